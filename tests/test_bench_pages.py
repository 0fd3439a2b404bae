"""The GPU benchmark's words, model and pages, without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from mok_ref.bench.cases import CASES, TABLE_CASES, BenchCase, routes
from mok_ref.bench.commands import parse_sizes
from mok_ref.bench.growth import (
    ALL_TO_ONE,
    AXES,
    DIRECTIONS,
    GrowthRow,
    bytes_moved,
    cases_of,
    draw_growth,
    limit_ms,
)
from mok_ref.bench.page import BEGIN, END, tables
from mok_ref.bench.variants import AroundRow, RankRow, SavingRow

CEILINGS = {"tflops": 700.0, "tbytes_per_s": 4.0}


def test_words_of_sizes() -> None:
    chosen = parse_sizes("qwen3,growth,sonic:mxfp8,64x32x16x8x2,save")
    cases = [what for what in chosen if isinstance(what, BenchCase)]
    assert [case.name for case in cases] == ["qwen3", "sonic:mxfp8", "64x32x16x8x2"]
    assert [case.dtype for case in cases] == ["bf16", "mxfp8", "bf16"]
    assert (chosen[1], chosen[4]) == ("growth", "save")
    mxfp8 = [what.name for what in parse_sizes("mxfp8") if isinstance(what, BenchCase)]
    assert mxfp8 == [f"{name}:mxfp8" for name in TABLE_CASES]


@pytest.mark.parametrize("word", ["qwen4", "qwen3:fp4", "8x8x8x4", "0x8x8x4x2", ""])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="cases must be of"):
        parse_sizes(f"qwen3,{word}")


def test_all_routes_to_one_expert() -> None:
    case = BenchCase("one", 7, 16, 16, 4, 2, "one")
    ids, weights = routes(case)
    assert ids.dtype == np.int32 and not ids.any() and weights.shape == (7, 2)


def test_bytes_that_must_move_by_hand() -> None:
    case = BenchCase("tiny", 3, 10, 20, 2, 1, "one")
    weights, token = 3 * 10 * 20 * 2, 10 * 2
    assert bytes_moved(case, "forward") == weights + 3 * (2 + 1 + 1) * token
    kept = 3 * 2 * 20 * 2
    assert bytes_moved(case, "backward") == (1 + 2) * weights + kept + 3 * (2 + 1 + 1 + 1) * token


def test_the_limit_is_the_larger_term() -> None:
    few, many = CASES["small-16"], CASES["dsv3-rank"]
    assert limit_ms(few, "forward", CEILINGS)[1] == "memory"
    ms, which = limit_ms(many, "forward", CEILINGS)
    assert which == "products" and ms == pytest.approx(many.flops("forward") / 700e9)


def test_rows_stay_the_same_on_the_axes_of_experts_and_skew() -> None:
    for axis in ("experts", "skew"):
        assert len({case.num_rows for _, case in cases_of(axis)}) == 1
    assert cases_of("skew")[-1] == (ALL_TO_ONE, cases_of("skew")[-1][1])
    assert cases_of("skew")[-1][1].routing == "one"


def growth_rows() -> list[GrowthRow]:
    case = asdict(CASES["qwen3"])
    return [
        GrowthRow(axis, value, direction, 2.0 * value, 1.0 * value, "memory", case)
        for axis in AXES
        for value in (1.0, 2.0, ALL_TO_ONE)
        for direction in DIRECTIONS
    ]


def report() -> dict:
    def row(contender: str, direction: str, ratio: float) -> dict:
        times = {"sustained_ms": 4.0, "bursts_ms": 4.4, "tflops": 600.0}
        ratios = {"ratio_sustained": ratio, "ratio_bursts": 0.9}
        return {"case": "qwen3", "direction": direction, "contender": contender, **times, **ratios}

    return {
        "device": {"gpu": "G", "driver": "1", "cuda": "13.0", "date": "2026-11-29"},
        "rows": [
            row("mok_ref", "forward", 0.9),
            row("mok_ref, saving", "forward", 0.89),
            row("dense cuBLAS", "forward", 1.0),
            row("mok_ref", "backward", 0.5),
            row("mok_ref, bf16 dW", "backward", 0.8),
            row("dense cuBLAS", "backward", 1.0),
        ],
        "bits": {"qwen3": "equal"},
        "host_us": {"qwen3": 30.0},
        "saving": [
            asdict(SavingRow("qwen3", 512, 2048, save, 1.0, step, kept))
            for save, step, kept in (("all", 4.0, 2**22), ("ring", 4.4, 2**20), ("none", 5.0, 0))
        ],
        "ranks": [asdict(RankRow("qwen3", r, "forward", 2.0, r / 4)) for r in (1, 4)],
        "around": [
            asdict(AroundRow("qwen3", "schedule", 21.0, None)),
            asdict(AroundRow("qwen3", "y", 75.0, 4.02)),
        ],
        "growth": [asdict(row) for row in growth_rows()],
        "ceilings": CEILINGS,
    }


def test_a_page_holds_what_the_report_has() -> None:
    page = tables([report()], ["curves.svg"])
    assert "| qwen3 | 0.900 (0.900) | 0.82 | 0.800 (0.900) | 0.75 | **0.500** (0.900) |" in page
    assert "dsv3-rank" not in page  # not run
    assert "| qwen3 | 512 / 2048 | none | 0 | 1.000 | 5.000 | +25.0 % |" in page
    assert "| qwen3 | 4 | forward | 2.000 | 1.000 |" in page
    assert "| qwen3 | schedule | 21.0 | – |" in page and "| qwen3 | y | 75.0 | 4.02 |" in page
    assert "| skew | all to one | 6.000 | 3.000 | 6.000 | 3.000 | memory |" in page
    assert "(curves.svg)" in page and "Host time per forward call: 30 to 30 us" in page


def test_stored_reports_still_make_the_page() -> None:
    docs = Path(__file__).parents[1] / "docs"
    stored = sorted((docs / "results").glob("bench_*.json"))
    page = (docs / "results.md").read_text(encoding="utf-8")
    made = page.split(BEGIN)[1].split(END)[0].strip()
    for path in stored:
        text = tables([json.loads(path.read_text(encoding="utf-8"))])
        first = text.splitlines()[0]
        assert first in made


def test_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "growth.svg"
    draw_growth([asdict(row) for row in growth_rows()], path)
    assert path.read_text(encoding="utf-8").count("<path") > 10
