"""What one rank does in one direction of one layer: compute steps, pulls and pushes, in order.

Forward, for walk positions q = 0, 1, ...:   shared, gate_up(0), gate_up(1), down(0), ...
    gate_up(q) needs pull(q); down(q) pushes its rows; pull(q) needs the ring slot of
    an earlier minibatch, which that one's down frees.
Backward, macrobatch by macrobatch:   dgrad_hidden(q), dgrad_input(q-1), ..., wgrad(macrobatch)
    dgrad_hidden(q) needs pull(q) of dy and x; wgrad frees the whole ring.

This is the task order of `cuda_src/megakernel.cu` at the grain of minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mok_ref.schedule import Minibatch, forward_task_order, walk

from .choice import Choice
from .stages import TILE_ROWS, StageCosts
from .workload import Workload


@dataclass
class Programme:
    """Steps and transfers of one rank.

    kinds, index, seconds, needs, pushes   per step: name, walk position, duration, pull it waits
                                           for (-1: none), push it starts (-1: none)
    gate                                   per pull: step that frees its ring slot (-1: none)
    pull_bytes, push_bytes                 (Q, R) bytes from / to every rank, own rank included
    """

    kinds: list[str] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    pushes: list[int] = field(default_factory=list)
    gate: list[int] = field(default_factory=list)
    pull_bytes: np.ndarray = field(default_factory=lambda: np.zeros((0, 1)))
    push_bytes: np.ndarray = field(default_factory=lambda: np.zeros((0, 1)))

    def add(self, kind: str, index: int, seconds: float, needs: int = -1, push: int = -1) -> int:
        self.kinds.append(kind)
        self.index.append(index)
        self.seconds.append(seconds)
        self.needs.append(needs)
        self.pushes.append(push)
        return len(self.kinds) - 1

    @property
    def compute_seconds(self) -> float:
        return sum(self.seconds)


@dataclass(frozen=True)
class MinibatchTable:
    """rows (Q, L) valid rows of each local expert, sources (Q, R) rows from each rank;
    num_rows of the schedule, padding included."""

    rows: np.ndarray
    sources: np.ndarray
    num_rows: int


def segments(counts: np.ndarray) -> np.ndarray:
    """(L+1,) row where each local expert's segment starts, in multiples of TILE_ROWS."""
    sizes = -(-counts // TILE_ROWS) * TILE_ROWS
    return np.concatenate([[0], np.cumsum(sizes)])


def minibatch_tables(
    work: Workload, owner: np.ndarray, minibatch: int, ranks: Iterable[int] | None = None
) -> list[MinibatchTable]:
    """Each rank's minibatches in row order, with the rows of every source rank.

    From token ids the sources are those of the real (canonical) schedule; without ids each
    expert's rows come evenly from its sources, which is what the canonical order amounts to.
    """
    load = work.expert_load
    tables = []
    for rank in range(work.num_ranks) if ranks is None else ranks:
        experts = np.flatnonzero(owner == rank)
        counts = load[experts]
        offsets = segments(counts)
        num = -(-int(offsets[-1]) // minibatch)
        edges = np.arange(num + 1)[:, None] * minibatch
        low = np.maximum(edges[:-1], offsets[:-1])
        high = np.minimum(edges[1:], offsets[:-1] + counts)
        rows = np.maximum(high - low, 0).astype(float)
        if work.topk_ids is not None:
            sources = exact_sources(work, experts, offsets, minibatch, num)
        else:
            share = work.counts[:, experts] / np.maximum(counts, 1)
            sources = rows @ share.T
        tables.append(MinibatchTable(rows, sources, int(offsets[-1])))
    return tables


def exact_sources(
    work: Workload, experts: np.ndarray, offsets: np.ndarray, minibatch: int, num: int
) -> np.ndarray:
    """(Q, R) rows per minibatch and source, counted in the real schedule."""
    sources, starts = work.sources_by_expert
    pieces = [sources[starts[e] : starts[e + 1]] for e in experts]
    places = [offsets[i] + np.arange(len(piece)) for i, piece in enumerate(pieces)]
    if not pieces or num == 0:
        return np.zeros((num, work.num_ranks))
    key = np.concatenate(places) // minibatch * work.num_ranks + np.concatenate(pieces)
    count = np.bincount(key.astype(np.int64), minlength=num * work.num_ranks)
    return count.reshape(num, work.num_ranks).astype(float)


def forward_batches(num_rows: int, choice: Choice) -> list[Minibatch]:
    """Minibatches in forward's order, as the reference and the kernels walk them."""
    return list(walk(num_rows, choice.macrobatch, choice.minibatch, "forward"))


def forward_programme(
    costs: StageCosts, choice: Choice, table: MinibatchTable, num_tokens: float
) -> Programme:
    """Task order of the forward megakernel (`mok_ref.schedule.forward_task_order`)."""
    batches = forward_batches(table.num_rows, choice)
    order = [batch.index for batch in batches]
    position = {index: q for q, index in enumerate(order)}
    rows, sources = table.rows[order], table.sources[order]
    result = Programme()
    result.pull_bytes = sources * costs.shape.pull_row_bytes
    result.push_bytes = sources * costs.shape.push_row_bytes
    result.gate = [-1] * len(order)
    if costs.shape.shared_intermediate_size:
        result.add("shared", -1, costs.shared_forward(num_tokens))
    freed: dict[int, int] = {}  # ring slot: step after which it is free
    for kind, batch in forward_task_order(batches, choice.macrobatch):
        q, slot = position[batch.index], batch.first % choice.macrobatch
        if kind == "gate_up":
            result.gate[q] = freed.get(slot, -1)
            seconds = costs.gate_up(rows[q], choice.save == "all")
            result.add("gate_up", q, seconds, needs=q)
        else:
            seconds = costs.down(rows[q]) + gather_hidden(costs, rows[q])
            freed[slot] = result.add("down", q, seconds, push=q)
    stretch = costs.stretch(table.rows.sum(axis=0), False)
    first, last = (stretch * seconds for seconds in costs.latencies[:2])
    keep_distance(result, "gate_up", "down", first, last)
    return result


def trailing(slots: int) -> int:
    """By how many minibatches backward's second product trails the first: one, unless the ring
    has a single slot, which pull(q+1) needs before its first product can run."""
    return 1 if slots > 1 else 0


def keep_distance(
    result: Programme, first: str, second: str, latency: float, last: float, start: int = 0
) -> None:
    """What tickets cannot hide: a tile of `second` waits for tiles of `first`, however few.

    Between the last ticket of first(q) and the first of second(q) lie second(q-1) and first(q+1).
    Where these take less than one tile's latency, the SMs that drew tiles of second(q) wait. With
    S SMs in flight, D tiles of second and u = D/S, Little's law gives the period of a minibatch
        P = (work + u * latency) / (1 + u),     stall = u * (latency - work) / (1 + u).
    Where nothing lies between (the next minibatch needs this one's ring slot), the next pull waits
    as well: both steps take whole waves of tiles. At the end one tile at least, half a tile more.
    """
    steps = range(start, len(result.kinds))
    firsts = [i for i in steps if result.kinds[i] == first]
    seconds = [i for i in steps if result.kinds[i] == second]
    for q, step in enumerate(seconds[:-1]):
        between = sum(result.seconds[i] for i in range(firsts[q] + 1, step))
        share = result.seconds[step] / last
        if step > firsts[q] + 1:
            result.seconds[step] += max(0.0, latency - between) * share / (1.0 + share)
        else:
            for i, tile in ((firsts[q], latency), (step, last)):
                result.seconds[i] = whole_waves(result.seconds[i], tile)
    if seconds:
        for step, tile in ((firsts[-1], latency), (seconds[-1], last)):
            result.seconds[step] = max(result.seconds[step], 0.5 * tile) + 0.5 * tile


def whole_waves(seconds: float, tile: float) -> float:
    """A step that nothing overlaps: its last wave lasts as long as a full one."""
    return max(seconds, math.ceil(seconds / tile - 1e-9) * tile) if seconds > 0 else 0.0


def gather_hidden(costs: StageCosts, rows: np.ndarray) -> float:
    """Tensor parallelism: h is gathered from the other GPUs of the group before W_down."""
    shape = costs.shape
    share = (shape.tp_size - 1) / shape.tp_size
    return float(rows.sum()) * shape.intermediate_size * 2 * share / costs.hardware.link_rate


def backward_programme(
    costs: StageCosts,
    choice: Choice,
    table: MinibatchTable,
    num_tokens: float,
    x_kept: bool = False,
) -> Programme:
    """Task order of the backward megakernel and its wgrad launches.

    x_kept  the ring still holds x of the first macrobatch
    """
    rows, sources = table.rows, table.sources
    num, slots = len(rows), choice.ring_slots
    result = Programme()
    # x is pulled again for dW_gate and dW_up where the ring does not hold it
    times = np.full((num, 1), 2.0)
    times[: slots if x_kept else 0] = 1.0
    result.pull_bytes = sources * costs.shape.pull_row_bytes * times
    result.push_bytes = sources * costs.shape.push_row_bytes
    if costs.shape.shared_intermediate_size:
        result.add("shared", -1, costs.shared_backward(num_tokens))
    result.gate = []
    free = -1
    for first in range(0, num, slots):
        inside = range(first, min(first + slots, num))
        result.gate += [free] * len(inside)
        add_macrobatch(result, costs, choice, rows, inside)
        free = len(result.kinds) - 1
    return result


def add_macrobatch(
    result: Programme, costs: StageCosts, choice: Choice, rows: np.ndarray, inside: range
) -> None:
    """dgrads of one macrobatch, the second one minibatch behind the first; then its wgrads."""
    kept = {"all": len(rows), "ring": choice.ring_slots, "none": 0}[choice.save]
    start, lag = len(result.kinds), trailing(choice.ring_slots)
    for q in range(inside.start, inside.stop + lag):
        if q < inside.stop:
            seconds = costs.dgrad_hidden(rows[q]) + gather_hidden(costs, rows[q])
            if q >= kept:
                seconds += costs.gate_up(rows[q], saves=False)
            result.add("dgrad_hidden", q, seconds, needs=q)
        if q >= inside.start + lag:
            seconds = costs.dgrad_input(rows[q - lag])
            result.add("dgrad_input", q - lag, seconds, push=q - lag)
    together = rows[inside.start : inside.stop].sum(axis=0)
    first, last = (costs.stretch(together, True) * seconds for seconds in costs.latencies[2:])
    keep_distance(result, "dgrad_hidden", "dgrad_input", first, last, start)
    result.add("wgrad", inside.start, costs.wgrad(together))
