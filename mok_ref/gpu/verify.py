"""Every intermediate of a forward step on the device against the NumPy layer, bit for bit.

Schedule tables, ring rows, gate, up, h, the y rows that arrived in each slot, and the output. The
first difference is named with its tensor, rank and coordinate, so that a wrong bit leads to the
step that made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.experts import ExpertForward, ExpertWeights, expert_forward, operand_values
from mok_ref.gpu import layer
from mok_ref.gpu.schedule import read_schedule
from mok_ref.gpu.workspace import DeviceWorkspace, derive_sizes
from mok_ref.numerics import as_values, bf16_to_bits, canonical_nan
from mok_ref.schedule import Schedule, build_schedule

TABLES = (
    "peer_rank",
    "peer_row",
    "expert_offset",
    "expert_count",
    "row_block_expert",
    "row_block_valid",
)


class Batch(NamedTuple):
    """The whole batch on the host: bf16 arrays as bits, expert weights of all experts."""

    x: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    weights: ExpertWeights
    shared: ExpertWeights | None
    splits: np.ndarray

    def tokens_of(self, rank: int) -> slice:
        ends = np.cumsum(self.splits)
        return slice(int(ends[rank] - self.splits[rank]), int(ends[rank]))


class Finding(NamedTuple):
    """One tensor on one rank: how many elements were compared, and the first that differs."""

    rank: int
    tensor: str
    compared: int
    differing: int
    where: tuple[int, ...]
    actual: int
    expected: int

    def __str__(self) -> str:
        if not self.differing:
            return f"rank {self.rank} {self.tensor}: {self.compared} equal"
        return (
            f"rank {self.rank} {self.tensor}: {self.differing} of {self.compared} differ, first at "
            f"{list(self.where)}: {self.actual:#x} on the device, {self.expected:#x} expected"
        )


def compare(rank: int, tensor: str, actual: np.ndarray, expected: np.ndarray) -> Finding:
    """Bits of two arrays of the same shape and dtype; all NaN are alike."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        shapes = f"{actual.dtype}{actual.shape} on the device, {expected.dtype}{expected.shape}"
        return Finding(rank, f"{tensor} ({shapes} expected)", 0, 1, (), 0, 0)
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[actual.dtype.itemsize]
    a, b = (np.ascontiguousarray(canonical_nan(v)).view(unsigned) for v in (actual, expected))
    bad = np.argwhere(a != b)
    if not len(bad):
        return Finding(rank, tensor, a.size, 0, (), 0, 0)
    where = tuple(int(i) for i in bad[0])
    return Finding(rank, tensor, a.size, len(bad), where, int(a[where]), int(b[where]))


def check_forward(
    config: MoEConfig, heap: Any, batch: Batch, path: str = "auto"
) -> tuple[str, list[Finding]]:
    """(path that ran, findings) of this rank; collective over the heap's ranks.

    Every buffer is filled with NaN first, so a value that was never written cannot pass.
    """
    rank, tokens = heap.rank, batch.tokens_of(heap.rank)
    max_tokens = int(max(batch.splits))
    all_rows = derive_sizes(config, rank, max(1, max_tokens)).max_row_blocks * ROW_TILE
    workspace = DeviceWorkspace(config, heap, max_tokens, all_rows, path=path)
    workspace.poison()
    heap.barrier()
    weights = ExpertWeights(*(w[config.experts_of(rank)] for w in batch.weights))
    arguments = (batch.x[tokens], batch.topk_ids[tokens], batch.topk_weights[tokens], weights)
    y, _ = layer.forward(config, heap, *arguments, batch.shared, workspace, "all")
    heap.check(config.top_k)
    table = build_schedule(config, rank, batch.topk_ids, batch.splits)
    findings = list(_compare_tables(rank, read_schedule(workspace), table))
    if not any(finding.differing for finding in findings):  # rows mean nothing in another order
        findings += _compare_rows(config, batch, workspace, table)
    findings += _compare_tokens(config, batch, workspace, y)
    name = layer.path_name(workspace)
    workspace.close()
    return name, findings


def _compare_tables(rank: int, actual: Schedule, expected: Schedule) -> Iterator[Finding]:
    for name in TABLES:
        yield compare(rank, f"schedule.{name}", getattr(actual, name), getattr(expected, name))


def _compare_rows(
    config: MoEConfig, batch: Batch, workspace: Any, table: Schedule
) -> Iterator[Finding]:
    """x, gate, up and h of this rank's rows. The rings hold the first macrobatch at the end."""
    rank = workspace.heap.rank
    in_ring = min(table.num_rows, workspace.sizes.macro_blocks * ROW_TILE)
    valid = table.peer_rank >= 0
    first = np.concatenate([[0], np.cumsum(batch.splits)])
    token = first[table.peer_rank[valid]] + table.peer_row[valid] // config.top_k
    x = operand_values(config, batch.x[token])
    expert_of_row = np.repeat(table.row_block_expert, ROW_TILE)[valid]
    expected: dict[str, np.ndarray] = {"x_ring": bf16_to_bits(x)}
    parts = {name: np.zeros((len(token), config.intermediate_size), np.uint16) for name in "guh"}
    for local in np.unique(expert_of_row):
        mine = expert_of_row == local
        result = _expert(config, batch, int(table.expert_ids[local]), x[mine])
        for name, values in zip("guh", result[:3], strict=True):
            parts[name][mine] = bf16_to_bits(values)
    expected |= {"gate_saved": parts["g"], "up_saved": parts["u"], "h_ring": parts["h"]}
    for name, values in expected.items():
        end = in_ring if name.endswith("ring") else len(valid)
        actual = _rows_of(workspace, name)[:end][valid[:end]]
        yield compare(rank, name, actual, values[: np.count_nonzero(valid[:end])])


def _rows_of(workspace: Any, name: str) -> np.ndarray:
    """bf16 bits of a buffer of rows; rings may hold them as codes and scales."""
    path = layer.forward_path(workspace)
    if name.endswith("_ring") and hasattr(path, "ring_values"):
        return path.ring_values(workspace, name.removesuffix("_ring"))
    return getattr(workspace, name).get()


def _expert(config: MoEConfig, batch: Batch, expert: int, x: np.ndarray) -> ExpertForward:
    weights = (operand_values(config, w[expert]) for w in batch.weights)
    return expert_forward(config, x, ExpertWeights(*weights))


def _compare_tokens(config: MoEConfig, batch: Batch, workspace: Any, y: Any) -> Iterator[Finding]:
    """The slots of this rank's tokens, whoever computed them, the shared expert and the output."""
    from mok_ref.combine import combine_forward

    rank, tokens = workspace.heap.rank, batch.tokens_of(workspace.heap.rank)
    ids, weights = batch.topk_ids[tokens], batch.topk_weights[tokens]
    x = batch.x[tokens]
    slots = np.zeros((*ids.shape, config.hidden_size), np.uint16)
    for expert in np.unique(ids[ids >= 0]):
        token, slot = np.nonzero(ids == expert)
        rows = operand_values(config, x[token])
        slots[token, slot] = bf16_to_bits(_expert(config, batch, int(expert), rows).y)
    arrived = workspace.combine[: ids.size].get().reshape(slots.shape)
    yield compare(rank, "y slots", arrived[ids >= 0], slots[ids >= 0])
    shared_y = None
    if batch.shared is not None:
        whole = ExpertWeights(*(as_values(w) for w in batch.shared))
        shared = expert_forward(config, as_values(x), whole, routed=False)
        shared_y = shared.y
        for name, values in (("shared_h", shared.h), ("shared_y", shared.y)):
            actual = getattr(workspace, name)[: len(ids)].get()
            yield compare(rank, name, actual, bf16_to_bits(values))
    out = combine_forward(as_values(slots), ids, weights, shared_y)
    host = y.get() if hasattr(y, "get") else np.asarray(y)
    yield compare(rank, "y", host.view(np.uint16), bf16_to_bits(out))
