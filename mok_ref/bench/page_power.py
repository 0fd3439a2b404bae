"""Joules, cycles, bytes and instructions of runs of the same kernels: what stands between this
layer and dense cuBLAS on a card at its power limit.

Time = cycles / clock, and at one power the clock follows the energy of a cycle. Where that energy
goes is an account of what was counted:

    joules = idle watts * time + products + bytes of L2 + bytes of memory + warp instructions

each at one price for all cases and both contenders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mok_ref.bench.cases import CASES, TABLE_CASES
from mok_ref.bench.energy import dense_bytes, layer_bytes
from mok_ref.bench.page_runs import COLUMNS, Report, spread

DENSE = "dense cuBLAS"
PRICES = ("joules_per_tflop", "l2_pj_per_byte", "copy_pj_per_byte", "nj_per_instruction")
POWER_DIGITS = (3, 3, 3, 0, 0)


def power_tables(runs: list[Report], prices: Report | None) -> list[str]:
    """All three tables as lines of Markdown. prices: `PRICES`, where they were measured."""
    tables = power_table(runs), joules_table(runs, prices), traffic_table(runs)
    return [line for table in tables if table for line in (*table, "")]


def _directions() -> Iterator[tuple[str, str, str]]:
    """(case, direction, this layer's contender) of every row; backward with bf16 dW."""
    for case in TABLE_CASES:
        for direction, ours in COLUMNS[:2]:
            yield case, direction, ours


def _rows(runs: list[Report], kind: str, case: str, direction: str, contender: str) -> list[Report]:
    """Rows of "energy" or "traffic" in all runs that have one."""
    wanted = (case, direction, contender)
    return [
        row
        for run in runs
        for row in run.get(kind, [])
        if (row["case"], row["direction"], row["contender"]) == wanted
    ]


def _mean(rows: list[Report], value: Callable[[Report], float]) -> float:
    return sum(map(value, rows)) / len(rows)


# --------------------------------------------------------------------------- cycles and clock


def power_table(runs: list[Report]) -> list[str]:
    """Ratios to dense in time, cycles and clock."""
    lines = []
    for case, direction, ours in _directions():
        found = []
        for run in runs:  # a ratio is of one run
            mine, dense = (_rows([run], "energy", case, direction, who) for who in (ours, DENSE))
            found += [_power_of(mine[0], dense[0])] if mine and dense else []
        if found:
            columns = zip(*found, strict=True)
            cells = [spread(list(v), digits=d) for v, d in zip(columns, POWER_DIGITS, strict=True)]
            lines.append(f"| {case} | {direction} | {' | '.join(cells)} |")
    if not lines:
        return []
    return [
        "### Cycles and clock",
        "",
        "All of it at the card's power limit. Ratio = dense cuBLAS / whole layer; in time = in "
        "cycles x clock. Clock: the layer's / dense's, by the multiprocessors' own counters.",
        "",
        "| case | direction | in time | in cycles | clock | MHz of ours | MHz of dense |",
        "|---|---|---|---|---|---|---|",
        *lines,
    ]


def _power_of(mine: Report, dense: Report) -> tuple[float, ...]:
    """One run's cells of `power_table`."""
    in_time, clock = dense["ms"] / mine["ms"], mine["mhz"] / dense["mhz"]
    return in_time, in_time / clock, clock, mine["mhz"], dense["mhz"]


# --------------------------------------------------------------------------- joules


def joules_table(runs: list[Report], prices: Report | None) -> list[str]:
    """The account of one call of dense and of the layer, beside the joules that were measured."""
    measured = [run for run in runs if run.get("energy")]
    if prices is None or not measured:
        return []
    idle_watts = sum(run["copy"]["idle_watts"] for run in measured) / len(measured)
    lines, closing = [], []
    for case, direction, ours in _directions():
        for who in (DENSE, ours):
            energy, traffic = (_rows(runs, k, case, direction, who) for k in ("energy", "traffic"))
            if not energy or not traffic:
                continue
            parts = account(energy, traffic, idle_watts, prices)
            counter = _mean(energy, lambda row: row["joules"])
            closing.append(sum(parts) / counter)
            cells = [f"{part:.3f}" for part in (*parts, sum(parts), counter)]
            lines.append(f"| {case} | {direction} | {who} | {' | '.join(cells)} |")
    if not lines:
        return []
    product, l2_byte, copy_byte, instruction = (prices[name] for name in PRICES)
    return [
        "### Where the joules go",
        "",
        "Joules of one call, at one price for everybody: the idle card "
        f"{idle_watts:.0f} W; a byte of L2 {l2_byte:.0f} pJ and a warp instruction "
        f"{instruction:.2f} nJ (kernels that only load, and that only wait); a byte of memory "
        f"{copy_byte - l2_byte:.0f} pJ beside L2's (a copy of 4 GiB costs {copy_byte:.0f} pJ per "
        "byte read or written). Products have the price that closes the account: "
        f"{product:.2f} J per TFLOP. Bytes and instructions as counted (next table). The sums are "
        f"{min(closing):.3f} to {max(closing):.3f} of what the card's counter says; voltage falls "
        "with the clock, so one price is a little high for the layer and low for dense.",
        "",
        "| case | direction | who | idle | products | L2 | memory | instructions | sum "
        "| measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *lines,
    ]


def account(
    energy: list[Report], traffic: list[Report], idle_watts: float, prices: Report
) -> tuple[float, ...]:
    """Joules of one call: idle, products, L2, memory, instructions.

    A copied byte passes memory and L2, so memory alone costs the difference.
    """
    flops = CASES[energy[0]["case"]].flops(energy[0]["direction"])
    product, l2_byte, copy_byte, instruction = (prices[name] for name in PRICES)
    return (
        idle_watts * _mean(energy, lambda row: row["ms"]) / 1e3,
        product * flops / 1e12,
        1e-12 * l2_byte * _mean(traffic, _l2),
        1e-12 * (copy_byte - l2_byte) * _mean(traffic, _memory),
        1e-9 * instruction * _mean(traffic, _instructions),
    )


# --------------------------------------------------------------------------- bytes


def _memory(row: Report) -> float:
    return float(row["dram_read"] + row["dram_written"])


def _l2(row: Report) -> float:
    return float(row["l2_read"] + row["l2_written"])


def _between_halves(row: Report) -> float:
    return float(row["between_halves"])


def _instructions(row: Report) -> float:
    return float(row["instructions"])


def _busy(row: Report) -> float:
    return float(row["tensor_cycles"] / row["cycles"])


OF_A_CALL = (
    (_memory, 1e9, 2),
    (_l2, 1e9, 1),
    (_between_halves, 1e9, 1),
    (_instructions, 1e6, 0),
    (_busy, 1e-2, 1),
)
"""Columns of `traffic_table`: value, unit, digits."""


def traffic_table(runs: list[Report]) -> list[str]:
    """Counted bytes and instructions of dense and of the layer, beside the bytes that must move."""
    lines = []
    for case, direction, ours in _directions():
        both = [_rows(runs, "traffic", case, direction, who) for who in (DENSE, ours)]
        if not all(both):
            continue
        must = dense_bytes(CASES[case], direction), layer_bytes(CASES[case], direction, ring=True)
        cells = [f"{bytes_ / 1e9:.2f}" for bytes_ in must]
        for value, unit, digits in OF_A_CALL:
            cells += [spread([value(row) / unit for row in rows], digits=digits) for rows in both]
        lines.append(f"| {case} | {direction} | {' | '.join(cells)} |")
    if not lines:
        return []
    return [
        "### What is moved",
        "",
        "Counted by Nsight Compute over all kernels of one call (`mok_ref/bench/traffic.py`; "
        "backward with bf16 dW). Once: every tensor once for each kernel that reads or writes it, "
        "the layer's rows through a ring. Dense reads its operands more than once too: both have "
        "more of them than the L2 cache holds. L2: what its slices serve, transfers between its "
        "two halves included, which stand apart as well.",
        "",
        "| case | direction | GB once, dense | GB once, layer | GB of memory, dense "
        "| GB of memory, layer | GB of L2, dense | GB of L2, layer | GB between halves, dense "
        "| GB between halves, layer | M warp instructions, dense | M warp instructions, layer "
        "| % tensor pipes busy, dense | % tensor pipes busy, layer |",
        "|---|---|" + "---|" * 12,
        *lines,
    ]


# --------------------------------------------------------------------------- parts

WHOLE = "whole layer"


def parts_table(report: Report) -> list[str]:
    """What single parts of the layer cost: time and cycles of kernels that leave some out.

    Raises: KeyError where the whole layer is missing beside a case's parts.
    """
    lines = []
    found: dict[tuple[str, str], dict[str, Report]] = {}
    for row in report["parts"]:
        found.setdefault((row["case"], row["direction"]), {})[row["what"]] = row
    for (case, direction), rows in found.items():
        if WHOLE not in rows:
            raise KeyError(f"parts hold no {WHOLE} of {case} {direction}")
        whole = rows[WHOLE]
        for what, row in rows.items():
            saved = 1 - row["ms"] / whole["ms"], 1 - _cycles(row) / _cycles(whole)
            cells = ["", ""] if what == WHOLE else [f"{100 * part:.1f} %" for part in saved]
            lines.append(
                f"| {case} | {direction} | {what} | {row['ms']:.3f} | {row['mhz']:.0f} "
                f"| {_cycles(row):.2f} | {' | '.join(cells)} |"
            )
    return [
        "Kernels with something left out give wrong results and are not in the sources; they took "
        "turns with the whole layer and dense cuBLAS at the card's power limit. Parts wait for "
        "each other, so that what they save need not add up.",
        "",
        "| case | direction | what runs | ms | MHz | Mcycles | time saved | cycles saved |",
        "|---|---|---|---|---|---|---|---|",
        *lines,
    ]


def _cycles(row: Report) -> float:
    """Millions."""
    return float(row["ms"] * row["mhz"] / 1e3)
