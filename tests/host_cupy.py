"""A stand-in for CuPy that runs this project's kernels on the CPU, for tests without a GPU.

Covers what mok_ref.gpu and mok_ref.heap use of CuPy and no more: arrays are NumPy arrays with an
address, streams and events do nothing because a launch has ended when it returns, kernels come from
tests/gpu/host_cuda. Virtual ranks run in threads as usual; launches take turns.

    with host_cuda_device():
        run_virtual_cuda_ranks(4, work)
"""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
from gpu.host_cuda import HostKernels

import mok_ref.gpu

LAUNCH = threading.Lock()


class Address:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class ndarray(np.ndarray):
    """A NumPy array that answers CuPy's questions."""

    @property
    def data(self) -> Address:  # type: ignore[override]
        return Address(self.ctypes.data)

    def get(self) -> np.ndarray:
        return np.array(self)

    def set(self, values: Any) -> None:
        self[...] = values


def _own(array: Any) -> ndarray:
    return np.asarray(array).view(ndarray)


class Stream:
    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        pass

    def use(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


class Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass


class Device:
    compute_capability = "80"

    def __init__(self, index: int = 0) -> None:
        pass

    def use(self) -> None:
        pass

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_FUNCTIONS: dict[int, HostFunction] = {}


def _launch_kernel(function: int, *shape_and_arguments: int) -> None:
    """cuLaunchKernel: grid, block, shared memory, stream, address of the arguments' addresses."""
    width, height, _, threads, _, _, smem_bytes, _, arguments, _ = shape_and_arguments
    with LAUNCH:
        _FUNCTIONS[function].run((width, height), threads, arguments, smem_bytes)


class HostFunction:
    """One kernel with CuPy's call signature."""

    num_regs = 32

    def __init__(self, kernels: HostKernels, name: str) -> None:
        self._kernels, self._name = kernels, name
        self.kernel = Address(id(self))  # what the driver is given
        _FUNCTIONS[id(self)] = self

    def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        plain = [np.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
        with LAUNCH:
            self._kernels.launch(self._name, grid, int(np.prod(block)), plain)

    def run(self, grid: tuple[int, int], threads: int, arguments: int, smem_bytes: int) -> None:
        self._kernels.limit_shared(smem_bytes)
        self._kernels.launch_at(self._name, grid, threads, arguments)


@lru_cache(maxsize=8)
def host_kernels(source_name: str) -> HostKernels:
    return HostKernels(source_name)


@lru_cache(maxsize=256)
def load_host_kernel(source: str, kernel: str, macros: Any = (), smem_bytes: int = 0) -> Any:
    with LAUNCH:
        return HostFunction(host_kernels(source), kernel)


def _memset_async(address: int, value: int, num_bytes: int, stream: int) -> None:
    ctypes.memset(address, value, num_bytes)


def _memcpy_async(target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
    ctypes.memmove(target, source, num_bytes)


_ALLOCATIONS: dict[int, Any] = {}


def _malloc(num_bytes: int) -> int:
    memory = ctypes.create_string_buffer(num_bytes)
    address = ctypes.addressof(memory)
    _ALLOCATIONS[address] = memory
    return address


def _free(address: int) -> None:
    del _ALLOCATIONS[address]


def _ipc_handle(address: int) -> bytes:
    """Ranks are threads of one process here: a handle is the address."""
    return address.to_bytes(64, "little")


class MemoryPointer:
    """What `ndarray(shape, dtype, pointer)` is laid over."""

    def __new__(cls, memory: Any, offset: int) -> Any:
        address, num_bytes = memory
        return (ctypes.c_char * num_bytes).from_address(address + offset)


def make_module() -> types.ModuleType:
    """The module that stands in for `cupy`."""
    module = types.ModuleType("cupy")
    stream = Stream()
    runtime = types.SimpleNamespace(
        getDeviceProperties=lambda index: {"name": b"host"},
        getDeviceCount=lambda: 1,
        malloc=_malloc,
        free=_free,
        memset=lambda address, value, num_bytes: ctypes.memset(address, value, num_bytes),
        ipcGetMemHandle=_ipc_handle,
        ipcOpenMemHandle=lambda handle: int.from_bytes(handle, "little"),
        ipcCloseMemHandle=lambda address: None,
        memsetAsync=_memset_async,
        memcpyAsync=_memcpy_async,
        memcpyDeviceToDevice=3,
        deviceSynchronize=lambda: None,
        CUDARuntimeError=RuntimeError,
    )
    names = {
        "ndarray": ndarray,
        "empty": lambda shape, dtype=float: _own(np.empty(shape, dtype)),
        "zeros": lambda shape, dtype=float: _own(np.zeros(shape, dtype)),
        "full": lambda shape, value, dtype=None: _own(np.full(shape, value, dtype)),
        "array": lambda values, dtype=None: _own(np.array(values, dtype)),
        "asarray": lambda values, dtype=None: _own(np.array(values, dtype)),
        "get_default_memory_pool": lambda: types.SimpleNamespace(free_all_blocks=lambda: None),
        "asnumpy": lambda array: np.array(array),
        "ascontiguousarray": lambda values: _own(np.ascontiguousarray(values)),
        "cuda": types.SimpleNamespace(
            Stream=Stream,
            Event=Event,
            Device=Device,
            runtime=runtime,
            driver=types.SimpleNamespace(launchKernel=_launch_kernel),
            get_current_stream=lambda: stream,
            alloc_pinned_memory=PinnedMemory,
            UnownedMemory=lambda address, num_bytes, owner, device: (address, num_bytes),
            MemoryPointer=MemoryPointer,
        ),
    }
    for name in ("uint8", "uint16", "uint32", "uint64", "int32", "int64", "float32"):
        names[name] = getattr(np, name)
    for name, value in names.items():
        setattr(module, name, value)
    return module


class PinnedMemory(bytearray):
    """Host memory with an address."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


@contextmanager
def stand_in_module() -> Iterator[None]:
    """`cupy` in the table of modules. What is imported inside stays afterwards, since some modules
    cannot be loaded twice; but not those of this package: they may hold patched functions."""
    before = dict(sys.modules)
    sys.modules["cupy"] = make_module()
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name == "cupy" or name.startswith("mok_ref."):
                del sys.modules[name]
        if "cupy" in before:
            sys.modules["cupy"] = before["cupy"]


@contextmanager
def host_cuda_device() -> Iterator[None]:
    """Within it `import cupy` finds the stand-in and every kernel runs on the CPU."""
    for module_info in pkgutil.iter_modules(mok_ref.gpu.__path__, "mok_ref.gpu."):
        importlib.import_module(module_info.name)  # so that each one's load_kernel is replaced
    patches = []
    for name, module in list(sys.modules.items()):
        if name.startswith("mok_ref.") and hasattr(module, "load_kernel"):
            patches.append(mock.patch.object(module, "load_kernel", load_host_kernel))
    for patch in patches:
        patch.start()
    try:
        with stand_in_module():
            yield
    finally:
        for patch in reversed(patches):
            patch.stop()
