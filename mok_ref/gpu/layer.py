"""The layer on one rank of a device heap: forward above, backward below.

Reads like mok_ref/layer.py. Everything is enqueued on the calling thread's current stream; nothing
waits for the device and nothing is allocated once the workspace exists, so a step can be captured
in a CUDA graph and replayed with new routing written in place. What the device finds wrong (ids,
weights, expired waits) is raised by the next `heap.check(top_k)`.

A step is known by its arrays: their addresses, shapes and dtypes. The first step with the same
arrays checks them and prepares its parameter block and launches; later ones only enqueue. With one
rank x and dy are read where they are, also by backward: x stays as it is until that has run.

y, dx and the gradients are arrays of the workspace: its next forward or backward overwrites them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mok_ref.config import SAVE_MODES, MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.gpu import schedule
from mok_ref.gpu.errors import BARRIER_COMBINE, BARRIER_DX, BARRIER_DY, BARRIER_INPUTS
from mok_ref.gpu.launch import ParamBlock, prepared, remember
from mok_ref.gpu.params import BACKWARD_PARAMS, device_address, new_params, set_params
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.numerics import BFLOAT16
from mok_ref.validation import (
    check_activations,
    check_route_arrays,
    check_weights,
    gradient_shapes,
)

WEIGHT_PARTS = ("gate", "up", "down")
HOPPER_MODULES = {
    "bf16": ("mok_ref.gpu.hopper", "mok_ref.gpu.hopper_backward"),
    "mxfp8": ("mok_ref.gpu.hopper_mxfp8", "mok_ref.gpu.hopper_mxfp8_backward"),
}
"""Modules of the Hopper kernels, forward and backward, by the layer's dtype."""

ALIGNMENT = 16  # bytes: kernels load and copy that much at a time


@dataclass
class DeviceContext:
    """What forward leaves for backward. It can be used once, before the workspace's next
    forward."""

    config: MoEConfig
    workspace: DeviceWorkspace
    generation: int
    params: ParamBlock
    num_tokens: int
    kept: tuple[Any, ...]  # arrays whose addresses are in params
    output_dtype: Any
    save: str
    used: bool = field(default=False)

    @property
    def path(self) -> str:
        """ "hopper" or "portable": which kernels ran."""
        return path_name(self.workspace)


# --------------------------------------------------------------------------- forward


def forward(
    config: MoEConfig,
    heap: Any,
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    workspace: DeviceWorkspace | None,
    save: str,
) -> tuple[Any, DeviceContext]:
    """`moe_forward` on a device heap (mok_ref/layer.py says what goes in and comes out).

    Raises: ValueError for shapes, dtypes and options; values are checked on the device.
    CUDA:   cuda_src/support.cu around cuda_src/megakernel.cu or cuda_src/portable.cu
    """
    if workspace is None:
        workspace = DeviceWorkspace(config, heap, _largest_num_tokens(heap, len(x)))
    _check_call(config, heap, workspace, save)
    x, topk_ids, topk_weights = on_device(x), on_device(topk_ids), on_device(topk_weights)
    weights = ExpertWeights(*map(on_device, weights))
    shared = None if shared is None else ExpertWeights(*map(on_device, shared))
    params = _forward_params(workspace, x, topk_ids, topk_weights, weights, shared, save)
    heap.status.check_timeout()
    heap.status.top_k = config.top_k
    workspace.generation += 1
    path, stream = forward_path(workspace), current_stream()
    prepare(workspace, path)

    schedule.launch_stage_inputs(workspace, params, stream)
    _publish_quantised(workspace, "x", x)
    heap.barrier(BARRIER_INPUTS)  # tokens and routes of every rank are readable
    schedule.launch_schedule(workspace, params, stream)
    path.launch_forward(workspace, params, stream)
    heap.barrier(BARRIER_COMBINE)  # every pushed row has arrived
    schedule.launch_combine(workspace, params, stream)

    y = prepared(params, "y", lambda: as_output(workspace.y[: len(x)], x.dtype))
    kept = (x, topk_ids, topk_weights, weights, shared)
    return y, DeviceContext(
        config, workspace, workspace.generation, params, len(x), kept, x.dtype, save
    )


def _publish_quantised(workspace: DeviceWorkspace, name: str, values: Any) -> None:
    """MXFP8 tokens travel as codes and scales, quantised once by their owner."""
    if workspace.config.dtype == "mxfp8":
        from mok_ref.gpu import mxfp8

        mxfp8.publish(workspace, name, values)


def forward_path(workspace: DeviceWorkspace) -> Any:
    """The module that computes the products: one of HOPPER_MODULES where it can, else
    mok_ref.gpu.portable.

    Hopper: compute capability 9.0, rows of 16-byte multiples (TMA strides).
    Raises: ValueError when "hopper" was asked for and cannot be.
    """
    return _path(workspace, 0)


def backward_path(workspace: DeviceWorkspace) -> Any:
    """As `forward_path`, for backward."""
    return _path(workspace, 1)


def path_name(workspace: DeviceWorkspace) -> str:
    """ "hopper" or "portable": which kernels this workspace runs."""
    return "portable" if forward_path(workspace).__name__.endswith("portable") else "hopper"


def _path(workspace: DeviceWorkspace, direction: int) -> Any:
    """The module of forward (0) or backward (1), chosen once per workspace."""

    def choose() -> Any:
        reason, asked = _hopper_refusal(workspace.config), workspace.requested_path
        if asked == "hopper" and reason:
            raise ValueError(f"path 'hopper' is not possible here: {reason}")
        if reason or asked == "portable":
            return importlib.import_module("mok_ref.gpu.portable")
        return importlib.import_module(HOPPER_MODULES[workspace.config.dtype][direction])

    return workspace.extra(("path", direction), choose)


def _hopper_refusal(config: MoEConfig) -> str:
    """Why the Hopper kernels cannot run this layer, or an empty string."""
    from mok_ref.gpu.compiler import device_arch

    arch = device_arch()
    if arch != "sm_90a":
        return f"the device is {arch}, not sm_90a"
    if config.dtype not in HOPPER_MODULES:
        return f"dtype is {config.dtype!r}"
    module = importlib.import_module(HOPPER_MODULES[config.dtype][0])
    sizes = (config.hidden_size, config.intermediate_size, config.shared_intermediate_size)
    if not module.supports(*sizes):
        multiple = f"multiples of {module.ALIGNMENT}"
        return f"hidden and intermediate sizes must be {multiple}, got {sizes}"
    return ""


def prepare(workspace: DeviceWorkspace, path: Any) -> None:
    """Load all kernels of a path once, on every rank before its first barrier."""

    def load() -> bool:
        schedule.warm_up(workspace)
        if hasattr(path, "warm_up"):
            path.warm_up(workspace)
        return True

    workspace.extra(("loaded", path.__name__), load)


def _forward_params(
    workspace: DeviceWorkspace,
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    save: str,
) -> ParamBlock:
    """The parameter block of this step, checked and made when its arrays are new.

    Raises: ValueError for shapes and dtypes; nothing reads device memory.
    """
    arrays = (x, topk_ids, topk_weights, *weights, *(shared or ()))
    key = (save, *[(a.data.ptr, a.shape, a.dtype) for a in arrays])
    params = workspace.steps.get(key)
    if params is None:
        _check_arrays(workspace, x, topk_ids, topk_weights, weights, shared)
        params = _step_params(workspace, x, topk_ids, topk_weights, weights, shared, save)
        remember(workspace.steps, key, params)
    return params


def _step_params(
    workspace: DeviceWorkspace,
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    save: str,
) -> ParamBlock:
    """The workspace's parameter block with the arrays of a step."""
    params = workspace.params.copy()
    sizes = workspace.sizes
    ring_rows = sizes.macro_blocks * 128
    saved = {"all": sizes.max_saved_rows, "ring": min(ring_rows, sizes.max_saved_rows), "none": 0}
    set_params(
        params,
        num_tokens=len(x),
        x_in=x,
        ids_in=topk_ids,
        weights_in=topk_weights,
        max_saved_rows=saved[save] if workspace.training else 0,
    )
    for part, array in zip(WEIGHT_PARTS, weights, strict=True):
        params[f"w_{part}"] = device_address(array)
    for part, array in zip(WEIGHT_PARTS, shared or (), strict=False):
        params[f"shared_w_{part}"] = device_address(array)
    if int(params["max_saved_rows"]) == 0:
        set_params(params, gate_saved=0, up_saved=0)
    if save == "none":
        set_params(params, shared_gate=0, shared_up=0)
    return params


def _check_call(config: MoEConfig, heap: Any, workspace: DeviceWorkspace, save: str) -> None:
    """What every call is checked for."""
    same = config is workspace.config or config == workspace.config
    if not same or workspace.heap is not heap:
        raise ValueError("workspace must be made with this call's config and heap")
    if save not in SAVE_MODES:
        raise ValueError(f"save must be one of {', '.join(SAVE_MODES)}, got {save!r}")


def _check_arrays(
    workspace: DeviceWorkspace,
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
) -> None:
    """Shapes and dtypes of a step's arrays."""
    config = workspace.config
    check_activations(config, "x", x)
    if len(x) > workspace.max_tokens:
        raise ValueError(
            f"x must have at most max_tokens={workspace.max_tokens} rows, got {len(x)}"
        )
    check_route_arrays(config, len(x), topk_ids, topk_weights)
    check_weights(config, workspace.heap.rank, weights, shared)


# --------------------------------------------------------------------------- backward


def backward(
    context: DeviceContext,
    dy: Any,
    main_grad: Any = None,
    router_share: Callable[[Any], Any] | None = None,
) -> Any:
    """`moe_backward` on a device heap (mok_ref/layer.py says what goes in and comes out).

    CUDA: cuda_src/support.cu around cuda_src/megakernel_backward.cu or cuda_src/portable.cu
    """
    from mok_ref.layer import Gradients

    dy = on_device(dy)
    _use_context(context, dy)
    workspace, params = context.workspace, context.params
    heap, gradients = workspace.heap, gradient_buffers(workspace, main_grad)
    back = backward_params(workspace, params, dy, gradients, main_grad is not None)
    path, stream = backward_path(workspace), current_stream()
    prepare(workspace, path)

    schedule.launch_stage_dy(workspace, params, back, stream)
    _publish_quantised(workspace, "dy", dy)
    heap.barrier(BARRIER_DY)  # dy of every rank is readable
    path.launch_backward(workspace, params, back, stream)
    heap.barrier(BARRIER_DX)  # every pushed dx row and weight gradient has arrived
    if router_share is not None:
        schedule.dispatch_d_weights(workspace, params, back, stream)
        router_dx = on_device(router_share(_outputs(context, back)[1]))
        back = _with_router_dx(back, router_dx)
    schedule.launch_dispatch_backward(workspace, params, back, stream)

    return Gradients(*_outputs(context, back), **gradients)


def _outputs(context: DeviceContext, back: ParamBlock) -> tuple[Any, Any]:
    """dx and d_topk_weights of this rank's tokens."""
    workspace, num_tokens = context.workspace, context.num_tokens

    def build() -> tuple[Any, Any]:
        dx = as_output(workspace.dx[:num_tokens], context.output_dtype)
        return dx, workspace.d_weights[:num_tokens]

    return prepared(back, ("outputs", context.output_dtype), build)


def gradient_buffers(workspace: DeviceWorkspace, main_grad: Any) -> dict[str, Any]:
    """Where the weight gradients go: the caller's buffers, else the workspace's.

    Raises: ValueError when a buffer of `main_grad` does not fit.
    """
    config = workspace.config
    dtype = np.dtype(np.uint16 if config.grad_dtype == "bf16" else np.float32)
    shapes = workspace.extra(
        "gradient_shapes", lambda: gradient_shapes(config, workspace.heap.rank)
    )
    if main_grad is None:
        return workspace.extra(
            "gradients",
            lambda: {name: workspace.scratch(name, shape, dtype) for name, shape in shapes.items()},
        )
    for name, shape in shapes.items():
        array = getattr(main_grad, name)
        bits = (
            np.uint16
            if getattr(array, "dtype", None) == BFLOAT16
            else getattr(array, "dtype", None)
        )
        if not hasattr(array, "data") or tuple(array.shape) != shape or bits != dtype:
            found = f"{getattr(array, 'dtype', type(array))} {getattr(array, 'shape', '')}"
            raise ValueError(f"main_grad.{name} must be {dtype} {shape} on the device, got {found}")
    return {name: getattr(main_grad, name) for name in shapes}


def backward_params(
    workspace: DeviceWorkspace,
    params: ParamBlock,
    dy: Any,
    gradients: dict[str, Any],
    accumulate: bool = False,
) -> ParamBlock:
    """The parameter block of a backward after the forward of `params`, made when its arrays are
    new."""

    def build() -> ParamBlock:
        names = set(BACKWARD_PARAMS.names or ()) & set(workspace.buffers)
        block = new_params(BACKWARD_PARAMS, **{name: workspace.buffers[name] for name in names})
        set_params(
            block,
            **gradients,
            dy_in=dy,
            d_topk_weights=workspace.d_weights,
            dw_is_bf16=int(workspace.config.grad_dtype == "bf16"),
            dw_accumulate=int(accumulate),
        )
        return block

    key = ("backward", dy.data.ptr, *[g.data.ptr for g in gradients.values()], accumulate)
    return prepared(params, key, build)


def _with_router_dx(back: ParamBlock, router_dx: Any) -> ParamBlock:
    """The block of a backward whose dx ends with the router's share."""

    def build() -> ParamBlock:
        block = back.copy()
        set_params(block, router_dx=router_dx)
        return block

    return prepared(back, ("router", router_dx.data.ptr), build)


def _use_context(context: DeviceContext, dy: Any) -> None:
    check_activations(context.config, "dy", dy)
    if len(dy) != context.num_tokens:
        raise ValueError(f"dy must have the {context.num_tokens} rows of x, got {len(dy)}")
    if not context.workspace.training:
        raise RuntimeError("the workspace was made with training=False: it has no backward buffers")
    if context.used:
        raise RuntimeError("context was used by an earlier moe_backward; run moe_forward again")
    if context.generation != context.workspace.generation:
        raise RuntimeError("context is stale: its workspace ran another forward since")
    context.used = True


# --------------------------------------------------------------------------- arrays


def on_device(array: Any) -> Any:
    """A CuPy array of the same values, C-contiguous and 16-byte aligned; bf16 keeps its dtype or
    becomes its bits."""
    import cupy

    if isinstance(array, cupy.ndarray):
        if array.flags.c_contiguous and array.data.ptr % ALIGNMENT == 0:
            return array
        return array.copy(order="C")
    host = np.ascontiguousarray(array)
    return cupy.asarray(host.view(np.uint16) if host.dtype == BFLOAT16 else host)


def as_output(bits: Any, dtype: Any) -> Any:
    """bf16 bits with the dtype that x had, where CuPy knows it."""
    return bits.view(dtype) if dtype == BFLOAT16 else bits


def _largest_num_tokens(heap: Any, num_tokens: int) -> int:
    """The largest T of all ranks; collective, synchronises."""
    name = f"num_tokens_{getattr(heap, '_num_size_questions', 0)}"
    heap._num_size_questions = getattr(heap, "_num_size_questions", 0) + 1
    heap.alloc(name, (1,), np.int32)[...] = num_tokens
    heap.barrier()
    heap.check()
    largest = max(int(heap.peer(rank, name).get()[0]) for rank in range(heap.size))
    heap.free(name)
    return largest


def current_stream() -> Any:
    """The calling thread's CuPy stream."""
    import cupy

    return cupy.cuda.get_current_stream()
