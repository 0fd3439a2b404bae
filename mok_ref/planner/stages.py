"""What one stage of the kernel costs on one GPU: gate/up, down, dgrad, wgrad, combine.

    seconds = max(issue, power) and memory, the shorter one hidden but for `stall_share`

    issue    tiles * (k_blocks * t_block + t_epilogue) / SMs          what the clock allows
    power    FLOPs / sustained FLOP/s                                 what 700 W allow
    memory   bytes read / read rate + bytes written / write rate

A tile is 128 rows by 256 columns, a k-block 64 long. One with at most `TAIL_ROWS` rows keeps one of
the two math warpgroups idle and costs `tail_share` of a full one; clock stamps of the kernels say
that this is nearly all of it, because operands come as slowly. The constants of `KernelConstants`
are fitted by `validity.py`, never typed in.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from .errors import require
from .hardware import Hardware, load_hardware
from .models import ModelDescription

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 128, 256, 64
TAIL_ROWS = 64
BLOCK_FLOPS = 2 * TILE_ROWS * TILE_COLUMNS * TILE_DEPTH
FITTED = Path(__file__).parent / "data" / "fitted.json"


@dataclass(frozen=True)
class KernelConstants:
    """Constants of this project's kernel on an H200, in microseconds per tile or as factors.

    issue_share       main loop's rate / hardware.burst_bf16_flops
    power_share       main loop's sustained rate / hardware.sustained_bf16_flops
    *_epilogue_us     what a 128x256 tile's epilogue adds when it is not hidden (wgrad: with
                      float32 dW; bf16 stores half the bytes and counts half)
    tail_share        time of a tile with at most 64 rows over that of a full one: half the work,
                      nearly the same operands
    stall_share       share of the shorter of products and memory traffic that the longer one does
                      not hide: a tile's first operands come late when its weights are cold
    copy_us_per_mb    issue slots that gather and scatter take from the math, per MB of rows
    dequantise_share  MXFP8 expanded to bf16 inside the kernel: factor on issue time
    quantise_share    kernels that quantise x, dy and weights for MXFP8: time over that of their
                      memory traffic alone
    fixed_us          launches and schedule kernels of one direction
    """

    issue_share: float = 1.0
    power_share: float = 1.0
    gate_up_epilogue_us: float = 4.0
    down_epilogue_us: float = 3.0
    dgrad_epilogue_us: float = 8.0
    wgrad_epilogue_us: float = 4.0
    stall_share: float = 0.3
    tail_share: float = 0.9
    copy_us_per_mb: float = 0.2
    dequantise_share: float = 1.15
    quantise_share: float = 1.5
    fixed_us: float = 40.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            require(math.isfinite(value) and value >= 0, f"{f.name} must be >= 0, got {value!r}")


def fitted_constants(path: Path = FITTED) -> KernelConstants:
    """The constants that `validity.py` last stored; the defaults if there is no such file."""
    if not path.is_file():
        return KernelConstants()
    return KernelConstants(**json.loads(path.read_text(encoding="utf-8"))["constants"])


def constants_as_json(constants: KernelConstants) -> dict[str, float]:
    return asdict(constants)


@dataclass(frozen=True)
class LayerShape:
    """One layer on one GPU, as the kernel sees it.

    tp_size cuts the columns of gate and up (I) and of down (H); `native_fp8` means MXFP8 products
    on block-scaled tensor cores (another contract than version 1: a what-if).
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    shared_intermediate_size: int = 0
    dtype: str = "bf16"
    tp_size: int = 1
    native_fp8: bool = False

    def __post_init__(self) -> None:
        require(self.dtype in ("bf16", "mxfp8"), f"dtype must be bf16 or mxfp8, got {self.dtype!r}")
        require(
            self.dtype == "mxfp8" or not self.native_fp8,
            "native_fp8 must go with dtype mxfp8, got dtype='bf16'",
        )

    @property
    def columns(self) -> int:
        """Columns of gate (and of up) that this GPU computes."""
        return -(-self.intermediate_size // self.tp_size)

    @property
    def output_columns(self) -> int:
        """Columns of y that this GPU computes."""
        return -(-self.hidden_size // self.tp_size)

    @property
    def pull_row_bytes(self) -> float:
        """Bytes of one pulled row: bf16, or E4M3 codes and one scale byte per 32."""
        per_element = 2 if self.dtype == "bf16" else 33 / 32
        return self.hidden_size * per_element

    @property
    def push_row_bytes(self) -> float:
        """Bytes of one pushed row of y or dx: always bf16."""
        return 2.0 * self.output_columns

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight element where it rests."""
        return 2.0 if self.dtype == "bf16" else 33 / 32


def shape_of(model: ModelDescription, dtype: str = "bf16", tp_size: int = 1) -> LayerShape:
    """The layer of `model` as the kernel sees it."""
    return LayerShape(
        model.hidden_size,
        model.intermediate_size,
        model.num_experts,
        model.top_k,
        model.shared_intermediate_size,
        dtype,
        tp_size,
    )


@cache
def reference_sm_rate() -> float:
    """FLOP/s of one SM of the GPU on which the constants were fitted."""
    reference = load_hardware("h200")
    return reference.burst_bf16_flops / reference.num_sms


@dataclass(frozen=True)
class StageCosts:
    """Cost functions of one shape on one machine; row counts in, seconds out.

    `rows` (n,) holds the rows of each expert touched (segments of a minibatch).
    """

    shape: LayerShape
    hardware: Hardware
    constants: KernelConstants
    communication_sms: int = 0
    sustained: bool = True
    float32_dw: bool = False

    def __post_init__(self) -> None:
        require(
            0 <= self.communication_sms < self.hardware.num_sms,
            f"communication_sms must be in 0..{self.hardware.num_sms - 1}, "
            f"got {self.communication_sms}",
        )

    @property
    def compute_sms(self) -> int:
        return self.hardware.num_sms - self.communication_sms

    @property
    def is_fast_fp8(self) -> bool:
        return self.shape.native_fp8 and self.hardware.native_mxfp8 > 0

    @cached_property
    def clock_scale(self) -> float:
        """How much slower than the H200's an SM's scalar work runs, from the tensor rate per SM:
        no better figure is public, so epilogues are assumed to keep their share of the time."""
        ours = self.hardware.burst_bf16_flops / self.hardware.num_sms
        return reference_sm_rate() / ours

    def tile_seconds(self, depth: float, epilogue_us: float) -> float:
        """Time of one output tile on one SM, with a chain of `depth`."""
        rate = self.hardware.burst_bf16_flops * self.constants.issue_share
        if self.is_fast_fp8:
            rate *= self.hardware.peak_fp8_flops / self.hardware.peak_bf16_flops
        block = BLOCK_FLOPS / (rate / self.hardware.num_sms)
        blocks = depth / TILE_DEPTH
        if self.shape.dtype == "mxfp8" and not self.is_fast_fp8:
            block *= self.constants.dequantise_share
        return blocks * block + epilogue_us * 1e-6 * self.clock_scale

    def issue_seconds(self, tiles: float, depth: float, epilogue_us: float) -> float:
        """Time of `tiles` output tiles drawn by all SMs, neighbours filling the last wave."""
        return tiles / self.compute_sms * self.tile_seconds(depth, epilogue_us)

    @cached_property
    def latencies(self) -> tuple[float, float, float, float]:
        """Seconds of a single tile of gate/up, down, dgrad hidden, dgrad input."""
        s, k = self.shape, self.constants
        hidden, inner = padded(s.hidden_size, TILE_DEPTH), padded(s.intermediate_size, TILE_DEPTH)
        return (
            self.tile_seconds(hidden, k.gate_up_epilogue_us),
            self.tile_seconds(inner, k.down_epilogue_us),
            self.tile_seconds(hidden, k.dgrad_epilogue_us),
            self.tile_seconds(2 * inner, k.down_epilogue_us),
        )

    def stretch(self, rows: np.ndarray, is_backward: bool) -> float:
        """Factor by which tiles of the two trailing products take longer than `latencies`: what
        power, memory and the rows' gather and scatter add to the clock's limit."""
        s = self.shape
        halves = -(-s.columns // TILE_ROWS)
        columns = (-(-s.columns // TILE_COLUMNS) if is_backward else halves,
                   -(-s.output_columns // TILE_COLUMNS))  # fmt: skip
        tiles = self.latencies[2:] if is_backward else self.latencies[:2]
        blocks = counted_tiles(rows, self.constants.tail_share) / self.compute_sms
        issue = blocks * sum(n * seconds for n, seconds in zip(columns, tiles, strict=True))
        if issue == 0.0:
            return 1.0
        if is_backward:
            return (self.dgrad_hidden(rows) + self.dgrad_input(rows)) / issue
        return (self.gate_up(rows) + self.down(rows)) / issue

    def power_seconds(self, flops: float) -> float:
        if not self.sustained:
            return 0.0
        rate = self.hardware.sustained_bf16_flops
        if self.is_fast_fp8:
            rate = self.hardware.sustained_fp8_flops
        return flops / (rate * self.constants.power_share)

    def memory_seconds(self, read: float, write: float) -> float:
        return read / self.hardware.read_bytes_per_s + write / self.hardware.write_bytes_per_s

    def copy_seconds(self, num_rows: float, row_bytes: float) -> float:
        """Issue slots that the helper warps' gather (or the scatter) takes from the math."""
        if self.communication_sms:
            return 0.0
        return self.constants.copy_us_per_mb * 1e-6 * num_rows * row_bytes / 1e6 * self.clock_scale

    def product(
        self,
        rows: np.ndarray,
        columns: int,
        depth: int,
        weight_elements: float,
        epilogue_us: float,
        extra: tuple[float, float] = (0.0, 0.0),
    ) -> float:
        """rows (n,) times a weight of `columns` x `depth` per expert; extra = (read, write)."""
        blocks = counted_tiles(rows, self.constants.tail_share)
        tiles = blocks * -(-columns // TILE_COLUMNS)
        issue = self.issue_seconds(tiles, padded(depth, TILE_DEPTH), epilogue_us)
        power = self.power_seconds(2.0 * float(np.sum(rows)) * columns * depth)
        weights = np.count_nonzero(rows) * weight_elements * self.shape.weight_bytes
        memory = self.memory_seconds(weights + extra[0], extra[1])
        return self.together(max(issue, power), memory)

    def together(self, products: float, memory: float) -> float:
        """Products and memory traffic side by side, the shorter one not wholly hidden."""
        stalled = self.constants.stall_share * min(products, memory)
        return max(products, memory) + stalled

    def gate_up(self, rows: np.ndarray, saves: bool = True) -> float:
        """gate and up side by side (2I columns, chain H), SwiGLU in the epilogue."""
        s, n = self.shape, float(np.sum(rows))
        if n == 0:
            return 0.0
        read = n * s.pull_row_bytes
        write = n * s.columns * (6.0 if saves else 2.0)
        seconds = self.product(
            rows,
            2 * padded(s.columns, TILE_ROWS),
            s.hidden_size,
            2.0 * s.columns * s.hidden_size,
            self.constants.gate_up_epilogue_us,
            (read, write),
        )
        return seconds + self.copy_seconds(n, s.pull_row_bytes)

    def down(self, rows: np.ndarray) -> float:
        """y = h W_down (H columns, chain I), pushed row by row."""
        s, n = self.shape, float(np.sum(rows))
        if n == 0:
            return 0.0
        seconds = self.product(
            rows,
            s.output_columns,
            s.intermediate_size,
            float(s.output_columns * s.intermediate_size),
            self.constants.down_epilogue_us,
            (n * s.intermediate_size * 2.0, n * s.push_row_bytes),
        )
        return seconds + self.copy_seconds(n, s.push_row_bytes)

    def dgrad_hidden(self, rows: np.ndarray) -> float:
        """dhu = dy W_down^T (I columns, chain H), SwiGLU backward and dot128 in the epilogue."""
        s, n = self.shape, float(np.sum(rows))
        if n == 0:
            return 0.0
        read = n * (s.pull_row_bytes + 4.0 * s.columns)
        seconds = self.product(
            rows,
            s.columns,
            s.hidden_size,
            float(s.columns * s.hidden_size),
            self.constants.dgrad_epilogue_us,
            (read, n * s.columns * 6.0),
        )
        return seconds + self.copy_seconds(n, s.pull_row_bytes)

    def dgrad_input(self, rows: np.ndarray) -> float:
        """dx rows = [d_gate | d_up] [W_gate ; W_up]^T (H columns, one chain over 2I)."""
        s, n = self.shape, float(np.sum(rows))
        if n == 0:
            return 0.0
        seconds = self.product(
            rows,
            s.output_columns,
            2 * s.intermediate_size,
            2.0 * s.output_columns * s.intermediate_size,
            self.constants.down_epilogue_us,
            (n * s.intermediate_size * 4.0, n * s.push_row_bytes),
        )
        return seconds + self.copy_seconds(n, s.push_row_bytes)

    def wgrad(self, rows: np.ndarray) -> float:
        """dW_down, dW_gate, dW_up: one chain over an expert's rows per output tile."""
        s, n = self.shape, float(np.sum(rows))
        if n == 0:
            return 0.0
        touched = rows[rows > 0]
        tiles = 3 * (-(-s.hidden_size // TILE_ROWS)) * (-(-s.columns // TILE_COLUMNS))
        depth = float(np.mean(-(-touched // TILE_DEPTH) * TILE_DEPTH))
        stored = self.constants.wgrad_epilogue_us * (1.0 if self.float32_dw else 0.5)
        issue = self.issue_seconds(tiles * len(touched), depth, stored)
        elements = 3.0 * s.hidden_size * s.columns * len(touched)
        read = n * (2 * s.hidden_size + 3 * s.columns) * 2.0
        write = elements * (4.0 if self.float32_dw else 2.0)
        power = self.power_seconds(6.0 * n * s.hidden_size * s.columns)
        return self.together(max(issue, power), self.memory_seconds(read, write))

    def quantise(self, elements: float) -> float:
        """bf16 to MXFP8 codes and scales, streaming: 2 bytes in, 33/32 out of each element.

        Native products are measured by others on operands that are codes already.
        """
        if self.shape.dtype != "mxfp8" or self.shape.native_fp8:
            return 0.0
        traffic = self.memory_seconds(2.0 * elements, 33 / 32 * elements)
        return self.constants.quantise_share * traffic

    def combine(self, num_tokens: float) -> float:
        """Epilogue: K rows of the combine buffer into each token, streaming."""
        s = self.shape
        moved = num_tokens * (s.top_k + 1) * s.hidden_size * 2.0
        return moved / self.hardware.combine_bytes_per_s

    def shared_forward(self, num_tokens: float) -> float:
        """The shared expert's products on this rank's own tokens (bf16 always)."""
        return self._shared(num_tokens, 6.0)

    def shared_backward(self, num_tokens: float) -> float:
        return self._shared(num_tokens, 12.0)

    def _shared(self, num_tokens: float, factor: float) -> float:
        s = self.shape
        flops = factor * num_tokens * s.hidden_size * s.shared_intermediate_size / s.tp_size
        rate = self.hardware.burst_bf16_flops * self.constants.issue_share
        rate *= self.compute_sms / self.hardware.num_sms
        return max(flops / rate, self.power_seconds(flops))


def padded(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


def counted_tiles(rows: np.ndarray, tail_share: float) -> float:
    """Row blocks of all experts; one with at most TAIL_ROWS rows counts `tail_share`."""
    rest = np.asarray(rows) % TILE_ROWS
    whole = np.sum(np.asarray(rows) // TILE_ROWS) + np.count_nonzero(rest > TAIL_ROWS)
    return float(whole + tail_share * np.count_nonzero((rest > 0) & (rest <= TAIL_ROWS)))


def layer_flops(rows: float, model: LayerShape, tokens: float = 0.0) -> float:
    """Forward FLOPs by the convention 6 rows H I (+ 6 T H I_shared); backward is twice that."""
    shared = 6.0 * tokens * model.hidden_size * model.shared_intermediate_size
    return 6.0 * rows * model.hidden_size * model.intermediate_size + shared
