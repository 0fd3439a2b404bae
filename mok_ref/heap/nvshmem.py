"""Ranks on an NVSHMEM symmetric heap (nvshmem4py), within one NVLink domain.

Buffers come from NVSHMEM; data still moves by plain loads and stores through peer pointers, so a
peer without a pointer (another NVLink domain) is an error, not a slower path. Bootstrapped with a
unique id broadcast by MPI. NVLink multicast stays off: this module never asks for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.heap.cuda_device import DEFAULT_TIMEOUT_S, import_cupy, storage_dtype
from mok_ref.heap.cuda_ipc import CudaIpcHeap
from mok_ref.heap.protocol import HeapError, check_timeout
from mok_ref.install import install_hint


def import_nvshmem() -> Any:
    """nvshmem4py's core module, or an error that says how to get it."""
    try:
        import nvshmem.core as nvshmem
    except (ImportError, OSError) as error:
        raise HeapError(f"nvshmem4py is missing ({error}): {install_hint('nvshmem')}") from error
    return nvshmem


class NvshmemHeap(CudaIpcHeap):
    """The symmetric heap of one NVSHMEM processing element (see `SymmetricHeap`).

    Raises: HeapError naming the peer that has no pointer.
    """

    def __init__(
        self, comm: Any = None, device: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        check_timeout(timeout_s)
        self._nvshmem = import_nvshmem()
        self._arrays: dict[str, list[Any]] = {}
        self._initialised = False
        super().__init__(comm, device, timeout_s)

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        if name in self._arrays:
            raise ValueError(f"heap name must be new, got {name!r} twice")
        dtype = storage_dtype(dtype)
        self._require_equal(name, shape, dtype)
        self._initialise()
        num_bytes = -(-max(1, int(np.prod(shape)) * dtype.itemsize) // 512) * 512
        memory = self._nvshmem.array((num_bytes,), dtype="uint8")
        memory[...] = 0
        self._arrays[name] = [self._peer_array(memory, peer, name) for peer in range(self.size)]
        addresses = [int(array.data.ptr) for array in self._arrays[name]]
        self._buffers[name] = (addresses, tuple(shape), dtype)
        import_cupy().cuda.runtime.deviceSynchronize()
        self.host_barrier(f"allocating {name!r}")
        return self.peer(self.rank, name)

    def free(self, name: str) -> None:
        import_cupy().cuda.runtime.deviceSynchronize()
        self.host_barrier(f"freeing {name!r}")
        self._buffers.pop(name)
        self._nvshmem.free_array(self._arrays.pop(name)[self.rank])

    def close(self) -> None:
        super().close()
        if self._initialised:
            self._nvshmem.finalize()
            self._initialised = False

    def _require_one_host(self) -> None:
        """An NVLink domain may span hosts; the pointers of `alloc` decide."""

    def _initialise(self) -> None:
        """Start NVSHMEM with a unique id that rank 0 draws."""
        if self._initialised:
            return
        from cuda.core import Device

        device = Device(self.device_index)
        device.set_current()
        unique_id = self._nvshmem.get_unique_id(empty=self.rank != 0)
        words = unique_id._data.view(np.int8)
        words[...] = np.frombuffer(self.exchange(words.tobytes(), "the NVSHMEM id")[0], np.int8)
        self._nvshmem.init(
            device=device, uid=unique_id, rank=self.rank, nranks=self.size, initializer_method="uid"
        )
        self._initialised = True

    def _peer_array(self, memory: Any, peer: int, name: str) -> Any:
        if peer == self.rank:
            return memory
        try:
            return self._nvshmem.get_peer_array(memory, peer)
        except Exception as error:
            raise HeapError(
                f"rank {self.rank} has no pointer to {name!r} of rank {peer}: {error}; "
                "NVSHMEM heaps need all ranks in one NVLink domain"
            ) from error
