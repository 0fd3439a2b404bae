"""Where allocations lie inside few large pieces of shared memory.

An MPI library has a bounded number of windows, and a layer has many buffers. So buffers are parts
of slabs. The same calls in the same order give the same places: every rank keeps such books for
itself, and they agree without a message.
"""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT = 64  # a cache line: no two buffers share one
SLAB_BYTES = 16 << 20


class Place(NamedTuple):
    """`num_bytes` from `offset` on in the slab with this number."""

    slab: int
    offset: int
    num_bytes: int


class SlabBook:
    """Which parts of which slabs are free; first fit, neighbours joined."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  # by slab number
        self._free: dict[int, list[tuple[int, int]]] = {}  # (offset, num_bytes), ascending
        self._next = 0

    def new_slab_bytes(self, num_bytes: int) -> int:
        """Size of a slab that a request which nothing holds is made for."""
        return max(SLAB_BYTES, _rounded(num_bytes))

    def add(self, num_bytes: int) -> int:
        """A new, empty slab; its number."""
        number, self._next = self._next, self._next + 1
        self.sizes[number], self._free[number] = num_bytes, [(0, num_bytes)]
        return number

    def take(self, num_bytes: int) -> Place | None:
        """The first part that is long enough, or None: a slab must be added."""
        wanted = _rounded(num_bytes)
        for slab, parts in self._free.items():
            for i, (offset, length) in enumerate(parts):
                if length >= wanted:
                    parts[i : i + 1] = [(offset + wanted, length - wanted)][: length > wanted]
                    return Place(slab, offset, wanted)
        return None

    def give(self, place: Place) -> int | None:
        """Take a part back. Returns the number of a slab that is not needed any more, if any.

        One empty slab of the usual size is kept for the next request.
        """
        parts = self._free[place.slab]
        parts.append((place.offset, place.num_bytes))
        parts.sort()
        joined = parts[:1]
        for offset, length in parts[1:]:
            first, before = joined[-1]
            if first + before == offset:
                joined[-1] = (first, before + length)
            else:
                joined.append((offset, length))
        self._free[place.slab] = joined
        if not self._is_empty(place.slab):
            return None
        others = any(self._is_empty(slab) for slab in self.sizes if slab != place.slab)
        if not others and self.sizes[place.slab] == SLAB_BYTES:
            return None
        del self.sizes[place.slab], self._free[place.slab]
        return place.slab

    def _is_empty(self, slab: int) -> bool:
        return self._free[slab] == [(0, self.sizes[slab])]


def _rounded(num_bytes: int) -> int:
    return max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT
