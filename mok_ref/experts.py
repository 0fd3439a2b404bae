"""One expert: two products with SwiGLU between them, forward and backward (spec sections 5, 6)."""

from __future__ import annotations

from typing import NamedTuple

from mok_ref.config import MoEConfig
from mok_ref.mxfp8 import quantized_values
from mok_ref.numerics import Array, array_module, as_values, dot128, mul, to_bf16, to_float64
from mok_ref.swiglu import swiglu_backward, swiglu_forward, weighted_h
from mok_ref.tensor_core import GROUP, tc


class ExpertWeights(NamedTuple):
    """gate, up (L, I, H) and down (L, H, I) bf16; without L for the shared expert."""

    gate: Array
    up: Array
    down: Array


class ExpertForward(NamedTuple):
    """What one expert computed for some rows; all bf16 values."""

    gate: Array  # (rows, I)
    up: Array  # (rows, I)
    h: Array  # (rows, I), quantised values for mxfp8
    y: Array  # (rows, H)


class ExpertBackward(NamedTuple):
    """Row gradients of one expert and the operands of its weight gradients."""

    dx: Array  # (rows, H) bf16 values
    d_weight: Array  # (rows,) float32, gradient of the routing weight
    d_gate: Array  # (rows, I) bf16 values, quantised for mxfp8
    d_up: Array  # (rows, I)
    hw: Array  # (rows, I) bf16 values of w * h


def operand_values(config: MoEConfig, values: Array, routed: bool = True) -> Array:
    """The values a product sees: with mxfp8, routed experts see the quantised operand.

    The float64 oracle quantises nothing, in whatever dtype the values come.
    """
    if config.arithmetic == "float64":
        return to_float64(as_values(values))
    if config.dtype == "mxfp8" and routed:
        return quantized_values(values, config.scale_rule)
    return as_values(values)


def expert_gate_up(config: MoEConfig, x: Array, weights: ExpertWeights) -> tuple[Array, Array]:
    """gate = bf16(tc(x, W_gate)), up = bf16(tc(x, W_up)) (spec eq. 5.1).

    x (rows, H) bf16 values, weights of one expert as `operand_values`; returns (rows, I) each.
    CUDA: cuda_src/experts.cuh: tc_tile
    """
    mode = config.arithmetic
    return to_bf16(tc(x, weights.gate, arithmetic=mode)), to_bf16(
        tc(x, weights.up, arithmetic=mode)
    )


def expert_forward(
    config: MoEConfig, x: Array, weights: ExpertWeights, routed: bool = True
) -> ExpertForward:
    """One expert on some rows (spec eq. 5.1 - 5.3).

        gate, up = bf16(tc(x, W));  h = bf16(silu(gate) * up);  y = bf16(tc(h, W_down))

    CUDA: cuda_src/experts.cuh: tc_tile
    """
    gate, up = expert_gate_up(config, x, weights)
    h = hidden(config, gate, up, routed)
    y = to_bf16(tc(h, weights.down, arithmetic=config.arithmetic))
    return ExpertForward(gate, up, h, y)


def hidden(config: MoEConfig, gate: Array, up: Array, routed: bool) -> Array:
    """h as the down product sees it (spec eq. 5.2; quantised for mxfp8)."""
    return operand_values(config, swiglu_forward(gate, up, config.swiglu_limit), routed)


def expert_backward(
    config: MoEConfig,
    gate: Array,
    up: Array,
    dy: Array,
    weights: ExpertWeights,
    weight: Array | None,
) -> ExpertBackward:
    """Row gradients of one expert (spec eq. 6.1 - 6.6, 6.8).

        dhu = tc(dy, W_down^T);  d_weight = dot128(dhu * h);  dh = w * dhu;  hw = bf16(w * h)
        dx  = bf16(tc([d_gate | d_up], [W_gate ; W_up]^T))

    dy (rows, H) bf16 values, unscaled      weight (rows,) float32, None for the shared expert
    Order:  dx is one chain over 2I, gate half first, each half padded to a multiple of 16.
    CUDA:   cuda_src/backward_dgrad.cuh: hidden_epilogue
    """
    xp = array_module(gate)
    mode, routed = config.arithmetic, weight is not None
    h = hidden(config, gate, up, routed)
    dhu = tc(dy, weights.down.T, arithmetic=mode)
    if weight is None:
        dh, hw, d_weight = dhu, h, xp.zeros(len(dy), dhu.dtype)
    else:
        dh, hw, d_weight = mul(weight[:, None], dhu), weighted_h(h, weight), dot128(mul(dhu, h))
    d_gate, d_up = swiglu_backward(gate, up, dh, config.swiglu_limit)
    d_gate, d_up = (operand_values(config, d, routed) for d in (d_gate, d_up))
    chain = tc(pad_depth(d_gate), pad_depth(weights.gate.T), arithmetic=mode)
    dx = to_bf16(tc(d_up, weights.up.T, chain, arithmetic=mode))
    return ExpertBackward(dx, d_weight, d_gate, d_up, hw)


def pad_depth(values: Array) -> Array:
    """Pad the last axis with +0 to a multiple of 16, where a chain may be resumed."""
    depth = values.shape[-1]
    missing = -depth % GROUP
    if not missing:
        return values
    xp = array_module(values)
    padded = xp.zeros((*values.shape[:-1], depth + missing), values.dtype)
    padded[..., :depth] = values
    return padded


def weight_gradient(rows_out: Array, rows_in: Array, start: Array | None, mode: str) -> Array:
    """dW = tc over rows (rows_out^T, rows_in^T), continuing `start` (spec eq. 6.9).

    rows_out (rows, M), rows_in (rows, N) bf16 values, in schedule order; returns (M, N).
    Order:  rows ascending in groups of 16; `start` is the accumulator of the rows before.
    CUDA:   cuda_src/backward_wgrad.cuh: multiply_wgrad
    """
    return tc(rows_out.T, rows_in.T, start, arithmetic=mode)
