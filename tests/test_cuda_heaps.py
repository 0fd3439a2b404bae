"""Device heaps without a GPU: allocation, peers, self-test, barrier and what a missing rank causes.

The kernels run on the CPU (tests/host_cupy.py); "processes" are threads that share an address
space, so a handle is an address. tests/gpu/test_ipc_gpu.py has real processes and a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_comm import FileComm
from gpu.host_cuda import compiler
from host_cupy import host_cuda_device, make_module

from mok_ref.gpu import errors
from mok_ref.gpu.params import BARRIER_WORDS
from mok_ref.heap import cuda_device, cuda_ipc
from mok_ref.heap.cuda_ipc import CudaIpcHeap
from mok_ref.heap.protocol import HeapError, SymmetricHeap
from mok_ref.heap.virtual_cuda import VirtualCudaWorld, run_virtual_cuda_ranks


@pytest.fixture(autouse=True)
def on_the_cpu():
    if compiler() is None:
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    with host_cuda_device():
        yield


def run_threads(folder: Path, size: int, work: Callable[[Any], Any], timeout_s: float = 20) -> list:
    """work(heap) on `size` CudaIpcHeaps; results or exceptions in rank order."""
    results: list[Any] = [None] * size

    def rank(index: int) -> None:
        try:
            comm = FileComm(str(folder), index, size)
            results[index] = work(CudaIpcHeap(comm, timeout_s=timeout_s))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_ipc_heap_shares_memory_and_gives_it_back(tmp_path: Path) -> None:
    def work(heap):
        assert isinstance(heap, SymmetricHeap)
        mine = heap.alloc("a", (3, 5), np.int32)
        other = heap.alloc("b", (1,), np.uint8)
        assert not mine.any()
        mine[...], other[...] = heap.rank + 1, 7
        heap.host_barrier("test")
        seen = [int(heap.peer(r, "a")[2, 4]) for r in range(heap.size)]
        assert len(set(heap.addresses("a") + heap.addresses("b"))) == 2 * heap.size
        heap.host_barrier("test")
        heap.free("a")
        heap.close()
        return seen

    assert run_threads(tmp_path, 3, work) == [[1, 2, 3]] * 3


def test_peer_memory_is_used_in_this_ranks_context(tmp_path: Path, monkeypatch) -> None:
    """CuPy would ask the driver where memory lies and use a peer's on the peer's GPU."""
    import cupy

    original, devices = cupy.cuda.UnownedMemory, []

    def recorded(address, num_bytes, owner, device):
        devices.append((owner.rank, device))
        return original(address, num_bytes, owner, device)

    monkeypatch.setattr(cupy.cuda, "UnownedMemory", recorded)

    def work(heap):
        heap.device_index = 10 + heap.rank
        heap.alloc("a", (1,), np.uint8)
        devices.clear()
        heap.host_barrier("test")
        heap.peer(1 - heap.rank, "a")
        heap.host_barrier("test")

    run_threads(tmp_path, 2, work)
    assert sorted(devices) == [(0, 10), (1, 11)]


def test_ipc_heap_refuses_what_differs_between_ranks(tmp_path: Path) -> None:
    def work(heap):
        heap.alloc("a", (3 + heap.rank,), np.int32)

    for rank, error in enumerate(run_threads(tmp_path, 2, work)):
        assert isinstance(error, ValueError)
        assert f"'a ({3 + rank},) <i4' on rank {rank}" in str(error)


def test_ipc_heap_names_the_pair_that_cannot_share(tmp_path: Path, monkeypatch) -> None:
    original = cuda_ipc.run_self_test

    def silent(heap, name):
        verdict = original(heap, name)
        return [
            bits | (2 if (heap.rank, peer) == (1, 0) else 0) for peer, bits in enumerate(verdict)
        ]

    monkeypatch.setattr(cuda_ipc, "run_self_test", silent)
    results = run_threads(tmp_path, 2, lambda heap: None, timeout_s=1)
    assert "rank 0's write into rank 1's memory does not arrive" in str(results[1])
    assert isinstance(results[0], HeapError) and "did not arrive within 1 s" in str(results[0])


def test_the_self_test_notices_a_wrong_pointer(tmp_path: Path) -> None:
    def work(heap):
        heap.alloc("test", (32,), np.uint32)
        addresses = heap.addresses("test")
        heap.addresses = lambda name: addresses[::-1] if heap.rank else addresses
        return cuda_ipc.run_self_test(heap, "test")

    results = run_threads(tmp_path, 2, work)
    assert any(any(verdict) for verdict in results)


def test_barrier_kernel_counts_epochs_and_names_who_is_missing() -> None:
    cupy = make_module()
    status = errors.DeviceStatus(0, timeout_s=0.05)
    flags = [cupy.zeros(BARRIER_WORDS, np.uint32) for _ in range(3)]
    barrier = cuda_device.KernelBarrier(0, [f.data.ptr for f in flags], status)
    for epoch in (1, 2):  # the other ranks have been here already
        flags[0][1], flags[0][2] = epoch, epoch + 1
        barrier.launch(errors.BARRIER_DY)
        status.check_timeout()
        assert [int(f[0]) for f in flags] == [epoch] * 3
        assert int(status.words[1]) == epoch
    flags[0][2] = 3  # rank 1 does not come to epoch 3
    barrier.launch(errors.BARRIER_COMBINE)
    with pytest.raises(errors.MokTimeoutError) as caught:
        status.check()
    text = str(caught.value)
    assert "rank 0 waited 0.0" in text and "for rank 1 in the barrier after the forward" in text
    assert "epoch 3: arrivals expected 3, seen 2" in text
    with pytest.raises(errors.MokTimeoutError):  # the rank has given up for good
        barrier.launch(errors.BARRIER_DX)


def test_virtual_heap_names_the_late_rank() -> None:
    def work(heap):
        heap.barrier(errors.BARRIER_INPUTS)
        if heap.rank == 1:
            time.sleep(1.0)
            return None
        with pytest.raises(errors.MokTimeoutError) as caught:
            heap.barrier(errors.BARRIER_COMBINE)
        return str(caught.value)

    text = run_virtual_cuda_ranks(2, work, timeout_s=0.3)[0]
    assert "rank 0 waited in the barrier after the forward kernel" in text
    assert "rank 1 (last seen in the barrier before the forward kernel" in text


class OrderedStream:
    """A stream that knows what its end follows: a set of (stream, how much it had enqueued)."""

    ptr = 16

    def __init__(self) -> None:
        self.lock, self.count, self.follows = threading.Lock(), 0, set()
        self.calls = 0

    def enqueue(self) -> None:
        self.count += 1
        self.follows |= {(self, self.count)}

    def wait_event(self, event: Any) -> None:
        self.calls += 1
        self.follows |= event.follows


class OrderedEvent:
    """What a stream's end followed when the event was recorded."""

    def __init__(self, **_: Any) -> None:
        self.follows: set[Any] = set()

    def record(self, stream: OrderedStream) -> None:
        stream.calls += 1
        self.follows = set(stream.follows)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_behind_a_virtual_barrier_every_stream_follows_all_others(size: int, monkeypatch) -> None:
    """Whoever comes last; and the driver's calls grow with the ranks, not with their square."""
    import cupy

    own, plain = threading.local(), cupy.cuda.get_current_stream()
    monkeypatch.setattr(cupy.cuda, "Event", OrderedEvent)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: getattr(own, "stream", plain))
    streams = [OrderedStream() for _ in range(size)]
    rounds = 20

    def work(heap: Any) -> None:
        own.stream = streams[heap.rank]
        rng = np.random.default_rng(heap.rank)
        for number in range(1, rounds + 1):
            own.stream.enqueue()
            time.sleep(float(rng.choice([0, 0, 1e-3])))
            heap.barrier()
            assert {(stream, number) for stream in streams} <= own.stream.follows
            # what another enqueues behind the barrier is not waited for
            assert max(count for _, count in own.stream.follows) == number
            heap.barrier()

    run_virtual_cuda_ranks(size, work, timeout_s=30)
    assert sum(stream.calls for stream in streams) == 2 * rounds * (3 * size - 2)


def test_a_virtual_barrier_refuses_the_per_thread_stream(monkeypatch) -> None:
    """Its handle means another stream in each thread, and one thread joins them all."""
    import cupy

    own, plain = threading.local(), cupy.cuda.get_current_stream()
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: getattr(own, "stream", plain))

    def work(heap: Any) -> str:
        if heap.rank == 1:
            own.stream = OrderedStream()
            own.stream.ptr = 2
        with pytest.raises((ValueError, errors.MokTimeoutError)) as caught:
            heap.barrier()
        return str(caught.value)

    begin = time.monotonic()
    other, refused = run_virtual_cuda_ranks(2, work, timeout_s=30)
    assert "must be one that every thread can name" in refused and "rank 1" in refused
    assert "rank 0 waited" in other and time.monotonic() - begin < 10


def test_a_rank_that_comes_too_late_is_refused() -> None:
    """The others have given up: it must not go on as if they had been there."""

    def work(heap: Any) -> str:
        if heap.rank == 1:
            while not heap._world.arrival.broken:
                time.sleep(0.01)
        with pytest.raises(errors.MokTimeoutError) as caught:
            heap.barrier(errors.BARRIER_DY)
        return str(caught.value)

    first, late = run_virtual_cuda_ranks(2, work, timeout_s=0.2)
    assert "rank 0 waited" in first and "for rank 1" in first
    assert "rank 1 waited" in late and "another rank gave up" in late


def test_virtual_heap_alloc_and_free() -> None:
    def work(heap):
        assert isinstance(heap, SymmetricHeap)
        heap.alloc("a", (2,), np.float32)[...] = heap.rank
        with pytest.raises(ValueError, match="must be new"):
            heap.alloc("a", (2,), np.float32)
        heap.barrier("a caller's words")
        seen = [float(heap.peer(r, "a")[1]) for r in range(heap.size)]
        heap.close()
        return seen

    assert run_virtual_cuda_ranks(3, work, timeout_s=20) == [[0.0, 1.0, 2.0]] * 3


def test_virtual_heap_refuses_different_shapes_and_ranks() -> None:
    def work(heap):
        heap.alloc("a", (2 + heap.rank,), np.float32)

    with pytest.raises(ValueError, match="must be the same on all ranks"):
        run_virtual_cuda_ranks(2, work, timeout_s=5)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1"):
        VirtualCudaWorld(2).heap(2)
    with pytest.raises(ValueError, match="ranks must be >= 1"):
        VirtualCudaWorld(0)
