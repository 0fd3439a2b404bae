"""The command `mok-ref train`. (`mok-ref report` calls `report_run`.)"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mok_ref.casefile import check_distinct
from mok_ref.heap import run_ranks
from mok_ref.launch import under_mpiexec
from mok_ref.option_names import option_names
from mok_ref.routing import RoutingOptions
from mok_ref.training import checkpoint as files
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


# Small enough for a step of exact arithmetic in well under a second on one core.
START = TrainConfig(ModelConfig(sequence=32), batch=4)


def shown(help: str, default: object) -> Any:
    """An option whose default comes from `START`, or from the run to resume."""
    return typer.Option(help=help, show_default=str(default))


RunDir = Annotated[
    Path | None, typer.Option(help="New or empty folder for metrics and checkpoints.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir.")]
Checkpoint = Annotated[
    str | None, typer.Option(help="Resume from this one: best or manifest-000050.json.")
]
Config = Annotated[Path | None, typer.Option(help="JSON of a run; options override.")]
TextFile = Annotated[Path | None, shown("Text file, 4096 bytes or more.", "Python's help texts")]
Ranks = Annotated[int | None, shown("Virtual ranks (not under mpiexec).", 1)]
Steps = Annotated[int | None, shown("Steps of the whole run.", START.steps)]
StopAt = Annotated[int | None, typer.Option(help="Stop before this step.")]
Batch = Annotated[int | None, shown("Sequences per step.", START.batch)]
Seed = Annotated[int | None, shown("Seed of weights and data.", START.seed)]
Sequence = Annotated[
    int | None, shown("Bytes per sequence, a multiple of 16.", START.model.sequence)
]
Hidden = Annotated[int | None, shown("Hidden size.", START.model.hidden)]
Layers = Annotated[int | None, shown("Blocks.", START.model.num_layers)]
Heads = Annotated[int | None, shown("Attention heads.", START.model.num_heads)]
Intermediate = Annotated[int | None, shown("Width of an expert.", START.model.intermediate)]
Experts = Annotated[int | None, shown("Experts per layer.", START.model.num_experts)]
Shared = Annotated[int | None, shown("Width of a shared expert.", START.model.shared_intermediate)]
Ffn = Annotated[str | None, shown("moe, dense or ordinary.", START.model.ffn)]
Arithmetic = Annotated[
    str | None,
    shown("exact: same bits everywhere; fast: BLAS, no promise.", START.model.arithmetic),
]
Recompute = Annotated[
    bool | None, typer.Option("--recompute", help="Save less, compute again in backward.")
]
TensorParallel = Annotated[
    bool | None, typer.Option("--tensor-parallel", help="Cut the dense FFN over ranks.")
]
Router = Annotated[
    str | None,
    shown("topk, litter, expert_choice, balanced or replay.", START.model.router.kind),
]
TopK = Annotated[int | None, shown("Experts per token.", START.model.router.options.top_k)]
Score = Annotated[str | None, shown("softmax or sigmoid.", START.model.router.options.score)]
Groups = Annotated[
    int | None, shown("Groups of experts (litters).", START.model.router.options.num_groups)
]
KeepGroups = Annotated[int | None, shown("Groups open per token.", "all")]
Aux = Annotated[
    float | None, shown("Weight of the balance loss over experts.", START.balance.kitten)
]
LitterAux = Annotated[
    float | None, shown("Weight of the balance loss over litters.", START.balance.litter)
]
SequenceAux = Annotated[
    float | None, shown("Weight of the balance loss in sequences.", START.balance.sequence)
]
Z = Annotated[float | None, shown("Weight of the router's z-loss.", START.balance.z)]
BiasSpeed = Annotated[
    float | None, shown("Step of the choice bias; 0: none.", START.balance.bias_speed)
]
Capacity = Annotated[
    float | None, shown("First capacity factor; beyond it routes are dropped.", "no limit")
]
Drop = Annotated[
    str | None, shown("With --capacity, what goes first: canonical or score.", "canonical")
]
Unlock = Annotated[
    str | None, typer.Option(help="start:share:every[:copy|fresh]; every 0: when flat.")
]
RaiseAux = Annotated[
    bool | None,
    typer.Option("--raise-aux", help="While the entropy alarm lasts, raise --aux threefold."),
]
RollbackAfter = Annotated[
    int | None,
    shown("Alarms in a row before going back to the last good checkpoint; 0: never.", 0),
]
ClipOutliers = Annotated[
    bool | None,
    typer.Option("--clip-outliers", help="Scale an outlying expert's gradient down."),
]
Collapse = Annotated[str | None, typer.Option(help="Disturb the router on purpose: step:strength.")]
Rate = Annotated[float | None, shown("Learning rate.", START.optimizer.rate)]
CheckpointEvery = Annotated[
    int | None,
    shown("Steps between files of the shared weights.", START.checkpoint.shared_every),
]
ExpertsEvery = Annotated[
    int | None, shown("Steps between files of changed experts.", "as --checkpoint-every")
]
FullEvery = Annotated[
    int | None,
    shown("Steps between checkpoints with every file anew; 0: never.", 0),
]
ValidEvery = Annotated[int | None, shown("Steps between validations; 0: never.", START.valid_every)]
SaveRoutes = Annotated[Path | None, typer.Option(help="Write all routes (.npz).")]
Replay = Annotated[Path | None, typer.Option(help="Read routes (.npz).")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")]


def train(
    run_dir: RunDir = None,
    resume: Resume = False,
    checkpoint: Checkpoint = None,
    config: Config = None,
    text: TextFile = None,
    ranks: Ranks = None,
    steps: Steps = None,
    stop_at: StopAt = None,
    batch: Batch = None,
    seed: Seed = None,
    sequence: Sequence = None,
    hidden: Hidden = None,
    layers: Layers = None,
    heads: Heads = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    shared: Shared = None,
    ffn: Ffn = None,
    arithmetic: Arithmetic = None,
    recompute: Recompute = None,
    tensor_parallel: TensorParallel = None,
    router: Router = None,
    top_k: TopK = None,
    score: Score = None,
    groups: Groups = None,
    keep_groups: KeepGroups = None,
    aux: Aux = None,
    litter_aux: LitterAux = None,
    sequence_aux: SequenceAux = None,
    z: Z = None,
    bias_speed: BiasSpeed = None,
    capacity: Capacity = None,
    drop: Drop = None,
    unlock: Unlock = None,
    raise_aux: RaiseAux = None,
    rollback_after: RollbackAfter = None,
    clip_outliers: ClipOutliers = None,
    collapse: Collapse = None,
    rate: Rate = None,
    checkpoint_every: CheckpointEvery = None,
    experts_every: ExpertsEvery = None,
    full_every: FullEvery = None,
    valid_every: ValidEvery = None,
    save_routes: SaveRoutes = None,
    replay: Replay = None,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level language model with mixture-of-experts layers, bit for bit repeatable."""
    chosen = dict(locals())
    check_options(chosen)
    check_distinct(
        **{"--config": config, "--text": text, "--replay": replay, "--save-routes": save_routes}
    )
    start = checkpoint or resume
    base = read_config(config, run_dir if start else None)
    with option_names(**OPTIONS):
        built = build_config(chosen, base)
        data = load_text(text)
        routes = None if replay is None else load_routes(replay)
        with progress(built, as_json, header(built, data.source, ranks)) as show:
            records = run_on_all_ranks(
                ranks or 1,
                lambda heap: train_on_rank(
                    built, heap, data, run_dir, start, stop_at, show, routes, save_routes
                ),
            )
    if not records and run_dir is not None and is_first():
        print(nothing_left(run_dir, built, stop_at), file=sys.stderr if as_json else sys.stdout)


# arguments of the Python interface -> what was typed
OPTIONS = {
    "run_dir": "--run-dir",
    "resume": "--resume",
    "record_to": "--save-routes",
    "num_heads": "--heads",
    "num_layers": "--layers",
    "num_experts": "--experts",
    "hidden_size": "--hidden",
    "intermediate_size": "--intermediate",
    "shared_intermediate": "--shared",
    "shared_intermediate_size": "--shared",
    "tensor_parallel": "--tensor-parallel",
    "top_k": "--top-k",
    "kind": "--router",
    "num_groups": "--groups",
    "num_litters": "--groups",
    "keep_groups": "--keep-groups",
    "keep_litters": "--keep-groups",
    "bias_speed": "--bias-speed",
    "shared_every": "--checkpoint-every",
    "experts_every": "--experts-every",
    "full_every": "--full-every",
    "rollback_after": "--rollback-after",
}
# option -> the option without which it would do nothing
NEEDS = {
    "resume": "run_dir",
    "checkpoint": "run_dir",
    "checkpoint_every": "run_dir",
    "experts_every": "run_dir",
    "full_every": "run_dir",
    "rollback_after": "run_dir",
    "drop": "capacity",
}


LEAST = dict.fromkeys(
    ("ranks", "steps", "stop_at", "batch", "sequence", "hidden", "layers", "heads"), 1
) | dict.fromkeys(
    ("seed", "shared", "rollback_after", "checkpoint_every", "experts_every", "full_every",
     "valid_every", "aux", "litter_aux", "sequence_aux", "z", "bias_speed"), 0
)  # fmt: skip


def check_options(chosen: dict[str, Any]) -> None:
    """Refuse what would silently do nothing, and numbers below their least.

    Raises: ValueError in the words of the command line.
    """
    if chosen["ranks"] is not None and under_mpiexec():
        raise ValueError(f"--ranks must not be given under mpiexec, got {chosen['ranks']}")
    for option, other in NEEDS.items():
        if chosen[option] and not chosen[other]:
            raise ValueError(f"{dashed(option)} must go with {dashed(other)}, which is not given")
    for option, least in LEAST.items():
        value = chosen[option]
        if value is not None and not least <= value < math.inf:
            finite = "finite and " if isinstance(value, float) else ""
            raise ValueError(f"{dashed(option)} must be {finite}at least {least}, got {value}")
    for option in ("rate", "capacity"):
        if chosen[option] is not None and not 0 < chosen[option] < math.inf:
            raise ValueError(f"{dashed(option)} must be finite and above 0, got {chosen[option]}")


def dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_first() -> bool:
    """Whether this process speaks for all: the only one, or rank 0 under mpiexec."""
    if not under_mpiexec():
        return True
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.Get_rank() == 0)


def num_processes() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_size())


def header(config: TrainConfig, source: str, ranks: int | None) -> str:
    """What is about to run, and what the lines below it say."""
    model = config.model
    experts = "" if model.ffn == "dense" else f", {model.num_experts} experts per layer"
    size = num_processes() if under_mpiexec() else ranks or 1
    where = (
        f"{size} {'processes' if under_mpiexec() else 'virtual ranks'}" if size > 1 else "1 rank"
    )
    return (
        f"{model.ffn} model: {model.num_layers} layers, hidden {model.hidden}{experts}; {source}\n"
        f"{config.steps} steps of {config.batch} x {model.sequence} bytes on {where}, "
        f"{model.arithmetic} arithmetic\n"
        "loss: nats per byte (float32 bits); entropy: of the experts' load, 1 is even"
    )


def nothing_left(run_dir: Path, config: TrainConfig, stop_at: int | None) -> str:
    """Why a resumed run did nothing."""
    step = files.step_of(files.newest(run_dir / "checkpoints", "consistent") or "manifest-0.json")
    limit = f"--steps {config.steps}"
    if stop_at is not None and stop_at < config.steps:
        limit = f"--stop-at {stop_at}"
    return f"already at step {step}, {limit} asks for no more: nothing done"


def run_on_all_ranks(ranks: int, function: Callable[[Any], Any]) -> Any:
    """Virtual ranks (the result of rank 0), or this process's rank under mpiexec."""
    if not under_mpiexec():
        return run_ranks(ranks, function)[0]
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
        return START
    try:
        values = json.loads(path.read_text())
        return TrainConfig.from_json(values.get("config", values))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"--config must be the JSON of a run, got {path}") from None
    except (KeyError, TypeError, AttributeError) as error:
        what = f"without {error}" if isinstance(error, KeyError) else f"with {error}"
        raise ValueError(f"--config must be the JSON of a run, got {path} {what}") from error


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
        capacity = CapacityOptions(
            start, min(1.0, start), max(1.25, start), policy=chosen["drop"] or "canonical"
        )
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
        raise ValueError(f"--unlock must be start:share:every[:copy|fresh], got {value!r}")
    start, share, every = (int(p) for p in parts[:3])
    return UnlockOptions(start, share, every, init=parts[3] if len(parts) == 4 else "copy")


def parse_collapse(value: str) -> CollapseOptions:
    """step:strength."""
    try:
        step, strength = value.split(":")
        made = CollapseOptions(int(step), strength=float(strength))
    except ValueError as error:
        raise ValueError(f"--collapse must be step:strength, got {value!r}") from error
    if made.step < 0 or not math.isfinite(made.strength):
        raise ValueError(f"--collapse must have a step >= 0 and a finite strength, got {value!r}")
    return made


# --------------------------------------------------------------------------- progress


@contextmanager
def progress(
    config: TrainConfig, as_json: bool, title: str
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A live table on a terminal, ten lines and the events elsewhere, JSON lines on request.

    The title comes with the first step, when nothing can be refused any more.
    """
    if as_json:
        yield lambda record: print(json.dumps(record), flush=True)
        return
    if not sys.stdout.isatty():
        every = max(1, config.steps // 10)
        first = True

        def line(record: dict[str, Any]) -> None:
            done = record["step"] + 1
            nonlocal first  # the first step shows how long one takes
            if first:
                print(title)
            worth = first or done % every == 0 or "valid_loss" in record or record["actions"]
            if worth or done == config.steps:
                print(one_line(record), flush=True)
            first = False

        yield line
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    actions: list[str] = []
    with Live(refresh_per_second=4) as live:

        def table(record: dict[str, Any]) -> None:
            actions.extend(f"step {record['step'] + 1}: {a}" for a in record["actions"])
            live.update(Group(Text(title), live_table(config, record, actions[-SHOWN_ACTIONS:])))

        yield table


def one_line(record: dict[str, Any]) -> str:
    """A step in one line."""
    parts = [f"step {record['step'] + 1}", f"loss {record['loss']:.4f} ({record['loss_bits']})"]
    parts.append(f"{record['seconds']:.2f} s")
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
