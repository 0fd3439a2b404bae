"""Weight gradients of the Hopper path where chains are cut, skipped or continued, bit for bit.

The whole layer's bits are in test_layer_gpu.py; these are the cases in which a launch treats only a
part of a chain: experts that straddle macrobatches, gradients that accumulate, experts with few or
no rows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mok_ref import ExpertWeights, Gradients, MoEConfig, moe_backward, moe_forward, run_ranks
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.numerics import BFLOAT16
from mok_ref.testing import assert_bitwise_equal, random_bf16

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cases import ids_with_rows

pytestmark = pytest.mark.gpu

NAMES = ("dw_gate", "dw_up", "dw_down")

# rows per expert: straddling macrobatches of 128 and 256, few, none
ROWS: dict[str, list[int]] = {
    "long": [300, 0, 129, 5],
    "few": [0, 5, 0, 3],
    "many-idle": [0] * 40 + [7] + [0] * 20 + [1, 2],
    "edges": [7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129],
}


def make_batch(rows: list[int], hidden: int, inner: int) -> tuple[Any, ...]:
    """(x, ids, weights, dy, experts) of one rank whose expert e gets rows[e] rows."""
    rng = np.random.default_rng([7, sum(rows), hidden])
    ids = ids_with_rows(rng, rows, top_k=1)
    tokens, experts = len(ids), len(rows)
    weights = rng.standard_normal((tokens, 1)).astype(np.float32)
    x, dy = (random_bf16(rng, (tokens, hidden)) for _ in range(2))
    gate, up = (random_bf16(rng, (experts, inner, hidden), hidden**-0.5) for _ in range(2))
    down = random_bf16(rng, (experts, hidden, inner), inner**-0.5)
    return x, ids, weights, dy, ExpertWeights(gate, up, down)


def main_grad(experts: ExpertWeights, dtype: Any) -> Gradients:
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(w.shape).astype(np.float32).astype(dtype) for w in experts]
    empty = np.zeros(0, np.float32)
    return Gradients(empty, empty, *values)


def as_bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def gradients(config: MoEConfig, batch: tuple[Any, ...], device: bool, accumulate: bool) -> dict:
    x, ids, weights, dy, experts = batch

    def work(heap: Any) -> dict:
        start = None
        if accumulate:
            start = main_grad(experts, BFLOAT16 if config.grad_dtype == "bf16" else np.float32)
        workspace = None
        if device:
            import cupy

            workspace = DeviceWorkspace(config, heap, len(x), path="hopper")
            workspace.poison()
            for name in NAMES if accumulate else ():
                setattr(start, name, cupy.asarray(as_bits(getattr(start, name))))
        _, context = moe_forward(config, heap, x, ids, weights, experts, workspace=workspace)
        result = moe_backward(context, dy, start)
        if device:
            heap.check(config.top_k)
        arrays = {name: getattr(result, name) for name in (*NAMES, "dx", "d_topk_weights")}
        host = {k: v.get() if hasattr(v, "get") else np.asarray(v) for k, v in arrays.items()}
        return {name: as_bits(value) for name, value in host.items()}

    return (run_virtual_cuda_ranks(1, work, 20.0) if device else run_ranks(1, work))[0]


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "accumulate"])
@pytest.mark.parametrize("grad_dtype", ["float32", "bf16"])
@pytest.mark.parametrize("macrobatch", [128, 256, None])
@pytest.mark.parametrize("rows", ROWS)
def test_weight_gradients(
    rows: str, macrobatch: int | None, grad_dtype: str, accumulate: bool
) -> None:
    hidden, inner = 72, 136  # neither is a multiple of 64
    sizes: dict[str, Any] = dict(
        hidden_size=hidden, intermediate_size=inner, num_experts=len(ROWS[rows]), top_k=1
    )
    batch = make_batch(ROWS[rows], hidden, inner)
    expected = gradients(MoEConfig(**sizes, grad_dtype=grad_dtype), batch, False, accumulate)
    config = MoEConfig(**sizes, grad_dtype=grad_dtype, macrobatch=macrobatch)
    actual = gradients(config, batch, True, accumulate)
    for name, value in expected.items():
        assert_bitwise_equal(actual[name], value, name)
