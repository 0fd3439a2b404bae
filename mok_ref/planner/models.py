"""Model descriptions: what a mixture-of-experts language model is made of, as data.

Files in `data/models/*.toml`, or a user's file or dict in the same form. The planner reads sizes,
`compile` reads the routing too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .errors import parse_toml, read_text, require

DATA = Path(__file__).parent / "data" / "models"
SCORES = ("softmax", "sigmoid")
MOST = 1 << 24  # of any size; of what there is an array of in the planner, less
MOST_OF = {"num_experts": 1 << 16, "top_k": 1 << 10, "num_layers": 1 << 16}


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is no count of plausible size."""
    most = MOST_OF.get(name, MOST)
    is_count = isinstance(value, int) and not isinstance(value, bool)
    require(
        is_count and least <= value <= most,  # type: ignore[operator]
        f"{name} must be an integer in {least}..{most}, got {value!r}",
    )


@dataclass(frozen=True)
class Attention:
    """Heads and, for latent attention (q_lora_rank > 0), the ranks of its compressed parts."""

    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    value_head_dim: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            check_count(f"attention.{f.name}", getattr(self, f.name), 0)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of one layer's attention (projections only; norms are negligible)."""
        heads, dim = self.num_heads, self.head_dim
        if not self.kv_lora_rank:
            return hidden_size * dim * 2 * (heads + self.num_kv_heads)
        query = hidden_size * self.q_lora_rank + self.q_lora_rank * heads * (
            dim + self.rope_head_dim
        )
        key_value = hidden_size * (self.kv_lora_rank + self.rope_head_dim)
        key_value += self.kv_lora_rank * heads * (dim + self.value_head_dim)
        return query + key_value + heads * self.value_head_dim * hidden_size


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts: the options of `mok_ref.routing` that a description may name."""

    score: str = "softmax"
    num_groups: int = 1
    keep_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        known = ", ".join(SCORES)
        require(self.score in SCORES, f"routing.score must be one of {known}, got {self.score!r}")
        for name in ("num_groups", "keep_groups"):
            check_count(f"routing.{name}", getattr(self, name), 1)
        require(
            self.keep_groups <= self.num_groups,
            f"routing.keep_groups must be at most num_groups={self.num_groups}, "
            f"got {self.keep_groups}",
        )
        require(
            isinstance(self.renormalize, bool),
            f"routing.renormalize must be true or false, got {self.renormalize!r}",
        )
        is_number = isinstance(self.scale, (int, float)) and not isinstance(self.scale, bool)
        require(
            is_number and 0 < self.scale < math.inf,
            f"routing.scale must be a finite number above 0, got {self.scale!r}",
        )


@dataclass(frozen=True)
class ModelDescription:
    """H hidden_size, I intermediate_size, E num_experts, K top_k; layers without experts apart."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_layers: int = 1
    num_dense_layers: int = 0
    dense_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    vocab_size: int = 0
    title: str = ""
    source: str = "user"
    attention: Attention = Attention()
    routing: Routing = Routing()

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int":
                check_count(f.name, value, 1 if f.name in REQUIRED else 0)
            elif f.type == "str":
                is_line = isinstance(value, str) and (value.isprintable() or not value)
                require(is_line, f"{f.name} must be one line of text, got {value!r}")
        require(bool(self.name.strip()), "name must not be empty")
        for name, kind in PARTS.items():
            value = getattr(self, name)
            require(isinstance(value, kind), f"{name} must be a table [{name}], got {value!r}")
        require(
            self.num_dense_layers < self.num_layers,
            "num_dense_layers must be below num_layers, got "
            f"num_dense_layers={self.num_dense_layers}, num_layers={self.num_layers}",
        )
        require(
            self.num_experts % self.routing.num_groups == 0,
            "num_experts must be divisible by num_groups, got "
            f"num_experts={self.num_experts}, num_groups={self.routing.num_groups}",
        )

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def all_expert_parameters(self) -> int:
        return self.num_moe_layers * self.num_experts * self.expert_parameters

    @property
    def replicated_parameters(self) -> int:
        """Weights that every data-parallel rank holds: attention, dense and shared MLPs, router,
        embedding and output (untied)."""
        per_layer = self.attention.num_parameters(self.hidden_size)
        dense = 3 * self.hidden_size * self.dense_intermediate_size
        shared = 3 * self.hidden_size * self.shared_intermediate_size
        router = self.hidden_size * self.num_experts
        return (
            self.num_layers * per_layer
            + self.num_dense_layers * dense
            + self.num_moe_layers * (shared + router)
            + 2 * self.vocab_size * self.hidden_size
        )

    @property
    def num_parameters(self) -> int:
        return self.all_expert_parameters + self.replicated_parameters

    @property
    def active_parameters(self) -> int:
        """Weights one token meets, the embedding table apart."""
        chosen = self.num_moe_layers * self.top_k * self.expert_parameters
        return chosen + self.replicated_parameters - self.vocab_size * self.hidden_size


PARTS = {"attention": Attention, "routing": Routing}
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_experts",
    "top_k",
    "num_layers",
)


def known_models() -> list[str]:
    """Names that `load_model` accepts besides paths and dicts."""
    return sorted(path.stem for path in DATA.glob("*.toml"))


def model_from_table(table: Mapping[str, Any], where: str) -> ModelDescription:
    """Build a description from a TOML table or a dict of the same form.

    Raises: ValueError naming an unknown or missing key.
    """
    values = dict(table)
    values.setdefault("name", where)
    try:
        for key, kind in PARTS.items():
            if isinstance(values.get(key), Mapping):
                refuse_unknown(values[key], kind, key)
                values[key] = kind(**values[key])
        refuse_unknown(values, ModelDescription, "model")
        missing = [key for key in REQUIRED[:4] if key not in values]
        require(not missing, f"missing {', '.join(missing)}")
        return ModelDescription(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def refuse_unknown(values: Mapping[str, Any], kind: type, where: str) -> None:
    allowed = {f.name for f in fields(kind)}
    unknown = sorted(set(values) - allowed)
    known = ", ".join(sorted(allowed))
    require(not unknown, f"{where}: unknown {', '.join(unknown)}; known are {known}")


def load_model(model: str | Path | Mapping[str, Any] | ModelDescription) -> ModelDescription:
    """A model by name, from a TOML file, or from a dict.

    Raises: ValueError if it is none of these, or wrong.
    """
    if isinstance(model, ModelDescription):
        return model
    if isinstance(model, Mapping):
        return model_from_table(model, str(model.get("name", "model")))
    path = Path(model)
    if path.suffix != ".toml":
        require(
            str(model) in known_models(),
            f"model must be one of {', '.join(known_models())} or a .toml file, got {str(model)!r}",
        )
        path = DATA / f"{model}.toml"
    require(path.is_file(), f"model file must exist, got {str(path)!r}")
    return model_from_table(parse_toml(read_text(path), path.name), path.stem)
