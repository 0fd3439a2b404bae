"""Others that do the same job on one GPU: dense cuBLAS, torch pipelines, and what is installed.

All of them take the torch tensors of `BenchInputs`. A peer that cannot be imported is left out and
named in the report.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from mok_ref.bench.cases import BenchCase, routes


@dataclass
class BenchInputs:
    """Random bf16 data of one case on the GPU, as torch tensors."""

    case: BenchCase
    x: Any  # (T, H)
    dy: Any  # (T, H)
    w_gate_up: Any  # (E, 2I, H): gate rows, then up rows
    w_down: Any  # (E, H, I)
    topk_ids: Any  # (T, K) int32
    topk_weights: Any  # (T, K) float32


def make_inputs(case: BenchCase, seed: int = 1) -> BenchInputs:
    """Normal activations, weights scaled by 1/sqrt(fan in)."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        return values.mul_(scale)

    hidden, inner, experts = case.hidden_size, case.intermediate_size, case.num_experts
    ids, weights = routes(case, seed)
    return BenchInputs(
        case,
        normal(case.num_tokens, hidden),
        normal(case.num_tokens, hidden),
        normal(experts, 2 * inner, hidden, scale=hidden**-0.5),
        normal(experts, hidden, inner, scale=inner**-0.5),
        torch.from_numpy(ids).cuda(),
        torch.from_numpy(weights).cuda(),
    )


# --------------------------------------------------------------------------- dense cuBLAS


def dense(inputs: BenchInputs) -> dict[str, Callable[[], Any]]:
    """The products of one big expert with the same FLOPs: what bare cuBLAS needs."""
    import torch

    rows, case = inputs.case.num_rows, inputs.case
    gate_up, down = inputs.w_gate_up[0], inputs.w_down[0]

    def random(columns: int) -> Any:
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

    x, h = random(case.hidden_size), random(case.intermediate_size)
    dy, d_gate_up = random(case.hidden_size), random(2 * case.intermediate_size)

    def forward() -> None:
        torch.matmul(x, gate_up.T)
        torch.matmul(h, down.T)

    def backward() -> None:
        torch.matmul(dy, down)
        torch.matmul(d_gate_up, gate_up)
        torch.matmul(dy.T, h)
        torch.matmul(d_gate_up.T, x)

    return {"forward": forward, "backward": backward}


# --------------------------------------------------------------------------- torch pipeline


def torch_layer(x: Any, w_gate_up: Any, w_down: Any, weights: Any, ids: Any) -> Any:
    """sort, gather, grouped product, SiLU * up, grouped product, un-permute, weighted sum."""
    import torch
    from torch.nn import functional

    num_tokens, top_k = ids.shape
    expert, order = ids.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(num_tokens * top_k, device=x.device)
    experts = torch.arange(w_down.shape[0], device=x.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    rows = x[order // top_k]
    gate, up = torch._grouped_mm(rows, w_gate_up.transpose(1, 2), offs=ends).chunk(2, 1)
    y = torch._grouped_mm(functional.silu(gate) * up, w_down.transpose(1, 2), offs=ends)
    slots = y[inverse].view(num_tokens, top_k, -1)
    return (slots * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def torch_pipeline(inputs: BenchInputs, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Forward without a graph; backward alone, through autograd."""
    import torch

    leaves = [
        t.detach().clone().requires_grad_()
        for t in (inputs.x, inputs.w_gate_up, inputs.w_down, inputs.topk_weights)
    ]
    layer: Callable[..., Any] = torch_layer
    if compiled:
        import torch._functorch.config as functorch_config

        functorch_config.donated_buffer = False  # so that backward can run again
        layer = torch.compile(torch_layer, dynamic=False)
    out = layer(*leaves, inputs.topk_ids)

    def forward() -> Any:
        with torch.no_grad():
            return layer(*leaves, inputs.topk_ids)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, inputs.dy, retain_graph=True)

    return {"forward": forward, "backward": backward}


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same call replayed from a CUDA graph (what small batches are served with)."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# --------------------------------------------------------------------------- SonicMoE


def sonic(inputs: BenchInputs) -> dict[str, Callable[[], Any]]:
    """SonicMoE's training forward and backward, given top-k (package sonic-moe)."""
    import torch
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import (
        TC_topk_router_metadata_triton,
        _DownProjection,
        _UpProjection,
    )

    _shorten_sonic_tuning()
    case = inputs.case
    num_experts, inner, hidden = case.num_experts, case.intermediate_size, case.hidden_size
    rows, tokens = case.num_rows, case.num_tokens
    interleaved = inputs.w_gate_up.view(num_experts, 2, inner, hidden).transpose(1, 2)
    w_up = interleaved.reshape(num_experts, 2 * inner, hidden).permute(1, 2, 0)
    leaves = [
        inputs.x.detach().clone().requires_grad_(),
        w_up.requires_grad_(),
        inputs.w_down.detach().clone().permute(1, 2, 0).requires_grad_(),
        inputs.topk_weights.detach().clone().requires_grad_(),
    ]
    ids = inputs.topk_ids.to(torch.int32)

    def metadata() -> tuple[Any, ...]:
        def empty(count: int) -> Any:
            return torch.empty(count, dtype=torch.int32, device="cuda")

        scatter, reverse, gather = empty(rows), empty(rows), empty(rows)
        frequency, offset = empty(num_experts), empty(num_experts + 1)
        TC_topk_router_metadata_triton(
            ids, num_experts, frequency, offset, gather, scatter, reverse
        )
        return offset, gather, scatter, reverse

    def layer() -> Any:
        offset, gather, scatter, reverse = metadata()
        swiglu = ActivationType.SWIGLU
        shape = (rows, case.top_k)
        a, h = _UpProjection.apply(
            leaves[0], leaves[1], None, offset, *shape, gather, scatter, reverse, None, False,
            swiglu, False, False,
        )  # fmt: skip
        return _DownProjection.apply(
            a, h, leaves[2], None, leaves[3], offset, tokens, case.top_k, gather, scatter, reverse,
            None, False, swiglu,
        )  # fmt: skip

    out = layer()
    return {
        "forward": layer,
        "backward": lambda: torch.autograd.grad(out, leaves, inputs.dy, retain_graph=True),
    }


def _shorten_sonic_tuning() -> None:
    """Its tuners keep all their candidates; those of the sum over slots, 50 and more, are timed for
    about 20 ms each instead of 125."""
    import triton
    from quack.cute_dsl_utils import get_max_active_clusters
    from sonicmoe.functional.reduction_over_k_gather import token_gather_sum_kernel

    for size in (1, 2):  # slow at first, which a tuner would take for kernels yet to be compiled
        get_max_active_clusters(size)
    token_gather_sum_kernel._do_bench = partial(triton.testing.do_bench, warmup=3, rep=15)


# --------------------------------------------------------------------------- Liger


def liger(inputs: BenchInputs) -> dict[str, Callable[[], Any]]:
    """Liger's fused layer in Triton, given top-k (package liger-kernel); it tunes itself unless
    LIGER_FUSED_MOE_AUTOTUNE=0."""
    import torch
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    leaves = [
        t.detach().clone().requires_grad_()
        for t in (inputs.x, inputs.w_gate_up, inputs.w_down, inputs.topk_weights)
    ]

    def layer() -> Any:
        x, w_gate_up, w_down, weights = leaves
        return LigerFusedMoEFunction.apply(x, w_gate_up, w_down, inputs.topk_ids, weights)

    out = layer()
    return {
        "forward": layer,
        "backward": lambda: torch.autograd.grad(out, leaves, inputs.dy, retain_graph=True),
    }


# --------------------------------------------------------------------------- all of them


def relative_error(actual: Any, expected: Any) -> float:
    """||a - b|| / ||b|| in float32, a sanity check of a peer (never of this layer's bits)."""
    a, b = actual.float(), expected.float()
    return float(((a - b).norm() / b.norm()).item())


PEERS: dict[str, Callable[[BenchInputs], dict[str, Callable[[], Any]]]] = {
    "dense cuBLAS": dense,
    "torch eager": lambda inputs: torch_pipeline(inputs, compiled=False),
    "torch compiled": lambda inputs: torch_pipeline(inputs, compiled=True),
    "SonicMoE": sonic,
    "Liger": liger,
}
PACKAGES = {  # all others: torch
    "SonicMoE": ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl"),
    "Liger": ("liger-kernel", "triton"),
}


def software_of(name: str) -> str:
    """A peer's packages with their versions, and how it was tuned where it tunes itself.

    Raises: ImportError when a package is not installed.
    """
    versions = ", ".join(
        f"{package} {version(package)}" for package in PACKAGES.get(name, ("torch",))
    )
    if name == "Liger":
        tuned = os.environ.get("LIGER_FUSED_MOE_AUTOTUNE", "1") != "0"
        return f"{versions}, {'its own tuner' if tuned else 'LIGER_FUSED_MOE_AUTOTUNE=0'}"
    return f"{versions}, its own tuner, no candidate left out" if name == "SonicMoE" else versions
