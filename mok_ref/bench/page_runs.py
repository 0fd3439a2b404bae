"""What several runs of the same kernels give together: medians over the runs, and their spread.

A figure belongs to a run (one report); between runs the card, its heat and its clocks differ. So a
quotient is always taken inside a run, and the runs are put side by side: median, lowest, highest.
A target is met or missed by the median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from mok_ref.bench.cases import CASES, SMALL_CASES, TABLE_CASES
from mok_ref.bench.entry import kernels_name

Report = dict[str, Any]

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
    ("forward", "mok_ref"),
    ("backward", "mok_ref, bf16 dW"),
    ("backward", "mok_ref"),
)
LARGE_EXPERTS = ("dsv3-rank", "kimi-16", "mixtral")
PEERS = ("torch eager", "torch compiled", "SonicMoE", "Liger")
KEEPING = ("SonicMoE", "Liger")  # whose forward keeps what their backward needs
MOST_SAVING = 1.03  # time with saving / without
MOST_SCHEDULE_US = 40.0  # of one rank, T 8192, E 128, K 8
SCHEDULE_CASE = "qwen3"
MOST_RANKS = 1.10  # 4 virtual ranks / one, on the large experts
MOST_HOST_US = 50.0  # of a call

# headings of the page that say why a target is missed
WHY = {
    ("large", "forward"): "#large-experts-forward",
    ("large", "backward"): "#large-experts-backward",
    ("fine", "forward"): "#fine-grained-experts-forward",
    ("fine", "backward"): "#fine-grained-experts-backward",
    ("small", "forward"): "#small-batches",
    ("small", "backward"): "#small-batches",
    "around": "#saving-ranks-schedule-host-time",
}


def why(case: str, direction: str) -> str:
    """The heading under which the page explains this case and direction."""
    kind = "small" if case in SMALL_CASES else "large" if case in LARGE_EXPERTS else "fine"
    return WHY[kind, direction]


def runs_of_one_kind(reports: list[Report]) -> list[Report]:
    """The reports of the present kernels; where there are none, those of the latest report's."""
    by_date = sorted(reports, key=when)
    present = [report for report in by_date if report["device"].get("kernels") == kernels_name()]
    if present or not by_date:
        return present
    latest = by_date[-1]["device"].get("kernels")
    return [report for report in by_date if report["device"].get("kernels") == latest]


def when(report: Report) -> tuple[str, str]:
    """Date and time of a report, for sorting."""
    return report["device"]["date"], report["device"].get("time", "")


def row_of(report: Report, case: str, direction: str, contender: str) -> Report | None:
    """The row of one contender, if it was timed."""
    wanted = (case, direction, contender)
    rows = (r for r in report["rows"] if (r["case"], r["direction"], r["contender"]) == wanted)
    return next(rows, None)


def values_of(runs: list[Report], case: str, direction: str, contender: str) -> list[float]:
    """Sustained ratio to dense cuBLAS in each run that has one."""
    rows = (row_of(run, case, direction, contender) for run in runs)
    return [row["ratio_sustained"] for row in rows if row]


def quotients(runs: list[Report], case: str, direction: str, ours: str, other: str) -> list[float]:
    """Time of `other` / time of `ours`, inside each run that has both."""
    found = []
    for run in runs:
        mine, theirs = (row_of(run, case, direction, name) for name in (ours, other))
        if mine and theirs:
            found.append(mine["ratio_sustained"] / theirs["ratio_sustained"])
    return found


def spread(
    values: list[float],
    missed: Callable[[float], bool] = lambda _: False,
    reason: str = "",
    digits: int = 3,
) -> str:
    """ "median (lowest – highest)"; bold and with its reason where the median misses a target."""
    if not values:
        return "–"
    middle = f"{median(values):.{digits}f}"
    text = f"**{middle}**" if missed(median(values)) else middle
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} – {max(values):.{digits}f})"
    return f"{text} [why]({reason})" if reason and missed(median(values)) else text


def below(target: float | None) -> Callable[[float], bool]:
    """Whether a figure that shall reach a target misses it."""
    return lambda value: target is not None and value < target


def above(target: float | None) -> Callable[[float], bool]:
    """Whether a figure that shall stay within a target misses it."""
    return lambda value: target is not None and value > target


def _target(target: float | None, digits: int = 2) -> str:
    return "–" if target is None else f"{target:.{digits}f}"


# --------------------------------------------------------------------------- tables


def runs_tables(runs: list[Report], names: dict[int, str]) -> list[str]:
    """All tables over runs as lines of Markdown. names: a link to each run's report, by id()."""
    dtypes = {"": TABLE_CASES, ":mxfp8": tuple(f"{case}:mxfp8" for case in TABLE_CASES)}
    parts = [runs_list(runs, names), cases_table(runs)]
    parts += [targets_table(runs, cases) for cases in dtypes.values()]
    parts += [peers_table(runs), small_table(runs), other_targets_table(runs)]
    return [line for part in parts if part for line in (*part, "")]


def runs_list(runs: list[Report], names: dict[int, str]) -> list[str]:
    """Which run was made when and on which card."""
    lines = [
        "| made | GPU | card | driver, CUDA | kernels | report |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        facts = run["device"]
        made = " ".join(part for part in when(run) if part)
        lines.append(
            f"| {made} | {facts['gpu']} | {facts.get('gpu_id', 'not recorded')} "
            f"| {facts['driver']}, {facts['cuda']} | {facts.get('kernels', 'not recorded')} "
            f"| {names[id(run)]} |"
        )
    return lines


def cases_table(runs: list[Report]) -> list[str]:
    """Shapes of the cases that were timed."""
    timed = {row["case"].partition(":")[0] for run in runs for row in run["rows"]}
    lines = [
        f"| {c.name} | {c.num_tokens} | {c.hidden_size} | {c.intermediate_size} | {c.num_experts} "
        f"| {c.top_k} | {c.routing} |"
        for c in CASES.values()
        if c.name in timed
    ]
    head = [
        "| case | tokens | hidden size | intermediate size | experts | top-k | routing |",
        "|---|---|---|---|---|---|---|",
    ]
    return head + lines if lines else []


def targets_table(runs: list[Report], cases: Iterable[str]) -> list[str]:
    """Ratio to dense cuBLAS by case, beside its targets."""
    lines = []
    for case in cases:
        columns = [values_of(runs, case, *column) for column in COLUMNS]
        if not any(columns):
            continue
        cells = []
        for values, (direction, _), target in zip(
            columns, COLUMNS, TARGETS.get(case, (None,) * len(COLUMNS))
        ):
            cells += [spread(values, below(target), why(case, direction)), _target(target)]
        lines.append(f"| {case} | {' | '.join(cells)} | {max(map(len, columns))} |")
    head = [
        "| case | forward | target | backward, bf16 dW | target | backward, float32 dW | target "
        "| runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return head + lines if lines else []


def peers_table(runs: list[Report]) -> list[str]:
    """Everybody's ratio to dense cuBLAS in the same runs."""
    lines = []
    timed = {row["contender"] for run in runs for row in run["rows"]}
    peers = [peer for peer in PEERS if peer in timed]
    for case in TABLE_CASES:
        for direction, ours in COLUMNS[:2]:
            cells = []
            for peer in peers:
                saving = direction == "forward" and peer in KEEPING
                mine = f"{ours}, saving" if saving else ours
                faster = quotients(runs, case, direction, mine, peer)
                values = values_of(runs, case, direction, peer)
                cells += [spread(values), spread(faster, below(1.0), why(case, direction), 2)]
            if any(cell != "–" for cell in cells):
                shown = spread(values_of(runs, case, direction, ours))
                lines.append(f"| {case} | {direction} | {shown} | {' | '.join(cells)} |")
    columns = "".join(f"| {peer} | {peer} / mok_ref " for peer in peers)
    head = [
        "Beside others in the same runs: ratio to dense cuBLAS, and how much longer they take. "
        "Backward: bf16 dW, as they write it. Forward of SonicMoE and Liger keeps what their "
        "backward needs: they stand beside this layer's forward that saves gate and up.",
        "",
        f"| case | direction | mok_ref {columns}|",
        "|---|---|---|" + "---|---|" * len(peers),
    ]
    return head + lines if lines else []


def small_table(runs: list[Report]) -> list[str]:
    """Small batches: the torch pipeline's time / this layer's; target 1."""
    lines = []
    labels = {"mok_ref": ", float32 dW", "mok_ref, bf16 dW": ", bf16 dW"}
    for case in SMALL_CASES:
        for direction, ours in COLUMNS:
            ratio = quotients(runs, case, direction, ours, "torch eager")
            if not ratio:
                continue
            ms = [r["sustained_ms"] for r in (row_of(n, case, direction, ours) for n in runs) if r]
            label = direction + (labels[ours] if direction == "backward" else "")
            missed = below(1.0) if ours != "mok_ref" or direction == "forward" else below(None)
            lines.append(
                f"| {CASES[case].num_tokens} | {label} | {spread(ms)} "
                f"| {spread(ratio, missed, why(case, direction), 2)} | {len(ratio)} |"
            )
    head = [
        "Small batches (E 128, K 8, H 2048, I 768), everybody replayed from a CUDA graph; target: "
        "faster than the torch pipeline (backward: with bf16 dW, as torch writes it).",
        "",
        "| tokens | direction | mok_ref ms | torch eager / mok_ref | runs |",
        "|---|---|---|---|---|",
    ]
    return head + lines if lines else []


def other_targets_table(runs: list[Report]) -> list[str]:
    """Saving, schedule, virtual ranks, host time."""
    found: list[tuple[str, str, list[float], float | None, int]] = []
    for case in TABLE_CASES:
        values = [run["saving_cost"][case] for run in runs if case in run.get("saving_cost", {})]
        found.append(("forward that saves / that does not", case, values, MOST_SAVING, 3))
    schedules = [
        row["us"]
        for run in runs
        for row in run.get("around", [])
        if (row["case"], row["kernels"]) == (SCHEDULE_CASE, "schedule")
    ]
    found.append(("schedule kernels alone, us", SCHEDULE_CASE, schedules, MOST_SCHEDULE_US, 1))
    for (case, ranks, direction), values in _ranks_by_case(runs).items():
        target = MOST_RANKS if case in LARGE_EXPERTS else None
        found.append((f"{ranks} virtual ranks / one, {direction}", case, values, target, 3))
    for direction, key in (("forward", "host_us"), ("backward", "host_backward_us")):
        slowest = [max(run[key].values()) for run in runs if run.get(key)]
        what = f"host time of a {direction} call, us"
        found.append((what, "slowest of a run", slowest, MOST_HOST_US, 1))
    lines = [
        f"| {what} | {case} | {spread(values, above(target), WHY['around'], digits)} "
        f"| {_target(target, min(digits, 2))} | {len(values)} |"
        for what, case, values, target, digits in found
        if values
    ]
    head = ["| what | case | found | at most | runs |", "|---|---|---|---|---|"]
    return head + lines if lines else []


def _ranks_by_case(runs: list[Report]) -> dict[tuple[str, int, str], list[float]]:
    """Time of several virtual ranks / of one, by case, ranks and direction."""
    values: dict[tuple[str, int, str], list[float]] = {}
    for run in runs:
        for row in run.get("ranks", []):
            if row["ranks"] > 1:
                key = (row["case"], row["ranks"], row["direction"])
                values.setdefault(key, []).append(row["against_one_rank"])
    return values


# --------------------------------------------------------------------------- picture


BAR = 0.17  # width of a bar, cases are 1 apart


def draw_runs(runs: list[Report], path: str | Path) -> None:
    """Ratio to dense cuBLAS of everybody, by case: medians over the runs, bars from the lowest to
    the highest, and the targets. Raises: RuntimeError without matplotlib."""
    from mok_ref.plotting import import_pyplot, save

    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(2, 1, figsize=(9, 6.5), layout="constrained")
    timed = {row["contender"] for run in runs for row in run["rows"]}
    for panel, (column, (direction, ours)) in zip(panels, enumerate(COLUMNS[:2])):
        names = [ours, *(peer for peer in PEERS if peer in timed)]
        cases = [case for case in TABLE_CASES if values_of(runs, case, direction, ours)]
        first = -BAR * (len(names) - 1) / 2
        for place, name in enumerate(names):
            all_values = [values_of(runs, case, direction, name) for case in cases]
            bars = [(x + first + BAR * place, v) for x, v in enumerate(all_values) if v]
            middle = [median(values) for _, values in bars]
            reach = [
                [m - min(values) for m, (_, values) in zip(middle, bars)],
                [max(values) - m for m, (_, values) in zip(middle, bars)],
            ]
            panel.bar([x for x, _ in bars], middle, BAR, yerr=reach, capsize=2, label=name)
        targets = [TARGETS[case][column] for case in cases]
        ends = [[x + first + BAR * side for x in range(len(cases))] for side in (-0.6, 0.6)]
        panel.hlines(targets, *ends, color="black", linewidth=2, label="target of mok_ref")
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set_xticks(range(len(cases)), cases)
        panel.set_ylabel(f"{direction}: dense cuBLAS / it")
        panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)
    pyplot.close(figure)
