"""The layer as one dense formula: no ranks, no schedule, no ring.

`dense_layer` gives the bits (with `mok_ref.tc`, which has its own oracle); `error_bounds` says
how far those may lie from exact real arithmetic.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from cases import Case
from oracles import bf16, canonical_rows, dot128_by_loops

from mok_ref import tc
from mok_ref.numerics import as_values, sigmoid

FLOAT = np.float32


def mxfp8(values: np.ndarray) -> np.ndarray:
    """Rule "fit", by ml_dtypes and a search over all scales; finite values only."""
    out = np.empty_like(values)
    for first in range(0, values.shape[-1], 32):
        block = values[..., first : first + 32].astype(np.float64)
        amax = np.abs(block).max(axis=-1)
        scale = np.full(amax.shape, 119)
        for e in range(119, -125, -1):
            scale = np.where(amax <= 448 * 2.0**e, e, scale)
        codes = (block * 2.0 ** -scale[..., None].astype(float)).clip(-448, 448)
        codes = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        out[..., first : first + 32] = codes * 2.0 ** scale[..., None].astype(float)
    return out


def _pad16(values: np.ndarray) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, -values.shape[1] % 16)))


def dense_layer(case: Case, start: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """y and all gradients as bits: bf16 as uint16, dW and d_topk_weights as float32.

    start   dW to continue, by name, or None for +0
    """
    s = case.sizes
    quant = mxfp8 if s.dtype == "mxfp8" else (lambda v: v)
    x, dy = as_values(case.x), as_values(case.dy)
    y_slots = np.zeros((*case.topk_ids.shape, s.hidden), FLOAT)
    dx_slots, d_weights = np.zeros_like(y_slots), np.zeros(case.topk_ids.shape, FLOAT)
    dw: dict[str, list[np.ndarray]] = {"dw_gate": [], "dw_up": [], "dw_down": []}
    start = start or {}
    for e in range(s.experts):
        rows = canonical_rows(case.topk_ids, e)
        token, slot = (np.array([r[i] for r in rows], int) for i in (0, 1))
        weights = [quant(as_values(w[e])) for w in case.weights]
        weight = case.topk_weights[token, slot]
        before = [start[name][e] if start else None for name in dw]
        y, dx, d_weight, *grads = _expert(
            quant(x[token]), quant(dy[token]), weights, weight, s.limit, quant, before
        )
        y_slots[token, slot], dx_slots[token, slot], d_weights[token, slot] = y, dx, d_weight
        for name, value in zip(dw, grads, strict=True):
            dw[name].append(value)
    out = {name: np.stack(values) for name, values in dw.items()}
    y_acc = dx_acc = np.zeros_like(x)
    if case.shared is not None:
        shared = [as_values(w) for w in case.shared]
        before = [start.get(f"shared_{name}") for name in dw]
        y_acc, dx_acc, _, *grads = _expert(x, dy, shared, None, s.limit, lambda v: v, before)
        out |= {f"shared_{name}": g for name, g in zip(dw, grads, strict=True)}
    for k in range(s.top_k):
        routed = case.topk_ids[:, k, None] >= 0
        term = case.topk_weights[:, k, None] * y_slots[:, k]
        y_acc = np.where(routed, y_acc + term, y_acc)
        dx_acc = np.where(routed, dx_acc + dx_slots[:, k], dx_acc)
    out |= {"y": _bits(y_acc), "dx": _bits(dx_acc), "d_topk_weights": d_weights}
    return out


def _bits(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


@np.errstate(all="ignore")
def _expert(x, dy, weights, weight, limit, quant, before):
    """One expert on its rows: y, dx, d_weight, dW_gate, dW_up, dW_down."""
    w_gate, w_up, w_down = weights
    gate, up = bf16(tc(x, w_gate)), bf16(tc(x, w_up))
    g, u = gate, up
    if limit is not None:
        g, u = np.minimum(gate, FLOAT(limit)), np.clip(up, -FLOAT(limit), FLOAT(limit))
    s = sigmoid(g)
    h = quant(bf16((g * s) * u))
    y = bf16(tc(h, w_down))
    dhu = tc(dy, w_down.T)
    dh, hw = dhu, h
    if weight is not None:
        dh, hw = weight[:, None] * dhu, bf16(weight[:, None] * h)
    d_up = bf16(dh * (g * s))
    d_gate = bf16((dh * u) * (s * (1 + g * (1 - s))))
    if limit is not None:
        d_gate[gate > FLOAT(limit)] = 0
        d_up[np.abs(up) > FLOAT(limit)] = 0
    d_gate, d_up = quant(d_gate), quant(d_up)
    both = np.concatenate([_pad16(d_gate), _pad16(d_up)], axis=1)
    w_both = np.concatenate([_pad16(w_gate.T), _pad16(w_up.T)], axis=1)
    dx = bf16(tc(both, w_both))
    d_weight = np.array([dot128_by_loops(p) for p in dhu * h], FLOAT)
    chains = ((d_gate, x), (d_up, x), (dy, hw))
    dw = [tc(a.T, b.T, c) for (a, b), c in zip(chains, before, strict=True)]
    return y, dx, d_weight, *dw


# --------------------------------------------------------------------------- error bounds

U_BF16 = 2.0**-8  # half an ulp of 8 significant bits, relative
U_FLOAT = 2.0**-24


def _tc_error(terms: np.ndarray, depth: int) -> np.ndarray:
    """Per group: 17 terms truncated below 2^(E-25), 2^E <= S, and the sum to 24 bits (2^-23 S),
    with S the sum of all |products|. Below 2^-20.5 S per group."""
    return -(-depth // 16) * 2.0**-20.5 * terms


def _silu(g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    s = 1 / (1 + np.exp(-g))
    return s, g * s, s * (1 + g * (1 - s))


def error_bounds(case: Case) -> dict[str, np.ndarray]:
    """First-order bounds on |bits - exact| of every tensor, no clamp, bf16.

    Every rounding's error, pushed through the absolute derivatives of what follows it: silu' is
    the slope itself, |silu''| <= 1/2. Times 1.25 for the second order (roundings are 2^-8).
    """
    s = case.sizes
    x, dy = (as_values(v).astype(np.float64) for v in (case.x, case.dy))
    ey, edx = np.zeros_like(x), np.zeros_like(x)
    size_y, size_dx = np.zeros_like(x), np.zeros_like(x)
    e_weights = np.zeros(case.topk_ids.shape)
    out: dict[str, np.ndarray] = {}
    if case.shared is not None:
        shared = [as_values(w).astype(np.float64) for w in case.shared]
        size_y, size_dx, ey, edx, _, *grads = _expert_bounds(x, dy, shared, np.ones(len(x)))
        names = ("dw_gate", "dw_up", "dw_down")
        out |= {f"shared_{n}": g for n, g in zip(names, grads, strict=True)}
    per_expert = []
    for e in range(s.experts):
        token, slot = np.nonzero(case.topk_ids == e)
        weights = [as_values(w[e]).astype(np.float64) for w in case.weights]
        w = case.topk_weights[token, slot].astype(np.float64)
        y, dx, e_y, e_dx, e_w, *grads = _expert_bounds(x[token], dy[token], weights, w)
        e_weights[token, slot] = e_w
        for target, value in (
            (size_y, np.abs(w)[:, None] * y),
            (ey, np.abs(w)[:, None] * e_y),
            (size_dx, dx),
            (edx, e_dx),
        ):
            np.add.at(target, token, value)
        per_expert.append(grads)
    sums = (2 * s.top_k + 1) * U_FLOAT + U_BF16
    out["y"], out["dx"] = ey + sums * size_y, edx + sums * size_dx
    out["d_topk_weights"] = e_weights
    for i, name in enumerate(("dw_gate", "dw_up", "dw_down")):
        out[name] = np.stack([grads[i] for grads in per_expert])
    return {name: 1.25 * bound + 1e-30 for name, bound in out.items()}


def _expert_bounds(x, dy, weights, w):
    """|y|, |dx| and the errors of y, dx, d_weight, dW_gate, dW_up, dW_down."""
    w_gate, w_up, w_down = weights
    hidden, inner, rows = x.shape[1], w_gate.shape[0], len(x)
    gate, up = x @ w_gate.T, x @ w_up.T
    e_gate = U_BF16 * np.abs(gate) + _tc_error(np.abs(x) @ np.abs(w_gate.T), hidden)
    e_up = U_BF16 * np.abs(up) + _tc_error(np.abs(x) @ np.abs(w_up.T), hidden)
    _, silu, slope = _silu(gate)
    h = silu * up
    e_h = (U_BF16 + 6 * U_FLOAT) * np.abs(h) + np.abs(slope * up) * e_gate + np.abs(silu) * e_up
    y = h @ w_down.T
    e_y = U_BF16 * np.abs(y) + _tc_error(np.abs(h) @ np.abs(w_down.T), inner)
    e_y += e_h @ np.abs(w_down.T)
    dhu = dy @ w_down
    e_dhu = _tc_error(np.abs(dy) @ np.abs(w_down), hidden)
    dh, e_dh = w[:, None] * dhu, np.abs(w)[:, None] * (e_dhu + U_FLOAT * np.abs(dhu))
    d_up, d_gate = dh * silu, dh * up * slope
    own = U_BF16 + 12 * U_FLOAT
    e_d_up = own * np.abs(d_up) + np.abs(silu) * e_dh + np.abs(dh * slope) * e_gate
    e_d_gate = U_BF16 * np.abs(d_gate) + 12 * U_FLOAT * np.abs(dh * up) * (np.abs(slope) + 1)
    e_d_gate += np.abs(up * slope) * e_dh + np.abs(dh * slope) * e_up
    e_d_gate += np.abs(dh * up) * 0.5 * e_gate
    dx = d_gate @ w_gate + d_up @ w_up
    terms = np.abs(d_gate) @ np.abs(w_gate) + np.abs(d_up) @ np.abs(w_up)
    e_dx = U_BF16 * np.abs(dx) + _tc_error(terms, 2 * inner + 32)
    e_dx += e_d_gate @ np.abs(w_gate) + e_d_up @ np.abs(w_up)
    e_weight = (e_dhu * np.abs(h) + np.abs(dhu) * e_h).sum(-1)
    e_weight += (inner + 8) * U_FLOAT * np.abs(dhu * h).sum(-1)
    hw = w[:, None] * h
    e_hw = U_BF16 * np.abs(hw) + np.abs(w)[:, None] * e_h + U_FLOAT * np.abs(hw)

    def chain(out: np.ndarray, e_out: np.ndarray, rows_in: np.ndarray, e_in: np.ndarray):
        exact = np.abs(out).T @ np.abs(rows_in)
        moved = e_out.T @ np.abs(rows_in) + np.abs(out).T @ e_in
        return moved + _tc_error(exact, rows + 16)

    zero_x, zero_dy = np.zeros_like(x), np.zeros_like(dy)
    return (
        np.abs(y),
        np.abs(dx),
        e_y,
        e_dx,
        e_weight,
        chain(d_gate, e_d_gate, x, zero_x),
        chain(d_up, e_d_up, x, zero_x),
        chain(dy, zero_dy, hw, e_hw),
    )
