"""Combine: the weighted sum of a token's slots."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from oracles import bf16

from mok_ref.combine import combine_forward
from mok_ref.numerics import as_values
from mok_ref.testing import assert_bitwise_equal, random_bf16, random_routes


def make(seed: int, tokens: int, top_k: int = 4, columns: int = 5, missing: float = 0.25):
    """y, ids, weights, shared_y. Neighbouring slots cancel at 2^16, so that order reaches bf16."""
    rng = np.random.default_rng(seed)
    ids, weights = random_routes(rng, tokens, 9, top_k, missing)
    y = as_values(random_bf16(rng, (tokens, top_k, columns)))
    if top_k > 2:
        y[:, 1] *= np.float32(2.0**16)
        y[:, 2], weights[:, 2] = -y[:, 1], weights[:, 1]
    return y, ids, weights, as_values(random_bf16(rng, (tokens, columns)))


# --------------------------------------------------------------------------- oracles


@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.booleans())
def test_bits_of_a_scalar_loop(seed: int, tokens: int, with_shared: bool) -> None:
    y, ids, weights, shared = make(seed, tokens)
    expected = np.zeros((tokens, 5), np.float32)
    for t, c in np.ndindex(tokens, 5):
        acc = shared[t, c] if with_shared else np.float32(0)
        for k in range(4):
            if ids[t, k] >= 0:
                product = np.float32(weights[t, k] * y[t, k, c])
                acc = np.float32(acc + product)
        expected[t, c] = acc
    result = combine_forward(y, ids, weights, shared if with_shared else None)
    assert_bitwise_equal(result, bf16(expected))


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_near_the_sparse_product(top_k: int) -> None:
    """out = S @ y, S the (T, T*K) matrix of weights, in float64.

    K products and K sums in float32, one rounding to bf16.
    """
    y, ids, weights, shared = make(top_k, 300, top_k, 16)
    route = np.flatnonzero(ids.ravel() >= 0)
    values = weights.ravel()[route].astype(np.float64)
    shape = (300, 300 * top_k)
    matrix = scipy.sparse.csr_array((values, (route // top_k, route)), shape=shape)
    flat = y.reshape(-1, 16).astype(np.float64)
    exact = shared + matrix @ flat
    size = np.abs(shared) + abs(matrix) @ np.abs(flat)
    error = np.abs(combine_forward(y, ids, weights, shared) - exact)
    assert (error <= (2 * top_k) * 2.0**-24 * size + 2.0**-8 * np.abs(exact)).all()


# --------------------------------------------------------------------------- invariants


def test_slot_without_a_route_never_counts() -> None:
    """Whatever it holds, whatever its weight: NaN and Inf included."""
    y = np.full((3, 4, 2), np.nan, np.float32)
    ids = np.array([[2, -1, 5, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]], np.int32)
    weights = np.array([[0.5, 7, -2, 3], [np.inf, 1, 1, 1], [1, 1, 1, 1]], np.float32)
    y[0, 0], y[0, 2] = 4, 1
    result = combine_forward(y, ids, weights)
    assert_bitwise_equal(result, np.float32([[0, 0], [0, 0], [0, 0]]))  # 0.5 * 4 - 2 * 1 = 0
    shared = np.float32([[1, 2], [-0.0, 3], [5, 6]])
    result = combine_forward(y, ids, weights, shared)
    assert_bitwise_equal(result[1:], shared[1:])  # the shared expert alone, to the sign of zero


def test_order_of_slots_shows() -> None:
    """Slots ascending: where large terms cancel, the reversed order has other bits."""
    y, ids, weights, _ = make(3, 200, 8, 4, missing=0.0)
    backwards = combine_forward(
        y[:, ::-1].copy(), ids[:, ::-1].copy(), weights[:, ::-1].copy(), None
    )
    assert (backwards != combine_forward(y, ids, weights)).any()


@pytest.mark.parametrize("tokens", [16, 512, 4096])
def test_fifty_runs_have_the_same_bits(tokens: int) -> None:
    for top_k in range(1, 9):
        y, ids, weights, _ = make(top_k, tokens, top_k, 4)
        first = combine_forward(y, ids, weights)
        for _ in range(49):
            assert combine_forward(y, ids, weights).tobytes() == first.tobytes()


def test_overflow_and_nan_pass_through() -> None:
    y = np.float32([[[3e38], [3e38]], [[np.nan], [1]]])
    ids, weights = np.zeros((2, 2), np.int32), np.ones((2, 2), np.float32)
    result = combine_forward(as_values(y), ids, weights)
    assert np.isposinf(result[0, 0]) and np.isnan(result[1, 0])
