"""How contenders are timed: CUDA events, queued launches, random order, sustained and in bursts.

The card is power-limited, so a figure means something only beside another from the same run.
Sustained figures are of each contender's own clock: turns that are too short for the power control
would share one clock among all, and compare cycles instead of times. The control moves the clock in
steps of 15 MHz, about 1 % each, and swings by some percent for half a second after a contender that
draws less power. So a turn counts as the mean of its calls (their median is one step or the other),
and whoever leaves the limit alone has its turn after all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np

BURST_LAUNCHES = 4
MAX_CALLS = 1000  # in one turn


@dataclass(frozen=True)
class Protocol:
    """How much is measured.

    repeats        sustained samples of every contender, at least
    rounds         in each of them every contender has one turn
    warm_s         continuous work before the first round
    skip_s         beginning of a turn that does not count: the clock is not yet this contender's
    turn_s         the part of a turn that counts
    bursts         groups of 4 launches, each after `burst_rest_s` without work
    numpy_samples  tokens that NumPy computes again
    """

    repeats: int = 20
    rounds: int = 4
    warm_s: float = 1.0
    skip_s: float = 0.2
    turn_s: float = 0.4
    bursts: int = 5
    burst_rest_s: float = 0.3
    numpy_samples: int = 0

    def calls(self, ms: float, rounds: int) -> tuple[int, int]:
        """(calls that do not count, calls that count) of one of so many turns, for a call of this
        length."""
        counted = max(-(-self.repeats // rounds), ceil(1e3 * self.turn_s / ms))
        return min(ceil(1e3 * self.skip_s / ms), MAX_CALLS), min(
            counted, max(self.repeats, MAX_CALLS)
        )


@dataclass
class Timing:
    """Milliseconds of single calls, a list for each turn or burst."""

    sustained: list[list[float]] = field(default_factory=list)
    bursts: list[list[float]] = field(default_factory=list)

    def means(self, kind: str) -> list[float]:
        """Of each turn's calls. kind: "sustained" or "bursts"."""
        return [float(np.mean(turn)) for turn in getattr(self, kind)]

    def ms(self, kind: str) -> float:
        """Milliseconds per call: the median over the turns of the mean of a turn's calls."""
        return float(np.median(self.means(kind)))

    def median(self, kind: str) -> float:
        """Of all calls."""
        return float(np.median(np.concatenate(getattr(self, kind))))

    def ratio(self, other: Timing, kind: str) -> float:
        """This time / the other's."""
        return self.ms(kind) / other.ms(kind)


def time_contenders(
    contenders: Mapping[str, Callable[[], Any]],
    rng: np.random.Generator,
    protocol: Protocol,
    apart: Collection[str] = (),
) -> dict[str, Timing]:
    """Samples of every contender.

    Sustained: rounds in which the contenders have turns without a pause, each long enough to settle
    at the clock that its own power leaves. Bursts: groups of 4 launches with a rest before each.

    apart  contenders that have one turn, after all rounds: after them the clock is another one
    """
    results = {name: Timing() for name in contenders}
    estimate = {name: _estimate_ms(call) for name, call in contenders.items()}
    together = [name for name in contenders if name not in apart]
    _work_for(protocol.warm_s, {name: contenders[name] for name in together}, estimate)
    alone = [name for name in contenders if name in apart]
    for names, rounds in ((together, protocol.rounds), (alone, 1)):
        for name in turns(names, rounds, rng):
            skipped, counted = protocol.calls(estimate[name], rounds)
            found = launches_ms(contenders[name], counted, warm=skipped)
            results[name].sustained.append(found)
    for _ in range(protocol.bursts):
        for name in rng.permutation(list(contenders)):
            time.sleep(protocol.burst_rest_s)
            results[name].bursts.append(launches_ms(contenders[name], BURST_LAUNCHES, warm=1))
    return results


def turns(names: list[str], rounds: int, rng: np.random.Generator) -> Iterator[str]:
    """Who has the next turn: in every other round a random order, then the same order backwards, so
    that a steady drift meets all alike."""
    order: list[str] = []
    for number in range(rounds):
        order = order[::-1] if number % 2 else [str(name) for name in rng.permutation(names)]
        yield from order


def launches_ms(call: Callable[[], Any], count: int, warm: int) -> list[float]:
    """Milliseconds of `count` queued calls, measured one by one with events.

    warm  calls before
    """
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
