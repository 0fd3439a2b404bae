"""MXFP8 beside bf16 on one GPU: forward kernel and forward step, in one process, random order.

    python -m mok_ref.bench.mxfp8 --output docs/results/mxfp8_h200.json [CASE ...]
    python -m mok_ref.bench.mxfp8 --page docs/mxfp8.md docs/results/mxfp8_h200.json

The first measures on the current device and compares every y with that of the portable kernels;
the second writes the tables between the page's markers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.bench.cases import CASES, BenchCase, routes
from mok_ref.bench.entry import WordParser, kernels_line, one_line_errors, require_gpu
from mok_ref.bench.report_files import (
    COUNT,
    DEVICE,
    POSITIVE,
    Each,
    ReportKind,
    Rule,
    errors_name,
    one_of,
    read_report,
    write_between_markers,
)
from mok_ref.casefile import check_writable, write_whole
from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights

DEFAULT_CASES = (
    "dsv3-rank", "qwen3", "mixtral", "kimi-16", "sonic", "small-16", "small-128", "small-512",
)  # fmt: skip
ROUNDS = 3
ROUND_MS = 30.0
MOST_CALLS = 200
COLUMNS = ("bf16 kernel", "mxfp8 kernel", "bf16 step", "mxfp8 step", "mxfp8 step, weights held")


class Layers:
    """One case with both dtypes on a heap of one rank; everything on the heap's stream."""

    def __init__(self, case: BenchCase) -> None:
        import cupy

        from mok_ref.heap.virtual_cuda import VirtualCudaWorld

        self.case, self.heap = case, VirtualCudaWorld(1).heap(0)
        hidden, inner, experts = case.hidden_size, case.intermediate_size, case.num_experts
        ids, weights = routes(case)
        self.routes = cupy.asarray(ids), cupy.asarray(weights)
        self.x = random_bits((case.num_tokens, hidden), 1.0, 1)
        self.weights = ExpertWeights(
            random_bits((experts, inner, hidden), hidden**-0.5, 3),
            random_bits((experts, inner, hidden), hidden**-0.5, 4),
            random_bits((experts, hidden, inner), inner**-0.5, 5),
        )
        self.workspaces: dict[tuple[str, str], Any] = {}

    def workspace(self, dtype: str, path: str = "auto") -> Any:
        """Of one dtype and choice of kernels, made once."""
        from mok_ref.gpu.workspace import DeviceWorkspace

        case, key = self.case, (dtype, path)
        if key not in self.workspaces:
            sizes = (case.hidden_size, case.intermediate_size, case.num_experts, case.top_k)
            config = MoEConfig(*sizes, dtype=dtype)
            self.workspaces[key] = DeviceWorkspace(
                config, self.heap, case.num_tokens, training=False, path=path
            )
        return self.workspaces[key]

    def forward(self, dtype: str, path: str = "auto") -> tuple[Any, Any]:
        """(y, context) of one step."""
        from mok_ref.gpu import layer

        workspace = self.workspace(dtype, path)
        arguments = (self.x, *self.routes, self.weights, None)
        return layer.forward(workspace.config, self.heap, *arguments, workspace, "none")

    def differing(self) -> int:
        """Elements of y in which the Hopper and the portable MXFP8 kernels differ."""
        actual = self.forward("mxfp8")[0].view(np.uint16).copy()
        expected = self.forward("mxfp8", "portable")[0].view(np.uint16)
        self.heap.check()
        count = int((actual != expected).sum())
        del self.workspaces["mxfp8", "portable"]
        return count

    def contenders(self) -> dict[str, tuple[Callable[[], None], Callable[[], Any]]]:
        """name -> (what is done before and not timed, what is timed)."""
        from mok_ref.gpu import hopper, hopper_mxfp8

        stream = self.heap.stream
        ours, bf16 = self.workspace("mxfp8"), self.workspace("bf16")
        params = {dtype: self.forward(dtype)[1].params for dtype in ("mxfp8", "bf16")}
        kernels = {
            "mxfp8 kernel": (ours, hopper_mxfp8.routed_experts(ours, params["mxfp8"])),
            "bf16 kernel": (bf16, hopper._kernel_of(bf16).prepare(params["bf16"])),
        }

        def clear(workspace: Any) -> None:
            workspace.counters.data.memset_async(0, workspace.counters.nbytes, stream)

        def hold() -> None:  # quantises at the first of a row of calls alone
            if not hopper_mxfp8._held(ours):
                hopper_mxfp8.hold_weights(ours, self.weights)

        release = partial(hopper_mxfp8.release_weights, ours)

        found: dict[str, tuple[Callable[[], None], Callable[[], Any]]] = {
            name: (partial(clear, workspace), partial(launch, stream))
            for name, (workspace, launch) in kernels.items()
        }
        found["bf16 step"] = (release, partial(self.forward, "bf16"))
        found["mxfp8 step"] = (release, partial(self.forward, "mxfp8"))
        found["mxfp8 step, weights held"] = (hold, partial(self.forward, "mxfp8"))
        return found


def random_bits(shape: tuple[int, ...], scale: float, seed: int) -> Any:
    """Normal values as bf16 bits, made on the device (truncated: any bf16 values will do)."""
    import cupy

    rng = cupy.random.default_rng(seed)
    out = cupy.empty(shape, cupy.uint16)
    flat, piece = out.reshape(-1), 1 << 24
    for first in range(0, flat.size, piece):
        count = min(piece, flat.size - first)
        part = rng.standard_normal(count, dtype=cupy.float32) * np.float32(scale)
        flat[first : first + count] = (part.view(cupy.uint32) >> 16).astype(cupy.uint16)
    return out


def median_ms(
    contenders: dict[str, tuple[Callable[[], None], Callable[[], Any]]], stream: Any
) -> dict[str, float]:
    """Median milliseconds of every contender, in rounds of random order."""
    import cupy

    def timed(name: str) -> tuple[Any, Any]:
        before, call = contenders[name]
        before()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        call()
        end.record(stream)
        return start, end

    samples: dict[str, list[float]] = {name: [] for name in contenders}
    rng = np.random.default_rng(0)
    for name in contenders:
        timed(name)
    for _ in range(ROUNDS):
        for name in rng.permutation(list(contenders)):
            first = timed(name)
            first[1].synchronize()
            once = max(cupy.cuda.get_elapsed_time(*first), 1e-3)
            marks = [timed(name) for _ in range(int(min(MOST_CALLS, max(4, ROUND_MS / once))))]
            stream.synchronize()
            samples[name] += [cupy.cuda.get_elapsed_time(*pair) for pair in marks]
    return {name: float(np.median(found)) for name, found in samples.items()}


def measure(name: str, checked: bool) -> dict[str, Any]:
    """One row of the tables."""
    import cupy

    from mok_ref.gpu import hopper_mxfp8

    case = CASES[name]
    layers = Layers(case)
    with layers.heap.stream:
        differing = layers.differing() if checked else None
        times = median_ms(layers.contenders(), layers.heap.stream)
        layers.heap.check()
    config = layers.workspace("mxfp8").config
    row = {
        "case": name,
        "tokens": case.num_tokens,
        "hidden": case.hidden_size,
        "intermediate": case.intermediate_size,
        "experts": case.num_experts,
        "top_k": case.top_k,
        "flops": case.flops("forward"),
        "ms": times,
        "differing": differing,
        "compared": case.num_tokens * case.hidden_size if checked else 0,
        "memory": hopper_mxfp8.memory_bytes(config, 0, case.num_tokens),
    }
    del layers
    cupy.get_default_memory_pool().free_all_blocks()
    return row


# --------------------------------------------------------------------------- page


def time_table(report: dict[str, Any]) -> str:
    """Milliseconds, TFLOP/s and ratios of every case."""
    lines = [
        f"| case (T, H, I, E, K) | {' | '.join(f'{c} ms' for c in COLUMNS)} | kernel TFLOP/s, "
        "bf16, mxfp8 | bf16 time / mxfp8 time: kernel, step, step held |",
        "|---|" + "---|" * (len(COLUMNS) + 2),
    ]
    for row in report["rows"]:
        ms = row["ms"]
        sizes = ", ".join(
            str(row[k]) for k in ("tokens", "hidden", "intermediate", "experts", "top_k")
        )
        rates = ", ".join(f"{row['flops'] / ms[c] / 1e9:.0f}" for c in COLUMNS[:2])
        ratios = ", ".join(
            f"{ms[bf16] / ms[ours]:.2f}"
            for bf16, ours in (COLUMNS[:2], COLUMNS[2:4], (COLUMNS[2], COLUMNS[4]))
        )
        times = " | ".join(f"{ms[c]:.3f}" for c in COLUMNS)
        lines.append(f"| {row['case']} ({sizes}) | {times} | {rates} | {ratios} |")
    return "\n".join([*lines, "", kernels_line(report["device"])])


def memory_table(report: dict[str, Any]) -> str:
    """Bytes of bf16 and of MXFP8 by what they hold."""
    names = list(report["rows"][0]["memory"])
    lines = [f"| case | {' | '.join(f'{n}, MiB' for n in names)} |", "|---|" + "---|" * len(names)]
    for row in report["rows"]:
        if list(row["memory"]) != names:
            raise KeyError(f"memory of {row['case']} must hold {', '.join(names)}")
        cells = [f"{a / 2**20:,.1f} → {b / 2**20:,.1f}" for a, b in row["memory"].values()]
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    return "\n".join(lines)


BYTES = Rule(
    "two whole numbers >= 0",
    lambda v: isinstance(v, list) and len(v) == 2 and all(map(COUNT.holds, v)),
)
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
                "ms": dict.fromkeys(COLUMNS, POSITIVE),
                "memory": Each(BYTES),
            }
        ],
    },
    some_of=("rows",),
)
TABLES = {"device times": time_table, "device memory": memory_table}


def fill_page(page: Path, path: Path) -> None:
    """Write the tables of the report at `path` between the page's markers.

    Raises: ValueError naming the file, and the key that is wrong; or when a pair of markers is not
    there exactly once; OSError.
    """
    report = read_report(path, REPORT)
    with errors_name(path, REPORT):
        made = {
            (f"<!-- begin {name} -->", f"<!-- end {name} -->"): make(report)
            for name, make in TABLES.items()
        }
    write_between_markers(page, made)


def main(arguments: list[str] | None = None) -> int:
    """Measure cases, or write the page; 1 if an element differed."""
    with one_line_errors():
        return _run(arguments)


def _run(arguments: list[str] | None) -> int:
    parser = WordParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases to measure, or with --page the report")
    parser.add_argument("--output", type=Path, help="JSON file of the report")
    parser.add_argument("--page", type=Path, help="page to write the tables into")
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
    require_gpu("bench.mxfp8", with_torch=False)
    from mok_ref.bench.gpu import device_facts

    report: dict[str, Any] = {"device": device_facts(), "rows": []}
    for name in dict.fromkeys(options.names or DEFAULT_CASES):
        report["rows"].append(measure(name, not options.unchecked))
        row = report["rows"][-1]
        times = ", ".join(f"{k} {v:.3f}" for k, v in row["ms"].items())
        print(f"{name}: {row['differing']} of {row['compared']:,} differ; ms: {times}", flush=True)
        if options.output:
            write_whole(options.output, json.dumps(report, indent=1) + "\n")
    return 1 if any(row["differing"] for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
