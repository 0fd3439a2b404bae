"""Tensor parallelism: the bits of one rank at every split, ragged widths included."""

from __future__ import annotations

import numpy as np
import pytest

from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights, expert_backward, expert_forward, weight_gradient
from mok_ref.heap import run_ranks
from mok_ref.numerics import to_bf16
from mok_ref.testing import assert_bitwise_equal
from mok_ref.training.ranks import Exchange
from mok_ref.training.tensor_parallel import SlicedExpert, axis_bounds, tp_backward, tp_forward

HIDDEN, INNER, TOKENS = 144, 272, 20


def values(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return to_bf16(rng.normal(size=shape).astype(np.float32))


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(1)
    x, dy = values(rng, TOKENS, HIDDEN), values(rng, TOKENS, HIDDEN)
    weights = ExpertWeights(
        values(rng, INNER, HIDDEN), values(rng, INNER, HIDDEN), values(rng, HIDDEN, INNER)
    )
    return x, dy, weights, rng.normal(size=TOKENS).astype(np.float32)


def run_split(case, ranks: int, weight, unit: int, limit: float | None):
    x, dy, weights, _ = case
    config = MoEConfig(HIDDEN, INNER, 1, 1, swiglu_limit=limit)

    def rank(heap):
        exchange = Exchange(heap)
        expert = SlicedExpert.cut(weights, heap.rank, heap.size, unit)
        forward = tp_forward(config, exchange, x, expert)
        backward = tp_backward(config, exchange, x, dy, forward, expert, weight)
        exchange.close()
        return forward, backward

    return run_ranks(ranks, rank)


@pytest.mark.parametrize("routed", [True, False], ids=["routed", "shared"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_same_bits_as_one_rank(case, ranks: int, routed: bool) -> None:
    x, dy, weights, weight = case
    limit = 1.5 if routed else None
    config = MoEConfig(HIDDEN, INNER, 1, 1, swiglu_limit=limit)
    weight = weight if routed else None
    forward = expert_forward(config, x, weights)
    backward = expert_backward(config, forward.gate, forward.up, dy, weights, weight)
    expected = {
        "dw_gate": weight_gradient(backward.d_gate, x, None, "exact"),
        "dw_up": weight_gradient(backward.d_up, x, None, "exact"),
        "dw_down": weight_gradient(dy, backward.hw, None, "exact"),
    }
    parts = run_split(case, ranks, weight, 128 if routed else 16, limit)
    for sliced, grads in parts:
        assert_bitwise_equal(sliced.y, forward.y, "y")
        assert_bitwise_equal(grads.dx, backward.dx, "dx")
        assert_bitwise_equal(grads.d_weight, backward.d_weight, "d_weight")
    for name, whole in expected.items():
        assert_bitwise_equal(np.concatenate([getattr(g, name) for _, g in parts]), whole, name)


def test_adding_partial_sums_would_change_bits(case) -> None:
    """Negative control: the usual scheme, W_down cut along I and partial sums added."""
    from mok_ref.tensor_core import tc

    x, _, weights, _ = case
    forward = expert_forward(MoEConfig(HIDDEN, INNER, 1, 1), x, weights)
    halves = [tc(forward.h[:, c], weights.down[:, c]) for c in (slice(0, 128), slice(128, None))]
    assert (halves[0] + halves[1] != tc(forward.h, weights.down)).any()


def test_slices_are_whole_units() -> None:
    np.testing.assert_array_equal(axis_bounds(400, 4), [0, 128, 256, 384, 400])
    np.testing.assert_array_equal(axis_bounds(144, 4), [0, 128, 144, 144, 144])
    np.testing.assert_array_equal(axis_bounds(144, 4, 16), [0, 48, 80, 112, 144])
    with pytest.raises(ValueError, match=r"^unit must be a multiple of 16"):
        axis_bounds(64, 2, 8)
