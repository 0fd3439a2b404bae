"""What every symmetric heap offers.

A symmetric heap is memory that each rank allocates with the same name, shape and dtype, and that
every other rank can read and write directly. Data moves by one-sided pull and push; the only
synchronisation is `barrier`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

BARRIER_TIMEOUT_S = 120.0  # no wait is unbounded


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

    def barrier(self) -> None:
        """All writes before it, on any rank, are visible to every rank after it.

        Raises: HeapError when a rank does not arrive in time.
        """

    def close(self) -> None:
        """Give everything back; collective."""
