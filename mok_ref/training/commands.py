"""The command `mok-ref train`. (`mok-ref report` calls `report_run`.)"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mok_ref.heap import run_ranks
from mok_ref.launch import under_mpiexec
from mok_ref.routing import RoutingOptions
from mok_ref.training.capacity import CapacityOptions
from mok_ref.training.choosers import LitterOptions
from mok_ref.training.data import load_text
from mok_ref.training.loop import train as train_on_rank
from mok_ref.training.parameters import ModelConfig
from mok_ref.training.router import load_routes
from mok_ref.training.trainer import CollapseOptions, TrainConfig
from mok_ref.training.unlocking import UnlockOptions

DIGITS = "0123456789"
SHOWN_ACTIONS = 5  # below the live table


def register(app: typer.Typer) -> None:
    """Add the training commands to the command line."""
    app.command()(train)


def train(
    run_dir: Annotated[Path | None, typer.Option(help="Folder for metrics, checkpoints.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue run_dir's run.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option(help="Resume from this one: best or manifest-000050.json.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="JSON of a run; options override.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file; default: Python's help.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Virtual ranks (not under mpiexec).")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the whole run.")] = None,
    stop_at: Annotated[int | None, typer.Option(help="Stop before this step.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Bytes per sequence (16 n).")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of an expert.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts per layer.")] = None,
    shared: Annotated[int | None, typer.Option(help="Width of a shared expert.")] = None,
    ffn: Annotated[str | None, typer.Option(help="moe, dense or ordinary.")] = None,
    arithmetic: Annotated[str | None, typer.Option(help="exact or fast.")] = None,
    recompute: Annotated[bool | None, typer.Option("--recompute", help="Save less.")] = None,
    tensor_parallel: Annotated[
        bool | None, typer.Option("--tensor-parallel", help="Cut the dense FFN over ranks.")
    ] = None,
    router: Annotated[
        str | None, typer.Option(help="topk, litter, expert_choice, balanced or replay.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Slots per token.")] = None,
    score: Annotated[str | None, typer.Option(help="softmax or sigmoid.")] = None,
    groups: Annotated[int | None, typer.Option(help="Groups of experts (litters).")] = None,
    keep_groups: Annotated[int | None, typer.Option(help="Groups open per token.")] = None,
    aux: Annotated[float | None, typer.Option(help="Balance loss over experts.")] = None,
    litter_aux: Annotated[float | None, typer.Option(help="Balance loss over litters.")] = None,
    sequence_aux: Annotated[float | None, typer.Option(help="Balance inside sequences.")] = None,
    z: Annotated[float | None, typer.Option(help="Router z-loss.")] = None,
    bias_speed: Annotated[float | None, typer.Option(help="Choice-bias speed.")] = None,
    capacity: Annotated[float | None, typer.Option(help="First capacity factor.")] = None,
    drop: Annotated[str, typer.Option(help="canonical or score.")] = "canonical",
    unlock: Annotated[
        str | None, typer.Option(help="start:share:every[:copy|fresh]; every 0: when flat.")
    ] = None,
    raise_aux: Annotated[bool | None, typer.Option("--raise-aux", help="Action.")] = None,
    rollback_after: Annotated[int | None, typer.Option(help="Action: steps of alarm.")] = None,
    clip_outliers: Annotated[bool | None, typer.Option("--clip-outliers", help="Action.")] = None,
    collapse: Annotated[str | None, typer.Option(help="Disturb: step:strength.")] = None,
    rate: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Shared file, steps.")] = None,
    experts_every: Annotated[int | None, typer.Option(help="Expert files, steps.")] = None,
    full_every: Annotated[int | None, typer.Option(help="Full checkpoints, steps.")] = None,
    valid_every: Annotated[int | None, typer.Option(help="Validation, steps.")] = None,
    save_routes: Annotated[Path | None, typer.Option(help="Write all routes (.npz).")] = None,
    replay: Annotated[Path | None, typer.Option(help="Read routes (.npz).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")] = False,
) -> None:
    """Train a byte-level language model with mixture-of-experts layers, bit for bit repeatable."""
    chosen = dict(locals())
    start = checkpoint or resume
    built = build_config(chosen, read_config(config, run_dir if start else None))
    data = load_text(text)
    routes = None if replay is None else load_routes(replay)
    if ranks is not None and under_mpiexec():
        raise ValueError(f"ranks must not be given under mpiexec, got {ranks=}")
    with progress(built, as_json) as show:
        run_on_all_ranks(
            ranks or 1,
            lambda heap: train_on_rank(
                built, heap, data, run_dir, start, stop_at, show, routes, save_routes
            ),
        )


def run_on_all_ranks(ranks: int, function: Callable[[Any], Any]) -> Any:
    """Virtual ranks, or this process's rank under mpiexec."""
    if not under_mpiexec():
        return run_ranks(ranks, function)
    from mok_ref.heap.mpi import MpiSharedHeap

    heap = MpiSharedHeap()
    result = function(heap)
    heap.close()
    return result


# --------------------------------------------------------------------------- options


def read_config(path: Path | None, run_dir: Path | None) -> TrainConfig:
    """A config file, the config of the run to resume, or defaults."""
    if path is None and run_dir is not None:
        path = run_dir / "config.json"
    if path is None:
        return TrainConfig()
    try:
        values = json.loads(path.read_text())
        return TrainConfig.from_json(values.get("config", values))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"config must be the JSON of a run, got {path}: {error}") from error


def given(chosen: dict[str, Any], **names: str) -> dict[str, Any]:
    """field=option for every option that was given."""
    return {f: chosen[o] for f, o in names.items() if chosen[o] is not None}


def build_config(chosen: dict[str, Any], base: TrainConfig) -> TrainConfig:
    """`base` with every option that was given."""
    model = build_model(chosen, base.model)
    balance = given(
        chosen, kitten="aux", litter="litter_aux", sequence="sequence_aux", z="z",
        bias_speed="bias_speed",
    )  # fmt: skip
    actions = given(
        chosen, raise_aux="raise_aux", rollback_after="rollback_after",
        clip_outliers="clip_outliers",
    )  # fmt: skip
    checkpoint = given(
        chosen, shared_every="checkpoint_every", experts_every="experts_every",
        full_every="full_every",
    )  # fmt: skip
    if "shared_every" in checkpoint:
        checkpoint.setdefault("experts_every", checkpoint["shared_every"])
    capacity, unlock, collapse = base.capacity, base.unlock, base.collapse
    if chosen["capacity"] is not None:
        start = chosen["capacity"]
        capacity = CapacityOptions(start, min(1.0, start), max(1.25, start), policy=chosen["drop"])
    if chosen["unlock"] is not None:
        unlock = parse_unlock(chosen["unlock"])
    if chosen["collapse"] is not None:
        collapse = parse_collapse(chosen["collapse"])
    return replace(
        base,
        model=model,
        balance=replace(base.balance, **balance),
        actions=replace(base.actions, **actions),
        checkpoint=replace(base.checkpoint, **checkpoint),
        optimizer=replace(base.optimizer, **given(chosen, rate="rate")),
        capacity=capacity,
        unlock=unlock,
        collapse=collapse,
        **given(chosen, steps="steps", batch="batch", seed="seed", valid_every="valid_every"),
    )


def build_model(chosen: dict[str, Any], base: ModelConfig) -> ModelConfig:
    """The model part of build_config."""
    options = given(
        chosen, top_k="top_k", score="score", num_groups="groups", keep_groups="keep_groups"
    )
    router = base.router
    kind = chosen["router"] or router.kind
    if chosen["replay"] is not None:
        kind = "replay"
    plain = replace(router.options, **options)
    litter = router.litter
    if kind == "litter":
        before = litter or LitterOptions(top_k=plain.top_k, num_litters=max(2, plain.num_groups))
        litter = replace(
            before,
            **given(chosen, top_k="top_k", num_litters="groups", keep_litters="keep_groups"),
        )
        plain = RoutingOptions(plain.top_k, renormalize=plain.renormalize)
    else:
        litter = None
    return replace(
        base,
        router=replace(router, kind=kind, options=plain, litter=litter),
        **given(
            chosen, sequence="sequence", hidden="hidden", num_layers="layers", num_heads="heads",
            intermediate="intermediate", num_experts="experts", shared_intermediate="shared",
            ffn="ffn", arithmetic="arithmetic", recompute="recompute",
            tensor_parallel="tensor_parallel",
        ),
    )  # fmt: skip


def parse_unlock(value: str) -> UnlockOptions:
    """start:share:every[:copy|fresh]."""
    parts = value.split(":")
    if len(parts) not in (3, 4) or not all(p and set(p) <= set(DIGITS) for p in parts[:3]):
        raise ValueError(f"unlock must be start:share:every[:copy|fresh], got {value!r}")
    start, share, every = (int(p) for p in parts[:3])
    return UnlockOptions(start, share, every, init=parts[3] if len(parts) == 4 else "copy")


def parse_collapse(value: str) -> CollapseOptions:
    """step:strength."""
    try:
        step, strength = value.split(":")
        return CollapseOptions(int(step), strength=float(strength))
    except ValueError as error:
        raise ValueError(f"collapse must be step:strength, got {value!r}") from error


# --------------------------------------------------------------------------- progress


@contextmanager
def progress(config: TrainConfig, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A live table on a terminal, ten lines and the events elsewhere, JSON lines on request."""
    if as_json:
        yield lambda record: print(json.dumps(record), flush=True)
        return
    if not sys.stdout.isatty():
        every = max(1, config.steps // 10)

        def line(record: dict[str, Any]) -> None:
            done = record["step"] + 1
            worth = done % every == 0 or "valid_loss" in record or record["actions"]
            if worth or done == config.steps:
                print(one_line(record), flush=True)

        yield line
        return
    from rich.live import Live

    actions: list[str] = []
    with Live(refresh_per_second=4) as live:

        def table(record: dict[str, Any]) -> None:
            actions.extend(f"step {record['step'] + 1}: {a}" for a in record["actions"])
            live.update(live_table(config, record, actions[-SHOWN_ACTIONS:]))

        yield table


def one_line(record: dict[str, Any]) -> str:
    """A step in one line."""
    parts = [f"step {record['step'] + 1}", f"loss {record['loss']:.4f} ({record['loss_bits']})"]
    if "valid_loss" in record:
        parts.append(f"validation {record['valid_loss']:.4f}")
    if record.get("layers"):
        parts.append(f"entropy {min(n['entropy'] for n in record['layers']):.3f}")
    parts += [f"ALARM {alarm}" for alarm in record["alarms"]]
    parts += [f"ACTION {action}" for action in record["actions"]]
    return ", ".join(parts)


def live_table(config: TrainConfig, record: dict[str, Any], actions: list[str]) -> Any:
    """What the terminal shows while a run goes on: this step, its alarms, the last actions."""
    from rich.console import Group
    from rich.text import Text

    from mok_ref.printing import table

    head = (
        f"step {record['step'] + 1}/{config.steps}  loss {record['loss']:.4f}  "
        f"rate {record['rate']:.2g}  |g| {record['gradient_norm']:.3g}  "
        f"{config.batch * config.model.sequence / record['seconds']:.0f} tokens/s"
    )
    shown = table(
        None, ">layer", ">entropy", ">variance", ">overflow", ">max load", ">idle", ">|g| max"
    )
    for index, layer in enumerate(record.get("layers", [])):
        load = layer["load"][: record["num_open"]]
        shown.add_row(
            str(index),
            f"{layer['entropy']:.3f}",
            f"{layer['utilisation_variance']:.3f}",
            f"{layer['overflow']:.3f}",
            f"{max(load) * len(load) / max(1, sum(load)):.2f}",
            str(sum(n == 0 for n in load)),
            f"{max(layer['gradient_norms']):.3g}",
        )
    notes = [Text(alarm, style="bold red") for alarm in record["alarms"]]
    notes += [Text(action, style="yellow") for action in actions]
    return Group(Text(head), shown, *notes) if record.get("layers") else Group(Text(head), *notes)
