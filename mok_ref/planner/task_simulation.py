"""Task-level simulation of one rank: every tile on every SM, drawn by tickets.

An SM that is free draws the next ticket; the tile starts when what it depends on is there. Since a
task depends on smaller tickets only, one pass in ticket order is the whole simulation:

    gate/up tile of block b   rows of its minibatch pulled
    down tile of block b      all gate/up tiles of b done
    pull of minibatch q       pull of q-1 done, down tiles of q - slots done (ring slot free)
    end of a down tile        its push has left (stores are pushed back by a full link)

Links: the rank's own port at the measured rate. Peers do the same at the same time, so their pushes
come in where this rank's pulls do: a pull gets what pushes left of the port during the minibatch
before, a push half of it while a pull runs. Uneven ranks are `minibatch_simulation`'s business.
Backward has dgrad hidden for gate/up, dgrad input for down, and after each macrobatch its wgrad
tiles.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from mok_ref.schedule import Minibatch, forward_task_order, walk

from .closed_form import Setting, head_seconds, tail_seconds
from .minibatch_simulation import Span
from .programme import trailing
from .stages import (
    TAIL_ROWS,
    TILE_COLUMNS,
    TILE_DEPTH,
    TILE_ROWS,
    StageCosts,
    layer_flops,
    padded,
)


@dataclass(frozen=True)
class TileKind:
    """One kind of tile: columns of tiles per row block, seconds of a full and of a half tile."""

    name: str
    columns: int
    full: float
    half: float
    push_bytes: float = 0.0  # per row


@dataclass
class TaskRun:
    """Result: seconds, spans, and SM-seconds by what they were spent on."""

    seconds: float
    head: float
    tail: float
    spent: dict[str, float]
    num_tiles: int
    flops: float
    spans: list[Span] = field(default_factory=list)

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds / 1e12

    def shares(self) -> dict[str, float]:
        """Share of all SM-time between head and tail."""
        total = sum(self.spent.values())
        return {name: value / total if total else 0.0 for name, value in self.spent.items()}


@dataclass(frozen=True)
class Blocks:
    """Row blocks of one rank in schedule order: expert, valid rows, remote rows of each."""

    expert: np.ndarray
    valid: np.ndarray
    remote: np.ndarray


def row_blocks(setting: Setting, rank: int) -> Blocks:
    """The rank's row blocks; remote rows in proportion to each expert's foreign routes."""
    experts = np.flatnonzero(setting.owner == rank)
    expert, valid, remote = [], [], []
    for e in experts:
        count = int(setting.work.expert_load[e])
        foreign = 1.0 - float(setting.work.counts[rank, e]) / max(count, 1)
        for first in range(0, count, TILE_ROWS):
            rows = min(TILE_ROWS, count - first)
            expert.append(e)
            valid.append(rows)
            remote.append(rows * foreign)
    return Blocks(np.array(expert, int), np.array(valid, int), np.array(remote, float))


def tile_kinds(costs: StageCosts, is_backward: bool) -> tuple[TileKind, TileKind]:
    """The two kinds of tiles that trail each other."""
    s, k = costs.shape, costs.constants
    hidden, inner = padded(s.hidden_size, TILE_DEPTH), padded(s.intermediate_size, TILE_DEPTH)
    halves = -(-s.columns // TILE_ROWS)
    wide = -(-s.output_columns // TILE_COLUMNS)
    if is_backward:
        names, depths = ("dgrad_hidden", "dgrad_input"), (hidden, 2 * inner)
        epilogues = (k.dgrad_epilogue_us, k.down_epilogue_us)
        columns = (-(-s.columns // TILE_COLUMNS), wide)
    else:
        names, depths = ("gate_up", "down"), (hidden, inner)
        epilogues = (k.gate_up_epilogue_us, k.down_epilogue_us)
        columns = (halves, wide)
    made = []
    for i in range(2):
        full = costs.tile_seconds(depths[i], epilogues[i])
        half = full * k.tail_share
        made.append(TileKind(names[i], columns[i], full, half, 2.0 * TILE_COLUMNS * i))
    return made[0], made[1]


class Tickets:
    """SMs that draw tickets; keeps spans and the account of SM-time."""

    def __init__(self, num_sms: int, first_sm: int, with_spans: bool) -> None:
        self.free = [(0.0, sm) for sm in range(first_sm, first_sm + num_sms)]
        heapq.heapify(self.free)
        self.spent: dict[str, float] = {}
        self.spans: list[Span] = []
        self.with_spans = with_spans
        self.num_tiles = 0

    def draw(self, name: str, ready: float, seconds: float, reason: str) -> tuple[float, int]:
        """Give the next tile to the SM that is free first; returns its (end, SM)."""
        free, sm = heapq.heappop(self.free)
        start = max(free, ready)
        if start > free:
            self.spent[reason] = self.spent.get(reason, 0.0) + start - free
        self.spent[name] = self.spent.get(name, 0.0) + seconds
        self.num_tiles += 1
        if self.with_spans:
            self.spans.append(Span(sm, "tiles", name, start, start + seconds))
        return start + seconds, sm

    def put_back(self, end: float, sm: int) -> None:
        heapq.heappush(self.free, (end, sm))

    def close(self) -> float:
        """End of the last tile; the others' idle time until then counts as the last wave."""
        last = max(end for end, _ in self.free)
        idle = sum(last - end for end, _ in self.free)
        self.spent["last wave"] = self.spent.get("last wave", 0.0) + idle
        return last


class RankTasks:
    """One pass over all tickets of one rank."""

    def __init__(self, setting: Setting, rank: int, is_backward: bool, with_spans: bool) -> None:
        self.setting, self.costs = setting, setting.costs
        self.blocks = row_blocks(setting, rank)
        self.is_backward = is_backward
        self.tickets = Tickets(self.costs.compute_sms, setting.choice.communication_sms, with_spans)
        self.kinds = tile_kinds(self.costs, is_backward)
        self.rows = np.bincount(self.blocks.expert, weights=self.blocks.valid)
        self.stretch = self.costs.stretch(self.rows, is_backward)
        num_rows = len(self.blocks.valid) * TILE_ROWS
        direction = "backward" if is_backward else "forward"
        choice = setting.choice
        self.batches = list(walk(num_rows, choice.macrobatch, choice.minibatch, direction))
        self.ready = np.zeros(len(self.blocks.valid))  # first product of a block done
        self.freed: dict[int, float] = {}  # ring slot: when its last user had left it
        self.pulled = self.pull_end = self.push_end = 0.0
        movers = setting.choice.communication_sms or setting.hardware.num_sms
        ceiling = movers * setting.hardware.sm_link_bytes_per_s
        self.pull_rate = min(setting.hardware.link_rate, ceiling)
        self.last_pull = self.pushed_seconds = 0.0

    def slot_of(self, batch: Minibatch) -> int:
        return batch.first % self.setting.choice.macrobatch

    def pull(self, batch: Minibatch) -> float:
        """When the rows of a minibatch are all in the ring."""
        blocks = blocks_of(batch)
        start = max(self.pull_end, self.freed.get(self.slot_of(batch), 0.0))
        in_ring = self.setting.x_kept and batch.first < self.setting.choice.macrobatch
        factor = 2.0 if self.is_backward and not in_ring else 1.0
        row_bytes = self.costs.shape.pull_row_bytes * factor
        remote = float(self.blocks.remote[blocks.start : blocks.stop].sum())
        total = float(self.blocks.valid[blocks.start : blocks.stop].sum())
        hardware = self.setting.hardware
        seconds = remote * row_bytes / self.pull_rate / self.port_share(start)
        seconds = max(seconds, (total - remote) * row_bytes / hardware.gather_bytes_per_s)
        self.pull_end = start + seconds + hardware.link_latency_us * 1e-6
        if self.tickets.with_spans:
            span = Span(-1, "pull", f"pull {batch.index}", start, self.pull_end)
            self.tickets.spans.append(span)
        return self.pull_end

    def port_share(self, now: float) -> float:
        """What pushes left of the link since the last pull began, at least a fair half."""
        since = now - self.last_pull
        used = self.pushed_seconds / since if since > 0 else 0.0
        self.last_pull, self.pushed_seconds = now, 0.0
        return max(0.5, 1.0 - used)

    def seconds_of(self, kind: TileKind, block: int) -> float:
        is_full = self.blocks.valid[block] > TAIL_ROWS
        return (kind.full if is_full else kind.half) * self.stretch

    def first_product(self, batch: Minibatch) -> None:
        """Column-major over the blocks: a weight tile serves all blocks of an expert."""
        kind, here = self.kinds[0], self.pull(batch)
        for _ in range(kind.columns):
            for block in blocks_of(batch):
                seconds = self.seconds_of(kind, block)
                end, sm = self.tickets.draw(kind.name, here, seconds, "waiting for rows")
                self.tickets.put_back(end, sm)
                self.ready[block] = max(self.ready[block], end)

    def second_product(self, batch: Minibatch) -> None:
        kind, last = self.kinds[1], 0.0
        rate = self.setting.hardware.link_rate
        for _ in range(kind.columns):
            for block in blocks_of(batch):
                end, sm = self.tickets.draw(
                    kind.name,
                    float(self.ready[block]),
                    self.seconds_of(kind, block),
                    "waiting for the first product",
                )
                sent = float(self.blocks.remote[block]) * kind.push_bytes / rate
                self.pushed_seconds += sent
                if end < self.pull_end:
                    sent *= 2
                self.push_end = max(self.push_end, end - sent) + sent
                if self.push_end > end:
                    spent = self.tickets.spent
                    spent["pushing"] = spent.get("pushing", 0.0) + self.push_end - end
                    end = self.push_end
                self.tickets.put_back(end, sm)
                last = max(last, end)
        self.freed[self.slot_of(batch)] = last

    def shared_expert(self, num_tokens: float) -> None:
        """Tiles that need nothing from peers: they come first and hide the first pull."""
        costs = self.costs
        work = costs.shared_backward if self.is_backward else costs.shared_forward
        seconds = work(num_tokens)
        tile = self.kinds[0].full * self.stretch
        tiles = round(seconds * costs.compute_sms / tile)
        for _ in range(tiles):
            end, sm = self.tickets.draw("shared", 0.0, tile, "waiting for rows")
            self.tickets.put_back(end, sm)

    def wgrad(self, batches: list[Minibatch]) -> None:
        """Weight gradients of the experts that a macrobatch touches: a launch of its own."""
        s, costs = self.costs.shape, self.costs
        start = self.restart()
        tiles = 3 * (-(-s.hidden_size // TILE_ROWS)) * (-(-s.columns // TILE_COLUMNS))
        stored = costs.constants.wgrad_epilogue_us * (1.0 if costs.float32_dw else 0.5)
        blocks = slice(blocks_of(batches[0]).start, blocks_of(batches[-1]).stop)
        counts = np.bincount(self.blocks.expert[blocks], weights=self.blocks.valid[blocks])
        counts = counts[counts > 0]
        chains = [costs.tile_seconds(padded(int(rows), TILE_DEPTH), stored) for rows in counts]
        stretch = costs.wgrad(counts) * costs.compute_sms / (tiles * sum(chains))
        for seconds in chains:
            for _ in range(tiles):
                end, sm = self.tickets.draw("wgrad", start, seconds * stretch, "waiting for dgrad")
                self.tickets.put_back(end, sm)
        # the ring is free for the next macrobatch only now
        end = self.restart()
        self.freed = {self.slot_of(batch): end for batch in batches}

    def restart(self) -> float:
        """All SMs wait for the last tile: the end of a launch."""
        end = self.tickets.close()
        self.tickets.free = [(end, sm) for _, sm in self.tickets.free]
        return end

    def run(self, num_tokens: float) -> float:
        choice = self.setting.choice
        if self.costs.shape.shared_intermediate_size:
            self.shared_expert(num_tokens)
        if not self.is_backward:
            self.run_tasks(forward_task_order(self.batches, choice.macrobatch))
            return self.tickets.close()
        for first in range(0, len(self.batches), choice.ring_slots):
            inside = self.batches[first : first + choice.ring_slots]
            self.run_tasks(backward_task_order(inside, choice.ring_slots))
            self.wgrad(inside)
        return self.tickets.close()

    def run_tasks(self, order: Iterable[tuple[str, Minibatch]]) -> None:
        for kind, batch in order:
            if kind == "gate_up":
                self.first_product(batch)
            else:
                self.second_product(batch)


def blocks_of(batch: Minibatch) -> range:
    """Row blocks of a minibatch."""
    return range(batch.first // TILE_ROWS, -(-batch.end // TILE_ROWS))


def backward_task_order(
    batches: list[Minibatch], ring_slots: int
) -> Iterator[tuple[str, Minibatch]]:
    """dgrad hidden in gate/up's place and dgrad input in down's, one minibatch behind."""
    lag = trailing(ring_slots)
    for q in range(len(batches) + lag):
        if q < len(batches):
            yield "gate_up", batches[q]
        if q >= lag:
            yield "down", batches[q - lag]


def simulate_tasks(
    setting: Setting, rank: int = 0, is_backward: bool = False, with_spans: bool = False
) -> TaskRun:
    """All tiles of one rank in one direction of the layer."""
    tasks = RankTasks(setting, rank, is_backward, with_spans)
    tokens = float(setting.work.tokens[rank])
    seconds = tasks.run(tokens)
    head, tail = head_seconds(setting, is_backward), tail_seconds(setting)
    rows = float(tasks.blocks.valid.sum())
    flops = layer_flops(rows, setting.shape, tokens) * (2 if is_backward else 1)
    return TaskRun(
        head + seconds + tail,
        head,
        tail,
        tasks.tickets.spent,
        tasks.tickets.num_tiles,
        flops / setting.shape.tp_size,
        tasks.tickets.spans,
    )
