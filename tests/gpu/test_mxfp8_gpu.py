"""MXFP8 on the device: the Hopper kernels' expander and quantiser, and edge values in the layer.

The first part also runs on the CPU with the kernels compiled for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mok_ref import mxfp8
from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.gpu import hopper_mxfp8, layer
from mok_ref.gpu import mxfp8 as gpu_mxfp8
from mok_ref.gpu.compiler import device_arch
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap import run_ranks
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.layer import moe_forward
from mok_ref.numerics import bf16_to_bits, bits_to_bf16
from mok_ref.schedule import default_splits
from mok_ref.testing import assert_bitwise_equal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import units
from gpu.test_layer_gpu import (
    Inputs,
    as_host,
    assert_same,
    collect,
    make_inputs,
    on_device,
    rank_arguments,
    reference,
)

ROWS, COLUMNS = 12, 208  # three and a quarter words of 64 columns, the last block half


def test_expand_every_code_under_every_scale(device: str) -> None:
    """All 256 x 256; a NaN code only under scale 255, the quantiser's rule."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    codes[:255, [0x7F, 0xFF]] = [0x7E, 0xFE]
    runs, scales = codes.reshape(-1, 16), np.repeat(np.arange(256, dtype=np.uint8), 16)
    want = bf16_to_bits(mxfp8.dequantize(runs, scales[:, None]))
    got = units.expand(runs, scales)
    is_nan = scales == 255
    assert ((got[is_nan] & 0x7FFF) > 0x7F80).all() and (want[is_nan] == 0x7FC0).all()
    assert_bitwise_equal(got[~is_nan], want[~is_nan])


def edge_values(kind: str) -> np.ndarray:
    """bf16 bits (2, ROWS, COLUMNS)."""
    rng = np.random.default_rng(list(kind.encode()))
    shape = (2, ROWS, COLUMNS)
    if kind in units.KINDS:
        return units.operand_bits(rng, shape, kind)
    values = rng.standard_normal(shape)
    blocks = np.arange(COLUMNS) // 32 + np.arange(ROWS)[:, None]
    if kind == "block exponents":
        values *= 2.0 ** (blocks % 16)
    if kind == "extreme exponents":
        values *= 2.0 ** rng.choice([-130, -60, 0, 60, 118], (2, ROWS, 1))
    if kind == "zero blocks":
        values[:, blocks % 3 == 0] = 0
    if kind == "NaN and Inf blocks":
        values[:, blocks % 5 == 0] = np.nan
        values[0, 3, 40], values[1, 7, 200] = np.inf, -np.inf
    with np.errstate(over="ignore"):
        return bf16_to_bits(values.astype(np.float32))


EDGES = ("block exponents", "extreme exponents", "zero blocks", "NaN and Inf blocks")


@pytest.mark.parametrize("rule", ["fit", "ocp"])
@pytest.mark.parametrize("kind", [*units.KINDS, *EDGES])
def test_quantize64(kind: str, rule: str, device: str) -> None:
    values = edge_values(kind)
    codes, scales = gpu_mxfp8.quantize64(units.on_device(values), rule)
    want_codes, want_scales = mxfp8.quantize(values, rule)
    assert_bitwise_equal(scales.get(), gpu_mxfp8.column_blocks(want_scales), "scales")
    assert_bitwise_equal(codes.get(), want_codes, "codes")


@pytest.mark.parametrize("rule", ["fit", "ocp"])
def test_quantize64_of_every_bf16(rule: str, device: str) -> None:
    """Each value alone in its block, and beside a greater one."""
    alone = np.zeros((1 << 16, 32), np.uint16)
    alone[:, 5] = units.ALL_BF16
    beside = alone.copy()
    beside[:, 9] = np.where((units.ALL_BF16 & 0x7F80) < 0x7C00, units.ALL_BF16 + 0x0280, 0x3F80)
    values = np.concatenate([alone, beside], axis=1)[None]
    if device == "host":
        values = values[:, ::37]
    codes, scales = gpu_mxfp8.quantize64(units.on_device(np.ascontiguousarray(values)), rule)
    want_codes, want_scales = mxfp8.quantize(values, rule)
    assert_bitwise_equal(scales.get(), gpu_mxfp8.column_blocks(want_scales), "scales")
    assert_bitwise_equal(codes.get(), want_codes, "codes")


# --------------------------------------------------------------------------- the layer

LAYER = dict(hidden_size=208, intermediate_size=112, num_experts=8, top_k=2, dtype="mxfp8")
"""Widths of three and a quarter, and one and three quarters words of scales: K tails everywhere."""

KINDS = ("plain", "block exponents", "zero blocks", "NaN and Inf", "huge tokens", "huge weights")


def edge_inputs(config: MoEConfig, kind: str, num_tokens: int) -> Inputs:
    """Tokens and weights whose blocks of 32 have every kind of scale."""
    inputs = make_inputs(config, (num_tokens,))
    x = bits_to_bf16(inputs.x.view(np.uint16)).astype(np.float64)
    down = bits_to_bf16(inputs.experts.down.view(np.uint16)).astype(np.float64)
    blocks = np.arange(x.shape[1]) // 32 + np.arange(num_tokens)[:, None]
    if kind == "block exponents":
        x *= 2.0 ** (blocks % 16)
        down *= 2.0 ** -(np.arange(down.shape[2]) // 32 % 16)
    if kind == "zero blocks":
        x[blocks % 3 == 0], x[7] = 0, 0
        down[::2, :, :32] = 0
    if kind == "NaN and Inf":
        x[(blocks % 7 == 0) & (np.arange(num_tokens)[:, None] % 5 == 0)] = np.nan
        x[3, 5], x[4, 70] = np.inf, -np.inf
    if kind == "huge tokens":  # scales above 2^7, and below every normal one
        x *= 2.0 ** np.resize([-130, -60, 0, 40, 100, 118], num_tokens)[:, None]
    if kind == "huge weights":
        down *= 2.0 ** np.resize([-100, 0, 30], down.shape[1])[None, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        experts = inputs.experts._replace(down=bf16_to_bits(down.astype(np.float32)))
        return inputs._replace(x=bf16_to_bits(x.astype(np.float32)), experts=experts)


def split(inputs: Inputs, num_ranks: int) -> Inputs:
    return inputs._replace(counts=tuple(int(n) for n in default_splits(len(inputs.x), num_ranks)))


def canonical(bits: np.ndarray) -> np.ndarray:
    return np.where((bits & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), bits)


def device_y(config: MoEConfig, inputs: Inputs, num_ctas: int | None = None) -> np.ndarray:
    """y of all tokens on virtual ranks, with whatever kernels the device takes."""

    def work(heap):
        workspace = DeviceWorkspace(config, heap, max(inputs.counts))
        if num_ctas is not None:
            workspace.extra("mxfp8_ctas", lambda: num_ctas)
        workspace.poison()
        arguments = rank_arguments(config, inputs, heap.rank)
        y, _ = layer.forward(config, heap, *arguments, workspace, "all")
        heap.check(config.top_k)
        if device_arch() == "sm_90a":
            assert layer.path_name(workspace) == "hopper"
        return as_host(y)

    return np.concatenate(run_virtual_cuda_ranks(len(inputs.counts), work, timeout_s=60))


def reference_y(config: MoEConfig, inputs: Inputs) -> np.ndarray:
    def work(heap):
        return as_host(moe_forward(config, heap, *rank_arguments(config, inputs, heap.rank))[0])

    with np.errstate(all="ignore"):
        return np.concatenate(run_ranks(len(inputs.counts), work))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["fit", "ocp"])
@pytest.mark.parametrize("kind", KINDS)
def test_edge_values_in_the_layer(kind: str, rule: str) -> None:
    pytest.importorskip("cupy")
    config = MoEConfig(**LAYER, scale_rule=rule, shared_intermediate_size=24)
    inputs = edge_inputs(config, kind, 150)
    expected = canonical(reference_y(config, inputs))
    for num_ctas in (None, 2, 7):
        assert_bitwise_equal(canonical(device_y(config, inputs, num_ctas)), expected, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["block exponents", "huge tokens"])
def test_ranks_do_not_change_bits(kind: str, num_ranks: int) -> None:
    pytest.importorskip("cupy")
    config = MoEConfig(**LAYER, ep_size=num_ranks, swiglu_limit=0.75)
    inputs = split(edge_inputs(config, kind, 150), num_ranks)
    whole = reference_y(MoEConfig(**LAYER, swiglu_limit=0.75), split(inputs, 1))
    assert_bitwise_equal(device_y(config, inputs), whole, kind)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        dict(macrobatch=128, minibatch=128),
        dict(macrobatch=384, minibatch=128, row_order="round_robin"),
        dict(num_experts=64, top_k=1),
        dict(hidden_size=16, intermediate_size=16),
        dict(hidden_size=512, intermediate_size=384, num_experts=2),
    ],
    ids=["ring of one", "ring of three", "idle experts", "one group", "many k-blocks"],
)
def test_forward_and_backward_bits(change: dict) -> None:
    pytest.importorskip("cupy")
    config = MoEConfig(**LAYER | change, shared_intermediate_size=24)
    inputs = edge_inputs(config, "plain", 200)
    assert_same(on_device(config, inputs, "auto", repeats=2), reference(config, inputs))


@pytest.mark.gpu
def test_held_weights_are_used_until_they_are_released() -> None:
    cupy = pytest.importorskip("cupy")
    if device_arch() != "sm_90a":
        pytest.skip("hold_weights is for the Hopper kernels")
    config = MoEConfig(**LAYER)
    inputs = edge_inputs(config, "plain", 40)
    expected = reference_y(config, inputs)

    def work(heap):
        workspace = DeviceWorkspace(config, heap, 40)
        weights = ExpertWeights(*(cupy.asarray(w.view(np.uint16)) for w in inputs.experts))
        arguments = (inputs.x, inputs.ids, inputs.weights, weights, None, workspace, "none")

        def y() -> np.ndarray:
            return as_host(layer.forward(config, heap, *arguments)[0]).copy()

        found = [y()]
        hopper_mxfp8.hold_weights(workspace, weights)
        weights.gate[...] = 0  # not looked at: the codes are held
        found.append(y())
        hopper_mxfp8.release_weights(workspace)
        found.append(y())
        heap.check(config.top_k)
        return found

    own, held, zeros = run_virtual_cuda_ranks(1, work, timeout_s=60)[0]
    assert_bitwise_equal(own, expected, "quantised at every forward")
    assert_bitwise_equal(held, expected, "held")
    assert not zeros.any()


def check_a_forward_between_held_ones(config: MoEConfig, inputs: Inputs) -> None:
    """y of held weights, of others, and of the first again; on a GPU or an imitation of one."""
    import cupy

    others = inputs.experts._replace(down=inputs.experts.down.view(np.uint16) ^ 0x8000)

    def work(heap):
        workspace = DeviceWorkspace(config, heap, len(inputs.x))
        a, b = (
            ExpertWeights(*(cupy.asarray(w.view(np.uint16)) for w in weights))
            for weights in (inputs.experts, others)
        )
        hopper_mxfp8.hold_weights(workspace, a)
        routes = (inputs.x, inputs.ids, inputs.weights)
        found = []
        for weights in (a, b, a):
            y, _ = layer.forward(config, heap, *routes, weights, None, workspace, "none")
            found.append(as_host(y).copy())
        heap.check(config.top_k)
        return found

    found = run_virtual_cuda_ranks(1, work, timeout_s=300)[0]
    for name, y, experts in zip("aba", found, (inputs.experts, others) * 2, strict=False):
        assert_bitwise_equal(y, reference_y(config, inputs._replace(experts=experts)), name)


@pytest.mark.gpu
def test_a_forward_with_other_weights_lets_go_of_held_ones() -> None:
    pytest.importorskip("cupy")
    if device_arch() != "sm_90a":
        pytest.skip("hold_weights is for the Hopper kernels")
    config = MoEConfig(**LAYER)
    check_a_forward_between_held_ones(config, edge_inputs(config, "plain", 40))


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["auto", "portable"])
def test_a_captured_step_quantises_what_lies_there(path: str) -> None:
    """One CUDA graph of forward and backward; tokens, routes, dy and weights change in place."""
    cupy = pytest.importorskip("cupy")
    config, count = MoEConfig(**LAYER, shared_intermediate_size=24), 90
    batches = [make_inputs(config, (count,), seed) for seed in (1, 2, 3)]

    def arrays_of(batch: Inputs) -> list[np.ndarray]:
        weights = [as_host(w) for part in (batch.experts, batch.shared) for w in part]
        return [*(as_host(a) for a in (batch.x, batch.ids, batch.weights, batch.dy)), *weights]

    def work(heap):
        workspace = DeviceWorkspace(config, heap, count, path=path)
        if device_arch() == "sm_90a" and path == "auto":
            assert layer.path_name(workspace) == "hopper"
        arrays = [cupy.asarray(a) for a in arrays_of(batches[0])]
        x, ids, weights, dy = arrays[:4]
        experts, shared = ExpertWeights(*arrays[4:7]), ExpertWeights(*arrays[7:])

        def step():
            routes = (x, ids, weights, experts, shared)
            y, context = layer.forward(config, heap, *routes, workspace, "all")
            return y, layer.backward(context, dy)

        step()  # everything is loaded and allocated
        heap.check(config.top_k)
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        y, gradients = step()
        graph = stream.end_capture()
        results = []
        for batch in (*batches[1:], batches[0]):
            for array, values in zip(arrays, arrays_of(batch), strict=True):
                array.set(values)
            graph.launch(stream)
            heap.check(config.top_k)
            results.append(collect(y, gradients))
        return results

    results = run_virtual_cuda_ranks(1, work, timeout_s=60)[0]
    for result, batch in zip(results, (*batches[1:], batches[0]), strict=True):
        assert_same([result], reference(config, batch))
