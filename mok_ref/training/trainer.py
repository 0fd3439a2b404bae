"""The training loop on one rank: step, monitors, actions, checkpoints (docs/training.md)."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from mok_ref.numerics import add, bf16_to_bits, bits_to_bf16, div, fast_exp, mul, to_bf16
from mok_ref.training.balance import BalanceOptions, balance_loss, load_ratio, update_choice_bias
from mok_ref.training.capacity import CapacityOptions, CapacityState, adapt_capacity
from mok_ref.training.checkpoint import CheckpointOptions
from mok_ref.training.data import ByteText, train_batch, valid_batches
from mok_ref.training.model import (
    ForwardSaved,
    LayerControl,
    Model,
    ModelGradients,
    mean_loss,
)
from mok_ref.training.monitors import (
    ActionOptions,
    MonitorOptions,
    MonitorState,
    find_alarms,
    layer_metrics,
    outliers,
    take_actions,
)
from mok_ref.training.optimizer import (
    AdamWOptions,
    adamw,
    clip_factor,
    learning_rate,
    sqrt,
    square_sum,
    square_sums,
)
from mok_ref.training.parameters import (
    PARTS,
    ModelConfig,
    Parameters,
    check_keys,
    initial_expert,
)
from mok_ref.training.router import save_routes
from mok_ref.training.unlocking import (
    UnlockOptions,
    UnlockState,
    advance_unlocking,
    start_unlocking,
)

Routes = list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class CollapseOptions:
    """A disturbance for experiments: from `step` on, every logit of `expert` is raised."""

    step: int
    expert: int = 0
    strength: float = 4.0


@dataclass(frozen=True)
class TrainConfig:
    """Everything that fixes a run's bits, apart from the text."""

    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 100
    batch: int = 8
    seed: int = 0
    optimizer: AdamWOptions = field(default_factory=AdamWOptions)
    balance: BalanceOptions = field(default_factory=lambda: BalanceOptions(kitten=0.001, z=0.0001))
    capacity: CapacityOptions | None = None
    unlock: UnlockOptions | None = None
    monitor: MonitorOptions = field(default_factory=MonitorOptions)
    actions: ActionOptions = field(default_factory=ActionOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    collapse: CollapseOptions | None = None
    valid_every: int = 50
    valid_batches: int = 4

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise ValueError(
                f"steps and batch must be at least 1, got steps={self.steps}, batch={self.batch}"
            )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainConfig:
        kinds: dict[str, type[Any]] = {
            "optimizer": AdamWOptions,
            "balance": BalanceOptions,
            "capacity": CapacityOptions,
            "unlock": UnlockOptions,
            "monitor": MonitorOptions,
            "actions": ActionOptions,
            "checkpoint": CheckpointOptions,
            "collapse": CollapseOptions,
        }
        known = [f.name for f in fields(cls)]
        check_keys("config", values, known)
        out = {k: v for k, v in values.items() if k not in kinds and k != "model"}
        for name, kind in kinds.items():
            if values[name] is None:
                out[name] = None
                continue
            check_keys(name, values[name], [f.name for f in fields(kind)])
            out[name] = kind(**values[name])
        return cls(model=ModelConfig.from_json(values["model"]), **out)


@dataclass
class RunState:
    """What a run remembers besides its parameters; equal on every rank."""

    step: int
    salt: int  # raised by a rollback, so that the data after it is new
    unlock: UnlockState
    monitor: MonitorState
    capacity: list[CapacityState]  # per layer; entries of foreign experts are not read
    choice_bias: list[np.ndarray]  # per layer (E,) float32
    best_valid: float = float("inf")

    @classmethod
    def start(cls, config: TrainConfig) -> RunState:
        model, layers = config.model, config.model.num_layers
        num_experts = model.num_experts
        options = config.capacity or CapacityOptions()
        return cls(
            step=0,
            salt=0,
            unlock=start_unlocking(config.unlock, num_experts),
            monitor=MonitorState.start(config.balance.kitten, layers, num_experts),
            capacity=[CapacityState.start(num_experts, options) for _ in range(layers)],
            choice_bias=[np.zeros(num_experts, np.float32) for _ in range(layers)],
        )


class Trainer:
    """One rank of a run. Every rank makes one and calls the same methods in the same order."""

    def __init__(
        self, config: TrainConfig, heap: Any, text: ByteText, replay: Routes | None = None
    ) -> None:
        self.config, self.heap, self.text = config, heap, text
        self.parameters = Parameters(config.model, config.seed, heap.rank, heap.size)
        self.model = Model(config.model, heap, config.batch, self.parameters)
        self.exchange = self.model.exchange
        self.state = RunState.start(config)
        self.replay = replay
        self.recorded: Routes = []
        self.record_routes = False

    # ----------------------------------------------------------------------- one step

    def step(self, batch: np.ndarray | None = None) -> dict[str, Any]:
        """Forward, backward, update, watch. Returns this step's record (equal on every rank).

        batch (B, S + 1) byte values, the same on every rank; None: windows of the text
        """
        with self._arithmetic():
            return self._step(batch)

    def _arithmetic(self) -> AbstractContextManager[None]:
        """Long runs without a bit promise use NumPy's own exponential too."""
        return fast_exp() if self.config.model.arithmetic == "fast" else nullcontext()

    def _step(self, batch: np.ndarray | None) -> dict[str, Any]:
        begin = time.perf_counter()
        config, state = self.config, self.state
        key = f"{config.seed}/{state.salt}/batch{state.step}"
        if batch is None:
            batch = train_batch(self.text, key, config.batch, config.model.sequence)
        controls = self._controls()
        saved = self.model.forward(batch, controls)
        self._record(saved)
        grads = self.model.backward(saved, controls)
        rate = learning_rate(config.optimizer, state.step, config.steps)
        record = self._summary(saved, grads, controls)
        record["rate"] = float(rate)
        self._update(grads, rate, saved, record)
        self._watch(saved, record)
        record["step"] = state.step
        record["seconds"] = time.perf_counter() - begin
        state.step += 1
        return record

    def _controls(self) -> list[LayerControl]:
        config, state = self.config, self.state
        balance = BalanceOptions(**{**vars(config.balance), "kitten": state.monitor.aux})
        bias = None
        if config.collapse is not None and state.step >= config.collapse.step:
            bias = np.zeros(config.model.num_experts, np.float32)
            bias[config.collapse.expert] = np.float32(config.collapse.strength)
        controls = []
        for layer in range(config.model.num_layers):
            controls.append(
                LayerControl(
                    num_open=state.unlock.num_open,
                    balance=balance,
                    choice_bias=state.choice_bias[layer] if config.balance.bias_speed else None,
                    capacity=config.capacity,
                    capacity_factor=state.capacity[layer].factor,
                    logit_bias=bias,
                    replayed=self._replayed(layer),
                )
            )
        return controls

    def _replayed(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        if self.replay is None:
            return None
        call = self.state.step * self.config.model.num_layers + layer
        if call >= len(self.replay):
            raise ValueError(f"route file must have {call + 1} calls, got {len(self.replay)}")
        ids, weights = self.replay[call]
        return ids[self.model.own_tokens], weights[self.model.own_tokens]

    def _record(self, saved: ForwardSaved) -> None:
        if not self.record_routes:
            return
        for block in saved.blocks:
            if block.routed is not None:
                counts, routed = self.model.counts, block.routed
                ids = self.exchange.gather_rows("record_ids", routed.topk_ids, counts)
                weights = self.exchange.gather_rows("record_weights", routed.topk_weights, counts)
                self.recorded.append((ids, weights))

    def save_routes(self, path: Any) -> None:
        """Write the routes of all recorded steps; any rank may be the one that does."""
        save_routes(path, self.recorded)

    def _summary(
        self, saved: ForwardSaved, grads: ModelGradients, controls: list[LayerControl]
    ) -> dict[str, Any]:
        """Loss and per-layer numbers, before the update."""
        num_tokens, model = self.model.num_tokens, self.config.model
        loss = mean_loss(grads.sums["loss"], num_tokens)
        record: dict[str, Any] = {"loss": float(loss), "loss_bits": f"{loss.view(np.uint32):08x}"}
        if model.ffn == "dense":
            return record
        record["num_open"] = self.state.unlock.num_open
        record["aux_coefficient"] = self.state.monitor.aux
        record["layers"] = []
        for layer, block in enumerate(saved.blocks):
            assert block.stats is not None
            control = controls[layer]
            numbers = layer_metrics(block.stats, control.num_open, model.router.num_groups())
            numbers["ranks_touched"] /= num_tokens
            mean_p = div(grads.sums[f"layer{layer}.mean_p"], np.float32(num_tokens))
            ratio = load_ratio(block.stats.demand, control.num_open)
            numbers["aux_loss"] = float(balance_loss(ratio, mean_p, control.balance.kitten))
            if f"layer{layer}.z" in grads.sums:
                z = mean_loss(grads.sums[f"layer{layer}.z"], num_tokens)
                numbers["z_loss"] = float(mul(z, np.float32(control.balance.z)))
            record["layers"].append(numbers)
        return record

    # ----------------------------------------------------------------------- update

    def _update(
        self, grads: ModelGradients, rate: np.float32, saved: ForwardSaved, record: dict[str, Any]
    ) -> None:
        """Norms, clipping, AdamW on this rank's shard and experts, new bf16 values everywhere."""
        parameters, options = self.parameters, self.config.optimizer
        total = np.float32(0)
        for name in parameters.shapes:
            total = add(total, square_sum(grads.replicated[name]))
        scales = [np.ones(self.config.model.num_experts, np.float32)] * len(parameters.experts)
        for layer in range(len(parameters.experts)):
            norms = self._expert_norms(f"gradient{layer}", grads.experts[layer], layer)
            weights = self._expert_norms(f"weight{layer}", parameters.experts[layer].master, layer)
            scales[layer], norms = self._clip_outliers(norms, record["layers"][layer])
            record["layers"][layer]["gradient_norms"] = [float(n) for n in norms]
            record["layers"][layer]["weight_norms"] = [float(n) for n in weights]
            for norm in norms:
                total = add(total, mul(norm, norm))
        norm, factor = clip_factor(total, options)
        record["gradient_norm"] = float(norm)
        flat = parameters.flatten(grads.replicated)[parameters.shard]
        parameters.master, parameters.moments = adamw(
            parameters.master, mul(flat, factor), parameters.moments, rate, options
        )
        self._update_experts(grads, rate, factor, scales, saved)
        self.refresh_values()

    def _expert_norms(self, name: str, tensors: dict[str, np.ndarray], layer: int) -> np.ndarray:
        """Norm of each expert's three matrices, from its owner. (E,) float32."""
        assert self.model.layer_config is not None
        mine = np.zeros(self.config.model.num_experts, np.float32)
        ids = self.parameters.experts[layer].ids
        for part in PARTS:
            mine[ids] = add(mine[ids], square_sums(tensors[part]))
        owner = self.model.layer_config.owner_of_expert
        return sqrt(self.exchange.merge_owned(name, mine, owner))

    def _clip_outliers(
        self, norms: np.ndarray, numbers: dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(scale of each expert's gradient, norms after it)."""
        scales = np.ones(len(norms), np.float32)
        is_outlier, bound = outliers(norms, self.config.monitor.outlier)
        numbers["gradient_norms_raw"] = [float(n) for n in norms]
        if self.config.actions.clip_outliers and is_outlier.any():
            safe = np.where(is_outlier, norms, np.float32(1))
            scales = np.where(is_outlier, div(np.float32(bound), safe), scales)
            numbers["clipped_experts"] = [int(e) for e in np.flatnonzero(is_outlier)]
        return scales, mul(norms, scales)

    def _update_experts(
        self,
        grads: ModelGradients,
        rate: np.float32,
        factor: np.float32,
        scales: list[np.ndarray],
        saved: ForwardSaved,
    ) -> None:
        """An expert without rows keeps its weights: no decay, no step, nothing to save again."""
        for layer, state in enumerate(self.parameters.experts):
            stats = saved.blocks[layer].stats
            assert stats is not None
            has_rows = (stats.demand > stats.dropped)[state.ids]
            scale = mul(factor, scales[layer][state.ids])[:, None, None]
            for part in PARTS:
                gradient = mul(grads.experts[layer][part], scale)
                before, moments = state.master[part], state.moments[part]
                after, new = adamw(before, gradient, moments, rate, self.config.optimizer)
                state.master[part] = np.where(has_rows[:, None, None], after, before)
                state.moments[part] = moments.where(has_rows, new)
            state.updates += has_rows

    def refresh_values(self) -> None:
        """bf16 values of all replicated parameters, gathered from the owners of the shards."""
        bits = bf16_to_bits(to_bf16(self.parameters.master))
        whole = self.exchange.gather_shards("values", bits, self.parameters.bounds)
        self.parameters.values = self.parameters.unflatten(bits_to_bf16(whole))

    # ----------------------------------------------------------------------- watch

    def _watch(self, saved: ForwardSaved, record: dict[str, Any]) -> None:
        """Bias, capacity, unlocking, alarms and actions; all from numbers equal on every rank."""
        config, state = self.config, self.state
        loss = np.float32(record["loss"])
        layers = record.get("layers", [])
        is_open = np.arange(config.model.num_experts) < state.unlock.num_open
        for layer in range(len(layers)):
            stats = saved.blocks[layer].stats
            assert stats is not None
            if config.balance.bias_speed:
                state.choice_bias[layer] = update_choice_bias(
                    state.choice_bias[layer], stats.demand, is_open, config.balance.bias_speed
                )
            if config.capacity is not None:
                state.capacity[layer] = adapt_capacity(
                    state.capacity[layer], stats.demand, stats.dropped, state.step, config.capacity
                )
                layers[layer]["capacity_factor"] = [float(f) for f in state.capacity[layer].factor]
        record["alarms"] = find_alarms(
            state.monitor, layers, loss, state.unlock.num_open, config.monitor
        )
        self._stop_at_nan(layers)
        record["actions"], roll_back = take_actions(
            state.monitor, record["alarms"], config.actions, config.balance.kitten
        )
        record["roll_back"] = roll_back
        if config.unlock is not None:
            self._unlock(loss, saved, record)

    def _stop_at_nan(self, layers: list[dict[str, Any]]) -> None:
        """Without the roll-back action a NaN logit ends the run, on all ranks alike."""
        for index, numbers in enumerate(layers):
            if numbers["refused_logits"] and not self.config.actions.rollback_after:
                raise ValueError(
                    f"logits must not be NaN or +Inf, got {numbers['refused_logits']} in layer "
                    f"{index} at step {self.state.step}; rollback_after can answer it"
                )

    def _unlock(self, loss: np.float32, saved: ForwardSaved, record: dict[str, Any]) -> None:
        config, before = self.config, self.state.unlock.num_open
        assert config.unlock is not None
        self.state.unlock = advance_unlocking(
            self.state.unlock, config.unlock, self.state.step, loss, config.model.num_experts
        )
        now = self.state.unlock.num_open
        if now == before:
            return
        record["actions"].append(f"unlock experts {before} .. {now - 1} ({config.unlock.init})")
        for layer in range(config.model.num_layers):
            stats = saved.blocks[layer].stats
            assert stats is not None
            source = int(stats.demand[:before].argmax())  # ties: the lower id
            self._start_experts(layer, range(before, now), source, config.unlock.init)

    def _start_experts(self, layer: int, experts: range, source: int, init: str) -> None:
        """New experts: the source's masters, or their own random start; moments from zero."""
        assert self.model.layer_config is not None
        state, owners = self.parameters.experts[layer], self.model.layer_config.owner_of_expert
        local_of = {int(e): i for i, e in enumerate(state.ids)}
        for part in PARTS:
            copied = np.zeros(state.master[part].shape[1:], np.float32)
            if source in local_of:
                copied = state.master[part][local_of[source]]
            copied = self.exchange.broadcast(f"unlock_{part}", copied, int(owners[source]))
            for expert in experts:
                if expert not in local_of:
                    continue
                local = local_of[expert]
                state.master[part][local] = (
                    copied
                    if init == "copy"
                    else initial_expert(self.config.model, self.config.seed, layer, expert, part)
                )
                moments = state.moments[part]
                moments.m[local], moments.v[local], moments.powers[:, local] = 0, 0, 1
        for expert in experts:
            if expert in local_of:
                state.updates[local_of[expert]] += 1

    # ----------------------------------------------------------------------- validation

    def validate(self) -> np.float32:
        """Mean loss over the held-out batches: no capacity, the same open experts."""
        config = self.config
        controls = [
            replace(control, balance=BalanceOptions(), capacity=None, replayed=None)
            for control in self._controls()
        ]
        total = np.float32(0)
        batches = valid_batches(
            self.text, config.batch, config.model.sequence, config.valid_batches
        )
        for batch in batches:
            with self._arithmetic():
                saved = self.model.forward(batch, controls)
            total = add(total, np.float32(self.model.loss_sum(saved)))
        return mean_loss(total, self.model.num_tokens * len(batches))

    def close(self) -> None:
        """Give symmetric memory back; collective."""
        self.model.close()
