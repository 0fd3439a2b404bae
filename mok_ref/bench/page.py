"""docs/results.md: tables made from stored benchmark reports.

    python -m mok_ref.bench.page docs/results/bench_*.json --output docs/results.md

First what all runs of the same kernels give together (page_runs.py), beside the project's targets;
then every report by itself, folded. Pictures go beside them: of the runs beside the page, of a
report's growth beside the report.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mok_ref.bench.cases import CASES, TABLE_CASES, BenchCase
from mok_ref.bench.entry import WordParser, is_older, kernels_line, one_line_errors
from mok_ref.bench.growth import ALL_TO_ONE, AXES, DIRECTIONS, draw_growth
from mok_ref.bench.growth import BASE as GROWTH_BASE
from mok_ref.bench.page_power import PRICES, parts_table, power_tables
from mok_ref.bench.page_runs import (
    COLUMNS,
    draw_runs,
    row_of,
    runs_of_one_kind,
    runs_tables,
    when,
)
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
    check_own_links,
    errors_name,
    one_of,
    page_with_tables,
    plain,
    read_report,
)
from mok_ref.bench.timing import Protocol
from mok_ref.bench.traffic import BYTES, COUNTERS
from mok_ref.casefile import check_distinct, check_writable, write_whole
from mok_ref.config import SAVE_MODES

ROW: dict[str, Any] = {"case": NAME, "direction": one_of(*DIRECTIONS), "contender": NAME} | {
    key: POSITIVE
    for key in ("sustained_ms", "bursts_ms", "tflops", "ratio_sustained", "ratio_bursts")
}
ROW |= {"ratio_of_medians": Maybe(POSITIVE), "turns_ms": Maybe([POSITIVE])}
SAVING = {"case": NAME, "ring_rows": COUNT, "rows": COUNT, "save": one_of(*SAVE_MODES)}
SAVING |= {"forward_ms": POSITIVE, "step_ms": POSITIVE, "saved_bytes": COUNT}
RANK = {"case": NAME, "ranks": COUNT, "direction": one_of(*DIRECTIONS)}
RANK |= {"ms": POSITIVE, "against_one_rank": POSITIVE}
RATE = Rule("a number from 1e-9 to 1e18 or null", lambda v: v is None or POSITIVE.holds(v))
AROUND: dict[str, Any] = {"case": NAME, "kernels": NAME, "us": POSITIVE, "tbytes_per_s": RATE}
AROUND |= {"own_launch": Maybe(one_of(True, False))}
GROWTH = {"axis": one_of(*AXES), "value": NUMBER, "direction": one_of(*DIRECTIONS)}
GROWTH |= {"ms": POSITIVE, "limit_ms": POSITIVE, "limited_by": one_of("products", "memory")}
TABLE = Protocol()
TURN_S = TABLE.skip_s + TABLE.turn_s
PROTOCOL = f"""
Ratio = time of dense cuBLAS products with the same FLOPs / time of the whole layer, sustained.
After {TABLE.warm_s:g} s of work all contenders have {TABLE.rounds} turns of {TURN_S:g} s, in random
order and the same order backwards, without a pause. The first {TABLE.skip_s:g} s of a turn do not
count, so that each runs at its own clock. Its time is the median over its turns of the mean of a
turn's calls (queued, {TABLE.repeats} at least in all, timed by CUDA events): the card moves its
clock in steps of 1 %, and the median of calls jumps from step to step; it stands beside in every
report. The torch pipelines and Liger draw less power, after which the clock swings for half a
second, so they have one turn after all others'. Below: median over the runs (lowest – highest).
**Bold** where that median misses the target."""
RUNS_TITLE = f"### All runs of these kernels\n\n{textwrap.fill(PROTOCOL.strip(), 100)}"
ENERGY = {"case": one_of(*TABLE_CASES), "direction": one_of(*DIRECTIONS), "contender": NAME}
ENERGY |= {key: POSITIVE for key in ("ms", "joules", "watts", "mhz")}
TRAFFIC = {"case": one_of(*TABLE_CASES), "direction": one_of(*DIRECTIONS), "contender": NAME}
TRAFFIC |= dict.fromkeys(COUNTERS, COUNT) | {"cycles": POSITIVE}
PART = {"case": one_of(*TABLE_CASES), "direction": one_of(*DIRECTIONS), "what": NAME}
PART |= {key: POSITIVE for key in ("ms", "mhz")}
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
        "saving_cost": Maybe(Each(POSITIVE)),
        "left_out": Maybe(Each(TEXT)),
        "peers": Maybe(Each(TEXT)),
        "peer_errors": Maybe(Each(NUMBER)),
        "saving": Maybe([SAVING]),
        "ranks": Maybe([RANK]),
        "around": Maybe([AROUND]),
        "growth": Maybe([GROWTH]),
        "ceilings": Maybe(Each(POSITIVE)),
        "energy": Maybe([ENERGY]),
        "copy": Maybe(Each(POSITIVE)),
        "traffic": Maybe([TRAFFIC]),
        "parts": Maybe([PART]),
        "prices": Maybe(dict.fromkeys(PRICES, POSITIVE)),
    },
    some_of=("rows", "saving", "ranks", "around", "growth", "energy", "traffic", "parts"),
)


def tables_of(report: dict[str, Any]) -> str:
    """All tables of one report but its growth's as Markdown.

    Raises: KeyError naming what the report lacks.
    """
    made = {
        "rows": _rows_table,
        "saving": _saving_table,
        "ranks": _ranks_table,
        "around": _around_table,
        "energy": _energy_table,
        "traffic": _traffic_table,
    }
    parts = [line for key in made if report.get(key) for line in (*made[key](report), "")]
    return "\n".join([*parts, *_facts(report)])


def _rows_table(report: dict[str, Any]) -> list[str]:
    lines = [
        "| case (T H I E K) | direction | who | ms | TFLOP/s | dense / it | by medians of calls "
        "| in bursts: ms | dense / it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        shape = CASES.get(row["case"].partition(":")[0])
        sizes = "" if shape is None else f" ({_sizes(shape)})"
        medians = f"{row['ratio_of_medians']:.3f}" if "ratio_of_medians" in row else "–"
        lines.append(
            f"| {row['case']}{sizes} | {row['direction']} | {row['contender']} "
            f"| {row['sustained_ms']:.3f} | {row['tflops']:.0f} | {row['ratio_sustained']:.3f} "
            f"| {medians} | {row['bursts_ms']:.3f} | {row['ratio_bursts']:.3f} |"
        )
    return lines


def _sizes(case: BenchCase) -> str:
    return (
        f"{case.num_tokens} {case.hidden_size} {case.intermediate_size} "
        f"{case.num_experts} {case.top_k}"
    )


def _saving_table(report: dict[str, Any]) -> list[str]:
    """Forward and backward by save mode; recomputing costs what a mode takes beyond "all"."""
    rows = report["saving"]
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


def _ranks_table(report: dict[str, Any]) -> list[str]:
    lines = [
        "Virtual ranks on one GPU, sharing the case's tokens:",
        "",
        "| case | ranks | direction | ms | against one rank |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r['case']} | {r['ranks']} | {r['direction']} | {r['ms']:.3f} "
        f"| {r['against_one_rank']:.3f} |"
        for r in report["ranks"]
        if r["ranks"] > 1
    ]


def _around_table(report: dict[str, Any]) -> list[str]:
    """Share of a call: beside the case's time in the same report, where it has one."""
    lines = [
        "Kernels before and after the products of one rank, alone in a CUDA graph, and their share "
        "of a call that launches them; where the kernels that pull, multiply and push do that work "
        "inside, there is none. TB/s of the sums over slots counts each pushed row once and each "
        "token once:",
        "",
        "| case | kernels | us | share of a call | TB/s |",
        "|---|---|---|---|---|",
    ]
    for row in report["around"]:
        direction, ours = COLUMNS[1] if row["kernels"] == "dx" else COLUMNS[0]
        whole = row_of(report, row["case"], direction, ours)
        share = f"{row['us'] / whole['sustained_ms'] / 10:.1f} % of {direction}" if whole else "–"
        if not row.get("own_launch", True):
            share = "inside"
        rate = "–" if row["tbytes_per_s"] is None else f"{row['tbytes_per_s']:.2f}"
        lines.append(f"| {row['case']} | {row['kernels']} | {row['us']:.1f} | {share} | {rate} |")
    return lines


def _energy_table(report: dict[str, Any]) -> list[str]:
    copy = report.get("copy", {})
    if not {"idle_watts", "watts", "tbytes_per_s", "pj_per_byte"} <= set(copy):
        raise KeyError("copy must hold watts, idle_watts, tbytes_per_s, pj_per_byte with energy")
    lines = [
        f"A copy: {copy['tbytes_per_s']:.2f} TB/s, {copy['watts']:.0f} W; nothing to do: "
        f"{copy['idle_watts']:.0f} W; so {copy['pj_per_byte']:.0f} pJ per byte.",
        "Work without a pause until it is steady; joules from the card's own counter:",
        "",
        "| case | direction | who | ms | J per call | W | SM clock MHz | Mcycles |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r['case']} | {r['direction']} | {r['contender']} | {r['ms']:.3f} "
        f"| {r['joules']:.3f} | {r['watts']:.0f} | {r['mhz']:.0f} "
        f"| {r['ms'] * r['mhz'] / 1e3:.2f} |"
        for r in report["energy"]
    ]


def _traffic_table(report: dict[str, Any]) -> list[str]:
    lines = [
        "Bytes and warp instructions of one call, counted:",
        "",
        "| case | direction | who | memory read, GB | written | L2 read, GB | written "
        "| between its halves, GB | M warp instructions | tensor pipes busy, % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["traffic"]:
        gbytes = [f"{row[name] / 1e9:.2f}" for name in BYTES]
        busy = 100 * row["tensor_cycles"] / row["cycles"]
        lines.append(
            f"| {row['case']} | {row['direction']} | {row['contender']} | {' | '.join(gbytes)} "
            f"| {row['instructions'] / 1e6:.0f} | {busy:.1f} |"
        )
    return lines


def growth_table(report: dict[str, Any], picture: str) -> list[str]:
    """Points of all curves beside their limits. Raises: KeyError naming what the report lacks."""
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
    lines += [
        f"![time against tokens, experts, skew and ranks, with the limit]({picture})",
        "",
        "| axis | value | forward ms | limit ms | ms / limit | backward ms | limit ms | ms / limit "
        "| limited by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    points: dict[tuple[str, float], dict[str, Any]] = {}
    for row in report["growth"]:
        points.setdefault((row["axis"], row["value"]), {})[row["direction"]] = row
    for (axis, value), found in points.items():
        if len(found) < len(DIRECTIONS):
            raise KeyError(f"growth holds {' '.join(found)} alone at {axis} {value:g}")
        cells = []
        for row in (found[direction] for direction in DIRECTIONS):
            times = f"{row['ms']:.3f}", f"{row['limit_ms']:.3f}"
            cells += [*times, f"{row['ms'] / row['limit_ms']:.2f}"]
        limits = ", ".join(dict.fromkeys(found[d]["limited_by"] for d in DIRECTIONS))
        shown = "all to one" if (axis, value) == ("skew", ALL_TO_ONE) else f"{value:g}"
        lines.append(f"| {axis} | {shown} | {' | '.join(cells)} | {limits} |")
    return lines


def _facts(report: dict[str, Any]) -> list[str]:
    """What else the report says, as a list."""
    equal = [case for case, bits in report["bits"].items() if bits == "equal"]
    lines = [kernels_line(report["device"])]
    if report["bits"]:
        lines.append(
            f"- Bits against the portable kernels: {len(equal)} of {len(report['bits'])} cases "
            f"equal ({', '.join(equal)})."
        )
    if report.get("saving_cost"):
        cost = report["saving_cost"].values()
        lines.append(
            f"- Forward that saves gate and up: {100 * min(cost) - 100:+.1f} to "
            f"{100 * max(cost) - 100:+.1f} % in time."
        )
    lines += _turns_apart(report["rows"])
    of_what = " with those older kernels and launches" if is_older(report["device"]) else ""
    for name, key in (("forward", "host_us"), ("backward", "host_backward_us")):
        host = report.get(key, {}).values()
        if host:
            span = f"{min(host):.0f} to {max(host):.0f} us"
            lines.append(f"- Host time per {name} call{of_what}: {span}.")
    timed, left_out = {row["contender"] for row in report["rows"]}, report.get("left_out", {})
    peers = report.get("peers", {})
    lines += [f"- {peer}: {plain(what)}." for peer, what in peers.items() if peer in timed]
    errors = [e for who, e in report.get("peer_errors", {}).items() if who not in left_out]
    if errors:
        lines.append(f"- y and dx of the others against this layer's: at most {max(errors):.1e}.")
    lines += [f"- Left out: {who}: {plain(reason)}." for who, reason in left_out.items()]
    if "bits_note" in report:
        lines.append(f"- {plain(report['bits_note'])}.")
    return lines


def _prices(reports: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The newest report's that has some; they belong to the card, not to the kernels."""
    with_some = [report for report in reports if report.get("prices")]
    return max(with_some, key=when)["prices"] if with_some else None


def _turns_apart(rows: list[dict[str, Any]]) -> list[str]:
    """How far the turns of one contender are apart: what repeating gives inside a run."""
    several = [row["turns_ms"] for row in rows if len(row.get("turns_ms", [])) > 1]
    if not several:
        return []
    spans = [100 * (max(turns) / min(turns) - 1) for turns in several]
    return [
        f"- Slowest and fastest of the {max(map(len, several))} turns of a contender: "
        f"{median(spans):.1f} % apart in the middle row, {max(spans):.1f} % at most."
    ]


def page_text(
    paths: Sequence[Path], reports: list[dict[str, Any]], folder: Path, picture: str
) -> str:
    """All tables: of the runs of one kind together, then of every report.

    folder   where the page is, for its links
    picture  of the runs
    Raises:  ValueError naming the report that lacks something.
    """
    runs = runs_of_one_kind(reports)
    names = [os.path.relpath(path, folder) for path in paths]
    links = {id(r): f"[{Path(name).name}]({name})" for r, name in zip(reports, names, strict=True)}
    details, joules, growth = [], [], []
    for report, path in sorted(zip(reports, paths, strict=True), key=lambda one: when(one[0])):
        facts = report["device"]
        made = " ".join(part for part in when(report) if part)
        title = f"{made}, {facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}"
        with errors_name(path, BENCH):
            tables = tables_of(report)
            if report.get("parts"):
                joules += ["### Where the time goes", "", *parts_table(report), ""]
                joules += [kernels_line(facts), ""]
            if report.get("growth"):
                curves = os.path.relpath(path.with_suffix(".svg"), folder)
                growth += ["### Growth", "", *growth_table(report, curves), ""]
                growth += [kernels_line(facts), ""]
        details += [f"<details><summary>{title}</summary>", "", tables, "", "</details>", ""]
    shown = f"![everybody's ratio to dense cuBLAS]({picture})"
    lines = [RUNS_TITLE, "", shown, "", *runs_tables(runs, links)]
    lines += power_tables(runs, _prices(reports))
    lines += [*joules, *growth, "### Every report", "", *details]
    return "\n".join(lines).rstrip()


def _check_each_run_once(paths: Sequence[Path], reports: list[dict[str, Any]]) -> None:
    """A run that is there twice would count twice in every median.

    Raises: ValueError naming the files.
    """
    files: set[Path] = set()
    runs: dict[str, Path] = {}
    for path, report in zip(paths, reports, strict=True):
        if path.resolve() in files:
            raise ValueError(f"reports must be named once, got {path} twice")
        files.add(path.resolve())
        # Reports of other experiments may be of one minute: they hold no rows, but are not equal.
        run = json.dumps([report["device"], report["rows"] or report], sort_keys=True)
        if run in runs:
            raise ValueError(f"reports must be of different runs, got one in {runs[run]}, {path}")
        runs[run] = path


def write_page(paths: Sequence[Path], page: Path) -> None:
    """Tables of stored reports between the page's markers, a picture of the runs beside the page,
    and the curves of each report that has some in a picture beside that report. Nothing is written
    before everything was read and its tables made.

    Raises: ValueError naming the file, and the key that is wrong; OSError; RuntimeError without
    matplotlib.
    """
    check_writable(page, "--output")
    reports, curves = [read_report(path, BENCH) for path in paths], {}
    _check_each_run_once(paths, reports)
    for path, report in zip(paths, reports, strict=True):
        picture = path.with_suffix(".svg")
        if report.get("growth"):
            check_distinct(report=path, picture=picture, **{"--output": page})
            if picture in curves:
                raise ValueError(f"reports must have names of their own, got two of {path.stem}")
            curves[picture] = report["growth"]
    of_runs = page.with_suffix(".svg")
    check_distinct(picture=of_runs, **{str(path): path for path in (*paths, *curves)})
    made = page_text(paths, reports, page.parent, of_runs.name)
    text = page_with_tables(page, {(BEGIN, END): made})
    check_own_links(page, text, BEGIN, END)
    draw_runs(runs_of_one_kind(reports), of_runs)
    for picture, rows in curves.items():
        draw_growth(rows, picture)
    write_whole(page, text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables of a page, and the pictures they show."""
    parser = WordParser(description="Write the tables of docs/results.md.")
    parser.add_argument("reports", nargs="+", type=Path)
    markers = f"an existing page with the markers {BEGIN} and {END}"
    parser.add_argument("--output", type=Path, required=True, help=markers)
    with one_line_errors():
        options = parser.parse_args(arguments)
        write_page(options.reports, options.output)


if __name__ == "__main__":
    main()
