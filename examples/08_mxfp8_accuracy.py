"""How far bf16 and MXFP8 results are from float64, and how many bytes each format pulls.

    python examples/08_mxfp8_accuracy.py          # measure, store, write the tables of the page
    python examples/08_mxfp8_accuracy.py page     # the tables again, from the stored numbers

One layer on random weights, three kinds of tokens, both arithmetics and both scale rules; y and
every gradient against the same inputs in float64, where nothing is rounded and nothing quantised.
Stores docs/results/mxfp8_accuracy.json and fills docs/mxfp8.md between its markers. About a minute
on one core.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.bench.entry import one_line_errors, script_parser
from mok_ref.casefile import Case
from mok_ref.heap import LocalHeap, LocalWorld, run_on_world
from mok_ref.mxfp8 import BLOCK, E4M3_MAX, NAN_SCALE, SCALE_BIAS, dequantize, quantize
from mok_ref.numerics import as_values, bf16_to_bits, to_bf16
from mok_ref.runner import (
    Plan,
    RandomCase,
    Settings,
    make_plan,
    run_rank,
    run_virtual,
)

HOME = Path(__file__).parents[1]
RESULTS = HOME / "docs" / "results" / "mxfp8_accuracy.json"
PAGE = HOME / "docs" / "mxfp8.md"

SIZES: dict[str, Any] = {
    "num_tokens": 256,
    "hidden_size": 512,
    "intermediate_size": 128,
    "num_experts": 8,
}
TOP_K = 2
SEEDS = (0, 1, 2, 3, 4)
TENSORS = ("y", "dx", "d_topk_weights", "dw_gate", "dw_up", "dw_down")
BYTES_RANKS = 4

OUTLIER_SPACING, OUTLIER_FACTOR = 64, 32.0
HEAVY_TAIL_FREEDOM = 3
INPUTS = {
    "random": "x and dy normal",
    "heavy-tailed": f"x and dy from Student's t with {HEAVY_TAIL_FREEDOM} degrees of freedom",
    "outlier channels": f"normal, then one of {OUTLIER_SPACING} channels times "
    f"{OUTLIER_FACTOR:g}, other ones in dy than in x",
}
ARITHMETICS = {
    "bf16": Settings(backward=True, dtype="bf16"),
    "mxfp8, fit": Settings(backward=True, dtype="mxfp8", scale_rule="fit"),
    "mxfp8, ocp": Settings(backward=True, dtype="mxfp8", scale_rule="ocp"),
}

Record = dict[str, Any]


# --------------------------------------------------------------------------- inputs


def tokens(inputs: str, seed: int, which: int) -> np.ndarray:
    """(N, H) uint16 bf16 bits of x (`which` 0) or dy (1)."""
    rng = np.random.default_rng([seed, which])
    shape = (SIZES["num_tokens"], SIZES["hidden_size"])
    values = rng.standard_normal(shape)
    if inputs == "heavy-tailed":
        values = rng.standard_t(HEAVY_TAIL_FREEDOM, shape)
    if inputs == "outlier channels":
        values[:, 5 + 11 * which :: OUTLIER_SPACING] *= OUTLIER_FACTOR
    return bf16_to_bits(to_bf16(values.astype(np.float32)))


def make_case(inputs: str, seed: int) -> Case:
    """A case of `SIZES` whose weights are N(0, 1/fan-in)."""
    case = RandomCase(**SIZES, top_k=TOP_K, seed=seed).make()
    return replace(case, x=tokens(inputs, seed, 0), dy=tokens(inputs, seed, 1))


# --------------------------------------------------------------------------- errors


def relative_error(values: np.ndarray, exact: np.ndarray) -> float:
    """||values - exact|| / ||exact|| over all elements, to six digits."""
    wide = np.asarray(as_values(values), np.float64)
    return float(f"{np.linalg.norm(wide - exact) / np.linalg.norm(exact):.6g}")


def oracle(case: Case) -> dict[str, np.ndarray]:
    """All results in float64."""
    return run_virtual(make_plan(case, Settings(backward=True, arithmetic="float64"))).tensors


def errors(case: Case, exact: dict[str, np.ndarray], arithmetic: str) -> dict[str, float]:
    """Relative error of y and of every gradient."""
    tensors = run_virtual(make_plan(case, ARITHMETICS[arithmetic])).tensors
    return {name: relative_error(tensors[name], exact[name]) for name in TENSORS}


def token_statistics(inputs: str, seed: int, rule: str) -> dict[str, float]:
    """What quantisation does to x: relative error, share above 448 * 2^e, share that becomes 0."""
    bits = tokens(inputs, seed, 0)
    values = np.asarray(as_values(bits), np.float64)
    codes, scales = quantize(bits, rule)
    assert (scales != NAN_SCALE).all()
    largest = np.repeat(E4M3_MAX * 2.0 ** (scales.astype(int) - SCALE_BIAS), BLOCK, axis=1)
    lost = (dequantize(codes, scales) == 0) & (values != 0)
    return {
        "error": relative_error(dequantize(codes, scales), values),
        "saturated": float(np.mean(np.abs(values) > largest)),
        "lost": float(np.mean(lost)),
    }


# --------------------------------------------------------------------------- bytes


class CountedRows:
    """A view of a peer's rows that adds up the bytes which go through it."""

    def __init__(self, rows: np.ndarray, bytes_by_way: dict[str, int]) -> None:
        self.rows, self._bytes = rows, bytes_by_way

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self.rows[index]
        self._bytes["pulled"] += part.nbytes
        return part

    def __setitem__(self, index: Any, values: np.ndarray) -> None:
        self.rows[index] = values
        self._bytes["pushed"] += self.rows[index].nbytes


class CountingHeap(LocalHeap):
    """A rank's heap that counts the token rows it reads from and writes to other ranks."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.bytes_by_way = {"pulled": 0, "pushed": 0}

    def peer(self, rank: int, name: str) -> Any:
        memory = super().peer(rank, name)
        kind = name.rpartition("/")[2]
        if rank == self.rank or not kind.startswith(("x", "dy", "slots")):
            return memory
        return CountedRows(memory, self.bytes_by_way)


class CountingWorld(LocalWorld):
    def heap(self, rank: int) -> LocalHeap:
        return CountingHeap(self, rank)


def count_bytes(case: Case, dtype: str, backward: bool) -> dict[str, int]:
    """Bytes of token rows that cross ranks in one step: pulled and pushed."""
    settings = Settings(ranks=BYTES_RANKS, dtype=dtype, backward=backward)
    plan: Plan = make_plan(case, settings)

    def rank(heap: Any) -> dict[str, int]:
        run_rank(plan, heap)
        return heap.bytes_by_way

    counts = run_on_world(CountingWorld(BYTES_RANKS), rank)
    return {way: sum(count[way] for count in counts) for way in ("pulled", "pushed")}


def bytes_rows() -> list[Record]:
    """Forward and backward, both formats. Backward alone is the step less its forward."""
    case, rows = make_case("random", 0), []
    for dtype in ("bf16", "mxfp8"):
        forward, both = (count_bytes(case, dtype, backward) for backward in (False, True))
        backward = {way: both[way] - forward[way] for way in both}
        rows.append({"dtype": dtype, "step": "forward", **forward})
        rows.append({"dtype": dtype, "step": "backward", **backward})
    return rows


# --------------------------------------------------------------------------- measuring


def measure() -> Record:
    rows: list[Record] = []
    x_rows: list[Record] = []
    for inputs in INPUTS:
        for seed in SEEDS:
            case = make_case(inputs, seed)
            exact = oracle(case)
            for arithmetic in ARITHMETICS:
                found = errors(case, exact, arithmetic)
                rows.append({"inputs": inputs, "arithmetic": arithmetic, "seed": seed, **found})
            for rule in ("fit", "ocp"):
                found = token_statistics(inputs, seed, rule)
                x_rows.append({"inputs": inputs, "rule": rule, "seed": seed, **found})
            print(f"{inputs}, seed {seed}", file=sys.stderr)
    sizes = {**SIZES, "top_k": TOP_K, "ranks_for_bytes": BYTES_RANKS}
    return {"sizes": sizes, "errors": rows, "x": x_rows, "bytes": bytes_rows()}


# --------------------------------------------------------------------------- the page


def spread(values: Iterable[float], scale: float = 100.0) -> str:
    """Median, and the smallest and largest over the seeds, in percent."""
    found = [scale * value for value in values]
    return f"{statistics.median(found):.3g} ({min(found):.3g}–{max(found):.3g})"


def matching(rows: list[Record], **wanted: str) -> list[Record]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    header = list(header)
    body = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in body)


def error_table(stored: Record) -> str:
    lines = []
    for inputs in INPUTS:
        for arithmetic in ARITHMETICS:
            rows = matching(stored["errors"], inputs=inputs, arithmetic=arithmetic)
            cells = [spread(row[name] for row in rows) for name in TENSORS]
            lines.append([inputs, arithmetic, *cells])
    return table(("inputs", "experts", *(f"{name} %" for name in TENSORS)), lines)


def x_table(stored: Record) -> str:
    lines = []
    for inputs in INPUTS:
        for rule in ("fit", "ocp"):
            rows = matching(stored["x"], inputs=inputs, rule=rule)
            parts = ("error", "saturated", "lost")
            lines.append([inputs, rule, *(spread(row[part] for row in rows) for part in parts)])
    return table(("inputs", "rule", "error of x %", "saturated %", "becomes 0 %"), lines)


def bytes_table(stored: Record) -> str:
    lines = []
    for step in ("forward", "backward"):
        bf16, mxfp8 = (matching(stored["bytes"], step=step, dtype=d)[0] for d in ("bf16", "mxfp8"))
        for name, ways in (("pulled", ["pulled"]), ("pushed", ["pushed"]), ("sum", list(bf16)[2:])):
            before, after = (sum(row[way] for way in ways) for row in (bf16, mxfp8))
            lines.append([step, name, f"{before:,}", f"{after:,}", f"{after / before:.4f}"])
    return table(("step", "way", "bf16 bytes", "mxfp8 bytes", "ratio"), lines)


TABLES = {"errors": error_table, "x": x_table, "bytes": bytes_table}


def fill(text: str, stored: Record) -> str:
    """The page with the tables of `stored` between their markers. Raises: ValueError."""
    for name, make in TABLES.items():
        begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"page must hold the markers of {name!r} once, in {PAGE}")
        head, _, rest = text.partition(begin)
        text = head + begin + make(stored) + end + rest.partition(end)[2]
    return text


def write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("only", nargs="?", choices=["page"], help="measure nothing")
    if parser.parse_args().only is None:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        write(RESULTS, json.dumps(measure(), indent=1) + "\n")
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    write(PAGE, fill(PAGE.read_text(encoding="utf-8"), stored))
    print(error_table(stored), x_table(stored), bytes_table(stored), sep="\n\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
