"""The pull schedule: which rank computes which row, where the row comes from, in which order.

Every rank builds its own table from the routes of the whole batch, so nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig

PADDING = -1  # peer_rank of a padding row


@dataclass(frozen=True)
class Schedule:
    """One rank's rows: expert by expert, each segment padded to a multiple of 128.

    peer_rank, peer_row   (P,) int32: source rank (-1: padding) and token * K + slot there
    expert_ids            (L,) int32: global id of each local expert
    expert_offset         (L+1,) int64: first row of each segment
    expert_count          (L,) int64: rows without padding
    row_block_expert      (P/128,) int32: local expert of each block of 128 rows
    row_block_valid       (P/128,) int32: real rows of the block, 1..128
    """

    peer_rank: np.ndarray
    peer_row: np.ndarray
    expert_ids: np.ndarray
    expert_offset: np.ndarray
    expert_count: np.ndarray
    row_block_expert: np.ndarray
    row_block_valid: np.ndarray

    @property
    def num_rows(self) -> int:
        """P: padded rows."""
        return len(self.peer_rank)

    @property
    def num_row_blocks(self) -> int:
        return len(self.row_block_expert)

    def segment(self, local_expert: int) -> slice:
        """Rows of one expert, padding included."""
        first, end = self.expert_offset[local_expert : local_expert + 2]
        return slice(int(first), int(end))


def bit_reversed_order(num_tokens: int) -> np.ndarray:
    """Global tokens in canonical order: g = bitreverse(g') for g' = 0, 1, 2, ..., g < N.

    B = max(1, ceil(log2 N)) bits are reversed. int64 (N,). (Spec eq. 4.1.)
    CUDA: cuda_src/schedule.cuh: walk_route
    """
    bits = max(1, int(num_tokens - 1).bit_length() if num_tokens > 0 else 1)
    walk = np.arange(1 << bits, dtype=np.int64)
    reversed_walk = np.zeros_like(walk)
    for bit in range(bits):
        reversed_walk |= ((walk >> bit) & 1) << (bits - 1 - bit)
    return reversed_walk[reversed_walk < num_tokens]


def default_splits(num_tokens: int, ep_size: int) -> np.ndarray:
    """Tokens per rank: units of 16, U//R each, one more for the first U mod R ranks.

    The last unit may be partial. (Spec eq. 6.11; replicated gradients then have the same bits for
    every R.)
    """
    units = -(-num_tokens // 16)
    per_rank = np.full(ep_size, units // ep_size, np.int64)
    per_rank[: units % ep_size] += 1
    ends = np.minimum(np.cumsum(per_rank) * 16, num_tokens)
    return np.diff(ends, prepend=0)


def build_schedule(
    config: MoEConfig, rank: int, topk_ids: np.ndarray, token_counts: np.ndarray
) -> Schedule:
    """The table of `rank` (spec eq. 4.1, 4.2).

    topk_ids      (N, K) int32 of the whole batch in global token order, -1 = no route
    token_counts  (R,) tokens per rank
    Order inside a segment: "canonical": ascending (bitreverse(g), slot). "round_robin": source
    ranks take turns, rank 0 first, each giving its next route in ascending (token, slot).
    CUDA: cuda_src/schedule.cuh: schedule_fill_body
    """
    experts = config.experts_of(rank)
    tokens = bit_reversed_order(len(topk_ids))
    if config.row_order == "round_robin":
        tokens = np.arange(len(topk_ids), dtype=np.int64)
    local_of_expert = np.full(config.num_experts + 1, -1, np.int64)  # last entry: id -1
    local_of_expert[experts] = np.arange(len(experts))
    local = local_of_expert[topk_ids[tokens]].ravel()
    walk = np.flatnonzero(local >= 0)  # this rank's routes in walk order
    order = walk[np.argsort(local[walk], kind="stable")]
    expert_of_route = local[order]
    token, slot = tokens[order // config.top_k], order % config.top_k
    first_token = np.concatenate([[0], np.cumsum(token_counts)])
    source = np.searchsorted(first_token, token, side="right") - 1
    if config.row_order == "round_robin":
        turn = _turns(expert_of_route, source, len(token_counts))
        by_turn = np.lexsort((source, turn, expert_of_route))
        expert_of_route, token, slot, source = (
            v[by_turn] for v in (expert_of_route, token, slot, source)
        )
    peer_row = (token - first_token[source]) * config.top_k + slot
    return _padded(experts, expert_of_route, source, peer_row)


def _turns(expert: np.ndarray, source: np.ndarray, num_ranks: int) -> np.ndarray:
    """How many earlier routes of the same expert come from the same rank."""
    key = expert * num_ranks + source
    order = np.argsort(key, kind="stable")
    position = np.arange(len(key))
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    turn = np.empty(len(key), np.int64)
    turn[order] = position - np.repeat(starts, np.diff(starts, append=len(key)))
    return turn


def _padded(
    experts: np.ndarray, expert_of_route: np.ndarray, source: np.ndarray, peer_row: np.ndarray
) -> Schedule:
    """Lay the routes out in segments that start at multiples of 128."""
    count = np.bincount(expert_of_route, minlength=len(experts)).astype(np.int64)
    blocks = -(-count // ROW_TILE)
    offset = np.concatenate([[0], np.cumsum(blocks * ROW_TILE)])
    first_route = np.concatenate([[0], np.cumsum(count)])[:-1]
    row = np.arange(len(source)) - np.repeat(first_route - offset[:-1], count)
    peer_rank = np.full(offset[-1], PADDING, np.int32)
    rows = np.full(offset[-1], PADDING, np.int32)
    peer_rank[row], rows[row] = source, peer_row
    block_expert = np.repeat(np.arange(len(experts), dtype=np.int32), blocks)
    block_in_expert = np.arange(len(block_expert)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    valid = np.minimum(ROW_TILE, count[block_expert] - block_in_expert * ROW_TILE).astype(np.int32)
    return Schedule(peer_rank, rows, experts, offset, count, block_expert, valid)


# --------------------------------------------------------------------------- the walk


@dataclass(frozen=True)
class Minibatch:
    """A unit of hand-over: rows [first, end) of the schedule, a multiple of 128."""

    index: int
    macrobatch: int
    first: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.end)


def walk(num_rows: int, macrobatch: int, minibatch: int, direction: str) -> Iterator[Minibatch]:
    """Minibatches in the order they are computed.

    direction "forward": macrobatches last to first; "backward": first to last. Inside a macrobatch
    minibatches ascend. Forward ends with macrobatch 0, so what its ring still holds is what
    backward needs first. (Spec eq. 4.5.)
    """
    num_macro = -(-num_rows // macrobatch)
    macros = range(num_macro) if direction == "backward" else reversed(range(num_macro))
    for macro in macros:
        end_of_macro = min((macro + 1) * macrobatch, num_rows)
        for first in range(macro * macrobatch, end_of_macro, minibatch):
            yield Minibatch(first // minibatch, macro, first, min(first + minibatch, end_of_macro))


def pull_order(peer_rank: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """In which time order a minibatch's rows are pulled: ranks take turns (spec eq. 4.7).

    Each rank starts with its right-hand neighbour, so that no owner serves everybody at once.
    Padding rows come last (they are zeroed, not pulled). Free by contract: no bit depends on it.
    """
    real = np.flatnonzero(peer_rank >= 0)
    distance = (peer_rank[real].astype(np.int64) - rank - 1) % num_ranks
    turn = _turns(np.zeros(len(real), np.int64), distance, num_ranks)
    padding = np.flatnonzero(peer_rank < 0)
    return np.concatenate([real[np.lexsort((distance, turn))], padding])


def forward_task_order(
    batches: list[Minibatch], macrobatch: int
) -> Iterator[tuple[str, Minibatch]]:
    """("gate_up" | "down", minibatch) in the order tasks are handed out (spec eq. 4.6).

    Down trails gate/up by one minibatch, so that its hidden rows are ready when it starts. Where
    the next minibatch takes over the very slots of the one before (a ring of one minibatch, or a
    last macrobatch of one), down comes first: a task may wait for earlier tasks only.
    CUDA: cuda_src/tile.cuh: routed_tile
    """
    waiting: Minibatch | None = None
    for batch in batches:
        if waiting is not None and waiting.first % macrobatch == batch.first % macrobatch:
            yield "down", waiting
            waiting = None
        yield "gate_up", batch
        if waiting is not None:
            yield "down", waiting
        waiting = batch
    if waiting is not None:
        yield "down", waiting
