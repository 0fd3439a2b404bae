"""Virtual ranks on one GPU: one thread and one stream per rank in one process.

Ranks are joined by events, never by a kernel that spins: a rank's stream waits for the events that
all ranks recorded, and the host threads meet so that every event is recorded before anybody waits
for it. So any number of ranks shares a device that runs their kernels in any order.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from mok_ref.heap.cuda_device import DEFAULT_TIMEOUT_S, import_cupy, storage_dtype
from mok_ref.heap.protocol import HeapError, check_timeout, late_message

BUSY_LOOKS, PAUSE_S = 500, 1e-4
"""How often a thread looks for the others before it pauses between looks, and how long then."""


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
        with cupy.cuda.Device(device):
            # Two sets: a rank may record for barrier n+1 while another has still to wait for
            # barrier n.
            self.events = [
                [cupy.cuda.Event(disable_timing=True) for _ in range(size)] for _ in range(2)
            ]

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
        self._barriers_passed = 0
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

        Raises: MokTimeoutError when another rank's thread failed or does not arrive in time.
        """
        import cupy

        self.status.check_timeout()
        if self.size == 1:
            return
        events = self._world.events[self._barriers_passed % 2]
        self._barriers_passed += 1
        stream = cupy.cuda.get_current_stream()
        events[self.rank].record(stream)
        self._meet(phase)
        for peer, event in enumerate(events):
            if peer != self.rank:
                stream.wait_event(event)

    def warm_up(self) -> None:
        """Nothing: this barrier has no kernel."""

    def check(self, top_k: int | None = None) -> None:
        """Wait for the stream and raise what the device reported (DeviceStatus.check)."""
        self.status.check(top_k)

    def close(self) -> None:
        for name in list(self._names):
            self.free(name)

    def _meet(self, phase: Any = 6) -> None:
        """Meet the other ranks' host threads: look until all of them have come as far.

        They come within microseconds of each other in a step; waking sleeping threads would take
        longer than the step's kernels do.
        """
        from mok_ref.gpu.errors import PHASES, MokTimeoutError

        world = self._world
        words = PHASES[phase] if isinstance(phase, int) else str(phase)
        epoch = world.progress[self.rank][0] + 1
        world.progress[self.rank] = (epoch, words)
        limit, looks = time.monotonic() + world.timeout_s, 0
        while any(seen[0] < epoch for seen in world.progress):
            if world.arrival.broken or time.monotonic() > limit:
                world.arrival.abort()  # releases the other ranks too
                late = [(r, *seen) for r, seen in enumerate(world.progress) if seen[0] < epoch]
                cause = f"failed or did not arrive within {world.timeout_s:g} s"
                raise MokTimeoutError(late_message(self.rank, words, epoch, late, cause))
            time.sleep(0 if looks < BUSY_LOOKS else PAUSE_S)
            looks += 1


def run_virtual_cuda_ranks(
    size: int, function: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """`run_ranks` on one GPU: `function(heap)` once per virtual rank, one thread and stream
    each."""
    from mok_ref.heap.local import run_on_world

    return run_on_world(VirtualCudaWorld(size, timeout_s), function)


__all__ = ["HeapError", "VirtualCudaHeap", "VirtualCudaWorld", "run_virtual_cuda_ranks"]
