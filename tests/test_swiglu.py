"""SwiGLU: scalar loops for the bits, float64 for the values, finite differences for the slopes."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import bf16, exp_by_fractions, float32_nearest, fraction

from mok_ref.numerics import as_values, sigmoid
from mok_ref.swiglu import clamp, swiglu_backward, swiglu_forward, weighted_h
from mok_ref.testing import assert_bitwise_equal, random_bf16

LIMITS = (None, 0.75, 0.7)  # 0.7 is no bf16 value


def make(seed: int, count: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    gate, up = (as_values(random_bf16(rng, (1, count), 2)) for _ in range(2))
    return gate, up, rng.standard_normal((1, count)).astype(np.float32)


def scalar_sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), each step rounded once, on fractions."""
    below = float32_nearest(1 + fraction(exp_by_fractions(-x)))
    return float32_nearest(1 / fraction(below))


def product(*factors: float) -> float:
    """Left to right, each product rounded to float32."""
    total = factors[0]
    for factor in factors[1:]:
        total = float32_nearest(fraction(total) * fraction(factor))
    return total


def clamped(gate: float, up: float, limit: float | None) -> tuple[float, float]:
    if limit is None:
        return gate, up
    high = float(np.float32(limit))
    return min(gate, high), max(min(up, high), -high)


# --------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("limit", LIMITS)
def test_forward_bits(limit: float | None) -> None:
    gate, up, _ = make(1)
    expected = []
    for g, u in zip(gate[0].tolist(), up[0].tolist(), strict=True):
        g, u = clamped(g, u, limit)
        expected.append(product(product(g, scalar_sigmoid(g)), u))
    assert_bitwise_equal(swiglu_forward(gate, up, limit), bf16([expected]))


@pytest.mark.parametrize("limit", LIMITS)
def test_backward_bits(limit: float | None) -> None:
    gate, up, dh = make(2)
    d_gate, d_up = [], []
    for g, u, d in zip(gate[0].tolist(), up[0].tolist(), dh[0].tolist(), strict=True):
        gc, uc = clamped(g, u, limit)
        s = scalar_sigmoid(gc)
        inner = float32_nearest(1 - fraction(s))
        slope = product(s, float32_nearest(1 + fraction(product(gc, inner))))
        high = np.inf if limit is None else float(np.float32(limit))
        d_gate.append(0.0 if g > high else product(product(d, uc), slope))
        d_up.append(0.0 if abs(u) > high else product(d, product(gc, s)))
    ours = swiglu_backward(gate, up, dh, limit)
    assert_bitwise_equal(ours[0], bf16([d_gate]))
    assert_bitwise_equal(ours[1], bf16([d_up]))


@pytest.mark.parametrize("limit", LIMITS)
def test_backward_is_the_slope_of_forward(limit: float | None) -> None:
    """Central differences in float64: step^2 / 6 * |h'''| < 2e-11, cancellation < 1e-9."""
    gate, up, dh = (v.astype(np.float64) for v in make(3))
    if limit is not None:  # differences are defined off the kinks only
        for values in (gate, up):
            near = np.abs(np.abs(values) - limit) < 1e-3
            values[near] += 0.01
    d_gate, d_up = swiglu_backward(gate, up, dh, limit)
    step = 1e-5
    high, low = swiglu_forward(gate + step, up, limit), swiglu_forward(gate - step, up, limit)
    np.testing.assert_allclose(d_gate, dh * (high - low) / (2 * step), rtol=0, atol=1e-8)
    high, low = swiglu_forward(gate, up + step, limit), swiglu_forward(gate, up - step, limit)
    np.testing.assert_allclose(d_up, dh * (high - low) / (2 * step), rtol=0, atol=1e-8)


def test_every_bf16_gate() -> None:
    """h for every finite gate: sigmoid 2.5 * 2^-23, two products 2^-24 each, then bf16 2^-8."""
    gate = as_values(np.arange(65536, dtype=np.uint16))
    gate = gate[np.isfinite(gate) & (np.abs(gate) < 80)][None]
    up = np.full_like(gate, 1.5)
    wide = gate.astype(np.float64)
    exact = 1.5 * wide / (1 + np.exp(-wide))
    tolerance = (2.0**-8 + 7 * 2.0**-24) * np.abs(exact) + 2.0**-133  # one bf16 subnormal step
    assert (np.abs(swiglu_forward(gate, up) - exact) <= tolerance).all()


def test_order_of_products() -> None:
    """A million elements, since bf16 hides most of the order; each other one shows somewhere."""
    g, u, d = (v.reshape(-1) for v in make(6, 1 << 20))
    s = sigmoid(g)
    slope = s * (1 + g * (1 - s))
    h = swiglu_forward(g, u)
    d_gate, d_up = swiglu_backward(g, u, d)
    for ours, right, others in (
        (h, (g * s) * u, [g * (s * u), (g * u) * s]),
        (d_up, d * (g * s), [(d * g) * s, (d * s) * g]),
        (
            d_gate,
            (d * u) * slope,
            [d * (u * slope), (d * slope) * u, (d * u) * (s + g * s * (1 - s))],
        ),
    ):
        assert_bitwise_equal(ours, bf16(right))
        for other in others:
            assert (ours != bf16(other)).any()


# --------------------------------------------------------------------------- invariants


def test_clamp_by_hand() -> None:
    gate = np.float32([0.7, 0.8, -9.0, np.nan, np.inf, -np.inf, 0.75])
    up = np.float32([0.7, -0.8, 9.0, np.nan, np.inf, -np.inf, -0.75])
    g, u = clamp(gate, up, 0.75)
    assert_bitwise_equal(g, np.float32([0.7, 0.75, -9, np.nan, 0.75, -np.inf, 0.75]))
    assert_bitwise_equal(u, np.float32([0.7, -0.75, 0.75, np.nan, 0.75, -0.75, -0.75]))


def test_gradient_at_and_beyond_the_limit() -> None:
    """Equality passes the gradient; one bf16 step beyond it is exactly +0."""
    limit = np.float32(0.75)
    beyond = np.float32(0.75390625)
    gate = np.float32([[limit, beyond, -beyond, limit, limit]])
    up = np.float32([[limit, limit, -limit, beyond, -beyond]])
    d_gate, d_up = swiglu_backward(gate, up, np.ones((1, 5), np.float32), 0.75)
    assert (d_gate[0, [0, 2, 3, 4]] != 0).all() and d_gate.view(np.uint32)[0, 1] == 0
    assert (d_up[0, :3] != 0).all() and (d_up.view(np.uint32)[0, 3:] == 0).all()


def test_nan_stays() -> None:
    nan, one = np.float32([[np.nan]]), np.float32([[1.0]])
    for limit in LIMITS:
        assert np.isnan(swiglu_forward(nan, one, limit)).all()
        assert np.isnan(swiglu_forward(one, nan, limit)).all()
        assert np.isnan(swiglu_backward(nan, one, one, limit)[0]).all()


def test_very_negative_gate_is_tiny_not_zero() -> None:
    """exp is clamped at 88, so silu(-1e38) = -1e38 * 6.05e-39."""
    h = swiglu_forward(as_values(np.uint16([[0xFE96]])), np.ones((1, 1), np.float32))
    assert h[0, 0] == pytest.approx(-0.605, rel=0.01)


def test_weighted_h_rounds_once() -> None:
    h, _, _ = make(4)
    rows = h.reshape(20, 15)
    weight = np.random.default_rng(5).standard_normal(20).astype(np.float32)
    assert_bitwise_equal(weighted_h(rows, weight), bf16(weight[:, None] * rows))
