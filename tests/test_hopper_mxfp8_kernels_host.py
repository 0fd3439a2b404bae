"""The whole MXFP8 layer by Hopper kernels on the CPU, under random orders of everything that is
asynchronous, against the NumPy layer, bit for bit (tests/gpu/host_cuda/hopper.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from gpu import test_layer_gpu as layers
from gpu import test_mxfp8_gpu as edges
from gpu.test_hopper_mxfp8_backward_gpu import special_blocks
from host_hopper import hopper_on_host, kernels

from mok_ref.config import MoEConfig
from mok_ref.gpu import hopper, hopper_backward, hopper_mxfp8, hopper_mxfp8_backward
from mok_ref.gpu import layer as gpu_layer
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.testing import assert_bitwise_equal

pytestmark = pytest.mark.slow
MODULES = (hopper, hopper_backward, hopper_mxfp8, hopper_mxfp8_backward)
SIZES: dict[str, Any] = dict(
    hidden_size=80, intermediate_size=144, num_experts=4, top_k=2, dtype="mxfp8"
)


@pytest.fixture
def device() -> Iterator[None]:
    with hopper_on_host(
        MODULES,
        (hopper, "ForwardKernel", partial(hopper.ForwardKernel, num_ctas=1)),
        (hopper_mxfp8, "num_ctas", lambda workspace: 1),
        (hopper_backward, "_num_multiprocessors", lambda: 2),
        (hopper_backward, "_wgrad_name", lambda *blocks: "moe_wgrad_hopper"),
        (gpu_layer, "_hopper_refusal", lambda config: ""),
    ):
        yield


def device_y(config: MoEConfig, inputs: Any) -> np.ndarray:
    """y of all tokens by the forward kernel."""

    def work(heap: Any) -> np.ndarray:
        workspace = DeviceWorkspace(config, heap, max(inputs.counts))
        assert gpu_layer.forward_path(workspace) is hopper_mxfp8
        workspace.poison()
        arguments = layers.rank_arguments(config, inputs, heap.rank)
        y, _ = gpu_layer.forward(config, heap, *arguments, workspace, "all")
        return layers.as_host(y)

    return np.concatenate(run_virtual_cuda_ranks(len(inputs.counts), work, timeout_s=300))


# name: (config arguments, tokens per rank, kind of values)
FORWARD: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "tails": ({}, (150,), "plain"),
    "ring-of-one": (dict(macrobatch=128, minibatch=128), (150,), "block exponents"),
    "many-k-blocks": (dict(hidden_size=528, intermediate_size=48), (70,), "zero blocks"),
    "clamp-two-ranks": (dict(swiglu_limit=0.5), (16, 5), "plain"),
    "scales-above-2^7": ({}, (40,), "huge tokens"),
    "NaN-and-Inf": (dict(scale_rule="ocp"), (40,), "NaN and Inf"),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", FORWARD)
def test_forward_in_any_order(name: str, seed: int, device: None) -> None:
    arguments, counts, kind = FORWARD[name]
    config = MoEConfig(**SIZES | arguments, ep_size=len(counts))
    inputs = edges.edge_inputs(config, kind, sum(counts))._replace(counts=counts)
    kernels(hopper_mxfp8.SOURCE).seed(seed)
    with np.errstate(all="ignore"):
        expected = edges.canonical(edges.reference_y(config, inputs))
    assert_bitwise_equal(edges.canonical(device_y(config, inputs)), expected, name)


def test_a_forward_with_other_weights_lets_go_of_held_ones(device: None) -> None:
    config = MoEConfig(**SIZES)
    edges.check_a_forward_between_held_ones(config, edges.edge_inputs(config, "plain", 20))


@pytest.mark.parametrize("save", ["all", "none"])
def test_forward_and_backward_with_the_shared_expert(save: str, device: None) -> None:
    config = MoEConfig(**SIZES, shared_intermediate_size=24, ep_size=2)
    inputs = layers.make_inputs(config, (16, 5))
    actual = layers.on_device(config, inputs, "auto", save)
    layers.assert_same(actual, layers.reference(config, inputs))


@pytest.mark.parametrize("rule", ["fit", "ocp"])
def test_backward_of_scales_of_any_size(rule: str, device: None) -> None:
    """Blocks of zeros, NaN, Inf, and scales that need a second multiplication."""
    config = MoEConfig(**SIZES, scale_rule=rule)
    inputs = special_blocks(layers.make_inputs(config, (40,)))
    with np.errstate(all="ignore"):
        expected = layers.reference(config, inputs)
    layers.assert_same(layers.on_device(config, inputs, "auto", "all"), expected)
