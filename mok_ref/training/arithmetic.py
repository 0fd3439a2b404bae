"""Specified float32 arithmetic outside the layer (docs/training.md, T1 to T5).

A training run repeats its loss to the last bit only if everything between two layers is specified
as well. These are the few operations that `mok_ref.numerics` does not need but a model does: a
logarithm, a square root, sums over rows and over tokens, and random numbers with a fixed meaning.
"""

from __future__ import annotations

import hashlib

import numpy as np

from mok_ref.numerics import (
    Array,
    add,
    array_module,
    dot128,
    fma,
    mul,
    sub,
    to_float32,
    to_float64,
)
from mok_ref.tensor_core import tc

_SQRT_HALF_BITS = 0x3F3504F3  # float32(sqrt(1/2))
_LN2_HI = np.float32(0.693359375)
_LN2_LO = np.float32(-2.12194440e-4)
_LOG_POLY = tuple(
    np.float32(c)
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)


def log(x: Array) -> Array:
    """Natural logarithm (T1), below 1 ulp away from the true value or 2^-25 near 1.

        x = m * 2^n, m in [sqrt(1/2), sqrt(2));  f = m - 1;  z = f * f
        p = Horner in f;  y = (p * f) * z;  y = fma(n, ln2_lo, y);  y = fma(z, -1/2, y)
        log(x) = fma(n, ln2_hi, f + y)

    x, result: float32 (float64: the true logarithm).  log(0) = -Inf, of a negative number NaN.
    Source: coefficients of Cephes `logf`.
    """
    if x.dtype == np.float64:
        return array_module(x).log(x)
    xp = array_module(x)
    is_normal_positive = (x > 0) & xp.isfinite(x)
    safe = xp.where(is_normal_positive, x, xp.ones_like(x))
    is_small = xp.ascontiguousarray(safe).view(np.int32) < 0x00800000
    safe = xp.where(is_small, mul(safe, np.float32(2**23)), safe)  # exact
    bits = xp.ascontiguousarray(safe).view(np.int32)
    n = (bits - _SQRT_HALF_BITS) >> 23
    m = (bits - (n << 23)).astype(np.int32).view(np.float32)
    n = (n - xp.where(is_small, 23, 0)).astype(np.float32)
    f = sub(m, np.float32(1))
    z = mul(f, f)
    p = xp.full_like(f, _LOG_POLY[0])
    for coefficient in _LOG_POLY[1:]:
        p = fma(p, f, coefficient)
    y = mul(mul(p, f), z)
    y = fma(z, np.float32(-0.5), fma(n, _LN2_LO, y))
    result = fma(n, _LN2_HI, add(f, y))
    special = xp.where(x == 0, np.float32(-np.inf), xp.where(x == np.inf, x, np.float32(np.nan)))
    return xp.where(is_normal_positive, result, special)


def sqrt(x: Array) -> Array:
    """Square root, rounded once (T2). float64's root rounds to the same float32."""  # RNE
    return to_float32(array_module(x).sqrt(to_float64(x))) if x.dtype == np.float32 else x**0.5


def row_sum(rows: Array) -> Array:
    """Sum of each row in the order of dot128 (T3).

    rows  (T, C) float32.  Returns (T,) float32.
    Order:  contract section 6, dot128.
    """
    return dot128(rows)


def token_sum(rows: Array, carry: Array) -> Array:
    """Sum over tokens, continuing `carry` of the ranks below (T4).

        carry = carry + rows[t],  t ascending

    rows   (T, ...) float32
    carry  (...) float32: +0 on the first rank, else what the rank below returned
    Order:  ascending global token, one accumulator per column.
    """
    if rows.shape[0] == 0:
        return carry
    # accumulate is defined as r[t] = r[t-1] + a[t], so its order is the loop's
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return np.add.accumulate(np.concatenate([carry[None], rows]), axis=0)[-1]


def batched_tc(a: Array, b: Array, arithmetic: str = "exact") -> Array:
    """tc of each pair of matrices: a (G, M, K), b (G, N, K) -> (G, M, N)."""
    if arithmetic == "fast":
        return np.matmul(a, b.swapaxes(1, 2))
    out_dtype = np.float64 if arithmetic == "float64" else np.float32
    out = np.zeros((a.shape[0], a.shape[1], b.shape[1]), out_dtype)
    for g in range(a.shape[0]):
        out[g] = tc(a[g], b[g], arithmetic=arithmetic)
    return out


def random_bits(key: str, count: int) -> np.ndarray:
    """`count` uint64 from Philox, keyed by SHA-256 of a name. The stream is fixed by NumPy."""
    digest = hashlib.sha256(key.encode()).digest()
    bit_generator = np.random.Philox(key=np.frombuffer(digest[:16], "<u8"))
    return bit_generator.random_raw(count)


def random_uniform(key: str, shape: tuple[int, ...], bound: float) -> np.ndarray:
    """Uniform numbers in [-bound, bound) from 24 random bits each (T5): no library's normal().

    Returns float32: (k - 2^23) * (float32(bound) * 2^-23), k in 0 .. 2^24 - 1.
    """
    k = (random_bits(key, int(np.prod(shape, dtype=np.int64))) >> np.uint64(40)).astype(np.int64)
    step = np.float32(bound) * np.float32(2.0**-23)
    return ((k - 2**23).astype(np.float32) * step).reshape(shape)


def random_indices(key: str, count: int, limit: int) -> np.ndarray:
    """`count` integers in 0 .. limit - 1: the high half of 64 x 32 bits, no rejection."""
    return ((random_bits(key, count) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(
        np.int64
    )
