"""How contenders are timed: CUDA events, queued launches, random order, sustained and in bursts.

The card is power-limited, so a figure means something only beside another from the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

SUSTAINED_ROUNDS = 3
BURST_LAUNCHES = 4


@dataclass(frozen=True)
class Protocol:
    """How much is measured.

    repeats        sustained samples of every contender, at least
    warm_s         continuous work before sustained samples
    bursts         groups of 4 launches, each after `burst_rest_s` without work
    numpy_samples  tokens that NumPy computes again
    """

    repeats: int = 20
    warm_s: float = 1.2
    bursts: int = 5
    burst_rest_s: float = 0.3
    numpy_samples: int = 0


@dataclass
class Timing:
    """Milliseconds of single calls."""

    sustained: list[float] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)

    def median(self, kind: str) -> float:
        """Of "sustained" or "bursts"."""
        return float(np.median(getattr(self, kind)))


def time_contenders(
    contenders: dict[str, Callable[[], Any]], rng: np.random.Generator, protocol: Protocol
) -> dict[str, Timing]:
    """Median-ready samples of every contender.

    Sustained: after `warm_s` of continuous work, rounds in which the contenders follow each other
    in random order without a pause. Bursts: groups of 4 launches with a rest before each.
    """
    results = {name: Timing() for name in contenders}
    estimate = {name: _estimate_ms(call) for name, call in contenders.items()}
    _work_for(protocol.warm_s, contenders, estimate)
    per_round = -(-protocol.repeats // SUSTAINED_ROUNDS)
    for _ in range(SUSTAINED_ROUNDS):
        for name in rng.permutation(list(contenders)):
            results[name].sustained += launches_ms(contenders[name], per_round, warm=2)
    for _ in range(protocol.bursts):
        for name in rng.permutation(list(contenders)):
            time.sleep(protocol.burst_rest_s)
            results[name].bursts += launches_ms(contenders[name], BURST_LAUNCHES, warm=1)
    return results


def launches_ms(call: Callable[[], Any], count: int, warm: int) -> list[float]:
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


def interleaved_ms(
    contenders: Mapping[str, Callable[[], Any]],
    rng: np.random.Generator,
    rounds: int = 3,
    per_round: int = 5,
) -> dict[str, float]:
    """Median milliseconds of every contender, in rounds of random order without a pause."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in rng.permutation(list(contenders)):
            samples[name] += launches_ms(contenders[name], per_round, warm=2)
    return {name: float(np.median(found)) for name, found in samples.items()}


def _estimate_ms(call: Callable[[], Any]) -> float:
    call()
    return max(launches_ms(call, 2, warm=1)[-1], 1e-3)


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
