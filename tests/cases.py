"""Named sizes and routing patterns, and a whole batch through the layer at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mok_ref import (
    ExpertWeights,
    Gradients,
    MoEConfig,
    Workspace,
    moe_backward,
    moe_forward,
    run_ranks,
)
from mok_ref.numerics import as_values
from mok_ref.schedule import default_splits
from mok_ref.testing import random_bf16, random_routes

# --------------------------------------------------------------------------- routing patterns

Pattern = Callable[[np.random.Generator, int, int, int], np.ndarray]


def _random(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    return random_routes(rng, tokens, experts, top_k)[0]


def _holes(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    return random_routes(rng, tokens, experts, top_k, missing=0.4)[0]


def _first_quarter(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    return rng.integers(0, max(1, experts // 4), (tokens, top_k), dtype=np.int32)


def _one_expert(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    return np.full((tokens, top_k), experts - 1, np.int32)


def _none(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    return np.full((tokens, top_k), -1, np.int32)


def _repeated(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """Any slot any expert: the same one may come twice in a token."""
    return rng.integers(-1, experts, (tokens, top_k), dtype=np.int32)


def _skewed(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """Holes, and half of the routes go to a twelfth of the experts: long and short segments."""
    ids = _holes(rng, tokens, experts, top_k)
    busy = rng.integers(0, max(1, experts // 12), ids.shape, dtype=np.int32)
    return np.where((ids >= 0) & (rng.random(ids.shape) < 0.5), busy, ids)


PATTERNS: dict[str, Pattern] = {
    "skewed": _skewed,
    "random": _random,
    "holes": _holes,
    "first-quarter": _first_quarter,
    "one-expert": _one_expert,
    "no-route": _none,
    "repeated": _repeated,
}


def ids_with_rows(
    rng: np.random.Generator, rows_per_expert: list[int], top_k: int = 2
) -> np.ndarray:
    """(T, K) ids that give expert e exactly rows_per_expert[e] rows, in random order."""
    flat = np.repeat(np.arange(len(rows_per_expert), dtype=np.int32), rows_per_expert)
    rng.shuffle(flat)
    flat = np.concatenate([flat, np.full(-len(flat) % top_k, -1, np.int32)])
    return flat.reshape(-1, top_k)


# --------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Sizes:
    """One awkward case as data; routed and shared widths always differ."""

    num_tokens: int = 37
    hidden: int = 48
    inner: int = 24
    experts: int = 6
    top_k: int = 3
    shared: int = 40
    limit: float | None = None
    dtype: str = "bf16"
    pattern: str = "random"
    scale: float = 1.0


SIZES = {
    "plain": Sizes(),
    "no-shared": Sizes(shared=0),
    "clamp": Sizes(limit=0.75),
    "holes": Sizes(pattern="holes", num_tokens=150, experts=5),
    "one-expert": Sizes(pattern="one-expert", num_tokens=70, top_k=2, shared=0),
    "more-slots-than-experts": Sizes(experts=2, top_k=5, pattern="repeated"),
    "no-route": Sizes(pattern="no-route"),
    "no-token": Sizes(num_tokens=0),
    "one-token": Sizes(num_tokens=1),
    "odd-widths": Sizes(hidden=37, inner=19, shared=21),
    "single-column": Sizes(hidden=1, inner=1, shared=2),
    "mxfp8": Sizes(dtype="mxfp8", hidden=80, inner=40, shared=24),
    "mxfp8-clamp": Sizes(dtype="mxfp8", limit=1.0, shared=0, pattern="holes"),
}


@dataclass(frozen=True)
class Case:
    """A whole batch: tokens in global order, all experts."""

    sizes: Sizes
    x: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    weights: ExpertWeights
    shared: ExpertWeights | None
    dy: np.ndarray

    def config(self, ep_size: int, **options: Any) -> MoEConfig:
        s = self.sizes
        base = dict(
            hidden_size=s.hidden,
            intermediate_size=s.inner,
            num_experts=s.experts,
            top_k=s.top_k,
            ep_size=ep_size,
            shared_intermediate_size=s.shared,
            swiglu_limit=s.limit,
            dtype=s.dtype,
        )
        return MoEConfig(**{**base, **options})

    def with_ids(self, topk_ids: np.ndarray) -> Case:
        return replace(self, topk_ids=np.asarray(topk_ids, np.int32))

    def widened(self) -> Case:
        """The same values in float64, for the oracle arithmetic."""

        def wide(values: np.ndarray) -> np.ndarray:
            return as_values(values).astype(np.float64)

        return replace(
            self,
            x=wide(self.x),
            topk_weights=wide(self.topk_weights),
            weights=ExpertWeights(*map(wide, self.weights)),
            shared=None if self.shared is None else ExpertWeights(*map(wide, self.shared)),
            dy=wide(self.dy),
        )


def make_case(sizes: Sizes, seed: int = 0, topk_ids: np.ndarray | None = None) -> Case:
    """Random tokens and weights of unit output size; ids by the sizes' pattern or as given."""
    rng = np.random.default_rng([seed, 1])
    if topk_ids is not None:
        sizes = replace(sizes, num_tokens=len(topk_ids), top_k=topk_ids.shape[1])
    s = sizes
    ids = topk_ids
    if ids is None:
        ids = PATTERNS[s.pattern](rng, s.num_tokens, s.experts, s.top_k)
    shared = None
    if s.shared:
        shared = ExpertWeights(
            random_bf16(rng, (s.shared, s.hidden), s.hidden**-0.5),
            random_bf16(rng, (s.shared, s.hidden), s.hidden**-0.5),
            random_bf16(rng, (s.hidden, s.shared), s.shared**-0.5),
        )
    return Case(
        sizes,
        random_bf16(rng, (s.num_tokens, s.hidden), s.scale),
        ids,
        rng.standard_normal((s.num_tokens, s.top_k)).astype(np.float32),
        ExpertWeights(
            random_bf16(rng, (s.experts, s.inner, s.hidden), s.hidden**-0.5),
            random_bf16(rng, (s.experts, s.inner, s.hidden), s.hidden**-0.5),
            random_bf16(rng, (s.experts, s.hidden, s.inner), s.inner**-0.5),
        ),
        shared,
        random_bf16(rng, (s.num_tokens, s.hidden)),
    )


# --------------------------------------------------------------------------- running


def splits_of(num_tokens: int, ranks: int | list[int]) -> np.ndarray:
    """Tokens per rank: as given, or the default units of 16."""
    return default_splits(num_tokens, ranks) if isinstance(ranks, int) else np.asarray(ranks)


def run_case(
    case: Case,
    ranks: int | list[int] = 1,
    save: str = "all",
    backward: bool = True,
    main_grad: Gradients | None = None,
    poison: Callable[[Any], None] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """The batch on virtual ranks; tensors of the whole batch and of all experts, by name."""
    splits = splits_of(len(case.x), ranks)
    config = case.config(len(splits), **options)

    def work(heap: Any) -> dict[str, np.ndarray]:
        workspace = Workspace(config, heap, int(splits.max()))
        if poison:
            poison(workspace)
        return rank_step(heap, case, config, splits, workspace, save, backward, main_grad)

    return assemble(config, run_ranks(len(splits), work))


def rank_step(
    heap: Any,
    case: Case,
    config: MoEConfig,
    splits: np.ndarray,
    workspace: Workspace | None = None,
    save: str = "all",
    backward: bool = True,
    main_grad: Gradients | None = None,
) -> dict[str, np.ndarray]:
    """Forward and backward of one rank on its share of the batch and its experts."""
    first = int(splits[: heap.rank].sum())
    mine = slice(first, first + int(splits[heap.rank]))
    experts = config.experts_of(heap.rank)
    y, context = moe_forward(
        config,
        heap,
        case.x[mine],
        case.topk_ids[mine],
        case.topk_weights[mine],
        ExpertWeights(*(w[experts] for w in case.weights)),
        case.shared,
        workspace,
        save,
    )
    out = {"y": y}
    if backward:
        if main_grad is not None:
            parts = {n: getattr(main_grad, n)[experts] for n in ("dw_gate", "dw_up", "dw_down")}
            main_grad = replace(main_grad, **parts)
        grads = moe_backward(context, case.dy[mine], main_grad)
        out |= {name: value for name, value in vars(grads).items() if value is not None}
    return out


def assemble(config: MoEConfig, parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One batch from the ranks' parts; replicated gradients must agree on every rank."""
    whole = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if name.startswith("shared_"):
            for rank, piece in enumerate(pieces):
                assert piece.tobytes() == pieces[0].tobytes(), f"{name} differs on rank {rank}"
            whole[name] = pieces[0]
        elif name.startswith("dw_"):
            whole[name] = np.zeros((config.num_experts, *pieces[0].shape[1:]), pieces[0].dtype)
            for rank, piece in enumerate(pieces):
                whole[name][config.experts_of(rank)] = piece
        else:
            whole[name] = np.concatenate(pieces)
    return whole
