"""Fair shares of links: how fast every transfer runs when many use the same wires.

Max-min fairness by progressive filling (Bertsekas and Gallager, "Data Networks", section 6.5): all
transfers speed up together until a wire is full; those that use it stay at that rate, the others
go on.
"""

from __future__ import annotations

import numpy as np

FULL = 0.01  # a wire within 1 % of its capacity counts as full: fewer rounds, 1 % accuracy


def fair_rates(usage: np.ndarray, capacity: np.ndarray, ceiling: np.ndarray) -> np.ndarray:
    """Rates (n,) of n transfers over m wires.

    usage      (m, n) share of a transfer's rate that crosses each wire
    capacity   (m,) rate of each wire
    ceiling    (n,) rate a transfer cannot pass even alone; 0 for an idle one
    """
    rate = np.zeros(len(ceiling))
    growing = ceiling > 0
    left = capacity.astype(float).copy()
    level = 0.0
    while growing.any():
        demand = usage @ growing
        busy = demand > 0
        step = (ceiling[growing] - level).min()
        if busy.any():
            step = min(step, (left[busy] / demand[busy]).min())
        level += step
        left -= demand * step
        rate[growing] = level
        is_full = busy & (left <= FULL * capacity)
        stopped = growing & (ceiling <= level * (1 + 1e-9))
        if is_full.any():
            stopped |= growing & (usage[is_full] > 0).any(axis=0)
        growing &= ~stopped
    return rate
