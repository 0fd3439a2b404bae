"""One door to all choosers for a training step: logits of this rank's tokens in, routes out."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.numerics import add
from mok_ref.routing import (
    RoutingOptions,
    check_logits,
    route_backward,
    route_forward,
    sigmoid_scores,
    softmax_scores,
)
from mok_ref.training.choosers import (
    LitterOptions,
    balanced_ids,
    chosen_saved,
    expert_choice_ids,
    litter_backward,
    litter_forward,
)
from mok_ref.training.ranks import Exchange

KINDS = ("topk", "litter", "expert_choice", "balanced", "replay")


@dataclass(frozen=True)
class RouterConfig:
    """How the layers of a model route.

    kind     "topk": per token, by `options`;  "litter": two levels, by `litter`
             "expert_choice": experts take tokens, by `options.score`; capacity N * top_k / E, at
             most `slots` experts per token;  "balanced": one expert, equal counts
             "replay": ids and weights from a file
    """

    kind: str = "topk"
    options: RoutingOptions = field(default_factory=lambda: RoutingOptions(2, renormalize=True))
    litter: LitterOptions | None = None
    slots: int | None = None
    method: str = "auto"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got kind={self.kind!r}")
        if (self.kind == "litter") != (self.litter is not None):
            raise ValueError(
                f"litter must be given exactly for kind='litter', got kind={self.kind!r}, "
                f"litter={self.litter!r}"
            )

    @property
    def num_slots(self) -> int:
        """K of the layer: slots per token."""
        if self.kind == "litter":
            assert self.litter is not None
            return self.litter.top_k
        if self.kind == "balanced":
            return 1
        if self.kind == "expert_choice":
            return self.slots or 2 * self.options.top_k
        return self.options.top_k

    def num_groups(self) -> int:
        """Litters whose balance is watched; 1 if experts are not grouped."""
        return self.litter.num_litters if self.litter else self.options.num_groups

    def num_logits(self, num_experts: int) -> int:
        """Rows of W_router: one per expert, before them one per litter."""
        return num_experts + (self.litter.num_litters if self.litter else 0)

    @property
    def score(self) -> str:
        if self.kind == "litter":
            return "softmax"
        return "sigmoid" if self.kind == "balanced" else self.options.score


@dataclass(frozen=True)
class Routed:
    """Routes of this rank's tokens and the way back to the logits."""

    topk_ids: np.ndarray
    topk_weights: np.ndarray
    scores: np.ndarray  # (T, E)
    backward: Callable[[np.ndarray, np.ndarray | None], np.ndarray]


def route(
    router: RouterConfig,
    logits: np.ndarray,
    choice_bias: np.ndarray | None,
    exchange: Exchange,
    counts: np.ndarray,
    replayed: tuple[np.ndarray, np.ndarray] | None = None,
) -> Routed:
    """Routes for logits (T, num_logits) of this rank; collective for whole-batch choosers.

    counts    (R,) tokens per rank
    replayed  ids and weights of this rank's tokens, for kind "replay"
    """
    if router.kind == "litter":
        assert router.litter is not None
        ids, weights, litter = litter_forward(logits, router.litter)
        return Routed(
            ids, weights, litter.product.scores, lambda dw, ds: litter_backward(litter, dw, ds)
        )
    if router.kind == "replay":
        return replay_route(logits, replayed, router.options.top_k)
    if router.kind == "topk":
        options = replace(router.options, choice_bias=choice_bias)
        ids, weights, saved = route_forward(logits, options)
        return Routed(ids, weights, saved.scores, lambda dw, ds: route_backward(saved, dw, ds))
    return whole_batch_route(router, logits, exchange, counts)


def replay_route(
    logits: np.ndarray, replayed: tuple[np.ndarray, np.ndarray] | None, top_k: int
) -> Routed:
    """Given ids and weights; the router gets no gradient from them."""
    if replayed is None:
        raise ValueError("replayed must be given for kind='replay', got None")
    ids, weights = replayed
    if ids.shape != (len(logits), top_k):
        raise ValueError(
            f"replayed ids must have shape (tokens, top_k), got {ids.shape}, "
            f"tokens={len(logits)}, {top_k=}"
        )
    zero = np.zeros_like(logits)
    return Routed(ids, weights, zero, lambda dw, ds: zero)


def whole_batch_route(
    router: RouterConfig, logits: np.ndarray, exchange: Exchange, counts: np.ndarray
) -> Routed:
    """Expert-choice and balanced assignment: every rank solves the same whole batch."""
    check_logits(logits, RoutingOptions(1))
    every = exchange.gather_rows("logits", logits, counts)
    is_open = every != -np.inf
    score = (softmax_scores if router.score == "softmax" else sigmoid_scores)(every, is_open)
    num_experts = logits.shape[1]
    if router.kind == "balanced":
        open_experts = np.flatnonzero(is_open.any(axis=0))
        chosen = balanced_ids(np.ascontiguousarray(every[:, open_experts]), router.method)
        ids = open_experts[chosen].astype(np.int32)
        options = RoutingOptions(1, "sigmoid")
    else:
        capacity = -(-len(every) * router.options.top_k // num_experts)
        ids = expert_choice_ids(score, is_open, capacity, router.num_slots)
        options = RoutingOptions(router.num_slots, router.options.score)
    first = int(counts[: exchange.rank].sum())
    mine = slice(first, first + len(logits))
    ids, weights, saved = chosen_saved(score[mine], is_open[mine], ids[mine], options)
    return Routed(ids, weights, saved.scores, lambda dw, ds: route_backward(saved, dw, ds))


def add_gradients(a: np.ndarray, b: np.ndarray | None) -> np.ndarray:
    """a + b, or a."""
    return a if b is None else add(a, b)


# --------------------------------------------------------------------------- replay files


def save_routes(path: Any, routes: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write ids and weights of consecutive layer calls (whole batch, ascending g) to an .npz."""
    arrays: dict[str, Any] = {"num_calls": np.int64(len(routes))}
    for call, (ids, weights) in enumerate(routes):
        arrays[f"ids_{call}"], arrays[f"weights_{call}"] = ids, weights
    np.savez_compressed(path, **arrays)


def load_routes(path: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read what save_routes wrote; no pickle. Raises ValueError for a missing key or a cut file."""
    whole = f"route file {path} must be a whole .npz, it is not"
    Path(path).stat()  # a missing file says so
    if not zipfile.is_zipfile(path):
        raise ValueError(whole)
    try:
        with np.load(path, allow_pickle=False) as file:
            calls = range(int(file["num_calls"]))
            return [(file[f"ids_{c}"], file[f"weights_{c}"]) for c in calls]
    except KeyError as error:
        raise ValueError(f"route file {path} must have all calls, missing {error}") from error
    except (zipfile.BadZipFile, EOFError, TypeError, zlib.error) as error:
        raise ValueError(whole) from error
