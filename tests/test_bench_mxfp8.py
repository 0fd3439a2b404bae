"""The report of the MXFP8 benchmark and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mok_ref.bench import mxfp8
from mok_ref.bench.cases import CASES

DOCS = Path(__file__).resolve().parents[1] / "docs"
REPORT = DOCS / "results" / "mxfp8_h200.json"


def test_every_case_was_compared_and_equal() -> None:
    rows = json.loads(REPORT.read_text(encoding="utf-8"))["rows"]
    assert [row["case"] for row in rows] == list(mxfp8.DEFAULT_CASES)
    for row in rows:
        assert row["bits"] == "equal" and row["flops"] == CASES[row["case"]].flops("forward")
        assert set(row["ms"]) == {*mxfp8.COLUMNS, *mxfp8.BACKWARD}
        assert set(row["ratios"]) == set(mxfp8.RATIOS)


def test_memory_of_the_page_is_computed() -> None:
    parts = mxfp8.memory_of(CASES["dsv3-rank"])
    weights = 2 * 3 * 4 * 7168 * 2048
    assert parts["weights"] == (weights, weights * 33 // 64)
    page = (DOCS / "mxfp8.md").read_text(encoding="utf-8")
    for bf16, ours in parts.values():
        assert f"{bf16 / 2**20:,.1f} → {ours / 2**20:,.1f}" in page


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="one pair of markers"):
        mxfp8.fill_page(page, REPORT)
