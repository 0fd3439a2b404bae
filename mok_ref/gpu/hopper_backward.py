"""Launches of the backward megakernels: tensor maps, parameters, the ordered chain's pipeline.

CUDA twins: cuda_src/megakernel_backward.cu and cuda_src/backward_*.cuh. Per macrobatch one dgrad
launch (pull, dhu, SwiGLU backward, dx, push) and one wgrad launch; then the replicated gradients.
Everything is enqueued on the current stream; nothing synchronises the host, and only the first call
of a workspace allocates.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.hopper import encode_tiled
from mok_ref.gpu.params import SYMMETRIC_BUFFERS, by_value

SOURCE = "megakernel_backward.cu"
THREADS = 384
SHARED_BYTES = 4 * 49152 + 8 * 4096 + 4 * 32 + 8 * 32
"""Dynamic shared memory of a CTA (SharedLayout::kBytes): ring, staging, task queue, barriers."""

TILE_ROWS, TILE_COLUMNS = 128, 256
TICKET_WORDS = 32  # one counter per 128 bytes
CHAIN_PHASE = 5  # kPhaseBarrierChain
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

WGRAD_MAPS = np.dtype([(name, TENSOR_MAP, (NUM_PRODUCTS,)) for name in ("rows_out", "rows_in")])
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
    ],
    align=True,
)
"""Struct WgradParams."""

FLOAT32_GRADIENT, BF16_GRADIENT = 0, 1

_FORWARD_ONLY = ("x_in", "ids_in", "weights_in", "y")
_EPILOGUE_ONLY = ("dy_in", "dx", "d_topk_weights", "router_dx")


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


def _dgrad_maps(layer: Any, back: Any, again: dict[str, int], own: dict[str, int]) -> np.ndarray:
    """DGRAD_MAPS of one rank.

    own    addresses of its symmetric x and dy
    again  addresses of gate and up made again, routed and shared
    """
    ring, tokens = int(layer["macro_blocks"]) * ROW_TILE, int(layer["num_tokens"])
    routed = {name: int(back[f"{name}_ring"]) for name in ("dy", "d_gate", "d_up", "hw")}
    routed |= {name: int(layer[name]) for name in ("gate_saved", "up_saved")}
    routed |= {f"{name}_again": again[name] for name in ("gate", "up")}
    routed["x"] = int(layer["x_ring"])
    shared = {name: own[name] for name in ("dy", "x")}
    shared |= {name: int(back[f"shared_{name}"]) for name in ("d_gate", "d_up")}
    shared["hw"] = int(layer["shared_h"])  # hw = h: the same bits again
    for name in ("gate", "up"):
        shared[f"{name}_saved"] = shared[f"{name}_again"] = again[f"shared_{name}"]
    maps = np.zeros(1, DGRAD_MAPS)
    width, saved = int(layer["intermediate_size"]), int(layer["max_saved_rows"])
    experts, shared_width = int(layer["num_local_experts"]), int(layer["shared_intermediate_size"])
    _fill_side(maps["routed"][0], layer, "", routed, width, ring, saved, experts)
    _fill_side(maps["shared"][0], layer, "shared_", shared, shared_width, tokens, tokens, 1)
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
        side[f"w_{name}"] = encode_columns(weight, hidden, width, experts)
        side[f"w_{name}_rows"] = encode_rows(weight, hidden, width, experts, TILE_COLUMNS)
    side["w_down"] = encode_columns(int(layer[f"{prefix}w_down"]), width, hidden, experts)


def _wgrad_maps(layer: Any, back: Any) -> np.ndarray:
    """WGRAD_MAPS of the routed experts."""
    sizes = (int(layer["hidden_size"]), int(layer["intermediate_size"]))
    names = ("dy_ring", "d_gate_ring", "d_up_ring", "hw_ring")
    pointers = (*(int(back[name]) for name in names), int(layer["x_ring"]))
    return _product_maps(sizes, int(layer["macro_blocks"]) * ROW_TILE, pointers)


def _chain_maps(layer: Any, back: Any, own: dict[str, int]) -> np.ndarray:
    """WGRAD_MAPS of the shared expert: this rank's tokens."""
    sizes = (int(layer["hidden_size"]), int(layer["shared_intermediate_size"]))
    d_gate, d_up = int(back["shared_d_gate"]), int(back["shared_d_up"])
    pointers = (own["dy"], d_gate, d_up, int(layer["shared_h"]), own["x"])
    return _product_maps(sizes, int(layer["num_tokens"]), pointers)


def _product_maps(sizes: tuple[int, int], num_rows: int, pointers: tuple[int, ...]) -> np.ndarray:
    """Products down, gate, up: A (M columns, two boxes) and B (N columns, four boxes).

    sizes (H, I); pointers of dy, d_gate, d_up, hw, x
    """
    hidden, width = sizes
    dy, d_gate, d_up, hw, x = pointers
    maps = np.zeros(1, WGRAD_MAPS)
    for product, pointer in enumerate((dy, d_gate, d_up)):
        columns = hidden if product == 0 else width
        maps["rows_out"][0, product] = encode_columns(pointer, columns, num_rows, boxes=2)
    maps["rows_in"][0, 0] = encode_columns(hw, width, num_rows)
    maps["rows_in"][0, 1] = maps["rows_in"][0, 2] = encode_columns(x, hidden, num_rows)
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
    for name in (dgrad, "moe_wgrad_hopper", "moe_chain_hopper"):
        _ = load_kernel(SOURCE, name, (), SHARED_BYTES).num_regs
    _ = load_kernel(SOURCE, "moe_chain_collect").num_regs


def launch_backward(
    workspace: Any, layer: np.ndarray, back: np.ndarray, stream: Any = None
) -> None:
    """Everything between the barriers of `moe_backward`; collective if there is a shared expert.

    Pushes dx rows and d_topk_weights to their owners and writes all weight gradients.
    layer, back   LAYER_PARAMS and BACKWARD_PARAMS blocks of this call; the x rows of macrobatch 0
                  still lie in the ring as the forward kernel left them
    """
    state = workspace.extra("hopper_backward", lambda: _State(workspace))
    plan = state.plan(layer, back)
    counters = state.extra["counters"]
    counters.data.memset_async(0, counters.nbytes)
    ctas = _num_multiprocessors()
    for name, arguments in plan.routed:
        kernel = load_kernel(SOURCE, name, (), SHARED_BYTES)
        kernel((ctas,), (THREADS,), arguments, shared_mem=SHARED_BYTES)
    if plan.chain:
        _launch_chain(workspace.heap, plan, ctas)


def _launch_chain(heap: Any, plan: Plan, ctas: int) -> None:
    """Weight gradients of the shared expert by the ordered chain (spec eq. 6.10).

    With R ranks and G groups of tiles, R + G - 1 launches between barriers: in launch p rank r
    continues group p - r. The last rank's accumulators are the result, which every rank fetches.
    """
    kernel = load_kernel(SOURCE, "moe_chain_hopper", (), SHARED_BYTES)
    groups = len(plan.chain)
    for turn in range(heap.size + groups - 1):
        group = turn - heap.rank
        if 0 <= group < groups:
            kernel((ctas,), (THREADS,), plan.chain[group], shared_mem=SHARED_BYTES)
        if heap.size > 1:
            heap.barrier(CHAIN_PHASE)
    collect = load_kernel(SOURCE, "moe_chain_collect")
    collect((4 * ctas,), (COLLECT_THREADS,), plan.collect)


class Plan(NamedTuple):
    """The launches of one set of arrays: arguments ready to be passed."""

    routed: list[tuple[str, tuple[Any, ...]]]  # kernel, arguments
    chain: list[tuple[Any, ...]]  # per group of tiles; empty without a shared expert
    collect: tuple[Any, ...]


class _State:
    """What these launches keep with a workspace: extra buffers, tensor maps, parameter blocks."""

    MAX_CACHED = 16

    def __init__(self, workspace: Any) -> None:
        import cupy

        config, sizes = workspace.config, workspace.sizes
        self.sizes, self.rank = sizes, workspace.heap.rank
        self.extra = {
            name: cupy.empty(buffer.shape, buffer.dtype)
            for name, buffer in extra_buffers(config, sizes).items()
        }
        names = [name for name in ("x", "dy", "chain") if name in workspace.buffers]
        self.own = {name: _address(workspace.buffers[name]) for name in names}
        self.own.setdefault("chain", 0)
        table = workspace.buffers["peer_table"].get()
        self.chain_addresses = [int(address) for address in table[SYMMETRIC_BUFFERS["chain"]]]
        self.again = self._again_addresses(workspace)
        self._plans: dict[bytes, Plan] = {}

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

    def plan(self, layer: np.ndarray, back: np.ndarray) -> Plan:
        """The launches for the arrays named in the blocks, made at their first use."""
        layer, back = layer.reshape(1).copy(), back.copy()
        for block, names in ((layer, _FORWARD_ONLY), (back, _EPILOGUE_ONLY)):
            for name in names:
                block[name] = 0  # new at every call and of no concern to these kernels
        key = layer.tobytes() + back.tobytes()
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= self.MAX_CACHED:
                self._plans.pop(next(iter(self._plans)))
            routed = self._routed_launches(layer, back)
            shared = int(layer["shared_intermediate_size"][0]) > 0
            chain = self._chain_launches(layer, back) if shared else []
            found = self._plans[key] = Plan(routed, chain, self._collect_arguments(layer, back))
        return found

    def _routed_launches(self, layer: Any, back: Any) -> list[tuple[str, tuple[Any, ...]]]:
        """Per macrobatch dgrad, then wgrad."""
        dgrad_maps = _dgrad_maps(layer[0], back, self.again, self.own)
        wgrad_maps = _wgrad_maps(layer[0], back)
        dgrad = _dgrad_name(bool(layer["has_limit"][0]))
        launches: list[tuple[str, tuple[Any, ...]]] = []
        for macro in range(num_macrobatches(self.sizes)):
            params = self._dgrad_params(layer[0], back, macro)
            launches.append((dgrad, _arguments(layer, params, dgrad_maps)))
            if layer["num_local_experts"][0]:
                params = self._wgrad_params(layer[0], back, macro)
                launches.append(("moe_wgrad_hopper", _arguments(layer, params, wgrad_maps)))
        return launches

    def _chain_launches(self, layer: Any, back: Any) -> list[tuple[Any, ...]]:
        """One launch per group of tiles."""
        maps = _chain_maps(layer[0], back, self.own)
        hidden, width = int(layer["hidden_size"][0]), int(layer["shared_intermediate_size"][0])
        tiles = sum(
            -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
            for _, _, columns, rows in _products(hidden, width)
        )
        groups = min(len(self.chain_addresses), tiles)
        bounds = [group * tiles // groups for group in range(groups + 1)]
        return [
            _arguments(layer, self._chain_params(layer[0], back, group, bounds), maps)
            for group in range(groups)
        ]

    def _collect_arguments(self, layer: Any, back: Any) -> tuple[Any, ...]:
        words = int(layer["hidden_size"][0]) * int(layer["shared_intermediate_size"][0])
        names = ("shared_dw_down", "shared_dw_gate", "shared_dw_up")
        targets = tuple(np.uint64(back[name]) for name in names)
        source = np.uint64(self.chain_addresses[-1])
        return (source, *targets, np.int64(words), np.int32(back["dw_is_bf16"]))

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
        params["ticket"] = self._ticket(macro)
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
            params["gradient"][0, product] = self.own["chain"] + offset
        return params

    def _ticket(self, index: int) -> int:
        macros = num_macrobatches(self.sizes)
        words = macros * _dgrad_words(self.sizes) + index * TICKET_WORDS
        return _address(self.extra["counters"]) + 4 * words


def _mini_blocks(layer: Any) -> int:
    """Row blocks walked together: enough that a step keeps every CTA at work for six tiles.

    A dx tile waits for the hidden tiles of one step before; tickets are drawn two tiles ahead.
    """
    widths = (int(layer["hidden_size"]), int(layer["intermediate_size"]))
    tiles = sum(-(-width // TILE_COLUMNS) for width in widths)  # of one row block
    return max(int(layer["mini_blocks"]), -(-6 * 132 // tiles))


def _address(array: Any) -> int:
    return int(array.data.ptr) if array.size else 0


def _dgrad_name(has_limit: bool) -> str:
    return "moe_dgrad_clamp_hopper" if has_limit else "moe_dgrad_hopper"


@cache
def _num_multiprocessors() -> int:
    import cupy

    device = cupy.cuda.runtime.getDevice()
    return int(cupy.cuda.runtime.deviceGetAttribute(16, device))  # MultiProcessorCount


def _arguments(*blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Kernel arguments by value, copied: a plan outlives the blocks it was made from."""
    return tuple(by_value(block.copy()) for block in blocks)
