"""Which tiles the tickets of the dgrad kernel stand for: backward_schedule.cuh on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from gpu.host_cuda import HERE
from gpu.host_cuda import compiler as host_compiler
from host_hopper import kernels

from mok_ref.config import ROW_TILE
from mok_ref.gpu import hopper_backward
from mok_ref.gpu.params import LAYER_PARAMS, SCHEDULE_INFO, new_params

AGAIN, HIDDEN, INPUT = 1, 2, 3  # TaskKind
TILE = np.dtype([(name, np.int32) for name in ("kind", "block", "partner", "column", "exists")])
HIDDEN_COLUMNS, INPUT_COLUMNS = 3, 8
COLUMNS = {AGAIN: 2 * HIDDEN_COLUMNS, HIDDEN: HIDDEN_COLUMNS, INPUT: INPUT_COLUMNS}


def walk(
    blocks: Sequence[int], mini_blocks: int, saved_blocks: int, ctas: int, before: int = 0
) -> np.ndarray:
    """TILE [tickets, CTAs of a cluster] of experts with so many row blocks; the macrobatch begins
    `before` row blocks into the first."""
    if host_compiler() is None:
        pytest.skip("no C++ compiler to build the kernel for the CPU")
    experts = np.repeat(np.arange(len(blocks), dtype=np.int32), blocks)
    offsets = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32) * ROW_TILE
    info = np.zeros(1, SCHEDULE_INFO)
    info["num_row_blocks"] = len(experts)
    layer = new_params(
        LAYER_PARAMS,
        intermediate_size=HIDDEN_COLUMNS * 256 - 8,
        hidden_size=INPUT_COLUMNS * 256,
        max_saved_rows=saved_blocks * ROW_TILE,
        info=info.ctypes.data,
        row_block_expert=experts.ctypes.data,
        expert_offset=offsets.ctypes.data,
    )
    params = np.zeros((), hopper_backward.DGRAD_PARAMS)
    params["macro_blocks"], params["mini_blocks"] = len(experts), mini_blocks
    if before:  # the second of two macrobatches
        params["macro_index"], params["macro_blocks"] = 1, before
    end = len(experts) * sum(COLUMNS.values())
    tiles = np.zeros((end, ctas), TILE)
    macros = (f"MOK_CLUSTER_SIZE={ctas}",) if ctas > 1 else ()
    probe = kernels(str(HERE / "dgrad_walk.cu"), macros)
    probe.launch("dgrad_walk", (1, 1), 32, [layer, params, np.int32(end), tiles.view(np.int32)])
    return tiles[tiles["kind"][:, 0] != 0]


CASES = {
    "many-of-17": ([17, 16, 18, 17, 15, 17], 32, 0),
    "few": ([4, 5, 4, 6, 3, 5, 4, 4, 5, 4, 1, 0, 5], 32, 30),
    "long": ([33, 70, 2], 48, 1000),
    "one-each": ([1] * 9, 16, 1000),
    "one-block": ([1], 16, 1000),
}


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_every_tile_has_one_ticket(name: str, ctas: int) -> None:
    tiles = walk(*CASES[name], ctas).ravel()
    made = tiles[tiles["exists"] != 0]
    counted = np.stack([made["kind"], made["block"], made["column"]])
    found, times = np.unique(counted, axis=1, return_counts=True)
    assert (times == 1).all()
    blocks = sum(CASES[name][0])
    for kind in (HIDDEN, INPUT):
        assert (found[0] == kind).sum() == blocks * COLUMNS[kind]
    again = np.unique(found[1][found[0] == AGAIN])
    assert (found[0] == AGAIN).sum() == len(again) * COLUMNS[AGAIN]
    kept = np.setdiff1d(np.arange(blocks), again)
    assert (kept < CASES[name][2]).all()
    assert found[1].max() == blocks - 1 and found[1].min() == 0
    assert all(found[2][found[0] == kind].max() < COLUMNS[kind] for kind in np.unique(found[0]))


@pytest.mark.parametrize("name", CASES)
def test_ctas_of_a_cluster_have_two_row_blocks_or_two_columns(name: str) -> None:
    first, second = walk(*CASES[name], 2).T
    pairs = first["partner"] >= 0
    assert ((second["partner"] >= 0) == pairs).all() and (first["kind"] == second["kind"]).all()
    assert (first["exists"] == 1).all() and (second["exists"][pairs] == 1).all()
    assert (first["partner"][pairs] == second["block"][pairs]).all()
    assert (second["partner"][pairs] == first["block"][pairs]).all()
    assert (second["block"][pairs] == first["block"][pairs] + 1).all()
    assert (second["column"][pairs] == first["column"][pairs]).all()
    alone = ~pairs
    assert (second["block"][alone] == first["block"][alone]).all()
    apart = (second["column"] - first["column"])[alone]
    assert (apart == second["exists"][alone]).all()  # the last column of an odd number has one CTA


@pytest.mark.parametrize("name", ["many-of-17", "few", "long"])
def test_pairs_are_of_one_expert(name: str) -> None:
    blocks = CASES[name][0]
    expert = np.repeat(np.arange(len(blocks)), blocks)
    first, second = walk(*CASES[name], 2).T
    assert (expert[first["block"]] == expert[second["block"]]).all()
    odd = [sum(blocks[: e + 1]) - 1 for e in range(len(blocks)) if blocks[e] % 2]
    assert np.unique(first["block"][first["partner"] < 0]).tolist() == odd


def test_experts_of_one_row_block_share_clusters() -> None:
    first, _ = walk(*CASES["one-each"], 2).T
    assert np.unique(first["block"][first["partner"] < 0]).tolist() == [8]  # of nine


@pytest.mark.parametrize("name", CASES)
def test_a_tile_depends_on_smaller_tickets(name: str) -> None:
    tiles = walk(*CASES[name], 2)
    ticket = np.broadcast_to(np.arange(len(tiles))[:, None], tiles.shape)
    for block in np.unique(tiles["block"]):
        of_block = [ticket[(tiles["block"] == block) & (tiles["kind"] == kind)] for kind in COLUMNS]
        again, hidden, dx = of_block
        assert hidden.max() < dx.min() and (again.size == 0 or again.max() < hidden.min())


def test_a_later_macrobatch_begins_inside_an_expert() -> None:
    tiles = walk([20, 3, 9], 16, 0, 2, before=16).ravel()
    made = tiles[(tiles["exists"] != 0) & (tiles["kind"] == HIDDEN)]
    assert np.unique(made["block"]).tolist() == list(range(16))
    assert len(made) == 16 * HIDDEN_COLUMNS
