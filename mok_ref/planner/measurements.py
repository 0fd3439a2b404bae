"""Measured and published figures, and the routing they were measured with.

    data/measurements/h200.toml       one H200: dense products, peers, the prototype kernel's parts;
                                      two H200: this project's kernel
    data/measurements/published.toml  several GPUs, by others
    docs/results/*.json               this project's kernel, written by the benchmark

The results files are reports of `mok-ref bench --json`, of `python -m mok_ref.bench.mxfp8`, of
several GPUs (mok_ref/bench/links_run.py), or hold
{"device": {"gpu", "driver", "date"}, "rows": [{"case", "T", "H", "I", "E", "K", "direction",
"ms_ours", "ms_dense", "bits_ok", ...}]}; further keys that are read if present:
"routing" ("uniform" or "zipf"), "ranks", "dtype", "mode" ("sustained" or "bursts"), "save",
"dw_dtype", "shared", "minibatch", "macrobatch", "weights" ("held" or "not held": MXFP8). A report
without any such row is named by `unread_reports`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import parse_json, read_text
from .report_form import check_report
from .workload import Workload, counts_of, draw_ids, popularity

DATA = Path(__file__).parent / "data" / "measurements"
ZIPF_SKEW = 1.0
MOST_DRAWN_ROUTES = 600_000  # above this only counts are drawn
NEEDED = ("case", "T", "H", "I", "E", "K", "direction", "ms_ours")
# cases whose rows may be fitted: one with large experts, one with many small ones, one of few
# tokens; a held-out row is of another shape, token count or routing than any of these
FITTED_CASES = ("dsv3", "dsv3-rank", "qwen3", "small-128")
# what the report of MXFP8 beside bf16 timed, in the words of a row; bf16 is there to compare with
MXFP8_CONTENDERS: dict[str, dict[str, str]] = {
    "bf16 kernel": {"direction": "forward kernel", "dtype": "bf16"},
    "mxfp8 kernel": {"direction": "forward kernel", "dtype": "mxfp8"},
    "bf16 step": {"direction": "forward", "dtype": "bf16"},
    "mxfp8 step": {"direction": "forward", "dtype": "mxfp8", "weights": "not held"},
    "mxfp8 step, weights held": {"direction": "forward", "dtype": "mxfp8", "weights": "held"},
}
MXFP8_GROUP = "kernel, MXFP8"


@dataclass(frozen=True)
class Measurement:
    """One figure: milliseconds of `what` for one shape on one kind of GPU."""

    group: str
    case: str
    what: str
    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ms: float
    source: str
    routing: str = "uniform"
    hardware: str = "h200"
    ranks: int = 1
    dtype: str = "bf16"
    role: str = "held out"
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


def sizes_of(row: dict[str, Any]) -> dict[str, Any]:
    """The five sizes of a row under this module's names."""
    names = ("tokens", "hidden_size", "intermediate_size", "num_experts", "top_k")
    return {name: int(row[key]) for name, key in zip(names, "THIEK", strict=True)}


FLOP_FACTORS = {
    "forward": 6.0,
    "forward products": 6.0,
    "forward layer": 6.0,
    "forward kernel": 6.0,
    "backward": 12.0,
    "forward and backward": 18.0,
    "backward float32": 12.0,
    "dgrad hidden": 2.0,
    "dgrad input": 4.0,
    "wgrad float32": 6.0,
    "wgrad bf16": 6.0,
}


def h200_rows(path: Path = DATA / "h200.toml") -> list[Measurement]:
    """Rows in ms or in TFLOP/s per GPU; the prototype's rows of fitted shapes may be fitted."""
    result = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["rows"]:
        flops = FLOP_FACTORS[row["what"]] * row["T"] * row["K"] * row["H"] * row["I"]
        ms = row["ms"] if "ms" in row else flops / row["tflops"] / 1e9
        is_fit = row["group"] == "prototype" and row["case"] in FITTED_CASES
        result.append(
            Measurement(
                row["group"],
                row["case"],
                row["what"],
                **sizes_of(row),
                ms=ms,
                source=row["source"],
                routing=row["routing"],
                ranks=row.get("ranks", 1),
                role="fit" if is_fit else "held out",
                extra={key: row[key] for key in ("dw_dtype",) if key in row},
            )
        )
    return result


def published_rows(path: Path = DATA / "published.toml") -> list[Measurement]:
    """Rows of others on several GPUs; the hardware's constants are fitted on those marked fit."""
    known = {"name", "hardware", "ranks", "T", "H", "I", "E", "K", "dtype", "direction", "ms"}
    known |= {"role", "source"}
    return [
        Measurement(
            "published",
            row["name"],
            row["direction"],
            **sizes_of(row),
            ms=row["ms"],
            source=row["source"],
            hardware=row["hardware"],
            ranks=row["ranks"],
            dtype=row["dtype"],
            role=row["role"],
            extra={key: value for key, value in row.items() if key not in known},
        )
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["rows"]
    ]


def published_links(path: Path = DATA / "published.toml") -> list[dict[str, Any]]:
    return tomllib.loads(path.read_text(encoding="utf-8"))["links"]


def kernel_rows(paths: Iterable[Path]) -> list[Measurement]:
    """This project's kernel, from benchmark results; of what several files measured, the newest.

    Rows whose bits were not right are no measurements of this kernel and are left out.
    Raises: ValueError naming the file, the row and the key that is missing or wrong.
    """
    tables = [(path.name, results_table(path)) for path in sorted(paths)]
    tables.sort(key=lambda item: (str(item[1].get("device", {}).get("date", "")), item[0]))
    newest: dict[tuple, Measurement] = {}
    for name, table in tables:
        device = table.get("device", {})
        for row in rows_of_table(table):
            if not isinstance(row, dict) or row.get("ms_ours") is None:
                continue
            if row.get("bits_ok", True):
                made = kernel_row(row, device, name)
                newest[what_was_measured(made)] = made
    return list(newest.values())


def unread_reports(paths: Iterable[Path]) -> list[str]:
    """Names of the files that give no row: no time of a layer in a form that `kernel_rows` reads,
    or wrong bits."""
    return [path.name for path in sorted(paths) if not kernel_rows([path])]


def results_table(path: Path) -> dict[str, Any]:
    """A JSON object; {} where the file holds something else than an object.

    Raises: ValueError naming the file, the row and the key that is wrong.
    """
    table = parse_json(read_text(path), path.name)
    if not isinstance(table, dict):
        return {}
    check_report(table, path.name)
    return table


def rows_of_table(table: dict[str, Any]) -> list[Any]:
    """Rows in the form of `NEEDED`, whichever benchmark wrote the file; none if none did."""
    if isinstance(table.get("layers"), list):
        return rows_of_layers(table)
    if not isinstance(table.get("rows"), list):
        return []
    rows = [row for row in table["rows"] if isinstance(row, dict)]
    if any("contender" in row for row in rows):
        return rows_of_bench(table)
    if any(isinstance(row.get("ms"), dict) for row in rows):
        return rows_of_mxfp8(rows)
    return table["rows"]


VARIANT_KEYS = ("mode", "save", "dw_dtype", "shared", "weights")


def what_was_measured(row: Measurement) -> tuple:
    """Equal for two measurements of the same thing."""
    variant = tuple(str(row.extra.get(key)) for key in VARIANT_KEYS)
    batches = tuple(row.extra.get(key) for key in ("minibatch", "macrobatch"))
    sizes = (row.tokens, row.hidden_size, row.intermediate_size, row.num_experts, row.top_k)
    return (row.group, row.case, row.what, *sizes, row.routing, row.hardware, row.ranks, row.dtype,
            variant, batches)  # fmt: skip


def kernel_row(row: dict[str, Any], device: dict[str, Any], name: str) -> Measurement:
    case = str(row["case"])
    gpu = str(device.get("gpu", "H200"))
    ranks, dtype = int(row.get("ranks", 1)), str(row.get("dtype", "bf16"))
    group = str(row.get("group", "kernel" if dtype == "bf16" else MXFP8_GROUP))
    return Measurement(
        group if ranks == 1 else "kernel on several H200",
        case,
        str(row["direction"]),
        **sizes_of(row),
        ms=float(row["ms_ours"]),
        source=f"{name}: {gpu}, driver {device.get('driver', '?')}, {device.get('date', '?')}",
        routing=str(row.get("routing", "zipf" if "zipf" in case.lower() else "uniform")),
        hardware="h100" if "H100" in gpu else "h200",
        ranks=ranks,
        dtype=dtype,
        role=role_of(case, row),
        extra={key: value for key, value in row.items() if key not in NEEDED},
    )


def role_of(case: str, row: dict[str, Any]) -> str:
    """ "fit" for the fitted cases on one GPU, sustained and in bursts (power limits only the
    former: together they tell it from the clock); all others are "held out", but for bf16 beside
    MXFP8, which is there to compare with."""
    if row.get("group") == MXFP8_GROUP and row.get("dtype") == "bf16":
        return "context"
    is_fit = case in FITTED_CASES and int(row.get("ranks", 1)) == 1
    return "fit" if is_fit else "held out"


def rows_of_bench(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows in the form of `NEEDED` from a report of `mok-ref bench`, whose rows name contenders.

    Ours alone, sustained and bursts apart; the shapes are those of the benchmark's case table.
    """
    from mok_ref.bench.cases import CASES

    result = []
    for row in table["rows"]:
        full_name = str(row.get("case"))
        name, _, dtype = full_name.partition(":")
        case = CASES.get(name)
        if case is None or not str(row.get("contender", "")).startswith("mok_ref"):
            continue
        for mode in ("sustained", "bursts"):
            result.append(
                {
                    "case": name,
                    "T": case.num_tokens,
                    "H": case.hidden_size,
                    "I": case.intermediate_size,
                    "E": case.num_experts,
                    "K": case.top_k,
                    "direction": row["direction"],
                    "routing": case.routing,
                    "ms_ours": row[f"{mode}_ms"],
                    "mode": mode,
                    "dtype": dtype or "bf16",
                    **variant_of(row),
                    "bits_ok": table.get("bits", {}).get(full_name, "equal") == "equal",
                }
            )
    return result


def rows_of_mxfp8(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the form of `NEEDED` from a report of mok_ref/bench/mxfp8.py: forward steps and
    their kernels alone, MXFP8 and bf16 of the same run, in one group; sustained."""
    sizes = ("tokens", "hidden", "intermediate", "experts", "top_k")
    result = []
    for row in rows:
        for contender, words in MXFP8_CONTENDERS.items():
            if contender not in row["ms"]:
                continue
            result.append(
                {
                    "case": row["case"],
                    **{letter: row[name] for letter, name in zip("THIEK", sizes, strict=True)},
                    "ms_ours": row["ms"][contender],
                    "mode": "sustained",
                    "save": "none",
                    "group": MXFP8_GROUP,
                    "bits_ok": row.get("bits") in (None, "equal"),
                    **words,
                }
            )
    return result


def rows_of_layers(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows in the form of `NEEDED` from a report of several GPUs (mok_ref/bench/links_run.py):
    ours as they are; on one rank only cases that the benchmark of one GPU does not have."""
    from mok_ref.bench.cases import CASES

    result = []
    bits = table.get("bits", {})
    for row in table["layers"]:
        if row["contender"] not in ("mok_ref", "mok_ref, float32 dW"):
            continue
        if row["R"] == 1 and row["case"] in CASES:
            continue
        checked = [v for k, v in bits.items() if k.startswith(f"{row['case']}, R {row['R']},")]
        result.append(
            {
                **{key: row[key] for key in ("case", *"THIEK", "direction")},
                "ms_ours": row["ms"],
                "ranks": row["R"],
                "dtype": row.get("dtype", "bf16"),
                "save": "none" if row["direction"] == "forward" else "all",
                "dw_dtype": "float32" if "float32" in row["contender"] else "bf16",
                "bits_ok": all(value == "equal" for value in checked),
            }
        )
    return result


def variant_of(row: dict[str, Any]) -> dict[str, str]:
    """What a contender's name says: what forward saved, or in which type backward stored dW."""
    if row["direction"] == "backward":
        return {"save": "all", "dw_dtype": "bf16" if "bf16" in row["contender"] else "float32"}
    return {"save": "all" if "saving" in row["contender"] else "none"}


def workload_of(row: Measurement) -> Workload:
    """The routing of a measurement, drawn again: ids may repeat where K > E."""
    rng = np.random.default_rng([1, row.num_experts])
    skew = ZIPF_SKEW if row.routing == "zipf" else 0.0
    chances = popularity(row.num_experts, skew, rng)
    tokens = np.full(row.ranks, row.tokens, np.int64)
    total = row.tokens * row.ranks
    if total * row.top_k <= MOST_DRAWN_ROUTES:
        ids = draw_ids(total, row.top_k, chances, rng)
        return Workload(tokens, counts_of(ids, tokens, row.num_experts), row.routing, ids)
    counts = rng.multinomial(row.rows, chances, size=row.ranks).astype(np.int64)
    return Workload(tokens, counts, row.routing)
