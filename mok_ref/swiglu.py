"""SwiGLU between the two expert products, forward and backward (spec eq. 5.2, 6.4, 6.5)."""

from __future__ import annotations

from mok_ref.numerics import Array, add, array_module, mul, sigmoid, sub, to_bf16


def clamp(gate: Array, up: Array, limit: float | None) -> tuple[Array, Array]:
    """Optional clamp of the bf16 gate and up; NaN stays (spec eq. 5.1c).

        gate = gate > limit ? limit : gate;  up likewise into [-limit, limit]

    The limit is a float32, so a clamped value need not be a bf16 value.
    """
    if limit is None:
        return gate, up
    xp = array_module(gate)
    high, low = gate.dtype.type(limit), gate.dtype.type(-limit)
    up = xp.where(up > high, high, up)
    return xp.where(gate > high, high, gate), xp.where(up < low, low, up)


def swiglu_forward(gate: Array, up: Array, limit: float | None = None) -> Array:
    """h = bf16((gate * sigmoid(gate)) * up) (spec eq. 5.2).

    gate, up  (rows, I) bf16 values      Returns  (rows, I) bf16 values
    Order:  product left to right, each rounded to float32, then once to bf16.
    CUDA:   cuda_src/swiglu.cuh: swiglu_forward
    """
    gate, up = clamp(gate, up, limit)
    return to_bf16(mul(mul(gate, sigmoid(gate)), up))


def swiglu_backward(
    gate: Array, up: Array, dh: Array, limit: float | None = None
) -> tuple[Array, Array]:
    """Gradients of h = (gate * sigmoid(gate)) * up (spec eq. 6.4, 6.5).

        s = sigmoid(gate);  d_up   = bf16(dh * (gate * s))
                            d_gate = bf16((dh * up) * (s * (1 + gate * (1 - s))))

    gate, up  (rows, I) bf16 values, unclamped      dh  (rows, I) float32
    Returns   (d_gate, d_up) bf16 values; +0 where the clamp was active (equality passes).
    CUDA:     cuda_src/swiglu.cuh: swiglu_backward
    """
    xp = array_module(gate)
    g, u = clamp(gate, up, limit)
    s = sigmoid(g)
    one = g.dtype.type(1)
    d_up = to_bf16(mul(dh, mul(g, s)))
    slope = mul(s, add(one, mul(g, sub(one, s))))
    d_gate = to_bf16(mul(mul(dh, u), slope))
    if limit is not None:
        high, zero = gate.dtype.type(limit), gate.dtype.type(0)
        d_gate = xp.where(gate > high, zero, d_gate)
        d_up = xp.where((up > high) | (up < -high), zero, d_up)
    return d_gate, d_up


def weighted_h(h: Array, weight: Array) -> Array:
    """hw = bf16(w * h), the operand of dW_down (spec eq. 6.8).

    h (rows, I) bf16 values      weight (rows,) float32
    """
    return to_bf16(mul(weight[:, None], h))
