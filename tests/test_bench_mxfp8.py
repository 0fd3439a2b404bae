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
        case = CASES[row["case"]]
        assert row["differing"] == 0
        assert row["compared"] == case.num_tokens * case.hidden_size
        assert row["flops"] == case.flops("forward") and set(row["ms"]) == set(mxfp8.COLUMNS)


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="one pair of markers"):
        mxfp8.fill_page(page, REPORT)
