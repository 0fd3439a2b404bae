"""The promise, checked: one case run in many ways must give one digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mok_ref.casefile import MAX_RANKS, OUTPUT_EXPERTS, OUTPUT_REPLICATED, Case
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
    """One way of running the case, and what came of it. `fault` is empty where all bits agree.

    ring       macrobatch, minibatch in rows; "whole": all rows of a rank at once
    save       what forward keeps for backward
    placement  "even", "scattered" or "case": ranks, tokens and owners as in the file
    left_out   results that are not compared, by definition
    """

    ranks: int
    device: str
    order: str
    ring: str
    save: str
    placement: str
    digest: str
    fault: str
    left_out: str = ""


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
    """ "1,8,72" and "1-4,8" as ascending numbers, none of them twice. Raises: ValueError."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"ranks must look like 1,8,72 or 1-4,8, got {text!r}")
        low, high = int(first[:9]), int((last if dash else first)[:9])
        if not (1 <= low <= MAX_RANKS and 1 <= high <= MAX_RANKS):
            raise ValueError(f"ranks must be in 1..{MAX_RANKS}, got {part.strip()[:40]!r}")
        if low > high:
            raise ValueError(f"ranks must be ranges low-high, got {part.strip()[:40]!r}")
        twice = next((r for r in range(low, high + 1) if r in ranks), None)
        if twice is not None:
            raise ValueError(f"ranks must not name a number twice, got {twice} twice")
        ranks.extend(range(low, high + 1))
    return sorted(ranks)


def fitting_ranks(case: Case, ranks: list[int]) -> tuple[list[int], list[int]]:
    """(numbers of ranks that divide E, those that do not and are skipped)."""
    num_experts = len(case.w_gate)
    fitting = [r for r in ranks if num_experts % r == 0]
    return fitting, [r for r in ranks if r not in fitting]


def own_variant(case: Case, device: str, dtype: str | None) -> Settings | None:
    """The configuration that the case itself names; None where it leaves all of it open."""
    if case.splits is None and case.placement is None:
        return None
    return Settings(device=device, dtype=dtype, backward=case.dy is not None)


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
    the case's   equal to the first run, without replicated gradients where the file's splits are
                 not in units of 16 (spec section 6)
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        # Splits in units of 16, which replicated gradients need to be equal for every R.
        self._even_case = replace(case, splits=None)
        self._first: RunResult | None = None
        self._first_of: dict[int, RunResult] = {}

    def check(self, settings: Settings) -> Check:
        """Run one variant. Raises: ValueError for a case that does not fit."""
        is_own = settings.placement is None  # ranks, tokens, owners and order of the file
        result = run_virtual(make_plan(self._case if is_own else self._even_case, settings))
        config = result.plan.config
        left_out = OUTPUT_EXPERTS if config.row_order == "round_robin" else ()
        if is_own and not in_units_of_16(result.plan.splits):
            left_out = (*left_out, *OUTPUT_REPLICATED)
        self._first = self._first or result
        faults = [first_difference(self._first, result, left_out)]
        if settings.order == "round_robin":
            assert settings.ranks is not None
            first = self._first_of.setdefault(settings.ranks, result)
            faults.append(first_difference(first, result))
        size = (settings.macrobatch, settings.minibatch)
        return Check(
            ranks=config.ep_size,
            device=settings.device,
            order=config.row_order,
            ring="whole" if size == (None, None) else f"{size[0]}, {size[1]}",
            save=settings.save,
            placement=_placement_word(settings),
            digest=result.digest,
            fault=next((fault for fault in faults if fault), ""),
            left_out=", ".join(name for name in left_out if name in result.tensors),
        )


def _placement_word(settings: Settings) -> str:
    if isinstance(settings.placement, tuple):
        return "scattered"
    return settings.placement or "case"


def in_units_of_16(splits: np.ndarray) -> bool:
    """Whether each rank but the last non-empty one holds a multiple of 16 tokens."""
    filled = splits[splits > 0]
    return not (filled[:-1] % 16).any()


@dataclass(frozen=True, eq=False)
class Verdict:
    """All checks of a case, and the sentence that sums them up."""

    checks: list[Check]
    skipped: list[int]
    num_experts: int
    intermediates_equal: bool = True

    @property
    def ranks(self) -> list[int]:
        """Numbers of ranks that were asked for and run."""
        return sorted({check.ranks for check in self.checks if check.placement != "case"})

    @property
    def equal(self) -> bool:
        """Whether at least two numbers of ranks gave equal bits everywhere."""
        no_fault = not any(check.fault for check in self.checks)
        return len(self.ranks) >= 2 and no_fault and self.intermediates_equal

    def as_json(self) -> dict[str, Any]:
        """The same as one JSON object."""
        runs = [asdict(check) for check in self.checks]
        summary = self.sentence()
        return {"equal": self.equal, "skipped": self.skipped, "summary": summary, "runs": runs}

    def sentence(self) -> str:
        """What was compared, what differed, what was left out."""
        ran = f"R = {', '.join(map(str, self.ranks)) or 'none'}"
        faults = sum(bool(check.fault) for check in self.checks)
        if faults or not self.intermediates_equal:
            where = f"{faults} of {len(self.checks)} runs" if faults else "intermediates"
            text = f"NOT verified: bits differ in {where}"
        elif len(self.ranks) < 2:
            text = f"NOT verified: fewer than two numbers of ranks compared, {ran}"
        else:
            text = f"all bits equal: {len(self.checks)} runs, {ran}"
        own = [check.ranks for check in self.checks if check.placement == "case"]
        if own:
            text += f" and the case as it is on {own[0]}"
        if self.skipped:
            numbers = ", ".join(map(str, self.skipped))
            text += f"; skipped {numbers} (no divisor of E={self.num_experts})"
        left_out = sorted({check.left_out for check in self.checks if check.placement == "case"})
        if any(left_out):
            text += f"; not compared in the case's own splits: {', '.join(filter(None, left_out))}"
        return text


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
