"""How the cost grows with tokens, experts, skew and ranks, beside a model of its limit.

The limit of a step is the larger of two times, with ceilings measured in the same run:

    products   floating-point operations / rate of one large cuBLAS product
    memory     bytes that must move once / bandwidth of a copy (bytes read and written)

Bytes of forward: weights of the experts that have rows, x, every y row written and read again by
the sum, y. Backward: these weights and the gradients of all experts (bf16), gate and up as kept, x
and dy, every dx row written and read again, dx. Nothing else is counted: padding, schedule, rings
that do not stay in the L2 cache and everything that runs before or after the products are what the
measured lines show above the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.bench.cases import CASES, BenchCase, routes

BASE = "qwen3"
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
EXPERTS = (8, 16, 32, 64, 128, 256, 512)
EXPONENTS = (0.0, 0.5, 1.0, 1.5, 2.0)
RANKS = (1, 2, 4, 8)
AXES = ("tokens", "experts", "skew", "ranks")
ALL_TO_ONE = 3.0  # place of "all to one expert" on the axis of exponents
DIRECTIONS = ("forward", "backward")
WARM_MS = 500.0  # until the clock has stopped swinging (mok_ref/bench/timing.py)
TURN_MS = 150.0  # of calls that count


@dataclass
class GrowthRow:
    """One measured point of one curve."""

    axis: str
    value: float
    direction: str
    ms: float
    limit_ms: float
    limited_by: str  # "products" or "memory"
    case: dict[str, Any]

    def __str__(self) -> str:
        return (
            f"growth {self.axis:7} {self.value:7g} {self.direction:8} {self.ms:.3f} ms, "
            f"limit {self.limit_ms:.3f} ms by {self.limited_by}"
        )


def cases_of(axis: str) -> list[tuple[float, BenchCase]]:
    """(value, case) of the points of an axis but "ranks"."""
    base = CASES[BASE]
    if axis == "tokens":
        return [(tokens, replace(base, num_tokens=tokens)) for tokens in TOKENS]
    if axis == "experts":
        return [(experts, replace(base, num_experts=experts)) for experts in EXPERTS]
    zipf = [(s, replace(base, routing="zipf", zipf_exponent=s)) for s in EXPONENTS]
    return [*zipf, (ALL_TO_ONE, replace(base, routing="one"))]


def bytes_moved(case: BenchCase, direction: str) -> int:
    """Bytes that a step must move at least, for the case's routes."""
    hidden, inner, tokens, rows = (
        case.hidden_size,
        case.intermediate_size,
        case.num_tokens,
        case.num_rows,
    )
    expert = 3 * hidden * inner * 2
    hit = len(np.unique(routes(case)[0]))
    rows_out = 2 * rows * hidden * 2
    if direction == "forward":
        return hit * expert + rows_out + 2 * tokens * hidden * 2
    kept = 2 * rows * inner * 2
    return (hit + case.num_experts) * expert + rows_out + kept + 3 * tokens * hidden * 2


def limit_ms(case: BenchCase, direction: str, ceilings: dict[str, float]) -> tuple[float, str]:
    """The model's time and which of its two terms it is."""
    products = case.flops(direction) / ceilings["tflops"] / 1e9
    memory = bytes_moved(case, direction) / ceilings["tbytes_per_s"] / 1e9
    return max((products, "products"), (memory, "memory"))


# --------------------------------------------------------------------------- measuring


def bench_growth(report: Any) -> None:
    """All curves; adds to report.growth and report.ceilings."""
    report.ceilings = measure_ceilings()
    for axis in ("tokens", "experts", "skew"):
        for value, case in cases_of(axis):
            for direction, ms in time_case(case).items():
                report.growth.append(_row(axis, value, direction, ms, case, report.ceilings))
    report.growth += rank_rows(CASES[BASE], report.ceilings)


def _row(
    axis: str,
    value: float,
    direction: str,
    ms: float,
    case: BenchCase,
    ceilings: dict[str, float],
) -> GrowthRow:
    limit, which = limit_ms(case, direction, ceilings)
    return GrowthRow(axis, value, direction, ms, limit, which, asdict(case))


def measure_ceilings(size: int = 8192) -> dict[str, float]:
    """TFLOP/s of one large product and TB/s of a copy, after half a second of work."""
    import torch

    from mok_ref.bench.timing import launches_ms

    def random() -> Any:
        return torch.randn(size, size, device="cuda", dtype=torch.bfloat16)

    a, b = random(), random()
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    launches_ms(partial(torch.matmul, a, b), 300, warm=1)
    product = float(np.median(launches_ms(partial(torch.matmul, a, b), 20, warm=2)))
    copy = float(np.median(launches_ms(partial(target.copy_, source), 20, warm=2)))
    return {"tflops": 2 * size**3 / product / 1e9, "tbytes_per_s": 2 * source.numel() / copy / 1e9}


def time_case(case: BenchCase) -> dict[str, float]:
    """Mean milliseconds of forward and backward after `WARM_MS` of the same work; small cases
    replayed from a CUDA graph."""
    from mok_ref.bench.gpu import SMALL_TOKENS, OurLayer
    from mok_ref.bench.peers import graphed, make_inputs
    from mok_ref.bench.timing import MAX_CALLS, free_device_memory, launches_ms

    layer = OurLayer(make_inputs(case), "bf16")
    calls: dict[str, Callable[[], Any]] = {
        "forward": partial(layer.forward, "none"),
        "backward": layer.backward,
    }
    found = {}
    for direction, call in calls.items():
        if direction == "backward":
            layer.forward("all")
        run = graphed(call) if case.num_tokens <= SMALL_TOKENS else call
        first = max(float(np.median(launches_ms(run, 3, warm=1))), 1e-2)
        warm, counted = ceil(WARM_MS / first), max(12, min(ceil(TURN_MS / first), MAX_CALLS))
        found[direction] = float(np.mean(launches_ms(run, counted, warm)))
    layer.close()
    del layer, calls, call, run
    free_device_memory()
    return found


def rank_rows(case: BenchCase, ceilings: dict[str, float]) -> list[GrowthRow]:
    """Virtual ranks that share the case's tokens; one GPU, so one limit."""
    from mok_ref.bench.peers import make_inputs
    from mok_ref.bench.variants import time_ranks

    inputs = make_inputs(case)
    rows = []
    for size in RANKS:
        timings = time_ranks(inputs, size, rounds=1)
        for direction in DIRECTIONS:
            ms = timings[size, direction].ms("sustained")
            rows.append(_row("ranks", size, direction, ms, case, ceilings))
    return rows


# --------------------------------------------------------------------------- drawing


def draw_growth(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Measured curves and the model's, one panel per axis. rows: GrowthRow as dictionaries.

    Raises: RuntimeError without matplotlib.
    """
    from mok_ref.plotting import import_pyplot, save

    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, panel in zip(AXES, panels.flat, strict=True):
        for color, direction in zip(("tab:blue", "tab:orange"), DIRECTIONS, strict=True):
            chosen = [r for r in rows if r["axis"] == axis and r["direction"] == direction]
            values = [row["value"] for row in chosen]
            measured = [row["ms"] for row in chosen]
            limits = [row["limit_ms"] for row in chosen]
            panel.plot(values, measured, "o-", color=color, label=direction)
            panel.plot(values, limits, "--", color=color, label=f"limit of {direction}")
            memory = [r for r in chosen if r["limited_by"] == "memory"]
            points = [r["value"] for r in memory], [r["limit_ms"] for r in memory]
            panel.plot(*points, "x", color=color, label="limited by memory")
        _label(panel, axis)
    panels.flat[0].legend(fontsize="small")
    save(figure, path)
    pyplot.close(figure)


def _label(panel: Any, axis: str) -> None:
    base = CASES[BASE]
    texts = {
        "tokens": f"tokens (E {base.num_experts})",
        "experts": f"experts ({base.num_rows} rows)",
        "skew": "Zipf exponent; last: all to one expert",
        "ranks": f"virtual ranks sharing {base.num_tokens} tokens",
    }
    panel.set_xlabel(texts[axis])
    panel.set_ylabel("ms")
    panel.grid(alpha=0.3)
    if axis in ("tokens", "experts"):
        panel.set_xscale("log", base=2)
    if axis == "tokens":
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)
