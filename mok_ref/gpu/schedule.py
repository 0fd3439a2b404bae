"""Launches of the kernels around the products: staging, schedule, epilogues
(cuda_src/support.cu).

`params` and `back` are the parameter blocks of one step; what is launched for them is prepared at
their first use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.launch import NUM_MULTIPROCESSORS, Launch, ParamBlock, enqueue
from mok_ref.gpu.params import SCHEDULE_INFO
from mok_ref.schedule import Schedule

SOURCE = "support.cu"
THREADS = 256
MAX_CTAS = 8 * NUM_MULTIPROCESSORS

__all__ = [
    "dispatch_d_weights",
    "launch_combine",
    "launch_dispatch_backward",
    "launch_schedule",
    "launch_stage_dy",
    "launch_stage_inputs",
    "read_schedule",
    "warm_up",
]


def warm_up(workspace: Any) -> None:
    """Compile and load every kernel of a step, so that no rank waits for another one's compiler."""
    for name in (
        "stage_inputs", "stage_dy", "gather_routes", "combine_forward_8", "combine_forward_1",
        "dispatch_backward_8", "dispatch_backward_1", "dispatch_d_weights",
    ):  # fmt: skip
        _ = load_kernel(SOURCE, name).num_regs
    for name, lists in zip(_SCHEDULE_KERNELS, _schedule_shape(workspace)[1:], strict=True):
        _ = load_kernel(SOURCE, name, (), lists).num_regs
    workspace.heap.warm_up()


def launch_stage_inputs(workspace: Any, params: ParamBlock, stream: Any) -> None:
    """Several ranks: the caller's arrays into this rank's symmetric buffers, checked on the way.

    One rank alone stages nothing: its schedule reads routes from the caller's arrays, the layer its
    tokens.
    """
    if workspace.heap.size == 1:
        return

    def build() -> list[Launch]:
        copy_x = np.int32(workspace.config.dtype == "bf16")
        words = _staged_words(params, workspace.config.top_k)
        return [_launch("stage_inputs", (_ctas(words),), THREADS, params, copy_x)]

    enqueue(params, "stage_inputs", stream, build)


def launch_stage_dy(workspace: Any, params: ParamBlock, back: ParamBlock, stream: Any) -> None:
    """dy where every rank reads it: in its symmetric buffer, or with one rank in place."""

    def build() -> list[Launch]:
        copy = workspace.heap.size > 1 and workspace.config.dtype == "bf16"
        ctas = _ctas(_staged_words(params, 0)) if copy else 1
        return [_launch("stage_dy", (ctas,), THREADS, params, back, np.int32(copy))]

    enqueue(back, "stage_dy", stream, build)


def launch_schedule(workspace: Any, params: ParamBlock, stream: Any) -> None:
    """Gather all ranks' routes and build this rank's tables; after a barrier between ranks.

    Clears the counters that the forward kernel counts with.
    """
    enqueue(params, "schedule", stream, lambda: _schedule_launches(workspace, params))


def _schedule_launches(workspace: Any, params: ParamBlock) -> list[Launch]:
    sizes, size = workspace.sizes, workspace.heap.size
    launches = []
    if size > 1:
        words = sizes.max_tokens * workspace.config.top_k
        blocks = max(1, min(32, -(-words // (4 * THREADS))))
        launches.append(_launch("gather_routes", (blocks, size), THREADS, params))
    threads, *smem = _schedule_shape(workspace)
    ctas = sizes.segments * sizes.blocks
    kernels = list(zip(_SCHEDULE_KERNELS, (ctas, sizes.segments, ctas), smem, strict=True))
    if sizes.segments == 1:
        kernels.pop(1)
    if ctas == 1 and size == 1:  # what the only block counts is all there is
        kernels = kernels[-1:]
    for name, width, smem_bytes in kernels:
        launches.append(_launch(name, (width,), threads, params, smem_bytes=smem_bytes, early=True))
    return launches


def launch_combine(workspace: Any, params: ParamBlock, stream: Any) -> None:
    """combine_forward: y from the rank's own combine buffer; after a barrier between ranks."""
    enqueue(params, "combine", stream, lambda: _epilogue("combine_forward", params))


def dispatch_d_weights(workspace: Any, params: ParamBlock, back: ParamBlock, stream: Any) -> None:
    """d_topk_weights of this rank's tokens; after a barrier between ranks."""

    def build() -> list[Launch]:
        words = int(params["num_tokens"]) * int(params["top_k"])
        return [_launch("dispatch_d_weights", (_ctas(words),), THREADS, params, back)]

    enqueue(back, "d_weights", stream, build)


def launch_dispatch_backward(
    workspace: Any, params: ParamBlock, back: ParamBlock, stream: Any
) -> None:
    """dispatch_backward: dx from the rank's own combine buffer; after a barrier between ranks.

    d_topk_weights too, unless the router's share of dx was made from them before.
    """
    with_d_weights = np.int32(int(back["router_dx"]) == 0)
    arguments = (params, back, with_d_weights)
    enqueue(back, "dx", stream, lambda: _epilogue("dispatch_backward", *arguments))


def _epilogue(name: str, params: ParamBlock, *arguments: Any) -> list[Launch]:
    """One thread for each 8 columns (16 bytes) of a token, or for each column."""
    num_tokens, hidden = int(params["num_tokens"]), int(params["hidden_size"])
    vector = 8 if hidden % 8 == 0 else 1
    columns = hidden // vector
    ctas = -(-columns // THREADS)
    threads = -(-columns // (32 * ctas)) * 32
    if num_tokens == 0:
        return []
    early = name == "combine_forward"
    shape = (num_tokens, ctas), threads
    return [_launch(f"{name}_{vector}", *shape, params, *arguments, early=early)]


def read_schedule(workspace: Any) -> Schedule:
    """The tables as the reference's `Schedule`, for comparison; synchronises."""
    info = np.frombuffer(workspace.info.get().tobytes(), SCHEDULE_INFO)[0]
    rows, blocks = int(info["num_rows"]), int(info["num_row_blocks"])
    return Schedule(
        peer_rank=workspace.peer_rank[:rows].get(),
        peer_row=workspace.peer_row[:rows].get(),
        expert_ids=workspace.config.experts_of(workspace.heap.rank),
        expert_offset=workspace.expert_offset.get().astype(np.int64),
        expert_count=workspace.expert_count.get().astype(np.int64),
        row_block_expert=workspace.row_block_expert[:blocks].get(),
        row_block_valid=workspace.row_block_valid[:blocks].get(),
    )


def _launch(
    name: str,
    grid: tuple[int, ...],
    threads: int,
    *arguments: Any,
    smem_bytes: int = 0,
    early: bool = False,
) -> Launch:
    kernel = load_kernel(SOURCE, name, (), smem_bytes)
    return Launch(kernel, grid, threads, arguments, smem_bytes, early)


def _staged_words(params: ParamBlock, top_k: int) -> int:
    """Threads that have something to copy: 16 bytes of a token, or a route."""
    return int(params["num_tokens"]) * max(int(params["hidden_size"]) // 8, top_k)


def _ctas(words: int) -> int:
    return max(1, min(MAX_CTAS, -(-words // THREADS)))


_SCHEDULE_KERNELS = ("schedule_count", "schedule_turns", "schedule_fill")


def _schedule_shape(workspace: Any) -> tuple[int, int, int, int]:
    """(threads per CTA, dynamic shared memory of each of the schedule kernels)."""
    experts = max(1, workspace.config.num_local_experts(workspace.heap.rank))
    warps = workspace.sizes.block_warps
    return 32 * warps, 4 * experts, 0, 4 * experts * (warps + 3)
