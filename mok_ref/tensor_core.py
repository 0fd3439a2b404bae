"""tc(): the matrix product of a Hopper tensor core, to the last bit.

A tensor core does not add as IEEE does. Per output it takes 16 products at a time, aligns them and
the accumulator to the largest exponent, drops what lies below 2^(E-25), adds exactly and truncates
to float32. That is a fixed function of the inputs, and this module is that function.

Measured on an NVIDIA H200 against `wgmma` and `mma.sync` (docs/device_checks.md). By the published
MMA-Sim study (arXiv 2511.10909) Blackwell's bf16 unit has the same parameters, Ampere and Ada have
24 bits and two groups of 8; only Hopper was measured here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.numerics import Array, array_module, as_values, to_float32, to_float64

GROUP = 16  # products that enter one alignment
FRACTION_BITS = 25  # terms are truncated to multiples of 2^(E - FRACTION_BITS)
ZERO_ACC_EXPONENT = -133  # what a zero accumulator counts as
MIN_EXPONENT = -126  # subnormal operands count as this
SUBNORMAL_ULP = -149

_NO_EXPONENT = -16384  # code for "this product is zero"; two of them still fit int16
_FLOAT32_SAFE_LOW = -90  # alignment exponents between which float32 products lose nothing
_FLOAT32_SAFE_HIGH = 100
_TILE_M = 64  # rows of a block of outputs
_TILE_AREA = 16384  # outputs of a block: its work arrays stay in the L2 cache
_CUPY_TILE = 4096
_MANTISSA_24 = np.int64(-(1 << 29))  # float64 bits that survive truncation to 24 bits


def tc(a: Array, b: Array, c: Array | None = None, arithmetic: str = "exact") -> Array:
    """The tensor-core product a @ b.T + c (spec eq. 3.1 - 3.4).

    a  (M, K) bf16      b  (N, K) bf16      c  (M, N) float32, or None for +0
    Operands are bf16 bits (uint16, ml_dtypes.bfloat16) or float32 arrays that hold bf16 values
    (looked at for "exact" on NumPy, where that costs below 2 % of the product).
    Returns  (M, N) float32 (float64 for arithmetic="float64")
    Order:  K ascending in groups of 16, the last one padded with +0; one accumulator per output.
            A chain may be cut at any multiple of 16 and resumed through `c`.
    arithmetic: "exact" (this contract), "fast" (BLAS float32, no bit promise), "float64" (oracle).
    Raises: ValueError if shapes or dtypes do not fit, a float32 operand does not hold bf16 values,
            or `arithmetic` is unknown.
    CUDA:   cuda_src/tensor_core.cuh: tc_k64 (wgmma); cuda_src/portable.cuh: tc_group
    """
    a, b = as_values(a), as_values(b)
    _check_accumulator(c, arithmetic)
    _check_shapes(a, b, c)
    if arithmetic != "exact":
        with np.errstate(all="ignore"):
            if arithmetic == "float64":
                a, b, c = to_float64(a), to_float64(b), None if c is None else to_float64(c)
            product = a @ b.T
            return product if c is None else product + c
    _check_values("a", a)
    _check_values("b", b)
    return _tc_exact(a, b, c)


def _check_accumulator(c: Array | None, arithmetic: str) -> None:
    """`c` is an accumulator: float32, for the oracle float64 too."""
    allowed = {"exact": ("float32",), "fast": ("float32",), "float64": ("float32", "float64")}
    if arithmetic not in allowed:
        raise ValueError(f"arithmetic must be exact, fast or float64, got {arithmetic!r}")
    if c is not None and str(getattr(c, "dtype", None)) not in allowed[arithmetic]:
        got = getattr(c, "dtype", type(c).__name__)
        raise ValueError(f"c must be {' or '.join(allowed[arithmetic])}, got {got}")


def _check_shapes(a: Array, b: Array, c: Array | None) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"tc needs a (M, K) and b (N, K), got {a.shape=}, {b.shape=}")
    if c is not None and c.shape != (a.shape[0], b.shape[0]):
        raise ValueError(f"tc needs c {(a.shape[0], b.shape[0])}, got {c.shape=}")


def _check_values(name: str, values: Array) -> None:
    """Refuse float32 numbers that bf16 does not hold: the product would mean nothing.

    Not below 2^-126, where MXFP8 codes stand for numbers finer than bf16's.
    """
    if array_module(values) is not np or values.dtype != np.float32 or not values.size:
        return
    bits = values.view(np.uint32)
    if not np.bitwise_or.reduce(bits, axis=None) & 0xFFFF:  # one pass, no temporary array
        return
    bad = ((bits & 0xFFFF) != 0) & (np.abs(values) >= 2.0**MIN_EXPONENT)  # false for NaN
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name} must hold bf16 values (numerics.to_bf16 rounds), "
            f"got {values[row, column]!s} at [{row}, {column}]"
        )


def _tc_exact(a: Array, b: Array, c: Array | None) -> Array:
    """Walk the outputs in tiles; tiles never share an accumulator."""
    xp = array_module(a)
    rows, columns = a.shape[0], b.shape[0]
    out = xp.zeros((rows, columns), np.float32)
    if a.shape[1] == 0:  # no group: the chain ends where it started
        return out if c is None else to_float32(c).copy()
    left, right = _Operand(a), _Operand(b)
    tile_m, tile_n = _tile_shape(rows) if xp is np else (_CUPY_TILE, _CUPY_TILE)
    with np.errstate(all="ignore"):
        for i in range(0, rows, tile_m):
            for j in range(0, columns, tile_n):
                block = (slice(i, min(i + tile_m, rows)), slice(j, min(j + tile_n, columns)))
                start = None if c is None else to_float64(c[block])
                out[block] = _tile(left.part(block[0]), right.part(block[1]), start)
    return out


def _tile_shape(rows: int) -> tuple[int, int]:
    """Rows and columns of a block: few rows get wide blocks. No bit depends on it."""
    tile_m = min(_TILE_M, max(1, rows))
    return tile_m, _TILE_AREA // tile_m


class _Operand:
    """An operand along K first, with the exponent of every element and what is special."""

    def __init__(self, values: Array) -> None:
        xp = array_module(values)
        rows, depth = values.shape
        padded = xp.zeros((-(-depth // GROUP) * GROUP, rows), np.float32)
        padded[:depth] = values.T
        self.values = padded
        self.exponents = _operand_exponents(padded)
        self.finite = bool(xp.isfinite(padded).all())

    def part(self, rows: slice) -> _Operand:
        piece = object.__new__(_Operand)
        piece.values = self.values[:, rows]
        piece.exponents = self.exponents[:, rows]
        piece.finite = self.finite
        return piece


def _operand_exponents(values: Array) -> Array:
    """int16 max(floor(log2 |v|), -126); zero has none."""
    xp = array_module(values)
    bits = values.view(np.int32) & 0x7FFFFFFF
    exponent = xp.maximum((bits >> 23) - 127, MIN_EXPONENT)
    return xp.where(bits == 0, _NO_EXPONENT, exponent).astype(np.int16)


def _tile(a: _Operand, b: _Operand, start: Array | None) -> Array:
    """One tile of outputs through all groups of K; the accumulator is exact in float64."""
    xp = array_module(a.values)
    shape = (a.values.shape[1], b.values.shape[1])
    acc = xp.zeros(shape, np.float64) if start is None else start
    work = _Work(xp, shape)
    finite = a.finite and b.finite and bool(xp.isfinite(acc).all())
    for k in range(0, a.values.shape[0], GROUP):
        acc, finite = _group(a, b, k, acc, work, finite)
    return to_float32(acc)  # exact: acc already is a float32 value


class _Work:
    """Scratch arrays of one tile, allocated once."""

    def __init__(self, xp: Any, shape: tuple[int, int]) -> None:
        self.exponent = xp.empty(shape, np.int16)
        self.largest = xp.empty(shape, np.int16)
        self.product = xp.empty(shape, np.float32)
        self.integer = xp.empty(shape, np.int32)
        self.sum = xp.empty(shape, np.int32)


def _group(
    a: _Operand, b: _Operand, k: int, acc: Array, work: _Work, finite: bool
) -> tuple[Array, bool]:
    """One group of 16 products added to `acc`. Returns it and whether all of it is finite."""
    xp = array_module(acc)
    products_exponent = _largest_product_exponent(a, b, k, work)
    largest = xp.maximum(products_exponent, _acc_exponent(acc))  # E of every output
    scale = _power_of_two(FRACTION_BITS - largest)
    if finite and _float32_is_exact(xp, products_exponent):
        total = _sum_float32(a, b, k, largest, work)
    else:
        total = _sum_float64(a, b, k, scale)
    total = total + xp.trunc(acc * scale)  # RZ to 2^(E-25); the sum of integers is exact
    result = _truncate(total, scale, int(largest.min()))
    overflow = xp.abs(result) >= 2.0**128
    if bool(overflow.any()):
        result = xp.where(overflow, xp.copysign(np.inf, result), result)
    if not finite:
        result = _ieee_where_special(a, b, k, acc, result)
    return result, finite and not bool(overflow.any())


def _largest_product_exponent(a: _Operand, b: _Operand, k: int, work: _Work) -> Array:
    """max over the group of exponent(a) + exponent(b), per output."""
    xp = array_module(a.values)
    work.largest.fill(2 * _NO_EXPONENT)
    for i in range(k, k + GROUP):
        xp.add(a.exponents[i][:, None], b.exponents[i][None, :], out=work.exponent)
        xp.maximum(work.largest, work.exponent, out=work.largest)
    return work.largest


def _acc_exponent(acc: Array) -> Array:
    """int16 exponent of a float64 that holds a float32 value; zero counts as -133."""
    xp = array_module(acc)
    exponent = ((acc.view(np.int64) >> 52) & 0x7FF).astype(np.int16) - np.int16(1023)
    floor = xp.where(acc == 0, np.int16(ZERO_ACC_EXPONENT), np.int16(MIN_EXPONENT))
    return xp.maximum(exponent, floor)


def _power_of_two(exponent: Array) -> Array:
    """2^exponent as float64, exact."""
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def _float32_is_exact(xp: Any, products_exponent: Array) -> bool:
    """Whether float32 products, scaled by 2^(25-E), truncate to the right integers.

    They do where E is moderate: a product too small for float32 is then below 2^(E-25) anyway.
    Outputs whose products are all zero never matter.
    """
    low, high = int(products_exponent.min()), int(products_exponent.max())
    if high > _FLOAT32_SAFE_HIGH:
        return False
    if low >= _FLOAT32_SAFE_LOW:
        return True
    nonzero = products_exponent > _NO_EXPONENT // 2
    return not bool((nonzero & (products_exponent < _FLOAT32_SAFE_LOW)).any())


def _sum_float32(a: _Operand, b: _Operand, k: int, largest: Array, work: _Work) -> Array:
    """Sum of the truncated products in units of 2^(E-25).

    A product has 16 significant bits and is below 2^(E+2), so the scaled float32 is exact, its
    conversion to int32 truncates toward zero, and 16 of them stay below 2^31.
    """
    xp = array_module(a.values)
    bounded = xp.maximum(largest, _FLOAT32_SAFE_LOW).astype(np.int32)
    scale = ((127 + FRACTION_BITS - bounded) << 23).astype(np.int32).view(np.float32)
    work.sum.fill(0)
    for i in range(k, k + GROUP):
        xp.multiply(a.values[i][:, None], b.values[i][None, :], out=work.product)  # exact
        xp.multiply(work.product, scale, out=work.product)  # exact
        work.integer[...] = work.product  # RZ
        xp.add(work.sum, work.integer, out=work.sum)  # exact
    return work.sum


def _sum_float64(a: _Operand, b: _Operand, k: int, scale: Array) -> Array:
    """The same sum for any finite operands; special outputs are replaced afterwards."""
    xp = array_module(a.values)
    total = xp.zeros(scale.shape, np.float64)
    for i in range(k, k + GROUP):
        left, right = to_float64(a.values[i]), to_float64(b.values[i])
        total += xp.trunc(left[:, None] * right[None, :] * scale)  # exact product, RZ, exact sum
    return total


def _truncate(total: Array, scale: Array, smallest_exponent: int) -> Array:
    """The integer `total` / `scale`, truncated toward zero to float32; zero is +0."""
    xp = array_module(total)
    kept = (total.view(np.int64) & _MANTISSA_24).view(np.float64)  # RZ to 24 bits
    result = kept / scale  # exact: a power of two
    if smallest_exponent - FRACTION_BITS < SUBNORMAL_ULP:
        ulp = 2.0**SUBNORMAL_ULP
        result = xp.where(xp.abs(result) < 2.0**MIN_EXPONENT, xp.trunc(result / ulp) * ulp, result)
    return result + 0.0  # -0 becomes +0


def _ieee_where_special(a: _Operand, b: _Operand, k: int, acc: Array, result: Array) -> Array:
    """Where a product or `acc` is NaN or infinite, what IEEE addition gives instead."""
    xp = array_module(acc)
    total = acc.copy()
    for i in range(k, k + GROUP):
        total = total + to_float64(a.values[i])[:, None] * to_float64(b.values[i])[None, :]
    return xp.where(xp.isfinite(total), result, total)
