"""A layer's predicted time: head, simulation of all ranks, tail; and the figures drawn from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .closed_form import Setting, estimate, flops_per_gpu, head_seconds, tail_seconds
from .minibatch_simulation import Simulation, simulate
from .programme import Programme, backward_programme, forward_programme

MOST_RANKS = 144  # of an EP group that is simulated rank by rank
MOST_STEPS = 4000  # compute steps of all ranks; beyond it minibatches are joined for the simulation


@dataclass(frozen=True)
class Prediction:
    """One direction of one layer.

    seconds       from the first launch to the last rank's output
    compute_share of the slowest rank's time spent on matrix products
    hidden_share  of transfer time during which that rank computed
    link_share    bytes of the busiest port / (nominal link rate * seconds)
    """

    direction: str
    seconds: float
    head: float
    tail: float
    flops: float
    peak_flops: float
    simulation: Simulation
    link_share: float

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over the vendor's dense peak."""
        return self.flops / self.seconds / self.peak_flops

    @property
    def hidden_share(self) -> float:
        return self.simulation.hidden_share

    @property
    def compute_share(self) -> float:
        return float(self.simulation.compute.max()) / self.seconds


def programmes_of(
    setting: Setting, is_backward: bool, ranks: Sequence[int] | None = None
) -> list[Programme]:
    """The work of every rank, or of some."""
    costs, choice = setting.costs, setting.choice
    tables = setting.tables(ranks)
    chosen = range(setting.work.num_ranks) if ranks is None else ranks
    tokens = [float(setting.work.tokens[rank]) for rank in chosen]
    if is_backward:
        return [
            backward_programme(costs, choice, table, n, setting.x_kept)
            for n, table in zip(tokens, tables, strict=True)
        ]
    return [
        forward_programme(costs, choice, table, n) for n, table in zip(tokens, tables, strict=True)
    ]


def coarse(setting: Setting) -> Setting:
    """Join minibatches where there are too many to simulate each; ring slots shrink alike, but two
    stay two: with one nothing would overlap."""
    choice = setting.choice
    steps = 2.0 * float(setting.work.counts.sum()) / choice.minibatch
    factor = 1
    while steps / factor > MOST_STEPS:
        factor *= 2
    if factor == 1:
        return setting
    minibatch = choice.minibatch * factor
    slots = max(min(2, choice.ring_slots), round(choice.ring_slots / factor))
    joined = replace(choice, minibatch=minibatch, macrobatch=minibatch * slots)
    return replace(setting, choice=joined)


def predict(setting: Setting, is_backward: bool = False, with_spans: bool = False) -> Prediction:
    """Simulate one direction of the layer on all ranks of an EP group.

    A group of more than `MOST_RANKS` ranks is simulated hierarchically: the busiest domain rank by
    rank, everything else as traffic that takes its share of the network.
    """
    setting = coarse(setting)
    if setting.choice.ep_size > MOST_RANKS:
        simulation = simulate_busiest_domain(setting, is_backward, with_spans)
    else:
        simulation = simulate(
            programmes_of(setting, is_backward),
            setting.hardware,
            setting.domain,
            setting.choice.communication_sms,
            with_spans=with_spans,
        )
    return prediction_from(setting, simulation, is_backward)


def prediction_from(setting: Setting, simulation: Simulation, is_backward: bool) -> Prediction:
    head, tail = head_seconds(setting, is_backward), tail_seconds(setting)
    seconds = head + simulation.seconds + tail
    busiest = float(max(simulation.sent.max(), simulation.received.max()))
    is_fp8 = setting.shape.native_fp8 and setting.hardware.native_mxfp8 > 0
    peak = setting.hardware.peak_fp8_flops if is_fp8 else setting.hardware.peak_bf16_flops
    return Prediction(
        "backward" if is_backward else "forward",
        seconds,
        head,
        tail,
        flops_per_gpu(setting) * (2 if is_backward else 1),
        peak,
        simulation,
        busiest / setting.hardware.link_bytes_per_s / seconds,
    )


def simulate_busiest_domain(
    setting: Setting, is_backward: bool, with_spans: bool = False
) -> Simulation:
    """Hierarchical simulation: one domain in full, the others as a mean field.

    Ranks outside are one more rank of unlimited capacity. What they pull from and push to this
    domain's ranks occupies the network ports evenly over the layer's time, which is found by
    repeating the simulation (it converges at once: the traffic is known, only its duration is not).
    """
    loads = setting.work.rows_of_ranks(setting.owner)
    domain = setting.domain
    totals = np.bincount(domain, weights=loads)
    members = np.flatnonzero(domain == int(np.argmax(totals)))
    inside = collapse(programmes_of(setting, is_backward, members.tolist()), members)
    outside = np.zeros(len(members) + 1, int)
    outside[-1] = 1
    seconds = estimate(setting, is_backward).seconds
    for is_last in (False, True):
        simulation = simulate(
            inside,
            setting.hardware,
            outside,
            setting.choice.communication_sms,
            foreign_traffic(setting, members, is_backward) / seconds,
            with_spans and is_last,
            unlimited=len(members),
        )
        seconds = simulation.seconds
    return simulation


def collapse(programmes: list[Programme], members: np.ndarray) -> list[Programme]:
    """Peers outside `members` become one: the last column; that peer itself has no work."""
    for programme in programmes:
        for name in ("pull_bytes", "push_bytes"):
            full = getattr(programme, name)
            near = full[:, members]
            far = full.sum(axis=1, keepdims=True) - near.sum(axis=1, keepdims=True)
            setattr(programme, name, np.concatenate([near, far], axis=1))
    idle = Programme()
    idle.pull_bytes = idle.push_bytes = np.zeros((0, len(members) + 1))
    return [*programmes, idle]


def foreign_traffic(setting: Setting, members: np.ndarray, is_backward: bool) -> np.ndarray:
    """(4 (n+1),) bytes that ranks outside move through these ranks' network ports by themselves:
    they pull x from here (out) and push y to here (in)."""
    traffic = setting.work.traffic(setting.owner)
    is_outside = np.ones(len(traffic), bool)
    is_outside[members] = False
    pulled = traffic[members][:, is_outside].sum(axis=1) * setting.shape.pull_row_bytes
    pushed = traffic[members][:, is_outside].sum(axis=1) * setting.shape.push_row_bytes
    num = len(members) + 1
    result = np.zeros(4 * num)
    loads = setting.work.rows_of_ranks(setting.owner)
    times = setting.pulls_of_backward(float(loads.max())) if is_backward else 1.0
    result[2 * num : 2 * num + len(members)] = pulled * times
    result[3 * num : 3 * num + len(members)] = pushed
    return result
