"""What the symmetric heaps on CUDA devices share.

A device heap offers, beside the protocol's `alloc`, `peer`, `free`, `barrier` and `close`:

    addresses(name)     device address of that buffer on every rank, as this rank sees it
    barrier(phase)      stream-ordered; `phase` (mok_ref.gpu.errors) names it in a time-out
    warm_up()           compiles and loads what barriers need, before anybody waits for anybody
    status              abort flag, error record, time limit (mok_ref.gpu.errors.DeviceStatus)
    check(top_k)        synchronises and raises what the device reported

bf16 buffers are uint16 arrays of bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.heap.protocol import HeapError
from mok_ref.install import install_hint

DEFAULT_TIMEOUT_S = 60.0


def import_cupy() -> Any:
    """CuPy with a usable device, or an error that says what is missing.

    Raises: HeapError.
    """
    try:
        import cupy
    except ImportError as error:
        raise HeapError(f"CuPy is missing: {install_hint('gpu')}") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise HeapError(f"no CUDA device is usable: {error}") from error
    if count < 1:
        raise HeapError("no CUDA device is visible")
    return cupy


def storage_dtype(dtype: Any) -> np.dtype:
    """dtype in which a buffer is stored: bf16 as uint16 bits, float8 and e8m0 as uint8, others
    unchanged."""
    dtype = np.dtype(dtype)
    if dtype.kind in "biuf":
        return dtype
    return np.dtype({1: np.uint8, 2: np.uint16}[dtype.itemsize])


def array_at(address: int, shape: tuple[int, ...], dtype: Any, owner: Any, device: int) -> Any:
    """CuPy array over device memory that `owner` keeps alive.

    device  the GPU that uses it, and in whose context it is mapped. CuPy would ask where the memory
            lies, which for a peer's is another GPU, and copy there, where nothing is mapped.
    """
    import cupy

    dtype = np.dtype(dtype)
    num_bytes = max(1, int(np.prod(shape)) * dtype.itemsize)
    memory = cupy.cuda.UnownedMemory(address, num_bytes, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def phase_number(phase: Any) -> int:
    """A phase of `mok_ref.gpu.errors.PHASES`; words of a caller count as its own barrier."""
    from mok_ref.gpu.errors import BARRIER_USER

    return phase if isinstance(phase, int) else BARRIER_USER


class KernelBarrier:
    """The barrier kernel over flags that every rank can reach (cuda_src/support.cu: rank_barrier).

    flag_addresses  address of each rank's flag words, as this rank sees them
    """

    def __init__(self, rank: int, flag_addresses: list[int], status: Any) -> None:
        import cupy

        from mok_ref.gpu.params import BARRIER_PARAMS, new_params

        self._flags = cupy.asarray(np.asarray(flag_addresses, np.uint64))
        self._params = new_params(
            BARRIER_PARAMS, size=len(flag_addresses), flags=self._flags, epoch=status.epoch_address
        )
        wait = self._params["wait"]
        wait["timeout_ns"] = status.timeout_ns
        wait["abort_flag"] = status.abort_address
        wait["record"] = status.record_address
        wait["rank"] = rank
        self._threads = min(1024, -(-len(flag_addresses) // 32) * 32)
        self._status = status
        self.warm_up()
        cupy.cuda.get_current_stream().synchronize()

    def warm_up(self) -> None:
        """Load the kernel into the device, which CuPy otherwise does at the first launch."""
        from mok_ref.gpu.compiler import load_kernel

        _ = load_kernel("support.cu", "rank_barrier").num_regs

    def launch(self, phase: Any) -> None:
        import cupy

        from mok_ref.gpu.launch import enqueue

        self._status.check_timeout()
        number = phase_number(phase)
        stream = cupy.cuda.get_current_stream()
        enqueue(self._params, number, stream, lambda: [self._prepare(number)])

    def _prepare(self, phase: int) -> Any:
        from mok_ref.gpu.compiler import load_kernel
        from mok_ref.gpu.launch import Launch

        kernel = load_kernel("support.cu", "rank_barrier")
        return Launch(kernel, (1,), self._threads, (self._params, np.uint32(phase)))
