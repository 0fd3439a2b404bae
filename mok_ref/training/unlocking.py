"""Gradual unlocking: how many experts are open at each step (docs/training.md, U1, U2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok_ref.numerics import add, mul, sub

STARTS = ("copy", "fresh")


@dataclass(frozen=True)
class UnlockOptions:
    """Open experts 0 .. n - 1; n grows from `start` to num_experts.

    start       experts open at step 0
    share       experts opened at a time
    every       steps between unlocks; 0: only when the loss is flat
    flat_after  with every = 0: unlock when the smoothed loss has not fallen by flat_ratio of itself
                for this many steps
    init        "copy": a new expert starts from the weights of the most used open one;
                "fresh": from its own random start
    """

    start: int
    share: int
    every: int = 100
    flat_after: int = 50
    flat_ratio: float = 0.001
    init: str = "copy"

    def __post_init__(self) -> None:
        for name in ("start", "share"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.every < 0 or self.flat_after < 1:
            raise ValueError(
                f"every must be >= 0 and flat_after >= 1, got every={self.every!r}, "
                f"flat_after={self.flat_after!r}"
            )
        if self.init not in STARTS:
            raise ValueError(f"init must be one of {STARTS}, got init={self.init!r}")


@dataclass
class UnlockState:
    """num_open experts; the rest watches the loss."""

    num_open: int
    smooth_loss: float = 0.0  # float32 values
    best_loss: float = float("inf")
    steps_flat: int = 0
    last_unlock: int = 0


def start_unlocking(options: UnlockOptions | None, num_experts: int) -> UnlockState:
    """Without options everything is open."""
    if options is None:
        return UnlockState(num_experts)
    if options.start > num_experts:
        raise ValueError(
            f"start must be at most num_experts, got start={options.start!r}, {num_experts=}"
        )
    return UnlockState(options.start)


def advance_unlocking(
    state: UnlockState, options: UnlockOptions, step: int, loss: np.float32, num_experts: int
) -> UnlockState:
    """State after `step` (U1); float32 arithmetic on the run's loss, so every rank agrees.

    smooth = loss at the first step, then smooth + (loss - smooth) / 16
    flat for one more step unless smooth < best * (1 - flat_ratio)
    """
    first = not np.isfinite(state.best_loss) and state.smooth_loss == 0.0
    smooth = np.float32(state.smooth_loss)
    smooth = np.float32(loss) if first else add(smooth, mul(sub(loss, smooth), np.float32(0.0625)))
    best = np.float32(state.best_loss)
    better = bool(smooth < mul(best, sub(np.float32(1), np.float32(options.flat_ratio))))
    best, steps_flat = (smooth, 0) if better else (best, state.steps_flat + 1)
    due = (
        step + 1 - state.last_unlock >= options.every
        if options.every
        else (steps_flat >= options.flat_after)
    )
    num_open, last = state.num_open, state.last_unlock
    if due and num_open < num_experts:
        num_open = min(num_experts, num_open + options.share)
        last, steps_flat, best = step + 1, 0, smooth
    return UnlockState(num_open, float(smooth), float(best), steps_flat, last)


def mask_locked(logits: np.ndarray, num_open: int, first_expert: int = 0) -> np.ndarray:
    """Close experts num_open .. E - 1 before the choice (U2): their logits become -Inf."""
    if first_expert + num_open >= logits.shape[1]:
        return logits
    masked = logits.copy()
    masked[:, first_expert + num_open :] = -np.inf
    return masked
