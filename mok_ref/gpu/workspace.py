"""All device buffers of one layer on one rank, named once in a table that also gives their bytes.

A workspace allocates from `buffer_table` and what a kernel family asks of its `scratch` before its
first launch; `workspace_bytes` adds up the same requests, so the memory function cannot disagree
with the allocation. After its first forward and backward a step allocates nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig, is_int, shown
from mok_ref.gpu.hopper import combines, default_minibatch, num_combine_counters
from mok_ref.gpu.launch import ParamBlock
from mok_ref.gpu.params import (
    LAYER_PARAMS,
    NUM_SYMMETRIC,
    ROW_ORDER_CODES,
    SCHEDULE_INFO,
    SYMMETRIC_BUFFERS,
    new_params,
)
from mok_ref.planner.tune import CLUSTER_SIZES, tuned, tuned_cluster_size

WARP_TOKENS = 4  # kWarpTokens of cuda_src/schedule.cuh
MAX_SCHEDULE_WARPS = 32
SCHEDULE_WORDS = 22 * 1024  # of dynamic shared memory for a schedule kernel; sm_86 has 99 KiB
PATHS = ("auto", "hopper", "portable")
BF16 = np.dtype(np.uint16)
F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
U32 = np.dtype(np.uint32)
U8 = np.dtype(np.uint8)


class Buffer(NamedTuple):
    """One array: shape, storage dtype, and whether every rank can reach it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    symmetric: bool = False

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Sizes(NamedTuple):
    """Derived sizes of a workspace, all worst case where the routing decides."""

    max_tokens: int
    max_row_blocks: int
    mini_blocks: int
    macro_blocks: int
    max_saved_rows: int
    segments: int
    blocks: int
    block_warps: int
    num_counters: int


def schedule_warps(num_local_experts: int, walk: int) -> int:
    """Warps of a CTA of the schedule kernels: enough for a short walk in one block, as far as their
    counts of every expert leave room.

    Raises: ValueError when a rank holds more experts than that.
    """
    experts = max(1, num_local_experts)
    room = SCHEDULE_WORDS // experts - 3
    if room < 1:
        raise ValueError(f"a rank must own at most {SCHEDULE_WORDS // 4} experts, got {experts}")
    return min(max(8, -(-walk // WARP_TOKENS)), MAX_SCHEDULE_WARPS, room)


def schedule_grid(config: MoEConfig, rank: int, max_tokens: int) -> tuple[int, int, int]:
    """(segments, blocks per segment, warps per block) of the schedule kernels
    (cuda_src/schedule.cuh: walk_grid)."""
    if config.row_order == "canonical":
        bits = max(1, int(config.ep_size * max_tokens - 1).bit_length())
        segments, walk = 1, 1 << bits
    else:
        segments, walk = config.ep_size, max_tokens
    warps = schedule_warps(config.num_local_experts(rank), walk)
    return segments, -(-walk // (WARP_TOKENS * warps)), warps


def derive_sizes(
    config: MoEConfig, rank: int, max_tokens: int, max_saved_rows: int | None = None
) -> Sizes:
    """Sizes of the buffers of `rank`.

    The ring and the saved rows default to twice a balanced load: more rows than that wrap around
    the ring and are recomputed in backward, with the same bits.
    """
    local = config.num_local_experts(rank)
    routes = config.ep_size * max_tokens * config.top_k
    max_blocks = max(1, -(-(routes + local * (ROW_TILE - 1)) // ROW_TILE))
    balanced = -(-2 * max_tokens * config.top_k // ROW_TILE) + local
    macro_rows, mini_rows = config.ring_rows(
        min(max_blocks, balanced) * ROW_TILE, default_minibatch(config.intermediate_size)
    )
    macro_blocks = macro_rows // ROW_TILE
    if max_saved_rows is None:
        max_saved_rows = max(balanced, macro_blocks) * ROW_TILE
    max_saved_rows = min(max_saved_rows, max_blocks * ROW_TILE)
    segments, blocks, warps = schedule_grid(config, rank, max_tokens)
    sums = combines(config, max_tokens)
    combine_words = num_combine_counters(max_blocks, max_tokens) if sums else 0
    return Sizes(
        max_tokens=max_tokens,
        max_row_blocks=max_blocks,
        mini_blocks=mini_rows // ROW_TILE,
        macro_blocks=macro_blocks,
        max_saved_rows=max_saved_rows // ROW_TILE * ROW_TILE,
        segments=segments,
        blocks=blocks,
        block_warps=warps,
        num_counters=1024 + 8 * max_blocks + combine_words,
    )


VALUE_RINGS = ("x_ring", "h_ring", "dy_ring", "d_gate_ring", "d_up_ring")
"""Rings of bf16 rows that kernels do without whose rings hold codes and scales."""


def buffer_table(
    config: MoEConfig,
    rank: int,
    sizes: Sizes,
    training: bool = True,
    value_rings: bool = True,
) -> dict[str, Buffer]:
    """Every buffer of the workspace by name; names equal the fields of the parameter blocks.

    value_rings   False: without VALUE_RINGS
    """
    table = _symmetric_buffers(config, sizes, training)
    table |= _schedule_buffers(config, rank, sizes)
    table |= _forward_buffers(config, sizes, training)
    if training:
        table |= _backward_buffers(config, sizes)
    return {n: b for n, b in table.items() if value_rings or n not in VALUE_RINGS}


def _symmetric_buffers(config: MoEConfig, sizes: Sizes, training: bool) -> dict[str, Buffer]:
    tokens, hidden, slots = sizes.max_tokens, config.hidden_size, config.top_k
    scales = -(-hidden // 32)
    table = {
        "x": Buffer((tokens, hidden), BF16, True),
        "topk_ids": Buffer((tokens, slots), I32, True),
        "topk_weights": Buffer((tokens, slots), F32, True),
        "num_tokens": Buffer((1,), I32, True),
        "combine": Buffer((tokens * slots, hidden), BF16, True),
    }
    if training:
        table["dy"] = Buffer((tokens, hidden), BF16, True)
        table["d_topk_weights"] = Buffer((tokens * slots,), F32, True)
        if config.shared_intermediate_size:
            words = 3 * config.shared_intermediate_size * hidden
            table["chain"] = Buffer((words,), F32, True)
    if config.dtype == "mxfp8":
        for prefix in ("x", "dy") if training else ("x",):
            table[f"{prefix}_codes"] = Buffer((tokens, hidden), U8, True)
            table[f"{prefix}_scales"] = Buffer((tokens, scales), U8, True)
    return table


def _schedule_buffers(config: MoEConfig, rank: int, sizes: Sizes) -> dict[str, Buffer]:
    rows, local = sizes.max_row_blocks * ROW_TILE, config.num_local_experts(rank)
    count_words = local * sizes.segments * (sizes.blocks + 1)
    return {
        "all_ids": Buffer((config.ep_size * sizes.max_tokens, config.top_k), I32),
        "local_expert": Buffer((config.num_experts,), I32),
        "peer_rank": Buffer((rows,), I32),
        "peer_row": Buffer((rows,), I32),
        "row_weight": Buffer((rows,), F32),
        "expert_offset": Buffer((local + 1,), I32),
        "expert_count": Buffer((local,), I32),
        "row_block_expert": Buffer((sizes.max_row_blocks,), I32),
        "row_block_valid": Buffer((sizes.max_row_blocks,), I32),
        "info": Buffer((SCHEDULE_INFO.itemsize // 4,), I32),
        "block_count": Buffer((count_words,), I32),
        "counters": Buffer((sizes.num_counters,), U32),
        "peer_table": Buffer((NUM_SYMMETRIC, config.ep_size), np.dtype(np.uint64)),
    }


def _ring_sizes(config: MoEConfig, sizes: Sizes) -> tuple[int, int, int]:
    """(rows of a ring, I, H)."""
    return sizes.macro_blocks * ROW_TILE, config.intermediate_size, config.hidden_size


def _forward_buffers(config: MoEConfig, sizes: Sizes, training: bool) -> dict[str, Buffer]:
    ring, inner, hidden = _ring_sizes(config, sizes)
    tokens, shared = sizes.max_tokens, config.shared_intermediate_size
    table = {
        "x_ring": Buffer((ring, hidden), BF16),
        "h_ring": Buffer((ring, inner), BF16),
        "y": Buffer((tokens, hidden), BF16),
    }
    if training:
        table["gate_saved"] = Buffer((sizes.max_saved_rows, inner), BF16)
        table["up_saved"] = Buffer((sizes.max_saved_rows, inner), BF16)
    if shared:
        table["shared_h"] = Buffer((tokens, shared), BF16)
        table["shared_y"] = Buffer((tokens, hidden), BF16)
    if shared and training:
        table["shared_gate"] = Buffer((tokens, shared), BF16)
        table["shared_up"] = Buffer((tokens, shared), BF16)
    return table


def _backward_buffers(config: MoEConfig, sizes: Sizes) -> dict[str, Buffer]:
    ring, inner, hidden = _ring_sizes(config, sizes)
    tokens, shared = sizes.max_tokens, config.shared_intermediate_size
    table = {
        "dy_ring": Buffer((ring, hidden), BF16),
        "hw_ring": Buffer((ring, inner), BF16),
        "d_gate_ring": Buffer((ring, inner), BF16),
        "d_up_ring": Buffer((ring, inner), BF16),
        "dx": Buffer((tokens, hidden), BF16),
        "d_weights": Buffer((tokens, config.top_k), F32),
    }
    if shared:
        table["shared_dx"] = Buffer((tokens, hidden), BF16)
        table["shared_d_gate"] = Buffer((tokens, shared), BF16)
        table["shared_d_up"] = Buffer((tokens, shared), BF16)
    return table


def workspace_bytes(
    config: MoEConfig,
    rank: int,
    max_tokens: int,
    max_saved_rows: int | None = None,
    training: bool = True,
    path: str = "auto",
) -> dict[str, int]:
    """Bytes of every buffer that a workspace on `rank` has after its first step, plus "total".

    Without weight gradients, which are the caller's or as large as the weights; ring sizes are the
    config's or the default ones, `mok-ref tune` may have measured others for a device.

    path   which kernels' own buffers are counted: "hopper", "portable", or "auto", Hopper's where
           the sizes allow them
    Raises: ValueError naming argument, rule and value.
    """
    from mok_ref.gpu.layer import size_refusal

    _check_sizes(max_tokens, max_saved_rows)
    if not (is_int(rank) and 0 <= rank < config.ep_size):
        raise ValueError(f"rank must be an integer in 0..{config.ep_size - 1}, got {shown(rank)}")
    if path not in PATHS:
        raise ValueError(f"path must be {', '.join(PATHS)}, got {shown(path)}")
    refusal = size_refusal(config)
    if path == "hopper" and refusal:
        raise ValueError(f"path 'hopper' is not possible here: {refusal}")
    sizes = derive_sizes(config, rank, max(1, max_tokens), max_saved_rows)
    plan = _PlannedWorkspace(config, rank, sizes, training, path != "portable" and not refusal)
    table = {name: buffer.num_bytes for name, buffer in plan.buffers.items()}
    return table | {"total": sum(table.values())}


class _PlannedWorkspace:
    """What a kernel family asks a workspace for when it makes its buffers; nothing is allocated."""

    def __init__(
        self, config: MoEConfig, rank: int, sizes: Sizes, training: bool, hopper: bool
    ) -> None:
        from mok_ref.gpu import hopper_backward, hopper_mxfp8, hopper_mxfp8_backward, portable

        self.config, self.sizes, self.training = config, sizes, training
        self.heap = SimpleNamespace(rank=rank)
        codes = hopper and config.dtype == "mxfp8"
        self.buffers = buffer_table(config, rank, sizes, training, value_rings=not codes)
        self.info = self.buffers["info"]
        if not hopper:
            portable.make_buffers(self)
        elif codes:
            hopper_mxfp8.ring_buffers(self), hopper_mxfp8.weight_buffers(self)
            if config.shared_intermediate_size:
                hopper_mxfp8._no_rows(self)
        if hopper and training:
            (hopper_mxfp8_backward if codes else hopper_backward).make_buffers(self)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """As `DeviceWorkspace.scratch`, without memory."""
        self.buffers[name] = Buffer(tuple(shape), np.dtype(dtype))
        return SimpleNamespace(data=SimpleNamespace(ptr=0), size=0)


def has_rings_of_codes(config: MoEConfig, module: Any) -> bool:
    """Whether the kernels of a forward path keep rows as codes and scales, in buffers of their
    own."""
    return config.dtype == "mxfp8" and hasattr(module, "ring_buffers")


def byte_range(array: Any) -> tuple[int, int]:
    """Addresses of a contiguous array's first byte and of the one behind its last; 0, 0 for an
    empty one."""
    first = int(array.data.ptr) if array.size else 0
    return first, first + int(array.nbytes)


class DeviceWorkspace:
    """The buffers of one layer on one rank of a device heap.

    Collective: every rank makes it with the same config, max_tokens, max_saved_rows and training.
    It holds one forward's state: the next forward invalidates earlier contexts and overwrites y and
    the gradients.

    path          "auto", "hopper" or "portable": which kernels compute the products; same bits
    cluster_size  may be set at any time: CTAs of the forward kernel that share operands; same bits
    Raises: ValueError naming the argument and the rule.
    """

    def __init__(
        self,
        config: MoEConfig,
        heap: Any,
        max_tokens: int,
        max_saved_rows: int | None = None,
        training: bool = True,
        path: str = "auto",
    ) -> None:
        from mok_ref.gpu.layer import forward_path

        _check_arguments(config, heap, max_tokens, max_saved_rows, path)
        self.closed = False
        self.config, self.heap, self.training = config, heap, training
        self.max_tokens = max_tokens
        # sizes that `mok-ref tune` measured on this device, where the config names none
        ring = tuned(config, heap.device, max_tokens)
        self._cluster_size = tuned_cluster_size(config, heap.device, max_tokens)
        self.sizes = derive_sizes(ring, heap.rank, max(1, max_tokens), max_saved_rows)
        self.requested_path = path
        self.generation = 0
        self._serial = _next_serial(heap)
        self.steps: dict[Any, Any] = {}  # what forwards have prepared, by their arrays
        self.main_grads: dict[Any, bool] = {}  # layouts that were checked
        self._extra: dict[Any, Any] = {}
        value_rings = not has_rings_of_codes(config, forward_path(self))
        self._table = buffer_table(config, heap.rank, self.sizes, training, value_rings)
        self.buffers: dict[str, Any] = {}
        self._allocate()
        self._fill_constants()
        self.params = self._base_params()

    @property
    def cluster_size(self) -> int:
        """CTAs of the forward kernel that share operands."""
        return self._cluster_size

    @cluster_size.setter
    def cluster_size(self, size: int) -> None:
        """Later forwards are prepared anew. Raises: ValueError for a number no kernel knows."""
        if type(size) is not int or size not in CLUSTER_SIZES:
            known = ", ".join(map(str, CLUSTER_SIZES))
            raise ValueError(f"cluster_size must be one of {known}, got {shown(size)}")
        if size == self._cluster_size:
            return
        self._cluster_size = size
        self.steps.clear()
        for key in [key for key in self._extra if key[0] == "loaded" or key == "hopper_forward"]:
            del self._extra[key]

    def __getattr__(self, name: str) -> Any:
        """Buffers are attributes too: `workspace.x_ring`."""
        buffers = self.__dict__.get("buffers", {})
        if name in buffers:
            return buffers[name]
        raise AttributeError(f"the workspace has no buffer {name!r}")

    def symmetric_name(self, name: str) -> str:
        """Heap name of one of this workspace's symmetric buffers."""
        return f"gpu_layer{self._serial}/{name}"

    def mine(self, name: str) -> Any:
        """This rank's array of a symmetric buffer. With several ranks, x written there spares the
        layer a copy; with one rank there is none."""
        return self.buffers[name]

    def peer(self, rank: int, name: str) -> Any:
        return self.heap.peer(rank, self.symmetric_name(name))

    def extra(self, key: Any, make: Any) -> Any:
        """What a kernel family keeps with the workspace (tensor maps, caches); `make()` once per
        key."""
        if key not in self._extra:
            self._extra[key] = make()
        return self._extra[key]

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """A buffer of this rank that a kernel family adds; made at the first call.

        Raises: ValueError when the same name is asked for with another shape or dtype.
        """
        import cupy

        wanted = Buffer(tuple(shape), np.dtype(dtype))
        if name not in self._table:
            self.buffers[name] = cupy.empty(shape, dtype)
            self._table[name] = wanted
        if self._table[name] != wanted:
            raise ValueError(f"scratch {name!r} is {self._table[name]}, got {wanted}")
        return self.buffers[name]

    def ranges(self) -> list[tuple[str, int, int]]:
        """(name, address of the first byte, address behind the last) of every buffer."""
        return self.extra(
            ("ranges", len(self.buffers)),
            lambda: [(name, *byte_range(array)) for name, array in self.buffers.items()],
        )

    def poison(self) -> None:
        """Fill every buffer that a step must write before reading with NaN bytes (tests)."""
        for name, array in self.buffers.items():
            if name not in ("local_expert", "peer_table"):
                array.view(np.uint8)[...] = 0xFF

    def close(self) -> None:
        """Give the symmetric memory back; collective. A workspace can be closed twice."""
        self.closed = True
        for name, buffer in self._table.items():
            if buffer.symmetric:
                self.heap.free(self.symmetric_name(name))
        for kept in (self.buffers, self.steps, self.main_grads, self._extra):
            kept.clear()
        self._table = {}

    def _allocate(self) -> None:
        import cupy

        for name, buffer in self._table.items():
            if buffer.symmetric:
                heap_name = self.symmetric_name(name)
                self.buffers[name] = self.heap.alloc(heap_name, buffer.shape, buffer.dtype)
            else:
                self.buffers[name] = cupy.empty(buffer.shape, buffer.dtype)

    def _fill_constants(self) -> None:
        """Peer addresses and the expert map: they never change."""
        import cupy

        table = np.zeros((NUM_SYMMETRIC, self.heap.size), np.uint64)
        for name, buffer in self._table.items():
            if buffer.symmetric:
                table[SYMMETRIC_BUFFERS[name]] = self.heap.addresses(self.symmetric_name(name))
        self.buffers["peer_table"].set(table)
        local = np.full(self.config.num_experts, -1, np.int32)
        experts = self.config.experts_of(self.heap.rank)
        local[experts] = np.arange(len(experts), dtype=np.int32)
        self.buffers["local_expert"].set(local)
        cupy.cuda.get_current_stream().synchronize()

    def _base_params(self) -> ParamBlock:
        config, sizes, status = self.config, self.sizes, self.heap.status
        params = new_params(
            LAYER_PARAMS,
            rank=self.heap.rank,
            ep_size=self.heap.size,
            max_tokens=sizes.max_tokens,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            shared_intermediate_size=config.shared_intermediate_size,
            num_experts=config.num_experts,
            num_local_experts=config.num_local_experts(self.heap.rank),
            top_k=config.top_k,
            mini_blocks=sizes.mini_blocks,
            macro_blocks=sizes.macro_blocks,
            max_row_blocks=sizes.max_row_blocks,
            row_order=ROW_ORDER_CODES[config.row_order],
            has_limit=int(config.swiglu_limit is not None),
            swiglu_limit=config.swiglu_limit or 0.0,
            timeout_ns=status.timeout_ns,
            input_error=status.input_error_address,
            error_record=status.record_address,
            abort_flag=status.abort_address,
            barrier_epoch=status.epoch_address,
            num_counters=sizes.num_counters,
        )
        own = {name for name, buffer in self._table.items() if not buffer.symmetric}
        own |= {"combine", "topk_ids", "topk_weights"}
        for name in own & set(LAYER_PARAMS.names or ()):
            params[name] = self.buffers[name].data.ptr if self.buffers[name].size else 0
        if self.heap.size == 1:
            params["all_ids"] = self.buffers["topk_ids"].data.ptr  # one rank: nothing to gather
        return params


def _check_arguments(
    config: MoEConfig, heap: Any, max_tokens: int, max_saved_rows: int | None, path: str
) -> None:
    if heap.size != config.ep_size:
        raise ValueError(f"ep_size must be the heap's size {heap.size}, got {config.ep_size}")
    if config.arithmetic != "exact":
        raise ValueError(f"arithmetic must be 'exact' on a device, got {config.arithmetic!r}")
    _check_sizes(max_tokens, max_saved_rows)
    if path not in PATHS:
        raise ValueError(f"path must be auto, hopper or portable, got {path!r}")
    rows = config.ep_size * max_tokens * config.top_k + config.num_experts * ROW_TILE
    if rows >= 1 << 31:
        raise ValueError(f"ranks * max_tokens * top_k must stay below 2^31 rows, got {rows}")


def _check_sizes(max_tokens: Any, max_saved_rows: Any) -> None:
    if not (is_int(max_tokens) and max_tokens >= 0):
        raise ValueError(f"max_tokens must be an integer >= 0, got {shown(max_tokens)}")
    if not (max_saved_rows is None or (is_int(max_saved_rows) and max_saved_rows >= 0)):
        raise ValueError(
            f"max_saved_rows must be an integer >= 0 or None, got {shown(max_saved_rows)}"
        )


def _next_serial(heap: Any) -> int:
    """A new number, the same on every rank: workspaces are made in the same order everywhere."""
    number = getattr(heap, "_num_device_workspaces", 0)
    heap._num_device_workspaces = number + 1
    return number
