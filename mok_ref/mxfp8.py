"""MXFP8: E4M3 codes with one E8M0 scale per block of 32 along the last axis.

Format source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 (E4M3), 5.4 (E8M0).
Hopper has no block-scaled tensor core, so operands are expanded to the bf16 values they stand for
(spec section 7); code * 2^e is always exact in bf16 for the scales `quantize` produces.
"""

from __future__ import annotations

import numpy as np

from mok_ref.numerics import Array, array_module, as_values, to_bf16, to_float32, to_float64

BLOCK = 32
MIN_SCALE, MAX_SCALE = -124, 119  # every code * 2^e is then exact and finite in bf16
SCALE_BIAS = 127
NAN_SCALE = 255
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
_E4M3_MAX_EXPONENT = 8
_E4M3_MIN_EXPONENT = -6
_E4M3_MANTISSA_BITS = 3
_E4M3_BIAS = 7


def num_blocks(columns: int) -> int:
    """Scale bytes per row; the last block may be shorter."""
    return -(-columns // BLOCK)


def quantize(values: Array, rule: str = "fit") -> tuple[Array, Array]:
    """bf16 values to MXFP8 (spec eq. 7.1).

        e = the smallest integer in -124..119 with amax / 2^e <= 448, else 119   (rule "fit")
        e = floor(log2 amax) - 8, same bounds                                     (rule "ocp")
        codes = E4M3(x * 2^-e), nearest even, saturating

    values   (..., n) bf16 bits, or float32 that holds bf16 values
    Returns  codes (..., n) uint8, scales (..., ceil(n/32)) uint8 = e + 127.
             A block with a NaN or Inf: scale 255, codes 0x7F. amax = 0: e = -124.
    Raises: ValueError if `rule` is unknown.
    CUDA:   cuda_src/mxfp8.cuh: quantize_block
    """
    if rule not in ("fit", "ocp"):
        raise ValueError(f"scale_rule must be fit or ocp, got {rule!r}")
    wide = to_float64(as_values(values))
    xp = array_module(wide)
    blocks = _blocked(wide)
    amax = xp.abs(blocks).max(axis=-1)
    finite = xp.isfinite(amax)
    exponent = _scale_exponent(xp.where(finite, amax, 0.0), rule)
    scaled = blocks * _power_of_two(-exponent)[..., None]  # exact in float64
    codes = xp.where(finite[..., None], encode_e4m3(scaled), np.uint8(E4M3_NAN)).astype(np.uint8)
    scales = xp.where(finite, exponent + SCALE_BIAS, NAN_SCALE).astype(np.uint8)
    columns = wide.shape[-1]
    flat = codes.reshape(*wide.shape[:-1], scales.shape[-1] * BLOCK)
    return xp.ascontiguousarray(flat[..., :columns]), scales


def dequantize(codes: Array, scales: Array) -> Array:
    """bf16 values, carried in float32, of MXFP8 codes and scales (spec eq. 7.2).

        value = bf16(code * 2^(scale - 127)); scale 255 gives NaN

    CUDA: cuda_src/mxfp8.cuh: dequantize
    """
    xp = array_module(codes)
    exponent = scales.astype(np.int64) - SCALE_BIAS
    factor = xp.where(scales == NAN_SCALE, np.nan, _power_of_two(exponent))
    per_code = xp.repeat(factor, BLOCK, axis=-1)[..., : codes.shape[-1]]
    with np.errstate(invalid="ignore"):
        return to_bf16(to_float32(decode_e4m3(codes) * per_code))


def quantized_values(values: Array, rule: str = "fit") -> Array:
    """The values an operand stands for once it is quantised; float64 passes (oracle)."""
    if values.dtype == np.float64:
        return values
    return dequantize(*quantize(values, rule))


def encode_e4m3(values: Array) -> Array:
    """E4M3 code of float64 values: nearest even, saturating at 448; NaN is 0x7F."""
    xp = array_module(values)
    magnitude = xp.minimum(xp.abs(values), E4M3_MAX)  # RNE below, saturation here
    exponent = xp.maximum(_exponent(magnitude), _E4M3_MIN_EXPONENT)
    quantum = _power_of_two(exponent - _E4M3_MANTISSA_BITS)
    steps = xp.rint(magnitude / quantum)  # RNE; 16 steps carry into the next exponent by themselves
    biased = (exponent - _E4M3_MIN_EXPONENT) * 8 + xp.nan_to_num(steps)
    code = biased.astype(np.int64) | xp.where(xp.signbit(values), 0x80, 0)
    return xp.where(xp.isnan(values), E4M3_NAN, code).astype(np.uint8)


def decode_e4m3(codes: Array) -> Array:
    """float64 value of E4M3 codes; 0x7F and 0xFF are NaN."""
    xp = array_module(codes)
    wide = codes.astype(np.int64)
    exponent, mantissa = (wide >> 3) & 15, wide & 7
    normal = (8 + mantissa) * _power_of_two(exponent - _E4M3_BIAS - _E4M3_MANTISSA_BITS)
    subnormal = mantissa * 2.0**-9
    magnitude = xp.where(exponent == 0, subnormal, normal)
    signed = xp.where(wide & 0x80, -magnitude, magnitude)
    return xp.where((wide & 0x7F) == E4M3_NAN, np.nan, signed)


def _blocked(wide: Array) -> Array:
    """(..., n) -> (..., blocks, 32), the last block padded with zeros."""
    xp = array_module(wide)
    blocks = num_blocks(wide.shape[-1])
    padded = xp.zeros((*wide.shape[:-1], blocks * BLOCK), np.float64)
    padded[..., : wide.shape[-1]] = wide
    return padded.reshape(*wide.shape[:-1], blocks, BLOCK)


def _scale_exponent(amax: Array, rule: str) -> Array:
    """int64 exponent e of the block scale; amax finite and >= 0."""
    xp = array_module(amax)
    exponent = _exponent(xp.where(amax == 0, 1.0, amax)) - _E4M3_MAX_EXPONENT
    if rule == "fit":
        exponent = exponent + (amax > E4M3_MAX * _power_of_two(exponent))
    exponent = xp.clip(exponent, MIN_SCALE, MAX_SCALE)
    return xp.where(amax == 0, MIN_SCALE, exponent).astype(np.int64)


def _exponent(magnitude: Array) -> Array:
    """floor(log2 v) of float64 v > 0 that is normal in float64; a very small number for 0."""
    xp = array_module(magnitude)
    return ((xp.ascontiguousarray(magnitude).view(np.int64) >> 52) & 0x7FF) - 1023


def _power_of_two(exponent: Array) -> Array:
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)
