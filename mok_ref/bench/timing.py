"""How contenders are timed: CUDA events, queued launches, random order, sustained and in bursts.

The card is power-limited, so a figure means something only beside another from the same run.
Sustained figures are of each contender's own clock: turns that are too short for the power control
would share one clock among all, and compare cycles instead of times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np

BURST_LAUNCHES = 4
MAX_CALLS = 400  # in one turn
BRIEF = 0.5  # of a turn


@dataclass(frozen=True)
class Protocol:
    """How much is measured.

    repeats        sustained samples of every contender, at least
    rounds         in each of them every contender has one turn
    warm_s         continuous work before the first round
    skip_s         beginning of a turn that does not count: the card's power control takes some
                   tenths of a second until the clock is this contender's own
    turn_s         the part of a turn that counts
    bursts         groups of 4 launches, each after `burst_rest_s` without work
    numpy_samples  tokens that NumPy computes again
    """

    repeats: int = 20
    rounds: int = 3
    warm_s: float = 0.3
    skip_s: float = 0.15
    turn_s: float = 0.25
    bursts: int = 5
    burst_rest_s: float = 0.3
    numpy_samples: int = 0

    def calls(self, ms: float, share: float) -> tuple[int, int]:
        """(calls that do not count, calls that count) of a turn, for a call of this length."""
        counted = max(-(-self.repeats // self.rounds), ceil(1e3 * share * self.turn_s / ms))
        skipped = ceil(1e3 * share * self.skip_s / ms)
        return min(skipped, MAX_CALLS), min(counted, max(self.repeats, MAX_CALLS))


@dataclass
class Timing:
    """Milliseconds of single calls, a list for each round."""

    sustained: list[list[float]] = field(default_factory=list)
    bursts: list[list[float]] = field(default_factory=list)

    def median(self, kind: str) -> float:
        """Of all calls of "sustained" or "bursts"."""
        return float(np.median(np.concatenate(getattr(self, kind))))

    def ratio(self, other: Timing, kind: str) -> float:
        """This time / the other's, paired: the median over the rounds of the quotient of their
        medians in a round. Clocks that drift from round to round leave it alone."""
        pairs = zip(getattr(self, kind), getattr(other, kind), strict=True)
        return float(np.median([np.median(mine) / np.median(others) for mine, others in pairs]))


def time_contenders(
    contenders: Mapping[str, Callable[[], Any]],
    rng: np.random.Generator,
    protocol: Protocol,
    brief: Collection[str] = (),
) -> dict[str, Timing]:
    """Samples of every contender.

    Sustained: rounds in which the contenders have turns in random order without a pause, each long
    enough to settle at the clock that its own power leaves. Bursts: groups of 4 launches with a
    rest before each.

    brief  contenders with turns of `BRIEF` the length
    """
    results = {name: Timing() for name in contenders}
    estimate = {name: _estimate_ms(call) for name, call in contenders.items()}
    _work_for(protocol.warm_s, contenders, estimate)
    for _ in range(protocol.rounds):
        for name in rng.permutation(list(contenders)):
            skipped, counted = protocol.calls(estimate[name], BRIEF if name in brief else 1.0)
            found = launches_ms(contenders[name], counted, warm=skipped)
            results[name].sustained.append(found)
    for _ in range(protocol.bursts):
        for name in rng.permutation(list(contenders)):
            time.sleep(protocol.burst_rest_s)
            results[name].bursts.append(launches_ms(contenders[name], BURST_LAUNCHES, warm=1))
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


def _estimate_ms(call: Callable[[], Any]) -> float:
    call()
    return max(launches_ms(call, 2, warm=1)[-1], 1e-3)


def _work_for(
    seconds: float, contenders: Mapping[str, Callable[[], Any]], estimate: dict[str, float]
) -> None:
    """Keep the device busy with all contenders in turn."""
    import torch

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, call in contenders.items():
            for _ in range(max(1, int(20 / estimate[name]))):
                call()
        torch.cuda.synchronize()


def host_us_per_call(call: Callable[[], Any], count: int = 100, queued: int = 5) -> float:
    """Microseconds the host spends in one call when the device never makes it wait: the median of
    `count` calls, the queue emptied after every `queued`."""
    import torch

    call()
    spent = []
    for index in range(count):
        if index % queued == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * float(np.median(spent))


def free_device_memory() -> None:
    """Give back what is no longer used, so that torch and CuPy find it."""
    import gc

    import cupy
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
