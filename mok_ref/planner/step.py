"""From a layer to a training step: the other layers, gradient exchange, optimizer.

Only the MoE layers are simulated. The rest is a bound, not a simulation: attention and dense
products run at `OTHER_SHARE` of the sustained rate, gradients are exchanged while backward computes
earlier layers, the optimizer streams its states once.
"""

from __future__ import annotations

from dataclasses import dataclass

from .choice import Choice
from .hardware import Hardware
from .memory import SHARED_STATES
from .models import ModelDescription

OTHER_SHARE = 0.8  # assumption: attention and dense layers against the sustained tensor rate
EXCHANGED_BYTES = 6.0  # per parameter: float32 gradient reduced, bf16 weight gathered


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step by part; `tokens` of all GPUs together."""

    parts: dict[str, float]
    tokens: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def other_seconds(
    model: ModelDescription, hardware: Hardware, tokens: float, sequence: int, tp_size: int
) -> float:
    """Forward and backward of everything but the MoE layers' routed and shared experts."""
    moe_shared = 3.0 * model.hidden_size * model.shared_intermediate_size * model.num_moe_layers
    table = model.vocab_size * model.hidden_size
    products = 6.0 * tokens * (model.replicated_parameters - moe_shared - table)
    heads = model.attention.num_heads * model.attention.head_dim
    scores = 6.0 * tokens * sequence * heads * model.num_layers
    rate = hardware.sustained_bf16_flops * OTHER_SHARE
    return (products + scores) / tp_size / rate


def exchange_seconds(
    model: ModelDescription, hardware: Hardware, choice: Choice, experts: float
) -> float:
    """Gradients reduced and weights gathered among copies: inside domains, then between them.

    experts   owned by one rank in one layer
    """
    owned = model.num_moe_layers * experts * model.expert_parameters / choice.tp_size
    per_domain = max(1, hardware.gpus_per_domain // (choice.ep_size * choice.tp_size))
    seconds = ring_seconds(owned, min(per_domain, choice.dp_size), choice.dp_size, hardware)
    shared = model.replicated_parameters / choice.tp_size
    everywhere = choice.num_gpus
    inside = min(hardware.gpus_per_domain, everywhere)
    return seconds + ring_seconds(shared, inside, everywhere, hardware)


def ring_seconds(parameters: float, inside: int, copies: int, hardware: Hardware) -> float:
    """Reduce-scatter and all-gather among `copies`, `inside` of them in one domain."""
    if copies <= 1:
        return 0.0
    size = parameters * EXCHANGED_BYTES
    seconds = size * (inside - 1) / inside / hardware.link_rate
    domains = -(-copies // inside)
    if domains > 1:
        seconds += size / inside * (domains - 1) / domains / hardware.network_rate
    return seconds


def optimizer_seconds(
    model: ModelDescription, hardware: Hardware, choice: Choice, experts: float
) -> float:
    """AdamW streams gradient, master and both moments: 16 bytes read, 14 written."""
    is_spread = "optimizer" in SHARED_STATES[choice.sharding]
    owned = model.num_moe_layers * experts * model.expert_parameters / choice.tp_size
    owned /= choice.dp_size if is_spread else 1
    shared = model.replicated_parameters / choice.tp_size
    shared /= choice.num_gpus if is_spread else 1
    count = owned + shared
    return count * (16.0 / hardware.read_bytes_per_s + 14.0 / hardware.write_bytes_per_s)


def step_time(
    model: ModelDescription,
    hardware: Hardware,
    choice: Choice,
    layer: tuple[float, float],
    tokens_per_rank: int,
    experts: float,
    sequence: int,
    accumulate: int,
    recompute: bool,
) -> StepTime:
    """One optimizer step of `accumulate` micro-batches; layer = (forward, backward) seconds.

    tokens_per_rank   of one EP rank (a TP group together) in one micro-batch
    """
    forward, backward = layer
    again = 1 if recompute else 0
    other = other_seconds(model, hardware, tokens_per_rank, sequence, choice.tp_size)
    other *= 1.0 + again / 3.0
    exchange = exchange_seconds(model, hardware, choice, experts)
    # the exchange of layer l runs while layers below l compute backward in the last micro-batch
    hides = (model.num_moe_layers * backward + other * 2 / 3) * (1 - 1 / model.num_layers)
    parts = {
        "MoE forward": model.num_moe_layers * forward * (1 + again) * accumulate,
        "MoE backward": model.num_moe_layers * backward * accumulate,
        "attention and dense": other * accumulate,
        "exposed gradient exchange": max(exchange - hides, exchange / model.num_layers),
        "optimizer": optimizer_seconds(model, hardware, choice, experts),
    }
    total = float(tokens_per_rank) * choice.ep_size * choice.dp_size * accumulate
    return StepTime(parts, total)
