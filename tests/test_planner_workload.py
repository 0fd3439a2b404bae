"""Routing as counts: against the real schedule of the layer, and against probability."""

from __future__ import annotations

import numpy as np
import pytest

from mok_ref.config import MoEConfig
from mok_ref.planner.placement import in_order, place_experts
from mok_ref.planner.programme import minibatch_tables
from mok_ref.planner.workload import (
    Workload,
    all_to_one,
    counts_of,
    draw_ids,
    foreign_routing,
    inclusion,
    make_workload,
    popularity,
    recorded_workload,
    window_counts,
)
from mok_ref.schedule import build_schedule


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("placed", [False, True])
def test_minibatches_are_those_of_the_real_schedule(ranks, placed):
    num_experts, top_k = 24, 3
    work = make_workload(ranks, 96, num_experts, top_k, skew=1.0, seed=ranks)
    placement = in_order(work.expert_load, ranks)
    if placed:
        placement = place_experts(work.expert_load, ranks)
    config = MoEConfig(64, 64, num_experts, top_k, ranks, placement=tuple(placement.owner.tolist()))
    tables = minibatch_tables(work, placement.owner, 256)
    for rank, table in enumerate(tables):
        schedule = build_schedule(config, rank, work.topk_ids, work.tokens)
        assert table.num_rows == schedule.num_rows
        for q in range(len(table.sources)):
            peers = schedule.peer_rank[q * 256 : (q + 1) * 256]
            real = np.bincount(peers[peers >= 0], minlength=ranks)
            assert table.sources[q].tolist() == real.tolist()
        assert table.rows.sum(axis=0).tolist() == schedule.expert_count.tolist()


def test_without_ids_rows_come_evenly_from_their_sources():
    work = make_workload(4, 256, 16, 2, seed=3)
    bare = Workload(work.tokens, work.counts, "bare")
    owner = in_order(work.expert_load, 4).owner
    for exact, even in zip(minibatch_tables(work, owner, 512), minibatch_tables(bare, owner, 512)):
        assert exact.sources.sum(axis=0) == pytest.approx(even.sources.sum(axis=0))
        assert exact.rows.tolist() == even.rows.tolist()


@pytest.mark.parametrize("skew", [0.0, 1.0, 4.0])
def test_a_tokens_experts_are_distinct(skew):
    rng = np.random.default_rng(5)
    ids = draw_ids(500, 6, popularity(16, skew, rng), rng)
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert ids.min() >= 0 and ids.max() < 16


def test_drawing_is_drawing_without_replacement():
    """Frequency of each expert among K = 2 of E = 3 with p = (0.5, 0.3, 0.2), by hand:
    P(e in set) = p_e + sum over first choices f of p_f * p_e / (1 - p_f)."""
    p = np.array([0.5, 0.3, 0.2])
    expected = [p[e] + sum(p[f] * p[e] / (1 - p[f]) for f in range(3) if f != e) for e in range(3)]
    ids = draw_ids(40_000, 2, p, np.random.default_rng(0))
    share = np.bincount(ids.ravel(), minlength=3) / 40_000
    # standard deviation at most sqrt(1/4/40000) = 0.0025
    assert share == pytest.approx(expected, abs=0.0125)


def test_counts_drawn_directly_resemble_drawn_ids():
    chances = popularity(64, 1.0, np.random.default_rng(0))
    ids = draw_ids(20_000, 8, chances, np.random.default_rng(1))
    share = np.bincount(ids.ravel(), minlength=64) / 20_000
    assert inclusion(chances, 8).sum() == pytest.approx(8, rel=1e-6)
    assert inclusion(chances, 8) == pytest.approx(share, abs=0.05)


def test_more_slots_than_experts_repeat():
    ids = draw_ids(100, 8, np.full(4, 0.25), np.random.default_rng(0))
    assert ids.shape == (100, 8) and set(np.unique(ids)) == {0, 1, 2, 3}


def test_traffic_conserves_rows_and_missing_routes_count_nothing():
    ids = np.array([[0, -1], [1, 2], [-1, -1], [3, 0]], np.int32)
    tokens = np.array([2, 2])
    work = Workload(tokens, counts_of(ids, tokens, 4), "made")
    traffic = work.traffic(np.array([0, 0, 1, 1]))
    assert traffic.tolist() == [[2.0, 1.0], [1.0, 1.0]]
    assert work.rows_of_ranks(np.array([0, 0, 1, 1])).tolist() == [3.0, 2.0]


def test_all_to_one_hits_the_rank_that_owns_most():
    owner = np.array([0, 1, 1, 1, 2])
    work = all_to_one(3, 10, owner, 3)
    assert work.rows_of_ranks(owner).tolist() == [0.0, 90.0, 0.0]


def test_recorded_tokens_are_repeated_to_fill_the_batch(tmp_path):
    ids = np.random.default_rng(0).integers(0, 8, (40, 2)).astype(np.int32)
    path = tmp_path / "case.npz"
    np.savez(path, topk_ids=ids)
    work = recorded_workload(path, 3, 50, 8, 2)
    assert work.tokens.tolist() == [50, 50, 50]
    assert work.topk_ids.tolist() == [ids[g % 40].tolist() for g in range(150)]
    assert work.counts.tolist() == counts_of(work.topk_ids, work.tokens, 8).tolist()


def test_counts_of_a_window_are_those_of_its_tokens():
    """Large batches are counted window by window, without making their token ids."""
    ids = np.random.default_rng(0).integers(-1, 8, (40, 2)).astype(np.int32)
    for first, num in ((0, 40), (35, 3), (35, 25), (7, 130), (80, 0)):
        tokens = np.array([ids[g % 40] for g in range(first, first + num)]).reshape(-1)
        expected = np.bincount(tokens[tokens >= 0].astype(int), minlength=8)
        assert window_counts(ids, first, num, 8).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": np.zeros(3)}, "missing topk_ids"),
        ({"topk_ids": np.zeros((3, 2))}, "topk_ids must be"),
        ({"topk_ids": np.full((3, 2), 9)}, "topk_ids must lie in -1..7"),
        ({"topk_ids": np.zeros((3, 3), int)}, "topk_ids must have the model's 2 slots"),
        ({"topk_ids": np.array([[None, 1]])}, "not a readable .npz file of plain arrays"),
        (
            {"topk_ids": np.zeros((3, 2), int), "w_gate": np.zeros((4, 1, 1), np.uint16)},
            "must be of the model's 8 experts, got 4",
        ),
    ],
)
def test_a_wrong_recorded_file_is_refused(tmp_path, content, message):
    path = tmp_path / "case.npz"
    np.savez(path, **content)
    with pytest.raises(ValueError, match=f"case.npz: {message}"):
        recorded_workload(path, 2, 16, 8, 2)


def test_routing_that_never_uses_half_of_the_experts_is_doubted():
    tokens = np.array([200])
    for highest, is_doubtful in ((4, True), (5, False), (8, False)):
        ids = np.arange(400).reshape(200, 2) % highest
        work = Workload(tokens, counts_of(ids, tokens, 8), "file.npz", ids)
        assert bool(foreign_routing(work)) == is_doubtful
    few = np.zeros((10, 2), int)  # too few routes to tell
    assert foreign_routing(Workload(np.array([10]), counts_of(few, np.array([10]), 8), "f")) == ""


def test_a_truncated_recorded_file_is_refused(tmp_path):
    path = tmp_path / "case.npz"
    np.savez(path, topk_ids=np.zeros((300, 2), int))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"case\.npz: not a readable"):
        recorded_workload(path, 2, 16, 8, 2)
