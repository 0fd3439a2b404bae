"""Virtual ranks: one thread per rank in one process, memory shared as it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mok_ref.heap.protocol import BARRIER_TIMEOUT_S, CALLERS_BARRIER, HeapError, late_message

Result = TypeVar("Result")
_START = "its start"


class LocalWorld:
    """What the virtual ranks of one process share."""

    def __init__(self, size: int, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        if size < 1:
            raise ValueError(f"ranks must be >= 1, got {size}")
        self.size = size
        self.timeout_s = timeout_s
        self.arrival = threading.Barrier(size)
        self.progress = [(0, _START)] * size  # epoch and phase of the barrier a rank entered last
        self.memory: dict[str, list[Any]] = {}
        self.lock = threading.Lock()

    def heap(self, rank: int) -> LocalHeap:
        return LocalHeap(self, rank)


class LocalHeap:
    """The symmetric heap of one virtual rank (see `SymmetricHeap`)."""

    device = "cpu"

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self._world = world
        self._names: set[str] = set()

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if name in self._names:
            raise ValueError(f"heap name must be new, got {name!r} twice")
        memory = np.zeros(shape, dtype)
        with self._world.lock:
            slots = self._world.memory.setdefault(name, [None] * self.size)
            slots[self.rank] = memory
        self._names.add(name)
        self.barrier(f"allocating {name!r}")
        for peer, other in enumerate(slots):
            if other.shape != memory.shape or other.dtype != memory.dtype:
                raise ValueError(
                    f"heap allocation {name!r} must be the same on all ranks, got "
                    f"{memory.shape} {memory.dtype} on rank {self.rank} and "
                    f"{other.shape} {other.dtype} on rank {peer}"
                )
        return memory

    def peer(self, rank: int, name: str) -> np.ndarray:
        return self._world.memory[name][rank]

    def free(self, name: str) -> None:
        self.barrier(f"freeing {name!r}")
        self._names.discard(name)
        with self._world.lock:
            self._world.memory.pop(name, None)
        self.barrier(f"freeing {name!r}")

    def barrier(self, phase: str = CALLERS_BARRIER) -> None:
        world = self._world
        epoch = world.progress[self.rank][0] + 1
        world.progress[self.rank] = (epoch, phase)
        try:
            world.arrival.wait(world.timeout_s)
        except threading.BrokenBarrierError as error:
            late = [(r, *seen) for r, seen in enumerate(world.progress) if seen[0] < epoch]
            cause = f"failed or did not arrive within {world.timeout_s:g} s"
            raise HeapError(late_message(self.rank, phase, epoch, late, cause)) from error

    def close(self) -> None:
        for name in sorted(self._names):
            self.free(name)


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
