"""The layer as a stream-ordered sequence of launches: any GPU from sm_80, any size.

CUDA twin: cuda_src/portable.cu; the products and their two paths are in mok_ref.gpu.products.

Per macrobatch: pull, gate, up, SwiGLU, down and push. Backward: pull x and dy, gate and up again if
they were not kept, dhu, SwiGLU backward with dot128, dx and push, three weight gradients whose
chains continue from macrobatch to macrobatch. The host never waits, nothing is allocated after
`warm_up`. The number of launches is that of the worst-case schedule; launches beyond the schedule's
end return at once.

MXFP8: codes and scales travel and rest; rows are expanded to the bf16 values they stand for when
pulled, weights when loaded into a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.gpu.params import SYMMETRIC_BUFFERS
from mok_ref.gpu.products import (
    GRADIENT_PARAMS,
    OPERAND,
    PRODUCT_PARAMS,
    PUSH_BF16,
    ROUTED,
    ROW_RANGE,
    SOURCE,
    STORE_BF16,
    STORE_FLOAT,
    THREADS,
    DeviceLauncher,
    Link,
    Products,
    choose_path,
    rows_operand,
    struct,
    weight_operand,
)
from mok_ref.mxfp8 import num_blocks

SCALE_RULE_CODES = {"fit": 0, "ocp": 1}
NOT_QUANTISED = -1
PARTS = ("gate", "up", "down")
MAX_SWIGLU_CTAS = 8192

_POINTER = np.uint64

PULL_PARAMS = np.dtype(
    [("rows", ROW_RANGE), ("ring", _POINTER), ("buffer", np.int32), ("scales", np.int32)],
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
    dw: tuple[int, ...]  # float32 chains of gate, up, down where bf16 gradients are wanted
    shared_gate: int  # [max_tokens, I'] bf16: gate of the shared expert where it is not kept
    shared_up: int


class GradientRows(NamedTuple):
    """Addresses of a macrobatch's row gradients: d_gate, d_up and hw, [rows, I] bf16."""

    d_gate: int
    d_up: int
    hw: int


@dataclass(frozen=True)
class PortableLayer(Products):
    """One rank's launches of the layer, between the barriers.

    routed   this rank's experts: bf16, or MXFP8 codes with scales
    shared   the shared expert, or None
    """

    config: MoEConfig
    scratch: Scratch
    routed: Weights
    shared: Weights | None

    # ------------------------------------------------------------------ sizes and places

    @property
    def macro_rows(self) -> int:
        return int(self.params["macro_blocks"]) * ROW_TILE

    @property
    def num_macrobatches(self) -> int:
        return -(-int(self.params["max_row_blocks"]) // int(self.params["macro_blocks"]))

    def routed_rows(self, macrobatch: int) -> np.ndarray:
        """The rows of one macrobatch."""
        first, rows = macrobatch * self.macro_rows, self.macro_rows
        return struct(ROW_RANGE, first_row=first, num_rows=rows, dense_rows=ROUTED)

    def is_kept(self, macrobatch: int) -> bool:
        """Whether gate and up of all rows of a macrobatch rest in gate_saved and up_saved."""
        end = min((macrobatch + 1) * self.macro_rows, int(self.params["max_row_blocks"]) * ROW_TILE)
        return bool(self.params["gate_saved"]) and end <= int(self.params["max_saved_rows"])

    def gate_up_places(self, macrobatch: int) -> tuple[int, int]:
        """Where gate and up of a macrobatch's first row are."""
        if not self.is_kept(macrobatch):
            return self.scratch.gate_ring, self.scratch.up_ring
        first = macrobatch * self.macro_rows * self.config.intermediate_size * 2
        return int(self.params["gate_saved"]) + first, int(self.params["up_saved"]) + first

    def shared_gate_up_places(self) -> tuple[int, int]:
        """Where gate and up of the shared expert are."""
        gate, up = int(self.params["shared_gate"]), int(self.params["shared_up"])
        return (gate, up) if gate else (self.scratch.shared_gate, self.scratch.shared_up)

    # ------------------------------------------------------------------ steps

    def pull(self, buffer: str, ring: int, rows: np.ndarray) -> None:
        """dispatch: rows of x or dy from their owners' memory into a ring, as bf16 values."""
        quantised = self.config.dtype == "mxfp8"
        block = struct(
            PULL_PARAMS,
            rows=rows,
            ring=ring,
            buffer=SYMMETRIC_BUFFERS[f"{buffer}_codes" if quantised else buffer],
            scales=SYMMETRIC_BUFFERS[f"{buffer}_scales"] if quantised else -1,
        )
        self.launch("pull", (int(rows["num_rows"]),), block)

    def swiglu(self, direction: str, rows: np.ndarray, width: int, **places: int) -> None:
        """SwiGLU of rows; `direction` is "forward" or "backward"."""
        rule = NOT_QUANTISED
        if self.config.dtype == "mxfp8" and int(rows["dense_rows"]) == ROUTED:
            rule = SCALE_RULE_CODES[self.config.scale_rule]
        block = struct(SWIGLU_PARAMS, rows=rows, width=width, scale_rule=rule, **places)
        warps_per_cta = THREADS // 32
        if direction == "forward":  # a warp per block of 32 columns, walking on
            ctas = min(
                -(-int(rows["num_rows"]) * num_blocks(width) // warps_per_cta), MAX_SWIGLU_CTAS
            )
        else:  # a warp per row
            ctas = -(-int(rows["num_rows"]) // warps_per_cta)
        self.launch(f"swiglu_{direction}", (ctas,), block)

    def gate_up(
        self, rows: np.ndarray, x: int, weights: Weights, places: tuple[int, int], inner: int
    ) -> None:
        """gate = bf16(tc(x, W_gate)), up = bf16(tc(x, W_up))."""
        hidden = self.config.hidden_size
        a = rows_operand(x, int(rows["num_rows"]), hidden)
        matrices = ((weights.gate, weights.gate_scales), (weights.up, weights.up_scales))
        for out, (matrix, scales) in zip(places, matrices, strict=True):
            b = weight_operand(matrix, scales, inner, hidden)
            self.product(rows, [(a, b)], inner, STORE_BF16, out)

    def down(
        self, rows: np.ndarray, h: int, weights: Weights, inner: int, output: int, out: int = 0
    ) -> None:
        """y = bf16(tc(h, W_down)), pushed (routed) or stored (shared)."""
        hidden = self.config.hidden_size
        a = rows_operand(h, int(rows["num_rows"]), inner)
        b = weight_operand(weights.down, weights.down_scales, hidden, inner)
        self.product(rows, [(a, b)], hidden, output, out)

    def row_gradients(
        self,
        rows: np.ndarray,
        dy: int,
        weights: Weights,
        inner: int,
        gate_up: tuple[int, int],
        out: GradientRows,
    ) -> None:
        """dhu = tc(dy, W_downᵀ); d_gate, d_up, hw; routed: d_topk_weights = dot128(dhu · h)."""
        hidden, dhu = self.config.hidden_size, self.scratch.dhu
        a = rows_operand(dy, int(rows["num_rows"]), hidden)
        b = weight_operand(weights.down, weights.down_scales, hidden, inner, transposed=True)
        self.product(rows, [(a, b)], inner, STORE_FLOAT, dhu)
        gate, up = gate_up
        self.swiglu("backward", rows, inner, gate=gate, up=up, dhu=dhu, d_gate=out.d_gate,
                    d_up=out.d_up, h=out.hw)  # fmt: skip

    def dx(
        self,
        rows: np.ndarray,
        gradients: GradientRows,
        weights: Weights,
        inner: int,
        output: int,
        out: int = 0,
    ) -> None:
        """dx = bf16(tc([d_gate | d_up], [W_gate ; W_up]ᵀ)), one chain, gate half first."""
        hidden, num_rows = self.config.hidden_size, int(rows["num_rows"])
        pairs = [
            (
                rows_operand(gradient, num_rows, inner),
                weight_operand(matrix, scales, inner, hidden, transposed=True),
            )
            for gradient, matrix, scales in (
                (gradients.d_gate, weights.gate, weights.gate_scales),
                (gradients.d_up, weights.up, weights.up_scales),
            )
        ]
        self.product(rows, pairs, hidden, output, out)

    # ------------------------------------------------------------------ forward

    def forward(self) -> None:
        """Everything between the barriers of a forward step: shared, then routed experts.

        Macrobatches go last to first, like in the megakernel; no bit depends on it.
        """
        self.shared_forward()
        for macrobatch in reversed(range(self.num_macrobatches)):
            self.routed_forward(macrobatch)

    def routed_forward(self, macrobatch: int) -> None:
        rows, inner = self.routed_rows(macrobatch), self.config.intermediate_size
        places = self.gate_up_places(macrobatch)
        x_ring, h_ring = int(self.params["x_ring"]), int(self.params["h_ring"])
        self.pull("x", x_ring, rows)
        self.gate_up(rows, x_ring, self.routed, places, inner)
        self.swiglu("forward", rows, inner, gate=places[0], up=places[1], h=h_ring)
        self.down(rows, h_ring, self.routed, inner, PUSH_BF16)

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
        gate, up = places = self.shared_gate_up_places()
        self.gate_up(rows, int(self.params["x_in"]), shared, places, inner)
        self.swiglu("forward", rows, inner, gate=gate, up=up, h=int(self.params["shared_h"]))

    # ------------------------------------------------------------------ backward

    def backward(self, back: np.ndarray) -> None:
        """Everything between the two barriers of a backward step but the ordered chain.

        back    a BACKWARD_PARAMS block
        Order:  macrobatches first to last: the weight gradients' chains run over ascending rows.
        """
        self.start_gradients(back)
        self.shared_backward(back)
        for macrobatch in range(self.num_macrobatches):
            self.routed_backward(macrobatch, back)
        self.finish_gradients(back)

    def routed_backward(self, macrobatch: int, back: np.ndarray) -> None:
        rows = self.routed_rows(macrobatch)
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        places = self.gate_up_places(macrobatch)
        x_ring, dy_ring = int(self.params["x_ring"]), int(back["dy_ring"])
        gradients = GradientRows(*(int(back[f"{name}_ring"]) for name in ("d_gate", "d_up", "hw")))
        self.pull("x", x_ring, rows)
        self.pull("dy", dy_ring, rows)
        if not self.is_kept(macrobatch):
            self.gate_up(rows, x_ring, self.routed, places, inner)
        self.row_gradients(rows, dy_ring, self.routed, inner, places, gradients)
        self.dx(rows, gradients, self.routed, inner, PUSH_BF16)
        chains = self.chain_places(back)
        for name, a, b in (
            ("dw_down", (dy_ring, hidden), (gradients.hw, inner)),
            ("dw_gate", (gradients.d_gate, inner), (x_ring, hidden)),
            ("dw_up", (gradients.d_up, inner), (x_ring, hidden)),
        ):
            self.gradient(rows, a, b, chains[name], chains[name])

    def chain_places(self, back: np.ndarray) -> dict[str, int]:
        """Where the float32 chains of the routed weight gradients are."""
        names = tuple(f"dw_{part}" for part in PARTS)
        if int(back["dw_is_bf16"]):
            return dict(zip(names, self.scratch.dw, strict=True))
        return {name: int(back[name]) for name in names}

    def start_gradients(self, back: np.ndarray) -> None:
        """Chains start from +0 or from the caller's gradients (bf16 ones are widened, exactly)."""
        for name, place in self.chain_places(back).items():
            if not int(back["dw_accumulate"]):
                self.launcher.clear(place, 4 * self.gradient_elements)
            elif int(back["dw_is_bf16"]):
                self.widen(int(back[name]), place, self.gradient_elements)

    def finish_gradients(self, back: np.ndarray) -> None:
        """bf16 gradients: the one rounding at the end of the chain."""
        if int(back["dw_is_bf16"]):
            for name, place in self.chain_places(back).items():
                self.round(place, int(back[name]), self.gradient_elements)

    @property
    def gradient_elements(self) -> int:
        """Elements of each routed weight gradient."""
        local = int(self.params["num_local_experts"])
        return local * self.config.intermediate_size * self.config.hidden_size

    def shared_backward(self, back: np.ndarray) -> None:
        """dx, d_gate and d_up of the shared expert; its weights: `shared_chain`."""
        if self.shared is None:
            return
        if not int(self.params["shared_gate"]):
            self.shared_hidden(self.shared)  # not kept: the same bits again
        rows, inner = self.own_rows(), self.config.shared_intermediate_size
        places, gradients = self.shared_gate_up_places(), self.shared_rows(back)
        self.row_gradients(rows, int(back["dy_in"]), self.shared, inner, places, gradients)
        self.dx(rows, gradients, self.shared, inner, STORE_BF16, int(back["shared_dx"]))

    def shared_rows(self, back: np.ndarray) -> GradientRows:
        d_gate, d_up = int(back["shared_d_gate"]), int(back["shared_d_up"])
        return GradientRows(d_gate, d_up, int(self.params["shared_h"]))

    def shared_chain(
        self,
        back: np.ndarray,
        chains: list[int],
        barrier: Callable[[], None],
        num_groups: int | None = None,
    ) -> None:
        """The shared expert's weight gradients: dw_gate, dw_up, dw_down over all ranks' tokens."""
        if self.shared is None:
            return
        hidden, inner = self.config.hidden_size, self.config.shared_intermediate_size
        x, dy, rows = int(self.params["x_in"]), int(back["dy_in"]), self.shared_rows(back)
        links = [
            Link(int(back["shared_dw_gate"]), (rows.d_gate, inner), (x, hidden)),
            Link(int(back["shared_dw_up"]), (rows.d_up, inner), (x, hidden)),
            Link(int(back["shared_dw_down"]), (dy, hidden), (rows.hw, inner)),
        ]
        accumulate, is_bf16 = bool(back["dw_accumulate"]), bool(back["dw_is_bf16"])
        self.ordered_chain(links, chains, barrier, accumulate, is_bf16, num_groups)


# ------------------------------------------------------------------------- entry points


def launch_forward(workspace: Any, params: np.ndarray, stream: Any) -> None:
    """Everything between the two barriers of a forward step, on the current stream."""
    _layer(workspace, params, quantise=True).forward()


def launch_backward(workspace: Any, params: np.ndarray, back: np.ndarray, stream: Any) -> None:
    """The products of a backward step, from the barrier behind dy to the one behind which all dx
    rows are here, on the current stream."""
    from mok_ref.gpu.errors import BARRIER_CHAIN, BARRIER_DX

    layer = _layer(workspace, params, quantise=False)
    layer.backward(back)
    if layer.shared is not None:
        chains = workspace.heap.addresses(workspace.symmetric_name("chain"))
        layer.shared_chain(back, chains, lambda: workspace.heap.barrier(BARRIER_CHAIN))
    workspace.heap.barrier(BARRIER_DX)


def warm_up(workspace: Any) -> None:
    """Load every kernel and make the scratch: no rank waits for another one's compiler."""
    from mok_ref.gpu import mxfp8
    from mok_ref.gpu.compiler import load_kernel

    path = device_path(workspace)
    names = ("pull", f"product_{path}", f"gradient_{path}", "swiglu_forward", "swiglu_backward",
             "widen", "round")  # fmt: skip
    for name in names:
        _ = load_kernel(SOURCE, f"portable_{name}").num_regs
    if workspace.config.dtype == "mxfp8":
        mxfp8.warm_up()
    make_buffers(workspace)


def make_buffers(workspace: Any) -> None:
    """This path's own buffers, made once per workspace."""
    if workspace.config.dtype == "mxfp8":
        _quantised_buffers(workspace)
    _scratch(workspace)


def device_path(workspace: Any) -> str:
    """How tc is evaluated; `workspace.extra("tc_path", ...)` may have fixed it before."""
    return workspace.extra("tc_path", choose_path)


def _layer(workspace: Any, params: np.ndarray, quantise: bool) -> PortableLayer:
    shared = None
    if workspace.config.shared_intermediate_size:
        shared = Weights(*(int(params[f"shared_w_{part}"]) for part in PARTS))
    return PortableLayer(
        params=params,
        launcher=workspace.extra("portable_launcher", DeviceLauncher),
        path=device_path(workspace),
        config=workspace.config,
        scratch=_scratch(workspace),
        routed=_routed_weights(workspace, params, quantise),
        shared=shared,
    )


def _routed_weights(workspace: Any, params: np.ndarray, quantise: bool) -> Weights:
    """The experts' weights as products see them; MXFP8 codes are made once per forward."""
    given = [int(params[f"w_{part}"]) for part in PARTS]
    if workspace.config.dtype != "mxfp8":
        return Weights(*given)
    from mok_ref.gpu import mxfp8

    buffers = _quantised_buffers(workspace)
    for address, (codes, scales) in zip(given, buffers, strict=True):
        if quantise:
            rows, width = codes.shape
            rule = workspace.config.scale_rule
            mxfp8.launch_quantize(address, codes, scales, rows, width, rule)
    codes_at = (int(codes.data.ptr) for codes, _ in buffers)
    scales_at = (int(scales.data.ptr) for _, scales in buffers)
    return Weights(*codes_at, *scales_at)


def _quantised_buffers(workspace: Any) -> list[tuple[Any, Any]]:
    """(codes, scales) of W_gate, W_up, W_down; made once per workspace."""
    config, local = workspace.config, workspace.config.num_local_experts(workspace.heap.rank)
    inner, hidden = config.intermediate_size, config.hidden_size
    pairs = []
    for part in PARTS:
        outer, width = (hidden, inner) if part == "down" else (inner, hidden)
        codes = workspace.scratch(f"w_{part}_codes", (local * outer, width), np.uint8)
        scales = workspace.scratch(f"w_{part}_scales", (local * outer, num_blocks(width)), np.uint8)
        pairs.append((codes, scales))
    return pairs


def _scratch(workspace: Any) -> Scratch:
    """This path's own buffers, made once per workspace."""
    config, sizes, training = workspace.config, workspace.sizes, workspace.training
    rows, inner = sizes.macro_blocks * ROW_TILE, config.intermediate_size
    tokens, shared = sizes.max_tokens, config.shared_intermediate_size
    local = config.num_local_experts(workspace.heap.rank)

    def place(name: str, shape: tuple[int, ...], dtype: Any, wanted: Any = True) -> int:
        if not wanted:
            return 0
        return int(workspace.scratch(f"portable_{name}", shape, dtype).data.ptr)

    bf16_gradients = training and config.grad_dtype == "bf16"
    gradient = (local * inner * config.hidden_size,)
    return Scratch(
        gate_ring=place("gate_ring", (rows, inner), np.uint16),
        up_ring=place("up_ring", (rows, inner), np.uint16),
        dhu=place("dhu", (max(rows * inner, tokens * shared),), np.float32, training),
        dw=tuple(place(f"dw_{part}", gradient, np.float32, bf16_gradients) for part in PARTS),
        shared_gate=place("shared_gate", (tokens, shared), np.uint16, shared),
        shared_up=place("shared_up", (tokens, shared), np.uint16, shared),
    )
