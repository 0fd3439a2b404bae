"""mok_ref: a mixture-of-experts layer that has the same bits everywhere."""

from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.heap import HeapError, LocalHeap, run_ranks
from mok_ref.layer import Context, Gradients, moe_backward, moe_forward
from mok_ref.tensor_core import tc
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
    "moe_backward",
    "moe_forward",
    "run_ranks",
    "tc",
]
