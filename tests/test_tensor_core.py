"""tc(): exact integer arithmetic, whole small domains, chains, tiles, and what must not change.

The pure-Python oracle in oracles.py implements spec section 3 with fractions. The cross-check
against `mmasim` (MMA-Sim, arXiv 2511.10909) keeps to normal numbers: that model counts a zero
accumulator as 2^-126 where an H200 behaves as 2^-133, which shows only near underflow.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracles import tc_exact

from mok_ref import tc, tensor_core
from mok_ref.numerics import bf16_to_bits, bits_to_bf16, to_bf16
from mok_ref.testing import assert_bitwise_equal

KINDS = ("normal", "wide", "very-wide", "tiny", "sparse", "bits", "special", "signed-zero")


def operand(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """bf16 values of one kind, carried in float32."""
    x = rng.standard_normal(shape)
    if kind == "wide":
        x *= 2.0 ** rng.integers(-20, 20, shape)
    elif kind == "very-wide":
        x *= 2.0 ** rng.integers(-60, 60, shape)
    elif kind == "tiny":
        x *= 2.0 ** rng.integers(-133, -60, shape)
    elif kind == "sparse":
        x *= rng.random(shape) < 0.2
    elif kind == "bits":
        bits = rng.integers(0, 65536, shape, dtype=np.uint16)
        bits = np.where((bits & 0x7F80) == 0x7F80, bits & 0xBFFF, bits).astype(np.uint16)
        return bits_to_bf16(bits)
    elif kind == "special":
        q = rng.random(shape)
        x = np.where(q < 0.02, np.inf, np.where(q < 0.04, -np.inf, np.where(q < 0.05, np.nan, x)))
    elif kind == "signed-zero":
        x = np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    return to_bf16(x.astype(np.float32))


def accumulator(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    c = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)
    if kind == "tiny":
        c *= 2.0**-120
    if kind == "signed-zero":
        c = np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    return c.astype(np.float32)


# --------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("depth", [1, 16, 17, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_tc_is_exact_integer_arithmetic(kind: str, depth: int) -> None:
    rng = np.random.default_rng([depth, KINDS.index(kind)])
    a, b = operand(rng, (7, depth), kind), operand(rng, (6, depth), kind)
    for c in (None, accumulator(rng, (7, 6), kind)):
        assert_bitwise_equal(tc(a, b, c), tc_exact(a, b, c))


def test_mixed_exponents_and_subnormal_results() -> None:
    """Products from 2^-266 to 2^127 in one group, accumulators at both ends."""
    rng = np.random.default_rng(11)
    exponents = rng.integers(-133, 64, (40, 16))
    a = to_bf16((rng.standard_normal((40, 16)) * 2.0**exponents).astype(np.float32))
    b = to_bf16(
        (rng.standard_normal((5, 16)) * 2.0 ** rng.integers(-133, 60, (5, 16))).astype("f4")
    )
    c = np.full((40, 5), 1e-44, np.float32)
    c[::2] = np.float32(-3e38)
    result = tc(a, b, c)
    assert_bitwise_equal(result, tc_exact(a, b, c))
    a, b = to_bf16(a * np.float32(2.0**-60)), to_bf16(b * np.float32(2.0**-40))
    tiny = tc(a, b)
    assert_bitwise_equal(tiny, tc_exact(a, b))
    assert ((tiny != 0) & (np.abs(tiny) < 2.0**-126)).any()


@pytest.mark.parametrize("exponents", [range(-150, -84), range(88, 127)], ids=["low", "high"])
def test_every_alignment_exponent(exponents: range) -> None:
    """A tile whose products all lie near 2^e, with small ones below: both ways to add meet here."""
    rng = np.random.default_rng(23)
    for e in exponents:
        small = 2.0 ** -rng.integers(0, 12, (5, 16))
        a = to_bf16((rng.standard_normal((5, 16)) * small * 2.0 ** (e // 2)).astype(np.float32))
        b = to_bf16((rng.standard_normal((4, 16)) * 2.0 ** (e - e // 2)).astype(np.float32))
        assert_bitwise_equal(tc(a, b), tc_exact(a, b), f"{e=}")


def test_single_products_exhaustively() -> None:
    """Every bf16 with 60 others: one product has 16 bits, so only range can cut it."""
    values = bits_to_bf16(np.arange(65536, dtype=np.uint16))
    values = values[np.isfinite(values)]
    others = values[np.random.default_rng(12).integers(0, len(values), 60)]
    others[:4] = to_bf16(np.float32([1.0, -0.0, 1e-40, 3e38]))
    with np.errstate(all="ignore"):
        exact = values[:, None].astype(np.float64) * others.astype(np.float64)
        nearest = exact.astype(np.float32)
        too_far = np.abs(nearest.astype(np.float64)) > np.abs(exact)
        toward_zero = np.where(too_far, np.nextafter(nearest, np.float32(0)), nearest)
    overflow = np.abs(exact) >= 2.0**128
    expected = np.where(overflow, np.copysign(np.inf, exact), toward_zero).astype(np.float32)
    assert_bitwise_equal(tc(values[:, None], others[:, None]), expected + np.float32(0))


def test_two_products_and_accumulator_on_a_small_domain() -> None:
    """All triples of 24 awkward values as products next to 8 accumulators."""
    small = np.array([0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0xBFFF], np.uint16)
    large = np.array([0x4B80, 0xCB7F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x3400], np.uint16)
    values = bits_to_bf16(np.concatenate([small, large]))
    pairs = np.array([(p, q) for p in values for q in values], np.float32)
    ones = bits_to_bf16(np.array([[0x3F80, 0x3F80], [0x3FC0, 0xBF80]], np.uint16))
    for acc in (0.0, -0.0, 1e-45, 1.0, -16777215.0, 3.4e38, -np.inf, np.nan):
        c = np.full((len(pairs), 2), acc, np.float32)
        assert_bitwise_equal(tc(pairs, ones, c), tc_exact(pairs, ones, c), f"{acc=}")


@pytest.mark.parametrize("kind", ["normal", "wide", "sparse"])
def test_tc_agrees_with_mmasim(kind: str) -> None:
    mmasim = pytest.importorskip(
        "mmasim.nv_ptx", reason='mmasim is missing: pip install ".[oracle]"'
    )
    torch = pytest.importorskip("torch", reason="mmasim needs torch")
    unit = mmasim.MMA("Hopper", "m16n8k16.f32.bf16.bf16.f32")
    rng = np.random.default_rng(13)
    for _ in range(8):
        a, b = operand(rng, (16, 16), kind), operand(rng, (8, 16), kind)
        c = accumulator(rng, (16, 8), kind)
        left = torch.from_numpy(a).bfloat16()
        right = torch.from_numpy(b).bfloat16().T.contiguous()
        theirs = unit(left, right, torch.from_numpy(c)).numpy()
        assert_bitwise_equal(tc(a, b, c), theirs)


# --------------------------------------------------------------------------- the two (!) details


def test_product_exponent_is_that_of_the_operands() -> None:
    """1.5 * 1.5 = 2.25 aligns as 2^0, so a term of 2^-25 next to it survives."""
    ones = np.float32([[1.5, -1.5, 1.0]])
    assert tc(np.float32([[1.5, 1.5, 2.0**-25]]), ones)[0, 0] == 2.0**-25
    ones[0, :2] = 1, -1
    assert tc(np.float32([[2.25, 2.25, 2.0**-25]]), ones)[0, 0] == 0  # 2.25 * 1 aligns as 2^1


def test_zero_accumulator_counts_as_2_to_the_minus_133() -> None:
    """16 products of 1.75 * 2^-151: all their bits count. With -126 only 4 ulps would be left."""
    a = np.full((1, 16), 1.75 * 2.0**-75, np.float32)
    b = np.full((1, 16), 2.0**-76, np.float32)
    assert tc(a, b).view(np.uint32)[0, 0] == 7
    assert tc_exact(a, b, zero=-126).view(np.uint32)[0, 0] == 4


@pytest.mark.parametrize("rule", [{"frac": 24}, {"frac": 26}, {"zero": -126}])
def test_another_rule_is_detected(rule: dict[str, int]) -> None:
    """The comparison is sharp: an oracle with one parameter off disagrees."""
    rng = np.random.default_rng(14)
    kind = "tiny" if "zero" in rule else "wide"
    a, b = operand(rng, (20, 16), kind), operand(rng, (20, 16), kind)
    if kind == "tiny":
        a, b = (to_bf16((rng.standard_normal((20, 16)) * 2.0**-75).astype("f4")) for _ in range(2))
    assert (tc(a, b).view(np.uint32) != tc_exact(a, b, **rule).view(np.uint32)).any()


def test_tc_is_not_ieee() -> None:
    rng = np.random.default_rng(15)
    a, b = operand(rng, (30, 64), "normal"), operand(rng, (30, 64), "normal")
    assert (tc(a, b) != a @ b.T).any()


# --------------------------------------------------------------------------- chains and tiles


@pytest.mark.parametrize("kind", KINDS)
def test_chain_may_be_cut_at_any_multiple_of_16(kind: str) -> None:
    rng = np.random.default_rng(16)
    a, b = operand(rng, (9, 150), kind), operand(rng, (8, 150), kind)
    whole = tc(a, b)
    for cut in range(0, 160, 16):
        assert_bitwise_equal(tc(a[:, cut:], b[:, cut:], tc(a[:, :cut], b[:, :cut])), whole)
    steps = None
    for k in range(0, 150, 16):
        steps = tc(a[:, k : k + 16], b[:, k : k + 16], steps)
    assert_bitwise_equal(steps, whole)


def test_a_cut_inside_a_group_shows() -> None:
    rng = np.random.default_rng(17)
    a, b = operand(rng, (20, 64), "normal"), operand(rng, (20, 64), "normal")
    assert (tc(a[:, 8:], b[:, 8:], tc(a[:, :8], b[:, :8])) != tc(a, b)).any()


def test_order_of_groups_shows() -> None:
    rng = np.random.default_rng(18)
    a, b = operand(rng, (20, 64), "normal"), operand(rng, (20, 64), "normal")
    assert (tc(np.roll(a, 16, 1), np.roll(b, 16, 1)) != tc(a, b)).any()
    inside = np.arange(64).reshape(4, 16)[:, ::-1].ravel()  # order inside a group is free
    assert_bitwise_equal(tc(a[:, inside], b[:, inside]), tc(a, b))


@pytest.mark.parametrize("kind", ["normal", "bits", "special"])
def test_tiles_rows_and_neighbours_change_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output alone, in any row, next to anything, in any tile: the same bits."""
    rng = np.random.default_rng(19)
    a, b = operand(rng, (33, 48), kind), operand(rng, (29, 48), kind)
    whole = tc(a, b)
    for i, j in ((0, 0), (32, 28), (7, 11), (20, 3)):
        assert_bitwise_equal(tc(a[i : i + 1], b[j : j + 1]), whole[i : i + 1, j : j + 1])
    order = rng.permutation(33)
    assert_bitwise_equal(tc(a[order], b), whole[order])
    assert_bitwise_equal(tc(b, a), whole.T.copy())
    for tile in ((3, 5), (64, 4)):
        monkeypatch.setattr(tensor_core, "_tile_shape", lambda rows, tile=tile: tile)
        assert_bitwise_equal(tc(a, b), whole)


def test_depth_is_padded_with_zeros() -> None:
    rng = np.random.default_rng(20)
    a, b = operand(rng, (5, 21), "wide"), operand(rng, (4, 21), "wide")
    pad = ((0, 0), (0, 11))
    assert_bitwise_equal(tc(np.pad(a, pad), np.pad(b, pad)), tc(a, b))


def test_no_depth_gives_back_the_accumulator() -> None:
    c = np.array([[-0.0, 1.5], [np.inf, 1e-45]], np.float32)
    assert_bitwise_equal(tc(np.zeros((2, 0), "f4"), np.zeros((2, 0), "f4"), c), c)
    zero = tc(np.zeros((2, 0), "f4"), np.zeros((2, 0), "f4"))
    assert_bitwise_equal(zero, np.zeros((2, 2), np.float32))


def test_no_rows() -> None:
    assert tc(np.zeros((0, 16), "f4"), np.zeros((3, 16), "f4")).shape == (0, 3)


def test_zero_sums_are_positive_zero() -> None:
    one, minus = np.float32([[1.0, 1.0]]), np.float32([[1.0, -1.0]])
    for c in (None, np.float32([[-0.0]])):
        assert tc(one, minus, c).view(np.uint32)[0, 0] == 0
    assert tc(np.float32([[-0.0]]), one[:, :1], np.float32([[-0.0]])).view(np.uint32)[0, 0] == 0


# --------------------------------------------------------------------------- interface


def test_bits_and_values_are_the_same_operands() -> None:
    rng = np.random.default_rng(21)
    a, b = operand(rng, (3, 20), "normal"), operand(rng, (2, 20), "normal")
    assert_bitwise_equal(tc(bf16_to_bits(a), bf16_to_bits(b)), tc(a, b))


def test_other_arithmetics_are_close() -> None:
    """fast: 40 float32 roundings; tc itself: 3 groups (see dense._tc_error)."""
    rng = np.random.default_rng(22)
    a, b = operand(rng, (6, 40), "normal"), operand(rng, (5, 40), "normal")
    c = accumulator(rng, (6, 5), "normal")
    oracle = tc(a, b, c, arithmetic="float64")
    assert oracle.dtype == np.float64
    size = np.abs(a).astype(float) @ np.abs(b.T) + np.abs(c)
    assert (np.abs(tc(a, b, c, arithmetic="fast") - oracle) <= 41 * 2.0**-24 * size).all()
    assert (np.abs(tc(a, b, c) - oracle) <= 3 * 2.0**-20.5 * size).all()


@pytest.mark.parametrize(
    ("a", "b", "c", "arithmetic", "message"),
    [
        ((2, 3), (2, 4), None, "exact", r"tc needs a \(M, K\) and b \(N, K\), got .*\(2, 4\)"),
        ((2,), (2, 4), None, "exact", "tc needs a"),
        ((2, 3), (5, 3), (5, 2), "exact", r"tc needs c \(2, 5\), got .*\(5, 2\)"),
        ((2, 3), (5, 3), None, "quick", "arithmetic must be exact, fast or float64, got 'quick'"),
    ],
)
def test_bad_input_is_named(a, b, c, arithmetic, message) -> None:
    start = None if c is None else np.zeros(c, np.float32)
    with pytest.raises(ValueError, match=message):
        tc(np.zeros(a, np.float32), np.zeros(b, np.float32), start, arithmetic)


def test_operands_that_are_not_bf16_are_refused() -> None:
    """float32 numbers that bf16 does not hold; NaNs of any payload are one NaN."""
    good, bad = np.ones((2, 16), np.float32), np.full((3, 16), 0.5, np.float32)
    bad[1, 4] = np.float32(0.1)
    with pytest.raises(ValueError, match=r"^a must hold bf16 values .*, got 0.1 at \[1, 4\]$"):
        tc(bad, good)
    with pytest.raises(ValueError, match=r"^b must hold bf16 values .*, got 0.1 at \[1, 4\]$"):
        tc(good, bad)
    bad[1, 4] = np.array(0x7F800001, np.uint32).view(np.float32)
    assert np.isnan(tc(bad, good)[1]).all() and (tc(bad, good)[0] == 8).all()


@pytest.mark.parametrize("arithmetic", ["exact", "fast", "float64"])
def test_the_accumulator_is_float32(arithmetic: str) -> None:
    """float64 for the oracle too; other dtypes are not converted, lists are no arrays."""
    a = np.zeros((2, 16), np.uint16)
    tc(a, a, np.ones((2, 2), np.float32), arithmetic)
    wide = np.ones((2, 2))
    if arithmetic == "float64":
        assert tc(a, a, wide, arithmetic).dtype == np.float64
    refused = [wide.astype(np.uint16), wide.astype(int), wide.astype(np.float16), wide.tolist()]
    for c in refused + [wide] * (arithmetic != "float64"):
        with pytest.raises(ValueError, match=r"^c must be float32( or float64)?, got "):
            tc(a, a, c, arithmetic)


def test_no_warning_on_huge_operands() -> None:
    huge = np.full((2, 16), 0x7F7F, np.uint16)
    for arithmetic in ("exact", "fast", "float64"):
        assert tc(huge, huge, None, arithmetic).shape == (2, 2)
    wide = np.array([[1e300, -1e300, np.inf]])
    assert np.isnan(tc(wide, np.array([[1e300, 1e300, 0]]), None, "float64")).all()
