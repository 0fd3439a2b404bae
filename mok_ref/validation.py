"""Checks at the layer's boundary: every bad input is one line naming argument, rule and value."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from mok_ref.config import SAVE_MODES, MoEConfig, shown
from mok_ref.experts import ExpertWeights
from mok_ref.heap.protocol import HeapError, is_closed
from mok_ref.numerics import BFLOAT16
from mok_ref.workspace import Workspace

_BF16_DTYPES = (BFLOAT16, np.dtype(np.uint16))
_heap_parts = attrgetter("rank", "size", "device", "alloc", "peer", "free", "barrier", "close")
"""Of `SymmetricHeap`; asking the protocol itself takes 20 us at every call of the layer."""


def check_layer(config: Any, heap: Any) -> None:
    """What decides where the layer runs. Raises ValueError."""
    if not isinstance(config, MoEConfig):
        raise ValueError(f"config must be an MoEConfig, got {type(config).__name__}")
    try:
        _heap_parts(heap)
    except AttributeError:
        raise ValueError(f"heap must be a symmetric heap, got {type(heap).__name__}") from None


def check_backward(context: Any, router_share: Any) -> None:
    """What `moe_backward` takes before it knows where it runs. Raises ValueError."""
    if not hasattr(getattr(getattr(context, "workspace", None), "heap", None), "device"):
        raise ValueError(
            f"context must be the one that moe_forward returned, got {type(context).__name__}"
        )
    if not (router_share is None or callable(router_share)):
        raise ValueError(
            f"router_share must be a function or None, got {type(router_share).__name__}"
        )


def check_router_share(config: MoEConfig, num_tokens: int, share: Any) -> None:
    """What `router_share` returned: (T, H) bf16, like dy. Raises ValueError."""
    shape, found = (num_tokens, config.hidden_size), getattr(share, "shape", None)
    allowed = _bf16_dtypes(config)
    dtype = getattr(share, "dtype", None)
    if dtype is None or dtype not in allowed or found != shape:
        got = type(share).__name__ if dtype is None else f"{dtype} {found}"
        raise ValueError(f"router_share must return {_names(allowed)} of shape {shape}, got {got}")


def check_forward(
    config: MoEConfig,
    heap: Any,
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    workspace: Any,
    save: str,
) -> None:
    """Everything `moe_forward` takes. Raises ValueError; HeapError if the heap is closed."""
    if is_closed(heap):
        raise HeapError(f"the heap of rank {heap.rank} is closed")
    if heap.size != config.ep_size:
        raise ValueError(f"ep_size must be the heap's size {heap.size}, got {config.ep_size}")
    if not (isinstance(save, str) and save in SAVE_MODES):
        raise ValueError(f"save must be one of {', '.join(SAVE_MODES)}, got {shown(save)}")
    check_activations(config, "x", x)
    check_routes(config, len(x), topk_ids, topk_weights)
    check_weights(config, heap.rank, weights, shared)
    if workspace is not None:
        check_workspace(config, heap, len(x), workspace)


def check_workspace(config: MoEConfig, heap: Any, num_tokens: int, workspace: Any) -> None:
    """A workspace serves the heap and the config it was made for, up to its max_tokens."""
    if not isinstance(workspace, Workspace):
        raise ValueError(f"workspace must be a Workspace, got {type(workspace).__name__}")
    if workspace.closed:
        raise ValueError("workspace must be open, got one that was closed")
    if workspace.heap is not heap:
        raise ValueError(
            f"workspace must be made on the heap of this call, got one of rank "
            f"{workspace.heap.rank} of {workspace.heap.size} on rank {heap.rank} of {heap.size}"
        )
    for field in fields(config):
        mine, wanted = getattr(workspace.config, field.name), getattr(config, field.name)
        if mine != wanted:
            raise ValueError(
                f"workspace must be made with the config of this call, got {field.name}={mine!r} "
                f"in the workspace and {wanted!r} in the call"
            )
    if num_tokens > workspace.max_tokens:
        raise ValueError(
            f"x must have at most max_tokens={workspace.max_tokens} rows, got {num_tokens}"
        )


def gradient_shapes(config: MoEConfig, rank: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weight gradients of one rank."""
    local, hidden = config.num_local_experts(rank), config.hidden_size
    inner, shared = config.intermediate_size, config.shared_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "dw_gate": (local, inner, hidden),
        "dw_up": (local, inner, hidden),
        "dw_down": (local, hidden, inner),
    }
    if shared:
        shapes["shared_dw_gate"] = shapes["shared_dw_up"] = (shared, hidden)
        shapes["shared_dw_down"] = (hidden, shared)
    return shapes


def check_main_grad(config: MoEConfig, rank: int, main_grad: Any) -> None:
    """Weight gradients to continue: shapes of the weights, float32 or bf16."""
    allowed: tuple[np.dtype, ...] = (np.dtype(np.float32), BFLOAT16)
    if config.arithmetic == "float64":
        allowed = (*allowed, np.dtype(np.float64))
    for name, shape in gradient_shapes(config, rank).items():
        _check_array(f"main_grad.{name}", getattr(main_grad, name, None), allowed)
        if getattr(main_grad, name).shape != shape:
            got = getattr(main_grad, name).shape
            raise ValueError(f"main_grad.{name} must have shape {shape}, got {got}")


def check_activations(config: MoEConfig, name: str, array: Any) -> None:
    """(T, H) bf16; the float64 oracle takes float64 too."""
    _check_dtype(config, name, array)
    if array.ndim != 2 or array.shape[1] != config.hidden_size:
        raise ValueError(f"{name} must be (tokens, {config.hidden_size}), got shape {array.shape}")


def check_routes(config: MoEConfig, num_tokens: int, topk_ids: Any, topk_weights: Any) -> None:
    """(T, K) int32 ids in -1..E-1 and finite float32 weights."""
    check_route_arrays(config, num_tokens, topk_ids, topk_weights)
    outside = (topk_ids < -1) | (topk_ids >= config.num_experts)
    _refuse(outside, topk_ids, "topk_ids", f"in -1..{config.num_experts - 1}")
    _refuse(~np.isfinite(topk_weights), topk_weights, "topk_weights", "finite")


def check_route_arrays(
    config: MoEConfig, num_tokens: int, topk_ids: Any, topk_weights: Any
) -> None:
    """Shapes and dtypes of routes; reads no value, so it serves device arrays too."""
    shape = (num_tokens, config.top_k)
    for name, array, dtype in (
        ("topk_ids", topk_ids, np.int32),
        ("topk_weights", topk_weights, np.float32),
    ):
        allowed: tuple[np.dtype, ...] = (np.dtype(dtype),)
        if name == "topk_weights" and config.arithmetic == "float64":
            allowed = (*allowed, np.dtype(np.float64))
        _check_array(name, array, allowed)
        if array.shape != shape:
            raise ValueError(f"{name} must be (tokens, top_k) = {shape}, got shape {array.shape}")


def check_weights(
    config: MoEConfig, rank: int, weights: ExpertWeights, shared: ExpertWeights | None
) -> None:
    """Shapes and dtypes of this rank's experts and of the shared expert."""
    for name, given in (("weights", weights), ("shared", shared)):
        parts = all(hasattr(given, part) for part in ("gate", "up", "down"))
        if not parts and not (name == "shared" and given is None):
            raise ValueError(f"{name} must be ExpertWeights, got {type(given).__name__}")
    local, hidden = config.num_local_experts(rank), config.hidden_size
    inner, shared_inner = config.intermediate_size, config.shared_intermediate_size
    _check_shape(config, "weights.gate", weights.gate, (local, inner, hidden))
    _check_shape(config, "weights.up", weights.up, (local, inner, hidden))
    _check_shape(config, "weights.down", weights.down, (local, hidden, inner))
    if (shared is None) != (shared_inner == 0):
        raise ValueError(
            "shared must be given exactly when shared_intermediate_size > 0, got "
            f"shared={'None' if shared is None else 'weights'}, {shared_inner=}"
        )
    if shared is not None:
        _check_shape(config, "shared.gate", shared.gate, (shared_inner, hidden))
        _check_shape(config, "shared.up", shared.up, (shared_inner, hidden))
        _check_shape(config, "shared.down", shared.down, (hidden, shared_inner))


def _check_shape(config: MoEConfig, name: str, array: Any, shape: tuple[int, ...]) -> None:
    _check_dtype(config, name, array)
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")


def _check_dtype(config: MoEConfig, name: str, array: Any) -> None:
    _check_array(name, array, _bf16_dtypes(config))


def _bf16_dtypes(config: MoEConfig) -> tuple[np.dtype, ...]:
    """How bf16 tensors may be given; the float64 oracle takes float64 too."""
    if config.arithmetic == "float64":
        return (*_BF16_DTYPES, np.dtype(np.float64))
    return _BF16_DTYPES


def _check_array(name: str, array: Any, allowed: tuple[np.dtype, ...]) -> None:
    """An array (not a list, not None) of one of some dtypes."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or dtype not in allowed:
        raise ValueError(f"{name} must be {_names(allowed)}, got {dtype or type(array).__name__}")


def _names(dtypes: tuple[np.dtype, ...]) -> str:
    return " or ".join(dtype.name for dtype in dtypes)


def _refuse(bad: Any, values: Any, name: str, rule: str) -> None:
    if bad.any():
        token, slot = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name} must be {rule}, got {values[token, slot]} at [{token}, {slot}]")
