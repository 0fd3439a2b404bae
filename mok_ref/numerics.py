"""The float32 rules of the bit contract: every scalar rounding of the layer happens here.

Arrays decide what is computed. float32 arrays (bf16 values are carried in float32) follow the
contract, on NumPy and on CuPy alike. float64 arrays are the oracle: the same text, no rounding.

CuPy compiles its own kernels with flush-to-zero. There, float32 operations go through float64,
whose results round to the same float32 (53 >= 2*24 + 2 bits), and the two conversions are inline
PTX without `.ftz`, so subnormals survive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BF16_NAN = np.uint16(0x7FC0)
FLOAT32_NAN = np.uint32(0x7FC00000)

# Constants of `exp` (Cephes expf), rounded to float32 by the contract.
_LOG2E = np.float32(1.44269504)
_MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
_LN2_HI = np.float32(-0.693359375)
_LN2_LO = np.float32(2.12194440e-4)
_EXP_P0 = np.float32(1.9875691500e-4)
_EXP_POLY = tuple(
    np.float32(c)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
_DOT_BLOCK = 128

_REAL_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_BF16_DTYPES = (BFLOAT16, np.dtype(np.uint16))  # native byte order only


def array_module(array: Array) -> Any:
    """`numpy` or `cupy`, whichever made `array`."""
    if isinstance(array, (np.ndarray, np.generic)):
        return np
    import cupy

    return cupy


# --------------------------------------------------------------------------- conversions


@lru_cache(maxsize=1)
def _cupy_casts() -> tuple[Any, Any]:
    """float32 -> float64 and back on CuPy, without flushing subnormals."""
    import cupy

    widen = cupy.ElementwiseKernel(
        "float32 a", "float64 b", 'asm("cvt.f64.f32 %0, %1;" : "=d"(b) : "f"(a));', "mok_widen"
    )
    narrow = cupy.ElementwiseKernel(
        "float64 a", "float32 b", 'asm("cvt.rn.f32.f64 %0, %1;" : "=f"(b) : "d"(a));', "mok_narrow"
    )
    return widen, narrow


def to_float64(value: Array) -> Array:
    """Exact conversion of float32 (or float64) to float64, subnormals kept."""
    if value.dtype == np.float64:
        return value
    if array_module(value) is np:
        with np.errstate(invalid="ignore"):  # a signaling NaN becomes a quiet one
            return value.astype(np.float64)
    return _cupy_casts()[0](value)


def to_float32(value: Array) -> Array:
    """float64 rounded to nearest even float32, subnormals kept."""  # RNE
    if value.dtype == np.float32:
        return value
    if array_module(value) is np:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return value.astype(np.float32)
    return _cupy_casts()[1](value)


def to_bf16(value: Array) -> Array:
    """bf16(v): float32 rounded to the nearest even bf16, carried in float32 (spec eq. 2.1).

    NaN becomes the canonical NaN, overflow becomes Inf. float64 passes through (oracle).
    CUDA: cuda_src/numerics.cuh: float_to_bf16
    """
    if value.dtype == np.float64:
        return value
    xp = array_module(value)
    bits = xp.ascontiguousarray(value).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000  # RNE
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return xp.where(is_nan, FLOAT32_NAN, rounded).astype(np.uint32).view(np.float32)


def bf16_to_bits(value: Array) -> Array:
    """uint16 bits of bf16 values carried in float32; every NaN as 0x7FC0."""
    xp = array_module(value)
    bits = xp.ascontiguousarray(value).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return xp.where(is_nan, BF16_NAN, (bits >> 16).astype(np.uint16))


def bits_to_bf16(bits: Array) -> Array:
    """float32 values of bf16 bits (uint16 or ml_dtypes.bfloat16). Exact."""
    xp = array_module(bits)
    raw = xp.ascontiguousarray(bits).view(np.uint16)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def as_values(array: Array) -> Array:
    """Values to compute with: bf16 bits become float32, float32 and float64 stay.

    Raises: ValueError for anything else, whose bits would be read as what they are not.
    """
    dtype = getattr(array, "dtype", None)
    if isinstance(dtype, np.dtype):  # NumPy holds None equal to float64
        if dtype in _REAL_DTYPES:
            return array
        if dtype in _BF16_DTYPES:
            return bits_to_bf16(array)
    raise ValueError(
        "values must be an array of bfloat16, uint16 (bf16 bits), float32 or float64, "
        f"got {type(array).__name__ if dtype is None else dtype}"
    )


def canonical_nan(array: Array) -> Array:
    """The same array with every NaN written as 0x7FC0 / 0x7FC00000 (files and digests)."""
    xp = array_module(array)
    if array.dtype == np.uint16 or array.dtype == BFLOAT16:
        bits = xp.ascontiguousarray(array).view(np.uint16)
        return xp.where((bits & 0x7FFF) > 0x7F80, BF16_NAN, bits).view(array.dtype)
    if array.dtype == np.float32:
        bits = xp.ascontiguousarray(array).view(np.uint32)
        return xp.where((bits & 0x7FFFFFFF) > 0x7F800000, FLOAT32_NAN, bits).view(np.float32)
    return array


# --------------------------------------------------------------------------- arithmetic


def _quiet() -> Any:
    return np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")


def _binary(name: str, a: Array, b: Array) -> Array:
    """One IEEE operation, rounded once to the arrays' precision."""
    a, b = _same_kind(a, b)
    xp = array_module(a)
    with _quiet():
        if xp is np or a.dtype == np.float64:
            return getattr(xp, name)(a, b)
        return to_float32(getattr(xp, name)(to_float64(a), to_float64(b)))


def _same_kind(a: Array, b: Array) -> tuple[Array, Array]:
    """Python numbers take the array's dtype; float32 next to float64 widens (oracle).

    A NumPy scalar next to a CuPy array moves to the device: NumPy would hand the operation to
    CuPy's own kernel, which flushes subnormal results.
    """
    if isinstance(a, np.generic) and array_module(b) is not np:
        a = array_module(b).asarray(a)
    if isinstance(b, np.generic) and array_module(a) is not np:
        b = array_module(a).asarray(b)
    if not hasattr(a, "dtype"):
        a = array_module(b).asarray(a, b.dtype)
    if not hasattr(b, "dtype"):
        b = array_module(a).asarray(b, a.dtype)
    if a.dtype != b.dtype:
        a, b = to_float64(a), to_float64(b)
    return a, b


def mul(a: Array, b: Array) -> Array:
    """a * b, rounded once."""  # RNE
    return _binary("multiply", a, b)


def add(a: Array, b: Array) -> Array:
    """a + b, rounded once."""  # RNE
    return _binary("add", a, b)


def sub(a: Array, b: Array) -> Array:
    """a - b, rounded once."""  # RNE
    return _binary("subtract", a, b)


def div(a: Array, b: Array) -> Array:
    """a / b, rounded once."""  # RNE
    return _binary("divide", a, b)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once (CUDA `__fmaf_rn`), for float32 (spec eq. 2.2).

    The product is exact in float64. The sum's error comes from two-sum; if there is one and the
    sum's last bit is even, the sum moves one float64 ulp toward the exact value (round to odd), so
    that the final rounding to float32 is the only one.
    """
    a, b = _same_kind(a, b)
    a, c = _same_kind(a, c)
    xp = array_module(a)
    with _quiet():
        if a.dtype == np.float64:
            return a * b + c
        product = to_float64(a) * to_float64(b)  # exact: 24 + 24 bits
        addend = to_float64(c) + xp.zeros_like(product)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        bits = xp.ascontiguousarray(total).view(np.int64)
        inexact = (error != 0) & ((bits & 1) == 0) & xp.isfinite(total)
        toward = xp.where((error > 0) == (total > 0), 1, -1)
        odd = xp.where(inexact, bits + toward, bits).astype(np.int64).view(np.float64)
        return to_float32(odd)


_EXP_MODE = threading.local()


@contextmanager
def fast_exp() -> Iterator[None]:
    """Inside, `exp` of this thread is NumPy's own: for long runs with arithmetic="fast" only."""
    before = getattr(_EXP_MODE, "fast", False)
    _EXP_MODE.fast = True
    try:
        yield
    finally:
        _EXP_MODE.fast = before


def exp(x: Array) -> Array:
    """exp(x) by range reduction and a polynomial, error below 1 ulp (spec eq. 2.3).

        x = fmin(fmax(x, -87), 88);  n = fma(x, log2 e, 1.5*2^23) - 1.5*2^23
        r = fma(n, -ln2_hi, x);  r = fma(n, ln2_lo, r)
        p = Horner in r;  y = fma(p, r*r, r) + 1;  result y * 2^n (added to the exponent)

    x, result: float32 (float64: the true exponential).  NaN counts as -87.
    Source: coefficients of Cephes `expf`.
    CUDA:   cuda_src/numerics.cuh: exp_rn
    """
    xp = array_module(x)
    with _quiet():
        if x.dtype == np.float64:
            return xp.exp(x)
        if getattr(_EXP_MODE, "fast", False):
            return xp.exp(xp.fmin(xp.fmax(x, np.float32(-87)), np.float32(88)))
    wide = xp.fmin(xp.fmax(to_float64(x), -87.0), 88.0)
    x = to_float32(wide)  # exact: the bounds are float32
    shifted = fma(x, _LOG2E, _MAGIC)
    n = sub(shifted, _MAGIC)
    r = fma(n, _LN2_LO, fma(n, _LN2_HI, x))
    p = xp.full_like(r, _EXP_P0)
    for coefficient in _EXP_POLY:
        p = fma(p, r, coefficient)
    y = add(fma(p, mul(r, r), r), np.float32(1))
    bits = xp.ascontiguousarray(y).view(np.int32) + (n.astype(np.int32) << 23)
    return bits.astype(np.int32).view(np.float32)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)): negation exact, one addition, one division (spec eq. 2.4).

    CUDA: cuda_src/numerics.cuh: sigmoid
    """
    one = x.dtype.type(1)
    return div(one, add(one, exp(-x)))


def dot128(products: Array) -> Array:
    """Sum each row of `products` in the order an accumulator fragment has (spec eq. 2.5).

    products  (rows, columns) float32
    Returns   (rows,) float32
    Order:  columns in blocks of 128 (missing columns are +0). Inside a block column
            c = 8i + 2q + j (i < 16, q < 4, j < 2): S_q adds i ascending, j = 0 then 1, from +0;
            block = (S_0 + S_1) + (S_2 + S_3); blocks ascending, from +0.
    CUDA:   cuda_src/numerics.cuh: dot128_block
    """
    xp = array_module(products)
    rows, columns = products.shape
    blocks = -(-columns // _DOT_BLOCK)
    padded = xp.zeros((rows, blocks * _DOT_BLOCK), products.dtype)
    padded[:, :columns] = products
    lanes = padded.reshape(rows, blocks, 16, 4, 2)
    partial = xp.zeros((rows, blocks, 4), products.dtype)
    for i in range(16):
        for j in range(2):
            partial = add(partial, lanes[:, :, i, :, j])
    block_sums = add(add(partial[..., 0], partial[..., 1]), add(partial[..., 2], partial[..., 3]))
    total = xp.zeros(rows, products.dtype)
    for block in range(blocks):
        total = add(total, block_sums[:, block])
    return total
