"""Bad input: one line that names the argument, the rule and the value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import SIZES, make_case, run_case

from mok_ref import (
    ExpertWeights,
    Gradients,
    HeapError,
    MoEConfig,
    Workspace,
    moe_backward,
    moe_forward,
)
from mok_ref.heap import LocalWorld
from mok_ref.numerics import as_values
from mok_ref.testing import random_bf16

GOOD = dict(hidden_size=48, intermediate_size=24, num_experts=6, top_k=3)


# --------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden_size=0), "hidden_size must be an integer >= 1, got 0"),
        (dict(intermediate_size=-5), "intermediate_size must be an integer >= 1, got -5"),
        (dict(num_experts=2.5), "num_experts must be an integer >= 1, got 2.5"),
        (dict(top_k=True), "top_k must be an integer >= 1, got True"),
        (dict(ep_size="2"), "ep_size must be an integer >= 1, got '2'"),
        (
            dict(shared_intermediate_size=-1),
            "shared_intermediate_size must be an integer >= 0, got -1",
        ),
        (dict(swiglu_limit=0.0), "swiglu_limit must be a finite float32 > 0, got 0.0"),
        (dict(swiglu_limit=-1), "swiglu_limit must be a finite float32 > 0, got -1"),
        (dict(swiglu_limit="7"), "swiglu_limit must be a finite float32 > 0, got '7'"),
        (dict(swiglu_limit=np.nan), "swiglu_limit must be a finite float32 > 0, got nan"),
        (dict(swiglu_limit=1e39), r"swiglu_limit must be a finite float32 > 0, got 1e\+39"),
        (dict(swiglu_limit=1e-60), "swiglu_limit must be a finite float32 > 0, got 1e-60"),
        (dict(swiglu_limit=True), "swiglu_limit must be a finite float32 > 0, got True"),
        (dict(swiglu_limit=1 + 0j), r"swiglu_limit must be a finite float32 > 0, got \(1\+0j\)"),
        (dict(swiglu_limit=np.complex64(1)), "swiglu_limit must be a finite float32 > 0, got .*"),
        (dict(swiglu_limit=10**400), r"swiglu_limit must be a finite float32 > 0, got 10*\.\.\."),
        (dict(row_order=np.array(["canonical"] * 2)), "row_order must be one of .*"),
        (dict(row_order="sorted"), "row_order must be one of canonical, round_robin, got 'sorted'"),
        (dict(dtype="fp8"), "dtype must be one of bf16, mxfp8, got 'fp8'"),
        (dict(scale_rule="max"), "scale_rule must be one of fit, ocp, got 'max'"),
        (dict(grad_dtype="fp16"), "grad_dtype must be one of float32, bf16, got 'fp16'"),
        (dict(arithmetic="ieee"), "arithmetic must be one of exact, fast, float64, got 'ieee'"),
        (
            dict(ep_size=4),
            "num_experts must be divisible by ep_size unless a placement is given, got "
            "num_experts=6, ep_size=4",
        ),
        (
            dict(placement=(0, 0)),
            "placement must name one owner rank per expert, got 2 entries for num_experts=6",
        ),
        (
            dict(ep_size=2, placement=(0, 1, 2, 0, 1, 1)),
            r"placement must hold ranks in 0\.\.1, got 2",
        ),
        (
            dict(ep_size=2, placement=(0, 1, -1, 0, 1, 1)),
            r"placement must hold ranks in 0\.\.1, got -1",
        ),
        (dict(placement=[0.7] * 6), "placement must hold integers, got 0.7"),
        (dict(placement=[False] * 6), "placement must hold integers, got False"),
        (dict(placement="000000"), "placement must be a sequence of owner ranks or None, got .*"),
        (dict(placement=5), "placement must be a sequence of owner ranks or None, got 5"),
        (dict(placement=np.zeros((6, 1), int)), "placement must be a sequence of owner ranks .*"),
        (dict(macrobatch=100), "macrobatch must be a positive multiple of 128, got 100"),
        (dict(minibatch=0), "minibatch must be a positive multiple of 128, got 0"),
        (
            dict(macrobatch=384, minibatch=256),
            "macrobatch must be a multiple of minibatch, got macrobatch=384, minibatch=256",
        ),
    ],
)
def test_config(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        MoEConfig(**{**GOOD, **change})


def test_numpy_integers_do_not_wrap() -> None:
    config = MoEConfig(
        np.int8(48), np.int16(24), np.int32(6), np.uint8(3), macrobatch=np.int16(128)
    )
    for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "macrobatch"):
        assert type(getattr(config, name)) is int


# --------------------------------------------------------------------------- forward


def call(ranks: int = 1, **change: Any) -> Any:
    """moe_forward on one rank of a heap of its own, with one argument changed."""
    case = make_case(SIZES["plain"])
    arguments = dict(
        config=case.config(1),
        heap=LocalWorld(ranks).heap(0),
        x=case.x,
        topk_ids=case.topk_ids,
        topk_weights=case.topk_weights,
        weights=case.weights,
        shared=case.shared,
    )
    return moe_forward(**{**arguments, **change})


CASE = make_case(SIZES["plain"])
RNG = np.random.default_rng(0)


def with_value(array: np.ndarray, value: Any) -> np.ndarray:
    changed = array.copy()
    changed[4, 1] = value
    return changed


def with_weight(position: int, value: Any, expert_weights: ExpertWeights) -> ExpertWeights:
    changed = list(expert_weights)
    changed[position] = value
    return ExpertWeights(*changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=CASE.x.astype(np.float32)), "x must be bfloat16 or uint16, got float32"),
        (dict(x=CASE.x.tolist()), "x must be bfloat16 or uint16, got list"),
        (dict(x=None), "x must be bfloat16 or uint16, got NoneType"),
        (dict(x=CASE.x[0]), r"x must be \(tokens, 48\), got shape \(48,\)"),
        (dict(x=CASE.x[:, :-1]), r"x must be \(tokens, 48\), got shape \(37, 47\)"),
        (dict(topk_ids=CASE.topk_ids.astype(np.int64)), "topk_ids must be int32, got int64"),
        (dict(topk_ids=CASE.topk_ids.tolist()), "topk_ids must be int32, got list"),
        (
            dict(topk_ids=CASE.topk_ids[:-1]),
            r"topk_ids must be \(tokens, top_k\) = \(37, 3\), got shape \(36, 3\)",
        ),
        (
            dict(topk_ids=with_value(CASE.topk_ids, 6)),
            r"topk_ids must be in -1\.\.5, got 6 at \[4, 1\]",
        ),
        (
            dict(topk_ids=with_value(CASE.topk_ids, -2)),
            r"topk_ids must be in -1\.\.5, got -2 at \[4, 1\]",
        ),
        (
            dict(topk_weights=CASE.topk_weights.astype(np.float64)),
            "topk_weights must be float32, got float64",
        ),
        (
            dict(topk_weights=CASE.topk_weights[:, :2]),
            r"topk_weights must be \(tokens, top_k\) = \(37, 3\), got shape \(37, 2\)",
        ),
        (
            dict(topk_weights=with_value(CASE.topk_weights, np.nan)),
            r"topk_weights must be finite, got nan at \[4, 1\]",
        ),
        (
            dict(topk_weights=with_value(CASE.topk_weights, -np.inf)),
            r"topk_weights must be finite, got -inf at \[4, 1\]",
        ),
        (
            dict(weights=with_weight(0, CASE.weights.gate[1:], CASE.weights)),
            r"weights.gate must have shape \(6, 24, 48\), got \(5, 24, 48\)",
        ),
        (
            dict(weights=with_weight(2, CASE.weights.up, CASE.weights)),
            r"weights.down must have shape \(6, 48, 24\), got \(6, 24, 48\)",
        ),
        (
            dict(weights=with_weight(1, CASE.weights.up.astype(np.float16), CASE.weights)),
            "weights.up must be bfloat16 or uint16, got float16",
        ),
        (
            dict(shared=None),
            "shared must be given exactly when shared_intermediate_size > 0, got shared=None, "
            "shared_inner=40",
        ),
        (
            dict(shared=with_weight(2, random_bf16(RNG, (48, 24)), CASE.shared)),
            r"shared.down must have shape \(48, 40\), got \(48, 24\)",
        ),
        (
            dict(shared=with_weight(0, random_bf16(RNG, (24, 48)), CASE.shared)),
            r"shared.gate must have shape \(40, 48\), got \(24, 48\)",
        ),
        (dict(weights=None), "weights must be ExpertWeights, got NoneType"),
        (dict(weights=tuple(CASE.weights)), "weights must be ExpertWeights, got tuple"),
        (dict(shared=tuple(CASE.shared)), "shared must be ExpertWeights, got tuple"),
        (dict(workspace="a"), "workspace must be a Workspace, got str"),
        (dict(config=None), "config must be an MoEConfig, got NoneType"),
        (dict(heap=None), "heap must be a symmetric heap, got NoneType"),
        (dict(save=["all"]), r"save must be one of all, ring, none, got \['all'\]"),
        (dict(save="some"), "save must be one of all, ring, none, got 'some'"),
        (dict(config=CASE.config(2)), "ep_size must be the heap's size 1, got 2"),
    ],
)
def test_forward(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(**change)


def test_shared_without_a_width() -> None:
    with pytest.raises(ValueError, match=r"shared must be given exactly when .*shared=weights"):
        call(config=replace(CASE.config(1), shared_intermediate_size=0))


def test_workspace() -> None:
    heap = LocalWorld(1).heap(0)
    workspace = Workspace(CASE.config(1), heap, 36)
    with pytest.raises(ValueError, match=r"^x must have at most max_tokens=36 rows, got 37$"):
        call(heap=heap, workspace=workspace)
    other = replace(CASE.config(1), macrobatch=128)
    with pytest.raises(
        ValueError,
        match="workspace must be made with the config of this call, got macrobatch=None in the "
        "workspace and 128 in the call",
    ):
        call(heap=heap, workspace=workspace, config=other)
    with pytest.raises(ValueError, match="workspace must be made on the heap of this call"):
        call(workspace=workspace)
    with pytest.raises(ValueError, match="max_tokens must be an integer >= 0, got -1"):
        Workspace(CASE.config(1), heap, -1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2.5,), "max_tokens must be an integer >= 0, got 2.5"),
        (("a",), "max_tokens must be an integer >= 0, got 'a'"),
        ((None,), "max_tokens must be an integer >= 0, got None"),
        ((4, -5), "max_saved_rows must be an integer >= 0 or None, got -5"),
        ((4, "a"), "max_saved_rows must be an integer >= 0 or None, got 'a'"),
        ((4, 1.5), "max_saved_rows must be an integer >= 0 or None, got 1.5"),
    ],
)
def test_sizes_of_a_workspace(sizes: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Workspace(CASE.config(1), LocalWorld(1).heap(0), *sizes)


def test_closed_workspaces_heaps_and_contexts() -> None:
    for close_heap in (False, True):
        heap = LocalWorld(1).heap(0)
        workspace = Workspace(CASE.config(1), heap, 37)
        _, context = call(heap=heap, workspace=workspace)
        heap.close() if close_heap else workspace.close()
        workspace.close()
        expected: tuple[type[Exception], str] = (ValueError, "workspace must be open, got one that")
        if close_heap:
            expected = (HeapError, "the heap of rank 0 is closed")
        with pytest.raises(expected[0], match=expected[1]):
            call(heap=heap, workspace=workspace)
        with pytest.raises(
            RuntimeError, match="context is stale: its workspace or heap was closed"
        ):
            moe_backward(context, CASE.dy)
    _, context = call()
    context.close()
    with pytest.raises(RuntimeError, match=r"^context was closed; run moe_forward again$"):
        moe_backward(context, CASE.dy)


def test_nothing_is_written_before_the_check() -> None:
    """A refused call leaves the workspace and earlier contexts as they were."""
    heap = LocalWorld(1).heap(0)
    workspace = Workspace(CASE.config(1), heap, 37)
    _, context = call(heap=heap, workspace=workspace)
    with pytest.raises(ValueError, match="topk_ids"):
        call(heap=heap, workspace=workspace, topk_ids=with_value(CASE.topk_ids, 6))
    dx = moe_backward(context, CASE.dy).dx
    np.testing.assert_array_equal(dx.view(np.uint16), run_case(CASE)["dx"].view(np.uint16))


# --------------------------------------------------------------------------- backward


@pytest.mark.parametrize(
    ("dy", "message"),
    [
        (CASE.dy.astype(np.float32), "dy must be bfloat16 or uint16, got float32"),
        (CASE.dy[:, :8], r"dy must be \(tokens, 48\), got shape \(37, 8\)"),
        (CASE.dy[:5], "dy must have the 37 rows of x, got 5"),
    ],
)
def test_backward(dy: np.ndarray, message: str) -> None:
    _, context = call()
    with pytest.raises(ValueError, match=f"^{message}$"):
        moe_backward(context, dy)
    moe_backward(context, CASE.dy)  # a refused call does not use the context up


def test_backward_takes_a_context_and_a_function() -> None:
    for context in (None, "context", CASE):
        with pytest.raises(
            ValueError, match=r"^context must be the one that moe_forward returned, got"
        ):
            moe_backward(context, CASE.dy)
    _, context = call()
    with pytest.raises(ValueError, match=r"^router_share must be a function or None, got int$"):
        moe_backward(context, CASE.dy, router_share=7)
    with pytest.raises(ValueError, match=r"^dy must be bfloat16 or uint16, got NoneType$"):
        moe_backward(context, None)


@pytest.mark.parametrize(
    ("share", "got"),
    [
        (lambda x: as_values(x), r"float32 \(\d+, 48\)"),
        (lambda x: x[:3], r"bfloat16 \(3, 48\)"),
        (lambda x: x[:1], r"bfloat16 \(1, 48\)"),
        (lambda x: x.view(np.int16), r"int16 \(\d+, 48\)"),
        (lambda x: x.tolist(), "list"),
        (lambda x: None, "NoneType"),
    ],
)
def test_what_router_share_returns(share: Any, got: str) -> None:
    _, context = call()
    shape = rf"\({len(CASE.x)}, 48\)"
    rule = rf"^router_share must return bfloat16 or uint16 of shape {shape}, got {got}$"
    with pytest.raises(ValueError, match=rule):
        moe_backward(context, CASE.dy, router_share=lambda d_topk_weights: share(CASE.x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dw_up=None), "main_grad.dw_up must be float32 or bfloat16, got NoneType"),
        (dict(dw_gate=np.zeros((6, 24, 48))), "main_grad.dw_gate must be .*, got float64"),
        (
            dict(dw_down=np.zeros((6, 24, 48), np.float32)),
            r"main_grad.dw_down must have shape \(6, 48, 24\), got \(6, 24, 48\)",
        ),
        (
            dict(shared_dw_down=None),
            "main_grad.shared_dw_down must be float32 or bfloat16, got NoneType",
        ),
        (
            dict(shared_dw_gate=np.zeros((24, 48), np.float32)),
            r"main_grad.shared_dw_gate must have shape \(40, 48\), got \(24, 48\)",
        ),
    ],
)
def test_main_grad(change: dict[str, Any], message: str) -> None:
    _, context = call()
    zeros = {
        "dw_gate": np.zeros((6, 24, 48), np.float32),
        "dw_up": np.zeros((6, 24, 48), np.float32),
        "dw_down": np.zeros((6, 48, 24), np.float32),
        "shared_dw_gate": np.zeros((40, 48), np.float32),
        "shared_dw_up": np.zeros((40, 48), np.float32),
        "shared_dw_down": np.zeros((48, 40), np.float32),
    }
    main_grad = Gradients(None, None, **{**zeros, **change})
    with pytest.raises(ValueError, match=f"^{message}$"):
        moe_backward(context, CASE.dy, main_grad)


# --------------------------------------------------------------------------- heaps


def test_heap_names_are_new() -> None:
    heap = LocalWorld(1).heap(0)
    heap.alloc("x", (1,), np.int8)
    with pytest.raises(ValueError, match="heap name must be new, got 'x' twice"):
        heap.alloc("x", (1,), np.int8)
    heap.free("x")
    heap.alloc("x", (1,), np.int8)


def test_number_of_ranks() -> None:
    with pytest.raises(ValueError, match="ranks must be >= 1, got 0"):
        LocalWorld(0)
