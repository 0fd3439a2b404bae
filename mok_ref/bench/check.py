"""Bits of a timed run: every tensor against the portable path, whole tokens against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.combine import combine_forward
from mok_ref.dispatch import dispatch_backward
from mok_ref.experts import ExpertWeights, expert_backward, expert_forward, operand_values
from mok_ref.numerics import as_values, bf16_to_bits
from mok_ref.testing import assert_bitwise_equal


def check_bits(layer: Any, num_samples: int) -> str:
    """ "equal", or the first difference of any output; synchronises.

    layer        an `OurLayer`; its forward and backward run once here
    num_samples  tokens whose y, dx and d_topk_weights NumPy computes again (slow on big experts)
    """
    tensors = _outputs(layer)
    try:
        with layer.on_portable_path() as portable:
            for name, expected in _outputs(portable).items():
                _assert_same_on_device(tensors[name], expected, name)
        if num_samples:
            tokens = np.linspace(0, len(layer.ids) - 1, num_samples).astype(int)
            for name, values in _expected(layer, tokens).items():
                actual = tensors[name][tokens].get().view(values.dtype)
                assert_bitwise_equal(actual, values, name)
    except AssertionError as difference:
        return str(difference)
    return "equal"


def _outputs(layer: Any) -> dict[str, Any]:
    """y and all gradients, on the device; they live in the layer's workspace."""
    y = layer.forward("all")
    gradients = layer.backward()
    layer.synchronize()
    return {"y": y} | {n: value for n, value in vars(gradients).items() if value is not None}


def _assert_same_on_device(actual: Any, expected: Any, name: str) -> None:
    bits = {2: np.uint16, 4: np.uint32}[expected.dtype.itemsize]
    differing = int((actual.view(bits) != expected.view(bits)).sum())
    assert differing == 0, f"{name}: {differing} of {expected.size} differ from the portable path"


def _expected(layer: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """y, dx and d_topk_weights of these tokens by the reference, expert by expert."""
    ids, weights = layer.ids[tokens].get(), layer.topk_weights[tokens].get()
    x, dy = (
        operand_values(layer.config, as_values(rows[tokens].get())) for rows in (layer.x, layer.dy)
    )
    slots = (len(tokens), layer.config.top_k, layer.config.hidden_size)
    y, dx = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
    d_weights = np.zeros(slots[:2], np.float32)
    for expert in np.unique(ids):
        row, slot = np.nonzero(ids == expert)
        parts = (as_values(part[int(expert)].get()) for part in layer.weights)
        expert_weights = ExpertWeights(*(operand_values(layer.config, part) for part in parts))
        forward = expert_forward(layer.config, x[row], expert_weights)
        backward = expert_backward(
            layer.config, forward.gate, forward.up, dy[row], expert_weights, weights[row, slot]
        )
        y[row, slot], dx[row, slot] = forward.y, backward.dx
        d_weights[row, slot] = backward.d_weight
    return {
        "y": bf16_to_bits(combine_forward(y, ids, weights)),
        "dx": bf16_to_bits(dispatch_backward(dx, ids, None, None)),
        "d_topk_weights": d_weights,
    }
