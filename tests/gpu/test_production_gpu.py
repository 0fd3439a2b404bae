"""Production sizes on the device: Hopper kernels against portable ones in full, samples in NumPy.

All tensors are compared on the device; a token goes through NumPy whole, and one tile of each
weight gradient is summed again in NumPy from the device's own rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mok_ref.combine import combine_forward
from mok_ref.config import MoEConfig
from mok_ref.dispatch import dispatch_backward
from mok_ref.experts import ExpertWeights, expert_backward, expert_forward
from mok_ref.gpu import layer
from mok_ref.gpu.schedule import read_schedule
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.numerics import as_values, bf16_to_bits
from mok_ref.tensor_core import tc
from mok_ref.testing import assert_bitwise_equal, random_routes

pytestmark = pytest.mark.gpu

# name: (tokens, H, I, E, K)
SIZES = {
    "few_large_experts": (4096, 7168, 2048, 4, 8),
    "many_small_experts": (8192, 2048, 768, 128, 8),
    "elements_beyond_2_31": (66000, 4096, 32, 2, 8),  # 528,000 rows of 4096
}
SAMPLE = 1  # tokens that NumPy computes whole


def device_bf16(shape: tuple[int, ...], scale: float, seed: int) -> Any:
    """Normal values as bf16 bits, made on the device (truncated: any bf16 values will do)."""
    import cupy

    rng = cupy.random.default_rng(seed)
    out = cupy.empty(shape, cupy.uint16)
    for first in range(0, shape[0], 1024):
        part = rng.standard_normal((min(1024, shape[0] - first), *shape[1:]), dtype=cupy.float32)
        out[first : first + len(part)] = ((part * scale).view(cupy.uint32) >> 16).astype("u2")
    return out


def run_path(config, heap, path: str, arrays: dict[str, Any]) -> tuple[DeviceWorkspace, dict]:
    """One step; y and all gradients stay on the device."""
    workspace = DeviceWorkspace(config, heap, len(arrays["x"]), path=path)
    workspace.poison()
    weights = ExpertWeights(arrays["gate"], arrays["up"], arrays["down"])
    arguments = (arrays["x"], arrays["ids"], arrays["weights"], weights, None)
    y, context = layer.forward(config, heap, *arguments, workspace, "all")
    gradients = layer.backward(context, arrays["dy"])
    heap.check()
    assert path == "auto" or layer.path_name(workspace) == path
    tensors = {"y": y} | {n: v for n, v in vars(gradients).items() if v is not None}
    return workspace, tensors


@pytest.mark.parametrize("name", SIZES)
def test_production_sizes(name: str) -> None:
    cupy = pytest.importorskip("cupy")
    num_tokens, hidden, inner, experts, top_k = SIZES[name]
    config = MoEConfig(hidden, inner, experts, top_k)
    ids, weights = random_routes(np.random.default_rng(5), num_tokens, experts, top_k)

    def work(heap):
        arrays = {
            "x": device_bf16((num_tokens, hidden), 1.0, 1),
            "dy": device_bf16((num_tokens, hidden), 1.0, 2),
            "gate": device_bf16((experts * inner, hidden), hidden**-0.5, 3),
            "up": device_bf16((experts * inner, hidden), hidden**-0.5, 4),
            "down": device_bf16((experts * hidden, inner), inner**-0.5, 5),
            "ids": cupy.asarray(ids),
            "weights": cupy.asarray(weights),
        }
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)),
                            ("down", (hidden, inner))):  # fmt: skip
            arrays[part] = arrays[part].reshape(experts, *shape)
        portable, expected = run_path(config, heap, "portable", arrays)
        check_tokens(config, arrays, ids, weights, expected)
        check_gradient_tiles(config, portable, arrays, expected)
        del portable
        _, actual = run_path(config, heap, "auto", arrays)
        for tensor, values in expected.items():
            same = bool((bits(values) == bits(actual[tensor])).all())
            assert same, f"{tensor} differs between the paths"

    run_virtual_cuda_ranks(1, work, timeout_s=60)


def bits(array: Any) -> Any:
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def check_tokens(config, arrays, ids, weights, tensors) -> None:
    """y, dx and d_topk_weights of a few tokens by the reference."""
    tokens = np.linspace(len(ids) // 3, len(ids) - 1, SAMPLE).astype(int)
    slots = (SAMPLE, config.top_k, config.hidden_size)
    y, dx = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
    d_weights = np.zeros(slots[:2], np.float32)
    x, dy = (as_values(arrays[n][tokens].get()) for n in ("x", "dy"))
    for expert in np.unique(ids[tokens]):
        rows, slot = np.nonzero(ids[tokens] == expert)
        parts = (as_values(arrays[p][int(expert)].get()) for p in ("gate", "up", "down"))
        expert_weights = ExpertWeights(*parts)
        forward = expert_forward(config, x[rows], expert_weights)
        weight = weights[tokens[rows], slot]
        backward = expert_backward(
            config, forward.gate, forward.up, dy[rows], expert_weights, weight
        )
        y[rows, slot], dx[rows, slot] = forward.y, backward.dx
        d_weights[rows, slot] = backward.d_weight
    expected = {
        "y": bf16_to_bits(combine_forward(y, ids[tokens], weights[tokens])),
        "dx": bf16_to_bits(dispatch_backward(dx, ids[tokens], None, None)),
        "d_topk_weights": d_weights,
    }
    for name, values in expected.items():
        actual = tensors[name][tokens].get()
        assert_bitwise_equal(actual.view(values.dtype), values, name)


def check_gradient_tiles(config, workspace, arrays, tensors) -> None:
    """A tile of each weight gradient, summed in the schedule's row order."""
    table = read_schedule(workspace)
    rows = table.segment(1)
    valid = slice(rows.start, rows.start + int(table.expert_count[1]))
    token = table.peer_row[valid] // config.top_k
    corner = slice(16, 24)

    def columns(array: Any) -> np.ndarray:
        return as_values(array[:, corner].get())

    x, dy = columns(arrays["x"][token]), columns(arrays["dy"][token])
    d_gate, d_up, hw = (
        columns(getattr(workspace, f"{n}_ring")[valid]) for n in ("d_gate", "d_up", "hw")
    )
    for name, a, b in (("dw_gate", d_gate, x), ("dw_up", d_up, x), ("dw_down", dy, hw)):
        actual = tensors[name][1][corner, corner].get()
        assert_bitwise_equal(actual, tc(a.T, b.T), name)
