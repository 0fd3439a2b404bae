"""Where a kernel's time goes: its tasks by kind, from clock stamps on the device.

    python -m mok_ref.bench.tasks qwen3 mixtral --stamps stamps.npz            # on the GPU
    python -m mok_ref.bench.tasks --read stamps.npz --output docs/results/tasks.json --traces out/

Per direction and launch: how many tasks of each kind, how long one takes, and which share of its
warps' time they fill. "idle" is what a role's warps did not record: before their first task, after
their last, and bookkeeping. "floor" is what the products of a tile need at the highest clock.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.bench.cases import CASES, BenchCase
from mok_ref.planner.trace import STAMP_KINDS, spans_from_stamps, summarize, write_trace

WARM_UP = 3
TIMED = 9
TILE_FLOPS_PER_DEPTH = 2 * 128 * 256
SM_FLOPS_PER_CLOCK = 4096  # dense bf16 of a Hopper multiprocessor
PHASES = {
    "forward": ("shared_gate_up", "shared_down", "gate_up", "down"),
    "dgrad": ("gate_up_again", "dgrad_hidden", "dgrad_input"),
    "wgrad": ("wgrad",),
}


@dataclass(frozen=True)
class TaskRow:
    """One kind of task in one kind of warp during one phase."""

    case: str
    phase: str
    role: str
    kind: str
    number: int
    mean_us: float
    share: float
    floor_us: float | None


@dataclass(frozen=True)
class PhaseTime:
    """First stamp to last, and the whole direction with and without stamps (CUDA events)."""

    case: str
    direction: str
    phases_ms: dict[str, float]
    traced_ms: float
    plain_ms: float
    lost: int


@dataclass(frozen=True)
class Recorded:
    """One call of one direction of one case."""

    case: str
    direction: str
    stamps: np.ndarray
    lost: int
    traced_ms: float
    plain_ms: float
    clock_hz: float


def phases_of(stamps: np.ndarray) -> dict[str, np.ndarray]:
    """Stamps of each launch: forward, or dgrad and wgrad by turns (joined by name).

    A launch ends with its last product; what begins later belongs to the next.
    """
    kinds = np.array(STAMP_KINDS)[stamps["kind"]]
    phase = np.full(len(stamps), "", object)
    for name, members in PHASES.items():
        phase[np.isin(kinds, members)] = name
    products = np.flatnonzero(phase != "")
    order = products[np.argsort(stamps["start"][products], kind="stable")]
    changes = np.flatnonzero(phase[order][1:] != phase[order][:-1])
    edges = [int(stamps["end"][order[: i + 1]].max()) for i in changes]
    names = [str(phase[order[i]]) for i in [*changes, len(order) - 1]] if len(order) else []
    place = (
        np.searchsorted(edges, stamps["start"], side="right") if edges else np.zeros(len(stamps))
    )
    found: dict[str, list[np.ndarray]] = {}
    for i, name in enumerate(names):
        found.setdefault(name, []).append(stamps[place == i])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def depth_of(case: BenchCase, kind: str) -> int | None:
    """K of a kind of tile; None where experts differ or nothing is multiplied."""
    hidden, inner = case.hidden_size, case.intermediate_size
    depths = {"gate_up": hidden, "down": inner, "gate_up_again": hidden, "dgrad_hidden": hidden}
    return (depths | {"dgrad_input": 2 * inner}).get(kind)


def rows_of(case: BenchCase, stamps: np.ndarray, clock_hz: float) -> list[TaskRow]:
    """The table of one direction's stamps."""
    rows = []
    for phase, part in phases_of(stamps).items():
        for k in summarize(spans_from_stamps(part)):
            depth = depth_of(case, k.kind)
            floor = None
            if depth is not None and k.role == "math":
                floor = TILE_FLOPS_PER_DEPTH * depth / SM_FLOPS_PER_CLOCK / clock_hz * 1e6
            rows.append(
                TaskRow(case.name, phase, k.role, k.kind, k.number, k.mean_us, k.share, floor)
            )
    return rows


def milliseconds(stamps: np.ndarray) -> float:
    return float(stamps["end"].max() - stamps["start"].min()) * 1e-6 if len(stamps) else 0.0


def median_ms(call: Callable[[], Any]) -> float:
    """Median of single calls by CUDA events."""
    import torch

    times = []
    for _ in range(TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def calls_of(layer: Any) -> dict[str, Callable[[], Any]]:
    return {"forward": lambda: layer.forward("all"), "backward": layer.backward}


def measure(case: BenchCase) -> list[Recorded]:
    """Forward and backward of one case on one rank, recorded and not; needs a GPU and torch."""
    import cupy

    from mok_ref.bench.gpu import OurLayer
    from mok_ref.bench.peers import make_inputs
    from mok_ref.gpu.trace import recording

    inputs = make_inputs(case)
    clock = cupy.cuda.runtime.getDeviceProperties(0)["clockRate"] * 1e3
    plain: dict[str, float] = {}
    layer = OurLayer(inputs, grad_dtype="bf16")
    for direction, call in calls_of(layer).items():
        for _ in range(WARM_UP):
            call()
        plain[direction] = median_ms(call)
    layer.close()
    found = []
    with recording() as recorder:
        layer = OurLayer(inputs, grad_dtype="bf16")
        for direction, call in calls_of(layer).items():
            for _ in range(WARM_UP):
                call()
            traced = median_ms(call)
            recorder.clear()
            call()
            layer.synchronize()
            stamps, lost = recorder.read(), recorder.num_lost()
            times = (traced, plain[direction])
            found.append(Recorded(case.name, direction, stamps, lost, *times, clock))
        layer.close()
    return found


def tables_of(recorded: Sequence[Recorded]) -> tuple[list[TaskRow], list[PhaseTime]]:
    """Everything that is printed of what was recorded."""
    rows, times = [], []
    for one in recorded:
        rows += rows_of(CASES[one.case], one.stamps, one.clock_hz)
        parts = {name: milliseconds(part) for name, part in phases_of(one.stamps).items()}
        times.append(
            PhaseTime(one.case, one.direction, parts, one.traced_ms, one.plain_ms, one.lost)
        )
    return rows, times


def save_stamps(path: Path, recorded: Sequence[Recorded], device: dict[str, str]) -> None:
    """All stamps, for tables and timelines to be made elsewhere."""
    facts = [{k: v for k, v in vars(one).items() if k != "stamps"} for one in recorded]
    arrays = {f"stamps{i}": one.stamps for i, one in enumerate(recorded)}
    facts_text = json.dumps({"device": device, "recorded": facts})
    np.savez_compressed(path, facts=np.array(facts_text), **arrays)  # type: ignore[arg-type]


def load_stamps(path: Path) -> tuple[list[Recorded], dict[str, str]]:
    """What `save_stamps` wrote. Raises: ValueError naming the file if it is something else."""
    try:
        with np.load(path, allow_pickle=False) as data:
            facts = json.loads(str(data["facts"]))
            stamps = [data[f"stamps{i}"] for i in range(len(facts["recorded"]))]
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"{path.name}: no stamps of this benchmark: {error}") from None
    recorded = [
        Recorded(stamps=array, **one) for array, one in zip(stamps, facts["recorded"], strict=True)
    ]
    return recorded, facts["device"]


def table_text(rows: Sequence[TaskRow], times: Sequence[PhaseTime]) -> str:
    """Everything for a terminal."""
    lines = []
    for t in times:
        phases = ", ".join(f"{name} {ms:.3f} ms" for name, ms in t.phases_ms.items())
        lost = f"; {t.lost} tasks found no room" if t.lost else ""
        lines.append(
            f"{t.case} {t.direction}: {t.plain_ms:.3f} ms, {t.traced_ms:.3f} ms with stamps; "
            f"{phases}{lost}"
        )
    lines.append(
        f"{'case':11} {'phase':8} {'warps':6} {'kind':14} {'number':>7} {'mean us':>9} "
        f"{'floor us':>9} {'share':>7}"
    )
    for r in rows:
        floor = "" if r.floor_us is None else f"{r.floor_us:.2f}"
        lines.append(
            f"{r.case:11} {r.phase:8} {r.role:6} {r.kind:14} {r.number:7d} {r.mean_us:9.2f} "
            f"{floor:>9} {r.share:7.1%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases, or read what was measured; print, write or both."""
    parser = argparse.ArgumentParser(description="Tasks of the kernels by kind.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--stamps", type=Path, help="with cases: write all stamps (.npz)")
    parser.add_argument("--read", type=Path, help="no cases: read stamps (.npz)")
    parser.add_argument("--output", type=Path, help="write the table as JSON")
    parser.add_argument("--traces", type=Path, help="folder for timelines (Chrome trace)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.cases if name not in CASES]
    if unknown or bool(options.cases) == (options.read is not None):
        parser.error(f"give --read or cases of {', '.join(CASES)}, got {options.cases}")
    if options.read is not None:
        recorded, device = load_stamps(options.read)
    else:
        from mok_ref.bench.gpu import device_facts
        from mok_ref.gpu.compiler import source_digest

        recorded = [one for name in options.cases for one in measure(CASES[name])]
        device = device_facts() | {"kernels": source_digest()[:12]}
    if options.stamps is not None:
        save_stamps(options.stamps, recorded, device)
    rows, times = tables_of(recorded)
    print(table_text(rows, times))
    if options.traces is not None:
        for one in recorded:
            path = options.traces / f"{one.case}-{one.direction}.json"
            write_trace(path, spans_from_stamps(one.stamps))
    if options.output is not None:
        document = {
            "device": device,
            "times": [asdict(t) for t in times],
            "tasks": [asdict(r) for r in rows],
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
