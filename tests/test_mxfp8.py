"""MXFP8: every code, every bf16, every scale against ml_dtypes and brute force."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mok_ref import mxfp8
from mok_ref.numerics import bits_to_bf16, to_bf16
from mok_ref.testing import assert_bitwise_equal, random_bf16

E4M3 = ml_dtypes.float8_e4m3fn
ALL_CODES = np.arange(256, dtype=np.uint8)
ALL_BF16 = np.arange(65536, dtype=np.uint16)
FINITE = np.isfinite(bits_to_bf16(ALL_BF16))
POSITIVE = bits_to_bf16(ALL_BF16[FINITE & (ALL_BF16 > 0) & (ALL_BF16 < 0x8000)]).astype(np.float64)


# --------------------------------------------------------------------------- oracles


def test_every_code_decodes_like_ml_dtypes() -> None:
    expected = ALL_CODES.view(E4M3).astype(np.float64)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(mxfp8.decode_e4m3(ALL_CODES)), nan)
    assert_bitwise_equal(mxfp8.decode_e4m3(ALL_CODES)[~nan], expected[~nan])


def test_every_code_comes_back() -> None:
    codes = mxfp8.encode_e4m3(mxfp8.decode_e4m3(ALL_CODES))
    nan = (ALL_CODES & 0x7F) == 0x7F
    np.testing.assert_array_equal(codes[~nan], ALL_CODES[~nan])
    assert (codes[nan] == 0x7F).all()


def test_every_bf16_encodes_like_ml_dtypes() -> None:
    """bf16 values times powers of two, so that all ties and subnormal codes are met."""
    values = bits_to_bf16(ALL_BF16[FINITE]).astype(np.float64)
    expected = values.clip(-448, 448).astype(E4M3).view(np.uint8)
    np.testing.assert_array_equal(mxfp8.encode_e4m3(values), expected)
    ties = (np.arange(-4096, 4097) / 2048.0)[:, None] * 2.0 ** np.arange(-10, 9)
    expected = ties.clip(-448, 448).astype(E4M3).view(np.uint8)
    np.testing.assert_array_equal(mxfp8.encode_e4m3(ties), expected)


def test_scale_of_every_amax_is_the_smallest_that_fits() -> None:
    _, scales = mxfp8.quantize(POSITIVE[:, None].astype(np.float32))
    exponents = np.arange(-124, 120)
    fits = POSITIVE[:, None] <= 448 * 2.0**exponents
    smallest = np.where(fits.any(axis=1), exponents[fits.argmax(axis=1)], 119)
    np.testing.assert_array_equal(scales[:, 0], smallest + 127)
    assert {-124, 119} <= set(smallest.tolist())  # both bounds were met


def test_scale_by_the_ocp_rule() -> None:
    _, scales = mxfp8.quantize(POSITIVE[:, None].astype(np.float32), "ocp")
    exponent = np.frexp(POSITIVE)[1] - 1 - 8
    np.testing.assert_array_equal(scales[:, 0], exponent.clip(-124, 119) + 127)


@pytest.mark.parametrize("n", range(-120, 119, 7))
def test_amax_next_to_the_largest_code(n: int) -> None:
    """448 * 2^n takes scale n and the largest code; one bf16 ulp more takes n + 1."""
    edge = np.float32(448.0 * 2.0**n)
    ulp = np.float32(2.0 ** (n + 8 - 7))
    block = np.stack([edge - ulp, edge, edge + ulp])[:, None]
    codes, scales = mxfp8.quantize(block)
    np.testing.assert_array_equal(scales[:, 0] - 127.0, [n, n, n + 1])
    assert codes[1, 0] == 0x7E
    codes, scales = mxfp8.quantize(block, "ocp")
    np.testing.assert_array_equal(scales[:, 0] - 127.0, [n, n, n])
    assert codes[2, 0] == 0x7E  # saturated


def test_quantize_matches_brute_force() -> None:
    rng = np.random.default_rng(3)
    values = random_bf16(rng, (40, 100)).astype(np.float32)
    values *= 2.0 ** rng.integers(-20, 20, (40, 1)).astype(np.float32)
    codes, scales = mxfp8.quantize(values)
    for row, first in np.ndindex(40, 4):
        block = values[row, 32 * first : 32 * first + 32].astype(np.float64)
        e = next(e for e in range(-124, 120) if np.abs(block).max() <= 448 * 2.0**e)
        assert scales[row, first] == e + 127
        expected = (block / 2.0**e).astype(E4M3).view(np.uint8)
        np.testing.assert_array_equal(codes[row, 32 * first : 32 * first + 32], expected)


def test_every_code_and_scale_dequantises() -> None:
    """Exact where quantize makes the scale; bf16(code * 2^e) for scales from elsewhere."""
    scales = np.arange(256, dtype=np.uint8)
    codes = np.broadcast_to(ALL_CODES, (256, 256))
    got = mxfp8.dequantize(codes, np.repeat(scales[:, None], 8, axis=1))
    e8m0 = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    exact = ALL_CODES.view(E4M3).astype(np.float64) * e8m0[:, None]
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32)  # 4 significant bits: exact, or Inf
    assert_bitwise_equal(got, to_bf16(expected))
    made = slice(mxfp8.MIN_SCALE + 127, mxfp8.MAX_SCALE + 128)
    np.testing.assert_array_equal(got[made].astype(np.float64), exact[made])
    assert np.isfinite(got[made][:, :127]).all()


# --------------------------------------------------------------------------- invariants


def test_zero_block_is_zero() -> None:
    """Also next to a block that is not, and as a whole token; -0 keeps its sign."""
    values = np.zeros((2, 64), np.float32)
    values[0, 40], values[1, 3] = 5, -0.0
    codes, scales = mxfp8.quantize(values)
    np.testing.assert_array_equal(scales[:, 0], [3, 3])  # e = -124
    assert codes[1, 3] == 0x80
    assert_bitwise_equal(mxfp8.dequantize(codes, scales), values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_special_value_makes_a_nan_block(bad: float) -> None:
    values = np.ones((1, 96), np.float32)
    values[0, 50] = bad
    codes, scales = mxfp8.quantize(values)
    np.testing.assert_array_equal(scales, [[119, 255, 119]])  # 1 = 256 * 2^-8
    assert (codes[0, 32:64] == 0x7F).all()
    decoded = mxfp8.dequantize(codes, scales)
    assert np.isnan(decoded[0, 32:64]).all()
    assert (decoded[0, :32] == 1).all() and (decoded[0, 64:] == 1).all()


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 40, 64, 65])
def test_last_block_may_be_short(columns: int) -> None:
    values = random_bf16(np.random.default_rng(columns), (3, columns)).astype(np.float32)
    codes, scales = mxfp8.quantize(values)
    assert codes.shape == (3, columns)
    assert scales.shape == (3, -(-columns // 32))
    padded = np.pad(values, ((0, 0), (0, -columns % 32)))
    np.testing.assert_array_equal(mxfp8.quantize(padded)[0][:, :columns], codes)


@pytest.mark.parametrize("rule", ["fit", "ocp"])
def test_quantised_values_stay(rule: str) -> None:
    """Values that came out of a block go back into the same values."""
    values = random_bf16(np.random.default_rng(5), (64, 64)).astype(np.float32)
    once = mxfp8.quantized_values(values, rule)
    assert_bitwise_equal(mxfp8.quantized_values(once, rule), once)


def test_error_is_half_a_code() -> None:
    """3 mantissa bits: 2^-4 of the value, or half the smallest code's step, 2^-10 of the scale."""
    values = random_bf16(np.random.default_rng(6), (50, 96)).astype(np.float32)
    codes, scales = mxfp8.quantize(values)
    step = np.repeat(2.0 ** (scales.astype(float) - 127), 32, axis=1) * 2.0**-10
    error = np.abs(mxfp8.dequantize(codes, scales) - values)
    assert (error <= np.maximum(2.0**-4 * np.abs(values), step)).all()
    assert error.max() > 0


def test_blocks_do_not_see_each_other() -> None:
    values = random_bf16(np.random.default_rng(7), (4, 96)).astype(np.float32)
    changed = values.copy()
    changed[:, 32:64] *= 1024
    np.testing.assert_array_equal(
        mxfp8.quantize(values)[0][:, :32], mxfp8.quantize(changed)[0][:, :32]
    )


def test_bits_and_values_are_the_same_operand() -> None:
    values = random_bf16(np.random.default_rng(8), (3, 40))
    for ours, theirs in zip(
        mxfp8.quantize(values), mxfp8.quantize(values.view(np.uint16)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="scale_rule must be fit or ocp, got 'max'"):
        mxfp8.quantize(np.ones((1, 32), np.float32), "max")
