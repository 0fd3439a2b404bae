"""Independent oracles: exact integers and fractions, brute force, one dense layer without ranks.

Nothing here calls the function it judges. Slow on purpose.
"""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np

# --------------------------------------------------------------------------- exact numbers


def fraction(value: float) -> Fraction:
    """The exact value of a finite float."""
    return Fraction(float(value))


def floor_log2(value: Fraction) -> int:
    """floor(log2 |v|) of a non-zero fraction."""
    n, d = abs(value.numerator), value.denominator
    e = n.bit_length() - d.bit_length()
    return e if n >= d * Fraction(2) ** e else e - 1


def truncate(value: Fraction, exponent: int) -> Fraction:
    """Toward zero to a multiple of 2^exponent."""
    unit = Fraction(2) ** exponent
    steps = abs(value) / unit
    whole = steps.numerator // steps.denominator
    return (whole if value >= 0 else -whole) * unit


def round_to_even(value: Fraction, exponent: int) -> Fraction:
    """To the nearest multiple of 2^exponent, ties to an even multiple."""
    unit = Fraction(2) ** exponent
    return round(value / unit) * unit


def float32_nearest(value: Fraction) -> float:
    """The fraction rounded once to float32, nearest even (a zero comes out as +0)."""
    if value == 0:
        return 0.0
    rounded = round_to_even(value, max(floor_log2(value) - 23, -149))
    if abs(rounded) >= Fraction(2) ** 128:
        return np.inf if value > 0 else -np.inf
    return float(rounded)


# --------------------------------------------------------------------------- the tensor core


def _operand_exponent(value: Fraction) -> int:
    return max(floor_log2(value), -126)


def tc_group(a: list[float], b: list[float], acc: float, frac: int = 25, zero: int = -133) -> float:
    """One group of products added to one accumulator, in exact arithmetic (spec eq. 3.1 - 3.4)."""
    products = [np.float64(x) * np.float64(y) for x, y in zip(a, b, strict=True)]
    if not np.isfinite([*products, acc]).all():
        with np.errstate(invalid="ignore"):
            return float(np.float64(acc) + np.sum(np.array(products)))
    exact = [(fraction(x), fraction(y)) for x, y in zip(a, b, strict=True) if x != 0 and y != 0]
    exponents = [_operand_exponent(x) + _operand_exponent(y) for x, y in exact]
    start = fraction(acc)
    exponents.append(zero if start == 0 else _operand_exponent(start))
    unit = max(exponents) - frac
    total = sum((truncate(x * y, unit) for x, y in exact), truncate(start, unit))
    if total == 0:
        return 0.0
    kept = truncate(total, max(floor_log2(total) - 23, -149))
    if abs(kept) >= Fraction(2) ** 128:
        return float(np.copysign(np.inf, float(np.sign(kept.numerator))))
    return float(kept)


def tc_exact(a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, **rule: int) -> np.ndarray:
    """tc() one output at a time; a (M, K), b (N, K) hold bf16 values."""
    out = np.zeros((len(a), len(b)), np.float32)
    for i, j in np.ndindex(*out.shape):
        acc = 0.0 if c is None else float(c[i, j])
        for k in range(0, a.shape[1], 16):
            acc = tc_group(a[i, k : k + 16].tolist(), b[j, k : k + 16].tolist(), acc, **rule)
        out[i, j] = acc
    return out


# --------------------------------------------------------------------------- scalars


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounding by ml_dtypes, carried in float32."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def exp_by_fractions(x: float) -> float:
    """The contract's exp with every rounding made on exact fractions."""

    def fma(a: float, b: float, c: float) -> float:
        return float32_nearest(fraction(a) * fraction(b) + fraction(c))

    def const(value: float) -> float:
        return float(np.float32(value))

    x = -87.0 if np.isnan(x) else min(max(x, -87.0), 88.0)
    magic = 12582912.0
    n = float32_nearest(fraction(fma(x, const(1.44269504), magic)) - fraction(magic))
    r = fma(n, const(-0.693359375), x)
    r = fma(n, const(2.12194440e-4), r)
    p = const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, const(c))
    square = float32_nearest(fraction(r) * fraction(r))
    y = float32_nearest(fraction(fma(p, square, r)) + 1)
    return float(fraction(y) * Fraction(2) ** int(n))


def dot128_by_loops(row: np.ndarray) -> np.float32:
    """dot128 of one row, scalar after scalar."""
    total = np.float32(0)
    for first in range(0, len(row), 128):
        block = np.zeros(128, np.float32)
        block[: len(row[first : first + 128])] = row[first : first + 128]
        s = [np.float32(0)] * 4
        for q in range(4):
            for i in range(16):
                for j in range(2):
                    s[q] = np.float32(s[q] + block[8 * i + 2 * q + j])
        total = np.float32(total + np.float32(np.float32(s[0] + s[1]) + np.float32(s[2] + s[3])))
    return total


# --------------------------------------------------------------------------- the row order


def bit_reverse(token: int, num_tokens: int) -> int:
    """The token's bits written backwards, as text."""
    bits = 1
    while 2**bits < num_tokens:
        bits += 1
    return int(f"{token:0{bits}b}"[::-1], 2)


def canonical_rows(topk_ids: np.ndarray, expert: int) -> list[tuple[int, int]]:
    """(token, slot) of an expert's rows, sorted by (bitreverse(token), slot)."""
    routes = [(t, k) for t, k in np.ndindex(*topk_ids.shape) if topk_ids[t, k] == expert]
    return sorted(routes, key=lambda r: (bit_reverse(r[0], len(topk_ids)), r[1]))


def round_robin_rows(topk_ids: np.ndarray, expert: int, counts: list[int]) -> list[tuple[int, int]]:
    """The same by queues: ranks take turns, exhausted ones are skipped."""
    queues, first = [], 0
    for count in counts:
        tokens = range(first, first + count)
        queues.append([(t, k) for t in tokens for k in range(topk_ids.shape[1])])
        queues[-1] = [r for r in queues[-1] if topk_ids[r] == expert]
        first += count
    rows = []
    while any(queues):
        rows += [queue.pop(0) for queue in queues if queue]
    return rows
