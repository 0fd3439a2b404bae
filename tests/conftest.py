"""Shared fixtures: named sizes, mpiexec, hypothesis without a deadline."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

import mok_ref

settings.register_profile("mok", deadline=None, max_examples=60)
settings.load_profile("mok")

TESTS = Path(__file__).parent
PACKAGE_HOME = Path(mok_ref.__file__).parents[1]
Launch = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def mpi_run() -> Launch:
    """mpi_run(num_ranks, "step", ...): tests/mpi_worker.py under mpiexec, never for over 60 s."""
    beside_python = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip('needs mpiexec and mpi4py: pip install "mok_ref[mpi]"')

    def launch(
        num_ranks: int, *arguments: str, launcher: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess:
        worker = [sys.executable, str(TESTS / "mpi_worker.py"), *arguments]
        return subprocess.run(
            [mpiexec, *launcher, "-n", str(num_ranks), *worker],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE_HOME)},
        )

    return launch
