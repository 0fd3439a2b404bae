"""Production sizes on the device: Hopper kernels against portable ones in full, samples in NumPy.

All tensors are compared on the device. A token goes through NumPy whole, with its rows of the rings
that the weight gradients are made of; one tile of each weight gradient is summed again in NumPy
from the device's own rows. NumPy's part is at most some seconds of as many cores as a token has
experts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mok_ref.combine import combine_forward
from mok_ref.config import MoEConfig
from mok_ref.dispatch import dispatch_backward
from mok_ref.experts import (
    ExpertBackward,
    ExpertForward,
    ExpertWeights,
    expert_backward,
    expert_forward,
    operand_values,
)
from mok_ref.gpu import layer
from mok_ref.gpu.compiler import device_arch
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
# tokens that NumPy computes whole
SAMPLES = {"few_large_experts": 1, "many_small_experts": 2, "elements_beyond_2_31": 2}


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


@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", SIZES)
def test_production_sizes(name: str, dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    num_tokens, hidden, inner, experts, top_k = SIZES[name]
    config = MoEConfig(hidden, inner, experts, top_k, dtype=dtype)
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
        tokens = np.linspace(num_tokens // 3, num_tokens - 1, SAMPLES[name]).astype(int)
        check_tokens(config, portable, arrays, ids, weights, expected, tokens)
        check_gradient_tiles(config, portable, arrays, expected)
        del portable
        chosen, actual = run_path(config, heap, "auto", arrays)
        assert device_arch() != "sm_90a" or layer.path_name(chosen) == "hopper"
        for tensor, values in expected.items():
            same = bool((bits(values) == bits(actual[tensor])).all())
            assert same, f"{tensor} differs between the paths"

    run_virtual_cuda_ranks(1, work, timeout_s=60)


def bits(array: Any) -> Any:
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def check_tokens(config, workspace, arrays, ids, weights, tensors, tokens) -> None:
    """y, dx and d_topk_weights of these tokens, and their rows of the rings, by the reference."""
    slots = (len(tokens), config.top_k, config.hidden_size)
    y, dx = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
    d_weights = np.zeros(slots[:2], np.float32)
    table = read_schedule(workspace)
    for expert, rows, slot, forward, backward in reference_rows(
        config, arrays, ids[tokens], weights[tokens], tokens
    ):
        y[rows, slot], dx[rows, slot] = forward.y, backward.dx
        d_weights[rows, slot] = backward.d_weight
        places = ring_places(table, expert, tokens[rows] * config.top_k + slot)
        for name in ("d_gate", "d_up", "hw"):
            actual = getattr(workspace, f"{name}_ring")[places].get()
            assert_bitwise_equal(actual, bf16_to_bits(getattr(backward, name)), name)
    expected = {
        "y": bf16_to_bits(combine_forward(y, ids[tokens], weights[tokens])),
        "dx": bf16_to_bits(dispatch_backward(dx, ids[tokens], None, None)),
        "d_topk_weights": d_weights,
    }
    for name, values in expected.items():
        actual = tensors[name][tokens].get()
        assert_bitwise_equal(actual.view(values.dtype), values, name)


def reference_rows(
    config, arrays, ids, weights, tokens
) -> list[tuple[int, np.ndarray, np.ndarray, ExpertForward, ExpertBackward]]:
    """(expert, tokens' places, slots, results) of every expert that these tokens are sent to."""
    x, dy = (operand_values(config, as_values(arrays[n][tokens].get())) for n in ("x", "dy"))
    experts = [int(expert) for expert in np.unique(ids) if expert >= 0]

    def parts_of(expert: int) -> ExpertWeights:
        return ExpertWeights(*(as_values(arrays[p][expert].get()) for p in ("gate", "up", "down")))

    def work(expert: int, parts: ExpertWeights):
        rows, slot = np.nonzero(ids == expert)
        own = ExpertWeights(*(operand_values(config, part) for part in parts))
        forward = expert_forward(config, x[rows], own)
        backward = expert_backward(
            config, forward.gate, forward.up, dy[rows], own, weights[rows, slot]
        )
        return expert, rows, slot, forward, backward

    with ThreadPoolExecutor(max(1, len(experts))) as pool:  # NumPy lets other threads run
        return list(pool.map(work, experts, map(parts_of, experts)))


def ring_places(table, expert: int, peer_rows: np.ndarray) -> np.ndarray:
    """Rows of the ring, which holds all rows of one rank, where these slots of tokens lie."""
    rows = table.segment(expert)
    found = table.peer_row[rows.start : rows.start + int(table.expert_count[expert])]
    order = np.argsort(found)
    return rows.start + order[np.searchsorted(found, peer_rows, sorter=order)]


def check_gradient_tiles(config, workspace, arrays, tensors) -> None:
    """A tile of each weight gradient, summed in the schedule's row order."""
    table = read_schedule(workspace)
    rows = table.segment(1)
    valid = slice(rows.start, rows.start + int(table.expert_count[1]))
    token = table.peer_row[valid] // config.top_k
    block = slice(0, 32)  # of one scale
    corner = slice(16, 24)

    def columns(array: Any) -> np.ndarray:
        return as_values(array[:, corner].get())

    x, dy = (
        operand_values(config, as_values(arrays[n][:, block][token].get()))[:, corner]
        for n in ("x", "dy")
    )
    d_gate, d_up, hw = (
        columns(getattr(workspace, f"{n}_ring")[valid]) for n in ("d_gate", "d_up", "hw")
    )
    for name, a, b in (("dw_gate", d_gate, x), ("dw_up", d_up, x), ("dw_down", dy, hw)):
        actual = tensors[name][1][corner, corner].get()
        assert_bitwise_equal(actual, tc(a.T, b.T), name)
