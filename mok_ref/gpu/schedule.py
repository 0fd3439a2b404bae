"""Launches of the kernels around the products: staging, schedule, epilogues
(cuda_src/support.cu)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.gpu.compiler import load_kernel
from mok_ref.gpu.params import SCHEDULE_INFO, by_value
from mok_ref.gpu.workspace import CHUNK_TOKENS
from mok_ref.schedule import Schedule

SOURCE = "support.cu"
THREADS = 256
MAX_CTAS = 132 * 8
SMEM_LIMIT = 227 * 1024

__all__ = [
    "CHUNK_TOKENS",
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
        "stage_inputs", "stage_dy", "gather_routes", "schedule_count", "schedule_scan",
        "schedule_fill", "combine_forward_8", "combine_forward_1", "dispatch_backward_8",
        "dispatch_backward_1", "dispatch_d_weights",
    ):  # fmt: skip
        _ = _kernel(name, _schedule_smem(workspace)[1] if name in _WARP_WORDS else 0).num_regs
    workspace.heap.warm_up()


_WARP_WORDS = ("schedule_count", "schedule_fill")


def launch_stage_inputs(workspace: Any, params: np.ndarray) -> None:
    """The caller's arrays into this rank's symmetric buffers; ids and weights are checked."""
    words = int(params["num_tokens"]) * max(int(params["hidden_size"]) // 8, int(params["top_k"]))
    _kernel("stage_inputs")((_ctas(words),), (THREADS,), (by_value(params),))


def launch_stage_dy(workspace: Any, params: np.ndarray, back: np.ndarray) -> None:
    """dy into its symmetric buffer."""
    words = int(params["num_tokens"]) * int(params["hidden_size"]) // 8
    _kernel("stage_dy")((_ctas(words),), (THREADS,), (by_value(params), by_value(back)))


def launch_schedule(workspace: Any, params: np.ndarray) -> None:
    """Gather all ranks' routes and build this rank's tables; after a barrier between ranks."""
    sizes, size = workspace.sizes, workspace.heap.size
    words = sizes.max_tokens * workspace.config.top_k
    blocks = 1 if size == 1 else max(1, min(32, -(-words // (4 * THREADS))))
    block = by_value(params)
    _kernel("gather_routes")((blocks, size), (THREADS,), (block,))
    warps, smem = _schedule_smem(workspace)
    chunks = sizes.segments * sizes.chunks
    tasks = chunks + int(params["num_local_experts"])
    _kernel("schedule_count", smem)(
        (-(-chunks // warps),), (32 * warps,), (block,), shared_mem=smem
    )
    _kernel("schedule_scan")((1,), (1024,), (block,))
    _kernel("schedule_fill", smem)((-(-tasks // warps),), (32 * warps,), (block,), shared_mem=smem)


def launch_combine(workspace: Any, params: np.ndarray) -> None:
    """combine_forward: y from the rank's own combine buffer; after a barrier between ranks."""
    vector = _vector(params)
    words = int(params["num_tokens"]) * int(params["hidden_size"]) // vector
    if words:
        _kernel(f"combine_forward_{vector}")(
            (-(-words // THREADS),), (THREADS,), (by_value(params),)
        )


def dispatch_d_weights(workspace: Any, params: np.ndarray, back: np.ndarray) -> None:
    """d_topk_weights of this rank's tokens; after a barrier between ranks."""
    words = int(params["num_tokens"]) * int(params["top_k"])
    if words:
        _kernel("dispatch_d_weights")(
            (_ctas(words),), (THREADS,), (by_value(params), by_value(back))
        )


def launch_dispatch_backward(workspace: Any, params: np.ndarray, back: np.ndarray) -> None:
    """dispatch_backward: dx from the rank's own combine buffer; after a barrier between ranks."""
    vector = _vector(params)
    words = int(params["num_tokens"]) * int(params["hidden_size"]) // vector
    if words:
        _kernel(f"dispatch_backward_{vector}")(
            (-(-words // THREADS),), (THREADS,), (by_value(params), by_value(back))
        )


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


def _kernel(name: str, smem_bytes: int = 0) -> Any:
    return load_kernel(SOURCE, name, (), smem_bytes)


def _ctas(words: int) -> int:
    return max(1, min(MAX_CTAS, -(-words // THREADS)))


def _vector(params: np.ndarray) -> int:
    """Columns per thread: 8 where rows are multiples of 16 bytes."""
    return 8 if int(params["hidden_size"]) % 8 == 0 else 1


def _schedule_smem(workspace: Any) -> tuple[int, int]:
    """(warps per CTA, dynamic shared memory): one counter per warp and local expert.

    Raises: ValueError when a rank holds more experts than one warp's counters can hold.
    """
    per_warp = 4 * max(1, workspace.config.num_local_experts(workspace.heap.rank))
    if per_warp > SMEM_LIMIT:
        raise ValueError(f"a rank must own at most {SMEM_LIMIT // 4} experts, got {per_warp // 4}")
    warps = max(1, min(4, 48 * 1024 // per_warp))
    return warps, warps * per_warp
