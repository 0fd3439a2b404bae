"""Who sends how much to whom: routing as counts, uniform, skewed, or recorded in a file.

`counts` (R, E) int64: routes from source rank r to expert e. The simulator needs no token values.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mok_ref.schedule import bit_reversed_order

from .errors import require

MOST_DRAWN_ROUTES = 6_000_000  # above this, counts are drawn directly, without token ids


@dataclass(frozen=True)
class Workload:
    """tokens (R,) per rank and counts (R, E) of routes; `topk_ids` (N, K) if they were drawn."""

    tokens: np.ndarray
    counts: np.ndarray
    title: str
    topk_ids: np.ndarray | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def expert_load(self) -> np.ndarray:
        """(E,) rows of each expert in the whole batch."""
        return self.counts.sum(axis=0)

    def rows_of_ranks(self, owner: np.ndarray) -> np.ndarray:
        """(R,) rows that each rank's experts receive under placement `owner` (E,)."""
        return np.bincount(owner, weights=self.expert_load, minlength=self.num_ranks)

    @cached_property
    def sources_by_expert(self) -> tuple[np.ndarray, np.ndarray]:
        """Source rank of every row, experts ascending, canonical order inside; (E+1,) starts.

        Needs token ids. The order is contract section 4's: ascending (bitreverse(g), slot).
        """
        assert self.topk_ids is not None
        num_tokens, top_k = self.topk_ids.shape
        source = np.repeat(np.arange(self.num_ranks, dtype=np.int32), self.tokens)
        turn = np.empty(num_tokens, np.int64)
        turn[bit_reversed_order(num_tokens)] = np.arange(num_tokens)
        key = self.topk_ids.astype(np.int64) * num_tokens + turn[:, None]
        key, source = key.ravel(), np.repeat(source, top_k)
        is_route = self.topk_ids.ravel() >= 0
        key, source = key[is_route], source[is_route]
        starts = np.concatenate([[0], np.cumsum(self.expert_load)])
        return source[np.argsort(key, kind="stable")], starts

    def traffic(self, owner: np.ndarray) -> np.ndarray:
        """(R, R) rows that travel from source rank to owner rank (the diagonal stays at home)."""
        result = np.zeros((self.num_ranks, self.num_ranks))
        np.add.at(result.T, owner, self.counts.T)
        return result


def popularity(num_experts: int, skew: float, rng: np.random.Generator) -> np.ndarray:
    """(E,) probabilities: Zipf with exponent `skew` over a random order; 0 is uniform."""
    require(skew >= 0, f"skew must be >= 0, got {skew=}")
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -skew
    return rng.permutation(weights / weights.sum())


def draw_ids(
    num_tokens: int, top_k: int, probability: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(T, K) int32 distinct experts per token, drawn in proportion to `probability`.

    Slots that repeat an earlier one are drawn again, which is drawing without replacement. Tokens
    that are still undecided after many rounds (extreme skew) take the top of a Gumbel race.
    With top_k > E slots repeat, as given ids may.
    """
    num_experts = len(probability)
    edges = np.cumsum(probability)
    edges /= edges[-1]
    ids = np.searchsorted(edges, rng.random((num_tokens, top_k)), side="right").astype(np.int32)
    ids = np.minimum(ids, num_experts - 1)
    if top_k > num_experts:
        return ids
    pending = np.arange(num_tokens)
    for _ in range(60):
        repeated = repeats(ids[pending])
        pending = pending[repeated.any(axis=1)]
        repeated = repeated[repeated.any(axis=1)]
        if not len(pending):
            return ids
        fresh = np.searchsorted(edges, rng.random(repeated.sum()), side="right")
        block = ids[pending]
        block[repeated] = np.minimum(fresh, num_experts - 1)
        ids[pending] = block
    ids[pending] = gumbel_top(len(pending), top_k, probability, rng)
    return ids


def gumbel_top(
    num_tokens: int, top_k: int, probability: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(T, K) the K largest of log p + Gumbel noise: drawing without replacement in one go."""
    noise = rng.gumbel(size=(num_tokens, len(probability)))
    keys = np.log(np.maximum(probability, 1e-300)) + noise
    return np.argsort(-keys, axis=1)[:, :top_k].astype(np.int32)


def repeats(ids: np.ndarray) -> np.ndarray:
    """(T, K) bool: the slot's expert occurs in an earlier slot of the same token."""
    top_k = ids.shape[1]
    result = np.zeros(ids.shape, bool)
    for slot in range(1, top_k):
        result[:, slot] = (ids[:, :slot] == ids[:, slot : slot + 1]).any(axis=1)
    return result


def counts_of(topk_ids: np.ndarray, tokens: np.ndarray, num_experts: int) -> np.ndarray:
    """(R, E) routes per source rank and expert; ids of -1 are no routes."""
    rank = np.repeat(np.arange(len(tokens)), tokens)
    key = rank[:, None] * num_experts + topk_ids
    flat = key[topk_ids >= 0]
    return np.bincount(flat, minlength=len(tokens) * num_experts).reshape(len(tokens), num_experts)


def make_workload(
    num_ranks: int,
    tokens_per_rank: int,
    num_experts: int,
    top_k: int,
    skew: float = 0.0,
    seed: int = 0,
    with_ids: bool = True,
) -> Workload:
    """Routing of one batch: token ids where that is cheap and wanted, else multinomial counts."""
    rng = np.random.default_rng([seed, num_ranks])
    chances = popularity(num_experts, skew, rng)
    tokens = np.full(num_ranks, tokens_per_rank, np.int64)
    title = "uniform" if skew == 0 else f"Zipf {skew:g}"
    if with_ids and num_ranks * tokens_per_rank * top_k <= MOST_DRAWN_ROUTES:
        ids = draw_ids(num_ranks * tokens_per_rank, top_k, chances, rng)
        return Workload(tokens, counts_of(ids, tokens, num_experts), title, ids)
    chances = inclusion(chances, top_k) if top_k <= num_experts else chances * top_k
    counts = rng.multinomial(tokens_per_rank * top_k, chances / chances.sum(), size=num_ranks)
    return Workload(tokens, counts.astype(np.int64), title)


def inclusion(probability: np.ndarray, top_k: int) -> np.ndarray:
    """(E,) chance that an expert is among a token's K: 1 - (1-p)^m with m chosen to sum to K."""
    low, high = 1.0, 1e9
    for _ in range(80):
        middle = (low * high) ** 0.5
        total = -np.expm1(middle * np.log1p(-np.minimum(probability, 1 - 1e-12))).sum()
        low, high = (middle, high) if total < top_k else (low, middle)
    return -np.expm1(low * np.log1p(-np.minimum(probability, 1 - 1e-12)))


def all_to_one(num_ranks: int, tokens_per_rank: int, owner: np.ndarray, top_k: int) -> Workload:
    """The worst case under placement `owner` (E,): every token chooses the same K experts, all of
    the rank that owns most (and of the next ranks, if it owns fewer than K)."""
    num_experts = len(owner)
    owned = np.bincount(owner, minlength=num_ranks)
    order = np.lexsort((np.arange(num_experts), owner, -owned[owner]))
    tokens = np.full(num_ranks, tokens_per_rank, np.int64)
    counts = np.zeros((num_ranks, num_experts), np.int64)
    chosen = order[np.arange(top_k) % num_experts]
    counts[:] = np.bincount(chosen, minlength=num_experts) * tokens_per_rank
    return Workload(tokens, counts, "all to one")


def recorded_workload(
    path: str | Path, num_ranks: int, tokens_per_rank: int, num_experts: int, top_k: int
) -> Workload:
    """Recorded routing as a batch: the tokens of an .npz file with `topk_ids` (N, K), in order, as
    often as num_ranks * tokens_per_rank tokens need.

    Raises: ValueError naming the file and what is wrong with it, another E or K included.
    """
    path = Path(path)
    ids = recorded_ids(path, num_experts, top_k)
    tokens = np.full(num_ranks, tokens_per_rank, np.int64)
    total = num_ranks * tokens_per_rank
    if total * top_k <= MOST_DRAWN_ROUTES:
        ids = np.take(ids, np.arange(total) % len(ids), axis=0)
        return Workload(tokens, counts_of(ids, tokens, num_experts), path.name, ids)
    counts = np.stack([window_counts(ids, r * tokens_per_rank, tokens_per_rank, num_experts)
                       for r in range(num_ranks)])  # fmt: skip
    return Workload(tokens, counts, path.name)


def window_counts(ids: np.ndarray, first: int, num: int, num_experts: int) -> np.ndarray:
    """(E,) routes of `num` tokens from token `first` on, the file's tokens repeated for ever."""
    rounds, left = divmod(num, len(ids))
    window = np.take(ids, first + np.arange(left), axis=0, mode="wrap")
    one = np.bincount(window[window >= 0], minlength=num_experts)
    return one + rounds * np.bincount(ids[ids >= 0], minlength=num_experts)


def recorded_ids(path: Path, num_experts: int, top_k: int) -> np.ndarray:
    """(N, K) int32 of a routing file that fits a model of E experts and K slots."""
    require(path.is_file(), f"routing file must exist, got {str(path)!r}")
    require(zipfile.is_zipfile(path), f"{path.name}: not a readable .npz file")
    try:
        with np.load(path, allow_pickle=False) as data:
            ids = np.asarray(data["topk_ids"]) if "topk_ids" in data else None
            own_experts = len(data["w_gate"]) if "w_gate" in data else num_experts
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile):
        raise ValueError(f"{path.name}: not a readable .npz file of plain arrays") from None
    require(ids is not None, f"{path.name}: missing topk_ids")
    assert ids is not None
    require(
        ids.ndim == 2 and ids.dtype.kind == "i" and ids.size > 0,
        f"{path.name}: topk_ids must be (N,K) integers, got shape {ids.shape} {ids.dtype}",
    )
    require(
        ids.shape[1] == top_k,
        f"{path.name}: topk_ids must have the model's {top_k} slots per token, got {ids.shape[1]}",
    )
    require(
        own_experts == num_experts,
        f"{path.name}: must be of the model's {num_experts} experts, got {own_experts}",
    )
    require(
        bool((ids >= -1).all() and (ids < num_experts).all()),
        f"{path.name}: topk_ids must lie in -1..{num_experts - 1}, got {ids.min()}..{ids.max()}",
    )
    return ids.astype(np.int32)


def foreign_routing(work: Workload) -> str:
    """Why recorded routing looks like another model's: the upper half of the experts is never
    chosen, although there are many routes for each. "" where it does not."""
    load = work.expert_load
    used = 1 + int(np.flatnonzero(load).max()) if load.any() else 0
    if 2 * used > len(load) or load.sum() < 8 * len(load):
        return ""
    return (
        f"{work.title} never chooses experts {used} to {len(load) - 1}: "
        "is it routing of this model?"
    )
