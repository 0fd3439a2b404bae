"""The mixture-of-experts layer on one rank: forward above, backward below.

Reads top to bottom like the megakernels do (cuda_src/megakernel.cu, megakernel_backward.cu). All
arithmetic lives in the modules called here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mok_ref.chain import ordered_chain
from mok_ref.combine import combine_forward
from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.dispatch import dispatch_backward, push_rows
from mok_ref.experts import (
    ExpertForward,
    ExpertWeights,
    expert_backward,
    expert_forward,
    expert_gate_up,
    hidden,
    operand_values,
    weight_gradient,
)
from mok_ref.heap.protocol import is_closed
from mok_ref.numerics import BFLOAT16, Array, as_values, bf16_to_bits, to_bf16, to_float32
from mok_ref.ring import TokenRing
from mok_ref.schedule import Minibatch, Schedule, build_schedule, forward_task_order, walk
from mok_ref.tensor_core import tc
from mok_ref.timing import stage, stage_time
from mok_ref.validation import (
    check_activations,
    check_backward,
    check_forward,
    check_layer,
    check_main_grad,
    check_router_share,
    gradient_shapes,
)
from mok_ref.workspace import Lease, Workspace, private_workspace, storage_dtype, to_storage

RouterShare = Callable[[np.ndarray], Array]


@dataclass
class Context:
    """What forward leaves for backward: usable once, before the workspace's next forward."""

    config: MoEConfig
    workspace: Workspace
    generation: int
    schedule: Schedule
    experts: dict[int, ExpertWeights]  # by local expert, those that have rows
    shared: ExpertWeights | None
    x: Array
    topk_ids: Array
    topk_weights: Array
    gate: Array
    up: Array
    saved: np.ndarray  # (row blocks,) whether gate and up hold the block
    shared_rows: ExpertForward | None
    output_dtype: Any
    lease: Lease | None = None  # of a workspace made for this one forward, and freed with it
    used: str = ""  # by what

    def close(self) -> None:
        """Give back a workspace that `moe_forward` made; collective, and done by backward."""
        self.used = self.used or "closed"
        if self.lease is not None:
            self.workspace.close()


@dataclass
class Gradients:
    """Gradients of one rank. dx is bf16 (the dtype of x); all others float32 (dW: `grad_dtype`).

    dx (T, H), d_topk_weights (T, K), dw_gate, dw_up (L, I, H), dw_down (L, H, I) and, with a shared
    expert, shared_dw_gate, shared_dw_up (I', H), shared_dw_down (H, I'), equal on every rank.
    """

    dx: Array
    d_topk_weights: Array
    dw_gate: Array
    dw_up: Array
    dw_down: Array
    shared_dw_gate: Array | None = None
    shared_dw_up: Array | None = None
    shared_dw_down: Array | None = None


# --------------------------------------------------------------------------- forward


def moe_forward(
    config: MoEConfig,
    heap: Any,
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    weights: ExpertWeights,
    shared: ExpertWeights | None = None,
    workspace: Any = None,
    save: str = "all",
) -> tuple[Array, Any]:
    """One forward of the layer on this rank; every rank of the heap calls it (spec section 5).

    x             (T, H) bf16 (ml_dtypes.bfloat16 or its uint16 bits); T may differ per rank
                  and may be 0
    topk_ids      (T, K) int32 in -1..E-1, -1 = no route
    topk_weights  (T, K) float32, any finite value
    weights       this rank's experts: gate, up (L, I, H), down (L, H, I) bf16
    shared        shared expert: gate, up (I', H), down (H, I') bf16
    workspace     buffers to reuse (`Workspace`), or None: made for this call, freed by backward, by
                  the context's `close`, or by the next such call once the context is gone
    save          what backward finds: "all", "ring" (the last ring's worth) or "none"; same bits
    Returns       (y (T, H) with the dtype of x, context for `moe_backward`)
    Raises: ValueError naming argument, rule and value; HeapError if a rank does not arrive.
    CUDA:   cuda_src/megakernel.cu
    """
    check_layer(config, heap)
    if heap.device == "cuda":
        from mok_ref.gpu.layer import forward

        return forward(config, heap, x, topk_ids, topk_weights, weights, shared, workspace, save)
    check_forward(config, heap, x, topk_ids, topk_weights, weights, shared, workspace, save)
    lease = None
    if workspace is None:
        workspace, lease = private_workspace(config, heap, len(x))
    workspace.publish_tokens(x, topk_ids, topk_weights)
    heap.barrier("forward, publishing tokens and routes")
    counts, all_ids = workspace.gather_routes()
    with stage_time("schedule"):
        schedule = build_schedule(config, heap.rank, all_ids, counts)
    context = _new_context(
        config, workspace, schedule, x, topk_ids, topk_weights, weights, shared, save
    )
    context.lease = lease
    if context.shared is not None:
        with stage_time("shared expert"):
            context.shared_rows = expert_forward(config, context.x, context.shared, routed=False)
    _run_routed_experts(context)
    heap.barrier("forward, pushing expert outputs")
    return _as_output(context, _combine(context)), context


def _new_context(
    config: MoEConfig,
    workspace: Workspace,
    schedule: Schedule,
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    save: str,
) -> Context:
    experts = {
        int(e): _own_operands(config, ExpertWeights(*(tensor[e] for tensor in weights)), True)
        for e in np.flatnonzero(schedule.expert_count)  # nobody reads the weights of the others
    }
    macrobatch, _ = config.ring_rows(schedule.num_rows)
    saved_rows = {"all": schedule.num_rows, "ring": macrobatch, "none": 0}[save]
    if workspace.max_saved_rows is not None:
        saved_rows = min(saved_rows, workspace.max_saved_rows)
    saved_rows = min(saved_rows, schedule.num_rows) // ROW_TILE * ROW_TILE
    rows = (saved_rows, config.intermediate_size)
    return Context(
        config=config,
        workspace=workspace,
        generation=workspace.generation,
        schedule=schedule,
        experts=experts,
        shared=None if shared is None else _own_operands(config, shared, False),
        x=_own(as_values(to_storage(config, x)), x),
        topk_ids=topk_ids.copy(),
        topk_weights=topk_weights.copy(),
        gate=np.zeros(rows, storage_dtype(config)),
        up=np.zeros(rows, storage_dtype(config)),
        saved=np.arange(schedule.num_row_blocks) < saved_rows // ROW_TILE,
        shared_rows=None,
        output_dtype=x.dtype,
    )


def _own_operands(config: MoEConfig, weights: ExpertWeights, routed: bool) -> ExpertWeights:
    """One expert's weights as products see them, apart from the caller's arrays."""
    return ExpertWeights(*(_own(operand_values(config, w, routed), w) for w in weights))


def _own(values: Array, given: Array) -> Array:
    """`values`, copied if they lie in the caller's memory (float64 operands alone do)."""
    return values.copy() if np.may_share_memory(values, given) else values


def _run_routed_experts(context: Context) -> None:
    """Pull, gate/up, down and push, minibatch by minibatch through the ring (spec eq. 4.5, 4.6)."""
    config, workspace, schedule = context.config, context.workspace, context.schedule
    macrobatch, minibatch = config.ring_rows(schedule.num_rows)
    x_rings = workspace.x.rings(macrobatch)
    h_ring = TokenRing(macrobatch, config.intermediate_size, storage_dtype(config))
    batches = list(walk(schedule.num_rows, macrobatch, minibatch, "forward"))
    for step, batch in forward_task_order(batches, macrobatch):
        if step == "gate_up":
            workspace.x.pull(schedule, batch, x_rings)
            _gate_up(context, batch, x_rings, h_ring.claim(batch))
        else:
            _down(context, batch, h_ring)
            for ring in (*x_rings, h_ring):
                ring.retire(batch)


def _pieces(schedule: Schedule, rows: slice) -> list[tuple[int, slice]]:
    """(local expert, its real rows) inside a range of schedule rows."""
    pieces = []
    blocks = schedule.row_block_expert[rows.start // ROW_TILE : rows.stop // ROW_TILE]
    for expert in np.unique(blocks):
        first = int(schedule.expert_offset[expert])
        end = first + int(schedule.expert_count[expert])
        pieces.append((int(expert), slice(max(first, rows.start), min(end, rows.stop))))
    return pieces


def _within(rows: slice, first: int) -> slice:
    """The same rows, counted from `first`."""
    return slice(rows.start - first, rows.stop - first)


@stage("gate/up")
def _gate_up(
    context: Context, batch: Minibatch, x_rings: list[TokenRing], h_rows: np.ndarray
) -> None:
    """gate, up and h of a minibatch; padding rows stay zero."""
    config = context.config
    h_rows[...] = 0
    for expert, rows in _pieces(context.schedule, batch.rows):
        x = context.workspace.x.values(x_rings, batch, rows)
        gate, up = expert_gate_up(config, x, context.experts[expert])
        h_rows[_within(rows, batch.first)] = to_storage(config, hidden(config, gate, up, True))
        kept = slice(rows.start, max(rows.start, min(rows.stop, len(context.gate))))
        context.gate[kept] = to_storage(config, gate[: kept.stop - kept.start])
        context.up[kept] = to_storage(config, up[: kept.stop - kept.start])


@stage("down")
def _down(context: Context, batch: Minibatch, h_ring: TokenRing) -> None:
    """y of a minibatch, each row pushed into its own slot of the token's owner."""
    config, workspace = context.config, context.workspace
    for expert, rows in _pieces(context.schedule, batch.rows):
        h = as_values(h_ring.read(batch, rows))
        y = to_bf16(tc(h, context.experts[expert].down, arithmetic=config.arithmetic))
        push_rows(
            context.schedule,
            rows,
            to_storage(config, y),
            lambda target: workspace.peer(target, "slots"),
        )


@stage("combine")
def _combine(context: Context) -> Array:
    """Weighted sum of the slots that the experts' ranks filled."""
    shared_y = None if context.shared_rows is None else context.shared_rows.y
    return combine_forward(_own_slots(context), context.topk_ids, context.topk_weights, shared_y)


def _own_slots(context: Context) -> Array:
    """(T, K, H) values pushed to this rank."""
    num_tokens, top_k = context.topk_ids.shape
    slots = context.workspace.mine("slots")[: num_tokens * top_k]
    return as_values(slots).reshape(num_tokens, top_k, context.config.hidden_size)


def _as_output(context: Context, values: Array) -> Array:
    """bf16 values with the dtype that x had."""
    if context.config.arithmetic == "float64":
        return values
    bits = bf16_to_bits(values)
    return bits.view(BFLOAT16) if context.output_dtype == BFLOAT16 else bits


# --------------------------------------------------------------------------- backward


def moe_backward(
    context: Any,
    dy: Array,
    main_grad: Gradients | None = None,
    router_share: RouterShare | None = None,
) -> Gradients:
    """All gradients of the layer (spec section 6); every rank calls it with its own context.

    dy            (T, H) bf16
    main_grad     weight gradients to continue: their values are the start of every chain. bf16
                  buffers are widened, continued in float32 and rounded once at the end.
    router_share  called with d_topk_weights (T, K) once it is known; returns the router's dx
                  (T, H) bf16, as dy is given (`bf16_to_bits` of routing.router_dx), which is
                  added last
    Raises: ValueError for a bad dy; RuntimeError if the context was used or its workspace reused.
    A call that is refused before it begins leaves its context as it was.
    CUDA:   cuda_src/megakernel_backward.cu
    """
    check_backward(context, router_share)
    if context.workspace.heap.device == "cuda":
        from mok_ref.gpu.layer import backward

        return backward(context, dy, main_grad, router_share)
    _use_context(context, dy, main_grad)
    config, workspace = context.config, context.workspace
    heap, num_tokens = workspace.heap, len(dy)
    workspace.publish_gradient(dy)
    heap.barrier("backward, publishing dy")
    workspace.require_same_step("backward")
    grads = _start_gradients(context, main_grad)
    _run_routed_backward(context, grads)
    shared_dx = _shared_backward(context, as_values(to_storage(config, dy)), grads, main_grad)
    heap.barrier("backward, pushing dx and d_topk_weights")
    slots = num_tokens * config.top_k
    d_topk_weights = workspace.mine("d_topk_weights")[:slots].copy().reshape(-1, config.top_k)
    router_dx = None
    if router_share is not None:
        share = router_share(d_topk_weights)
        check_router_share(config, num_tokens, share)
        router_dx = as_values(share)
    dx = dispatch_backward(_own_slots(context), context.topk_ids, shared_dx, router_dx)
    heap.barrier("backward, adding slots up")  # nobody overwrites slots still read
    grads.dx, grads.d_topk_weights = _as_output(context, dx), d_topk_weights
    context.close()
    return _round_gradients(config, grads)


def _use_context(context: Context, dy: Array, main_grad: Gradients | None) -> None:
    check_activations(context.config, "dy", dy)
    if len(dy) != len(context.topk_ids):
        raise ValueError(f"dy must have the {len(context.topk_ids)} rows of x, got {len(dy)}")
    if main_grad is not None:
        check_main_grad(context.config, context.workspace.heap.rank, main_grad)
    if context.used:
        raise RuntimeError(f"context was {context.used}; run moe_forward again")
    if context.workspace.closed or is_closed(context.workspace.heap):
        raise RuntimeError("context is stale: its workspace or heap was closed since")
    if context.generation != context.workspace.generation:
        raise RuntimeError("context is stale: its workspace ran another forward since")
    context.used = "used by an earlier moe_backward"


def _start_gradients(context: Context, main_grad: Gradients | None) -> Gradients:
    """Accumulators of the routed experts: +0, or the values of `main_grad`."""
    config = context.config
    real = context.workspace.mine("topk_weights").dtype
    every = gradient_shapes(config, context.workspace.heap.rank)
    shapes = {name: every[name] for name in ("dw_gate", "dw_up", "dw_down")}
    start: dict[str, np.ndarray] = {name: np.zeros(s, real) for name, s in shapes.items()}
    if main_grad is not None:
        start = {name: as_values(getattr(main_grad, name)).astype(real) for name in shapes}
    empty = np.zeros(0, np.float32)
    return Gradients(empty, empty, **start)


def _run_routed_backward(context: Context, grads: Gradients) -> None:
    """Pull x and dy, row gradients, pushes, then the weights' chains, macrobatch by macrobatch."""
    config, workspace, schedule = context.config, context.workspace, context.schedule
    macrobatch, minibatch = config.ring_rows(schedule.num_rows)
    x_rings, dy_rings = workspace.x.rings(macrobatch), workspace.dy.rings(macrobatch)
    inner, real = config.intermediate_size, grads.dw_gate.dtype
    operands = {name: np.zeros((macrobatch, inner), real) for name in ("d_gate", "d_up", "hw")}
    batches = list(walk(schedule.num_rows, macrobatch, minibatch, "backward"))
    for position, batch in enumerate(batches):
        workspace.x.pull(schedule, batch, x_rings)
        workspace.dy.pull(schedule, batch, dy_rings)
        _row_gradients(context, batch, x_rings, dy_rings, operands, macrobatch)
        last = position + 1 == len(batches) or batches[position + 1].macrobatch != batch.macrobatch
        if last:
            done = [b for b in batches if b.macrobatch == batch.macrobatch]
            for finished in done:
                _weight_gradients(context, finished, x_rings, dy_rings, operands, macrobatch, grads)
                for ring in (*x_rings, *dy_rings):
                    ring.retire(finished)


@stage("row gradients")
def _row_gradients(
    context: Context,
    batch: Minibatch,
    x_rings: list[TokenRing],
    dy_rings: list[TokenRing],
    operands: dict[str, np.ndarray],
    macrobatch: int,
) -> None:
    """dx and d_topk_weights of a minibatch, pushed; d_gate, d_up, hw kept for the weights."""
    config, workspace, schedule = context.config, context.workspace, context.schedule
    first_slot = batch.first % macrobatch
    for kept in operands.values():
        kept[first_slot : first_slot + batch.end - batch.first] = 0  # padding rows
    for expert, rows in _pieces(schedule, batch.rows):
        x = workspace.x.values(x_rings, batch, rows)
        gate, up = _gate_up_again(context, expert, rows, x)
        result = expert_backward(
            config,
            gate,
            up,
            workspace.dy.values(dy_rings, batch, rows),
            context.experts[expert],
            workspace.row_weights(schedule, rows),
        )
        slots = _within(rows, batch.first - first_slot)
        for name, kept in operands.items():
            kept[slots] = getattr(result, name)
        dx = to_storage(config, result.dx)
        push_rows(schedule, rows, dx, lambda peer: workspace.peer(peer, "slots"))
        push_rows(
            schedule, rows, result.d_weight, lambda peer: workspace.peer(peer, "d_topk_weights")
        )


def _gate_up_again(context: Context, expert: int, rows: slice, x: Array) -> tuple[Array, Array]:
    """gate and up of some rows: saved by forward, or computed again with the same bits."""
    blocks = slice(rows.start // ROW_TILE, -(-rows.stop // ROW_TILE))
    if context.saved[blocks].all():
        return as_values(context.gate[rows]), as_values(context.up[rows])
    return expert_gate_up(context.config, x, context.experts[expert])


@stage("weight gradients")
def _weight_gradients(
    context: Context,
    batch: Minibatch,
    x_rings: list[TokenRing],
    dy_rings: list[TokenRing],
    operands: dict[str, np.ndarray],
    macrobatch: int,
    grads: Gradients,
) -> None:
    """Continue every expert's chains over the rows of a minibatch (spec eq. 6.9)."""
    workspace, mode = context.workspace, context.config.arithmetic
    first_slot = batch.first % macrobatch
    for expert, rows in _pieces(context.schedule, batch.rows):
        slots = _within(rows, batch.first - first_slot)
        x = workspace.x.values(x_rings, batch, rows)
        dy = workspace.dy.values(dy_rings, batch, rows)
        for dw, rows_out, rows_in in (
            (grads.dw_down, dy, operands["hw"][slots]),
            (grads.dw_gate, operands["d_gate"][slots], x),
            (grads.dw_up, operands["d_up"][slots], x),
        ):
            dw[expert] = weight_gradient(rows_out, rows_in, dw[expert], mode)


@stage("shared backward")
def _shared_backward(
    context: Context, dy: Array, grads: Gradients, main_grad: Gradients | None
) -> Array | None:
    """The shared expert: dx of this rank's tokens, dW by the ordered chain (spec eq. 6.10)."""
    if context.shared is None or context.shared_rows is None:
        return None
    config, workspace = context.config, context.workspace
    forward = context.shared_rows
    result = expert_backward(config, forward.gate, forward.up, dy, context.shared, None)
    for name, buffer, rows_out, rows_in in (
        ("shared_dw_gate", "chain_in", result.d_gate, context.x),
        ("shared_dw_up", "chain_in", result.d_up, context.x),
        ("shared_dw_down", "chain_out", dy, result.hw),
    ):
        start = None if main_grad is None else as_values(getattr(main_grad, name))
        total = ordered_chain(
            workspace.heap, workspace.name(buffer), rows_out, rows_in, start, config.arithmetic
        )
        setattr(grads, name, total)
    return result.dx


def _round_gradients(config: MoEConfig, grads: Gradients) -> Gradients:
    """bf16 weight gradients on request: rounded once, at the end of the chain."""
    if config.grad_dtype == "bf16" and config.arithmetic != "float64":
        names = [f"{prefix}dw_{part}" for prefix in ("", "shared_") for part in _WEIGHT_PARTS]
        for name in names:
            value = getattr(grads, name)
            if value is not None:
                setattr(grads, name, bf16_to_bits(to_bf16(to_float32(value))).view(BFLOAT16))
    return grads


_WEIGHT_PARTS = ("gate", "up", "down")
