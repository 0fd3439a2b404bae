"""Balance losses and the choice-bias rule (docs/training.md, B1 to B6).

The losses see the whole batch: route counts are integers (their sum has no order), mean scores are
token sums handed from rank to rank. Their gradients are per token and go into `route_backward`
(scores) or are added to the logits' gradient (z-loss).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok_ref.numerics import Array, add, div, exp, mul, sub
from mok_ref.training.arithmetic import log, token_sum


@dataclass(frozen=True)
class BalanceOptions:
    """Coefficients; 0 switches a part off.

    kitten    auxiliary loss over experts            litter    the same over litters (groups)
    sequence  auxiliary loss inside every sequence   z         router z-loss
    bias_speed  gamma of the choice-bias update (balance without an auxiliary loss)
    """

    kitten: float = 0.0
    litter: float = 0.0
    sequence: float = 0.0
    z: float = 0.0
    bias_speed: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}")


def count_routes(topk_ids: Array, num_experts: int) -> np.ndarray:
    """Routes of each expert; -1 counts nowhere. (T, K) -> (E,) int64."""
    return np.bincount(topk_ids[topk_ids >= 0], minlength=num_experts).astype(np.int64)


def load_ratio(counts: np.ndarray, num_open: int) -> np.ndarray:
    """Load of each expert over the mean load (B1): float32(count * open) / float32(all routes).

    counts (E,) integers of the whole batch. Returns (E,) float32, 1 everywhere when even; 0 when
    there are no routes.
    """
    total = int(counts.sum())
    if total == 0:
        return np.zeros(len(counts), np.float32)
    return div((counts * num_open).astype(np.float32), np.float32(total))


def normalized_scores(scores: Array, kind: str) -> tuple[Array, Array]:
    """p[e] = score[e] / sum of scores (e ascending) for sigmoid; softmax scores as they are.

    Returns p (T, E), sum (T,); a token without open experts has p = 0.
    """
    total = np.ones_like(scores[:, 0])
    if kind == "softmax":
        return scores, total
    total = np.zeros_like(total)
    for expert in range(scores.shape[1]):
        total = add(total, scores[:, expert])
    total = np.where(total == 0, total.dtype.type(1), total)
    return div(scores, total[:, None]), total


def balance_loss(ratio: Array, mean_p: Array, coefficient: float) -> np.float32:
    """coefficient * sum of ratio[e] * P[e], e ascending (B2; Switch Transformer eq. 4).

    ratio (E,) from load_ratio, mean_p (E,) float32: mean normalised score over the batch.
    It is `coefficient` when loads and scores are even.
    """
    acc = np.float32(0)
    for expert in range(len(ratio)):
        acc = add(acc, mul(ratio[expert], mean_p[expert]))
    return mul(acc, np.float32(coefficient))


def by_litter(values: np.ndarray, num_litters: int) -> np.ndarray:
    """Sum over each litter's kittens, e ascending, one accumulator from 0. (E,) -> (G,)."""
    grouped = values.reshape(num_litters, -1)
    acc = np.zeros_like(grouped[:, 0])
    for kitten in range(grouped.shape[1]):
        acc = acc + grouped[:, kitten]
    return acc


def balance_gradient(
    counts: np.ndarray,
    num_open: int,
    open_litters: int,
    num_litters: int,
    num_tokens: int,
    options: BalanceOptions,
) -> np.ndarray:
    """Gradient of the kitten and litter losses with respect to each token's p (B3).

        d_p[e] = (kitten * ratio[e] + litter * litter_ratio[g(e)]) / N       the same for all tokens

    counts (E,) of the whole batch. Returns (E,) float32.  The counts are constants, as usual.
    """
    ratio = load_ratio(counts, num_open)
    d = mul(ratio, np.float32(options.kitten))
    if options.litter:
        litter = load_ratio(by_litter(counts, num_litters), open_litters)
        spread = np.repeat(litter, len(counts) // num_litters)
        d = add(d, mul(spread, np.float32(options.litter)))
    return div(d, np.float32(num_tokens))


def sequence_gradient(
    topk_ids: np.ndarray, sequence: int, num_open: int, num_tokens: int, num_experts: int, c: float
) -> np.ndarray:
    """Gradient of the sequence-level loss (B4): loads are counted inside each sequence.

        d_p[t, e] = (c * ratio of t's sequence[e]) / N

    topk_ids (T, K) of whole sequences. Returns (T, E) float32.
    """
    out = np.zeros((len(topk_ids), num_experts), np.float32)
    for first in range(0, len(topk_ids), sequence):
        rows = slice(first, first + sequence)
        ratio = load_ratio(count_routes(topk_ids[rows], num_experts), num_open)
        out[rows] = div(mul(ratio, np.float32(c)), np.float32(num_tokens))
    return out


def d_scores_from_p(d_p: Array, p: Array, total: Array, kind: str) -> Array:
    """Back through normalized_scores: sigmoid d_s = (d_p - sum of d_p * p) / total, e ascending."""
    d_p = np.broadcast_to(d_p, p.shape)
    if kind == "softmax":
        return d_p
    dot = np.zeros_like(total)
    for expert in range(p.shape[1]):
        dot = add(dot, mul(d_p[:, expert], p[:, expert]))
    return div(sub(d_p, dot[:, None]), total[:, None])


def z_loss(logits: Array, num_tokens: int, coefficient: float) -> tuple[Array, Array]:
    """Router z-loss (B5; ST-MoE, 2202.08906): coefficient * mean of log(sum exp(logit))^2.

        m = max;  q[e] = exp(logit[e] - m), +0 if closed;  Z = sum of q, e ascending
        lse = m + log(Z);   loss[t] = lse * lse
        d_logit[e] = ((2 * coefficient / N) * lse) * (q[e] / Z)

    logits (T, E) float32, -Inf closed. Returns loss (T,) without coefficient, d_logits (T, E).
    """
    is_open = np.isfinite(logits)
    any_open = is_open.any(axis=1)
    top = np.where(any_open, logits.max(axis=1, initial=-np.inf), 0).astype(logits.dtype)
    shifted = sub(np.where(is_open, logits, top[:, None]), top[:, None])
    q = np.where(is_open, exp(shifted), logits.dtype.type(0))
    z = np.zeros_like(top)
    for expert in range(q.shape[1]):
        z = add(z, q[:, expert])
    z = np.where(any_open, z, logits.dtype.type(1))
    lse = add(top, log(z))
    factor = div(np.float32(2 * np.float32(coefficient)), np.float32(num_tokens))
    return mul(lse, lse), mul(mul(factor, lse)[:, None], div(q, z[:, None]))


def mean_over_batch(chained_sum: Array, num_tokens: int) -> Array:
    """A token sum over the whole batch, divided once by N."""
    return div(chained_sum, np.float32(max(1, num_tokens)))


def update_choice_bias(
    bias: np.ndarray, counts: np.ndarray, is_open: np.ndarray, speed: float
) -> np.ndarray:
    """Sign rule (B6; 2408.15664): underloaded experts gain `speed`, overloaded ones lose it.

        bias[e] = bias[e] + speed * sign(all routes - count[e] * open)

    bias (E,) float32, counts (E,) integers of the whole batch, is_open (E,) bool.
    """
    sign = np.sign(int(counts.sum()) - counts * int(is_open.sum())).astype(np.float32)
    return np.where(is_open, add(bias, mul(sign, np.float32(speed))), bias).astype(np.float32)


__all__ = [
    "BalanceOptions",
    "balance_gradient",
    "balance_loss",
    "by_litter",
    "count_routes",
    "d_scores_from_p",
    "load_ratio",
    "mean_over_batch",
    "normalized_scores",
    "sequence_gradient",
    "token_sum",
    "update_choice_bias",
    "z_loss",
]
