"""The portable path against the golden cases: every stored bit, with both ways to evaluate tc.

Runs on a GPU (marker gpu) and, for a few cases, on the CPU with the kernels compiled for it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mok_ref.casefile import load_case, read_npz
from mok_ref.experts import ExpertWeights
from mok_ref.golden import golden_pairs
from mok_ref.gpu import layer as gpu_layer
from mok_ref.gpu import portable, schedule
from mok_ref.gpu.routing import DeviceRouter
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.layer import moe_backward, moe_forward
from mok_ref.runner import Settings, assemble, make_plan, run_rank
from mok_ref.testing import assert_bitwise_equal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.units import on_device

assert schedule  # imported before the stand-in replaces what it loads

FOLDER = Path(__file__).resolve().parents[1] / "golden"
PAIRS = {name: (case_file, out_file) for name, case_file, out_file in golden_pairs(FOLDER)}
ON_THE_CPU = {("1", "soft"), ("4", "soft"), ("4", "mma"), ("empty_experts", "soft")}


pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def use_portable(monkeypatch):
    """Make the layer take the portable path with one way to evaluate tc."""

    def choose(tc_path: str) -> None:
        monkeypatch.setattr(
            gpu_layer, "_hopper_refusal", lambda config: "the test asks for portable"
        )
        monkeypatch.setattr(portable, "choose_path", lambda: tc_path)

    return choose


def run_case(name: str, limit: float | None = None, **settings) -> tuple[dict, dict]:
    """(tensors computed, tensors expected) of a golden case at its own splits."""
    case, expected = load_case(PAIRS[name][0]), read_npz(PAIRS[name][1])
    case = case if limit is None else replace(case, swiglu_limit=limit)
    plan = make_plan(case, Settings(device="cuda", backward="dx" in expected, **settings))
    results = run_virtual_cuda_ranks(plan.config.ep_size, lambda heap: run_rank(plan, heap), 60)
    return assemble(plan, results).tensors, expected


def assert_case(name: str, **settings) -> None:
    tensors, expected = run_case(name, **settings)
    stored = {key for key in expected if key not in ("digest", "digests")}
    assert stored <= set(tensors), stored - set(tensors)
    for key in sorted(stored):
        assert_bitwise_equal(tensors[key], expected[key], f"{name} {key}")


@pytest.mark.parametrize("tc_path", ["soft", "mma"])
@pytest.mark.parametrize("name", PAIRS)
def test_golden_bits(name: str, tc_path: str, device: str, use_portable) -> None:
    if device == "host" and (name, tc_path) not in ON_THE_CPU:
        pytest.skip("on the CPU a few cases are enough")
    use_portable(tc_path)
    assert_case(name)


@pytest.mark.parametrize("save", ["ring", "none"])
def test_a_small_ring_changes_nothing(save: str, device: str, use_portable) -> None:
    use_portable("soft" if device == "host" else "mma")
    assert_case("0", macrobatch=128, minibatch=128, save=save)


@pytest.mark.parametrize("name", ["router_softmax", "router_grouped"])
def test_router_kernels_around_the_layer(name: str, device: str, use_portable) -> None:
    """Logits, choice, layer, and the gradients through the choice, all on the device."""
    if device == "host":
        use_portable("soft")
    case, expected = load_case(PAIRS[name][0]), read_npz(PAIRS[name][1])
    plan = make_plan(case, Settings(device="cuda", backward=True))
    results = run_virtual_cuda_ranks(
        plan.config.ep_size, lambda heap: route_and_run(plan, heap), 60
    )
    for key in ("topk_ids", "topk_weights", "y", "dx", "d_logits"):
        joined = np.concatenate([result[key] for result in results])
        assert_bitwise_equal(joined.view(expected[key].dtype), expected[key], key)
    for result in results:
        assert_bitwise_equal(result["dw_router"], expected["dw_router"], "dw_router")


def route_and_run(plan, heap) -> dict[str, np.ndarray]:
    """One rank: router, forward, backward with the router's share, router gradient."""
    case, config, tokens = plan.case, plan.config, plan.tokens_of(heap.rank)
    experts = config.experts_of(heap.rank)
    x, dy, w_router = (on_device(a) for a in (case.x[tokens], case.dy[tokens], case.w_router))
    weights = ExpertWeights(*(w[experts] for w in (case.w_gate, case.w_up, case.w_down)))
    router = DeviceRouter(
        case.routing,
        config.num_experts,
        config.hidden_size,
        int(max(plan.splits)),
        heap.status.input_error_address,
        heap.rank,
        heap.size,
    )
    heap.alloc("router_chain", (config.num_experts, config.hidden_size), np.float32)
    ids, topk_weights = router.route_forward(router.router_logits(x, w_router))
    y, context = moe_forward(config, heap, x, ids, topk_weights, weights, case.shared)

    def router_share(d_topk_weights):
        router.route_backward(d_topk_weights)
        return router.router_dx(w_router, len(x))

    grads = moe_backward(context, dy, None, router_share)
    dw = router.router_dw(x, heap.addresses("router_chain"), heap.barrier)
    heap.check(config.top_k)
    tensors = {
        "topk_ids": ids, "topk_weights": topk_weights, "y": y, "dx": grads.dx,
        "d_logits": router.d_logits[: len(x)], "dw_router": dw,
    }  # fmt: skip
    return {name: array.get() for name, array in tensors.items()}


def test_negative_control_another_clamp_changes_bits(use_portable) -> None:
    use_portable("soft")
    tensors, expected = run_case("1", limit=0.5)
    for key in ("y", "dx", "dw_up"):
        with pytest.raises(AssertionError, match=key):
            assert_bitwise_equal(tensors[key], expected[key], key)
