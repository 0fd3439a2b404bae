"""Recorded kernels on the device: the same bits as ordinary ones, and every tile once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mok_ref.casefile import load_case
from mok_ref.gpu.trace import recording
from mok_ref.planner.trace import STAMP_KINDS
from mok_ref.runner import Plan, RandomCase, Settings, make_plan, routes_of, run_virtual
from mok_ref.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture(autouse=True)
def hopper() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("only the Hopper kernels stamp their tasks")


def plan_of(case: Any, ranks: int | None) -> Plan:
    backward = case.dy is not None
    settings = Settings(ranks=ranks, device="cuda", backward=backward, path="hopper", timeout_s=60)
    return make_plan(case, settings)


def recorded(plan: Plan) -> tuple[Any, np.ndarray, int]:
    with recording(num_ranks=plan.config.ep_size) as recorder:
        result = run_virtual(plan)
        return result, recorder.read(), recorder.num_lost()


def blocks_by_groups(plan: Plan) -> dict[int, tuple[int, int]]:
    """Per rank: row blocks, and how many of them have rows for the second math warpgroup."""
    topk_ids, _ = routes_of(plan)
    rows = np.bincount(topk_ids[topk_ids >= 0], minlength=plan.config.num_experts)
    found = {}
    for rank in range(plan.config.ep_size):
        own = rows[plan.config.experts_of(rank)]
        last = own % 128
        full = int((own // 128).sum())
        found[rank] = full + int((last > 0).sum()), full + int((last > 64).sum())
    return found


@pytest.mark.parametrize("name", ["0", "3", "_placement"])
def test_recording_changes_no_bit(name: str) -> None:
    plan = plan_of(load_case(GOLDEN / f"case{name}.npz"), None)
    result, stamps, _ = recorded(plan)
    plain = run_virtual(plan)
    assert len(stamps) > 0
    for tensor, values in plain.tensors.items():
        assert_bitwise_equal(np.asarray(result.tensors[tensor]), np.asarray(values), tensor)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_tile_is_recorded_once(ranks: int) -> None:
    case = RandomCase(2048, 512, 384, 16, 4).make()
    plan = plan_of(case, ranks)
    _, stamps, lost = recorded(plan)
    assert lost == 0 and (stamps["end"] >= stamps["start"]).all()
    columns = {"gate_up": 3, "down": 2, "dgrad_hidden": 2, "dgrad_input": 2}
    for rank, (low, high) in blocks_by_groups(plan).items():
        own = stamps[stamps["rank"] == rank]
        for kind, count in columns.items():
            tiles = own[own["kind"] == STAMP_KINDS.index(kind)]
            keys = np.stack([tiles["row_block"], tiles["column"], tiles["warp"]], axis=1)
            assert len(tiles) == (low + high) * count, kind
            assert len(np.unique(keys, axis=0)) == len(tiles), kind


def test_a_small_buffer_loses_tasks_and_no_bits() -> None:
    plan = plan_of(RandomCase(2048, 512, 384, 16, 4).make(), 1)
    with recording(capacity=1) as recorder:
        result = run_virtual(plan)
        assert recorder.num_lost() > 0
    assert result.digest == run_virtual(plan).digest
