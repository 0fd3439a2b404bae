"""Joules per call and clocks of this layer and dense cuBLAS on a card at its power limit.

There everybody draws the same power, and

    time of dense / time of the layer = cycles of dense / cycles of the layer
                                        * clock of the layer / clock of dense

The clock is what the energy of a cycle leaves: a kernel that moves more bytes or issues more
instructions in a cycle runs at a lower one (mok_ref/bench/page_power.py puts both together). A byte
through memory costs what a plain copy costs, measured in the same run:

    joules per byte = (joules of the copy - idle watts * its time) / (bytes read + bytes written)

`dense_bytes` and `layer_bytes` count what must move once; what is moved is counted by
mok_ref/bench/traffic.py.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from mok_ref.bench.cases import CASES, TABLE_CASES, BenchCase, routes

ROUNDS = 2
SECONDS = 1.2  # of work per contender and round: the counter moves every 0.1 s
STEADY = 0.3  # of it comes before what is measured
LONGEST_S = 3.0
POLL_S = 0.002
COPY_BYTES = 1 << 32
SOURCE, KERNEL = "clock.cu", "stamp_clocks"
PROBE_BLOCKS, PROBE_STAMPS = 1024, 512  # both more than any card's multiprocessors
BF16 = 2  # bytes


@dataclass
class EnergyRow:
    """One contender in its steady state."""

    case: str
    direction: str
    contender: str
    ms: float
    joules: float  # per call
    watts: float
    mhz: float

    def __str__(self) -> str:
        return (
            f"energy {self.case:11} {self.direction:8} {self.contender:17} {self.ms:.3f} ms, "
            f"{self.joules:.3f} J, {self.watts:.0f} W, {self.mhz:.0f} MHz"
        )


# --------------------------------------------------------------------------- bytes


def dense_bytes(case: BenchCase, direction: str) -> int:
    """Bytes of the dense products, every operand and result once.

    forward   x, W_gate_up -> gate, up;  h, W_down -> y
    backward  dy, W_down -> dh;  d_gate_up, W_gate_up -> dx;  dy, h -> dW_down;
              d_gate_up, x -> dW_gate_up
    """
    rows, hidden, inner = case.num_rows, case.hidden_size, case.intermediate_size
    once = rows * (2 * hidden + 3 * inner) + 3 * hidden * inner
    return BF16 * once * (1 if direction == "forward" else 2)


def layer_bytes(case: BenchCase, direction: str, ring: bool) -> int:
    """Bytes of the layer, every tensor once for each kernel that reads or writes it; dW in bf16.

    forward   weights of experts that have rows; rows of x; h written, read; y's rows written, read
              by the sum; y
    backward  weights again, dW of all experts; rows of dy, gate, up; d_gate, d_up written, read; hw
              (the weighted h) written; dx's rows written, read by the sum; dx; wgrad: rows of dy
              and x, d_gate, d_up and hw read
    ring      rows come through a ring: tokens read, rows written, beside the reading above
    """
    rows, hidden, inner = case.num_rows, case.hidden_size, case.intermediate_size
    expert, hit = 3 * hidden * inner, len(np.unique(routes(case)[0]))
    tokens = case.num_tokens * hidden
    if direction == "forward":
        moved = hit * expert + rows * (3 * hidden + 2 * inner) + tokens
    else:
        moved = (hit + case.num_experts) * expert + rows * (5 * hidden + 10 * inner) + tokens
    return BF16 * (moved + (tokens + rows * hidden if ring else 0))


# --------------------------------------------------------------------------- measuring


class EnergyError(RuntimeError):
    """The energy counter is absent, cannot tell, or does not move."""


class EnergyMeter:
    """Energy counter of CUDA's current device, through NVML.

    Raises: EnergyError where NVML is absent, too old or cannot tell.
    """

    def __init__(self) -> None:
        import cupy

        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise EnergyError(f"energy needs NVML: {error}") from error
        bus = cupy.cuda.Device().pci_bus_id.encode()
        self._device = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByPciBusId_v2", bus, ctypes.byref(self._device))
        self.read()

    def read(self) -> float:
        """Joules since the driver was loaded."""
        energy = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(energy))
        return energy.value / 1e3

    def _ask(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._nvml, name)
        except AttributeError:
            raise EnergyError(f"energy needs a later NVML: this one has no {name}") from None
        code = function(*arguments)
        if code != 0:
            raise EnergyError(f"energy needs NVML: {name} gave {code}")


@dataclass
class Recorder:
    """Watches the counter from a thread of its own while `with` lasts.

    The counter moves in steps some tens of milliseconds apart, so every step is kept with its time.
    What it shows at first is no step: nobody knows since when it does.

    Raises: EnergyError at the end of `with` when the counter could not be read.
    """

    meter: EnergyMeter
    samples: list[tuple[float, float]] = field(default_factory=list)  # time, joules

    def __enter__(self) -> Recorder:
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise EnergyError(f"energy counter was lost: {self._error}") from self._error

    def _watch(self) -> None:
        try:
            self._keep_steps()
        except Exception as error:  # raised by the thread that measures
            self._error = error

    def _keep_steps(self) -> None:
        last = self.meter.read()
        while not self._stop.wait(POLL_S):
            joules = self.meter.read()
            if joules != last:
                self.samples.append((time.perf_counter(), joules))
                last = joules

    def steps(self, begin: float, end: float) -> int:
        """Steps of the counter in this time."""
        return sum(begin <= sample[0] <= end for sample in self.samples)

    def watts(self, begin: float, end: float) -> float:
        """From the first to the last step in this time.

        Raises: EnergyError where the counter took fewer than two steps.
        """
        if self.steps(begin, end) < 2:
            took = self.steps(begin, end)
            raise EnergyError(f"energy counter took {took} steps in {end - begin:.2f} s")
        inside = [sample for sample in self.samples if begin <= sample[0] <= end]
        (first, joules), (last, more) = inside[0], inside[-1]
        return (more - joules) / (last - first)


class ClockProbe:
    """Clock of the multiprocessors between two moments of a stream, from their own counters: what
    the driver tells is 5 to 10 % higher under load.

    CUDA: cuda_src/clock.cu: stamp_clocks
    """

    def __init__(self) -> None:
        from mok_ref.gpu.compiler import load_kernel

        self._kernel = load_kernel(SOURCE, KERNEL)
        self._stamps: list[Any] = []
        self.stamp()  # what the first launch takes is over before anything is measured

    def stamp(self) -> None:
        """A moment behind what torch's current stream holds."""
        import cupy

        from mok_ref.bench.gpu import torch_stream

        with torch_stream():
            self._stamps.append(cupy.zeros((PROBE_STAMPS, 2), np.uint64))
            self._kernel((PROBE_BLOCKS,), (32,), (self._stamps[-1], np.int32(PROBE_STAMPS)))

    def mhz(self) -> float:
        """Between the last two moments, both of them passed."""
        return mean_mhz(*(stamps.get() for stamps in self._stamps[-2:]))


def mean_mhz(begin: np.ndarray, end: np.ndarray) -> float:
    """Median over the multiprocessors of cycles / microseconds. begin, end: (N, 2) uint64 stamps,
    zeros where there is none."""
    there = (begin > 0).all(axis=1) & (end > 0).all(axis=1)
    cycles, nanoseconds = (end[there] - begin[there]).astype(np.float64).T
    return float(np.median(1e3 * cycles / nanoseconds))


def measure_energy(
    meter: EnergyMeter, call: Callable[[], Any], seconds: float = SECONDS
) -> tuple[float, float, float]:
    """(ms per call, watts, MHz) of work without a pause, once it is steady."""
    import torch

    from mok_ref.bench.timing import launches_ms

    batch = max(1, ceil(25 / max(float(np.median(launches_ms(call, 2, warm=1))), 1e-2)))
    probe, marks, begin = ClockProbe(), [], 0.0

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    with Recorder(meter) as recorder:
        start = time.perf_counter()
        while (now := time.perf_counter() - start) < seconds:
            if not begin and now >= STEADY * seconds:
                begin = start + now
                probe.stamp()
                marks.clear()
            mark()
            for _ in range(batch):
                call()
            if len(marks) > 2:  # two batches are queued, not all of the time
                marks[-2].synchronize()
        end = time.perf_counter()
        mark()
        probe.stamp()
        torch.cuda.synchronize()
    if recorder.steps(begin, end) < 2 and seconds < LONGEST_S:  # a slow counter
        return measure_energy(meter, call, 2 * seconds)
    ms = marks[0].elapsed_time(marks[-1]) / (batch * (len(marks) - 1))
    return ms, recorder.watts(begin, end), probe.mhz()


def idle_watts(meter: EnergyMeter, seconds: float = SECONDS) -> float:
    """Power of the card with nothing to do, after a moment's rest."""
    import torch

    torch.cuda.synchronize()
    time.sleep(seconds)
    with Recorder(meter) as recorder:
        start = time.perf_counter()
        time.sleep(seconds)
        return recorder.watts(start, time.perf_counter())


def measure_copy(meter: EnergyMeter) -> dict[str, float]:
    """Power, rate and picojoules per byte (read or written) of a plain copy."""
    import torch

    source = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    idle = idle_watts(meter)
    ms, watts, _ = measure_energy(meter, partial(target.copy_, source))
    rate = 2 * COPY_BYTES / ms * 1e3
    return {
        "idle_watts": idle,
        "watts": watts,
        "tbytes_per_s": rate / 1e12,
        "pj_per_byte": 1e12 * (watts - idle) / rate,
    }


def bench_energy(
    report: Any, meter: EnergyMeter, peers: tuple[str, ...], keep: Callable[[], None]
) -> None:
    """Every large case beside dense cuBLAS and `peers`; adds to report.energy, report.copy.

    keep  called after every case, to store what the report has
    """
    report.copy = measure_copy(meter)
    for name in TABLE_CASES:
        energy_of(CASES[name], meter, peers, report)
        keep()


def energy_of(case: BenchCase, meter: EnergyMeter, peers: tuple[str, ...], report: Any) -> None:
    """Contenders take turns of `SECONDS`; means of `ROUNDS` turns. Adds to report.energy."""
    from mok_ref.bench.gpu import OURS, OURS_BF16, OurLayer, leave_out, peer_calls
    from mok_ref.bench.peers import make_inputs
    from mok_ref.bench.timing import free_device_memory

    inputs = make_inputs(case)
    layer = OurLayer(inputs, "bf16")
    calls = {name: peer_calls(name, inputs, report) for name in ("dense cuBLAS", *peers)}

    def failed(name: str, why: Exception) -> None:
        leave_out(name, case, report, why)
        calls[name] = {}

    for direction in ("forward", "backward"):
        ours: dict[str, Callable[[], Any]] = {OURS: partial(layer.forward, "none")}
        if direction == "backward":
            layer.forward("all")
            ours = {OURS_BF16: layer.backward}
        contenders = {name: call[direction] for name, call in calls.items() if call} | ours
        found = take_turns(contenders, partial(measure_energy, meter), peers, failed)
        for name, turns in found.items():
            ms, watts, mhz = map(float, np.mean(turns, axis=0))
            row = EnergyRow(case.name, direction, name, ms, ms * watts / 1e3, watts, mhz)
            report.energy.append(row)
    layer.close()
    calls.clear()
    del layer, contenders, ours, inputs
    free_device_memory()


def take_turns(
    contenders: dict[str, Callable[[], Any]],
    measure: Callable[[Callable[[], Any]], tuple[float, float, float]],
    may_fail: Collection[str],
    failed: Callable[[str, Exception], None],
) -> dict[str, list[tuple[float, float, float]]]:
    """`ROUNDS` measurements of every contender, in turn; every other round goes backwards.

    may_fail  contenders that drop out when they raise; `failed` is told
    Raises:   EnergyError, which is nobody's fault but the counter's; what all others raise
    """
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
    for number in range(ROUNDS):
        for name in list(found)[:: -1 if number % 2 else 1]:
            try:
                found[name].append(measure(contenders[name]))
            except Exception as why:  # whatever foreign code raises, the others are still measured
                if isinstance(why, EnergyError) or name not in may_fail:
                    raise
                failed(name, why)
                del found[name]
    return found
