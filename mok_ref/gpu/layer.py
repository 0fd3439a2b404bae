"""The layer on one rank of a device heap: forward above, backward below.

Reads like mok_ref/layer.py. Everything is enqueued on the calling thread's current stream; nothing
waits for the device and nothing is allocated once the workspace exists, so a step can be captured
in a CUDA graph and replayed with new routing written in place. What the device finds wrong (ids,
weights, expired waits) is raised by the next `heap.check(top_k)`.

A step is known by its arrays: their addresses, shapes, strides and dtypes. The first step with the
same arrays checks them and prepares its parameter block and launches; later ones only enqueue. With
one rank x and dy are read where they are, also by backward: x stays as it is until that has run.

y, dx and the gradients are arrays of the workspace: its next forward or backward overwrites them.
So y cannot be the next x of the same workspace, unless that was made with training=False.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mok_ref.config import SAVE_MODES, MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.gpu import hopper, schedule
from mok_ref.gpu.compiler import recording_number
from mok_ref.gpu.errors import BARRIER_COMBINE, BARRIER_DY, BARRIER_INPUTS
from mok_ref.gpu.launch import ParamBlock, prepared, remember
from mok_ref.gpu.params import BACKWARD_PARAMS, device_address, new_params, set_params
from mok_ref.gpu.workspace import DeviceWorkspace, byte_range
from mok_ref.numerics import BFLOAT16
from mok_ref.validation import (
    check_activations,
    check_route_arrays,
    check_router_share,
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


class ForwardStep(NamedTuple):
    """What the first forward with some arrays prepares; it keeps none of them alive."""

    params: ParamBlock
    path: Any  # module whose kernels compute the products
    combines: bool  # whether these make y, too
    y: Any


class BackwardStep(NamedTuple):
    """The same of a backward."""

    params: ParamBlock
    path: Any
    with_dx: bool  # whether the products' kernels make dx, too, where no router's share is added
    dx: Any
    d_topk_weights: Any


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
    CUDA:   cuda_src/support.cu around cuda_src/megakernel.cu, megakernel_mxfp8.cu or portable.cu
    """
    if workspace is None:
        workspace = DeviceWorkspace(config, heap, _largest_num_tokens(heap, len(x)))
    _check_call(config, heap, workspace, save)
    step, arrays = _forward_step(workspace, (x, topk_ids, topk_weights, weights, shared), save)
    params, path, stream = step.params, step.path, current_stream()
    heap.status.check_timeout()
    heap.status.top_k = config.top_k
    workspace.generation += 1

    schedule.launch_stage_inputs(workspace, params, stream)
    _publish_quantised(workspace, "x", arrays[0])
    heap.barrier(BARRIER_INPUTS)  # tokens and routes of every rank are readable
    schedule.launch_schedule(workspace, params, stream)
    path.launch_forward(workspace, params, stream)
    heap.barrier(BARRIER_COMBINE)  # every pushed row has arrived
    if not step.combines:
        schedule.launch_combine(workspace, params, stream)

    x = arrays[0]
    return step.y, DeviceContext(
        config, workspace, workspace.generation, params, len(x), arrays, x.dtype, save
    )


def _publish_quantised(workspace: DeviceWorkspace, name: str, values: Any) -> None:
    """MXFP8 tokens travel as codes and scales, quantised once by their owner."""
    if workspace.config.dtype == "mxfp8":
        from mok_ref.gpu import mxfp8

        mxfp8.publish(workspace, name, values)


def forward_path(workspace: DeviceWorkspace) -> Any:
    """The module that computes the products: one of HOPPER_MODULES where it can, else
    mok_ref.gpu.portable.

    Hopper: compute capability 9.0, rows of 16-byte multiples (TMA strides): with bf16 H, I and the
    shared expert's I in multiples of 8, with MXFP8, whose rows are codes, H and I in multiples of
    16 and the shared expert's I, which stays bf16, in multiples of 8.
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
    return size_refusal(config)


def size_refusal(config: MoEConfig) -> str:
    """Why the Hopper kernels cannot run layers of this size, or an empty string."""
    module = importlib.import_module(HOPPER_MODULES[config.dtype][0])
    sizes = ("hidden_size", "intermediate_size", "shared_intermediate_size")
    if module.supports(*(getattr(config, name) for name in sizes)):
        return ""
    multiples = (module.ALIGNMENT, module.ALIGNMENT, hopper.ALIGNMENT)  # the shared expert is bf16
    return "; ".join(
        f"{name} must be a multiple of {multiple}, got {getattr(config, name)}"
        for name, multiple in zip(sizes, multiples, strict=True)
        if getattr(config, name) % multiple
    )


def prepare(workspace: DeviceWorkspace, path: Any) -> None:
    """Load all kernels of a path once, and again for each recording of their tasks, on every rank
    before its first barrier."""

    def load() -> bool:
        schedule.warm_up(workspace)
        if hasattr(path, "warm_up"):
            path.warm_up(workspace)
        return True

    workspace.extra(("loaded", path.__name__, recording_number()), load)


def _forward_step(
    workspace: DeviceWorkspace, given: tuple[Any, ...], save: str
) -> tuple[ForwardStep, tuple[Any, ...]]:
    """What is prepared for these arrays, now if they are new, and the arrays as kernels read them.

    given   x, topk_ids, topk_weights, weights, shared
    Raises: ValueError for shapes and dtypes; nothing reads device memory.
    """
    step = workspace.steps.get(_step_key(save, given))
    if step is not None:
        return step, given
    x, topk_ids, topk_weights, weights, shared = given
    x, topk_ids, topk_weights = on_device(x), on_device(topk_ids), on_device(topk_weights)
    weights = ExpertWeights(*map(on_device, weights))
    shared = None if shared is None else ExpertWeights(*map(on_device, shared))
    arrays = (x, topk_ids, topk_weights, weights, shared)
    key = _step_key(save, arrays)
    step = workspace.steps.get(key)  # copies may lie where earlier ones did
    if step is None:
        _check_arrays(workspace, *arrays)
        parts = (*arrays[:3], *weights, *(shared or ()))
        _check_apart(workspace, dict(zip(_input_names(shared), parts, strict=True)))
        step = _new_step(workspace, arrays, save)
        remember(workspace.steps, key, step)
    return step, arrays


def _step_key(save: str, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells a forward from others."""
    x, topk_ids, topk_weights, weights, shared = arrays
    return save, recording_number(), _layout(x, topk_ids, topk_weights, *weights, *(shared or ()))


def _layout(*arrays: Any) -> Any:
    """What launches depend on of their arrays; None if one is not on the device: then they depend
    on a copy."""
    try:
        return tuple([(a.data.ptr, a.shape, a.strides, a.dtype) for a in arrays])
    except (AttributeError, ValueError):
        return None


def _new_step(workspace: DeviceWorkspace, arrays: tuple[Any, ...], save: str) -> ForwardStep:
    """The step of arrays that are as kernels read them; its kernels are loaded."""
    x, topk_ids, topk_weights, weights, shared = arrays
    params = _step_params(workspace, x, topk_ids, topk_weights, weights, shared, save)
    path = forward_path(workspace)
    prepare(workspace, path)
    y = as_output(workspace.y[: len(x)], x.dtype)
    return ForwardStep(params, path, bool(params["combines"]), y)


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
        combines=int(_combines_inside(workspace, len(x))),
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


def _combines_inside(workspace: DeviceWorkspace, num_tokens: int) -> bool:
    """Whether the forward kernel itself makes y; else `launch_combine` does behind it."""
    return forward_path(workspace) is hopper and hopper.combines(workspace.config, num_tokens)


def _check_call(config: MoEConfig, heap: Any, workspace: DeviceWorkspace, save: str) -> None:
    """What every call is checked for."""
    if not isinstance(workspace, DeviceWorkspace):
        raise ValueError(f"workspace must be a DeviceWorkspace, got {type(workspace).__name__}")
    if workspace.closed:
        raise ValueError("workspace is closed")
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

    CUDA: cuda_src/support.cu around cuda_src/megakernel_backward.cu, megakernel_mxfp8_backward.cu
    (with an MXFP8 layer's shared expert in the former) or portable.cu
    """
    from mok_ref.layer import Gradients

    _check_context(context, dy)
    workspace, params = context.workspace, context.params
    heap, gradients = workspace.heap, gradient_buffers(workspace, main_grad)
    step, dy = _backward_step(context, dy, gradients, main_grad is not None)
    context.used = True
    back, path, stream = step.params, step.path, current_stream()

    schedule.launch_stage_dy(workspace, params, back, stream)
    _publish_quantised(workspace, "dy", dy)
    heap.barrier(BARRIER_DY)  # dy of every rank is readable
    with_dx = router_share is None and step.with_dx
    launch = path.launch_backward_with_dx if with_dx else path.launch_backward
    launch(workspace, params, back, stream)  # in it BARRIER_DX: every pushed dx row has arrived
    if with_dx:
        return Gradients(step.dx, step.d_topk_weights, **gradients)
    if router_share is not None:
        schedule.dispatch_d_weights(workspace, params, back, stream)
        share = router_share(step.d_topk_weights)
        check_router_share(context.config, context.num_tokens, share)
        router_dx = on_device(share)
        back = _with_router_dx(back, router_dx)
    schedule.launch_dispatch_backward(workspace, params, back, stream)

    return Gradients(step.dx, step.d_topk_weights, **gradients)


def _backward_step(
    context: DeviceContext, given_dy: Any, gradients: dict[str, Any], accumulate: bool
) -> tuple[BackwardStep, Any]:
    """What is prepared for these arrays after the context's forward, now if they are new, and dy as
    kernels read it."""
    addresses = [gradient.data.ptr for gradient in gradients.values()]
    key = ("backward", recording_number(), accumulate, *addresses)
    step = context.params.prepared.get((*key, _layout(given_dy)))
    if step is not None:
        return step, given_dy
    dy = on_device(given_dy)

    def build() -> BackwardStep:
        workspace, params, num_tokens = context.workspace, context.params, context.num_tokens
        path = backward_path(workspace)
        back = backward_params(workspace, params, dy, gradients, accumulate)
        prepare(workspace, path)
        dx = as_output(workspace.dx[:num_tokens], context.output_dtype)
        with_dx = _dx_comes_early(workspace, path, params, back)
        return BackwardStep(back, path, with_dx, dx, workspace.d_weights[:num_tokens])

    return prepared(context.params, (*key, _layout(dy)), build), dy


def _dx_comes_early(
    workspace: DeviceWorkspace, path: Any, params: ParamBlock, back: ParamBlock
) -> bool:
    """Whether dx is written beside the weight gradients of the routed experts.

    Not where the last of these launches is likely to find no rows. Nor where dx lies in x or dy, if
    there is a shared expert: its weight gradients come last and read them.
    """
    if not hasattr(path, "launch_backward_with_dx"):
        return False
    if not path.last_launch_has_rows(workspace.sizes, params):
        return False
    num_bytes = int(params["num_tokens"]) * int(params["hidden_size"]) * 2
    dx, inputs = int(back["dx"]), (int(params["x_in"]), int(back["dy_in"]))
    apart = all(abs(dx - address) >= num_bytes for address in inputs)
    return apart or int(params["shared_intermediate_size"]) == 0


def gradient_buffers(workspace: DeviceWorkspace, main_grad: Any) -> dict[str, Any]:
    """Where the weight gradients go: the caller's buffers, else the workspace's.

    Raises: ValueError when a buffer of `main_grad` does not fit: shape, dtype, C-contiguous,
    16-byte aligned, and apart from the others.
    """
    if main_grad is None:
        own: dict[str, Any] = workspace.extra("gradients", partial(_own_gradients, workspace))
        return own
    config, dtype = workspace.config, _gradient_dtype(workspace)
    shapes = workspace.extra(
        "gradient_shapes", lambda: gradient_shapes(config, workspace.heap.rank)
    )
    buffers: dict[str, Any] = {name: getattr(main_grad, name, None) for name in shapes}
    layout = _layout(*buffers.values())
    if layout not in workspace.main_grads:
        for name, shape in shapes.items():
            _check_on_device(f"main_grad.{name}", buffers[name], shape, dtype)
        _check_main_grad(workspace, buffers)
        remember(workspace.main_grads, layout, True)
    return buffers


def _own_gradients(workspace: DeviceWorkspace) -> dict[str, Any]:
    """The workspace's buffers of weight gradients."""
    shapes = gradient_shapes(workspace.config, workspace.heap.rank)
    dtype = _gradient_dtype(workspace)
    return {name: workspace.scratch(name, shape, dtype) for name, shape in shapes.items()}


def _gradient_dtype(workspace: DeviceWorkspace) -> np.dtype:
    return np.dtype(np.uint16 if workspace.config.grad_dtype == "bf16" else np.float32)


def _check_on_device(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    import cupy

    found = getattr(array, "dtype", None)
    bits = np.uint16 if found == BFLOAT16 else found
    if isinstance(array, cupy.ndarray) and array.shape == shape and bits == dtype:
        return
    got = type(array).__name__ if found is None else f"{found} {array.shape}"
    where = "" if found is None or isinstance(array, cupy.ndarray) else " on the host"
    raise ValueError(f"{name} must be {dtype} {shape} on the device, got {got}{where}")


def _check_main_grad(workspace: DeviceWorkspace, buffers: dict[str, Any]) -> None:
    """Where kernels may write gradients, row after row, 16 bytes at a time."""
    named = {f"main_grad.{name}": array for name, array in buffers.items()}
    for name, array in named.items():
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} must be C-contiguous, got strides {array.strides}")
        if array.size and array.data.ptr % ALIGNMENT:
            raise ValueError(
                f"{name} must be {ALIGNMENT}-byte aligned, got address {array.data.ptr:#x}"
            )
    taken = sorted((byte_range(array), name) for name, array in named.items() if array.size)
    for (before, other), (here, name) in pairwise(taken):
        if here[0] < before[1]:
            raise ValueError(f"{name} must not overlap {other}")
    _check_apart(workspace, named)


_MAY_BE = {
    "x": ("x", "dx"),
    "topk_ids": ("topk_ids",),
    "topk_weights": ("topk_weights",),
    "dy": ("dy", "y", "dx"),
}
"""Buffers of the workspace that an argument may be: none of them is written before its last read.
y is, by forward: an x that lies there is not what backward finds."""


def _check_apart(workspace: DeviceWorkspace, arrays: dict[str, Any]) -> None:
    """Arguments must not lie where a step writes before it has read them for the last time.

    Weight gradients of the workspace may be continued in place.
    Raises: ValueError naming the argument and the workspace's buffer.
    """
    for name, array in arrays.items():
        allowed = _MAY_BE.get(name, ())
        if name.startswith("main_grad."):
            allowed = tuple(gradient_shapes(workspace.config, workspace.heap.rank))
        elif name == "x" and not workspace.training:
            allowed = ("x", "y")  # nothing reads x after y is written
        first, end = byte_range(array)
        for buffer, low, high in workspace.ranges():
            if first < high and low < end and buffer not in allowed:
                raise ValueError(f"{name} must not overlap the workspace's {buffer}")


def _input_names(shared: ExpertWeights | None) -> list[str]:
    """Names of a forward's arrays, in the order of their key."""
    names = ["x", "topk_ids", "topk_weights", *(f"weights.{part}" for part in WEIGHT_PARTS)]
    return names if shared is None else [*names, *(f"shared.{part}" for part in WEIGHT_PARTS)]


def backward_params(
    workspace: DeviceWorkspace,
    params: ParamBlock,
    dy: Any,
    gradients: dict[str, Any],
    accumulate: bool = False,
) -> ParamBlock:
    """The parameter block of a backward after the forward of `params`."""
    _check_apart(workspace, {"dy": dy})
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


def _with_router_dx(back: ParamBlock, router_dx: Any) -> ParamBlock:
    """The block of a backward whose dx ends with the router's share."""

    def build() -> ParamBlock:
        block = back.copy()
        set_params(block, router_dx=router_dx)
        return block

    return prepared(back, ("router", router_dx.data.ptr), build)


def _check_context(context: DeviceContext, dy: Any) -> None:
    """What every backward is checked for; a refused one leaves its context as it was."""
    if context.workspace.closed:
        raise ValueError("workspace is closed")
    check_activations(context.config, "dy", dy)
    if len(dy) != context.num_tokens:
        raise ValueError(f"dy must have the {context.num_tokens} rows of x, got {len(dy)}")
    if not context.workspace.training:
        raise RuntimeError("the workspace was made with training=False: it has no backward buffers")
    if context.used:
        raise RuntimeError("context was used by an earlier moe_backward; run moe_forward again")
    if context.generation != context.workspace.generation:
        raise RuntimeError(
            "context is stale: its workspace ran another forward (or held weights) since"
        )


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
