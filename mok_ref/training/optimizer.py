"""AdamW on float32 masters, element by element (docs/training.md, O1 to O4).

Nothing here sums over elements except `square_sum`, so a parameter may be cut over ranks anywhere:
each owner updates its shard, and the bits do not depend on the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok_ref.numerics import Array, add, div, mul, sub
from mok_ref.training.arithmetic import row_sum, sqrt, token_sum


@dataclass(frozen=True)
class AdamWOptions:
    """Constants are rounded to float32. The rate warms up, stays, and falls linearly to the end.

    rate, final_rate   learning rate after warm-up and at the last step
    warmup, decay_from steps of warm-up; share of the steps after which the rate falls
    clip_norm          limit of the gradient's norm over all parameters; 0: none
    """

    rate: float = 3e-3
    final_rate: float = 3e-4
    warmup: int = 20
    decay_from: float = 0.5
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not (self.rate > 0 and self.epsilon > 0):
            raise ValueError(
                f"rate and epsilon must be > 0, got rate={self.rate!r}, epsilon={self.epsilon!r}"
            )


@dataclass
class Moments:
    """AdamW's state: first and second moment, powers of the betas.

    powers  (2,) float32, beta1^t and beta2^t; (2, L, 1, 1) for L experts with their own t
    """

    m: np.ndarray
    v: np.ndarray
    powers: np.ndarray

    @classmethod
    def zeros(cls, shape: tuple[int, ...], stacked: bool = False) -> Moments:
        """Start of a parameter of `shape`; `stacked`: the first axis counts experts."""
        own = (2, shape[0], *(1 for _ in shape[1:])) if stacked else (2,)
        return cls(
            np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.ones(own, np.float32)
        )

    def where(self, chosen: np.ndarray, other: Moments) -> Moments:
        """`other` for the chosen experts of a stack (L,), self for the rest."""
        mask = chosen.reshape(-1, *(1 for _ in self.m.shape[1:]))
        return Moments(
            np.where(mask, other.m, self.m),
            np.where(mask, other.v, self.v),
            np.where(mask, other.powers, self.powers),
        )


def learning_rate(options: AdamWOptions, step: int, num_steps: int) -> np.float32:
    """Rate of `step` (O1): IEEE operations on float32, no library function.

    rate * (step + 1) / warmup while warming up; then rate; after decay_from * num_steps a straight
    line to final_rate.
    """
    rate, final = np.float32(options.rate), np.float32(options.final_rate)
    if step < options.warmup:
        return div(mul(rate, np.float32(step + 1)), np.float32(options.warmup))
    start = int(options.decay_from * num_steps)
    if step < start or num_steps <= start + 1:
        return rate
    share = div(np.float32(step - start), np.float32(num_steps - 1 - start))
    share = np.minimum(share, np.float32(1))
    return add(rate, mul(share, sub(final, rate)))


def advance_powers(powers: np.ndarray, options: AdamWOptions) -> np.ndarray:
    """beta^t by repeated multiplication, so a resumed run has the same bits (O2)."""
    betas = np.array([options.beta1, options.beta2], np.float32)
    return mul(powers, betas.reshape(2, *(1 for _ in powers.shape[1:])))


def adamw(
    master: Array, grad: Array, moments: Moments, rate: np.float32, options: AdamWOptions
) -> tuple[Array, Moments]:
    """One AdamW step (O3; Loshchilov and Hutter, 1711.05101).

        m = beta1 * m + (1 - beta1) * g          v = beta2 * v + ((1 - beta2) * g) * g
        m_hat = m / (1 - beta1^t)                v_hat = v / (1 - beta2^t)
        master = master - rate * (m_hat / (sqrt(v_hat) + epsilon) + decay * master)

    All float32 of one shape. Each operation is rounded, left to right as written.
    Returns new master, new moments.
    """
    one = np.float32(1)
    beta1, beta2 = np.float32(options.beta1), np.float32(options.beta2)
    powers = advance_powers(moments.powers, options)
    m = add(mul(beta1, moments.m), mul(sub(one, beta1), grad))
    v = add(mul(beta2, moments.v), mul(mul(sub(one, beta2), grad), grad))
    m_hat = div(m, sub(one, powers[0]))
    v_hat = div(v, sub(one, powers[1]))
    ratio = div(m_hat, add(sqrt(v_hat), np.float32(options.epsilon)))
    step = add(ratio, mul(np.float32(options.weight_decay), master))
    return sub(master, mul(rate, step)), Moments(m, v, powers)


def square_sums(stack: Array) -> Array:
    """Sum of squares of each tensor of a stack, in a fixed order (O4).

    stack  (L, ..., C) float32.  Returns (L,) float32.
    Order:  dot128 along the last axis, then rows ascending, one accumulator from +0.
    """
    per_tensor = int(np.prod(stack.shape[1:-1]))
    rows = stack.reshape(len(stack) * per_tensor, stack.shape[-1])
    sums = row_sum(mul(rows, rows)).reshape(len(stack), per_tensor)
    return token_sum(np.ascontiguousarray(sums.T), np.zeros(len(stack), np.float32))


def square_sum(tensor: Array) -> np.float32:
    """square_sums of one tensor."""
    return square_sums(tensor[None])[0]


def clip_factor(total: np.float32, options: AdamWOptions) -> tuple[np.float32, np.float32]:
    """(norm, factor): norm = sqrt(total), factor = clip_norm / norm if that is below 1, else 1."""
    norm = sqrt(np.asarray(total, np.float32).reshape(1))[0]
    limit = np.float32(options.clip_norm)
    if limit == 0 or not norm > limit:
        return norm, np.float32(1)
    return norm, div(limit, norm)


def shard_bounds(size: int, num_ranks: int) -> np.ndarray:
    """Offsets of each rank's shard of a flat vector: ceil(size / R) each, the last may be short."""
    per_rank = -(-size // num_ranks)
    return np.minimum(np.arange(num_ranks + 1, dtype=np.int64) * per_rank, size)
