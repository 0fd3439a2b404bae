"""Speed of the reference on the CPU: tokens/s and multiply-adds/s against R and size."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from mok_ref.bench.cases import parse_shape
from mok_ref.runner import RandomCase, Settings, make_plan, run_virtual

SIZES = {
    "small": RandomCase(256, 256, 128, num_experts=8, top_k=2),
    "medium": RandomCase(512, 512, 256, num_experts=16, top_k=2, shared_size=128),
}


@dataclass(frozen=True)
class CpuTiming:
    """The fastest of several runs of one size on one number of ranks."""

    name: str
    ranks: int
    num_tokens: int
    forward_ms: float
    backward_ms: float
    forward_macs_per_s: float
    backward_macs_per_s: float
    digest: str


def parse_size(text: str) -> RandomCase:
    """A name in `SIZES`, or NxHxIxExK. Raises: ValueError."""
    if text in SIZES:
        return SIZES[text]
    shape = parse_shape(text)
    if shape is None:
        raise ValueError(f"sizes must be {', '.join(SIZES)} or NxHxIxExK, got {text[:40]!r}")
    return RandomCase(*shape)


def multiply_adds(size: RandomCase) -> int:
    """Multiply-adds of a forward: 3 products of H x I per routed row, and the shared expert's.

    Backward does twice as many (dhu, dx over 2I, and three weight gradients).
    """
    routed = size.num_tokens * size.top_k * size.intermediate_size
    return 3 * size.hidden_size * (routed + size.num_tokens * size.shared_size)


def bench_cpu(
    sizes: str,
    ranks: list[int],
    repeats: int,
    backward: bool,
    finished: Callable[[CpuTiming], None] = lambda _: None,
) -> list[CpuTiming]:
    """Time every size, each once, on every number of ranks that divides its experts.

    finished  told each timing as soon as it is there
    """
    if repeats < 1:
        raise ValueError(f"repeats must be >= 1, got {repeats}")
    chosen = [(name, parse_size(name)) for name in dict.fromkeys(sizes.split(","))]
    for name, size in chosen:
        if all(size.num_experts % r for r in ranks):
            raise ValueError(
                f"ranks must hold a divisor of the {size.num_experts} experts of {name}, "
                f"got {', '.join(map(str, ranks))}"
            )
    timings = []
    for name, size in chosen:
        for r in ranks:
            if size.num_experts % r == 0:
                timings.append(_time(name, size, r, repeats, backward))
                finished(timings[-1])
    return timings


def _time(name: str, size: RandomCase, ranks: int, repeats: int, backward: bool) -> CpuTiming:
    plan = make_plan(size.make(), Settings(ranks=ranks, backward=backward))
    results = [run_virtual(plan) for _ in range(repeats)]
    forward = min(result.seconds("forward") for result in results)
    back = min(result.seconds("backward") for result in results)
    macs = multiply_adds(size)
    return CpuTiming(
        name=name,
        ranks=ranks,
        num_tokens=size.num_tokens,
        forward_ms=1e3 * forward,
        backward_ms=1e3 * back,
        forward_macs_per_s=macs / forward,
        backward_macs_per_s=2 * macs / back if back else 0.0,
        digest=results[0].digest,
    )


def bench_json(timings: list[CpuTiming]) -> str:
    """A JSON list of timings."""
    return json.dumps([asdict(timing) for timing in timings], indent=1)


def print_bench(timings: list[CpuTiming], as_json: bool) -> None:
    """A table, or a JSON list."""
    if as_json:
        print(bench_json(timings))
        return
    from mok_ref.printing import console, table

    columns = (">R", ">tokens", ">forward ms", ">tokens/s", ">M multiply-adds/s")
    shown = table(None, "size", *columns, ">backward ms", ">M multiply-adds/s", "digest")
    for t in timings:
        cells = (t.ranks, t.num_tokens, f"{t.forward_ms:.0f}")
        rates = (f"{1e3 * t.num_tokens / t.forward_ms:.0f}", f"{t.forward_macs_per_s / 1e6:.0f}")
        back = (f"{t.backward_ms:.0f}", f"{t.backward_macs_per_s / 1e6:.0f}", t.digest[:12])
        shown.add_row(t.name, *map(str, (*cells, *rates, *back)))
    console().print(shown)
