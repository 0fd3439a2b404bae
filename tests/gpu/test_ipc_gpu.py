"""Processes that share memory by CUDA IPC: bits, a killed rank, a late rank.

One GPU is enough for most; those that need one per rank say so. multi_gpu_worker.py has the checks
that run under mpiexec.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).with_name("ipc_worker.py")
MULTI_GPU_WORKER = Path(__file__).with_name("multi_gpu_worker.py")
ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 240


def run_processes(folder: Path, size: int, step: str) -> list[tuple[int, str]]:
    """(exit status, output) of every rank; none outlives the limit."""
    pytest.importorskip("cupy")
    command = [sys.executable, str(WORKER), str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), step],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(size)
    ]
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=90)
            results.append((process.returncode, output))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes_on_one_gpu_have_the_references_bits(tmp_path: Path, size: int) -> None:
    for rank, (status, output) in enumerate(run_processes(tmp_path, size, "bits")):
        assert status == 0 and output.endswith("done\n"), f"rank {rank}: {output}"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", ["kill", "late"])
def test_a_missing_rank_is_named_within_the_time_limit(tmp_path: Path, how: str, size: int) -> None:
    results = run_processes(tmp_path, size, how)
    for rank in range(size - 1):
        status, output = results[rank]
        first, second = output.strip().splitlines()[-2:]
        assert status == 0, output
        assert f"MokTimeoutError: rank {rank} waited" in first, output
        assert f"for rank {size - 1} in the barrier before the forward kernel" in first
        assert re.search(r"epoch \d+: arrivals expected \d+, seen \d+", first), output
        assert 2.0 <= float(first.split()[0]) < 6.0
        assert second == "again MokTimeoutError"


def gpus_for_two_ranks() -> int:
    """Number of visible GPUs, at least two; skips where there are fewer."""
    cupy = pytest.importorskip("cupy")
    count = int(cupy.cuda.runtime.getDeviceCount())
    if count < 2:
        pytest.skip(f"needs two GPUs, found {count}")
    return count


def run_mpiexec(size: int, *arguments: str, own_gpu_only: bool = False) -> str:
    """Output of multi_gpu_worker.py on `size` processes.

    own_gpu_only  each process sees its own GPU and no other
    """
    pytest.importorskip("mpi4py", exc_type=ImportError)
    if shutil.which("mpiexec") is None:
        pytest.skip("no mpiexec")
    worker = " ".join([sys.executable, str(MULTI_GPU_WORKER), *map(repr, arguments)])
    local_rank = "${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}"
    visible = f"CUDA_VISIBLE_DEVICES={local_rank} " if own_gpu_only else ""
    open_mpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    open_mpi |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    done = subprocess.run(
        ["mpiexec", "-n", str(size), "bash", "-c", visible + worker],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        cwd=ROOT,
        env={**os.environ, **open_mpi, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_gpu_per_rank_passes_every_check() -> None:
    """Golden cases and the faults that concern several GPUs, one process per GPU."""
    verdicts = run_mpiexec(gpus_for_two_ranks()).splitlines()
    assert len(verdicts) > 30
    assert all(": equal" in verdict for verdict in verdicts)


def test_ranks_that_see_one_gpu_each_share_memory() -> None:
    gpus_for_two_ranks()
    output = run_mpiexec(2, "fault row 24", "bf16 layer", own_gpu_only=True)
    assert output.count(": equal") == 2


def test_nvshmem_heap_of_two_gpus_has_the_references_bits() -> None:
    gpus_for_two_ranks()
    pytest.importorskip("nvshmem.core", exc_type=ImportError)
    output = run_mpiexec(2, "--heap", "nvshmem", "fault row 24", "bf16 layer", "mxfp8 layer")
    assert output.count(": equal") == 3
