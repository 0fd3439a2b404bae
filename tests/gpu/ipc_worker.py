"""One process of tests/gpu/test_ipc_gpu.py: python ipc_worker.py FOLDER RANK SIZE STEP.

Steps: `bits` runs layers and compares this rank's tensors with the NumPy layer; `graph` captures a
step and replays it with other inputs in place; `kill` lets the last rank die between two steps;
`late` lets it arrive too late.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from file_comm import FileComm

from gpu.test_layer_gpu import BASE, as_host, collect, make_inputs, rank_arguments, rank_dy
from mok_ref.config import MoEConfig
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap import run_ranks
from mok_ref.heap.cuda_ipc import CudaIpcHeap
from mok_ref.layer import moe_backward, moe_forward
from mok_ref.testing import assert_bitwise_equal

LAYERS = (
    BASE | dict(num_experts=12, shared_intermediate_size=24),
    BASE | dict(num_experts=12, hidden_size=33, intermediate_size=31, row_order="round_robin"),
    BASE | dict(num_experts=12, swiglu_limit=0.5, macrobatch=128, minibatch=128),
    BASE
    | dict(num_experts=12, hidden_size=80, intermediate_size=48, dtype="mxfp8")
    | dict(shared_intermediate_size=24),
)


def step(config, heap, workspace, inputs):
    arguments = rank_arguments(config, inputs, heap.rank)
    y, context = moe_forward(config, heap, *arguments, workspace=workspace)
    gradients = moe_backward(context, rank_dy(inputs, heap.rank))
    heap.check()
    return collect(y, gradients)


def reference(config, inputs, rank):
    def work(heap):
        y, context = moe_forward(config, heap, *rank_arguments(config, inputs, heap.rank))
        return collect(y, moe_backward(context, rank_dy(inputs, heap.rank)))

    return run_ranks(config.ep_size, work)[rank]


def two_small_buffers(heap) -> None:
    """Each keeps its own bytes when mapped elsewhere (an offset must not be lost)."""
    for name, value in (("small_a", 10), ("small_b", 100)):
        heap.alloc(name, (5,), np.uint8)[...] = value + heap.rank
    heap.barrier()
    heap.check()
    for peer in range(heap.size):
        assert (heap.peer(peer, "small_a").get() == 10 + peer).all()
        assert (heap.peer(peer, "small_b").get() == 100 + peer).all()


def bits(heap) -> None:
    two_small_buffers(heap)
    counts = (32, 5, 0, 40, 1, 16, 9, 2)[: heap.size]
    for number, arguments in enumerate(LAYERS):
        config = MoEConfig(**arguments, ep_size=heap.size)
        inputs = make_inputs(config, counts, number)
        workspace = DeviceWorkspace(config, heap, max(counts))
        expected = reference(config, inputs, heap.rank)
        for _ in range(2):
            actual = step(config, heap, workspace, inputs)
            for name, value in expected.items():
                assert_bitwise_equal(actual[name], value, f"rank {heap.rank} {name}")
        workspace.close()
    heap.close()


def graph(heap) -> None:
    """Forward and backward captured once on every rank, replayed with new tokens and routes."""
    import cupy

    config = MoEConfig(**LAYERS[0], ep_size=heap.size)
    counts = (32, 21, 16, 40)[: heap.size]
    first = make_inputs(config, counts, 1)
    x, ids, weights, experts, shared = rank_arguments(config, first, heap.rank)
    x, ids, weights = inputs = [cupy.asarray(as_host(a)) for a in (x, ids, weights)]
    experts, shared = (
        type(w)(*(cupy.asarray(as_host(part)) for part in w)) for w in (experts, shared)
    )
    dy = cupy.asarray(as_host(rank_dy(first, heap.rank)))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        workspace = DeviceWorkspace(config, heap, max(counts))

        def run():
            y, context = moe_forward(config, heap, *inputs, experts, shared, workspace=workspace)
            return y, moe_backward(context, dy)

        run()
        heap.check()
        stream.begin_capture()
        y, gradients = run()
        captured = stream.end_capture()
        for seed in (2, 3, 4):
            batch = make_inputs(config, counts, seed)
            batch = batch._replace(experts=first.experts, shared=first.shared)
            new = (*rank_arguments(config, batch, heap.rank)[:3], rank_dy(batch, heap.rank))
            for array, values in zip((*inputs, dy), new, strict=True):
                array.set(as_host(values))
            captured.launch(stream)
            heap.check()
            actual = collect(y, gradients)
            for name, value in reference(config, batch, heap.rank).items():
                assert_bitwise_equal(actual[name], value, f"rank {heap.rank} {name}")
    heap.close()


def lose_a_rank(heap, how: str) -> None:
    """The last rank is missing in the second step; the others' error is printed."""
    config = MoEConfig(**LAYERS[0], ep_size=heap.size)
    inputs = make_inputs(config, (16,) * heap.size)
    workspace = DeviceWorkspace(config, heap, 16)
    step(config, heap, workspace, inputs)
    if heap.rank == heap.size - 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 * heap.timeout_s)
        return
    start = time.monotonic()
    try:
        step(config, heap, workspace, inputs)
        print("no error", flush=True)
    except Exception as error:
        print(f"{time.monotonic() - start:.2f} {type(error).__name__}: {error}", flush=True)
    try:
        moe_forward(config, heap, *rank_arguments(config, inputs, heap.rank), workspace=workspace)
        print("second call went on", flush=True)
    except Exception as error:
        print(f"again {type(error).__name__}", flush=True)
    os._exit(0)


def main() -> None:
    folder, rank, size, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    timeout_s = 60.0 if what in ("bits", "graph") else 2.0
    heap = CudaIpcHeap(FileComm(folder, rank, size), timeout_s=timeout_s)
    if what == "bits":
        bits(heap)
    elif what == "graph":
        graph(heap)
    else:
        lose_a_rank(heap, what)
    print("done", flush=True)


if __name__ == "__main__":
    main()
