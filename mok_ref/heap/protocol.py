"""What every symmetric heap offers.

A symmetric heap is memory that each rank allocates with the same name, shape and dtype, and that
every other rank can read and write directly. Data moves by one-sided pull and push; the only
synchronisation is `barrier`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

BARRIER_TIMEOUT_S = 120.0  # no wait is unbounded
CALLERS_BARRIER = "a barrier of the caller"


class HeapError(RuntimeError):
    """A peer is missing, memory cannot be shared, or a wait ran out of time."""


@runtime_checkable
class SymmetricHeap(Protocol):
    """`rank` of `size`, on `device` "cpu" or "cuda"."""

    rank: int
    size: int
    device: str

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate zeroed symmetric memory; collective, in the same order on every rank.

        Raises: ValueError if the name is taken or ranks disagree on shape or dtype.
        """

    def peer(self, rank: int, name: str) -> Any:
        """A view of `rank`'s memory of that name."""

    def free(self, name: str) -> None:
        """Give one allocation back; collective."""

    def barrier(self, phase: Any = ...) -> None:
        """All writes before it, on any rank, are visible to every rank after it.

        phase   what the rank is doing, for the error message: words on CPU heaps, a number of
                `mok_ref.gpu.errors.PHASES` on GPU heaps
        Raises: HeapError naming rank, phase and epoch when a rank does not arrive in time.
        """

    def close(self) -> None:
        """Give everything back; collective."""


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
