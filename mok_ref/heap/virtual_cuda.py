"""Virtual ranks on one GPU: one thread and one stream per rank in one process.

Ranks are joined by events, never by a kernel that spins: rank 0's stream waits for what the others
have enqueued, then theirs wait for it. The host threads meet there, and the last one to come does
this for all of them. So any number of ranks shares a device that runs their kernels in any order.

A thread that waits sleeps in a lock. One that looked again and again would take the interpreter
from the threads that launch: every call of the driver gives it up and wants it back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mok_ref.heap.cuda_device import DEFAULT_TIMEOUT_S, import_cupy, storage_dtype
from mok_ref.heap.protocol import HeapError, check_timeout, late_message

LOOK_S = 0.02
"""How long a thread sleeps before it looks whether another has failed."""

PER_THREAD_STREAM = 2  # cudaStreamPerThread: whichever thread names it means its own


class VirtualCudaWorld:
    """What the virtual ranks of one process share; use with `mok_ref.heap.run_on_world`."""

    def __init__(self, size: int, timeout_s: float = DEFAULT_TIMEOUT_S, device: int = 0) -> None:
        if size < 1:
            raise ValueError(f"ranks must be >= 1, got {size=}")
        self.timeout_s = check_timeout(timeout_s)
        cupy = import_cupy()
        self.size = size
        self.device_index = device
        self.arrival = threading.Barrier(size)  # broken once a rank has failed
        self.progress: list[tuple[int, str]] = [(0, "the start")] * size  # (epoch, phase) by rank
        self.memory: dict[str, list[Any]] = {}
        self.lock = threading.Lock()
        self.num_missing = size  # threads that have not come to the present meeting
        self.doors = [threading.Lock() for _ in range(size)]  # by rank: opened by the last one
        for door in self.doors:
            door.acquire()
        self.streams: list[Any] = [None] * size  # where each rank enqueues
        with cupy.cuda.Device(device):
            self.events = [cupy.cuda.Event(disable_timing=True) for _ in range(size)]

    def heap(self, rank: int) -> VirtualCudaHeap:
        """The heap of `rank`; makes a new stream the calling thread's current one."""
        return VirtualCudaHeap(self, rank)


class VirtualCudaHeap:
    """The symmetric heap of one virtual rank on a GPU (see `SymmetricHeap`)."""

    device = "cuda"

    def __init__(self, world: VirtualCudaWorld, rank: int) -> None:
        from mok_ref.gpu.errors import DeviceStatus

        cupy = import_cupy()
        if not 0 <= rank < world.size:
            raise ValueError(f"rank must be in 0..{world.size - 1}, got {rank=}")
        self.rank = rank
        self.size = world.size
        self._world = world
        self._names: list[str] = []
        cupy.cuda.Device(world.device_index).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.status = DeviceStatus(rank, world.timeout_s)

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        import cupy

        if name in self._names:
            raise ValueError(f"heap name must be new, got {name!r} twice")
        memory = cupy.zeros(shape, storage_dtype(dtype))
        cupy.cuda.get_current_stream().synchronize()
        with self._world.lock:
            slots = self._world.memory.setdefault(name, [None] * self.size)
            slots[self.rank] = memory
        self._names.append(name)
        self._meet()
        for peer, other in enumerate(slots):
            if other.shape != memory.shape or other.dtype != memory.dtype:
                raise ValueError(
                    f"heap allocation {name!r} must be the same on all ranks, got {memory.shape} "
                    f"{memory.dtype} on rank {self.rank} and {other.shape} {other.dtype} "
                    f"on rank {peer}"
                )
        return memory

    def peer(self, rank: int, name: str) -> Any:
        return self._world.memory[name][rank]

    def addresses(self, name: str) -> list[int]:
        return [int(memory.data.ptr) for memory in self._world.memory[name]]

    def free(self, name: str) -> None:
        import cupy

        cupy.cuda.get_current_stream().synchronize()
        self._meet()
        self._names.remove(name)
        with self._world.lock:
            self._world.memory.pop(name, None)
        self._meet()

    def barrier(self, phase: Any = 6) -> None:
        """Stream-ordered: later work of every rank's stream sees earlier writes of all ranks'
        streams.

        Raises: MokTimeoutError when another rank's thread failed or does not arrive in time;
        ValueError on the per-thread default stream, which no other thread can wait for.
        """
        self.status.check_timeout()
        if self.size == 1:
            return
        import cupy

        stream = cupy.cuda.get_current_stream()
        if stream.ptr == PER_THREAD_STREAM:
            self._world.arrival.abort()
            raise ValueError(
                "the current stream must be one that every thread can name, got the per-thread "
                f"default stream (cupy.cuda.Stream.ptds) on rank {self.rank}"
            )
        self._world.streams[self.rank] = stream
        self._meet(phase, self._join_streams)

    def warm_up(self) -> None:
        """Nothing: this barrier has no kernel."""

    def check(self, top_k: int | None = None) -> None:
        """Wait for the stream and raise what the device reported (DeviceStatus.check)."""
        self.status.check(top_k)

    def close(self) -> None:
        for name in list(self._names):
            self.free(name)

    def _join_streams(self) -> None:
        """What is enqueued from now on follows all that is enqueued on any rank's stream."""
        (first, *others), (joined, *events) = self._world.streams, self._world.events
        for stream, event in zip(others, events, strict=True):
            event.record(stream)
            first.wait_event(event)
        joined.record(first)
        for stream in others:
            stream.wait_event(joined)

    def _meet(self, phase: Any = 6, at_last: Callable[[], None] | None = None) -> None:
        """Meet the other ranks' host threads; the last one to come does `at_last()` first.

        Raises: MokTimeoutError.
        """
        from mok_ref.gpu.errors import PHASES

        world = self._world
        words = PHASES[phase] if isinstance(phase, int) else str(phase)
        epoch = world.progress[self.rank][0] + 1
        world.progress[self.rank] = (epoch, words)
        if world.arrival.broken:
            raise self._given_up(epoch, words)
        with world.lock:
            world.num_missing -= 1
            is_last = world.num_missing == 0
            if is_last:
                world.num_missing = self.size
        if not is_last:
            self._wait_at_door(epoch, words)
            return
        if at_last is not None:
            at_last()
        for peer, door in enumerate(world.doors):
            if peer != self.rank:
                door.release()

    def _wait_at_door(self, epoch: int, words: str) -> None:
        """Sleep until the last rank has come."""
        world = self._world
        limit = time.monotonic() + world.timeout_s
        while not world.doors[self.rank].acquire(timeout=LOOK_S):
            if world.arrival.broken or time.monotonic() > limit:
                world.arrival.abort()  # releases the other ranks too
                raise self._given_up(epoch, words)

    def _given_up(self, epoch: int, words: str) -> HeapError:
        from mok_ref.gpu.errors import MokTimeoutError

        world = self._world
        late = [(r, *seen) for r, seen in enumerate(world.progress) if seen[0] < epoch]
        cause = f"failed or did not arrive within {world.timeout_s:g} s"
        return MokTimeoutError(late_message(self.rank, words, epoch, late, cause))


def run_virtual_cuda_ranks(
    size: int, function: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """`run_ranks` on one GPU: `function(heap)` once per virtual rank, one thread and stream
    each."""
    from mok_ref.heap.local import run_on_world

    return run_on_world(VirtualCudaWorld(size, timeout_s), function)


__all__ = ["HeapError", "VirtualCudaHeap", "VirtualCudaWorld", "run_virtual_cuda_ranks"]
