"""Inputs, digests and bitwise comparison, for this project's tests and for anybody else's layer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from mok_ref.numerics import BFLOAT16, bf16_to_bits, canonical_nan, to_bf16


def random_bf16(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    """Normal values times `scale`, rounded to bf16, as ml_dtypes.bfloat16."""
    values = to_bf16((rng.standard_normal(shape) * scale).astype(np.float32))
    return bf16_to_bits(values).view(BFLOAT16)


def random_routes(
    rng: np.random.Generator, num_tokens: int, num_experts: int, top_k: int, missing: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights): distinct experts per token where E >= K, a share of slots without a route."""
    if num_experts >= top_k:
        noise = rng.random((num_tokens, num_experts))
        ids = np.argsort(noise, axis=1)[:, :top_k].astype(np.int32)
    else:
        ids = rng.integers(0, num_experts, (num_tokens, top_k), dtype=np.int32)
    ids[rng.random(ids.shape) < missing] = -1
    weights = rng.standard_normal((num_tokens, top_k)).astype(np.float32)
    return ids, weights


def tensor_digest(name: str, array: Any) -> str:
    """SHA-256 of one named tensor: a JSON line, then its canonical little-endian bytes."""
    return hashlib.sha256(_digest_bytes(name, array)).hexdigest()


def digest(tensors: dict[str, Any]) -> str:
    """One SHA-256 over named tensors in ASCII order of their names (spec eq. 9.1).

    bf16 tensors count as their uint16 bits; every NaN is written as 0x7FC0 / 0x7FC00000.
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(_digest_bytes(name, tensors[name]))
    return total.hexdigest()


def _digest_bytes(name: str, array: Any) -> bytes:
    host = array.get() if hasattr(array, "get") else np.asarray(array)
    bits = host.view(np.uint16) if host.dtype == BFLOAT16 else host
    bits = canonical_nan(np.ascontiguousarray(bits))
    line = json.dumps({"dtype": bits.dtype.name, "name": name, "shape": list(bits.shape)})
    return line.encode() + b"\n" + bits.astype(bits.dtype.newbyteorder("<")).tobytes()


def assert_bitwise_equal(actual: Any, expected: Any, name: str = "array") -> None:
    """Raise AssertionError naming the first coordinate where bits differ; NaNs are all alike."""
    a, b = np.asarray(actual), np.asarray(expected)
    assert a.shape == b.shape, f"{name}: shape {a.shape} != {b.shape}"
    assert a.dtype == b.dtype, f"{name}: dtype {a.dtype} != {b.dtype}"
    bits_a, bits_b = (_as_bits(canonical_nan(v)) for v in (a, b))
    bad = bits_a != bits_b
    if not bad.any():
        return
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    raise AssertionError(
        f"{name}: {int(bad.sum())} of {bad.size} differ, first at {where}: "
        f"{a[where]} ({int(bits_a[where]):#x}) != {b[where]} ({int(bits_b[where]):#x})"
    )


def _as_bits(array: np.ndarray) -> np.ndarray:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize]
    return np.ascontiguousarray(array).view(unsigned)
