"""Where a kernel's time goes: its tasks by kind, from clock stamps on the device.

    python -m mok_ref.bench.tasks qwen3 mixtral --stamps stamps.npz            # on the GPU
    python -m mok_ref.bench.tasks --read stamps.npz --output docs/results/tasks.json --traces out/

Per direction and launch: how many tasks of each kind, how long one takes, and which share of its
warps' time they fill. "idle" is what a role's warps did not record: before their first task, after
their last, and bookkeeping. "floor" is what the products of a tile need at the highest clock.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.bench.cases import CASES, BenchCase
from mok_ref.bench.entry import WordParser, one_line_errors, require_gpu
from mok_ref.bench.report_files import (
    COUNT,
    NAME,
    POSITIVE,
    Each,
    check_shape,
    one_of,
)
from mok_ref.bench.timing import launches_ms
from mok_ref.casefile import check_distinct, check_writable, read_npz, write_whole
from mok_ref.planner.errors import check_outputs
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
DIRECTIONS = ("forward", "backward")
CALL = {"case": one_of(*CASES), "direction": one_of(*DIRECTIONS), "lost": COUNT}
CALL |= {"traced_ms": POSITIVE, "plain_ms": POSITIVE, "clock_hz": POSITIVE}
FACTS = {"device": Each(NAME), "recorded": [CALL]}  # what a file of stamps says about them


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
    """First stamp to last."""
    return float(stamps["end"].max() - stamps["start"].min()) * 1e-6 if len(stamps) else 0.0


def median_ms(call: Callable[[], Any]) -> float:
    """Median of queued calls after some that warm up."""
    return float(np.median(launches_ms(call, TIMED, warm=WARM_UP)))


def calls_of(layer: Any) -> dict[str, Callable[[], Any]]:
    """What is recorded, by direction; backward follows a forward."""
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
        plain[direction] = median_ms(call)
    layer.close()
    found = []
    with recording() as recorder:
        layer = OurLayer(inputs, grad_dtype="bf16")
        for direction, call in calls_of(layer).items():
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
    packed = io.BytesIO()
    np.savez_compressed(packed, facts=np.array(facts_text), **arrays)  # type: ignore[arg-type]
    write_whole(path, packed.getvalue())


def load_stamps(path: Path) -> tuple[list[Recorded], dict[str, str]]:
    """What `save_stamps` wrote.

    Raises: ValueError naming the file, and the key that is wrong, if it is something else; OSError.
    """
    arrays = read_npz(path)
    try:
        if "facts" not in arrays:
            raise ValueError("facts is missing")
        facts = json.loads(str(arrays["facts"]))
        check_shape(facts, FACTS)
        if not facts["recorded"]:
            raise ValueError("recorded is empty")
        recorded = []
        for index, one in enumerate(facts["recorded"]):
            stamps = arrays.get(f"stamps{index}")
            if stamps is None or stamps.ndim != 1:
                raise ValueError(f"stamps{index} must be an array of one axis")
            try:
                spans_from_stamps(stamps)
            except ValueError as error:
                raise ValueError(f"stamps{index}: {error}") from None
            recorded.append(Recorded(stamps=stamps, **{key: one[key] for key in CALL}))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be stamps of bench.tasks: {error}") from None
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


def trace_file(folder: Path, case: str, direction: str) -> Path:
    """Where the timeline of one call is written."""
    return folder / f"{case}-{direction}.json"


def check_files(
    read: Path | None, stamps: Path | None, output: Path | None, traces: Path | None
) -> None:
    """Refuse, before anything is measured, what cannot be written or would replace another file.

    Raises: ValueError naming the option.
    """
    wanted = (("--stamps", stamps, (".npz",)), ("--output", output, (".json",)))
    check_outputs(*wanted, inputs={"--read": read})
    if traces is None:
        return
    if not traces.is_dir():
        raise ValueError(f"--traces must be a folder, got {traces}")
    for case, direction in itertools.product(CASES, DIRECTIONS):
        path = trace_file(traces, case, direction)
        check_writable(path, "--traces")
        check_distinct(**{"--stamps": stamps, "--output": output, "--traces": path})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases, or read what was measured; print, write or both."""
    with one_line_errors():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    parser = WordParser(description="Tasks of the kernels by kind.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--stamps", type=Path, help="with cases: write all stamps (.npz)")
    parser.add_argument("--read", type=Path, help="no cases: read stamps (.npz)")
    parser.add_argument("--output", type=Path, help="write the table as JSON")
    parser.add_argument("--traces", type=Path, help="folder for timelines (Chrome trace)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.cases if name not in CASES]
    if unknown or bool(options.cases) == (options.read is not None):
        parser.error(f"give --read or cases of {', '.join(CASES)}, got {options.cases}")
    check_files(options.read, options.stamps, options.output, options.traces)
    if options.read is not None:
        recorded, device = load_stamps(options.read)
    else:
        require_gpu("bench.tasks")
        from mok_ref.bench.gpu import device_facts

        recorded = [one for name in dict.fromkeys(options.cases) for one in measure(CASES[name])]
        device = device_facts()
    if options.stamps is not None:
        save_stamps(options.stamps, recorded, device)
    rows, times = tables_of(recorded)
    print(table_text(rows, times))
    if options.traces is not None:
        for one in recorded:
            path = trace_file(options.traces, one.case, one.direction)
            write_trace(path, spans_from_stamps(one.stamps))
    if options.output is not None:
        document = {
            "device": device,
            "times": [asdict(t) for t in times],
            "tasks": [asdict(r) for r in rows],
        }
        write_whole(options.output, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
