"""A byte-level language model with mixture-of-experts layers: forward above its backward.

Everything is a specified float32 operation (docs/training.md), so with arithmetic="exact" loss and
gradients have the same bits for any number of ranks. Ranks hold whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights, expert_backward, expert_forward, weight_gradient
from mok_ref.layer import moe_backward, moe_forward
from mok_ref.numerics import BFLOAT16, Array, add, as_values, bf16_to_bits, mul, to_bf16, to_float64
from mok_ref.routing import router_dx, router_logits
from mok_ref.tensor_core import GROUP, tc
from mok_ref.training.arithmetic import token_sum
from mok_ref.training.attention import AttentionSaved, attention_backward, attention_forward
from mok_ref.training.balance import (
    BalanceOptions,
    balance_gradient,
    count_routes,
    d_scores_from_p,
    normalized_scores,
    sequence_gradient,
    z_loss,
)
from mok_ref.training.capacity import CapacityOptions, expert_capacity, routes_to_drop
from mok_ref.training.choosers import ranks_touched
from mok_ref.training.cross_entropy import cross_entropy_backward, cross_entropy_forward
from mok_ref.training.norm import norm_backward, norm_forward
from mok_ref.training.ordinary import ordinary_backward, ordinary_forward
from mok_ref.training.parameters import PARTS, ModelConfig, Parameters
from mok_ref.training.ranks import Exchange, Tensors, split_sequences
from mok_ref.training.router import Routed, add_gradients, route
from mok_ref.training.tensor_parallel import SlicedExpert, tp_backward, tp_forward
from mok_ref.training.unlocking import mask_locked
from mok_ref.workspace import Workspace


@dataclass
class LayerControl:
    """What the trainer sets for one layer in one step; the same on every rank."""

    num_open: int
    balance: BalanceOptions
    choice_bias: np.ndarray | None = None
    capacity: CapacityOptions | None = None
    capacity_factor: np.ndarray | None = None  # (E,), only this rank's experts are read
    logit_bias: np.ndarray | None = None  # (E,), a disturbance for experiments
    replayed: tuple[np.ndarray, np.ndarray] | None = None


@dataclass
class LayerStats:
    """Integers of the whole batch, equal on every rank."""

    demand: np.ndarray  # (E,) routes that were chosen
    dropped: np.ndarray  # (E,)
    ranks_touched: int  # sum over tokens
    num_refused: int  # logits that were NaN or +Inf


@dataclass
class BlockSaved:
    """One block's operands for the backward."""

    residual: Array
    norm1: tuple[Array, Array] | None
    attention: AttentionSaved | None
    norm2: tuple[Array, Array]
    ffn_in: Array
    logits: Array | None
    routed: Routed | None
    topk_ids: Array | None
    context: Any
    stats: LayerStats | None


@dataclass
class ForwardSaved:
    tokens: np.ndarray
    targets: np.ndarray
    blocks: list[BlockSaved]
    norm: tuple[Array, Array]
    final_in: Array
    probabilities: Array
    loss: Array  # (T,) float32


@dataclass
class ModelGradients:
    """Replicated gradients of the whole batch (equal on every rank); experts' by owner."""

    replicated: Tensors
    experts: list[dict[str, np.ndarray]]
    sums: Tensors  # loss, and per layer mean_p, z: token sums over the batch


class Model:
    """The model on one rank of `heap`."""

    def __init__(self, config: ModelConfig, heap: Any, batch: int, parameters: Parameters) -> None:
        self.config, self.heap, self.parameters = config, heap, parameters
        self.exchange = Exchange(heap)
        self.sequences = split_sequences(batch, heap.size)
        self.counts = self.sequences * config.sequence
        self.num_tokens = int(self.counts.sum())
        self.layer_config: MoEConfig | None = None
        self.workspaces: list[Workspace] = []
        if config.ffn == "ordinary" and heap.size != 1:
            raise ValueError(f"ffn='ordinary' needs one rank, got {heap.size}")
        if config.ffn != "dense":
            self.layer_config = config.layer_config(heap.size)
        if config.ffn == "moe":
            assert self.layer_config is not None
            most = int(self.counts.max())
            self.workspaces = [
                Workspace(self.layer_config, heap, most) for _ in range(config.num_layers)
            ]

    @property
    def first_token(self) -> int:
        return int(self.counts[: self.heap.rank].sum())

    @property
    def own_tokens(self) -> slice:
        return slice(self.first_token, self.first_token + int(self.counts[self.heap.rank]))

    def own_windows(self, batch: np.ndarray) -> np.ndarray:
        """This rank's sequences of a batch (B, S + 1)."""
        first = int(self.sequences[: self.heap.rank].sum())
        return batch[first : first + int(self.sequences[self.heap.rank])]

    # ----------------------------------------------------------------------- forward

    def forward(self, batch: np.ndarray, controls: list[LayerControl]) -> ForwardSaved:
        """Loss of every token of this rank's sequences (T12). batch (B, S + 1), all ranks' alike.

        x = embed[byte] + position;  per block x = x + attention(norm(x)), x = x + ffn(norm(x))
        loss = cross_entropy(tc(bf16(norm(x)), unembed), next byte)
        """
        values, arithmetic = self.parameters.values, self.config.arithmetic
        windows = self.own_windows(batch)
        tokens, targets = windows[:, :-1].ravel(), windows[:, 1:].ravel()
        position = np.tile(values["position"], (len(windows), 1))
        x = add(values["embed"][tokens], position)
        if arithmetic == "float64":
            x = to_float64(x)
        blocks = []
        for layer, control in enumerate(controls):
            x, block = self._block_forward(layer, x, control)
            blocks.append(block)
        norm = norm_forward(x)
        final_in = to_bf16(norm[0])
        logits = tc(final_in, values["unembed"], arithmetic=arithmetic)
        loss, probabilities = cross_entropy_forward(logits, targets)
        return ForwardSaved(tokens, targets, blocks, norm, final_in, probabilities, loss)

    def _block_forward(
        self, layer: int, x: Array, control: LayerControl
    ) -> tuple[Array, BlockSaved]:
        residual = x
        norm1, y, attention = self._attention(layer, x)
        x = add(x, y)
        norm2 = norm_forward(x)
        ffn_in = to_bf16(norm2[0])
        block = BlockSaved(residual, norm1, attention, norm2, ffn_in, None, None, None, None, None)
        if self.config.recompute:
            block.norm1 = block.attention = None
        if self.config.ffn == "dense":
            return add(x, self._dense_forward(layer, block)), block
        return add(x, self._moe_forward(layer, ffn_in, control, block)), block

    def _attention(self, layer: int, x: Array) -> tuple[Any, Array, AttentionSaved]:
        config, values = self.config, self.parameters.values
        norm = norm_forward(x)
        y, saved = attention_forward(
            to_bf16(norm[0]),
            values[f"layer{layer}.attn_qkv"],
            values[f"layer{layer}.attn_out"],
            config.sequence,
            config.num_heads,
            config.arithmetic,
        )
        return norm, y, saved

    def _ffn_values(self, layer: int, prefix: str) -> ExpertWeights:
        values = self.parameters.values
        return ExpertWeights(*(values[f"layer{layer}.{prefix}{part}"] for part in PARTS))

    def _dense_forward(self, layer: int, block: BlockSaved) -> Array:
        """SwiGLU of all tokens: by tokens, or cut over ranks (`tensor_parallel`); same bits."""
        weights = self._ffn_values(layer, "ffn_")
        if not self.config.tensor_parallel:
            block.context = expert_forward(self._dense_config(), block.ffn_in, weights, False)
            return block.context.y
        expert = SlicedExpert.cut(weights, self.heap.rank, self.heap.size, unit=GROUP)
        every = self.exchange.gather_rows("tp_x", block.ffn_in, self.counts)
        forward = tp_forward(self._dense_config(), self.exchange, every, expert)
        block.context = (every, forward, expert)
        return forward.y[self.own_tokens]

    def _dense_config(self) -> MoEConfig:
        config = self.config
        return MoEConfig(config.hidden, config.intermediate, 1, 1, arithmetic=config.arithmetic)

    def _moe_forward(self, layer: int, x: Array, control: LayerControl, block: BlockSaved) -> Array:
        """Route, drop what is over capacity, run the experts."""
        config, experts = self.config, self.parameters.experts[layer]
        w_router = self.parameters.values[f"layer{layer}.router"]
        logits = router_logits(x, w_router, config.arithmetic)
        first_expert = config.num_logits - config.num_experts
        if control.logit_bias is not None:
            bias = np.concatenate([np.zeros(first_expert, np.float32), control.logit_bias])
            logits = add(logits, bias[None, :])
        refused = np.isnan(logits) | (logits == np.inf)  # counted, so that all ranks hear of it
        logits = np.where(refused, logits.dtype.type(0), logits)
        logits = mask_locked(logits, control.num_open, first_expert)
        routed = route(
            config.router,
            logits,
            control.choice_bias,
            self.exchange,
            self.counts,
            control.replayed,
        )
        topk_ids, stats = self._drop(routed, control, int(refused.sum()))
        block.logits, block.routed, block.topk_ids, block.stats = logits, routed, topk_ids, stats
        weights = np.where(topk_ids >= 0, routed.topk_weights, np.float32(0))
        if config.ffn == "ordinary":
            y, block.context = ordinary_forward(x, topk_ids, weights, experts.values())
            return y
        shared = None
        if config.shared_intermediate:
            shared = ExpertWeights(*(as_bits(v) for v in self._ffn_values(layer, "shared_")))
        assert self.layer_config is not None
        y, block.context = moe_forward(
            self.layer_config,
            self.heap,
            as_bits(x),
            topk_ids,
            weights,
            experts.weights(),
            shared,
            self.workspaces[layer],
            save="none" if config.recompute else "all",
        )
        return as_values(y)

    def _drop(
        self, routed: Routed, control: LayerControl, num_refused: int
    ) -> tuple[np.ndarray, LayerStats]:
        """Capacity, by the experts' owners; and the counts that everything else reads."""
        num_experts, topk_ids = self.config.num_experts, routed.topk_ids
        assert self.layer_config is not None
        owner = self.layer_config.owner_of_expert
        dropped = np.zeros(num_experts, np.int64)
        kept = topk_ids
        if control.capacity is not None:
            over = self._over_capacity(routed, control)
            kept = np.where(over, np.int32(-1), topk_ids)
            dropped = count_routes(topk_ids[over], num_experts)
        touched = int(ranks_touched(kept, owner).sum()) if len(kept) else 0
        mine = np.concatenate(
            [count_routes(topk_ids, num_experts), dropped, [touched, num_refused]]
        )
        total = self.exchange.sum_integers("route_counts", mine.astype(np.int64))
        demand, dropped = total[:num_experts], total[num_experts : 2 * num_experts]
        return kept, LayerStats(demand, dropped, int(total[-2]), int(total[-1]))

    def _over_capacity(self, routed: Routed, control: LayerControl) -> np.ndarray:
        """Which of this rank's routes their experts' owners refuse. (T, K) bool."""
        assert control.capacity is not None and control.capacity_factor is not None
        assert self.layer_config is not None
        ids = self.exchange.gather_rows("drop_ids", routed.topk_ids, self.counts)
        weights = self.exchange.gather_rows("drop_weights", routed.topk_weights, self.counts)
        num_routes = int((ids >= 0).sum())
        refused = np.zeros(ids.shape, bool)
        for expert in self.layer_config.experts_of(self.heap.rank):
            factor = control.capacity_factor[expert]
            limit = expert_capacity(factor, num_routes, control.num_open)
            refused |= routes_to_drop(ids, weights, int(expert), limit, control.capacity.policy)
        return self.exchange.push_rows("refused", refused, self.counts)

    # ----------------------------------------------------------------------- backward

    def backward(self, saved: ForwardSaved, controls: list[LayerControl]) -> ModelGradients:
        """Gradients of the mean loss plus the balance losses (T13)."""
        values, arithmetic = self.parameters.values, self.config.arithmetic
        operands: dict[str, tuple[Array, Array]] = {}
        d_logits = to_bf16(
            cross_entropy_backward(saved.probabilities, saved.targets, self.num_tokens)
        )
        operands["unembed"] = (d_logits, saved.final_in)
        d_final = tc(d_logits, values["unembed"].T, arithmetic=arithmetic)
        dx = norm_backward(d_final, *saved.norm)
        experts: list[dict[str, np.ndarray]] = []
        ready: Tensors = {}
        sums: Tensors = {"loss": saved.loss}
        for layer in reversed(range(len(saved.blocks))):
            dx = self._block_backward(
                layer, saved.blocks[layer], dx, controls[layer], operands, experts, ready, sums
            )
        experts.reverse()
        replicated, totals = self._chains(saved, dx, operands, sums)
        replicated.update(ready)
        return ModelGradients(replicated, experts, totals)

    def _block_backward(
        self,
        layer: int,
        block: BlockSaved,
        dx: Array,
        control: LayerControl,
        operands: dict[str, tuple[Array, Array]],
        experts: list[dict[str, np.ndarray]],
        ready: Tensors,
        sums: Tensors,
    ) -> Array:
        values, config = self.parameters.values, self.config
        if config.ffn == "dense":
            d_in = self._dense_backward(layer, block, dx, operands, ready)
        else:
            d_in = self._moe_backward(layer, block, dx, control, operands, experts, ready, sums)
        dx = add(dx, norm_backward(d_in, *block.norm2))
        norm1, attention = block.norm1, block.attention
        if norm1 is None or attention is None:
            norm1, _, attention = self._attention(layer, block.residual)
        dy = to_bf16(dx)
        w_qkv, w_out = values[f"layer{layer}.attn_qkv"], values[f"layer{layer}.attn_out"]
        d_attention, d_qkv = attention_backward(attention, dy, w_qkv, w_out, config.arithmetic)
        operands[f"layer{layer}.attn_qkv"] = (d_qkv, attention.x)
        operands[f"layer{layer}.attn_out"] = (dy, attention.o)
        return add(dx, norm_backward(d_attention, *norm1))

    def _dense_backward(
        self,
        layer: int,
        block: BlockSaved,
        dx: Array,
        operands: dict[str, tuple[Array, Array]],
        ready: Tensors,
    ) -> Array:
        dy = to_bf16(dx)
        if self.config.tensor_parallel:
            return self._sliced_backward(layer, block, dy, ready)
        forward, weights = block.context, self._ffn_values(layer, "ffn_")
        result = expert_backward(self._dense_config(), forward.gate, forward.up, dy, weights, None)
        operands[f"layer{layer}.ffn_gate"] = (result.d_gate, block.ffn_in)
        operands[f"layer{layer}.ffn_up"] = (result.d_up, block.ffn_in)
        operands[f"layer{layer}.ffn_down"] = (dy, result.hw)
        return result.dx

    def _sliced_backward(self, layer: int, block: BlockSaved, dy: Array, ready: Tensors) -> Array:
        """Each rank makes its slices' gradients from all tokens; the slices are then gathered."""
        every, forward, expert = block.context
        every_dy = self.exchange.gather_rows("tp_dy", dy, self.counts)
        result = tp_backward(
            self._dense_config(), self.exchange, every, every_dy, forward, expert, None
        )
        for part, bounds in zip(PARTS, (expert.inner, expert.inner, expert.outer), strict=True):
            mine = getattr(result, f"dw_{part}")
            ready[f"layer{layer}.ffn_{part}"] = self.exchange.gather_rows(
                f"tp_dw_{part}", mine, np.diff(bounds)
            )
        return result.dx[self.own_tokens]

    def _moe_backward(
        self,
        layer: int,
        block: BlockSaved,
        dx: Array,
        control: LayerControl,
        operands: dict[str, tuple[Array, Array]],
        experts: list[dict[str, np.ndarray]],
        ready: Tensors,
        sums: Tensors,
    ) -> Array:
        """The layer's backward; the router's share of dx is added inside it, last."""
        config, dy = self.config, to_bf16(dx)
        w_router = self.parameters.values[f"layer{layer}.router"]
        d_scores, d_extra = self._balance_gradients(layer, block, control, sums)

        def router_share(d_topk_weights: Array) -> Array:
            assert block.routed is not None
            d_logits = add_gradients(block.routed.backward(d_topk_weights, d_scores), d_extra)
            operands[f"layer{layer}.router"] = (to_bf16(d_logits), block.ffn_in)
            return as_bits(router_dx(d_logits, w_router, config.arithmetic))

        if config.ffn == "ordinary":
            ordinary = ordinary_backward(block.context, dy)
            experts.append({p: getattr(ordinary, f"dw_{p}") for p in PARTS})
            share = as_values(router_share(ordinary.d_topk_weights))
            return to_bf16(add(ordinary.dx, share))
        grads = moe_backward(block.context, as_bits(dy), router_share=router_share)
        experts.append({p: getattr(grads, f"dw_{p}") for p in PARTS})
        if config.shared_intermediate:
            for part in PARTS:
                ready[f"layer{layer}.shared_{part}"] = getattr(grads, f"shared_dw_{part}")
        return as_values(grads.dx)

    def _balance_gradients(
        self, layer: int, block: BlockSaved, control: LayerControl, sums: Tensors
    ) -> tuple[Array | None, Array | None]:
        """(d_scores, d_logits) of the balance losses; their values go into `sums`."""
        options, routed, stats = control.balance, block.routed, block.stats
        assert routed is not None and stats is not None and block.logits is not None
        config = self.config
        kind = config.router.score
        p, total = normalized_scores(routed.scores, kind)
        sums[f"layer{layer}.mean_p"] = p
        d_scores = d_extra = None
        if options.kitten or options.litter or options.sequence:
            num_groups = config.router.num_groups()
            size = config.num_experts // num_groups
            d_p: Array = balance_gradient(
                stats.demand,
                control.num_open,
                -(-control.num_open // size),
                num_groups,
                self.num_tokens,
                options,
            )[None, :]
            if options.sequence:
                d_p = add(
                    d_p,
                    sequence_gradient(
                        routed.topk_ids,
                        config.sequence,
                        control.num_open,
                        self.num_tokens,
                        config.num_experts,
                        options.sequence,
                    ),
                )
            d_scores = d_scores_from_p(d_p, p, total, kind)
        if options.z:
            z, d_extra = z_loss(block.logits, self.num_tokens, options.z)
            sums[f"layer{layer}.z"] = z
        return d_scores, d_extra

    def _chains(
        self,
        saved: ForwardSaved,
        dx: Array,
        operands: dict[str, tuple[Array, Array]],
        sums: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """All sums over tokens, handed from rank to rank in one pass (T14).

        weights: dW = tc over tokens (rows_out^T, rows_in^T);  embed, position, loss, ...: additions
        Order:  ascending global token.
        """
        real = np.float64 if self.config.arithmetic == "float64" else np.float32
        shapes = self.parameters.shapes
        start = {f"w/{n}": np.zeros(shapes[n], real) for n in operands}
        start |= {f"w/{n}": np.zeros(shapes[n], real) for n in ("embed", "position")}
        start |= {f"s/{n}": np.zeros(rows.shape[1:], rows.dtype) for n, rows in sums.items()}

        def link(carry: Tensors) -> Tensors:
            out = {}
            for name, (rows_out, rows_in) in operands.items():
                out[f"w/{name}"] = weight_gradient(
                    rows_out, rows_in, carry[f"w/{name}"], self.config.arithmetic
                )
            out["w/embed"] = embed_gradient(saved.tokens, dx, carry["w/embed"])
            by_window = dx.reshape(-1, *shapes["position"])
            out["w/position"] = token_sum(by_window, carry["w/position"])
            for name, rows in sums.items():
                out[f"s/{name}"] = token_sum(rows, carry[f"s/{name}"])
            return out

        total = self.exchange.chain("grads", start, link)
        replicated = {k[2:]: v for k, v in total.items() if k.startswith("w/")}
        return replicated, {k[2:]: v for k, v in total.items() if k.startswith("s/")}

    def loss_sum(self, saved: ForwardSaved) -> np.float32:
        """Sum of the loss over all tokens of the batch, ascending g (for validation)."""
        start = {"loss": np.zeros((), saved.loss.dtype)}
        total = self.exchange.chain(
            "valid", start, lambda carry: {"loss": token_sum(saved.loss, carry["loss"])}
        )
        return np.float32(total["loss"][()])

    def close(self) -> None:
        """Give symmetric memory back; collective."""
        self.exchange.close()
        for workspace in self.workspaces:
            workspace.close()


def as_bits(values: Array) -> Array:
    """bf16 values as the layer takes them (float64 stays: the oracle)."""
    if values.dtype == np.float64:
        return values
    return bf16_to_bits(values).view(BFLOAT16)


def embed_gradient(tokens: np.ndarray, dx: Array, carry: Array) -> Array:
    """d_embed[byte] = carry + dx[t] for every token t with that byte, t ascending (T15).

    One float32 addition at a time. A stable sort brings equal bytes together in their order.
    """
    out = carry.copy()
    order = np.argsort(tokens, kind="stable")
    first = np.flatnonzero(np.diff(tokens[order], prepend=-1))
    for rows in np.split(order, first[1:]):
        if len(rows):
            out[tokens[rows[0]]] = token_sum(dx[rows], out[tokens[rows[0]]])
    return out


def mean_loss(total: Array, num_tokens: int) -> np.float32:
    """total * (1 / N), one division and one multiplication."""
    return np.float32(mul(np.asarray(total), np.float32(1) / np.float32(num_tokens))[()])
