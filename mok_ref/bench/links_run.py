"""Everything that is measured on several GPUs, one process per GPU:

    mpiexec -n 2 python -m mok_ref.bench.links_run --output docs/results/multi_gpu_h200x2.json

The number of GPUs is the number of processes. Layers are timed on 1, 2, 4, ... ranks up to it;
with fewer ranks than processes all groups of neighbours work at once and the slowest GPU counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mok_ref.bench.entry import WordParser, one_line_errors, require_gpu
from mok_ref.bench.links_layer import LAYER_CASES
from mok_ref.casefile import check_writable, write_whole
from mok_ref.launch import start_job

PARTS = ("links", "layers", "bits")


def group_sizes(size: int, cases: Iterable[str] = ()) -> list[int]:
    """Numbers of ranks, largest first: the job's own and the powers of two that divide it.

    Each of them divides the experts of every case. Raises: ValueError if the job's own does not.
    """
    for name in cases:
        experts = LAYER_CASES[name].num_experts
        if experts % size:
            raise ValueError(
                f"the number of processes must divide the {experts} experts of {name}, got {size}"
            )
    smaller = [1 << i for i in range(size.bit_length()) if 1 << i < size and size % (1 << i) == 0]
    return [size, *reversed(smaller)]


def new_report(facts: dict[str, Any], size: int) -> dict[str, Any]:
    """An empty report. Its tables are made by mok_ref/bench/links_page.py."""
    return {
        "device": facts | {"gpus": size},
        "links": [],
        "links_check": {},
        "layers": [],
        "hidden": [],
        "torch_error": {},
        "bits": {},
    }


def run(cases: list[str], output: Path | None, parts: set[str], timeout_s: float) -> bool:
    """Measure on all processes of the job; rank 0 writes after every part. False: a bit differs."""
    import cupy
    import torch
    from mpi4py import MPI

    from mok_ref.bench.gpu import device_facts, torch_stream
    from mok_ref.bench.links import bench_links
    from mok_ref.bench.links_layer import bench_layer, check_layer, free_memory
    from mok_ref.bench.links_peers import NcclAllToAll, torch_groups
    from mok_ref.heap.cuda_ipc import CudaIpcHeap

    comm = MPI.COMM_WORLD
    device = comm.rank % cupy.cuda.runtime.getDeviceCount()
    torch.cuda.set_device(device)
    cupy.cuda.Device(device).use()
    torch.cuda.set_stream(torch.cuda.Stream())
    torch_stream().use()
    report = new_report(device_facts(), comm.size)

    def slowest(value: float) -> float:
        return float(comm.allreduce(value, op=MPI.MAX))

    def write() -> None:
        for bits in ("bits", "links_check"):
            report[bits] = {k: v for part in comm.allgather(report[bits]) for k, v in part.items()}
        if output is not None and comm.rank == 0:
            write_whole(output, json.dumps(report, indent=1) + "\n")

    sizes = group_sizes(comm.size)
    groups = torch_groups(comm, sizes)
    for size in sizes:
        mine = comm.Split(comm.rank // size, comm.rank)
        heap = CudaIpcHeap(mine, device, timeout_s)
        if "links" in parts and size == comm.size and size > 1:
            bench_links(heap, slowest, NcclAllToAll(groups[size], size), report)
            free_memory()
            write()
        for name in cases if "layers" in parts else ():
            bench_layer(LAYER_CASES[name], heap, slowest, groups[size], report)
            write()
        heap.close()
    if "bits" in parts:
        heap = CudaIpcHeap(comm, device, timeout_s)
        for name in cases:
            check_layer(LAYER_CASES[name], heap, report)
            write()
        heap.close()
    torch.distributed.destroy_process_group()
    found = [*report["bits"].values(), *report["links_check"].values()]
    return all(bits == "equal" for bits in found)


def parse(arguments: Sequence[str] | None) -> Any:
    """The options. Raises: ValueError."""
    parser = WordParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cases", default=",".join(LAYER_CASES), help="Names, with commas.")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--timeout", type=float, default=20.0, help="Seconds of any one wait.")
    options = parser.parse_args(arguments)
    for name, known in (("cases", LAYER_CASES), ("parts", PARTS)):
        text = getattr(options, name)
        if not set(text.split(",")) <= set(known):
            raise ValueError(f"{name} must be of {', '.join(known)}, got {text!r}")
    if not options.timeout > 0:
        raise ValueError(f"timeout must be above 0, got {options.timeout}")
    if options.output is not None:
        check_writable(options.output, "--output")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, on every process of the job; status 1 if a bit differed."""
    from mok_ref.heap.mpi import import_mpi

    with one_line_errors():
        options = parse(arguments)
        require_gpu("bench.links_run")
        cases = list(dict.fromkeys(options.cases.split(",")))
        parts = set(options.parts.split(","))
        group_sizes(import_mpi().COMM_WORLD.size, cases if parts & {"layers", "bits"} else ())
    job = start_job()  # None without mpiexec: one process
    with one_line_errors(job):
        equal = run(cases, options.output, parts, options.timeout)
    if job is not None:
        job.close()
    if not equal:
        sys.exit(1)


if __name__ == "__main__":
    main()
