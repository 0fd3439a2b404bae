"""MXFP8 quantiser on the device, the same names and bits as mok_ref/mxfp8.py.

CUDA twin: cuda_src/mxfp8.cu. Everything is enqueued on the current stream; with `out` nothing is
allocated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.config import MoEConfig
from mok_ref.gpu.launch import NUM_MULTIPROCESSORS, Launch, remember
from mok_ref.gpu.portable import SCALE_RULE_CODES
from mok_ref.mxfp8 import num_blocks

SOURCE = "mxfp8.cu"
THREADS = 256
MAX_CTAS = 16 * NUM_MULTIPROCESSORS
SCALE_COLUMNS = 64
"""Columns whose two scale bytes are one word of the Hopper kernels."""


def quantize(values: Any, rule: str = "fit", out: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """MXFP8 of bf16 bits on the device (spec eq. 7.1).

    values   (..., n) uint16 bits or ml_dtypes.bfloat16, C-contiguous
    out      (codes, scales) to write into, or None for new arrays
    Returns  codes (..., n) uint8, scales (..., ceil(n/32)) uint8
    Raises: ValueError for another dtype, layout or rule.
    NumPy twin: mok_ref.mxfp8.quantize
    """
    import cupy

    if values.dtype.itemsize != 2 or values.dtype == np.float16 or not values.flags.c_contiguous:
        raise ValueError(f"values must be contiguous bf16 or its uint16 bits, got {values.dtype}")
    if rule not in SCALE_RULE_CODES:
        raise ValueError(f"scale_rule must be fit or ocp, got {rule!r}")
    columns = values.shape[-1]
    rows = values.size // columns if columns else 0
    scale_shape = (*values.shape[:-1], num_blocks(columns))
    codes, scales = out or (cupy.empty(values.shape, np.uint8), cupy.empty(scale_shape, np.uint8))
    launch_quantize(int(values.data.ptr), codes, scales, rows, columns, rule)
    return codes, scales


def launch_quantize(
    values: int, codes: Any, scales: Any, rows: int, columns: int, rule: str
) -> None:
    """The kernel alone: `values` is the address of [rows, columns] bf16."""
    if rows and columns:
        arguments = (np.uint64(values), codes, scales, np.int64(rows), np.int32(columns),
                     np.int32(SCALE_RULE_CODES[rule]))  # fmt: skip
        _kernel("mxfp8_quantize")(_grid(rows, columns), (THREADS,), arguments)


def quantize64(values: Any, rule: str = "fit") -> tuple[Any, Any]:
    """MXFP8 of bf16 bits with the scales' layout of the Hopper kernels (spec eq. 7.1).

    values   (matrices, rows, n) uint16 bits, C-contiguous, n a multiple of 8
    Returns  codes (matrices, rows, n) uint8, scale words (matrices, ceil(n/64), rows) uint16: the
             bytes of a row's two blocks of 32, the first one low; 0 where a block does not exist
    NumPy twin: mok_ref.mxfp8.quantize, then `column_blocks`
    """
    import cupy

    matrices, rows, columns = values.shape
    codes = cupy.empty(values.shape, np.uint8)
    scales = cupy.empty((matrices, -(-columns // SCALE_COLUMNS), rows), np.uint16)
    launch = prepare_quantize64(int(values.data.ptr), codes, scales, rule)
    if values.size:
        launch(cupy.cuda.get_current_stream())
    return codes, scales


def prepare_quantize64(values: int, codes: Any, scales: Any, rule: str, wide: int = 0) -> Launch:
    """The launch alone: `values` is the address of bf16 (matrices, rows, n); `scales` has the shape
    of `quantize64`'s; `wide` is 0 or the address of a word that becomes 1 if a scale is above
    2^7."""
    matrices, words, rows = scales.shape
    columns = codes.shape[-1]
    groups = -(-matrices * rows // 4) * words
    grid = (max(1, min(MAX_CTAS, -(-groups * 32 // THREADS))),)
    arguments = (np.uint64(values), codes, scales, np.int64(matrices), np.int32(rows),
                 np.int32(columns), np.int32(SCALE_RULE_CODES[rule]), np.uint64(wide))  # fmt: skip
    return Launch(_kernel("mxfp8_quantize64"), grid, THREADS, arguments)


def column_blocks(scales: np.ndarray) -> np.ndarray:
    """Scale bytes (..., rows, blocks) as the words (..., ceil(blocks/2), rows) of `quantize64`."""
    padded = np.zeros((*scales.shape[:-1], -(-scales.shape[-1] // 2) * 2), np.uint8)
    padded[..., : scales.shape[-1]] = scales
    return np.ascontiguousarray(padded.view("<u2").swapaxes(-1, -2))


def row_scales(words: np.ndarray, columns: int) -> np.ndarray:
    """The scale bytes (..., rows, blocks) in `column_blocks`'s words."""
    by_row = np.ascontiguousarray(words.swapaxes(-1, -2))
    return by_row.astype("<u2").view(np.uint8)[..., : num_blocks(columns)]


def dequantize(codes: Any, scales: Any) -> Any:
    """bf16 bits (uint16) of MXFP8 codes and scales (spec eq. 7.2).

    NumPy twin: mok_ref.mxfp8.dequantize
    """
    import cupy

    columns = codes.shape[-1]
    rows = codes.size // columns if columns else 0
    values = cupy.empty(codes.shape, np.uint16)
    if rows:
        arguments = (codes, scales, values, np.int64(rows), np.int32(columns))
        _kernel("mxfp8_dequantize")(_grid(rows, columns), (THREADS,), arguments)
    return values


def publish(workspace: Any, name: str, values: Any) -> None:
    """Quantise this rank's x or dy into its symmetric buffers, once, before it travels.

    name     "x" or "dy"; values (T, H) bf16 on the device
    """
    import cupy

    if not len(values):
        return
    launches: dict[Any, Launch] = workspace.extra("mxfp8_publish", dict)
    key = name, int(values.data.ptr), len(values)
    launch = launches.get(key)
    if launch is None:
        codes, scales = workspace.mine(f"{name}_codes"), workspace.mine(f"{name}_scales")
        launch = remember(
            launches, key, _prepare_quantize(*key[1:], codes, scales, workspace.config)
        )
    launch(cupy.cuda.get_current_stream())


def _prepare_quantize(values: int, rows: int, codes: Any, scales: Any, config: MoEConfig) -> Launch:
    columns = config.hidden_size
    arguments = (np.uint64(values), codes, scales, np.int64(rows), np.int32(columns),
                 np.int32(SCALE_RULE_CODES[config.scale_rule]))  # fmt: skip
    return Launch(_kernel("mxfp8_quantize"), _grid(rows, columns), THREADS, arguments)


def warm_up() -> None:
    """Compile and load the kernels."""
    for name in ("mxfp8_quantize", "mxfp8_quantize64", "mxfp8_dequantize"):
        _ = _kernel(name).num_regs


def _kernel(name: str) -> Any:
    from mok_ref.gpu.compiler import load_kernel

    return load_kernel(SOURCE, name)


def _grid(rows: int, columns: int) -> tuple[int]:
    blocks = rows * num_blocks(columns)
    return (min(MAX_CTAS, -(-blocks // (THREADS // 32))),)
