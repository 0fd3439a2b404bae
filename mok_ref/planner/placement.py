"""Which rank owns which expert: longest first, litters kept together, traffic kept inside domains.

Longest processing time first (Graham 1969, "Bounds on multiprocessing timing anomalies"): the
heaviest item goes to the least loaded bin. Its largest bin is at most 4/3 - 1/(3 R) of the best
possible one. The bits of the layer do not depend on the placement (contract, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import require

KEEP = ("free", "domain", "rank")


@dataclass(frozen=True)
class Placement:
    """owner (E,) int32 and how good it is: the largest rank's load over the mean."""

    owner: np.ndarray
    load: np.ndarray
    title: str

    @property
    def imbalance(self) -> float:
        mean = float(self.load.mean())
        return float(self.load.max()) / mean if mean else 1.0


def rank_load(owner: np.ndarray, load: np.ndarray, num_ranks: int) -> np.ndarray:
    return np.bincount(owner, weights=load, minlength=num_ranks)


def in_order(load: np.ndarray, num_ranks: int) -> Placement:
    """E/R experts per rank in order; where R does not divide E, as even as it goes."""
    num_experts = len(load)
    owner = (np.arange(num_experts) * num_ranks // num_experts).astype(np.int32)
    return Placement(owner, rank_load(owner, load, num_ranks), "in order")


def longest_first(
    load: np.ndarray, num_bins: int, most: int | None = None, start: np.ndarray | None = None
) -> np.ndarray:
    """(n,) bin of each item: heaviest first, into the least loaded bin that has room.

    Ties: the lower item first, the lower bin first, so that the result is the same everywhere.
    most   at most this many items in a bin (memory)
    start  (num_bins,) load that the bins have already
    Raises: ValueError if the bins cannot hold all items.
    """
    most = len(load) if most is None else most
    require(
        most * num_bins >= len(load),
        f"most * num_bins must hold all items, got {most=}, {num_bins=}, items={len(load)}",
    )
    level = np.zeros(num_bins) if start is None else np.array(start, float)
    count = np.zeros(num_bins, int)
    result = np.zeros(len(load), np.int32)
    for item in np.argsort(-np.asarray(load, float), kind="stable"):
        candidates = np.where(count < most, level, np.inf)
        # equal loads: the bin with fewer items, so that idle experts spread as well
        least = np.flatnonzero(candidates == candidates.min())
        target = int(least[np.argmin(count[least])])
        result[item] = target
        level[target] += load[item]
        count[target] += 1
    return result


def place_experts(
    load: np.ndarray,
    num_ranks: int,
    num_groups: int = 1,
    ranks_per_domain: int | None = None,
    keep: str = "free",
    most: int | None = None,
) -> Placement:
    """Place E experts on R ranks by measured load (E,).

    num_groups  litters of E/num_groups experts, in order of id
    keep        "rank": a litter stays whole on one rank; "domain": on ranks of one domain, so that
                grouped routing keeps a token's rows inside it; "free": anywhere
    most        at most this many experts on a rank (default: ceil(E/R), or a litter if larger)
    Raises: ValueError naming the argument.
    """
    load = np.asarray(load, float)
    num_experts = len(load)
    require(keep in KEEP, f"keep must be one of {', '.join(KEEP)}, got {keep!r}")
    require(
        num_experts % num_groups == 0,
        f"num_experts must be divisible by num_groups, got {num_experts=}, {num_groups=}",
    )
    per_domain = min(ranks_per_domain or num_ranks, num_ranks)
    require(
        num_ranks % per_domain == 0,
        f"num_ranks must be divisible by ranks_per_domain, got {num_ranks=}, {per_domain=}",
    )
    size = num_experts // num_groups
    if keep == "rank":
        groups = longest_first(load.reshape(num_groups, size).sum(axis=1), num_ranks)
        owner = np.repeat(groups, size)
    else:
        most = most or -(-num_experts // num_ranks)
        units = num_groups if keep == "domain" else num_experts
        owner = by_domain(load, units, num_ranks, per_domain, most)
    title = {"free": "longest first", "domain": "litters by domain", "rank": "litters whole"}[keep]
    return Placement(owner.astype(np.int32), rank_load(owner, load, num_ranks), title)


def by_domain(
    load: np.ndarray, num_units: int, num_ranks: int, per_domain: int, most: int
) -> np.ndarray:
    """(E,) owner: units (litters or single experts) to domains, then experts to ranks inside."""
    num_domains = num_ranks // per_domain
    size = len(load) // num_units
    if num_domains > 1 and num_units < num_domains:
        size, num_units = 1, len(load)  # fewer litters than domains: they have to be cut
    room = max(most * per_domain // size, -(-num_units // num_domains))
    units = longest_first(load.reshape(num_units, size).sum(axis=1), num_domains, room)
    domain = np.repeat(units, size)
    owner = np.zeros(len(load), np.int32)
    for d in range(num_domains):
        members = np.flatnonzero(domain == d)
        if len(members):
            fits = max(most, -(-len(members) // per_domain))
            owner[members] = d * per_domain + longest_first(load[members], per_domain, fits)
    return owner


def best_placement(
    load: np.ndarray, num_ranks: int, num_groups: int, ranks_per_domain: int, most: int | None
) -> list[Placement]:
    """All kinds of placement that are possible here, the most even first (ties: simplest)."""
    found = [in_order(load, num_ranks)] if num_ranks <= len(load) else []
    found.append(place_experts(load, num_ranks, 1, ranks_per_domain, "free", most))
    if num_groups > 1:
        found.append(place_experts(load, num_ranks, num_groups, ranks_per_domain, "domain", most))
        if num_groups >= num_ranks:
            found.append(place_experts(load, num_ranks, num_groups, ranks_per_domain, "rank"))
    return sorted(found, key=lambda p: round(p.imbalance, 3))
