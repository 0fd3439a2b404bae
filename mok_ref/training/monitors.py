"""What is watched, when it is an alarm, and what is done about it (docs/training.md, M1 to M4).

Every number that an action depends on is made of integers of the whole batch and specified float32
operations, so all ranks take the same action at the same step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mok_ref.numerics import add, div, mul, sub
from mok_ref.training.arithmetic import log
from mok_ref.training.balance import by_litter
from mok_ref.training.model import LayerStats


@dataclass(frozen=True)
class MonitorOptions:
    """Limits of the alarms.

    entropy_share   alarm below this share of the maximum entropy
    dead_after      steps without a route after which an open expert counts as dead
    outlier         a norm above this many medians of its layer is an outlier
    loss_spike      alarm when the loss exceeds this many smoothed losses
    """

    entropy_share: float = 0.6
    dead_after: int = 50
    outlier: float = 10.0
    loss_spike: float = 2.0


@dataclass(frozen=True)
class ActionOptions:
    """What alarms may do; everything is off unless switched on.

    raise_aux      entropy alarm: the auxiliary coefficient becomes raise_factor times its normal
                   value (0.001 -> 0.003); after each `quiet_steps` without the alarm it falls back
                   by a quarter of the way
    rollback_after entropy alarm or bad loss for this many steps in a row: back to the last good
                   checkpoint, at most max_rollbacks times; 0 switches it off
    clip_outliers  an outlier expert's gradient is scaled down to the outlier limit
    """

    raise_aux: bool = False
    raise_factor: float = 3.0
    quiet_steps: int = 20
    rollback_after: int = 0
    max_rollbacks: int = 3
    clip_outliers: bool = False


@dataclass
class MonitorState:
    """What is remembered from step to step; plain numbers, so it fits into JSON."""

    aux: float
    quiet: int = 0
    alarm_streak: int = 0
    rollbacks: int = 0
    smooth_loss: float = 0.0
    idle_steps: list[list[int]] = field(default_factory=list)  # per layer, per expert

    @classmethod
    def start(cls, aux: float, num_layers: int, num_experts: int) -> MonitorState:
        return cls(aux, idle_steps=[[0] * num_experts for _ in range(num_layers)])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def entropy_share(counts: np.ndarray, num_open: int) -> np.float32:
    """Entropy of the load over its maximum (M1): 1 is even, 0 is one expert for all.

    p = count / total;  H = sum of -p * log(p), e ascending, counts > 0 only;  H / log(open)
    """
    total = int(counts.sum())
    if num_open <= 1 or total == 0:
        return np.float32(1)
    p = div(counts.astype(np.float32), np.float32(total))
    acc = np.float32(0)
    for term in mul(p, log(np.where(counts > 0, p, np.float32(1)))):
        acc = sub(acc, term)
    return div(acc, log(np.full(1, num_open, np.float32)))[0]


def utilisation_variance(counts: np.ndarray, num_open: int) -> np.float32:
    """Mean over open experts of (load / mean load - 1)^2 (M2), e ascending."""
    total = int(counts.sum())
    if total == 0:
        return np.float32(0)
    acc = np.float32(0)
    ratio = div((counts[:num_open] * num_open).astype(np.float32), np.float32(total))
    for value in sub(ratio, np.float32(1)):
        acc = add(acc, mul(value, value))
    return div(acc, np.float32(num_open))


def layer_metrics(stats: LayerStats, num_open: int, num_litters: int) -> dict[str, Any]:
    """Numbers of one layer in one step, for the record and the alarms."""
    demand, dropped = stats.demand, int(stats.dropped.sum())
    routes = int(demand.sum())
    out: dict[str, Any] = {
        "load": [int(c) for c in demand],
        "entropy": float(entropy_share(demand, num_open)),
        "utilisation_variance": float(utilisation_variance(demand, num_open)),
        "overflow": dropped / routes if routes else 0.0,
        "dropped": dropped,
        "ranks_touched": stats.ranks_touched,
        "refused_logits": stats.num_refused,
    }
    if num_litters > 1:
        size = len(demand) // num_litters
        litters = by_litter(demand, num_litters)
        out["litter_entropy"] = float(entropy_share(litters, -(-num_open // size)))
    return out


def outliers(norms: np.ndarray, limit: float) -> tuple[np.ndarray, np.float32]:
    """Which norms exceed `limit` medians, and that bound (M3).

    norms (E,) float32; zeros (idle experts) do not count. The median is the lower middle one.
    Returns (mask (E,), bound): bound is +Inf where fewer than three experts have a norm.
    """
    used = np.sort(norms[norms > 0])
    if len(used) < 3:
        return np.zeros(len(norms), bool), np.float32(np.inf)
    bound = mul(used[(len(used) - 1) // 2], np.float32(limit))
    return norms > bound, bound


def find_alarms(
    state: MonitorState,
    layers: list[dict[str, Any]],
    loss: np.float32,
    num_open: int,
    options: MonitorOptions,
) -> list[str]:
    """Alarms of this step, as short texts (M4). Updates idle counters and the smoothed loss."""
    alarms = []
    for index, layer in enumerate(layers):
        for name in ("entropy", "litter_entropy"):
            if layer.get(name, 1.0) < np.float32(options.entropy_share):
                alarms.append(f"layer{index}: {name} {layer[name]:.3f} < {options.entropy_share}")
        if layer["refused_logits"]:
            alarms.append(f"loss: layer{index} has {layer['refused_logits']} NaN or +Inf logits")
        idle = state.idle_steps[index]
        for expert, load in enumerate(layer["load"][:num_open]):
            idle[expert] = 0 if load else idle[expert] + 1
            if idle[expert] >= options.dead_after:
                alarms.append(
                    f"layer{index}: expert {expert} dead, {idle[expert]} steps without a route"
                )
        for kind in ("gradient", "weight"):
            norms = np.array(layer.get(f"{kind}_norms", []), np.float32)
            for large in np.flatnonzero(outliers(norms, options.outlier)[0]):
                alarms.append(f"layer{index}: expert {large} {kind} norm {norms[large]:.3g}")
    smooth = np.float32(state.smooth_loss)
    if not np.isfinite(loss):
        alarms.append(f"loss {loss}")
    elif smooth > 0 and loss > mul(smooth, np.float32(options.loss_spike)):
        alarms.append(f"loss {loss:.3f} above {options.loss_spike} * {smooth:.3f}")
    else:
        start = smooth == 0
        smooth = loss if start else add(smooth, mul(sub(loss, smooth), np.float32(0.0625)))
        state.smooth_loss = float(smooth)
    return alarms


def is_collapse(alarms: list[str]) -> bool:
    """Alarms that raise the coefficient or lead to a rollback: entropy and loss."""
    return any("entropy" in a or a.startswith("loss") for a in alarms)


def take_actions(
    state: MonitorState, alarms: list[str], options: ActionOptions, aux_normal: float
) -> tuple[list[str], bool]:
    """Change `state` after a step's alarms. Returns (what was done, whether to roll back).

    aux_normal  the auxiliary coefficient that the run was given
    """
    done: list[str] = []
    entropy = any("entropy" in alarm for alarm in alarms)
    state.alarm_streak = state.alarm_streak + 1 if is_collapse(alarms) else 0
    if options.raise_aux:
        if entropy:
            state.quiet = 0
            raised = aux_normal * options.raise_factor
            if state.aux < raised:
                done.append(f"auxiliary coefficient {state.aux:g} -> {raised:g}")
                state.aux = raised
        elif state.aux > aux_normal:
            state.quiet += 1
            if state.quiet >= options.quiet_steps:
                state.quiet = 0
                step = aux_normal * (options.raise_factor - 1) / 4
                lower = state.aux - step
                if lower < aux_normal + step / 2:
                    lower = aux_normal
                done.append(f"auxiliary coefficient {state.aux:g} -> {lower:g}")
                state.aux = lower
    due = options.rollback_after and state.alarm_streak >= options.rollback_after
    if due and state.rollbacks < options.max_rollbacks:
        state.rollbacks += 1
        state.alarm_streak = 0
        return [*done, "roll back to the last good checkpoint"], True
    return done, False
