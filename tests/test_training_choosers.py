"""The family of choosers: brute force, finite differences, independence of ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mok_ref.heap import run_ranks
from mok_ref.routing import RoutingOptions, route_forward
from mok_ref.testing import assert_bitwise_equal
from mok_ref.training import choosers
from mok_ref.training.assignment import auction, expert_shares, linear_sum
from mok_ref.training.choosers import LitterOptions, litter_backward, litter_forward
from mok_ref.training.ranks import Exchange
from mok_ref.training.router import RouterConfig, load_routes, route, save_routes


def make_logits(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --------------------------------------------------------------------------- presets


@pytest.mark.parametrize(
    ("options", "slots", "weight_sum"),
    [
        pytest.param(choosers.switch(), 1, None, id="switch"),
        pytest.param(choosers.gshard(), 2, 1.0, id="gshard"),
        pytest.param(choosers.qwen(), 8, 1.0, id="qwen"),
        pytest.param(choosers.deepseek_v3(), 8, 2.5, id="deepseek-v3"),
    ],
)
def test_presets(options: RoutingOptions, slots: int, weight_sum: float | None) -> None:
    ids, weights, saved = route_forward(make_logits(0, 20, 64), options)
    assert ids.shape == (20, slots) and (ids >= 0).all()
    if weight_sum is not None:
        np.testing.assert_allclose(weights.sum(axis=1), weight_sum, rtol=1e-6)
    else:
        assert_bitwise_equal(weights, np.take_along_axis(saved.scores, ids, axis=1))


def test_deepseek_bias_moves_the_choice_but_not_the_weights() -> None:
    logits = make_logits(1, 30, 16)
    bias = np.zeros(16, np.float32)
    bias[5] = 10
    plain = dict(top_k=2, num_groups=4, keep_groups=2)
    ids, weights, saved = route_forward(logits, choosers.deepseek_v3(bias, **plain))
    assert (ids[:, 0] == 5).all()
    chosen = np.take_along_axis(saved.scores, ids, axis=1).astype(np.float64)
    np.testing.assert_allclose(weights, 2.5 * chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-6)


# --------------------------------------------------------------------------- litters


def softmax64(x: np.ndarray) -> np.ndarray:
    p = np.exp(x)
    return p / p.sum(axis=-1, keepdims=True)


def litter_scores64(logits: np.ndarray, num_litters: int) -> np.ndarray:
    wide = logits.astype(np.float64)
    kittens = wide[:, num_litters:].reshape(len(wide), num_litters, -1)
    return (softmax64(wide[:, :num_litters])[:, :, None] * softmax64(kittens)).reshape(
        len(wide), -1
    )


@pytest.mark.parametrize("keep", [1, 2])
def test_litter_forward_matches_brute_force(keep: int) -> None:
    logits = make_logits(2, 40, 4 + 12)
    options = LitterOptions(top_k=3, num_litters=4, keep_litters=keep)
    ids, weights, _ = litter_forward(logits, options)
    scores = litter_scores64(logits, 4)
    for token in range(40):
        litters = np.argsort(-logits[token, :4], kind="stable")[:keep]
        allowed = [e for e in range(12) if e // 3 in litters]
        expected = sorted(allowed, key=lambda e: -scores[token, e])[:3]
        np.testing.assert_array_equal(ids[token], expected)
    np.testing.assert_allclose(weights, np.take_along_axis(scores, ids, axis=1), rtol=16 * 2.0**-24)


def test_litter_backward_matches_finite_differences() -> None:
    logits = make_logits(3, 5, 3 + 6)
    options = LitterOptions(2, 3, 2, renormalize=True, scale=1.5)
    ids, _, saved = litter_forward(logits, options)
    rng = np.random.default_rng(4)
    dw = rng.normal(size=ids.shape).astype(np.float32)
    ds = rng.normal(size=(5, 6)).astype(np.float32)

    def loss(values: np.ndarray) -> float:
        scores = litter_scores64(values, 3)
        chosen = np.take_along_axis(scores, ids, axis=1)
        weights = 1.5 * chosen / chosen.sum(axis=1, keepdims=True)
        return float((weights * dw).sum() + (scores * ds).sum())

    gradient = litter_backward(saved, dw, ds)
    for index in np.ndindex(*logits.shape):
        moved = [logits.astype(np.float64) for _ in range(2)]
        moved[0][index] += 1e-6
        moved[1][index] -= 1e-6
        slope = (loss(moved[0]) - loss(moved[1])) / 2e-6
        assert gradient[index] == pytest.approx(slope, abs=3e-6)


def test_litter_without_open_kittens_is_never_chosen() -> None:
    logits = np.zeros((1, 2 + 4), np.float32)
    logits[0, 0] = 9  # litter 0 is preferred, but both its kittens are closed
    logits[0, 2:4] = -np.inf
    ids, _, saved = litter_forward(logits, LitterOptions(3, 2, 2))
    np.testing.assert_array_equal(ids, [[2, 3, -1]])
    gradient = litter_backward(saved, np.ones((1, 3), np.float32))
    assert not gradient[0, [0, 2, 3]].any()


def test_litter_size_is_limited() -> None:
    with pytest.raises(ValueError, match=r"^litter size .* got 16, max_litter_size=8"):
        litter_forward(make_logits(0, 2, 2 + 32), LitterOptions(1, 2))
    litter_forward(make_logits(0, 2, 2 + 32), LitterOptions(1, 2, max_litter_size=16))
    with pytest.raises(ValueError, match=r"^num_experts must be divisible by num_litters"):
        litter_forward(make_logits(0, 2, 3 + 8), LitterOptions(1, 3))


@pytest.mark.parametrize(
    ("experts", "litters", "ranks"), [(16, 4, 2), (16, 4, 4), (16, 4, 8), (24, 3, 1)]
)
def test_litters_are_placed_whole_or_on_neighbours(experts: int, litters: int, ranks: int) -> None:
    owner = choosers.litter_placement(experts, litters, ranks)
    for litter in owner.reshape(litters, -1):
        used = np.unique(litter)
        assert len(used) <= max(1, ranks // litters)
        assert (np.diff(used) == 1).all()  # neighbours
    np.testing.assert_array_equal(np.bincount(owner, minlength=ranks), experts // ranks)


def test_ranks_touched_by_brute_force() -> None:
    ids = np.random.default_rng(5).integers(-1, 8, (50, 3)).astype(np.int32)
    owner = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    expected = [len({owner[e] for e in row if e >= 0}) for row in ids]
    np.testing.assert_array_equal(choosers.ranks_touched(ids, owner), expected)


# --------------------------------------------------------------------------- whole batch


def test_expert_choice_by_brute_force() -> None:
    scores = make_logits(6, 30, 5)
    scores[::3] = np.round(scores[::3])  # ties
    is_open = np.ones(scores.shape, bool)
    is_open[:, 4] = False
    ids = choosers.expert_choice_ids(scores, is_open, 7, top_k=5)
    for expert in range(4):
        best = sorted(range(30), key=lambda t: (-scores[t, expert], t))[:7]
        np.testing.assert_array_equal(np.flatnonzero((ids == expert).any(axis=1)), sorted(best))
    assert (ids != 4).all()
    few = choosers.expert_choice_ids(scores, is_open, 7, top_k=1)
    for token in range(30):
        mine = [e for e in ids[token] if e >= 0]
        assert few[token, 0] == (max(mine, key=lambda e: (scores[token, e], -e)) if mine else -1)


@pytest.mark.parametrize("solve", [linear_sum, auction], ids=["linear_sum", "auction"])
def test_balanced_assignment_by_brute_force(solve) -> None:
    for seed, (tokens, experts) in enumerate([(6, 3), (5, 2), (4, 4), (7, 3), (2, 4), (1, 1)]):
        scores = make_logits(seed, tokens, experts)
        seats = np.repeat(np.arange(experts), expert_shares(tokens, experts))
        best = max(
            sum(float(scores[t, e]) for t, e in enumerate(order))
            for order in set(itertools.permutations(seats))
        )
        owner = solve(scores)
        np.testing.assert_array_equal(
            np.bincount(owner, minlength=experts), expert_shares(tokens, experts)
        )
        total = scores[np.arange(tokens), owner].sum(dtype=np.float64)
        assert total == pytest.approx(best, abs=tokens * 2.0**-17)  # scores have 20 bits


@pytest.mark.parametrize(("tokens", "experts"), [(512, 8), (1000, 16), (515, 7)])
def test_auction_equals_the_exact_solver_on_larger_batches(tokens: int, experts: int) -> None:
    scores = make_logits(tokens, tokens, experts)
    a, b = auction(scores), linear_sum(scores)
    total = [scores[np.arange(tokens), o].sum(dtype=np.float64) for o in (a, b)]
    assert total[0] == pytest.approx(total[1], abs=tokens * 2.0**-17)
    np.testing.assert_array_equal(np.bincount(a), np.bincount(b))
    np.testing.assert_array_equal(a, auction(scores))


def test_auction_with_equal_scores_ends() -> None:
    np.testing.assert_array_equal(np.bincount(auction(np.zeros((64, 8), np.float32))), [8] * 8)
    assert len(auction(np.zeros((0, 4), np.float32))) == 0


@pytest.mark.parametrize("kind", ["expert_choice", "balanced"])
def test_whole_batch_choosers_do_not_depend_on_ranks(kind: str) -> None:
    logits = make_logits(8, 48, 6)
    router = RouterConfig(kind)

    def rank(heap):
        counts = np.array([[48], [16, 32], [16, 0, 32]][heap.size - 1])
        first = int(counts[: heap.rank].sum())
        exchange = Exchange(heap)
        mine = logits[first : first + int(counts[heap.rank])]
        routed = route(router, mine, None, exchange, counts)
        d = np.ones_like(routed.topk_weights)
        result = routed.topk_ids, routed.topk_weights, routed.backward(d, None)
        exchange.close()
        return result

    whole = run_ranks(1, rank)[0]
    for ranks in (2, 3):
        parts = run_ranks(ranks, rank)
        for index, expected in enumerate(whole):
            assert_bitwise_equal(np.concatenate([p[index] for p in parts]), expected)
    counts = np.bincount(whole[0][whole[0] >= 0], minlength=6)
    np.testing.assert_array_equal(counts, [16 if kind == "expert_choice" else 8] * 6)


# --------------------------------------------------------------------------- replay


def test_routes_survive_a_file(tmp_path) -> None:
    routes = [(make_logits(i, 4, 2).astype(np.int32), make_logits(i + 9, 4, 2)) for i in range(3)]
    save_routes(tmp_path / "routes.npz", routes)
    for before, after in zip(routes, load_routes(tmp_path / "routes.npz"), strict=True):
        assert_bitwise_equal(before[0], after[0])
        assert_bitwise_equal(before[1], after[1])
    np.savez(tmp_path / "bad.npz", num_calls=2, ids_0=routes[0][0])
    with pytest.raises(ValueError, match="weights_0"):
        load_routes(tmp_path / "bad.npz")
    whole = (tmp_path / "routes.npz").read_bytes()
    for length in (0, 3, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.npz must be a whole"):
            load_routes(tmp_path / "cut.npz")


def test_router_config_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^kind must be one of"):
        RouterConfig("hash")
    with pytest.raises(ValueError, match=r"^litter must be given"):
        RouterConfig("litter")
