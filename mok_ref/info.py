"""What is installed, which devices answer, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from mok_ref.install import install_hint

ABSENT = "not installed (optional)"
# Distribution -> (extra that brings it, what it is for)
OPTIONAL = {
    "mpi4py": ("mpi", "ranks as processes under mpiexec"),
    "cupy-cuda13x": ("gpu", "arrays and kernels on CUDA devices"),
    "cuda-core": ("gpu", "compiling kernels"),
    "nvidia-cuda-nvrtc": ("gpu", "the run-time compiler"),
    "nvshmem4py-cu13": ("nvshmem", "symmetric memory across nodes of one NVLink domain"),
    "matplotlib": ("plot", "pictures"),
    "scipy": ("planner", "assignment and statistics"),
    "safetensors": ("train", "checkpoints"),
}
CORE = ("mok_ref", "numpy", "ml_dtypes", "typer", "rich")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `hint` says how to get what is missing; empty where nothing is."""

    name: str
    state: str
    hint: str = ""


def collect() -> list[Finding]:
    """Versions, devices and backends of this machine. Never raises for what is missing."""
    findings = [Finding("python", f"{platform.python_version()} ({sys.executable})")]
    findings += [Finding(name, _version(name) or _not_installed(name)) for name in CORE]
    findings += [
        Finding("cpu cores", str(os.cpu_count())),
        Finding("platform", platform.platform()),
    ]
    findings += [_optional(name) for name in OPTIONAL]
    findings += [_mpi(), _cuda_sources(), *_cuda_devices()]
    return findings


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _not_installed(name: str) -> str:
    """A core distribution without metadata: this package run from a checkout, or really absent."""
    return "run from a checkout" if name == "mok_ref" else "missing"


def _optional(distribution: str) -> Finding:
    extra, purpose = OPTIONAL[distribution]
    version = _version(distribution)
    if version is None:
        return Finding(distribution, ABSENT, f"{install_hint(extra)}: {purpose}")
    return Finding(distribution, version)


def _mpi() -> Finding:
    launcher = shutil.which("mpiexec") or _beside_python("mpiexec")
    if launcher is None:
        return Finding("mpiexec", ABSENT, f"{install_hint('mpi')}, or a system MPI")
    return Finding("mpiexec", launcher)


def _beside_python(program: str) -> str | None:
    path = Path(sys.executable).with_name(program)
    return str(path) if path.is_file() else None


def _cuda_sources() -> Finding:
    from mok_ref.gpu.compiler import cuda_source_dir

    try:
        return Finding("cuda_src", str(cuda_source_dir()))
    except FileNotFoundError as error:
        return Finding("cuda_src", "missing", str(error))


def _cuda_devices() -> list[Finding]:
    """One finding per CUDA device, or one that says why there is none."""
    try:
        import cupy
    except ImportError:
        return [Finding("cuda devices", "unknown", f"{install_hint('gpu')} to look for them")]
    try:
        runtime = cupy.cuda.runtime
        driver = runtime.driverGetVersion()
        count = runtime.getDeviceCount()
    except Exception as error:  # CuPy's own error types cannot be imported where loading it failed
        return [Finding("cuda devices", "none", str(error).splitlines()[0])]
    findings = [Finding("cuda driver", f"{driver // 1000}.{driver % 1000 // 10}")]
    for index in range(count):
        found = runtime.getDeviceProperties(index)
        name = found["name"].decode()
        memory_gib = found["totalGlobalMem"] / 2**30
        capability = f"{found['major']}.{found['minor']}"
        state = f"{name}, capability {capability}, {memory_gib:.0f} GiB"
        findings.append(Finding(f"cuda device {index}", state))
    return findings
