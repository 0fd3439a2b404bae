"""The ring token buffer: row r in slot r mod macrobatch, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from mok_ref.ring import TokenRing
from mok_ref.schedule import Minibatch, walk

MACRO, MINI = 512, 128


def batch(index: int) -> Minibatch:
    first = MINI * index
    return Minibatch(index, first // MACRO, first, first + MINI)


def test_row_lives_in_slot_row_mod_macrobatch() -> None:
    ring = TokenRing(MACRO, 3, np.float32)
    for index in (1, 6, 4):
        ring.claim(batch(index))[...] = index
    np.testing.assert_array_equal(ring.rows[128:256], np.full((128, 3), 1))
    np.testing.assert_array_equal(ring.rows[256:384], np.full((128, 3), 6))  # 6 mod 4
    np.testing.assert_array_equal(ring.rows[0:128], np.full((128, 3), 4))
    assert ring.read(batch(6), slice(800, 805)).shape == (5, 3)


def test_slot_of_a_live_minibatch_is_refused() -> None:
    ring = TokenRing(MACRO, 1, np.float32)
    ring.claim(batch(1))
    with pytest.raises(AssertionError, match="minibatch 5 would overwrite 1"):
        ring.claim(batch(5))
    ring.retire(batch(1))
    ring.claim(batch(5))


def test_row_that_is_not_there_is_refused() -> None:
    ring = TokenRing(MACRO, 1, np.float32)
    with pytest.raises(AssertionError, match="not in the ring"):
        ring.read(batch(0), slice(0, 5))
    ring.claim(batch(4))
    with pytest.raises(AssertionError, match="not in the ring"):
        ring.read(batch(0), slice(0, 5))


def test_data_stays_until_the_slot_is_claimed_again() -> None:
    """Backward begins with what forward left."""
    ring = TokenRing(MACRO, 1, np.float32)
    ring.claim(batch(2))[...] = 7
    ring.retire(batch(2))
    assert (ring.rows[256:384] == 7).all()


@pytest.mark.parametrize("rows", [128, 384, 512, 640, 1280])
def test_last_macrobatch_may_be_short(rows: int) -> None:
    """A whole backward walk: claimed, read, retired macrobatch by macrobatch."""
    ring = TokenRing(MACRO, 1, np.int64)
    batches = list(walk(rows, MACRO, MINI, "backward"))
    seen = []
    for position, one in enumerate(batches):
        ring.claim(one)[:, 0] = np.arange(one.first, one.end)
        if (
            position + 1 == len(batches)
            or batches[position + 1].macrobatch != batches[position].macrobatch
        ):
            for done in (b for b in batches if b.macrobatch == one.macrobatch):
                seen += ring.read(done, done.rows)[:, 0].tolist()
                ring.retire(done)
    assert seen == list(range(rows))
