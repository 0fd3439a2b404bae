"""Memory of one GPU, part by part: weights, optimizer, activations, ring, peer buffers.

    weights      bf16 (2 bytes) that the kernels read
    gradients    float32 (4 bytes): main_grad
    optimizer    float32 master, first and second moment (12 bytes): AdamW
    activations  what forward keeps for backward, of all layers
    ring, peer buffers, tables: one workspace, used by all layers in turn

Every term counts the arrays that this project's kernels and training parts allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .choice import Choice
from .hardware import Hardware
from .models import ModelDescription
from .stages import TILE_ROWS, padded

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2.0, 4.0, 12.0
RESERVE_BYTES = 6e9  # CUDA context, cubins, cuBLAS workspaces and fragmentation: an allowance
ATTENTION_SAVED = 10.0  # bf16 rows of width H kept per token and layer outside the MoE part


@dataclass(frozen=True)
class MemoryReport:
    """Bytes per part for the fullest GPU, and what the machine has."""

    parts: dict[str, float]
    capacity: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


SHARED_STATES: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer",),
    "gradients": ("optimizer", "gradients"),
}


def parameter_bytes(model: ModelDescription, choice: Choice, experts: int) -> dict[str, float]:
    """Weights, gradients and optimizer states of one GPU that owns `experts` per layer.

    Expert states are spread over the dp copies; replicated weights exist on every GPU, so their
    states are spread over all GPUs.
    """
    owned = model.num_moe_layers * experts * model.expert_parameters / choice.tp_size
    shared = model.replicated_parameters / choice.tp_size
    result = {}
    sizes = {
        "weights": WEIGHT_BYTES,
        "gradients": GRADIENT_BYTES,
        "optimizer": OPTIMIZER_BYTES,
    }
    for what, size in sizes.items():
        is_spread = what in SHARED_STATES[choice.sharding]
        result[f"{what} of experts"] = owned * size / (choice.dp_size if is_spread else 1)
        result[f"{what} of the rest"] = shared * size / (choice.num_gpus if is_spread else 1)
    if choice.dtype == "mxfp8":
        result["MXFP8 weights of experts"] = owned * 33 / 32
    return result


def activation_bytes(
    model: ModelDescription, choice: Choice, tokens: float, rows: float, recompute: bool
) -> dict[str, float]:
    """What forward keeps: layer inputs, attention's tensors, gate and up by `save`.

    With `recompute` only the input of each layer stays and everything else is computed again.
    """
    inputs = 2.0 * tokens * model.hidden_size * model.num_layers
    columns = -(-model.intermediate_size // choice.tp_size)
    kept_rows = {"all": rows, "ring": min(rows, choice.macrobatch), "none": 0.0}[choice.save]
    layers = 1 if recompute else model.num_moe_layers
    routed = 4.0 * kept_rows * columns * layers
    shared = 4.0 * tokens * model.shared_intermediate_size * (0 if recompute else layers)
    attention = 0.0 if recompute else ATTENTION_SAVED * inputs
    ids = 8.0 * tokens * model.top_k * model.num_moe_layers
    return {"activations": inputs + attention + ids + shared, "saved gate and up": routed}


def workspace_bytes(
    model: ModelDescription, choice: Choice, tokens: int, max_rows: int
) -> dict[str, float]:
    """Ring, symmetric (peer) buffers and schedule tables of one workspace.

    max_rows   worst case of the schedule: every route of the EP group to this rank. Tables are
               sized for it, buffers of rows are not: that is why routing cannot overflow them.
    """
    hidden, columns = model.hidden_size, -(-model.intermediate_size // choice.tp_size)
    element = 2.0 if choice.dtype == "bf16" else 33 / 32
    ring = choice.macrobatch * (hidden * element + columns * 2.0)
    # backward keeps dy, d_gate, d_up and w*h of the ring's rows as well
    ring_backward = choice.macrobatch * (hidden * element + 3 * columns * 2.0)
    routes = tokens * model.top_k
    peer = 2 * tokens * hidden * 2.0 + routes * hidden * 2.0 + routes * 12.0
    if choice.dtype == "mxfp8":
        peer += 2 * tokens * hidden * 33 / 32
    tables = max_rows * 8.0 + max_rows / TILE_ROWS * 12.0 + choice.ep_size * routes * 4.0
    return {"ring": ring + ring_backward, "peer buffers": peer, "schedule tables": tables}


def memory_report(
    model: ModelDescription,
    hardware: Hardware,
    choice: Choice,
    owner: np.ndarray,
    rows: np.ndarray,
    tokens_per_rank: int,
    recompute: bool = False,
) -> MemoryReport:
    """Memory of the fullest GPU of an EP group.

    owner (E,) placement, rows (R,) padded rows per rank in one layer; tokens per EP rank (of a TP
    group together).
    """
    experts = np.bincount(owner, minlength=choice.ep_size)
    worst = choice.ep_size * tokens_per_rank * model.top_k
    worst += int(experts.max()) * (TILE_ROWS - 1)
    parts = parameter_bytes(model, choice, int(experts.max()))
    parts |= activation_bytes(model, choice, tokens_per_rank, float(rows.max()), recompute)
    parts |= workspace_bytes(model, choice, tokens_per_rank, padded(worst, TILE_ROWS))
    parts["reserve"] = RESERVE_BYTES
    return MemoryReport(parts, hardware.memory_bytes)
