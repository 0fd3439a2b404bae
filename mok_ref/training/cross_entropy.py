"""Next-byte cross-entropy, forward and backward (T10, T11)."""

from __future__ import annotations

import numpy as np

from mok_ref.numerics import Array, add, div, exp, mul, sub
from mok_ref.training.arithmetic import log, row_sum


def cross_entropy_forward(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Loss of every token and the probabilities (T10).

        m = max(logits);  p = exp(logits - m);  Z = row_sum(p)
        loss[t] = log(Z) - (logits[t, target] - m)

    logits (T, V) float32, targets (T,) integers.  Returns loss (T,), p / Z (T, V), float32.
    """
    if len(targets) == 0:
        return logits[:, 0], logits
    shifted = sub(logits, logits.max(axis=1, keepdims=True))
    p = exp(shifted)
    z = row_sum(p)
    picked = np.take_along_axis(shifted, targets[:, None], axis=1)[:, 0]
    return sub(log(z), picked), div(p, z[:, None])


def cross_entropy_backward(probabilities: Array, targets: Array, num_tokens: int) -> Array:
    """Gradient of the mean loss over `num_tokens` (T11): (p - [v = target]) * (1 / N)."""
    one = probabilities.dtype.type(1)
    is_target = np.arange(probabilities.shape[1]) == targets[:, None]
    d = np.where(is_target, add(probabilities, -one), probabilities)
    return mul(d, div(one, probabilities.dtype.type(num_tokens)))
