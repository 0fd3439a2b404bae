"""The ring token buffer: row r of the schedule lives in slot r mod macrobatch (spec eq. 4.8).

The NumPy walk uses it exactly as the kernel does, and it refuses what the kernel must never do:
writing into a slot whose tenant is not retired, reading a row that is not there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.config import ROW_TILE
from mok_ref.schedule import Minibatch

_FREE = -1


class TokenRing:
    """`capacity` rows of `width` columns, handed over in minibatches."""

    def __init__(self, capacity: int, width: int, dtype: Any) -> None:
        self.capacity = capacity
        self.rows = np.zeros((capacity, width), dtype)
        self._tenant = np.full(capacity // ROW_TILE, _FREE, np.int64)

    def _blocks(self, minibatch: Minibatch) -> np.ndarray:
        blocks = np.arange(minibatch.first // ROW_TILE, minibatch.end // ROW_TILE)
        return blocks % len(self._tenant)

    def claim(self, minibatch: Minibatch) -> np.ndarray:
        """The slots of a minibatch, for writing; their former tenants must be retired."""
        blocks = self._blocks(minibatch)
        taken = self._tenant[blocks]
        assert (taken == _FREE).all(), f"minibatch {minibatch.index} would overwrite {taken.max()}"
        self._tenant[blocks] = minibatch.index
        return self._slots(minibatch.rows)

    def read(self, minibatch: Minibatch, rows: slice) -> np.ndarray:
        """Rows of a minibatch that is in the ring (rows are schedule rows)."""
        block = np.arange(rows.start // ROW_TILE, -(-rows.stop // ROW_TILE)) % len(self._tenant)
        assert (self._tenant[block] == minibatch.index).all(), f"rows {rows} are not in the ring"
        return self._slots(rows)

    def retire(self, minibatch: Minibatch) -> None:
        """The minibatch is done: its slots may be written again. The data stays until then."""
        self._tenant[self._blocks(minibatch)] = _FREE

    def _slots(self, rows: slice) -> np.ndarray:
        first = rows.start % self.capacity
        return self.rows[first : first + (rows.stop - rows.start)]
