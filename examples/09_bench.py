"""Time this layer: beside your own one on a GPU, on a CPU against ranks and size.

    python examples/09_bench.py [REPORT.json]

A contender is a function from the benchmark's inputs to two calls. The one below runs expert by
expert; put yours in its place. Its y and dx are compared with this layer's before it is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mok_ref.bench.commands import bench_cuda, bench_on_cpu
from mok_ref.bench.entry import one_line_errors, require_gpu, script_parser
from mok_ref.bench.peers import PEERS, BenchInputs
from mok_ref.heap.protocol import HeapError


def expert_by_expert(inputs: BenchInputs) -> dict[str, Callable[[], Any]]:
    """The layer in torch, a few products per expert."""
    import torch
    from torch.nn import functional

    weights = (inputs.x, inputs.w_gate_up, inputs.w_down, inputs.topk_weights)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in weights]

    def layer() -> Any:
        x, w_gate_up, w_down, topk_weights = leaves
        y = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(len(w_down)):
            token, slot = torch.nonzero(inputs.topk_ids == expert, as_tuple=True)
            gate, up = (x[token] @ w_gate_up[expert].T).chunk(2, 1)
            out = (functional.silu(gate) * up) @ w_down[expert].T
            y = y.index_add(0, token, out * topk_weights[token, slot, None])
        return y.to(x.dtype)

    out = layer()
    return {
        "forward": layer,
        "backward": lambda: torch.autograd.grad(out, leaves, inputs.dy, retain_graph=True),
    }


def main(arguments: list[str]) -> int:
    parser = script_parser(__doc__)
    parser.add_argument(
        "report", nargs="?", type=Path, default=Path("bench.json"),
        metavar="REPORT.json", help="default: %(default)s",
    )  # fmt: skip
    report = parser.parse_args(arguments).report
    try:
        require_gpu("this example on a GPU")
    except (HeapError, ValueError) as why:
        print(f"on the CPU, because {why}")
        bench_on_cpu("64x64x32x8x2,256x64x32x8x2", "1,2", "forward,backward", 2, report, False)
    else:
        PEERS["mine"] = expert_by_expert
        sizes = "dsv3-rank,2048x1024x512x8x2"
        if not bench_cuda(sizes, peers="torch-eager,mine", output=report, bursts=2):
            return 1
    print(f"report written to {report}")
    return 0


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(sys.argv[1:]))
