"""What one call moves through memory and the L2 cache and how many instructions it issues, beside
dense cuBLAS: counted on the device by Nsight Compute.

    mok-ref bench --device cuda --sizes traffic --output traffic.json

runs `python -m mok_ref.bench.traffic CASE ...` under `ncu`: every call once more in a range of its
own after it ran twice, caches and clocks left as they are. A call's counts are the sums over its
kernels. L2 counts what its slices serve, transfers between its two halves included.
"""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mok_ref.bench.cases import CASES, TABLE_CASES
from mok_ref.bench.entry import one_line_errors, require_gpu, script_parser

CALLS = (
    ("forward", "dense cuBLAS"),
    ("forward", "mok_ref"),
    ("forward", "mok_ref, saving"),
    ("backward", "dense cuBLAS"),
    ("backward", "mok_ref, bf16 dW"),
)
SECTOR = 32  # bytes of L2
TENSOR_PIPES = 4  # of a multiprocessor
COUNTERS = {  # of a TrafficRow: (metric, what one count of it is worth)
    "dram_read": ("dram__bytes_read.sum", 1),
    "dram_written": ("dram__bytes_write.sum", 1),
    "l2_read": ("lts__t_sectors_op_read.sum", SECTOR),
    "l2_written": ("lts__t_sectors_op_write.sum", SECTOR),
    "between_halves": ("lts__t_sectors_srcunit_ltcfabric.sum", SECTOR),
    "instructions": ("smsp__inst_executed.sum", 1),
    "tensor_cycles": ("sm__pipe_tensor_cycles_active.sum", 1 / TENSOR_PIPES),
    "cycles": ("sm__cycles_elapsed.sum", 1),
}
BYTES = ("dram_read", "dram_written", "l2_read", "l2_written", "between_halves")
COLUMNS = ("Kernel Name", "Metric Name", "Metric Value")  # of what ncu writes
RANGE = "call"  # and a number: which call a kernel belongs to
SECONDS_PER_CASE = 60


@dataclass
class TrafficRow:
    """Bytes of one call, instructions that its warps issued, and the cycles of all multiprocessors,
    with those in which their tensor pipes were busy."""

    case: str
    direction: str
    contender: str
    dram_read: int
    dram_written: int
    l2_read: int
    l2_written: int
    between_halves: int
    instructions: int
    tensor_cycles: int
    cycles: int

    def __str__(self) -> str:
        return (
            f"traffic {self.case:11} {self.direction:8} {self.contender:17} "
            f"memory {self.dram_read / 1e9:.2f} GB read, {self.dram_written / 1e9:.2f} written, "
            f"L2 {self.l2_read / 1e9:.1f} read, {self.l2_written / 1e9:.1f} written, "
            f"{self.instructions / 1e6:.0f} M warp instructions, "
            f"tensor pipes busy {100 * self.tensor_cycles / self.cycles:.1f} %"
        )


class TrafficError(RuntimeError):
    """Nsight Compute is absent, or did not count."""


def find_ncu() -> str:
    """Raises: TrafficError where there is no `ncu`."""
    found = shutil.which("ncu")
    if found is None:
        raise TrafficError("traffic needs ncu (Nsight Compute, part of the CUDA toolkit) on PATH")
    return found


def bench_traffic(report: Any, ncu: str, cases: Sequence[str] = TABLE_CASES) -> None:
    """Every large case; adds to report.traffic."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counts.csv"
        _run(_command(ncu, log, cases), log, SECONDS_PER_CASE * len(cases))
        report.traffic += rows_of(log.read_text(encoding="utf-8"), cases)


def _command(ncu: str, log: Path, cases: Sequence[str]) -> list[str]:
    metrics = ",".join(metric for metric, _ in COUNTERS.values())
    as_they_are = ("--cache-control", "none", "--clock-control", "none")
    ranges = ("--profile-from-start", "off", "--nvtx", "--print-nvtx-rename", "kernel")
    output = ("--print-units", "base", "--csv", "--log-file", str(log), "--metrics", metrics)
    return [ncu, *ranges, *as_they_are, *output, sys.executable, "-m", __name__, *cases]


def _run(command: list[str], log: Path, seconds: float) -> None:
    """Run ncu and the program under it; both are gone when the time is up.

    Raises: TrafficError with what ncu, or the program under it, said.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # ncu and its program, not reaped yet
            if isinstance(error, subprocess.TimeoutExpired):
                raise TrafficError(f"traffic: ncu took more than {seconds:.0f} s") from None
            raise
    if process.returncode != 0:
        written = log.read_text(encoding="utf-8") if log.exists() else ""
        said = [line for line in f"{written}\n{printed}".splitlines() if line]
        why = next((line for line in said if "ERROR" in line), said[-1] if said else "no word")
        raise TrafficError(f"traffic: ncu ended with {process.returncode}: {why[:200]}")


def rows_of(log: str, cases: Sequence[str]) -> list[TrafficRow]:
    """Counts of all calls of `cases`, in the order of `CALLS`, from what ncu wrote.

    Raises: TrafficError where a call or a counter is missing or no number.
    """
    sums = _sums_of(log)
    names = [(case, *call) for case in cases for call in CALLS]
    rows = []
    for number, (case, direction, contender) in enumerate(names):
        counts = sums.get(f"{RANGE}{number}", {})
        missing = [metric for metric, _ in COUNTERS.values() if metric not in counts]
        if missing:
            raise TrafficError(f"traffic: ncu gave no {missing[0]} of {case} {direction}")
        found = {name: round(counts[metric] * each) for name, (metric, each) in COUNTERS.items()}
        rows.append(TrafficRow(case, direction, contender, **found))
    return rows


def _sums_of(log: str) -> dict[str, dict[str, float]]:
    """Every counter of every range, summed over its kernels.

    Raises: TrafficError naming the line that is not ncu's, or the counter that is no number.
    """
    lines = [line for line in log.splitlines() if line.startswith('"')]
    first = next((i for i, line in enumerate(lines) if all(c in line for c in COLUMNS)), None)
    if first is None:
        raise TrafficError(f"traffic: ncu wrote no table with the columns {', '.join(COLUMNS)}")
    sums: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines[first:]):
        kernel, metric, text = (row[column] for column in COLUMNS)
        if kernel is None or metric is None or text is None:
            raise TrafficError(f"traffic: ncu wrote a row that ends early, of {kernel}")
        try:
            value = float(text.replace(",", ""))
            if not 0 <= value < 1e18:
                raise ValueError
        except ValueError:
            raise TrafficError(f"traffic: ncu gave {text!r} for {metric} of {kernel}") from None
        counts = sums.setdefault(kernel.partition("/")[0], {})
        counts[metric] = counts.get(metric, 0.0) + value
    return sums


def run_calls(cases: Sequence[str]) -> None:
    """What runs under ncu: each call of each case twice, then once in its own range."""
    import torch

    from mok_ref.bench.timing import free_device_memory

    number = 0
    for case in cases:
        calls, close = _calls_of(case)
        for _ in range(2):
            for call in calls:
                call()
        torch.cuda.synchronize()
        for call in calls:
            torch.cuda.cudart().cudaProfilerStart()
            torch.cuda.nvtx.range_push(f"{RANGE}{number}")
            call()
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_pop()
            torch.cuda.cudart().cudaProfilerStop()
            number += 1
        close()
        del calls, call, close
        free_device_memory()


def _calls_of(case: str) -> tuple[list[Callable[[], Any]], Callable[[], None]]:
    """The calls of `CALLS` in their order (backward follows the forward that saves), and what gives
    the layer back."""
    from mok_ref.bench.gpu import OurLayer
    from mok_ref.bench.peers import dense, make_inputs

    inputs = make_inputs(CASES[case])
    bare, layer = dense(inputs), OurLayer(inputs, "bf16")
    forward = [partial(layer.forward, "none"), partial(layer.forward, "all")]
    return [bare["forward"], *forward, bare["backward"], layer.backward], layer.close


def main(arguments: Sequence[str] | None = None) -> None:
    """The program that ncu watches."""
    parser = script_parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    with one_line_errors():
        cases = parser.parse_args(arguments).cases
        unknown = [case for case in cases if case not in CASES]
        if unknown or not cases:
            raise ValueError(f"cases must be of {', '.join(CASES)}, got {', '.join(cases)!r}")
        require_gpu("bench.traffic")
        run_calls(cases)


if __name__ == "__main__":
    main()
