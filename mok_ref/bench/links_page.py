"""docs/multi_gpu.md: tables made from stored reports of links_run and of the checks.

    python -m mok_ref.bench.links_page docs/results/multi_gpu_*.json --output docs/multi_gpu.md

A report with "links" is one of mok_ref/bench/links_run.py, one with "checks" one of
tests/gpu/multi_gpu_worker.py. Predictions are the planner's, made when the page is made.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok_ref.bench.entry import WordParser, kernels_line, one_line_errors
from mok_ref.bench.links import CTAS_MIB, MODES, NCCL, PULL, PUSH
from mok_ref.bench.links_layer import (
    FORWARD,
    LAYER_CASES,
    LOCAL,
    OURS,
    OURS_FLOAT32,
    STEP,
    TORCH,
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
    errors_name,
    one_of,
    plain,
    read_report,
    write_between_markers,
)

RANKS = (1, 2, 4, 8)
PULL_AIM, PUSH_AIM, HIDDEN_AIM = 330, 355, 0.9
EMPTY = "–"
LINK = {"mode": one_of(*(mode.name for mode in MODES), NCCL), "H": COUNT, "mib": COUNT}
LINK |= {"ctas": COUNT, "gb_per_s": POSITIVE}
LAYER = {"case": one_of(*LAYER_CASES), "direction": one_of(FORWARD, STEP), "contender": NAME}
LAYER |= {"R": one_of(*RANKS), "ms": POSITIVE, "tflops": POSITIVE}
LAYER |= dict.fromkeys("THIEK", COUNT)
HIDDEN = {"case": one_of(*LAYER_CASES), "direction": one_of(FORWARD, STEP), "R": one_of(*RANKS)}
HIDDEN |= {"remote_bytes": COUNT, "compute_ms": POSITIVE, "transfer_ms": POSITIVE}
HIDDEN |= {"fused_ms": POSITIVE, "hidden": NUMBER}
LINKS = ReportKind(
    made_by="bench.links_run",
    key="links",
    shape={
        "device": DEVICE | {"gpus": COUNT},
        "links": [LINK],
        "links_check": Each(TEXT),
        "layers": [LAYER],
        "hidden": [HIDDEN],
        "torch_error": Each(NUMBER),
        "bits": Each(TEXT),
    },
    some_of=("links", "layers", "bits"),
)
CHECKED = ReportKind(
    made_by="tests/gpu/multi_gpu_worker.py",
    key="checks",
    shape={
        "device": DEVICE | {"gpus": COUNT, "ranks": Maybe(COUNT), "heap": NAME},
        "checks": Each(TEXT),
    },
    some_of=("checks",),
)


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(map(plain, row)) + " |" for row in rows]


def cell(found: dict[Any, float], key: Any, form: str) -> str:
    """A figure, or what an empty cell shows."""
    return format(found[key], form) if key in found else EMPTY


# --------------------------------------------------------------------------- links


def links_tables(report: dict[str, Any]) -> list[str]:
    """Bandwidth against message size, against CTAs, and of other ways to move the same rows."""
    links = report["links"]
    rates = {(row["mode"], row["H"], row["mib"], row["ctas"]): row["gb_per_s"] for row in links}
    widths, most = sorted({row["H"] for row in links} - {0}), max(row["ctas"] for row in links)
    return [
        *size_table(rates, widths, most),
        "",
        *ctas_table(rates, widths),
        "",
        *mode_table(rates, widths, most),
    ]


def size_table(rates: dict[Any, float], widths: list[int], most: int) -> list[str]:
    """Bandwidth against message size, on all multiprocessors, beside NCCL."""
    rows = []
    for mib in sorted({key[2] for key in rates if key[3] == most}):
        cells = [
            aimed(rates, (mode.name, h, mib, most), aim)
            for h in widths
            for mode, aim in ((PULL, PULL_AIM), (PUSH, PUSH_AIM))
        ]
        rows.append([str(mib), *cells, cell(rates, (NCCL, 0, mib, 0), ".0f")])
    title = f"GB/s each way, all ranks at once, {most} CTAs (**bold**: at the aim of "
    title += f"{PULL_AIM} pulling, {PUSH_AIM} pushing):"
    header = ["MiB per rank", *pull_and_push(widths), NCCL]
    return [title, "", *table(header, rows)]


def pull_and_push(widths: list[int]) -> list[str]:
    """Column titles: both directions for each width of a row."""
    return [f"{mode.name}, rows of {2 * h} B" for h in widths for mode in (PULL, PUSH)]


def aimed(rates: dict[Any, float], key: Any, aim: float) -> str:
    """A rate, bold where it reaches what was aimed at."""
    text = cell(rates, key, ".0f")
    return f"**{text}**" if key in rates and rates[key] >= aim else text


def ctas_table(rates: dict[Any, float], widths: list[int]) -> list[str]:
    """Bandwidth of one message size against the number of CTAs."""
    rows = []
    for ctas in sorted({key[3] for key in rates if key[2] == CTAS_MIB} - {0}):
        keys = [(mode.name, h, CTAS_MIB, ctas) for h in widths for mode in (PULL, PUSH)]
        rows.append([str(ctas), *(cell(rates, key, ".0f") for key in keys)])
    title = f"GB/s each way against CTAs, {CTAS_MIB} MiB per rank:"
    return [title, "", *table(["CTAs (one on an SM)", *pull_and_push(widths)], rows)]


def mode_table(rates: dict[Any, float], widths: list[int], most: int) -> list[str]:
    """Ways of moving the largest message that all of them were timed with."""
    mib = max((key[2] for key in rates if key[0] == MODES[-1].name), default=0)
    if not mib:
        raise KeyError(f"links holds no {MODES[-1].name}")
    rows = [
        [mode.name, *(cell(rates, (mode.name, h, mib, most), ".0f") for h in widths)]
        for mode in MODES
    ]
    header = ["who moves what", *(f"rows of {2 * h} B" for h in widths)]
    return [f"GB/s each way, {mib} MiB of rows per rank:", "", *table(header, rows)]


# --------------------------------------------------------------------------- layers


def layer_table(report: dict[str, Any]) -> list[str]:
    """TFLOP/s per GPU of every contender against the number of ranks."""
    found = {
        (r["case"], r["direction"], r["contender"], r["R"]): r["tflops"] for r in report["layers"]
    }
    rows = []
    for case in (c for c in LAYER_CASES if any(key[0] == c for key in found)):
        for direction in (FORWARD, STEP):
            for contender in (OURS, OURS_FLOAT32, TORCH):
                keys = [(case, direction, contender, r) for r in RANKS]
                if any(key in found for key in keys):
                    cells = [cell(found, key, ".0f") for key in keys]
                    rows.append([case_title(case), direction, contender, *cells])
    header = ["case, per rank", "direction", "", *(f"R = {r}" for r in RANKS)]
    title = "TFLOP/s per GPU (6 · T · K · H · I forward, three times that forward and backward):"
    lines = [title, "", *table(header, rows)]
    missing = [r for r in RANKS if not any(key[3] == r for key in found)]
    if missing:
        names = " and ".join(f"R = {r}" for r in missing)
        lines += ["", f"{names}: not measured, no machine with that many GPUs was at hand."]
    return lines


def case_title(name: str) -> str:
    """Name, dtype and sizes per rank."""
    case = LAYER_CASES[name]
    sizes = f"T {case.num_tokens} E {case.num_experts} K {case.top_k}"
    sizes += f" H {case.hidden_size} I {case.intermediate_size}"
    return f"{name.split(':')[0]}, {case.dtype}: {sizes}"


def hidden_table(report: dict[str, Any]) -> list[str]:
    """Compute, transfer, fused, and the share of communication that is hidden."""
    rows = []
    for row in report["hidden"]:
        share = f"{row['hidden']:.2f}"
        rows.append(
            [
                row["case"],
                str(row["R"]),
                row["direction"],
                f"{row['remote_bytes'] / 1e6:.0f}",
                f"{row['compute_ms']:.3f}",
                f"{row['transfer_ms']:.3f}",
                f"{row['fused_ms']:.3f}",
                f"**{share}**" if row["hidden"] >= HIDDEN_AIM else share,
            ]
        )
    header = ["case", "R", "direction", "remote MB per direction of the link"]
    header += ["compute ms", "transfer ms", "fused ms", "hidden"]
    return [
        f"Share of communication that is hidden (**bold**: at least {HIDDEN_AIM}):",
        "",
        *table(header, rows),
        "",
        *control_lines(report),
    ]


def control_lines(report: dict[str, Any]) -> list[str]:
    """On one rank nothing is remote either way: how far two timings of one thing lie apart."""
    times = {
        (r["case"], r["direction"], r["contender"]): r["ms"]
        for r in report["layers"]
        if r["R"] == 1
    }
    spread = []
    for (case, direction, contender), ms in times.items():
        if contender == OURS:
            if (case, direction, LOCAL) not in times:
                raise KeyError(f"layers holds no {LOCAL} for {case} {direction}, R = 1")
            spread.append(abs(times[case, direction, LOCAL] / ms - 1))
    if not spread:
        return []
    return [
        "With R = 1 compute and fused are the same thing timed twice: they lie up to "
        f"{max(spread):.1%} apart, which is how exact these times are."
    ]


def planner_table(report: dict[str, Any]) -> list[str]:
    """Measured beside predicted milliseconds and hidden shares."""
    hidden = {(r["case"], r["R"], r["direction"]): r["hidden"] for r in report["hidden"]}
    rows = []
    for row in report["layers"]:
        if row["contender"] not in (OURS, OURS_FLOAT32):
            continue
        ms, share = predicted(row)
        is_main = row["R"] > 1 and row["contender"] == OURS
        key = (row["case"], row["R"], row["direction"])
        rows.append(
            [
                row["case"],
                str(row["R"]),
                row["direction"],
                row["contender"],
                f"{row['ms']:.3f}",
                f"{ms:.3f}",
                f"{ms / row['ms'] - 1:+.1%}",
                cell(hidden, key, ".2f") if is_main else EMPTY,
                f"{share:.2f}" if is_main else EMPTY,
            ]
        )
    header = ["case", "R", "direction", "", "measured ms", "predicted ms", "error"]
    header += ["hidden, measured", "hidden, predicted"]
    title = "The planner's predictions (its constants are fitted on one GPU's times only):"
    return [title, "", *table(header, rows)]


def predicted(row: dict[str, Any]) -> tuple[float, float]:
    """(milliseconds, hidden share) that the planner predicts for a row of the layer table."""
    from mok_ref.planner.layer_prediction import predict_layer

    dw_dtype = "float32" if row["contender"] == OURS_FLOAT32 else "bf16"
    step = row["direction"] == STEP
    dtype = LAYER_CASES[row["case"]].dtype
    options = {"save": "all" if step else "none", "dw_dtype": dw_dtype}
    parts = [predict_layer(row, row["R"], "h200", FORWARD, dtype, **options)]
    if step:
        parts.append(predict_layer(row, row["R"], "h200", "backward", dtype, **options))
    seconds = sum(part.seconds for part in parts)
    return seconds * 1e3, sum(p.hidden_share * p.seconds for p in parts) / seconds


# --------------------------------------------------------------------------- checks


CHECKS = {
    "bf16 layer": "two steps in bf16, forward and backward, on poisoned buffers",
    "mxfp8 layer": "two steps in MXFP8, forward and backward, on poisoned buffers",
    "fault row 1": "every buffer full of NaN before each step",
    "fault row 2": "the same routing 100 times: one result, one schedule",
    "fault row 3": "1, 128, 2, 1024, 3 tokens one after the other in the same buffers",
    "fault row 4": "different numbers of tokens on the ranks, zero among them",
    "fault row 5": "experts and ranks that receive nothing, a rank without tokens",
    "fault row 12": "a foreign kernel holds multiprocessors throughout the step",
    "fault row 13": "the last rank comes two seconds late",
    "fault row 20": "K 1 to 8, up to 4096 tokens, 50 times each: the portable kernels' bits",
    "fault row 24": "two small buffers that share a block of memory keep their own bytes elsewhere",
}
"""What the checks of tests/gpu/multi_gpu_worker.py try, by their words on its command line."""
MXFP8_WAS_PORTABLE = ("84b6f287d609",)
"""Kernels without MXFP8 ones for Hopper: reports of these do not say which kernels a layer ran."""


def checks_lines(reports: list[dict[str, Any]]) -> list[str]:
    """What was compared on several GPUs: golden cases counted, everything else by name."""
    lines = []
    for report in reports:
        checks, where = report["checks"], report["device"]
        title = f"{where['heap']}, {where['gpus']} × {where['gpu']}, {where['date']}"
        golden = {name: text for name, text in checks.items() if name.startswith("golden")}
        equal = [text for text in golden.values() if text.startswith("equal")]
        rows = [
            [CHECKS.get(name, EMPTY), f"`{name}`", verdict(name, text, where)]
            for name, text in checks.items()
            if name not in golden
        ]
        rows += [
            ["a stored golden case", f"`{name}`", text]
            for name, text in golden.items()
            if not text.startswith("equal")
        ]
        if golden:
            kinds = Counter(text.removeprefix("equal (").rstrip(")") for text in equal)
            text = "; ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            text = f"equal: {text}" if equal else "none equal"
            rows.append([f"{len(equal)} of {len(golden)} golden cases", "", text])
        header = ["what is tried", "word for the worker", "bits"]
        lines += [f"Bits, {title}:", "", *table(header, rows), "", kernels_line(where), ""]
    return lines


def verdict(name: str, text: str, where: dict[str, Any]) -> str:
    """A check's verdict, with the kernels that ran where the report leaves them out."""
    if (name, text) == ("mxfp8 layer", "equal") and where.get("kernels") in MXFP8_WAS_PORTABLE:
        return "equal (mxfp8, portable kernels: there were none for Hopper)"
    return text


def bits_lines(report: dict[str, Any]) -> list[str]:
    """What was compared in the timed runs, in sentences."""
    lines = []
    for title, key in (
        ("Rows pulled and pushed in the bandwidth runs, against what peers hold", "links_check"),
        ("Bits of the timed shapes against the portable kernels", "bits"),
    ):
        found = report[key]
        if found:
            equal = [name for name, text in found.items() if text == "equal"]
            bad = [f"{name}: {plain(text)}" for name, text in found.items() if text != "equal"]
            lines.append(f"- {title}: {len(equal)} of {len(found)} equal" + "".join(
                f"; {text}" for text in bad
            ) + ".")  # fmt: skip
    if report["torch_error"]:
        worst = max(report["torch_error"].values())
        lines.append(f"- ‖torch − mok_ref‖ / ‖mok_ref‖ of y: at most {worst:.4f}.")
    return lines


# --------------------------------------------------------------------------- page


KEYS = {
    "links": ("mode", "H", "mib", "ctas"),
    "layers": ("case", "direction", "contender", "R"),
    "hidden": ("case", "direction", "R"),
}


def merged(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One report for each machine and state of the kernels; of what was timed twice, the last."""
    found: dict[Any, dict[str, Any]] = {}
    for report in reports:
        facts = report["device"]
        one = found.setdefault(json.dumps(facts, sort_keys=True), {"device": facts})
        for name, keys in KEYS.items():
            rows = {tuple(row[key] for key in keys): row for row in one.get(name, [])}
            rows |= {tuple(row[key] for key in keys): row for row in report[name]}
            one[name] = list(rows.values())
        for name in ("links_check", "torch_error", "bits"):
            one[name] = one.get(name, {}) | report[name]
    return list(found.values())


def measured_tables(report: dict[str, Any]) -> list[list[str]]:
    """The tables of what was timed."""
    made = [links_tables(report)] if report["links"] else []
    made += [layer_table(report)] if report["layers"] else []
    made += [hidden_table(report)] if report["hidden"] else []
    return made + ([planner_table(report)] if report["layers"] else [])


def tables(reports: list[dict[str, Any]]) -> str:
    """All tables of all reports as Markdown."""
    parts: list[str] = []
    for report in merged([r for r in reports if "links" in r]):
        facts = report["device"]
        parts += [
            f"### {facts['gpus']} × {facts['gpu']}, driver {facts['driver']}, "
            f"CUDA {facts['cuda']}, {facts['date']}",
            "",
            *(line for part in measured_tables(report) for line in (*part, "")),
            *bits_lines(report),
            kernels_line(facts),
            "",
        ]
    parts += checks_lines([r for r in reports if "checks" in r])
    return "\n".join([*parts, *neighbour_lines()]).rstrip()


def neighbour_lines() -> list[str]:
    """Figures that others published for several H200 and a shape of the layer table."""
    from mok_ref.planner.measurements import published_links, published_rows

    shapes = {
        (c.num_tokens, c.num_experts, c.hidden_size, c.dtype): name
        for name, c in LAYER_CASES.items()
    }
    lines = []
    for row in published_rows():
        name = shapes.get((row.tokens, row.num_experts, row.hidden_size, row.dtype))
        if row.hardware == "h200" and row.ranks > 1 and name:
            lines.append(f"- {name} {row.what}: {row.case}, {row.ms} ms ({row.source})")
    for link in published_links():
        if link["hardware"] == "h200":
            lines.append(f"- {link['name']}: {link['gb_per_s']} GB/s ({link['source']})")
    return ["Published neighbours (others' figures, other machines):", "", *lines]


def read_whole(path: Path) -> dict[str, Any]:
    """A stored report of one of both kinds, of which tables can be made.

    Raises: ValueError naming the file, and the key that is wrong or missing; OSError.
    """
    report = read_report(path, LINKS, CHECKED)
    kind = LINKS if LINKS.key in report else CHECKED
    with errors_name(path, kind):
        for row in report.get("layers", []):
            case = LAYER_CASES[row["case"]]
            sizes = [case.num_tokens, case.hidden_size, case.intermediate_size]
            sizes += [case.num_experts, case.top_k]
            if [row[key] for key in "THIEK"] != sizes:
                raise ValueError(f"T, H, I, E, K of {case.name} in layers must be {sizes}")
        if report.get("links"):
            links_tables(report)
        control_lines(report if kind is LINKS else {"layers": []})
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables of a page."""
    parser = WordParser(description="Write the tables of docs/multi_gpu.md.")
    parser.add_argument("reports", nargs="+", type=Path)
    markers = f"an existing page with the markers {BEGIN} and {END}"
    parser.add_argument("--output", type=Path, required=True, help=markers)
    with one_line_errors():
        options = parser.parse_args(arguments)
        reports = [read_whole(path) for path in options.reports]
        write_between_markers(options.output, {(BEGIN, END): tables(reports)})


if __name__ == "__main__":
    main()
