"""The whole layer: bits of the dense formula, real values, slopes, and what may not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import SIZES, Case, Sizes, ids_with_rows, make_case, rank_step, run_case
from dense import dense_layer, error_bounds

import mok_ref.layer
from mok_ref import ExpertWeights, Gradients, LocalHeap, Workspace, moe_backward, moe_forward
from mok_ref.heap import LocalWorld
from mok_ref.numerics import BFLOAT16, as_values, bf16_to_bits, to_bf16
from mok_ref.testing import assert_bitwise_equal, digest

WEIGHT_GRADS = ("dw_gate", "dw_up", "dw_down", "shared_dw_gate", "shared_dw_up", "shared_dw_down")


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same tensors with the same bits."""
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        got = actual[name]
        got, value = (v.view(np.uint16) if v.dtype == BFLOAT16 else v for v in (got, value))
        assert_bitwise_equal(got, value, name)


def single_heap() -> LocalHeap:
    return LocalWorld(1).heap(0)


# --------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SIZES)
def test_bits_of_the_dense_formula(name: str, ranks: int) -> None:
    """No ranks, no schedule, no ring in the oracle; an odd E is placed unevenly."""
    case = make_case(SIZES[name])
    placement = tuple(int(e == 0) for e in range(case.sizes.experts)) if ranks == 2 else None
    assert_same(run_case(case, ranks, placement=placement), dense_layer(case))


EXACT = [n for n, s in SIZES.items() if s.dtype == "bf16" and s.limit is None]


@pytest.mark.parametrize("name", EXACT)
def test_values_are_near_real_arithmetic(name: str) -> None:
    """float64 oracle; the bound of every element is derived in dense.error_bounds."""
    case = make_case(SIZES[name], seed=1)
    bounds = error_bounds(case)
    bits, real = run_case(case), run_case(case.widened(), arithmetic="float64")
    for name_, bound in bounds.items():
        assert real[name_].dtype == np.float64
        assert (np.abs(as_values(bits[name_]) - real[name_]) <= bound).all(), name_


@pytest.mark.parametrize("name", EXACT[:2])
def test_fast_arithmetic_is_near_too(name: str) -> None:
    """K float32 roundings instead of K/16 groups: at most twice the bound of `tc`."""
    case = make_case(SIZES[name], seed=1)
    fast, real = (
        run_case(case, arithmetic="fast"),
        run_case(case.widened(), arithmetic="float64"),
    )
    for name_, bound in error_bounds(case).items():
        assert (np.abs(as_values(fast[name_]) - real[name_]) <= 2 * bound).all(), name_


TINY = Sizes(num_tokens=5, hidden=4, inner=3, experts=3, top_k=2, shared=2, pattern="repeated")


@pytest.mark.parametrize("limit", [None, 0.5])
def test_every_gradient_by_finite_differences(limit: float | None) -> None:
    """Each element of each input, float64, two ranks' sum order left out: d(sum y * dy).

    Central differences, step 1e-5, |y| < 100: 1e-9 from cancellation, 1e-9 from the third
    derivative. Values within 1e-3 of the clamp have no derivative; this seed has none.
    """
    case = make_case(replace(TINY, limit=limit), seed=2).widened()
    grads = run_case(case, arithmetic="float64")
    assert not near_clamp(case, limit)
    inputs: dict[str, np.ndarray] = {"dx": case.x, "d_topk_weights": case.topk_weights}
    inputs |= dict(zip(WEIGHT_GRADS, [*case.weights, *case.shared], strict=True))
    for name, values in inputs.items():
        for index in np.ndindex(*values.shape):
            moved, kept = [], values[index]
            for sign in (1, -1):
                values[index] = kept + sign * 1e-5
                y = run_case(case, backward=False, arithmetic="float64")["y"]
                moved.append((y * case.dy).sum())
            values[index] = kept
            slope = (moved[0] - moved[1]) / 2e-5
            assert grads[name][index] == pytest.approx(slope, abs=2e-8, rel=1e-8), (name, index)


def near_clamp(case: Case, limit: float | None) -> bool:
    if limit is None:
        return False
    x = case.x
    products = [x @ w.reshape(-1, x.shape[1]).T for w in (*case.weights[:2], *case.shared[:2])]
    near = [np.abs(np.abs(p) - limit) < 1e-4 for p in products]
    assert any((np.abs(p) > limit).any() for p in products)  # the clamp is at work
    return any(n.any() for n in near)


# --------------------------------------------------------------------------- invariants

LONG = {  # several macrobatches per rank, idle and long experts, segments that straddle
    dtype: Sizes(hidden=16, inner=8, experts=6, shared=4, dtype=dtype)
    for dtype in ("bf16", "mxfp8")
}
LONG_ROWS = [520, 0, 130, 5, 257, 64]
BATCHES = [(None, None), (128, 128), (256, 128), (384, 128), (512, 256), (1024, 1024), (None, 256)]


@pytest.mark.parametrize("row_order", ["canonical", "round_robin"])
@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
def test_batches_and_save_modes_change_nothing(dtype: str, row_order: str) -> None:
    ids = ids_with_rows(np.random.default_rng(3), LONG_ROWS)
    case = make_case(LONG[dtype], 3, ids)
    base = run_case(case, 2, row_order=row_order)
    batches = BATCHES if (dtype, row_order) == ("bf16", "canonical") else BATCHES[1::2]
    for position, (macro, mini) in enumerate(batches):
        save = ("all", "ring", "none")[position % 3]
        again = run_case(case, 2, save, row_order=row_order, macrobatch=macro, minibatch=mini)
        assert digest(again) == digest(base), (macro, mini, save)
    for save in ("ring", "none"):
        assert_same(run_case(case, 2, save, row_order=row_order, macrobatch=256), base)


def test_saved_rows_may_be_limited() -> None:
    ids = ids_with_rows(np.random.default_rng(3), LONG_ROWS)
    case = make_case(LONG["bf16"], 3, ids)
    config, heap = case.config(1), single_heap()
    results = []
    for rows in (None, 0, 100, 300):
        workspace = Workspace(config, heap, len(ids), max_saved_rows=rows)
        results.append(rank_step(heap, case, config, np.array([len(ids)]), workspace))
        workspace.close()
    for other in results[1:]:
        assert_same(other, results[0])


def test_main_grad_is_continued() -> None:
    """The start of every chain; an expert without rows keeps it as it was."""
    case = make_case(SIZES["holes"], 4)
    case = case.with_ids(np.where(case.topk_ids == 1, 2, case.topk_ids))
    rng = np.random.default_rng(5)
    shapes = {name: value.shape for name, value in dense_layer(case).items()}
    start = {n: rng.standard_normal(shapes[n]).astype(np.float32) for n in WEIGHT_GRADS}
    start["dw_gate"][1, 0, 0] = -0.0
    none = np.zeros(0, np.float32)
    expected = dense_layer(case, start)
    assert_bitwise_equal(expected["dw_gate"][1], start["dw_gate"][1])
    for ranks in (1, 5):
        assert_same(run_case(case, ranks, main_grad=Gradients(none, none, **start)), expected)
    rounded = {n: to_bf16(v) for n, v in start.items()}
    as_bits = {n: bf16_to_bits(v).view(BFLOAT16) for n, v in rounded.items()}
    result = run_case(case, 1, main_grad=Gradients(none, none, **as_bits), grad_dtype="bf16")
    for name in WEIGHT_GRADS:
        expected_bits = bf16_to_bits(to_bf16(dense_layer(case, rounded)[name]))
        assert_bitwise_equal(result[name].view(np.uint16), expected_bits, name)


def test_bf16_gradients_are_rounded_once_at_the_end() -> None:
    case = make_case(SIZES["plain"], 7)
    real, rounded = run_case(case, 3), run_case(case, 3, grad_dtype="bf16")
    for name in real:
        if name in WEIGHT_GRADS:
            assert rounded[name].dtype == BFLOAT16
            expected = bf16_to_bits(to_bf16(real[name]))
            assert_bitwise_equal(rounded[name].view(np.uint16), expected, name)
        else:
            assert_same({name: rounded[name]}, {name: real[name]})


def test_bits_in_bits_out() -> None:
    """uint16 bits and ml_dtypes.bfloat16 are the same input; outputs take the dtype of x."""
    case = make_case(SIZES["plain"], 8)
    as_bits = replace(
        case,
        x=case.x.view(np.uint16),
        dy=case.dy.view(np.uint16),
        weights=ExpertWeights(*(w.view(np.uint16) for w in case.weights)),
    )
    bits, values = run_case(as_bits, 2), run_case(case, 2)
    assert bits["y"].dtype == bits["dx"].dtype == np.uint16
    assert values["y"].dtype == values["dx"].dtype == BFLOAT16
    assert_same(bits, values)


def test_idle_experts_have_zero_gradients() -> None:
    case = make_case(SIZES["plain"]).with_ids(np.full((37, 3), 4))
    result = run_case(case, 3)
    for name in ("dw_gate", "dw_up", "dw_down"):
        idle = np.delete(result[name], 4, axis=0)
        assert not idle.view(np.uint32).any()
        assert result[name][4].any()


def test_special_values_stay_with_their_tokens() -> None:
    """NaN and Inf in one token reach that token and the weights it meets, no other token."""
    case = make_case(SIZES["holes"], 9)
    for bad in (np.nan, np.inf):
        broken = replace(case, x=case.x.copy())
        broken.x[3, 5] = bad
        clean, result = run_case(case, 5), run_case(broken, 5)
        others = np.arange(150) != 3
        assert_same({"y": result["y"][others]}, {"y": clean["y"][others]})
        assert_same({"dx": result["dx"][others]}, {"dx": clean["dx"][others]})
        assert_same(result, dense_layer(broken))


def test_router_share_is_added_last() -> None:
    case = make_case(SIZES["plain"], 10)
    config, heap = case.config(1), single_heap()
    seen = []
    bits = make_case(SIZES["plain"], 11).x
    share = as_values(bits)

    def router(d_topk_weights: np.ndarray) -> np.ndarray:
        seen.append(d_topk_weights)
        return bits

    results = []
    for router_share in (None, router):
        _, context = moe_forward(
            config, heap, case.x, case.topk_ids, case.topk_weights, case.weights, case.shared
        )
        results.append(moe_backward(context, case.dy, router_share=router_share))
    assert_bitwise_equal(seen[0], results[0].d_topk_weights)
    plain, added = (as_values(r.dx) for r in results)
    # plain is rounded to bf16 already, so one bf16 rounding and one float32 rounding apart
    bound = 2.0**-8 * (np.abs(plain) + np.abs(plain + share)) + 2.0**-23 * np.abs(share)
    assert (np.abs(added - (plain + share)) <= bound).all()
    assert (added != plain).any()


# --------------------------------------------------------------------------- buffers, contexts


def test_two_forwards_before_two_backwards() -> None:
    """Without a workspace each call has its own buffers, and backward gives them back."""
    cases = [make_case(SIZES["plain"], seed) for seed in (12, 13)]
    config, heap = cases[0].config(1), single_heap()
    contexts = [
        moe_forward(config, heap, c.x, c.topk_ids, c.topk_weights, c.weights, c.shared)[1]
        for c in cases
    ]
    for case, context in zip(cases, contexts, strict=True):
        assert_bitwise_equal(moe_backward(context, case.dy).dx, run_case(case)["dx"])
    _, context = moe_forward(
        config, heap, cases[0].x, cases[0].topk_ids, cases[0].topk_weights, *_weights(cases[0])
    )
    context.close()
    assert not heap._world.memory


def _weights(case: Case) -> tuple[ExpertWeights, ExpertWeights | None]:
    return case.weights, case.shared


def test_inputs_may_change_after_forward() -> None:
    case = make_case(SIZES["plain"], 14)
    config, heap = case.config(1), single_heap()
    x, ids, weights = case.x.copy(), case.topk_ids.copy(), case.topk_weights.copy()
    _, context = moe_forward(config, heap, x, ids, weights, *_weights(case))
    x[...], ids[...], weights[...] = 0, -1, 7
    assert_bitwise_equal(moe_backward(context, case.dy).dx, run_case(case)["dx"])


def test_context_is_used_once() -> None:
    case = make_case(SIZES["plain"])
    config, heap = case.config(1), single_heap()
    workspace = Workspace(config, heap, 37)
    args = (config, heap, case.x, case.topk_ids, case.topk_weights, *_weights(case), workspace)
    _, context = moe_forward(*args)
    moe_backward(context, case.dy)
    with pytest.raises(RuntimeError, match="context was used by an earlier moe_backward"):
        moe_backward(context, case.dy)
    _, stale = moe_forward(*args)
    moe_forward(*args)
    with pytest.raises(RuntimeError, match="context is stale: its workspace ran another forward"):
        moe_backward(stale, case.dy)


# --------------------------------------------------------------------------- negative controls


def _zero_output(*args: Any) -> np.ndarray:
    return np.zeros_like(_combine(*args))


def _reversed_slots(y: np.ndarray, ids: np.ndarray, weights: np.ndarray, shared: Any) -> Any:
    return _combine(y[:, ::-1], ids[:, ::-1], weights[:, ::-1], shared)


def _dropped_token(schedule: Any, rows: slice, values: np.ndarray, peer: Any) -> None:
    if values.dtype == np.uint16:
        values = values.copy()
        values[len(values) // 2] = 0
    _push(schedule, rows, values, peer)


_combine = mok_ref.layer.combine_forward
_push = mok_ref.layer.push_rows


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("combine_forward", _zero_output),
        ("combine_forward", _reversed_slots),
        ("push_rows", _dropped_token),
    ],
    ids=["zero-output", "wrong-slot-order", "dropped-token"],
)
def test_fault_is_detected(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(SIZES["plain"], 15)
    case.topk_ids[:, 1] = case.topk_ids[:, 0]  # large terms cancel, so that their order shows
    case.topk_weights[:, 0] *= 2**20
    case.topk_weights[:, 1] = -case.topk_weights[:, 0]
    expected = dense_layer(case)
    assert_same(run_case(case, 2), expected)
    monkeypatch.setattr(mok_ref.layer, name, fault)
    with pytest.raises(AssertionError, match=r"y: \d+ of 1776 differ"):
        assert_same({"y": run_case(case, 2)["y"]}, {"y": expected["y"]})


def test_swapped_experts_are_detected() -> None:
    case = make_case(SIZES["plain"], 16)
    swapped = replace(case, weights=ExpertWeights(*(w[[1, 0, 2, 3, 4, 5]] for w in case.weights)))
    expected = dense_layer(case)
    for name in ("y", "dx", "d_topk_weights", "dw_gate"):
        with pytest.raises(AssertionError, match=f"{name}: .* differ"):
            assert_same({name: run_case(swapped, 2)[name]}, {name: expected[name]})


def test_one_moved_row_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an expert in another order: outputs stay, weight gradients show it."""
    case = make_case(SIZES["one-expert"], 17)
    expected = dense_layer(case)
    order = mok_ref.schedule.bit_reversed_order
    monkeypatch.setattr(mok_ref.schedule, "bit_reversed_order", lambda n: order(n)[::-1])
    result = run_case(case, 2)
    for name in ("y", "dx", "d_topk_weights"):
        assert_same({name: result[name]}, {name: expected[name]})
    with pytest.raises(AssertionError, match=r"dw_down: .* differ"):
        assert_same({"dw_down": result["dw_down"]}, {"dw_down": expected["dw_down"]})


# --------------------------------------------------------------------------- float64


def test_the_oracle_quantises_nothing() -> None:
    """mxfp8 in float64 is bf16 in float64, in whatever dtype weights arrive."""
    case = make_case(SIZES["mxfp8"], 19)
    plain = run_case(case, 2, arithmetic="float64", dtype="bf16")
    assert_same(run_case(case, 2, arithmetic="float64"), plain)
    assert_same(run_case(case.widened(), 2, arithmetic="float64"), plain)
    assert plain["dw_gate"].dtype == np.float64
    assert (run_case(case, 2)["dw_gate"] != run_case(case, 2, dtype="bf16")["dw_gate"]).any()


@pytest.mark.parametrize("arithmetic", ["exact", "float64"])
def test_every_input_may_change_after_forward(arithmetic: str) -> None:
    """x, ids, routing weights, experts and the shared expert: backward has copies of them all."""
    case = make_case(SIZES["plain"], 20)
    expected = run_case(case.widened() if arithmetic == "float64" else case, arithmetic=arithmetic)
    mine = make_case(SIZES["plain"], 20)
    mine = mine.widened() if arithmetic == "float64" else mine
    config, heap = mine.config(1, arithmetic=arithmetic), single_heap()
    inputs = (mine.x, mine.topk_ids, mine.topk_weights, mine.weights, mine.shared)
    _, context = moe_forward(config, heap, *inputs)
    for values in (mine.x, mine.topk_weights, *mine.weights, *mine.shared):
        values[...] = 3
    mine.topk_ids[...] = -1
    grads = vars(moe_backward(context, mine.dy))
    assert_same({name: grads[name] for name in expected if name != "y"}, without_y(expected))


def without_y(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in tensors.items() if name != "y"}


@pytest.mark.parametrize("arithmetic", ["exact", "fast", "float64"])
def test_huge_values_warn_nowhere(arithmetic: str) -> None:
    """Warnings are errors in these tests; overflow, Inf - Inf and NaN are results."""
    case = make_case(SIZES["clamp"], 21)
    case.x[3] = 1e38
    case.weights.gate[0] = case.shared.gate[0] = -1e38
    case = case.widened() if arithmetic == "float64" else case
    if arithmetic == "float64":
        case.x[4] = 1e300
        case.weights.up[1] = 1e300
    result = run_case(case, 2, arithmetic=arithmetic)
    assert not np.isfinite(as_values(result["dx"])).all()
