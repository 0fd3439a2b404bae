"""What a stored report must hold before its rows are read: one line names file, row and key.

Only rows of this project's kernel are looked at; what other programs took is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mok_ref.config import DTYPES, shown

from .errors import require
from .layer_options import (
    LARGEST,
    check_count,
    check_ms,
    check_options,
    check_ranks,
    check_text,
    check_word,
)

DIRECTIONS = ("forward", "backward", "forward and backward", "forward kernel")
Check = Callable[[object, str], object]


def size(letter: str) -> Check:
    return lambda value, name: check_count(value, name, LARGEST[letter])


def direction(value: object, name: str) -> None:
    check_word(value, name, DIRECTIONS)


def ms_or_none(value: object, name: str) -> None:
    """A time that was perhaps not measured."""
    if value is not None:
        check_ms(value, name)


def times(value: object, name: str) -> None:
    """A table of times."""
    require(isinstance(value, dict), f"{name} must be an object, got {shown(value)}")
    assert isinstance(value, dict)
    for key, ms in value.items():
        ms_or_none(ms, f"{name}[{key!r}]")


SIZES: dict[str, Check] = {letter: size(letter) for letter in "THIEK"}
COMMON: dict[str, Check] = {"case": check_text, "direction": direction}
PLAIN: dict[str, Check] = COMMON | SIZES | {"ms_ours": check_ms}
LAYERS: dict[str, Check] = COMMON | SIZES | {"R": size("E"), "ms": ms_or_none}
BENCH: dict[str, Check] = COMMON | {"sustained_ms": ms_or_none, "bursts_ms": ms_or_none}
MXFP8: dict[str, Check] = {
    "case": check_text,
    "tokens": size("T"),
    "hidden": size("H"),
    "intermediate": size("I"),
    "experts": size("E"),
    "top_k": size("K"),
    "ms": times,
}


def check_report(table: Mapping[str, Any], name: str) -> None:
    """Refuse a report whose rows could not be read or would not be times.

    Raises: ValueError naming the file, the row and the key.
    """
    device = table.get("device", {})
    require(isinstance(device, dict), f"{name}: device must be an object, got {shown(device)}")
    for key in ("gpu", "driver", "date"):
        if key in device:
            check_text(device[key], f"{name}: device.{key}")
    listed = next((key for key in ("layers", "rows") if isinstance(table.get(key), list)), None)
    if listed is None:
        return
    bits = table.get("bits", {})
    require(isinstance(bits, dict), f"{name}: bits must be an object, got {shown(bits)}")
    rows = table[listed]
    form = form_of(rows, listed)
    for i, row in enumerate(rows):
        where = f"{name}: {listed}[{i}]"
        if form is PLAIN and not (isinstance(row, dict) and row.get("ms_ours") is not None):
            continue  # no time of a layer
        require(isinstance(row, dict), f"{where} must be an object, got {shown(row)}")
        if form is LAYERS or form is BENCH:
            contender = check_text(row.get("contender"), f"{where}.contender")
            if not contender.startswith("mok_ref"):
                continue
        check_row(row, form, where)


def form_of(rows: list[Any], listed: str) -> dict[str, Check]:
    """Which benchmark wrote the rows."""
    if listed == "layers":
        return LAYERS
    objects = [row for row in rows if isinstance(row, dict)]
    if any("contender" in row for row in objects):
        return BENCH
    return MXFP8 if any(isinstance(row.get("ms"), dict) for row in objects) else PLAIN


def check_row(row: Mapping[str, Any], form: Mapping[str, Check], where: str) -> None:
    """One row of this project's kernel. Raises: ValueError naming it and the key."""
    missing = [key for key in form if key not in row]
    require(not missing, f"{where}: row without {', '.join(missing)}")
    for key, check in form.items():
        check(row[key], f"{where}.{key}")
    if "dtype" in row:
        check_word(row["dtype"], f"{where}.dtype", DTYPES)
    if form is PLAIN:
        try:
            check_options(row)
            check_ranks(row.get("ranks", 1), row["E"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
