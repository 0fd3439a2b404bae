"""mok_ref: a mixture-of-experts layer that has the same bits everywhere."""

from typing import Any

from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.heap import HeapError, LocalHeap, run_ranks
from mok_ref.layer import Context, Gradients, moe_backward, moe_forward
from mok_ref.tensor_core import tc
from mok_ref.testing import digest
from mok_ref.workspace import Workspace

__version__ = "0.1.0"

__all__ = [
    "Context",
    "ExpertWeights",
    "Gradients",
    "HeapError",
    "LocalHeap",
    "MoEConfig",
    "Workspace",
    "compile",
    "digest",
    "moe_backward",
    "moe_forward",
    "run_ranks",
    "tc",
]


def compile(model: Any, hardware: Any = "here", optimization: str = "dev", **options: Any) -> Any:
    """A plan for `hardware` and a trainer that steps here: `mok_ref.planner.compile.compile`."""
    from mok_ref.planner.compile import compile as compile_model

    return compile_model(model, hardware, optimization, **options)
