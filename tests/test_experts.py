"""One expert: bits against its own equations, values against float64, slopes by differences."""

from __future__ import annotations

import numpy as np
import pytest
from cases import SIZES, Case, make_case
from oracles import bf16, dot128_by_loops, tc_exact

from mok_ref import ExpertWeights, MoEConfig
from mok_ref.experts import (
    expert_backward,
    expert_forward,
    operand_values,
    pad_depth,
    weight_gradient,
)
from mok_ref.numerics import as_values
from mok_ref.swiglu import swiglu_backward, swiglu_forward
from mok_ref.tensor_core import tc
from mok_ref.testing import assert_bitwise_equal


def one_expert(name: str, seed: int = 0):
    """(config, x, dy, weights, routing weights) of expert 0, all as values."""
    case: Case = make_case(SIZES[name], seed)
    config = case.config(1)
    x, dy = (operand_values(config, v) for v in (case.x, case.dy))
    weights = ExpertWeights(*(operand_values(config, w[0]) for w in case.weights))
    return config, x, dy, weights, case.topk_weights[:, 0]


# --------------------------------------------------------------------------- oracles


def test_small_expert_in_exact_arithmetic() -> None:
    """Forward and backward with the products of the pure-Python tensor core."""
    rng = np.random.default_rng(1)
    x, dy = (bf16(rng.standard_normal((3, 18))) for _ in range(2))
    w_gate, w_up = (bf16(rng.standard_normal((5, 18))) for _ in range(2))
    w_down, weight = bf16(rng.standard_normal((18, 5))), np.float32([0.5, -2, 0])
    config = MoEConfig(18, 5, 1, 1)
    weights = ExpertWeights(w_gate, w_up, w_down)
    ours = expert_forward(config, x, weights)
    gate, up = bf16(tc_exact(x, w_gate)), bf16(tc_exact(x, w_up))
    h = swiglu_forward(gate, up)
    for name, value in (("gate", gate), ("up", up), ("h", h), ("y", bf16(tc_exact(h, w_down)))):
        assert_bitwise_equal(getattr(ours, name), value, name)
    back = expert_backward(config, gate, up, dy, weights, weight)
    dhu = tc_exact(dy, w_down.T)
    d_gate, d_up = swiglu_backward(gate, up, weight[:, None] * dhu)
    pad = ((0, 0), (0, 11))
    both = np.concatenate([np.pad(d_gate, pad), np.pad(d_up, pad)], axis=1)
    w_both = np.concatenate([np.pad(w_gate.T, pad), np.pad(w_up.T, pad)], axis=1)
    assert_bitwise_equal(back.dx, bf16(tc_exact(both, w_both)), "dx")
    assert_bitwise_equal(back.hw, bf16(weight[:, None] * h), "hw")
    assert_bitwise_equal(back.d_gate, d_gate, "d_gate")
    assert_bitwise_equal(back.d_up, d_up, "d_up")
    expected = np.array([dot128_by_loops(p) for p in dhu * h], np.float32)
    assert_bitwise_equal(back.d_weight, expected, "d_weight")


@pytest.mark.parametrize("name", ["plain", "odd-widths", "clamp"])
def test_gradients_by_finite_differences(name: str) -> None:
    """float64: d(sum w y dy) along random directions of every input of the expert.

    Central differences with step 1e-6 on sums below 1e3: about 1e-7 from cancellation.
    """
    case = make_case(SIZES[name], 2).widened()
    config = case.config(1, arithmetic="float64")
    rng = np.random.default_rng(3)
    weights, dy, weight = ExpertWeights(*(w[0] for w in case.weights)), case.dy, None
    weight = case.topk_weights[:, 0]

    def loss(x, w, scale) -> float:
        return float((scale[:, None] * expert_forward(config, x, w).y * dy).sum())

    forward = expert_forward(config, case.x, weights)
    back = expert_backward(config, forward.gate, forward.up, dy, weights, weight)
    inputs = [case.x, *weights, weight]
    grads = [
        back.dx,
        weight_gradient(back.d_gate, case.x, None, "float64"),
        weight_gradient(back.d_up, case.x, None, "float64"),
        weight_gradient(dy, back.hw, None, "float64"),
        back.d_weight,
    ]
    for position, grad in enumerate(grads):
        for _ in range(4):
            direction = rng.standard_normal(grad.shape)
            moved = []
            for sign in (1, -1):
                changed = list(inputs)
                changed[position] = inputs[position] + sign * 1e-6 * direction
                moved.append(loss(changed[0], ExpertWeights(*changed[1:4]), changed[4]))
            slope = (moved[0] - moved[1]) / 2e-6
            assert (grad * direction).sum() == pytest.approx(slope, rel=1e-6, abs=1e-5)


# --------------------------------------------------------------------------- invariants


@pytest.mark.parametrize("name", ["plain", "clamp", "mxfp8"])
def test_rows_do_not_see_each_other(name: str) -> None:
    config, x, dy, weights, weight = one_expert(name)
    whole = expert_forward(config, x, weights)
    back = expert_backward(config, whole.gate, whole.up, dy, weights, weight)
    rows = np.random.default_rng(4).permutation(len(x))[:9]
    part = expert_forward(config, x[rows], weights)
    part_back = expert_backward(
        config, whole.gate[rows], whole.up[rows], dy[rows], weights, weight[rows]
    )
    for name_ in whole._fields:
        assert_bitwise_equal(getattr(part, name_), getattr(whole, name_)[rows], name_)
    for name_ in back._fields:
        assert_bitwise_equal(getattr(part_back, name_), getattr(back, name_)[rows], name_)


def test_shared_expert_has_no_weight() -> None:
    """dh = dhu and hw = h: the bits of a routed expert whose weights are all 1."""
    config, x, dy, weights, weight = one_expert("plain")
    forward = expert_forward(config, x, weights, routed=False)
    alone = expert_backward(config, forward.gate, forward.up, dy, weights, None)
    ones = expert_backward(config, forward.gate, forward.up, dy, weights, np.ones_like(weight))
    for name in ("dx", "d_gate", "d_up", "hw"):
        assert_bitwise_equal(getattr(alone, name), getattr(ones, name), name)


@pytest.mark.parametrize("weight", [0.0, -0.0, -1.5, 1e-40, 3e38])
def test_any_finite_weight_has_a_gradient(weight: float) -> None:
    """Nothing is divided by w: d_weight is the same whatever w is."""
    config, x, dy, weights, ones = one_expert("plain")
    forward = expert_forward(config, x, weights)
    scale = np.full_like(ones, weight)
    back = expert_backward(config, forward.gate, forward.up, dy, weights, scale)
    usual = expert_backward(config, forward.gate, forward.up, dy, weights, ones)
    assert_bitwise_equal(back.d_weight, usual.d_weight)
    if weight == 0:
        assert not back.dx.any() and not back.hw.any()


@pytest.mark.parametrize("inner", [15, 16, 17])
def test_dx_is_one_chain_with_padded_halves(inner: int) -> None:
    """gate half first; joining the halves without padding shows where I is no multiple of 16."""
    rng = np.random.default_rng(inner)
    d_gate, d_up = (bf16(rng.standard_normal((40, inner))) for _ in range(2))
    w_gate, w_up = (bf16(rng.standard_normal((inner, 30))) for _ in range(2))
    start = tc(pad_depth(d_gate), pad_depth(w_gate.T))
    chain = tc(d_up, w_up.T, start)
    joined = tc(np.concatenate([d_gate, d_up], 1), np.concatenate([w_gate, w_up]).T)
    assert np.array_equal(chain, joined) == (inner == 16)


def test_gate_half_comes_first() -> None:
    """Rounding to bf16 hides most of it: 64,000 outputs, of which some show the order."""
    rng = np.random.default_rng(7)
    config = MoEConfig(64, 16, 1, 1)
    gate, up = (bf16(rng.standard_normal((1000, 16))) for _ in range(2))
    dy, weight = bf16(rng.standard_normal((1000, 64))), np.ones(1000, np.float32)
    shapes = ((16, 64), (16, 64), (64, 16))
    weights = ExpertWeights(*(bf16(rng.standard_normal(shape)) for shape in shapes))
    back = expert_backward(config, gate, up, dy, weights, weight)
    halves = [(back.d_gate, weights.gate.T), (back.d_up, weights.up.T)]
    chains = []
    for (first, w_first), (second, w_second) in (halves, halves[::-1]):
        chains.append(bf16(tc(second, w_second, tc(first, w_first))))
    assert_bitwise_equal(back.dx, chains[0])
    assert (chains[0] != chains[1]).any()


def test_weight_gradient_continues() -> None:
    rng = np.random.default_rng(5)
    rows_out, rows_in = (bf16(rng.standard_normal((50, n))) for n in (6, 7))
    whole = weight_gradient(rows_out, rows_in, None, "exact")
    for cut in (0, 16, 48):
        start = weight_gradient(rows_out[:cut], rows_in[:cut], None, "exact")
        again = weight_gradient(rows_out[cut:], rows_in[cut:], start, "exact")
        assert_bitwise_equal(again, whole)
    assert_bitwise_equal(whole, tc(rows_out.T, rows_in.T))


def test_mxfp8_quantises_the_routed_operands_only() -> None:
    case = make_case(SIZES["mxfp8"], 6)
    config = case.config(1)
    routed, shared = (operand_values(config, case.x, r) for r in (True, False))
    assert_bitwise_equal(shared, as_values(case.x))
    assert (routed != shared).any()
    weights = ExpertWeights(*(as_values(w) for w in case.shared))
    plain = make_case(SIZES["plain"]).config(1, hidden_size=80)
    assert_bitwise_equal(
        expert_forward(config, shared, weights, routed=False).y,
        expert_forward(plain, shared, weights).y,
    )
