"""What every symmetric heap offers.

A symmetric heap is memory that each rank allocates with the same name, shape and dtype, and that
every other rank can read and write directly. Data moves by one-sided pull and push; the only
synchronisation is `barrier`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mok_ref.config import is_int, is_real, shown

BARRIER_TIMEOUT_S = 120.0  # no wait is unbounded
MAX_TIMEOUT_S = 1e6  # eleven days; threads and device clocks count seconds up to here
MAX_NAME_BYTES = 128
CALLERS_BARRIER = "a barrier of the caller"


class HeapError(RuntimeError):
    """A peer is missing, memory cannot be shared, or a wait ran out of time."""


class RankMismatch(HeapError, ValueError):
    """Ranks met in one barrier and came from different calls. Every rank raises it."""


@runtime_checkable
class SymmetricHeap(Protocol):
    """`rank` of `size`, on `device` "cpu" or "cuda"."""

    rank: int
    size: int
    device: str

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate zeroed symmetric memory; collective, in the same order on every rank.

        Raises: ValueError if the name is taken or ranks disagree on name, shape or dtype.
        """

    def peer(self, rank: int, name: str) -> Any:
        """A view of `rank`'s memory of that name."""

    def free(self, name: str) -> None:
        """Give one allocation back; collective."""

    def barrier(self, phase: Any = ...) -> None:
        """All writes before it, on any rank, are visible to every rank after it.

        phase   what the rank is doing: words on CPU heaps, a number of `mok_ref.gpu.errors.PHASES`
                on GPU heaps. It is in error messages; on CPU heaps it must be the same on every
                rank, so that ranks that went apart learn it at once.
        Raises: HeapError naming rank, phase and epoch when a rank does not arrive in time;
                RankMismatch, on every rank of a CPU heap, when phases differ.
        """

    def close(self) -> None:
        """Give everything back; collective."""


def is_closed(heap: Any) -> bool:
    """Whether a heap was closed; one that does not say counts as open."""
    return bool(getattr(heap, "closed", False))


def check_timeout(timeout_s: Any) -> float:
    """The limit of a heap's waits. Raises: ValueError, also for NaN and infinity."""
    if not (is_real(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise ValueError(
            f"timeout_s must be a number of seconds > 0 and <= {MAX_TIMEOUT_S:g}, "
            f"got {shown(timeout_s)}"
        )
    return float(timeout_s)


def check_size(size: Any) -> int:
    """A number of ranks. Raises: ValueError."""
    if not (is_int(size) and size >= 1):
        raise ValueError(f"ranks must be >= 1, got {shown(size)}")
    return int(size)


def check_rank(rank: Any, size: int) -> None:
    """A rank of `size`. Raises: ValueError; nothing counts from the end."""
    if not (is_int(rank) and 0 <= rank < size):
        raise ValueError(f"rank must be in 0..{size - 1}, got {shown(rank)}")


def check_new_name(name: Any, taken: Container[str]) -> None:
    """A name that a new allocation may have. Raises: ValueError."""
    if not isinstance(name, str) or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise ValueError(
            f"heap name must be text of at most {MAX_NAME_BYTES} bytes, got {shown(name)}"
        )
    if name in taken:
        raise ValueError(f"heap name must be new, got {name!r} twice")


def check_known_name(name: Any, taken: Container[str]) -> None:
    """The name of an allocation. Raises: ValueError."""
    if name not in taken:
        raise ValueError(f"heap name must be one that was allocated, got {shown(name)}")


def allocation_phase(name: str, shape: tuple[int, ...], dtype: np.dtype) -> str:
    """The phase of an allocation's barrier: ranks that ask for different memory differ in it."""
    return f"allocating {name!r} {shape} {dtype}"


def mismatch(rank: int, phase: str, peer: int, theirs: str) -> RankMismatch:
    """The error of ranks that met in one barrier and came from different calls."""
    return RankMismatch(
        "calls must be the same on all ranks, got "
        f"{phase} on rank {rank} and {theirs} on rank {peer}"
    )


def late_message(
    rank: int, phase: str, epoch: int, late: list[tuple[int, int, str]], cause: str
) -> str:
    """One line: who waited where, for whom, and where those were seen last.

    late   (rank, last epoch, last phase) of every rank that has not arrived
    epoch  how many barriers of the heap `rank` has entered, this one included
    """
    where = f"rank {rank} waited in {phase}, epoch {epoch}"
    if not late:
        return f"{where}, but another rank gave up: {cause}"
    peers = ", ".join(f"rank {r} (last seen in {p}, epoch {e})" for r, e, p in late)
    return f"{where}, for {peers}: {cause}"
