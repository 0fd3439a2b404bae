"""The bf16 layer by Hopper kernels on the CPU, under random orders of everything that is
asynchronous, against the NumPy layer, bit for bit (tests/gpu/host_cuda/hopper.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from gpu import test_layer_gpu as layers
from host_hopper import hopper_on_host, kernels

from mok_ref.config import MoEConfig
from mok_ref.gpu import hopper, hopper_backward
from mok_ref.gpu import layer as gpu_layer
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.testing import assert_bitwise_equal

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = dict(hidden_size=80, intermediate_size=144, num_experts=4, top_k=2)
LONG: dict[str, Any] = dict(hidden_size=528, intermediate_size=528, num_experts=3, top_k=2)
# name: (config arguments, tokens per rank)
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "tails": (SIZES, (150,)),
    "one-block": (dict(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), (37,)),
    "many-k-blocks": (LONG, (140,)),
    "ring-of-one": (SIZES | dict(macrobatch=128, minibatch=128), (300,)),
    "ring-of-two": (LONG | dict(macrobatch=256, minibatch=128), (200,)),
    "shared-and-clamp": (SIZES | dict(shared_intermediate_size=24, swiglu_limit=0.5), (70,)),
    "one-slot": (SIZES | dict(top_k=1), (45,)),  # and tokens without any
    "ten-slots": (SIZES | dict(num_experts=12, top_k=10), (20,)),
    "one-token": (LONG, (1,)),
    "three-ranks": (SIZES | dict(num_experts=6), (16, 0, 29)),
}


@pytest.fixture
def device() -> Iterator[None]:
    with hopper_on_host(
        (hopper, hopper_backward),
        (hopper, "ForwardKernel", partial(hopper.ForwardKernel, num_ctas=1)),
        (hopper, "COMBINE_FROM_TOKENS", 0),
        (hopper_backward, "_num_multiprocessors", lambda: 1),
        (hopper_backward, "_wgrad_name", lambda *blocks: "moe_wgrad_hopper"),
        (gpu_layer, "_hopper_refusal", lambda config: ""),
    ):
        yield


def outputs(config: MoEConfig, inputs: Any, cluster_size: int) -> list[np.ndarray]:
    """y of every rank."""

    def work(heap: Any) -> np.ndarray:
        workspace = DeviceWorkspace(config, heap, max(inputs.counts))
        assert gpu_layer.forward_path(workspace) is hopper
        workspace.cluster_size = cluster_size
        workspace.poison()
        arguments = layers.rank_arguments(config, inputs, heap.rank)
        y, context = gpu_layer.forward(config, heap, *arguments, workspace, "all")
        assert int(context.params["combines"]) == (config.ep_size == 1)
        return layers.as_host(y)

    return run_virtual_cuda_ranks(len(inputs.counts), work, timeout_s=300)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("cluster_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_forward_in_any_order(name: str, cluster_size: int, seed: int, device: None) -> None:
    arguments, counts = CASES[name]
    config = MoEConfig(**arguments, ep_size=len(counts))
    inputs = layers.make_inputs(config, counts)
    kernels(hopper.SOURCE, hopper.cluster_macros(cluster_size)).seed(100 * seed + len(name))
    expected = layers.reference(config, inputs)
    for actual, rank in zip(outputs(config, inputs, cluster_size), expected, strict=True):
        assert_bitwise_equal(actual, rank["y"], name)


@pytest.mark.parametrize("save", ["all", "none"])
def test_backward_finds_the_rows_of_x(save: str, device: None) -> None:
    config = MoEConfig(**SIZES)
    inputs = layers.make_inputs(config, (150,))
    actual = layers.on_device(config, inputs, "auto", save)
    layers.assert_same(actual, layers.reference(config, inputs))
