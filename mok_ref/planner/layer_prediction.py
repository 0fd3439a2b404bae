"""One layer's predicted time and timeline, without a plan: beside a benchmark or a recorded run.

predict_layer(CASES["qwen3"], ranks=2, hardware="h200", direction="backward").seconds
python -m mok_ref.planner.layer_prediction 8192x2048x768x128x8 --ranks 2 --direction backward
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mok_ref.config import MoEConfig

from .choice import Choice
from .closed_form import Setting
from .errors import require
from .hardware import Hardware, load_hardware
from .measurements import Measurement, sizes_of
from .minibatch_simulation import Span
from .plan import machine_factors
from .prediction import Prediction, predict
from .stages import LayerShape, fitted_constants
from .task_simulation import simulate_tasks
from .trace import spans_of_sms
from .validity import setting_of_row
from .workload import Workload, counts_of

DIRECTIONS = ("forward", "backward")
BENCH_NAMES = {
    "T": "num_tokens",
    "H": "hidden_size",
    "I": "intermediate_size",
    "E": "num_experts",
    "K": "top_k",
}
OPTIONS = (
    "minibatch",
    "macrobatch",
    "save",
    "mode",
    "dw_dtype",
    "shared",
    "communication_sms",
    "native_fp8",
)


def predict_layer(
    case: Any,
    ranks: int = 1,
    hardware: str | Hardware = "h200",
    direction: str = "forward",
    dtype: str = "bf16",
    **options: Any,
) -> Prediction:
    """Simulate one direction of one layer.

    case       a case of the benchmark, or a mapping with T (tokens per rank), H, I, E, K and
               perhaps "routing" ("uniform" or "zipf")
    options    minibatch, macrobatch (the layer's own choice), save ("all"), mode ("sustained"),
               dw_dtype ("bf16"), shared (0), communication_sms, native_fp8
    Raises: ValueError naming the argument.
    """
    require(direction in DIRECTIONS, f"direction must be one of {DIRECTIONS}, got {direction!r}")
    unknown = sorted(set(options) - set(OPTIONS))
    require(not unknown, f"unknown {', '.join(unknown)}; options are {', '.join(OPTIONS)}")
    require(isinstance(ranks, int) and ranks >= 1, f"ranks must be an integer >= 1, got {ranks!r}")
    row = row_of(case, ranks, direction, dtype, options)
    setting = setting_of_row(row, corrected(hardware), fitted_constants())
    return predict(setting, direction == "backward")


def row_of(
    case: Any, ranks: int, direction: str, dtype: str, options: Mapping[str, Any]
) -> Measurement:
    """The case as a row of the tables that has not been measured."""
    given = case if isinstance(case, Mapping) else vars(case)
    sizes: dict[str, Any] = {}
    for letter, name in BENCH_NAMES.items():
        value = given.get(letter, given.get(name))
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        require(good, f"case must have {letter} ({name}) as an integer >= 1, got {value!r}")
        sizes[letter] = value
    routing = str(given.get("routing", "uniform"))
    require(routing in ("uniform", "zipf"), f"routing must be uniform or zipf, got {routing!r}")
    return Measurement(
        "predicted",
        str(given.get("name", given.get("case", "case"))),
        direction,
        **sizes_of(sizes),
        ms=1.0,
        source="none",
        routing=routing,
        ranks=ranks,
        dtype=dtype,
        extra=dict(options),
    )


def corrected(hardware: str | Hardware) -> Hardware:
    """A machine, its rates corrected by what others have published where it is not at hand."""
    machine = load_hardware(hardware)
    _, factors = machine_factors(machine)
    return machine.scaled(**factors) if factors else machine


# --------------------------------------------------------------------------- recorded runs


def hardware_of_gpu(gpu: str) -> str | None:
    """Which machine file describes a GPU by the name that its driver gives; None: none does."""
    for word, name in (("H200", "h200"), ("H100", "h100")):
        if word in gpu:
            return name
    return None


def setting_of_run(
    config: MoEConfig, tokens: np.ndarray, topk_ids: np.ndarray, hardware: str, save: str
) -> Setting:
    """What the simulation of a layer with these routes takes.

    tokens    (R,) of each rank
    topk_ids  (N, K) of the whole batch
    """
    from mok_ref.gpu.workspace import derive_sizes

    sizes = derive_sizes(config, 0, max(1, int(tokens.max())))
    choice = Choice(
        config.ep_size,
        minibatch=sizes.mini_blocks * 128,
        macrobatch=sizes.macro_blocks * 128,
        save=save,
        dtype=config.dtype,
    )
    shape = LayerShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_experts,
        config.top_k,
        config.shared_intermediate_size,
        config.dtype,
    )
    tokens = np.asarray(tokens, np.int64)
    counts = counts_of(topk_ids.astype(np.int64), tokens, config.num_experts)
    work = Workload(tokens, counts, "recorded", topk_ids)
    owner = np.asarray(config.owner_of_expert, np.int32)
    return Setting(
        corrected(hardware),
        shape,
        choice,
        fitted_constants(),
        work,
        owner,
        sustained=False,  # one step: the clock sets the pace, not the power
        float32_dw=config.grad_dtype != "bf16",
        x_kept=True,
    )


def simulated_run(setting: Setting, backward: bool) -> list[Span]:
    """Tasks of every rank of a step; backward begins where the slowest forward ended."""
    spans: list[Span] = []
    begin = 0.0
    for is_backward in (False, True)[: 1 + backward]:
        runs = [
            simulate_tasks(setting, rank, is_backward, with_spans=True)
            for rank in range(setting.work.num_ranks)
        ]
        for rank, run in enumerate(runs):
            spans += [
                Span(s.rank, s.lane, s.name, s.start + begin, s.end + begin)
                for s in spans_of_sms(run.spans, rank)
            ]
        begin += max(run.seconds - run.head for run in runs)
    return spans


# --------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one prediction."""
    parser = argparse.ArgumentParser(description="Predicted time of one layer.")
    parser.add_argument("sizes", help="TxHxIxExK, T per rank, or a case of the benchmark")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--direction", default="forward", choices=DIRECTIONS)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "mxfp8"))
    options = parser.parse_args(arguments)
    try:
        case = case_of(options.sizes)
        found = predict_layer(
            case, options.ranks, options.hardware, options.direction, options.dtype
        )
    except ValueError as error:
        parser.error(str(error))
    print(
        f"{found.seconds * 1e3:.3f} ms, {found.tflops:.0f} TFLOP/s per GPU, "
        f"{found.hidden_share:.0%} of transfers hidden"
    )
    return 0


def case_of(text: str) -> Any:
    """A case of the benchmark by its name, or TxHxIxExK."""
    from mok_ref.bench.cases import CASES

    if text in CASES:
        return CASES[text]
    parts = text.split("x")
    require(
        len(parts) == 5 and all(part.isdecimal() for part in parts),
        f"sizes must be TxHxIxExK or one of {', '.join(CASES)}, got {text!r}",
    )
    return dict(zip("THIEK", map(int, parts), strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
