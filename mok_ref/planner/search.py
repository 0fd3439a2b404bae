"""Search: every way to split the machine, ranked by the closed form, the best few simulated.

EP x TP x DP comes first because it decides everything else; inside one split the kernel's batches
and the SMs for communication; sharding and what forward saves are the least that fits in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from .choice import Choice
from .closed_form import Estimate, Setting, estimate
from .errors import require
from .hardware import Hardware
from .memory import MemoryReport, memory_report
from .models import ModelDescription
from .placement import Placement, best_placement
from .prediction import Prediction, predict
from .stages import TILE_ROWS, KernelConstants, fitted_constants, shape_of
from .step import StepTime, step_time
from .workload import Workload, make_workload, recorded_workload

MINIBATCHES = (1024, 2048, 4096, 8192, 16384)
RING_SLOTS = (2, 4, 8)
COMMUNICATION_SMS = (0, 16, 32)
MOST_TOKENS = 1 << 20  # of a GPU's micro-batch, and of a sequence, and micro-batches of a step
EVEN_ENOUGH = 1.02  # litters stay together if that costs at most 2 % of balance


@dataclass(frozen=True)
class Question:
    """What is asked of the planner.

    tokens   per GPU and micro-batch; routing "uniform", "zipf:S" or the path of an .npz file
    """

    model: ModelDescription
    hardware: Hardware
    tokens: int
    dtype: str = "bf16"
    routing: str = "uniform"
    seed: int = 0
    sequence: int = 4096
    accumulate: int = 1
    cross_domain: bool = False
    constants: KernelConstants = field(default_factory=fitted_constants)
    ep_size: int | None = None
    tp_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "accumulate", "sequence"):
            value = getattr(self, name)
            require(
                1 <= value <= MOST_TOKENS, f"{name} must be in 1..{MOST_TOKENS}, got {name}={value}"
            )
        require(self.seed >= 0, f"seed must be >= 0, got seed={self.seed}")
        for name, value in (("ep_size", self.ep_size), ("tp_size", self.tp_size)):
            require(value is None or value >= 1, f"{name} must be at least 1, got {name}={value}")


@dataclass(frozen=True)
class Candidate:
    """A choice with its predicted step, cheap (closed form) or simulated."""

    setting: Setting
    placement: Placement
    recompute: bool
    forward: Estimate
    backward: Estimate
    memory: MemoryReport
    step: StepTime
    simulated: tuple[Prediction, Prediction] | None = None
    closed_form: StepTime | None = None  # the step before it was simulated

    @property
    def choice(self) -> Choice:
        return self.setting.choice

    @property
    def tokens_per_second(self) -> float:
        return self.step.tokens_per_second

    @property
    def closed_tokens_per_second(self) -> float:
        """By the closed form alone, which every candidate has: like is compared with like."""
        return (self.closed_form or self.step).tokens_per_second


def parse_routing(text: str) -> float | None:
    """Skew of "uniform" or "zipf:S"; None if `text` is a path.

    Raises: ValueError if the number is wrong.
    """
    if text == "uniform":
        return 0.0
    if not text.startswith("zipf"):
        require(
            text.endswith(".npz"),
            f'routing must be "uniform", "zipf:S" or an .npz file, got {text!r}',
        )
        return None
    try:
        skew = float(text.removeprefix("zipf").removeprefix(":") or "1")
    except ValueError:
        raise ValueError(f'routing must be "zipf:S" with a number S, got {text!r}') from None
    require(0 <= skew <= 10, f'routing must be "zipf:S" with S in 0..10, got {text!r}')
    return skew


@lru_cache(maxsize=64)
def workload_for(
    routing: str, ep_size: int, tokens: int, num_experts: int, top_k: int, seed: int
) -> Workload:
    """One EP group's routing; the same for every split of the same size."""
    skew = parse_routing(routing)
    if skew is None:
        return recorded_workload(routing, ep_size, tokens, num_experts, top_k)
    # counts alone: the search needs no token ids
    return make_workload(ep_size, tokens, num_experts, top_k, skew, seed, with_ids=False)


def divisors(value: int) -> list[int]:
    return [d for d in range(1, value + 1) if value % d == 0]


def splits(question: Question) -> Iterator[tuple[int, int, int]]:
    """(ep, tp, dp) that use most of the machine; EP groups stay inside a fast domain.

    A group size need not divide the domain: what is left over stays idle and is counted as lost.
    """
    hardware, model = question.hardware, question.model
    domain = hardware.gpus_per_domain
    for tp in [question.tp_size] if question.tp_size else (1, 2, 4, 8):
        fits = tp == 1 or (model.intermediate_size % (tp * 128) == 0 and domain % tp == 0)
        if not fits:
            continue
        sizes = set(divisors(domain // tp)) | {2**i for i in range(14)}
        sizes |= {d for d in divisors(model.num_experts) if d <= domain}
        if question.cross_domain:
            sizes |= {domain // tp * d for d in divisors(hardware.num_domains)}
        if question.ep_size:
            sizes = {question.ep_size}
        for ep in sorted(sizes):
            if ep > model.num_experts or ep * tp > hardware.num_gpus:
                continue
            if ep * tp <= domain:
                dp = domain // (ep * tp) * hardware.num_domains
            elif question.cross_domain and ep * tp % domain == 0:
                dp = hardware.num_gpus // (ep * tp)
            else:
                continue
            if ep * tp * dp * 4 >= hardware.num_gpus * 3:
                yield ep, tp, dp


def choose_placement(question: Question, work: Workload, tp: int) -> Placement:
    """The most even placement; litters kept together where that costs next to nothing."""
    model, ranks = question.model, work.num_ranks
    per_domain = min(max(1, question.hardware.gpus_per_domain // tp), ranks)
    per_domain = per_domain if ranks % per_domain == 0 else ranks
    groups = model.routing.num_groups
    found = best_placement(work.expert_load, ranks, groups, per_domain, None)
    best = found[0].imbalance
    even = [p for p in found if p.imbalance <= best * EVEN_ENOUGH]
    order = ["litters whole", "litters by domain", "in order", "longest first"]
    return min(even, key=lambda p: order.index(p.title))


def fitting_memory(
    question: Question, choice: Choice, owner: np.ndarray, rows: np.ndarray, tokens: int
) -> tuple[Choice, bool, MemoryReport]:
    """The least sharding, saving and recomputation that fit; the leanest if nothing does."""
    leanest: tuple[Choice, bool, MemoryReport] | None = None
    attempts = [
        (replace(choice, sharding=sharding, save=save), recompute)
        for recompute, save in ((False, "all"), (False, "none"), (True, "none"))
        for sharding in ("optimizer", "gradients")
    ]
    for attempt, recompute in attempts:
        report = memory_report(
            question.model, question.hardware, attempt, owner, rows, tokens, recompute
        )
        if report.fits:
            return attempt, recompute, report
        if leanest is None or report.total < leanest[2].total:
            leanest = attempt, recompute, report
    assert leanest is not None
    return leanest


def padded_rows(work: Workload, owner: np.ndarray) -> np.ndarray:
    """(R,) rows of every rank, each expert's segment rounded up to TILE_ROWS."""
    sizes = -(-work.expert_load // TILE_ROWS) * TILE_ROWS
    return np.bincount(owner, weights=sizes, minlength=work.num_ranks)


def evaluate(question: Question, setting: Setting, placement: Placement, tokens: int) -> Candidate:
    """Closed-form figures of one candidate."""
    rows = padded_rows(setting.work, setting.owner)
    choice, recompute, memory = fitting_memory(
        question, setting.choice, setting.owner, rows, tokens
    )
    setting = replace(setting, choice=choice)
    forward, backward = estimate(setting), estimate(setting, True)
    step = whole_step(question, setting, (forward.seconds, backward.seconds), recompute)
    return Candidate(setting, placement, recompute, forward, backward, memory, step)


def whole_step(
    question: Question, setting: Setting, layer: tuple[float, float], recompute: bool
) -> StepTime:
    experts = float(np.bincount(setting.owner, minlength=setting.choice.ep_size).max())
    return step_time(
        question.model,
        question.hardware,
        setting.choice,
        layer,
        int(setting.work.tokens.max()),
        experts,
        question.sequence,
        question.accumulate,
        recompute,
    )


def candidates_of_split(question: Question, ep: int, tp: int, dp: int) -> list[Candidate]:
    """All batches and communication shares of one split."""
    model, tokens = question.model, question.tokens * tp
    work = workload_for(question.routing, ep, tokens, model.num_experts, model.top_k, question.seed)
    placement = choose_placement(question, work, tp)
    shape = shape_of(model, question.dtype, tp_size=tp)
    mean_rows = float(work.counts.sum()) / ep
    found = []
    for minibatch in MINIBATCHES:
        if minibatch > MINIBATCHES[0] and minibatch > mean_rows:
            continue
        for sms in communication_sms(question.hardware):
            choice = Choice(
                ep, tp, dp, "optimizer", minibatch, minibatch * 4, sms, "all", question.dtype
            )
            setting = Setting(
                question.hardware, shape, choice, question.constants, work, placement.owner
            )
            found.append(evaluate(question, setting, placement, tokens))
    return found


def communication_sms(hardware: Hardware) -> list[int]:
    """Numbers of SMs that could only move rows while others compute; 0 stands for none."""
    return [sms for sms in COMMUNICATION_SMS if sms < hardware.num_sms]


def rank_key(candidate: Candidate) -> tuple[bool, float, float]:
    """Those that fit first, the fastest first; of those that do not fit, the leanest first, and of
    equally lean ones the fastest."""
    return _rank(candidate, candidate.tokens_per_second)


def closed_rank_key(candidate: Candidate) -> tuple[bool, float, float]:
    """`rank_key` by figures that simulated candidates and others share."""
    return _rank(candidate, candidate.closed_tokens_per_second)


def _rank(candidate: Candidate, tokens_per_second: float) -> tuple[bool, float, float]:
    fits, total = candidate.memory.fits, candidate.memory.total
    return not fits, 0.0 if fits else total, -tokens_per_second


def best_per_split(found: list[Candidate], num: int) -> list[Candidate]:
    """The best of each split, the best splits first."""
    best: dict[tuple[int, int], Candidate] = {}
    for candidate in sorted(found, key=rank_key):
        key = (candidate.choice.ep_size, candidate.choice.tp_size)
        best.setdefault(key, candidate)
    return sorted(best.values(), key=rank_key)[:num]


def simulate_candidate(question: Question, candidate: Candidate) -> Candidate:
    """Replace the closed form by the simulation of every rank."""
    setting = candidate.setting
    pair = (predict(setting), predict(setting, True))
    layer = (pair[0].seconds, pair[1].seconds)
    step = whole_step(question, setting, layer, candidate.recompute)
    closed = candidate.closed_form or candidate.step
    return replace(candidate, step=step, simulated=pair, closed_form=closed)


def batch_variants(question: Question, candidate: Candidate, num: int) -> list[Candidate]:
    """The same split with other minibatches and rings, the best `num` by the closed form."""
    here = candidate.choice
    rows = int(padded_rows(candidate.setting.work, candidate.setting.owner).max())
    result = []
    for minibatch in (here.minibatch // 2, here.minibatch, here.minibatch * 2):
        # a ring for all rows never waits for a slot, where there is memory for it
        for slots in sorted({*RING_SLOTS, -(-rows // minibatch)}):
            choice = replace(here, minibatch=minibatch, macrobatch=minibatch * slots)
            if choice == here or minibatch < MINIBATCHES[0]:
                continue
            setting = replace(candidate.setting, choice=choice)
            tokens = int(setting.work.tokens.max())
            result.append(evaluate(question, setting, candidate.placement, tokens))
    return sorted(result, key=rank_key)[:num]


def search(question: Question, num_simulated: int = 3) -> list[Candidate]:
    """The best candidate by simulation, then the others, best first by the closed form.

    The first few are simulated. A split that the closed form puts above the best simulated one is
    simulated too, so that none that is left out claims to be better. Where nothing fits, the first
    is the leanest of all.
    Raises: ValueError if no split of the machine is possible.
    """
    ways = list(splits(question))
    require(
        bool(ways),
        f"ep_size and tp_size must fit the machine, got ep_size={question.ep_size}, "
        f"tp_size={question.tp_size} on {question.hardware.num_gpus} GPUs",
    )
    found = [candidate for way in ways for candidate in candidates_of_split(question, *way)]
    rest = best_per_split(found, max(num_simulated, 6))
    head = [simulate_candidate(question, c) for c in rest[:num_simulated]]
    rest = rest[num_simulated:]
    head.sort(key=rank_key)
    varied = [simulate_candidate(question, c) for c in batch_variants(question, head[0], 2)]
    head[0] = min([head[0], *varied], key=rank_key)
    while rest and rank_key(rest[0]) < rank_key(head[0]):
        head.append(simulate_candidate(question, rest.pop(0)))
        head.sort(key=rank_key)
    return head[:1] + sorted(head[1:] + rest, key=closed_rank_key)
