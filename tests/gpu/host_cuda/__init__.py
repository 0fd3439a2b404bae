"""Run kernels of `cuda_src/` on the CPU, compiled by the system's C++ compiler (see host_cuda.h).

    kernels = HostKernels("portable.cu")
    kernels.launch("portable_round", (1, 1), 256, [from_array, to_array, np.int64(n)])

`translate` rewrites what C++ does not know: inline PTX becomes calls of functions in host_cuda.h
that are named after the instruction, `extern __shared__` becomes a fixed array, and every kernel
gets a launcher.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
CUDA_SRC = HERE.parents[2] / "cuda_src"
_FLAGS = [
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-w",
]
_HOPPER_ONLY = r"(?s)#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n.*?#endif\n"
_NOT_ON_HOST = ("tensor_core.cuh", "ptx.cuh")  # Hopper's own instructions


def compiler() -> str | None:
    """The system's C++ compiler, or None."""
    return shutil.which("g++") or shutil.which("clang++")


def translate(source: str) -> str:
    """CUDA C++ that a host compiler understands."""
    out = []
    position = 0
    for match in re.finditer(r"\basm\b\s*(volatile)?\s*\(", source):
        end = _closing(source, match.end() - 1)
        out.append(source[position : match.start()])
        out.append(_asm_call(source[match.end() : end]))
        position = end + 1
    text = "".join(out) + source[position:]
    return re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];", r"alignas(16) static \1 \2[1 << 16];", text
    )


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`, string literals skipped."""
    depth, quoted = 0, False
    for i in range(opening, len(text)):
        char = text[i]
        if char == '"':
            quoted = not quoted
        elif not quoted and char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return i
    raise ValueError("asm statement without an end")


def _asm_call(inner: str) -> str:
    """`"cvt.rn.f32 ..." : "=f"(x) : "f"(y)` becomes `ptx_cvt_rn_f32(x, y)`."""
    instruction = re.search(r'"\{?\s*([a-z][\w.:]*)', inner)
    name = re.sub(r"\W+", "_", instruction.group(1)) if instruction else "unknown"
    arguments = []
    for match in re.finditer(r'"[=+]?[rlfhn]"\s*\(', inner):
        end = _closing(inner, match.end() - 1)
        arguments.append(inner[match.end() : end])
    return f"ptx_{name}({', '.join(arguments)})"


def launchers(source: str) -> str:
    """One C function per kernel: launch_<name>(grid x, grid y, threads; pointers to the
    arguments)."""
    text = []
    pattern = r'extern "C" __global__ void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\(([^)]*)\)'
    for name, parameters in re.findall(pattern, source):
        types = []
        for parameter in parameters.split(","):
            words = parameter.replace("const __grid_constant__", "").strip()
            types.append(re.sub(r"\s*\w+$", "", words))
        passed = ", ".join(
            f"*reinterpret_cast<std::remove_const_t<{kind}>*>(arguments[{i}])"
            for i, kind in enumerate(types)
        )
        text.append(
            f'extern "C" void launch_{name}(const unsigned* shape, void** arguments) '
            f"{{ host_cuda::run_grid(shape, [&] {{ {name}({passed}); }}); }}"
        )
    return "\n".join(text)


_MMA_BY_TC_GROUP = """
float host_mma_output(const unsigned short* a_row, const unsigned short* b_column, float acc) {
  mok::u32 a[16], b[16];
  for (int i = 0; i < 16; ++i) { a[i] = mok::operand_word(a_row[i]); b[i] =
  mok::operand_word(b_column[i]); } return mok::tc_group(a, 1, b, 1, acc);
}
"""


def _compile(build: Path, source_name: str, macros: tuple[str, ...]) -> Path:
    """The library made of `kernels.cc` in the directory `build`."""
    program, library = compiler(), build / "kernels.so"
    if program is None:
        raise RuntimeError("running kernels on the CPU needs g++ or clang++")
    command = [program, *_FLAGS, *(f"-D{macro}" for macro in macros)]
    command += [f"-I{HERE}", f"-I{build}", "-o", str(library)]
    result = subprocess.run(
        [*command, str(build / "kernels.cc")], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{source_name} does not compile on the host:\n{result.stderr[:4000]}")
    return library


class HostKernels:
    """The kernels of one source file as host functions; macros like "MOK_TRACE=1"."""

    def __init__(self, source_name: str, macros: tuple[str, ...] = ()) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="mok_host_")
        build = Path(self._directory.name)
        self._write_sources(build, source_name)
        self._library = ctypes.CDLL(str(_compile(build, source_name, macros)))

    def _write_sources(self, build: Path, source_name: str) -> None:
        """Everything that `kernels.cc` in the directory `build` needs."""
        for path in CUDA_SRC.glob("*.cuh"):
            if path.name not in _NOT_ON_HOST:
                (build / path.name).write_text(translate(path.read_text()))
        source = re.sub(_HOPPER_ONLY, "", (CUDA_SRC / source_name).read_text())
        body = ['#include "host_cuda.h"', translate(source), '#include "portable.cuh"']
        body += [_MMA_BY_TC_GROUP, launchers(source)]
        (build / "kernels.cc").write_text("\n".join(body))

    def close(self) -> None:
        """Delete the compiled file; what is loaded stays."""
        self._directory.cleanup()

    def symbol(self, name: str, num_bytes: int) -> np.ndarray:
        """The bytes of a global variable, to read and write."""
        return np.frombuffer((ctypes.c_uint8 * num_bytes).in_dll(self._library, name), np.uint8)

    def limit_shared(self, num_bytes: int) -> None:
        """Dynamic shared memory of the launches that follow; looked at by Hopper's kernels."""

    def launch(
        self, kernel: str, grid: tuple[int, ...], threads: int, arguments: list[Any]
    ) -> None:
        """Run a kernel to its end. Arrays are passed by address, structs and NumPy scalars by
        value."""
        kept, pointers = [], []
        for argument in arguments:
            if isinstance(argument, np.ndarray) and argument.dtype.names is None:
                value = np.array(argument.ctypes.data, np.uint64)
            else:
                value = np.array(argument)
            kept.append(value)
            pointers.append(value.ctypes.data)
        table = (ctypes.c_void_p * len(pointers))(*pointers)
        self.launch_at(kernel, grid, threads, ctypes.addressof(table))

    def launch_at(self, kernel: str, grid: tuple[int, ...], threads: int, arguments: int) -> None:
        """The same; `arguments` is the address of the arguments' addresses."""
        width, height = (*grid, 1)[:2]
        shape = (ctypes.c_uint * 3)(width, height, threads)
        getattr(self._library, f"launch_{kernel}")(shape, ctypes.c_void_p(arguments))
