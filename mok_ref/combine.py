"""Combine: the owner of a token adds up what the experts pushed into its slots."""

from __future__ import annotations

from mok_ref.numerics import Array, add, array_module, mul, to_bf16


def combine_forward(
    y: Array, topk_ids: Array, topk_weights: Array, shared_y: Array | None = None
) -> Array:
    """Weighted sum of the slots of every token (spec eq. 5.4).

        out[t] = bf16(acc);  acc = shared_y[t] or +0;  acc = acc + w[t,k] * y[t,k], routes only

    y             (T, K, H) bf16 values
    topk_ids      (T, K) int32, -1 = no route: the slot is skipped, whatever it holds
    topk_weights  (T, K) float32, any finite value
    shared_y      (T, H) bf16 values
    Returns       (T, H) bf16 values
    Order:  k ascending; float32 multiply, then add; one rounding to bf16.
    CUDA:   cuda_src/combine.cuh: combine_forward
    """
    xp = array_module(y)
    num_tokens, top_k, hidden_size = y.shape
    acc = xp.zeros((num_tokens, hidden_size), y.dtype) if shared_y is None else shared_y
    for k in range(top_k):
        routed = (topk_ids[:, k] >= 0)[:, None]
        term = mul(topk_weights[:, k][:, None], y[:, k])
        acc = xp.where(routed, add(acc, term), acc)
    return to_bf16(acc)
