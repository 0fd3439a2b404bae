"""One digest for any number of ranks: virtual ranks and MPI processes."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

import numpy as np
import pytest
from cases import Sizes, make_case, rank_step, run_case

from mok_ref import MoEConfig, run_ranks
from mok_ref.testing import assert_bitwise_equal, digest

RANK_SIZES = Sizes(
    num_tokens=215, hidden=32, inner=16, experts=72, top_k=4, shared=24, pattern="skewed"
)
UNEVEN = {  # 215 tokens; 0 and 1 among them
    "one-and-none": [0, 1, 214],
    "last-empty": [107, 108, 0],
    "odd": [7, 1, 0, 100, 33, 1, 0, 73],
    "one-rank-has-all": [0, 0, 215, 0],
}
IN_UNITS = {"uneven-units": [16, 0, 160, 39], "first-empty": [0, 208, 7], "early-end": [215, 0, 0]}


def sizes_of(dtype: str) -> Sizes:
    return RANK_SIZES if dtype == "bf16" else Sizes(**{**vars(RANK_SIZES), "dtype": dtype})


@lru_cache
def one_rank(dtype: str = "bf16") -> dict[str, np.ndarray]:
    return run_case(make_case(sizes_of(dtype)), 1)


def without_replicated(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in tensors.items() if not name.startswith("shared_")}


# --------------------------------------------------------------------------- virtual ranks


@pytest.mark.parametrize(
    ("dtype", "ranks"), [*(("bf16", r) for r in (2, 3, 4, 8, 72)), ("mxfp8", 3), ("mxfp8", 72)]
)
def test_one_digest_for_all_ranks(dtype: str, ranks: int) -> None:
    """Outputs and every gradient, the replicated ones by the ordered chain."""
    result = run_case(make_case(sizes_of(dtype)), ranks)
    assert len(result) == 9
    assert digest(result) == digest(one_rank(dtype))


@pytest.mark.parametrize("name", IN_UNITS)
def test_splits_in_units_of_16_agree_in_everything(name: str) -> None:
    splits = IN_UNITS[name]
    placement = tuple(np.arange(72) % len(splits))
    result = run_case(make_case(RANK_SIZES), splits, placement=placement)
    assert digest(result) == digest(one_rank())


@pytest.mark.parametrize("name", UNEVEN)
def test_other_splits_agree_in_all_but_replicated_gradients(name: str) -> None:
    splits = UNEVEN[name]
    result = run_case(make_case(RANK_SIZES), splits)
    assert digest(without_replicated(result)) == digest(without_replicated(one_rank()))
    for part in ("gate", "up", "down"):  # another grouping of the same sum
        theirs, ours = (t[f"shared_dw_{part}"] for t in (result, one_rank()))
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5 * np.abs(ours).max())


def test_replicated_gradients_repeat_for_the_same_split() -> None:
    case, splits = make_case(RANK_SIZES), UNEVEN["odd"]
    assert digest(run_case(case, splits)) == digest(run_case(case, splits))


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(tuple([2] * 72), id="one-rank-owns-all"),
        pytest.param(tuple(np.arange(72) % 3), id="round-robin"),
        pytest.param(tuple(np.random.default_rng(1).integers(0, 3, 72)), id="random"),
    ],
)
def test_placement_changes_nothing(placement: tuple[int, ...]) -> None:
    result = run_case(make_case(RANK_SIZES), 3, placement=placement)
    assert digest(result) == digest(one_rank())


def test_ranks_and_batches_together() -> None:
    case = make_case(RANK_SIZES)
    for ranks, macro, mini, save in ((2, 256, 128, "none"), (8, 128, 128, "ring")):
        result = run_case(case, ranks, save, macrobatch=macro, minibatch=mini)
        assert digest(result) == digest(one_rank())


def test_round_robin_agrees_in_what_no_row_order_touches() -> None:
    """y, dx and d_topk_weights; weight gradients have one value per number of ranks.

    Also the proof that these rows are many enough for their order to show.
    """
    case, seen = make_case(RANK_SIZES), set()
    for ranks in (1, 3):
        result = run_case(case, ranks, row_order="round_robin")
        for name in ("y", "dx", "d_topk_weights"):
            assert_bitwise_equal(result[name], one_rank()[name], name)
        seen.add(digest({"dw_down": result["dw_down"]}))
        again = run_case(case, ranks, row_order="round_robin", macrobatch=128)
        assert digest(again) == digest(result)
    assert len(seen) == 2


def test_digest_sees_everything() -> None:
    """Name, dtype, shape, one bit and the sign of zero count; a NaN's payload does not."""
    x = np.array([[0.0, np.nan]], np.float32)
    base = digest({"x": x})
    others = [{"y": x}, {"x": x.T}, {"x": x.astype(np.float64)}, {"x": -x}, {"x": x, "z": x}]
    assert len({base, *map(digest, others)}) == 6
    payload = x.copy()
    payload.view(np.uint32)[0, 1] = 0xFFC00001
    assert digest({"x": payload}) == base
    assert digest({"b": x, "a": x}) == digest({"a": x, "b": x})


def test_digest_by_hand() -> None:
    """The format of spec section 9, written out."""
    x = np.array([[1.0, 2.0]], np.float32)
    text = b'{"dtype": "float32", "name": "x", "shape": [1, 2]}\n'
    expected = hashlib.sha256(text + bytes([0, 0, 128, 63, 0, 0, 0, 64])).hexdigest()
    assert digest({"x": x}) == expected


# --------------------------------------------------------------------------- errors


def test_first_error_reaches_the_caller() -> None:
    def work(heap) -> None:
        if heap.rank == 2:
            raise ValueError("rank 2 does not like its input")
        heap.barrier()

    with pytest.raises(ValueError, match="rank 2 does not like its input"):
        run_ranks(4, work)


def test_sizes_must_agree() -> None:
    def work(heap) -> None:
        heap.alloc("buffer", (4 + heap.rank // 2, 3), np.float32)

    with pytest.raises(
        ValueError, match=r"must be the same on all ranks, got .*'buffer' \(., 3\) float32"
    ):
        run_ranks(3, work)


def test_heap_of_another_size_is_refused() -> None:
    case = make_case(RANK_SIZES)
    config = MoEConfig(32, 16, 72, 4, 2, 24)

    def work(heap) -> None:
        rank_step(heap, case, config, np.array([100, 100, 15]))

    with pytest.raises(ValueError, match="ep_size must be the heap's size 3, got 2"):
        run_ranks(3, work)


# --------------------------------------------------------------------------- MPI processes


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_mpi_processes_give_the_same_digest(ranks: int, mpi_run) -> None:
    uneven = {3: ["0,1,214"], 4: ["0,0,215,0", "16,0,160,39"]}.get(ranks, [])
    result = mpi_run(ranks, "digests", "", *uneven)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 1 + len(uneven)
    assert lines[0]["all"] == digest(one_rank())
    for line in lines:
        assert line["own"] == digest(without_replicated(one_rank()))
    if ranks == 4:
        assert lines[2]["all"] == digest(one_rank())


@pytest.mark.mpi
def test_mpi_allocation_sizes_must_agree(mpi_run) -> None:
    result = mpi_run(3, "disagree")
    assert result.returncode != 0
    assert [report["rank"] for report in result.reports] == [0, 1, 2]
    for report in result.reports:
        assert "must be the same on all ranks" in report["error"]
        assert "'buffer' (5, 3) float32 on rank 2" in report["error"]
