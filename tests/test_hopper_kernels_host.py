"""The Hopper backward kernels on the CPU, under random orders of everything that is asynchronous.

Forward runs the portable kernels; backward the Hopper kernels as tests/gpu/host_cuda/hopper.py
imitates the device. Every gradient is compared with the NumPy layer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gpu import test_layer_gpu as layers
from host_hopper import hopper_on_host, kernels

from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.gpu import hopper_backward, hopper_mxfp8, hopper_mxfp8_backward
from mok_ref.gpu import layer as gpu_layer
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks

pytestmark = pytest.mark.slow
MODULES = (hopper_backward, hopper_mxfp8_backward)
SOURCES = (hopper_backward.SOURCE, hopper_backward.CLUSTER_SOURCE, hopper_mxfp8_backward.SOURCE)

TAILS: dict[str, Any] = dict(hidden_size=80, intermediate_size=144, num_experts=4, top_k=2)
# name: (config arguments, tokens per rank, save)
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "mxfp8": (TAILS | dict(dtype="mxfp8"), (150,), "all"),
    "mxfp8-again": (TAILS | dict(dtype="mxfp8", macrobatch=128), (150,), "none"),
    "mxfp8-shared": (
        TAILS | dict(dtype="mxfp8", swiglu_limit=0.5, shared_intermediate_size=24),
        (16, 5),
        "all",
    ),
    "bf16": (TAILS | dict(grad_dtype="bf16"), (150,), "all"),
    "bf16-steps": (TAILS | dict(num_experts=3), (700,), "all"),
    "bf16-shared": (TAILS | dict(shared_intermediate_size=24, macrobatch=128), (40,), "none"),
    "bf16-ranks": (
        TAILS | dict(shared_intermediate_size=24, macrobatch=128),
        (20, 9, 0, 12),
        "all",
    ),
}


RUNS = [(name, hopper_backward.WGRAD) for name in CASES]
RUNS += [(name, hopper_backward.WGRAD_PAIRS) for name in CASES if "bf16" in name]


@pytest.fixture
def device(wgrad: str) -> Iterator[None]:
    with hopper_on_host(
        MODULES,
        (hopper_backward, "_num_multiprocessors", lambda: 2),
        (hopper_backward, "_wgrad_name", lambda *_: wgrad),
    ):
        yield


class AfterPortableForward:
    """A backward module behind a forward of portable kernels."""

    def __init__(self, module: Any) -> None:
        self.__name__ = module.__name__
        self.module = module

    def __getattr__(self, name: str) -> Any:  # the bf16 module alone makes dx as well
        if name == "last_launch_has_rows":
            return getattr(self.module, name)
        if not name.startswith("launch_backward"):
            raise AttributeError(name)
        launch = getattr(self.module, name)
        return lambda workspace, params, back, stream: launch(
            workspace, self._as_kept(workspace, params, stream), back, stream
        )

    def _as_kept(self, workspace: Any, params: Any, stream: Any) -> Any:
        """The kept rows are those of whole macrobatches; MXFP8 weights and x are not where the
        Hopper forward leaves them."""
        block = params.copy()
        ring, rows = workspace.sizes.macro_blocks * ROW_TILE, workspace.sizes.max_row_blocks
        kept = int(params["max_saved_rows"])
        block["max_saved_rows"] = kept if kept >= rows * ROW_TILE else kept // ring * ring
        if workspace.config.dtype == "mxfp8":
            weights = [int(params[f"w_{part}"]) for part in gpu_layer.WEIGHT_PARTS]
            for launch in hopper_mxfp8.quantise_weights(workspace, weights):
                launch(stream)
        return block


def placed_in_dx(workspace: DeviceWorkspace, rows: Any) -> Any:
    import cupy

    place = workspace.dx[: len(rows)]
    place[:] = cupy.asarray(np.ascontiguousarray(rows).view(np.uint16))
    return place


def gradients(config: MoEConfig, inputs: Any, save: str, seed: int, in_dx: str = "") -> list[dict]:
    """y and every gradient of each rank; `in_dx`: "x" or "dy" of rank 0 lies in its own dx."""
    module = hopper_mxfp8_backward if config.dtype == "mxfp8" else hopper_backward
    dgrad_params = hopper_backward._State._dgrad_params

    def pull_x(state: Any, layer: Any, back: Any, macro: int) -> np.ndarray:
        params = dgrad_params(state, layer, back, macro)
        if config.dtype == "mxfp8":
            params["x_in_ring"] = 0
        return params

    def work(heap: Any) -> dict:
        workspace = DeviceWorkspace(config, heap, max(inputs.counts), path="portable")
        workspace.poison()
        workspace.extra(("path", 1), lambda: AfterPortableForward(module))
        x, *others = layers.rank_arguments(config, inputs, heap.rank)
        dy = layers.rank_dy(inputs, heap.rank)
        own_dx = in_dx if heap.rank == 0 else ""
        x = placed_in_dx(workspace, x) if own_dx == "x" else x
        y, context = gpu_layer.forward(config, heap, x, *others, workspace, save)
        kept = layers.as_host(y)
        dy = placed_in_dx(workspace, dy) if own_dx == "dy" else dy
        return layers.collect(kept, gpu_layer.backward(context, dy))

    for source in SOURCES:
        kernels(source).seed(seed)
    with (
        mock.patch.object(hopper_backward, "_mini_blocks", lambda *_: 4),
        mock.patch.object(hopper_backward._State, "_dgrad_params", pull_x),
    ):
        return run_virtual_cuda_ranks(len(inputs.counts), work, timeout_s=300)


@pytest.mark.parametrize(("name", "wgrad"), RUNS)
def test_gradients_in_any_order(name: str, wgrad: str, device: None) -> None:
    arguments, counts, save = CASES[name]
    config = MoEConfig(**arguments, ep_size=len(counts))
    inputs = layers.make_inputs(config, counts)
    layers.assert_same(
        gradients(config, inputs, save, seed=len(name)), layers.reference(config, inputs)
    )


@pytest.mark.parametrize("counts", [(40,), (24, 16)])
@pytest.mark.parametrize("in_dx", ["x", "dy"])
@pytest.mark.parametrize("wgrad", [hopper_backward.WGRAD])
def test_a_step_may_start_from_the_last_ones_dx(
    counts: tuple[int, ...], in_dx: str, wgrad: str, device: None
) -> None:
    """Rank 0 makes its dx late then, and other ranks early: they still meet in the same order."""
    config = MoEConfig(**TAILS, shared_intermediate_size=24, ep_size=len(counts))
    inputs = layers.make_inputs(config, counts)
    found = gradients(config, inputs, "all", seed=1, in_dx=in_dx)
    layers.assert_same(found, layers.reference(config, inputs))
