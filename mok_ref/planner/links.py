"""Fair shares of links: how fast every transfer runs when many use the same wires.

Max-min fairness by progressive filling (Bertsekas and Gallager, "Data Networks", section 6.5): all
transfers speed up together until a wire is full; those that use it stay at that rate, the others
go on.
"""

from __future__ import annotations

import numpy as np

FULL = 0.03  # a wire within 3 % of its capacity counts as full: fewer rounds, 3 % accuracy
LITTLE = 1e-9  # shares are fractions: what is left of a sum after all its terms were taken away


def fair_rates(usage: np.ndarray, capacity: np.ndarray, ceiling: np.ndarray) -> np.ndarray:
    """Rates (n,) of n transfers over m wires.

    usage      (m, n) share of a transfer's rate that crosses each wire
    capacity   (m,) rate of each wire
    ceiling    (n,) rate a transfer cannot pass even alone; 0 for an idle one
    """
    rate = np.zeros(len(ceiling))
    growing = ceiling > 0
    demand = usage @ growing.astype(float)
    left = capacity.astype(float).copy()
    enough = FULL * capacity
    level = 0.0
    while growing.any():
        busy = demand > LITTLE
        step = float(ceiling[growing].min()) - level
        if busy.any():
            step = min(step, float((left[busy] / demand[busy]).min()))
        level += step
        left -= demand * step
        is_full = busy & (left <= enough)
        stopped = growing & (ceiling <= level * (1 + 1e-9))
        if is_full.any():
            stopped |= growing & (is_full.astype(float) @ usage > 0)
        rate[stopped] = level
        growing &= ~stopped
        demand -= usage @ stopped.astype(float)
    return rate
