"""One rank of the checks on several GPUs:

    mpiexec -n 2 python tests/gpu/multi_gpu_worker.py [--heap nvshmem] [--output FILE] [NAME ...]

One process per GPU (processes may share one). Every check compares bits; the names are printed with
their verdicts by rank 0, which also writes them as JSON. Exit status 1 if one failed anywhere, 2
with one line of error when nothing could be checked.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.ipc_worker import two_small_buffers
from gpu.test_layer_gpu import (
    BASE,
    collect,
    make_inputs,
    rank_arguments,
    rank_dy,
    reference,
)
from mok_ref.bench.entry import WordParser, one_line_errors, require_gpu
from mok_ref.bench.gpu import device_facts
from mok_ref.casefile import (
    OUTPUT_EXPERTS,
    OUTPUT_REPLICATED,
    check_writable,
    load_case,
    read_npz,
    write_whole,
)
from mok_ref.config import MoEConfig
from mok_ref.gpu import layer as gpu_layer
from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.schedule import read_schedule
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.runner import Settings, assemble, make_plan, run_rank
from mok_ref.testing import assert_bitwise_equal, digest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SIZES = BASE | dict(num_experts=12, shared_intermediate_size=24)


class Job:
    """A fresh heap on every process, and what a check needs to run a step of the layer."""

    def __init__(self, comm: Any, heap: Any) -> None:
        self.comm, self.heap = comm, heap
        self.rank, self.size = heap.rank, heap.size
        self.path = ""  # the kernels of the last step

    def config(self, **changes: Any) -> MoEConfig:
        return MoEConfig(**SIZES | changes, ep_size=self.size)

    def counts(self, *some: int) -> tuple[int, ...]:
        """Tokens of every rank: `some`, repeated."""
        return tuple(itertools.islice(itertools.cycle(some), self.size))

    def step(self, workspace: DeviceWorkspace, inputs: Any) -> dict[str, np.ndarray]:
        """Forward and backward of this rank's share, on the host."""
        arguments = rank_arguments(workspace.config, inputs, self.rank)
        y, context = gpu_layer.forward(workspace.config, self.heap, *arguments, workspace, "all")
        kept, self.path = collect(y, None)["y"].copy(), context.path
        gradients = gpu_layer.backward(context, rank_dy(inputs, self.rank))
        self.heap.check(workspace.config.top_k)
        return collect(kept, gradients)

    def compare(self, actual: dict[str, np.ndarray], config: MoEConfig, inputs: Any) -> None:
        """Every tensor of this rank against the NumPy layer."""
        expected = reference(config, inputs)[self.rank]
        assert set(actual) == set(expected)
        for name in sorted(expected):
            assert_bitwise_equal(actual[name], expected[name], f"rank {self.rank} {name}")

    def steps_equal(self, config: MoEConfig, counts: tuple[int, ...], repeats: int = 1) -> str:
        """Poisoned buffers, then steps; each has the reference's bits. Returns what ran."""
        inputs = make_inputs(config, counts, len(counts))
        workspace = DeviceWorkspace(config, self.heap, max(1, *counts))
        for _ in range(repeats):
            self.heap.barrier()
            workspace.poison()
            self.heap.barrier()
            self.compare(self.step(workspace, inputs), config, inputs)
        workspace.close()
        return f"{config.dtype}, {self.path} kernels"


def golden(job: Job, name: str) -> str:
    """The stored bits of one golden case at this number of ranks."""
    case, stored = load_case(GOLDEN / f"case{name}.npz"), read_npz(GOLDEN / f"out{name}.npz")
    backward = case.dy is not None
    settings = Settings(ranks=job.size, placement="even", backward=backward, device="cuda")
    plan = make_plan(case, settings, job.size)
    mine = run_rank(plan, job.heap)
    everyone = job.comm.gather(mine)
    fault = "" if everyone is None else first_difference(assemble(plan, everyone), stored)
    fault = job.comm.allgather(fault)[0]
    assert not fault, fault
    return f"{plan.config.dtype}, {mine.path} kernels"


def first_difference(result: Any, stored: dict[str, np.ndarray]) -> str:
    """The first tensor that differs from the stored ones, or an empty string.

    Replicated gradients depend on how tokens are split, and round_robin's row order, with it the
    experts' gradients, on the number of ranks.
    """
    plan = result.plan
    own = len(plan.case.splits) if plan.case.splits is not None else 1
    left_out: tuple[str, ...] = ("digest", "digests")
    if own != plan.config.ep_size:
        left_out += OUTPUT_REPLICATED
        left_out += OUTPUT_EXPERTS if plan.config.row_order == "round_robin" else ()
    try:
        for name in (n for n in stored if n not in left_out):
            assert_bitwise_equal(np.asarray(result.tensors[name]), stored[name], name)
    except AssertionError as error:
        return str(error)
    return ""


def row_1(job: Job) -> None:
    """Every buffer full of NaN before each of two steps."""
    config = MoEConfig(256, 128, 2 * job.size, 2, ep_size=job.size)
    job.steps_equal(config, job.counts(64), repeats=2)


def row_2(job: Job) -> None:
    """The same routing 100 times: bits of outputs and of the schedule tables."""
    config = job.config()
    inputs = make_inputs(config, job.counts(64, 51))
    workspace = DeviceWorkspace(config, job.heap, 64)
    seen = set()
    for number in range(100):
        actual = job.step(workspace, inputs)
        tables = {
            name: value
            for name, value in vars(read_schedule(workspace)).items()
            if isinstance(value, np.ndarray)
        }
        seen.add(digest(actual) + digest(tables))
        if number == 0:
            job.compare(actual, config, inputs)
    workspace.close()
    assert len(seen) == 1, f"{len(seen)} different results"


def row_3(job: Job) -> None:
    """T = 1, 128, 2, 1024, 3 in one process with reused buffers."""
    config = job.config()
    workspace = DeviceWorkspace(config, job.heap, 1024)
    for number, tokens in enumerate((1, 128, 2, 1024, 3)):
        inputs = make_inputs(config, job.counts(tokens), number)
        job.compare(job.step(workspace, inputs), config, inputs)
    workspace.close()


def row_4(job: Job) -> None:
    """Different T on different ranks: all pairs from {0, 1, 2, 3, 5, 6, 7}, and larger ones."""
    config = job.config()
    workspace = DeviceWorkspace(config, job.heap, 128)
    pairs = [*itertools.product((0, 1, 2, 3, 5, 6, 7), repeat=2), (1, 128), (64, 7)]
    for number, pair in enumerate(pairs):
        inputs = make_inputs(config, job.counts(*pair), number)
        job.compare(job.step(workspace, inputs), config, inputs)
    workspace.close()


def row_5(job: Job) -> None:
    """Ranks and experts that receive nothing; a rank without tokens."""
    config = job.config(num_experts=16)
    for counts in (job.counts(32), job.counts(32, 0), job.counts(0, 32)):
        inputs = make_inputs(config, counts)
        ids = np.random.default_rng(1).integers(0, 4, inputs.ids.shape, dtype=np.int32)
        inputs = inputs._replace(ids=ids)
        workspace = DeviceWorkspace(config, job.heap, 32)
        actual = job.step(workspace, inputs)
        job.compare(actual, config, inputs)
        idle = [e >= 4 for e in config.experts_of(job.rank)]
        assert not actual["dw_gate"].view(np.uint32)[idle].any()
        workspace.close()


def row_12(job: Job) -> None:
    """A foreign kernel holds multiprocessors of every GPU from before the launch until after."""
    import cupy

    config = job.config()
    inputs = make_inputs(config, job.counts(150, 90))
    workspace = DeviceWorkspace(config, job.heap, 150)
    job.step(workspace, inputs)
    hold = load_kernel("support.cu", "hold_sm", (), 200 * 1024)
    side, release = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1, cupy.uint32)
    release[...] = 1  # loads CuPy's own kernel now: loading waits for whatever is running
    release[...] = 0
    cupy.cuda.get_current_stream().synchronize()
    with side:
        hold((20,), (1024,), (release, np.uint64(20_000_000_000)), shared_mem=200 * 1024)
    actual = job.step(workspace, inputs)
    assert not side.done
    release[...] = 1
    cupy.cuda.get_current_stream().synchronize()
    side.synchronize()
    job.compare(actual, config, inputs)
    workspace.close()


def row_13(job: Job) -> None:
    """The last rank sleeps before its first launch."""
    if job.rank == job.size - 1:
        time.sleep(2)
    job.steps_equal(job.config(), job.counts(16))


def row_20(job: Job) -> None:
    """T in {16, 512, 4096}, E 8, K 1 to 8, 50 runs each: one result, the portable kernels' too."""
    for tokens, top_k in itertools.product((16, 512, 4096), range(1, 9)):
        config = MoEConfig(64, 32, 8, top_k, ep_size=job.size)
        inputs = make_inputs(config, job.counts(tokens), top_k)
        portable = DeviceWorkspace(config, job.heap, tokens, path="portable")
        first = job.step(portable, inputs)
        portable.close()
        workspace = DeviceWorkspace(config, job.heap, tokens)
        differing = repeat_on_device(job, workspace, inputs, first, 50)
        workspace.close()
        assert not differing, f"T {tokens} K {top_k}: {differing}"


def repeat_on_device(
    job: Job, workspace: DeviceWorkspace, inputs: Any, first: dict[str, np.ndarray], times: int
) -> list[str]:
    """Names of tensors that differed from `first` in one of `times` steps."""
    import cupy

    arguments = [on_device(a) for a in rank_arguments(workspace.config, inputs, job.rank)]
    dy, kept = on_device(rank_dy(inputs, job.rank)), {n: cupy.asarray(a) for n, a in first.items()}
    wrong = {name: cupy.zeros((), np.int64) for name in kept}
    for _ in range(times):
        y, context = gpu_layer.forward(workspace.config, job.heap, *arguments, workspace, "all")
        gradients = gpu_layer.backward(context, dy)
        tensors = {"y": y} | {n: a for n, a in vars(gradients).items() if a is not None}
        for name, value in tensors.items():
            wrong[name] += (value.view(np.uint8) != kept[name].view(np.uint8)).sum()
    job.heap.check()
    return [name for name, count in wrong.items() if int(count)]


def on_device(value: Any) -> Any:
    """An array, or expert weights, on the GPU; None stays."""
    if isinstance(value, tuple):
        return type(value)(*map(gpu_layer.on_device, value))
    return value if value is None else gpu_layer.on_device(value)


def row_24(job: Job) -> None:
    """Two small buffers keep their own bytes when mapped elsewhere."""
    two_small_buffers(job.heap)


def mxfp8(job: Job) -> str:
    """A layer in MXFP8."""
    config = MoEConfig(256, 128, 4 * job.size, 2, ep_size=job.size, dtype="mxfp8")
    return job.steps_equal(config, job.counts(64, 50), repeats=2)


CHECKS: dict[str, Callable[[Job], Any]] = {
    "bf16 layer": lambda job: job.steps_equal(job.config(), job.counts(32, 5), 2),
    "mxfp8 layer": mxfp8,
    "fault row 1": row_1,
    "fault row 2": row_2,
    "fault row 3": row_3,
    "fault row 4": row_4,
    "fault row 5": row_5,
    "fault row 12": row_12,
    "fault row 13": row_13,
    "fault row 20": row_20,
    "fault row 24": row_24,
}
for _path in sorted(GOLDEN.glob("case*.npz")):
    _name = _path.stem.removeprefix("case")
    CHECKS[f"golden {_name}"] = lambda job, name=_name: golden(job, name)


def run_check(comm: Any, make_heap: Callable[[], Any], name: str) -> str:
    """ "equal" on this rank, with what the check adds, or its error in a line."""
    try:
        heap = make_heap()
        note = CHECKS[name](Job(comm, heap))
        heap.close()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"equal ({note})" if note else "equal"


def first_fault(mine: str, comm: Any) -> str:
    """The first rank's error, or what rank 0 found."""
    everyone = comm.allgather(mine)
    return next((text for text in everyone if not text.startswith("equal")), everyone[0])


def gpus_in_use(comm: Any) -> int:
    """GPUs that the ranks of this host run on: one each as far as there are enough."""
    import cupy

    device = comm.rank % cupy.cuda.runtime.getDeviceCount()
    return len(set(comm.allgather(cupy.cuda.runtime.deviceGetPCIBusId(device))))


def parse(arguments: Sequence[str] | None) -> Any:
    """The options. Raises: ValueError."""
    parser = WordParser(description="Checks on several GPUs, under mpiexec.")
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--heap", choices=["ipc", "nvshmem"], default="ipc")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(CHECKS))
    if unknown:
        raise ValueError(f"names must be of {', '.join(CHECKS)}, got {', '.join(unknown)}")
    if options.output is not None:
        check_writable(options.output, "--output")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    from mok_ref.heap.cuda_ipc import CudaIpcHeap
    from mok_ref.heap.mpi import import_mpi
    from mok_ref.heap.nvshmem import NvshmemHeap

    with one_line_errors():
        options = parse(arguments)
        require_gpu("multi_gpu_worker.py", with_torch=False)
        comm = import_mpi().COMM_WORLD
    kind = {"ipc": CudaIpcHeap, "nvshmem": NvshmemHeap}[options.heap]
    facts = device_facts() | {"gpus": gpus_in_use(comm), "ranks": comm.size}
    facts |= {"heap": kind.__name__}
    found: dict[str, str] = {}
    for name in options.names or CHECKS:
        start = time.monotonic()
        found[name] = first_fault(run_check(comm, lambda: kind(timeout_s=20), name), comm)
        if comm.rank == 0:
            print(f"{name}: {found[name]} [{time.monotonic() - start:.1f} s]", flush=True)
            if options.output is not None:
                report = {"device": facts, "checks": found}
                write_whole(options.output, json.dumps(report, indent=1) + "\n")
    sys.exit(any(not text.startswith("equal") for text in found.values()))


if __name__ == "__main__":
    main()
