"""Find, digest, compile, cache and load the kernels of `cuda_src/`.

Compiling needs cuda-core and NVRTC but no GPU. A cubin is cached on disk under a name that digests
every file of `cuda_src/`, every flag and the compiler's version, so a stale cubin cannot be loaded.
Files are written under a temporary name and renamed: concurrent ranks may compile the same kernel,
none sees a half.

CuPy's own `RawModule(code=...)` is not used: it adds `-ftz=true` after the caller's options, which
the contract forbids (section 2), and it knows no `sm_90a`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import threading
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mok_ref.install import install_hint

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""Targets that `mok-ref build` accepts. Hopper-only files are compiled for sm_90a alone."""

FLAGS = ("std=c++17", "ftz=false", "fmad=false", "prec-div=true", "prec-sqrt=true")
"""Arithmetic flags, part of every cache key; `compile_cubin` passes exactly these."""

TRACE_MACRO = "MOK_TRACE=1"
TRACE_HEADER = "trace.cuh"
_recorder: Any = None  # of tasks, for all virtual ranks of this process
_recordings = 0  # switched on so far

_COMPILING = threading.Lock()
"""Virtual ranks are threads: one of them imports and runs the compiler, the others find the
file."""


@dataclass(frozen=True)
class KernelUsage:
    """Resources of one kernel as ptxas reports them (shared memory: static part, in bytes)."""

    name: str
    registers: int
    static_smem_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def cuda_source_dir() -> Path:
    """Directory of the CUDA sources: in the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "cuda_src", package.parent / "cuda_src"):
        if (candidate / "config.cuh").is_file():
            return candidate
    raise FileNotFoundError(
        f"cuda_src not found beside the package, looked in {package} and its parent"
    )


def cache_dir() -> Path:
    """Where cubins are kept: $MOK_REF_CACHE, else the user's cache directory."""
    chosen = os.environ.get("MOK_REF_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mok_ref"


def source_names(arch: str | None = None) -> list[str]:
    """Names of the compilable files, those for `arch` only if it is given.

    A file whose first lines say `// Compiled for: sm_90a` is left out for every other target.
    """
    names = []
    for path in sorted(cuda_source_dir().glob("*.cu")):
        head = path.read_text(encoding="utf-8")[:2000]
        match = re.search(r"^// Compiled for: (.+)$", head, re.MULTILINE)
        targets = match.group(1).split() if match else None
        if arch is None or targets is None or arch in targets:
            names.append(path.name)
    return names


def source_digest() -> str:
    """SHA-256 over names and contents of all files in `cuda_src/`, sorted by name."""
    digest = hashlib.sha256()
    for path in sorted(cuda_source_dir().iterdir()):
        if path.suffix in (".cu", ".cuh"):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """NVRTC's version, e.g. '13.5'; part of the cache key.

    Raises: RuntimeError naming the command that installs the compiler when it is missing.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise RuntimeError(
            f"compiling kernels needs cuda-core and NVRTC: {install_hint('gpu')}"
        ) from error
    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"NVRTC does not answer: {status}")
    return f"{major}.{minor}"


def cache_key(source_name: str, arch: str, macros: tuple[str, ...]) -> str:
    """Digest that names a cubin: sources, flags, macros, target and compiler version."""
    parts = [source_name, arch, *macros, *FLAGS, compiler_version(), source_digest()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def compile_cubin(source_name: str, arch: str = "sm_90a", macros: tuple[str, ...] = ()) -> Path:
    """Path of the cubin of `cuda_src/<source_name>`, compiled now unless the cache holds it.

    macros   definitions "NAME=VALUE" (or "NAME"), order is part of the key

    Raises: ValueError for an unknown source, target or malformed macro; RuntimeError with the
    compiler's
            log when the source does not compile.
    """
    _check_request(source_name, arch, macros)
    key = cache_key(source_name, arch, macros)
    path = cache_dir() / f"{Path(source_name).stem}-{arch}-{key[:32]}.cubin"
    with _COMPILING:
        if not path.is_file():
            cubin, log = _compile(source_name, arch, macros)
            usage = [asdict(kernel) for kernel in parse_ptxas_log(log)]
            _write_atomically(path.with_suffix(".json"), json.dumps(usage, indent=1).encode())
            _write_atomically(path, cubin)
    return path


def resource_usage(cubin_path: Path) -> list[KernelUsage]:
    """Registers, static shared memory and spills of each kernel, as recorded when it was
    compiled."""
    recorded = json.loads(cubin_path.with_suffix(".json").read_text(encoding="utf-8"))
    return [KernelUsage(**kernel) for kernel in recorded]


def parse_ptxas_log(log: str) -> list[KernelUsage]:
    """Kernels in a `ptxas -v` log, sorted by name; device functions that are no kernels are left
    out."""
    kernels = []
    sections = re.split(r"Compiling entry function '([^']+)'", log)
    for name, text in zip(sections[1::2], sections[2::2], strict=True):

        def number(pattern: str, text: str = text) -> int:
            match = re.search(pattern, text)
            return int(match.group(1)) if match else 0

        kernels.append(
            KernelUsage(
                name=name,
                registers=number(r"Used (\d+) registers"),
                static_smem_bytes=number(r"(\d+) bytes smem"),
                stack_bytes=number(r"(\d+) bytes stack frame"),
                spill_store_bytes=number(r"(\d+) bytes spill stores"),
                spill_load_bytes=number(r"(\d+) bytes spill loads"),
            )
        )
    return sorted(kernels, key=lambda kernel: kernel.name)


def device_arch() -> str:
    """Target of the current device: the 'a' variant where the project has one.

    Raises: RuntimeError when no device is there or it is older than sm_80.
    """
    import cupy

    number = int(cupy.cuda.Device().compute_capability)
    if number < 80:
        raise RuntimeError(
            f"the kernels need compute capability 8.0 or newer, this device has {number / 10}"
        )
    for arch in ARCHITECTURES:
        if arch.rstrip("a") == f"sm_{number}":
            return arch
    return f"sm_{number}"


@lru_cache(maxsize=256)
def load_module(source_name: str, arch: str | None = None, macros: tuple[str, ...] = ()) -> Any:
    """CuPy module of a source, compiled for the current device; one per process and variant.

    CuPy loads it into a device lazily: call `load_kernel` on every rank before the first barrier,
    so that no rank waits for another one's compiler.
    """
    import cupy

    return cupy.RawModule(path=str(compile_cubin(source_name, arch or device_arch(), macros)))


def load_kernel(
    source_name: str, kernel: str, macros: tuple[str, ...] = (), smem_bytes: int = 0
) -> Any:
    """Kernel `kernel` of a source, ready to launch; `smem_bytes` is its dynamic shared memory
    limit. While tasks are recorded (mok_ref/gpu/trace.py) it is the variant that does so."""
    recorder = _recorder
    if recorder is not None and TRACE_HEADER in headers_of(source_name):
        macros = (*macros, TRACE_MACRO)
        recorder.attach(load_module(source_name, None, macros))
    return _loaded_kernel(source_name, kernel, macros, smem_bytes)


def record_tasks(recorder: Any) -> None:
    """From now on load kernels that record their tasks into `recorder`; None: ordinary ones.

    Raises: RuntimeError while another recorder is at work: a module's kernels write to one place.
    """
    global _recorder, _recordings
    if recorder is not None and _recorder is not None:
        raise RuntimeError("recording is on: it cannot be switched on again within itself")
    _recordings += recorder is not None
    _recorder = recorder


def recording_number() -> int:
    """Which recording is on, 0 for none: kernels loaded under another number are other kernels."""
    return _recordings if _recorder is not None else 0


@lru_cache(maxsize=64)
def headers_of(name: str) -> frozenset[str]:
    """Headers of `cuda_src/` that a file includes, directly or not."""
    text = (cuda_source_dir() / name).read_text(encoding="utf-8")
    found = re.findall(r'^#include "(\w+\.cuh)"', text, re.MULTILINE)
    return frozenset(found).union(*map(headers_of, found))


@lru_cache(maxsize=1024)
def _loaded_kernel(source_name: str, kernel: str, macros: tuple[str, ...], smem_bytes: int) -> Any:
    function = load_module(source_name, None, macros).get_function(kernel)
    if smem_bytes > 48 * 1024:
        function.max_dynamic_shared_size_bytes = smem_bytes
    return function


def _check_request(source_name: str, arch: str, macros: tuple[str, ...]) -> None:
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f"arch must look like sm_90a, got {arch=}")
    if source_name not in source_names():
        raise ValueError(f"source_name must be one of {source_names()}, got {source_name=}")
    if source_name not in source_names(arch):
        raise ValueError(f"{source_name} is not compiled for {arch=}")
    for macro in macros:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*(=[A-Za-z0-9_.]+)?", macro):
            raise ValueError(f"macros must look like NAME=VALUE, got {macro=}")


def _compile(source_name: str, arch: str, macros: tuple[str, ...]) -> tuple[bytes, str]:
    """Cubin and ptxas log of one source."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise RuntimeError(
            f"compiling kernels needs cuda-core and NVRTC: {install_hint('gpu')}"
        ) from error
    source_dir = cuda_source_dir()
    options = ProgramOptions(
        name=source_name,
        arch=arch,
        std="c++17",
        ftz=False,
        fma=False,
        prec_div=True,
        prec_sqrt=True,
        define_macro=[tuple(macro.split("=", 1)) if "=" in macro else macro for macro in macros]
        or None,
        include_path=[str(source_dir)],
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    program = Program((source_dir / source_name).read_text(encoding="utf-8"), "c++", options)
    try:
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:
        raise RuntimeError(
            f"{source_name} does not compile for {arch}:\n{log.getvalue() or error}"
        ) from error
    return cubin, log.getvalue()


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
