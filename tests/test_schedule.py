"""The pull schedule against brute force, and its properties for any routes."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from cases import ids_with_rows
from hypothesis import given
from hypothesis import strategies as st
from oracles import bit_reverse, canonical_rows, round_robin_rows

from mok_ref import MoEConfig
from mok_ref.ring import TokenRing
from mok_ref.schedule import (
    Schedule,
    bit_reversed_order,
    build_schedule,
    default_splits,
    forward_task_order,
    pull_order,
    walk,
)


def config_of(experts: int, top_k: int, ranks: int, order: str, placed: bool) -> MoEConfig:
    rng = np.random.default_rng([experts, ranks])
    owners = tuple(int(r) for r in rng.integers(0, ranks, experts))
    return MoEConfig(
        8, 8, experts, top_k, ranks, row_order=order, placement=owners if placed else None
    )


@st.composite
def batches(draw):
    """(config, ids (N, K), tokens per rank): any routes, uneven ranks, empty ranks."""
    ranks = draw(st.integers(1, 6))
    placed = draw(st.booleans())
    experts = draw(st.integers(1, 9)) if placed else ranks * draw(st.integers(1, 3))
    top_k = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks))
    seed = draw(st.integers(0, 2**32 - 1))
    few = draw(st.booleans())  # all routes to the first experts: long segments, idle experts
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, 1 + few if few else experts, (sum(counts), top_k))
    ids = np.minimum(ids, experts - 1).astype(np.int32)
    order = draw(st.sampled_from(["canonical", "round_robin"]))
    return config_of(experts, top_k, ranks, order, placed), ids, np.array(counts)


def rows_by_expert(
    config: MoEConfig, ids: np.ndarray, counts: np.ndarray
) -> dict[int, list[tuple[int, int]]]:
    """What every rank's table says: expert -> its (global token, slot) in row order."""
    first = np.concatenate([[0], np.cumsum(counts)])
    rows = {}
    for rank in range(len(counts)):
        table = build_schedule(config, rank, ids, counts)
        for local, expert in enumerate(table.expert_ids):
            segment = table.segment(local)
            count = int(table.expert_count[local])
            sources, peer_rows = table.peer_rank[segment], table.peer_row[segment]
            assert (sources[:count] >= 0).all() and (sources[count:] == -1).all()
            assert (peer_rows[count:] == -1).all()
            rows[int(expert)] = [
                (int(first[s] + r // config.top_k), int(r % config.top_k))
                for s, r in zip(sources[:count], peer_rows[:count], strict=True)
            ]
    return rows


# --------------------------------------------------------------------------- oracles


@given(batches())
def test_rows_match_brute_force(batch) -> None:
    config, ids, counts = batch
    rows = rows_by_expert(config, ids, counts)
    assert sorted(rows) == list(range(config.num_experts))
    for expert, got in rows.items():
        if config.row_order == "canonical":
            assert got == canonical_rows(ids, expert)
        else:
            assert got == round_robin_rows(ids, expert, counts.tolist())


@pytest.mark.parametrize("num_tokens", [*range(40), 64, 65, 100])
def test_bit_reversed_order(num_tokens: int) -> None:
    expected = sorted(range(num_tokens), key=lambda g: bit_reverse(g, num_tokens))
    assert bit_reversed_order(num_tokens).tolist() == expected


def test_known_table() -> None:
    """Two ranks, two tokens each, one expert: written down by hand from the spec."""
    ids = np.array([[0, -1], [0, 0], [0, -1], [-1, 0]], np.int32)
    config = MoEConfig(8, 8, 1, 2, 2, placement=(1,))
    table = build_schedule(config, 1, ids, np.array([2, 2]))
    assert table.peer_rank[:5].tolist() == [0, 1, 0, 0, 1]  # tokens 0, 2, 1, 1, 3
    assert table.peer_row[:5].tolist() == [0, 0, 2, 3, 3]
    turns = MoEConfig(8, 8, 1, 2, 2, placement=(1,), row_order="round_robin")
    table = build_schedule(turns, 1, ids, np.array([2, 2]))
    assert table.peer_rank[:5].tolist() == [0, 1, 0, 1, 0]
    assert table.peer_row[:5].tolist() == [0, 0, 2, 3, 3]
    assert build_schedule(config, 0, ids, np.array([2, 2])).num_rows == 0


# --------------------------------------------------------------------------- invariants


@given(batches())
def test_each_route_appears_exactly_once(batch) -> None:
    config, ids, counts = batch
    rows = [(t, k, e) for e, r in rows_by_expert(config, ids, counts).items() for t, k in r]
    expected = [(t, k, int(ids[t, k])) for t, k in np.ndindex(*ids.shape) if ids[t, k] >= 0]
    assert sorted(rows) == sorted(expected)


@given(batches())
def test_segments_are_padded_blocks(batch) -> None:
    config, ids, counts = batch
    for rank in range(config.ep_size):
        table = build_schedule(config, rank, ids, counts)
        _check_layout(table)
        np.testing.assert_array_equal(table.expert_ids, config.experts_of(rank))


def _check_layout(table: Schedule) -> None:
    assert table.num_rows == table.expert_offset[-1] == 128 * table.num_row_blocks
    assert (table.expert_offset % 128 == 0).all()
    padded = np.diff(table.expert_offset)
    assert ((padded >= table.expert_count) & (padded < table.expert_count + 128)).all()
    for block, (expert, valid) in enumerate(
        zip(table.row_block_expert, table.row_block_valid, strict=True)
    ):
        rows = table.peer_rank[128 * block : 128 * block + 128]
        assert 1 <= valid <= 128
        assert (rows[:valid] >= 0).all() and (rows[valid:] == -1).all()
        assert table.expert_offset[expert] <= 128 * block < table.expert_offset[expert + 1]
    kinds = {f.name: getattr(table, f.name).dtype for f in fields(table)}
    assert kinds["expert_offset"] == kinds["expert_count"] == np.int64
    assert kinds["peer_rank"] == kinds["peer_row"] == np.int32


@given(batches(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_canonical_order_does_not_depend_on_ranks(batch, other_ranks, random) -> None:
    """Another number of ranks, other splits, another placement: the same rows per expert."""
    config, ids, counts = batch
    cuts = sorted(random.randint(0, len(ids)) for _ in range(other_ranks - 1))
    other_counts = np.diff([0, *cuts, len(ids)])
    canonical = config_of(config.num_experts, config.top_k, config.ep_size, "canonical", True)
    other = config_of(config.num_experts, config.top_k, other_ranks, "canonical", True)
    assert rows_by_expert(canonical, ids, counts) == rows_by_expert(other, ids, other_counts)


def test_round_robin_depends_on_ranks() -> None:
    ids = np.zeros((8, 1), np.int32)
    rows = [
        rows_by_expert(config_of(1, 1, r, "round_robin", True), ids, default)
        for r, default in ((1, np.array([8])), (2, np.array([4, 4])))
    ]
    assert rows[0] != rows[1]


def test_consecutive_rows_come_from_scattered_ranks() -> None:
    """Canonical order spreads the sources: 4 equal ranks, neighbours never from one rank."""
    config = MoEConfig(8, 8, 4, 1, 4)
    table = build_schedule(config, 0, np.zeros((256, 1), np.int32), np.full(4, 64))
    assert (np.diff(table.peer_rank[:256]) != 0).all()


def test_same_routes_give_the_same_table_again() -> None:
    config = MoEConfig(8, 8, 4, 2, 2)
    ids = ids_with_rows(np.random.default_rng(0), [9, 200, 0, 31])
    first = build_schedule(config, 1, ids, np.array([60, 60]))
    for _ in range(100):
        again = build_schedule(config, 1, ids, np.array([60, 60]))
        for field in fields(first):
            a, b = getattr(first, field.name), getattr(again, field.name)
            assert a.tobytes() == b.tobytes()


@given(st.integers(0, 5000), st.integers(1, 80))
def test_default_splits_are_units_of_16(num_tokens: int, ranks: int) -> None:
    splits = default_splits(num_tokens, ranks)
    assert splits.sum() == num_tokens and len(splits) == ranks
    units = -(-num_tokens // 16)
    expected = [units // ranks + (r < units % ranks) for r in range(ranks)]
    np.testing.assert_array_equal(-(-splits // 16), expected)
    partial = np.flatnonzero(splits % 16)
    assert len(partial) <= 1
    assert not splits[partial[0] + 1 :].any() if len(partial) else True


# --------------------------------------------------------------------------- pull order


@given(st.lists(st.integers(-1, 5), max_size=80), st.integers(0, 5))
def test_pull_order_alternates_over_sources(sources: list[int], rank: int) -> None:
    peer_rank = np.array(sources, np.int32)
    order = pull_order(peer_rank, rank, 6)
    assert sorted(order.tolist()) == list(range(len(sources)))
    pulled = peer_rank[order]
    real = pulled[pulled >= 0]
    assert (pulled[len(real) :] == -1).all()  # padding comes last
    rounds, seen = [], {}
    for source in real.tolist():
        seen[source] = seen.get(source, 0) + 1
        rounds.append((seen[source], (source - rank - 1) % 6))
    assert rounds == sorted(rounds)  # turn by turn, each turn from the right-hand neighbour on


# --------------------------------------------------------------------------- the walk


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_walk_covers_every_row_once(blocks: int, minis: int, mini_blocks: int) -> None:
    rows, mini = 128 * blocks, 128 * mini_blocks
    for direction in ("forward", "backward"):
        batches_ = list(walk(rows, mini * minis, mini, direction))
        covered = sorted(r for b in batches_ for r in range(b.first, b.end, 128))
        assert covered == list(range(0, rows, 128))
        macros = [b.macrobatch for b in batches_]
        assert macros == sorted(macros, reverse=direction == "forward")
        for a, b in pairwise(batches_):
            assert a.macrobatch != b.macrobatch or a.first < b.first
        for b in batches_:
            assert b.index == b.first // mini and b.end - b.first <= mini


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4))
def test_task_order_never_overwrites_a_live_slot(blocks: int, minis: int, mini_blocks: int) -> None:
    """Run the walk on a ring that refuses overwriting; each task waits for earlier ones only."""
    rows, mini = 128 * blocks, 128 * mini_blocks
    batches_ = list(walk(rows, mini * minis, mini, "forward"))
    ring = TokenRing(mini * minis, 1, np.int64)
    ready, finished = set(), []
    for step, batch in forward_task_order(batches_, mini * minis):
        if step == "gate_up":
            ring.claim(batch)[:, 0] = np.arange(batch.first, batch.end)
            ready.add(batch.index)
        else:
            assert batch.index in ready
            assert ring.read(batch, batch.rows)[:, 0].tolist() == list(
                range(batch.first, batch.end)
            )
            ring.retire(batch)
            finished.append(batch.index)
    assert finished == [b.index for b in batches_]


def test_down_trails_by_one_minibatch() -> None:
    batches_ = list(walk(128 * 4, 128 * 4, 128, "forward"))
    steps = [(step, b.index) for step, b in forward_task_order(batches_, 128 * 4)]
    assert steps == [
        ("gate_up", 0),
        ("gate_up", 1),
        ("down", 0),
        ("gate_up", 2),
        ("down", 1),
        ("gate_up", 3),
        ("down", 2),
        ("down", 3),
    ]
