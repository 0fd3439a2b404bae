"""docs/mxfp8.md is what the stored numbers say, and the script still measures those numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mok_ref.runner import traffic_of

HOME = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "mxfp8_accuracy", HOME / "examples" / "08_mxfp8_accuracy.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mxfp8_accuracy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored(accuracy: ModuleType) -> dict:
    return json.loads(accuracy.RESULTS.read_text(encoding="utf-8"))


def test_page_is_made_of_the_stored_numbers(accuracy: ModuleType, stored: dict) -> None:
    page = accuracy.PAGE.read_text(encoding="utf-8")
    assert accuracy.fill(page, stored) == page
    changed = json.loads(json.dumps(stored))
    changed["errors"][0]["y"] *= 2
    changed["bytes"][0]["pulled"] += 1
    assert accuracy.fill(page, changed) != page


def test_one_row_is_measured_again(accuracy: ModuleType, stored: dict) -> None:
    case = accuracy.make_case("outlier channels", 0)
    found = accuracy.errors(case, accuracy.oracle(case), "mxfp8, fit")
    wanted = {"inputs": "outlier channels", "arithmetic": "mxfp8, fit", "seed": 0}
    (row,) = accuracy.matching(stored["errors"], **wanted)
    assert {name: row[name] for name in found} == pytest.approx(found, rel=1e-4)
    x = accuracy.token_statistics("outlier channels", 0, "ocp")
    (row,) = accuracy.matching(stored["x"], inputs="outlier channels", rule="ocp", seed=0)
    assert {name: row[name] for name in x} == pytest.approx(x, rel=1e-4)


def test_every_row_is_there(accuracy: ModuleType, stored: dict) -> None:
    rows = [(row["inputs"], row["arithmetic"], row["seed"]) for row in stored["errors"]]
    wanted = [
        (i, a, s) for i in accuracy.INPUTS for s in accuracy.SEEDS for a in accuracy.ARITHMETICS
    ]
    assert sorted(rows) == sorted(wanted)
    sizes = {key: stored["sizes"][key] for key in accuracy.SIZES}
    assert sizes == accuracy.SIZES and stored["sizes"]["top_k"] == accuracy.TOP_K


def test_counted_bytes(accuracy: ModuleType, stored: dict) -> None:
    """Counted in the heap, and by the schedule: remote rows times bytes per row."""
    case = accuracy.make_case("random", 0)
    plan = accuracy.make_plan(case, accuracy.Settings(ranks=accuracy.BYTES_RANKS))
    traffic = np.array(traffic_of(plan, case.topk_ids))
    remote = int(traffic.sum() - np.trace(traffic))
    hidden = accuracy.SIZES["hidden_size"]
    row_bytes = {"bf16": 2 * hidden, "mxfp8": hidden + hidden // 32}
    for row in stored["bytes"]:
        pulls = {"forward": 1, "backward": 2}[row["step"]]  # x; dy, and x again
        assert row["pulled"] == pulls * remote * row_bytes[row["dtype"]]
        assert row["pushed"] == remote * row_bytes["bf16"]
    assert row_bytes["mxfp8"] / row_bytes["bf16"] == 33 / 64
    assert accuracy.count_bytes(case, "mxfp8", False) == {
        way: accuracy.matching(stored["bytes"], dtype="mxfp8", step="forward")[0][way]
        for way in ("pulled", "pushed")
    }


def test_relative_error_by_hand(accuracy: ModuleType) -> None:
    assert accuracy.relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == 0.2


def test_what_the_page_says_of_the_rules(accuracy: ModuleType, stored: dict) -> None:
    """`fit` is nearer to float64 than `ocp` everywhere, and nothing saturates under it."""
    for inputs in accuracy.INPUTS:
        fit, ocp = (
            accuracy.matching(stored["errors"], inputs=inputs, arithmetic=f"mxfp8, {rule}")
            for rule in ("fit", "ocp")
        )
        for a, b in zip(fit, ocp, strict=True):
            assert a["seed"] == b["seed"]
            assert all(a[name] < b[name] for name in accuracy.TENSORS)
    assert all(row["saturated"] == 0 for row in stored["x"] if row["rule"] == "fit")
    assert all(row["saturated"] > 0 for row in stored["x"] if row["rule"] == "ocp")
