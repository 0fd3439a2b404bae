"""Timelines as Chrome trace events (chrome://tracing, Perfetto): simulated and measured alike.

Format: Google's "Trace Event Format" (2016), complete events ("ph": "X") with microseconds. One
process per rank, one thread per lane (an SM, or pull/compute/push); metadata events name them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.casefile import write_whole
from mok_ref.config import is_int, is_real, shown

from .errors import parse_json, read_text, require
from .minibatch_simulation import Span

LANES = ("pull", "compute", "push")
MOST_PID = 1 << 53  # of a trace that is read
MOST_MICROSECONDS = 1e18  # stamps may count from any epoch
MOST_DIGITS = 9  # of a lane's number

# One record per finished task of a kernel run with --trace: who, what, and globaltimer stamps.
# CUDA twin: cuda_src/trace.cuh: TraceRecord
STAMP = np.dtype(
    [
        ("sm", "u2"),
        ("rank", "u2"),
        ("kind", "u2"),
        ("warp", "u2"),
        ("row_block", "u4"),
        ("column", "u4"),
        ("start", "u8"),
        ("end", "u8"),
    ]
)
# CUDA twin: cuda_src/trace.cuh: TraceKind. Where the simulation has the kind, too, its name.
STAMP_KINDS = (
    "pull",
    "shared_gate_up",
    "shared_down",
    "gate_up",
    "down",
    "gate_up_again",
    "dgrad_hidden",
    "dgrad_input",
    "wgrad",
    "store",
    "load",
    "wait_rows",
    "wait_operands",
    "wait_store",
    "wait_tile",
    "wait_ring",
    "combine",
    "wait_token",
)
ROLES = {
    "pull": ("pull", "wait_ring"),
    "load": ("load", "wait_rows"),
    "store": ("store", "wait_tile"),
    "combine": ("combine", "wait_token"),
}
FIRST_MATH_WARP = 4  # the warps before it load, pull and store


def spans_from_stamps(stamps: np.ndarray) -> list[Span]:
    """Device-side stamps (n,) of dtype STAMP, in nanoseconds, as spans; the earliest is time 0.

    A lane is one warp of one multiprocessor: "SM 5 math 8" is the second math warpgroup there.
    Raises: ValueError if a kind is unknown or an end precedes its start.
    """
    require(stamps.dtype == STAMP, f"stamps must have dtype STAMP, got {stamps.dtype}")
    if len(stamps) == 0:
        return []
    require(
        bool((stamps["kind"] < len(STAMP_KINDS)).all()),
        f"stamps.kind must be below {len(STAMP_KINDS)}, got {int(stamps['kind'].max())}",
    )
    require(
        bool((stamps["end"] >= stamps["start"]).all()), "stamps.end must not precede stamps.start"
    )
    zero = int(stamps["start"].min())
    return [
        Span(
            rank,
            f"SM {sm} {role_of(kind, warp)} {warp}",
            f"{STAMP_KINDS[kind]} {row_block}.{column}",
            (start - zero) * 1e-9,
            (end - zero) * 1e-9,
        )
        for sm, rank, kind, warp, row_block, column, start, end in stamps.tolist()
    ]


def role_of(kind: int, warp: int) -> str:
    """What a warp does, from one of its tasks. A math warp that pulls rows at the start counts as a
    pulling one until it multiplies."""
    role = next((role for role, kinds in ROLES.items() if STAMP_KINDS[kind] in kinds), "other")
    return role if warp < FIRST_MATH_WARP or role == "pull" else "math"


@dataclass(frozen=True)
class KindSummary:
    """All spans of one kind in lanes of one role: how many, their seconds together, and their
    share of the time of these lanes from the first span of all to the last."""

    role: str
    kind: str
    number: int
    seconds: float
    share: float

    @property
    def mean_us(self) -> float:
        return self.seconds / self.number * 1e6


def summarize(spans: Sequence[Span]) -> list[KindSummary]:
    """Where the time went, by role and kind; what a role's lanes did not record is "idle"."""
    if not spans:
        return []
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    lanes: dict[str, set[tuple[int, str]]] = {}
    kinds: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        role = role_of_lane(span.lane)
        lanes.setdefault(role, set()).add((span.rank, span.lane))
        kinds.setdefault((role, span.name.split(" ")[0]), []).append(span.end - span.start)
    result = []
    for role in sorted(lanes):
        time = len(lanes[role]) * whole
        parts = [(kind, len(v), sum(v)) for (r, kind), v in sorted(kinds.items()) if r == role]
        idle = max(0.0, time - sum(seconds for _, _, seconds in parts))
        for kind, number, seconds in [*parts, ("idle", len(lanes[role]), idle)]:
            result.append(KindSummary(role, kind, number, seconds, seconds / time if time else 0.0))
    return result


def role_of_lane(lane: str) -> str:
    """ "math" of "SM 5 math 8"; simulated lanes are "SM 5", pull, compute or push."""
    words = lane.split(" ")
    return (words[2] if len(words) > 2 else "tiles") if words[0] == "SM" else lane


def spans_of_sms(spans: Iterable[Span], rank: int) -> list[Span]:
    """Spans of a task-level simulation (their `rank` is an SM, -1 the pull) as lanes of a rank."""
    return [
        Span(rank, "pull" if s.rank < 0 else f"SM {s.rank}", s.name, s.start, s.end) for s in spans
    ]


def lane_order(lane: str) -> tuple[int, int, str]:
    if lane in LANES:
        return 0, LANES.index(lane), lane
    number = lane.removeprefix("SM ").split(" ")[0]
    is_number = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
    return 1, int(number) if is_number else 0, lane


def chrome_events(spans: Sequence[Span], shift_process: int = 0, title: str = "rank") -> list[dict]:
    """Trace events of these spans; `shift_process` keeps two timelines apart in one file."""
    lanes = sorted({span.lane for span in spans}, key=lane_order)
    thread = {lane: i for i, lane in enumerate(lanes)}
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        pid = rank + shift_process
        events.append(metadata("process_name", pid, 0, f"{title} {rank}"))
        events += [metadata("thread_name", pid, thread[lane], lane) for lane in lanes]
    for span in spans:
        events.append(
            {
                "name": span.name,
                "cat": span.name.split(" ")[0],
                "ph": "X",
                "ts": round(span.start * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
                "pid": span.rank + shift_process,
                "tid": thread[span.lane],
            }
        )
    return events


def metadata(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}


def write_trace(
    path: Path, simulated: Sequence[Span], measured: Sequence[Span] = (), note: str = ""
) -> None:
    """One file with both timelines side by side; whole or absent."""
    events = chrome_events(simulated, 0, "simulated rank" if measured else "rank")
    if measured:
        shift = 1 + max((span.rank for span in simulated), default=0)
        events += chrome_events(measured, shift, "measured rank")
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"program": "mok_ref", "note": note},
    }
    write_whole(path, json.dumps(document))


def read_trace(path: Path) -> list[Span]:
    """Spans of a trace file.

    Raises: ValueError naming the file if it is no trace.
    """
    return [span for spans in read_timelines(path).values() for span in spans]


def read_timelines(path: Path) -> dict[str, list[Span]]:
    """Spans of a trace file by timeline: "simulated" and "measured", or "" where there is but one.

    Raises: ValueError naming the file if it is no trace.
    """
    table = parse_json(read_text(path), path.name, "trace")
    try:
        return timelines_of(table)
    except ValueError as error:
        raise ValueError(f"{path.name}: not a trace file: {error}") from None


def timelines_of(table: Any) -> dict[str, list[Span]]:
    """Spans of a trace file's table by timeline. Other programs write traces, too: what is no
    complete event and names nothing is left out.

    Raises: ValueError naming the event, the key, the rule and the value.
    """
    events = table.get("traceEvents") if isinstance(table, dict) else None
    require(isinstance(events, list), f"traceEvents must be a list, got {shown(events)}")
    assert isinstance(events, list)
    for i, event in enumerate(events):
        require(isinstance(event, dict), f"event {i} must be an object, got {shown(event)}")
    names = {
        (event["name"], *thread_of(event, i)): lane_name(event, i)
        for i, event in enumerate(events)
        if event.get("ph") == "M" and event.get("name") in ("process_name", "thread_name")
    }
    found: dict[str, list[Span]] = {}
    for i, event in enumerate(events):
        if event.get("ph") == "X":
            pid, tid = thread_of(event, i)
            title = names.get(("process_name", pid, 0), "").rpartition("rank")[0].strip()
            lane = names.get(("thread_name", pid, tid), str(tid))
            start = microseconds(event, "ts", i)
            end = start + microseconds(event, "dur", i)
            span = Span(pid, lane, text_of(event, "name", i), start / 1e6, end / 1e6)
            found.setdefault(title, []).append(span)
    for spans in found.values():
        takes_time = any(span.end > span.start for span in spans)
        require(takes_time, "dur must be above 0 in one event at least")
    return found


def thread_of(event: dict[str, Any], index: int) -> tuple[int, int | str]:
    """(pid, tid) of an event: a rank; a number or a name, 0 where there is none."""
    pid: Any = event.get("pid")
    tid: Any = event.get("tid", 0)
    is_rank = is_int(pid) and abs(pid) <= MOST_PID
    require(is_rank, f"event {index}: pid must be an integer to 2^53, got {shown(pid)}")
    is_thread = isinstance(tid, str) or (is_int(tid) and abs(tid) <= MOST_PID)
    require(is_thread, f"event {index}: tid must be an integer or text, got {shown(tid)}")
    return pid, text_of(event, "tid", index) if isinstance(tid, str) else tid


def lane_name(event: dict[str, Any], index: int) -> str:
    """The name that a metadata event gives to its process or thread."""
    args: Any = event.get("args")
    require(isinstance(args, dict), f"event {index}: args must be an object, got {shown(args)}")
    return text_of(args, "name", index)


def text_of(table: dict[str, Any], key: str, index: int) -> str:
    """Text that UTF-8 can write: JSON may hold halves of characters."""
    text = table.get(key)
    is_text = isinstance(text, str) and not any("\ud800" <= char <= "\udfff" for char in text)
    require(is_text, f"event {index}: {key} must be text, got {shown(text)}")
    return str(text)


def microseconds(event: dict[str, Any], key: str, index: int) -> float:
    """A time stamp or a duration."""
    value: Any = event.get(key)
    is_time = is_real(value) and 0 <= value <= MOST_MICROSECONDS
    require(
        is_time,
        f"event {index}: {key} must be a number in 0..{MOST_MICROSECONDS:g}, got {shown(value)}",
    )
    return float(value)
