"""The promise, checked: one case run in many ways must give one digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mok_ref.casefile import OUTPUT_EXPERTS, Case
from mok_ref.experts import ExpertWeights
from mok_ref.runner import RandomCase, RunResult, Settings, make_plan, routes_of, run_virtual
from mok_ref.testing import assert_bitwise_equal

# Ring sizes and what forward saves; none of them may change a bit.
RINGS: tuple[tuple[int | None, int | None, str], ...] = (
    (None, None, "all"),
    (128, 128, "none"),
    (512, 256, "ring"),
)
DEFAULT_RANKS = "1,8,72"


@dataclass(frozen=True, eq=False)
class Check:
    """One way of running the case, and what came of it. `fault` is empty where all bits agree."""

    ranks: int
    device: str
    order: str
    ring: str
    placement: str
    digest: str
    fault: str


def default_case() -> Case:
    """E = 72, N = 1152, a router, a shared expert of its own width: 1, 2, 3, 4, 8, 72 ranks fit."""
    return RandomCase(
        num_tokens=1152,
        hidden_size=32,
        intermediate_size=16,
        num_experts=72,
        top_k=3,
        shared_size=24,
        router=True,
        seed=1,
    ).make()


def parse_ranks(text: str) -> list[int]:
    """ "1,8,72" and "1-4,8" as ascending numbers. Raises: ValueError."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"ranks must look like 1,8,72 or 1-4,8, got {text!r}")
        ranks.update(range(int(first), int(last if dash else first) + 1))
    if not ranks or min(ranks) < 1 or max(ranks) > 1024:
        raise ValueError(f"ranks must be in 1..1024, got {text!r}")
    return sorted(ranks)


def fitting_ranks(case: Case, ranks: list[int]) -> tuple[list[int], list[int]]:
    """(numbers of ranks that divide E, those that do not and are skipped)."""
    num_experts = len(case.w_gate)
    fitting = [r for r in ranks if num_experts % r == 0]
    return fitting, [r for r in ranks if r not in fitting]


def variants(case: Case, ranks: list[int], device: str, dtype: str | None) -> Iterator[Settings]:
    """Every way of running the case, canonical ones first."""
    base = Settings(device=device, dtype=dtype, backward=case.dy is not None, placement="even")
    for size in ranks:
        for macrobatch, minibatch, save in RINGS:
            yield replace(base, ranks=size, order="canonical", macrobatch=macrobatch,
                          minibatch=minibatch, save=save)  # fmt: skip
        if size > 1:
            placement = scattered_placement(len(case.w_gate), size)
            yield replace(base, ranks=size, order="canonical", placement=placement)
    for size in ranks:
        for macrobatch, minibatch, save in RINGS[:2]:
            yield replace(base, ranks=size, order="round_robin", macrobatch=macrobatch,
                          minibatch=minibatch, save=save)  # fmt: skip


def scattered_placement(num_experts: int, ranks: int) -> tuple[int, ...]:
    """An owner for each expert, drawn at random: uneven counts, idle ranks, no neighbours."""
    rng = np.random.default_rng([num_experts, ranks])
    return tuple(int(owner) for owner in rng.integers(0, ranks, num_experts))


class Verifier:
    """Runs variants one by one and compares each with the first that must have equal bits.

    canonical    every tensor equal to the first canonical run
    round_robin  every tensor equal to the first round_robin run of the same R; everything but the
                 routed experts' dW, whose row order depends on R, equal to the first run of all
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        # Splits in units of 16, which replicated gradients need to be equal for every R.
        self._even_case = replace(case, splits=None)
        self._first: RunResult | None = None
        self._first_of: dict[int, RunResult] = {}

    def check(self, settings: Settings) -> Check:
        """Run one variant. Raises: ValueError for a case that does not fit."""
        result = run_virtual(make_plan(self._even_case, settings))
        faults = [self._against_all(result, settings)]
        if settings.order == "round_robin":
            assert settings.ranks is not None
            first = self._first_of.setdefault(settings.ranks, result)
            faults.append(first_difference(first, result))
        ring = f"{settings.macrobatch or 'whole'}/{settings.minibatch or 'auto'} {settings.save}"
        placement = "even" if settings.placement == "even" else "scattered"
        return Check(
            ranks=result.plan.config.ep_size,
            device=settings.device,
            order=result.plan.config.row_order,
            ring=ring,
            placement=placement,
            digest=result.digest,
            fault=next((fault for fault in faults if fault), ""),
        )

    def _against_all(self, result: RunResult, settings: Settings) -> str:
        if self._first is None:
            self._first = result
        leave_out = OUTPUT_EXPERTS if settings.order == "round_robin" else ()
        return first_difference(self._first, result, leave_out)


def first_difference(
    expected: RunResult, actual: RunResult, leave_out: tuple[str, ...] = ()
) -> str:
    """Tensor, coordinate and values of the first difference; empty if there is none."""
    for name, tensor in expected.tensors.items():
        if name in leave_out:
            continue
        try:
            assert_bitwise_equal(actual.tensors[name], tensor, name)
        except AssertionError as error:
            return str(error)
    return ""


def device_intermediates(
    case: Case, ranks: int, order: str, dtype: str | None
) -> tuple[str, int, str]:
    """Every intermediate of a forward step on the GPU: (path, tensors compared, first fault)."""
    from mok_ref.gpu.verify import Batch, check_forward
    from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks

    settings = Settings(ranks=ranks, order=order, dtype=dtype, placement="even", device="cuda")
    plan = make_plan(replace(case, splits=None), settings)
    weights = ExpertWeights(case.w_gate, case.w_up, case.w_down)
    batch = Batch(case.x, *routes_of(plan), weights, case.shared, plan.splits)
    results = run_virtual_cuda_ranks(ranks, lambda heap: check_forward(plan.config, heap, batch))
    findings = [finding for _, found in results for finding in found]
    faults = [str(finding) for finding in findings if finding.differing]
    return results[0][0], len(findings), faults[0] if faults else ""
