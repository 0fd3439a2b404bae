"""How right the model is: constants fitted on some rows, tested on the others, one table of all.

    python -m mok_ref.planner.validity [--fit] [--results docs/results] [--output docs/...]

Fitted: the constants of `KernelConstants`, on the rows of two shapes (`FITTED_CASES`); and, per
kind of GPU that is not at hand, two factors on its data-sheet rates, on the published rows marked
"fit". Everything else in the table is a prediction of a row the fit has not seen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from mok_ref.bench.entry import WordParser, one_line_errors
from mok_ref.casefile import write_whole
from mok_ref.config import MoEConfig
from mok_ref.gpu.workspace import derive_sizes

from .choice import Choice
from .closed_form import Setting
from .errors import check_outputs, optional_module, require
from .hardware import Hardware, load_hardware
from .measurements import (
    MXFP8_GROUP,
    Measurement,
    h200_rows,
    kernel_rows,
    published_links,
    published_rows,
    unread_reports,
    workload_of,
)
from .placement import in_order
from .prediction import predict
from .stages import (
    FITTED,
    TILE_ROWS,
    KernelConstants,
    LayerShape,
    StageCosts,
    constants_as_json,
    fitted_constants,
)
from .workload import Workload

PARAMETERS = (
    "issue_share",
    "power_share",
    "gate_up_epilogue_us",
    "down_epilogue_us",
    "dgrad_epilogue_us",
    "wgrad_epilogue_us",
    "stall_share",
    "tail_share",
    "copy_us_per_mb",
)
DENSE = KernelConstants(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
MOST_ERROR = 0.15  # median of the held-out rows; above it the exit status is 1
KERNEL_ROWS_TO_FIT = 8  # with fewer rows of the real kernel the prototype's are fitted


@dataclass(frozen=True)
class Compared:
    """A measured figure with its prediction."""

    row: Measurement
    predicted_ms: float
    role: str

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ms / self.row.ms - 1.0


@lru_cache(maxsize=256)
def cached_workload(key: Measurement) -> Workload:
    return workload_of(key)


def shape_of_row(row: Measurement) -> LayerShape:
    native = bool(row.extra.get("native_fp8", False))
    return LayerShape(
        row.hidden_size,
        row.intermediate_size,
        row.num_experts,
        row.top_k,
        int(row.extra.get("shared", 0)),
        row.dtype,
        native_fp8=native,
    )


def part_seconds(row: Measurement, hardware: Hardware, constants: KernelConstants) -> float:
    """One GPU, one launch of `what` over all rows (the prototype has no ring and no schedule)."""
    rows = cached_workload(row).expert_load.astype(float)
    costs = StageCosts(shape_of_row(row), hardware, constants)
    bare = replace(costs, constants=replace(constants, copy_us_per_mb=0.0))
    wide = replace(bare, float32_dw=True)
    parts: dict[str, Callable[[], float]] = {
        "forward products": lambda: bare.gate_up(rows, False) + bare.down(rows),
        "forward layer": lambda: (
            costs.gate_up(rows, False) + costs.down(rows) + costs.combine(row.tokens)
        ),
        "dgrad hidden": lambda: bare.dgrad_hidden(rows),
        "dgrad input": lambda: bare.dgrad_input(rows),
        "wgrad float32": lambda: wide.wgrad(rows),
        "wgrad bf16": lambda: bare.wgrad(rows),
        "backward float32": lambda: (
            wide.dgrad_hidden(rows) + wide.dgrad_input(rows) + wide.wgrad(rows)
        ),
    }
    return parts[row.what]()


def dense_seconds(row: Measurement, hardware: Hardware) -> float:
    """One dense product of the same FLOPs: the tensor cores' limits and nothing else."""
    costs = StageCosts(shape_of_row(row), hardware, DENSE)
    factor = 6.0 if row.what == "forward" else 12.0
    flops = factor * row.rows * row.hidden_size * row.intermediate_size
    return max(costs.power_seconds(flops), flops / hardware.burst_bf16_flops)


def choice_of_row(row: Measurement) -> Choice:
    """The batches a row was measured with; where it names none, those the layer takes by itself.
    A backward row's forward saved all."""
    extra = row.extra
    default = default_batches(row)
    given = int(extra.get("macrobatch") or 0)
    by_itself = default[0] if given % default[0] == 0 else given
    minibatch = int(extra.get("minibatch") or by_itself)
    macrobatch = int(extra.get("macrobatch") or -(-default[1] // minibatch) * minibatch)
    save = "all" if "backward" in row.what else str(extra.get("save", "all"))
    return Choice(
        row.ranks,
        minibatch=minibatch,
        macrobatch=macrobatch,
        communication_sms=int(extra.get("communication_sms", 0)),
        save=save,
        dtype=row.dtype,
        native_fp8=bool(extra.get("native_fp8", False)),
    )


def default_batches(row: Measurement) -> tuple[int, int]:
    """(minibatch, macrobatch) of a layer on a device whose configuration names none."""
    config = MoEConfig(
        row.hidden_size,
        row.intermediate_size,
        row.num_experts,
        row.top_k,
        row.ranks,
        placement=tuple(in_order(np.ones(row.num_experts), row.ranks).owner.tolist()),
    )
    sizes = derive_sizes(config, 0, row.tokens)
    return sizes.mini_blocks * TILE_ROWS, sizes.macro_blocks * TILE_ROWS


def setting_of_row(row: Measurement, hardware: Hardware, constants: KernelConstants) -> Setting:
    """What the simulation of a row's layer on all its ranks takes."""
    if row.extra.get("native_fp8"):
        hardware = replace(hardware, native_mxfp8=1.0)
    work = cached_workload(row)
    return Setting(
        hardware,
        shape_of_row(row),
        choice_of_row(row),
        constants,
        work,
        in_order(work.expert_load, row.ranks).owner,
        sustained=row.extra.get("mode", "sustained") != "bursts",
        float32_dw=row.extra.get("dw_dtype", "bf16") == "float32",
        x_kept=True,
        weights_held=row.extra.get("weights") == "held",
    )


def layer_seconds(row: Measurement, hardware: Hardware, constants: KernelConstants) -> float:
    """The whole layer through the simulation of all its ranks."""
    setting = setting_of_row(row, hardware, constants)
    if row.what == "forward and backward":
        return predict(setting).seconds + predict(setting, True).seconds
    found = predict(setting, row.what.startswith("backward"))
    alone = found.head + found.tail if row.what == "forward kernel" else 0.0
    return found.seconds - alone


def predicted_seconds(row: Measurement, hardware: Hardware, constants: KernelConstants) -> float:
    if row.group == "dense cuBLAS":
        return dense_seconds(row, hardware)
    if row.group == "prototype":
        return part_seconds(row, hardware, constants)
    return layer_seconds(row, hardware, constants)


def log_errors(
    rows: Sequence[Measurement],
    machine: Callable[[Measurement], Hardware],
    constants: KernelConstants,
) -> np.ndarray:
    return np.array(
        [np.log(predicted_seconds(row, machine(row), constants) * 1e3 / row.ms) for row in rows]
    )


def fit_constants(rows: Sequence[Measurement]) -> KernelConstants:
    """Least squares of the logarithms of predicted over measured times.

    Parameters are positive and weakly drawn to their starting values, so that one that no row
    determines stays where it was. What MXFP8 costs more is fitted afterwards, on its own rows.
    """
    expanded = [row for row in rows if row.dtype == "mxfp8"]
    rows = [row for row in rows if row.group != MXFP8_GROUP and row.dtype != "mxfp8"]
    require(len(rows) >= len(PARAMETERS), f"too few rows to fit, got {len(rows)}")
    optimize = optional_module("scipy.optimize")
    start = KernelConstants()
    names = PARAMETERS + (("fixed_us",) if any(r.group == "kernel" for r in rows) else ())
    first = np.log([getattr(start, name) for name in names])
    # shares of measured rates lie near 1; epilogues may be anything
    held = np.array([0.3 if name.endswith("_share") else 0.01 for name in names])
    hardware = {name: load_hardware(name) for name in {row.hardware for row in rows}}

    def constants_at(point: np.ndarray) -> KernelConstants:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        return replace(start, **values)

    def residuals(point: np.ndarray) -> np.ndarray:
        errors = log_errors(rows, lambda row: hardware[row.hardware], constants_at(point))
        return np.concatenate([errors, held * (point - first)])

    bounds = (first - 2.5, first + 2.5)
    found = optimize.least_squares(
        residuals, first, bounds=bounds, diff_step=0.02, loss="soft_l1", f_scale=0.05
    )
    return with_expansion(constants_at(found.x), expanded)


def with_expansion(constants: KernelConstants, rows: Sequence[Measurement]) -> KernelConstants:
    """`constants` with what suits these MXFP8 rows; as they are without any.

    dequantise_share from the kernels alone where they were timed, else from all rows; then
    quantise_share from the steps. Searches over a grid: nothing else is left to find.
    """
    kernels = [row for row in rows if row.what == "forward kernel"]
    steps = [row for row in rows if row not in kernels]
    found = best_share(constants, "dequantise_share", kernels or steps)
    return best_share(found, "quantise_share", steps if kernels else [])


def best_share(
    constants: KernelConstants, name: str, rows: Sequence[Measurement]
) -> KernelConstants:
    """`constants` with `name` as it suits the rows; as they are without any."""
    if not rows:
        return constants

    def loss(share: float) -> float:
        tried = replace(constants, **{name: share})
        return float(np.abs(log_errors(rows, lambda r: load_hardware(r.hardware), tried)).sum())

    return replace(constants, **{name: min(SHARES, key=loss)})


SHARES = tuple(round(0.8 * 1.02**i, 3) for i in range(120))
TENSOR_FACTORS = (0.8, 0.9, 1.0)
LINK_FACTORS = tuple(round(0.4 + 0.05 * i, 2) for i in range(13))


def fit_machine(rows: Sequence[Measurement], constants: KernelConstants) -> dict[str, float]:
    """Two factors for a machine that is not at hand: on its tensor rates and on its link rate.

    A search over a grid: simulated times are not smooth in a rate. The rows tell the two apart
    badly, and a tensor rate far below the H200's share of its peak is implausible, so that
    distance from 1 costs as much as the same error of one row.
    """

    def loss(tensor: float, link: float) -> float:
        errors = log_errors(
            rows, lambda row: load_hardware(row.hardware).scaled(tensor, link), constants
        )
        return float(np.sum(errors**2) + np.log(tensor) ** 2)

    pairs = [(tensor, link) for tensor in TENSOR_FACTORS for link in LINK_FACTORS]
    tensor, link = min(pairs, key=lambda pair: loss(*pair))
    return {"tensor": tensor, "link": link}


def compare_all(
    constants: KernelConstants,
    machines: dict[str, dict[str, float]],
    kernel: Sequence[Measurement],
    groups: Collection[str] | None = None,
) -> list[Compared]:
    """Every figure there is (of these groups) with its prediction; `machines` corrects rates."""
    fits_kernel = num_fit(kernel) >= KERNEL_ROWS_TO_FIT
    result = []
    newer = {(row.group, row.case, row.what, row.ranks) for row in kernel}
    stored = [r for r in h200_rows() if (r.group, r.case, r.what, r.ranks) not in newer]
    for row in [*kernel, *stored, *published_rows()]:
        if groups is not None and row.group not in groups:
            continue
        hardware = load_hardware(row.hardware)
        if row.hardware in machines:
            factors = machines[row.hardware]
            hardware = hardware.scaled(factors["tensor"], factors["link"])
        seconds = predicted_seconds(row, hardware, constants)
        role = row.role
        if row.group == "prototype" and fits_kernel:
            role = "context"  # the real kernel was fitted instead: the prototype is another one
        if row.group not in OURS_AND_PUBLISHED:
            role = "context"
        result.append(Compared(row, seconds * 1e3, role))
    return result


def num_fit(rows: Sequence[Measurement]) -> int:
    """Rows of the bf16 kernel that may be fitted."""
    return sum(row.role == "fit" and row.group == "kernel" for row in rows)


def fit_all(kernel: Sequence[Measurement]) -> dict[str, object]:
    """Constants and machine factors, as they are stored."""
    prototype = [row for row in h200_rows() if row.group == "prototype" and row.role == "fit"]
    use_kernel = num_fit(kernel) >= KERNEL_ROWS_TO_FIT
    rows = [row for row in kernel if row.role == "fit"] if use_kernel else prototype
    constants = fit_constants(rows)
    machine = fit_machine([row for row in published_rows() if row.role == "fit"], constants)
    return {
        "constants": constants_as_json(constants),
        "fitted_on": "kernel" if use_kernel else "prototype",
        "fitted_rows": len(rows),
        "machines": {"b300": {**machine, "archs": ["sm_100a", "sm_103a"]}},
    }


OURS_AND_PUBLISHED = ("kernel", MXFP8_GROUP, "kernel on several H200", "prototype", "published")
GROUP_TITLES = {
    "kernel": "This project's kernel on one GPU",
    MXFP8_GROUP: "MXFP8 experts on one GPU, forward: steps and kernels alone (bf16 of the same "
    "run: context)",
    "kernel on several H200": "This project's kernel on several H200 (CUDA IPC, NVLink)",
    "prototype": "Prototype kernel's parts on one H200 (ratios to dense products, converted)",
    "published": "Published by others, several GPUs (predicted: this project's kernel, in their "
    "configuration where it is known)",
    "dense cuBLAS": "Dense products on one H200 (the model's ceiling; nothing fitted)",
    "SonicMoE": "SonicMoE's layer on one H200 (predicted: our kernel)",
    "torch _grouped_mm": "torch._grouped_mm alone on one H200 (predicted: our whole layer)",
    "torch eager layer": "torch pipeline on one H200 (predicted: our layer)",
}
HEADER = (
    "| case | what | T | H | I | E | K | GPUs | role | measured ms | predicted ms | error |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def markdown_line(item: Compared) -> str:
    row = item.row
    sizes = (row.tokens, row.hidden_size, row.intermediate_size, row.num_experts, row.top_k)
    numbers = " | ".join(str(size) for size in sizes)
    what = row.what
    if row.group.startswith("kernel") or row.group == "published":
        details = [row.extra.get(key) for key in ("mode", "save", "dw_dtype")]
        if row.extra.get("weights"):
            details.append(f"weights {row.extra['weights']}")
        what = " ".join([what, row.dtype, *(str(d) for d in details if d)])
    gpus = f"{row.ranks} {row.hardware}"
    return (
        f"| {row.case} | {what} | {numbers} | {gpus} | {item.role} | {row.ms:.3f} | "
        f"{item.predicted_ms:.3f} | {item.error:+.1%} |"
    )


def summary_lines(items: Sequence[Compared]) -> list[str]:
    """Median and largest absolute error per group and role."""
    lines = ["| rows | role | number | median error | largest error |", "|---|---|---|---|---|"]
    for group in GROUP_TITLES:
        roles = sorted({item.role for item in items if item.row.group == group})
        for role in roles:
            chosen = [i for i in items if i.row.group == group and i.role == role]
            errors = np.abs([item.error for item in chosen])
            lines.append(
                f"| {group} | {role} | {len(chosen)} | {np.median(errors):.1%} | "
                f"{errors.max():.1%} |"
            )
    return lines


def link_lines() -> list[str]:
    """Rates that rows reach on links, as the hardware files say and as others measured."""
    lines = ["| measured by | GPU | GB/s | model GB/s | error |", "|---|---|---|---|---|"]
    for link in published_links():
        rate = load_hardware(link["hardware"]).link_rate / 1e9
        error = rate / link["gb_per_s"] - 1
        cells = [link["name"], link["hardware"], link["gb_per_s"], f"{rate:.0f}", f"{error:+.1%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def source_lines(items: Sequence[Compared]) -> list[str]:
    """Where the measured figures are from, each source once per group."""
    found = dict.fromkeys((item.row.group, item.row.source) for item in items)
    found |= dict.fromkeys(("link rate", link["source"]) for link in published_links())
    return [f"- {group}: {source}" for group, source in found]


def validity_page(
    fitted: dict[str, object], items: Sequence[Compared], unread: Sequence[str] = ()
) -> str:
    """The whole table as Markdown; `unread` names the reports that it does not use."""
    lines = [
        "# Validity of the planner's predictions",
        "",
        "Written by `python -m mok_ref.planner.validity`; do not edit. Error: predicted over "
        "measured, less one. Rows marked *fit* were used to fit the constants; *held out* rows are "
        "predictions of cases (shape, tokens, routing, number of GPUs) that no fit has seen; "
        "*other implementation* and *context* rows are figures of other programs (the prototype "
        "kernel among them), "
        "beside the prediction of this project's kernel for the same layer; with MXFP8, *context* "
        "is this project's bf16 in the same run.",
        "",
        f"Constants fitted on: {fitted['fitted_on']} rows ({fitted['fitted_rows']}).",
        "",
        "```json",
        json.dumps({key: fitted[key] for key in ("constants", "machines")}, indent=1),
        "```",
        "",
        *summary_lines(items),
    ]
    for group, title in GROUP_TITLES.items():
        chosen = [item for item in items if item.row.group == group]
        if chosen:
            lines += ["", f"## {title}", "", HEADER, *(markdown_line(item) for item in chosen)]
    lines += [
        "",
        "## Link rates",
        "",
        *link_lines(),
        "",
        "## Sources",
        "",
        *source_lines(items),
        "",
        "Reports that gave no row (no times of a layer, or other bits than the reference): "
        f"{', '.join(unread) or 'none'}.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit if asked to, compare everything, write the page; exit status 1 if held-out rows of the
    kernel (of the prototype while there are none) have a median error above 15 %."""
    parser = WordParser(description="Predictions beside every measured figure.")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew and store them")
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    parser.add_argument("--output", type=Path, default=None, help="write the page to this file")
    with one_line_errors():
        options = parser.parse_args(arguments)
        check_outputs(("--output", options.output, (".md",)))
        return compare_and_write(options.fit, options.results, options.output)


def compare_and_write(fit: bool, results: Path, output: Path | None) -> int:
    """What `main` does with its options; returns the exit status."""
    require(results.is_dir(), f"--results must be a folder, got {str(results)!r}")
    kernel = kernel_rows(results.glob("*.json"))
    unread = unread_reports(results.glob("*.json"))
    if unread:
        print(f"no row from: {', '.join(unread)}", file=sys.stderr)
    if fit:
        write_whole(FITTED, json.dumps(fit_all(kernel), indent=1) + "\n")
    fitted = json.loads(FITTED.read_text(encoding="utf-8"))
    items = compare_all(fitted_constants(), fitted["machines"], kernel)
    page = validity_page(fitted, items, unread)
    if output:
        write_whole(output, page)
        print(f"page: {output}")
    else:
        print(page)
    error = held_out_error(items, "kernel" if kernel else "prototype")
    return int(error is not None and error > MOST_ERROR)


def held_out_error(items: Sequence[Compared], group: str) -> float | None:
    """Median absolute error of a group's held-out rows; None without any."""
    errors = [abs(i.error) for i in items if i.row.group == group and i.role == "held out"]
    return float(np.median(errors)) if errors else None


if __name__ == "__main__":
    raise SystemExit(main())
