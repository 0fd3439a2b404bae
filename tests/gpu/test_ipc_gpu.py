"""Processes that share memory by CUDA IPC, all on one GPU: bits, a killed rank, a late rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).with_name("ipc_worker.py")
ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("how", ["kill", "late"])
def test_a_missing_rank_is_named_within_the_time_limit(tmp_path: Path, how: str) -> None:
    size = 3
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
