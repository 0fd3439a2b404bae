"""The closed form: a layer's time from sums and maxima, without events. It ranks candidates.

    forward  = head + first pull not hidden + max(compute, link in, link out) + last push + tail
    head     = launches and schedule + barrier + all-gather of ids
    tail     = barrier + combine

Compute is that of the most loaded rank, links likewise. Against the simulation it errs where
minibatches of different ranks get out of step; `search.py` therefore simulates the best few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .choice import Choice
from .hardware import Hardware
from .programme import MinibatchTable, minibatch_tables
from .stages import (
    TILE_COLUMNS,
    TILE_ROWS,
    KernelConstants,
    LayerShape,
    StageCosts,
    layer_flops,
)
from .workload import Workload


@dataclass(frozen=True)
class Estimate:
    """Seconds of one direction of one layer and what bounds them."""

    seconds: float
    compute: float
    link: float
    network: float
    head: float
    tail: float
    bound: str


@dataclass(frozen=True)
class Setting:
    """Everything a prediction depends on except the batches: who does what, where.

    x_kept        backward follows this layer's own forward, whose last macrobatch (the first of
                  backward) still lies in the ring: its x is not pulled again
    weights_held  MXFP8 weights are codes already; else each forward quantises them
    """

    hardware: Hardware
    shape: LayerShape
    choice: Choice
    constants: KernelConstants
    work: Workload
    owner: np.ndarray
    sustained: bool = True
    float32_dw: bool = True
    x_kept: bool = False
    weights_held: bool = False

    @property
    def costs(self) -> StageCosts:
        return StageCosts(
            self.shape,
            self.hardware,
            self.constants,
            self.choice.communication_sms,
            self.sustained,
            self.float32_dw,
        )

    @property
    def domain(self) -> np.ndarray:
        """(R,) domain of every EP rank; a TP group lies in one domain."""
        per_domain = max(1, self.hardware.gpus_per_domain // self.choice.tp_size)
        return np.arange(self.choice.ep_size) // per_domain

    def pulls_of_backward(self, rows: float) -> float:
        """How often backward pulls rows' bytes: dy, and x where the ring does not hold it."""
        kept = min(1.0, self.choice.macrobatch / max(rows, 1.0)) if self.x_kept else 0.0
        return 2.0 - kept

    def tables(self, ranks: Iterable[int] | None = None) -> list[MinibatchTable]:
        return minibatch_tables(self.work, self.owner, self.choice.minibatch, ranks)


def head_seconds(setting: Setting, is_backward: bool = False) -> float:
    """Launches, schedule kernels, quantisation, the barrier, and every rank's ids from every other
    rank."""
    hardware, work = setting.hardware, setting.work
    remote = 1 - 1 / work.num_ranks
    ids = float(work.tokens.sum()) * setting.shape.top_k * 4.0 * remote
    seconds = setting.constants.fixed_us * 1e-6 + quantise_seconds(setting, is_backward)
    if work.num_ranks > 1:
        seconds += hardware.barrier_us * 1e-6 + ids / hardware.link_rate
        seconds += hardware.link_latency_us * 1e-6
        if len(set(setting.domain.tolist())) > 1:
            seconds += hardware.network_latency_us * 1e-6
    return seconds


def quantise_seconds(setting: Setting, is_backward: bool) -> float:
    """What MXFP8 experts cost before the kernel: x (backward: dy) of the rank with most tokens,
    and in forward the weights of the rank with most experts; 0 for bf16."""
    shape = setting.shape
    elements = float(setting.work.tokens.max()) * shape.hidden_size
    if not is_backward and not setting.weights_held:
        experts = int(np.bincount(setting.owner).max())
        elements += 3.0 * experts * shape.hidden_size * shape.columns
    return setting.costs.quantise(elements)


def tail_seconds(setting: Setting) -> float:
    """The closing barrier and the combine kernel of the rank with most tokens."""
    work = setting.work
    seconds = setting.costs.combine(float(work.tokens.max()))
    if work.num_ranks > 1:
        seconds += setting.hardware.barrier_us * 1e-6
    return seconds


def transfer_seconds(setting: Setting, pull_factor: float) -> tuple[float, float]:
    """(link, network) seconds of the busiest port: rows pulled in and pushed out, and served."""
    traffic = setting.work.traffic(setting.owner)
    np.fill_diagonal(traffic, 0.0)
    same = setting.domain[:, None] == setting.domain[None, :]
    result = []
    for share, rate in (
        (np.where(same, traffic, 0.0), setting.hardware.link_rate),
        (np.where(same, 0.0, traffic), setting.hardware.network_rate),
    ):
        pull = share * setting.shape.pull_row_bytes * pull_factor
        push = share * setting.shape.push_row_bytes
        # pull: source -> owner; push: owner -> source
        out = pull.sum(axis=1) + push.sum(axis=0)
        into = pull.sum(axis=0) + push.sum(axis=1)
        busiest = float(max(out.max(), into.max()))
        result.append(busiest / rate if rate > 0 else (np.inf if busiest > 0 else 0.0))
    return result[0], result[1]


def rank_compute(setting: Setting, rank: int, is_backward: bool) -> float:
    """Seconds of matrix work of one rank, all its minibatches together."""
    choice, costs = setting.choice, setting.costs
    rows = setting.work.expert_load[setting.owner == rank].astype(float)
    tokens = float(setting.work.tokens[rank])
    if rows.sum() == 0:
        return costs.shared_backward(tokens) if is_backward else costs.shared_forward(tokens)
    pieces = max(1.0, rows.sum() / choice.minibatch)
    weights_again = reread_seconds(costs, rows, pieces)
    if not is_backward:
        seconds = costs.gate_up(rows, choice.save == "all") + costs.down(rows)
        return seconds + costs.shared_forward(tokens) + weights_again
    seconds = costs.dgrad_hidden(rows) + costs.dgrad_input(rows) + costs.wgrad(rows)
    kept = {"all": 1.0, "ring": min(1.0, choice.macrobatch / rows.sum()), "none": 0.0}
    seconds += (1.0 - kept[choice.save]) * costs.gate_up(rows, False)
    return seconds + costs.shared_backward(tokens) + weights_again


def reread_seconds(costs: StageCosts, rows: np.ndarray, pieces: float) -> float:
    """Weights read again because an expert's rows straddle minibatches (bounded by the tensor
    cores in most cases, so only what exceeds a minibatch's compute counts)."""
    shape = costs.shape
    straddles = max(0.0, pieces - 1.0)
    one = 3.0 * shape.hidden_size * shape.columns * shape.weight_bytes
    seconds = straddles * one / costs.hardware.read_bytes_per_s
    compute = float(rows.sum()) * 6.0 * shape.hidden_size * shape.columns
    compute /= costs.hardware.sustained_bf16_flops
    return max(0.0, seconds - compute)


def batch_seconds(setting: Setting, rows: float, compute: float, is_backward: bool) -> float:
    """What small minibatches cost beyond the products: waiting SMs (`programme.keep_distance`)."""
    choice, costs = setting.choice, setting.costs
    pieces = max(1.0, rows / choice.minibatch)
    single = costs.latencies[2:] if is_backward else costs.latencies[:2]
    stretch = costs.stretch(np.array([rows]), is_backward)
    first, last = (stretch * seconds for seconds in single)
    tiles = (
        min(rows, choice.minibatch) / TILE_ROWS * -(-setting.shape.output_columns // TILE_COLUMNS)
    )
    share = tiles / costs.compute_sms
    work = compute / pieces * (0.5 if is_backward else 1.0)
    stall = pieces * max(0.0, first - work) * share / (1.0 + share)
    return stall + 0.5 * (first + last)


def refill_seconds(setting: Setting, rows: float, first_pull: float) -> float:
    """Backward's ring empties after each macrobatch: the next one's first pull is not hidden."""
    times = -(-rows // setting.choice.macrobatch) - 1.0
    return max(0.0, times) * (first_pull + sum(setting.costs.latencies[2:]))


def estimate(setting: Setting, is_backward: bool = False) -> Estimate:
    """Closed-form time of one direction of the layer."""
    loads = setting.work.rows_of_ranks(setting.owner)
    slowest = int(np.argmax(loads))
    rows = float(loads[slowest])
    compute = rank_compute(setting, slowest, is_backward)
    compute += batch_seconds(setting, rows, compute, is_backward)
    pull_factor = setting.pulls_of_backward(rows) if is_backward else 1.0
    link, network = transfer_seconds(setting, pull_factor)
    # of a port's bytes half are pulls in forward, two thirds in backward with x
    pulls = (link + network) * pull_factor / (pull_factor + 1.0)
    # the first pull precedes all routed work; the shared expert's tiles hide it
    first = pulls * min(1.0, setting.choice.minibatch / max(rows, 1.0))
    tokens = float(setting.work.tokens.max())
    shared = setting.costs.shared_forward(tokens)
    head = head_seconds(setting, is_backward) + max(0.0, first - shared)
    tail = tail_seconds(setting) + first * 0.5
    parts = {"compute": compute, "link": link, "network": network}
    bound = max(parts, key=lambda name: parts[name])
    if is_backward:
        head += refill_seconds(setting, rows, first)
    return Estimate(head + tail + parts[bound], compute, link, network, head, tail, bound)


def flops_per_gpu(setting: Setting) -> float:
    """Mean forward FLOPs of one GPU by the convention 6 rows H I (+ shared)."""
    total = layer_flops(
        float(setting.work.counts.sum()), setting.shape, float(setting.work.tokens.sum())
    )
    return total / setting.work.num_ranks / setting.choice.tp_size
