"""The layer as a stream-ordered sequence of launches: any GPU from sm_80, any hidden and intermediate size.

CUDA twin: cuda_src/portable.cu. Two ways to evaluate `tc`, with the same bits:

    path "soft"   integer instructions, one output per thread (every GPU)
    path "mma"    mma.sync.m16n8k16, measured to be the same function on Hopper only

Per macrobatch: pull, gate, up, SwiGLU, down and push; backward: pull x and dy, (gate, up again if they were
not kept,) dhu, SwiGLU backward with dot128, dx and push, three weight gradients whose chains continue from
macrobatch to macrobatch. The host never waits, nothing is allocated after `prepare`. The number of launches
is that of the worst-case schedule; launches beyond the schedule's end return at once.

Everything here takes a launcher, an object with `launch`, `copy` and `clear`, so that the same sequence runs
on a device (`DeviceLauncher`) and, in tests, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.gpu.params import SYMMETRIC_BUFFERS
from mok_ref.mxfp8 import num_blocks

SOURCE = "portable.cu"
THREADS = 256
PATHS = ("soft", "mma")
TILES = {"soft": (64, 64), "mma": (128, 128)}
"""Rows and columns of one CTA's outputs (SoftTile, MmaTile)."""

MMA_CAPABILITIES = ("90",)
"""Compute capabilities on which mma.sync was measured to be the contract's `tc`."""

SCALE_RULE_CODES = {"fit": 0, "ocp": 1}
NOT_QUANTISED = -1
ROUTED = -1  # RowRange.dense_rows of routed rows
STORE_BF16, STORE_FLOAT, PUSH_BF16 = 0, 1, 2

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
PULL_PARAMS = np.dtype(
    [("rows", ROW_RANGE), ("ring", _POINTER), ("buffer", np.int32), ("scales", np.int32)], align=True
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
SWIGLU_PARAMS = np.dtype(
    [
        ("rows", ROW_RANGE),
        ("gate", _POINTER),
        ("up", _POINTER),
        ("h", _POINTER),
        ("dhu", _POINTER),
        ("d_gate", _POINTER),
        ("d_up", _POINTER),
        ("width", np.int32),
        ("scale_rule", np.int32),
    ],
    align=True,
)
STRUCTS = (OPERAND, PULL_PARAMS, PRODUCT_PARAMS, GRADIENT_PARAMS, SWIGLU_PARAMS)
"""In the order in which the kernel `portable_layout` reports their sizes."""


class Launcher(Protocol):
    """Where a sequence of launches goes."""

    def launch(self, kernel: str, grid: tuple[int, ...], threads: int, arguments: list[Any]) -> None:
        """Enqueue one kernel of portable.cu."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy between device addresses."""

    def clear(self, target: int, num_bytes: int) -> None:
        """Enqueue zeros."""


class DeviceLauncher:
    """Launches on the current CuPy stream."""

    def launch(self, kernel: str, grid: tuple[int, ...], threads: int, arguments: list[Any]) -> None:
        from mok_ref.gpu.compiler import load_kernel

        load_kernel(SOURCE, kernel)(grid, (threads,), tuple(arguments))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDeviceToDevice, stream)

    def clear(self, target: int, num_bytes: int) -> None:
        import cupy

        cupy.cuda.runtime.memsetAsync(target, 0, num_bytes, cupy.cuda.get_current_stream().ptr)


def choose_path(path: str = "auto") -> str:
    """"soft" or "mma" on the current device.

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
        raise ValueError(f"path mma was measured on compute capability 9.0 only, this is {capability}")
    return "soft"


class Weights(NamedTuple):
    """Addresses of one set of expert weights; scales are 0 for bf16, else E8M0 bytes."""

    gate: int
    up: int
    down: int
    gate_scales: int = 0
    up_scales: int = 0
    down_scales: int = 0


class Scratch(NamedTuple):
    """Addresses of the buffers that only this path needs."""

    gate_ring: int  # [macrobatch, I] bf16: gate of rows that are not kept for backward
    up_ring: int
    dhu: int  # [max(macrobatch * I, max_tokens * I')] float32
    dw: tuple[int, int, int]  # float32 chains of gate, up, down where bf16 gradients are wanted
    shared_gate: int  # [max_tokens, I'] bf16: gate of the shared expert where it is not kept
    shared_up: int


@dataclass(frozen=True)
class PortableLayer:
    """One rank's launches. `params` and `back` are LAYER_PARAMS and BACKWARD_PARAMS of mok_ref.gpu.params.

    routed   this rank's experts: bf16, or MXFP8 codes with scales
    shared   the shared expert, or None
    """

    config: MoEConfig
    params: np.ndarray
    scratch: Scratch
    routed: Weights
    shared: Weights | None
    launcher: Launcher
    path: str = "soft"

    # ------------------------------------------------------------------ sizes

    @property
    def macro_rows(self) -> int:
        return int(self.params["macro_blocks"]) * ROW_TILE

    @property
    def num_macrobatches(self) -> int:
        return -(-int(self.params["max_row_blocks"]) // int(self.params["macro_blocks"]))

    @property
    def num_tokens(self) -> int:
        return int(self.params["num_tokens"])

    def routed_rows(self, macrobatch: int) -> np.ndarray:
        """The rows of one macrobatch."""
        return _struct(ROW_RANGE, first_row=macrobatch * self.macro_rows, num_rows=self.macro_rows,
                       dense_rows=ROUTED)  # fmt: skip

    def own_rows(self) -> np.ndarray:
        """This rank's tokens, for the experts and the router that every rank holds."""
        return _struct(ROW_RANGE, num_rows=self.num_tokens, dense_rows=self.num_tokens)

    def is_kept(self, macrobatch: int) -> bool:
        """Whether gate and up of all rows of a macrobatch rest in gate_saved and up_saved."""
        end = min((macrobatch + 1) * self.macro_rows, int(self.params["max_row_blocks"]) * ROW_TILE)
        return bool(self.params["gate_saved"]) and end <= int(self.params["max_saved_rows"])

    def gate_up_addresses(self, macrobatch: int) -> tuple[int, int]:
        """Where gate and up of a macrobatch's first row are."""
        if not self.is_kept(macrobatch):
            return self.scratch.gate_ring, self.scratch.up_ring
        first = macrobatch * self.macro_rows * self.config.intermediate_size * 2
        return int(self.params["gate_saved"]) + first, int(self.params["up_saved"]) + first

    # ------------------------------------------------------------------ operands

    def rows_operand(self, address: int, num_rows: int, width: int) -> np.ndarray:
        """Rows as the left operand of a product along their width."""
        return _struct(OPERAND, data=address, num_mn=num_rows, num_k=width, inner_size=width,
                       inner_is_k=1)  # fmt: skip

    def columns_operand(self, address: int, num_rows: int, width: int) -> np.ndarray:
        """The same rows as an operand of a product over them."""
        return _struct(OPERAND, data=address, num_mn=width, num_k=num_rows, inner_size=width)

    def weight_operand(
        self, address: int, scales: int, outer: int, inner: int, transposed: bool = False
    ) -> np.ndarray:
        """A weight matrix [outer, inner] per expert; transposed: the product runs over `outer`."""
        return _struct(OPERAND, data=address, scales=scales, expert_stride=outer * inner,
                       scale_stride=outer * num_blocks(inner), num_mn=inner if transposed else outer,
                       num_k=outer if transposed else inner, inner_size=inner,
                       inner_is_k=int(not transposed))  # fmt: skip

    # ------------------------------------------------------------------ launches

    def pull(self, buffer: str, ring: int, rows: np.ndarray) -> None:
        """dispatch: rows of x or dy from their owners' memory into a ring, as bf16 values."""
        quantised = self.config.dtype == "mxfp8"
        source = SYMMETRIC_BUFFERS[f"{buffer}_codes" if quantised else buffer]
        scales = SYMMETRIC_BUFFERS[f"{buffer}_scales"] if quantised else -1
        pull = _struct(PULL_PARAMS, rows=rows, ring=ring, buffer=source, scales=scales)
        self._launch("pull", (int(rows["num_rows"]),), pull)

    def product(
        self,
        rows: np.ndarray,
        pairs: list[tuple[np.ndarray, np.ndarray]],
        num_columns: int,
        output: int,
        out: int = 0,
    ) -> None:
        """out[row, n] = tc over the pairs of operands, one chain."""
        product = _struct(PRODUCT_PARAMS, rows=rows, num_segments=len(pairs),
                          num_columns=num_columns, output=output, out=out)  # fmt: skip
        for segment, (a, b) in enumerate(pairs):
            product["a"][segment], product["b"][segment] = a, b
        tile_m, tile_n = TILES[self.path]
        grid = (-(-num_columns // tile_n), -(-int(rows["num_rows"]) // tile_m))
        self._launch(f"product_{self.path}", grid, product)

    def gradient(
        self,
        rows: np.ndarray,
        a: tuple[int, int],
        b: tuple[int, int],
        start: int,
        out: int,
        tiles: tuple[int, int] | None = None,
    ) -> None:
        """out = start + tc over rows (aᵀ, bᵀ) for every expert; a and b are (address, width).

        tiles   (first, end) of the output's tiles, all of them by default
        """
        num_rows, (num_m, num_n) = int(rows["num_rows"]), (a[1], b[1])
        first, end = tiles or (0, self.num_tiles(num_m, num_n))
        gradient = _struct(GRADIENT_PARAMS, rows=rows, a=self.columns_operand(a[0], num_rows, num_m),
                           b=self.columns_operand(b[0], num_rows, num_n), start=start, out=out,
                           num_m=num_m, num_n=num_n, first_tile=first, end_tile=end)  # fmt: skip
        dense = int(rows["dense_rows"]) >= 0
        experts = 1 if dense else int(self.params["num_local_experts"])
        self._launch(f"gradient_{self.path}", (end - first, experts), gradient)

    def num_tiles(self, num_m: int, num_n: int) -> int:
        """Tiles of an [M, N] gradient."""
        tile_m, tile_n = TILES[self.path]
        return -(-num_m // tile_m) * -(-num_n // tile_n)

    def swiglu(self, direction: str, rows: np.ndarray, width: int, **addresses: int) -> None:
        """SwiGLU of rows; `direction` is "forward" or "backward"."""
        routed = int(rows["dense_rows"]) == ROUTED
        rule = NOT_QUANTISED
        if self.config.dtype == "mxfp8" and routed:
            rule = SCALE_RULE_CODES[self.config.scale_rule]
        swiglu = _struct(SWIGLU_PARAMS, rows=rows, width=width, scale_rule=rule, **addresses)
        per_cta = THREADS // 32
        items = int(rows["num_rows"]) * (num_blocks(width) if direction == "forward" else 1)
        ctas = -(-items // per_cta)
        self._launch(f"swiglu_{direction}", (min(ctas, 8192) if direction == "forward" else ctas,), swiglu)

    def _launch(self, kernel: str, grid: tuple[int, ...], struct: np.ndarray) -> None:
        if all(grid):
            self.launcher.launch(f"portable_{kernel}", grid, THREADS, [self.params, struct])

    # ------------------------------------------------------------------ forward

    def gate_up(self, rows: np.ndarray, x: int, weights: Weights, gate: int, up: int, inner: int) -> None:
        """gate = bf16(tc(x, W_gate)), up = bf16(tc(x, W_up))."""
        hidden = self.config.hidden_size
        a = self.rows_operand(x, int(rows["num_rows"]), hidden)
        for out, matrix, scales in (
            (gate, weights.gate, weights.gate_scales),
            (up, weights.up, weights.up_scales),
        ):
            b = self.weight_operand(matrix, scales, inner, hidden)
            self.product(rows, [(a, b)], inner, STORE_BF16, out)

    def down(self, rows: np.ndarray, h: int, weights: Weights, inner: int, output: int, out: int) -> None:
        """y = bf16(tc(h, W_down)), pushed (routed) or stored (shared)."""
        hidden = self.config.hidden_size
        a = self.rows_operand(h, int(rows["num_rows"]), inner)
        b = self.weight_operand(weights.down, weights.down_scales, hidden, inner)
        self.product(rows, [(a, b)], hidden, output, out)

    def forward(self) -> None:
        """Everything between the two barriers of a forward step: shared expert, then routed experts.

        Order: macrobatches last to first, like the megakernel; no bit depends on it.
        """
        self.shared_forward()
        for macrobatch in reversed(range(self.num_macrobatches)):
            self.routed_forward(macrobatch)

    def routed_forward(self, macrobatch: int) -> None:
        rows, inner = self.routed_rows(macrobatch), self.config.intermediate_size
        gate, up = self.gate_up_addresses(macrobatch)
        x_ring, h_ring = int(self.params["x_ring"]), int(self.params["h_ring"])
        self.pull("x", x_ring, rows)
        self.gate_up(rows, x_ring, self.routed, gate, up, inner)
        self.swiglu("forward", rows, inner, gate=gate, up=up, h=h_ring)
        self.down(rows, h_ring, self.routed, inner, PUSH_BF16, 0)

    def shared_forward(self) -> None:
        """y of the shared expert for this rank's own tokens, never quantised."""
        if self.shared is None:
            return
        inner, h = self.config.shared_intermediate_size, int(self.params["shared_h"])
        self.shared_hidden(self.shared)
        self.down(self.own_rows(), h, self.shared, inner, STORE_BF16, int(self.params["shared_y"]))

    def shared_hidden(self, shared: Weights) -> None:
        """gate, up and h of the shared expert."""
        rows, inner = self.own_rows(), self.config.shared_intermediate_size
        gate, up = self.shared_gate_up()
        self.gate_up(rows, int(self.params["x_in"]), shared, gate, up, inner)
        self.swiglu("forward", rows, inner, gate=gate, up=up, h=int(self.params["shared_h"]))

    def shared_gate_up(self) -> tuple[int, int]:
        """Where gate and up of the shared expert are."""
        gate, up = int(self.params["shared_gate"]), int(self.params["shared_up"])
        return (gate, up) if gate else (self.scratch.shared_gate, self.scratch.shared_up)

    # ------------------------------------------------------------------ backward

    def backward(self, back: np.ndarray) -> None:
        """Everything between the two barriers of a backward step but the ordered chain.

        Order: macrobatches first to last: the weight gradients' chains run over ascending rows.
        """
        self.start_gradients(back)
        self.shared_backward(back)
        for macrobatch in range(self.num_macrobatches):
            self.routed_backward(macrobatch, back)
        self.finish_gradients(back)

    def gradient_shapes(self) -> dict[str, tuple[int, int]]:
        inner, hidden = self.config.intermediate_size, self.config.hidden_size
        return {"dw_gate": (inner, hidden), "dw_up": (inner, hidden), "dw_down": (hidden, inner)}

    def chain_addresses(self, back: np.ndarray) -> dict[str, int]:
        """Where the float32 chains of the routed weight gradients live."""
        if int(back["dw_is_bf16"]):
            return dict(zip(("dw_gate", "dw_up", "dw_down"), self.scratch.dw, strict=True))
        return {name: int(back[name]) for name in self.gradient_shapes()}

    def start_gradients(self, back: np.ndarray) -> None:
        """Chains start from +0 or from the caller's gradients (bf16 ones are widened, exactly)."""
        for name, address in self.chain_addresses(back).items():
            num_elements = self._gradient_elements(name)
            if not int(back["dw_accumulate"]):
                self.launcher.clear(address, 4 * num_elements)
            elif int(back["dw_is_bf16"]):
                self._convert("portable_widen", int(back[name]), address, num_elements)

    def finish_gradients(self, back: np.ndarray) -> None:
        """bf16 gradients: the one rounding at the end of the chain."""
        if int(back["dw_is_bf16"]):
            for name, address in self.chain_addresses(back).items():
                self._convert("portable_round", address, int(back[name]), self._gradient_elements(name))

    def _gradient_elements(self, name: str) -> int:
        num_m, num_n = self.gradient_shapes()[name]
        return int(self.params["num_local_experts"]) * num_m * num_n

    def _convert(self, kernel: str, source: int, target: int, num_elements: int) -> None:
        grid = (min(-(-num_elements // THREADS), 4096),)
        arguments = [np.uint64(source), np.uint64(target), np.int64(num_elements)]
        if num_elements:
            self.launcher.launch(kernel, grid, THREADS, arguments)

    def routed_backward(self, macrobatch: int, back: np.ndarray) -> None:
        rows, hidden, inner = self.routed_rows(macrobatch), self.config.hidden_size, self.config.intermediate_size
        gate, up = self.gate_up_addresses(macrobatch)
        x_ring, dy_ring = int(self.params["x_ring"]), int(back["dy_ring"])
        d_gate, d_up, hw = (int(back[f"{name}_ring"]) for name in ("d_gate", "d_up", "hw"))
        self.pull("x", x_ring, rows)
        self.pull("dy", dy_ring, rows)
        if not self.is_kept(macrobatch):
            self.gate_up(rows, x_ring, self.routed, gate, up, inner)
        self.row_gradients(rows, dy_ring, self.routed, inner, gate, up, d_gate, d_up, hw)
        self.dx(rows, d_gate, d_up, self.routed, inner, PUSH_BF16, 0)
        chains = self.chain_addresses(back)
        for name, a, b in (
            ("dw_down", (dy_ring, hidden), (hw, inner)),
            ("dw_gate", (d_gate, inner), (x_ring, hidden)),
            ("dw_up", (d_up, inner), (x_ring, hidden)),
        ):
            self.gradient(rows, a, b, chains[name], chains[name])

    def row_gradients(
        self, rows: np.ndarray, dy: int, weights: Weights, inner: int, gate: int, up: int, d_gate: int,
        d_up: int, hw: int,
    ) -> None:  # fmt: skip
        """dhu = tc(dy, W_downᵀ); d_gate, d_up, hw and, for routed rows, d_topk_weights = dot128(dhu · h)."""
        hidden = self.config.hidden_size
        a = self.rows_operand(dy, int(rows["num_rows"]), hidden)
        b = self.weight_operand(weights.down, weights.down_scales, hidden, inner, transposed=True)
        self.product(rows, [(a, b)], inner, STORE_FLOAT, self.scratch.dhu)
        self.swiglu("backward", rows, inner, gate=gate, up=up, h=hw, dhu=self.scratch.dhu,
                    d_gate=d_gate, d_up=d_up)  # fmt: skip

    def dx(
        self, rows: np.ndarray, d_gate: int, d_up: int, weights: Weights, inner: int, output: int, out: int
    ) -> None:
        """dx = bf16(tc([d_gate | d_up], [W_gate ; W_up]ᵀ)), one chain, gate half first."""
        hidden, num_rows = self.config.hidden_size, int(rows["num_rows"])
        pairs = [
            (
                self.rows_operand(gradient, num_rows, inner),
                self.weight_operand(matrix, scales, inner, hidden, transposed=True),
            )
            for gradient, matrix, scales in (
                (d_gate, weights.gate, weights.gate_scales),
                (d_up, weights.up, weights.up_scales),
            )
        ]
        self.product(rows, pairs, hidden, output, out)

    def shared_backward(self, back: np.ndarray) -> None:
        """dx, d_gate and d_up of the shared expert for this rank's tokens; its weights follow by the chain."""
        if self.shared is None:
            return
        rows, inner = self.own_rows(), self.config.shared_intermediate_size
        if not int(self.params["shared_gate"]):
            self.shared_hidden(self.shared)  # not kept: the same bits again
        gate, up = self.shared_gate_up()
        h = int(self.params["shared_h"])
        d_gate, d_up = int(back["shared_d_gate"]), int(back["shared_d_up"])
        self.row_gradients(rows, int(back["dy_in"]), self.shared, inner, gate, up, d_gate, d_up, h)
        self.dx(rows, d_gate, d_up, self.shared, inner, STORE_BF16, int(back["shared_dx"]))

    # ------------------------------------------------------------------ ordered chain

    def shared_chain(
        self, back: np.ndarray, chains: list[int], barrier: Callable[[], None], num_groups: int | None = None
    ) -> None:
        """Weight gradients of the shared expert over all ranks' tokens, in ascending global token.

        chains   address of the symmetric buffer "chain" on every rank: dw_gate, dw_up, dw_down one after
                 the other, float32
        barrier  a barrier between the ranks, in stream order
        """
        if self.shared is None:
            return
        hidden, inner = self.config.hidden_size, self.config.shared_intermediate_size
        x, dy, h = int(self.params["x_in"]), int(back["dy_in"]), int(self.params["shared_h"])
        d_gate, d_up = int(back["shared_d_gate"]), int(back["shared_d_up"])
        links = [
            Link("shared_dw_gate", (d_gate, inner), (x, hidden)),
            Link("shared_dw_up", (d_up, inner), (x, hidden)),
            Link("shared_dw_down", (dy, hidden), (h, inner)),
        ]
        self.ordered_chain(back, links, chains, barrier, num_groups)

    def ordered_chain(
        self,
        back: np.ndarray,
        links: list[Link],
        chains: list[int],
        barrier: Callable[[], None],
        num_groups: int | None = None,
    ) -> None:
        """In launch p rank r continues tile group p - r from what rank r - 1 left, so that all ranks work
        at once and no kernel waits for a peer; R + G - 1 launches with a barrier after each. Then every rank
        copies the last rank's result.

        Order: rank 0 starts from the caller's gradients (dw_accumulate) or +0; then rank after rank.
        """
        rank, size = int(self.params["rank"]), int(self.params["ep_size"])
        groups = num_groups or (4 * size if size > 1 else 1)
        placed = place_links(links)
        if rank == 0:
            for link, offset in placed:
                self._start_chain(back, link, chains[0] + offset)
        for position in range(size + groups - 1):
            if 0 <= position - rank < groups:
                for link, offset in placed:
                    self._chain_group(link, chains, offset, position - rank, groups)
            barrier()
        for link, offset in placed:
            self._finish_chain(back, link, chains[size - 1] + offset)
        barrier()  # nobody overwrites a chain that a peer still reads

    def _start_chain(self, back: np.ndarray, link: Link, chain: int) -> None:
        """The accumulator that rank 0 begins with."""
        start = int(back[link.name])
        if not int(back["dw_accumulate"]):
            self.launcher.clear(chain, 4 * link.num_elements)
        elif int(back["dw_is_bf16"]):
            self._convert("portable_widen", start, chain, link.num_elements)
        else:
            self.launcher.copy(chain, start, 4 * link.num_elements)

    def _chain_group(
        self, link: Link, chains: list[int], offset: int, group: int, groups: int
    ) -> None:
        """This rank's tokens into one group of tiles, continuing the rank below."""
        rank, tiles = int(self.params["rank"]), self.num_tiles(link.a[1], link.b[1])
        span = (tiles * group // groups, tiles * (group + 1) // groups)
        out = chains[rank] + offset
        start = chains[rank - 1] + offset if rank else out
        self.gradient(self.own_rows(), link.a, link.b, start, out, span)

    def _finish_chain(self, back: np.ndarray, link: Link, chain: int) -> None:
        """The last rank's accumulator is the gradient; bf16 is rounded once, here."""
        if int(back["dw_is_bf16"]):
            self._convert("portable_round", chain, int(back[link.name]), link.num_elements)
        else:
            self.launcher.copy(int(back[link.name]), chain, 4 * link.num_elements)


class Link(NamedTuple):
    """One replicated weight gradient: name in BACKWARD_PARAMS, operands as (address, width)."""

    name: str
    a: tuple[int, int]
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


def _struct(dtype: np.dtype, **values: Any) -> np.ndarray:
    """A parameter struct by value, all other fields 0."""
    block = np.zeros((), dtype)
    for name, value in values.items():
        block[name] = value
    return block


# --------------------------------------------------------------------------- entry points of the layer


def launch_forward(workspace: Any, params: np.ndarray, stream: Any) -> None:
    """Everything between the two barriers of a forward step, on the current stream."""
    _layer(workspace, params, quantise=True).forward()


def launch_backward(workspace: Any, params: np.ndarray, back: np.ndarray, stream: Any) -> None:
    """Everything between the two barriers of a backward step, on the current stream."""
    from mok_ref.gpu.errors import BARRIER_CHAIN

    layer = _layer(workspace, params, quantise=False)
    layer.backward(back)
    if layer.shared is not None:
        chains = workspace.heap.addresses(workspace.symmetric_name("chain"))
        layer.shared_chain(back, chains, lambda: workspace.heap.barrier(BARRIER_CHAIN))


def warm_up(workspace: Any) -> None:
    """Compile and load every kernel, so that no rank waits for another one's compiler."""
    from mok_ref.gpu import mxfp8
    from mok_ref.gpu.compiler import load_kernel

    path = device_path(workspace)
    names = ("pull", f"product_{path}", f"gradient_{path}", "swiglu_forward", "swiglu_backward",
             "widen", "round")  # fmt: skip
    for name in names:
        _ = load_kernel(SOURCE, f"portable_{name}").num_regs
    if workspace.config.dtype == "mxfp8":
        mxfp8.warm_up()
    _scratch(workspace)


def device_path(workspace: Any) -> str:
    """"soft" or "mma" for this workspace; `workspace.extra("tc_path", ...)` may have fixed it before."""
    return workspace.extra("tc_path", choose_path)


def _layer(workspace: Any, params: np.ndarray, quantise: bool) -> PortableLayer:
    shared = None
    if workspace.config.shared_intermediate_size:
        shared = Weights(*(int(params[f"shared_w_{part}"]) for part in ("gate", "up", "down")))
    return PortableLayer(
        config=workspace.config,
        params=params,
        scratch=_scratch(workspace),
        routed=_routed_weights(workspace, params, quantise),
        shared=shared,
        launcher=workspace.extra("portable_launcher", DeviceLauncher),
        path=device_path(workspace),
    )


def _routed_weights(workspace: Any, params: np.ndarray, quantise: bool) -> Weights:
    """The experts' weights as products see them; MXFP8 codes are made once per forward."""
    parts = ("gate", "up", "down")
    given = [int(params[f"w_{part}"]) for part in parts]
    if workspace.config.dtype != "mxfp8":
        return Weights(*given)
    from mok_ref.gpu import mxfp8

    config, local = workspace.config, int(params["num_local_experts"])
    inner, hidden = config.intermediate_size, config.hidden_size
    codes, scales = [], []
    for part, address in zip(parts, given, strict=True):
        outer, width = (hidden, inner) if part == "down" else (inner, hidden)
        rows = local * outer
        code = workspace.scratch(f"w_{part}_codes", (rows, width), np.uint8)
        scale = workspace.scratch(f"w_{part}_scales", (rows, num_blocks(width)), np.uint8)
        if quantise:
            mxfp8.launch_quantize(address, code, scale, rows, width, config.scale_rule)
        codes.append(int(code.data.ptr))
        scales.append(int(scale.data.ptr))
    return Weights(*codes, *scales)


def _scratch(workspace: Any) -> Scratch:
    """This path's own buffers, made once per workspace."""
    config, sizes = workspace.config, workspace.sizes
    rows, inner = sizes.macro_blocks * ROW_TILE, config.intermediate_size
    tokens, shared = sizes.max_tokens, config.shared_intermediate_size
    local = config.num_local_experts(workspace.heap.rank)

    def address(name: str, shape: tuple[int, ...], dtype: Any) -> int:
        return int(workspace.scratch(f"portable_{name}", shape, dtype).data.ptr)

    dw = (0, 0, 0)
    if workspace.training and config.grad_dtype == "bf16":
        elements = local * inner * config.hidden_size
        dw = tuple(address(f"dw_{part}", (elements,), np.float32) for part in ("gate", "up", "down"))
    return Scratch(
        gate_ring=address("gate_ring", (rows, inner), np.uint16),
        up_ring=address("up_ring", (rows, inner), np.uint16),
        dhu=address("dhu", (max(rows * inner, tokens * shared),), np.float32) if workspace.training else 0,
        dw=dw,
        shared_gate=address("shared_gate", (tokens, shared), np.uint16) if shared else 0,
        shared_up=address("shared_up", (tokens, shared), np.uint16) if shared else 0,
    )
