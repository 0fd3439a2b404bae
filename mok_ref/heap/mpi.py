"""MPI ranks on one host: MPI-3 shared-memory windows, real one-sided pull and push.

No message passing in the data path: a rank reads and writes its peers' windows as plain memory.
Barriers are counters in such a window too, so that a rank knows whom it is waiting for, where that
one was seen last and whether its process still lives.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from mok_ref.heap.protocol import BARRIER_TIMEOUT_S, CALLERS_BARRIER, HeapError, late_message
from mok_ref.install import install_hint

_CONTROL = np.dtype([("epoch", np.int64), ("pid", np.int64), ("phase", "S96"), ("request", "S256")])
_LIVENESS_INTERVAL_S = 0.05


def import_mpi() -> Any:
    """mpi4py's MPI module, or an error that says how to get it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HeapError(
            f"mpi4py with an MPI library is missing: {install_hint('mpi')}"
        ) from error
    return MPI


class MpiSharedHeap:
    """The symmetric heap of one MPI process (see `SymmetricHeap`)."""

    device = "cpu"

    def __init__(self, comm: Any = None, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        self._mpi = import_mpi()
        world = self._mpi.COMM_WORLD if comm is None else comm
        self._timeout_s = timeout_s
        self._wait_for_start(world)
        self.comm = world.Split_type(self._mpi.COMM_TYPE_SHARED)
        if self.comm.size != world.size:
            raise HeapError(
                "MpiSharedHeap needs all ranks on one host, got "
                f"{self.comm.size} of {world.size} ranks on this one"
            )
        self.rank, self.size = self.comm.rank, self.comm.size
        self._windows: dict[str, tuple[Any, tuple[int, ...], np.dtype]] = {}
        self._control = self._new_window(_CONTROL.itemsize)
        self._blocks = [self._block(rank) for rank in range(self.size)]
        mine = self._blocks[self.rank]
        mine["pid"], mine["phase"] = os.getpid(), b"its start"
        self.barrier("the start")

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if name in self._windows:
            raise ValueError(f"heap name must be new, got {name!r} twice")
        dtype = np.dtype(dtype)
        self._require_equal(name, f"{tuple(shape)} {dtype.str}")
        window = self._new_window(max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize))
        self._windows[name] = (window, tuple(shape), dtype)
        memory = self.peer(self.rank, name)
        memory[...] = np.zeros((), dtype)
        self.barrier(f"allocating {name!r}")
        return memory

    def peer(self, rank: int, name: str) -> np.ndarray:
        window, shape, dtype = self._windows[name]
        buffer, _ = window.Shared_query(rank)
        return np.frombuffer(buffer, dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape)

    def free(self, name: str) -> None:
        self.barrier(f"freeing {name!r}")
        window, _, _ = self._windows.pop(name)
        window.Unlock_all()
        window.Free()

    def barrier(self, phase: str = CALLERS_BARRIER) -> None:
        """Flush own stores, wait for every rank with a time limit, see theirs."""
        mine = self._blocks[self.rank]
        epoch = int(mine["epoch"]) + 1
        mine["phase"] = phase.encode()[:96]
        self._sync()  # the data and the phase before the counter that announces them
        mine["epoch"] = epoch
        started = checked = time.monotonic()
        pause = 0.0
        while late := self._late(epoch):
            self.comm.Iprobe()  # lets MPI finish a collective that a late rank is still in
            now = time.monotonic()
            if now - checked > _LIVENESS_INTERVAL_S:
                checked = now
                self._give_up_on_the_dead(late, phase, epoch)
            if now - started > self._timeout_s:
                cause = f"did not arrive within {self._timeout_s:g} s"
                raise HeapError(late_message(self.rank, phase, epoch, self._seen(late), cause))
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)
        self._sync()

    def close(self) -> None:
        for name in sorted(self._windows):
            self.free(name)
        self.barrier("closing the heap")
        self._control.Unlock_all()
        self._control.Free()
        self.comm.Free()

    def _wait_for_start(self, world: Any) -> None:
        """Meet all ranks, with a time limit, before the first call that has none."""
        request = world.Ibarrier()
        limit = time.monotonic() + self._timeout_s
        while not request.Test():
            if time.monotonic() > limit:
                raise HeapError(
                    f"rank {world.rank} waited in the start, epoch 0: another of the {world.size} "
                    f"ranks did not arrive within {self._timeout_s:g} s"
                )
            time.sleep(1e-3)

    def _new_window(self, num_bytes: int) -> Any:
        """Shared memory of `num_bytes` per rank. Every rank must have been seen to come here."""
        window = self._mpi.Win.Allocate_shared(num_bytes, 1, comm=self.comm)
        window.Lock_all()  # one epoch for the window's whole life; Sync needs it open
        return window

    def _block(self, rank: int) -> np.ndarray:
        """The control block of a rank, a view of one record."""
        buffer, _ = self._control.Shared_query(rank)
        return np.frombuffer(buffer, _CONTROL, 1).reshape(())

    def _sync(self) -> None:
        """Memory fence on every window."""
        for window in (self._control, *(window for window, _, _ in self._windows.values())):
            window.Sync()

    def _late(self, epoch: int) -> list[int]:
        """Ranks that have not entered barrier number `epoch`."""
        self._control.Sync()
        return [rank for rank, block in enumerate(self._blocks) if block["epoch"] < epoch]

    def _seen(self, ranks: list[int]) -> list[tuple[int, int, str]]:
        blocks = [(rank, self._blocks[rank]) for rank in ranks]
        return [(r, int(b["epoch"]), bytes(b["phase"].item()).decode()) for r, b in blocks]

    def _give_up_on_the_dead(self, late: list[int], phase: str, epoch: int) -> None:
        pids = {rank: int(self._blocks[rank]["pid"]) for rank in late}
        dead = [rank for rank, pid in pids.items() if pid and _is_gone(pid)]
        if dead:
            cause = f"process {pids[dead[0]]} is gone"
            raise HeapError(late_message(self.rank, phase, epoch, self._seen(dead), cause))

    def _require_equal(self, name: str, request: str) -> None:
        """Refuse an allocation on which the ranks disagree; afterwards all ranks are here."""
        self._blocks[self.rank]["request"] = f"{name!r} {request}".encode()[:256]
        self.barrier(f"allocating {name!r}")
        wanted = [bytes(block["request"].item()).decode() for block in self._blocks]
        for peer, other in enumerate(wanted):
            if other != wanted[self.rank]:
                raise ValueError(
                    "heap allocations must be the same on all ranks, got "
                    f"{wanted[self.rank]} on rank {self.rank} and {other} on rank {peer}"
                )


def _is_gone(pid: int) -> bool:
    """Whether a process of this host has ended (a zombie has, too)."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except ProcessLookupError:
        return True
    except OSError:  # no permission, or no /proc: let the time limit decide
        return False
