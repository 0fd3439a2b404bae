"""Backward of the Hopper path with MXFP8 operands: every gradient against NumPy, bit for bit.

Widths are multiples of 16 around the edges of blocks of 32 and boxes of 64; rows per expert are
those where a chain is cut, skipped or continued.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mok_ref import MoEConfig, moe_backward, moe_forward, run_ranks
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.numerics import BFLOAT16
from mok_ref.testing import assert_bitwise_equal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cases import ids_with_rows

from gpu.test_hopper_backward_gpu import NAMES, ROWS, as_bits, main_grad
from gpu.test_layer_gpu import (
    Inputs,
    assert_same,
    make_inputs,
    on_device,
    rank_arguments,
    reference,
)

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=48, num_experts=6, top_k=3, dtype="mxfp8"
)
TAILS = BASE | dict(hidden_size=80, intermediate_size=144)

# name: (config arguments, tokens per rank)
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "one-block": (BASE | dict(hidden_size=16, intermediate_size=16), (50,)),
    "tails": (TAILS, (70,)),
    "several-tiles": (BASE | dict(hidden_size=272, intermediate_size=400, num_experts=3), (200,)),
    "clamp": (TAILS | dict(swiglu_limit=0.5), (70,)),
    "ocp-shared": (TAILS | dict(scale_rule="ocp", shared_intermediate_size=40), (40, 9)),
    "shared-clamp": (
        BASE | dict(swiglu_limit=0.3, shared_intermediate_size=72, grad_dtype="bf16"),
        (48, 16),
    ),
    "four-ranks": (TAILS | dict(num_experts=8, row_order="round_robin"), (16, 1, 0, 35)),
    "eight-ranks": (TAILS | dict(num_experts=8, shared_intermediate_size=24), (16,) * 7 + (5,)),
}


def compared(config: MoEConfig, inputs: Inputs, save: str = "all") -> None:
    actual = on_device(config, inputs, "hopper", save, repeats=2)
    assert_same(actual, reference(config, inputs))


@pytest.mark.parametrize("name", CASES)
def test_every_gradient(name: str) -> None:
    arguments, counts = CASES[name]
    config = MoEConfig(**arguments, ep_size=len(counts))
    compared(config, make_inputs(config, counts))


@pytest.mark.parametrize("save", ["all", "ring", "none"])
@pytest.mark.parametrize("macrobatch", [128, 384, None])
def test_rings_and_kept_rows(save: str, macrobatch: int | None) -> None:
    config = MoEConfig(**TAILS, macrobatch=macrobatch)
    compared(config, make_inputs(config, (300,)), save)


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "accumulate"])
@pytest.mark.parametrize("grad_dtype", ["float32", "bf16"])
@pytest.mark.parametrize("macrobatch", [128, 256, None])
@pytest.mark.parametrize("rows", ROWS)
def test_weight_gradients(
    rows: str, macrobatch: int | None, grad_dtype: str, accumulate: bool
) -> None:
    """Chains that straddle macrobatches, short ones, none, and main_grad."""
    arguments = TAILS | dict(num_experts=len(ROWS[rows]), top_k=1, grad_dtype=grad_dtype)
    config = MoEConfig(**arguments, macrobatch=macrobatch)
    ids = ids_with_rows(np.random.default_rng(5), ROWS[rows], top_k=1)
    inputs = make_inputs(config, (len(ids),))._replace(ids=ids)

    def work(heap: Any) -> dict[str, np.ndarray]:
        device, start = heap.device == "cuda", None
        if accumulate:
            start = main_grad(inputs.experts, BFLOAT16 if grad_dtype == "bf16" else np.float32)
        workspace = None
        if device:
            import cupy

            workspace = DeviceWorkspace(config, heap, len(ids), path="hopper")
            workspace.poison()
            for name in NAMES if accumulate else ():
                setattr(start, name, cupy.asarray(as_bits(getattr(start, name))))
        arguments = rank_arguments(config, inputs, 0)
        _, context = moe_forward(config, heap, *arguments, workspace=workspace)
        result = moe_backward(context, inputs.dy, start)
        arrays = {name: getattr(result, name) for name in (*NAMES, "dx", "d_topk_weights")}
        host = {k: v.get() if hasattr(v, "get") else np.asarray(v) for k, v in arrays.items()}
        return {name: as_bits(value) for name, value in host.items()}

    actual = run_virtual_cuda_ranks(1, work, 20.0)[0]
    for name, value in run_ranks(1, work)[0].items():
        assert_bitwise_equal(actual[name], value, name)


def special_blocks(inputs: Inputs) -> Inputs:
    """Zero tokens and blocks, NaN, Inf, extreme exponents, magnitudes next to 448 * 2^n."""
    x, dy = (array.astype(np.float32) for array in (inputs.x, inputs.dy))
    x[3], x[4, :32], dy[5] = 0, 0, 0
    x[6, 7], dy[7, 40] = np.nan, np.inf
    x[8], dy[9], dy[10] = x[8] * 2.0**100, dy[9] * 2.0**-120, dy[10] * 2.0**110
    for row, exponent in enumerate((0, 1, -3), 12):
        for value in (448.0, 450.0, 446.0):  # and the next bf16 above and below
            for operand, column in ((x, 0), (dy, 33)):
                operand[row, column // 32 * 32 : column // 32 * 32 + 32] = 0
                operand[row, column] = value * 2.0**exponent
            row += 3
    return inputs._replace(x=x.astype(BFLOAT16), dy=dy.astype(BFLOAT16))


@pytest.mark.parametrize("rule", ["fit", "ocp"])
def test_special_blocks(rule: str) -> None:
    config = MoEConfig(**BASE | dict(hidden_size=96, intermediate_size=64, scale_rule=rule))
    compared(config, special_blocks(make_inputs(config, (60,))))


def test_every_block_has_a_scale_of_its_own() -> None:
    """A scale taken from a neighbouring block or row cannot pass: exponents are 2^(i mod 16)."""
    config = MoEConfig(**BASE | dict(hidden_size=512, intermediate_size=64, num_experts=2, top_k=2))
    inputs = make_inputs(config, (60,))
    steps = np.repeat(2.0 ** (np.arange(16) - 8), 32).astype(np.float32)
    x, dy = inputs.x.astype(np.float32) * steps, inputs.dy.astype(np.float32) * steps[::-1]
    compared(config, inputs._replace(x=x.astype(BFLOAT16), dy=dy.astype(BFLOAT16)))
