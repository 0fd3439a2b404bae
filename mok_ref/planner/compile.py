"""`mok_ref.compile`: from a declarative description to a plan and a trainer that steps.

The plan is for the machine that is named; the trainer runs on what is at hand: virtual CPU ranks,
or this process's rank under mpiexec. Because the layer's bits do not depend on ranks, batches or
placement, a step here is the step of the planned machine, bit for bit (row order canonical).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import require
from .hardware import Hardware
from .models import ModelDescription, load_model
from .plan import Plan, make_plan, moe_config_options

OPTIMIZATIONS = ("dev", "max")
BYTES_PER_PARAMETER = 18.0  # bf16 value, float32 master and two moments, float32 gradient
BYTE_VOCABULARY = 256
MOST_VIRTUAL_RANKS = 4
GPU_NAMES = (
    ("GB300", "gb300-nvl72"),
    ("GB200", "gb200-nvl72"),
    ("B300", "b300"),
    ("H200", "h200"),
    ("H100", "h100"),
)


@dataclass
class Compiled:
    """A plan, and a trainer that is built when its first step is asked for.

    step(batch)   forward, backward, optimizer; batch (B, S + 1) byte values or None: the
                  trainer's own text. Returns the step's record (loss, its bits, balance, ...).
    close()       gives the trainer's memory back; also as a context manager
    """

    plan: Plan
    model: ModelDescription
    optimization: str
    seed: int
    batch: int
    sequence: int
    steps: int
    ranks: int | None
    arithmetic: str
    text: Path | None
    tuned: list[Any] = field(default_factory=list)
    _trainer: Any = None

    @property
    def trainer(self) -> Any:
        """The trainer, built on first use.

        Raises: ValueError if this description cannot be trained here, saying why.
        """
        if self._trainer is None:
            self._trainer = build_trainer(self)
        return self._trainer

    def step(self, batch: np.ndarray | None = None) -> dict[str, Any]:
        """One training step on whatever is at hand."""
        trainer = self.trainer  # first: says why a description cannot be trained here
        if batch is not None:
            batch = checked_batch(batch, self.batch, self.sequence)
        record: dict[str, Any] = trainer.step(batch)
        return record

    def config_options(self) -> dict[str, Any]:
        """Arguments of `mok_ref.MoEConfig` for the planned machine."""
        return moe_config_options(self.plan)

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def compile(
    model: str | Path | Mapping[str, Any] | ModelDescription,
    hardware: str | Path | Hardware = "here",
    optimization: str = "dev",
    seed: int = 0,
    *,
    tokens: int | None = None,
    gpus: int | None = None,
    batch: int = 4,
    sequence: int = 64,
    steps: int = 100,
    ranks: int | None = None,
    arithmetic: str = "exact",
    text: Path | None = None,
    **options: Any,
) -> Compiled:
    """Plan `model` for `hardware` and prepare a trainer for what is at hand.

    model          name, TOML file, dict or ModelDescription: layers, experts, routing options
    hardware       name or TOML file of the planned machine; "here": the GPU at hand, else an H200
    optimization   "dev": one candidate simulated, nothing measured, seconds; "max": the best few
                   simulated, and the layer's batches measured here for the trainer
    tokens         per GPU and micro-batch on the planned machine (default: batch * sequence)
    batch, sequence, steps, ranks, arithmetic, text   of the trainer; ranks None: chosen here
    options        further options of `plan.make_plan` (routing, dtype, ep_size, ...)
    Raises: ValueError naming the argument.
    """
    require(
        optimization in OPTIMIZATIONS,
        f"optimization must be one of {', '.join(OPTIMIZATIONS)}, got {optimization!r}",
    )
    require(batch >= 1, f"batch must be at least 1, got {batch=}")
    description = load_model(model)
    machine = machine_here() if hardware == "here" else hardware
    if hardware == "here" and gpus is None:
        gpus = 1
    plan = make_plan(
        description,
        machine,
        tokens or batch * sequence,
        gpus,
        num_simulated=1 if optimization == "dev" else 3,
        seed=seed,
        sequence=sequence,
        **options,
    )
    made = Compiled(
        plan, description, optimization, seed, batch, sequence, steps, ranks, arithmetic, text
    )
    if optimization == "max" and trainable_reason(description) is None:
        made.tuned = tune_here(made)
    return made


def machine_here() -> str:
    """The description that fits the GPU at hand; an H200 where there is none."""
    try:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    except Exception:  # no CuPy, no driver, no device: each raises its own kind
        return "h200"
    for part, hardware in GPU_NAMES:
        if part in name:
            return hardware
    return "h200"


def trainable_reason(model: ModelDescription) -> str | None:
    """Why the byte-level trainer cannot train this description here; None if it can."""
    if model.vocab_size not in (0, BYTE_VOCABULARY):
        return f"vocab_size must be {BYTE_VOCABULARY} (bytes) to train here, got {model.vocab_size}"
    if model.num_dense_layers:
        return f"num_dense_layers must be 0 to train here, got {model.num_dense_layers}"
    if model.attention.kv_lora_rank:
        return f"kv_lora_rank must be 0 to train here, got {model.attention.kv_lora_rank}"
    need, have = model.num_parameters * BYTES_PER_PARAMETER, physical_memory()
    if need > have:
        return (
            f"model must fit this machine's memory to train here, got {need / 1e9:.0f} GB of "
            f"states in {have / 1e9:.0f} GB"
        )
    return None


def physical_memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return 8e9


def checked_batch(batch: np.ndarray, size: int, sequence: int) -> np.ndarray:
    """Refuse what the model would misread.

    Raises: ValueError naming the argument, the rule and the value.
    """
    batch = np.asarray(batch)
    require(
        batch.shape == (size, sequence + 1) and batch.dtype.kind in "iu",
        f"batch must be integers of shape ({size}, {sequence + 1}), got {batch.dtype} "
        f"{batch.shape}",
    )
    require(
        bool((batch >= 0).all() and (batch < BYTE_VOCABULARY).all()),
        f"batch must hold bytes 0..{BYTE_VOCABULARY - 1}, got {batch.min()}..{batch.max()}",
    )
    return batch.astype(np.int64)


def train_config(made: Compiled) -> Any:
    """The training configuration that this description stands for."""
    from mok_ref.routing import RoutingOptions
    from mok_ref.training.parameters import ModelConfig
    from mok_ref.training.router import RouterConfig
    from mok_ref.training.trainer import TrainConfig

    model, routing = made.model, made.model.routing
    options = RoutingOptions(
        model.top_k,
        routing.score,
        num_groups=routing.num_groups,
        keep_groups=routing.keep_groups if routing.num_groups > 1 else None,
        renormalize=routing.renormalize,
        scale=routing.scale,
    )
    options.check_num_experts(model.num_experts)
    inner = ModelConfig(
        sequence=made.sequence,
        hidden=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.attention.num_heads or 1,
        intermediate=model.intermediate_size,
        num_experts=model.num_experts,
        shared_intermediate=model.shared_intermediate_size,
        router=RouterConfig(options=options),
        arithmetic=made.arithmetic,
        minibatch=made.tuned[0].minibatch if made.tuned else None,
        macrobatch=made.tuned[0].macrobatch if made.tuned else None,
    )
    return TrainConfig(model=inner, steps=made.steps, batch=made.batch, seed=made.seed)


def build_trainer(made: Compiled) -> Any:
    """A trainer on the ranks at hand."""
    reason = trainable_reason(made.model)
    require(reason is None, str(reason))
    from mok_ref.launch import under_mpiexec
    from mok_ref.training.data import load_text

    config, text = train_config(made), load_text(made.text)
    if under_mpiexec():
        return MpiTrainer(config, text, made.ranks)
    return VirtualTrainer(config, text, made.ranks or ranks_here(made))


def ranks_here(made: Compiled) -> int:
    """The planned EP size where that many virtual ranks are sensible, else fewer. Same bits."""
    most = min(made.plan.chosen.ep_size, MOST_VIRTUAL_RANKS, made.batch, made.model.num_experts)
    return max(1, most)


class VirtualTrainer:
    """One `Trainer` per virtual rank, kept between steps; every step runs one thread per rank."""

    def __init__(self, config: Any, text: Any, ranks: int) -> None:
        from mok_ref.heap.local import LocalWorld
        from mok_ref.training.trainer import Trainer

        self.world, self.ranks = LocalWorld(ranks), ranks
        self.trainers = self._on_all(lambda heap: Trainer(config, heap, text))

    def _on_all(self, function: Any) -> list[Any]:
        from mok_ref.heap.local import run_on_world

        return run_on_world(self.world, function)

    def step(self, batch: np.ndarray | None = None) -> dict[str, Any]:
        records = self._on_all(lambda heap: self.trainers[heap.rank].step(batch))
        record: dict[str, Any] = records[0]
        return record

    def close(self) -> None:
        self._on_all(lambda heap: self.trainers[heap.rank].close())


class MpiTrainer:
    """This process's rank of a run under mpiexec."""

    def __init__(self, config: Any, text: Any, ranks: int | None) -> None:
        from mok_ref.heap.mpi import MpiSharedHeap
        from mok_ref.training.trainer import Trainer

        self.heap = MpiSharedHeap()
        self.ranks = self.heap.size
        require(
            ranks in (None, self.ranks),
            f"ranks must equal the number of processes, got {ranks=}, processes={self.ranks}",
        )
        self.trainer = Trainer(config, self.heap, text)

    def step(self, batch: np.ndarray | None = None) -> dict[str, Any]:
        record: dict[str, Any] = self.trainer.step(batch)
        return record

    def close(self) -> None:
        self.trainer.close()
        self.heap.close()


def tune_here(made: Compiled) -> list[Any]:
    """Measure batches of the trainer's layer, as `mok-ref tune --device cpu` does."""
    from mok_ref.config import MoEConfig

    from .tune import tune

    model = made.model
    ranks = made.ranks or ranks_here(made)
    require(
        model.num_experts % ranks == 0,
        f"num_experts must be divisible by ranks, got num_experts={model.num_experts}, {ranks=}",
    )
    config = MoEConfig(
        model.hidden_size,
        model.intermediate_size,
        model.num_experts,
        model.top_k,
        ranks,
        arithmetic=made.arithmetic,
    )
    tokens = max(16, made.batch * made.sequence // ranks)
    return tune(config, tokens, repeats=3, seed=made.seed)
