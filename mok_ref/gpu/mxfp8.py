"""MXFP8 quantiser on the device, the same names and bits as mok_ref/mxfp8.py.

CUDA twin: cuda_src/mxfp8.cu. Everything is enqueued on the current stream; with `out` nothing is
allocated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.gpu.portable import SCALE_RULE_CODES
from mok_ref.mxfp8 import num_blocks

SOURCE = "mxfp8.cu"
THREADS = 256
MAX_CTAS = 132 * 16


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
    num_tokens = len(values)
    codes, scales = workspace.mine(f"{name}_codes"), workspace.mine(f"{name}_scales")
    config = workspace.config
    launch_quantize(
        int(values.data.ptr), codes, scales, num_tokens, config.hidden_size, config.scale_rule
    )


def warm_up() -> None:
    """Compile and load the kernels."""
    for name in ("mxfp8_quantize", "mxfp8_dequantize"):
        _ = _kernel(name).num_regs


def _kernel(name: str) -> Any:
    from mok_ref.gpu.compiler import load_kernel

    return load_kernel(SOURCE, name)


def _grid(rows: int, columns: int) -> tuple[int]:
    blocks = rows * num_blocks(columns)
    return (min(MAX_CTAS, -(-blocks // (THREADS // 32))),)
