"""Routing: oracles in float64 and by brute force, awkward inputs, finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_ref import routing
from mok_ref.numerics import to_bf16
from mok_ref.routing import RoutingOptions, route_backward, route_forward
from mok_ref.tensor_core import tc

INF = np.float32(np.inf)


def make_logits(seed: int, num_tokens: int, num_experts: int, closed: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_tokens, num_experts)).astype(np.float32)
    logits[rng.random(logits.shape) < closed] = -INF
    return logits


def scores_float64(logits: np.ndarray, score: str) -> np.ndarray:
    """Independent oracle: no max subtraction, numpy's own exp, -Inf gives exactly 0."""
    wide = logits.astype(np.float64)
    if score == "sigmoid":
        return 1 / (1 + np.exp(-wide))
    p = np.exp(wide)
    total = p.sum(axis=1, keepdims=True)
    return np.divide(p, total, out=np.zeros_like(p), where=total > 0)


def brute_force_topk(choice: np.ndarray, is_open: np.ndarray, options: RoutingOptions) -> list[int]:
    """One token, by Python's sorted() on exact fractions of the float32 choices."""
    num_experts = len(choice)
    size = num_experts // options.num_groups
    groups = []
    for g in range(options.num_groups):
        members = [e for e in range(g * size, (g + 1) * size) if is_open[e]]
        best = sorted((choice[e] for e in members), reverse=True)[:2]
        if not best:
            continue
        value = best[0]
        if options.group_score == "top2" and len(best) == 2:
            value = np.float32(best[0] + best[1])
        groups.append((-float(value), g))
    kept = {g for _, g in sorted(groups)[: options.num_kept]}
    ranked = sorted(
        (-float(choice[e]), e) for e in range(num_experts) if is_open[e] and e // size in kept
    )
    ids = [e for _, e in ranked[: options.top_k]]
    return ids + [-1] * (options.top_k - len(ids))


# --------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("score", routing.SCORES)
def test_scores_match_float64(score: str) -> None:
    logits = make_logits(1, 50, 12, closed=0.3)
    _, _, saved = route_forward(logits, RoutingOptions(2, score))
    # exp and division are below 1 ulp each, the sum has 12 terms: 16 ulps of 2^-24 bound it
    np.testing.assert_allclose(saved.scores, scores_float64(logits, score), rtol=16 * 2.0**-24)
    assert (saved.scores[logits == -INF] == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(top_k=1), id="switch"),
        pytest.param(dict(top_k=2, renormalize=True), id="mixtral"),
        pytest.param(dict(top_k=3, num_groups=4, keep_groups=2, score="sigmoid"), id="deepseek"),
        pytest.param(dict(top_k=2, num_groups=6, keep_groups=1, group_score="max"), id="litter"),
        pytest.param(dict(top_k=4, num_groups=12, keep_groups=5), id="groups-of-one"),
    ],
)
@pytest.mark.parametrize("closed", [0.0, 0.5, 0.95])
def test_topk_matches_brute_force(options: dict, closed: float) -> None:
    rng = np.random.default_rng(3)
    logits = make_logits(2, 60, 12, closed)
    logits[:20] = np.round(logits[:20])  # many ties
    for bias in (None, rng.normal(size=12).astype(np.float32), np.full(12, -2, np.float32)):
        chosen = RoutingOptions(choice_bias=bias, **options)
        ids, _, saved = route_forward(logits, chosen)
        choice = saved.scores if bias is None else saved.scores + bias
        expected = [
            brute_force_topk(c, o, chosen) for c, o in zip(choice, logits != -INF, strict=True)
        ]
        np.testing.assert_array_equal(ids, expected)


def test_choice_key_orders_like_real_numbers() -> None:
    values = np.array(
        [-3e38, -1, -1e-38, -1e-45, -0.0, 0.0, 1e-45, 3e-45, 1e-38, 1, 3e38], np.float32
    )
    keys = routing.choice_key(values, np.ones(len(values), bool))
    np.testing.assert_array_equal(
        np.sign(np.diff(keys.astype(np.int64))), [1, 1, 1, 1, 0] + [1] * 5
    )
    assert routing.choice_key(values, np.zeros(len(values), bool)).max() < keys.min()


def test_weights() -> None:
    logits = make_logits(4, 40, 8)
    ids, weights, saved = route_forward(
        logits, RoutingOptions(3, "sigmoid", renormalize=True, scale=2.5)
    )
    oracle = np.take_along_axis(scores_float64(logits, "sigmoid"), ids, axis=1)
    oracle = 2.5 * oracle / oracle.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, oracle, rtol=16 * 2.0**-24)
    ids1, plain, _ = route_forward(logits, RoutingOptions(3, "sigmoid"))
    np.testing.assert_array_equal(plain, np.take_along_axis(saved.scores, ids1, axis=1))


# --------------------------------------------------------------------------- awkward inputs


def test_all_equal_logits_choose_ascending_ids() -> None:
    for groups in (1, 4):
        options = RoutingOptions(4, num_groups=groups, keep_groups=max(1, groups // 2))
        ids, weights, _ = route_forward(np.zeros((2, 16), np.float32), options)
        np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 2)
        np.testing.assert_array_equal(weights, np.full((2, 4), 1 / 16, np.float32))


def test_masked_group_never_beats_a_real_score() -> None:
    """All logits -18, bias +12: choices are large, scores tiny; and negative choices of kept groups
    must win against experts of closed groups."""
    logits = np.full((3, 16), -18, np.float32)
    for bias in (12, -12):
        options = RoutingOptions(
            4, "sigmoid", np.full(16, bias, np.float32), 4, 2, renormalize=True
        )
        ids, weights, _ = route_forward(logits, options)
        np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 3)
        np.testing.assert_array_equal(weights, np.full((3, 4), 0.25, np.float32))


@pytest.mark.parametrize("score", routing.SCORES)
def test_closed_token_has_no_routes(score: str) -> None:
    logits = np.full((2, 4), -INF, np.float32)
    logits[1, 2] = 5
    options = RoutingOptions(2, score, renormalize=True)
    ids, weights, saved = route_forward(logits, options)
    np.testing.assert_array_equal(ids, [[-1, -1], [2, -1]])
    np.testing.assert_array_equal(weights, [[0, 0], [1, 0]])
    d_logits = route_backward(saved, np.full((2, 2), 7, np.float32))
    np.testing.assert_array_equal(d_logits.view(np.uint32), np.zeros((2, 4), np.uint32))


def test_total_of_zero_gives_zero_weights_and_gradients() -> None:
    saved_scores = np.zeros((1, 4), np.float32)
    options = RoutingOptions(2, renormalize=True, scale=3.0)
    ids = np.array([[0, 1]], np.int32)
    weights, ratio, total = routing.route_weights(saved_scores, ids, options)
    np.testing.assert_array_equal(weights, [[0, 0]])
    saved = routing.RoutingSaved(options, saved_scores, np.ones((1, 4), bool), ids, ratio, total)
    assert not route_backward(saved, np.ones((1, 2), np.float32)).any()


def test_no_tokens() -> None:
    ids, weights, saved = route_forward(np.zeros((0, 8), np.float32), RoutingOptions(2))
    assert ids.shape == weights.shape == (0, 2)
    assert route_backward(saved, weights).shape == (0, 8)


def test_subnormal_choices_stay_apart() -> None:
    """A bias that leaves only subnormal differences still decides."""
    tiny = np.float32(1e-45)
    choice = np.array([[tiny, 2 * tiny, 0, 3 * tiny]], np.float32)
    ids = routing.choose_topk(choice, np.ones((1, 4), bool), 4)
    np.testing.assert_array_equal(ids, [[3, 1, 0, 2]])


@pytest.mark.parametrize(
    ("kwargs", "num_experts", "name"),
    [
        (dict(top_k=0), 4, "top_k"),
        (dict(top_k=5), 4, "top_k"),
        (dict(top_k=3, num_groups=2, keep_groups=1), 4, "top_k"),
        (dict(top_k=1, num_groups=3), 4, "num_experts"),
        (dict(top_k=1, num_groups=2, keep_groups=3), 4, "keep_groups"),
        (dict(top_k=1, num_groups=2, keep_groups=0), 4, "keep_groups"),
        (dict(top_k=1, score="relu"), 4, "score"),
        (dict(top_k=1, group_score="mean"), 4, "group_score"),
        (dict(top_k=1, scale=1e39), 4, "scale"),
        (dict(top_k=1, choice_bias=np.zeros(3, np.float32)), 4, "choice_bias"),
        (dict(top_k=1, choice_bias=np.full(4, np.nan, np.float32)), 4, "choice_bias"),
    ],
)
def test_options_are_refused_by_name(kwargs: dict, num_experts: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        route_forward(np.zeros((2, num_experts), np.float32), RoutingOptions(**kwargs))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_are_refused_by_name(value: float) -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = value
    with pytest.raises(ValueError, match=r"^logits .*token=1, expert=2"):
        route_forward(logits, RoutingOptions(1))


# --------------------------------------------------------------------------- backward


def loss_float64(logits: np.ndarray, ids: np.ndarray, d: np.ndarray, options: RoutingOptions):
    """sum of d * weights in float64, ids held fixed (the choice has no gradient)."""
    scores = scores_float64(logits, options.score)
    chosen = np.where(ids >= 0, np.take_along_axis(scores, np.maximum(ids, 0), axis=1), 0)
    if options.renormalize:
        total = chosen.sum(axis=1, keepdims=True)
        chosen = np.divide(chosen, total, out=np.zeros_like(chosen), where=total > 0)
    return (d * chosen * options.scale).sum()


@pytest.mark.parametrize("score", routing.SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_backward_matches_finite_differences(score: str, renormalize: bool) -> None:
    logits = make_logits(5, 6, 8, closed=0.3)
    options = RoutingOptions(3, score, renormalize=renormalize, scale=1.5)
    ids, _, saved = route_forward(logits, options)
    d = np.random.default_rng(6).normal(size=ids.shape).astype(np.float32)
    d_logits = route_backward(saved, d)
    step = 1e-6
    for token, expert in np.ndindex(*logits.shape):
        if logits[token, expert] == -INF:
            assert d_logits[token, expert].view(np.uint32) == 0
            continue
        moved = [logits.astype(np.float64) for _ in range(2)]
        moved[0][token, expert] += step
        moved[1][token, expert] -= step
        slope = (
            loss_float64(moved[0], ids, d, options) - loss_float64(moved[1], ids, d, options)
        ) / (2 * step)
        # float32 operations of size <= |d| * scale * few; differences err by about 1e-9
        assert d_logits[token, expert] == pytest.approx(slope, abs=3e-6)


def test_balance_gradient_is_added_to_the_routes() -> None:
    logits = make_logits(7, 9, 6)
    _, weights, saved = route_forward(logits, RoutingOptions(2))
    extra = np.random.default_rng(8).normal(size=logits.shape).astype(np.float32)
    alone = routing.scores_backward(saved, extra)
    np.testing.assert_array_equal(route_backward(saved, np.zeros_like(weights), extra), alone)
    both = route_backward(saved, weights, extra)
    assert (both != alone).any()


def test_router_gradients_follow_the_chain() -> None:
    """Two ranks, 32 + 5 tokens: the chain continues the accumulator in ascending tokens."""
    rng = np.random.default_rng(9)
    x = to_bf16(rng.normal(size=(37, 24)).astype(np.float32))
    w_router = to_bf16(rng.normal(size=(6, 24)).astype(np.float32))
    logits = routing.router_logits(x, w_router)
    np.testing.assert_array_equal(logits, tc(x, w_router))
    d_logits = rng.normal(size=logits.shape).astype(np.float32)
    whole = routing.router_dw(d_logits, x)
    chained = routing.router_dw(d_logits[32:], x[32:], routing.router_dw(d_logits[:32], x[:32]))
    np.testing.assert_array_equal(whole.view(np.uint32), chained.view(np.uint32))
    assert (whole != routing.router_dw(d_logits[::-1].copy(), x[::-1].copy())).any()
    # bf16 d_logits: 2^-9 relative per term, 37 or 6 terms
    wide = d_logits.astype(np.float64)
    bound = 2.0**-8 * np.abs(wide).T @ np.abs(x)
    assert (np.abs(whole - wide.T @ x) <= bound).all()
    dx = routing.router_dx(d_logits, w_router)
    assert (np.abs(dx - wide @ w_router) <= 2.0**-7 * np.abs(wide) @ np.abs(w_router)).all()


# --------------------------------------------------------------------------- properties


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.sampled_from([1, 2, 4]),
    top_k=st.integers(1, 4),
    score=st.sampled_from(routing.SCORES),
    closed=st.sampled_from([0.0, 0.4, 0.9]),
)
def test_routes_are_distinct_open_and_ordered(
    seed: int, groups: int, top_k: int, score: str, closed: float
) -> None:
    logits = make_logits(seed, 11, 16, closed)
    options = RoutingOptions(top_k, score, num_groups=groups, keep_groups=max(1, groups // 2))
    ids, weights, saved = route_forward(logits, options)
    for token in range(len(ids)):
        routed = ids[token][ids[token] >= 0]
        assert len(set(routed)) == len(routed)
        assert np.isfinite(logits[token, routed]).all()
        assert (np.diff(saved.scores[token, routed]) <= 0).all()
        assert len(set(routed // (16 // groups))) <= options.num_kept
        assert (ids[token][len(routed) :] == -1).all()  # closed slots come last
    # per token: no other token, and no order of tokens, changes a bit
    alone, alone_w, _ = route_forward(logits[3:4], options)
    np.testing.assert_array_equal(alone, ids[3:4])
    np.testing.assert_array_equal(alone_w.view(np.uint32), weights[3:4].view(np.uint32))


# --------------------------------------------------------------------------- signs of zero


@pytest.mark.parametrize("score", routing.SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scale", [-1.0, -2.5, -0.0])
def test_zeros_of_no_route_are_positive(score: str, renormalize: bool, scale: float) -> None:
    """Every +0 of R2, R3 and R7 to R11, where a product with a negative number would give -0."""
    logits = make_logits(10, 40, 8, closed=0.7)
    logits[0] = -INF
    logits[1, 1:] = -INF
    options = RoutingOptions(4, score, renormalize=renormalize, scale=scale)
    ids, weights, saved = route_forward(logits, options)
    empty, closed = ids < 0, logits == -INF
    assert empty[0].all() and empty[1].sum() == 3
    bits = {
        "score": saved.scores.view(np.uint32)[closed],
        "weight": weights.view(np.uint32)[empty],
        "ratio": saved.ratio.view(np.uint32)[empty],
        "total": saved.total.view(np.uint32)[empty.all(axis=1)],
    }
    for d in (np.float32(-3), np.float32(3)):
        d_weights = np.full(ids.shape, d)
        d_chosen = routing.route_weights_backward(saved, d_weights)
        for balance in (None, np.full(logits.shape, -d)):
            d_logits = route_backward(saved, d_weights, balance)
            bits[f"d_logit {d} {balance is None}"] = d_logits.view(np.uint32)[closed]
        bits[f"d_chosen {d}"] = d_chosen.view(np.uint32)[empty]
    assert all(len(found) for found in bits.values())
    assert {name for name, found in bits.items() if found.any()} == set()


def test_zero_total_has_positive_zeros() -> None:
    """R8 and R10 where the chosen scores sum to 0: ratio and gradient of its routes are +0."""
    options = RoutingOptions(2, renormalize=True, scale=-3.0)
    scores, ids = np.zeros((1, 4), np.float32), np.array([[0, -1]], np.int32)
    weights, ratio, total = routing.route_weights(scores, ids, options)
    saved = routing.RoutingSaved(options, scores, np.ones((1, 4), bool), ids, ratio, total)
    d_chosen = routing.route_weights_backward(saved, np.full((1, 2), 5, np.float32))
    assert weights[0, 1].view(np.uint32) == 0
    assert not ratio.view(np.uint32).any() and not d_chosen.view(np.uint32).any()


# --------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(top_k=True), "top_k must be an integer >= 1, got True"),
        (dict(top_k=2.0), "top_k must be an integer >= 1, got 2.0"),
        (dict(top_k=1, num_groups=2.0), "num_groups must be an integer >= 1, got 2.0"),
        (dict(top_k=1, keep_groups=1.0), r"keep_groups must be an integer in 1\.\.num_groups, got"),
        (dict(top_k=1, score=1), "score must be one of softmax, sigmoid, got 1"),
        (dict(top_k=1, scale=True), "scale must be a finite float32, got True"),
        (dict(top_k=1, scale="2"), "scale must be a finite float32, got '2'"),
        (dict(top_k=1, scale=1j), "scale must be a finite float32, got 1j"),
        (dict(top_k=1, scale=np.nan), "scale must be a finite float32, got nan"),
        (dict(top_k=1, scale=10**400), "scale must be a finite float32, got 1000"),
        (dict(top_k=1, renormalize="no"), "renormalize must be True or False, got 'no'"),
        (dict(top_k=1, renormalize=1), "renormalize must be True or False, got 1"),
        (dict(top_k=1, choice_bias=[0.0]), "choice_bias must be float32 or float64, got list"),
        (
            dict(top_k=1, choice_bias=np.zeros(4, int)),
            "choice_bias must be float32 or float64, got",
        ),
        (dict(top_k=1, choice_bias=np.full(4, 1e300)), "choice_bias must be finite as float32"),
    ],
)
def test_option_types_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        RoutingOptions(**kwargs)


def test_numpy_numbers_are_options() -> None:
    options = RoutingOptions(np.int8(2), scale=np.float32(2.5), renormalize=np.True_)
    assert (type(options.top_k), type(options.scale)) == (int, float)
    bias = np.array([0.1, 0, 0, 0])  # rounded to float32, whatever the scores are
    for dtype in (np.float32, np.float64):
        choice = routing.choice_of(np.zeros((1, 4), dtype), RoutingOptions(1, choice_bias=bias))
        assert choice[0, 0] == np.float32(0.1)


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros((2, 4), np.float16),
        np.zeros((2, 4), np.int32),
        np.zeros((2, 4), ">f4"),
        np.zeros((2, 4), np.uint16),
        [[0.0] * 4],
        None,
    ],
    ids=["float16", "int32", "big-endian", "bits", "list", "None"],
)
def test_logits_are_float32(logits: object) -> None:
    with pytest.raises(
        ValueError, match=r"^logits must be float32 \(float64 for the oracle\), got"
    ):
        route_forward(logits, RoutingOptions(1))
