"""What tests run under mpiexec: python tests/mpi_worker.py STEP [ARGUMENTS].

Results go to standard output. Errors go to one file per rank in the directory $REPORTS, since the
launcher may close the output of survivors when a rank dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case, Sizes, assemble, make_case, rank_step, splits_of
from test_ranks import RANK_SIZES

from mok_ref import HeapError, Workspace
from mok_ref.heap import mpi
from mok_ref.heap.mpi import MpiSharedHeap, import_mpi
from mok_ref.heap.slabs import SLAB_BYTES
from mok_ref.testing import digest

TINY_SIZES = Sizes(num_tokens=5, hidden=16, inner=8, experts=4, top_k=2, shared=0)


def run_layer(heap: Any, case: Case, splits: np.ndarray) -> dict[str, np.ndarray] | None:
    """The case on all ranks; the whole batch's tensors on rank 0."""
    config = case.config(heap.size)
    workspace = Workspace(config, heap, int(splits.max()))
    part = rank_step(heap, case, config, splits, workspace)
    workspace.close()
    parts = import_mpi().COMM_WORLD.gather(part)
    return None if parts is None else assemble(config, parts)


def digests(heap: Any, *all_splits: str) -> None:
    """One line per split: digest of everything, digest without replicated gradients."""
    case = make_case(RANK_SIZES)
    for splits in all_splits or ("",):
        counts = [int(n) for n in splits.split(",")] if splits else heap.size
        whole = run_layer(heap, case, splits_of(len(case.x), counts))
        if whole is not None:
            own = {n: v for n, v in whole.items() if not n.startswith("shared_")}
            print(json.dumps({"all": digest(whole), "own": digest(own)}), flush=True)


def late_start(heap: Any, seconds: str) -> None:
    """Rank 1 sleeps before its first step."""
    if heap.rank == 1:
        time.sleep(float(seconds))
    digests(heap)


def die(heap: Any, how: str) -> None:
    """Rank 1 leaves in the middle of a step, between forward's two barriers."""
    case = make_case(RANK_SIZES)
    config, splits = case.config(heap.size), splits_of(len(case.x), heap.size)
    barrier = heap.barrier

    def leave_before_pushes(phase: str = "") -> None:
        if heap.rank == 1 and phase == "forward, pushing expert outputs":
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "sleep":
                time.sleep(4)
            os._exit(0)
        barrier(phase)

    heap.barrier = leave_before_pushes
    rank_step(heap, case, config, splits)


def disagree(heap: Any) -> None:
    heap.alloc("buffer", (4 + heap.rank // 2, 3), np.float32)


def forwards(heap: Any, steps: str) -> None:
    """Forwards whose contexts nobody keeps."""
    case = make_case(TINY_SIZES)
    config, splits = case.config(heap.size), splits_of(len(case.x), heap.size)
    for _ in range(int(steps)):
        rank_step(heap, case, config, splits, backward=False)
    if heap.rank == 0:
        print("windows", len(heap._slabs), flush=True)


def apart(heap: Any, what: str) -> None:
    """Rank 1 does something else."""
    if what == "phases":
        heap.barrier(f"phase {heap.rank}")
    if what == "long phases":
        heap.barrier("é" * 300 + str(heap.rank))
    if what == "names":
        heap.alloc("é" * 60 + str(heap.rank), (4,), np.float32)
    if what == "settings":
        order = ("canonical", "round_robin")[heap.rank]
        Workspace(make_case(TINY_SIZES).config(heap.size, row_order=order), heap, 5)


def many_windows(heap: Any) -> None:
    """One buffer per window, until the heap says that there are too many."""
    mpi.MAX_WINDOWS = 3
    for i in range(4):
        heap.alloc(f"b{i}", (SLAB_BYTES - 1,), np.int8)


def refuse(heap: Any) -> None:
    """A bad input on one rank only."""
    case = make_case(RANK_SIZES)
    if heap.rank == 1:
        case.topk_ids[...] = 99
    digests_of = case.config(heap.size), splits_of(len(case.x), heap.size)
    rank_step(heap, case, *digests_of)


STEPS = {
    f.__name__: f
    for f in (digests, late_start, die, disagree, forwards, apart, many_windows, refuse)
}


def main() -> None:
    started = time.monotonic()
    timeout_s = float(os.environ.get("HEAP_TIMEOUT_S", "30"))
    try:
        heap = MpiSharedHeap(timeout_s=timeout_s)
        STEPS[sys.argv[1]](heap, *sys.argv[2:])
        heap.close()
    except (HeapError, ValueError) as error:
        rank = import_mpi().COMM_WORLD.rank
        taken = time.monotonic() - started
        report = json.dumps({"rank": rank, "error": str(error), "seconds": taken})
        Path(os.environ["REPORTS"], f"rank{rank}.json").write_text(report)
        time.sleep(0.5)  # let the other survivors speak before the launcher ends them
        os._exit(3)


if __name__ == "__main__":
    main()
