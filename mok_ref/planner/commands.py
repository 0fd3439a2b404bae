"""The commands `mok-ref plan`, `mok-ref tune` and `mok-ref report`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mok_ref.casefile import write_whole
from mok_ref.option_names import option_names

from .errors import check_outputs, require
from .reasons import WARNING

if TYPE_CHECKING:
    from .minibatch_simulation import Span
    from .plan import Plan
    from .tune import Tried

JSON = (".json",)
HTML = (".html", ".htm")


def register(app: typer.Typer) -> None:
    """Add the planner's commands to the command line."""
    app.command()(plan)
    app.command()(tune)
    app.command()(report)


PlanModel = Annotated[str | None, typer.Option(help="Model name or TOML file; 'list' shows names.")]
PlanHardware = Annotated[
    str | None, typer.Option(help="Machine name or TOML file; 'list' shows names.")
]
PlanTokens = Annotated[
    int, typer.Option(help="Tokens per GPU and micro-batch (a routing file is repeated).")
]
PlanGpus = Annotated[int | None, typer.Option(help="GPUs; default: the whole machine.")]
PlanRouting = Annotated[str, typer.Option(help="uniform, zipf:S or an .npz file with topk_ids.")]
PlanEp = Annotated[int | None, typer.Option(help="Only this EP size.")]
PlanTp = Annotated[int | None, typer.Option(help="Only this TP size.")]
Sequence = Annotated[int, typer.Option(help="Sequence length, for attention.")]
Accumulate = Annotated[int, typer.Option(help="Micro-batches per optimizer step.")]
RoutingSeed = Annotated[int, typer.Option(help="Seed of the routing.")]
CrossDomain = Annotated[bool, typer.Option("--cross-domain", help="What if EP spans fast domains.")]
RawRates = Annotated[bool, typer.Option("--raw-rates", help="Data-sheet rates, uncorrected.")]
Best = Annotated[int, typer.Option(help="Splits to simulate.")]
PlanOutput = Annotated[Path | None, typer.Option(help="Write the plan (.json).")]
PlanTrace = Annotated[Path | None, typer.Option(help="Write a Chrome trace (.json).")]
PlanHtml = Annotated[Path | None, typer.Option(help="Write the report (.html).")]
PlanJson = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]

Hidden = Annotated[int, typer.Option(help="Hidden size H.")]
Intermediate = Annotated[int, typer.Option(help="Intermediate size I.")]
Experts = Annotated[int, typer.Option(help="Experts E.")]
TopK = Annotated[int, typer.Option(help="Slots K per token.")]
TuneTokens = Annotated[int, typer.Option(help="Tokens per rank.")]
Ranks = Annotated[int, typer.Option(help="Virtual ranks on this machine.")]
Dtype = Annotated[str, typer.Option(help="bf16 or mxfp8 experts.")]
TuneDevice = Annotated[
    str, typer.Option(help="cuda; cpu measures and stores nothing: its layer looks nothing up.")
]
Arithmetic = Annotated[str | None, typer.Option(help="cpu: exact (the default), fast or float64.")]
Repeats = Annotated[int, typer.Option(help="Timed samples of each size.")]
Seconds = Annotated[
    float, typer.Option(help="Measure for about so long; the layer's own choice comes first.")
]
ForwardOnly = Annotated[bool, typer.Option("--forward-only", help="Time no backward.")]
InputSeed = Annotated[int, typer.Option(help="Seed of the inputs.")]
TuneJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def plan(
    model: PlanModel = None,
    hardware: PlanHardware = None,
    tokens: PlanTokens = 4096,
    gpus: PlanGpus = None,
    dtype: Dtype = "bf16",
    routing: PlanRouting = "uniform",
    ep: PlanEp = None,
    tp: PlanTp = None,
    sequence: Sequence = 4096,
    accumulate: Accumulate = 1,
    seed: RoutingSeed = 0,
    cross_domain: CrossDomain = False,
    raw_rates: RawRates = False,
    best: Best = 3,
    output: PlanOutput = None,
    trace: PlanTrace = None,
    html: PlanHtml = None,
    as_json: PlanJson = False,
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
    check_outputs(
        ("--output", output, JSON),
        ("--trace", trace, JSON),
        ("--html", html, HTML),
        inputs={"--model": model, "--hardware": hardware, "--routing": routing},
    )
    words = {"num_gpus": "--gpus", "ep_size": "--ep", "tp_size": "--tp"}
    words |= {name: f"--{name}" for name in ("tokens", "sequence", "accumulate", "seed")}
    with option_names(**words):
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
    write_plan(made, output, trace, html)  # first: a reader of the text may leave early
    print(made.to_json() if as_json else plan_text(made))
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


def tune(
    hidden: Hidden,
    intermediate: Intermediate,
    experts: Experts,
    top_k: TopK,
    tokens: TuneTokens,
    ranks: Ranks = 1,
    dtype: Dtype = "bf16",
    device: TuneDevice = "cuda",
    arithmetic: Arithmetic = None,
    repeats: Repeats = 5,
    seconds: Seconds = 60.0,
    forward_only: ForwardOnly = False,
    seed: InputSeed = 0,
    as_json: TuneJson = False,
) -> None:
    """Measure ring and minibatch sizes here and keep the best for the layer to look up."""
    from mok_ref.config import MoEConfig

    from .tune import tune as measure
    from .tune import tuning_path

    require(device in ("cpu", "cuda"), f"--device must be cpu or cuda, got {device!r}")
    require(
        device == "cpu" or arithmetic is None,
        f"--arithmetic must go with --device cpu (a GPU is exact), got {arithmetic!r}",
    )
    check_device(device)
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
        print(f"{sizes_text(tried)}  {tried.ms:9.3f} ms", file=sys.stderr)

    words = {"num_tokens": "--tokens"} | {n: f"--{n}" for n in ("repeats", "seed", "seconds")}
    with option_names(**words):
        found = measure(
            config,
            tokens,
            device,
            repeats,
            not forward_only,
            seed,
            progress=show,
            seconds=seconds,
        )
    best = found[0]
    if as_json:
        print(json.dumps({"best": vars(best), "tried": [vars(t) for t in found]}))
        return
    stored = f"stored in {tuning_path()}"
    if device == "cpu":
        stored = "not stored: the CPU layer looks no sizes up"
    print(f"best: {sizes_text(best)}  {best.ms:.3f} ms; {stored}")


def check_device(device: str) -> None:
    """Before anything is measured. Raises: HeapError saying what is missing and the way around."""
    from mok_ref.heap.cuda_device import import_cupy
    from mok_ref.heap.protocol import HeapError

    if device == "cuda":
        try:
            import_cupy()
        except HeapError as error:
            raise HeapError(f"{error}; --device cpu measures the CPU layer") from error


def sizes_text(tried: Tried) -> str:
    text = f"minibatch {tried.minibatch:6d}  macrobatch {tried.macrobatch:7d}"
    return f"{text}  clusters of {tried.cluster_size}" if tried.cluster_size > 1 else text


Source = Annotated[Path, typer.Argument(help="Training run folder, plan or trace (.json).")]
ReportOutput = Annotated[
    Path | None,
    typer.Option(help="HTML file; default: SOURCE.report.html, or report.html in a run."),
]
Measured = Annotated[Path | None, typer.Option(help="Measured trace to lay beside a plan's.")]
ReportTrace = Annotated[
    Path | None,
    typer.Option(
        help="Write the plan's trace (.json); with --measured by default SOURCE.report.trace.json."
    ),
]
Pictures = Annotated[Path | None, typer.Option(help="Folder for a plan's SVG files.")]
ReportJson = Annotated[
    bool, typer.Option("--json", help="A run's numbers, else the files written, as JSON.")
]


def report(
    source: Source,
    output: ReportOutput = None,
    measured: Measured = None,
    trace: ReportTrace = None,
    pictures: Pictures = None,
    as_json: ReportJson = False,
) -> None:
    """Make one self-contained HTML page of a training run, a plan or a trace."""
    from .report import write_report

    page = output or default_page(source)
    names = {"--output": "--output" if output else f"{page.name} (--output's default)"}
    names["--trace"] = "--trace"
    if trace is None and measured is not None:
        trace = page.with_suffix(".trace.json")
        names["--trace"] = f"{trace.name} (--trace's default)"
    check_report(source, page, measured, trace, pictures, names)
    needs_plan = trace is not None or pictures is not None
    beside = read_plan_and_trace(source, measured) if needs_plan else None
    write_report(source, page)
    files = {"report": page}
    if beside is not None:
        files |= write_plan_files(*beside, trace, pictures)
    if source.is_dir() and (source / "config.json").is_file():
        from mok_ref.training.report import report_run

        report_run(source, as_json)
    elif as_json:
        print(json.dumps({what: str(path) for what, path in files.items()}))
    for what, path in files.items():
        written(what, path)


def check_report(
    source: Path,
    page: Path,
    measured: Path | None,
    trace: Path | None,
    pictures: Path | None,
    names: Mapping[str, str],
) -> None:
    """Refuse wrong paths before anything is written; `names` says how --output and --trace are
    called in an error: a name that was not typed is told. Raises: ValueError naming the option."""
    require(
        measured is None or measured.is_file(),
        f"--measured must be an existing file, got {str(measured)!r}",
    )
    check_outputs(
        (names["--output"], page, HTML),
        (names["--trace"], trace, JSON),
        inputs={"source": source, "--measured": measured},
    )
    require(
        pictures is None or not pictures.is_file(), f"--pictures must be a folder, got {pictures}"
    )
    require(
        (trace is None and pictures is None) or source.is_file(),
        f"--trace, --measured and --pictures need a plan file, got {str(source)!r}",
    )


def read_plan_and_trace(source: Path, measured: Path | None) -> tuple[Plan, list[Span]]:
    """A plan, and the measured timeline of a trace file; none without a file."""
    from .plan import parse_plan
    from .report import read_source
    from .trace import read_timelines

    made = parse_plan(read_source(source), source.name)
    timelines = {} if measured is None else read_timelines(measured)
    alone = [span for spans in timelines.values() for span in spans]
    return made, timelines.get("measured", alone)


def write_plan_files(
    made: Plan, beside: list[Span], trace: Path | None, pictures: Path | None
) -> dict[str, Path]:
    """A plan's timeline and pictures, as far as they were asked for; what was written."""
    from .report import plan_trace, write_pictures

    files = {}
    if trace is not None:
        plan_trace(made, trace, beside)
        files["trace"] = trace
    if pictures is not None:
        write_pictures(made, pictures)
        files["pictures"] = pictures
    return files


def default_page(source: Path) -> Path:
    """A name that no other command's example gives to its own page (`plan --html plan.html`)."""
    return source / "report.html" if source.is_dir() else source.with_suffix(".report.html")
