"""The layer under stress on the device: repeats, delays, other kernels, graphs. One digest each."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from gpu.test_layer_gpu import (
    BASE,
    as_host,
    assert_same,
    collect,
    make_inputs,
    rank_arguments,
    rank_dy,
    reference,
)
from mok_ref.config import MoEConfig
from mok_ref.gpu import layer
from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.runner import RandomCase, Settings, make_plan, run_virtual
from mok_ref.testing import digest

pytestmark = pytest.mark.gpu
PATHS = ("auto", "portable")
SIZES = BASE | dict(intermediate_size=48, num_experts=8, shared_intermediate_size=32)
"""Multiples of 16, no multiples of a tile: both dtypes run on the Hopper kernels."""


def step(config, heap, workspace, arguments, dy, save="all"):
    y, context = layer.forward(config, heap, *arguments, workspace, save)
    return y, layer.backward(context, dy)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_repeats_with_delays_and_rings_give_one_digest(
    num_ranks: int, dtype: str, path: str
) -> None:
    """Every ring size and save mode, 20 times (portable: 2), ranks delayed at random."""
    cupy = pytest.importorskip("cupy")
    counts = (150, 9, 64, 77)[:num_ranks]
    whole = MoEConfig(**SIZES, dtype=dtype, ep_size=num_ranks)
    inputs = make_inputs(whole, counts)
    expected = [digest(t) for t in reference(whole, inputs)]
    rings = [(128, 128), (384, 128), (None, None)]
    repeats = 20 if path == "auto" else 2

    def work(heap):
        rng = np.random.default_rng([heap.rank, num_ranks])
        delay = load_kernel("support.cu", "delay")
        arguments = [cupy.asarray(as_host(a)) for a in rank_arguments(whole, inputs, heap.rank)[:3]]
        _, _, _, weights, shared = rank_arguments(whole, inputs, heap.rank)
        weights, shared = (
            type(w)(*(cupy.asarray(as_host(part)) for part in w)) for w in (weights, shared)
        )
        dy = cupy.asarray(as_host(rank_dy(inputs, heap.rank)))
        digests = []
        for macrobatch, minibatch in rings:
            batches = dict(macrobatch=macrobatch, minibatch=minibatch)
            config = replace(whole, **batches)
            workspace = DeviceWorkspace(config, heap, max(counts), path=path)
            for save in ("all", "ring", "none"):
                for _ in range(repeats):
                    if rng.random() < 0.5:
                        delay((1,), (1,), (np.uint64(rng.integers(0, 1_000_000)),))
                    y, gradients = step(
                        config, heap, workspace, (*arguments, weights, shared), dy, save
                    )
                    heap.check()
                    digests.append(digest(collect(y, gradients)))
        return digests

    for rank, digests in enumerate(run_virtual_cuda_ranks(num_ranks, work, timeout_s=60)):
        assert len(digests) == 9 * repeats
        assert set(digests) == {expected[rank]}


@pytest.mark.parametrize("path", PATHS)
def test_a_foreign_kernel_on_some_multiprocessors(path: str) -> None:
    """A kernel holds multiprocessors from before the launch until after the layer's end."""
    cupy = pytest.importorskip("cupy")
    config = MoEConfig(**SIZES)
    inputs = make_inputs(config, (300,))
    expected = reference(config, inputs)

    def work(heap):
        workspace = DeviceWorkspace(config, heap, 300, path=path)
        arguments, dy = rank_arguments(config, inputs, 0), rank_dy(inputs, 0)
        step(config, heap, workspace, arguments, dy)
        heap.check()
        hold = load_kernel("support.cu", "hold_sm", (), 200 * 1024)
        side = cupy.cuda.Stream(non_blocking=True)
        release = cupy.zeros(1, cupy.uint32)
        release[...] = 1  # loads CuPy's own kernel now: loading waits for whatever is running
        release[...] = 0
        cupy.cuda.get_current_stream().synchronize()
        with side:  # 200 KiB of shared memory: nothing else fits beside it
            arguments_ = (release, np.uint64(20_000_000_000))
            hold((20,), (1024,), arguments_, shared_mem=200 * 1024)
        y, gradients = step(config, heap, workspace, arguments, dy)
        heap.check()
        result = collect(y, gradients)
        assert not side.done
        release[...] = 1
        cupy.cuda.get_current_stream().synchronize()
        side.synchronize()
        return result

    assert_same(run_virtual_cuda_ranks(1, work, timeout_s=60), expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
def test_a_captured_step_follows_new_inputs(dtype: str, path: str) -> None:
    """Forward and backward in one CUDA graph; replayed with other tokens and routes in place."""
    cupy = pytest.importorskip("cupy")
    config, count = MoEConfig(**SIZES, dtype=dtype), 90
    first = make_inputs(config, (count,), 1)
    batches = [
        make_inputs(config, (count,), seed)._replace(experts=first.experts, shared=first.shared)
        for seed in (2, 3, 4)
    ]

    def work(heap):
        workspace = DeviceWorkspace(config, heap, count, path=path)
        x, ids, weights, experts, shared = rank_arguments(config, first, 0)
        x, ids, weights = (cupy.asarray(as_host(a)) for a in (x, ids, weights))
        experts, shared = (
            type(w)(*(cupy.asarray(as_host(part)) for part in w)) for w in (experts, shared)
        )
        dy = cupy.asarray(as_host(first.dy))
        arguments = (x, ids, weights, experts, shared)
        step(config, heap, workspace, arguments, dy)  # everything is loaded and allocated
        heap.check()
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        y, gradients = step(config, heap, workspace, arguments, dy)
        graph = stream.end_capture()
        results = []
        for batch in batches:
            for array, values in zip((x, ids, weights, dy), batch[:4], strict=True):
                array.set(as_host(values))
            graph.launch(stream)
            heap.check()
            results.append(collect(y, gradients))
        return results

    results = run_virtual_cuda_ranks(1, work, timeout_s=60)[0]
    for result, batch in zip(results, batches, strict=True):
        assert_same([result], reference(config, batch))


def test_bad_inputs_are_reported_by_the_next_check_and_count_as_no_route() -> None:
    config = MoEConfig(**BASE)
    inputs = make_inputs(config, (40,))
    ids, weights = inputs.ids.copy(), inputs.weights.copy()
    ids[11, 1], weights[12, 0] = 6, np.inf
    good_ids, good_weights = inputs.ids.copy(), inputs.weights.copy()
    good_ids[11, 1], good_ids[12, 0], good_weights[12, 0] = -1, -1, 0
    expected = reference(config, inputs._replace(ids=good_ids, weights=good_weights))

    def work(heap):
        workspace = DeviceWorkspace(config, heap, 40)
        bad = inputs._replace(ids=ids, weights=weights)
        y, gradients = step(
            config, heap, workspace, rank_arguments(config, bad, 0), rank_dy(inputs, 0)
        )
        with pytest.raises(ValueError, match="got 6 at rank 0, token 11, slot 1"):
            heap.check()
        return collect(y, gradients)

    assert_same(run_virtual_cuda_ranks(1, work), expected)


@pytest.mark.parametrize("path", PATHS)
def test_idle_experts_ranks_and_poison(path: str) -> None:
    """E256 T4 K2 on 4 ranks, one of them without tokens: dW of idle experts is exactly +0."""
    config = MoEConfig(**BASE | dict(num_experts=256), ep_size=4)
    inputs = make_inputs(config, (2, 0, 1, 1))
    expected = reference(config, inputs)

    def work(heap):
        workspace = DeviceWorkspace(config, heap, 2, path=path)
        for _ in range(2):
            heap.barrier()
            workspace.poison()
            heap.barrier()
            y, gradients = step(
                config, heap, workspace, rank_arguments(config, inputs, heap.rank),
                rank_dy(inputs, heap.rank),
            )  # fmt: skip
            heap.check()
        return collect(y, gradients)

    assert_same(run_virtual_cuda_ranks(4, work, timeout_s=60), expected)


@pytest.mark.parametrize("value, shown", [(np.nan, "nan"), (np.inf, "inf")])
def test_bad_logits_are_named_by_the_call_that_waits(value: float, shown: str) -> None:
    """A router's product with NaN or infinite weights; -Inf alone only closes an expert."""
    pytest.importorskip("cupy")
    case = RandomCase(40, 32, 16, num_experts=8, top_k=2, router=True, seed=3).make()
    assert case.w_router is not None
    w_router = case.w_router.copy()
    w_router[5, 3] = np.asarray(value, ml_dtypes.bfloat16).view(np.uint16)
    x = case.x.copy()
    x[:, 3] = 0xBF80  # -1: a logit of -Inf
    x[11, 3] = 0xBF80 if shown == "nan" else 0x3F80
    first = 0 if shown == "nan" else 11
    plan = make_plan(replace(case, w_router=w_router, x=x), Settings(device="cuda", timeout_s=60))
    message = f"logits must be finite or -Inf, got {shown} at rank 0, token {first}, expert 5"
    with pytest.raises(ValueError, match=message):
        run_virtual(plan)
