"""One layer's predicted time and timeline, without a plan: beside a benchmark or a recorded run.

predict_layer(CASES["qwen3"], ranks=2, hardware="h200", direction="backward").seconds
python -m mok_ref.planner.layer_prediction 8192x2048x768x128x8 --ranks 2 --direction backward
python -m mok_ref.planner.layer_prediction qwen3:mxfp8
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mok_ref.config import DTYPES, GRAD_DTYPES, MoEConfig

from .choice import SAVES, Choice
from .closed_form import Setting
from .errors import require
from .hardware import Hardware, load_hardware
from .layer_options import (
    LARGEST,
    MODES,
    ROUTINGS,
    WEIGHTS,
    check_count,
    check_options,
    check_ranks,
    check_word,
)
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
    "weights",
)


def predict_layer(
    case: Any,
    ranks: int = 1,
    hardware: str | Hardware = "h200",
    direction: str = "forward",
    dtype: str | None = None,
    **options: Any,
) -> Prediction:
    """Simulate one direction of one layer.

    case       a case of the benchmark, or a mapping with T (tokens per rank), H, I, E, K and
               perhaps "routing" ("uniform" or "zipf") and "dtype"; where K > E, ids are drawn
               with replacement, as in the benchmark's first case (the layer takes K of E)
    ranks      must divide E: experts lie in order, E/R on each
    dtype      of the experts, "bf16" or "mxfp8"; None: the case's, else bf16
    options    minibatch, macrobatch (the layer's own choice), save ("all"), mode ("sustained"),
               dw_dtype ("bf16"), shared (0), communication_sms, native_fp8, weights ("not held":
               an MXFP8 forward quantises them)
    Raises: ValueError naming the argument.
    """
    check_word(direction, "direction", DIRECTIONS)
    unknown = sorted(set(options) - set(OPTIONS))
    require(not unknown, f"unknown {', '.join(unknown)}; options are {', '.join(OPTIONS)}")
    check_options(options)
    is_kept = direction == "forward" or options.get("save", "all") == "all"
    require(is_kept, f"save must be all with direction backward, got {options.get('save')!r}")
    row = row_of(case, ranks, direction, dtype, options)
    setting = setting_of_row(row, corrected(hardware), fitted_constants())
    return predict(setting, direction == "backward")


def row_of(
    case: Any, ranks: int, direction: str, dtype: str | None, options: Mapping[str, Any]
) -> Measurement:
    """The case as a row of the tables that has not been measured."""
    given = case if isinstance(case, Mapping) else getattr(case, "__dict__", {})
    own = given.get("dtype")
    require(
        None in (own, dtype) or own == dtype or own == "bf16",
        f"dtype must be the case's own, {own}, or left out, got {dtype!r}",
    )
    dtype = dtype or own or "bf16"
    check_word(dtype, "dtype", DTYPES)
    sizes: dict[str, Any] = {}
    for letter, name in BENCH_NAMES.items():
        value = given.get(letter, given.get(name))
        sizes[letter] = check_count(value, f"case's {letter} ({name})", LARGEST[letter])
    ranks = check_ranks(ranks, sizes["E"])
    require(sizes["E"] % ranks == 0, f"ranks must divide E, got ranks={ranks}, E={sizes['E']}")
    routing = given.get("routing", "uniform")
    check_word(routing, "routing", ROUTINGS)
    return Measurement(
        "predicted",
        str(given.get("name", given.get("case", "case"))),
        direction,
        **sizes_of(sizes),
        ms=1.0,
        source="none",
        routing=str(routing),
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
    """Print one prediction and what it is of."""
    parser = command_line()
    options = parser.parse_args(arguments)
    words = {name: getattr(options, name) for name in ("save", "mode", "dw_dtype", "weights")}
    try:
        case = case_of(options.case)
        given = {name: value for name, value in words.items() if value is not None}
        asked = options.ranks, options.hardware, options.direction, options.dtype
        found = predict_layer(case, *asked, **given)
        print(heading(case, *asked, given))
    except ValueError as error:
        parser.error(str(error))
    hidden = "no transfers between ranks"
    if options.ranks > 1:
        hidden = f"{found.hidden_share:.0%} of transfers hidden"
    print(f"{found.seconds * 1e3:.3f} ms, {found.tflops:.0f} TFLOP/s per GPU, {hidden}")
    return 0


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Predicted time of one layer.")
    add = parser.add_argument
    add("case", help="a case of the benchmarks or TxHxIxExK, T per rank; either with :mxfp8")
    add("--ranks", type=int, default=1, help="GPUs that share the experts (1)")
    add("--hardware", default="h200", help="a machine's name or TOML file (h200)")
    add("--direction", default="forward", choices=DIRECTIONS, help="(forward)")
    add("--dtype", choices=("bf16", "mxfp8"), help="of the experts (the case's, else bf16)")
    add("--save", choices=SAVES, help="what forward keeps; backward's forward keeps all (all)")
    add("--mode", choices=MODES, help="of the load: power limits it, or only the clock (sustained)")
    add("--dw-dtype", choices=GRAD_DTYPES, help="backward: in which type dW is stored (bf16)")
    add("--weights", choices=WEIGHTS, help="mxfp8 forward: are they quantised already? (not held)")
    return parser


def heading(
    case: Any,
    ranks: int,
    hardware: str,
    direction: str,
    dtype: str | None,
    given: Mapping[str, Any],
) -> str:
    """What is predicted, in one line."""
    row = row_of(case, ranks, direction, dtype, given)
    sizes = (row.tokens, row.hidden_size, row.intermediate_size, row.num_experts, row.top_k)
    shape = " ".join(f"{letter} {size}" for letter, size in zip("THIEK", sizes, strict=True))
    words = [f"{row.case}: {shape}", f"{row.ranks} x {hardware}", direction, row.dtype]
    if direction == "forward":
        words.append(f"save {given.get('save', 'all')}")
        if row.dtype == "mxfp8":
            words.append(f"weights {given.get('weights', 'not held')}")
    else:
        words += ["save all", f"dW {given.get('dw_dtype', 'bf16')}"]
    return ", ".join([*words, str(given.get("mode", "sustained"))])


def known_cases() -> dict[str, Any]:
    """Cases of all benchmarks, of one GPU and of several."""
    from mok_ref.bench.cases import CASES
    from mok_ref.bench.links_layer import BF16_CASES

    return {case.name: case for case in BF16_CASES} | CASES


def case_of(text: str) -> Any:
    """A case of the benchmarks by its name, or TxHxIxExK; with :mxfp8 one of MXFP8 experts."""
    cases = known_cases()
    name, colon, dtype = text.partition(":")
    parts = name.split("x")
    is_sizes = len(parts) == 5 and all(part.isdecimal() for part in parts)
    require(
        (name in cases or is_sizes) and (not colon or dtype in ("bf16", "mxfp8")),
        f"case must be TxHxIxExK or one of {', '.join(cases)}, perhaps with :mxfp8, got {text!r}",
    )
    found = dict(vars(cases[name])) if name in cases else {"name": name}
    if is_sizes and name not in cases:
        found |= dict(zip("THIEK", map(int, parts), strict=True))
    return found | ({"dtype": dtype} if dtype else {})


if __name__ == "__main__":
    raise SystemExit(main())
