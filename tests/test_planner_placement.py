"""Placement: against the best of all placements, with litters and domains kept together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_ref.planner.placement import best_placement, in_order, longest_first, place_experts


def best_possible(load, bins):
    """Smallest largest bin over all assignments."""
    levels = (
        np.bincount(bin_of, weights=load, minlength=bins).max()
        for bin_of in itertools.product(range(bins), repeat=len(load))
    )
    return min(levels)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 3))
def test_longest_first_keeps_grahams_bound(load, bins):
    load = np.array(load, float)
    level = np.bincount(longest_first(load, bins), weights=load, minlength=bins).max()
    assert level <= best_possible(load, bins) * (4 / 3 - 1 / (3 * bins)) + 1e-9


def test_a_hand_made_case():
    owner = longest_first(np.array([8.0, 7, 6, 5, 4]), 2)
    assert owner.tolist() == [0, 1, 1, 0, 0]


def test_equal_loads_spread_evenly_and_always_alike():
    owner = longest_first(np.zeros(9), 3)
    assert np.bincount(owner).tolist() == [3, 3, 3]
    assert owner.tolist() == longest_first(np.zeros(9), 3).tolist()


def test_room_is_respected_and_too_little_room_refused():
    owner = longest_first(np.array([100.0, 1, 1, 1]), 2, most=2)
    assert np.bincount(owner).tolist() == [2, 2]
    with pytest.raises(ValueError, match="most \\* num_bins must hold all items"):
        longest_first(np.ones(5), 2, most=2)


def test_litters_stay_whole_on_a_rank():
    load = np.random.default_rng(1).integers(1, 100, 32).astype(float)
    owner = place_experts(load, 4, num_groups=8, keep="rank").owner
    assert all(len(set(litter)) == 1 for litter in owner.reshape(8, 4).tolist())


@pytest.mark.parametrize(("ranks", "per_domain", "groups"), [(8, 4, 4), (12, 3, 8), (64, 32, 8)])
def test_litters_stay_inside_a_domain(ranks, per_domain, groups):
    load = np.random.default_rng(2).integers(1, 100, 64).astype(float)
    placed = place_experts(load, ranks, groups, per_domain, keep="domain")
    domains = placed.owner.reshape(groups, -1) // per_domain
    assert all(len(set(row)) == 1 for row in domains.tolist())
    assert placed.load.sum() == load.sum()


def test_fewer_litters_than_domains_are_cut_rather_than_piled_up():
    placed = place_experts(np.ones(16), 4, num_groups=2, ranks_per_domain=1, keep="domain")
    assert np.bincount(placed.owner, minlength=4).tolist() == [4, 4, 4, 4]


def test_a_skewed_load_is_more_even_than_in_order():
    load = np.arange(64, dtype=float)[::-1] ** 2
    found = best_placement(load, 8, 8, 8, None)
    assert found[0].imbalance < 1.05 < in_order(load, 8).imbalance


def test_ranks_that_do_not_divide_the_experts():
    placed = place_experts(np.ones(256), 72)
    counts = np.bincount(placed.owner, minlength=72)
    assert counts.min() >= 3 and counts.max() == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "box"}, "keep must be one of"),
        ({"num_groups": 3}, "num_experts must be divisible by num_groups"),
        ({"ranks_per_domain": 3}, "num_ranks must be divisible by ranks_per_domain"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        place_experts(np.ones(8), 4, **options)
