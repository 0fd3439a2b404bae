"""Stored reports and the pages made of them: read and checked as a whole, written whole or not at
all.

A report is a JSON object of one of the benchmarks. Its shape is written down beside the tables that
are made of it, out of `Rule`s for single values, lists of one shape, objects with named keys and
objects with any keys (`Each`); other keys than the named ones are let through.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok_ref.casefile import write_whole

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

Shape = Any
"""Rule | Each | [Shape] | {key: Shape | Maybe}"""


@dataclass(frozen=True)
class Rule:
    """What one value must be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Each:
    """An object with any keys, whose values all have one shape."""

    shape: Shape


@dataclass(frozen=True)
class Maybe:
    """What stands at a key if the key is there."""

    shape: Shape


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def one_of(*known: Any) -> Rule:
    """One of these values; 2.0 is not 2."""
    words = f"one of {', '.join(map(str, known))}"
    return Rule(words, lambda v: any(type(v) is type(k) and v == k for k in known))


# Bounds keep NaN, infinities and quotients that are one or the other out of every table.
POSITIVE = Rule("a number from 1e-9 to 1e18", lambda v: _is_number(v) and 1e-9 <= v <= 1e18)
NUMBER = Rule("a finite number", lambda v: _is_number(v) and abs(v) <= 1e18)
COUNT = Rule("a whole number >= 0", lambda v: type(v) is int and 0 <= v <= 10**18)
NAME = Rule(
    "a name without '|'",
    lambda v: isinstance(v, str) and v != "" and v.isprintable() and "|" not in v,
)
TEXT = Rule("a text", lambda v: isinstance(v, str) and bool(v))
DEVICE: dict[str, Shape] = {"gpu": NAME, "driver": NAME, "cuda": NAME, "date": NAME}
DEVICE |= {key: Maybe(NAME) for key in ("kernels", "gpu_id", "time")}


@dataclass(frozen=True)
class ReportKind:
    """Reports of one program.

    key      what tells them from reports of the others
    shape    of the whole report
    some_of  keys of which at least one must hold something
    """

    made_by: str
    key: str
    shape: Shape
    some_of: tuple[str, ...]


def check_shape(value: Any, shape: Shape, where: str = "") -> None:
    """Raises: ValueError naming the first place that has another shape, and what it must be."""
    place = where or "it"
    if isinstance(shape, Rule):
        if not shape.holds(value):
            raise ValueError(f"{place} must be {shape.words}, got {reprlib.repr(value)}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{place} must be a list, got {reprlib.repr(value)}")
        for index, item in enumerate(value):
            check_shape(item, shape[0], f"{where}[{index}]")
    elif not isinstance(value, dict):
        raise ValueError(f"{place} must be an object, got {reprlib.repr(value)}")
    elif isinstance(shape, Each):
        for key, item in value.items():
            check_shape(key, NAME, f"the key {reprlib.repr(key)} of {place}")
            check_shape(item, shape.shape, f"{where}[{reprlib.repr(key)}]")
    else:
        for key, part in shape.items():
            inner = f"{where}.{key}" if where else key
            if key in value:
                check_shape(value[key], part.shape if isinstance(part, Maybe) else part, inner)
            elif not isinstance(part, Maybe):
                raise ValueError(f"{inner} is missing")


def read_report(path: Path, *kinds: ReportKind) -> dict[str, Any]:
    """A stored report of one of `kinds`, checked.

    Raises: ValueError naming the file, and the key that is wrong; OSError.
    """
    made_by = " or ".join(kind.made_by for kind in kinds)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be a report of {made_by}: no JSON: {error}") from None
    if not isinstance(report, dict):
        got = reprlib.repr(report)
        raise ValueError(f"{path}: must be a report of {made_by}: must be an object, got {got}")
    kind = next((kind for kind in kinds if kind.key in report), None)
    if kind is None:
        keys = " or ".join(kind.key for kind in kinds)
        raise ValueError(f"{path}: must be a report of {made_by}: {keys} is missing")
    with errors_name(path, kind):
        check_shape(report, kind.shape)
        if not any(report.get(key) for key in kind.some_of):
            raise ValueError(f"nothing was measured in it ({', '.join(kind.some_of)})")
    return report


def plain(text: str) -> str:
    """A text as it can stand in one line and in one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


@contextmanager
def errors_name(path: Path, kind: ReportKind) -> Iterator[None]:
    """What a report lacks, found while its tables are made (KeyError) or before (ValueError), is
    said with the file's name. Raises: ValueError."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: must be a report of {kind.made_by}: {error.args[0]}") from None


def page_with_tables(page: Path, made: Mapping[tuple[str, str], str]) -> str:
    """The page's text with each of `made` in place of what is between its two markers.

    Raises: ValueError when the page is not there, or a pair of markers not exactly once; OSError.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except FileNotFoundError:
        markers = ", ".join(repr(marker) for pair in made for marker in pair)
        raise ValueError(f"{page} must be an existing page with the markers {markers}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{page} must be a page: no text: {error}") from None
    for (begin, end), table in made.items():
        before, _, rest = text.partition(begin)
        if text.count(begin) != 1 or text.count(end) != 1 or end not in rest:
            raise ValueError(f"{page} must have one pair of markers {begin!r}, {end!r}")
        text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def anchors_of(text: str) -> set[str]:
    """Names of a page's headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def check_own_links(page: Path, text: str, begin: str, end: str) -> None:
    """What stands around the tables may link to them: they must be there.

    Raises: ValueError naming a heading that is linked to and that the page has not.
    """
    anchors = anchors_of(text)
    around = text.partition(begin)[0] + text.partition(end)[2]
    for link in re.findall(r"\]\(#([^)]+)\)", around):
        if link not in anchors:
            raise ValueError(f"{page} links to #{link}, which these reports do not make")


def write_between_markers(page: Path, made: Mapping[tuple[str, str], str]) -> None:
    """`page_with_tables`, written whole or not at all. Raises: ValueError, OSError."""
    write_whole(page, page_with_tables(page, made))
