"""Parameter blocks of the kernels as structured NumPy scalars.

CUDA twin: cuda_src/params.cuh. Same fields, same order; `align=True` gives the C layout. The kernel
`params_layout` reports the compiler's own offsets (tests/gpu), and tests/test_gpu_compiler.py
compares names and types with the header's text, which needs no GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mok_ref.gpu.launch import ParamBlock

MAX_RANKS = 128
BARRIER_WORDS = MAX_RANKS

SYMMETRIC_BUFFERS = {
    "x": 0,
    "dy": 1,
    "topk_ids": 2,
    "topk_weights": 3,
    "num_tokens": 4,
    "combine": 5,
    "d_topk_weights": 6,
    "barrier_flags": 7,
    "x_codes": 8,
    "x_scales": 9,
    "dy_codes": 10,
    "dy_scales": 11,
    "chain": 12,
}
"""Row of each symmetric buffer in the peer table (enum SymmetricBuffer)."""

NUM_SYMMETRIC = 16

ROW_ORDER_CODES = {"canonical": 0, "round_robin": 1}

NO_INPUT_ERROR = (1 << 64) - 1

_POINTER = np.uint64

SCHEDULE_INFO = np.dtype(
    [
        ("num_row_blocks", np.int32),
        ("num_rows", np.int32),
        ("num_tokens_total", np.int32),
        ("num_routes", np.int32),
        ("token_offset", np.int32, (MAX_RANKS + 1,)),
    ],
    align=True,
)

ERROR_RECORD = np.dtype(
    [
        ("code", np.uint32),
        ("rank", np.int32),
        ("peer", np.int32),
        ("phase", np.uint32),
        ("counter", np.uint32),
        ("expected", np.uint32),
        ("seen", np.uint32),
        ("epoch", np.uint32),
        ("wait_us", np.uint32),
        ("reserved", np.uint32, (7,)),
    ],
    align=True,
)

WAIT_CONTEXT = np.dtype(
    [
        ("timeout_ns", np.uint64),
        ("abort_flag", _POINTER),
        ("record", _POINTER),
        ("rank", np.int32),
    ],
    align=True,
)

BARRIER_PARAMS = np.dtype(
    [
        ("wait", WAIT_CONTEXT),
        ("size", np.int32),
        ("flags", _POINTER),
        ("epoch", _POINTER),
    ],
    align=True,
)

LAYER_PARAMS = np.dtype(
    [
        ("rank", np.int32),
        ("ep_size", np.int32),
        ("num_tokens", np.int32),
        ("max_tokens", np.int32),
        ("hidden_size", np.int32),
        ("intermediate_size", np.int32),
        ("shared_intermediate_size", np.int32),
        ("num_experts", np.int32),
        ("num_local_experts", np.int32),
        ("top_k", np.int32),
        ("mini_blocks", np.int32),
        ("macro_blocks", np.int32),
        ("max_row_blocks", np.int32),
        ("row_order", np.int32),
        ("has_limit", np.int32),
        ("swiglu_limit", np.float32),
        ("timeout_ns", np.uint64),
        ("peer_table", _POINTER),
        ("local_expert", _POINTER),
        ("all_ids", _POINTER),
        ("peer_rank", _POINTER),
        ("peer_row", _POINTER),
        ("row_weight", _POINTER),
        ("expert_offset", _POINTER),
        ("expert_count", _POINTER),
        ("row_block_expert", _POINTER),
        ("row_block_valid", _POINTER),
        ("info", _POINTER),
        ("block_count", _POINTER),
        ("counters", _POINTER),
        ("input_error", _POINTER),
        ("error_record", _POINTER),
        ("abort_flag", _POINTER),
        ("barrier_epoch", _POINTER),
        ("x_ring", _POINTER),
        ("h_ring", _POINTER),
        ("gate_saved", _POINTER),
        ("up_saved", _POINTER),
        ("max_saved_rows", np.int64),
        ("w_gate", _POINTER),
        ("w_up", _POINTER),
        ("w_down", _POINTER),
        ("shared_w_gate", _POINTER),
        ("shared_w_up", _POINTER),
        ("shared_w_down", _POINTER),
        ("shared_h", _POINTER),
        ("shared_y", _POINTER),
        ("shared_gate", _POINTER),
        ("shared_up", _POINTER),
        ("y", _POINTER),
        ("x_in", _POINTER),
        ("ids_in", _POINTER),
        ("weights_in", _POINTER),
        ("num_counters", np.int64),
        ("combine", _POINTER),
        ("topk_ids", _POINTER),
        ("topk_weights", _POINTER),
        ("combines", np.int32),
    ],
    align=True,
)

BACKWARD_PARAMS = np.dtype(
    [
        ("dy_ring", _POINTER),
        ("hw_ring", _POINTER),
        ("d_gate_ring", _POINTER),
        ("d_up_ring", _POINTER),
        ("dy_in", _POINTER),
        ("dx", _POINTER),
        ("d_topk_weights", _POINTER),
        ("dw_gate", _POINTER),
        ("dw_up", _POINTER),
        ("dw_down", _POINTER),
        ("shared_dx", _POINTER),
        ("shared_d_gate", _POINTER),
        ("shared_d_up", _POINTER),
        ("shared_dw_gate", _POINTER),
        ("shared_dw_up", _POINTER),
        ("shared_dw_down", _POINTER),
        ("dw_is_bf16", np.int32),
        ("dw_accumulate", np.int32),
        ("first_macro", np.int32),
        ("recompute", np.int32),
        ("router_dx", _POINTER),
    ],
    align=True,
)

STRUCTS = {
    "ScheduleInfo": SCHEDULE_INFO,
    "ErrorRecord": ERROR_RECORD,
    "LayerParams": LAYER_PARAMS,
    "BackwardParams": BACKWARD_PARAMS,
    "BarrierParams": BARRIER_PARAMS,
}


def new_params(dtype: np.dtype, **values: Any) -> ParamBlock:
    """A zeroed parameter block of shape () with `values` written; arrays become device
    addresses."""
    block = np.zeros((), dtype).view(ParamBlock)
    set_params(block, **values)
    return block


def by_value(block: np.ndarray) -> np.ndarray:
    """A parameter block as a kernel argument: the same bytes under one field, shape (1,).

    CuPy describes an argument's fields one by one at every launch; fifty of them cost 40 us.
    """
    return np.asarray(block).reshape(1).view(_opaque(block.dtype.itemsize))


@lru_cache(maxsize=64)
def _opaque(num_bytes: int) -> np.dtype:
    return np.dtype([("bytes", np.uint8, (num_bytes,))])


def set_params(block: np.ndarray, **values: Any) -> None:
    """Write fields of a parameter block in place; None and empty arrays become null pointers.

    Raises: KeyError for a field that the struct does not have.
    """
    names = block.dtype.names or ()
    for name, value in values.items():
        if name not in names:
            raise KeyError(f"{name} is no field of the parameter block")
        block[name] = device_address(value)


def device_address(value: Any) -> Any:
    """Address of a CuPy array (0 for None or an empty one); numbers pass unchanged."""
    if value is None:
        return 0
    data = getattr(value, "data", None)
    pointer = getattr(data, "ptr", None)
    if pointer is None:
        return value
    return pointer if value.size else 0


def layout_words() -> list[int]:
    """Sizes and offsets in the order that the kernel `params_layout` reports them."""
    words = []
    for dtype in STRUCTS.values():
        fields: Any = dtype.fields
        words.append(dtype.itemsize)
        words.append(fields[(dtype.names or ())[-1]][1])
    return words
