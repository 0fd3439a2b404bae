"""An ordinary mixture-of-experts layer: right on average, different bits each time.

The baseline of the comparison. It does what an atomic-order implementation does: rows reach an
expert in an order nobody fixes (drawn from the operating system here), sums run in that order, and
BLAS adds as it likes. One process, no ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok_ref.experts import ExpertWeights
from mok_ref.numerics import sigmoid, to_bf16


@dataclass
class OrdinaryContext:
    x: np.ndarray
    topk_weights: np.ndarray
    weights: ExpertWeights
    routes: list[tuple[np.ndarray, np.ndarray]]  # per expert: token, slot
    gate: list[np.ndarray]
    up: list[np.ndarray]


@dataclass
class OrdinaryGradients:
    dx: np.ndarray
    d_topk_weights: np.ndarray
    dw_gate: np.ndarray
    dw_up: np.ndarray
    dw_down: np.ndarray


def ordinary_forward(
    x: np.ndarray, topk_ids: np.ndarray, topk_weights: np.ndarray, weights: ExpertWeights
) -> tuple[np.ndarray, OrdinaryContext]:
    """out[t] = sum of w[t,k] * expert(x[t]), in a random order. Shapes as in moe_forward."""
    arrival = np.random.default_rng()  # seeded by the operating system: no two runs agree
    out = np.zeros_like(x)
    context = OrdinaryContext(x, topk_weights, weights, [], [], [])
    for expert in range(len(weights.gate)):
        token, slot = np.nonzero(topk_ids == expert)
        order = arrival.permutation(len(token))
        token, slot = token[order], slot[order]
        gate = to_bf16(x[token] @ weights.gate[expert].T)
        up = to_bf16(x[token] @ weights.up[expert].T)
        h = to_bf16(gate * sigmoid(gate) * up)
        y = to_bf16(h @ weights.down[expert].T)
        np.add.at(out, token, topk_weights[token, slot][:, None] * y)
        context.routes.append((token, slot))
        context.gate.append(gate)
        context.up.append(up)
    return to_bf16(out), context


def ordinary_backward(context: OrdinaryContext, dy: np.ndarray) -> OrdinaryGradients:
    """Gradients of ordinary_forward, summed in the order in which its rows arrived."""
    weights = context.weights
    dx, d_weights = np.zeros_like(context.x), np.zeros_like(context.topk_weights)
    grads = [np.zeros(w.shape, np.float32) for w in weights]
    for expert, (token, slot) in enumerate(context.routes):
        gate, up, x = context.gate[expert], context.up[expert], context.x[token]
        w = context.topk_weights[token, slot][:, None]
        s = sigmoid(gate)
        h = to_bf16(gate * s * up)
        dhu = dy[token] @ weights.down[expert]
        d_weights[token, slot] = (dhu * h).sum(axis=1)
        dh = w * dhu
        d_up = to_bf16(dh * gate * s)
        d_gate = to_bf16(dh * up * s * (1 + gate * (1 - s)))
        np.add.at(dx, token, to_bf16(d_gate @ weights.gate[expert] + d_up @ weights.up[expert]))
        grads[0][expert] = d_gate.T @ x
        grads[1][expert] = d_up.T @ x
        grads[2][expert] = dy[token].T @ to_bf16(w * h)
    return OrdinaryGradients(dx, d_weights, *grads)
