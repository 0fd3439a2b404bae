"""Clock stamps of the megakernels' tasks: who did what, from when to when.

    with recording() as recorder:
        moe_forward(...)                 # kernels compiled with MOK_TRACE=1; the same bits
        heap.check()
    stamps = recorder.read()             # mok_ref.planner.trace: spans_from_stamps, write_trace

CUDA twin: cuda_src/trace.cuh. Recording costs a few per cent of time and, per rank, about a hundred
megabytes of device memory; kernels of the portable path record nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mok_ref.config import is_int, shown
from mok_ref.gpu.compiler import record_tasks
from mok_ref.planner.trace import STAMP

SYMBOL = "mok_trace"
TRACE_BUFFER = np.dtype(
    [
        ("records", np.uint64),
        ("counts", np.uint64),
        ("capacity", np.uint32),
        ("num_ctas", np.uint32),
        ("first_rank", np.uint32),
        ("num_ranks", np.uint32),
    ]
)
"""Struct TraceBuffer."""

WARPS = 16  # kTraceWarps
CAPACITY = 2048  # tasks of one warp
MAX_RANKS = 1 << 16  # STAMP has 16 bits for a rank
MAX_CAPACITY = (1 << 31) - 1
RECORD_WORDS = STAMP.itemsize // 8


class Buffers(NamedTuple):
    """Device memory that the kernels of one module write."""

    module: Any
    records: Any  # (regions, capacity, RECORD_WORDS) uint64
    counts: Any  # (regions,) uint32: tasks seen, with or without room


class Recorder:
    """Records of the ranks first_rank .. first_rank + num_ranks - 1, all on this process's device.

    A module's buffers are made when its first kernel is loaded, on the device that is then current.
    """

    def __init__(self, first_rank: int, num_ranks: int, capacity: int) -> None:
        for name, value, low, high in (
            ("first_rank", first_rank, 0, MAX_RANKS - 1),
            ("num_ranks", num_ranks, 1, MAX_RANKS),
            ("capacity", capacity, 1, MAX_CAPACITY),
        ):
            if not (is_int(value) and low <= value <= high):
                raise ValueError(f"{name} must be an integer in {low}..{high}, got {shown(value)}")
        self.first_rank, self.num_ranks, self.capacity = first_rank, num_ranks, capacity
        self._attached: dict[int, Buffers] = {}
        self._lock = threading.Lock()

    def attach(self, module: Any) -> None:
        """Give the kernels of a module room for their records, at the first call."""
        with self._lock:
            if id(module) not in self._attached:
                self._attached[id(module)] = self._make_buffers(module)

    def _make_buffers(self, module: Any) -> Buffers:
        import cupy

        ctas = int(cupy.cuda.runtime.deviceGetAttribute(16, cupy.cuda.runtime.getDevice()))
        regions = self.num_ranks * ctas * WARPS
        records = cupy.empty((regions, self.capacity, RECORD_WORDS), np.uint64)
        counts = cupy.zeros((regions,), np.uint32)
        block = np.zeros(1, TRACE_BUFFER)
        block["records"], block["counts"] = records.data.ptr, counts.data.ptr
        block["capacity"], block["num_ctas"] = self.capacity, ctas
        block["first_rank"], block["num_ranks"] = self.first_rank, self.num_ranks
        cupy.cuda.runtime.deviceSynchronize()  # counts are zero before any stream's kernel
        _set_symbol(module, block)
        return Buffers(module, records, counts)

    def clear(self) -> None:
        """Forget what was recorded; the device must have ended what it was given."""
        for buffers in self._attached.values():
            buffers.counts[...] = 0

    def read(self) -> np.ndarray:
        """Records (n,) of dtype STAMP, by start; the device must have ended what it was given."""
        parts = [_records_of(buffers, self.capacity) for buffers in self._attached.values()]
        stamps = np.concatenate([np.zeros(0, STAMP), *parts])
        return stamps[np.argsort(stamps["start"], kind="stable")]

    def num_lost(self) -> int:
        """Tasks that found no room."""
        seen = [buffers.counts.get().astype(np.int64) for buffers in self._attached.values()]
        return int(sum(np.maximum(counts - self.capacity, 0).sum() for counts in seen))

    def detach(self) -> None:
        """The kernels record no more: their buffers may be freed."""
        if self._attached:
            import cupy

            cupy.cuda.runtime.deviceSynchronize()
        for buffers in self._attached.values():
            _set_symbol(buffers.module, np.zeros(1, TRACE_BUFFER))


def _set_symbol(module: Any, block: np.ndarray) -> None:
    module.get_global(SYMBOL).copy_from_host(block.ctypes.data, block.nbytes)


def _records_of(buffers: Buffers, capacity: int) -> np.ndarray:
    counts = np.minimum(buffers.counts.get(), capacity)
    most = int(counts.max(initial=0))
    words = np.ascontiguousarray(buffers.records[:, :most].get())
    stamps = words.view(STAMP)[..., 0] if most else np.zeros((len(counts), 0), STAMP)
    return stamps[np.arange(most) < counts[:, None]]


@contextmanager
def recording(
    first_rank: int = 0, num_ranks: int = 1, capacity: int = CAPACITY
) -> Iterator[Recorder]:
    """Within it every megakernel of this process records its tasks.

    first_rank, num_ranks   ranks of this process: all virtual ones, or its own under mpiexec
    capacity                tasks of one warp; more are counted and not kept
    Raises: ValueError for other numbers; RuntimeError within another recording.
    """
    recorder = Recorder(first_rank, num_ranks, capacity)
    record_tasks(recorder)
    try:
        yield recorder
    finally:
        record_tasks(None)
        recorder.detach()
