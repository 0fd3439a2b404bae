"""The commands `mok-ref plan`, `mok-ref tune` and `mok-ref report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import require


def register(app: typer.Typer) -> None:
    """Add the planner's commands to the command line."""
    app.command()(plan)
    app.command()(tune)
    app.command()(report)


def plan(
    model: Annotated[str, typer.Option(help="Model name or TOML file; 'list' shows names.")],
    hardware: Annotated[str, typer.Option(help="Machine name or TOML file; 'list' shows names.")],
    tokens: Annotated[int, typer.Option(help="Tokens per GPU and micro-batch.")] = 4096,
    gpus: Annotated[int | None, typer.Option(help="GPUs; default: the whole machine.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or mxfp8 experts.")] = "bf16",
    routing: Annotated[str, typer.Option(help="uniform, zipf:S or a file with topk_ids.")] = (
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
    """Choose EP, TP, sharding, batches and placement for a model on a machine, with reasons."""
    from .hardware import known_hardware
    from .models import known_models
    from .plan import make_plan, plan_text
    from .report import page, plan_sections, plan_trace

    if "list" in (model, hardware):
        print("models:   " + ", ".join(known_models()))
        print("hardware: " + ", ".join(known_hardware()))
        return
    require(best >= 1, f"best must be at least 1, got {best=}")
    require(dtype in ("bf16", "mxfp8"), f"dtype must be bf16 or mxfp8, got {dtype!r}")
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
    if output:
        made.write(output)
    if trace:
        plan_trace(made, trace)
    if html:
        title = f"{made.model['name']} on {made.hardware['title']}"
        write_whole(html, page(title, plan_sections(made)))
    print(made.to_json() if as_json else plan_text(made))


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
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    arithmetic: Annotated[str, typer.Option(help="exact, fast or float64 (cpu).")] = "exact",
    repeats: Annotated[int, typer.Option(help="Timed calls of each size.")] = 5,
    forward_only: Annotated[bool, typer.Option("--forward-only")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure ring and minibatch sizes here and keep the best for the layer to look up."""
    from mok_ref.config import MoEConfig

    from .tune import Tried, tuning_path
    from .tune import tune as measure

    config = MoEConfig(
        hidden, intermediate, experts, top_k, ranks, dtype=dtype, arithmetic=arithmetic
    )

    def show(tried: Tried) -> None:
        text = f"minibatch {tried.minibatch:6d}  macrobatch {tried.macrobatch:7d}"
        print(f"{text}  {tried.ms:9.3f} ms", file=sys.stderr)

    found = measure(config, tokens, device, repeats, not forward_only, seed, progress=show)
    best = found[0]
    if as_json:
        print(json.dumps({"best": vars(best), "tried": [vars(t) for t in found]}))
        return
    print(
        f"best: minibatch {best.minibatch}, macrobatch {best.macrobatch}: {best.ms:.3f} ms; "
        f"stored in {tuning_path()}"
    )


def report(
    source: Annotated[Path, typer.Argument(help="Training run folder, plan or trace (.json).")],
    output: Annotated[Path | None, typer.Option(help="HTML file; default: beside source.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Measured trace to lay beside a plan's.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the plan's trace (.json).")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for a plan's SVG files.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A run's numbers as JSON.")] = False,
) -> None:
    """Make one self-contained HTML page of a training run, a plan or a trace."""
    from .plan import parse_plan
    from .report import plan_trace, write_pictures, write_report

    page = output or default_page(source)
    write_report(source, page)
    if trace or measured or pictures:
        require(
            source.is_file(), f"trace, measured and pictures need a plan file, got {str(source)!r}"
        )
        made = parse_plan(source.read_text(encoding="utf-8"), source.name)
        if trace or measured:
            plan_trace(made, trace or page.with_suffix(".trace.json"), measured)
        if pictures:
            write_pictures(made, pictures)
    if source.is_dir() and (source / "config.json").is_file():
        from mok_ref.training.report import report_run

        report_run(source, as_json)
    if not as_json:
        print(f"report: {page}")


def default_page(source: Path) -> Path:
    return source / "report.html" if source.is_dir() else source.with_suffix(".html")
