"""Causal self-attention over whole sequences, forward and backward (T8, T9).

Ranks hold whole sequences, so attention needs no communication. Gradients of the two weights are
links of the ordered chain and are computed later, from the operands saved here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok_ref.numerics import Array, div, exp, mul, sub, to_bf16
from mok_ref.tensor_core import tc
from mok_ref.training.arithmetic import batched_tc, row_sum, sqrt


@dataclass(frozen=True)
class AttentionSaved:
    """Operands of the backward pass; all (sequences * heads, S, ...) except `x`, `o`."""

    x: Array  # (T, H) bf16, input
    q: Array
    k: Array
    v: Array
    p: Array  # (G, S, S) bf16 probabilities
    o: Array  # (T, H) bf16, heads joined


def split_heads(x: Array, sequence: int, num_heads: int) -> Array:
    """(T, H) -> (sequences * heads, S, H / heads)."""
    num_tokens, hidden = x.shape
    head = hidden // num_heads
    shaped = x.reshape(num_tokens // sequence, sequence, num_heads, head)
    return np.ascontiguousarray(shaped.transpose(0, 2, 1, 3)).reshape(-1, sequence, head)


def join_heads(x: Array, num_heads: int) -> Array:
    """(sequences * heads, S, D) -> (T, H): the inverse of split_heads."""
    groups, sequence, head = x.shape
    shaped = x.reshape(groups // num_heads, num_heads, sequence, head).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(shaped).reshape(-1, num_heads * head)


def causal_softmax(scores: Array) -> Array:
    """Probabilities of each query over itself and earlier keys; later keys are +0.

        p = exp(a - max);  p / row_sum(p)

    scores (G, S, S) float32. Returns the same shape, float32.
    """
    sequence = scores.shape[-1]
    is_past = np.tril(np.ones((sequence, sequence), bool))
    top = np.where(is_past, scores, -np.inf).max(axis=-1, keepdims=True).astype(scores.dtype)
    shifted = np.where(is_past, sub(scores, top), scores.dtype.type(0))
    p = np.where(is_past, exp(shifted), scores.dtype.type(0))
    total = row_sum(p.reshape(-1, sequence)).reshape(top.shape)
    return div(p, total)


def score_scale(like: Array, head: int) -> Array:
    """1 / sqrt(D) in the dtype of `like`: one root and one division."""
    return div(np.ones(1, like.dtype), sqrt(np.full(1, head, like.dtype)))


def attention_forward(
    x: Array, w_qkv: Array, w_out: Array, sequence: int, num_heads: int, arithmetic: str
) -> tuple[Array, AttentionSaved]:
    """Self-attention (T8).

        q, k, v = bf16(tc(x, W_qkv))          a = tc(q, k) * (1 / sqrt(D))
        p = bf16(causal_softmax(a))           o = bf16(tc(p, v^T))
        y = bf16(tc(o, W_out))

    x (T, H) bf16, w_qkv (3H, H), w_out (H, H).  Returns y (T, H) bf16, saved.
    Order:  tc chains over H, D, S, H.
    """
    qkv = to_bf16(tc(x, w_qkv, arithmetic=arithmetic))
    q, k, v = (split_heads(part, sequence, num_heads) for part in np.split(qkv, 3, axis=1))
    scores = batched_tc(q, k, arithmetic)
    p = to_bf16(causal_softmax(mul(scores, score_scale(scores, q.shape[-1]))))
    o = join_heads(to_bf16(batched_tc(p, v.swapaxes(1, 2), arithmetic)), num_heads)
    y = to_bf16(tc(o, w_out, arithmetic=arithmetic))
    return y, AttentionSaved(x, q, k, v, p, o)


def attention_backward(
    saved: AttentionSaved, dy: Array, w_qkv: Array, w_out: Array, arithmetic: str
) -> tuple[Array, Array]:
    """Gradient of attention_forward (T9).

        do = bf16(tc(dy, W_out^T))             dp = tc(do, v)
        dv = bf16(tc(p^T, do^T))               ds = p * (dp - row_sum(dp * p))
        da = bf16(ds * (1 / sqrt(D)))          dq = bf16(tc(da, k^T))
        dk = bf16(tc(da^T, q^T))               dx = tc([dq, dk, dv], W_qkv^T)

    dy (T, H) bf16.  Returns dx (T, H) float32 and d_qkv (T, 3H) bf16, operand of dW_qkv.
    Order:  tc chains over H, D, S, S, S, 3H; row_sum is dot128's.
    """
    num_heads = saved.o.shape[1] // saved.q.shape[-1]
    sequence = saved.q.shape[1]
    d_o = to_bf16(tc(dy, w_out.T, arithmetic=arithmetic))
    d_o = split_heads(d_o, sequence, num_heads)
    dp = batched_tc(d_o, saved.v, arithmetic)
    dv = to_bf16(batched_tc(saved.p.swapaxes(1, 2), d_o.swapaxes(1, 2), arithmetic))
    dot = row_sum(mul(dp, saved.p).reshape(-1, sequence)).reshape(*dp.shape[:2], 1)
    ds = mul(saved.p, sub(dp, dot))
    da = to_bf16(mul(ds, score_scale(ds, saved.q.shape[-1])))
    dq = to_bf16(batched_tc(da, saved.k.swapaxes(1, 2), arithmetic))
    dk = to_bf16(batched_tc(da.swapaxes(1, 2), saved.q.swapaxes(1, 2), arithmetic))
    d_qkv = np.concatenate([join_heads(part, num_heads) for part in (dq, dk, dv)], axis=1)
    return tc(d_qkv, w_qkv.T, arithmetic=arithmetic), d_qkv
