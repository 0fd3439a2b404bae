"""Bytes of a text as training and validation batches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mok_ref.training.arithmetic import random_indices

HELD_OUT = 10  # one tenth, from the end, is for validation


@dataclass(frozen=True)
class ByteText:
    """A text cut into a training part and a held-out part. Both uint8."""

    train: np.ndarray
    valid: np.ndarray
    source: str
    sha256: str


def load_text(path: str | Path | None = None) -> ByteText:
    """The user's file, or by default Python's own help texts (pydoc_data.topics, about 700 KB).

    Raises: ValueError for a file that is too short to be cut into sequences.
    """
    if path is None:
        from pydoc_data.topics import topics

        raw = "\n".join(topics[key] for key in sorted(topics)).encode()
        source = "pydoc_data.topics"
    else:
        raw, source = Path(path).read_bytes(), Path(path).name
    if len(raw) < 4096:
        raise ValueError(f"text must have at least 4096 bytes, got {len(raw)} in {source}")
    data = np.frombuffer(raw, np.uint8)
    cut = len(data) - len(data) // HELD_OUT
    return ByteText(data[:cut], data[cut:], source, hashlib.sha256(raw).hexdigest())


def train_batch(text: ByteText, key: str, batch: int, sequence: int) -> np.ndarray:
    """`batch` windows of sequence + 1 bytes at places fixed by `key`. (B, S + 1) int64."""
    starts = random_indices(key, batch, len(text.train) - sequence)
    return text.train[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)


def valid_batches(text: ByteText, batch: int, sequence: int, count: int) -> list[np.ndarray]:
    """The same `count` batches every time, evenly spaced over the held-out part."""
    total = batch * count
    last = len(text.valid) - sequence - 1
    if last < 1:
        raise ValueError(f"held-out text must exceed one sequence, got {len(text.valid)} bytes")
    starts = np.arange(total) * last // max(1, total - 1)
    windows = text.valid[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)
    return [windows[i * batch : (i + 1) * batch] for i in range(count)]
