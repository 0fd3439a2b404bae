"""docs/results.md: tables made from stored benchmark reports.

    python -m mok_ref.bench.page docs/results/bench_*.json --output docs/results.md

A report has tables for what was run in it; curves of a report's growth go into a picture beside it.
Targets are those the project set itself; a figure below its target is marked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok_ref.bench.cases import CASES, SMALL_CASES, TABLE_CASES
from mok_ref.bench.entry import WordParser, is_older, kernels_line, one_line_errors
from mok_ref.bench.growth import ALL_TO_ONE, AXES, DIRECTIONS, draw_growth
from mok_ref.bench.growth import BASE as GROWTH_BASE
from mok_ref.bench.report_files import (
    BEGIN,
    COUNT,
    DEVICE,
    END,
    NAME,
    NUMBER,
    POSITIVE,
    TEXT,
    Each,
    Maybe,
    ReportKind,
    Rule,
    errors_name,
    one_of,
    page_with_tables,
    plain,
    read_report,
)
from mok_ref.casefile import check_distinct, write_whole
from mok_ref.config import SAVE_MODES

# ratio to dense cuBLAS that a case shall reach at least: forward, backward (bf16 dW), float32 dW
TARGETS = {
    "dsv3-rank": (0.96, 0.92, 0.92),
    "kimi-16": (0.94, 0.97, 0.92),
    "mixtral": (0.95, 0.94, 0.90),
    "qwen3": (0.82, 0.75, 0.68),
    "qwen3-zipf": (0.78, 0.72, 0.64),
    "sonic": (0.90, 0.90, 0.82),
}
COLUMNS = (
    ("forward", "mok_ref", 0),
    ("backward", "mok_ref, bf16 dW", 1),
    ("backward", "mok_ref", 2),
)
ROW = {"case": NAME, "direction": one_of(*DIRECTIONS), "contender": NAME} | {
    key: POSITIVE
    for key in ("sustained_ms", "bursts_ms", "tflops", "ratio_sustained", "ratio_bursts")
}
SAVING = {"case": NAME, "ring_rows": COUNT, "rows": COUNT, "save": one_of(*SAVE_MODES)}
SAVING |= {"forward_ms": POSITIVE, "step_ms": POSITIVE, "saved_bytes": COUNT}
RANK = {"case": NAME, "ranks": COUNT, "direction": one_of(*DIRECTIONS)}
RANK |= {"ms": POSITIVE, "against_one_rank": POSITIVE}
RATE = Rule("a number from 1e-9 to 1e18 or null", lambda v: v is None or POSITIVE.holds(v))
AROUND = {"case": NAME, "kernels": NAME, "us": POSITIVE, "tbytes_per_s": RATE}
GROWTH = {"axis": one_of(*AXES), "value": NUMBER, "direction": one_of(*DIRECTIONS)}
GROWTH |= {"ms": POSITIVE, "limit_ms": POSITIVE, "limited_by": one_of("products", "memory")}
BENCH = ReportKind(
    made_by="bench --device cuda",
    key="rows",
    shape={
        "device": DEVICE,
        "rows": [ROW],
        "bits": Each(TEXT),
        "host_us": Maybe(Each(POSITIVE)),
        "host_backward_us": Maybe(Each(POSITIVE)),
        "bits_note": Maybe(TEXT),
        "saving": Maybe([SAVING]),
        "ranks": Maybe([RANK]),
        "around": Maybe([AROUND]),
        "growth": Maybe([GROWTH]),
        "ceilings": Maybe(Each(POSITIVE)),
    },
    some_of=("rows", "saving", "ranks", "around", "growth"),
)


def find(report: dict[str, Any], case: str, direction: str, contender: str) -> dict[str, Any]:
    """The row of one contender. Raises: KeyError naming what is not there."""
    for row in report["rows"]:
        if (row["case"], row["direction"], row["contender"]) == (case, direction, contender):
            return row
    raise KeyError(f"rows holds none of {contender} for {case} {direction}")


def has_row(report: dict[str, Any], case: str, direction: str, contender: str) -> bool:
    """Whether a report timed that."""
    wanted = (case, direction, contender)
    return any((r["case"], r["direction"], r["contender"]) == wanted for r in report["rows"])


def cases_in(report: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Those of the cases that a report timed in both directions."""
    return [name for name in names if all(has_row(report, name, *c[:2]) for c in COLUMNS)]


def tables_of(report: dict[str, Any], picture: str = "") -> str:
    """All tables of one report as Markdown. picture: file of its curves, or empty.

    Raises: KeyError naming what the report lacks.
    """
    parts = []
    for dtype in ("", ":mxfp8"):
        cases = cases_in(report, tuple(name + dtype for name in TABLE_CASES))
        if cases:
            parts += [*_targets_table(report, cases), "", *_times_table(report, cases), ""]
    small = cases_in(report, SMALL_CASES)
    if small:
        parts += [*_small_table(report, small), ""]
    if report.get("saving"):
        parts += [*_saving_table(report["saving"]), ""]
    if report.get("ranks"):
        parts += [*_ranks_table(report["ranks"]), ""]
    if report.get("around"):
        parts += [*_around_table(report["around"]), ""]
    if report.get("growth"):
        parts += [*_growth_table(report, picture), ""]
    if not parts:
        raise KeyError("rows holds no case of the table in both directions")
    facts = report["device"]
    title = f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}, {facts['date']}"
    return "\n".join([f"### {title}", "", *parts, *_facts(report)]).rstrip()


def _saving_table(rows: list[dict[str, Any]]) -> list[str]:
    """Forward and backward by save mode; recomputing costs what a mode takes beyond "all"."""
    lines = [
        "What each save mode costs (dW in bf16; the ring holds all rows, or a quarter of them):",
        "",
        "| case | ring rows / rows | save | kept MiB | forward ms | forward + backward ms "
        "| beyond save=all |",
        "|---|---|---|---|---|---|---|",
    ]
    whole = {(r["case"], r["ring_rows"]): r["step_ms"] for r in rows if r["save"] == "all"}
    for row in rows:
        if (row["case"], row["ring_rows"]) not in whole:
            raise KeyError(f"saving holds no save=all of {row['case']}, ring {row['ring_rows']}")
        beyond = row["step_ms"] / whole[row["case"], row["ring_rows"]] - 1
        lines.append(
            f"| {row['case']} | {row['ring_rows']} / {row['rows']} | {row['save']} "
            f"| {row['saved_bytes'] / 2**20:.0f} | {row['forward_ms']:.3f} "
            f"| {row['step_ms']:.3f} | {100 * beyond:+.1f} % |"
        )
    return lines


def _ranks_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Virtual ranks on one GPU, sharing the case's tokens:",
        "",
        "| case | ranks | direction | ms | against one rank |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r['case']} | {r['ranks']} | {r['direction']} | {r['ms']:.3f} "
        f"| {r['against_one_rank']:.3f} |"
        for r in rows
        if r["ranks"] > 1
    ]


def _around_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Kernels before and after the products of one rank, alone in a CUDA graph; TB/s of the "
        "sums over slots counts each pushed row once and each token once:",
        "",
        "| case | kernels | us | TB/s |",
        "|---|---|---|---|",
    ]
    for row in rows:
        rate = row["tbytes_per_s"]
        shown = "–" if rate is None else f"{rate:.2f}"
        lines.append(f"| {row['case']} | {row['kernels']} | {row['us']:.1f} | {shown} |")
    return lines


def _growth_table(report: dict[str, Any], picture: str) -> list[str]:
    ceilings = report.get("ceilings", {})
    if not {"tflops", "tbytes_per_s"} <= set(ceilings):
        raise KeyError("ceilings must hold tflops and tbytes_per_s where growth holds rows")
    lines = [
        f"How the cost grows, around case {GROWTH_BASE} (dW in bf16). Limit: the larger of "
        f"products at {ceilings['tflops']:.0f} TFLOP/s and compulsory bytes at "
        f"{ceilings['tbytes_per_s']:.2f} TB/s, both measured in the same run "
        "(mok_ref/bench/growth.py).",
        "",
    ]
    if picture:
        lines += [f"![time against tokens, experts, skew and ranks, with the limit]({picture})", ""]
    lines += [
        "| axis | value | forward ms | limit ms | backward ms | limit ms | limited by |",
        "|---|---|---|---|---|---|---|",
    ]
    points: dict[tuple[str, float], dict[str, Any]] = {}
    for row in report["growth"]:
        points.setdefault((row["axis"], row["value"]), {})[row["direction"]] = row
    for (axis, value), found in points.items():
        if len(found) < len(DIRECTIONS):
            raise KeyError(f"growth holds {' '.join(found)} alone at {axis} {value:g}")
        cells = [f"{found[d][key]:.3f}" for d in DIRECTIONS for key in ("ms", "limit_ms")]
        limits = ", ".join(dict.fromkeys(found[d]["limited_by"] for d in DIRECTIONS))
        shown = "all to one" if (axis, value) == ("skew", ALL_TO_ONE) else f"{value:g}"
        lines.append(f"| {axis} | {shown} | {' | '.join(cells)} | {limits} |")
    return lines


def _targets_table(report: dict[str, Any], cases: list[str]) -> list[str]:
    lines = [
        "Ratio = time of dense cuBLAS / time of the whole layer, sustained (bursts in brackets).",
        "**Bold** where the target is missed.",
        "",
        "| case | forward | target | backward, bf16 dW | target | backward, float32 dW | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        cells = []
        for direction, contender, which in COLUMNS:
            row, targets = find(report, case, direction, contender), TARGETS.get(case)
            ratio, target = f"{row['ratio_sustained']:.3f}", targets[which] if targets else None
            missed = target is not None and row["ratio_sustained"] < target
            shown = f"**{ratio}**" if missed else ratio
            cells += [
                f"{shown} ({row['ratio_bursts']:.3f})",
                "–" if target is None else f"{target:.2f}",
            ]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return lines


def _times_table(report: dict[str, Any], cases: list[str]) -> list[str]:
    lines = [
        "| case (T H I E K) | direction | mok_ref ms | TFLOP/s | dense ms | torch eager ms "
        "| torch / mok_ref |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        shape = CASES[case.partition(":")[0]]
        sizes = (
            f"{shape.num_tokens} {shape.hidden_size} {shape.intermediate_size} "
            f"{shape.num_experts} {shape.top_k}"
        )
        for direction in ("forward", "backward"):
            ours = find(report, case, direction, "mok_ref")
            dense = find(report, case, direction, "dense cuBLAS")
            torch = _torch_cells(report, case, direction, ours)
            lines.append(
                f"| {case} ({sizes}) | {direction} | {ours['sustained_ms']:.3f} "
                f"| {ours['tflops']:.0f} | {dense['sustained_ms']:.3f} | {torch} |"
            )
    return lines


def _torch_cells(report: dict[str, Any], case: str, direction: str, ours: dict[str, Any]) -> str:
    """Time of the torch pipeline, and how much longer it takes; dashes where it did not run."""
    if not has_row(report, case, direction, "torch eager"):
        return "– | –"
    torch = find(report, case, direction, "torch eager")["sustained_ms"]
    return f"{torch:.3f} | {torch / ours['sustained_ms']:.2f}"


def _small_table(report: dict[str, Any], cases: list[str]) -> list[str]:
    lines = [
        "Small batches, everybody replayed from a CUDA graph (E 128, K 8, H 2048, I 768):",
        "",
        "| tokens | direction | mok_ref ms | torch eager ms | torch / mok_ref |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        for direction, contender in (
            ("forward", "mok_ref"),
            ("backward", "mok_ref, bf16 dW"),
            ("backward", "mok_ref"),
        ):
            ours = find(report, case, direction, contender)
            torch = _torch_cells(report, case, direction, ours)
            label = {"mok_ref": "float32 dW"}.get(contender, "bf16 dW")
            name = direction if direction == "forward" else f"backward, {label}"
            lines.append(
                f"| {CASES[case].num_tokens} | {name} | {ours['sustained_ms']:.3f} | {torch} |"
            )
    return lines


def _facts(report: dict[str, Any]) -> list[str]:
    saving = [
        find(report, case, "forward", "mok_ref, saving")["sustained_ms"]
        / find(report, case, "forward", "mok_ref")["sustained_ms"]
        - 1
        for case in cases_in(report, TABLE_CASES)
    ]
    equal = [case for case, bits in report["bits"].items() if bits == "equal"]
    lines = [kernels_line(report["device"])]
    if report["bits"]:
        lines.append(
            f"- Bits against the portable kernels: {len(equal)} of {len(report['bits'])} cases "
            f"equal ({', '.join(equal)})."
        )
    if saving:
        lines.append(
            f"- Forward that saves gate and up: {100 * min(saving):+.1f} to "
            f"{100 * max(saving):+.1f} % in time."
        )
    of_what = " with those older kernels and launches" if is_older(report["device"]) else ""
    for name, key in (("forward", "host_us"), ("backward", "host_backward_us")):
        host = report.get(key, {}).values()
        if host:
            span = f"{min(host):.0f} to {max(host):.0f} us"
            lines.append(f"- Host time per {name} call{of_what}: {span}.")
    if "bits_note" in report:
        lines.append(f"- {plain(report['bits_note'])}.")
    return lines


def write_page(paths: Sequence[Path], page: Path) -> None:
    """Tables of stored reports between the page's markers; the curves of each report that has some
    in a picture beside it. Nothing is written before everything was read and its tables made.

    Raises: ValueError naming the file, and the key that is wrong; OSError; RuntimeError without
    matplotlib.
    """
    reports, curves, made = [read_report(path, BENCH) for path in paths], {}, []
    for path, report in zip(paths, reports, strict=True):
        picture = path.with_suffix(".svg")
        if report.get("growth"):
            check_distinct(report=path, picture=picture, **{"--output": page})
            if picture in curves:
                raise ValueError(f"reports must have names of their own, got two of {path.stem}")
            curves[picture] = report["growth"]
        name = os.path.relpath(picture, page.parent) if picture in curves else ""
        with errors_name(path, BENCH):
            made.append(tables_of(report, name))
    text = page_with_tables(page, {(BEGIN, END): "\n\n".join(made)})
    for picture, rows in curves.items():
        draw_growth(rows, picture)
    write_whole(page, text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables of a page, and the pictures they show."""
    parser = WordParser(description="Write the tables of docs/results.md.")
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    with one_line_errors():
        options = parser.parse_args(arguments)
        write_page(options.reports, options.output)


if __name__ == "__main__":
    main()
