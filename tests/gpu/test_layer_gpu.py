"""The whole layer, heaps, schedule, products, epilogues, against the NumPy layer, bit for bit.

Runs on a GPU (marker gpu) and, with small cases, on the CPU with kernels compiled for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.gpu import layer as gpu_layer
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap import run_ranks
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.layer import moe_backward, moe_forward
from mok_ref.schedule import default_splits
from mok_ref.testing import assert_bitwise_equal, random_bf16, random_routes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from host_cupy import host_cuda_device

from gpu.host_cuda import compiler as host_compiler

PATH = {"host": "portable", "cuda": "auto", "cuda_portable": "portable"}
"""Kernels of the products by the fixture's parameter."""

GPU_PARAMS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda_portable")]


HOST = pytest.param("host", marks=pytest.mark.slow)  # test_layer_host.py has a quick part


@pytest.fixture(autouse=True, params=[HOST, *GPU_PARAMS], scope="module")
def device(request):
    """Where the kernels of this module run."""
    if request.param != "host":
        pytest.importorskip("cupy")
        yield request.param
        return
    if host_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    with host_cuda_device():
        yield "host"


class Inputs(NamedTuple):
    """One batch over all ranks."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    dy: np.ndarray
    experts: ExpertWeights
    shared: ExpertWeights | None
    counts: tuple[int, ...]


def make_inputs(config: MoEConfig, counts: tuple[int, ...], seed: int = 0) -> Inputs:
    rng = np.random.default_rng([seed, sum(counts)])
    hidden, inner, width = (
        config.hidden_size,
        config.intermediate_size,
        config.shared_intermediate_size,
    )
    tokens, experts = sum(counts), config.num_experts
    ids, weights = random_routes(rng, tokens, experts, config.top_k, missing=0.1)
    weights[:: max(1, tokens // 3)] *= -1
    weights[tokens // 2 :][:1] = 0
    shared = None
    if width:
        shared = ExpertWeights(
            random_bf16(rng, (width, hidden), 0.2),
            random_bf16(rng, (width, hidden), 0.2),
            random_bf16(rng, (hidden, width), 0.2),
        )
    return Inputs(
        random_bf16(rng, (tokens, hidden)),
        ids,
        weights,
        random_bf16(rng, (tokens, hidden)),
        ExpertWeights(
            random_bf16(rng, (experts, inner, hidden), 0.2),
            random_bf16(rng, (experts, inner, hidden), 0.2),
            random_bf16(rng, (experts, hidden, inner), 0.2),
        ),
        shared,
        counts,
    )


def rank_arguments(config: MoEConfig, inputs: Inputs, rank: int) -> tuple[Any, ...]:
    first = sum(inputs.counts[:rank])
    mine = slice(first, first + inputs.counts[rank])
    local = ExpertWeights(*(w[config.experts_of(rank)] for w in inputs.experts))
    return inputs.x[mine], inputs.ids[mine], inputs.weights[mine], local, inputs.shared


def rank_dy(inputs: Inputs, rank: int) -> np.ndarray:
    first = sum(inputs.counts[:rank])
    return inputs.dy[first : first + inputs.counts[rank]]


def as_host(array: Any) -> np.ndarray:
    host = array.get() if hasattr(array, "get") else np.asarray(array)
    return host.view(np.uint16) if host.dtype.itemsize == 2 else host


def collect(y: Any, gradients: Any) -> dict[str, np.ndarray]:
    tensors = {"y": y} | ({} if gradients is None else vars(gradients))
    return {name: as_host(v) for name, v in tensors.items() if v is not None}


def reference(config: MoEConfig, inputs: Inputs) -> list[dict[str, np.ndarray]]:
    def work(heap):
        y, context = moe_forward(config, heap, *rank_arguments(config, inputs, heap.rank))
        return collect(y, moe_backward(context, rank_dy(inputs, heap.rank)))

    return run_ranks(len(inputs.counts), work)


def on_device(
    config: MoEConfig, inputs: Inputs, path: str, save: str = "all", repeats: int = 1
) -> list[dict[str, np.ndarray]]:
    """The same on virtual ranks; every buffer is filled with NaN before each step."""

    def work(heap):
        workspace = DeviceWorkspace(config, heap, max(inputs.counts), path=path)
        arguments = rank_arguments(config, inputs, heap.rank)
        for _ in range(repeats):
            heap.barrier()
            workspace.poison()
            heap.barrier()
            y, context = gpu_layer.forward(config, heap, *arguments, workspace, save)
            kept = as_host(y)
            gradients = gpu_layer.backward(context, rank_dy(inputs, heap.rank))
            heap.check(config.top_k)
        return collect(kept, gradients)

    return run_virtual_cuda_ranks(len(inputs.counts), work, timeout_s=60)


def assert_same(actual: list[dict], expected: list[dict]) -> None:
    for rank, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert set(a) == set(b), rank
        for name in sorted(b):
            assert_bitwise_equal(a[name], b[name], f"rank {rank} {name}")


BASE = dict(hidden_size=48, intermediate_size=40, num_experts=6, top_k=2)

# name: (config arguments, tokens per rank)
CASES: dict[str, tuple[dict, tuple[int, ...]]] = {
    "one_rank": (BASE, (40,)),
    "shared_two_ranks": (BASE | dict(shared_intermediate_size=24), (32, 21)),
    "clamp_three_ranks": (BASE | dict(swiglu_limit=0.5), (16, 0, 30)),
    "turns": (BASE | dict(row_order="round_robin", shared_intermediate_size=16), (20, 13)),
    "placement": (BASE | dict(placement=(1, 1, 0, 1, 1, 1)), (16, 9)),
    "odd_sizes": (BASE | dict(hidden_size=33, intermediate_size=31, top_k=3), (17,)),
    "mxfp8": (BASE | dict(dtype="mxfp8", hidden_size=64, shared_intermediate_size=24), (16, 5)),
    "mxfp8_tiles": (BASE | dict(dtype="mxfp8", hidden_size=80, intermediate_size=48), (16, 5)),
    "bf16_gradients": (BASE | dict(grad_dtype="bf16", shared_intermediate_size=8), (16, 7)),
    "idle_experts": (BASE | dict(num_experts=64, top_k=1), (3, 2)),
}


def make_case(name: str) -> tuple[MoEConfig, Inputs]:
    arguments, counts = CASES[name]
    config = MoEConfig(**arguments, ep_size=len(counts))
    return config, make_inputs(config, counts)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_bits(name: str, device: str) -> None:
    config, inputs = make_case(name)
    assert_same(on_device(config, inputs, PATH[device], repeats=2), reference(config, inputs))


@pytest.mark.parametrize("save", ["all", "ring", "none"])
@pytest.mark.parametrize("macrobatch, minibatch", [(128, 128), (384, 128), (None, None)])
def test_batches_and_kept_rows_do_not_change_bits(
    save: str, macrobatch, minibatch, device: str
) -> None:
    batches = dict(macrobatch=macrobatch, minibatch=minibatch)
    config = MoEConfig(**BASE | batches | dict(shared_intermediate_size=16), ep_size=1)
    inputs = make_inputs(config, (200,))
    expected = reference(MoEConfig(**BASE, shared_intermediate_size=16), inputs)
    assert_same(on_device(config, inputs, PATH[device], save), expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_ranks_do_not_change_bits(num_ranks: int, device: str) -> None:
    arguments = BASE | dict(num_experts=24, shared_intermediate_size=16)
    inputs = make_inputs(MoEConfig(**arguments), (150,))
    whole = reference(MoEConfig(**arguments), inputs)[0]
    counts = tuple(int(n) for n in default_splits(150, num_ranks))
    config = MoEConfig(**arguments, ep_size=num_ranks)
    parts = on_device(config, inputs._replace(counts=counts), PATH[device])
    for name in whole:
        joined = parts[0][name]
        if not name.startswith("shared"):
            joined = np.concatenate([part[name] for part in parts])
        assert_bitwise_equal(joined, whole[name], name)


def test_main_grad_continues_the_chains() -> None:
    config, inputs = make_case("shared_two_ranks")

    def twice(heap, forward, backward, wrap):
        y, context = forward(config, heap, *rank_arguments(config, inputs, heap.rank))
        first = backward(context, rank_dy(inputs, heap.rank))
        kept = wrap(first)
        y, context = forward(config, heap, *rank_arguments(config, inputs, heap.rank))
        return collect(y, backward(context, rank_dy(inputs, heap.rank), kept))

    size = len(inputs.counts)
    expected = run_ranks(size, lambda heap: twice(heap, moe_forward, moe_backward, lambda g: g))
    # On the device every call makes its own workspace here, so the first gradients survive.
    actual = run_virtual_cuda_ranks(
        size, lambda heap: twice(heap, moe_forward, moe_backward, lambda g: g), timeout_s=60
    )
    assert_same(actual, expected)


def test_varying_token_counts_reuse_one_workspace() -> None:
    config = MoEConfig(**BASE, ep_size=2)
    batches = [make_inputs(config, counts) for counts in ((1, 0), (50, 3), (2, 64), (0, 0), (7, 7))]

    def work(heap):
        workspace, results = DeviceWorkspace(config, heap, 64), []
        for inputs in batches:
            arguments = rank_arguments(config, inputs, heap.rank)
            y, context = moe_forward(config, heap, *arguments, workspace=workspace)
            kept = as_host(y)
            gradients = moe_backward(context, rank_dy(inputs, heap.rank))
            results.append(collect(kept, gradients))
        heap.check(config.top_k)
        return results

    results = run_virtual_cuda_ranks(2, work, timeout_s=60)
    for index, inputs in enumerate(batches):
        assert_same([results[0][index], results[1][index]], reference(config, inputs))


def test_a_context_works_once_and_only_for_the_last_forward() -> None:
    config, inputs = make_case("one_rank")

    def work(heap):
        arguments = rank_arguments(config, inputs, 0)
        workspace = DeviceWorkspace(config, heap, 40)
        _, first = moe_forward(config, heap, *arguments, workspace=workspace)
        _, second = moe_forward(config, heap, *arguments, workspace=workspace)
        with pytest.raises(RuntimeError, match="stale"):
            moe_backward(first, inputs.dy)
        moe_backward(second, inputs.dy)
        with pytest.raises(RuntimeError, match="used"):
            moe_backward(second, inputs.dy)

    run_virtual_cuda_ranks(1, work)


def test_negative_control_swapped_experts_change_bits(device: str) -> None:
    config, inputs = make_case("one_rank")
    expected = reference(config, inputs)
    swapped = ExpertWeights(*(w[[1, 0, 2, 3, 4, 5]] for w in inputs.experts))
    with pytest.raises(AssertionError):
        assert_same(on_device(config, inputs._replace(experts=swapped), PATH[device]), expected)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=np.zeros((40, 47), np.uint16)), "x must be"),
        (dict(ids=np.zeros((40, 2), np.int64)), "topk_ids must be int32"),
        (dict(weights=np.zeros((39, 2), np.float32)), "topk_weights must be"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    config, inputs = make_case("one_rank")

    def work(heap):
        with pytest.raises(ValueError, match=message):
            bad = inputs._replace(**change)
            moe_forward(config, heap, *rank_arguments(config, bad._replace(counts=(40,)), 0))

    run_virtual_cuda_ranks(1, work)
