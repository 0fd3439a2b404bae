"""Whether a case fits into memory, asked before anything of it is made."""

from __future__ import annotations

from collections.abc import Iterable

from mok_ref.bench.cases import BenchCase
from mok_ref.config import MoEConfig
from mok_ref.gpu.workspace import workspace_bytes
from mok_ref.runner import memory_bytes

BF16, F32, F64 = 2, 4, 8


def device_bytes(case: BenchCase) -> int:
    """What the bench keeps of a case on the GPU at once, peers not counted.

    Its inputs, and three layers, each with its own copy of W_gate and W_up: with float32 dW, with
    bf16 dW, and on the portable path, whose bits the first one's are compared with.
    Raises: ValueError for a shape that no layer can have.
    """
    config = MoEConfig(
        case.hidden_size, case.intermediate_size, case.num_experts, case.top_k, dtype=case.dtype
    )
    weight = case.num_experts * case.intermediate_size * case.hidden_size
    tokens = case.num_tokens * case.hidden_size
    inputs = BF16 * (2 * tokens + 3 * weight) + (F32 + F32) * case.num_rows
    fast, portable = (
        workspace_bytes(config, 0, case.num_tokens, path=path)["total"]
        for path in ("auto", "portable")
    )
    copies = 3 * 2 * BF16 * weight
    gradients = 3 * (F32 + BF16 + F32) * weight
    return inputs + 2 * fast + portable + copies + gradients


def host_bytes(case: BenchCase) -> int:
    """What drawing its routes takes: scores of every expert for every token, twice."""
    return 2 * F64 * case.num_tokens * case.num_experts


def check_memory(cases: Iterable[BenchCase], free_bytes: int) -> None:
    """Raises: ValueError naming the first case that does not fit.

    free_bytes  of the GPU
    """
    for case in cases:
        for where, needed, free in (
            ("the GPU", device_bytes(case), free_bytes),
            ("the host", host_bytes(case), memory_bytes()),
        ):
            if needed > free:
                raise ValueError(
                    f"cases must fit into {where}'s {free / 2**30:.0f} GiB of memory, "
                    f"got {case.name}, which takes {needed / 2**30:.0f} GiB"
                )
