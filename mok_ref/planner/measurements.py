"""Measured and published figures, and the routing they were measured with.

    data/measurements/h200.toml       one H200: dense products, peers, the prototype kernel's parts
    data/measurements/published.toml  several GPUs, by others
    docs/results/*.json               this project's kernel, written by the benchmark

The results files hold {"device": {"gpu", "driver", "date"}, "rows": [{"case", "T", "H", "I", "E",
"K", "direction", "ms_ours", "ms_dense", "bits_ok", ...}]}; further keys that are read if present:
"routing" ("uniform" or "zipf"), "ranks", "dtype", "mode" ("sustained" or "bursts"), "save",
"dw_dtype", "shared", "minibatch", "macrobatch".
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import require
from .workload import Workload, counts_of, draw_ids, popularity

DATA = Path(__file__).parent / "data" / "measurements"
ZIPF_SKEW = 1.0
NEEDED = ("case", "T", "H", "I", "E", "K", "direction", "ms_ours")
# shapes whose rows may be fitted: one with large experts, one with many small ones; all others
# are held out, so that a held-out row is of a shape that the fit has never seen
FITTED_CASES = ("dsv3", "qwen3")


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


FLOP_FACTORS = {
    "forward": 6.0,
    "forward products": 6.0,
    "forward layer": 6.0,
    "backward": 12.0,
    "backward float32": 12.0,
    "dgrad hidden": 2.0,
    "dgrad input": 4.0,
    "wgrad float32": 6.0,
    "wgrad bf16": 6.0,
}


def h200_rows(path: Path = DATA / "h200.toml") -> list[Measurement]:
    """Rows given in TFLOP/s; the prototype's rows of fitted shapes may be fitted."""
    result = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["rows"]:
        flops = FLOP_FACTORS[row["what"]] * row["T"] * row["K"] * row["H"] * row["I"]
        is_fit = row["group"] == "prototype" and row["case"] in FITTED_CASES
        result.append(
            Measurement(
                row["group"],
                row["case"],
                row["what"],
                *(row[key] for key in ("T", "H", "I", "E", "K")),
                ms=flops / row["tflops"] / 1e9,
                source=row["source"],
                routing=row["routing"],
                role="fit" if is_fit else "held out",
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
            *(row[key] for key in ("T", "H", "I", "E", "K")),
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
    """This project's kernel, from benchmark results.

    Rows whose bits were not right are no measurements of this kernel and are left out.
    Raises: ValueError naming the file and the missing key.
    """
    result = []
    for path in sorted(paths):
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}: not a JSON file: {error}") from None
        if not isinstance(table, dict) or not isinstance(table.get("rows"), list):
            continue
        device = table.get("device", {})
        for row in table["rows"]:
            if not isinstance(row, dict) or row.get("ms_ours") is None:
                continue
            missing = [key for key in NEEDED if key not in row]
            require(not missing, f"{path.name}: row without {', '.join(missing)}: {row}")
            if row.get("bits_ok", True):
                result.append(kernel_row(row, device, path.name))
    return result


def kernel_row(row: dict[str, Any], device: dict[str, Any], name: str) -> Measurement:
    case = str(row["case"])
    gpu = str(device.get("gpu", "H200"))
    return Measurement(
        "kernel",
        case,
        str(row["direction"]),
        *(int(row[key]) for key in ("T", "H", "I", "E", "K")),
        ms=float(row["ms_ours"]),
        source=f"{name}: {gpu}, driver {device.get('driver', '?')}, {device.get('date', '?')}",
        routing=str(row.get("routing", "zipf" if "zipf" in case.lower() else "uniform")),
        hardware="h100" if "H100" in gpu else "h200",
        ranks=int(row.get("ranks", 1)),
        dtype=str(row.get("dtype", "bf16")),
        role="fit" if (int(row["H"]), int(row["I"])) in FITTED_WIDTHS else "held out",
        extra={key: value for key, value in row.items() if key not in NEEDED},
    )


# (H, I) of FITTED_CASES: a benchmark may name its cases differently
FITTED_WIDTHS = ((7168, 2048), (2048, 768))


def workload_of(row: Measurement) -> Workload:
    """The routing of a measurement, drawn again: ids may repeat where K > E."""
    rng = np.random.default_rng([1, row.num_experts])
    skew = ZIPF_SKEW if row.routing == "zipf" else 0.0
    chances = popularity(row.num_experts, skew, rng)
    tokens = np.full(row.ranks, row.tokens, np.int64)
    total = row.tokens * row.ranks
    if total * row.top_k <= 2_000_000:
        ids = draw_ids(total, row.top_k, chances, rng)
        return Workload(tokens, counts_of(ids, tokens, row.num_experts), row.routing, ids)
    counts = rng.multinomial(row.rows, chances, size=row.ranks).astype(np.int64)
    return Workload(tokens, counts, row.routing)
