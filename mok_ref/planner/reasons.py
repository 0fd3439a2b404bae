"""Why this plan: every sentence is a comparison of two predictions or a figure of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .choice import Choice
from .closed_form import Estimate, Setting, estimate
from .memory import memory_report
from .placement import in_order
from .search import (
    MINIBATCHES,
    Candidate,
    Question,
    communication_sms,
    padded_rows,
    parse_routing,
)
from .workload import foreign_routing

TIGHT = 0.03  # share of the memory; a plan that leaves less is warned about
WARNING = "WARNING:"  # how a reason begins that questions the input


def reasons_for(question: Question, best: Candidate, others: list[Candidate]) -> list[str]:
    """Sentences in the order in which the decisions were taken."""
    makers: list[Callable[[], str | None]] = [
        lambda: routing_reason(question, best),
        lambda: split_reason(best, others),
        lambda: unused_reason(question, best),
        lambda: bound_reason(best),
        lambda: placement_reason(best),
        lambda: minibatch_reason(best),
        lambda: communication_reason(best),
        lambda: memory_reason(question, best),
        lambda: tight_reason(best),
    ]
    return [text for text in (make() for make in makers) if text]


def name_of(candidate: Candidate) -> str:
    return split_name(candidate.choice)


def split_name(choice: Choice) -> str:
    return f"EP {choice.ep_size} x TP {choice.tp_size} x DP {choice.dp_size}"


def routing_reason(question: Question, best: Candidate) -> str | None:
    """A warning about a routing file; synthetic routing has the model's experts by construction."""
    if parse_routing(question.routing) is not None:
        return None
    doubt = foreign_routing(best.setting.work)
    return f"{WARNING} {doubt}" if doubt else None


def split_reason(best: Candidate, others: list[Candidate]) -> str | None:
    """Against the next split: how much faster, and where the difference lies."""
    rest = [o for o in others if name_of(o) != name_of(best)]
    if not rest:
        return f"{name_of(best)} is the only split of this machine that was asked for"
    other = rest[0]
    if not best.memory.fits:
        return f"{name_of(best)} needs least memory: {name_of(other)} needs {gigabytes(other)} GB"
    if not other.memory.fits:
        return (
            f"{name_of(best)}: the next split, {name_of(other)}, needs "
            f"{gigabytes(other)} GB per GPU and does not fit"
        )
    # like with like: where the other was not simulated, both by the closed form
    mine, its, by = best.step, other.step, ""
    if not other.simulated:
        mine, by = best.closed_form or best.step, " (closed form)"
    gain = mine.tokens_per_second / its.tokens_per_second - 1
    # parts per token, since splits may leave GPUs idle
    difference = {
        key: its.parts[key] / its.tokens - mine.parts[key] / mine.tokens for key in mine.parts
    }
    main = max(difference, key=lambda key: difference[key])
    return (
        f"{name_of(best)} gives {gain:+.1%} tokens/s against the next split, {name_of(other)}{by}, "
        f"mostly in {main}"
    )


def gigabytes(candidate: Candidate) -> str:
    return f"{candidate.memory.total / 1e9:.1f}"


def unused_reason(question: Question, best: Candidate) -> str | None:
    total = question.hardware.num_gpus
    unused = total - best.choice.num_gpus
    if unused <= 0:
        return None
    why = "the experts divide more evenly over {} ranks than over all"
    if question.ep_size:
        why = "groups of {} ranks, as asked for, do not fill the machine"
    return f"{unused} of {total} GPUs stay idle: " + why.format(best.choice.ep_size)


def bound_reason(best: Candidate) -> str:
    forward, backward = best.forward, best.backward
    text = f"forward is bound by {needs(forward)}, backward by {needs(backward)} (closed form)"
    if not best.simulated or best.choice.ep_size == 1:
        return text
    first, second = best.simulated
    machine = best.setting.hardware
    reached = machine.link_rate / machine.link_bytes_per_s
    return (
        f"{text}; simulated, {first.hidden_share:.0%} and {second.hidden_share:.0%} of the "
        f"communication is hidden and ports carry {first.link_share:.0%} and "
        f"{second.link_share:.0%} of their nominal {machine.link_bytes_per_s / 1e9:.0f} GB/s, of "
        f"which rows reach {reached:.0%} at most: a link is full long before it is 100 % busy"
    )


def needs(estimate: Estimate) -> str:
    """The bound with its time, beside the products' (or the link's) own."""
    if estimate.bound == "compute":
        return f"compute ({estimate.compute * 1e3:.2f} ms, links {estimate.link * 1e3:.2f} ms)"
    moved = estimate.network if estimate.bound == "network" else estimate.link
    return f"{estimate.bound} ({moved * 1e3:.2f} ms, products {estimate.compute * 1e3:.2f} ms)"


def placement_reason(best: Candidate) -> str:
    plain = in_order(best.setting.work.expert_load, best.choice.ep_size)
    return (
        f"placement {best.placement.title}: the fullest rank has {best.placement.imbalance:.3f}x "
        f"the mean rows (experts in order: {plain.imbalance:.3f}x)"
    )


def layer_ms(setting: Setting) -> float:
    return (estimate(setting).seconds + estimate(setting, True).seconds) * 1e3


def minibatch_reason(best: Candidate) -> str:
    """The same layer at half and at twice the minibatch, by the closed form."""
    setting, choice = best.setting, best.choice
    here = layer_ms(setting)
    texts = []
    for size in (choice.minibatch // 2, choice.minibatch * 2):
        if not MINIBATCHES[0] // 2 <= size <= MINIBATCHES[-1] * 2:
            continue
        other = replace(choice, minibatch=size, macrobatch=size * choice.ring_slots)
        change = layer_ms(replace(setting, choice=other)) / here - 1
        texts.append(f"{size} rows {change:+.1%}")
    times = f"time of forward and backward: {', '.join(texts)}"
    why = "" if best.memory.fits else "; no size fits: the ring's memory decides, not time"
    return f"minibatch {choice.minibatch} rows ({times}{why})"


def communication_reason(best: Candidate) -> str:
    setting, choice = best.setting, best.choice
    here = layer_ms(setting)
    texts = []
    for sms in communication_sms(setting.hardware):
        if sms == choice.communication_sms:
            continue
        other = replace(setting, choice=replace(choice, communication_sms=sms))
        name = f"{sms} SMs" if sms else "helper warps"
        texts.append(f"{name} {layer_ms(other) / here - 1:+.1%}")
    chosen = f"{choice.communication_sms} SMs" if choice.communication_sms else "helper warps"
    others = ", ".join(texts) or "the machine has no SMs to spare"
    return f"rows are moved by {chosen} ({others})"


def memory_reason(question: Question, best: Candidate) -> str:
    """What a roomier setting would need."""
    text = f"{best.memory.total / 1e9:.0f} of {best.memory.capacity / 1e9:.0f} GB per GPU"
    reserve = best.memory.parts["reserve"] / 1e9
    text += f", most of it the {best.memory.largest}, {reserve:.0f} GB a reserve for the driver's "
    text += "context, kernels and fragmentation"
    rows = padded_rows(best.setting.work, best.setting.owner)
    roomy = replace(best.choice, sharding="none", save="all")
    need = memory_report(
        question.model,
        question.hardware,
        roomy,
        best.setting.owner,
        rows,
        int(best.setting.work.tokens.max()),
    ).total
    if need > best.memory.total * 1.01:
        text += f"; without sharding, with save all and no recomputation {need / 1e9:.0f} GB"
    return text


def tight_reason(best: Candidate) -> str | None:
    """A warning where the plan fits, but hardly."""
    memory = best.memory
    left = memory.capacity - memory.total
    if not memory.fits or left >= TIGHT * memory.capacity:
        return None
    return (
        f"{WARNING} beside the reserve only {left / 1e9:.1f} GB ({left / memory.capacity:.1%}) of "
        "memory are left; fewer --tokens or more --gpus leave more"
    )
