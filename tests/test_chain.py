"""The ordered chain: replicated gradients with the same bits for every number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import splits_of
from oracles import bf16

from mok_ref import run_ranks, tc
from mok_ref.chain import ordered_chain
from mok_ref.testing import assert_bitwise_equal


def operands(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return bf16(rng.standard_normal((tokens, 5))), bf16(rng.standard_normal((tokens, 7)))


def run_chain(out: np.ndarray, into: np.ndarray, splits: Any, start: Any = None) -> np.ndarray:
    """The chain on len(splits) ranks; every rank must have the same bits."""
    ends = np.cumsum(splits)

    def work(heap: Any) -> list[np.ndarray]:
        mine = slice(ends[heap.rank] - splits[heap.rank], ends[heap.rank])
        heap.alloc("chain", (5, 7), np.float32)
        return [
            ordered_chain(heap, "chain", out[mine], into[mine], start, "exact") for _ in range(2)
        ]

    results = [total for rank in run_ranks(len(splits), work) for total in rank]
    for total in results[1:]:
        assert_bitwise_equal(total, results[0])
    return results[0]


# --------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize("tokens", [0, 1, 16, 100, 150])
def test_default_splits_give_one_product(ranks: int, tokens: int) -> None:
    out, into = operands(tokens)
    start = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
    splits = splits_of(tokens, ranks)
    assert_bitwise_equal(run_chain(out, into, splits), tc(out.T, into.T))
    assert_bitwise_equal(run_chain(out, into, splits, start), tc(out.T, into.T, start))


@pytest.mark.parametrize("splits", [[5, 20], [0, 7, 0, 33, 1], [17, 0, 0]])
def test_each_rank_begins_a_new_group(splits: list[int]) -> None:
    """Any splits: the product of the ranks' tokens, each padded to a multiple of 16."""
    out, into = operands(sum(splits))
    padded = []
    for values in (out, into):
        parts = np.split(values, np.cumsum(splits)[:-1])
        padded.append(np.concatenate([np.pad(p, ((0, -len(p) % 16), (0, 0))) for p in parts]))
    assert_bitwise_equal(run_chain(out, into, splits), tc(padded[0].T, padded[1].T))


# --------------------------------------------------------------------------- invariants


def test_splits_in_units_of_16_agree() -> None:
    out, into = operands(75)
    whole = run_chain(out, into, [75])
    for splits in ([16, 59], [0, 48, 27], [32, 0, 16, 27], [64, 11, 0, 0]):
        assert_bitwise_equal(run_chain(out, into, splits), whole)


def test_other_splits_show() -> None:
    out, into = operands(75)
    assert (run_chain(out, into, [10, 65]) != run_chain(out, into, [75])).any()


def test_adding_the_ranks_sums_shows() -> None:
    """What an all-reduce would give is something else."""
    out, into = operands(96)
    halves = tc(out[:48].T, into[:48].T) + tc(out[48:].T, into[48:].T)
    assert (halves != run_chain(out, into, [48, 48])).any()
