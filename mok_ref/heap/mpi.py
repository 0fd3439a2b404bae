"""MPI ranks on one host: MPI-3 shared-memory windows, real one-sided pull and push.

No message passing in the data path: a rank reads and writes its peers' windows as plain memory.
Barriers are counters in such a window too, so that a rank knows whom it is waiting for, where that
one was seen last and whether its process still lives. Buffers lie in few large windows
(`mok_ref.heap.slabs`), because an MPI library has a bounded number of them.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from typing import Any

import numpy as np

from mok_ref.heap.protocol import (
    BARRIER_TIMEOUT_S,
    CALLERS_BARRIER,
    HeapError,
    allocation_phase,
    check_known_name,
    check_new_name,
    check_rank,
    check_timeout,
    late_message,
    mismatch,
)
from mok_ref.heap.slabs import Place, SlabBook
from mok_ref.install import install_hint

_PHASE_BYTES = 240
# Phases of even and odd epochs, each with a digest of its whole text: a rank may enter the next
# barrier while others still look at this one.
_CONTROL = np.dtype(
    [
        ("epoch", np.int64),
        ("pid", np.int64),
        ("digest", np.uint64, (2,)),
        ("phase", f"S{_PHASE_BYTES}", (2,)),
    ]
)
_LIVENESS_INTERVAL_S = 0.05
MAX_WINDOWS = 1024  # MPICH ends a process that asks for more than about 2048


def import_mpi() -> Any:
    """mpi4py's MPI module, or an error that says how to get it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HeapError(f"mpi4py with an MPI library is missing: {install_hint('mpi')}") from error
    return MPI


class MpiSharedHeap:
    """The symmetric heap of one MPI process (see `SymmetricHeap`)."""

    device = "cpu"

    def __init__(self, comm: Any = None, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        self._timeout_s = check_timeout(timeout_s)
        self._mpi = import_mpi()
        world = self._mpi.COMM_WORLD if comm is None else comm
        self._wait_for_start(world)
        self.comm = world.Split_type(self._mpi.COMM_TYPE_SHARED)
        if self.comm.size != world.size:
            raise HeapError(
                "MpiSharedHeap needs all ranks on one host, got "
                f"{self.comm.size} of {world.size} ranks on this one"
            )
        self.rank, self.size = self.comm.rank, self.comm.size
        self.closed = False
        self._book = SlabBook()
        self._slabs: dict[int, tuple[Any, list[np.ndarray]]] = {}  # window, bytes of every rank
        self._buffers: dict[str, tuple[Place, tuple[int, ...], np.dtype]] = {}
        self._control = self._new_window(_CONTROL.itemsize)
        self._blocks = [self._block(rank) for rank in range(self.size)]
        self._digests = [block["digest"] for block in self._blocks]
        mine = self._blocks[self.rank]
        mine["pid"], mine["phase"] = os.getpid(), b"its start"
        self.barrier("the start")

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self._require_open()
        check_new_name(name, self._buffers)
        dtype = np.dtype(dtype)
        shape = tuple(int(n) for n in np.atleast_1d(np.asarray(shape, np.int64)))
        self.barrier(allocation_phase(name, shape, dtype))
        self._buffers[name] = (self._place(name, math.prod(shape) * dtype.itemsize), shape, dtype)
        memory = self.peer(self.rank, name)
        memory[...] = np.zeros((), dtype)
        self.barrier(f"clearing {name!r}")  # nobody writes before the zeros
        return memory

    def peer(self, rank: int, name: str) -> np.ndarray:
        check_rank(rank, self.size)
        self._require_open()
        check_known_name(name, self._buffers)
        place, shape, dtype = self._buffers[name]
        end = place.offset + math.prod(shape) * dtype.itemsize
        return self._slabs[place.slab][1][rank][place.offset : end].view(dtype).reshape(shape)

    def free(self, name: str) -> None:
        self._require_open()
        check_known_name(name, self._buffers)
        self.barrier(f"freeing {name!r}")
        unused = self._book.give(self._buffers.pop(name)[0])
        if unused is not None:
            self._free_slab(unused)

    def barrier(self, phase: str = CALLERS_BARRIER) -> None:
        """Flush own stores, wait for every rank with a time limit, see theirs."""
        self._require_open()
        mine = self._blocks[self.rank]
        epoch = int(mine["epoch"]) + 1
        digest = self._announce(phase, epoch % 2)
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
        for peer, digests in enumerate(self._digests):
            if digests[epoch % 2] != digest:
                theirs = self._phase_of(peer, epoch)
                raise mismatch(self.rank, phase, peer, theirs)

    def close(self) -> None:
        if self.closed:
            return
        self.barrier("closing the heap")
        self.closed = True
        self._buffers.clear()
        for slab in list(self._slabs):
            self._free_slab(slab)
        self._control.Unlock_all()
        self._control.Free()
        self.comm.Free()

    def _place(self, name: str, num_bytes: int) -> Place:
        """A part of a slab, of a new one if need be; all ranks come here together."""
        place = self._book.take(num_bytes)
        if place is not None:
            return place
        if len(self._slabs) >= MAX_WINDOWS:
            raise HeapError(
                f"heap must have at most {MAX_WINDOWS} windows, got one more for {name!r}: "
                "close workspaces that are no longer used"
            )
        slab_bytes = self._book.new_slab_bytes(num_bytes)
        window = self._new_window(slab_bytes)
        parts = [window.Shared_query(rank)[0] for rank in range(self.size)]
        self._slabs[self._book.add(slab_bytes)] = (
            window,
            [np.frombuffer(part, np.uint8) for part in parts],
        )
        place = self._book.take(num_bytes)
        assert place is not None, "a new slab holds what it was made for"
        return place

    def _free_slab(self, slab: int) -> None:
        window, _ = self._slabs.pop(slab)
        window.Unlock_all()
        window.Free()

    def _announce(self, phase: str, parity: int) -> np.uint64:
        """Write down what this rank is doing; returns the digest of the text."""
        text = phase.encode(errors="replace")
        digest = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), np.uint64)[0]
        mine = self._blocks[self.rank]
        mine["phase"][parity] = text[:_PHASE_BYTES]
        mine["digest"][parity] = digest
        return digest

    def _phase_of(self, rank: int, epoch: int) -> str:
        """What a rank was doing in an epoch, one of the last two that it entered."""
        return bytes(self._blocks[rank]["phase"][epoch % 2]).decode(errors="ignore")

    def _require_open(self) -> None:
        if self.closed:
            raise HeapError(f"the heap of rank {self.rank} is closed")

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
        for window in (self._control, *(window for window, _ in self._slabs.values())):
            window.Sync()

    def _late(self, epoch: int) -> list[int]:
        """Ranks that have not entered barrier number `epoch`."""
        self._control.Sync()
        return [rank for rank, block in enumerate(self._blocks) if block["epoch"] < epoch]

    def _seen(self, ranks: list[int]) -> list[tuple[int, int, str]]:
        epochs = [int(self._blocks[rank]["epoch"]) for rank in ranks]
        return [
            (rank, epoch, self._phase_of(rank, epoch))
            for rank, epoch in zip(ranks, epochs, strict=True)
        ]

    def _give_up_on_the_dead(self, late: list[int], phase: str, epoch: int) -> None:
        pids = {rank: int(self._blocks[rank]["pid"]) for rank in late}
        dead = [rank for rank, pid in pids.items() if pid and _is_gone(pid)]
        if dead:
            cause = f"process {pids[dead[0]]} is gone"
            raise HeapError(late_message(self.rank, phase, epoch, self._seen(dead), cause))


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
