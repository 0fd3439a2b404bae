"""Launches of `tc` products on a device: along rows, over rows, and over the rows of all ranks.

CUDA twin: cuda_src/portable.cu. Two ways to evaluate `tc`, with the same bits:

    path "soft"   integer instructions, one output per thread (every GPU from sm_80)
    path "mma"    mma.sync.m16n8k16, measured to be the same function on Hopper only

Everything goes through a launcher, an object with `launch`, `copy` and `clear`, so that the same
sequence runs on a device (`DeviceLauncher`) and, in tests, on a CPU. The host never waits and
nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mok_ref.gpu.launch import Launch
from mok_ref.mxfp8 import num_blocks

SOURCE = "portable.cu"
THREADS = 256
PATHS = ("soft", "mma")
TILES = {"soft": (64, 64), "mma": (128, 128)}
"""Rows and columns of one CTA's outputs (SoftTile, MmaTile)."""

MMA_CAPABILITIES = ("90",)
"""Where mma.sync was measured to be the contract's `tc` (docs/device_checks.md)."""

STORE_BF16, STORE_FLOAT, PUSH_BF16 = 0, 1, 2
"""enum ProductOutput: where a product along rows goes."""

ROUTED = -1
"""RowRange.dense_rows of rows that the schedule describes."""

_POINTER = np.uint64

OPERAND = np.dtype(
    [
        ("data", _POINTER),
        ("scales", _POINTER),
        ("expert_stride", np.int64),
        ("scale_stride", np.int64),
        ("num_mn", np.int32),
        ("num_k", np.int32),
        ("inner_size", np.int32),
        ("inner_is_k", np.int32),
    ],
    align=True,
)
ROW_RANGE = np.dtype(
    [("first_row", np.int64), ("num_rows", np.int32), ("dense_rows", np.int32)], align=True
)
PRODUCT_PARAMS = np.dtype(
    [
        ("rows", ROW_RANGE),
        ("a", OPERAND, (2,)),
        ("b", OPERAND, (2,)),
        ("num_segments", np.int32),
        ("num_columns", np.int32),
        ("output", np.int32),
        ("reserved", np.int32),
        ("out", _POINTER),
    ],
    align=True,
)
GRADIENT_PARAMS = np.dtype(
    [
        ("rows", ROW_RANGE),
        ("a", OPERAND),
        ("b", OPERAND),
        ("start", _POINTER),
        ("out", _POINTER),
        ("num_m", np.int32),
        ("num_n", np.int32),
        ("first_tile", np.int32),
        ("end_tile", np.int32),
    ],
    align=True,
)


def struct(dtype: np.dtype, **values: Any) -> np.ndarray:
    """A parameter struct by value, all other fields 0."""
    block = np.zeros((), dtype)
    for name, value in values.items():
        block[name] = value
    return block


# --------------------------------------------------------------------------- where launches go


class Launcher(Protocol):
    """Where a sequence of launches goes."""

    def launch(self, kernel: str, grid: tuple[int, ...], threads: int, arguments: list) -> None:
        """Enqueue one kernel of portable.cu."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy between device addresses."""

    def clear(self, target: int, num_bytes: int) -> None:
        """Enqueue zeros."""


class DeviceLauncher:
    """Launches on the current CuPy stream."""

    def launch(self, kernel: str, grid: tuple[int, ...], threads: int, arguments: list) -> None:
        import cupy

        from mok_ref.gpu.compiler import load_kernel

        stream = cupy.cuda.get_current_stream()
        Launch(load_kernel(SOURCE, kernel), grid, threads, tuple(arguments))(stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        runtime = cupy.cuda.runtime
        if num_bytes:
            runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDeviceToDevice, stream)

    def clear(self, target: int, num_bytes: int) -> None:
        import cupy

        if num_bytes:
            stream = cupy.cuda.get_current_stream().ptr
            cupy.cuda.runtime.memsetAsync(target, 0, num_bytes, stream)


def choose_path(path: str = "auto") -> str:
    """How to evaluate tc on the current device: "soft" or "mma".

    Raises: ValueError for an unknown path, or "mma" where its bits were not measured.
    """
    if path not in ("auto", *PATHS):
        raise ValueError(f"path must be auto, soft or mma, got {path!r}")
    if path == "soft":
        return path
    import cupy

    capability = cupy.cuda.Device().compute_capability
    if capability in MMA_CAPABILITIES:
        return "mma"
    if path == "mma":
        raise ValueError(f"path mma was measured on compute capability 9.0 only, got {capability}")
    return "soft"


# --------------------------------------------------------------------------- operands


def rows_operand(address: int, num_rows: int, width: int) -> np.ndarray:
    """bf16 rows as the left operand of a product along their width."""
    return struct(
        OPERAND, data=address, num_mn=num_rows, num_k=width, inner_size=width, inner_is_k=1
    )


def columns_operand(address: int, num_rows: int, width: int) -> np.ndarray:
    """bf16 rows as an operand of a product over them."""
    return struct(OPERAND, data=address, num_mn=width, num_k=num_rows, inner_size=width)


def weight_operand(
    address: int, scales: int, outer: int, inner: int, transposed: bool = False
) -> np.ndarray:
    """A weight matrix [outer, inner] per expert: bf16 (scales = 0) or E4M3 codes with E8M0 scales.

    transposed   the product runs over `outer` instead of `inner`
    """
    return struct(
        OPERAND,
        data=address,
        scales=scales,
        expert_stride=outer * inner,
        scale_stride=outer * num_blocks(inner),
        num_mn=inner if transposed else outer,
        num_k=outer if transposed else inner,
        inner_size=inner,
        inner_is_k=int(not transposed),
    )


class Link(NamedTuple):
    """One weight gradient of an ordered chain: rows a (T, M) and b (T, N), out (M, N)."""

    out: int
    a: tuple[int, int]  # address, width
    b: tuple[int, int]

    @property
    def num_elements(self) -> int:
        return self.a[1] * self.b[1]


def place_links(links: list[Link]) -> list[tuple[Link, int]]:
    """Links with their byte offsets in the chain buffer, one behind the other."""
    placed, offset = [], 0
    for link in links:
        placed.append((link, offset))
        offset += 4 * link.num_elements
    return placed


# --------------------------------------------------------------------------- products


@dataclass(frozen=True)
class Products:
    """One rank's product launches. `params` is a LAYER_PARAMS block of mok_ref.gpu.params."""

    params: np.ndarray
    launcher: Launcher
    path: str

    @property
    def num_tokens(self) -> int:
        return int(self.params["num_tokens"])

    def own_rows(self) -> np.ndarray:
        """This rank's tokens, for the experts and the router that every rank holds."""
        return struct(ROW_RANGE, num_rows=self.num_tokens, dense_rows=self.num_tokens)

    def launch(self, kernel: str, grid: tuple[int, ...], block: np.ndarray) -> None:
        if all(grid):
            self.launcher.launch(f"portable_{kernel}", grid, THREADS, [self.params, block])

    def product(
        self,
        rows: np.ndarray,
        pairs: list[tuple[np.ndarray, np.ndarray]],
        num_columns: int,
        output: int,
        out: int = 0,
    ) -> None:
        """out[row, n] = tc over the pairs of operands, one chain.

        output   STORE_BF16, STORE_FLOAT, or PUSH_BF16 into the owners' combine buffers
        """
        block = struct(
            PRODUCT_PARAMS,
            rows=rows,
            num_segments=len(pairs),
            num_columns=num_columns,
            output=output,
            out=out,
        )
        for segment, (a, b) in enumerate(pairs):
            block["a"][segment], block["b"][segment] = a, b
        tile_m, tile_n = TILES[self.path]
        grid = (-(-num_columns // tile_n), -(-int(rows["num_rows"]) // tile_m))
        self.launch(f"product_{self.path}", grid, block)

    def gradient(
        self,
        rows: np.ndarray,
        a: tuple[int, int],
        b: tuple[int, int],
        start: int,
        out: int,
        tiles: tuple[int, int] | None = None,
    ) -> None:
        """out = start + tc over rows (aᵀ, bᵀ), for every expert; a and b are (address, width).

        start   address of the accumulators to continue (may be `out`), 0 for +0
        tiles   (first, end) of the output's tiles, all of them by default
        """
        num_rows, num_m, num_n = int(rows["num_rows"]), a[1], b[1]
        first, end = tiles or (0, self.num_tiles(num_m, num_n))
        block = struct(
            GRADIENT_PARAMS,
            rows=rows,
            a=columns_operand(a[0], num_rows, num_m),
            b=columns_operand(b[0], num_rows, num_n),
            start=start,
            out=out,
            num_m=num_m,
            num_n=num_n,
            first_tile=first,
            end_tile=end,
        )
        is_dense = int(rows["dense_rows"]) != ROUTED
        experts = 1 if is_dense else int(self.params["num_local_experts"])
        self.launch(f"gradient_{self.path}", (end - first, experts), block)

    def num_tiles(self, num_m: int, num_n: int) -> int:
        """Tiles of an [M, N] gradient."""
        tile_m, tile_n = TILES[self.path]
        return -(-num_m // tile_m) * -(-num_n // tile_n)

    def widen(self, source: int, target: int, num_elements: int) -> None:
        """bf16 to float32, exact."""
        self._convert("portable_widen", source, target, num_elements)

    def round(self, source: int, target: int, num_elements: int) -> None:
        """float32 to bf16, one rounding."""
        self._convert("portable_round", source, target, num_elements)

    def _convert(self, kernel: str, source: int, target: int, num_elements: int) -> None:
        grid = (min(-(-num_elements // THREADS), 4096),)
        arguments = [np.uint64(source), np.uint64(target), np.int64(num_elements)]
        if num_elements:
            self.launcher.launch(kernel, grid, THREADS, arguments)

    # ------------------------------------------------------------------ ordered chain

    def ordered_chain(
        self,
        links: list[Link],
        chains: list[int],
        barrier: Callable[[], None],
        accumulate: bool = False,
        is_bf16: bool = False,
        num_groups: int | None = None,
    ) -> None:
        """Gradients of weights that every rank holds, over all tokens (spec eq. 6.10); collective.

        In launch p rank r continues tile group p - r from what rank r - 1 left, so that all ranks
        work at once and no kernel waits for a peer: R + G - 1 launches with a barrier after each.
        Then every rank takes the last rank's accumulators.

        chains      address of a symmetric float32 buffer for all links on every rank
        barrier     a barrier between the ranks, in stream order
        accumulate  the chain starts from `out` of rank 0 instead of +0
        is_bf16     `out` is bf16: widened at the start, rounded once at the end
        Order:  ascending global token; each rank's tokens start a new group of 16.
        NumPy twin: mok_ref/chain.py
        """
        rank, size = int(self.params["rank"]), int(self.params["ep_size"])
        groups = num_groups or (4 * size if size > 1 else 1)
        placed = place_links(links)
        if rank == 0:
            for link, offset in placed:
                self._start_chain(link, chains[0] + offset, accumulate, is_bf16)
        for position in range(size + groups - 1):
            if 0 <= position - rank < groups:
                for link, offset in placed:
                    self._chain_group(link, chains, offset, position - rank, groups)
            barrier()
        for link, offset in placed:
            self._finish_chain(link, chains[size - 1] + offset, is_bf16)
        barrier()  # nobody overwrites a chain that a peer still reads

    def _start_chain(self, link: Link, chain: int, accumulate: bool, is_bf16: bool) -> None:
        """The accumulators that rank 0 begins with."""
        if not accumulate:
            self.launcher.clear(chain, 4 * link.num_elements)
        elif is_bf16:
            self.widen(link.out, chain, link.num_elements)
        else:
            self.launcher.copy(chain, link.out, 4 * link.num_elements)

    def _chain_group(
        self, link: Link, chains: list[int], offset: int, group: int, groups: int
    ) -> None:
        """This rank's tokens into one group of tiles, continuing the rank below."""
        rank, tiles = int(self.params["rank"]), self.num_tiles(link.a[1], link.b[1])
        span = (tiles * group // groups, tiles * (group + 1) // groups)
        out = chains[rank] + offset
        start = chains[rank - 1] + offset if rank else out
        self.gradient(self.own_rows(), link.a, link.b, start, out, span)

    def _finish_chain(self, link: Link, chain: int, is_bf16: bool) -> None:
        """The last rank's accumulators are the gradient."""
        if is_bf16:
            self.round(chain, link.out, link.num_elements)
        else:
            self.launcher.copy(link.out, chain, 4 * link.num_elements)
