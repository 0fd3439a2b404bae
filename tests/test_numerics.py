"""Scalar arithmetic: ml_dtypes, exact fractions, float64; whole domains where they are small."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from oracles import dot128_by_loops, exp_by_fractions, float32_nearest, fraction

from mok_ref import numerics
from mok_ref.testing import assert_bitwise_equal

ALL_BF16 = np.arange(65536, dtype=np.uint16)
SMALL = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 1.0, -1.0, 1.0000001, 3.0, 0.1]
LARGE = [16777215.0, 2.0**24, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan]
EDGES = np.array([*SMALL, *LARGE], np.float32)


def random_floats(seed: int, count: int) -> np.ndarray:
    """Random bit patterns: every exponent, subnormals, NaN and Inf."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return bits.view(np.float32)


# --------------------------------------------------------------------------- oracles


def test_bf16_rounds_like_ml_dtypes() -> None:
    """Every bf16 with the lower halves that decide: ties, just below, just above, and random."""
    high = ALL_BF16.astype(np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234):
        values = (high | low).view(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            expected = values.astype(ml_dtypes.bfloat16)
        assert_bitwise_equal(
            numerics.bf16_to_bits(numerics.to_bf16(values)),
            numerics.canonical_nan(expected).view(np.uint16),
        )


def test_bf16_bits_come_back() -> None:
    values = numerics.bits_to_bf16(ALL_BF16)
    assert_bitwise_equal(numerics.bf16_to_bits(values), numerics.canonical_nan(ALL_BF16))
    assert_bitwise_equal(numerics.to_bf16(values), numerics.canonical_nan(values))
    assert_bitwise_equal(numerics.as_values(ALL_BF16.view(ml_dtypes.bfloat16)), values)


@pytest.mark.parametrize("name", ["mul", "add", "sub", "div"])
def test_operations_round_once(name: str) -> None:
    a, b = random_floats(1, 4000), random_floats(2, 4000)
    a[:2000] = np.random.default_rng(3).standard_normal(2000) * 1e-20  # subnormal products
    b[:2000] = np.random.default_rng(4).standard_normal(2000) * 1e-20
    result = getattr(numerics, name)(a, b)
    exact = {
        "mul": lambda x, y: x * y,
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "div": lambda x, y: x / y if y else Fraction(0),
    }[name]
    checked = 0
    for x, y, got in zip(a, b, result, strict=True):
        if np.isfinite([x, y]).all() and y != 0:
            assert got == float32_nearest(exact(fraction(x), fraction(y)))
            checked += 1
    assert checked > 3900


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(5)
    count = 3000
    a, b = (rng.standard_normal(count).astype(np.float32) for _ in range(2))
    c = rng.standard_normal(count).astype(np.float32)
    c[:1000] = -(a * b)[:1000]  # cancellation
    a[1000:1500] *= np.float32(1e-22)
    b[1000:1500] *= np.float32(1e-22)
    c[1000:1500] *= np.float32(1e-44)  # subnormal sums
    wide = slice(1500, 2200)
    c[wide] *= (2.0 ** rng.integers(-60, 60, 700)).astype(np.float32)
    # ties: a * b = (1 + 2^-12)^2 has 2^-24 as its last bit, half an ulp of 1.x
    a[2200:2300] = b[2200:2300] = np.float32(1 + 2.0**-12)
    c[2200:2300] = (2.0 ** rng.integers(-160, 3, 100)).astype(np.float32)
    result = numerics.fma(a, b, c)
    plain_differs = 0
    for x, y, z, got in zip(a, b, c, result, strict=True):
        assert got == float32_nearest(fraction(x) * fraction(y) + fraction(z))
        plain_differs += got != np.float32(x * y) + z
    assert plain_differs > 500  # an unfused multiply-add would not pass


def test_fma_of_special_values() -> None:
    a, b, c = (v.ravel() for v in np.meshgrid(EDGES, EDGES, EDGES))
    with np.errstate(all="ignore"):
        expected = (a.astype(float) * b.astype(float) + c.astype(float)).astype(np.float32)
    special = ~np.isfinite(expected)
    assert_bitwise_equal(numerics.fma(a, b, c)[special], expected[special])


def test_exp_is_the_contract() -> None:
    """Bit for bit against fractions; below 1 ulp against the true exponential."""
    rng = np.random.default_rng(6)
    x = np.concatenate([EDGES, rng.uniform(-90, 90, 300), rng.standard_normal(100) * 1e-3])
    x = x.astype(np.float32)
    with np.errstate(invalid="ignore"):
        result = numerics.exp(x)
    expected = np.array([exp_by_fractions(float(v)) for v in x], np.float32)
    assert_bitwise_equal(result, expected)


def test_exp_error_is_below_one_ulp() -> None:
    every = numerics.bits_to_bf16(ALL_BF16)
    every = every[np.isfinite(every) & (every >= -87) & (every <= 88)]
    x = np.concatenate([every, np.linspace(-87, 88, 200_001, dtype=np.float32)])
    true = np.exp(x.astype(np.float64))
    ulp = 2.0 ** (np.floor(np.log2(true)) - 23)
    assert (np.abs(numerics.exp(x) - true) / ulp).max() < 1


def test_exp_is_clamped() -> None:
    x = np.array([-np.inf, -1e30, -87.5, np.nan], np.float32)
    assert (numerics.exp(x) == numerics.exp(np.float32([-87]))).all()
    assert (numerics.exp(np.float32([np.inf, 1e30])) == numerics.exp(np.float32([88]))).all()


def test_sigmoid_of_every_bf16() -> None:
    """exp errs by 1 ulp, the sum and the division by half an ulp each: 2.5 * 2^-23, relative."""
    x = numerics.bits_to_bf16(ALL_BF16)
    x = x[np.isfinite(x)]
    inside = np.abs(x) <= 86
    true = 1 / (1 + np.exp(-x[inside].astype(np.float64)))
    error = np.abs(numerics.sigmoid(x[inside]) - true)
    assert (error <= 2.5 * 2.0**-23 * true).all()
    assert (numerics.sigmoid(x[x > 88]) == 1).all()
    floor = numerics.sigmoid(np.float32([-np.inf]))[0]
    assert floor == pytest.approx(6.05e-39, rel=1e-3)  # not 0: exp(88) is finite
    assert (numerics.sigmoid(x[x < -88]) == floor).all()
    assert not np.isnan(numerics.sigmoid(np.float32([np.nan])))[0]  # silu multiplies the NaN in


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 127, 128, 129, 200, 384, 500])
def test_dot128_has_the_fragment_order(columns: int) -> None:
    products = np.random.default_rng(columns).standard_normal((5, columns)).astype(np.float32)
    expected = np.array([dot128_by_loops(row) for row in products])
    assert_bitwise_equal(numerics.dot128(products), expected)


# --------------------------------------------------------------------------- invariants


def test_dot128_order_shows() -> None:
    """Neither NumPy's own sum nor a plain ascending one has these bits."""
    products = np.random.default_rng(9).standard_normal((200, 300)).astype(np.float32)
    result = numerics.dot128(products)
    ascending = np.zeros(200, np.float32)
    for column in products.T:
        ascending += column
    assert (result != ascending).any()
    assert (result != products.sum(axis=1)).any()


def test_dot128_of_no_rows_and_no_columns() -> None:
    assert numerics.dot128(np.zeros((0, 5), np.float32)).shape == (0,)
    assert_bitwise_equal(numerics.dot128(np.zeros((3, 0), np.float32)), np.zeros(3, np.float32))


def test_float64_is_not_rounded() -> None:
    """The oracle arithmetic passes through every function without a rounding."""
    x = np.array([0.1, -0.3, 1 / 3])
    assert (numerics.to_bf16(x) == x).all()
    assert numerics.exp(x) == pytest.approx(np.exp(x), rel=1e-15)
    assert numerics.fma(x, x, x) == pytest.approx(x * x + x, rel=1e-15)
    assert numerics.mul(x, np.float32(0.5)).dtype == np.float64


def test_canonical_nan() -> None:
    values = np.array([0x7F800001, 0xFFC00000, 0x7F800000, 0x3F800000], np.uint32)
    canonical = numerics.canonical_nan(values.view(np.float32)).view(np.uint32)
    assert [hex(v) for v in canonical] == ["0x7fc00000", "0x7fc00000", "0x7f800000", "0x3f800000"]
    bits = np.array([0xFF81, 0x7F80, 0x8000], np.uint16)
    assert [hex(v) for v in numerics.canonical_nan(bits)] == ["0x7fc0", "0x7f80", "0x8000"]


def test_no_warning_on_signaling_nan() -> None:
    """Any bit pattern may arrive from outside; warnings are errors here."""
    signaling = np.array([0x7F81, 0xFF81], np.uint16)
    values = numerics.bits_to_bf16(signaling)
    assert np.isnan(numerics.to_bf16(values)).all()
    assert np.isnan(numerics.to_float64(values)).all()
    assert np.isnan(numerics.add(values, values)).all()
    assert np.isnan(numerics.mul(values, numerics.sigmoid(values))).all()
    assert (numerics.fma(values, values, values) != 0).all()


def test_no_warning_on_huge_values() -> None:
    """Overflow and Inf - Inf are results here, in the oracle's arithmetic as in the contract's."""
    for dtype in (np.float32, np.float64):
        huge = np.array([-np.inf, -1e38, 1e38, np.inf, np.nan], dtype)
        for function in (numerics.exp, numerics.sigmoid):
            assert function(huge).shape == (5,)
        for function in (numerics.mul, numerics.add, numerics.sub, numerics.div):
            assert function(huge, huge[::-1]).shape == (5,)
        numerics.fma(huge * dtype(1), huge, huge[::-1])
        with numerics.fast_exp():
            numerics.exp(huge)
    wide = np.array([1e300, -1e300])
    assert numerics.fma(wide, wide, wide)[0] == np.inf
    assert numerics.exp(wide)[0] == np.inf


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(2, np.float16),
        np.zeros(2, np.int16),
        np.zeros(2, ">u2"),
        np.zeros(2, ">f4"),
        np.zeros(2, np.uint32),
        np.zeros(2, bool),
        np.zeros(2, ml_dtypes.float8_e4m3fn),
        [1.0, 2.0],
        None,
    ],
    ids=lambda values: str(getattr(values, "dtype", type(values).__name__)),
)
def test_values_of_other_dtypes_are_refused(values: object) -> None:
    """None of these is read as bf16 bits."""
    with pytest.raises(
        ValueError, match=r"^values must be an array of bfloat16, uint16 \(bf16 bits"
    ):
        numerics.as_values(values)
