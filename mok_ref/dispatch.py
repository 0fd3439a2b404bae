"""Dispatch: each rank pulls the tokens its experts need out of their owners' memory.

Backward is the mirror: a row's gradient dx is pushed back to its token's slot, and the owner adds
the slots up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mok_ref.numerics import Array, add, array_module, to_bf16
from mok_ref.schedule import PADDING, Schedule, pull_order


def dispatch_forward(
    schedule: Schedule,
    rows: slice,
    top_k: int,
    rank: int,
    num_ranks: int,
    peer_tokens: Callable[[int], np.ndarray],
    out: np.ndarray,
) -> None:
    """Pull rows of the schedule into the ring (spec eq. 4.3).

        out[r] = x_peer[peer_rank[r]][peer_row[r] div K];  padding rows are zero

    peer_tokens(rank) is that rank's (T, width) memory.  Rows arrive in `pull_order`.
    CUDA: cuda_src/dispatch.cuh: dispatch_forward
    """
    peer_rank = schedule.peer_rank[rows]
    token = schedule.peer_row[rows] // top_k
    order = pull_order(peer_rank, rank, num_ranks)
    ranks_in_order = peer_rank[order]
    for source in np.unique(ranks_in_order):
        piece = order[ranks_in_order == source]
        out[piece] = 0 if source == PADDING else peer_tokens(int(source))[token[piece]]


def push_rows(
    schedule: Schedule,
    rows: slice,
    values: np.ndarray,
    peer_slots: Callable[[int], np.ndarray],
) -> None:
    """Push one result per row into its own slot of the token's owner (spec eq. 4.4).

        slots_peer[peer_rank[r]][peer_row[r]] = values[r];  padding rows are never pushed

    Every route has its own slot, so pushes never collide and nothing is reduced on the wire.
    CUDA: cuda_src/experts.cuh: push_rows
    """
    peer_rank = schedule.peer_rank[rows]
    for target in np.unique(peer_rank[peer_rank != PADDING]):
        mine = np.flatnonzero(peer_rank == target)
        peer_slots(int(target))[schedule.peer_row[rows][mine]] = values[mine]


def dispatch_backward(
    dx_slots: Array, topk_ids: Array, shared_dx: Array | None, router_dx: Array | None
) -> Array:
    """Add the slots' dx into tokens (spec eq. 6.7).

        dx[t] = bf16(acc);  acc = shared_dx[t] or +0;  acc = acc + dx[t,k], k ascending, routes
        only;  the router's share last

    dx_slots (T, K, H), shared_dx and router_dx (T, H): bf16 values.  Returns (T, H) bf16 values.
    Order:  one float32 accumulator, one rounding per addition, one to bf16 at the end.
    CUDA:   cuda_src/combine.cuh: dispatch_backward
    """
    xp = array_module(dx_slots)
    num_tokens, top_k, hidden_size = dx_slots.shape
    acc = xp.zeros((num_tokens, hidden_size), dx_slots.dtype) if shared_dx is None else shared_dx
    for k in range(top_k):
        routed = (topk_ids[:, k] >= 0)[:, None]
        acc = xp.where(routed, add(acc, dx_slots[:, k]), acc)
    if router_dx is not None:
        acc = add(acc, router_dx)
    return to_bf16(acc)
