"""Timelines as Chrome trace events (chrome://tracing, Perfetto): simulated and measured alike.

Format: Google's "Trace Event Format" (2016), complete events ("ph": "X") with microseconds. One
process per rank, one thread per lane (an SM, or pull/compute/push); metadata events name them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import require
from .minibatch_simulation import Span

LANES = ("pull", "compute", "push")

# One record per finished task of a kernel run with --trace: who, what, and globaltimer stamps.
STAMP = np.dtype(
    [
        ("sm", "u4"),
        ("kind", "u4"),
        ("index", "u4"),
        ("unused", "u4"),
        ("start", "u8"),
        ("end", "u8"),
    ]
)
STAMP_KINDS = ("pull", "shared", "gate_up", "down", "dgrad_hidden", "dgrad_input", "wgrad")


def spans_from_stamps(stamps: np.ndarray, rank: int) -> list[Span]:
    """Device-side stamps (n,) of dtype STAMP, in nanoseconds, as spans; the earliest is time 0.

    Records with end = 0 were never written (the buffer is sized for the worst case).
    Raises: ValueError if a kind is unknown or an end precedes its start.
    """
    require(stamps.dtype == STAMP, f"stamps must have dtype STAMP, got {stamps.dtype}")
    done = stamps[stamps["end"] > 0]
    if len(done) == 0:
        return []
    require(
        bool((done["kind"] < len(STAMP_KINDS)).all()),
        f"stamps.kind must be below {len(STAMP_KINDS)}, got {int(done['kind'].max())}",
    )
    require(bool((done["end"] >= done["start"]).all()), "stamps.end must not precede stamps.start")
    zero = int(done["start"].min())
    return [
        Span(
            int(s["sm"]) if rank < 0 else rank,
            "pull" if s["kind"] == 0 else f"SM {int(s['sm'])}",
            f"{STAMP_KINDS[int(s['kind'])]} {int(s['index'])}",
            (int(s["start"]) - zero) * 1e-9,
            (int(s["end"]) - zero) * 1e-9,
        )
        for s in done
    ]


def spans_of_sms(spans: Iterable[Span], rank: int) -> list[Span]:
    """Spans of a task-level simulation (their `rank` is an SM, -1 the pull) as lanes of a rank."""
    return [
        Span(rank, "pull" if s.rank < 0 else f"SM {s.rank}", s.name, s.start, s.end) for s in spans
    ]


def lane_order(lane: str) -> tuple[int, int, str]:
    if lane in LANES:
        return 0, LANES.index(lane), lane
    number = lane.removeprefix("SM ")
    return 1, int(number) if number.isdigit() else 0, lane


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
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(document), encoding="utf-8")
    temporary.replace(path)


def read_trace(path: Path) -> list[Span]:
    """Spans of a trace file.

    Raises: ValueError naming the file if it is no trace.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        events = document["traceEvents"]
        lanes = {
            (e["pid"], e["tid"]): e["args"]["name"]
            for e in events
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        return [
            Span(
                e["pid"],
                lanes.get((e["pid"], e["tid"]), str(e["tid"])),
                e["name"],
                e["ts"] / 1e6,
                (e["ts"] + e["dur"]) / 1e6,
            )
            for e in events
            if e["ph"] == "X"
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: not a trace file: {error!r}") from None
