"""What a training step exchanges between ranks, by one-sided writes, reads and barriers.

Every method writes this rank's part into its own symmetric buffer, waits, and reads its peers'.
Integers are added (their sum has no order), floats are only concatenated in rank order or carried
from rank to rank, so no result depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def split_sequences(num_sequences: int, num_ranks: int) -> np.ndarray:
    """Whole sequences per rank: B div R, one more for the first B mod R ranks. (R,) int64."""
    counts = np.full(num_ranks, num_sequences // num_ranks, np.int64)
    counts[: num_sequences % num_ranks] += 1
    return counts


class Exchange:
    """Named symmetric buffers, made on first use; all ranks must call in the same order."""

    def __init__(self, heap: Any) -> None:
        self.heap, self.rank, self.size = heap, heap.rank, heap.size
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        wanted = (shape, np.dtype(dtype))
        if self._shapes.get(name) != wanted:
            if name in self._shapes:
                self.heap.free(self._full(name))
            self.heap.alloc(self._full(name), shape, dtype)
            self._shapes[name] = wanted
        return self._peer(self.rank, name)

    @staticmethod
    def _full(name: str) -> str:
        return f"train/{name}"

    def _peer(self, rank: int, name: str) -> np.ndarray:
        return self.heap.peer(rank, self._full(name))

    def gather_rows(self, name: str, mine: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Rows of all ranks in rank order. mine (counts[rank], ...) -> (sum of counts, ...)."""
        buffer = self._buffer(name, (int(counts.max()), *mine.shape[1:]), mine.dtype)
        buffer[: len(mine)] = mine
        self.heap.barrier()
        rows = [self._peer(r, name)[: counts[r]] for r in range(self.size)]
        result = np.concatenate(rows)
        self.heap.barrier()  # nobody overwrites what a peer still reads
        return result

    def push_rows(self, name: str, whole: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The reverse: every rank adds boolean flags for all N rows; each owner gets its rows'.

        whole (N, ...) bool, different flags set on different ranks. Returns (counts[rank], ...):
        the flags of all ranks, or-ed.
        """
        shape = (self.size, int(counts.max()), *whole.shape[1:])
        self._buffer(name, shape, np.bool_)
        first = np.concatenate([[0], np.cumsum(counts)])
        for target in range(self.size):
            part = whole[first[target] : first[target + 1]]
            self._peer(target, name)[self.rank, : len(part)] = part
        self.heap.barrier()
        mine = np.logical_or.reduce(self._peer(self.rank, name)[:, : counts[self.rank]], axis=0)
        self.heap.barrier()
        return mine

    def sum_integers(self, name: str, mine: np.ndarray) -> np.ndarray:
        """Integer sum over ranks."""
        assert mine.dtype.kind in "iu", mine.dtype
        self._buffer(name, mine.shape, mine.dtype)[...] = mine
        self.heap.barrier()
        total = sum(self._peer(r, name) for r in range(self.size))
        self.heap.barrier()
        return np.asarray(total)

    def merge_owned(self, name: str, mine: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """Entry i from the rank that owns it. mine (E, ...), owner (E,) ranks. Returns (E, ...)."""
        self._buffer(name, mine.shape, mine.dtype)[...] = mine
        self.heap.barrier()
        merged = np.stack([self._peer(int(r), name)[i] for i, r in enumerate(owner)])
        self.heap.barrier()
        return merged

    def broadcast(self, name: str, mine: np.ndarray, owner: int) -> np.ndarray:
        """The owner's array, on every rank; `mine` gives shape and dtype elsewhere."""
        self._buffer(name, mine.shape, mine.dtype)[...] = mine
        self.heap.barrier()
        result = self._peer(owner, name).copy()
        self.heap.barrier()
        return result

    def chain(self, name: str, start: Tensors, link: Callable[[Tensors], Tensors]) -> Tensors:
        """Hand tensors from rank to rank: each rank continues what the rank below returned.

        start  what rank 0 begins with (shapes and dtypes for all ranks)
        link   carry -> carry, called once on this rank
        Returns the last rank's tensors, on every rank.
        """
        flat = {key: self._buffer(f"{name}/{key}", v.shape, v.dtype) for key, v in start.items()}
        for turn in range(self.size):
            if turn == self.rank:
                before = start
                if turn:
                    before = {k: self._peer(turn - 1, f"{name}/{k}").copy() for k in start}
                for key, value in link(before).items():
                    flat[key][...] = value
            self.heap.barrier()
        total = {k: self._peer(self.size - 1, f"{name}/{k}").copy() for k in start}
        self.heap.barrier()
        return total

    def gather_shards(self, name: str, mine: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Concatenate every rank's shard of a vector. bounds (R + 1,) offsets."""
        return self.gather_rows(name, mine, np.diff(bounds))

    def close(self) -> None:
        """Give the buffers back; collective."""
        for name in sorted(self._shapes):
            self.heap.free(self._full(name))
        self._shapes = {}
