"""Each device function alone against its NumPy twin, bit for bit.

Runs on a GPU (marker gpu) and, with small inputs, on the CPU with the kernels compiled for it. The
tables of docs/device_checks.md come from the same functions at full size: `python
tests/gpu/device_checks.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mok_ref import mxfp8, numerics, routing
from mok_ref.gpu import compiler, portable, products
from mok_ref.gpu import mxfp8 as gpu_mxfp8
from mok_ref.gpu import routing as gpu_routing
from mok_ref.numerics import bf16_to_bits, bits_to_bf16, to_bf16
from mok_ref.swiglu import swiglu_backward, swiglu_forward
from mok_ref.tensor_core import tc
from mok_ref.testing import assert_bitwise_equal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import units

assert portable and products  # imported before the stand-in replaces what they load


pytestmark = pytest.mark.usefixtures("device")


def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


# --------------------------------------------------------------------------- parameter structs


@pytest.mark.parametrize(
    "source, kernel, structs",
    [
        ("portable.cu", "portable_layout", portable.STRUCTS),
        ("routing.cu", "routing_layout", (gpu_routing.ROUTING_PARAMS,)),
        ("unit_kernels.cu", "unit_layout", (units.UNIT_PRODUCT,)),
    ],
    ids=["portable", "routing", "units"],
)
def test_parameter_structs_have_the_compilers_sizes(source, kernel, structs) -> None:
    import cupy

    words = cupy.zeros(len(structs), np.uint64)
    compiler.load_kernel(source, kernel)((1,), (1,), (words,))
    assert [int(word) for word in words.get()] == [block.itemsize for block in structs]


# --------------------------------------------------------------------------- float32 rules


def test_exp_and_sigmoid() -> None:
    x = units.random_floats(rng_of("exp"), 200_000)
    assert_bitwise_equal(units.elementwise("exp", [x], [np.float32])[0], numerics.exp(x))
    got = units.elementwise("sigmoid", [x], [np.float32])[0]
    assert_bitwise_equal(got, numerics.sigmoid(x))


def test_sigmoid_of_every_bf16() -> None:
    want = numerics.sigmoid(bits_to_bf16(units.ALL_BF16))
    got = units.elementwise("sigmoid_bf16", [units.ALL_BF16], [np.float32])[0]
    assert_bitwise_equal(got, want)


def test_rounding_to_bf16() -> None:
    x = units.random_floats(rng_of("round"), 200_000)
    got = units.elementwise("to_bf16", [x], [np.uint16])[0]
    assert_bitwise_equal(got, bf16_to_bits(to_bf16(x)))


def test_weighted_sum_rounds_product_and_sum() -> None:
    acc, weight, value = (units.random_floats(rng_of(n), 100_000) for n in ("acc", "w", "v"))
    got = units.elementwise("add_weighted", [acc, weight, value], [np.float32])[0]
    assert_bitwise_equal(got, numerics.add(acc, numerics.mul(weight, value)))


@pytest.mark.parametrize("limit", [None, 0.75])
def test_swiglu_forward(limit) -> None:
    rng = rng_of("swiglu")
    gate, up = (units.operand_bits(rng, (65_536,), kind) for kind in ("bit patterns", "wide 2^20"))
    gate[:30_000] = units.operand_bits(rng, (30_000,), "normal")
    got = units.elementwise("swiglu_forward", [gate, up], [np.uint16], np.float32(limit or 0))[0]
    want = swiglu_forward(bits_to_bf16(gate)[None], bits_to_bf16(up)[None], limit)[0]
    assert_bitwise_equal(got, bf16_to_bits(want))


def test_swiglu_backward() -> None:
    rng = rng_of("swiglu backward")
    gate, up = (units.operand_bits(rng, (65_536,), kind) for kind in ("bit patterns", "normal"))
    gate[:30_000] = units.operand_bits(rng, (30_000,), "normal")
    dh = units.random_floats(rng, 65_536)
    got = units.elementwise("swiglu_backward", [gate, up, dh], [np.uint16, np.uint16])
    want = swiglu_backward(bits_to_bf16(gate)[None], bits_to_bf16(up)[None], dh[None], None)
    for actual, expected in zip(got, want, strict=True):
        assert_bitwise_equal(actual, bf16_to_bits(expected[0]))


def test_dot128_order() -> None:
    terms = units.random_floats(rng_of("dot"), 64 * 384).reshape(64, 384)
    terms[:32] = rng_of("dot normal").standard_normal((32, 384))
    assert_bitwise_equal(units.dot128(terms), numerics.dot128(terms))


# --------------------------------------------------------------------------- tc


def tc_case(kind: str, batch: int, size: tuple[int, int], depth: int):
    rng = rng_of(f"{kind} {depth}")
    a = units.operand_bits(rng, (batch, size[0], depth), kind)
    b = units.operand_bits(rng, (batch, size[1], depth), kind)
    return a, b, units.accumulators(rng, (batch, *size), kind)


def reference(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.stack([tc(*product) for product in zip(a, b, c, strict=True)])


@pytest.mark.parametrize("kind", units.KINDS)
@pytest.mark.parametrize("name", units.INSTRUCTIONS)
def test_tc(name: str, kind: str, device: str) -> None:
    if device == "host" and name.startswith("wgmma"):
        pytest.skip("wgmma runs on Hopper only")
    if device == "cuda" and name.startswith("wgmma") and compiler.device_arch() != "sm_90a":
        pytest.skip("wgmma runs on Hopper only")
    for steps in (1, 4):
        case = tc_case(kind, 1, (64, 128), 16 * steps)
        assert_bitwise_equal(units.device_tc(name, *case), reference(*case), f"{name} {steps}")


@pytest.mark.parametrize("name", ["tc_group", "soft", "mma.sync"])
def test_a_resumed_chain_gives_the_same_bits(name: str) -> None:
    a, b, c = tc_case("wide 2^20", 1, (64, 64), 64)
    whole = units.device_tc(name, a, b, c)
    half = units.device_tc(name, a[..., :32], b[..., :32], c)
    assert_bitwise_equal(units.device_tc(name, a[..., 32:], b[..., 32:], half), whole)


@pytest.mark.parametrize("size", [(1, 1, 1), (5, 3, 7), (65, 130, 33), (129, 64, 100)], ids=str)
@pytest.mark.parametrize("name", ["soft", "soft MN-major", "mma.sync", "mma.sync MN-major"])
def test_any_size(name: str, size: tuple[int, int, int]) -> None:
    case = tc_case("normal", 1, size[:2], size[2])
    assert_bitwise_equal(units.device_tc(name, *case), reference(*case))


def test_a_negative_sum_that_vanishes_is_plus_zero() -> None:
    """-2^-150 truncates to zero, and a zero result is +0 whatever its sign was."""
    a = np.zeros((1, 1, 16), np.uint16)
    b = np.zeros((1, 1, 16), np.uint16)
    a[0, 0, 0], b[0, 0, 0] = 0x9A00, 0x1A00  # two small numbers of opposite sign
    case = (a, b, np.zeros((1, 1, 1), np.float32))
    product = bits_to_bf16(a[0, 0, :1]).astype(np.float64) * bits_to_bf16(b[0, 0, :1])
    assert -(2.0**-149) < product[0] < 0
    for name in ("tc_group", "soft", "mma.sync"):
        assert units.device_tc(name, *case).view(np.uint32)[0, 0, 0] == 0, name


def test_negative_control_a_flipped_operand_bit_is_seen() -> None:
    a, b, c = tc_case("normal", 1, (64, 64), 64)
    expected = reference(a, b, c)
    a[0, 3, 5] ^= 1
    got = units.device_tc("soft", a, b, c)
    assert 0 < units.count_different(got, expected) <= 64  # one row of outputs


# --------------------------------------------------------------------------- MXFP8


def quantiser_inputs() -> np.ndarray:
    """Rows of 80 columns (a short last block): every kind, zero blocks, edges of the scale."""
    rng = rng_of("mxfp8")
    rows = [units.operand_bits(rng, (40, 80), kind) for kind in units.KINDS]
    edges = np.zeros((64, 80), np.uint16)
    for i in range(64):  # amax at 448 * 2^n, and one bf16 step below and above it
        edges[i, 0] = 0x43E0 + (i - 32) * 0x80 + i % 3 - 1
        edges[i, 1:32] = units.operand_bits(rng, (31,), "sparse")
    spread = units.operand_bits(rng, (16, 80), "normal")
    spread = (spread & 0x807F) | ((120 + np.arange(16) % 16)[:, None] << 7).astype(np.uint16)
    return np.concatenate([*rows, np.zeros((3, 80), np.uint16), edges, spread.astype(np.uint16)])


@pytest.mark.parametrize("rule", ["fit", "ocp"])
def test_quantize(rule: str) -> None:
    values = quantiser_inputs()
    codes, scales = gpu_mxfp8.quantize(units.on_device(values), rule)
    want_codes, want_scales = mxfp8.quantize(values, rule)
    assert_bitwise_equal(scales.get(), want_scales, "scales")
    assert_bitwise_equal(codes.get(), want_codes, "codes")


def test_dequantize_every_code_under_every_scale() -> None:
    codes = np.repeat(np.arange(256, dtype=np.uint8)[None], 256, axis=0)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    got = gpu_mxfp8.dequantize(units.on_device(codes), units.on_device(scales)).get()
    assert_bitwise_equal(got, bf16_to_bits(mxfp8.dequantize(codes, scales)))


def test_quantize_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match="values must be contiguous bf16"):
        gpu_mxfp8.quantize(units.on_device(np.zeros((2, 32), np.float32)))
    with pytest.raises(ValueError, match="scale_rule must be"):
        gpu_mxfp8.quantize(units.on_device(np.zeros((2, 32), np.uint16)), "nearest")


# --------------------------------------------------------------------------- routing

BIAS = np.linspace(-0.3, 0.4, 16).astype(np.float32)

OPTIONS = {
    "softmax": routing.RoutingOptions(4),
    "sigmoid": routing.RoutingOptions(4, score="sigmoid", renormalize=True, scale=2.5),
    "bias": routing.RoutingOptions(3, choice_bias=BIAS, renormalize=True),
    "groups top2": routing.RoutingOptions(4, num_groups=4, keep_groups=2, scale=-1.5),
    "groups max": routing.RoutingOptions(
        2, score="sigmoid", num_groups=8, keep_groups=1, group_score="max", choice_bias=BIAS
    ),
    "every expert": routing.RoutingOptions(16, renormalize=True),
}


def routing_logits(num_tokens: int) -> np.ndarray:
    """Normal, tied, all equal, far apart, and with closed experts; one token with all of them
    closed."""
    rng = rng_of("logits")
    logits = rng.standard_normal((num_tokens, 16)).astype(np.float32) * 3
    logits[0] = 0
    logits[1] = np.repeat(logits[1, :4], 4)
    logits[2] = -18
    logits[3] *= 1e4
    logits[4, rng.permutation(16)[:13]] = -np.inf
    logits[5] = -np.inf
    logits[6, :8] = -np.inf
    return logits


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("balance", [False, True], ids=["", "balance"])
def test_routing(name: str, balance: bool) -> None:
    options, logits = OPTIONS[name], routing_logits(70)
    rng = rng_of(name)
    ids, weights, saved = routing.route_forward(logits, options)
    d_weights = rng.standard_normal(weights.shape).astype(np.float32)
    d_scores = rng.standard_normal(logits.shape).astype(np.float32) if balance else None
    d_logits = routing.route_backward(saved, d_weights, d_scores)
    router = gpu_routing.DeviceRouter(options, 16, 32, 80)
    got_ids, got_weights = router.route_forward(units.on_device(logits))
    assert_bitwise_equal(got_ids.get(), ids, "ids")
    assert_bitwise_equal(got_weights.get(), weights, "weights")
    assert_bitwise_equal(router.scores[:70].get(), saved.scores, "scores")
    on_device = None if d_scores is None else units.on_device(d_scores)
    got = router.route_backward(units.on_device(d_weights), on_device)
    assert_bitwise_equal(got.get(), d_logits, "d_logits")


def test_router_products() -> None:
    rng = rng_of("router")
    x, w_router = (units.operand_bits(rng, shape, "normal") for shape in ((37, 50), (16, 50)))
    options = OPTIONS["softmax"]
    router = gpu_routing.DeviceRouter(options, 16, 50, 40)
    x_there, w_there = units.on_device(x), units.on_device(w_router)
    logits = routing.router_logits(x, w_router)
    assert_bitwise_equal(router.router_logits(x_there, w_there).get(), logits, "logits")
    _, weights, saved = routing.route_forward(logits, options)
    d_weights = rng.standard_normal(weights.shape).astype(np.float32)
    d_logits = routing.route_backward(saved, d_weights)
    router.route_forward(router.router_logits(x_there, w_there))
    assert_bitwise_equal(router.route_backward(units.on_device(d_weights)).get(), d_logits)
    dx = bf16_to_bits(routing.router_dx(d_logits, bits_to_bf16(w_router)))
    assert_bitwise_equal(router.router_dx(w_there, 37).get(), dx, "dx")
    chain = units.on_device(np.zeros((16, 50), np.float32))
    start = rng.standard_normal((16, 50)).astype(np.float32)
    want = routing.router_dw(d_logits, bits_to_bf16(x), start)
    got = router.router_dw(x_there, [chain.data.ptr], lambda: None, units.on_device(start))
    assert_bitwise_equal(got.get(), want, "dw")


def test_bad_logits_are_reported_and_closed() -> None:
    logits = routing_logits(8)
    logits[3, 2], logits[6, 9] = np.nan, np.inf
    closed = np.where(np.isfinite(logits), logits, -np.inf).astype(np.float32)
    word = units.on_device(np.full(1, 2**64 - 1, np.uint64))
    router = gpu_routing.DeviceRouter(OPTIONS["softmax"], 16, 32, 8, input_error=word.data.ptr)
    ids, _ = router.route_forward(units.on_device(logits))
    assert_bitwise_equal(ids.get(), routing.route_forward(closed, OPTIONS["softmax"])[0])
    reported = int(word.get()[0])
    assert (reported >> 60, reported >> 32 & 0x0FFFFFFF) == (2, 3 * 16 + 2)


def test_a_router_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="num_experts must be at most"):
        gpu_routing.launch_shape(1, 5000)
    with pytest.raises(ValueError, match="max_tokens=4"):
        router = gpu_routing.DeviceRouter(OPTIONS["softmax"], 16, 32, 4)
        router.route_forward(units.on_device(routing_logits(8)))


# --------------------------------------------------------------------------- CuPy arrays


@pytest.mark.parametrize("name, count", [("sigmoid", 1), ("exp", 1), ("mul", 2), ("fma", 3)])
def test_the_reference_on_cupy_arrays(name: str, count: int, device: str) -> None:
    """The same text on CuPy arrays, subnormal results included; CuPy's own kernels flush them."""
    if device == "host":
        pytest.skip("the stand-in's arrays are NumPy arrays")
    inputs = [units.random_floats(rng_of(f"{name} {i}"), 100_000) for i in range(count)]
    function = getattr(numerics, name)
    got = function(*(units.on_device(x) for x in inputs)).get()
    assert_bitwise_equal(got, function(*inputs))


# --------------------------------------------------------------------------- the paths


def test_mma_is_refused_where_it_was_not_measured(device: str) -> None:
    with pytest.raises(ValueError, match="path must be auto, soft or mma"):
        products.choose_path("fast")
    if device == "host":  # the stand-in says compute capability 8.0
        assert products.choose_path() == "soft"
        with pytest.raises(ValueError, match="path mma was measured on"):
            products.choose_path("mma")
