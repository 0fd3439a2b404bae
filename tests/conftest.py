"""Shared fixtures: named sizes, mpiexec, hypothesis without a deadline."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import mok_ref

settings.register_profile("mok", deadline=None, max_examples=60)
settings.load_profile("mok")
os.environ.pop("COLUMNS", None)  # tests read tables that are not folded

TESTS = Path(__file__).parent
PACKAGE_HOME = Path(mok_ref.__file__).parents[1]
SHIELD = ("setsid", "-w")
Launch = Callable[..., Any]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Tests on a GPU run one after another in this process: some hold SMs or fill memory."""
    return 0 if config.option.markexpr.strip().startswith("gpu") else None


def _version(mpiexec: str) -> str:
    return subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout


@pytest.fixture
def mpi_run(tmp_path: Path) -> Launch:
    """mpi_run(num_ranks, "step", ...): tests/mpi_worker.py under mpiexec, never for over 60 s.

    unwatched: MPICH's launcher is kept from ending the survivors of a dead rank before they have
    said what they saw: it ends process groups, so each worker gets a session of its own.
    Returns the finished process; its `reports` are what ranks that met an error said.
    """
    beside_python = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip('needs mpiexec and mpi4py: pip install ".[mpi]"')

    def launch(num_ranks: int, *arguments: str, unwatched: bool = False) -> Any:
        worker = [sys.executable, str(TESTS / "mpi_worker.py"), *arguments]
        before, shield = (("-disable-auto-cleanup",), SHIELD) if unwatched else ((), ())
        if unwatched and ("HYDRA" not in _version(mpiexec) or shutil.which("setsid") is None):
            pytest.skip("survivors of a dead rank can speak under MPICH's mpiexec with setsid only")
        result: Any = subprocess.run(
            [mpiexec, *before, "-n", str(num_ranks), *shield, *worker],
            capture_output=True,
            text=True,
            timeout=60,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(PACKAGE_HOME),
                "REPORTS": str(tmp_path),
            },
        )
        files = sorted(tmp_path.glob("rank*.json"))
        result.reports = [json.loads(file.read_text()) for file in files]
        return result

    return launch
