"""Launches of the backward megakernels whose operands are MXFP8 codes and scales.

CUDA twin: cuda_src/megakernel_mxfp8_backward.cu. The launches are those of
mok_ref.gpu.hopper_backward with other maps and parameters. The shared expert is never quantised:
its rows go through a launch of the bf16 dgrad kernel that treats no routed rows, its weights
through the bf16 chain.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.config import ROW_TILE
from mok_ref.gpu import hopper_backward as bf16
from mok_ref.gpu import hopper_mxfp8
from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.errors import BARRIER_DX
from mok_ref.gpu.hopper import encode_tiled
from mok_ref.gpu.hopper_backward import TILE_COLUMNS, TILE_ROWS, encode_columns, encode_rows
from mok_ref.gpu.hopper_mxfp8 import scale_words
from mok_ref.gpu.launch import Launch, ParamBlock, prepared
from mok_ref.gpu.portable import PARTS, SCALE_RULE_CODES

SOURCE = "megakernel_mxfp8_backward.cu"
CODE_STAGE_BYTES = (TILE_ROWS + TILE_COLUMNS) * (64 + 2)
SHARED_BYTES = 3 * 49152 + 8 * 4096 + 2 * CODE_STAGE_BYTES + 4 * 32 + 34 * 8
"""Dynamic shared memory of a CTA: ring, staging, code stages, task queue, barriers."""

_POINTER = np.uint64
DGRAD_PARAMS = np.dtype(
    [
        ("base", bf16.DGRAD_PARAMS),
        *[
            (name, _POINTER)
            for name in (
                "dy_scales",
                "x_scales",
                "d_gate",
                "d_up",
                "d_gate_scales",
                "d_up_scales",
            )
        ],
        ("scale_rule", np.int32),
        ("reserved", np.int32),
    ],
    align=True,
)
"""Struct MxfpDgradParams."""

WGRAD_MAPS = np.dtype([("codes", bf16.WGRAD_MAPS), ("scales", bf16.WGRAD_MAPS)])
"""Struct MxfpWgradMaps."""

RINGS = ("x", "dy", "d_gate", "d_up")
CODES, SCALES = ("UINT8", "NONE"), ("UINT16", "NONE")
"""Element type and swizzle of the maps of codes and of pairs of scales."""


def ring_buffers(workspace: Any) -> dict[str, Any]:
    """Codes and scales of the rings: x, which forward fills, and those of backward; made once."""
    config, rows = workspace.config, workspace.sizes.macro_blocks * ROW_TILE
    forward = hopper_mxfp8.ring_buffers(workspace)
    rings = {"x": forward["x_codes"], "x_scales": forward["x_scales"]}
    for name in RINGS[1:]:
        width = config.hidden_size if name == "dy" else config.intermediate_size
        rings[name] = workspace.scratch(f"{name}_ring_codes", (rows, width), np.uint8)
        rings[f"{name}_scales"] = workspace.scratch(
            f"{name}_ring_scales", (scale_words(width), rows), np.uint16
        )
    return rings


def make_buffers(workspace: Any) -> None:
    """Every buffer that only these kernels use, made once per workspace."""
    bf16.make_buffers(workspace), ring_buffers(workspace), _shared_counters(workspace)


def _shared_counters(workspace: Any) -> Any:
    words = 64 + 2 * bf16._shared_blocks(workspace.sizes)
    return workspace.scratch("hopper_shared_counters", (words,), np.uint32)


# ---- tensor maps


def encode_codes(
    pointer: int, columns: int, rows: int, batch: int = 1, box_rows: int = TILE_ROWS
) -> np.ndarray:
    """Map of row-major [batch, rows, columns] codes as K-major operand: 64 columns a box."""
    if pointer == 0 or rows * columns * batch == 0:
        return np.zeros(16, np.uint64)
    strides = (columns, rows * columns)
    dims, box = (columns, rows, batch), (64, box_rows, 1)
    return encode_tiled(pointer, dims, strides, box, *CODES)


def encode_code_columns(
    pointer: int, columns: int, rows: int, batch: int = 1, boxes: int = 4
) -> np.ndarray:
    """Map of row-major [batch, rows, columns] codes as MN-major operand, like `encode_columns`."""
    if pointer == 0 or rows * columns * batch == 0:
        return np.zeros(16, np.uint64)
    matrix = rows * columns
    if columns % 64:
        strides = (columns, matrix, matrix)
        return encode_tiled(pointer, (columns, rows, 1, batch), strides, (64, 64, 1, 1), *CODES)
    dims = (64, rows, columns // 64, batch)
    return encode_tiled(pointer, dims, (columns, 64, matrix), (64, 64, boxes, 1), *CODES)


def encode_scales(
    pointer: int, columns: int, rows: int, batch: int, box: tuple[int, int]
) -> np.ndarray:
    """Map of [batch, ceil(columns / 64), rows] pairs of scale bytes.

    box   rows and blocks of 64 columns that one copy fetches
    """
    if pointer == 0 or rows * columns * batch == 0:
        return np.zeros(16, np.uint64)
    words = scale_words(columns)
    strides = (2 * rows, 2 * rows * words)
    return encode_tiled(pointer, (rows, words, batch), strides, (*box, 1), *SCALES)


def _dgrad_maps(layer: Any, back: Any, again: dict[str, int], at: dict[str, int]) -> np.ndarray:
    """DGRAD_MAPS: codes (and what stays bf16) in place of `routed`, scales in that of `shared`.

    at   addresses of codes and scales: rings by name, weights w_gate, w_up, w_down
    """
    maps = np.zeros(1, bf16.DGRAD_MAPS)
    codes, scales = maps["routed"][0], maps["shared"][0]
    hidden, width = int(layer["hidden_size"]), int(layer["intermediate_size"])
    ring, experts = int(layer["macro_blocks"]) * ROW_TILE, int(layer["num_local_experts"])
    for name in RINGS:
        columns = hidden if name in ("x", "dy") else width
        codes[name] = encode_codes(at[name], columns, ring)
        scales[name] = encode_scales(at[f"{name}_scales"], columns, ring, 1, (TILE_ROWS, 1))
    for part in PARTS:
        name = f"w_{part}"
        columns, rows = (width, hidden) if part == "down" else (hidden, width)
        size = (columns, rows, experts)
        codes[name] = encode_code_columns(at[name], *size)
        scales[name] = encode_scales(at[f"{name}_scales"], *size, (64, TILE_COLUMNS // 64))
        if part != "down":
            codes[f"{name}_rows"] = encode_codes(at[name], *size, TILE_COLUMNS)
            scales[f"{name}_rows"] = encode_scales(at[f"{name}_scales"], *size, (TILE_COLUMNS, 1))
    for name in ("gate", "up"):
        saved_rows = int(layer["max_saved_rows"])
        codes[f"{name}_saved"] = encode_rows(int(layer[f"{name}_saved"]), width, saved_rows)
        codes[f"{name}_again"] = encode_rows(again[name], width, ring)
    codes["hw_out"] = encode_rows(int(back["hw_ring"]), width, ring, box_rows=TILE_ROWS // 2)
    return maps


def _wgrad_maps(layer: Any, back: Any, at: dict[str, int]) -> np.ndarray:
    """WGRAD_MAPS: products down, gate, up; hw is the only bf16 operand."""
    maps = np.zeros(1, WGRAD_MAPS)
    codes, scales = maps["codes"][0], maps["scales"][0]
    hidden, width = int(layer["hidden_size"]), int(layer["intermediate_size"])
    ring = int(layer["macro_blocks"]) * ROW_TILE
    for product, name in enumerate(("dy", "d_gate", "d_up")):
        columns = hidden if product == 0 else width
        codes["rows_out"][product] = encode_code_columns(at[name], columns, ring, boxes=2)
        scales["rows_out"][product] = encode_scales(
            at[f"{name}_scales"], columns, ring, 1, (64, TILE_ROWS // 64)
        )
    codes["gradient"] = bf16.gradient_maps(layer, back)
    codes["rows_in"][0] = encode_columns(int(back["hw_ring"]), width, ring)
    for product in (1, 2):
        codes["rows_in"][product] = encode_code_columns(at["x"], hidden, ring)
        scales["rows_in"][product] = encode_scales(
            at["x_scales"], hidden, ring, 1, (64, TILE_COLUMNS // 64)
        )
    return maps


# ---- launches


def warm_up(workspace: Any) -> None:
    """Compile and load every kernel of a step; on every rank before its first barrier."""
    bf16.warm_up(workspace)
    clamped = workspace.config.swiglu_limit is not None
    if workspace.config.shared_intermediate_size:
        _ = load_kernel(bf16.SOURCE, bf16._dgrad_name(clamped), (), bf16.SHARED_BYTES).num_regs
    for name in (_dgrad_name(clamped), "moe_wgrad_mxfp8_hopper"):
        _ = load_kernel(SOURCE, name, (), SHARED_BYTES).num_regs


def launch_backward(workspace: Any, layer: ParamBlock, back: ParamBlock, stream: Any) -> None:
    """The products of `moe_backward`, from the barrier behind dy to the one behind which all dx
    rows are here; collective.

    layer, back   LAYER_PARAMS and BACKWARD_PARAMS blocks of this call; codes and scales of the
                  weights, and of the x rows of macrobatch 0, lie where the forward kernel left them
    """
    state = workspace.extra("hopper_mxfp8_backward", lambda: _State(workspace))
    plan = prepared(back, "hopper_mxfp8_backward", lambda: state.plan(layer, back))
    for launch in (*plan.routed, plan.weights):
        launch(stream)
    if plan.chain:
        bf16._launch_chain(workspace.heap, plan, stream)
    workspace.heap.barrier(BARRIER_DX)


class _State(bf16._State):
    """The bf16 launches' state with rings of codes and scales instead of values."""

    def __init__(self, workspace: Any) -> None:
        super().__init__(workspace)
        self.rule = SCALE_RULE_CODES[workspace.config.scale_rule]
        self.shared_counters = _shared_counters(workspace)
        self.counters.append(self.shared_counters)
        buffers = ring_buffers(workspace)
        for name, buffer in hopper_mxfp8.weight_buffers(workspace).items():
            buffers[name.removesuffix("_codes")] = buffer
        self.at = {name: bf16._address(buffer) for name, buffer in buffers.items()}

    def _routed_launches(self, layer: Any, back: Any, with_dx: bool = False) -> list[Launch]:
        """The shared expert's rows, then per macrobatch dgrad and wgrad."""
        launches = []
        if int(layer["shared_intermediate_size"]):
            launches.append(self._shared_launch(layer, back))
        routed = np.array(layer)
        routed["shared_intermediate_size"] = 0
        dgrad_maps = _dgrad_maps(layer, back, self.again, self.at)
        wgrad_maps = _wgrad_maps(layer, back, self.at)
        dgrad = _dgrad_name(bool(layer["has_limit"]))
        for macro in range(bf16.num_macrobatches(self.sizes)):
            params = self._mxfp_dgrad_params(layer, back, macro)
            launches.append(_launch(dgrad, routed, params, dgrad_maps))
            if layer["num_local_experts"]:
                params = self._wgrad_params(layer, back, macro)
                launches.append(_launch("moe_wgrad_mxfp8_hopper", routed, params, wgrad_maps))
        return launches

    def _shared_launch(self, layer: Any, back: Any) -> Launch:
        """The bf16 kernel on a macrobatch of no row blocks: the shared expert's tiles alone."""
        params = self._dgrad_params(layer, back, 0)
        params["macro_blocks"] = 0
        params["counters"] = bf16._address(self.shared_counters)
        maps = bf16._dgrad_maps(layer, back, self.again)
        return bf16._launch(bf16._dgrad_name(bool(layer["has_limit"])), layer, params, maps)

    def _mxfp_dgrad_params(self, layer: Any, back: Any, macro: int) -> np.ndarray:
        params = np.zeros(1, DGRAD_PARAMS)
        params["base"] = self._dgrad_params(layer, back, macro)
        params["base"]["dy_ring"], params["base"]["x_ring"] = self.at["dy"], self.at["x"]
        for name in ("d_gate", "d_up"):
            params[name] = self.at[name]
        for name in RINGS:
            params[f"{name}_scales"] = self.at[f"{name}_scales"]
        params["scale_rule"] = self.rule
        return params


def _dgrad_name(has_limit: bool) -> str:
    return "moe_dgrad_mxfp8_clamp_hopper" if has_limit else "moe_dgrad_mxfp8_hopper"


def _launch(name: str, *blocks: np.ndarray) -> Launch:
    """A persistent kernel: one CTA per multiprocessor."""
    kernel = load_kernel(SOURCE, name, (), SHARED_BYTES)
    return Launch(kernel, (bf16._num_multiprocessors(),), bf16.THREADS, blocks, SHARED_BYTES)
