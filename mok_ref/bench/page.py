"""docs/results.md: tables made from stored benchmark reports.

    python -m mok_ref.bench.page docs/results/bench_*.json --output docs/results.md

Targets are those the project set itself; a figure below its target is marked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mok_ref.bench.cases import CASES, SMALL_CASES, TABLE_CASES

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
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def find(report: dict[str, Any], case: str, direction: str, contender: str) -> dict[str, Any]:
    """The row of one contender. Raises: KeyError naming what is not there."""
    for row in report["rows"]:
        if (row["case"], row["direction"], row["contender"]) == (case, direction, contender):
            return row
    raise KeyError(f"no row of {contender} for {case} {direction}")


def tables(reports: list[dict[str, Any]]) -> str:
    """All tables of all reports as Markdown."""
    parts = []
    for report in reports:
        facts = report["device"]
        title = f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}, {facts['date']}"
        parts += [f"### {title}", "", *_targets_table(report), "", *_times_table(report), ""]
        parts += [*_small_table(report), "", *_facts(report), ""]
    return "\n".join(parts).rstrip()


def _targets_table(report: dict[str, Any]) -> list[str]:
    lines = [
        "Ratio = time of dense cuBLAS / time of the whole layer, sustained (bursts in brackets).",
        "**Bold** where the target is missed.",
        "",
        "| case | forward | target | backward, bf16 dW | target | backward, float32 dW | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in TABLE_CASES:
        cells = []
        for direction, contender, which in COLUMNS:
            row, target = find(report, case, direction, contender), TARGETS[case][which]
            ratio = f"{row['ratio_sustained']:.3f}"
            shown = ratio if row["ratio_sustained"] >= target else f"**{ratio}**"
            cells += [f"{shown} ({row['ratio_bursts']:.3f})", f"{target:.2f}"]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return lines


def _times_table(report: dict[str, Any]) -> list[str]:
    lines = [
        "| case (T H I E K) | direction | mok_ref ms | TFLOP/s | dense ms | torch eager ms "
        "| torch / mok_ref |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in TABLE_CASES:
        shape = CASES[case]
        sizes = (
            f"{shape.num_tokens} {shape.hidden_size} {shape.intermediate_size} "
            f"{shape.num_experts} {shape.top_k}"
        )
        for direction in ("forward", "backward"):
            ours = find(report, case, direction, "mok_ref")
            dense = find(report, case, direction, "dense cuBLAS")
            torch = find(report, case, direction, "torch eager")
            lines.append(
                f"| {case} ({sizes}) | {direction} | {ours['sustained_ms']:.3f} "
                f"| {ours['tflops']:.0f} | {dense['sustained_ms']:.3f} "
                f"| {torch['sustained_ms']:.3f} "
                f"| {torch['sustained_ms'] / ours['sustained_ms']:.2f} |"
            )
    return lines


def _small_table(report: dict[str, Any]) -> list[str]:
    lines = [
        "Small batches, everybody replayed from a CUDA graph (E 128, K 8, H 2048, I 768):",
        "",
        "| tokens | direction | mok_ref ms | torch eager ms | torch / mok_ref |",
        "|---|---|---|---|---|",
    ]
    for case in SMALL_CASES:
        for direction, contender in (
            ("forward", "mok_ref"),
            ("backward", "mok_ref, bf16 dW"),
            ("backward", "mok_ref"),
        ):
            ours = find(report, case, direction, contender)
            torch = find(report, case, direction, "torch eager")
            label = {"mok_ref": "float32 dW"}.get(contender, "bf16 dW")
            name = direction if direction == "forward" else f"backward, {label}"
            lines.append(
                f"| {CASES[case].num_tokens} | {name} | {ours['sustained_ms']:.3f} "
                f"| {torch['sustained_ms']:.3f} "
                f"| {torch['sustained_ms'] / ours['sustained_ms']:.2f} |"
            )
    return lines


def _facts(report: dict[str, Any]) -> list[str]:
    saving = [
        find(report, case, "forward", "mok_ref, saving")["sustained_ms"]
        / find(report, case, "forward", "mok_ref")["sustained_ms"]
        - 1
        for case in TABLE_CASES
    ]
    host = report["host_us"].values()
    equal = [case for case, bits in report["bits"].items() if bits == "equal"]
    lines = [
        f"- Bits against the portable kernels: {len(equal)} of {len(report['bits'])} cases equal "
        f"({', '.join(equal)}).",
        f"- Forward that saves gate and up: {100 * min(saving):+.1f} to {100 * max(saving):+.1f} % "
        "in time.",
        f"- Host time per forward call: {min(host):.0f} to {max(host):.0f} us.",
    ]
    if "bits_note" in report:
        lines.append(f"- {report['bits_note']}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of docs/results.md.")
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    made = tables([json.loads(path.read_text()) for path in options.reports])
    page = options.output.read_text()
    before, rest = page.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    options.output.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
