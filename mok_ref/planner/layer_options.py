"""Sizes and options of a layer whose time is predicted: what is accepted, how the rest is named.

Used for arguments (`predict_layer`) and for rows of stored reports (`kernel_rows`) alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mok_ref.config import DTYPES, GRAD_DTYPES, is_int, is_real, shown

from .choice import SAVES
from .errors import require
from .stages import TILE_ROWS

MOST_WIDTH = 1 << 24
# names of sizes as tables give them, with the most that is predicted
LARGEST = {"T": 1 << 24, "H": MOST_WIDTH, "I": MOST_WIDTH, "E": 1 << 16, "K": 1 << 10}
MOST_PAIRS = 1 << 22  # ranks * E: the simulation has tables of that size
MOST_MS = 1e9
MODES, WEIGHTS = ("sustained", "bursts"), ("not held", "held")
ROUTINGS = ("uniform", "zipf")
WORDS = {
    "save": SAVES,
    "mode": MODES,
    "dw_dtype": GRAD_DTYPES,
    "weights": WEIGHTS,
    "dtype": DTYPES,
    "routing": ROUTINGS,
}
BATCHES = ("minibatch", "macrobatch")


def is_count(value: object, most: int) -> bool:
    return is_int(value) and 1 <= value <= most  # type: ignore[operator]


def check_count(value: object, name: str, most: int) -> int:
    """A size. Raises: ValueError naming it."""
    require(is_count(value, most), f"{name} must be an integer in 1..{most}, got {shown(value)}")
    return int(value)  # type: ignore[call-overload]


def check_text(value: object, name: str) -> str:
    """One line. Raises: ValueError naming it."""
    is_line = isinstance(value, str) and bool(value.strip()) and value.isprintable()
    require(is_line, f"{name} must be one line of text, got {shown(value)}")
    return str(value)


def check_word(value: object, name: str, allowed: tuple[str, ...]) -> None:
    """One of some words. Raises: ValueError naming it."""
    is_known = isinstance(value, str) and value in allowed
    require(is_known, f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")


def check_ms(value: object, name: str) -> float:
    """A measured time. Raises: ValueError naming it."""
    is_time = is_real(value) and 0 < value <= MOST_MS  # type: ignore[operator]
    require(
        is_time, f"{name} must be a number above 0 and at most {MOST_MS:g} ms, got {shown(value)}"
    )
    return float(value)  # type: ignore[arg-type]


def check_ranks(ranks: object, num_experts: int) -> int:
    """Ranks of one layer, as many as its tables have room for. Raises: ValueError naming them."""
    good = is_count(ranks, MOST_PAIRS)
    require(good, f"ranks must be an integer in 1..{MOST_PAIRS}, got {shown(ranks)}")
    number = int(ranks)  # type: ignore[call-overload]
    require(
        number * num_experts <= MOST_PAIRS,
        f"ranks * E must be at most {MOST_PAIRS}, got ranks={number}, E={num_experts}",
    )
    return number


def check_options(options: Mapping[str, Any]) -> None:
    """Everything about a layer besides its sizes; absent and None both mean the layer's own choice
    of a batch.

    Raises: ValueError naming the option, the rule and the value.
    """
    for name, allowed in WORDS.items():
        if name in options:
            check_word(options[name], name, allowed)
    for name, most in (("shared", MOST_WIDTH), ("communication_sms", 1 << 16)):
        value = options.get(name, 0)
        good = is_int(value) and 0 <= value <= most
        require(good, f"{name} must be an integer in 0..{most}, got {shown(value)}")
    native = options.get("native_fp8", False)
    require(isinstance(native, bool), f"native_fp8 must be true or false, got {shown(native)}")
    given = {name: options[name] for name in BATCHES if options.get(name) is not None}
    for name, rows in given.items():
        good = is_count(rows, 1 << 40) and rows % TILE_ROWS == 0
        require(good, f"{name} must be a positive multiple of {TILE_ROWS}, got {shown(rows)}")
    if len(given) == len(BATCHES):
        minibatch, macrobatch = given["minibatch"], given["macrobatch"]
        require(
            macrobatch % minibatch == 0,
            f"macrobatch must be a multiple of minibatch, got {macrobatch=}, {minibatch=}",
        )
