"""MXFP8 layers of two processes that share memory by CUDA IPC: forward and backward against NumPy.

One GPU is enough: both processes may run on it. The checks are those of multi_gpu_worker.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.test_ipc_gpu import run_mpiexec
from mok_ref.casefile import load_case
from mok_ref.gpu.compiler import device_arch

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def golden_cases() -> list[str]:
    """The golden cases whose experts are MXFP8."""
    return [
        f"golden {path.stem.removeprefix('case')}"
        for path in sorted(GOLDEN.glob("case*.npz"))
        if load_case(path).dtype == "mxfp8"
    ]


def test_two_processes_have_the_references_bits() -> None:
    """Two steps on poisoned buffers, every output of every rank; then the stored golden bits."""
    pytest.importorskip("cupy")
    names = ["mxfp8 layer", *golden_cases()]
    assert len(names) > 5
    verdicts = run_mpiexec(2, *names).splitlines()
    assert [verdict.split(":")[0] for verdict in verdicts] == names
    assert all(": equal (mxfp8, " in verdict for verdict in verdicts), verdicts
    if device_arch() == "sm_90a":
        assert "hopper kernels" in verdicts[0]
