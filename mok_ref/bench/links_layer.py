"""The whole layer on several GPUs: times, and how much of its communication is hidden.

    hidden = (compute + transfer - fused) / min(compute, transfer)

fused     the layer as it is
compute   the same kernels and barriers, but every address of another rank's rows is replaced by
          this rank's own: the same work, nothing crosses a link
transfer  the kernel's pull and push code alone, at once, on as many remote rows as the busiest
          rank has (mok_ref/bench/links.py); backward moves as many bytes again: dy rows in, dx out
1 means that the longer of the two hides the shorter one wholly, 0 that they follow each other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mok_ref.bench.cases import CASES, BenchCase, routes
from mok_ref.bench.links import BOTH, LinkBench, num_multiprocessors, rows_of
from mok_ref.bench.timing import launches_ms

BF16_CASES = (CASES["qwen3"], BenchCase("dsv3", 4096, 7168, 2048, 256, 8))
LAYER_CASES = {c.name: c for c in (*BF16_CASES, *(case.as_mxfp8() for case in BF16_CASES))}
FORWARD, STEP = "forward", "forward and backward"
FLOPS_OF = {FORWARD: 1, STEP: 3}
OURS, LOCAL, TORCH = "mok_ref", "mok_ref, nothing remote", "torch grouped_mm + NCCL"
OURS_FLOAT32 = "mok_ref, float32 dW"
ROWS_OF_PEERS = (
    "x", "dy", "combine", "d_topk_weights", "x_codes", "x_scales", "dy_codes", "dy_scales",
)  # fmt: skip
ROUNDS, PER_ROUND, WARM = 3, 7, 3


def hidden_share(compute: float, transfer: float, fused: float) -> float:
    """Share of the shorter of compute and transfer that the fused layer hides; 1 if none moves."""
    shorter = min(compute, transfer)
    return (compute + transfer - fused) / shorter if shorter > 0 else 1.0


def remote_rows(everyones_ids: list[np.ndarray], num_experts: int) -> int:
    """Most rows that any rank receives from others, experts in order on R ranks."""
    size = len(everyones_ids)
    local = num_experts // size
    counts = np.zeros((size, size), np.int64)  # [source, owner]
    for source, ids in enumerate(everyones_ids):
        counts[source] = np.bincount(ids[ids >= 0].ravel() // local, minlength=size)
    np.fill_diagonal(counts, 0)
    return int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))


def own_table(table: np.ndarray, rank: int) -> np.ndarray:
    """A peer table (buffers, R) in which every rank's rows are this rank's own."""
    from mok_ref.gpu.params import SYMMETRIC_BUFFERS

    own = table.copy()
    for name in ROWS_OF_PEERS:
        buffer = SYMMETRIC_BUFFERS[name]
        own[buffer] = table[buffer, rank]
    return own


def group_inputs(case: BenchCase, rank: int, size: int) -> Any:
    """`BenchInputs` of one rank: its tokens' routes over all experts, its own experts' weights."""
    import torch

    from mok_ref.bench.peers import make_inputs

    inputs = make_inputs(replace(case, num_experts=case.num_experts // size), 1 + rank)
    ids, weights = routes(case, 1 + rank)
    inputs.case = case
    inputs.topk_ids = torch.from_numpy(ids).cuda()
    inputs.topk_weights = torch.from_numpy(weights).cuda()
    return inputs


def layer_calls(layer: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """Our contender by direction, twice: as it is, and for a time with nothing remote."""

    def step() -> None:
        layer.forward("all")
        layer.backward()

    calls = {FORWARD: lambda: layer.forward("none"), STEP: step}
    return {OURS: calls, LOCAL: calls}


def table_setter(layer: Any) -> Callable[[str], None]:
    """Function that makes the layer a contender: fills its peer table for that name."""
    table = layer.workspace.buffers["peer_table"]
    remote = table.get()
    own = own_table(remote, layer.heap.rank)

    def prepare(name: str) -> None:
        table.set(own if name == LOCAL else remote)

    return prepare


def time_calls(
    heap: Any,
    calls: dict[str, Callable[[], Any]],
    slowest: Callable[[float], float],
    prepare: Callable[[str], None],
) -> dict[str, float]:
    """Median milliseconds on the slowest rank: rounds in which the contenders follow each other in
    one random order, the same everywhere; calls queued, measured one by one with events."""
    rng = np.random.default_rng(0)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name in rng.permutation(list(calls)):
            prepare(name)
            heap.host_barrier("timing")
            times = launches_ms(calls[name], PER_ROUND, warm=WARM)
            if number:  # the first round warms everything up
                samples[name] += times
    prepare(OURS)
    heap.check()
    return {name: slowest(float(np.median(found))) for name, found in samples.items()}


def bench_layer(
    case: BenchCase,
    heap: Any,
    slowest: Callable[[float], float],
    group: Any,
    report: dict[str, Any],
) -> None:
    """Time one case on the heap's ranks; adds to report's layers and hidden. Collective.

    MXFP8 runs by itself: torch's layer has no such experts, and rows travel as codes and scales one
    way only, which the transfer kernel does not measure.
    """
    from mok_ref.bench.gpu import OurLayer
    from mok_ref.bench.links_peers import torch_calls
    from mok_ref.bench.peers import relative_error

    inputs = group_inputs(case, heap.rank, heap.size)
    layer = OurLayer(inputs, "bf16", heap=heap)
    calls = layer_calls(layer)
    is_bf16 = case.dtype == "bf16"
    if is_bf16:
        calls[TORCH] = torch_calls(inputs, group, heap.size)
        error = relative_error(_as_torch(layer.forward("none")), calls[TORCH][FORWARD]())
        report["torch_error"][f"{case.name} R {heap.size}"] = slowest(error)
    found: dict[tuple[str, str], float] = {}
    for direction in (FORWARD, STEP):
        times = time_calls(
            heap, {n: c[direction] for n, c in calls.items()}, slowest, table_setter(layer)
        )
        found |= {(name, direction): ms for name, ms in times.items()}
    if heap.size > 1 and is_bf16:
        report["hidden"] += hidden_rows(case, heap, inputs, found, slowest)
    layer.close()
    del calls, layer
    free_memory()
    layer = OurLayer(inputs, "float32", heap=heap)
    ours = {OURS: layer_calls(layer)[OURS][STEP]}
    found[OURS_FLOAT32, STEP] = time_calls(heap, ours, slowest, lambda name: None)[OURS]
    report["layers"] += [layer_row(case, heap.size, *key, ms) for key, ms in found.items()]
    del ours
    layer.close()
    del layer, inputs
    free_memory()


def check_layer(case: BenchCase, heap: Any, report: dict[str, Any]) -> None:
    """Bits of this rank's outputs and gradients against the portable kernels. Collective."""
    from mok_ref.bench.check import check_bits
    from mok_ref.bench.gpu import OurLayer

    layer = OurLayer(group_inputs(case, heap.rank, heap.size), heap=heap)
    report["bits"][f"{case.name}, R {heap.size}, rank {heap.rank}"] = check_bits(layer, 0)
    layer.close()
    del layer
    free_memory()


def hidden_rows(
    case: BenchCase,
    heap: Any,
    inputs: Any,
    found: dict[tuple[str, str], float],
    slowest: Callable[[float], float],
) -> list[dict[str, Any]]:
    """Both directions of one case: compute, transfer, fused, and the share that is hidden."""
    ids = inputs.topk_ids.cpu().numpy()
    blocks = heap.exchange(ids.tobytes(), "routes")
    everyones = [np.frombuffer(block, ids.dtype).reshape(ids.shape) for block in blocks]
    rows = remote_rows(everyones, case.num_experts)
    whole = rows_of(2 * case.hidden_size * rows, case.hidden_size)
    bench = LinkBench(heap, case.hidden_size, whole)
    bench.set_rows(whole)
    once = slowest(bench.milliseconds(BOTH, num_multiprocessors()))
    bench.close()
    result = []
    for direction, times in ((FORWARD, 1), (STEP, 2)):
        parts = (found[LOCAL, direction], times * once, found[OURS, direction])
        result.append(
            {
                "case": case.name,
                "R": heap.size,
                "direction": direction,
                "remote_bytes": 2 * times * 2 * case.hidden_size * rows,
                **dict(zip(("compute_ms", "transfer_ms", "fused_ms"), parts, strict=True)),
                "hidden": hidden_share(*parts),
            }
        )
    return result


def layer_row(
    case: BenchCase, size: int, contender: str, direction: str, ms: float
) -> dict[str, Any]:
    """A line of the report: one contender on R = `size` ranks."""
    tflops = FLOPS_OF[direction] * case.flops(FORWARD) / ms / 1e9
    return {
        "case": case.name,
        "T": case.num_tokens,
        "H": case.hidden_size,
        "I": case.intermediate_size,
        "E": case.num_experts,
        "K": case.top_k,
        "dtype": case.dtype,
        "R": size,
        "contender": contender,
        "direction": direction,
        "ms": ms,
        "tflops": tflops,
    }


def free_memory() -> None:
    """Give what is no longer used back to the device: CuPy and torch keep blocks apart."""
    import cupy
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()


def _as_torch(bits: Any) -> Any:
    """A CuPy array of bf16 bits as a torch tensor on the same memory."""
    import torch

    return torch.from_dlpack(bits.view(np.int16)).view(torch.bfloat16)
