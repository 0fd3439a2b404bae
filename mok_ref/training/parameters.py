"""The parameters of a model: replicated ones in one flat vector, experts by owner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.numerics import BFLOAT16, bf16_to_bits, to_bf16
from mok_ref.routing import RoutingOptions
from mok_ref.training.arithmetic import random_uniform
from mok_ref.training.choosers import LitterOptions, litter_placement
from mok_ref.training.optimizer import Moments, shard_bounds
from mok_ref.training.router import RouterConfig

VOCABULARY = 256
PARTS = ("gate", "up", "down")
FFNS = ("moe", "dense", "ordinary")


@dataclass(frozen=True)
class ModelConfig:
    """A byte-level causal language model.

    ffn  "moe": this project's layer;  "dense": one SwiGLU of width `intermediate` for all tokens;
         "ordinary": a mixture whose sums have no fixed order (the comparison's baseline)
    recompute  keep only the residual stream of every block; the backward computes the rest again
    tensor_parallel  with ffn="dense": cut the SwiGLU over the ranks instead of its tokens
    minibatch, macrobatch  rows of the layer's hand-overs and ring (None: its defaults); same bits
    """

    sequence: int = 64
    hidden: int = 64
    num_layers: int = 2
    num_heads: int = 4
    intermediate: int = 64
    num_experts: int = 8
    shared_intermediate: int = 0
    ffn: str = "moe"
    router: RouterConfig = field(default_factory=RouterConfig)
    arithmetic: str = "exact"
    recompute: bool = False
    tensor_parallel: bool = False
    minibatch: int | None = None
    macrobatch: int | None = None

    def __post_init__(self) -> None:
        if self.ffn not in FFNS:
            raise ValueError(f"ffn must be one of {FFNS}, got ffn={self.ffn!r}")
        if self.sequence < 16 or self.sequence % 16:
            raise ValueError(
                f"sequence must be a positive multiple of 16, got sequence={self.sequence!r}"
            )
        if self.tensor_parallel and (self.ffn != "dense" or self.arithmetic == "float64"):
            raise ValueError(
                f"tensor_parallel needs ffn='dense', got ffn={self.ffn!r}, "
                f"arithmetic={self.arithmetic!r}"
            )
        if self.hidden % self.num_heads:
            raise ValueError(
                f"hidden must be divisible by num_heads, got hidden={self.hidden!r}, "
                f"num_heads={self.num_heads!r}"
            )
        if self.router.litter is not None:
            self.router.litter.litter_size(self.num_experts)

    @property
    def num_logits(self) -> int:
        return self.router.num_logits(self.num_experts)

    def layer_config(self, ep_size: int) -> MoEConfig:
        """The layer's configuration on `ep_size` ranks."""
        return MoEConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.router.num_slots,
            ep_size=ep_size,
            shared_intermediate_size=self.shared_intermediate,
            placement=self.placement(ep_size),
            arithmetic=self.arithmetic,
            minibatch=self.minibatch,
            macrobatch=self.macrobatch,
        )

    def placement(self, ep_size: int) -> tuple[int, ...] | None:
        """Litters whole on a rank (or on neighbours); otherwise experts in order."""
        if self.router.litter is not None:
            owners = litter_placement(self.num_experts, self.router.litter.num_litters, ep_size)
            return tuple(int(r) for r in owners)
        if self.num_experts % ep_size:
            return tuple(int(e * ep_size // self.num_experts) for e in range(self.num_experts))
        return None

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        out["router"]["options"].pop("choice_bias")
        return out

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelConfig:
        values = dict(values)
        check_keys("model", values, [f.name for f in fields(cls)])
        router = dict(values.pop("router"))
        check_keys("model.router", router, [f.name for f in fields(RouterConfig)])
        litter = router.pop("litter")
        options = RoutingOptions(**router.pop("options"))
        chosen = None if litter is None else LitterOptions(**litter)
        return cls(router=RouterConfig(options=options, litter=chosen, **router), **values)


def check_keys(where: str, values: dict[str, Any], known: list[str]) -> None:
    """Raises: ValueError naming what is unknown, and everything that is known."""
    extra = sorted(set(values) - set(known))
    if extra:
        raise ValueError(
            f"{where} must have no other keys than {', '.join(known)}; got {', '.join(extra)}"
        )


def replicated_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters that every rank holds, in ASCII order of their names."""
    h, i = config.hidden, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCABULARY, h),
        "position": (config.sequence, h),
        "unembed": (VOCABULARY, h),
    }
    for layer in range(config.num_layers):
        shapes[f"layer{layer}.attn_out"] = (h, h)
        shapes[f"layer{layer}.attn_qkv"] = (3 * h, h)
        if config.ffn == "dense":
            shapes |= ffn_shapes(f"layer{layer}.ffn_", h, i)
            continue
        shapes[f"layer{layer}.router"] = (config.num_logits, h)
        if config.shared_intermediate:
            shapes |= ffn_shapes(f"layer{layer}.shared_", h, config.shared_intermediate)
    return dict(sorted(shapes.items()))


def ffn_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate": (inner, hidden),
        f"{prefix}up": (inner, hidden),
        f"{prefix}down": (hidden, inner),
    }


def initial_value(config: ModelConfig, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform with variance 1 / fan-in, outputs of blocks smaller by sqrt(2 * layers)."""
    bound = (3.0 / shape[-1]) ** 0.5
    if name in ("embed", "position"):
        bound = 1.0
    if name.endswith(("attn_out", "down")):
        bound /= (2.0 * config.num_layers) ** 0.5
    return random_uniform(f"{seed}/{name}", shape, bound)


def initial_expert(config: ModelConfig, seed: int, layer: int, expert: int, part: str):
    """One expert's matrix: its key names layer and expert, so no rank count matters."""
    h, i = config.hidden, config.intermediate
    shape = (h, i) if part == "down" else (i, h)
    return initial_value(config, seed, f"layer{layer}.expert{expert}.{part}", shape)


@dataclass
class ExpertState:
    """The experts of one layer that this rank owns: masters, moments, number of updates."""

    ids: np.ndarray  # (L,)
    master: dict[str, np.ndarray]  # part -> (L, ...) float32
    moments: dict[str, Moments]  # part -> stacked moments
    updates: np.ndarray  # (L,) int64: steps in which the expert had rows

    def weights(self) -> ExpertWeights:
        """bf16 bits of the masters."""
        return ExpertWeights(*(bf16_to_bits(to_bf16(self.master[p])).view(BFLOAT16) for p in PARTS))

    def values(self) -> ExpertWeights:
        return ExpertWeights(*(to_bf16(self.master[p]) for p in PARTS))


class Parameters:
    """One rank's parameters.

    values   name -> bf16 values (float32) of every replicated parameter
    master   (shard,) float32: this rank's shard of the replicated masters, and its moments
    experts  per layer, this rank's experts
    """

    def __init__(self, config: ModelConfig, seed: int, rank: int, num_ranks: int) -> None:
        self.config, self.seed, self.rank = config, seed, rank
        self.shapes = replicated_shapes(config)
        self.offsets = np.concatenate(
            [[0], np.cumsum([int(np.prod(s)) for s in self.shapes.values()])]
        )
        self.bounds = shard_bounds(int(self.offsets[-1]), num_ranks)
        whole = np.concatenate(
            [initial_value(config, seed, n, s).ravel() for n, s in self.shapes.items()]
        )
        self.set_replicated(whole, np.zeros_like(whole), np.zeros_like(whole), np.ones(2))
        self.values = self.unflatten(to_bf16(whole))
        self.experts: list[ExpertState] = []
        if config.ffn != "dense":
            owned = config.layer_config(num_ranks).experts_of(rank)
            self.experts = [self._fresh_experts(layer, owned) for layer in range(config.num_layers)]

    def _fresh_experts(self, layer: int, owned: np.ndarray) -> ExpertState:
        config, h, i = self.config, self.config.hidden, self.config.intermediate
        empty = {"gate": (0, i, h), "up": (0, i, h), "down": (0, h, i)}
        master = {}
        for part in PARTS:
            own = [initial_expert(config, self.seed, layer, int(e), part) for e in owned]
            master[part] = np.stack(own) if own else np.zeros(empty[part], np.float32)
        moments = {part: Moments.zeros(master[part].shape, stacked=True) for part in PARTS}
        return ExpertState(owned, master, moments, np.zeros(len(owned), np.int64))

    @property
    def shard(self) -> slice:
        return slice(int(self.bounds[self.rank]), int(self.bounds[self.rank + 1]))

    def set_replicated(
        self, master: np.ndarray, m: np.ndarray, v: np.ndarray, powers: np.ndarray
    ) -> None:
        """Keep this rank's shard of whole (P,) vectors."""
        self.master = master[self.shard].copy()
        powers = np.asarray(powers, np.float32)
        self.moments = Moments(m[self.shard].copy(), v[self.shard].copy(), powers)

    def unflatten(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """(P,) -> name -> array (views)."""
        spans = zip(self.shapes.items(), self.offsets[:-1], self.offsets[1:], strict=True)
        return {name: flat[a:b].reshape(shape) for (name, shape), a, b in spans}

    def flatten(self, tensors: dict[str, np.ndarray]) -> np.ndarray:
        """name -> array, in order -> (P,)."""
        return np.concatenate([tensors[name].ravel() for name in self.shapes])

    def owned_experts(self) -> Iterator[tuple[int, int, int]]:
        """(layer, local index, expert id) of everything this rank owns."""
        for layer, state in enumerate(self.experts):
            for local, expert in enumerate(state.ids):
                yield layer, local, int(expert)

    def count(self) -> int:
        """All parameters of the model, experts of all ranks included."""
        config = self.config
        experts = 0 if config.ffn == "dense" else config.num_layers * config.num_experts
        return int(self.offsets[-1]) + experts * 3 * config.hidden * config.intermediate
