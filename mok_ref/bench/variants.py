"""Beside the table: what each save mode costs, several virtual ranks on one GPU, and the kernels
around the products."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from mok_ref.bench.cases import CASES, BenchCase
from mok_ref.bench.energy import EnergyMeter, bench_energy
from mok_ref.bench.timing import Protocol, Timing, launches_ms, time_contenders
from mok_ref.bench.traffic import bench_traffic, find_ncu
from mok_ref.config import ROW_TILE, SAVE_MODES

SAVING_CASES = ("dsv3-rank", "qwen3")
AROUND_CASES = ("small-16", "dsv3-rank", "qwen3", "sonic")
RANK_CASES = ("dsv3-rank", "kimi-16", "mixtral", "qwen3")
ENERGY_PEERS = ("SonicMoE",)
NUM_RANKS = 4
RANK_ROUNDS = 3
RANK_CALLS = 12  # in the queue at once
RANK_TURN_S = 0.5
TURN_RATE = 500e12  # FLOP/s by which a turn is cut


@dataclass
class SavingRow:
    """Forward and backward of one case with one ring and one save mode; dW in bf16."""

    case: str
    ring_rows: int
    rows: int
    save: str
    forward_ms: float
    step_ms: float  # forward and backward
    saved_bytes: int  # of gate and up

    def __str__(self) -> str:
        return (
            f"save {self.save:4} {self.case:11} ring {self.ring_rows:7} of {self.rows:7} rows: "
            f"forward {self.forward_ms:.3f} ms, with backward {self.step_ms:.3f} ms, "
            f"{self.saved_bytes / 2**20:.0f} MiB kept"
        )


@dataclass
class RankRow:
    """Virtual ranks that share one GPU and one case's tokens."""

    case: str
    ranks: int
    direction: str
    ms: float
    against_one_rank: float

    def __str__(self) -> str:
        return (
            f"ranks {self.ranks} {self.case:11} {self.direction:8} {self.ms:.3f} ms, "
            f"{self.against_one_rank:.3f} of one rank"
        )


@dataclass
class AroundRow:
    """Kernels before and after the products, alone in a CUDA graph."""

    case: str
    kernels: str
    us: float
    tbytes_per_s: float | None  # where they are bound by memory
    own_launch: bool = True  # in a step of this case; else its products' kernels do it inside

    def __str__(self) -> str:
        rate = "" if self.tbytes_per_s is None else f", {self.tbytes_per_s:.2f} TB/s"
        where = "" if self.own_launch else ", in a step inside the products' kernels"
        return f"around {self.case:11} {self.kernels:8} {self.us:.1f} us{rate}{where}"


@dataclass(frozen=True)
class Instruments:
    """What experiments need beside the layer: an `EnergyMeter`, the path of `ncu`."""

    meter: EnergyMeter | None
    ncu: str | None

    @classmethod
    def of(cls, chosen: Collection[Any]) -> Instruments:
        """Those that the chosen experiments use. Raises: EnergyError, TrafficError."""
        return cls(
            EnergyMeter() if "energy" in chosen else None,
            find_ncu() if "traffic" in chosen else None,
        )


def run_experiment(
    name: str,
    report: Any,
    peers: tuple[str, ...],
    instruments: Instruments,
    keep: Callable[[], None],
) -> None:
    """One of `mok_ref.bench.commands.EXPERIMENTS`; adds to `report`.

    peers  who else may run
    keep   stores what the report has; called after each of the cases that "energy" measures
    """
    from mok_ref.bench.growth import bench_growth

    if name == "save":
        for case in SAVING_CASES:
            report.saving += bench_saving(CASES[case])
    elif name == "ranks":
        for case in RANK_CASES:
            report.ranks += bench_ranks(CASES[case], NUM_RANKS)
    elif name == "around":
        for case in AROUND_CASES:
            report.around += bench_around(CASES[case])
    elif name == "growth":
        bench_growth(report)
    elif name == "traffic":
        assert instruments.ncu is not None
        bench_traffic(report, instruments.ncu)
    else:
        assert instruments.meter is not None
        others = tuple(peer for peer in peers if peer in ENERGY_PEERS)
        bench_energy(report, instruments.meter, others, keep)


# --------------------------------------------------------------------------- save modes


def bench_saving(case: BenchCase) -> list[SavingRow]:
    """Every save mode with a ring for all rows and with one for a quarter of them."""
    from mok_ref.bench.gpu import OurLayer
    from mok_ref.bench.peers import make_inputs

    inputs, rng, rows = make_inputs(case), np.random.default_rng(0), []
    protocol = Protocol(rounds=2, warm_s=0.3, turn_s=0.25, bursts=0)
    for macrobatch in (None, -(-case.num_rows // (4 * ROW_TILE)) * ROW_TILE):
        layer = OurLayer(inputs, "bf16", macrobatch=macrobatch)
        forwards = {save: partial(layer.forward, save) for save in SAVE_MODES}
        steps = {save: partial(_step, layer, save) for save in SAVE_MODES}
        forward = time_contenders(forwards, rng, protocol)
        step = time_contenders(steps, rng, protocol)
        ring_rows = layer.workspace.sizes.macro_blocks * ROW_TILE
        for save in SAVE_MODES:
            layer.forward(save)
            kept = min(int(layer.context.params["max_saved_rows"]), _padded(case))
            rows.append(
                SavingRow(
                    case=case.name,
                    ring_rows=ring_rows,
                    rows=case.num_rows,
                    save=save,
                    forward_ms=forward[save].ms("sustained"),
                    step_ms=step[save].ms("sustained"),
                    saved_bytes=4 * kept * case.intermediate_size,
                )
            )
        layer.close()
    return rows


def _padded(case: BenchCase) -> int:
    """Rows that a uniform routing fills, padding included, at most."""
    return case.num_rows + case.num_experts * ROW_TILE


def _step(layer: Any, save: str) -> None:
    layer.forward(save)
    layer.backward()


# --------------------------------------------------------------------------- around the products


def bench_around(case: BenchCase) -> list[AroundRow]:
    """Everything of a step of one rank but its products, pulls and pushes."""
    from mok_ref.bench.gpu import OurLayer, torch_stream
    from mok_ref.bench.peers import graphed, make_inputs
    from mok_ref.gpu import layer, schedule

    ours = OurLayer(make_inputs(case), "bf16")
    _step(ours, "all")
    workspace, params = ours.workspace, ours.context.params
    back = layer.backward_params(
        workspace, params, ours.dy, layer.gradient_buffers(workspace, None)
    )
    sums = 2 * case.num_tokens * (case.top_k + 1) * case.hidden_size  # bytes read and written
    dx_inside = hasattr(layer.backward_path(workspace), "launch_backward_with_dx")
    launches: dict[str, tuple[Callable[[Any], None], int, bool]] = {
        "schedule": (partial(schedule.launch_schedule, workspace, params), 0, True),
        "y": (partial(schedule.launch_combine, workspace, params), sums, not params["combines"]),
        "dx": (
            partial(schedule.launch_dispatch_backward, workspace, params, back),
            sums,
            not dx_inside,
        ),
    }
    rows = []
    for name, (launch, num_bytes, own_launch) in launches.items():

        def call(launch: Callable[[Any], None] = launch) -> None:
            with torch_stream() as stream:
                launch(stream)

        us = 1e3 * float(np.median(launches_ms(graphed(call), 20, warm=4)))
        rate = num_bytes / us / 1e6 if num_bytes else None
        rows.append(AroundRow(case.name, name, us, rate, bool(own_launch)))
    ours.close()
    return rows


# --------------------------------------------------------------------------- virtual ranks


def bench_ranks(case: BenchCase, num_ranks: int) -> list[RankRow]:
    """Forward and backward of `num_ranks` virtual ranks beside one rank with all tokens."""
    from mok_ref.bench.peers import make_inputs

    timings = time_ranks(make_inputs(case), num_ranks)
    return [
        RankRow(
            case=case.name,
            ranks=size,
            direction=direction,
            ms=timing.ms("sustained"),
            against_one_rank=timing.ratio(timings[1, direction], "sustained"),
        )
        for (size, direction), timing in timings.items()
    ]


def time_ranks(
    inputs: Any, num_ranks: int, rounds: int = RANK_ROUNDS
) -> dict[tuple[int, str], Timing]:
    """Calls of one rank with all tokens and of `num_ranks` that share them, by (ranks, direction).

    All layers are there from the beginning and take turns without a pause: the clock of a card that
    was idle swings for longer than a turn. A call ends when its last rank ends, since ranks end in
    changing order; the first third of a turn does not count.
    """
    import torch

    from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks

    origin = torch.cuda.Event(enable_timing=True)
    origin.record()
    torch.cuda.synchronize()
    found = run_virtual_cuda_ranks(num_ranks, partial(_rank_turns, inputs, rounds, origin))
    timings: dict[tuple[int, str], Timing] = {}
    for key, turns in found[0].items():
        timings[key] = Timing()
        for number in range(len(turns)):
            ends = np.max([rank[key][number] for rank in found if key in rank], axis=0)
            timings[key].sustained.append(np.diff(ends[len(ends) // 3 :]).tolist())
    return timings


def _rank_turns(
    inputs: Any, rounds: int, origin: Any, heap: Any
) -> dict[tuple[int, str], list[list[float]]]:
    """One rank's part, in its own thread and stream: when its calls ended, turn by turn, in
    milliseconds since `origin`. Rank 0 has the layer of one rank, too."""
    import torch

    from mok_ref.bench.gpu import OurLayer

    with torch.cuda.stream(torch.cuda.ExternalStream(heap.stream.ptr)):
        mine = rank_inputs(inputs, heap.rank, heap.size)
        layers = {heap.size: OurLayer(mine, "bf16", heap=heap)}
        if heap.rank == 0 and heap.size > 1:
            layers[1] = OurLayer(inputs, "bf16")
        sizes = sorted({1, heap.size})
        ends: dict[tuple[int, str], list[list[float]]] = {}
        for direction in ("forward", "backward"):
            for number in range(rounds + 1):  # the first one warms the card up
                for size in sizes[::-1] if number % 2 else sizes:
                    heap.barrier()  # the turn before is over
                    if size not in layers:
                        continue
                    found = _rank_turn(layers[size], direction, inputs.case, origin)
                    if number > 0:
                        ends.setdefault((size, direction), []).append(found)
        for layer in layers.values():
            layer.close()
    return ends


def _rank_turn(layer: Any, direction: str, case: BenchCase, origin: Any) -> list[float]:
    """When the calls of a turn ended, in milliseconds since `origin`."""
    import torch

    call: Callable[[], Any] = partial(layer.forward, "none")
    if direction == "backward":
        layer.forward("all")
        call = layer.backward
    # Every rank must make the same number of calls, so it comes from the case alone.
    count = max(RANK_CALLS, ceil(RANK_TURN_S * TURN_RATE / case.flops(direction)))
    marks: list[Any] = []
    for _ in range(count):
        call()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if len(marks) > RANK_CALLS:  # a full queue would hold up ranks that its work waits for
            marks[-RANK_CALLS - 1].synchronize()
    layer.heap.barrier()  # before one of the ranks waits, all have queued all
    torch.cuda.synchronize()
    return [origin.elapsed_time(mark) for mark in marks]


def rank_inputs(inputs: Any, rank: int, size: int) -> Any:
    """`BenchInputs` of one rank: its share of the tokens and its experts' weights."""
    case = inputs.case
    tokens, experts = case.num_tokens // size, case.num_experts // size
    mine = slice(rank * tokens, (rank + 1) * tokens)
    own = slice(rank * experts, (rank + 1) * experts)
    parts = {name: getattr(inputs, name)[mine] for name in ("x", "dy", "topk_ids", "topk_weights")}
    weights = {name: getattr(inputs, name)[own] for name in ("w_gate_up", "w_down")}
    return replace(inputs, case=replace(case, num_tokens=tokens), **parts, **weights)
