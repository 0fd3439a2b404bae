"""What the command line prints: tables on a terminal or in a pipe, one JSON object on request."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mok_ref.casefile import CONTRACT, Case
from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.plotting import rows_in_time
from mok_ref.runner import Plan, RunResult
from mok_ref.schedule import Schedule, build_schedule, walk
from mok_ref.verify import Verdict

# Stages that happen once per minibatch: what a progress bar counts.
MINIBATCH_STAGES = ("gate/up", "down", "row gradients", "weight gradients")
WHOLE_STEPS = ("routing", "forward", "backward", "router gradient")
SHORT = 12  # characters of a digest in a table; 48 bits tell any two runs apart
INNER_STAGES = {
    "forward": ("schedule", "shared expert", "pull", "gate/up", "down", "combine"),
    "backward": ("row gradients", "weight gradients", "shared backward"),
}


def console() -> Console:
    """Standard output; in a pipe as wide as $COLUMNS says, else so that nothing is folded."""
    asked = os.environ.get("COLUMNS", "")
    width = None if sys.stdout.isatty() or asked.isdecimal() else 160
    return Console(width=width, markup=False, highlight=False)


def table(title: str | None, *columns: str) -> Table:
    """A plain table; columns whose name starts with '>' are right-aligned."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        made.add_column(
            column.lstrip(">"),
            justify="right" if column.startswith(">") else "left",
            overflow="fold",
        )
    return made


def describe_case(case: Case) -> str:
    """Sizes and options of a case in one line."""
    experts, inner, hidden = case.w_gate.shape
    parts = [f"N={case.num_tokens} H={hidden} I={inner} E={experts} K={case.top_k}"]
    if case.shared is not None:
        parts.append(f"shared expert of width {len(case.shared.gate)}")
    if case.swiglu_limit is not None:
        parts.append(f"clamp {case.swiglu_limit:g}")
    if case.routing is not None:
        parts.append(f"{case.routing.score} router")
    return ", ".join(parts)


def describe(plan: Plan) -> str:
    """Sizes and options of a run in one line."""
    config = plan.config
    options = [config.row_order, config.dtype, config.arithmetic, plan.settings.device]
    return f"{describe_case(plan.case)}, R={config.ep_size}, {', '.join(options)}"


def tokens_per_second(result: RunResult) -> float:
    """Tokens of the batch over the time of routing, forward and backward on the slowest rank."""
    seconds = result.seconds(*WHOLE_STEPS)
    return result.plan.case.num_tokens / seconds if seconds > 0 else 0.0


def stage_order(result: RunResult) -> list[str]:
    """Whole steps, each followed by the stages inside it; "pull" counts backward's pulls too."""
    order: list[str] = []
    for step in WHOLE_STEPS:
        order += [step, *INNER_STAGES.get(step, ())]
    plan, absent = result.plan, set()
    if plan.case.routing is None:
        absent.add("routing")
    if plan.case.shared is None:
        absent |= {"shared expert", "shared backward"}
    return [name for name in order if name in result.stages and name not in absent]


def print_run(result: RunResult) -> None:
    """Tables of a run: rows per rank, time per stage, digests."""
    out, plan = console(), result.plan
    out.print(describe(plan))
    ranks = table("Ranks", ">rank", ">tokens", ">experts", ">rows", ">rows with padding")
    routed, padded = result.rows_per_rank()
    for rank in range(plan.config.ep_size):
        cells = (rank, plan.splits[rank], plan.config.num_local_experts(rank))
        ranks.add_row(*map(str, (*cells, routed[rank], padded[rank])))
    out.print(ranks)
    stages = table("Stages (slowest rank)", "stage", ">ms")
    for name in stage_order(result):
        indent = "" if name in WHOLE_STEPS else "  "
        stages.add_row(f"{indent}{name}", f"{1e3 * result.stages[name]:.2f}")
    out.print(stages)
    kernels = "NumPy reference" if result.path == "reference" else f"{result.path} kernels"
    out.print(f"{kernels}, {tokens_per_second(result):.0f} tokens/s")
    tensors = table("Tensors", "name", "dtype", "shape", "sha-256")
    for name, value in result.digests.items():
        tensor = result.tensors[name]
        tensors.add_row(name, tensor.dtype.name, "x".join(map(str, tensor.shape)), value[:SHORT])
    out.print(tensors)
    print(f"digest {result.digest}")
    if plan.config.arithmetic != "exact":
        out.print(f"arithmetic {plan.config.arithmetic!r} makes no promise about bits")


def run_report(result: RunResult) -> dict[str, Any]:
    """The same as one JSON object."""
    plan, config = result.plan, result.plan.config
    routed, padded = result.rows_per_rank()
    return {
        "contract": CONTRACT,
        "ranks": config.ep_size,
        "device": plan.settings.device,
        "path": result.path,
        "num_tokens": plan.case.num_tokens,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "shared_intermediate_size": config.shared_intermediate_size,
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "order": config.row_order,
        "dtype": config.dtype,
        "arithmetic": config.arithmetic,
        "backward": plan.settings.backward,
        "splits": plan.splits.tolist(),
        "rows_per_rank": routed.tolist(),
        "padded_rows_per_rank": padded.tolist(),
        "rows_per_expert": result.rows_per_expert().tolist(),
        "stages_ms": {name: 1e3 * seconds for name, seconds in result.stages.items()},
        "tokens_per_s": tokens_per_second(result),
        "shapes": {name: list(tensor.shape) for name, tensor in result.tensors.items()},
        "digest": result.digest,
        "digests": result.digests,
    }


# --------------------------------------------------------------------------- verify


def print_verdict(case: Case, verdict: Verdict) -> None:
    """One row per run, what the columns mean, and one sentence."""
    out = console()
    out.print(describe_case(case))
    devices = {check.device for check in verdict.checks}
    shown = table(None, ">R", "order", "ring", "save", "placement", "digest", "bits")
    for number, check in enumerate(verdict.checks):
        good = "first run" if number == 0 and devices == {"cpu"} else "equal"
        cells = (check.ranks, check.order, check.ring, check.save, check.placement)
        shown.add_row(*map(str, cells), check.digest[:SHORT], check.fault or good)
    for ranks in verdict.skipped:
        shown.add_row(str(ranks), "", "", "", "", "", "skipped")
    out.print(shown)
    out.print("ring: macrobatch, minibatch in rows; whole: all rows of a rank at once.")
    out.print("save: what forward keeps for backward. Neither changes a bit.")
    if any(check.order == "round_robin" for check in verdict.checks):
        out.print(
            "round_robin: its row order depends on R, and with it the routed experts' weight\n"
            "gradients: one digest per R; every other result equals the canonical one."
        )
    print(verdict.sentence())


# --------------------------------------------------------------------------- progress


def num_minibatch_steps(plan: Plan, ranks: list[int]) -> int | None:
    """How often `MINIBATCH_STAGES` will happen on these ranks; None where a router decides."""
    ids, config = plan.case.topk_ids, plan.config
    if ids is None:
        return None
    steps = 0
    for rank in ranks:
        schedule = build_schedule(config, rank, ids, plan.splits)
        batches = walk(schedule.num_rows, *config.ring_rows(schedule.num_rows), "forward")
        steps += len(list(batches)) * (4 if plan.settings.backward else 2)
    return steps


@contextmanager
def progress(plan: Plan, ranks: list[int]) -> Iterator[Callable[[str], None] | None]:
    """A bar on a terminal, nothing elsewhere; yields what the ranks call after each stage."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("minibatches", total=num_minibatch_steps(plan, ranks))
        lock = threading.Lock()

        def after_stage(name: str) -> None:
            if name in MINIBATCH_STAGES:
                with lock:
                    bar.update(task, advance=1, description=name)

        yield after_stage


# --------------------------------------------------------------------------- schedule


def print_schedule(plan: Plan, topk_ids: np.ndarray, traffic: np.ndarray, num_rows: int) -> None:
    """The rank-to-rank matrix, each rank's experts, and the first rows of every schedule."""
    out, config = console(), plan.config
    sizes = f"N={plan.case.num_tokens} E={config.num_experts} K={config.top_k} R={config.ep_size}"
    out.print(f"{sizes}, {config.row_order} order")
    matrix = table("Rows that a rank pulls", "by", *(f">from {r}" for r in range(config.ep_size)))
    for rank, row in enumerate(traffic):
        matrix.add_row(f"rank {rank}", *map(str, row))
    out.print(matrix)
    for rank in range(config.ep_size):
        schedule = build_schedule(config, rank, topk_ids, plan.splits)
        experts = zip(schedule.expert_ids, schedule.expert_offset, schedule.expert_count)
        segments = [f"{e}: {n} from row {o}" for e, o, n in experts]
        out.print(f"rank {rank}: {schedule.num_rows} rows; experts {', '.join(segments) or 'none'}")
        if num_rows > 0:
            out.print(_first_rows(config, schedule, rank, num_rows))


def _first_rows(config: MoEConfig, schedule: Schedule, rank: int, num_rows: int) -> Table:
    """Where the first rows come from; "pulled" is their place in time, as in the picture."""
    rows = table(None, ">row", ">expert", ">from rank", ">token", ">slot", ">pulled")
    when = np.argsort(rows_in_time(config, schedule, rank))
    for row in np.flatnonzero(schedule.peer_rank >= 0)[:num_rows]:
        expert = schedule.expert_ids[schedule.row_block_expert[row // ROW_TILE]]
        token, slot = divmod(int(schedule.peer_row[row]), config.top_k)
        rows.add_row(*map(str, (row, expert, schedule.peer_rank[row], token, slot, when[row])))
    return rows
