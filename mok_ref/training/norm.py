"""Root-mean-square normalisation without a gain, forward and backward (T6, T7)."""

from __future__ import annotations

import numpy as np

from mok_ref.numerics import Array, add, div, mul, sub
from mok_ref.training.arithmetic import row_sum, sqrt

EPSILON = np.float32(2.0**-20)


def norm_forward(x: Array) -> tuple[Array, Array]:
    """Normalise every token (T6).

        r[t] = 1 / sqrt(row_sum(x[t] * x[t]) / H + 2^-20);   x_hat = x * r

    x        (T, H) float32
    Returns  x_hat (T, H) float32, r (T,) float32
    Order:  row_sum's (dot128).
    """
    one = x.dtype.type(1)
    mean_square = div(row_sum(mul(x, x)), x.dtype.type(x.shape[1]))
    r = div(one, sqrt(add(mean_square, x.dtype.type(EPSILON))))
    return mul(x, r[:, None]), r


def norm_backward(d: Array, x_hat: Array, r: Array) -> Array:
    """Gradient of x_hat = x * r (T7).

        dx = r * (d - x_hat * (row_sum(d * x_hat) / H))

    d, x_hat  (T, H) float32;  r (T,) float32.  Returns (T, H) float32.
    """
    mean = div(row_sum(mul(d, x_hat)), d.dtype.type(d.shape[1]))
    return mul(r[:, None], sub(d, mul(x_hat, mean[:, None])))
