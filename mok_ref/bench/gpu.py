"""This layer beside dense cuBLAS and its peers on one GPU and one rank; bits checked in the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mok_ref.bench.cases import BenchCase
from mok_ref.bench.check import check_bits
from mok_ref.bench.energy import EnergyRow
from mok_ref.bench.growth import GrowthRow
from mok_ref.bench.peers import (
    PEERS,
    BenchInputs,
    graphed,
    make_inputs,
    relative_error,
    software_of,
)
from mok_ref.bench.timing import (
    Protocol,
    Timing,
    free_device_memory,
    host_us_per_call,
    time_contenders,
)
from mok_ref.bench.traffic import TrafficRow
from mok_ref.bench.variants import AroundRow, RankRow, SavingRow
from mok_ref.layer import moe_backward, moe_forward

OURS, OURS_SAVING, OURS_BF16 = "mok_ref", "mok_ref, saving", "mok_ref, bf16 dW"
# Relative error of a peer's y and dx up to which it does the same job; all peers compute in bf16.
PEER_TOLERANCE = {"bf16": 0.03, "mxfp8": 0.2}
LIGHT = ("torch eager", "torch compiled", "Liger")  # draw less power than the others
SMALL_ROUNDS = 7
SMALL_TOKENS = 512  # up to here everybody is replayed from a CUDA graph


@dataclass
class BenchRow:
    """One contender of one case and direction."""

    case: str
    direction: str
    contender: str
    sustained_ms: float  # Timing.ms
    bursts_ms: float
    tflops: float
    ratio_sustained: float  # time of dense cuBLAS / this time
    ratio_bursts: float
    ratio_of_medians: float  # the same, of the medians of all sustained calls
    turns_ms: list[float]  # mean of each turn's calls
    samples: int
    note: str = ""  # "graph", or why a small case was not replayed from one


@dataclass
class BenchReport:
    """All rows of a run, with what they were measured on."""

    device: dict[str, str]
    rows: list[BenchRow] = field(default_factory=list)
    bits: dict[str, str] = field(default_factory=dict)  # case: "equal" or the first difference
    host_us: dict[str, float] = field(default_factory=dict)  # forward, by case
    host_backward_us: dict[str, float] = field(default_factory=dict)
    saving_cost: dict[str, float] = field(default_factory=dict)  # time / without saving
    left_out: dict[str, str] = field(default_factory=dict)  # peer: why
    peers: dict[str, str] = field(default_factory=dict)  # peer: packages, versions, tuning
    peer_errors: dict[str, float] = field(default_factory=dict)  # against this layer's y and dx
    saving: list[SavingRow] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    around: list[AroundRow] = field(default_factory=list)
    growth: list[GrowthRow] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)  # of the growth's model
    energy: list[EnergyRow] = field(default_factory=list)
    copy: dict[str, float] = field(default_factory=dict)  # what a byte costs, in joules
    traffic: list[TrafficRow] = field(default_factory=list)

    def to_json(self) -> str:
        """What mok_ref/bench/page.py reads."""
        return json.dumps(asdict(self), indent=1)


def device_facts() -> dict[str, str]:
    """GPU, driver, date, kernels: what a figure is worth nothing without.

    "gpu_id" tells cards apart: 8 hex digits of the SHA-256 of the card's UUID.
    """
    import datetime
    import hashlib

    import cupy

    from mok_ref.bench.entry import kernels_name

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    version = cupy.cuda.runtime.driverGetVersion()
    now = datetime.datetime.now(datetime.UTC)
    return {
        "gpu": properties["name"].decode(),
        "gpu_id": hashlib.sha256(bytes(properties.get("uuid", b"unknown"))).hexdigest()[:8],
        "driver": _driver_version(),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "date": now.date().isoformat(),
        "time": now.strftime("%H:%M UTC"),
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

        self.case = case = inputs.case
        inner = case.intermediate_size
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
        with torch_stream():
            return self.forward_on_stream(save)

    def backward(self) -> Any:
        """Backward of the last forward, again and again: its saved context counts as given."""
        with torch_stream():
            return self.backward_on_stream()

    def forward_on_stream(self, save: str) -> Any:
        """`forward` on CuPy's current stream, as a program that uses no torch calls it."""
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

    def backward_on_stream(self) -> Any:
        """`backward` on CuPy's current stream."""
        self.context.used = False
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
    inputs = make_inputs(case)
    layer, layer_bf16 = OurLayer(inputs), OurLayer(inputs, grad_dtype="bf16")
    report.bits[case.name] = check_bits(layer, protocol.numpy_samples)
    calls = {name: peer_calls(name, inputs, report) for name in peers}
    _check_peers(layer, calls, report)
    rng = np.random.default_rng(0)
    for direction in directions:
        contenders = _our_calls(direction, layer, layer_bf16, report)
        contenders |= {name: call[direction] for name, call in calls.items() if direction in call}
        timings, notes = _time(case, contenders, rng, protocol)
        _add_rows(case, direction, timings, notes, report)
    layer.close()
    layer_bf16.close()
    del calls, contenders, inputs, layer, layer_bf16
    free_device_memory()


def _our_calls(
    direction: str, layer: OurLayer, layer_bf16: OurLayer, report: BenchReport
) -> dict[str, Callable[[], Any]]:
    """Forward with and without saving, or backward with float32 and bf16 dW; their host times."""
    name = layer.case.name
    if direction == "forward":
        with torch_stream():
            report.host_us[name] = host_us_per_call(partial(layer.forward_on_stream, "none"))
        return {
            OURS: partial(layer.forward, "none"),
            OURS_SAVING: partial(layer.forward, "all"),
        }
    layer.forward("all")
    layer_bf16.forward("all")
    with torch_stream():
        report.host_backward_us[name] = host_us_per_call(layer.backward_on_stream)
    return {OURS: layer.backward, OURS_BF16: layer_bf16.backward}


def peer_calls(name: str, inputs: BenchInputs, report: BenchReport) -> dict[str, Callable[[], Any]]:
    """A peer's callables; a peer that cannot run is left out and named."""
    try:
        report.peers[name] = software_of(name)
        return PEERS[name](inputs)
    except Exception as error:  # whatever foreign code raises, the others are still measured
        leave_out(name, inputs.case, report, error)
        return {}


def leave_out(name: str, case: BenchCase, report: BenchReport, why: object) -> None:
    """Name a peer that does not take part, and why."""
    report.left_out[f"{name} on {case.name}"] = _first_line(why)


def _first_line(why: object) -> str:
    return str(why).strip().split("\n")[0][:200] or repr(why)


def _check_peers(
    layer: OurLayer, calls: dict[str, dict[str, Callable[[], Any]]], report: BenchReport
) -> None:
    """Each peer's y and dx against this layer's; one that differs or cannot run is left out."""
    import torch

    def of_ours(bits: Any) -> Any:
        return torch.from_dlpack(bits.view(np.int16)).view(torch.bfloat16).clone()

    y, dx = of_ours(layer.forward("all")), of_ours(layer.backward().dx)
    for name in [name for name in calls if name != "dense cuBLAS" and calls[name]]:
        try:
            found = calls[name]["forward"](), calls[name]["backward"]()[0]
            error = max(relative_error(a.detach(), b) for a, b in zip(found, (y, dx)))
        except Exception as failure:  # see peer_calls
            leave_out(name, layer.case, report, failure)
            calls[name] = {}
            continue
        report.peer_errors[f"{name} on {layer.case.name}"] = error
        if not error <= PEER_TOLERANCE[layer.case.dtype]:
            leave_out(name, layer.case, report, f"y or dx is another by {error:.1e}")
            calls[name] = {}


def _time(
    case: BenchCase,
    contenders: dict[str, Callable[[], Any]],
    rng: np.random.Generator,
    protocol: Protocol,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """(timings, notes of how they were launched).

    Small cases are replayed from CUDA graphs; they leave the card's power alone, so that short
    turns do.
    """
    notes = dict.fromkeys(contenders, "")
    if case.num_tokens <= SMALL_TOKENS:
        launched = {name: _graphed_or_plain(call) for name, call in contenders.items()}
        contenders = {name: call for name, (call, _) in launched.items()}
        notes = {name: note for name, (_, note) in launched.items()}
        protocol = replace(protocol, rounds=SMALL_ROUNDS, warm_s=0.1, skip_s=0.005, turn_s=0.015)
        return time_contenders(contenders, rng, protocol), notes
    return time_contenders(contenders, rng, protocol, apart=LIGHT), notes


def _graphed_or_plain(call: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """The call from a graph, or as it is where it cannot be captured; which of the two, in words"""
    try:
        return graphed(call), "graph"
    except RuntimeError as error:
        return call, f"no graph: {_first_line(error)}"


def _add_rows(
    case: BenchCase,
    direction: str,
    timings: dict[str, Timing],
    notes: dict[str, str],
    report: BenchReport,
) -> None:
    dense = timings["dense cuBLAS"]
    for name, timing in timings.items():
        row = BenchRow(
            case=case.name,
            direction=direction,
            contender=name,
            sustained_ms=timing.ms("sustained"),
            bursts_ms=timing.ms("bursts"),
            tflops=case.flops(direction) / timing.ms("sustained") / 1e9,
            ratio_sustained=dense.ratio(timing, "sustained"),
            ratio_bursts=dense.ratio(timing, "bursts"),
            ratio_of_medians=dense.median("sustained") / timing.median("sustained"),
            turns_ms=timing.means("sustained"),
            samples=sum(map(len, timing.sustained)),
            note=notes[name],
        )
        report.rows.append(row)
    if OURS_SAVING in timings:
        cost = timings[OURS_SAVING].ratio(timings[OURS], "sustained")
        report.saving_cost[case.name] = cost


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
    named = ("saving", "ranks", "around", "growth", "energy", "traffic")
    for line in (line for name in named for line in getattr(report, name)):
        print(line)
    for title, facts in (
        ("bits", report.bits),
        ("host us per forward", {k: round(v, 1) for k, v in report.host_us.items()}),
        ("host us per backward", {k: round(v, 1) for k, v in report.host_backward_us.items()}),
        ("copy", report.copy),
        ("time with saving / without", {k: f"{v:.3f}" for k, v in report.saving_cost.items()}),
        ("peer", report.peers),
        ("peer's relative error", {k: f"{v:.1e}" for k, v in report.peer_errors.items()}),
        ("left out", report.left_out),
    ):
        for key, value in facts.items():
            print(f"{title}: {key}: {value}")
