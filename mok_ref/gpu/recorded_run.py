"""`mok-ref run --device cuda --trace FILE`: a run's tasks, measured and simulated side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mok_ref.gpu.trace import recording
from mok_ref.planner.minibatch_simulation import Span
from mok_ref.planner.trace import spans_from_stamps, write_trace

Result = TypeVar("Result")


def run_recorded(
    run: Callable[[], Result], num_ranks: int, comm: Any = None
) -> tuple[Result, list[Span]]:
    """What `run` returns, and the tasks of all ranks; without those on ranks other than 0 of
    `comm`.

    Virtual ranks share a clock. Under mpiexec every rank's time begins with its own first task:
    clocks of different GPUs are not compared.
    """
    own = (0, num_ranks) if comm is None else (comm.rank, 1)
    with recording(*own) as recorder:
        result = run()
        spans, lost = spans_from_stamps(recorder.read()), recorder.num_lost()
    if comm is not None:
        everyone = comm.gather((spans, lost)) or []
        spans = [span for part, _ in everyone for span in part]
        lost = sum(count for _, count in everyone)
    if lost:
        print(f"trace: {lost} tasks found no room and are missing", file=sys.stderr)
    return result, spans


def write_timeline(path: Path, plan: Any, topk_ids: np.ndarray, measured: list[Span]) -> None:
    """The trace file of a run; the simulation beside it where the GPU's figures are known.

    Raises: RuntimeError when nothing was recorded.
    """
    if not measured:
        raise RuntimeError(
            "--trace found nothing to record: only the Hopper kernels stamp their tasks, "
            "and this run took others"
        )
    write_trace(path, simulation_of(plan, topk_ids), measured, note=f"{plan.config}")


def simulation_of(plan: Any, topk_ids: np.ndarray) -> list[Span]:
    """Simulated tasks of the run's ranks; none for a GPU without a machine file."""
    from mok_ref.planner.layer_prediction import hardware_of_gpu, setting_of_run, simulated_run
    from mok_ref.planner.tune import device_name, tuned

    hardware = hardware_of_gpu(device_name("cuda"))
    if hardware is None:
        return []
    settings, splits = plan.settings, np.asarray(plan.splits)
    config = tuned(plan.config, "cuda", int(splits.max()))
    setting = setting_of_run(config, splits, topk_ids, hardware, settings.save)
    return simulated_run(setting, settings.backward)
