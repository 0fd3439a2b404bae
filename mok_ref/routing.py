"""Routing: logits, scores, (grouped) top-k, weights; forward and backward (spec R1 to R12).

A router turns each token into `top_k` (expert, weight) pairs. Everything here is per token: no
value depends on another token, so neither the batch nor the number of ranks can change a bit.

All comparisons are made on integer keys (`choice_key`), all float32 arithmetic through
`mok_ref.numerics`, so that NumPy, CuPy and CUDA agree in every bit, subnormal numbers included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mok_ref.config import float32_of, is_int, is_real, shown
from mok_ref.numerics import add, array_module, div, exp, mul, sigmoid, sub, to_bf16, to_float32
from mok_ref.tensor_core import tc

Array = Any  # numpy.ndarray or cupy.ndarray

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")
_REALS = ("float32", "float64")  # float64 is the oracle, for logits; a bias is rounded to float32


@dataclass(frozen=True, eq=False)
class RoutingOptions:
    """How a token chooses its experts. Validated once, here; `check_num_experts` does the rest.

    top_k         slots per token, K
    score         "softmax" or "sigmoid": what a logit becomes
    choice_bias   (E,) float32 or None: added to the scores for the choice only, never to weights
    num_groups    experts are cut into this many equal groups ("litters" of "kittens")
    keep_groups   groups that stay open for a token; None keeps all of them
    group_score   "top2": sum of a group's two best choices; "max": its best choice
    renormalize   divide the chosen scores by their sum
    scale         factor on the weights, after `renormalize`
    """

    top_k: int
    score: str = "softmax"
    choice_bias: Array | None = None
    num_groups: int = 1
    keep_groups: int | None = None
    group_score: str = "top2"
    renormalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups"):
            value = getattr(self, name)
            if not (is_int(value) and value >= 1):
                raise ValueError(f"{name} must be an integer >= 1, got {shown(value)}")
            object.__setattr__(self, name, int(value))
        for name, allowed in (("score", SCORES), ("group_score", GROUP_SCORES)):
            value = getattr(self, name)
            if not (isinstance(value, str) and value in allowed):
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")
        if self.keep_groups is not None:
            if not (is_int(self.keep_groups) and 1 <= self.keep_groups <= self.num_groups):
                raise ValueError(
                    "keep_groups must be an integer in 1..num_groups, got "
                    f"keep_groups={shown(self.keep_groups)}, num_groups={self.num_groups}"
                )
            object.__setattr__(self, "keep_groups", int(self.keep_groups))
        if not isinstance(self.renormalize, (bool, np.bool_)):
            raise ValueError(f"renormalize must be True or False, got {shown(self.renormalize)}")
        if not (is_real(self.scale) and math.isfinite(float32_of(self.scale))):
            raise ValueError(f"scale must be a finite float32, got {shown(self.scale)}")
        object.__setattr__(self, "scale", float(self.scale))
        if self.choice_bias is not None:
            _check_bias(self.choice_bias)

    @property
    def num_kept(self) -> int:
        return self.num_groups if self.keep_groups is None else self.keep_groups

    def check_num_experts(self, num_experts: int) -> None:
        """Refuse sizes that do not fit `num_experts` logits per token."""
        if num_experts % self.num_groups:
            raise ValueError(
                "num_experts must be divisible by num_groups, "
                f"got {num_experts=}, num_groups={self.num_groups}"
            )
        num_open = self.num_kept * (num_experts // self.num_groups)
        if self.top_k > num_open:
            raise ValueError(
                "top_k must be at most keep_groups * (num_experts / num_groups), "
                f"got top_k={self.top_k}, {num_experts=}, num_groups={self.num_groups}, "
                f"keep_groups={self.num_kept}"
            )
        if self.choice_bias is not None:
            bias = self.choice_bias
            if tuple(bias.shape) != (num_experts,):
                raise ValueError(
                    "choice_bias must have shape (num_experts,), "
                    f"got {tuple(bias.shape)}, {num_experts=}"
                )


def _check_bias(bias: Any) -> None:
    """An array whose values are finite once they are float32, which is what they are added as."""
    if str(getattr(bias, "dtype", None)) not in _REALS:
        got = getattr(bias, "dtype", type(bias).__name__)
        raise ValueError(f"choice_bias must be {' or '.join(_REALS)}, got {got}")
    if not bool(array_module(bias).isfinite(to_float32(bias)).all()):
        raise ValueError("choice_bias must be finite as float32, got a NaN or infinite value")


@dataclass(frozen=True, eq=False)
class RoutingSaved:
    """What `route_backward` needs of `route_forward`.

    scores     (T, E) float32, +0 for closed experts
    is_open    (T, E) bool
    topk_ids   (T, K) int32
    ratio      (T, K) float32: weights before `scale` (R8)
    total      (T,) float32: sum of the chosen scores (R7)
    """

    options: RoutingOptions
    scores: Array
    is_open: Array
    topk_ids: Array
    ratio: Array
    total: Array


def router_logits(x: Array, w_router: Array, arithmetic: str = "exact") -> Array:
    """Logits of every token and expert (spec R1).

        logits = tc(x, W_router)

    x         (T, H) bf16
    w_router  (E, H) bf16
    Returns   (T, E) float32
    Order:    one tc chain over H.
    CUDA:     cuda_src/portable.cu: grouped_product
    """
    return tc(x, w_router, arithmetic=arithmetic)


def check_logits(logits: Array, options: RoutingOptions) -> None:
    """Refuse logits that no choice can be defined on: wrong dtype or rank, NaN, +Inf."""
    if str(getattr(logits, "dtype", None)) not in _REALS:
        got = getattr(logits, "dtype", type(logits).__name__)
        raise ValueError(f"logits must be float32 (float64 for the oracle), got {got}")
    if logits.ndim != 2:
        raise ValueError(f"logits must have shape (tokens, experts), got {tuple(logits.shape)}")
    options.check_num_experts(logits.shape[1])
    xp = array_module(logits)
    refused = xp.isnan(logits) | (logits == xp.inf)
    if bool(refused.any()):
        token, expert = (int(i) for i in xp.argwhere(refused)[0])
        raise ValueError(
            f"logits must not be NaN or +Inf, got {float(logits[token, expert])} "
            f"at {token=}, {expert=}"
        )


def softmax_scores(logits: Array, is_open: Array) -> Array:
    """Softmax over the open experts of each token (spec R2).

        m = max over open e of logit[e]
        p[e] = exp(logit[e] - m) if open, else +0
        score[e] = p[e] / Z,   Z = sum of p[e], e ascending

    logits, is_open  (T, E) float32, bool
    Returns          (T, E) float32; a token without open experts has +0 everywhere
    Order:  e ascending, one float32 accumulator from +0.
    """
    xp = array_module(logits)
    best, has_open, _ = take_best(choice_key(logits, is_open))
    top = xp.where(
        has_open,
        xp.take_along_axis(logits, best[:, None], axis=1)[:, 0],
        xp.zeros_like(logits[:, 0]),
    )
    shifted = sub(xp.where(is_open, logits, top[:, None]), top[:, None])
    p = xp.where(is_open, exp(shifted), xp.zeros_like(shifted))
    z = xp.zeros_like(p[:, 0])
    for expert in range(p.shape[1]):
        z = add(z, p[:, expert])
    z = xp.where(has_open, z, xp.ones_like(z))
    return div(p, z[:, None])


def sigmoid_scores(logits: Array, is_open: Array) -> Array:
    """Independent scores (spec R3): score[e] = sigmoid(logit[e]) if open, else +0."""
    xp = array_module(logits)
    score = sigmoid(xp.where(is_open, logits, xp.zeros_like(logits)))
    return xp.where(is_open, score, xp.zeros_like(score))


def choice_key(choice: Array, is_open: Array) -> Array:
    """Integers in the order of the choices; closed experts get the lowest integer of all.

    A float's bits, read as an integer, are ordered like the float once negative ones are flipped.
    Comparing integers keeps subnormal choices apart on devices whose comparisons flush them.
    -0 counts as +0.
    """
    xp = array_module(choice)
    integer = xp.dtype(f"int{8 * choice.dtype.itemsize}")
    limits = np.iinfo(integer)
    bits = xp.ascontiguousarray(choice).view(integer)
    bits = xp.where(bits == limits.min, xp.zeros_like(bits), bits)  # -0 is +0
    ordered = xp.where(bits < 0, bits ^ integer.type(limits.max), bits)
    return xp.where(is_open, ordered, xp.full_like(ordered, limits.min))


def take_best(keys: Array) -> tuple[Array, Array, Array]:
    """The greatest key of each row, the lower index on ties.

    Returns (index, found, keys with that entry closed); `found` is False where all were closed.
    """
    xp = array_module(keys)
    closed = np.iinfo(keys.dtype).min
    index = keys.argmax(axis=-1)  # the first of equals
    found = xp.take_along_axis(keys, index[..., None], axis=-1)[..., 0] > closed
    is_taken = xp.arange(keys.shape[-1]) == index[..., None]
    return index, found, xp.where(is_taken, xp.full_like(keys, closed), keys)


def group_choice(choice: Array, is_open: Array, options: RoutingOptions) -> tuple[Array, Array]:
    """Score of each group and whether it has an open expert (spec R5).

        "max":   best choice in the group
        "top2":  best + second best; the best alone if only one expert is open

    choice, is_open  (T, E)
    Returns          (T, G) float32, (T, G) bool
    """
    xp = array_module(choice)
    shape = (choice.shape[0], options.num_groups, choice.shape[1] // options.num_groups)
    choice, is_open = choice.reshape(shape), is_open.reshape(shape)
    best_idx, has_best, keys = take_best(choice_key(choice, is_open))
    best = xp.take_along_axis(choice, best_idx[..., None], axis=-1)[..., 0]
    if options.group_score == "max":
        return best, has_best
    second_idx, has_second, _ = take_best(keys)
    second = xp.take_along_axis(choice, second_idx[..., None], axis=-1)[..., 0]
    return xp.where(has_second, add(best, second), best), has_best


def keep_best_groups(choice: Array, is_open: Array, options: RoutingOptions) -> Array:
    """Close every expert outside the token's `keep_groups` best groups (spec R5).

    Ties go to the lower group. Returns is_open (T, E) restricted to the kept groups.
    """
    if options.num_kept == options.num_groups:
        return is_open
    xp = array_module(choice)
    keys = choice_key(*group_choice(choice, is_open, options))
    is_kept = xp.zeros(keys.shape, dtype=bool)
    for _ in range(options.num_kept):
        index, found, keys = take_best(keys)
        is_kept |= (xp.arange(keys.shape[1]) == index[:, None]) & found[:, None]
    group_size = choice.shape[1] // options.num_groups
    return is_open & xp.repeat(is_kept, group_size, axis=1)


def choose_topk(choice: Array, is_open: Array, top_k: int) -> Array:
    """The `top_k` best open experts of each token (spec R6).

    choice, is_open  (T, E)
    Returns          (T, K) int32, descending choice, ties to the lower id, -1 where none is left
    """
    xp = array_module(choice)
    keys = choice_key(choice, is_open)
    topk_ids = xp.full((choice.shape[0], top_k), -1, dtype=xp.int32)
    for slot in range(top_k):
        index, found, keys = take_best(keys)
        topk_ids[:, slot] = xp.where(found, index, -1)
    return topk_ids


def route_weights(
    scores: Array, topk_ids: Array, options: RoutingOptions
) -> tuple[Array, Array, Array]:
    """Weights of the chosen experts (spec R7, R8, R9).

        total = sum of score[id[k]], k ascending, routes only
        ratio[k] = score[id[k]] / total   (0 if total = 0)   if renormalize, else score[id[k]]
        weight[k] = ratio[k] * scale

    A slot of -1 has weight and ratio +0: the zero is put in after the product, whose sign would be
    that of `scale`.

    Returns (topk_weights (T, K), ratio (T, K), total (T,)), float32; +0 for a slot of -1
    Order:  k ascending, one float32 accumulator from +0.
    """
    xp = array_module(scores)
    chosen = xp.take_along_axis(scores, xp.maximum(topk_ids, 0), axis=1)
    is_route, zero = topk_ids >= 0, xp.zeros_like(chosen)
    chosen = xp.where(is_route, chosen, zero)
    total = xp.zeros_like(scores[:, 0])
    for slot in range(topk_ids.shape[1]):
        total = add(total, chosen[:, slot])
    ratio = chosen
    if options.renormalize:
        divisor = xp.where(is_zero(total), xp.ones_like(total), total)
        ratio = div(chosen, divisor[:, None])  # chosen is 0 where total is
    weights = xp.where(is_route, mul(ratio, scale_of(scores, options)), zero)
    return weights, ratio, total


def is_zero(value: Array) -> Array:
    """value == 0 by its bits: a comparison of floats may flush subnormal numbers on a device."""
    return choice_key(value, array_module(value).ones(value.shape, dtype=bool)) == 0


def scale_of(like: Array, options: RoutingOptions) -> Array:
    """`scale`, rounded to float32, in the dtype and array module of `like`."""
    return array_module(like).asarray(np.float32(float32_of(options.scale)), dtype=like.dtype)


def choice_of(scores: Array, options: RoutingOptions) -> Array:
    """What experts are chosen by (spec R4): score + choice_bias; the bias enters nothing else."""
    if options.choice_bias is None:
        return scores
    bias = to_float32(array_module(scores).asarray(options.choice_bias))
    return add(scores, bias[None, :])


def route_forward(logits: Array, options: RoutingOptions) -> tuple[Array, Array, RoutingSaved]:
    """Choose experts and weights for every token (spec R2 to R9).

    logits   (T, E) float32; -Inf closes an expert for that token
    Returns  topk_ids (T, K) int32 (-1: no open expert left), topk_weights (T, K) float32, saved
    Order:   as in softmax_scores (e ascending) and route_weights (k ascending).
    Raises:  ValueError if a logit is NaN or +Inf, or the options do not fit E.
    CUDA:    cuda_src/routing.cuh: route_forward
    """
    check_logits(logits, options)
    is_open = logits != -array_module(logits).inf
    score_fn = softmax_scores if options.score == "softmax" else sigmoid_scores
    scores = score_fn(logits, is_open)
    choice = choice_of(scores, options)
    topk_ids = choose_topk(choice, keep_best_groups(choice, is_open, options), options.top_k)
    topk_weights, ratio, total = route_weights(scores, topk_ids, options)
    saved = RoutingSaved(options, scores, is_open, topk_ids, ratio, total)
    return topk_ids, topk_weights, saved


def route_weights_backward(saved: RoutingSaved, d_topk_weights: Array) -> Array:
    """Gradient of the chosen scores (spec R10), from weight[k] = ratio[k] * scale.

        u[k] = d_weight[k] * scale
        renormalize:  dot = sum of u[k] * ratio[k], k ascending, routes only
                      d_chosen[k] = (u[k] - dot) / total    (+0 if total = 0)
        otherwise:    d_chosen[k] = u[k]

    d_topk_weights  (T, K) float32
    Returns         (T, K) float32, +0 for a slot of -1
    Order:  k ascending, product rounded, then sum rounded, from +0.
    """
    xp = array_module(d_topk_weights)
    is_route = saved.topk_ids >= 0
    zero = xp.zeros_like(d_topk_weights)
    u = xp.where(is_route, mul(d_topk_weights, scale_of(d_topk_weights, saved.options)), zero)
    if not saved.options.renormalize:
        return u
    dot = zero[:, 0]
    for slot in range(u.shape[1]):
        term = add(dot, mul(u[:, slot], saved.ratio[:, slot]))
        dot = xp.where(is_route[:, slot], term, dot)
    has_total = ~is_zero(saved.total)
    divisor = xp.where(has_total, saved.total, xp.ones_like(saved.total))
    d_chosen = div(sub(u, dot[:, None]), divisor[:, None])
    return xp.where(is_route & has_total[:, None], d_chosen, zero)


def scores_backward(saved: RoutingSaved, d_scores: Array) -> Array:
    """Gradient of the logits from the gradient of the scores (spec R11).

        softmax:  dot = sum of d_score[e] * score[e], e ascending
                  d_logit[e] = score[e] * (d_score[e] - dot)
        sigmoid:  d_logit[e] = d_score[e] * (score[e] * (1 - score[e]))
        closed:   d_logit[e] = +0

    d_scores  (T, E) float32
    Returns   (T, E) float32
    Order:  e ascending over all experts, product rounded, then sum rounded, from +0. (Where
            d_score is +0 the term is +0 too: a kernel may visit the chosen experts alone, by id.)
    """
    xp = array_module(d_scores)
    scores, zero = saved.scores, xp.zeros_like(d_scores)
    if saved.options.score == "sigmoid":
        d_logits = mul(d_scores, mul(scores, sub(xp.ones_like(scores), scores)))
        return xp.where(saved.is_open, d_logits, zero)
    dot = zero[:, 0]
    for expert in range(scores.shape[1]):
        dot = add(dot, mul(d_scores[:, expert], scores[:, expert]))
    return xp.where(saved.is_open, mul(scores, sub(d_scores, dot[:, None])), zero)


def scatter_chosen(saved: RoutingSaved, d_chosen: Array) -> Array:
    """Put the gradient of chosen scores at their experts, +0 elsewhere. A token's ids differ."""
    xp = array_module(d_chosen)
    d_scores = xp.zeros_like(saved.scores)
    experts = xp.arange(saved.scores.shape[1])
    for slot in range(d_chosen.shape[1]):
        is_here = saved.topk_ids[:, slot, None] == experts
        d_scores = xp.where(is_here, d_chosen[:, slot, None], d_scores)
    return d_scores


def route_backward(
    saved: RoutingSaved, d_topk_weights: Array, d_scores: Array | None = None
) -> Array:
    """Gradient of the logits (spec R10 to R12).

    d_topk_weights  (T, K) float32, from the layer's backward
    d_scores        (T, E) float32 or None: gradient that balance losses send to the scores,
                    added to the routes' gradient (routes + balance, one rounding)
    Returns         d_logits (T, E) float32
    Order:  as in route_weights_backward and scores_backward.
    CUDA:   cuda_src/routing.cuh: route_backward
    """
    total = scatter_chosen(saved, route_weights_backward(saved, d_topk_weights))
    if d_scores is not None:
        total = add(total, d_scores)
    return scores_backward(saved, total)


def router_dx(d_logits: Array, w_router: Array, arithmetic: str = "exact") -> Array:
    """The router's share of dx (spec R12), added last in the layer's sum for dx.

        dx_router = bf16(tc(bf16(d_logits), W_router^T))

    d_logits (T, E) float32, w_router (E, H) bf16. Returns (T, H) bf16.
    Order:  one tc chain over E.
    """
    return to_bf16(tc(to_bf16(d_logits), w_router.T, arithmetic=arithmetic))


def router_dw(
    d_logits: Array, x: Array, carry: Array | None = None, arithmetic: str = "exact"
) -> Array:
    """This rank's link of the ordered chain for W_router's gradient (spec R12).

        dW_router = tc(bf16(d_logits)^T, x^T, c = carry)

    d_logits (T, E) float32, x (T, H) bf16, carry (E, H) float32 from the rank below.
    Returns  (E, H) float32: the next rank's carry; on the last rank the gradient.
    Order:   ascending global token, one tc chain; each rank starts a new group of 16.
    """
    return tc(to_bf16(d_logits).T, x.T, carry, arithmetic=arithmetic)
