"""A plan: the chosen configuration with predictions, reasons and limits, as data and as text."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.casefile import write_whole

from .choice import Choice
from .closed_form import Setting
from .errors import parse_json, require
from .hardware import Hardware, load_hardware
from .models import ModelDescription, load_model, model_from_table
from .prediction import Prediction
from .reasons import name_of, reasons_for, split_name
from .search import Candidate, Question, search, workload_for
from .skew import first_break, skew_report
from .stages import FITTED, KernelConstants, shape_of
from .workload import Workload

SCHEMA = "mok_ref.plan/1"


@dataclass(frozen=True)
class Plan:
    """Everything a reader or `compile` needs; plain data, so that it survives a file.

    question, choice, placement   what was asked, what was chosen, owner rank per expert
    predicted                     forward, backward (ms, tflops, shares) and the whole step
    memory                        bytes per part, total, capacity
    reasons, breaks, first_break  why, what happens under skew, what breaks first
    alternatives                  the next best splits in one line each
    """

    question: dict[str, Any]
    model: dict[str, Any]
    hardware: dict[str, Any]
    choice: dict[str, Any]
    placement: list[int]
    predicted: dict[str, Any]
    memory: dict[str, Any]
    reasons: list[str]
    breaks: list[dict[str, Any]]
    first_break: str
    alternatives: list[dict[str, Any]]
    constants: dict[str, float]

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=False) + "\n"

    def write(self, path: Path) -> None:
        """Write a plan file, whole or not at all."""
        write_whole(path, self.to_json())

    @property
    def chosen(self) -> Choice:
        return Choice(**self.choice)

    def machine(self) -> Hardware:
        return Hardware(**self.hardware)

    def description(self) -> ModelDescription:
        return model_from_table(self.model, self.model["name"])

    def workload(self) -> Workload:
        """The routing that the plan was made for, drawn again from its seed."""
        q, model, choice = self.question, self.description(), self.chosen
        tokens = q["tokens"] * choice.tp_size
        ep, experts, top_k = choice.ep_size, model.num_experts, model.top_k
        return workload_for(q["routing"], ep, tokens, experts, top_k, q["seed"])

    def setting(self) -> Setting:
        """What the simulators take, rebuilt from the file's data alone."""
        choice = self.chosen
        shape = shape_of(self.description(), choice.dtype, tp_size=choice.tp_size)
        owner = np.array(self.placement, np.int32)
        constants = KernelConstants(**self.constants)
        return Setting(self.machine(), shape, choice, constants, self.workload(), owner)


def parse_plan(text: str, where: str) -> Plan:
    """Read a plan file.

    Raises: ValueError naming the file and what is wrong with it.
    """
    table = parse_json(text, where)
    is_plan = isinstance(table, dict) and table.get("schema") == SCHEMA
    require(is_plan, f"{where}: schema must be {SCHEMA!r}")
    table.pop("schema")
    names = {f.name for f in fields(Plan)}
    missing, extra = sorted(names - set(table)), sorted(set(table) - names)
    require(not missing, f"{where}: missing {', '.join(missing)}")
    known = ", ".join(sorted(names))
    require(not extra, f"{where}: unknown {', '.join(extra)}; a plan has {known}")
    plan = Plan(**table)
    try:
        plan_text(plan)
        plan.description()
        KernelConstants(**plan.constants)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not a whole plan: {error!r}") from None
    return plan


def machine_factors(hardware: Hardware, path: Path = FITTED) -> tuple[str, dict[str, float]]:
    """(name, factors) by which published rows correct a machine's rates; ("", {}) if none do."""
    if not path.is_file():
        return "", {}
    machines = json.loads(path.read_text(encoding="utf-8")).get("machines", {})
    for name, entry in machines.items():
        if hardware.arch in entry["archs"]:
            return name, {"tensor": entry["tensor"], "link": entry["link"]}
    return "", {}


def make_question(
    model: str | Path | Mapping[str, Any] | ModelDescription,
    hardware: str | Path | Hardware,
    tokens: int,
    gpus: int | None = None,
    calibrate: bool = True,
    **options: Any,
) -> tuple[Question, str]:
    """Load what is named; returns the question and the name of the calibration used."""
    machine = load_hardware(hardware)
    if gpus is not None:
        machine = machine.with_gpus(gpus)
    name, factors = machine_factors(machine) if calibrate else ("", {})
    if factors:
        machine = machine.scaled(**factors)
    return Question(load_model(model), machine, tokens, **options), name


def make_plan(
    model: str | Path | Mapping[str, Any] | ModelDescription,
    hardware: str | Path | Hardware,
    tokens: int = 4096,
    gpus: int | None = None,
    calibrate: bool = True,
    num_simulated: int = 3,
    **options: Any,
) -> Plan:
    """Search, simulate, explain.

    tokens    per GPU and micro-batch; further options are those of `search.Question`
    Raises: ValueError naming the argument, or saying that nothing fits the machine.
    """
    question, calibration = make_question(model, hardware, tokens, gpus, calibrate, **options)
    found = search(question, num_simulated)
    best, others = found[0], found[1:]
    cases = skew_report(question, best)
    return Plan(
        question=question_as_data(question, calibration),
        model=asdict(question.model),
        hardware=asdict(question.hardware),
        choice=asdict(best.choice),
        placement=[int(owner) for owner in best.placement.owner],
        predicted=predicted_as_data(question, best),
        memory={
            "parts": best.memory.parts,
            "total": best.memory.total,
            "capacity": best.memory.capacity,
            "fits": best.memory.fits,
        },
        reasons=reasons_for(question, best, others),
        breaks=[asdict(case) for case in cases],
        first_break=first_break(cases),
        alternatives=[alternative_as_data(other) for other in others],
        constants=asdict(question.constants),
    )


def question_as_data(question: Question, calibration: str) -> dict[str, Any]:
    skip = {"model", "hardware", "constants"}
    values = {f.name: getattr(question, f.name) for f in fields(question) if f.name not in skip}
    return {**values, "calibration": calibration}


def predicted_as_data(question: Question, best: Candidate) -> dict[str, Any]:
    assert best.simulated is not None
    step = best.step
    gpus = question.hardware.num_gpus
    active = 6.0 * question.model.active_parameters
    peak = question.hardware.peak_bf16_flops * gpus
    return {
        "forward": prediction_as_data(best.simulated[0]),
        "backward": prediction_as_data(best.simulated[1]),
        "step": {
            "seconds": step.seconds,
            "parts": step.parts,
            "tokens": step.tokens,
            "tokens_per_second": step.tokens_per_second,
            "tokens_per_second_per_gpu": step.tokens_per_second / gpus,
            "mfu": step.tokens_per_second * active / peak,
            "closed_form_tokens_per_second": best.closed_tokens_per_second,
            "recompute": best.recompute,
        },
        "imbalance": best.placement.imbalance,
        "placement": best.placement.title,
    }


def prediction_as_data(prediction: Prediction) -> dict[str, Any]:
    run = prediction.simulation
    return {
        "ms": prediction.seconds * 1e3,
        "tflops": prediction.tflops,
        "mfu": prediction.mfu,
        "hidden_share": prediction.hidden_share,
        "link_share": prediction.link_share,
        "compute_share": prediction.compute_share,
        "head_ms": prediction.head * 1e3,
        "tail_ms": prediction.tail * 1e3,
        "wait_pull_ms": float(run.wait_pull.max()) * 1e3,
        "wait_push_ms": float(run.wait_push.max()) * 1e3,
        "sent_mb": float(run.sent.max()) / 1e6,
        "received_mb": float(run.received.max()) / 1e6,
    }


def alternative_as_data(other: Candidate) -> dict[str, Any]:
    return {
        "split": name_of(other),
        "choice": str(other.choice),
        "tokens_per_second": other.tokens_per_second,
        "closed_form_tokens_per_second": other.closed_tokens_per_second,
        "memory_gb": other.memory.total / 1e9,
        "fits": other.memory.fits,
        "how": "simulated" if other.simulated else "closed form",
    }


def plan_text(plan: Plan) -> str:
    """The plan for a terminal of 80 columns."""
    q = plan.question
    machine = plan.machine()
    lines = [
        f"{plan.model['name']} on {machine.title}",
        f"{machine.num_gpus} GPU{'s' * (machine.num_gpus > 1)}, {q['tokens']} tokens per GPU, "
        f"routing {q['routing']}",
    ]
    if q["calibration"]:
        lines.append(f"Rates corrected by published rows of {q['calibration']}.")
    lines += ["", "Plan", *choice_lines(plan)]
    lines += ["", "Predicted", *predicted_lines(plan)]
    lines += ["", "Memory per GPU", *memory_lines(plan)]
    lines += ["", "Why", *(wrapped(reason, "  - ") for reason in plan.reasons)]
    lines += ["", "What breaks first", wrapped(plan.first_break, "  ")]
    lines += ["", "Alternatives", *alternative_lines(plan)]
    return "\n".join(lines)


def wrapped(text: str, start: str) -> str:
    """One paragraph at 80 columns, hanging under its start."""
    return textwrap.fill(text, 80, initial_indent=start, subsequent_indent=" " * len(start))


def choice_lines(plan: Plan) -> list[str]:
    """Name and value of everything the plan decides."""
    choice = plan.chosen
    movers = "helper warps of every SM"
    if choice.communication_sms:
        movers = f"{choice.communication_sms} SMs of their own"
    recomputed = ", all activations recomputed" if plan.predicted["step"]["recompute"] else ""
    rows = [
        ("split", split_name(choice)),
        ("experts", f"{choice.dtype}, placed {plan.predicted['placement']}"),
        ("batches", f"minibatch {choice.minibatch} rows, macrobatch {choice.macrobatch} rows"),
        ("rows moved by", movers),
        ("sharding", sharding_text(choice)),
        ("kept for backward", f"gate and up of rows: {choice.save}{recomputed}"),
    ]
    return [f"  {name:18s} {value}" for name, value in rows]


def sharding_text(choice: Choice) -> str:
    """What copies share: experts have one on each of dp groups, everything else one on each GPU."""
    if choice.sharding == "none":
        return "none"
    if choice.num_gpus == 1:
        return "nothing to share: one GPU"
    what = "optimizer" if choice.sharding == "optimizer" else "gradients, optimizer"
    experts = f"over {choice.dp_size}" if choice.dp_size > 1 else "one copy"
    return f"{what}: experts {experts}, rest over {choice.num_gpus} GPUs"


def predicted_lines(plan: Plan) -> list[str]:
    """The step, its parts, and the MoE layer in both directions."""
    step = plan.predicted["step"]
    lines = [
        f"  step {step['seconds'] * 1e3:.1f} ms, {step['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {step['mfu']:.1%}"
    ]
    lines += [f"    {name:28s} {value * 1e3:9.1f} ms" for name, value in step["parts"].items()]
    lines.append("  one MoE layer      ms   TFLOP/s    MFU   communication hidden   link share")
    linked = plan.chosen.ep_size > 1  # one rank sends nothing that could be hidden
    none = f"{'-':>22s} {'-':>12s}"
    for name in ("forward", "backward"):
        p = plan.predicted[name]
        shares = f"{p['hidden_share']:22.0%} {p['link_share']:12.0%}" if linked else none
        lines.append(f"    {name:10s} {p['ms']:8.3f} {p['tflops']:9.0f} {p['mfu']:6.0%} {shares}")
    if linked:
        lines.append("    link share: bytes of the busiest port over its nominal rate and the time")
    return lines


def memory_lines(plan: Plan) -> list[str]:
    """Total, verdict and the largest parts."""
    memory = plan.memory
    total, capacity = memory["total"] / 1e9, memory["capacity"] / 1e9
    lines = [f"  {total:.1f} of {capacity:.1f} GB"]
    if memory["fits"]:
        reserve = memory["parts"].get("reserve", 0.0) / 1e9
        lines[0] += f", {reserve:.1f} GB of it a reserve; {capacity - total:.1f} GB left"
    else:
        lines[0] += f": DOES NOT FIT, by {total - capacity:.1f} GB; no split searched needs less"
    return lines + [f"    {k:28s} {v / 1e9:9.1f} GB" for k, v in top_parts(memory["parts"])]


def top_parts(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return [(name, value) for name, value in ordered if math.isfinite(value) and value >= 5e7][:7]


def alternative_lines(plan: Plan) -> list[str]:
    """The chosen and the other splits, best first; two figures, so that like meets like."""
    if not plan.alternatives:
        return ["  none: no other split was asked for or possible"]
    lines = ["  split                       simulated   closed form    memory"]
    lines.append("                               tokens/s      tokens/s        GB")
    step = plan.predicted["step"]
    chosen = {
        "split": split_name(plan.chosen) + " *",
        "tokens_per_second": step["tokens_per_second"],
        "closed_form_tokens_per_second": step["closed_form_tokens_per_second"],
        "memory_gb": plan.memory["total"] / 1e9,
        "fits": plan.memory["fits"],
        "how": "simulated",
    }
    lines += [alternative_line(other) for other in (chosen, *plan.alternatives)]
    lines.append("  * this plan; the others in the order of the closed form; '-': not simulated")
    return lines


def alternative_line(other: Mapping[str, Any]) -> str:
    simulated = f"{other['tokens_per_second']:,.0f}" if other["how"] == "simulated" else "-"
    fit = "" if other["fits"] else "  does not fit"
    return (
        f"  {other['split']:25s} {simulated:>11s} "
        f"{other['closed_form_tokens_per_second']:13,.0f} {other['memory_gb']:9.1f}{fit}"
    )


def moe_config_options(plan: Plan) -> dict[str, Any]:
    """Arguments of `mok_ref.MoEConfig` that this plan fixes."""
    model, choice = plan.description(), plan.chosen
    in_order = np.arange(model.num_experts) * choice.ep_size // model.num_experts
    is_plain = model.num_experts % choice.ep_size == 0 and plan.placement == in_order.tolist()
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "ep_size": choice.ep_size,
        "shared_intermediate_size": model.shared_intermediate_size,
        "dtype": choice.dtype,
        "placement": None if is_plain else tuple(plan.placement),
        "macrobatch": choice.macrobatch,
        "minibatch": choice.minibatch,
    }
