"""Sizes and options of one mixture-of-experts layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

ROW_TILE = 128  # an expert's segment of rows starts at a multiple of this

ROW_ORDERS = ("canonical", "round_robin")
DTYPES = ("bf16", "mxfp8")
SCALE_RULES = ("fit", "ocp")
ARITHMETICS = ("exact", "fast", "float64")
GRAD_DTYPES = ("float32", "bf16")
SAVE_MODES = ("all", "ring", "none")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def is_int(value: object) -> bool:
    """An integer of Python or NumPy; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """A real number of Python or NumPy; booleans and complex numbers are none."""
    return is_int(value) or isinstance(value, (float, np.floating))


def shown(value: object) -> str:
    """A value in one line of an error message, however large it is."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of more digits than Python writes
        text = f"an {type(value).__name__} of too many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def float32_of(value: Any) -> float:
    """A real number rounded to float32, overflow to infinity, without a warning."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        try:
            return float(np.float32(float(value)))
        except OverflowError:  # an integer beyond float64
            return float("inf") if value > 0 else float("-inf")


def check_swiglu_limit(value: Any) -> float | None:
    """The clamp as the float32 it is rounded to; None stays.

    Raises: ValueError unless it is a number that is > 0 and finite as a float32.
    """
    if value is None:
        return None
    limit = float32_of(value) if is_real(value) else 0.0
    message = f"swiglu_limit must be a finite float32 > 0, got {shown(value)}"
    _require(0 < limit < float("inf"), message)
    return limit


@dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer, the same object on every rank.

    hidden_size H, intermediate_size I, num_experts E, top_k K, ep_size R.
    shared_intermediate_size   width of the shared expert, 0 for none
    swiglu_limit               clamp of gate and up before SwiGLU, a float32 > 0, or None
    row_order                  "canonical" (independent of R) or "round_robin" (spec section 4)
    dtype                      "bf16" or "mxfp8" (routed experts only, spec section 7)
    scale_rule                 "fit" (nothing saturates) or "ocp", for mxfp8
    placement                  owner rank of each expert, or None: E/R experts per rank in order
    macrobatch, minibatch      rows of the ring token buffer and of one hand-over; None: chosen by
                               `ring_rows`. They never change a bit of the result.
    grad_dtype                 weight gradients as "float32", or "bf16" rounded once at the end
    arithmetic                 "exact" (bit contract), "fast" (BLAS float32, bf16 roundings kept,
                               no bit promise) or "float64" (oracle without any rounding)
    Raises: ValueError naming the argument, the rule and the value.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ep_size: int = 1
    shared_intermediate_size: int = 0
    swiglu_limit: float | None = None
    row_order: str = "canonical"
    dtype: str = "bf16"
    scale_rule: str = "fit"
    placement: tuple[int, ...] | None = None
    macrobatch: int | None = None
    minibatch: int | None = None
    grad_dtype: str = "float32"
    arithmetic: str = "exact"

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()
        self._check_placement()
        self._check_batches()

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "ep_size"):
            value = getattr(self, name)
            _require(
                is_int(value) and value >= 1, f"{name} must be an integer >= 1, got {shown(value)}"
            )
            object.__setattr__(self, name, int(value))  # NumPy integers would wrap
        shared = self.shared_intermediate_size
        _require(
            is_int(shared) and shared >= 0,
            f"shared_intermediate_size must be an integer >= 0, got {shown(shared)}",
        )
        object.__setattr__(self, "shared_intermediate_size", int(shared))
        object.__setattr__(self, "swiglu_limit", check_swiglu_limit(self.swiglu_limit))

    def _check_choices(self) -> None:
        choices = {
            "row_order": ROW_ORDERS,
            "dtype": DTYPES,
            "scale_rule": SCALE_RULES,
            "grad_dtype": GRAD_DTYPES,
            "arithmetic": ARITHMETICS,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            known = isinstance(value, str) and value in allowed
            _require(known, f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")
            object.__setattr__(self, name, str(value))  # not NumPy's text, whose repr differs

    def _check_placement(self) -> None:
        if self.placement is None:
            _require(
                self.num_experts % self.ep_size == 0,
                "num_experts must be divisible by ep_size unless a placement is given, got "
                f"num_experts={self.num_experts}, ep_size={self.ep_size}",
            )
            return
        given = self.placement
        _require(
            isinstance(given, (tuple, list)) or (isinstance(given, np.ndarray) and given.ndim == 1),
            f"placement must be a sequence of owner ranks or None, got {shown(given)}",
        )
        odd = [owner for owner in given if not is_int(owner)]
        _require(not odd, f"placement must hold integers, got {shown(odd[0]) if odd else None}")
        owners = tuple(int(owner) for owner in given)
        _require(
            len(owners) == self.num_experts,
            "placement must name one owner rank per expert, got "
            f"{len(owners)} entries for num_experts={self.num_experts}",
        )
        bad = [owner for owner in owners if not 0 <= owner < self.ep_size]
        _require(
            not bad,
            f"placement must hold ranks in 0..{self.ep_size - 1}, got {bad[0] if bad else None}",
        )
        object.__setattr__(self, "placement", owners)

    def _check_batches(self) -> None:
        for name in ("macrobatch", "minibatch"):
            value = getattr(self, name)
            _require(
                value is None or (is_int(value) and value >= 1 and value % ROW_TILE == 0),
                f"{name} must be a positive multiple of {ROW_TILE}, got {shown(value)}",
            )
            object.__setattr__(self, name, None if value is None else int(value))
        if self.macrobatch is not None and self.minibatch is not None:
            _require(
                self.macrobatch % self.minibatch == 0,
                "macrobatch must be a multiple of minibatch, got "
                f"macrobatch={self.macrobatch}, minibatch={self.minibatch}",
            )

    @cached_property
    def owner_of_expert(self) -> np.ndarray:
        """(E,) int32: the rank that owns each expert."""
        if self.placement is not None:
            return np.asarray(self.placement, np.int32)
        per_rank = self.num_experts // self.ep_size
        return (np.arange(self.num_experts) // per_rank).astype(np.int32)

    def experts_of(self, rank: int) -> np.ndarray:
        """Expert ids that `rank` owns, ascending (its local order)."""
        return np.flatnonzero(self.owner_of_expert == rank).astype(np.int32)

    def num_local_experts(self, rank: int) -> int:
        """L: how many experts `rank` owns."""
        return int(np.count_nonzero(self.owner_of_expert == rank))

    def ring_rows(self, num_rows: int, default_minibatch: int = 2048) -> tuple[int, int]:
        """(macrobatch, minibatch) in rows for a schedule of at most `num_rows` padded rows."""
        whole = max(ROW_TILE, -(-num_rows // ROW_TILE) * ROW_TILE)
        minibatch = self.minibatch
        if minibatch is None:
            minibatch = self.macrobatch or min(default_minibatch, whole)
            if self.macrobatch and self.macrobatch % default_minibatch == 0:
                minibatch = default_minibatch
        macrobatch = self.macrobatch or -(-whole // minibatch) * minibatch
        return macrobatch, minibatch
