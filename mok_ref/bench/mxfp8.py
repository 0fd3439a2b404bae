"""MXFP8 beside bf16 on one GPU: kernels, whole steps and backward, in one process, random order.

    python -m mok_ref.bench.mxfp8 --output docs/results/mxfp8_h200.json [CASE ...]
    python -m mok_ref.bench.mxfp8 --page docs/mxfp8.md docs/results/mxfp8_h200.json

The first measures on the current device and compares y and every gradient with those of the
portable kernels; the second writes the tables between the page's markers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mok_ref.bench.cases import CASES, BenchCase
from mok_ref.bench.entry import WordParser, kernels_line, one_line_errors, require_gpu
from mok_ref.bench.report_files import (
    COUNT,
    DEVICE,
    POSITIVE,
    Maybe,
    ReportKind,
    errors_name,
    one_of,
    read_report,
    write_between_markers,
)
from mok_ref.bench.timing import Protocol, Timing, free_device_memory, time_contenders
from mok_ref.casefile import check_writable, write_whole
from mok_ref.config import MoEConfig

if TYPE_CHECKING:
    from mok_ref.bench.gpu import OurLayer

DEFAULT_CASES = (
    "dsv3-rank", "qwen3", "mixtral", "kimi-16", "sonic", "small-16", "small-128", "small-512",
)  # fmt: skip
PROTOCOL = Protocol(repeats=14, rounds=2, warm_s=0.3, skip_s=0.15, turn_s=0.2, bursts=0)
COLUMNS = ("bf16 kernel", "mxfp8 kernel", "bf16 step", "mxfp8 step", "mxfp8 step, weights held")
BACKWARD = ("bf16 backward", "mxfp8 backward")
RATIOS = {
    "kernel": COLUMNS[:2],
    "step": COLUMNS[2:4],
    "step held": (COLUMNS[2], COLUMNS[4]),
    "backward": BACKWARD,
}
Calls = dict[str, Callable[[], Any]]


def kernel_call(layer: OurLayer) -> Callable[[], Any]:
    """The forward kernel of a layer's last step, with the clearing of its counters; without the
    sum over slots, which bf16 may have inside and MXFP8 has not."""
    from mok_ref.bench.gpu import torch_stream
    from mok_ref.gpu import hopper, hopper_mxfp8
    from mok_ref.gpu.params import set_params

    workspace, params = layer.workspace, layer.context.params.copy()
    set_params(params, combines=0)
    launch: Callable[[Any], None]
    if layer.case.dtype == "mxfp8":
        launch = hopper_mxfp8.routed_experts(workspace, params)
    else:
        launch = partial(hopper.launch_forward, workspace, params)
    counters = workspace.counters

    def call() -> None:
        with torch_stream() as stream:
            counters.data.memset_async(0, counters.nbytes, stream)
            launch(stream)

    return call


def forward_calls(bf16: OurLayer, ours: OurLayer) -> Calls:
    """What is timed of a forward without saving: kernels and whole steps."""
    from mok_ref.bench.gpu import torch_stream
    from mok_ref.gpu import hopper_mxfp8

    for layer in (bf16, ours):
        layer.forward("none")
    calls: Calls = {"bf16 kernel": kernel_call(bf16), "mxfp8 kernel": kernel_call(ours)}

    def held() -> None:  # quantises at the first of a row of calls alone, which is not timed
        if not hopper_mxfp8._held(ours.workspace):
            with torch_stream():
                hopper_mxfp8.hold_weights(ours.workspace, ours.weights)
        ours.forward("none")

    def step() -> None:
        hopper_mxfp8.release_weights(ours.workspace)
        ours.forward("none")

    calls["bf16 step"] = partial(bf16.forward, "none")
    calls["mxfp8 step"] = step
    calls["mxfp8 step, weights held"] = held
    return calls


def backward_calls(bf16: OurLayer, ours: OurLayer) -> Calls:
    """Whole backwards of steps that saved gate and up; dW in bf16."""
    for layer in (bf16, ours):
        layer.forward("all")
    return {"bf16 backward": bf16.backward, "mxfp8 backward": ours.backward}


def measure(name: str, checked: bool) -> dict[str, Any]:
    """One row of the tables."""
    from mok_ref.bench.check import check_bits
    from mok_ref.bench.gpu import OurLayer
    from mok_ref.bench.peers import make_inputs

    case, inputs = CASES[name], make_inputs(CASES[name])
    ours = OurLayer(replace(inputs, case=case.as_mxfp8()), grad_dtype="bf16")
    bits = check_bits(ours, 0) if checked else None
    bf16, rng = OurLayer(inputs, grad_dtype="bf16"), np.random.default_rng(0)
    times = time_contenders(forward_calls(bf16, ours), rng, PROTOCOL)
    times |= time_contenders(backward_calls(bf16, ours), rng, PROTOCOL)
    row = {
        "case": name,
        **sizes_of(case),
        "flops": case.flops("forward"),
        "ms": {name: timing.ms("sustained") for name, timing in times.items()},
        "ratios": measured_ratios(times),
        "bits": bits,
    }
    for layer in (bf16, ours):
        layer.close()
    del bf16, ours, inputs
    free_device_memory()
    return row


def sizes_of(case: BenchCase) -> dict[str, int]:
    """T, H, I, E, K by the names they have in a report."""
    return {
        "tokens": case.num_tokens,
        "hidden": case.hidden_size,
        "intermediate": case.intermediate_size,
        "experts": case.num_experts,
        "top_k": case.top_k,
    }


def measured_ratios(times: dict[str, Timing]) -> dict[str, float]:
    """bf16 time / MXFP8 time of every kind."""
    return {
        kind: times[bf16].ratio(times[ours], "sustained") for kind, (bf16, ours) in RATIOS.items()
    }


# --------------------------------------------------------------------------- page


def time_table(report: dict[str, Any]) -> str:
    """Milliseconds, TFLOP/s and ratios of every case."""
    columns, ratios = columns_of(report), [k for k in RATIOS if RATIOS[k][1] in columns_of(report)]
    lines = [
        f"| case (T, H, I, E, K) | {' | '.join(f'{c} ms' for c in columns)} | kernel TFLOP/s, "
        f"bf16, mxfp8 | bf16 time / mxfp8 time: {', '.join(ratios)} |",
        "|---|" + "---|" * (len(columns) + 2),
    ]
    for row in report["rows"]:
        ms = row["ms"]
        sizes = ", ".join(
            str(row[k]) for k in ("tokens", "hidden", "intermediate", "experts", "top_k")
        )
        rates = ", ".join(f"{row['flops'] / ms[c] / 1e9:.0f}" for c in COLUMNS[:2])
        shown = ", ".join(f"{ratio_of(row, kind):.2f}" for kind in ratios)
        times = " | ".join(f"{ms[c]:.3f}" for c in columns)
        lines.append(f"| {row['case']} ({sizes}) | {times} | {rates} | {shown} |")
    return "\n".join([*lines, "", kernels_line(report["device"])])


def columns_of(report: dict[str, Any]) -> tuple[str, ...]:
    """What every row of a report has times of."""
    return tuple(
        name for name in COLUMNS + BACKWARD if all(name in row["ms"] for row in report["rows"])
    )


def ratio_of(row: dict[str, Any], kind: str) -> float:
    """Paired where the report has it, else the quotient of the medians."""
    bf16, ours = RATIOS[kind]
    return float(row.get("ratios", {}).get(kind, row["ms"][bf16] / row["ms"][ours]))


def memory_table(report: dict[str, Any]) -> str:
    """Bytes of bf16 and of MXFP8 by what they hold, of the cases of a report."""
    found = {row["case"]: memory_of(CASES[row["case"]]) for row in report["rows"]}
    names = list(next(iter(found.values())))
    lines = [f"| case | {' | '.join(f'{n}, MiB' for n in names)} |", "|---|" + "---|" * len(names)]
    for case, parts in found.items():
        cells = [f"{a / 2**20:,.1f} → {b / 2**20:,.1f}" for a, b in parts.values()]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_of(case: BenchCase) -> dict[str, tuple[int, int]]:
    """name -> (bytes of bf16, bytes of MXFP8): what changes its form, then whole workspaces on
    Hopper's path, whose MXFP8 ones hold the codes of the weights too."""
    from mok_ref.gpu.hopper_mxfp8 import memory_bytes
    from mok_ref.gpu.workspace import workspace_bytes

    sizes = (case.hidden_size, case.intermediate_size, case.num_experts, case.top_k)
    bf16, mxfp8 = (MoEConfig(*sizes, dtype=dtype) for dtype in ("bf16", "mxfp8"))
    parts = memory_bytes(mxfp8, 0, case.num_tokens)
    for name, training in (("workspace, forward alone", False), ("workspace, training", True)):
        totals = (
            workspace_bytes(config, 0, case.num_tokens, training=training, path="hopper")["total"]
            for config in (bf16, mxfp8)
        )
        first, second = totals
        parts[name] = first, second
    return parts


REPORT = ReportKind(
    made_by="bench.mxfp8",
    key="rows",
    shape={
        "device": DEVICE,
        "rows": [
            {
                "case": one_of(*CASES),
                **dict.fromkeys(("tokens", "hidden", "intermediate", "experts", "top_k"), COUNT),
                "flops": POSITIVE,
                "ms": {
                    **dict.fromkeys(COLUMNS, POSITIVE),
                    **dict.fromkeys(BACKWARD, Maybe(POSITIVE)),
                },
                "ratios": Maybe(dict.fromkeys(RATIOS, POSITIVE)),
            }
        ],
    },
    some_of=("rows",),
)
TABLES = {"device times": time_table, "device memory": memory_table}


def check_cases(report: dict[str, Any]) -> None:
    """Each case once, with its own sizes. Raises: ValueError."""
    seen: set[str] = set()
    for row in report["rows"]:
        name, sizes = row["case"], sizes_of(CASES[row["case"]])
        if name in seen:
            raise ValueError(f"rows must hold each case once, got {name} twice")
        seen.add(name)
        for key, size in sizes.items():
            if row[key] != size:
                raise ValueError(f"{key} of {name} in rows must be {size}, got {row[key]}")


def fill_page(page: Path, path: Path) -> None:
    """Write the tables of the report at `path` between the page's markers.

    Raises: ValueError naming the file, and the key that is wrong; or when a pair of markers is not
    there exactly once; OSError.
    """
    report = read_report(path, REPORT)
    with errors_name(path, REPORT):
        check_cases(report)
        made = {
            (f"<!-- begin {name} -->", f"<!-- end {name} -->"): make(report)
            for name, make in TABLES.items()
        }
    write_between_markers(page, made)


def main(arguments: list[str] | None = None) -> int:
    """Measure cases, or write the page; 1 if a bit differed."""
    with one_line_errors():
        return _run(arguments)


def _run(arguments: list[str] | None) -> int:
    parser = WordParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases to measure, or with --page the report")
    parser.add_argument("--output", type=Path, help="JSON file of the report")
    parser.add_argument("--page", type=Path, help="existing page with markers of its tables")
    parser.add_argument("--unchecked", action="store_true", help="leave out the comparison")
    options = parser.parse_args(arguments)
    if options.page:
        if len(options.names) != 1:
            raise ValueError(f"--page needs one report, got {' '.join(options.names) or 'none'}")
        fill_page(options.page, Path(options.names[0]))
        return 0
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        raise ValueError(f"cases must be of {', '.join(CASES)}, got {', '.join(unknown)}")
    if options.output:
        check_writable(options.output, "--output")
    require_gpu("bench.mxfp8")
    from mok_ref.bench.gpu import device_facts

    report: dict[str, Any] = {"device": device_facts(), "rows": []}
    for name in dict.fromkeys(options.names or DEFAULT_CASES):
        report["rows"].append(measure(name, not options.unchecked))
        row = report["rows"][-1]
        times = ", ".join(f"{k} {v:.3f}" for k, v in row["ms"].items())
        ratios = ", ".join(f"{k} {v:.3f}" for k, v in row["ratios"].items())
        print(f"{name}: bits {row['bits']}; ms: {times}; bf16 / mxfp8: {ratios}", flush=True)
        if options.output:
            write_whole(options.output, json.dumps(report, indent=1) + "\n")
    return 1 if any(row["bits"] not in (None, "equal") for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
