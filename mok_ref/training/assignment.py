"""Balanced assignment of tokens to experts: scipy's exact solver and a deterministic auction."""

from __future__ import annotations

import numpy as np

from mok_ref.install import install_hint

_SCORE_BITS = 20  # scores are rounded to multiples of 2^-20 of their range for the auction
_FIRST_EPSILON_SHIFT = 2  # epsilon starts at range / 4 and falls by 4 each phase


def expert_shares(num_tokens: int, num_experts: int) -> np.ndarray:
    """Tokens per expert: N div E, one more for the first N mod E experts. (E,) int64."""
    shares = np.full(num_experts, num_tokens // num_experts, np.int64)
    shares[: num_tokens % num_experts] += 1
    return shares


def linear_sum(scores: np.ndarray) -> np.ndarray:
    """Greatest total score by scipy.optimize.linear_sum_assignment. (N, E) -> (N,) int32.

    Each expert is repeated once per token it gets. For small batches: the time grows with N^3.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise RuntimeError(f"scipy is missing: {install_hint('train')}") from error
    seat_expert = np.repeat(np.arange(scores.shape[1]), expert_shares(*scores.shape))
    tokens, seats = linear_sum_assignment(scores.astype(np.float64)[:, seat_expert], maximize=True)
    out = np.zeros(len(scores), np.int32)
    out[tokens] = seat_expert[seats]
    return out


def auction(scores: np.ndarray) -> np.ndarray:
    """Greatest total score by Bertsekas's auction with epsilon scaling (C7). (N, E) -> (N,) int32.

    All arithmetic is on int64, so every machine and every run gives one answer. Benefits are
    scores rounded to 20 bits, times N + 1; the last epsilon is 1, which makes the assignment
    optimal for the rounded scores. All free tokens bid at once; an expert keeps its highest bids,
    ties to the lower token; its price is the lowest bid it holds once it is full.
    """
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        return np.zeros(0, np.int32)
    benefit = integer_benefits(scores)
    shares = expert_shares(num_tokens, num_experts)
    if num_experts == 1:
        return np.zeros(num_tokens, np.int32)
    prices = np.zeros(num_experts, np.int64)
    epsilon = max(1, int(benefit.max()) >> _FIRST_EPSILON_SHIFT)
    while True:
        owner, prices = auction_phase(benefit, shares, prices, epsilon)
        if epsilon == 1:
            return owner
        epsilon = max(1, epsilon >> 2)


def integer_benefits(scores: np.ndarray) -> np.ndarray:
    """Scores as int64 in 0 .. 2^20, times N + 1. The scaling is by a power of two: exact."""
    wide = scores.astype(np.float64)
    wide = wide - wide.min()
    top = wide.max()
    exponent = 0 if top == 0 else int(np.frexp(top)[1])
    return np.rint(np.ldexp(wide, _SCORE_BITS - exponent)).astype(np.int64) * (len(scores) + 1)


def auction_phase(
    benefit: np.ndarray, shares: np.ndarray, prices: np.ndarray, epsilon: int
) -> tuple[np.ndarray, np.ndarray]:
    """Everybody starts free; bids until all are placed. Returns (owner (N,) int32, prices (E,))."""
    num_tokens = len(benefit)
    owner = np.full(num_tokens, -1, np.int32)
    held_bid = np.zeros(num_tokens, np.int64)
    prices = prices.copy()
    prices[shares == 0] = np.iinfo(np.int64).max // 4  # an expert without seats sells nothing
    while True:
        free = np.flatnonzero(owner < 0)
        if len(free) == 0:
            return owner, prices
        value = benefit[free] - prices
        best = value.argmax(axis=1)
        first = value[np.arange(len(free)), best]
        value[np.arange(len(free)), best] = np.iinfo(np.int64).min
        held_bid[free] = prices[best] + first - value.max(axis=1) + epsilon
        owner[free] = best
        for expert in np.unique(best):
            holders = np.flatnonzero(owner == expert)
            if len(holders) > shares[expert]:
                order = holders[np.lexsort((holders, -held_bid[holders]))]
                owner[order[shares[expert] :]] = -1
                holders = order[: shares[expert]]
            if len(holders) == shares[expert]:
                prices[expert] = max(prices[expert], held_bid[holders].min())
