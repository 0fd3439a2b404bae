"""The portable layer on CPU ranks: kernels of portable.cu run by `host_cuda`, memory in NumPy arrays.

The sequence of launches is mok_ref.gpu.portable.PortableLayer, as on a device; schedule and combine come from
the reference.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from typing import Any

import numpy as np
from host_cuda import HostKernels

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.gpu.params import (
    BACKWARD_PARAMS,
    LAYER_PARAMS,
    NUM_SYMMETRIC,
    SCHEDULE_INFO,
    SYMMETRIC_BUFFERS,
)
from mok_ref.gpu.portable import PortableLayer, Scratch, Weights
from mok_ref.mxfp8 import num_blocks, quantize
from mok_ref.schedule import build_schedule


@lru_cache(maxsize=8)
def kernels(source: str) -> HostKernels:
    return HostKernels(source)


class HostLauncher:
    """A launcher (mok_ref.gpu.portable.Launcher) that runs kernels at once; one at a time."""

    lock = threading.Lock()

    def launch(self, kernel: str, grid: tuple[int, ...], threads: int, arguments: list[Any]) -> None:
        with self.lock:
            kernels("portable.cu").launch(kernel, grid, threads, arguments)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def clear(self, target: int, num_bytes: int) -> None:
        ctypes.memset(target, 0, num_bytes)


class HostRank:
    """One rank's memory. Everything a step must write is filled with NaN bytes first."""

    def __init__(self, config: MoEConfig, rank: int, num_tokens: int, max_tokens: int) -> None:
        self.config, self.rank, self.num_tokens, self.max_tokens = config, rank, num_tokens, max_tokens
        self.arrays: dict[str, np.ndarray] = {}
        hidden, slots = config.hidden_size, config.top_k
        for name in ("x", "dy"):
            self.poisoned(f"{name}_in", (num_tokens, hidden), np.uint16)
            self.poisoned(name, (max_tokens, hidden), np.uint16)
            self.poisoned(f"{name}_codes", (max_tokens, hidden), np.uint8)
            self.poisoned(f"{name}_scales", (max_tokens, num_blocks(hidden)), np.uint8)
        self.poisoned("combine", (max_tokens * slots, hidden), np.uint16)
        self.poisoned("d_topk_weights", (max_tokens * slots,), np.float32)
        self.poisoned("chain", (3 * config.shared_intermediate_size * hidden,), np.float32)

    def poisoned(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        array.view(np.uint8)[...] = 0xFF
        self.arrays[name] = array
        return array

    def keep(self, name: str, array: np.ndarray) -> np.ndarray:
        self.arrays[name] = np.ascontiguousarray(array)
        return self.arrays[name]

    def address(self, name: str) -> int:
        return self.arrays[name].ctypes.data

    def publish(self, name: str, values: np.ndarray) -> None:
        """The caller's rows into symmetric memory, quantised where they travel so."""
        self.arrays[f"{name}_in"][...] = values
        self.arrays[name][: len(values)] = values
        if self.config.dtype == "mxfp8":
            codes, scales = quantize(values, self.config.scale_rule)
            self.arrays[f"{name}_codes"][: len(values)] = codes
            self.arrays[f"{name}_scales"][: len(values)] = scales


def make_layer(
    ranks: list[HostRank], rank: int, ids: np.ndarray, topk_weights: np.ndarray, counts: np.ndarray,
    weights: tuple[np.ndarray, ...], shared: tuple[np.ndarray, ...] | None, macro_blocks: int,
    saved_rows: int, path: str, grad_dtype: str = "float32",
) -> tuple[PortableLayer, np.ndarray]:  # fmt: skip
    """The launches of one rank, and its backward parameters."""
    config, me = ranks[rank].config, ranks[rank]
    params, back = np.zeros((), LAYER_PARAMS), np.zeros((), BACKWARD_PARAMS)
    schedule = build_schedule(config, rank, ids, counts)
    _schedule_tables(me, params, schedule, topk_weights, counts)
    table = np.zeros((NUM_SYMMETRIC, config.ep_size), np.uint64)
    for name, buffer in SYMMETRIC_BUFFERS.items():
        if name in me.arrays:
            table[buffer] = [peer.address(name) for peer in ranks]
    me.keep("peer_table", table)
    local, inner, hidden = len(schedule.expert_ids), config.intermediate_size, config.hidden_size
    for name, value in (
        ("rank", rank), ("ep_size", config.ep_size), ("num_tokens", me.num_tokens),
        ("max_tokens", me.max_tokens), ("hidden_size", hidden), ("intermediate_size", inner),
        ("shared_intermediate_size", config.shared_intermediate_size),
        ("num_experts", config.num_experts), ("num_local_experts", local), ("top_k", config.top_k),
        ("mini_blocks", 1), ("macro_blocks", macro_blocks), ("max_saved_rows", saved_rows),
        ("max_row_blocks", schedule.num_row_blocks + 2), ("has_limit", config.swiglu_limit is not None),
        ("swiglu_limit", config.swiglu_limit or 0.0),
    ):  # fmt: skip
        params[name] = value
    _scratch_arrays(me, macro_blocks * ROW_TILE, saved_rows, local)
    routed = _routed_weights(me, [weight[schedule.expert_ids] for weight in weights])
    kept = None
    if shared is not None:
        names = ("shared_w_gate", "shared_w_up", "shared_w_down")
        kept = Weights(*(me.keep(n, w).ctypes.data for n, w in zip(names, shared, strict=True)))
    for block in (params, back):
        for name in set(block.dtype.names or ()) & set(me.arrays):
            block[name] = me.address(name)
    if not saved_rows:
        params["gate_saved"] = params["up_saved"] = params["shared_gate"] = params["shared_up"] = 0
    back["dw_is_bf16"] = grad_dtype == "bf16"
    scratch = Scratch(
        me.address("gate_ring"), me.address("up_ring"), me.address("dhu"),
        tuple(me.address(f"chain_{name}") for name in ("dw_gate", "dw_up", "dw_down")),
        me.address("scratch_gate"), me.address("scratch_up"),
    )  # fmt: skip
    return PortableLayer(config, params, scratch, routed, kept, HostLauncher(), path), back


def _schedule_tables(
    me: HostRank, params: np.ndarray, schedule: Any, topk_weights: np.ndarray, counts: np.ndarray
) -> None:
    first = np.concatenate([[0], np.cumsum(counts)])
    is_route = schedule.peer_rank >= 0
    flat = first[schedule.peer_rank] * me.config.top_k + schedule.peer_row
    weight = np.where(is_route, topk_weights.ravel()[np.where(is_route, flat, 0)], 0)
    me.keep("row_weight", weight.astype(np.float32))
    for name in ("peer_rank", "peer_row", "expert_offset", "expert_count", "row_block_expert",
                 "row_block_valid"):  # fmt: skip
        me.keep(name, getattr(schedule, name).astype(np.int32))
    info = np.zeros((), SCHEDULE_INFO)
    info["num_row_blocks"], info["num_rows"] = schedule.num_row_blocks, schedule.num_rows
    me.keep("info", info.reshape(1))
    me.keep("abort_flag", np.zeros(1, np.uint32))


def _scratch_arrays(me: HostRank, ring: int, saved_rows: int, local: int) -> None:
    config = me.config
    inner, hidden, shared = config.intermediate_size, config.hidden_size, config.shared_intermediate_size
    bits, real = np.uint16, np.float32
    for name, shape in (
        ("x_ring", (ring, hidden)), ("dy_ring", (ring, hidden)), ("h_ring", (ring, inner)),
        ("hw_ring", (ring, inner)), ("d_gate_ring", (ring, inner)), ("d_up_ring", (ring, inner)),
        ("gate_ring", (ring, inner)), ("up_ring", (ring, inner)), ("gate_saved", (saved_rows, inner)),
        ("up_saved", (saved_rows, inner)), ("shared_h", (me.max_tokens, shared)),
        ("shared_y", (me.max_tokens, hidden)), ("shared_gate", (me.max_tokens, shared)),
        ("shared_up", (me.max_tokens, shared)), ("shared_dx", (me.max_tokens, hidden)),
        ("shared_d_gate", (me.max_tokens, shared)), ("shared_d_up", (me.max_tokens, shared)),
        ("scratch_gate", (me.max_tokens, shared)), ("scratch_up", (me.max_tokens, shared)),
    ):  # fmt: skip
        me.poisoned(name, shape, bits)
    me.poisoned("dhu", (max(ring * inner, me.max_tokens * shared),), real)
    for name, shape in (("dw_gate", (inner, hidden)), ("dw_up", (inner, hidden)), ("dw_down", (hidden, inner))):
        me.poisoned(name, (local, *shape), real)
        me.poisoned(f"chain_{name}", (local, *shape), real)
    for name, shape in (("gate", (shared, hidden)), ("up", (shared, hidden)), ("down", (hidden, shared))):
        me.poisoned(f"shared_dw_{name}", shape, real)


def _routed_weights(me: HostRank, weights: list[np.ndarray]) -> Weights:
    """bf16 weights, or their codes and scales."""
    if me.config.dtype != "mxfp8":
        return Weights(*(me.keep(f"w{i}", w).ctypes.data for i, w in enumerate(weights)))
    pairs = [quantize(weight, me.config.scale_rule) for weight in weights]
    codes = [me.keep(f"c{i}", code).ctypes.data for i, (code, _) in enumerate(pairs)]
    scales = [me.keep(f"s{i}", scale).ctypes.data for i, (_, scale) in enumerate(pairs)]
    return Weights(*codes, *scales)
