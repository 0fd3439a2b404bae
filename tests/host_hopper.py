"""The Hopper kernels of cuda_src on the CPU, for tests that drive the layer's own host code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from gpu.host_cuda import compiler as host_compiler
from gpu.host_cuda.hopper import HopperKernels, encode_tiled
from host_cupy import HostFunction, host_cuda_device, load_host_kernel


@lru_cache(maxsize=8)
def _built(source: str, macros: tuple[str, ...]) -> HopperKernels:
    return HopperKernels(source, macros)


def kernels(source: str, macros: tuple[str, ...] = ()) -> HopperKernels:
    """A source built for the CPU, once per process: the object to seed is the one that runs."""
    return _built(source, macros)


def load_kernel(source: str, kernel: str, macros: Any = (), smem_bytes: int = 0) -> Any:
    """Stands in for mok_ref.gpu.compiler.load_kernel."""
    if source.startswith("megakernel"):
        return HostFunction(kernels(source, tuple(macros)), kernel)
    return load_host_kernel(source, kernel, macros, smem_bytes)


@contextmanager
def hopper_on_host(
    modules: tuple[ModuleType, ...], *replaced: tuple[ModuleType, str, Any]
) -> Iterator[None]:
    """The CPU as the device; `modules` load kernels and encode maps for it.

    replaced  further (module, name, value) for the time of the `with`
    Skips the test where there is no C++ compiler.
    """
    if host_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    loading = [
        (module, name, value)
        for module in modules
        for name, value in (("encode_tiled", encode_tiled), ("load_kernel", load_kernel))
        if hasattr(module, name)
    ]
    with host_cuda_device(), ExitStack() as stack:
        for module, name, value in (*loading, *replaced):
            stack.enter_context(mock.patch.object(module, name, value))
        yield
