"""One process per rank on the GPUs of one host: memory shared by CUDA IPC handles.

Each buffer is its own cudaMalloc allocation (an allocation from a pool would export its whole block
and lose the offset). Handles travel once, by MPI, when a buffer is allocated; data moves by plain
loads and stores of kernels afterwards. Ranks may share a GPU, so one of them suffices for any
number of processes.
"""

from __future__ import annotations

import hashlib
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.heap.cuda_device import (
    DEFAULT_TIMEOUT_S,
    KernelBarrier,
    array_at,
    import_cupy,
    storage_dtype,
)
from mok_ref.heap.mpi import import_mpi
from mok_ref.heap.protocol import HeapError, check_timeout

GRANULE = 2 << 20  # CUDA maps memory in pages of 2 MiB; no two buffers share one


class CudaIpcHeap:
    """The symmetric heap of one process and its GPU (see `SymmetricHeap`).

    comm        MPI communicator, default COMM_WORLD; all ranks on one host
    device      index of the GPU, default local rank modulo the visible GPUs
    timeout_s   limit of every wait, on the host and on the device
    Raises: HeapError naming the pair of ranks whose memory cannot be shared.
    """

    device = "cuda"

    def __init__(
        self, comm: Any = None, device: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        from mok_ref.gpu.errors import DeviceStatus

        self.timeout_s = check_timeout(timeout_s)
        cupy = import_cupy()
        world = import_mpi().COMM_WORLD if comm is None else comm
        self.comm = world.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self._require_one_host()
        self.device_index = (
            self.rank % cupy.cuda.runtime.getDeviceCount() if device is None else device
        )
        cupy.cuda.Device(self.device_index).use()
        self.status = DeviceStatus(self.rank, timeout_s)
        self._buffers: dict[str, tuple[list[int], tuple[int, ...], np.dtype]] = {}
        self._self_test()
        self._barrier = self._make_barrier()

    def alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        import cupy

        if name in self._buffers:
            raise ValueError(f"heap name must be new, got {name!r} twice")
        dtype = storage_dtype(dtype)
        self._require_equal(name, shape, dtype)
        num_bytes = -(-max(1, int(np.prod(shape)) * dtype.itemsize) // GRANULE) * GRANULE
        runtime = cupy.cuda.runtime
        address = runtime.malloc(num_bytes)
        runtime.memset(address, 0, num_bytes)
        runtime.deviceSynchronize()
        handles = self.exchange(runtime.ipcGetMemHandle(address), f"the handle of {name!r}")
        addresses = [
            address if peer == self.rank else self._open(handle, peer, name)
            for peer, handle in enumerate(handles)
        ]
        self._buffers[name] = (addresses, tuple(shape), dtype)
        self.host_barrier(f"allocating {name!r}")
        return self.peer(self.rank, name)

    def peer(self, rank: int, name: str) -> Any:
        addresses, shape, dtype = self._buffers[name]
        return array_at(addresses[rank], shape, dtype, self, self.device_index)

    def addresses(self, name: str) -> list[int]:
        return list(self._buffers[name][0])

    def free(self, name: str) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        runtime.deviceSynchronize()
        self.host_barrier(f"freeing {name!r}")
        addresses, _, _ = self._buffers.pop(name)
        for peer, address in enumerate(addresses):
            if peer != self.rank:
                runtime.ipcCloseMemHandle(address)
        self.host_barrier(f"freeing {name!r}")  # nobody frees what another still has open
        runtime.free(addresses[self.rank])

    def barrier(self, phase: Any = 6) -> None:
        """Stream-ordered barrier kernel; never blocks the host. One rank alone needs none."""
        if self.size > 1:
            self._barrier.launch(phase)

    def warm_up(self) -> None:
        self._barrier.warm_up()

    def check(self, top_k: int | None = None) -> None:
        """Wait for the stream and raise what the device reported (DeviceStatus.check)."""
        self.status.check(top_k)

    def close(self) -> None:
        for name in list(self._buffers):
            self.free(name)
        self.comm.Free()

    def exchange(self, block: bytes, what: str) -> list[bytes]:
        """Every rank's `block` (same length everywhere), in rank order, within the time limit."""
        mine = np.frombuffer(block, np.uint8).copy()
        everyone = np.empty((self.size, len(block)), np.uint8)
        self._finish(self.comm.Iallgather(mine, everyone), what)
        return [row.tobytes() for row in everyone]

    def host_barrier(self, what: str) -> None:
        """Meet the other processes on the host, within the time limit."""
        self._finish(self.comm.Ibarrier(), what)

    def _finish(self, request: Any, what: str) -> None:
        limit = time.monotonic() + self.timeout_s
        pause = 0.0
        while not request.Test():
            if time.monotonic() > limit:
                raise HeapError(
                    f"rank {self.rank}: another rank did not arrive within {self.timeout_s:g} s "
                    f"at: {what}"
                )
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)

    def _require_one_host(self) -> None:
        boot = Path("/proc/sys/kernel/random/boot_id")
        text = platform.node() + (boot.read_text() if boot.exists() else "")
        host = hashlib.sha256(text.encode()).digest()
        hosts = self.exchange(host, "comparing host names")
        others = [peer for peer, other in enumerate(hosts) if other != host]
        if others:
            raise HeapError(
                "CUDA IPC needs all ranks on one host, "
                f"rank {self.rank} and rank {others[0]} are not"
            )

    def _require_equal(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        text = f"{name} {tuple(shape)} {dtype.str}"
        texts = self.exchange(text.encode().ljust(256)[:256], f"allocating {name!r}")
        for peer, other in enumerate(texts):
            if other != texts[self.rank]:
                raise ValueError(
                    "heap allocations must be the same on all ranks, got "
                    f"{text!r} on rank {self.rank} and {other.decode().strip()!r} on rank {peer}"
                )

    def _open(self, handle: bytes, peer: int, name: str) -> int:
        import cupy

        try:
            return int(cupy.cuda.runtime.ipcOpenMemHandle(handle))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise HeapError(
                f"rank {self.rank} (GPU {self.device_index}) cannot map {name!r} of rank {peer}: "
                f"{error}"
            ) from error

    def _self_test(self) -> None:
        """Write and read a pattern through every peer pointer.

        Raises: HeapError naming the first pair whose write or read does not arrive.
        """
        self.alloc("self_test", (max(32, self.size),), np.uint32)
        verdict = run_self_test(self, "self_test")
        for peer, bits in enumerate(verdict):
            if bits & 1:
                raise HeapError(
                    f"rank {self.rank} does not read back what it wrote into rank {peer}'s memory"
                )
            if bits & 2:
                raise HeapError(
                    f"rank {peer}'s write into rank {self.rank}'s memory does not arrive"
                )

    def _make_barrier(self) -> KernelBarrier:
        from mok_ref.gpu.params import BARRIER_WORDS

        self.alloc("barrier_flags", (BARRIER_WORDS,), np.uint32)
        barrier = KernelBarrier(self.rank, self.addresses("barrier_flags"), self.status)
        self.host_barrier("loading the barrier kernel")
        return barrier


def run_self_test(heap: Any, name: str) -> list[int]:
    """Verdict per peer of the self-test kernels (cuda_src/support.cu) over the symmetric buffer
    `name`."""
    import cupy

    from mok_ref.gpu.compiler import load_kernel

    words = cupy.asarray(np.asarray(heap.addresses(name), np.uint64))
    verdict = cupy.full(heap.size, 3, cupy.uint32)
    rank, size = np.int32(heap.rank), np.int32(heap.size)
    try:
        load_kernel("support.cu", "self_test_write")((1,), (128,), (words, rank, size))
        cupy.cuda.runtime.deviceSynchronize()
        heap.host_barrier("the self-test's writes")
        load_kernel("support.cu", "self_test_read")((1,), (128,), (words, rank, size, verdict))
        return [int(bits) for bits in verdict.get()]
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise HeapError(f"rank {heap.rank}: peer memory is not accessible: {error}") from error
