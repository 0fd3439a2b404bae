"""The GPU benchmark's words, model and pages, without a GPU."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mok_ref.bench import entry, links_page, links_run, mxfp8, page, tasks
from mok_ref.bench.cases import CASES, TABLE_CASES, BenchCase, routes
from mok_ref.bench.commands import parse_sizes
from mok_ref.bench.cpu import bench_cpu
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
from mok_ref.bench.page import tables_of
from mok_ref.bench.report_files import BEGIN, END, write_between_markers
from mok_ref.bench.variants import AroundRow, RankRow, SavingRow
from mok_ref.heap import cuda_device
from mok_ref.install import install_hint

DOCS = Path(__file__).resolve().parents[1] / "docs"
CEILINGS = {"tflops": 700.0, "tbytes_per_s": 4.0}


def test_words_of_sizes() -> None:
    chosen = parse_sizes("qwen3,growth,sonic:mxfp8,64x32x16x8x2,save")
    cases = [what for what in chosen if isinstance(what, BenchCase)]
    assert [case.name for case in cases] == ["qwen3", "sonic:mxfp8", "64x32x16x8x2"]
    assert [case.dtype for case in cases] == ["bf16", "mxfp8", "bf16"]
    assert (chosen[1], chosen[4]) == ("growth", "save")
    mxfp8 = [what.name for what in parse_sizes("mxfp8") if isinstance(what, BenchCase)]
    assert mxfp8 == [f"{name}:mxfp8" for name in TABLE_CASES]


@pytest.mark.parametrize(
    "word",
    [
        "qwen4", "qwen3:fp4", "8x8x8x4", "0x8x8x4x2", "", "mxfp8:bf16", "mxfp8:mxfp8", "save:mxfp8",
        "qwen3:", "qwen3:mxfp8:mxfp8", "\u0664x8x8x4x2", "\u00b2x8x8x4x2", "9" * 5000 + "x8x8x4x2",
    ],
)  # fmt: skip
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="cases must be of"):
        parse_sizes(f"qwen3,{word}")


def test_what_is_named_twice_is_run_once() -> None:
    assert parse_sizes("qwen3,qwen3:bf16,save,qwen3,save") == [CASES["qwen3"], "save"]
    assert parse_sizes("sonic,table") == parse_sizes("sonic,table,sonic")
    timings = bench_cpu("16x16x16x2x1,16x16x16x2x1", [1], 1, False)
    assert [timing.name for timing in timings] == ["16x16x16x2x1"]


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
    made = tables_of(report(), "curves.svg")
    assert "| qwen3 | 0.900 (0.900) | 0.82 | 0.800 (0.900) | 0.75 | **0.500** (0.900) |" in made
    assert "dsv3-rank" not in made  # not run
    assert "| qwen3 | 512 / 2048 | none | 0 | 1.000 | 5.000 | +25.0 % |" in made
    assert "| qwen3 | 4 | forward | 2.000 | 1.000 |" in made
    assert "| qwen3 | schedule | 21.0 | – |" in made and "| qwen3 | y | 75.0 | 4.02 |" in made
    assert "| skew | all to one | 6.000 | 3.000 | 6.000 | 3.000 | memory |" in made
    assert "(curves.svg)" in made


PAGES = {
    "results.md": (page.main, "{reports} --output {page}", "bench_*.json"),
    "multi_gpu.md": (links_page.main, "{reports} --output {page}", "multi_gpu_*.json"),
    "mxfp8.md": (mxfp8.main, "--page {page} {reports}", "mxfp8_h200.json"),
}


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_what_its_command_makes(name: str, tmp_path: Path) -> None:
    """A page that changes here is made again by the command that it (or its script) names."""
    main, words, pattern = PAGES[name]
    copy = tmp_path / name
    shutil.copy(DOCS / name, copy)
    (tmp_path / "results").mkdir()
    for path in (DOCS / "results").glob(pattern):
        shutil.copy(path, tmp_path / "results")
    reports = [str(path) for path in sorted((tmp_path / "results").glob(pattern))]
    assert reports
    made_of = {"{reports}": reports, "{page}": [str(copy)]}
    main([each for word in words.split() for each in made_of.get(word, [word])])
    assert copy.read_text(encoding="utf-8") == (DOCS / name).read_text(encoding="utf-8")


def test_kernels_of_a_report_are_named() -> None:
    assert entry.kernels_line({"kernels": entry.kernels_name()}).endswith("the present sources.")
    old = entry.kernels_line({"kernels": "0123456789ab"})
    assert old.startswith("- Older kernels: ") and "0123456789ab" in old
    assert entry.kernels_line({}).startswith("- Older kernels: the report does not name")


def test_host_times_of_older_kernels_are_marked() -> None:
    made = report()
    assert "Host time per forward call with those older kernels and launches: 30" in tables_of(made)
    made["device"]["kernels"] = entry.kernels_name()
    assert "Host time per forward call: 30 to 30 us" in tables_of(made)


# --------------------------------------------------------------------------- errors


MEASURING = [(tasks.main, ["qwen3"]), (mxfp8.main, ["qwen3"]), (links_run.main, [])]


def refusal(main: Callable[..., Any], words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(("main", "words"), MEASURING)
def test_nothing_is_measured_without_cupy_or_torch(
    main: Callable[..., Any],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert install_hint("gpu") in refusal(main, words, capsys)
    if main is not mxfp8.main:  # it uses no torch
        monkeypatch.setattr(cuda_device, "import_cupy", lambda: None)
        monkeypatch.setitem(sys.modules, "torch", None)
        assert "pip install torch" in refusal(main, words, capsys)
        cpu = SimpleNamespace(__version__="9+cpu", cuda=SimpleNamespace(is_available=lambda: False))
        monkeypatch.setitem(sys.modules, "torch", cpu)
        assert "needs a torch with CUDA, got torch 9+cpu" in refusal(main, words, capsys)


@pytest.mark.parametrize(
    ("main", "words", "text"),
    [
        (tasks.main, ["nocase"], "give --read or cases of"),
        (tasks.main, ["--nothing"], "unrecognized arguments: --nothing"),
        (tasks.main, ["--read", "none.npz"], "none.npz"),
        (mxfp8.main, ["nocase"], "cases must be of"),
        (mxfp8.main, ["--page", "p.md"], "--page needs one report, got none"),
        (mxfp8.main, ["--page", "p.md", "none.json"], "none.json: No such file"),
        (links_run.main, ["--parts", "x"], "parts must be of links, layers, bits, got 'x'"),
        (links_run.main, ["--timeout", "0"], "timeout must be above 0"),
        (page.main, ["none.json", "--output", "p.md"], "none.json: No such file"),
        (page.main, [__file__, "--output", "p.md"], "must be a report of bench --device cuda"),
        (links_page.main, [], "required: reports, --output"),
    ],
)
def test_wrong_words_and_files_are_one_line(
    main: Callable[..., Any], words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refusal(main, words, capsys)


@pytest.mark.parametrize("text", ["nothing", END + BEGIN, BEGIN * 2 + END])
def test_a_page_without_its_pair_of_markers_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="one pair of markers"):
        write_between_markers(path, {(BEGIN, END): "made"})
    assert path.read_text() == text


def test_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "growth.svg"
    draw_growth([asdict(row) for row in growth_rows()], path)
    assert path.read_text(encoding="utf-8").count("<path") > 10
