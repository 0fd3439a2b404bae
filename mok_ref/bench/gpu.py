"""This layer beside dense cuBLAS and its peers on one GPU and one rank; bits checked in the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mok_ref.bench.cases import BenchCase
from mok_ref.bench.check import check_bits
from mok_ref.bench.growth import GrowthRow
from mok_ref.bench.peers import PEERS, BenchInputs, graphed, make_inputs
from mok_ref.bench.timing import Protocol, Timing, host_us_per_call, time_contenders
from mok_ref.bench.variants import AroundRow, RankRow, SavingRow

OURS, OURS_SAVING, OURS_BF16 = "mok_ref", "mok_ref, saving", "mok_ref, bf16 dW"
SMALL_TOKENS = 512  # up to here everybody is replayed from a CUDA graph


@dataclass
class BenchRow:
    """One contender of one case and direction."""

    case: str
    direction: str
    contender: str
    sustained_ms: float
    bursts_ms: float
    tflops: float
    ratio_sustained: float  # time of dense cuBLAS / this time
    ratio_bursts: float
    samples: int
    note: str = ""


@dataclass
class BenchReport:
    """All rows of a run, with what they were measured on."""

    device: dict[str, str]
    rows: list[BenchRow] = field(default_factory=list)
    bits: dict[str, str] = field(default_factory=dict)  # case: "equal" or the first difference
    host_us: dict[str, float] = field(default_factory=dict)  # forward, by case
    host_backward_us: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # peer: why
    saving: list[SavingRow] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    around: list[AroundRow] = field(default_factory=list)
    growth: list[GrowthRow] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)  # of the growth's model

    def to_json(self) -> str:
        """What mok_ref/bench/page.py reads."""
        return json.dumps(asdict(self), indent=1)


def device_facts() -> dict[str, str]:
    """GPU, driver, date, kernels: what a figure is worth nothing without."""
    import datetime

    import cupy

    from mok_ref.bench.entry import kernels_name

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    version = cupy.cuda.runtime.driverGetVersion()
    return {
        "gpu": properties["name"].decode(),
        "driver": _driver_version(),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "date": datetime.date.today().isoformat(),
        "kernels": kernels_name(),
    }


def _driver_version() -> str:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.split("\n")[0].strip()


class OurLayer:
    """The layer of one case on a device heap, on torch's current stream.

    heap  default: of one rank; with more, `inputs` holds this rank's experts and the whole case
    """

    def __init__(
        self,
        inputs: BenchInputs,
        grad_dtype: str = "float32",
        path: str = "auto",
        heap: Any = None,
        macrobatch: int | None = None,
    ) -> None:
        import cupy

        from mok_ref.config import MoEConfig
        from mok_ref.experts import ExpertWeights
        from mok_ref.gpu.workspace import DeviceWorkspace
        from mok_ref.heap.virtual_cuda import VirtualCudaWorld

        case, inner = inputs.case, inputs.case.intermediate_size
        self._inputs = inputs
        sizes = (case.hidden_size, inner, case.num_experts, case.top_k)
        self.heap = VirtualCudaWorld(1).heap(0) if heap is None else heap
        self.config = MoEConfig(
            *sizes,
            ep_size=self.heap.size,
            grad_dtype=grad_dtype,
            dtype=case.dtype,
            macrobatch=macrobatch,
        )
        self.x, self.dy = _bits(inputs.x), _bits(inputs.dy)
        self.ids = cupy.from_dlpack(inputs.topk_ids)
        self.topk_weights = cupy.from_dlpack(inputs.topk_weights)
        gate_up = inputs.w_gate_up
        self.weights = ExpertWeights(
            _bits(gate_up[:, :inner].contiguous()),
            _bits(gate_up[:, inner:].contiguous()),
            _bits(inputs.w_down),
        )
        with torch_stream():
            self.workspace = DeviceWorkspace(self.config, self.heap, case.num_tokens, path=path)
        self.context: Any = None

    def forward(self, save: str) -> Any:
        """y; the context stays for `backward`."""
        from mok_ref.layer import moe_forward

        with torch_stream():
            y, self.context = moe_forward(
                self.config,
                self.heap,
                self.x,
                self.ids,
                self.topk_weights,
                self.weights,
                workspace=self.workspace,
                save=save,
            )
        return y

    def backward(self) -> Any:
        """Backward of the last forward, again and again: its saved context counts as given."""
        from mok_ref.layer import moe_backward

        self.context.used = False
        with torch_stream():
            return moe_backward(self.context, self.dy)

    @contextmanager
    def on_portable_path(self) -> Iterator[OurLayer]:
        """The same layer through the portable kernels."""
        portable = OurLayer(self._inputs, self.config.grad_dtype, "portable", self.heap)
        try:
            yield portable
        finally:
            portable.close()

    def synchronize(self) -> None:
        """Wait for torch's stream, where the layer runs, and raise what the device reported."""
        import torch

        torch.cuda.synchronize()
        self.heap.check()

    def close(self) -> None:
        """Give the workspace back when the device has finished."""
        self.synchronize()
        self.workspace.close()


def torch_stream() -> Any:
    """CuPy's current stream is torch's (a capture stream too) inside the `with` block."""
    import torch

    return _external_stream(torch.cuda.current_stream().cuda_stream)


@lru_cache(maxsize=64)
def _external_stream(address: int) -> Any:
    import cupy

    return cupy.cuda.ExternalStream(address)


def _bits(tensor: Any) -> Any:
    """The same memory as a CuPy array of bf16 bits."""
    import cupy
    import torch

    return cupy.from_dlpack(tensor.view(torch.int16)).view(np.uint16)


def bench_case(
    case: BenchCase,
    directions: tuple[str, ...],
    peers: tuple[str, ...],
    report: BenchReport,
    protocol: Protocol,
) -> None:
    """Time all contenders of one case and check this layer's bits; adds to `report`."""
    import gc

    import torch

    inputs = make_inputs(case)
    calls = {name: _peer_calls(name, inputs, report) for name in peers}
    rng = np.random.default_rng(0)
    _bench_layer(inputs, directions, calls, report, rng, protocol)
    if "backward" in directions:
        _bench_bf16_gradients(inputs, calls, report, rng, protocol)
    del calls, inputs
    gc.collect()
    torch.cuda.empty_cache()


def _bench_layer(
    inputs: BenchInputs,
    directions: tuple[str, ...],
    calls: dict[str, dict[str, Callable[[], Any]]],
    report: BenchReport,
    rng: np.random.Generator,
    protocol: Protocol,
) -> None:
    """Forward with and without saving, backward with float32 dW, beside all peers."""
    case = inputs.case
    layer = OurLayer(inputs)
    report.bits[case.name] = check_bits(layer, protocol.numpy_samples)
    for direction in directions:
        peers = {name: call[direction] for name, call in calls.items() if direction in call}
        ours: dict[str, Callable[[], Any]] = {OURS: layer.backward}
        if direction == "forward":
            ours = {OURS: partial(layer.forward, "none")}
            ours[OURS_SAVING] = partial(layer.forward, "all")
            report.host_us[case.name] = host_us_per_call(ours[OURS])
        layer.forward("all")
        if direction == "backward":
            report.host_backward_us[case.name] = host_us_per_call(layer.backward)
        _add_rows(case, direction, ours | peers, report, rng, protocol)
    layer.close()


def _bench_bf16_gradients(
    inputs: BenchInputs,
    calls: dict[str, dict[str, Callable[[], Any]]],
    report: BenchReport,
    rng: np.random.Generator,
    protocol: Protocol,
) -> None:
    """Backward that writes dW in bf16, as the peers do, beside the same dense products."""
    layer = OurLayer(inputs, grad_dtype="bf16")
    layer.forward("all")
    dense = calls["dense cuBLAS"]["backward"]
    rows = BenchReport(report.device)
    contenders = {OURS_BF16: layer.backward, "dense cuBLAS": dense}
    _add_rows(inputs.case, "backward", contenders, rows, rng, protocol)
    report.rows += [row for row in rows.rows if row.contender == OURS_BF16]
    layer.close()


def _peer_calls(
    name: str, inputs: BenchInputs, report: BenchReport
) -> dict[str, Callable[[], Any]]:
    """A peer's callables; a peer that cannot run is left out and named."""
    try:
        return PEERS[name](inputs)
    except (ImportError, RuntimeError) as error:
        report.left_out[f"{name} on {inputs.case.name}"] = str(error).split("\n")[0][:200]
        return {}


def _add_rows(
    case: BenchCase,
    direction: str,
    contenders: dict[str, Callable[[], Any]],
    report: BenchReport,
    rng: np.random.Generator,
    protocol: Protocol,
) -> None:
    small = case.num_tokens <= SMALL_TOKENS
    if small:
        contenders = {name: _graphed_or_plain(call) for name, call in contenders.items()}
    timings = time_contenders(contenders, rng, protocol)
    dense = timings.get("dense cuBLAS")
    for name, timing in timings.items():
        report.rows.append(_row(case, direction, name, timing, dense, "graph" if small else ""))


def _graphed_or_plain(call: Callable[[], Any]) -> Callable[[], Any]:
    try:
        return graphed(call)
    except RuntimeError:
        return call


def _row(
    case: BenchCase, direction: str, name: str, timing: Timing, dense: Timing | None, note: str
) -> BenchRow:
    sustained, bursts = timing.median("sustained"), timing.median("bursts")
    nan = float("nan")
    return BenchRow(
        case=case.name,
        direction=direction,
        contender=name,
        sustained_ms=sustained,
        bursts_ms=bursts,
        tflops=case.flops(direction) / sustained / 1e9,
        ratio_sustained=dense.median("sustained") / sustained if dense else nan,
        ratio_bursts=dense.median("bursts") / bursts if dense else nan,
        samples=len(timing.sustained),
        note=note,
    )


def print_report(report: BenchReport) -> None:
    """The table on a terminal."""
    print(" ".join(f"{key}={value}" for key, value in report.device.items()))
    print(
        f"{'case':11} {'direction':9} {'contender':17} {'sust. ms':>9} {'bursts ms':>9} "
        f"{'TFLOP/s':>8} {'/dense':>7} {'bursts':>7}"
    )
    for row in report.rows:
        print(
            f"{row.case:11} {row.direction:9} {row.contender:17} {row.sustained_ms:9.3f} "
            f"{row.bursts_ms:9.3f} {row.tflops:8.0f} {row.ratio_sustained:7.3f} "
            f"{row.ratio_bursts:7.3f} {row.note}"
        )
    for line in (*report.saving, *report.ranks, *report.around, *report.growth):
        print(line)
    for title, facts in (
        ("bits", report.bits),
        ("host us per forward", {k: round(v, 1) for k, v in report.host_us.items()}),
        ("host us per backward", {k: round(v, 1) for k, v in report.host_backward_us.items()}),
        ("left out", report.left_out),
    ):
        for key, value in facts.items():
            print(f"{title}: {key}: {value}")
