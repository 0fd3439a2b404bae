"""How right the model is: constants fitted on some rows, tested on the others, one table of all.

    python -m mok_ref.planner.validity [--fit] [--results docs/results] [--output docs/...]

Fitted: the constants of `KernelConstants`, on the rows of two shapes (`FITTED_CASES`); and, per
kind of GPU that is not at hand, two factors on its data-sheet rates, on the published rows marked
"fit". Everything else in the table is a prediction of a row the fit has not seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from .choice import Choice
from .closed_form import Setting
from .errors import optional_module, require
from .hardware import Hardware, load_hardware
from .measurements import (
    Measurement,
    h200_rows,
    kernel_rows,
    published_links,
    published_rows,
    workload_of,
)
from .placement import in_order
from .prediction import predict
from .stages import (
    FITTED,
    KernelConstants,
    LayerShape,
    StageCosts,
    constants_as_json,
    fitted_constants,
)

PARAMETERS = (
    "issue_share",
    "power_share",
    "gate_up_epilogue_us",
    "down_epilogue_us",
    "dgrad_epilogue_us",
    "wgrad_epilogue_us",
    "copy_us_per_mb",
)
DENSE = KernelConstants(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
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
def cached_workload(key: Measurement):  # type: ignore[no-untyped-def]
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
    extra = row.extra
    minibatch = int(extra.get("minibatch") or 2048)
    macrobatch = int(extra.get("macrobatch") or 8 * minibatch)
    return Choice(
        row.ranks,
        minibatch=minibatch,
        macrobatch=macrobatch,
        communication_sms=int(extra.get("communication_sms", 0)),
        save=str(extra.get("save", "all")),
        dtype=row.dtype,
        native_fp8=bool(extra.get("native_fp8", False)),
    )


def layer_seconds(row: Measurement, hardware: Hardware, constants: KernelConstants) -> float:
    """The whole layer through the simulation of all its ranks."""
    if row.extra.get("native_fp8"):
        hardware = replace(hardware, native_mxfp8=1.0)
    work = cached_workload(row)
    owner = in_order(work.expert_load, row.ranks).owner
    setting = Setting(
        hardware,
        shape_of_row(row),
        choice_of_row(row),
        constants,
        work,
        owner,
        sustained=row.extra.get("mode", "sustained") != "bursts",
        float32_dw=row.extra.get("dw_dtype", "bf16") == "float32",
    )
    return predict(setting, row.what.startswith("backward")).seconds


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
    determines stays where it was.
    """
    require(len(rows) >= len(PARAMETERS), f"too few rows to fit, got {len(rows)}")
    optimize = optional_module("scipy.optimize")
    start = KernelConstants()
    names = PARAMETERS + (("fixed_us",) if any(r.group == "kernel" for r in rows) else ())
    first = np.log([getattr(start, name) for name in names])
    hardware = {name: load_hardware(name) for name in {row.hardware for row in rows}}

    def constants_at(point: np.ndarray) -> KernelConstants:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        return replace(start, **values)

    def residuals(point: np.ndarray) -> np.ndarray:
        errors = log_errors(rows, lambda row: hardware[row.hardware], constants_at(point))
        return np.concatenate([errors, 0.01 * (point - first)])

    bounds = (first - 2.5, first + 2.5)
    found = optimize.least_squares(residuals, first, bounds=bounds, diff_step=0.02, loss="soft_l1",
                                   f_scale=0.05)
    return constants_at(found.x)


def fit_machine(
    rows: Sequence[Measurement], constants: KernelConstants
) -> dict[str, float]:
    """Two factors for a machine that is not at hand: on its tensor rates and on its link rate."""
    optimize = optional_module("scipy.optimize")

    def residuals(point: np.ndarray) -> np.ndarray:
        factors = {"tensor": float(np.exp(point[0])), "link": float(np.exp(point[1]))}
        errors = log_errors(rows, lambda row: load_hardware(row.hardware).scaled(**factors), constants)
        return np.concatenate([errors, 0.02 * point])

    found = optimize.least_squares(residuals, np.zeros(2), bounds=(-2.0, 1.0), diff_step=0.03)
    return {"tensor": float(np.exp(found.x[0])), "link": float(np.exp(found.x[1]))}
