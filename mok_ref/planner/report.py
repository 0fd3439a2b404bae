"""`mok-ref report`: one self-contained HTML page of a plan, a trace or a training run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.casefile import write_whole

from .closed_form import Setting
from .errors import require
from .minibatch_simulation import Span
from .pictures import (
    curves_picture,
    matrix_picture,
    memory_picture,
    roofline_picture,
    timeline_picture,
)
from .plan import Plan, parse_plan, plan_text
from .prediction import MOST_RANKS, predict
from .stages import StageCosts
from .task_simulation import TaskRun, simulate_tasks
from .trace import read_timelines, spans_of_sms, summarize, write_trace

STYLE = (
    "body{font-family:sans-serif;max-width:1060px;margin:2em auto;color:#222;padding:0 1em}"
    "table{border-collapse:collapse;margin:.6em 0}td,th{border:1px solid #ccc;padding:3px 8px;"
    "text-align:right;font-size:13px}th{background:#f3f3f3}td:first-child,th:first-child"
    "{text-align:left}svg{max-width:100%;height:auto;border:1px solid #eee;margin:.4em 0}"
    "pre{background:#f7f7f7;padding:.8em;overflow-x:auto;font-size:12px}"
)
SHOWN_RANKS = 8  # ranks in the picture of the whole group; the trace file has all
SHOWN_SMS = 16


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """HTML without any outside reference."""
    body = "".join(f"<h2>{escape(name)}</h2>{content}" for name, content in sections if content)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}"
        f"</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell_text(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def cell_text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}" if math.isfinite(cell) else str(cell)
    return str(cell)


# --------------------------------------------------------------------------- plans


def traffic_megabytes(setting: Setting) -> np.ndarray:
    """(R, R) MB one forward moves from rank to rank: x rows to experts, y rows back."""
    rows = setting.work.traffic(setting.owner)
    shape = setting.shape
    return (rows * shape.pull_row_bytes + rows.T * shape.push_row_bytes) / 1e6


def hbm_bytes(costs: StageCosts, rows: float, experts: int) -> float:
    """Compulsory HBM traffic of one forward: weights once, rows in, h out and in, y out."""
    shape = costs.shape
    weights = 3.0 * experts * shape.hidden_size * shape.columns * shape.weight_bytes
    return weights + rows * (shape.pull_row_bytes + shape.push_row_bytes + 10.0 * shape.columns)


def roofline_points(plan: Plan, setting: Setting) -> list[tuple[str, float, float]]:
    rows = float(setting.work.counts.sum()) / setting.choice.ep_size
    experts = int(np.bincount(setting.owner, minlength=setting.choice.ep_size).max())
    moved = hbm_bytes(setting.costs, rows, experts)
    points = []
    for name, factor in (("forward", 1.0), ("backward", 2.0)):
        p = plan.predicted[name]
        flops = p["tflops"] * p["ms"] * 1e9
        points.append((name, flops / (moved * factor), p["tflops"]))
    return points


def plan_spans(setting: Setting) -> tuple[list[Span], list[Span], TaskRun]:
    """Forward of the whole group, and of rank 0 task by task."""
    group = predict(setting, with_spans=True).simulation.spans
    tasks = simulate_tasks(setting, 0, with_spans=True)
    return group, spans_of_sms(tasks.spans, 0), tasks


def plan_pictures(plan: Plan) -> dict[str, tuple[str, str]]:
    """SVG of every picture of a plan: file name, (heading, picture)."""
    setting = plan.setting()
    group, tasks, run = plan_spans(setting)
    ranks = sorted({span.rank for span in group})[:SHOWN_RANKS]
    lanes = {"pull", *(f"SM {i}" for i in range(setting.choice.communication_sms + SHOWN_SMS))}
    shares = ", ".join(f"{name} {share:.1%}" for name, share in run.shares().items())
    memory = plan.memory
    pictures = {
        "timeline-ranks": (
            "Forward, ranks side by side (simulated)",
            timeline_picture([s for s in group if s.rank in ranks], "minibatches"),
        ),
        "timeline-tasks": (
            "Forward, rank 0 task by task (simulated)",
            timeline_picture([s for s in tasks if s.lane in lanes], f"SM time: {shares}"),
        ),
        "roofline": ("Roofline", roofline_picture(plan.machine(), roofline_points(plan, setting))),
        "memory": ("Memory", memory_picture(memory["parts"], memory["capacity"])),
    }
    if setting.choice.ep_size <= MOST_RANKS:
        picture = matrix_picture(traffic_megabytes(setting), "MB from rank to rank, one forward")
        pictures["communication"] = ("Communication", picture)
    return pictures


def plan_sections(plan: Plan) -> list[tuple[str, str]]:
    text = ("Plan", f"<pre>{escape(plan_text(plan))}</pre>")
    pictures = list(plan_pictures(plan).values())
    return [text, *pictures, skew_section(plan), figures_section(plan)]


def write_pictures(plan: Plan, folder: Path) -> list[Path]:
    """Every picture of a plan as an SVG file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (_, picture) in plan_pictures(plan).items():
        path = folder / f"{name}.svg"
        path.write_text(picture + "\n", encoding="utf-8")
        written.append(path)
    return written


def skew_section(plan: Plan) -> tuple[str, str]:
    header = ["load", "slowdown", "experts placed anew", "fullest rank", "hottest expert", "breaks"]
    rows = [
        (
            case["title"],
            f"{case['slowdown']:.2f}x",
            f"{case['replaced']:.2f}x",
            f"{case['hottest_rank']:.2f}x",
            f"{case['hottest_expert']:.2f}x",
            case["breaks"] or "-",
        )
        for case in plan.breaks
    ]
    first = f"<p>{escape(plan.first_break)}</p>"
    return "What breaks first under skew", first + html_table(header, rows)


def figures_section(plan: Plan) -> tuple[str, str]:
    """Every figure of the machine with its source."""
    machine = plan.machine()
    rows = [(key, getattr(machine, key), text) for key, text in machine.sources.items()]
    return "Hardware figures", html_table(["figure", "value used", "source"], rows)


def plan_trace(plan: Plan, path: Path, measured: Sequence[Span] = ()) -> None:
    """Timeline of all ranks, and of rank 0 tile by tile; a measured one beside it."""
    group, tasks, _ = plan_spans(plan.setting())
    apart = [replace(span, rank=plan.chosen.ep_size) for span in tasks]
    write_trace(path, [*group, *apart], measured, note=str(plan.chosen))


# --------------------------------------------------------------------------- runs


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines; an unfinished last line (a run that is still going) is left out.

    Raises: ValueError naming file and line.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if i == len(lines) - 1:
                break
            raise ValueError(f"{path.name}: line {i + 1} is not JSON: {error}") from None
        if isinstance(record, dict):
            records.append(record)
    return records


def curves_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Every number that steps report, over steps; numbers of layers by layer."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for i, record in enumerate(records):
        step = float(record.get("step", i))
        numbers = {k: v for k, v in record.items() if k != "step"}
        for index, layer in enumerate(record.get("layers") or []):
            numbers |= {f"{key}, layer {index}": value for key, value in layer.items()}
        for name, value in numbers.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                curves.setdefault(name, []).append((step, float(value)))
    return curves


def grouped(curves: Mapping[str, list[tuple[float, float]]]) -> dict[str, dict[str, list]]:
    """Curves that belong in one picture: the same number of several layers, losses together."""
    groups: dict[str, dict[str, list]] = {}
    for name, line in curves.items():
        key = name.split(", layer")[0]
        key = "loss" if key in ("loss", "valid_loss") else key
        groups.setdefault(key, {})[name] = line
    return groups


def run_sections(run_dir: Path) -> list[tuple[str, str]]:
    """A training run: its summary, alarms and actions, and every number it wrote."""
    records = read_lines(run_dir / "metrics.jsonl")
    require(bool(records), f"run must hold at least one step, got none in {run_dir}")
    curves = curves_of(records)
    loss = curves.get("loss", [])
    sections = [("Run", f"<p>{len(records)} steps</p>" + last_numbers(records[-1]))]
    happened = [
        (record.get("step", i), kind, text)
        for i, record in enumerate(records)
        for kind in ("alarms", "actions")
        for text in record.get(kind) or []
    ]
    if happened:
        table = html_table(["step", "kind", "what"], happened[:200])
        sections.append(("Alarms and actions", table))
    if loss:
        first, last = loss[0][1], loss[-1][1]
        sections[0] = ("Run", sections[0][1] + f"<p>loss {first:.4f} to {last:.4f}</p>")
    for name, lines in grouped(curves).items():
        sections.append((name, curves_picture(lines, name)))
    return sections


def last_numbers(record: Mapping[str, Any]) -> str:
    rows = [
        (key, value)
        for key, value in record.items()
        if isinstance(value, (int, float, str)) and not isinstance(value, bool)
    ]
    return html_table(["last step", "value"], rows)


# --------------------------------------------------------------------------- entry


def html_report(source: Path) -> str:
    """The page of a plan (.json), of a trace (.json) or of a training run (folder).

    Raises: ValueError saying what `source` would have to be.
    """
    if source.is_dir():
        require(
            (source / "metrics.jsonl").is_file(),
            f"report needs a folder with metrics.jsonl, a plan or a trace, got {str(source)!r}",
        )
        return page(f"Training run {source.name}", run_sections(source))
    require(source.is_file(), f"report needs an existing file or folder, got {str(source)!r}")
    text = read_source(source)
    if '"traceEvents"' in text:
        return page(f"Trace {source.name}", trace_sections(source))
    plan = parse_plan(text, source.name)
    return page(f"{plan.model['name']} on {plan.hardware['title']}", plan_sections(plan))


def read_source(source: Path) -> str:
    """Text of a plan or trace file. Raises: ValueError for anything that is no text."""
    try:
        return source.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"report needs a plan or a trace (.json) or a run's folder, got {str(source)!r}"
        ) from None


def trace_sections(source: Path) -> list[tuple[str, str]]:
    """Timelines and tables of a trace: the simulated and the measured one below each other."""
    sections = []
    for title, spans in read_timelines(source).items():
        which = f", {title}" if title else ""
        sections.append((f"Timeline{which}", timeline_picture(spans, source.name)))
        sections.append((f"Time by kind{which}", kinds_table(spans)))
    return sections


def kinds_table(spans: Sequence[Span]) -> str:
    """Number, mean duration and share of time of each kind of span."""
    rows = [
        (k.role, k.kind, k.number, k.seconds * 1e3, k.mean_us, f"{k.share:.1%}")
        for k in summarize(spans)
    ]
    return html_table(["lanes", "kind", "number", "total ms", "mean us", "share of time"], rows)


def write_report(source: Path, output: Path) -> None:
    """Write the page, whole or not at all."""
    write_whole(output, html_report(source))
