"""MPI ranks on one host: MPI-3 shared-memory windows, real one-sided pull and push.

No message passing in the data path: a rank reads and writes its peers' windows as plain memory.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mok_ref.heap.protocol import BARRIER_TIMEOUT_S, HeapError


def import_mpi() -> Any:
    """mpi4py's MPI module, or an error that says how to get it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HeapError(
            'mpi4py with an MPI library is missing: pip install "mok_ref[mpi]"'
        ) from error
    return MPI


class MpiSharedHeap:
    """The symmetric heap of one MPI process (see `SymmetricHeap`)."""

    device = "cpu"

    def __init__(self, comm: Any = None, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        self._mpi = import_mpi()
        world = self._mpi.COMM_WORLD if comm is None else comm
        self.comm = world.Split_type(self._mpi.COMM_TYPE_SHARED)
        if self.comm.size != world.size:
            raise HeapError(
                "MpiSharedHeap needs all ranks on one host, got "
                f"{self.comm.size} of {world.size} ranks on this one"
            )
        self.rank, self.size = self.comm.rank, self.comm.size
        self._timeout_s = timeout_s
        self._windows: dict[str, tuple[Any, tuple[int, ...], np.dtype]] = {}

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if name in self._windows:
            raise ValueError(f"heap name must be new, got {name!r} twice")
        dtype = np.dtype(dtype)
        wanted = self.comm.allgather((name, tuple(shape), dtype.str))
        for peer, other in enumerate(wanted):
            if other != wanted[self.rank]:
                raise ValueError(
                    f"heap allocation {name!r} must be the same on all ranks, got "
                    f"{wanted[self.rank]} on rank {self.rank} and {other} on rank {peer}"
                )
        num_bytes = max(1, int(np.prod(shape)) * dtype.itemsize)
        window = self._mpi.Win.Allocate_shared(num_bytes, 1, comm=self.comm)
        window.Lock_all()  # one epoch for the window's whole life; Sync needs it open
        self._windows[name] = (window, tuple(shape), dtype)
        memory = self.peer(self.rank, name)
        memory[...] = np.zeros((), dtype)
        self.barrier()
        return memory

    def peer(self, rank: int, name: str) -> np.ndarray:
        window, shape, dtype = self._windows[name]
        buffer, _ = window.Shared_query(rank)
        count = int(np.prod(shape))
        return np.frombuffer(buffer, dtype, count).reshape(shape)

    def free(self, name: str) -> None:
        self.barrier()
        window, _, _ = self._windows.pop(name)
        window.Unlock_all()
        window.Free()

    def barrier(self) -> None:
        """Flush own stores, wait for every rank with a time limit, see theirs."""
        for window, _, _ in self._windows.values():
            window.Sync()
        request = self.comm.Ibarrier()
        limit = time.monotonic() + self._timeout_s
        pause = 0.0
        while not request.Test():
            if time.monotonic() > limit:
                raise HeapError(
                    f"rank {self.rank}: barrier: another rank did not arrive within "
                    f"{self._timeout_s:g} s"
                )
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)
        for window, _, _ in self._windows.values():
            window.Sync()

    def close(self) -> None:
        for name in sorted(self._windows):
            self.free(name)
        self.comm.Free()
