"""Fair shares of links against an exact oracle, and the property that defines them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_ref.planner.links import FULL, fair_rates


def exact_fair(usage, capacity, ceiling):
    """Progressive filling in rational numbers: no tolerance, one wire at a time."""
    usage = [[Fraction(u).limit_denominator(1000) for u in row] for row in usage]
    rate = [Fraction(0)] * len(ceiling)
    left = [Fraction(c) for c in capacity]
    growing = {i for i, c in enumerate(ceiling) if c > 0}
    while growing:
        steps = [Fraction(ceiling[i]) - rate[i] for i in growing]
        demand = [sum((row[i] for i in growing), Fraction(0)) for row in usage]
        steps += [room / d for room, d in zip(left, demand) if d > 0]
        step = min(steps)
        for i in growing:
            rate[i] += step
        left = [room - step * d for room, d in zip(left, demand)]
        full = {j for j, (room, d) in enumerate(zip(left, demand)) if d > 0 and room == 0}
        growing = {
            i for i in growing if rate[i] < ceiling[i] and not any(usage[j][i] > 0 for j in full)
        }
    return np.array([float(r) for r in rate])


def test_two_transfers_share_a_wire_and_a_third_takes_the_rest():
    usage = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    rates = fair_rates(usage, np.array([10.0, 100.0]), np.array([1e9, 1e9, 1e9]))
    assert rates == pytest.approx([5.0, 5.0, 95.0], rel=FULL)


def test_a_ceiling_leaves_its_share_to_others():
    usage = np.ones((1, 2))
    rates = fair_rates(usage, np.array([10.0]), np.array([2.0, 1e9]))
    assert rates == pytest.approx([2.0, 8.0], rel=FULL)


def test_idle_transfers_have_no_rate_and_local_ones_their_ceiling():
    usage = np.array([[1.0, 0.0, 1.0]])
    rates = fair_rates(usage, np.array([8.0]), np.array([0.0, 3.0, 1e9]))
    assert rates == pytest.approx([0.0, 3.0, 8.0], rel=FULL)


@st.composite
def networks(draw):
    wires, transfers = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    share = st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0])
    usage = draw(
        st.lists(st.lists(share, min_size=transfers, max_size=transfers), min_size=wires,
                 max_size=wires)
    )  # fmt: skip
    capacity = draw(st.lists(st.integers(1, 50), min_size=wires, max_size=wires))
    ceiling = draw(st.lists(st.integers(0, 80), min_size=transfers, max_size=transfers))
    return np.array(usage), np.array(capacity, float), np.array(ceiling, float)


@settings(max_examples=60, deadline=None)
@given(networks())
def test_rates_are_those_of_exact_filling(network):
    usage, capacity, ceiling = network
    exact = exact_fair(usage.tolist(), capacity.tolist(), ceiling.tolist())
    rates = fair_rates(usage, capacity, ceiling)
    assert (usage @ rates <= capacity * (1 + 1e-9)).all()
    # a wire counts as full FULL early, once per wire at most: what others lose adds up
    slack = FULL * capacity.max() * len(capacity) * 4
    assert np.abs(rates - exact).max() <= slack
