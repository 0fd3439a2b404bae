"""docs/spec.md names what exists: functions, tests, and every equation the code cites."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = (ROOT / "docs/spec.md").read_text()
HOMES = (
    ROOT / "mok_ref",
    ROOT / "cuda_src",
    ROOT / "tests",
)
REFERENCE = re.compile(r"`([a-z0-9_]+\.(?:py|cuh|cu)): ([a-z0-9_]+)`")
CITATION = re.compile(
    r"[Ss]pec (?:eq\. )?((?:R?\d+(?:\.\d+)?c?)(?:(?:, | - | to )R?\d+(?:\.\d+)?c?)*)"
)


def table_references() -> list[tuple[str, str]]:
    return sorted(set(REFERENCE.findall(SPEC)))


def equations() -> set[str]:
    """Numbers that begin an equation."""
    return set(re.findall(r"^    ((?:\d+\.\d+c?)|R\d+) ", SPEC, re.MULTILINE))


@pytest.mark.parametrize(("file", "name"), table_references())
def test_what_the_tables_name_exists(file: str, name: str) -> None:
    home = next(home / file for home in HOMES if (home / file).exists())
    keyword = "def " if file.endswith(".py") else r"[ *&]"
    assert re.search(rf"{keyword}{name}\(", home.read_text()), f"{home} has no {name}"


def test_every_equation_is_in_a_table() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", SPEC, re.MULTILINE)
    named: set[str] = set()
    for cell in rows:
        for part in cell.strip().split(", "):
            first, _, last = part.partition("–")
            named |= _between(first, last or first)
    assert equations() <= named
    assert len(equations()) > 45


def _between(first: str, last: str) -> set[str]:
    """Equation numbers of a range such as 6.1–6.3 or R7–R9."""
    match = re.fullmatch(r"(R|\d+\.)(\d+)", first)
    if match is None or first == last:
        return {first}
    prefix, low = match.groups()
    return {f"{prefix}{n}" for n in range(int(low), int(last.removeprefix(prefix)) + 1)}


def test_every_cited_equation_exists() -> None:
    known = equations()
    for home in (ROOT / "mok_ref", ROOT / "cuda_src"):
        for path in (*home.rglob("*.py"), *home.rglob("*.cu*")):
            for cited in CITATION.findall(path.read_text()):
                for number in re.findall(r"R\d+|\d+\.\d+c?", cited):
                    assert number in known, f"{path} cites spec eq. {number}"
