"""Tensor parallelism that never cuts a sum (docs/training.md, P1 to P6).

The usual scheme splits W_down along its inner axis and adds partial sums of ranks: other bits for
every number of ranks. Here a product's inner axis is never shared out for adding later. Forward
splits output columns and gathers h before W_down; backward hands float32 accumulators from rank to
rank in axis order, or gathers operands. The result has the bits of one rank.

All ranks of the heap hold the same tokens. Rank r holds rows `inner` of W_gate and W_up and rows
`outer` of W_down.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights, pad_depth, weight_gradient
from mok_ref.numerics import Array, add, dot128, mul, to_bf16
from mok_ref.swiglu import swiglu_backward, swiglu_forward, weighted_h
from mok_ref.tensor_core import GROUP, tc
from mok_ref.training.ranks import Exchange, Tensors

DOT_BLOCK = 128  # with routing weights a slice must be whole blocks of dot128


def axis_bounds(width: int, num_ranks: int, unit: int = DOT_BLOCK) -> np.ndarray:
    """Offsets of the slices of an axis, whole units each, the first ones one unit longer.

    unit  a multiple of 16 (where a tc chain may be resumed); 128 where dot128 runs along the axis
    Returns (R + 1,) int64. A slice may be empty.
    """
    if unit % GROUP:
        raise ValueError(f"unit must be a multiple of {GROUP}, got {unit=}")
    units = -(-width // unit)
    per_rank = np.full(num_ranks, units // num_ranks, np.int64)
    per_rank[: units % num_ranks] += 1
    return np.minimum(np.concatenate([[0], np.cumsum(per_rank) * unit]), width)


@dataclass(frozen=True)
class SlicedExpert:
    """One rank's slices: gate, up (inner, H), down (outer, I); where they start and end."""

    weights: ExpertWeights
    inner: np.ndarray  # (R + 1,) bounds of I
    outer: np.ndarray  # (R + 1,) bounds of H

    @classmethod
    def cut(
        cls, whole: ExpertWeights, rank: int, num_ranks: int, unit: int = DOT_BLOCK
    ) -> SlicedExpert:
        """This rank's slices of whole weights: gate, up (I, H), down (H, I)."""
        inner = axis_bounds(whole.gate.shape[0], num_ranks, unit)
        outer = axis_bounds(whole.down.shape[0], num_ranks, unit)
        rows_in = slice(int(inner[rank]), int(inner[rank + 1]))
        rows_out = slice(int(outer[rank]), int(outer[rank + 1]))
        sliced = ExpertWeights(whole.gate[rows_in], whole.up[rows_in], whole.down[rows_out])
        return cls(sliced, inner, outer)

    def columns(self, bounds: np.ndarray, rank: int) -> slice:
        return slice(int(bounds[rank]), int(bounds[rank + 1]))


@dataclass(frozen=True)
class SlicedForward:
    """gate, up of this rank's columns; h and y whole."""

    gate: Array
    up: Array
    h: Array
    y: Array


@dataclass(frozen=True)
class SlicedBackward:
    """dx and d_weight whole; weight gradients of this rank's slices, float32."""

    dx: Array
    d_weight: Array
    dw_gate: Array
    dw_up: Array
    dw_down: Array


def gather_columns(exchange: Exchange, name: str, mine: Array, bounds: np.ndarray) -> Array:
    """Columns of all ranks side by side. mine (T, own) -> (T, width)."""
    return exchange.gather_rows(name, np.ascontiguousarray(mine.T), np.diff(bounds)).T.copy()


def tp_forward(
    config: MoEConfig, exchange: Exchange, x: Array, expert: SlicedExpert
) -> SlicedForward:
    """One expert, columns split over ranks (P1).

        gate, up = bf16(tc(x, W[own rows]));  h = gather(swiglu(gate, up))
        y = gather(bf16(tc(h, W_down[own rows])))

    x (T, H) bf16 values, the same on every rank.
    Order:  every tc chain is whole: no sum is shared by ranks.
    """
    mode = config.arithmetic
    gate = to_bf16(tc(x, expert.weights.gate, arithmetic=mode))
    up = to_bf16(tc(x, expert.weights.up, arithmetic=mode))
    own = swiglu_forward(gate, up, config.swiglu_limit)
    h = gather_columns(exchange, "tp_h", own, expert.inner)
    y = to_bf16(tc(h, expert.weights.down, arithmetic=mode))
    return SlicedForward(gate, up, h, gather_columns(exchange, "tp_y", y, expert.outer))


def tp_backward(
    config: MoEConfig,
    exchange: Exchange,
    x: Array,
    dy: Array,
    forward: SlicedForward,
    expert: SlicedExpert,
    weight: Array | None,
) -> SlicedBackward:
    """Gradients of tp_forward with the bits of `expert_backward` (P2 to P6).

        dhu    chain over H: rank r continues with its rows of W_down           (P2)
        d_w    dot128 over I: rank r adds the blocks of its columns             (P3)
        d_gate, d_up  own columns                                              (P4)
        dx     chain over 2I: gate columns of ranks 0 .. R-1, then up columns  (P5)
        dW     own rows, from whole operands                                   (P6)

    dy (T, H) bf16 values; weight (T,) float32 routing weights, None for a shared or dense expert.
    """
    rank, mode, weights = exchange.rank, config.arithmetic, expert.weights
    own, rows = expert.columns(expert.inner, rank), expert.columns(expert.outer, rank)
    dhu = _chain_dhu(config, exchange, dy, expert)
    d_weight = np.zeros(len(dy), dhu.dtype)
    dh, hw = dhu[:, own], forward.h
    if weight is not None:
        d_weight = _chain_dot128(exchange, mul(dhu, forward.h), own)
        dh, hw = mul(weight[:, None], dh), weighted_h(forward.h, weight)
    d_gate, d_up = swiglu_backward(forward.gate, forward.up, dh, config.swiglu_limit)
    dx = np.zeros((len(dy), x.shape[1]), np.float32)
    for name, half, w in (("gate", d_gate, weights.gate), ("up", d_up, weights.up)):
        dx = _chain_dx(config, exchange, f"tp_dx_{name}", half, w, dx)
    return SlicedBackward(
        to_bf16(dx),
        d_weight,
        weight_gradient(d_gate, x, None, mode),
        weight_gradient(d_up, x, None, mode),
        weight_gradient(dy[:, rows], hw, None, mode),
    )


def _chain_dhu(config: MoEConfig, exchange: Exchange, dy: Array, expert: SlicedExpert) -> Array:
    """dhu = tc(dy, W_down^T): H ascending, each rank its own rows of W_down."""
    rows = expert.columns(expert.outer, exchange.rank)
    start = {"dhu": np.zeros((len(dy), expert.weights.down.shape[1]), np.float32)}

    def link(carry: Tensors) -> Tensors:
        down = expert.weights.down.T
        return {"dhu": tc(dy[:, rows], down, carry["dhu"], arithmetic=config.arithmetic)}

    return exchange.chain("tp_dhu", start, link)["dhu"]


def _chain_dot128(exchange: Exchange, products: Array, own: slice) -> Array:
    """dot128 of (T, I) products, the blocks of each rank's columns in turn."""

    def link(carry: Tensors) -> Tensors:
        total = carry["dot"]
        for first in range(own.start, own.stop, DOT_BLOCK):
            block = products[:, first : min(first + DOT_BLOCK, own.stop)]
            total = add(total, dot128(block))
        return {"dot": total}

    return exchange.chain("tp_dot", {"dot": np.zeros(len(products), np.float32)}, link)["dot"]


def _chain_dx(
    config: MoEConfig, exchange: Exchange, name: str, half: Array, weight: Array, before: Array
) -> Array:
    """One half of dx's chain: I ascending, each rank its own columns, from `before` (T, H)."""

    def link(carry: Tensors) -> Tensors:
        a, b = pad_depth(half), pad_depth(weight.T)
        return {"dx": tc(a, b, carry["dx"], arithmetic=config.arithmetic)}

    return exchange.chain(name, {"dx": before}, link)["dx"]
