"""Dispatch: pulls and pushes of rows, and the sum of a token's dx."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from oracles import bf16

from mok_ref import MoEConfig
from mok_ref.dispatch import dispatch_backward, dispatch_forward, push_rows
from mok_ref.numerics import as_values
from mok_ref.schedule import build_schedule
from mok_ref.testing import assert_bitwise_equal, random_bf16, random_routes


def table_of(seed: int, counts: list[int], experts: int = 4, top_k: int = 3):
    """(schedule of rank 1, ids (N, K)) with holes."""
    ids, _ = random_routes(np.random.default_rng(seed), sum(counts), experts, top_k, 0.3)
    config = MoEConfig(8, 8, experts, top_k, len(counts), placement=(1,) * experts)
    return build_schedule(config, 1, ids, np.array(counts)), ids


# --------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("counts", [[30, 25], [0, 40], [1, 0, 50, 7]])
def test_pull_is_a_permutation_matrix(counts: list[int]) -> None:
    """Rows = S @ x of the whole batch, S sparse with one 1 per real row; padding becomes 0."""
    table, _ = table_of(1, counts)
    x = [random_bf16(np.random.default_rng([2, r]), (n, 8)) for r, n in enumerate(counts)]
    out = np.full((table.num_rows, 8), np.nan, np.float32)
    values = [as_values(v) for v in x]
    dispatch_forward(
        table, slice(0, table.num_rows), 3, 1, len(counts), lambda rank: values[rank], out
    )
    first = np.concatenate([[0], np.cumsum(counts)])
    rows = np.flatnonzero(table.peer_rank >= 0)
    token = first[table.peer_rank[rows]] + table.peer_row[rows] // 3
    ones = np.ones(len(rows), np.float32)
    shape = (table.num_rows, sum(counts))
    pull = scipy.sparse.csr_array((ones, (rows, token)), shape=shape)
    assert_bitwise_equal(out, (pull @ np.concatenate(values)).astype(np.float32) + 0)


def test_part_of_the_rows() -> None:
    table, _ = table_of(3, [100, 100])
    x = [np.arange(100, dtype=np.float32)[:, None] + 1000 * r for r in range(2)]
    whole, piece = (np.empty((n, 1), np.float32) for n in (table.num_rows, 128))
    dispatch_forward(table, slice(0, table.num_rows), 3, 1, 2, lambda rank: x[rank], whole)
    dispatch_forward(table, slice(128, 256), 3, 1, 2, lambda rank: x[rank], piece)
    assert_bitwise_equal(piece, whole[128:256])


def test_every_route_has_its_own_slot() -> None:
    """Pushed rows land where their route is; slots without a route and padding stay untouched."""
    counts = [30, 0, 25]
    table, ids = table_of(4, counts)
    values = np.arange(table.num_rows, dtype=np.float32)[:, None] + 1
    slots = [np.full((n * 3, 1), np.nan, np.float32) for n in counts]
    push_rows(table, slice(0, table.num_rows), values, lambda rank: slots[rank])
    landed = np.concatenate(slots)[:, 0]
    np.testing.assert_array_equal(np.isnan(landed), ids.ravel() < 0)
    pushed = landed[~np.isnan(landed)]
    assert sorted(pushed) == sorted(values[table.peer_rank >= 0, 0])


def test_pushes_may_arrive_in_any_order() -> None:
    counts = [30, 25]
    table, _ = table_of(5, counts)
    values = np.random.default_rng(6).standard_normal((table.num_rows, 2)).astype(np.float32)
    results = []
    for order in (range(0, table.num_rows, 128), range(table.num_rows - 128, -1, -128)):
        slots = [np.zeros((n * 3, 2), np.float32) for n in counts]
        for first in order:
            rows = slice(first, first + 128)
            push_rows(table, rows, values[rows], lambda rank, slots=slots: slots[rank])
        results.append(np.concatenate(slots))
    assert_bitwise_equal(*results)


# --------------------------------------------------------------------------- backward


@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.booleans(), st.booleans())
def test_dx_is_added_in_slot_order(seed: int, tokens: int, shared: bool, router: bool) -> None:
    """Bits of a scalar loop: the shared expert first, slots ascending, the router last."""
    rng = np.random.default_rng(seed)
    slots = as_values(random_bf16(rng, (tokens, 4, 3)))
    slots[:, 1] *= np.float32(2.0**16)
    slots[:, 2] = -slots[:, 1]  # large terms cancel, so that the order reaches bf16
    ids, _ = random_routes(rng, tokens, 6, 4, 0.15)
    shared_dx = as_values(random_bf16(rng, (tokens, 3))) if shared else None
    router_dx = as_values(random_bf16(rng, (tokens, 3))) if router else None
    expected = np.zeros((tokens, 3), np.float32)
    for t, c in np.ndindex(tokens, 3):
        acc = shared_dx[t, c] if shared else np.float32(0)
        for k in range(4):
            if ids[t, k] >= 0:
                acc = np.float32(acc + slots[t, k, c])
        if router:
            acc = np.float32(acc + router_dx[t, c])
        expected[t, c] = acc
    assert_bitwise_equal(dispatch_backward(slots, ids, shared_dx, router_dx), bf16(expected))


def test_dx_near_the_sparse_sum() -> None:
    """dx = S^T @ rows in float64; 5 float32 additions and one rounding to bf16."""
    rng = np.random.default_rng(7)
    tokens, top_k = 200, 5
    slots = as_values(random_bf16(rng, (tokens, top_k, 16)))
    ids, _ = random_routes(rng, tokens, 9, top_k, 0.2)
    route = np.flatnonzero(ids.ravel() >= 0)
    shape = (tokens, tokens * top_k)
    add = scipy.sparse.csr_array((np.ones(len(route)), (route // top_k, route)), shape=shape)
    exact = add @ slots.reshape(-1, 16).astype(np.float64)
    size = add @ np.abs(slots.reshape(-1, 16)).astype(np.float64)
    error = np.abs(dispatch_backward(slots, ids, None, None) - exact)
    assert (error <= 5 * 2.0**-24 * size + 2.0**-8 * np.abs(exact)).all()


def test_slot_without_a_route_is_never_read() -> None:
    slots = np.full((2, 2, 3), np.nan, np.float32)
    slots[0, 1] = 5
    ids = np.array([[-1, 0], [-1, -1]], np.int32)
    result = dispatch_backward(slots, ids, None, None)
    assert_bitwise_equal(result, np.float32([[5, 5, 5], [0, 0, 0]]))
