"""Launches of the backward megakernels: tensor maps, parameters, the ordered chain's pipeline.

CUDA twins: cuda_src/megakernel_backward.cu, cuda_src/megakernel_backward_clusters.cu and
cuda_src/backward_*.cuh. Per macrobatch one dgrad launch (pull, dhu, SwiGLU backward, dx, push) and
one wgrad launch, the last with dx; then the replicated gradients.
Everything is enqueued on the current stream; nothing synchronises the host, and only the first call
of a workspace allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.errors import BARRIER_CHAIN, BARRIER_DX
from mok_ref.gpu.hopper import encode_tiled
from mok_ref.gpu.launch import NUM_MULTIPROCESSORS, Launch, ParamBlock, clearing, prepared
from mok_ref.gpu.params import SYMMETRIC_BUFFERS

SOURCE, CLUSTER_SOURCE = "megakernel_backward.cu", "megakernel_backward_clusters.cu"
THREADS = 384
SHARED_BYTES = 4 * 49152 + 8 * 4096 + 4 * 32 + 8 * 32
"""Dynamic shared memory of a CTA (SharedLayout::kBytes): ring, staging, task queue, barriers."""

TILE_ROWS, TILE_COLUMNS = 128, 256
CLUSTER_SIZE = 2
CLUSTER_SHARED_BYTES = SHARED_BYTES + 48  # letters between its CTAs
CLUSTER_BOXES = 4 // CLUSTER_SIZE  # of 64 columns of operand B, in one copy
WGRAD, WGRAD_PAIRS = "moe_wgrad_hopper", "moe_wgrad_pairs_hopper"
WGRAD_SOURCES = {WGRAD: CLUSTER_SOURCE, WGRAD_PAIRS: SOURCE}
PAIRS_BELOW_ROWS = {"bf16": 1024, "float32": 4096}
"""Rows per expert, on average, below which the warpgroups of the wgrad kernel take turns.

Both kernels run in clusters of two CTAs. Turns hide the store of a tile behind the other half's
products, but read operands more often from shared memory: they pay while the store, twice as long
in float32, is a large part of a tile (docs/tuning_backward.md).
"""

TICKET_WORDS = 32  # one counter per 128 bytes
HIDDEN_DONE_WORD = 16  # of DgradCounters
BLOCK_GROUP = 16  # kBlockGroup: row blocks whose tiles are walked column by column
COLLECT_THREADS = 256

_POINTER = np.uint64
TENSOR_MAP = np.dtype((np.uint64, (16,)))
NUM_PRODUCTS = 4

DGRAD_OPERANDS = (
    "dy", "x", "d_gate", "d_up", "w_gate", "w_up", "w_down", "w_gate_rows", "w_up_rows",
    "gate_saved", "up_saved", "gate_again", "up_again", "d_gate_out", "d_up_out", "hw_out",
)  # fmt: skip
_DGRAD_SIDE = np.dtype([(name, TENSOR_MAP) for name in DGRAD_OPERANDS])
DGRAD_MAPS = np.dtype([("routed", _DGRAD_SIDE), ("shared", _DGRAD_SIDE)])
"""Struct DgradMaps."""

DGRAD_PARAMS = np.dtype(
    [
        ("macro_index", np.int32),
        ("macro_blocks", np.int32),
        ("mini_blocks", np.int32),
        ("x_in_ring", np.int32),
        ("shared_saved_rows", np.int32),
        ("shared_blocks", np.int32),
        ("counters", _POINTER),
        ("dy_ring", _POINTER),
        ("x_ring", _POINTER),
        ("gate_again", _POINTER),
        ("up_again", _POINTER),
        ("shared_gate_again", _POINTER),
        ("shared_up_again", _POINTER),
        ("shared_dx", _POINTER),
        ("dot_partial", _POINTER),
    ],
    align=True,
)
"""Struct DgradParams."""

WGRAD_MAPS = np.dtype(
    [(name, TENSOR_MAP, (NUM_PRODUCTS,)) for name in ("rows_out", "rows_in", "gradient")]
)
"""Struct WgradMaps."""

WGRAD_PARAMS = np.dtype(
    [
        ("macro_index", np.int32),
        ("macro_blocks", np.int32),
        ("num_products", np.int32),
        ("gradient_type", np.int32),
        ("start_type", np.int32),
        ("accumulate", np.int32),
        ("first_tile", np.int32),
        ("end_tile", np.int32),
        ("num_rows", np.int32),
        ("rows", np.int32, (NUM_PRODUCTS,)),
        ("columns", np.int32, (NUM_PRODUCTS,)),
        ("ticket", _POINTER),
        ("start", _POINTER, (NUM_PRODUCTS,)),
        ("gradient", _POINTER, (NUM_PRODUCTS,)),
        ("straddling", _POINTER, (NUM_PRODUCTS,)),
        ("bulk_stores", np.int32),
        ("with_dx", np.int32),
        ("hidden_done", _POINTER),
    ],
    align=True,
)
"""Struct WgradParams."""

FLOAT32_GRADIENT = 0  # of start_type and gradient_type; bf16 is 1, as in dw_is_bf16


class ExtraBuffer(NamedTuple):
    """One array that only these kernels use."""

    shape: tuple[int, ...]
    dtype: Any


def extra_buffers(config: MoEConfig, sizes: Any) -> dict[str, ExtraBuffer]:
    """Buffers beside those of `mok_ref.gpu.workspace`, by name, for the given `Sizes`.

    gate_again, up_again   gate and up made again in backward, if gate_saved has no room for them
    straddling             float32 chains that cross a macrobatch while gradients are bf16
    """
    macro_rows, inner = sizes.macro_blocks * ROW_TILE, config.intermediate_size
    again_rows = macro_rows if sizes.max_saved_rows < macro_rows else 0
    macros = num_macrobatches(sizes)
    crosses = config.grad_dtype == "bf16" and macros > 1
    words = _dgrad_words(sizes) * macros + TICKET_WORDS * (macros + 1 + 2 * config.ep_size)
    f32, bf16 = np.float32, np.uint16
    return {
        "counters": ExtraBuffer((words,), np.uint32),
        "dot_partial": ExtraBuffer((2 * -(-inner // TILE_COLUMNS), macro_rows), f32),
        "gate_again": ExtraBuffer((again_rows, inner), bf16),
        "up_again": ExtraBuffer((again_rows, inner), bf16),
        "straddling": ExtraBuffer((3, 2 if crosses else 0, inner, config.hidden_size), f32),
    }


def make_buffers(workspace: Any) -> dict[str, Any]:
    """The arrays of `extra_buffers`, made once per workspace."""
    extra = extra_buffers(workspace.config, workspace.sizes)
    return {name: workspace.scratch(f"hopper_{name}", *buffer) for name, buffer in extra.items()}


def num_macrobatches(sizes: Any) -> int:
    """Launches that cover the worst routing; those that the routing does not need end at once."""
    return -(-sizes.max_row_blocks // sizes.macro_blocks)


def _shared_blocks(sizes: Any) -> int:
    return -(-sizes.max_tokens // ROW_TILE)


def _dgrad_words(sizes: Any) -> int:
    """Words of one launch's DgradCounters, a multiple of 32."""
    words = 64 + 4 * sizes.macro_blocks + 2 * _shared_blocks(sizes)
    return -(-words // TICKET_WORDS) * TICKET_WORDS


# ---- tensor maps


def encode_rows(
    pointer: int, columns: int, rows: int, batch: int = 1, box_rows: int = TILE_ROWS
) -> np.ndarray:
    """Map of a row-major [batch, rows, columns] bf16 array by boxes of `box_rows` rows, 64 columns.

    For K-major operands and stored tiles. Elements outside read as +0 and are not written. Zeros
    if there is nothing to map.
    """
    if pointer == 0 or rows * columns * batch == 0:
        return np.zeros(16, np.uint64)
    strides = (2 * columns, 2 * rows * columns)
    return encode_tiled(pointer, (columns, rows, batch), strides, (64, box_rows, 1))


def encode_columns(
    pointer: int, columns: int, rows: int, batch: int = 1, boxes: int = 4
) -> np.ndarray:
    """Map of a row-major [batch, rows, columns] bf16 array as MN-major operand, K along rows.

    One copy fetches 64 rows of `boxes` blocks of 64 columns, or of one block when the columns are
    no multiple of 64 (then those outside read as +0).
    """
    if pointer == 0 or rows * columns * batch == 0:
        return np.zeros(16, np.uint64)
    row, matrix = 2 * columns, 2 * rows * columns
    if columns % 64:
        strides = (row, matrix, matrix)
        return encode_tiled(pointer, (columns, rows, 1, batch), strides, (64, 64, 1, 1))
    dims = (64, rows, columns // 64, batch)
    return encode_tiled(pointer, dims, (row, 128, matrix), (64, 64, boxes, 1))


def encode_gradient(
    pointer: int, columns: int, rows: int, experts: int, in_bf16: bool
) -> np.ndarray:
    """Map of a [experts, rows, columns] weight gradient, stored 16 rows of 128 bytes at a time."""
    if rows * columns * experts == 0:
        return np.zeros(16, np.uint64)
    element, size = ("BFLOAT16", 2) if in_bf16 else ("FLOAT32", 4)
    strides = (size * columns, size * rows * columns)
    return encode_tiled(pointer, (columns, rows, experts), strides, (128 // size, 16, 1), element)


def _dgrad_maps(layer: Any, back: Any, again: dict[str, int], boxes: int = 4) -> np.ndarray:
    """DGRAD_MAPS of one rank.

    again  addresses of gate and up made again, routed and shared
    boxes  of 64 columns that a copy of a weight tile fetches
    """
    ring, tokens = int(layer["macro_blocks"]) * ROW_TILE, int(layer["num_tokens"])
    routed = {name: int(back[f"{name}_ring"]) for name in ("dy", "d_gate", "d_up", "hw")}
    routed |= {name: int(layer[name]) for name in ("gate_saved", "up_saved")}
    routed |= {f"{name}_again": again[name] for name in ("gate", "up")}
    routed["x"] = int(layer["x_ring"])
    shared = {"dy": int(back["dy_in"]), "x": int(layer["x_in"])}
    shared |= {name: int(back[f"shared_{name}"]) for name in ("d_gate", "d_up")}
    shared["hw"] = int(layer["shared_h"])  # hw = h: the same bits again
    for name in ("gate", "up"):
        shared[f"{name}_saved"] = shared[f"{name}_again"] = again[f"shared_{name}"]
    maps = np.zeros(1, DGRAD_MAPS)
    width, saved = int(layer["intermediate_size"]), int(layer["max_saved_rows"])
    experts, shared_width = int(layer["num_local_experts"]), int(layer["shared_intermediate_size"])
    _fill_side(maps["routed"][0], layer, "", routed, width, ring, saved, experts, boxes)
    _fill_side(maps["shared"][0], layer, "shared_", shared, shared_width, tokens, tokens, 1, boxes)
    return maps


def _fill_side(
    side: Any,
    layer: Any,
    prefix: str,
    pointers: dict[str, int],
    width: int,
    rows: int,
    saved_rows: int,
    experts: int,
    boxes: int,
) -> None:
    """The maps of the routed experts or of the shared one."""
    hidden = int(layer["hidden_size"])
    for name in ("dy", "x"):
        side[name] = encode_rows(pointers[name], hidden, rows)
    for name in ("d_gate", "d_up"):
        side[name] = encode_rows(pointers[name], width, rows)
    for name in ("d_gate", "d_up", "hw"):
        side[f"{name}_out"] = encode_rows(pointers[name], width, rows, box_rows=TILE_ROWS // 2)
    for name in ("gate", "up"):
        side[f"{name}_saved"] = encode_rows(pointers[f"{name}_saved"], width, saved_rows)
        side[f"{name}_again"] = encode_rows(pointers[f"{name}_again"], width, rows)
        weight = int(layer[f"{prefix}w_{name}"])
        side[f"w_{name}"] = encode_columns(weight, hidden, width, experts, boxes)
        side[f"w_{name}_rows"] = encode_rows(weight, hidden, width, experts, TILE_COLUMNS)
    side["w_down"] = encode_columns(int(layer[f"{prefix}w_down"]), width, hidden, experts, boxes)


def _wgrad_maps(layer: Any, back: Any, in_boxes: int) -> np.ndarray:
    """WGRAD_MAPS of the routed experts."""
    sizes = (int(layer["hidden_size"]), int(layer["intermediate_size"]))
    names = ("dy_ring", "d_gate_ring", "d_up_ring", "hw_ring")
    pointers = (*(int(back[name]) for name in names), int(layer["x_ring"]))
    maps = _product_maps(sizes, int(layer["macro_blocks"]) * ROW_TILE, pointers, in_boxes)
    maps["gradient"][0] = gradient_maps(layer, back)
    return maps


def gradient_maps(layer: Any, back: Any) -> np.ndarray:
    """The weight gradients of the routed experts as maps to store through, by product."""
    experts, in_bf16 = int(layer["num_local_experts"]), bool(back["dw_is_bf16"])
    maps = np.zeros((NUM_PRODUCTS, 16), np.uint64)
    for product, name, columns, rows in _products(
        int(layer["hidden_size"]), int(layer["intermediate_size"])
    ):
        pointer = int(back[f"dw_{name}"])
        maps[product] = encode_gradient(pointer, columns, rows, experts, in_bf16)
    return maps


def _chain_maps(layer: Any, back: Any) -> np.ndarray:
    """WGRAD_MAPS of the shared expert: this rank's tokens."""
    sizes = (int(layer["hidden_size"]), int(layer["shared_intermediate_size"]))
    d_gate, d_up = int(back["shared_d_gate"]), int(back["shared_d_up"])
    pointers = (int(back["dy_in"]), d_gate, d_up, int(layer["shared_h"]), int(layer["x_in"]))
    return _product_maps(sizes, int(layer["num_tokens"]), pointers)


def _product_maps(
    sizes: tuple[int, int], num_rows: int, pointers: tuple[int, ...], in_boxes: int = 4
) -> np.ndarray:
    """Products down, gate, up: A (M columns, two boxes) and B (N columns, `in_boxes`).

    sizes (H, I); pointers of dy, d_gate, d_up, hw, x
    """
    hidden, width = sizes
    dy, d_gate, d_up, hw, x = pointers
    maps = np.zeros(1, WGRAD_MAPS)
    for product, pointer in enumerate((dy, d_gate, d_up)):
        columns = hidden if product == 0 else width
        maps["rows_out"][0, product] = encode_columns(pointer, columns, num_rows, boxes=2)
    maps["rows_in"][0, 0] = encode_columns(hw, width, num_rows, boxes=in_boxes)
    maps["rows_in"][0, 1:3] = encode_columns(x, hidden, num_rows, boxes=in_boxes)
    return maps


def _products(hidden_size: int, inner: int) -> tuple[tuple[int, str, int, int], ...]:
    """(product, name, columns N, rows M) of the three weight gradients."""
    return (
        (0, "down", inner, hidden_size),
        (1, "gate", hidden_size, inner),
        (2, "up", hidden_size, inner),
    )


# ---- launches


def warm_up(workspace: Any) -> None:
    """Compile and load every kernel of a step; on every rank before its first barrier."""
    dgrad = _dgrad_name(workspace.config.swiglu_limit is not None)
    for name in (WGRAD_PAIRS, "moe_chain_hopper"):
        _ = load_kernel(SOURCE, name, (), SHARED_BYTES).num_regs
    for name in (dgrad, WGRAD):
        _ = load_kernel(CLUSTER_SOURCE, name, (), CLUSTER_SHARED_BYTES).num_regs
    _ = load_kernel(SOURCE, "moe_chain_collect").num_regs


def launch_backward(
    workspace: Any, layer: ParamBlock, back: ParamBlock, stream: Any, with_dx: bool = False
) -> None:
    """The products of `moe_backward`, from the barrier behind dy on; collective.

    Pushes dx rows and d_topk_weights to their owners, then comes the barrier behind which those of
    all ranks are here; writes all weight gradients.
    layer, back   LAYER_PARAMS and BACKWARD_PARAMS blocks of this call; the x rows of macrobatch 0
                  still lie in the ring as the forward kernel left them
    with_dx       whether the last kernel of the routed experts makes dx and d_topk_weights of this
                  rank's tokens, too: they are bound by memory and its products are not
    """

    def build() -> Plan:
        state = workspace.extra("hopper_backward", lambda: _State(workspace))
        return state.plan(layer, back, with_dx)

    plan: Plan = prepared(back, ("hopper_backward", with_dx), build)
    for launch in plan.routed:
        launch(stream)
    workspace.heap.barrier(BARRIER_DX)
    plan.weights(stream)
    if plan.chain:
        _launch_chain(workspace.heap, plan, stream)


def launch_backward_with_dx(
    workspace: Any, layer: ParamBlock, back: ParamBlock, stream: Any
) -> None:
    """`launch_backward` with dx."""
    launch_backward(workspace, layer, back, stream, with_dx=True)


def last_launch_has_rows(sizes: Any, layer: ParamBlock) -> bool:
    """Whether a balanced load reaches the last macrobatch.

    One of several ranks has room for more: then the last kernel has no products beside which dx
    could be made, and too few warps to make it alone as fast as a kernel of its own does.
    """
    rows = int(layer["num_tokens"]) * int(layer["top_k"])
    rows += int(layer["num_local_experts"]) * ROW_TILE // 2  # padding, half a tile each
    return rows > (num_macrobatches(sizes) - 1) * sizes.macro_blocks * ROW_TILE


def _launch_chain(heap: Any, plan: Plan, stream: Any) -> None:
    """Weight gradients of the shared expert by the ordered chain (spec eq. 6.10).

    With R ranks and G groups of tiles, R + G - 1 launches between barriers: in launch p rank r
    continues group p - r. The last rank's accumulators are the result, which every rank fetches.
    """
    groups = len(plan.chain)
    for turn in range(heap.size + groups - 1):
        group = turn - heap.rank
        if 0 <= group < groups:
            plan.chain[group](stream)
        if heap.size > 1:
            heap.barrier(BARRIER_CHAIN)
    plan.collect(stream)


class Plan(NamedTuple):
    """The launches of one set of arrays."""

    routed: list[Callable[[Any], None]]  # behind what clears the counters
    weights: Launch  # the last weight gradients of the routed experts, perhaps with dx
    chain: list[Launch]  # per group of tiles; empty without a shared expert
    collect: Launch


class _State:
    """What these launches keep with a workspace: extra buffers and addresses."""

    def __init__(self, workspace: Any) -> None:
        self.sizes, self.rank = workspace.sizes, workspace.heap.rank
        self.alone = workspace.heap.size == 1
        self.extra = make_buffers(workspace)
        self.counters = [self.extra["counters"]]  # zero when a backward begins
        table = workspace.buffers["peer_table"].get()
        self.chain_addresses = [int(address) for address in table[SYMMETRIC_BUFFERS["chain"]]]
        self.again = self._again_addresses(workspace)

    def _again_addresses(self, workspace: Any) -> dict[str, int]:
        """Where gate and up are made again: over the rows that forward kept, if a macrobatch fits.

        Ring row r lies where forward kept row r of macrobatch 0, which is done with by the time a
        later macrobatch writes there; inside macrobatch 0 the bits written are those kept before.
        """
        buffers, addresses = workspace.buffers, {}
        for name in ("gate", "up"):
            own = self.extra[f"{name}_again"]
            addresses[name] = _address(own if own.size else buffers[f"{name}_saved"])
            shared = buffers.get(f"shared_{name}")
            addresses[f"shared_{name}"] = 0 if shared is None else _address(shared)
        return addresses

    def plan(self, layer: ParamBlock, back: ParamBlock, with_dx: bool = False) -> Plan:
        """The launches for the arrays named in the blocks."""
        shared = int(layer["shared_intermediate_size"]) > 0
        chain = self._chain_launches(layer, back) if shared else []
        *routed, weights = self._routed_launches(layer, back, with_dx)
        clear = [clearing(counters) for counters in self.counters]
        return Plan([*clear, *routed], weights, chain, self._collect_launch(layer, back))

    def _routed_launches(self, layer: Any, back: Any, with_dx: bool) -> list[Launch]:
        """Per macrobatch dgrad, then wgrad (of a rank without experts it finds no tiles)."""
        wgrad = _wgrad_name(layer, back)
        dgrad_maps = _dgrad_maps(layer, back, self.again, CLUSTER_BOXES)
        wgrad_maps = _wgrad_maps(layer, back, 1 if wgrad == WGRAD_PAIRS else CLUSTER_BOXES)
        dgrad = _dgrad_name(bool(layer["has_limit"]))
        launches: list[Launch] = []
        macros = num_macrobatches(self.sizes)
        for macro in range(macros):
            params = self._dgrad_params(layer, back, macro)
            launches.append(_launch(dgrad, layer, params, dgrad_maps, source=CLUSTER_SOURCE))
            params = self._wgrad_params(layer, back, macro)
            params["with_dx"] = with_dx and macro == macros - 1
            early = self.alone and macro == 0  # x rows are in the ring, no barrier in between
            params["hidden_done"] = self._hidden_done(macro) if early else 0
            blocks, source = (layer, params, wgrad_maps, back), WGRAD_SOURCES[wgrad]
            launches.append(_launch(wgrad, *blocks, source=source, early=early))
        return launches

    def _chain_launches(self, layer: Any, back: Any) -> list[Launch]:
        """One launch per group of tiles."""
        maps = _chain_maps(layer, back)
        hidden, width = int(layer["hidden_size"]), int(layer["shared_intermediate_size"])
        tiles = sum(
            -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
            for _, _, columns, rows in _products(hidden, width)
        )
        groups = min(len(self.chain_addresses), tiles)
        bounds = [group * tiles // groups for group in range(groups + 1)]
        return [
            _launch(
                "moe_chain_hopper",
                layer,
                self._chain_params(layer, back, group, bounds),
                maps,
            )
            for group in range(groups)
        ]

    def _collect_launch(self, layer: Any, back: Any) -> Launch:
        words = int(layer["hidden_size"]) * int(layer["shared_intermediate_size"])
        names = ("shared_dw_down", "shared_dw_gate", "shared_dw_up")
        targets = tuple(np.uint64(back[name]) for name in names)
        source = np.uint64(self.chain_addresses[-1])
        arguments = (source, *targets, np.int64(words), np.int32(back["dw_is_bf16"]))
        kernel = load_kernel(SOURCE, "moe_chain_collect")
        return Launch(kernel, (4 * _num_multiprocessors(),), COLLECT_THREADS, arguments)

    def _dgrad_params(self, layer: Any, back: Any, macro: int) -> np.ndarray:
        params = np.zeros(1, DGRAD_PARAMS)
        params["macro_index"], params["x_in_ring"] = macro, macro == 0
        params["macro_blocks"], params["mini_blocks"] = layer["macro_blocks"], _mini_blocks(layer)
        params["shared_saved_rows"] = layer["num_tokens"] if int(layer["shared_gate"]) else 0
        params["shared_blocks"] = _shared_blocks(self.sizes)
        params["counters"] = _address(self.extra["counters"]) + 4 * macro * _dgrad_words(self.sizes)
        params["dy_ring"], params["x_ring"] = back["dy_ring"], layer["x_ring"]
        for name, address in self.again.items():
            params[f"{name}_again"] = address
        params["dot_partial"] = _address(self.extra["dot_partial"])
        params["shared_dx"] = back["shared_dx"]
        return params

    def _wgrad_params(self, layer: Any, back: Any, macro: int) -> np.ndarray:
        params = np.zeros(1, WGRAD_PARAMS)
        params["macro_index"], params["macro_blocks"] = macro, layer["macro_blocks"]
        params["num_products"], params["accumulate"] = 3, back["dw_accumulate"]
        params["gradient_type"] = params["start_type"] = back["dw_is_bf16"]
        params["ticket"], params["bulk_stores"] = self._ticket(macro), 1
        hidden, inner = int(layer["hidden_size"]), int(layer["intermediate_size"])
        for product, name, columns, rows in _products(hidden, inner):
            params["rows"][0, product], params["columns"][0, product] = rows, columns
            params["start"][0, product] = params["gradient"][0, product] = back[f"dw_{name}"]
            params["straddling"][0, product] = _address(self.extra["straddling"][product])
        return params

    def _chain_params(self, layer: Any, back: Any, group: int, bounds: list[int]) -> np.ndarray:
        params = np.zeros(1, WGRAD_PARAMS)
        hidden, width = int(layer["hidden_size"]), int(layer["shared_intermediate_size"])
        params["num_products"], params["num_rows"] = 3, layer["num_tokens"]
        params["first_tile"], params["end_tile"] = bounds[group], bounds[group + 1]
        params["ticket"] = self._ticket(num_macrobatches(self.sizes) + group)
        first = self.rank == 0
        params["accumulate"] = back["dw_accumulate"] if first else 1
        params["start_type"] = back["dw_is_bf16"] if first else FLOAT32_GRADIENT
        for product, name, columns, rows in _products(hidden, width):
            params["rows"][0, product], params["columns"][0, product] = rows, columns
            offset = 4 * product * hidden * width
            handed = self.chain_addresses[self.rank - 1] + offset
            params["start"][0, product] = back[f"shared_dw_{name}"] if first else handed
            params["gradient"][0, product] = self.chain_addresses[self.rank] + offset
        return params

    def _hidden_done(self, macro: int) -> int:
        """DgradCounters::hidden_done of a macrobatch's launch."""
        words = macro * _dgrad_words(self.sizes) + HIDDEN_DONE_WORD
        return _address(self.extra["counters"]) + 4 * words

    def _ticket(self, index: int) -> int:
        macros = num_macrobatches(self.sizes)
        words = macros * _dgrad_words(self.sizes) + index * TICKET_WORDS
        return _address(self.extra["counters"]) + 4 * words


def _mini_blocks(layer: Any) -> int:
    """Row blocks of a step: enough to keep an H200's CTAs at work for six tiles, in whole groups.

    A dx tile waits for the hidden tiles of one step before; tickets are drawn two tiles ahead.
    """
    widths = (int(layer["hidden_size"]), int(layer["intermediate_size"]))
    tiles = sum(-(-width // TILE_COLUMNS) for width in widths)  # of one row block
    blocks = max(int(layer["mini_blocks"]), -(-6 * NUM_MULTIPROCESSORS // tiles))
    return -(-blocks // BLOCK_GROUP) * BLOCK_GROUP


def _address(array: Any) -> int:
    return int(array.data.ptr) if array.size else 0


def _wgrad_name(layer: Any, back: Any) -> str:
    """The kernel for this many rows per expert; both have the same bits."""
    rows = int(layer["num_tokens"]) * int(layer["top_k"]) * int(layer["ep_size"])
    limit = PAIRS_BELOW_ROWS["bf16" if back["dw_is_bf16"] else "float32"]
    return WGRAD_PAIRS if rows < limit * int(layer["num_experts"]) else WGRAD


def _dgrad_name(has_limit: bool) -> str:
    return "moe_dgrad_clamp_hopper" if has_limit else "moe_dgrad_hopper"


@cache
def _num_multiprocessors() -> int:
    import cupy

    device = cupy.cuda.runtime.getDevice()
    return int(cupy.cuda.runtime.deviceGetAttribute(16, device))  # MultiProcessorCount


def _launch(name: str, *blocks: np.ndarray, source: str = SOURCE, early: bool = False) -> Launch:
    """A persistent kernel: one CTA per multiprocessor, in whole clusters.

    early  it begins while the kernel before it ends (mok_ref.gpu.launch.Launch)
    """
    shared = CLUSTER_SHARED_BYTES if source == CLUSTER_SOURCE else SHARED_BYTES
    kernel = load_kernel(source, name, (), shared)
    ctas = _num_multiprocessors()
    in_clusters = source == CLUSTER_SOURCE or name == WGRAD_PAIRS
    grid = max(1, ctas // CLUSTER_SIZE) * CLUSTER_SIZE if in_clusters else ctas
    return Launch(kernel, (grid,), THREADS, blocks, shared, early)
