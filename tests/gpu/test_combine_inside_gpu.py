"""y made inside the forward megakernel: against the portable path bit for bit, and what ends a
wait for a token that never completes."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

from gpu.test_layer_gpu import Inputs, as_host, make_inputs, rank_arguments
from mok_ref.config import MoEConfig
from mok_ref.gpu import hopper
from mok_ref.gpu import layer as gpu_layer
from mok_ref.gpu.errors import MokTimeoutError
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = dict(hidden_size=80, intermediate_size=144, num_experts=4, top_k=2)
WIDE: dict[str, Any] = dict(hidden_size=2056, intermediate_size=64, num_experts=16, top_k=8)
TIME_LIMIT_S = 0.5
# name: (config arguments, tokens)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "no-token": (SIZES, 0),
    "one-token": (WIDE, 1),
    "tokens-without-routes": (SIZES | dict(top_k=1), 145),
    "ten-slots": (SIZES | dict(num_experts=12, top_k=10), 120),
    "ring-of-one": (SIZES | dict(macrobatch=128, minibatch=128), 300),
    "shared": (WIDE | dict(shared_intermediate_size=264), 333),
    "parts-of-several-steps": (WIDE | dict(intermediate_size=32), 2100),
    "whole-tokens": (SIZES | dict(hidden_size=1032, num_experts=8), 4200),
}


@pytest.fixture(autouse=True)
def always_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr(hopper, "COMBINE_FROM_TOKENS", 0)


@lru_cache(maxsize=2)
def inputs_and_y(name: str) -> tuple[MoEConfig, Inputs, np.ndarray]:
    arguments, count = CASES[name]
    config = MoEConfig(**arguments)
    inputs = make_inputs(config, (count,))
    return config, inputs, run_virtual_cuda_ranks(1, partial(y_of, config, inputs, "portable"))[0]


def y_of(config: MoEConfig, inputs: Inputs, path: str, heap: Any) -> np.ndarray:
    workspace = DeviceWorkspace(config, heap, max(1, sum(inputs.counts)), path=path)
    workspace.poison()
    y, _ = gpu_layer.forward(config, heap, *rank_arguments(config, inputs, 0), workspace, "none")
    heap.check()
    return as_host(y)


@pytest.mark.parametrize("num_ctas", [None, 2, 7])
@pytest.mark.parametrize("cluster_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ctas(
    name: str, cluster_size: int, num_ctas: int | None, monkeypatch
) -> None:
    config, inputs, expected = inputs_and_y(name)
    kernel = partial(hopper.ForwardKernel, num_ctas=num_ctas)
    monkeypatch.setattr(hopper, "ForwardKernel", kernel)

    def work(heap: Any) -> list[np.ndarray]:
        workspace = DeviceWorkspace(config, heap, max(1, sum(inputs.counts)), path="hopper")
        workspace.cluster_size = cluster_size
        arguments, results = rank_arguments(config, inputs, 0), []
        for _ in range(3):
            workspace.poison()
            y, context = gpu_layer.forward(config, heap, *arguments, workspace, "all")
            heap.check()
            assert int(context.params["combines"]) == 1
            results.append(as_host(y))
        return results

    for y in run_virtual_cuda_ranks(1, work, timeout_s=20)[0]:
        assert_bitwise_equal(y, expected, name)


def test_a_captured_forward_follows_new_routes() -> None:
    cupy = pytest.importorskip("cupy")
    config, count = MoEConfig(**WIDE), 333
    first = make_inputs(config, (count,), 1)
    batches = [make_inputs(config, (count,), n)._replace(experts=first.experts) for n in (2, 3)]

    def work(heap: Any) -> list[np.ndarray]:
        workspace = DeviceWorkspace(config, heap, count, path="hopper")
        *routed, experts, shared = rank_arguments(config, first, 0)
        routed = [cupy.asarray(as_host(array)) for array in routed]
        experts = type(experts)(*(cupy.asarray(as_host(part)) for part in experts))
        arguments = (*routed, experts, shared, workspace, "none")
        gpu_layer.forward(config, heap, *arguments)  # everything is loaded and allocated
        heap.check()
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        y, _ = gpu_layer.forward(config, heap, *arguments)
        graph = stream.end_capture()
        results = []
        for batch in batches:
            for array, values in zip(routed, batch[:3], strict=True):
                array.set(as_host(values))
            graph.launch(stream)
            heap.check()
            results.append(as_host(y))
        return results

    results = run_virtual_cuda_ranks(1, work, timeout_s=20)[0]
    for y, batch in zip(results, batches, strict=True):
        expected = run_virtual_cuda_ranks(1, partial(y_of, config, batch, "portable"))[0]
        assert_bitwise_equal(y, expected, "y")


def test_a_token_that_never_completes_ends_at_the_time_limit(monkeypatch) -> None:
    config = MoEConfig(**SIZES)
    inputs = make_inputs(config, (150,))
    assert (inputs.ids < 0).any()

    def lose_empty_slots(launch: Any, workspace: Any, params: Any, stream: Any) -> None:
        launch(workspace, params, stream)
        workspace.topk_ids[...] = 0  # nobody counts the slots without a route any more

    schedule = gpu_layer.schedule
    spoiled = partial(lose_empty_slots, schedule.launch_schedule)
    monkeypatch.setattr(schedule, "launch_schedule", spoiled)
    with pytest.raises(MokTimeoutError, match="a sum waiting for a complete token"):
        run_virtual_cuda_ranks(1, partial(y_of, config, inputs, "hopper"), timeout_s=TIME_LIMIT_S)
