"""The commands `mok-ref plan`, `mok-ref tune` and `mok-ref report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mok_ref.option_names import option_names

from .errors import check_outputs, require
from .reasons import WARNING

if TYPE_CHECKING:
    from .plan import Plan

JSON = (".json",)
HTML = (".html", ".htm")


def register(app: typer.Typer) -> None:
    """Add the planner's commands to the command line."""
    app.command()(plan)
    app.command()(tune)
    app.command()(report)


def plan(
    model: Annotated[
        str | None, typer.Option(help="Model name or TOML file; 'list' shows names.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Machine name or TOML file; 'list' shows names.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens per GPU and micro-batch (a routing file is repeated).")
    ] = 4096,
    gpus: Annotated[int | None, typer.Option(help="GPUs; default: the whole machine.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or mxfp8 experts.")] = "bf16",
    routing: Annotated[str, typer.Option(help="uniform, zipf:S or an .npz file with topk_ids.")] = (
        "uniform"
    ),
    ep: Annotated[int | None, typer.Option(help="Only this EP size.")] = None,
    tp: Annotated[int | None, typer.Option(help="Only this TP size.")] = None,
    sequence: Annotated[int, typer.Option(help="Sequence length, for attention.")] = 4096,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the routing.")] = 0,
    cross_domain: Annotated[
        bool, typer.Option("--cross-domain", help="What if EP spans fast domains.")
    ] = False,
    raw_rates: Annotated[
        bool, typer.Option("--raw-rates", help="Data-sheet rates, uncorrected.")
    ] = False,
    best: Annotated[int, typer.Option(help="Splits to simulate.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Write the plan (.json).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (.json).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report (.html).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Choose EP, TP, sharding, batches and placement for a model on a machine, with reasons.

    Exit status 1 if the model does not fit the machine in any way.
    """
    from .hardware import known_hardware
    from .models import known_models
    from .plan import make_plan, plan_text

    if "list" in (model, hardware):
        print("models:   " + ", ".join(known_models()))
        print("hardware: " + ", ".join(known_hardware()))
        return
    if model is None or hardware is None:
        missing = "--model" if model is None else "--hardware"
        raise ValueError(f"{missing} must be given; '{missing} list' shows the names")
    require(best >= 1, f"--best must be at least 1, got {best}")
    require(dtype in ("bf16", "mxfp8"), f"--dtype must be bf16 or mxfp8, got {dtype!r}")
    check_outputs(("--output", output, JSON), ("--trace", trace, JSON), ("--html", html, HTML))
    with option_names(num_gpus="--gpus", ep_size="--ep", tp_size="--tp"):
        made = make_plan(
            model,
            hardware,
            tokens,
            gpus,
            not raw_rates,
            best,
            dtype=dtype,
            routing=routing,
            seed=seed,
            sequence=sequence,
            accumulate=accumulate,
            cross_domain=cross_domain,
            ep_size=ep,
            tp_size=tp,
        )
    print(made.to_json() if as_json else plan_text(made))
    write_plan(made, output, trace, html)
    for reason in made.reasons:
        if reason.startswith(WARNING):
            print(reason, file=sys.stderr)
    if not made.memory["fits"]:
        raise typer.Exit(1)


def write_plan(made: Plan, output: Path | None, trace: Path | None, html: Path | None) -> None:
    """The files that were asked for, each named when it is there."""
    from .report import page, plan_sections, plan_trace

    if output:
        made.write(output)
        written("plan", output)
    if trace:
        plan_trace(made, trace)
        written("trace", trace)
    if html:
        title = f"{made.model['name']} on {made.hardware['title']}"
        write_whole(html, page(title, plan_sections(made)))
        written("report", html)


def written(what: str, path: Path) -> None:
    """Say where something went; on stderr, which leaves JSON on stdout whole."""
    print(f"{what}: {path}", file=sys.stderr)


def write_whole(path: Path, text: str) -> None:
    """Under a temporary name, then renamed."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def tune(
    hidden: Annotated[int, typer.Option(help="Hidden size H.")],
    intermediate: Annotated[int, typer.Option(help="Intermediate size I.")],
    experts: Annotated[int, typer.Option(help="Experts E.")],
    top_k: Annotated[int, typer.Option(help="Slots K per token.")],
    tokens: Annotated[int, typer.Option(help="Tokens per rank.")],
    ranks: Annotated[int, typer.Option(help="Virtual ranks on this machine.")] = 1,
    dtype: Annotated[str, typer.Option(help="bf16 or mxfp8 experts.")] = "bf16",
    device: Annotated[
        str, typer.Option(help="cuda; cpu measures and stores nothing: its layer looks nothing up.")
    ] = "cuda",
    arithmetic: Annotated[
        str | None, typer.Option(help="cpu: exact (the default), fast or float64.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed calls of each size.")] = 5,
    forward_only: Annotated[bool, typer.Option("--forward-only")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure ring and minibatch sizes here and keep the best for the layer to look up."""
    from mok_ref.config import MoEConfig

    from .tune import Tried, tuning_path
    from .tune import tune as measure

    require(device in ("cpu", "cuda"), f"--device must be cpu or cuda, got {device!r}")
    require(
        device == "cpu" or arithmetic is None,
        f"--arithmetic must go with --device cpu (a GPU is exact), got {arithmetic!r}",
    )
    words = {"hidden_size": "--hidden", "intermediate_size": "--intermediate"}
    words |= {"num_experts": "--experts", "top_k": "--top-k", "ep_size": "--ranks"}
    with option_names(**words):
        config = MoEConfig(
            hidden,
            intermediate,
            experts,
            top_k,
            ranks,
            dtype=dtype,
            arithmetic=arithmetic or "exact",
        )

    def show(tried: Tried) -> None:
        text = f"minibatch {tried.minibatch:6d}  macrobatch {tried.macrobatch:7d}"
        print(f"{text}  {tried.ms:9.3f} ms", file=sys.stderr)

    with option_names(num_tokens="--tokens", repeats="--repeats", seed="--seed"):
        found = measure(config, tokens, device, repeats, not forward_only, seed, progress=show)
    best = found[0]
    if as_json:
        print(json.dumps({"best": vars(best), "tried": [vars(t) for t in found]}))
        return
    stored = f"stored in {tuning_path()}"
    if device == "cpu":
        stored = "not stored: the CPU layer looks no sizes up"
    print(
        f"best: minibatch {best.minibatch}, macrobatch {best.macrobatch}: {best.ms:.3f} ms; "
        + stored
    )


def report(
    source: Annotated[Path, typer.Argument(help="Training run folder, plan or trace (.json).")],
    output: Annotated[Path | None, typer.Option(help="HTML file; default: beside source.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Measured trace to lay beside a plan's.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the plan's trace (.json).")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for a plan's SVG files.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A run's numbers, else the files written, as JSON.")
    ] = False,
) -> None:
    """Make one self-contained HTML page of a training run, a plan or a trace."""
    from .plan import parse_plan
    from .report import plan_trace, read_source, write_pictures, write_report

    page = output or default_page(source)
    check_outputs(("--output", page, HTML), ("--trace", trace, JSON))
    require(
        pictures is None or not pictures.is_file(), f"--pictures must be a folder, got {pictures}"
    )
    made = None
    if trace or measured or pictures:
        require(
            source.is_file(),
            f"--trace, --measured and --pictures need a plan file, got {str(source)!r}",
        )
        made = parse_plan(read_source(source), source.name)
    write_report(source, page)
    files = {"report": page}
    if made is not None and (trace or measured):
        files["trace"] = trace or page.with_suffix(".trace.json")
        plan_trace(made, files["trace"], measured)
    if made is not None and pictures:
        write_pictures(made, pictures)
        files["pictures"] = pictures
    is_run = source.is_dir() and (source / "config.json").is_file()
    if is_run:
        from mok_ref.training.report import report_run

        report_run(source, as_json)
    elif as_json:
        print(json.dumps({what: str(path) for what, path in files.items()}))
    for what, path in files.items():
        written(what, path)


def default_page(source: Path) -> Path:
    return source / "report.html" if source.is_dir() else source.with_suffix(".html")
