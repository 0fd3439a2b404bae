"""Capacity that adapts: each expert's owner drops what is too much (docs/training.md, K1 to K3).

Dropping is decided by the owner of the expert, from that expert's routes of the whole batch, and
is pushed back to the token's owner. No statistic depends on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok_ref.numerics import add, div, mul, sub
from mok_ref.routing import choice_key
from mok_ref.schedule import bit_reversed_order

POLICIES = ("canonical", "score")


@dataclass(frozen=True)
class CapacityOptions:
    """When and what to drop.

    start, low, high  first capacity factor and its limits
    policy            "canonical": the last rows of the canonical order go; "score": lowest weight
    step              change of a factor at one adaptation
    every             steps between adaptations
    raise_above, lower_below   overflow rates (moving average) that move the factor
    """

    start: float = 1.25
    low: float = 1.0
    high: float = 1.25
    policy: str = "canonical"
    step: float = 0.01
    every: int = 10
    raise_above: float = 0.05
    lower_below: float = 0.005

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.start <= self.high:
            raise ValueError(
                "capacity factors must satisfy 0 < low <= start <= high, "
                f"got low={self.low!r}, start={self.start!r}, high={self.high!r}"
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got policy={self.policy!r}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got every={self.every!r}")


@dataclass
class CapacityState:
    """Per expert: its factor and the moving average of its overflow rate. (E,) float32 each."""

    factor: np.ndarray
    overflow: np.ndarray

    @classmethod
    def start(cls, num_experts: int, options: CapacityOptions) -> CapacityState:
        factor = np.full(num_experts, options.start, np.float32)
        return cls(factor, np.zeros(num_experts, np.float32))


def expert_capacity(factor: np.float32, num_routes: int, num_open: int) -> int:
    """Rows an expert takes (K1): ceil(factor * routes / open), the product rounded once."""
    mean = div(np.float32(num_routes), np.float32(num_open))
    return int(np.ceil(mul(np.float32(factor), mean)))


def routes_to_drop(
    topk_ids: np.ndarray, topk_weights: np.ndarray, expert: int, capacity: int, policy: str
) -> np.ndarray:
    """Which routes of one expert go (K2): (N, K) bool.

    topk_ids, topk_weights  (N, K) of the whole batch, ascending g
    "canonical": all but the first `capacity` in ascending (bitreverse(g), slot)
    "score":     all but the `capacity` of greatest weight, ties by canonical order
    """
    walk = bit_reversed_order(len(topk_ids))
    mine = np.argwhere(topk_ids[walk] == expert)
    token, slot = walk[mine[:, 0]], mine[:, 1]
    if policy == "score":
        keys = choice_key(topk_weights[token, slot], np.ones(len(token), bool)).astype(np.int64)
        order = np.argsort(-keys, kind="stable")
        token, slot = token[order], slot[order]
    dropped = np.zeros(topk_ids.shape, bool)
    dropped[token[capacity:], slot[capacity:]] = True
    return dropped


def adapt_capacity(
    state: CapacityState, demand: np.ndarray, dropped: np.ndarray, step: int, o: CapacityOptions
) -> CapacityState:
    """Move factors slowly (K3); elementwise, so each owner can do its own experts alone.

        rate = dropped / demand (0 without demand);  overflow = overflow + (rate - overflow) / 8
        every `every` steps: factor + step if overflow > raise_above, factor - step if
        overflow < lower_below, kept inside [low, high]

    demand, dropped  (E,) integers: routes that wanted the expert, routes it refused
    """
    rate = div(dropped.astype(np.float32), np.maximum(demand, 1).astype(np.float32))
    overflow = add(state.overflow, mul(sub(rate, state.overflow), np.float32(0.125)))
    factor = state.factor
    if (step + 1) % o.every == 0:
        up = overflow > np.float32(o.raise_above)
        down = overflow < np.float32(o.lower_below)
        move = np.where(up, np.float32(o.step), np.where(down, np.float32(-o.step), np.float32(0)))
        factor = np.clip(add(factor, move), np.float32(o.low), np.float32(o.high))
    return CapacityState(factor, overflow)
