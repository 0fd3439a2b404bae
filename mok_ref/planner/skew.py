"""What breaks first when the load is skewed: a rank, a link, the placement.

The placement was made for the load that was measured; here routing drifts away from it. Every case
is judged by the closed form, so that a whole row of them costs a second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .closed_form import Setting, estimate
from .search import Candidate, Question, choose_placement, padded_rows
from .workload import Workload, all_to_one, make_workload

SKEWS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SLOWER = 1.25  # "breaks": the layer takes a quarter longer than planned


@dataclass(frozen=True)
class SkewCase:
    """One skewed load under the planned placement.

    slowdown        forward + backward over the planned time
    replaced        the same after placing experts anew for this load
    hottest_rank    rows of the fullest rank over the mean; hottest_expert likewise
    bound           what limits the layer: compute, link or network
    recomputed      share of the fullest rank's rows whose gate and up were not saved: memory never
                    overflows, rows beyond the planned number are computed again in backward
    """

    title: str
    slowdown: float
    replaced: float
    hottest_rank: float
    hottest_expert: float
    bound: str
    recomputed: float
    breaks: str


def skewed_loads(question: Question, ranks: int, tokens: int, owner: np.ndarray) -> list[Workload]:
    model = question.model
    loads = [
        make_workload(
            ranks, tokens, model.num_experts, model.top_k, skew, question.seed + 1, with_ids=False
        )
        for skew in SKEWS
    ]
    return [*loads, all_to_one(ranks, tokens, owner, model.top_k)]


def skew_report(question: Question, plan: Candidate) -> list[SkewCase]:
    """All cases, mildest first."""
    setting = plan.setting
    base = plan.forward.seconds + plan.backward.seconds
    tokens = int(setting.work.tokens.max())
    return [
        skew_case(question, plan, work, base)
        for work in skewed_loads(question, setting.choice.ep_size, tokens, setting.owner)
    ]


def skew_case(question: Question, plan: Candidate, work: Workload, base: float) -> SkewCase:
    setting = replace(plan.setting, work=work)
    rows = padded_rows(work, setting.owner)
    load = work.expert_load
    forward, backward = estimate(setting), estimate(setting, True)
    planned = padded_rows(plan.setting.work, setting.owner).max()
    recomputed = max(0.0, 1.0 - float(planned) / max(float(rows.max()), 1.0))
    if setting.choice.save == "none":
        recomputed = 0.0  # everything is recomputed anyway, and counted in the plan
    again = recomputed_seconds(setting, recomputed)
    slowdown = (forward.seconds + backward.seconds + again) / base
    moved = choose_placement(question, work, setting.choice.tp_size)
    best = replace(setting, owner=moved.owner)
    replaced = (estimate(best).seconds + estimate(best, True).seconds) / base
    bound = backward.bound if backward.seconds > forward.seconds else forward.bound
    breaks = ""
    if slowdown > SLOWER:
        where = "its SMs" if bound == "compute" else f"its {bound}"
        breaks = f"rank {int(np.argmax(rows))} is the slowest, bound by {where}"
    return SkewCase(
        work.title,
        slowdown,
        replaced,
        float(rows.max() / max(rows.mean(), 1.0)),
        float(load.max() / max(load.mean(), 1e-9)),
        bound,
        recomputed,
        breaks,
    )


def recomputed_seconds(setting: Setting, share: float) -> float:
    """gate/up again for `share` of the fullest rank's rows."""
    slowest = int(np.argmax(setting.work.rows_of_ranks(setting.owner)))
    rows = setting.work.expert_load[setting.owner == slowest].astype(float)
    return share * setting.costs.gate_up(rows, saves=False)


def first_break(cases: list[SkewCase]) -> str:
    """One sentence: the mildest case that breaks something, and what would help."""
    for case in cases:
        if not case.breaks:
            continue
        text = f"{case.title}: {case.breaks} (rows {case.hottest_rank:.1f}x the mean, layer "
        text += f"{case.slowdown:.2f}x the planned time"
        if case.recomputed > 0:
            text += f", {case.recomputed:.0%} of its rows recomputed"
        text += ")"
        if case.replaced < case.slowdown * 0.9:
            return text + f"; placing experts anew brings it to {case.replaced:.2f}x"
        return text + (
            f"; no placement helps: one expert alone has {case.hottest_expert:.1f}x the mean rows, "
            "so balance the router or set a capacity"
        )
    return "nothing breaks up to all tokens on the same experts"
