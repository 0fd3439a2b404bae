"""Launch of the forward step on MXFP8 operands: weights quantised, then the routed experts' kernel.

CUDA twin: cuda_src/megakernel_mxfp8.cu (kernel `moe_forward_mxfp8`), mxfp8_tile.cuh,
mxfp8_experts.cuh; cuda_src/mxfp8.cu: mxfp8_quantize64.

Rings and weights rest as codes and scales. Codes are row-major; scales lie by blocks of 64 columns,
[ceil(columns / 64)][rows] words of two scale bytes, so that a tile's scales are one copy. The
shared expert is never quantised: its tiles run in a launch of the bf16 kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.gpu import hopper, mxfp8
from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.hopper import TENSOR_MAP, encode_tiled
from mok_ref.gpu.launch import Launch, ParamBlock, clearing, prepared
from mok_ref.gpu.mxfp8 import SCALE_COLUMNS, prepare_quantize64
from mok_ref.gpu.params import new_params, set_params
from mok_ref.gpu.portable import PARTS, SCALE_RULE_CODES
from mok_ref.gpu.workspace import derive_sizes
from mok_ref.mxfp8 import dequantize, num_blocks
from mok_ref.numerics import bf16_to_bits
from mok_ref.validation import check_weights

SOURCE = "megakernel_mxfp8.cu"
KERNEL = "moe_forward_mxfp8"

TILE_COLUMNS = 256
"""Weight rows of a tile (kTileN): 128 of gate and 128 of up, or 256 of down."""

BARRIERS = 3 + 2 * 2
SHARED_BYTES = hopper.SHARED_BYTES + 8 * BARRIERS
"""Dynamic shared memory of a CTA (kMxfp8SharedBytes)."""

ALIGNMENT = 16
"""H and I must be multiples of this: rows of codes are strides of tensor maps, in 16 bytes."""

CODE_MAPS = np.dtype(
    [
        (name, TENSOR_MAP)
        for name in (
            "x_codes",
            "x_half_codes",
            "x_scales",
            "h_codes",
            "h_half_codes",
            "h_scales",
            "w_gate_up_codes",
            "w_gate_up_scales",
            "w_down_codes",
            "w_down_scales",
        )
    ]
)
"""Struct CodeMaps: all maps of one rank, passed to the kernel by value."""

CODE_PARAMS = np.dtype(
    [
        ("x_codes", np.uint64),
        ("x_scales", np.uint64),
        ("h_codes", np.uint64),
        ("h_scales", np.uint64),
        ("weights_are_wide", np.uint64),
        ("scale_rule", np.int32),
        ("reserved", np.int32),
    ],
    align=True,
)


def supports(hidden_size: int, intermediate_size: int, shared_intermediate_size: int = 0) -> bool:
    """Whether these widths can go through tensor maps; others take the portable path."""
    routed = (hidden_size, intermediate_size)
    return all(width % ALIGNMENT == 0 for width in routed) and hopper.supports(
        *routed, shared_intermediate_size
    )


def scale_words(columns: int) -> int:
    """Scale words of a row."""
    return -(-columns // SCALE_COLUMNS)


# --------------------------------------------------------------------------- buffers


def ring_buffers(workspace: Any) -> dict[str, Any]:
    """Codes and scales of the rings of x and h; made once per workspace."""
    config, rows = workspace.config, workspace.sizes.macro_blocks * ROW_TILE
    rings = {}
    for name, width in (("x", config.hidden_size), ("h", config.intermediate_size)):
        rings[f"{name}_codes"] = workspace.scratch(f"{name}_ring_codes", (rows, width), np.uint8)
        rings[f"{name}_scales"] = workspace.scratch(
            f"{name}_ring_scales", (scale_words(width), rows), np.uint16
        )
    return rings


def weight_shape(config: Any, part: str) -> tuple[int, int]:
    """(rows, columns) of one expert's W_gate, W_up or W_down; blocks lie along its columns."""
    shape = (config.intermediate_size, config.hidden_size)
    return shape[::-1] if part == "down" else shape


def weight_buffers(workspace: Any) -> dict[str, Any]:
    """Codes and scales of this rank's experts, and whether a scale is above 2^7; made once per
    workspace. Those of gate and up lie behind each other: one copy fetches a tile of both."""
    config, local = workspace.config, workspace.config.num_local_experts(workspace.heap.rank)
    buffers = {"weights_are_wide": workspace.scratch("weights_are_wide", (1,), np.uint32)}
    for parts, name in ((("gate", "up"), "w_gate_up"), (("down",), "w_down")):
        rows, columns = weight_shape(config, parts[0])
        codes = workspace.scratch(f"{name}_codes64", (len(parts), local * rows, columns), np.uint8)
        scales = workspace.scratch(
            f"{name}_scales64", (len(parts), local, scale_words(columns), rows), np.uint16
        )
        for index, part in enumerate(parts):
            buffers[f"w_{part}_codes"] = codes[index] if codes.size else codes
            buffers[f"w_{part}_scales"] = scales[index] if scales.size else scales
    return buffers


def ring_values(workspace: Any, name: str) -> np.ndarray:
    """bf16 bits (rows, columns) that the ring of "x" or "h" stands for; synchronises."""
    rings = ring_buffers(workspace)
    codes = rings[f"{name}_codes"].get()
    scales = mxfp8.row_scales(rings[f"{name}_scales"].get(), codes.shape[1])
    return bf16_to_bits(dequantize(codes, scales))


def memory_bytes(config: MoEConfig, rank: int, max_tokens: int) -> dict[str, tuple[int, int]]:
    """What takes other room than with dtype bf16: name -> (bytes of bf16, bytes of MXFP8).

    "weights" are the routed experts' at rest: a rank that also keeps them in bf16 has both.
    "tokens" is what peers pull from.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    local = config.num_local_experts(rank)
    rows = derive_sizes(config, rank, max(1, max_tokens)).macro_blocks * ROW_TILE

    def pair(count: int, columns: int, scale_bytes: int) -> tuple[int, int]:
        return 2 * count * columns, count * (columns + scale_bytes)

    def words(count: int, columns: int) -> tuple[int, int]:
        return pair(count, columns, 2 * scale_words(columns))

    weights = [words(local * weight_shape(config, p)[0], weight_shape(config, p)[1]) for p in PARTS]
    return {
        "weights": (sum(w[0] for w in weights), sum(w[1] for w in weights)),
        "x ring": words(rows, hidden),
        "h ring": words(rows, inner),
        "tokens": pair(max_tokens, hidden, num_blocks(hidden)),
    }


# --------------------------------------------------------------------------- tensor maps


def encode_codes(pointer: int, rows: int, columns: int, box_rows: int) -> np.ndarray:
    """Map of row-major codes [rows, columns]: boxes of `box_rows` rows x 64 codes."""
    return encode_tiled(pointer, (columns, rows), (columns,), (64, box_rows), "UINT8", "64B")


def encode_scales(pointer: int, rows: int, columns: int) -> np.ndarray:
    """Map of scale words [ceil(columns / 64), rows]: boxes of 128 rows of one word."""
    dims = (rows, scale_words(columns))
    return encode_tiled(pointer, dims, (2 * rows,), (ROW_TILE, 1), "UINT16", "NONE")


def encode_weight_codes(
    pointer: int, parts: int, experts: int, rows: int, columns: int
) -> np.ndarray:
    """Map of codes [parts, experts, rows, columns]: boxes of 256 rows in all of one expert, equally
    many of every part, x 64 codes."""
    dims = (columns, rows, experts, parts)
    strides = (columns, rows * columns, experts * rows * columns)
    box = (64, TILE_COLUMNS // parts, 1, parts)
    return encode_tiled(pointer, dims, strides, box, "UINT8", "64B")


def encode_weight_scales(
    pointer: int, parts: int, experts: int, rows: int, columns: int
) -> np.ndarray:
    """Map of scale words [parts, experts, ceil(columns / 64), rows]: boxes as of the codes, of one
    word."""
    words = scale_words(columns)
    dims = (rows, words, experts, parts)
    strides = (2 * rows, 2 * rows * words, 2 * rows * words * experts)
    box = (TILE_COLUMNS // parts, 1, 1, parts)
    return encode_tiled(pointer, dims, strides, box, "UINT16", "NONE")


def encode_maps(workspace: Any) -> np.ndarray:
    """CODE_MAPS of one rank; its buffers never move."""
    config, maps = workspace.config, np.zeros(1, CODE_MAPS)
    experts = config.num_local_experts(workspace.heap.rank)
    if experts == 0:
        return maps
    rows = workspace.sizes.macro_blocks * ROW_TILE
    rings, weights = ring_buffers(workspace), weight_buffers(workspace)
    for name, width in (("x", config.hidden_size), ("h", config.intermediate_size)):
        codes, scales = (int(rings[f"{name}_{part}"].data.ptr) for part in ("codes", "scales"))
        maps[f"{name}_codes"] = encode_codes(codes, rows, width, ROW_TILE)
        maps[f"{name}_half_codes"] = encode_codes(codes, rows, width, ROW_TILE // 2)
        maps[f"{name}_scales"] = encode_scales(scales, rows, width)
    for name, first, parts in (("w_gate_up", "gate", 2), ("w_down", "down", 1)):
        shape = weight_shape(config, first)
        codes, scales = (int(weights[f"w_{first}_{p}"].data.ptr) for p in ("codes", "scales"))
        maps[f"{name}_codes"] = encode_weight_codes(codes, parts, experts, *shape)
        maps[f"{name}_scales"] = encode_weight_scales(scales, parts, experts, *shape)
    return maps


# --------------------------------------------------------------------------- launches


def quantise_weights(workspace: Any, weights: list[int]) -> list[Callable[[Any], None]]:
    """What quantises this rank's experts on a stream; addresses of W_gate, W_up, W_down in bf16."""
    buffers = weight_buffers(workspace)
    wide = buffers["weights_are_wide"]
    work: list[Callable[[Any], None]] = [clearing(wide)]
    for part, address in zip(PARTS, weights, strict=True):
        codes, scales = buffers[f"w_{part}_codes"], buffers[f"w_{part}_scales"]
        if codes.size:
            rule = workspace.config.scale_rule
            work.append(prepare_quantize64(address, codes, scales, rule, int(wide.data.ptr)))
    return work


def hold_weights(workspace: Any, weights: ExpertWeights) -> None:
    """Quantise weights now and keep their codes: forwards with the same arrays quantise no more.

    For weights that do not change: a change in place cannot be seen, call it again after one. They
    are held, and kept alive, until `release_weights` or until other weights are quantised over
    their codes, by a forward or by this. Backward reads the codes too: contexts of earlier forwards
    are stale. A CUDA graph replays what it captured: one captured while its weights were held wants
    them held at every replay; one captured without quantises over whatever is held, unseen by later
    forwards, so a workspace with such a graph holds no weights any more.

    weights   of this rank, on the device as the kernels read them: C-contiguous, 16-byte aligned
    Raises: ValueError for other arrays, or a workspace that is closed or whose forward is not this
    module's; RuntimeError while the stream captures, when nothing is quantised, and after a capture
    without held weights.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    _check_hold(workspace, weights)
    if stream.is_capturing():
        raise RuntimeError("hold_weights must run before a capture, got a stream that captures")
    if _captured(workspace):
        raise RuntimeError(
            "hold_weights must run before the workspace's first capture, got a workspace whose "
            "graph quantises weights: its replay would overwrite the held ones"
        )
    release_weights(workspace)
    workspace.generation += 1
    for work in quantise_weights(workspace, [int(array.data.ptr) for array in weights]):
        work(stream)
    _held(workspace)[:] = weights


def release_weights(workspace: Any) -> None:
    """Every forward quantises its weights again."""
    _held(workspace).clear()


def _held(workspace: Any) -> list[Any]:
    """W_gate, W_up, W_down whose codes are kept, or nothing. The arrays themselves: while they are
    here no other array has their addresses."""
    held: list[Any] = workspace.extra("mxfp8_held_weights", list)
    return held


def _captured(workspace: Any) -> list[bool]:
    """Not empty once a graph was captured that quantises weights."""
    captured: list[bool] = workspace.extra("mxfp8_captured", list)
    return captured


def _check_hold(workspace: Any, weights: ExpertWeights) -> None:
    from mok_ref.gpu import layer

    if workspace.closed:
        raise ValueError("workspace is closed")
    path = layer.forward_path(workspace).__name__
    if path != __name__:
        raise ValueError(f"workspace must run {KERNEL}, got one that runs {path}")
    check_weights(replace(workspace.config, shared_intermediate_size=0), workspace.heap.rank,
                  weights, None)  # fmt: skip
    for part, array in zip(PARTS, weights, strict=True):
        if layer.on_device(array) is not array:
            raise ValueError(
                f"weights.{part} must be a C-contiguous, 16-byte aligned array on the device, "
                f"got {type(array).__name__}"
            )


def routed_experts(workspace: Any, params: ParamBlock) -> Launch:
    """The launch of the routed experts; weights are quantised by the time it starts."""
    rings = {name: array.data.ptr for name, array in ring_buffers(workspace).items()}
    rule = SCALE_RULE_CODES[workspace.config.scale_rule]
    wide = weight_buffers(workspace)["weights_are_wide"]
    codes = new_params(CODE_PARAMS, **rings, weights_are_wide=wide, scale_rule=rule)
    block = params.copy()
    set_params(block, shared_intermediate_size=0)
    arguments = (block, codes, encode_maps(workspace))
    return Launch(_kernel(), (num_ctas(workspace),), hopper.THREADS, arguments, SHARED_BYTES)


def num_ctas(workspace: Any) -> int:
    """CTAs of the routed experts' kernel, one per multiprocessor; the bits are the same for any."""

    def count() -> int:
        import cupy

        return hopper._num_multiprocessors(cupy.cuda.runtime.getDevice())

    return int(workspace.extra("mxfp8_ctas", count))


def shared_expert(workspace: Any, params: ParamBlock) -> list[Callable[[Any], None]]:
    """The launch of the bf16 kernel that treats the shared expert alone: a schedule without rows,
    and counters of its own, the second half."""
    if not workspace.config.shared_intermediate_size or int(params["num_tokens"]) == 0:
        return []
    no_rows = _no_rows(workspace)
    block = params.copy()
    set_params(
        block,
        info=no_rows,
        counters=int(params["counters"]) + 4 * (workspace.sizes.num_counters // 2),
        num_local_experts=0,
    )
    kernel = workspace.extra("hopper_shared", hopper.ForwardKernel)
    return [clearing(no_rows), kernel.prepare(block)]


def launch_forward(workspace: Any, params: ParamBlock, stream: Any) -> None:
    """Everything between the barriers of a forward step: y rows pushed to their owners."""
    weights = [int(params[f"w_{part}"]) for part in PARTS]
    if [int(array.data.ptr) for array in _held(workspace)] != weights:
        release_weights(workspace)  # these are quantised over their codes
        if stream.is_capturing():
            _captured(workspace)[:] = [True]
        for work in prepared(params, "mxfp8_weights", lambda: quantise_weights(workspace, weights)):
            work(stream)
    for work in prepared(
        params,
        KERNEL,
        lambda: [*shared_expert(workspace, params), routed_experts(workspace, params)],
    ):
        work(stream)


def warm_up(workspace: Any) -> None:
    """Load the kernels and make the buffers; on every rank before its first barrier."""
    mxfp8.warm_up()
    _ = _kernel().num_regs
    if workspace.config.shared_intermediate_size:
        _ = workspace.extra("hopper_shared", hopper.ForwardKernel).load().num_regs
        _no_rows(workspace)
    ring_buffers(workspace), weight_buffers(workspace)


def _no_rows(workspace: Any) -> Any:
    """Place of a schedule's info without a row."""
    return workspace.scratch("no_rows_info", workspace.info.shape, workspace.info.dtype)


def _kernel() -> Any:
    return load_kernel(SOURCE, KERNEL, (), SHARED_BYTES)
