"""The command line `mok-ref`.

Bad input is one line on stderr and exit status 2, under mpiexec once for all ranks. A comparison
that finds different bits is exit status 1. Commands import what they need when they run, so that
`--help` stays quick and a machine without GPU, MPI or matplotlib can use everything else.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mok_ref.heap.protocol import HeapError
from mok_ref.install import install_hint
from mok_ref.launch import MpiJob, end_with_error, one_line, start_job
from mok_ref.option_names import option_names
from mok_ref.runner import RandomCase

if TYPE_CHECKING:
    from collections.abc import Callable

    from mok_ref.casefile import Case
    from mok_ref.runner import Plan, RunResult, Settings
    from mok_ref.verify import Check

app = typer.Typer(
    name="mok-ref",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="A mixture-of-experts layer that has the same bits everywhere.",
)
golden_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Store and check golden cases."
)
app.add_typer(golden_app, name="golden")

MORE_COMMANDS = ("mok_ref.training.commands", "mok_ref.planner.commands")
# Modules that an installation may lack, and the extra that brings them.
EXTRAS = {
    "cuda": "gpu",
    "cupy": "gpu",
    "matplotlib": "plot",
    "mpi4py": "mpi",
    "nvshmem": "nvshmem",
    "safetensors": "train",
    "scipy": "train",
}
USER_ERRORS = (ValueError, OSError, HeapError, RuntimeError)
# Names of the configuration, as options of the command line: those that override a case, and those
# that make a random one.
OVERRIDES = {"row_order": "--order", "scale_rule": "--scale-rule", "ep_size": "--ranks"}
OPTION_NAMES = OVERRIDES | {
    "num_tokens": "--tokens",
    "hidden_size": "--hidden",
    "intermediate_size": "--intermediate",
    "num_experts": "--experts",
    "shared_size": "--shared",
    "swiglu_limit": "--limit",
    "top_k": "--top-k",
    "seed": "--seed",
}
DEFAULT = RandomCase()

_job: MpiJob | None = None  # this process's part in an MPI job, made by `main`

Input = Annotated[Path | None, typer.Option("--input", help="Case file (.npz); default: random.")]
Ranks = Annotated[
    int | None,
    typer.Option(
        help="Ranks; default: the case's, else 1. Another number than the case's re-splits."
    ),
]
ScheduleRanks = Annotated[
    int | None, typer.Option(help="Ranks; default: the case's, or 4 for a random case.")
]
Order = Annotated[str | None, typer.Option(help="canonical or round_robin; overrides the case.")]
Dtype = Annotated[str | None, typer.Option(help="bf16 or mxfp8 experts; overrides the case.")]
ScaleRule = Annotated[str | None, typer.Option(help="fit or ocp, for mxfp8; overrides the case.")]
Placement = Annotated[
    str | None,
    typer.Option(help="Owner rank of each expert: even (for any number of ranks), or 0,1,1,..."),
]
Macrobatch = Annotated[
    int | None, typer.Option(help="Rows of the ring buffer, n * 128; default: all.")
]
Minibatch = Annotated[
    int | None, typer.Option(help="Rows of one hand-over, n * 128; default: at most 2048.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Kernels = Annotated[str, typer.Option("--path", help="cuda: auto, hopper or portable kernels.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def _random(what: str, default: object) -> Any:
    return typer.Option(help=f"Random case: {what} ({default}).")


Tokens = Annotated[int | None, _random("tokens N of the whole batch", DEFAULT.num_tokens)]
Hidden = Annotated[int | None, _random("hidden size H", DEFAULT.hidden_size)]
Intermediate = Annotated[int | None, _random("intermediate size I", DEFAULT.intermediate_size)]
Experts = Annotated[int | None, _random("experts E", DEFAULT.num_experts)]
TopK = Annotated[int | None, _random("slots K per token", DEFAULT.top_k)]
Shared = Annotated[int | None, _random("width of a shared expert", "none")]
Limit = Annotated[float | None, _random("clamp of gate and up", "none")]
Router = Annotated[bool | None, typer.Option("--router", help="Random case: with a router.")]
Seed = Annotated[int | None, _random("seed", DEFAULT.seed)]


def _show_version(wanted: bool) -> None:
    if wanted:
        from mok_ref import __version__

        print(f"mok_ref {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version."),
    ] = False,
) -> None:
    """A mixture-of-experts layer that has the same bits everywhere."""


# --------------------------------------------------------------------------- commands


@app.command()
def run(
    input: Input = None,
    output: Annotated[Path | None, typer.Option(help="Write results here (.npz).")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Gradients too.")] = False,
    ranks: Ranks = None,
    order: Order = None,
    dtype: Dtype = None,
    scale_rule: ScaleRule = None,
    placement: Placement = None,
    macrobatch: Macrobatch = None,
    minibatch: Minibatch = None,
    arithmetic: Annotated[str, typer.Option(help="exact, fast or float64.")] = "exact",
    save: Annotated[str, typer.Option(help="What forward keeps: all, ring, none.")] = "all",
    device: Device = "cpu",
    path: Kernels = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds a rank waits for the others.")] = 120.0,
    as_json: AsJson = False,
    save_input: Annotated[Path | None, typer.Option(help="Write the case here (.npz).")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="cuda: write the timeline of the kernels' tasks (.json).")
    ] = None,
    tokens: Tokens = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    shared: Shared = None,
    limit: Limit = None,
    router: Router = None,
    seed: Seed = None,
) -> None:
    """Run the layer on virtual ranks, or one rank per process under mpiexec."""
    from mok_ref.casefile import save_case, write_npz
    from mok_ref.runner import Settings

    sizes = (tokens, hidden, intermediate, experts, top_k, shared, limit, router, seed)
    settings = Settings(
        ranks=ranks,
        order=order,
        dtype=dtype,
        scale_rule=scale_rule,
        placement=_placement(placement),
        macrobatch=macrobatch,
        minibatch=minibatch,
        arithmetic=arithmetic,
        save=save,
        backward=backward,
        device=device,
        path=path,
        timeout_s=timeout,
    )
    _check_outputs(input, output, save_input, trace)
    if trace is not None and device != "cuda":
        raise ValueError(f"--trace must go with --device cuda, got device {device!r}")
    if trace is not None and path == "portable":
        raise ValueError("--trace must go with --path auto or hopper, got path 'portable'")
    plan = _prepare(input, sizes, settings)
    if save_input is not None and _is_root():
        save_case(save_input, plan.case)
    result, write_trace = (_run(plan), None) if trace is None else _run_recorded(plan, trace)
    if result is None:
        return
    if output is not None:
        write_npz(output, result.output_arrays())
    fault = None
    try:
        if write_trace is not None:
            write_trace()
    except RuntimeError as error:  # nothing was recorded: the results are told all the same
        fault, trace = error, None
    if not as_json:  # before the tables: their last line is the digest
        _say_written("case", save_input)
        _say_written("results", output)
        _say_written("trace", trace)
    _print_run(result, as_json)
    if fault is not None:
        raise fault


@app.command()
def verify(
    input: Input = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks: 1,8,72 or 1-4,8.")] = "1,8,72",
    dtype: Dtype = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Run one case in many ways; all must give the same bits (exit status 1 if not)."""
    from mok_ref.printing import print_verdict
    from mok_ref.verify import (
        Verdict,
        Verifier,
        default_case,
        fitting_ranks,
        own_variant,
        parse_ranks,
        variants,
    )

    _refuse_mpiexec("verify")
    case = default_case() if input is None else _load(input)
    fitting, skipped = fitting_ranks(case, parse_ranks(ranks))
    verifier = Verifier(case)
    if device != "cpu" and fitting:  # what the device is compared with
        verifier.check(next(iter(variants(case, fitting[:1], "cpu", dtype))))
    own = own_variant(case, device, dtype)
    ways = [*variants(case, fitting, device, dtype), *([] if own is None else [own])]
    checks: list[Check] = []
    for settings in ways:
        _show_progress(f"run {len(checks) + 1} of {len(ways)} ...")
        checks.append(verifier.check(settings))
    _show_progress("")
    same = device != "cuda" or _verify_intermediates(case, fitting, dtype)
    verdict = Verdict(checks, skipped, len(case.w_gate), same)
    if as_json:
        print(json.dumps(verdict.as_json(), indent=1))
    else:
        print_verdict(case, verdict)
    if not verdict.equal:
        raise typer.Exit(1)


@app.command()
def schedule(
    input: Input = None,
    ranks: ScheduleRanks = None,
    order: Order = None,
    placement: Placement = None,
    macrobatch: Macrobatch = None,
    minibatch: Minibatch = None,
    rows: Annotated[int, typer.Option(help="Print the first rows of each schedule.")] = 8,
    plot: Annotated[Path | None, typer.Option(help="Draw it (.png, .svg, .pdf).")] = None,
    as_json: AsJson = False,
    tokens: Tokens = None,
    experts: Experts = None,
    top_k: TopK = None,
    seed: Seed = None,
) -> None:
    """Print who pulls which rows from whom; --plot draws it."""
    from mok_ref.casefile import check_distinct
    from mok_ref.plotting import check_picture_path, draw_schedule, import_pyplot
    from mok_ref.printing import print_schedule
    from mok_ref.runner import Settings, routes_of, traffic_of
    from mok_ref.schedule import build_schedule

    _refuse_mpiexec("schedule")
    if plot is not None:
        check_picture_path(plot)
        check_distinct(**{"--input": input, "--plot": plot})
        import_pyplot()  # what is missing is said before anything is printed
    if rows < 0:
        raise ValueError(f"rows must be >= 0, got {rows}")
    sizes = (tokens, None, None, experts, top_k, None, None, None, seed)
    if input is None and ranks is None:
        ranks = 4
    settings = Settings(
        ranks=ranks,
        order=order,
        placement=_placement(placement),
        macrobatch=macrobatch,
        minibatch=minibatch,
    )
    plan = _prepare(input, sizes, settings)
    ids, _ = routes_of(plan)
    traffic = traffic_of(plan, ids)
    if as_json:
        print(json.dumps({"ranks": plan.config.ep_size, "rows_pulled": traffic.tolist()}))
    else:
        print_schedule(plan, ids, traffic, rows)
    if plot is not None:
        everyone = range(plan.config.ep_size)
        schedules = [build_schedule(plan.config, r, ids, plan.splits) for r in everyone]
        draw_schedule(plot, plan.config, schedules, traffic)
        if not as_json:
            _say_written("picture", plot)


@app.command()
def info(as_json: AsJson = False) -> None:
    """Versions, devices and backends found; what is missing and how to install it."""
    from mok_ref.info import collect
    from mok_ref.printing import console, table

    findings = collect() + _missing_commands()
    if not _is_root():
        return
    if as_json:
        rows = [{"name": f.name, "state": f.state, "hint": f.hint} for f in findings]
        print(json.dumps(rows, indent=1))
        return
    shown = table(None, "what", "found", "how to get it")
    for finding in findings:
        shown.add_row(finding.name, finding.state, finding.hint)
    console().print(shown)


@app.command()
def build(
    arch: Annotated[str, typer.Option(help="Targets, e.g. sm_90a,sm_80,sm_100a.")] = "sm_90a",
    as_json: AsJson = False,
) -> None:
    """Compile everything in cuda_src (needs the [gpu] extra, no GPU)."""
    from dataclasses import asdict

    from mok_ref.gpu.compiler import (
        ARCHITECTURES,
        compile_cubin,
        compiler_version,
        resource_usage,
        source_names,
    )
    from mok_ref.printing import console, table

    _refuse_mpiexec("build")
    targets = list(dict.fromkeys(arch.split(",")))
    for target in targets:
        if target not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"arch must be of {known}, got {target[:40]!r}")
    compiler_version()  # before a word is printed: says how to install what is missing
    shown = table(None, "target", "source", "kernel", ">registers", ">static", ">stack", ">spills")
    report = []
    for target in targets:
        for source in source_names(target):
            print(f"compiling {source} for {target}", file=sys.stderr)
            for kernel in resource_usage(compile_cubin(source, target)):
                report.append({"target": target, "source": source, **asdict(kernel)})
                spills = kernel.spill_store_bytes + kernel.spill_load_bytes
                numbers = (kernel.registers, kernel.static_smem_bytes, kernel.stack_bytes, spills)
                shown.add_row(target, source, kernel.name, *map(str, numbers))
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        console().print(shown)
        print("static: shared memory in bytes that the source fixes; a launch adds its own.")
        print("stack, spills: bytes per thread.")


@app.command()
def bench(
    device: Device = "cpu",
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated. cpu: small, medium, NxHxIxExK (small,medium); cuda: the cases "
            "dsv3-rank, kimi-16, mixtral, qwen3, qwen3-zipf, sonic (together: table), small-16, "
            "small-128, small-512 (together: small), all, NxHxIxExK, any of them with :mxfp8; "
            "mxfp8 for table:mxfp8; the experiments save, ranks, around, growth, energy, traffic "
            "(table)."
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="cpu: numbers of ranks, 1,2,4 or 1-4; those that do not divide a size's experts "
            "are skipped (1,2,4)."
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Timed runs, at most 10000 (2; cuda: 20).")
    ] = None,
    directions: Annotated[str, typer.Option(help="forward, or forward,backward.")] = (
        "forward,backward"
    ),
    peers: Annotated[
        str | None,
        typer.Option(
            help="cuda: who runs beside it, of dense (always), torch-eager, torch-compiled, "
            "sonicmoe, liger (dense,torch-eager)."
        ),
    ] = None,
    bursts: Annotated[
        int | None, typer.Option(help="cuda: groups of 4 launches after a rest (5).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="cuda: turns of every contender in sustained work (4).")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON report here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the layer: on the CPU against ranks and size, on a GPU beside its peers."""
    from mok_ref.bench import commands

    _refuse_mpiexec("bench")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be one of cpu, cuda, got {device!r}")
    of_cpu = {"ranks": ranks}
    of_cuda = {"peers": peers, "bursts": bursts, "rounds": rounds}
    mine, others = (of_cpu, of_cuda) if device == "cpu" else (of_cuda, of_cpu)
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} must be left out with device {device}, got {value!r}")
    if output is not None:
        _check_writable(output, ".json", "--output")
    words = {"sizes": sizes, "directions": directions, "repeats": repeats, "output": output, **mine}
    given: dict[str, Any] = {name: value for name, value in words.items() if value is not None}
    good = True
    if device == "cpu":
        commands.bench_on_cpu(**given, as_json=as_json)
    else:
        good = commands.bench_cuda(**given, as_json=as_json)
    if output is not None and not as_json:
        _say_written("report", output)
    if not good:
        raise typer.Exit(1)


@golden_app.command("make")
def golden_make(folder: Annotated[Path, typer.Argument(help="Folder of golden cases.")]) -> None:
    """Write the built-in cases a folder lacks and outputs of cases that have none."""
    from mok_ref.golden import make_folder

    _refuse_mpiexec("golden make")
    make_folder(folder, lambda path: print(f"wrote {path}"))


@golden_app.command("check")
def golden_check(
    folder: Annotated[Path, typer.Argument(help="Folder of golden cases.")],
    ranks: Ranks = None,
    placement: Placement = None,
    macrobatch: Macrobatch = None,
    minibatch: Minibatch = None,
    device: Device = "cpu",
    path: Kernels = "auto",
) -> None:
    """Run every golden case; exit status 1 if any stored bit differs."""
    from mok_ref.golden import GoldenCheck, check_folder
    from mok_ref.printing import SHORT, console, table
    from mok_ref.runner import Settings

    _refuse_mpiexec("golden check")
    settings = Settings(
        ranks=ranks,
        placement=_placement(placement),
        macrobatch=macrobatch,
        minibatch=minibatch,
        device=device,
        path=path,
    )
    shown = table(None, "case", "bits", "digest")
    faults = []

    def report(check: GoldenCheck) -> None:
        shown.add_row(check.name, check.fault or "equal", check.digest[:SHORT])
        faults.append(check.fault)

    good = check_folder(folder, settings, report)
    console().print(shown)
    failed = sum(map(bool, faults))
    print(
        f"all {len(faults)} cases equal" if good else f"{failed} of {len(faults)} cases NOT equal"
    )
    if not good:
        raise typer.Exit(1)


# --------------------------------------------------------------------------- helpers


def _is_root() -> bool:
    return _job is None or _job.rank == 0


def _refuse_mpiexec(command: str) -> None:
    if _job is not None and _job.size > 1:
        raise ValueError(
            f"{command} starts its own ranks, run it without mpiexec, got {_job.size} processes"
        )


def _load(path: Path) -> Case:
    from mok_ref.casefile import load_case

    return load_case(path)


def _prepare(path: Path | None, sizes: tuple[Any, ...], settings: Settings) -> Plan:
    """Case and settings, everything decided. Raises: ValueError in the words of the options."""
    from mok_ref.runner import check_settings, make_plan

    check_settings(settings)
    case = _read_or_make(path, sizes)
    with option_names(**(OPTION_NAMES if path is None else OVERRIDES)):
        return make_plan(case, settings, None if _job is None else _job.size)


def _read_or_make(path: Path | None, sizes: tuple[Any, ...]) -> Case:
    """The case file, or a random case of the sizes that were given."""
    from dataclasses import fields

    names = [field.name for field in fields(RandomCase)]
    given = {name: value for name, value in zip(names, sizes, strict=True) if value is not None}
    if path is None:
        with option_names(**OPTION_NAMES):
            return RandomCase(**given).make()
    if given:
        option = OPTION_NAMES.get(next(iter(given)), f"--{next(iter(given))}")
        raise ValueError(f"{option} must not be given together with --input {path}")
    return _load(path)


def _placement(text: str | None) -> str | tuple[int, ...] | None:
    if text is None or text == "even":
        return text
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"placement must be even or ranks like 0,1,1, got {text!r}")
    return tuple(int(part) for part in parts)


def _check_outputs(
    input: Path | None, output: Path | None, save_input: Path | None, trace: Path | None
) -> None:
    from mok_ref.casefile import check_distinct

    outputs = {"--output": output, "--save-input": save_input, "--trace": trace}
    for name, path in outputs.items():
        if path is not None:
            _check_writable(path, ".json" if name == "--trace" else ".npz", name)
    check_distinct(**{"--input": input, **outputs})


def _check_writable(path: Path, suffix: str, name: str) -> None:
    from mok_ref.casefile import check_writable

    if path.suffix != suffix:
        given = str(path) if path.name else f"{str(path)!r}, which names no file"
        raise ValueError(f"{name} must end in {suffix}, got {given}")
    check_writable(path, name)


def _say_written(what: str, path: Path | None) -> None:
    if path is not None:
        print(f"{what} written to {path}")


def _show_progress(text: str) -> None:
    """One line on a terminal that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _run(plan: Any) -> RunResult | None:
    """The run's result on the rank that prints, None on others."""
    from mok_ref.printing import progress
    from mok_ref.runner import run_mpi, run_virtual

    if _job is None:
        with progress(plan, list(range(plan.config.ep_size))) as after_stage:
            return run_virtual(plan, after_stage)
    if not _is_root():
        return run_mpi(plan, _job.comm)
    with progress(plan, [0]) as after_stage:
        return run_mpi(plan, _job.comm, after_stage)


def _run_recorded(plan: Any, trace: Path) -> tuple[RunResult | None, Callable[[], None] | None]:
    """`_run`, and what writes the timeline of its kernels' tasks into a file."""
    from mok_ref.gpu.recorded_run import run_recorded, write_timeline

    comm = None if _job is None else _job.comm
    result, spans = run_recorded(lambda: _run(plan), plan.config.ep_size, comm)
    if result is None:
        return None, None
    topk_ids = result.topk_ids
    return result, lambda: write_timeline(trace, plan, topk_ids, spans)


def _print_run(result: RunResult, as_json: bool) -> None:
    from mok_ref.printing import print_run, run_report

    if as_json:
        print(json.dumps(run_report(result)))
    else:
        print_run(result)


def _verify_intermediates(case: Case, ranks: list[int], dtype: str | None) -> bool:
    """Schedule, ring rows, gate, up, h, y, out on the device against the reference."""
    from mok_ref.verify import device_intermediates

    good = True
    for size in ranks:
        for order in ("canonical", "round_robin"):
            path, compared, fault = device_intermediates(case, size, order, dtype)
            text = f"R={size} {order} {path}: {compared} tensors, {fault or 'all equal'}"
            print(f"intermediates {text}", file=sys.stderr)
            good &= not fault
    return good


def _missing_commands() -> list[Any]:
    from mok_ref.info import Finding

    return [Finding(f"commands of {name}", "absent", why) for name, why in _unavailable.items()]


_unavailable: dict[str, str] = {}


def _register_more_commands() -> None:
    """Add the commands of training and planner; what cannot be imported is told by `info`."""
    for name in MORE_COMMANDS:
        try:
            importlib.import_module(name).register(app)
        except ImportError as error:
            _unavailable[name] = str(error)


# --------------------------------------------------------------------------- entry


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; see the module's text for the status."""
    global _job
    _open_closed_streams()
    try:
        _job = start_job()
        if not _is_root():  # whatever is printed, help included, is printed once
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        _register_more_commands()
        status = app(arguments, standalone_mode=False)
        if _job is not None:
            _job.close()
    except (typer.Exit, SystemExit) as done:
        status = getattr(done, "exit_code", getattr(done, "code", 0))
        if isinstance(done.__context__, BrokenPipeError):
            status = 0  # as below; tables are printed by a library that ends the program
    except BrokenPipeError:
        status = 0  # the reader of a pipe has seen enough
        _give_up_stdout()
    except (KeyboardInterrupt, typer.Abort):
        _fail("error: interrupted", 130)
    except MemoryError as error:
        _fail(f"error: not enough memory: {one_line(error)}")
    except USER_ERRORS as error:
        _fail(f"error: {one_line(error)}")
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            _fail(traceback.format_exc(), 1)
        _fail(f"error: {error.name} is missing: {install_hint(extra)}")
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message())  # type: ignore[attr-defined]
            sys.exit(0)
        if hasattr(error, "format_message"):  # a wrong option or argument
            _fail(f"error: {one_line(error.format_message())}{_wrong_value(error)}")
        _fail(traceback.format_exc(), 1)  # a fault of this program
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_stdout()
    except OSError as error:  # what was printed is lost: that is no success
        _fail(f"error: standard output: {one_line(error)}")
    sys.exit(status if isinstance(status, int) else 0)


def _open_closed_streams() -> None:
    """Nowhere instead of streams that were closed before the start (`>&-`), so that no file which
    is opened later takes their numbers and what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _give_up_stdout() -> None:
    """Nowhere instead of standard output, lest the interpreter's last flush speak, too."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int = 2) -> NoReturn:
    _flush_before_error()
    end_with_error(_job, message, status)


def _wrong_value(error: Exception) -> str:
    """ ", got 'x'" where a word is no number: the parser's own message tells the rule alone."""
    found = getattr(error.__cause__, "errors", None)
    if found is None:
        return ""
    return "".join(f", got {str(entry['input'])[:40]!r}" for entry in found()[:1])


def _flush_before_error() -> None:
    """What was printed before an error still comes out, where it can."""
    try:
        sys.stdout.flush()
    except OSError:
        _give_up_stdout()
