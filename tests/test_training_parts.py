"""Balance, capacity, unlocking, monitors, optimizer: oracles and invariants of each part."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from mok_ref.routing import RoutingOptions, route_forward, scores_backward
from mok_ref.testing import assert_bitwise_equal
from mok_ref.training import balance, monitors, optimizer
from mok_ref.training.balance import BalanceOptions
from mok_ref.training.capacity import (
    CapacityOptions,
    CapacityState,
    adapt_capacity,
    expert_capacity,
    routes_to_drop,
)
from mok_ref.training.model import LayerStats
from mok_ref.training.monitors import ActionOptions, MonitorOptions, MonitorState
from mok_ref.training.optimizer import AdamWOptions, Moments
from mok_ref.training.unlocking import (
    UnlockOptions,
    advance_unlocking,
    mask_locked,
    start_unlocking,
)

# --------------------------------------------------------------------------- balance


def scores64(logits: np.ndarray, kind: str) -> np.ndarray:
    """Normalised scores in float64."""
    p = np.exp(logits) if kind == "softmax" else 1 / (1 + np.exp(-logits))
    return p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_balance_gradient_matches_finite_differences(kind: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(32, 8)).astype(np.float32)
    ids, _, saved = route_forward(logits, RoutingOptions(2, kind))
    options = BalanceOptions(kitten=0.3, litter=0.2, sequence=0.1)
    counts = balance.count_routes(ids, 8)

    def loss(values: np.ndarray) -> float:
        p = scores64(values, kind)
        kitten = 0.3 * 8 * (counts / 64 * p.mean(axis=0)).sum()
        by_litter = counts.reshape(4, 2).sum(axis=1)
        litter = 0.2 * 4 * (by_litter / 64 * p.mean(axis=0).reshape(4, 2).sum(axis=1)).sum()
        sequence = 0.0
        for rows in (slice(0, 16), slice(16, 32)):
            own = balance.count_routes(ids[rows], 8)
            sequence += 0.1 * 8 * (own / 32 * p[rows].mean(axis=0)).sum() / 2
        return kitten + litter + sequence

    p, total = balance.normalized_scores(saved.scores, kind)
    d_p = balance.balance_gradient(counts, 8, 4, 4, 32, options)[None]
    d_p = d_p + balance.sequence_gradient(ids, 16, 8, 32, 8, 0.1)
    d = scores_backward(saved, balance.d_scores_from_p(d_p, p, total, kind))
    for index in [(0, 0), (5, 3), (17, 7), (31, 2)]:
        moved = [logits.astype(np.float64) for _ in range(2)]
        moved[0][index] += 1e-5
        moved[1][index] -= 1e-5
        slope = (loss(moved[0]) - loss(moved[1])) / 2e-5
        assert d[index] == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_balance_loss_is_the_coefficient_when_even() -> None:
    even = balance.load_ratio(np.full(8, 16), 8)
    np.testing.assert_array_equal(even, np.ones(8, np.float32))
    assert balance.balance_loss(even, np.full(8, 0.125, np.float32), 0.25) == 0.25
    skewed = balance.load_ratio(np.array([128, 0, 0, 0, 0, 0, 0, 0]), 8)
    assert balance.balance_loss(skewed, np.float32([1, 0, 0, 0, 0, 0, 0, 0]), 0.25) == 2.0


def test_z_loss_matches_finite_differences() -> None:
    logits = np.random.default_rng(2).normal(size=(6, 5)) * 3
    logits[2, 1] = -np.inf
    value, d = balance.z_loss(logits, 6, 0.1)
    finite = np.where(np.isfinite(logits), logits, -1e30)
    np.testing.assert_allclose(value, np.log(np.exp(finite).sum(axis=1)) ** 2)
    for index in [(0, 0), (2, 0), (5, 4)]:
        moved = [logits.copy() for _ in range(2)]
        moved[0][index] += 1e-6
        moved[1][index] -= 1e-6
        values = [0.1 * balance.z_loss(m, 6, 0.1)[0].mean() for m in moved]
        assert d[index] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-9)
    assert d[2, 1] == 0


def test_choice_bias_moves_against_the_load() -> None:
    counts = np.array([10, 2, 6, 6, 0])
    is_open = np.array([True, True, True, True, False])
    bias = balance.update_choice_bias(np.zeros(5, np.float32), counts, is_open, 0.125)
    np.testing.assert_array_equal(bias, [-0.125, 0.125, 0, 0, 0])


def test_choice_bias_balances_a_skewed_router() -> None:
    """A router that prefers expert 0 by far is even after 200 updates of 0.01."""
    logits = np.random.default_rng(3).normal(size=(256, 8)).astype(np.float32)
    logits[:, 0] += 3
    bias = np.zeros(8, np.float32)
    shares = []
    for _ in range(200):
        ids, _, _ = route_forward(logits, RoutingOptions(2, "sigmoid", bias))
        counts = balance.count_routes(ids, 8)
        shares.append(counts.max() / counts.mean())
        bias = balance.update_choice_bias(bias, counts, np.ones(8, bool), 0.01)
    assert shares[0] > 3 and shares[-1] < 1.3


# --------------------------------------------------------------------------- capacity


def test_drop_keeps_the_first_rows_in_canonical_order() -> None:
    rng = np.random.default_rng(4)
    ids = rng.integers(-1, 4, (37, 2)).astype(np.int32)
    weights = rng.random((37, 2)).astype(np.float32)
    reverse = [int(f"{g:06b}"[::-1], 2) for g in range(37)]
    for policy in ("canonical", "score"):
        dropped = routes_to_drop(ids, weights, 2, 5, policy)
        mine = [(t, k) for t in range(37) for k in range(2) if ids[t, k] == 2]
        key = {
            "canonical": lambda r: (reverse[r[0]], r[1]),
            "score": lambda r: (-weights[r], reverse[r[0]], r[1]),
        }[policy]
        expected = set(sorted(mine, key=key)[5:])
        assert {(int(t), int(k)) for t, k in np.argwhere(dropped)} == expected


def test_capacity_rounds_up() -> None:
    assert expert_capacity(np.float32(1.25), 64, 8) == 10
    assert expert_capacity(np.float32(1.0), 65, 8) == 9


def test_capacity_follows_the_overflow_rate() -> None:
    options = CapacityOptions(start=1.1, every=4)
    state = CapacityState.start(3, options)
    for step in range(80):
        demand = np.array([100, 100, 0])
        dropped = np.array([20, 0, 0])
        state = adapt_capacity(state, demand, dropped, step, options)
    np.testing.assert_array_equal(state.factor[[0, 1]], np.float32([1.25, 1.0]))
    assert state.overflow[0] == pytest.approx(0.2, abs=1e-3)
    one = CapacityState(state.factor[:1], state.overflow[:1])
    whole = adapt_capacity(state, demand, dropped, 3, options)
    alone = adapt_capacity(one, demand[:1], dropped[:1], 3, options)
    assert_bitwise_equal(alone.factor, whole.factor[:1])  # an owner needs its own experts only


def test_capacity_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^capacity factors must satisfy"):
        CapacityOptions(start=1.5)
    with pytest.raises(ValueError, match=r"^policy must be one of"):
        CapacityOptions(policy="random")


# --------------------------------------------------------------------------- unlocking


def test_unlocking_by_steps() -> None:
    options = UnlockOptions(start=2, share=3, every=10)
    state = start_unlocking(options, 8)
    seen = []
    for step in range(30):
        seen.append(state.num_open)
        state = advance_unlocking(state, options, step, np.float32(1), 8)
    assert seen == [2] * 10 + [5] * 10 + [8] * 10


def test_unlocking_when_the_loss_is_flat() -> None:
    options = UnlockOptions(start=1, share=1, every=0, flat_after=5)
    state = start_unlocking(options, 3)
    for step in range(40):
        state = advance_unlocking(state, options, step, np.float32(5 - 0.1 * step), 3)
    assert state.num_open == 1  # falling
    for step in range(40, 300):  # the smoothed loss needs a while to come down
        state = advance_unlocking(state, options, step, np.float32(1), 3)
    assert state.num_open == 3


def test_locked_experts_are_never_chosen() -> None:
    logits = np.random.default_rng(5).normal(size=(50, 8)).astype(np.float32)
    ids, _, _ = route_forward(mask_locked(logits, 3), RoutingOptions(4))
    assert set(np.unique(ids)) == {-1, 0, 1, 2}
    assert mask_locked(logits, 8) is logits


def test_unlock_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^init must be one of"):
        UnlockOptions(1, 1, init="zero")
    with pytest.raises(ValueError, match=r"^start must be at most num_experts"):
        start_unlocking(UnlockOptions(9, 1), 8)


# --------------------------------------------------------------------------- monitors


def test_entropy_matches_scipy() -> None:
    counts = np.array([5, 0, 30, 7, 22, 0, 0, 0])
    expected = scipy.stats.entropy(counts) / np.log(5)
    assert monitors.entropy_share(counts, 5) == pytest.approx(expected, rel=1e-6)
    assert monitors.entropy_share(np.full(8, 3), 8) == pytest.approx(1, rel=1e-6)
    assert monitors.entropy_share(np.array([9, 0, 0]), 3) == 0
    variance = np.var(counts[:5] / counts[:5].mean())
    assert monitors.utilisation_variance(counts, 5) == pytest.approx(variance, rel=1e-6)


def test_outliers_are_measured_in_medians() -> None:
    norms = np.float32([1, 2, 3, 0, 25])
    mask, bound = monitors.outliers(norms, 10.0)
    assert bound == 20
    np.testing.assert_array_equal(mask, [False, False, False, False, True])
    assert not monitors.outliers(np.float32([1, 99]), 10.0)[0].any()


def layer(load: list[int], **more) -> dict:
    stats = LayerStats(np.array(load), np.zeros(len(load), np.int64), 0, 0)
    return monitors.layer_metrics(stats, len(load), 2) | more


def test_alarms_name_what_is_wrong() -> None:
    options = MonitorOptions(dead_after=3)
    state = MonitorState.start(0.001, 1, 4)
    assert monitors.find_alarms(state, [layer([5, 5, 5, 5])], np.float32(2), 4, options) == []
    collapsed = layer([20, 0, 0, 0], gradient_norms=[1.0, 1.0, 1.0, 30.0])
    for _ in range(3):
        alarms = monitors.find_alarms(state, [collapsed], np.float32(2), 4, options)
    text = "; ".join(alarms)
    for part in ("entropy 0.000", "litter_entropy 0.000", "expert 1 dead", "expert 3 gradient"):
        assert part in text
    for loss in (np.float32(np.nan), np.float32(9)):
        alarms = monitors.find_alarms(state, [layer([5, 5, 5, 5])], loss, 4, options)
        assert len(alarms) == 1 and alarms[0].startswith("loss")


def test_coefficient_is_raised_and_falls_back() -> None:
    options = ActionOptions(raise_aux=True, quiet_steps=2)
    state = MonitorState.start(0.001, 1, 4)
    done, back = monitors.take_actions(state, ["layer0: entropy 0.1 < 0.6"], options, 0.001)
    assert state.aux == pytest.approx(0.003) and len(done) == 1 and not back
    seen = []
    for _ in range(10):
        monitors.take_actions(state, [], options, 0.001)
        seen.append(round(state.aux, 6))
    assert seen[1::2] == [0.0025, 0.002, 0.0015, 0.001, 0.001]
    off = MonitorState.start(0.001, 1, 4)
    monitors.take_actions(off, ["layer0: entropy 0.1 < 0.6"], ActionOptions(), 0.001)
    assert off.aux == 0.001


def test_roll_back_after_a_streak_and_not_for_ever() -> None:
    options = ActionOptions(rollback_after=3, max_rollbacks=2)
    state = MonitorState.start(0.001, 1, 4)
    asked = [monitors.take_actions(state, ["loss nan"], options, 0.001)[1] for _ in range(12)]
    assert [i for i, back in enumerate(asked) if back] == [2, 5]


# --------------------------------------------------------------------------- optimizer


def adamw64(w: np.ndarray, grads: list[np.ndarray], rate: float, o: AdamWOptions) -> np.ndarray:
    w = w.astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m = o.beta1 * m + (1 - o.beta1) * g
        v = o.beta2 * v + (1 - o.beta2) * g.astype(np.float64) ** 2
        m_hat, v_hat = m / (1 - o.beta1**t), v / (1 - o.beta2**t)
        w = w - rate * (m_hat / (np.sqrt(v_hat) + o.epsilon) + o.weight_decay * w)
    return w


def test_adamw_matches_float64() -> None:
    rng = np.random.default_rng(6)
    start = rng.normal(size=200).astype(np.float32)
    grads = [rng.normal(size=200).astype(np.float32) for _ in range(10)]
    options, rate = AdamWOptions(), np.float32(0.01)
    w, moments = start, Moments.zeros((200,))
    for g in grads:
        w, moments = optimizer.adamw(w, g, moments, rate, options)
    np.testing.assert_allclose(w, adamw64(start, grads, 0.01, options), atol=2e-6)


def test_adamw_does_not_depend_on_shards_or_stacking() -> None:
    rng = np.random.default_rng(7)
    w, g = rng.normal(size=(2, 12, 4, 5)).astype(np.float32)
    options, rate = AdamWOptions(), np.float32(0.01)
    whole, _ = optimizer.adamw(w.ravel(), g.ravel(), Moments.zeros((240,)), rate, options)
    bounds = optimizer.shard_bounds(240, 7)
    parts = [
        optimizer.adamw(w.ravel()[a:b], g.ravel()[a:b], Moments.zeros((b - a,)), rate, options)[0]
        for a, b in itertools.pairwise(bounds)
    ]
    assert_bitwise_equal(np.concatenate(parts), whole)
    stacked, moments = optimizer.adamw(w, g, Moments.zeros(w.shape, stacked=True), rate, options)
    assert_bitwise_equal(stacked.ravel(), whole)
    kept = Moments.zeros(w.shape, stacked=True).where(np.arange(12) == 3, moments)
    assert not kept.m[:3].any() and kept.m[3].any()
    np.testing.assert_array_equal(kept.powers[0, :, 0, 0] != 1, np.arange(12) == 3)


def test_learning_rate_warms_up_and_falls() -> None:
    options = AdamWOptions(rate=0.5, final_rate=0.125, warmup=4, decay_from=0.5)
    rates = [float(optimizer.learning_rate(options, s, 20)) for s in range(20)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5]
    assert rates[4:11] == [0.5] * 7 and rates[-1] == 0.125
    assert (np.diff(rates[10:]) < 0).all()


def test_square_sums_and_clipping() -> None:
    stack = np.random.default_rng(8).normal(size=(3, 6, 40)).astype(np.float32)
    sums = optimizer.square_sums(stack)
    np.testing.assert_allclose(sums, (stack.astype(np.float64) ** 2).sum(axis=(1, 2)), rtol=1e-6)
    for one, tensor in zip(sums, stack, strict=True):
        assert one == optimizer.square_sum(tensor)
    norm, factor = optimizer.clip_factor(np.float32(16), AdamWOptions(clip_norm=1.0))
    assert (norm, factor) == (4, 0.25)
    assert optimizer.clip_factor(np.float32(16), AdamWOptions(clip_norm=5.0))[1] == 1
    assert optimizer.clip_factor(np.float32(16), AdamWOptions(clip_norm=0.0))[1] == 1
