"""Inputs for, and calls of, the kernels that hold one device function each
(cuda_src/unit_kernels.cu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mok_ref.gpu import compiler
from mok_ref.numerics import canonical_nan

SOURCE = "unit_kernels.cu"
THREADS = 256

UNIT_PRODUCT = np.dtype(
    [
        ("a", np.uint64),
        ("b", np.uint64),
        ("c", np.uint64),
        ("d", np.uint64),
        ("num_m", np.int32),
        ("num_n", np.int32),
        ("num_k", np.int32),
        ("a_is_k_major", np.int32),
        ("b_is_k_major", np.int32),
        ("reserved", np.int32),
    ],
    align=True,
)


# --------------------------------------------------------------------------- inputs


def _scaled(low: int, high: int) -> Callable[[np.random.Generator, tuple], np.ndarray]:
    def draw(rng: np.random.Generator, shape: tuple) -> np.ndarray:
        return rng.standard_normal(shape) * 2.0 ** rng.integers(low, high, shape)

    return draw


def _sparse(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    return rng.standard_normal(shape) * (rng.random(shape) < 0.2)


def _signed_zeros(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    return np.where(rng.random(shape) < 0.5, -0.0, 0.0)


def _special(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    draw = rng.random(shape)
    values = np.where(
        draw < 0.01, np.inf, np.where(draw < 0.02, -np.inf, rng.standard_normal(shape))
    )
    return np.where((draw >= 0.02) & (draw < 0.022), np.nan, values)


VALUES: dict[str, Callable[[np.random.Generator, tuple], np.ndarray]] = {
    "normal": _scaled(0, 1),
    "wide 2^20": _scaled(-20, 20),
    "wide 2^60": _scaled(-60, 60),
    "subnormal": _scaled(-133, -60),
    "sparse": _sparse,
    "Inf, NaN": _special,
    "signed zeros": _signed_zeros,
}
KINDS = (*VALUES, "bit patterns")
"""Kinds of operands; "bit patterns" are uniformly random finite bf16 bits, overflow included."""


def operand_bits(rng: np.random.Generator, shape: tuple, kind: str) -> np.ndarray:
    """bf16 bits of a kind of operand."""
    if kind == "bit patterns":
        bits = rng.integers(0, 1 << 16, shape).astype(np.uint16)
        return np.where((bits & 0x7F80) == 0x7F80, bits & 0xBFFF, bits).astype(np.uint16)
    with np.errstate(all="ignore"):
        bits = VALUES[kind](rng, shape).astype(np.float32).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16)


def accumulators(rng: np.random.Generator, shape: tuple, kind: str) -> np.ndarray:
    """float32 starts of chains to go with a kind of operands; a third of them +0."""
    if kind == "bit patterns":
        bits = rng.integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32)
        is_special = (bits & 0x7F800000) == 0x7F800000
        values = np.where(is_special, bits & 0xBFFFFFFF, bits).astype(np.uint32).view(np.float32)
    elif kind == "subnormal":
        values = (rng.standard_normal(shape) * 2.0 ** rng.integers(-149, -110, shape)).astype(
            np.float32
        )
    else:
        with np.errstate(all="ignore"):
            values = VALUES[kind](rng, shape).astype(np.float32)
    if kind == "signed zeros":
        return values
    return np.where(rng.random(shape) < 1 / 3, np.float32(0), values)


def random_floats(rng: np.random.Generator, count: int) -> np.ndarray:
    """float32 of all magnitudes: half normal numbers, half random bit patterns (NaN and Inf
    too)."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.where(rng.random(count) < 0.5, rng.standard_normal(count).astype(np.float32), bits)


ALL_BF16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


# --------------------------------------------------------------------------- calls


def on_device(array: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(np.ascontiguousarray(array))


def elementwise(
    kernel: str, inputs: list[np.ndarray], dtypes: list[Any], *scalars: Any
) -> list[np.ndarray]:
    """Run unit_<kernel>(inputs..., outputs..., scalars..., count); one thread per element."""
    import cupy

    count = inputs[0].size
    outputs = [cupy.zeros(count, dtype) for dtype in dtypes]
    arguments = (*(on_device(i) for i in inputs), *outputs, *scalars, np.int64(count))
    _kernel(kernel)((-(-count // THREADS),), (THREADS,), arguments)
    return [output.get() for output in outputs]


def dot128(products: np.ndarray) -> np.ndarray:
    import cupy

    result = cupy.zeros(len(products), np.float32)
    arguments = (on_device(products), result, np.int32(products.shape[1]))
    _kernel("dot128")((len(products),), (32,), arguments)
    return result.get()


def expand(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bf16 bits of runs of 16 codes (n, 16) under one scale byte each."""
    import cupy

    values = cupy.zeros(codes.shape, np.uint16)
    arguments = (on_device(codes), on_device(scales), values, np.int64(len(codes)))
    _kernel("expand")((-(-len(codes) // THREADS),), (THREADS,), arguments)
    return values.get()


class Instruction(NamedTuple):
    """One way to evaluate tc on a device."""

    kernel: str
    tile: tuple[int, int]  # outputs of one CTA; (0, 0): 256 outputs, whichever
    threads: int
    a_is_k_major: bool = True
    b_is_k_major: bool = True


INSTRUCTIONS = {
    "tc_group": Instruction("tc_group", (0, 0), THREADS),
    "soft": Instruction("tc_soft", (64, 64), THREADS),
    "soft MN-major": Instruction("tc_soft", (64, 64), THREADS, False, False),
    "mma.sync": Instruction("tc_mma", (128, 128), THREADS),
    "mma.sync MN-major": Instruction("tc_mma", (128, 128), THREADS, False, False),
    "wgmma": Instruction("tc_wgmma", (64, 128), 128),
    "wgmma B MN-major": Instruction("tc_wgmma", (64, 128), 128, True, False),
    "wgmma MN-major": Instruction("tc_wgmma", (64, 128), 128, False, False),
}
"""wgmma needs sm_90a and exactly M = 64, N = 128; tc_group K-major operands, K a multiple of 16."""


def device_tc(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """tc of a batch: a (B, M, K), b (B, N, K) bf16 bits, c (B, M, N) float32."""
    import cupy

    instruction = INSTRUCTIONS[name]
    (batch, num_m, num_k), num_n = a.shape, b.shape[1]
    left = on_device(a if instruction.a_is_k_major else a.transpose(0, 2, 1))
    right = on_device(b if instruction.b_is_k_major else b.transpose(0, 2, 1))
    start, out = on_device(c), cupy.zeros(c.shape, np.float32)
    unit = np.zeros((), UNIT_PRODUCT)
    for field, value in (
        ("a", left.data.ptr), ("b", right.data.ptr), ("c", start.data.ptr), ("d", out.data.ptr),
        ("num_m", num_m), ("num_n", num_n), ("num_k", num_k),
        ("a_is_k_major", instruction.a_is_k_major), ("b_is_k_major", instruction.b_is_k_major),
    ):  # fmt: skip
        unit[field] = value
    tile_m, tile_n = instruction.tile
    tiles = -(-num_m * num_n // THREADS)
    if tile_m:
        tiles = -(-num_m // tile_m) * -(-num_n // tile_n)
    _kernel(instruction.kernel)((tiles, batch), (instruction.threads,), (unit,))
    return out.get()


def _kernel(name: str) -> Any:
    return compiler.load_kernel(SOURCE, f"unit_{name}")


def count_different(actual: np.ndarray, expected: np.ndarray) -> int:
    """Elements whose bits differ; NaNs are all alike."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    a, b = (np.ascontiguousarray(canonical_nan(v)).view(bits) for v in (actual, expected))
    return int(np.count_nonzero(a != b))
