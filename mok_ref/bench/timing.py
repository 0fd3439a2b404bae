"""How contenders are timed: CUDA events, queued launches, random order, sustained and in bursts.

The card is power-limited, so a figure means something only beside another from the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

WARM_SECONDS = 1.2  # of continuous work before a sustained measurement
SUSTAINED_ROUNDS = 3
BURSTS, BURST_LAUNCHES, BURST_REST_S = 5, 4, 0.3


@dataclass
class Timing:
    """Milliseconds of single calls."""

    sustained: list[float] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)

    def median(self, kind: str) -> float:
        return float(np.median(getattr(self, kind)))


def time_contenders(
    contenders: dict[str, Callable[[], Any]], rng: np.random.Generator, repeats: int = 20
) -> dict[str, Timing]:
    """Median-ready samples of every contender, at least `repeats` sustained ones each.

    Sustained: after `WARM_SECONDS` of continuous work, rounds in which the contenders follow each
    other in random order without a pause. Bursts: 5 x 4 launches with 0.3 s of rest.
    """
    results = {name: Timing() for name in contenders}
    estimate = {name: _estimate_ms(call) for name, call in contenders.items()}
    _work_for(WARM_SECONDS, contenders, estimate)
    per_round = -(-repeats // SUSTAINED_ROUNDS)
    for _ in range(SUSTAINED_ROUNDS):
        for name in rng.permutation(list(contenders)):
            results[name].sustained += _launches(contenders[name], per_round, warm=2)
    for _ in range(BURSTS):
        for name in rng.permutation(list(contenders)):
            time.sleep(BURST_REST_S)
            results[name].bursts += _launches(contenders[name], BURST_LAUNCHES, warm=1)
    return results


def _launches(call: Callable[[], Any], count: int, warm: int) -> list[float]:
    """Milliseconds of `count` queued calls, measured one by one with events."""
    import torch

    for _ in range(warm):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def _estimate_ms(call: Callable[[], Any]) -> float:
    call()
    return max(_launches(call, 2, warm=1)[-1], 1e-3)


def _work_for(
    seconds: float, contenders: dict[str, Callable[[], Any]], estimate: dict[str, float]
) -> None:
    """Keep the device busy with all contenders in turn."""
    import torch

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, call in contenders.items():
            for _ in range(max(1, int(20 / estimate[name]))):
                call()
        torch.cuda.synchronize()


def host_us_per_call(call: Callable[[], Any], count: int = 50) -> float:
    """Microseconds the host spends in one call when the device never makes it wait."""
    import torch

    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / count
