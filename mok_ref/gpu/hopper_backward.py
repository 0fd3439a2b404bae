"""Launches of the backward megakernels: tensor maps, parameter blocks, the ordered chain's pipeline.

CUDA twins: cuda_src/megakernel_backward.cu and cuda_src/backward_*.cuh. Per macrobatch one dgrad launch (pull,
dhu, SwiGLU backward, dx, push) and one wgrad launch; then the replicated gradients. Everything is enqueued on
the current stream; nothing synchronises the host, and only the first call of a workspace allocates.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.params import SYMMETRIC_BUFFERS

SOURCE = "megakernel_backward.cu"
THREADS = 384
SHARED_BYTES = 4 * 49152 + 8 * 4096 + 4 * 32 + 8 * 32
"""Dynamic shared memory of a CTA (SharedLayout::kBytes): operand ring, staging, task queue, barriers."""

TILE_ROWS, TILE_COLUMNS = 128, 256
TICKET_WORDS = 32  # one counter per 128 bytes
CHAIN_PHASE = 5  # kPhaseBarrierChain
COLLECT_THREADS = 256

_POINTER = np.uint64
TENSOR_MAP = np.dtype((np.uint64, (16,)))
NUM_PRODUCTS = 4

DGRAD_OPERANDS = (
    "dy", "x", "d_gate", "d_up", "hw", "w_gate", "w_up", "w_down",
    "gate_saved", "up_saved", "gate_again", "up_again",
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

_WGRAD_MAP_NAMES = ("rows_out", "rows_in", "gradient32", "gradient16", "straddling")
WGRAD_MAPS = np.dtype([(name, TENSOR_MAP, (NUM_PRODUCTS,)) for name in _WGRAD_MAP_NAMES])
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
        ("straddling", _POINTER, (NUM_PRODUCTS,)),
    ],
    align=True,
)
"""Struct WgradParams."""

FLOAT32_GRADIENT, BF16_GRADIENT = 0, 1


class ExtraBuffer(NamedTuple):
    """One array that only these kernels use."""

    shape: tuple[int, ...]
    dtype: Any


def extra_buffers(config: MoEConfig, sizes: Any) -> dict[str, ExtraBuffer]:
    """Buffers beside those of `mok_ref.gpu.workspace`, by name, for the given `Sizes`.

    gate_again, up_again   gate and up made again in backward, where gate_saved is too small to hold them
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


def encode_map(
    pointer: int, columns: int, rows: int, batch: int = 1, dtype: str = "bf16"
) -> np.ndarray:
    """Map of a row-major [batch, rows, columns] array; all zeros if there is nothing to map.

    Box: 64 rows of 128 bytes (64 bf16 or 32 float32 columns), 128-byte swizzle. Elements outside read as +0 and
    are not written.
    Raises: RuntimeError naming the arguments if the driver refuses them.
    """
    if pointer == 0 or rows * columns * batch == 0:
        return np.zeros(16, np.uint64)
    from cuda.bindings import driver

    item = 2 if dtype == "bf16" else 4
    types = driver.CUtensorMapDataType
    kind = {
        "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[dtype]
    dims = [driver.cuuint64_t(value) for value in (columns, rows, batch)]
    strides = [driver.cuuint64_t(value) for value in (columns * item, rows * columns * item)]
    box = [driver.cuuint32_t(value) for value in (128 // item, 64, 1)]
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        kind,
        3,
        pointer,
        dims,
        strides,
        box,
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"tensor map refused ({status}): {pointer=:#x}, {columns=}, {rows=}, {batch=}, {dtype=}"
        )
    return np.array([int(word) for word in tensor_map.opaque], np.uint64)


def _dgrad_maps(layer: Any, back: Any, again: dict[str, int], own: dict[str, int]) -> np.ndarray:
    """DGRAD_MAPS of one rank; `own`: addresses of its symmetric x and dy, `again`: of gate and up made again."""
    H, I = int(layer["hidden_size"]), int(layer["intermediate_size"])  # noqa: E741
    width, tokens = int(layer["shared_intermediate_size"]), int(layer["num_tokens"])
    experts, ring = int(layer["num_local_experts"]), int(layer["macro_blocks"]) * ROW_TILE
    maps = np.zeros(1, DGRAD_MAPS)
    routed, shared = maps["routed"][0], maps["shared"][0]
    for name, pointer in (("dy", back["dy_ring"]), ("x", layer["x_ring"])):
        routed[name] = encode_map(int(pointer), H, ring)
    for name in ("d_gate", "d_up", "hw"):
        routed[name] = encode_map(int(back[f"{name}_ring"]), I, ring)
    for name in ("w_gate", "w_up"):
        routed[name] = encode_map(int(layer[name]), H, I, experts)
        shared[name] = encode_map(int(layer[f"shared_{name}"]), H, width)
    routed["w_down"] = encode_map(int(layer["w_down"]), I, H, experts)
    shared["w_down"] = encode_map(int(layer["shared_w_down"]), width, H)
    for name in ("gate", "up"):
        saved = int(layer["max_saved_rows"])
        routed[f"{name}_saved"] = encode_map(int(layer[f"{name}_saved"]), I, saved)
        routed[f"{name}_again"] = encode_map(again[name], I, ring)
        kept = encode_map(again[f"shared_{name}"], width, tokens)
        shared[f"{name}_saved"] = shared[f"{name}_again"] = kept
    shared["dy"], shared["x"] = encode_map(own["dy"], H, tokens), encode_map(own["x"], H, tokens)
    shared["d_gate"] = encode_map(int(back["shared_d_gate"]), width, tokens)
    shared["d_up"] = encode_map(int(back["shared_d_up"]), width, tokens)
    shared["hw"] = encode_map(int(layer["shared_h"]), width, tokens)  # hw = h: the same bits again
    return maps


def _wgrad_maps(layer: Any, back: Any, extra: dict[str, Any]) -> np.ndarray:
    """WGRAD_MAPS of the routed experts: products down, gate, up."""
    H, I = int(layer["hidden_size"]), int(layer["intermediate_size"])  # noqa: E741
    experts, ring = int(layer["num_local_experts"]), int(layer["macro_blocks"]) * ROW_TILE
    maps = np.zeros(1, WGRAD_MAPS)
    x = encode_map(int(layer["x_ring"]), H, ring)
    hw = encode_map(int(back["hw_ring"]), I, ring)
    maps["rows_out"][0, 0] = encode_map(int(back["dy_ring"]), H, ring)
    for product, name in ((1, "d_gate"), (2, "d_up")):
        maps["rows_out"][0, product] = encode_map(int(back[f"{name}_ring"]), I, ring)
    maps["rows_in"][0, :3] = [hw, x, x]
    kind = "bf16" if int(back["dw_is_bf16"]) else "float32"
    target = "gradient16" if kind == "bf16" else "gradient32"
    for product, name, columns, rows in _products(H, I):
        maps[target][0, product] = encode_map(int(back[f"dw_{name}"]), columns, rows, experts, kind)
        kept = extra["straddling"][product]
        maps["straddling"][0, product] = encode_map(
            _address(kept), columns, rows, len(kept), "float32"
        )
    return maps


def _products(hidden_size: int, inner: int) -> tuple[tuple[int, str, int, int], ...]:
    """(product, name, columns N, rows M) of the three weight gradients."""
    return (
        (0, "down", inner, hidden_size),
        (1, "gate", hidden_size, inner),
        (2, "up", hidden_size, inner),
    )


def _chain_maps(layer: Any, back: Any, own: dict[str, int]) -> np.ndarray:
    """WGRAD_MAPS of the shared expert: this rank's tokens, results to its chain buffer."""
    H, width = int(layer["hidden_size"]), int(layer["shared_intermediate_size"])
    tokens = int(layer["num_tokens"])
    maps = np.zeros(1, WGRAD_MAPS)
    x = encode_map(own["x"], H, tokens)
    maps["rows_out"][0, 0] = encode_map(own["dy"], H, tokens)
    maps["rows_out"][0, 1] = encode_map(int(back["shared_d_gate"]), width, tokens)
    maps["rows_out"][0, 2] = encode_map(int(back["shared_d_up"]), width, tokens)
    maps["rows_in"][0, :3] = [encode_map(int(layer["shared_h"]), width, tokens), x, x]
    for product, _, columns, rows in _products(H, width):
        pointer = own["chain"] + 4 * product * H * width
        maps["gradient32"][0, product] = encode_map(pointer, columns, rows, 1, "float32")
    return maps


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
    """Everything between the barriers of `moe_backward`: dx rows and d_topk_weights pushed, all dW written.

    layer, back   LAYER_PARAMS and BACKWARD_PARAMS blocks of this call; x rows of macrobatch 0 still lie in the
                  ring as the forward kernel left them
    """
    launch_routed(workspace, layer, back)
    launch_replicated(workspace, layer, back)


def launch_routed(
    workspace: Any, layer: np.ndarray, back: np.ndarray, x_in_ring: bool = True
) -> None:
    """All gradients of the routed experts, dx rows and d_topk_weights pushed to their owners.

    layer, back   LAYER_PARAMS and BACKWARD_PARAMS blocks of this call
    x_in_ring     whether the x rows of macrobatch 0 still lie in the ring, as the forward kernel left them
    Also treats the shared expert, except for the gradients of its weights (`launch_replicated`).
    """
    state = _state(workspace)
    state.extra["counters"].data.memset_async(0, state.extra["counters"].nbytes)
    maps = state.maps(layer, back)
    macros = num_macrobatches(workspace.sizes)
    for macro in range(macros):
        dgrad = state.dgrad_params(layer, back, macro, x_in_ring and macro == 0)
        _launch(_dgrad_name(bool(layer["has_limit"])), layer, dgrad, maps["dgrad"])
        if int(layer["num_local_experts"]):
            _launch(
                "moe_wgrad_hopper", layer, state.wgrad_params(layer, back, macro), maps["wgrad"]
            )


def launch_replicated(workspace: Any, layer: np.ndarray, back: np.ndarray) -> None:
    """Weight gradients of the shared expert by the ordered chain; collective, after `launch_routed`.

    With R ranks and G groups of tiles, R + G - 1 launches between barriers: in launch p rank r continues group
    p - r. The last rank's accumulators are the result, which every rank then fetches.
    """
    width = int(layer["shared_intermediate_size"])
    if width == 0:
        return
    state, heap = _state(workspace), workspace.heap
    maps = state.maps(layer, back)["chain"]
    tiles = sum(
        _tiles(rows, columns) for _, _, columns, rows in _products(int(layer["hidden_size"]), width)
    )
    groups = min(heap.size, tiles)
    for turn in range(heap.size + groups - 1):
        group = turn - heap.rank
        if 0 <= group < groups:
            params = state.chain_params(layer, back, group, groups, tiles)
            _launch("moe_chain_hopper", layer, params, maps)
        if heap.size > 1:
            heap.barrier(CHAIN_PHASE)
    _collect_chain(state, layer, back)


def _collect_chain(state: _State, layer: np.ndarray, back: np.ndarray) -> None:
    """The last rank's accumulators into this rank's gradients, rounded to bf16 if those are."""
    words = int(layer["hidden_size"]) * int(layer["shared_intermediate_size"])
    source = state.chain_addresses[-1]
    kernel = load_kernel(SOURCE, "moe_chain_collect")
    names = ("shared_dw_down", "shared_dw_gate", "shared_dw_up")
    targets = tuple(np.uint64(back[name]) for name in names)
    arguments = (np.uint64(source), *targets, np.int64(words), np.int32(back["dw_is_bf16"]))
    blocks = max(1, min(1056, -(-3 * words // (2 * COLLECT_THREADS))))
    kernel((blocks,), (COLLECT_THREADS,), arguments)


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
        self._maps: dict[bytes, dict[str, np.ndarray]] = {}

    def _again_addresses(self, workspace: Any) -> dict[str, int]:
        """Where gate and up are made again: over the rows that forward kept, if there is room for a macrobatch.

        Ring row r lies where forward kept row r of macrobatch 0, which is done with by the time a later
        macrobatch writes there; inside macrobatch 0 the bits written are the bits that were kept.
        """
        buffers, addresses = workspace.buffers, {}
        for name in ("gate", "up"):
            own = self.extra[f"{name}_again"]
            addresses[name] = _address(own if own.size else buffers[f"{name}_saved"])
            shared = buffers.get(f"shared_{name}")
            addresses[f"shared_{name}"] = 0 if shared is None else _address(shared)
        return addresses

    def maps(self, layer: np.ndarray, back: np.ndarray) -> dict[str, np.ndarray]:
        """Tensor maps for the arrays named in the blocks, encoded at their first use."""
        key = layer.tobytes() + back.tobytes()
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= self.MAX_CACHED:
                self._maps.pop(next(iter(self._maps)))
            found = self._maps[key] = {
                "dgrad": _dgrad_maps(layer, back, self.again, self.own),
                "wgrad": _wgrad_maps(layer, back, self.extra),
            }
            if int(layer["shared_intermediate_size"]):
                found["chain"] = _chain_maps(layer, back, self.own)
        return found

    def dgrad_params(
        self, layer: np.ndarray, back: np.ndarray, macro: int, x_in_ring: bool
    ) -> np.ndarray:
        params = np.zeros(1, DGRAD_PARAMS)
        params["macro_index"], params["x_in_ring"] = macro, x_in_ring
        params["macro_blocks"], params["mini_blocks"] = layer["macro_blocks"], layer["mini_blocks"]
        params["shared_saved_rows"] = layer["num_tokens"] if int(layer["shared_gate"]) else 0
        params["shared_blocks"] = _shared_blocks(self.sizes)
        params["counters"] = _address(self.extra["counters"]) + 4 * macro * _dgrad_words(self.sizes)
        params["dy_ring"], params["x_ring"] = back["dy_ring"], layer["x_ring"]
        for name, address in self.again.items():
            params[f"{name}_again"] = address
        params["dot_partial"] = _address(self.extra["dot_partial"])
        params["shared_dx"] = back["shared_dx"]
        return params

    def wgrad_params(self, layer: np.ndarray, back: np.ndarray, macro: int) -> np.ndarray:
        params = np.zeros(1, WGRAD_PARAMS)
        kind = int(back["dw_is_bf16"])
        params["macro_index"], params["macro_blocks"] = macro, layer["macro_blocks"]
        params["num_products"], params["accumulate"] = 3, back["dw_accumulate"]
        params["gradient_type"] = params["start_type"] = kind
        params["ticket"] = self._ticket(macro)
        for product, name, columns, rows in _products(
            int(layer["hidden_size"]), int(layer["intermediate_size"])
        ):
            params["rows"][0, product], params["columns"][0, product] = rows, columns
            params["start"][0, product] = back[f"dw_{name}"]
            params["straddling"][0, product] = _address(self.extra["straddling"][product])
        return params

    def chain_params(
        self, layer: np.ndarray, back: np.ndarray, group: int, groups: int, tiles: int
    ) -> np.ndarray:
        params = np.zeros(1, WGRAD_PARAMS)
        hidden, width = int(layer["hidden_size"]), int(layer["shared_intermediate_size"])
        params["num_products"], params["num_rows"] = 3, layer["num_tokens"]
        params["first_tile"] = group * tiles // groups
        params["end_tile"] = (group + 1) * tiles // groups
        params["ticket"] = self._ticket(num_macrobatches(self.sizes) + group)
        first = self.rank == 0
        params["accumulate"] = back["dw_accumulate"] if first else 1
        params["start_type"] = back["dw_is_bf16"] if first else FLOAT32_GRADIENT
        for product, name, columns, rows in _products(hidden, width):
            params["rows"][0, product], params["columns"][0, product] = rows, columns
            handed = self.chain_addresses[self.rank - 1] + 4 * product * hidden * width
            params["start"][0, product] = back[f"shared_dw_{name}"] if first else handed
        return params

    def _ticket(self, index: int) -> int:
        macros = num_macrobatches(self.sizes)
        words = macros * _dgrad_words(self.sizes) + index * TICKET_WORDS
        return _address(self.extra["counters"]) + 4 * words


def _state(workspace: Any) -> _State:
    return workspace.extra("hopper_backward", lambda: _State(workspace))


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)


def _address(array: Any) -> int:
    return int(array.data.ptr) if array.size else 0


def _dgrad_name(has_limit: bool) -> str:
    return "moe_dgrad_clamp_hopper" if has_limit else "moe_dgrad_hopper"


def _launch(name: str, layer: np.ndarray, params: np.ndarray, maps: np.ndarray) -> None:
    import cupy

    kernel = load_kernel(SOURCE, name, (), SHARED_BYTES)
    ctas = _num_multiprocessors(cupy.cuda.runtime.getDevice())
    kernel((ctas,), (THREADS,), (layer.reshape(1), params, maps), shared_mem=SHARED_BYTES)


@cache
def _num_multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.runtime.deviceGetAttribute(16, device))  # MultiProcessorCount
