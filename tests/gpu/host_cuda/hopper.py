"""Run Hopper kernels of `cuda_src/` on the CPU: what only sm_90a has is imitated by hopper/*.h.

Warps run at random paces, copies by TMA and products of tensor cores happen at random times between
their start and the wait for them, all by one seed. An order that barriers do not force shows as
wrong bits, a barrier that is used wrongly as a message or as a standstill. CTAs run one after the
other, those of a cluster together.
Registers, speed and the memory model are not imitated.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np

from gpu.host_cuda import CUDA_SRC, HERE, HostKernels, launchers, translate

HOPPER = HERE / "hopper"
ELEMENT_BYTES = {"UINT8": 1, "UINT16": 2, "BFLOAT16": 2, "FLOAT32": 4}

_E4M3 = """
unsigned char host_e4m3_code(float value) {
  return value != value ? mok::kNanCode : mok::e4m3_code(value);
}
float host_e4m3_value(unsigned char code) {
  return (code & 0x7f) == mok::kNanCode ? __uint_as_float(0x7fc00000u) : mok::e4m3_value(code);
}
"""


def encode_tiled(
    pointer: int,
    dims: tuple,
    strides: tuple,
    box: tuple,
    element: str = "BFLOAT16",
    swizzle: str = "128B",
) -> np.ndarray:
    """Stands in for mok_ref.gpu.hopper.encode_tiled; hopper/ptx.cuh reads what this writes."""
    size, rank = ELEMENT_BYTES[element], len(dims)
    span = 0 if swizzle == "NONE" else int(swizzle.removesuffix("B"))
    assert pointer % 16 == 0 and all(stride % 16 == 0 for stride in strides), (pointer, strides)
    assert all(1 <= extent <= 256 for extent in box) and box[0] * size % 16 == 0, box
    assert span == 0 or box[0] * size <= span, (box, swizzle)
    words = np.zeros(16, np.uint64)
    words[0], words[1] = pointer, size | rank << 8 | span << 16
    words[2 : 2 + rank], words[7 : 7 + rank - 1], words[11 : 11 + rank] = dims, strides, box
    return words


class HopperKernels(HostKernels):
    """The kernels of one Hopper source as host functions."""

    def seed(self, value: int) -> None:
        """Paces of the launches that follow."""
        self._library.set_hopper_seed(value)

    def limit_shared(self, num_bytes: int) -> None:
        """Dynamic shared memory of the launches that follow: accesses beyond it are mistakes."""
        self._library.set_hopper_shared_bytes(num_bytes)

    def launch_at(self, kernel: str, grid: tuple[int, ...], threads: int, arguments: int) -> None:
        """Raises: RuntimeError where a device would hang, fault or go wrong unnoticed."""
        self._library.set_hopper_cluster(getattr(self._library, f"ctas_of_{kernel}")())
        super().launch_at(kernel, grid, threads, arguments)
        self._library.hopper_mistake.restype = ctypes.c_char_p
        mistake = self._library.hopper_mistake().decode()
        if mistake:
            raise RuntimeError(f"{kernel}: {mistake}")

    def _write_sources(self, build: Path, source_name: str) -> None:
        for path in CUDA_SRC.glob("*.cuh"):
            (build / path.name).write_text(self._translate(path.read_text()))
        for path in HOPPER.iterdir():
            (build / path.name).write_text(path.read_text())
        (build / "ptx.cuh").write_text((HOPPER / "ptx.cuh").read_text() + _not_imitated())
        (build / "soft_tc.cuh").write_text(translate(_group_arithmetic()))
        (build / "tensor_core.cuh").write_text(_tensor_core())
        (build / "mxfp8_tensor_core.cuh").write_text('#pragma once\n#include "tensor_core.cuh"\n')
        (build / "host_cuda.h").write_text(_scheduled_host_cuda())
        source = (CUDA_SRC / source_name).read_text()
        body = ['#include "intrinsics.h"', self._translate(source), '#include "mxfp8.cuh"', _E4M3]
        body += ['#include "scheduler.h"', "using namespace mok;", launchers(_plain(source))]
        body.append(_cluster_sizes(source))
        (build / "kernels.cc").write_text("\n".join(body))

    @staticmethod
    def _translate(text: str) -> str:
        shared = r"extern __shared__ __align__\(1024\) unsigned char (\w+)\[\];"
        of_cluster = (
            r"alignas(1024) static unsigned char \1_of_cluster[2 << mok::kHostCtaBits];"
            r" unsigned char* const \1 ="
            r" \1_of_cluster + (mok::cluster_ctarank() << mok::kHostCtaBits);"
        )
        text = re.sub(shared, of_cluster, text)
        return translate(re.sub(r"__cluster_dims__\([^)]*\)", "", text))


def _plain(source: str) -> str:
    """Kernel declarations without launch bounds and cluster sizes."""
    return re.sub(r"(__(launch_bounds|cluster_dims)__\([^)]*\)|MOK_CLUSTER_DIMS)\s*", "", source)


def _cluster_sizes(source: str) -> str:
    """C functions ctas_of_<kernel>: CTAs of its clusters."""
    attribute = r"(?:__\w+__\([^)]*\)\s*|MOK_CLUSTER_DIMS\s+)*"
    text = []
    for attributes, name in re.findall(rf'"C" __global__ void\s+({attribute})(\w+)\(', source):
        dims = re.search(r"__cluster_dims__\((\d+)", attributes)
        size = "kClusterSize" if "MOK_CLUSTER_DIMS" in attributes else dims[1] if dims else "1"
        text.append(f'extern "C" unsigned ctas_of_{name}() {{ return {size}; }}')
    return "\n".join(text)


def _not_imitated() -> str:
    """Stubs of ptx.cuh's other functions, which end the test."""
    declared = r"^(?:MOK_DEVICE|inline|void) (?:\w+ )?(\w+)\("
    names, ours = (
        set(re.findall(declared, path.read_text(), re.MULTILINE))
        for path in (CUDA_SRC / "ptx.cuh", HOPPER / "ptx.cuh")
    )
    stubs = [
        f'template <class... T> u32 {name}(T&&...) {{ host_mistake("{name}", 0); }}'
        for name in sorted(names - ours)
    ]
    return "\n".join(["namespace mok {", *stubs, "}", ""])


def _group_arithmetic() -> str:
    """tc_group of portable.cuh, without what comes behind it."""
    text = (CUDA_SRC / "portable.cuh").read_text()
    return (
        text[: text.index("// -", text.index("MOK_DEVICE float tc_group"))]
        + "}  // namespace mok\n"
    )


def _tensor_core() -> str:
    """tensor_core.cuh with the host's wgmma between its descriptors and its walk over k-blocks."""
    text = (CUDA_SRC / "tensor_core.cuh").read_text()
    first, wgmma = text.index("enum class Major"), text.index("MOK_DEVICE void wgmma_fence")
    walk = text.index("// One k-block of 64")
    head = '#pragma once\n#include "ptx.cuh"\n#include "soft_tc.cuh"\nnamespace mok {\n'
    return f'{head}{text[first:wgmma]}#include "wgmma.h"\n{text[walk:]}'


def _scheduled_host_cuda() -> str:
    """host_cuda.h with the random scheduler; a thread that polls a counter lets others run."""
    text = (HERE / "host_cuda.h").read_text()
    replaced = {
        "for (blockIdx.x = 0; blockIdx.x < shape[0]; ++blockIdx.x) run_block();": (
            "for (first_cta = 0; first_cta < shape[0]; first_cta += cluster_size)"
            " hopper_run_block();"
        ),
        "if (fibers.size() != shape[2]) fibers = std::vector<Fiber>(shape[2]);": (
            "if (const size_t number = shape[2] * cluster_size; fibers.size() != number)"
            " fibers = std::vector<Fiber>(number);"
        ),
        "inline void run_grid(": "void hopper_run_block();\ninline void run_grid(",
        "threadIdx.x = static_cast<unsigned>(index);": (
            "threadIdx.x = static_cast<unsigned>(index) % blockDim.x;\n"
            "  blockIdx.x = first_cta + static_cast<unsigned>(index) / blockDim.x;"
        ),
        "inline void resume(": "inline unsigned cluster_size = 1, first_cta;\ninline void resume(",
    }
    for old, new in replaced.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    nobody = "constexpr size_t kNobody = ~size_t{0};\ninline size_t current = kNobody;"
    text = text.replace("inline size_t current;", nobody)
    poll = "inline void ptx_ld_acquire_gpu_global_u32(unsigned& value, const unsigned* address) {"
    return text.replace(poll, f"{poll} host_cuda::wait(host_cuda::State::kReady);")
