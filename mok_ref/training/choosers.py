"""The family of choosers: who computes which token (docs/training.md, C1 to C7).

Per-token choosers are options of `mok_ref.routing`; the presets here give them their usual names.
Litter routing draws a litter (group of experts), then kittens (experts) inside it. Expert-choice
and balanced assignment look at the whole batch: they are functions of the logits of all N tokens
in ascending g, so that no number of ranks can change them.

All of them return `RoutingSaved`: weights and gradients are those of `mok_ref.routing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mok_ref.numerics import Array, add, array_module, mul
from mok_ref.routing import (
    RoutingOptions,
    RoutingSaved,
    check_logits,
    choice_key,
    choose_topk,
    route_weights,
    route_weights_backward,
    scatter_chosen,
    scores_backward,
    softmax_scores,
    take_best,
)
from mok_ref.training.assignment import auction, linear_sum

MAX_LITTER_SIZE = 8
LINEAR_SUM_LIMIT = 512  # tokens up to which `balanced` uses scipy's exact solver

# --------------------------------------------------------------------------- presets (C1)


def switch() -> RoutingOptions:
    """One expert per token, weight = its softmax probability (Switch Transformer, 2101.03961)."""
    return RoutingOptions(top_k=1)


def gshard() -> RoutingOptions:
    """Two experts, weights renormalised over the two (GShard, 2006.16668; Mixtral, 2401.04088)."""
    return RoutingOptions(top_k=2, renormalize=True)


mixtral = gshard


def qwen(top_k: int = 8, renormalize: bool = True) -> RoutingOptions:
    """Softmax over all experts, top-k, optionally renormalised (Qwen MoE's norm_topk_prob)."""
    return RoutingOptions(top_k=top_k, renormalize=renormalize)


def deepseek_v3(
    choice_bias: Array | None = None,
    top_k: int = 8,
    num_groups: int = 8,
    keep_groups: int = 4,
    scale: float = 2.5,
) -> RoutingOptions:
    """Sigmoid scores, choice bias, groups by their two best (DeepSeek-V3, 2412.19437)."""
    return RoutingOptions(
        top_k, "sigmoid", choice_bias, num_groups, keep_groups, "top2", True, scale
    )


# --------------------------------------------------------------------------- litters (C2, C3)


@dataclass(frozen=True)
class LitterOptions:
    """Two-level routing: E kittens in `num_litters` equal litters, `keep_litters` chosen per token.

    Logits are (T, num_litters + E): the litters' logits first, then the kittens'.
    """

    top_k: int
    num_litters: int
    keep_litters: int = 1
    renormalize: bool = False
    scale: float = 1.0
    max_litter_size: int = MAX_LITTER_SIZE

    def litter_size(self, num_experts: int) -> int:
        if num_experts % self.num_litters:
            raise ValueError(
                "num_experts must be divisible by num_litters, "
                f"got {num_experts=}, num_litters={self.num_litters}"
            )
        size = num_experts // self.num_litters
        if size > self.max_litter_size:
            raise ValueError(
                "litter size num_experts / num_litters must be at most max_litter_size, "
                f"got {size}, max_litter_size={self.max_litter_size}"
            )
        return size

    def product_options(self) -> RoutingOptions:
        """How weights are made of the product scores: like any softmax router's."""
        return RoutingOptions(
            self.top_k,
            num_groups=self.num_litters,
            keep_groups=self.keep_litters,
            group_score="max",
            renormalize=self.renormalize,
            scale=self.scale,
        )


@dataclass(frozen=True)
class LitterSaved:
    litter_p: Array  # (T, G) float32
    kitten_p: Array  # (T, E) float32
    litter_open: Array  # (T, G) bool
    product: RoutingSaved  # scores = litter_p * kitten_p


def kitten_softmax(logits: Array, is_open: Array, size: int) -> Array:
    """Softmax inside every litter. logits (T, E); e ascending inside the litter, from +0."""
    rows = logits.reshape(-1, size)
    return softmax_scores(rows, is_open.reshape(rows.shape)).reshape(logits.shape)


def litter_forward(logits: Array, options: LitterOptions) -> tuple[Array, Array, LitterSaved]:
    """Choose litters, then kittens inside them (C2).

        P[g] = softmax of the litter logits;  p[e] = softmax of the logits inside e's litter
        score[e] = P[g(e)] * p[e]
        the keep_litters best P stay open (ties to the lower litter), top_k scores inside them

    A litter without open kittens is closed. logits (T, G + E) float32.
    Returns topk_ids (T, K) int32, topk_weights (T, K) float32, saved
    Order:  g ascending; e ascending inside a litter; weights as in routing R7 to R9.
    """
    num_litters = options.num_litters
    num_experts = logits.shape[1] - num_litters
    size = options.litter_size(num_experts)
    plain = options.product_options()
    plain.check_num_experts(num_experts)
    check_logits(logits, RoutingOptions(1))
    minus_inf = -array_module(logits).inf
    kitten_open = logits[:, num_litters:] != minus_inf
    has_kitten = kitten_open.reshape(-1, num_litters, size).any(axis=2)
    litter_open = (logits[:, :num_litters] != minus_inf) & has_kitten
    litter_p = softmax_scores(logits[:, :num_litters], litter_open)
    kitten_p = kitten_softmax(logits[:, num_litters:], kitten_open, size)
    xp = array_module(logits)
    scores = mul(xp.repeat(litter_p, size, axis=1), kitten_p)
    is_open = kitten_open & xp.repeat(litter_open, size, axis=1)
    kept = keep_by_score(litter_p, litter_open, options.keep_litters)
    topk_ids = choose_topk(scores, is_open & xp.repeat(kept, size, axis=1), options.top_k)
    topk_weights, ratio, total = route_weights(scores, topk_ids, plain)
    product = RoutingSaved(plain, scores, is_open, topk_ids, ratio, total)
    return topk_ids, topk_weights, LitterSaved(litter_p, kitten_p, litter_open, product)


def keep_by_score(score: Array, is_open: Array, count: int) -> Array:
    """The `count` best open entries of each row, as a mask; ties to the lower index."""
    xp = array_module(score)
    keys = choice_key(score, is_open)
    kept = xp.zeros(score.shape, dtype=bool)
    for _ in range(count):
        index, found, keys = take_best(keys)
        kept |= (xp.arange(score.shape[1]) == index[:, None]) & found[:, None]
    return kept


def litter_backward(
    saved: LitterSaved, d_topk_weights: Array, d_scores: Array | None = None
) -> Array:
    """Gradient of litter_forward's logits (C3), from score[e] = P[g(e)] * p[e].

        ds = routes' gradient (R10), plus the balance losses'
        dP[g] = sum of ds[e] * p[e], e ascending in g;   dp[e] = ds[e] * P[g(e)]
        both through their softmax (R11)

    Returns (T, G + E) float32.
    """
    xp = array_module(d_topk_weights)
    ds = scatter_chosen(saved.product, route_weights_backward(saved.product, d_topk_weights))
    if d_scores is not None:
        ds = add(ds, d_scores)
    num_tokens, num_litters = saved.litter_p.shape
    size = ds.shape[1] // num_litters
    by_litter = mul(ds, saved.kitten_p).reshape(num_tokens, num_litters, size)
    d_litter = xp.zeros_like(saved.litter_p)
    for i in range(size):
        d_litter = add(d_litter, by_litter[:, :, i])
    d_kitten = mul(ds, xp.repeat(saved.litter_p, size, axis=1))
    softmax = RoutingOptions(1)
    litter = RoutingSaved(softmax, saved.litter_p, saved.litter_open, *_UNUSED)
    rows = saved.kitten_p.reshape(-1, size)
    kitten = RoutingSaved(softmax, rows, saved.product.is_open.reshape(rows.shape), *_UNUSED)
    d_kitten_logits = scores_backward(kitten, d_kitten.reshape(rows.shape)).reshape(ds.shape)
    return xp.concatenate([scores_backward(litter, d_litter), d_kitten_logits], axis=1)


_UNUSED: tuple[Any, Any, Any] = (None, None, None)  # ids, ratio, total: not read by R11


def litter_placement(num_experts: int, num_litters: int, ep_size: int) -> np.ndarray:
    """Owner rank of each expert, litters whole on one rank or on neighbouring ranks (C4).

    With ep_size <= num_litters litter g lives on rank g * R div G. Otherwise each litter gets a
    run of ranks, [g * R div G, (g+1) * R div G), and its kittens are spread over them in order.
    Returns (E,) int32.
    """
    size = num_experts // num_litters
    owner = np.zeros(num_experts, np.int32)
    for g in range(num_litters):
        first, end = g * ep_size // num_litters, (g + 1) * ep_size // num_litters
        span = max(1, end - first)
        owner[g * size : (g + 1) * size] = first + np.arange(size) * span // size
    return owner


def ranks_touched(topk_ids: np.ndarray, owner_of_expert: np.ndarray) -> np.ndarray:
    """How many different ranks each token's routes go to. (T, K) -> (T,) int64."""
    num_ranks = int(owner_of_expert.max()) + 1
    touched = np.zeros((len(topk_ids), num_ranks + 1), bool)
    ranks = np.where(topk_ids >= 0, owner_of_expert[np.maximum(topk_ids, 0)], num_ranks)
    np.put_along_axis(touched, ranks, True, axis=1)
    return touched[:, :num_ranks].sum(axis=1)


# --------------------------------------------------------------------------- whole-batch choosers


def chosen_saved(
    scores: Array, is_open: Array, topk_ids: Array, options: RoutingOptions
) -> tuple[Array, Array, RoutingSaved]:
    """Weights and saved state for ids that something else chose."""
    topk_weights, ratio, total = route_weights(scores, topk_ids, options)
    return topk_ids, topk_weights, RoutingSaved(options, scores, is_open, topk_ids, ratio, total)


def expert_choice_ids(scores: np.ndarray, is_open: np.ndarray, capacity: int, top_k: int):
    """Each expert takes its `capacity` best tokens (C5; Expert Choice, 2202.09368).

    scores, is_open  (N, E) of the whole batch
    Returns          (N, top_k) int32: a token's experts in ascending id, -1 behind them. Where more
                     than top_k experts chose a token, the top_k of greatest score stay.
    Ties go to the lower g. The choice looks at later tokens: it leaks the future in a causal model.
    """
    keys = choice_key(scores, is_open)
    lowest = np.iinfo(keys.dtype).min
    order = np.argsort(-keys.astype(np.int64), axis=0, kind="stable")[:capacity]
    taken = np.zeros(scores.shape, bool)
    np.put_along_axis(taken, order, True, axis=0)
    taken &= keys > lowest
    taken = keep_by_score(scores, taken, top_k)
    by_id = np.argsort(~taken, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    return np.where(np.take_along_axis(taken, by_id, axis=1), by_id, np.int32(-1))


def balanced_ids(scores: np.ndarray, method: str = "auto") -> np.ndarray:
    """One expert per token, equal counts, greatest total score (C6; BASE layers, 2103.16716).

    scores  (N, E) float32 of the whole batch; expert e gets N div E tokens, one more if
            e < N mod E
    method  "linear_sum" (scipy), "auction" (deterministic, integers), "auto": the former up to
            LINEAR_SUM_LIMIT tokens
    Returns (N, 1) int32
    """
    if method not in ("auto", "linear_sum", "auction"):
        raise ValueError(f"method must be auto, linear_sum or auction, got {method=}")
    if method == "auto":
        method = "linear_sum" if len(scores) <= LINEAR_SUM_LIMIT else "auction"
    solve = linear_sum if method == "linear_sum" else auction
    return solve(scores)[:, None]
