"""Specified float32 operations of a training run against float64, loops and finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from mok_ref.numerics import to_bf16
from mok_ref.testing import assert_bitwise_equal
from mok_ref.training import arithmetic
from mok_ref.training.attention import attention_backward, attention_forward
from mok_ref.training.cross_entropy import cross_entropy_backward, cross_entropy_forward
from mok_ref.training.model import embed_gradient
from mok_ref.training.norm import norm_backward, norm_forward


def test_log_matches_float64() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(1, 0x7F800000, 200_000, dtype=np.int64).astype(np.uint32)
    near_one = (1 + rng.normal(size=50_000) * 1e-3).astype(np.float32)
    x = np.concatenate([bits.view(np.float32), near_one, np.float32([1, 2, 0.5, 1e-45, 3e38])])
    exact = np.log(x.astype(np.float64))
    error = np.abs(arithmetic.log(x) - exact)
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (error <= np.maximum(ulp, 2.0**-25)).all()
    assert arithmetic.log(np.float32([1]))[0] == 0


def test_log_of_special_values() -> None:
    out = arithmetic.log(np.float32([0, -0.0, np.inf, -1, np.nan]))
    np.testing.assert_array_equal(out, [-np.inf, -np.inf, np.inf, np.nan, np.nan])


def test_sqrt_is_rounded_once() -> None:
    x = np.random.default_rng(2).random(10_000).astype(np.float32)
    assert_bitwise_equal(arithmetic.sqrt(x), np.sqrt(x))


def test_token_sum_is_one_loop_and_can_be_cut() -> None:
    rng = np.random.default_rng(3)
    rows = (rng.normal(size=(70, 5)) * 10.0 ** rng.integers(-6, 6, (70, 5))).astype(np.float32)
    loop = np.zeros(5, np.float32)
    for row in rows:
        loop = loop + row
    zero = np.zeros(5, np.float32)
    assert_bitwise_equal(arithmetic.token_sum(rows, zero), loop)
    for cut in (0, 1, 16, 70):
        carry = arithmetic.token_sum(rows[:cut], zero)
        assert_bitwise_equal(arithmetic.token_sum(rows[cut:], carry), loop)
    assert (arithmetic.token_sum(rows[::-1], zero) != loop).any()  # the order matters here


def test_embed_gradient_adds_tokens_in_order() -> None:
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 7, 60)
    dx = rng.normal(size=(60, 4)).astype(np.float32)
    carry = rng.normal(size=(9, 4)).astype(np.float32)
    loop = carry.copy()
    for token, row in zip(tokens, dx, strict=True):
        loop[token] = loop[token] + row
    assert_bitwise_equal(embed_gradient(tokens, dx, carry), loop)
    assert_bitwise_equal(embed_gradient(tokens[:0], dx[:0], carry), carry)


def test_random_numbers_have_a_fixed_meaning() -> None:
    """Golden values: a change of the stream would change every run."""
    assert [hex(b) for b in arithmetic.random_bits("a", 2)] == [
        "0x2a16ce89a82fb2b5",
        "0x4a1dfbbeac070767",
    ]
    uniform = arithmetic.random_uniform("a", (20_000,), 0.5)
    assert uniform.dtype == np.float32
    assert -0.5 <= uniform.min() < -0.499 and 0.499 < uniform.max() < 0.5
    assert abs(uniform.mean()) < 4 * 0.5 / 3**0.5 / 20_000**0.5  # four standard errors
    indices = arithmetic.random_indices("b", 5000, 7)
    assert set(indices) == set(range(7))
    assert (indices[:50] != arithmetic.random_indices("c", 50, 7)).any()


# --------------------------------------------------------------------------- gradients


def slope(function, x: np.ndarray, index: tuple[int, ...], step: float = 1e-5) -> float:
    """Central difference of a scalar function at one coordinate."""
    values = []
    for sign in (1, -1):
        moved = x.copy()
        moved[index] += sign * step
        values.append(function(moved))
    return (values[0] - values[1]) / (2 * step)


def test_norm_backward_matches_finite_differences() -> None:
    rng = np.random.default_rng(5)
    x, d = rng.normal(size=(2, 3, 20))
    dx = norm_backward(d, *norm_forward(x))
    for index in np.ndindex(*x.shape):
        expected = slope(lambda v: float((norm_forward(v)[0] * d).sum()), x, index)
        assert dx[index] == pytest.approx(expected, abs=1e-8)


def test_cross_entropy_backward_matches_finite_differences() -> None:
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(4, 9))
    targets = np.array([0, 8, 3, 3])
    _, p = cross_entropy_forward(logits, targets)
    d = cross_entropy_backward(p, targets, 4)
    for index in np.ndindex(*logits.shape):
        expected = slope(
            lambda v: float(cross_entropy_forward(v, targets)[0].mean()), logits, index
        )
        assert d[index] == pytest.approx(expected, abs=1e-8)


def test_cross_entropy_in_float32_is_close_to_float64() -> None:
    logits = np.random.default_rng(7).normal(size=(50, 256)).astype(np.float32) * 3
    targets = np.arange(50) * 5
    loss, _ = cross_entropy_forward(logits, targets)
    exact, _ = cross_entropy_forward(logits.astype(np.float64), targets)
    np.testing.assert_allclose(loss, exact, atol=4e-6)  # 256 terms of 2^-24, logits up to 12


def test_attention_backward_matches_finite_differences() -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(32, 8))
    w_qkv, w_out, dy = rng.normal(size=(24, 8)), rng.normal(size=(8, 8)), rng.normal(size=(32, 8))

    def total(v: np.ndarray) -> float:
        return float((attention_forward(v, w_qkv, w_out, 16, 2, "float64")[0] * dy).sum())

    _, saved = attention_forward(x, w_qkv, w_out, 16, 2, "float64")
    dx, _ = attention_backward(saved, dy, w_qkv, w_out, "float64")
    for index in [(0, 0), (3, 5), (15, 7), (16, 1), (31, 2)]:
        assert dx[index] == pytest.approx(slope(total, x, index), rel=1e-5, abs=1e-7)


def test_attention_looks_at_the_past_of_its_own_sequence() -> None:
    rng = np.random.default_rng(9)
    x = to_bf16(rng.normal(size=(32, 8)).astype(np.float32))
    weights = [to_bf16(rng.normal(size=s).astype(np.float32)) for s in ((24, 8), (8, 8))]
    y, _ = attention_forward(x, *weights, 16, 2, "exact")
    later = x.copy()
    later[9:] = 7
    assert_bitwise_equal(attention_forward(later, *weights, 16, 2, "exact")[0][:9], y[:9])
    alone, _ = attention_forward(x[16:], *weights, 16, 2, "exact")
    assert_bitwise_equal(alone, y[16:])
