"""Comparing intermediates: nothing in a right layer, the right tensor in a wrong one."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.test_layer_gpu import CASES, PATH, device, make_case
from mok_ref.gpu.verify import Batch, check_forward, compare
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks

assert device  # the fixture


def batch_of(inputs) -> Batch:
    return Batch(
        inputs.x.view(np.uint16),
        inputs.ids,
        inputs.weights,
        inputs.experts,
        inputs.shared,
        np.asarray(inputs.counts),
    )


@pytest.mark.parametrize("name", sorted(set(CASES) - {"idle_experts"}))
def test_every_intermediate_is_equal(name: str, device: str) -> None:
    config, inputs = make_case(name)
    batch = batch_of(inputs)

    def work(heap):
        return check_forward(config, heap, batch, PATH[device])

    for _, findings in run_virtual_cuda_ranks(config.ep_size, work, timeout_s=60):
        assert not [str(f) for f in findings if f.differing]
        assert {"x_ring", "gate_saved", "h_ring", "y slots", "y"} <= {f.tensor for f in findings}


def test_a_wrong_weight_shows_where_it_enters(device: str) -> None:
    config, inputs = make_case("one_rank")
    batch = batch_of(inputs)
    wrong = batch._replace(weights=batch.weights._replace(down=batch.weights.down[::-1]))

    def work(heap):
        original = check_forward.__globals__["_expert"]
        check_forward.__globals__["_expert"] = lambda c, _, *rest: original(c, batch, *rest)
        try:
            return check_forward(config, heap, wrong, PATH[device])
        finally:
            check_forward.__globals__["_expert"] = original

    _, findings = run_virtual_cuda_ranks(1, work, timeout_s=60)[0]
    assert [f.tensor for f in findings if f.differing] == ["y slots", "y"]


def test_a_finding_names_the_first_coordinate() -> None:
    a = np.zeros((3, 4), np.float32)
    b = a.copy()
    b[1, 2], b[2, 0] = 1.0, 1.0
    text = str(compare(5, "gate", a, b))
    assert text == (
        "rank 5 gate: 2 of 12 differ, first at [1, 2]: 0x0 on the device, 0x3f800000 expected"
    )
    b[...] = np.nan
    a[...] = -np.nan
    assert not compare(0, "gate", a, b).differing
