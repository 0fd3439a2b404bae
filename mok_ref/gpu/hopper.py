"""Launch of the forward megakernel: tensor maps, counters, grid.

CUDA twin: cuda_src/megakernel.cu (kernel `moe_forward_hopper`), tile.cuh, experts.cuh.

A tensor map names a matrix in device memory and the box of it that one copy fetches. The maps
depend on addresses and sizes alone, so they are encoded once per set of arrays and kept
(`ForwardKernel`); a call then costs one look-up and one launch.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.launch import Launch, ParamBlock, enqueue

SOURCE = "megakernel.cu"
KERNEL = "moe_forward_hopper"
THREADS = 384

STAGES = 4
STAGE_BYTES = 3 * ROW_TILE * 64 * 2
STAGING_BYTES = 2 * ROW_TILE * 64 * 2
TILE_SLOTS = 4
MAIL_SLOTS = 8
SHARED_BYTES = (
    STAGES * (STAGE_BYTES + 16)
    + STAGING_BYTES
    + (32 + 2 * 8) * TILE_SLOTS
    + 2 * 8 * MAIL_SLOTS
    + 4 * 8
)
"""Dynamic shared memory of a CTA (kForwardSharedBytes): operands, staging, tiles, barriers."""

TICKET_WORDS = 64

ALIGNMENT = 8
"""H and I must be multiples of this: tensor maps have strides in units of 16 bytes."""

MINIBATCH_TILES = 192
"""Gate/up tiles that a minibatch should have: 1.5 for each of an H200's 132 multiprocessors."""

NARROW_WIDTH = 1024
"""Up to this width of its experts a minibatch has twice as many tiles: they are short, down of the
minibatch before is through sooner, and h of so many narrow rows still fits the L2 cache (12.6 MB
of 64 row blocks at 768 and of 48 at 1024, the two sizes measured: docs/tuning.md, #33)."""

DEFAULT_CLUSTER_SIZE = 2
"""CTAs that share operands where nothing was tuned. A card at its power limit gains by every byte
that does not cross the chip twice (docs/tuning.md)."""

COMBINE_FROM_TOKENS = 1024
"""Below, counting rows, then tokens, then taking one from the list costs more than the launch that
it spares: 3 us of 240 at 16 tokens."""

TENSOR_MAP = np.dtype((np.uint64, (16,)))

FORWARD_MAPS = np.dtype(
    [
        (name, TENSOR_MAP)
        for name in (
            "x_ring",
            "h_ring",
            "w_gate",
            "w_up",
            "w_down",
            "x",
            "shared_h",
            "shared_w_gate",
            "shared_w_up",
            "shared_w_down",
        )
    ]
)
"""Struct ForwardMaps: all maps of one rank, passed to the kernel by value."""


def supports(hidden_size: int, intermediate_size: int, shared_intermediate_size: int = 0) -> bool:
    """Whether these widths can go through tensor maps; others take the portable path."""
    widths = (hidden_size, intermediate_size, shared_intermediate_size)
    return all(width % ALIGNMENT == 0 for width in widths)


def num_forward_counters(max_row_blocks: int, max_tokens: int) -> int:
    """Words of LayerParams.counters that the kernel uses (struct ForwardCounters)."""
    return TICKET_WORDS + 3 * max_row_blocks + -(-max_tokens // ROW_TILE)


def num_combine_counters(max_row_blocks: int, max_tokens: int) -> int:
    """Words behind them where the kernel makes y (struct CombineCounters): tickets and the room to
    align them, row blocks, tokens."""
    return 4 * 32 + max_row_blocks + -(-max_tokens // ROW_TILE) + 2 * max_tokens


def combines(config: MoEConfig, num_tokens: int) -> bool:
    """Whether the kernel makes y itself, from every token as soon as its rows are there.

    Not with several ranks: rows of others arrive at times of their own, and no kernel waits for
    another rank. Not with MXFP8 experts: their kernel makes no y.
    """
    alone = config.ep_size == 1 and config.dtype == "bf16"
    return alone and num_tokens >= COMBINE_FROM_TOKENS


def default_minibatch(intermediate_size: int) -> int:
    """Rows of a minibatch where the caller names none.

    At least 2048, so that x and h of a minibatch are used from the L2 cache, and so many that its
    gate/up tiles fill all multiprocessors about one and a half times: then down of a minibatch,
    one step behind, finds its h complete. Measured on fine-grained experts (docs/tuning.md).
    """
    column_tiles = -(-intermediate_size // ROW_TILE)
    tiles = MINIBATCH_TILES * (2 if intermediate_size <= NARROW_WIDTH else 1)
    row_blocks = -(-tiles // column_tiles)
    return ROW_TILE * min(max(row_blocks, 16), 64)


@lru_cache(maxsize=4096)
def encode_tiled(
    pointer: int,
    dims: tuple,
    strides: tuple,
    box: tuple,
    element: str = "BFLOAT16",
    swizzle: str = "128B",
) -> np.ndarray:
    """A tensor map of an array: (16,) uint64.

    dims     elements per dimension, innermost first
    strides  bytes from one element to the next in dimensions 1, 2, ...
    box      elements of one copy; of bf16 the innermost 64 are one 128-byte swizzle span
    element, swizzle   ends of the driver's names for them
    Elements outside `dims` read as +0.
    Encoded once for the same arguments: nobody writes into the result.
    Raises: RuntimeError naming the arguments if the driver refuses them.
    """
    from cuda.bindings import driver

    rank = len(dims)
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{element}"),
        rank,
        pointer,
        [driver.cuuint64_t(int(value)) for value in dims],
        [driver.cuuint64_t(int(value)) for value in strides],
        [driver.cuuint32_t(int(value)) for value in box],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"tensor map refused ({status}): {pointer=:#x}, {dims=}, {strides=}, {box=}"
        )
    return np.array([int(word) for word in tensor_map.opaque], np.uint64)


def encode_operand(pointer: int, rows: int, depth: int, box_rows: int) -> np.ndarray:
    """Map of a row-major [rows, depth] operand: boxes of `box_rows` rows x 64 elements along K."""
    return encode_tiled(pointer, (depth, rows), (depth * 2,), (64, box_rows))


def encode_forward_maps(params: np.ndarray) -> np.ndarray:
    """FORWARD_MAPS of one rank from its parameter block."""
    hidden, width = int(params["hidden_size"]), int(params["intermediate_size"])
    shared_width = int(params["shared_intermediate_size"])
    experts, num_tokens = int(params["num_local_experts"]), int(params["num_tokens"])
    ring_rows = int(params["macro_blocks"]) * ROW_TILE
    maps = np.zeros(1, FORWARD_MAPS)

    def encode(name: str, rows: int, depth: int, box_rows: int, field: str = "") -> None:
        maps[name] = encode_operand(int(params[field or name]), rows, depth, box_rows)

    if experts > 0:
        encode("x_ring", ring_rows, hidden, 64)
        encode("h_ring", ring_rows, width, 64)
        encode("w_gate", experts * width, hidden, 128)
        encode("w_up", experts * width, hidden, 128)
        encode("w_down", experts * hidden, width, 128)
    if shared_width > 0 and num_tokens > 0:
        encode("x", num_tokens, hidden, 64, "x_in")
        encode("shared_h", num_tokens, shared_width, 64)
        encode("shared_w_gate", shared_width, hidden, 128)
        encode("shared_w_up", shared_width, hidden, 128)
        encode("shared_w_down", hidden, shared_width, 128)
    return maps


_MAP_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "shared_intermediate_size",
    "num_local_experts",
    "macro_blocks",
    "num_tokens",
    "x_in",
    "x_ring",
    "h_ring",
    "w_gate",
    "w_up",
    "w_down",
    "shared_h",
    "shared_w_gate",
    "shared_w_up",
    "shared_w_down",
)


@cache
def _num_multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.runtime.deviceGetAttribute(16, device))  # MultiProcessorCount


def cluster_macros(cluster_size: int) -> tuple[str, ...]:
    """How the kernel is compiled for clusters of that many CTAs."""
    return () if cluster_size == 1 else (f"MOK_CLUSTER_SIZE={cluster_size}",)


class ForwardKernel:
    """The forward megakernel with the tensor maps of one workspace.

    cluster_size   1, or 2: pairs of CTAs share operands through their cluster's shared memory
    num_ctas       CTAs to launch, any number >= cluster_size; None: one per multiprocessor
    Neither changes a bit of the result.
    """

    MAX_CACHED = 16

    def __init__(
        self, cluster_size: int = DEFAULT_CLUSTER_SIZE, num_ctas: int | None = None
    ) -> None:
        self.cluster_size = cluster_size
        self.num_ctas = num_ctas
        self._maps: dict[tuple, np.ndarray] = {}

    def load(self) -> Any:
        """The compiled kernel; call it on every rank before the first barrier."""
        return load_kernel(SOURCE, KERNEL, cluster_macros(self.cluster_size), SHARED_BYTES)

    def maps(self, params: np.ndarray) -> np.ndarray:
        """Tensor maps for the arrays named in `params`, encoded at their first use."""
        key = tuple(params[name].item() for name in _MAP_FIELDS)
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= self.MAX_CACHED:
                self._maps.pop(next(iter(self._maps)))
            found = self._maps[key] = encode_forward_maps(params)
        return found

    def prepare(self, params: np.ndarray) -> Launch:
        """The launch for a LAYER_PARAMS block; its counters must be zero when the kernel starts."""
        import cupy

        ctas = self.num_ctas or _num_multiprocessors(cupy.cuda.runtime.getDevice())
        ctas = max(1, ctas // self.cluster_size) * self.cluster_size
        arguments = (params, self.maps(params))
        return Launch(self.load(), (ctas,), THREADS, arguments, SHARED_BYTES, early=True)


def warm_up(workspace: Any) -> None:
    """Compile and load the kernel; on every rank before its first barrier."""
    _ = _kernel_of(workspace).load().num_regs


def launch_forward(workspace: Any, params: ParamBlock, stream: Any) -> None:
    """Everything between the barriers of a forward step: y rows pushed to their owners."""
    enqueue(params, KERNEL, stream, lambda: [_kernel_of(workspace).prepare(params)])


def _kernel_of(workspace: Any) -> ForwardKernel:
    return workspace.extra("hopper_forward", lambda: ForwardKernel(workspace.cluster_size))
