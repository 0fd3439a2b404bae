"""docs/training_results.md is what the stored numbers say; `-m slow` measures the bits again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HOME = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    path = HOME / "examples" / "06_train_evidence.py"
    spec = importlib.util.spec_from_file_location("train_evidence", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_evidence"] = module
    spec.loader.exec_module(module)
    return module


def test_page_is_made_of_the_stored_numbers(evidence, tmp_path, monkeypatch) -> None:
    written = (HOME / "docs" / "training_results.md").read_text()
    monkeypatch.setattr(evidence, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(evidence, "draw_compare", lambda values: None)
    evidence.page()
    assert (tmp_path / "page.md").read_text() == written


def test_stored_bits_are_equal_for_every_run(evidence) -> None:
    values = evidence.stored("bits")
    for group in ("runs", "dense_runs"):
        assert len(values[group]) >= 5
        assert len({row["last"] for row in values[group]}) == 1
        assert all(row["steps_equal"] == row["steps_computed"] > 0 for row in values[group])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_bits_again(evidence, tmp_path, monkeypatch) -> None:
    """50 steps on 1, 2, 4, 8 ranks, under mpiexec, across a kill: exits if any bit differs.

    Another Python has another default text; with the same text the stored losses come back.
    """
    before = evidence.stored("bits")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    evidence.bits()
    after = evidence.stored("bits")
    if after["text_sha256"] == before["text_sha256"]:
        assert after["losses"] == before["losses"]
