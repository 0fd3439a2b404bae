"""Virtual ranks: one thread per rank in one process, memory shared as it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mok_ref.heap.protocol import (
    BARRIER_TIMEOUT_S,
    CALLERS_BARRIER,
    HeapError,
    RankMismatch,
    allocation_phase,
    check_known_name,
    check_new_name,
    check_rank,
    check_size,
    check_timeout,
    late_message,
    mismatch,
)

Result = TypeVar("Result")
_START = "its start"


class LocalWorld:
    """What the virtual ranks of one process share."""

    def __init__(self, size: int, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        self.size = check_size(size)
        self.timeout_s = check_timeout(timeout_s)
        self.arrival = threading.Barrier(self.size)
        self.progress = [(0, _START)] * size  # epoch and phase of the barrier a rank entered last
        # Phases of even and odd epochs: a rank may enter the next barrier while others still look.
        self.phases = [[_START] * size, [_START] * size]
        self.memory: dict[str, list[Any]] = {}
        self.lock = threading.Lock()

    def heap(self, rank: int) -> LocalHeap:
        return LocalHeap(self, rank)


class LocalHeap:
    """The symmetric heap of one virtual rank (see `SymmetricHeap`)."""

    device = "cpu"

    def __init__(self, world: LocalWorld, rank: int) -> None:
        check_rank(rank, world.size)
        self.rank = rank
        self.size = world.size
        self._world = world
        self._names: set[str] = set()
        self.closed = False

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self._require_open()
        check_new_name(name, self._names)
        memory = np.zeros(shape, dtype)
        with self._world.lock:
            slots = self._world.memory.setdefault(name, [None] * self.size)
            slots[self.rank] = memory
        self._names.add(name)
        try:
            self.barrier(allocation_phase(name, memory.shape, memory.dtype))
        except RankMismatch:
            self._forget(name)
            raise
        return memory

    def peer(self, rank: int, name: str) -> np.ndarray:
        check_rank(rank, self.size)
        self._require_open()
        check_known_name(name, self._names)
        return self._world.memory[name][rank]

    def free(self, name: str) -> None:
        self._require_open()
        check_known_name(name, self._names)
        self.barrier(f"freeing {name!r}")
        self._forget(name)
        self.barrier(f"freeing {name!r}")

    def barrier(self, phase: str = CALLERS_BARRIER) -> None:
        self._require_open()
        world = self._world
        epoch = world.progress[self.rank][0] + 1
        phases = world.phases[epoch % 2]
        phases[self.rank] = phase
        world.progress[self.rank] = (epoch, phase)
        try:
            world.arrival.wait(world.timeout_s)
        except threading.BrokenBarrierError as error:
            late = [(r, *seen) for r, seen in enumerate(world.progress) if seen[0] < epoch]
            cause = f"failed or did not arrive within {world.timeout_s:g} s"
            raise HeapError(late_message(self.rank, phase, epoch, late, cause)) from error
        if phases.count(phase) != self.size:
            peer = next(r for r, other in enumerate(phases) if other != phase)
            raise mismatch(self.rank, phase, peer, phases[peer])

    def close(self) -> None:
        if self.closed:
            return
        for name in sorted(self._names):
            self.free(name)
        self.closed = True

    def _forget(self, name: str) -> None:
        self._names.discard(name)
        with self._world.lock:
            self._world.memory.pop(name, None)

    def _require_open(self) -> None:
        if self.closed:
            raise HeapError(f"the heap of rank {self.rank} is closed")


def run_ranks(
    size: int, function: Callable[[Any], Result], timeout_s: float = BARRIER_TIMEOUT_S
) -> list[Result]:
    """Run `function(heap)` once per virtual rank, one thread each; results in rank order.

    Raises: the first error any rank raised; the other ranks are released from their barriers, and
            one that does not come back within `timeout_s` is left behind.
    """
    world = LocalWorld(size, timeout_s)
    return run_on_world(world, function)


def run_on_world(world: Any, function: Callable[[Any], Result]) -> list[Result]:
    """`run_ranks` on a world that exists already: it has `size`, `heap(rank)` and `arrival`."""
    results: list[Any] = [None] * world.size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(world.heap(rank))
        except BaseException as error:
            errors.append((rank, error))
            world.arrival.abort()

    if world.size == 1:
        work(0)
    else:
        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(world.size)]
        for thread in threads:
            thread.start()
        _join(threads, errors, world.timeout_s)
    if errors:
        cause = [e for e in errors if not isinstance(e[1], HeapError)] or errors
        raise cause[0][1]
    return results


def _join(threads: list[threading.Thread], errors: list[Any], timeout_s: float) -> None:
    """Wait for the ranks; once one has failed, for the others no longer than `timeout_s`."""
    limit = None
    for thread in threads:
        while thread.is_alive() and (limit is None or time.monotonic() < limit):
            thread.join(0.05)
            if errors and limit is None:
                limit = time.monotonic() + timeout_s
