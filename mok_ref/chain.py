"""The ordered chain: gradients of weights that every rank holds, with the same bits for every R.

A sum that each rank computed alone and then added would depend on R. Here rank r continues the
float32 accumulator that rank r-1 hands it, so the result is one chain over the whole batch in
ascending global token order (spec eq. 6.10).
"""

from __future__ import annotations

from typing import Any

from mok_ref.experts import weight_gradient
from mok_ref.numerics import Array


def ordered_chain(
    heap: Any, buffer: str, rows_out: Array, rows_in: Array, start: Array | None, mode: str
) -> Array:
    """dW = tc over all N tokens (rows_out^T, rows_in^T), rank after rank; collective.

    buffer    name of a symmetric (M, N) float32 allocation (float64 in oracle mode)
    rows_out  (T, M), rows_in (T, N): this rank's tokens, bf16 values
    start     (M, N) accumulator rank 0 begins with, or None for +0
    Returns   (M, N), the same on every rank.
    Order:  g ascending; each rank's tokens begin a new group of 16 (its last one padded).
            Equal bits for every R need each rank's T but the last non-empty one's to be a multiple
            of 16.
    CUDA:   cuda_src/backward_chain.cuh: locate
    """
    mine = heap.peer(heap.rank, buffer)
    for turn in range(heap.size):
        if turn == heap.rank:
            before = heap.peer(turn - 1, buffer).copy() if turn else start
            mine[...] = weight_gradient(rows_out, rows_in, before, mode)
        heap.barrier(f"ordered chain, turn of rank {turn}")
    total = heap.peer(heap.size - 1, buffer).copy()
    heap.barrier("ordered chain, reading the sum")  # nobody reuses the buffer before
    return total
