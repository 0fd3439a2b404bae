"""Stored reports that are damaged, partial or another program's: one line, and the page stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mok_ref.bench import links_page, mxfp8, page
from mok_ref.bench.commands import bench_cuda, bench_on_cpu
from mok_ref.bench.report_files import (
    BEGIN,
    COUNT,
    END,
    NAME,
    POSITIVE,
    Each,
    Maybe,
    check_shape,
    one_of,
    write_between_markers,
)
from mok_ref.casefile import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
NAN = float("nan")


def stored(pattern: str, key: str = "device") -> dict[str, Any]:
    """The last of these reports that holds something at `key`."""
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob(pattern))]
    return [report for report in reports if report.get(key)][-1]


def bench_report() -> dict[str, Any]:
    """Tables of cases, and the other experiments."""
    rows = [
        {"axis": axis, "value": value, "direction": direction, "ms": 2.0, "limit_ms": 1.0}
        | {"limited_by": "memory"}
        for axis in ("tokens", "experts", "skew", "ranks")
        for value in (1.0, 2.0)
        for direction in ("forward", "backward")
    ]
    kept = {"case": "qwen3", "ring_rows": 128, "rows": 512, "forward_ms": 1.0, "step_ms": 3.0}
    saving = [kept | {"save": save, "saved_bytes": 0} for save in ("all", "none")]
    ceilings = {"tflops": 700.0, "tbytes_per_s": 4.0}
    return stored("bench_*.json", "rows") | {"growth": rows, "saving": saving, "ceilings": ceilings}


MAIN = {"page": page.main, "links_page": links_page.main, "mxfp8": mxfp8.main}
REPORT: dict[str, Callable[[], dict[str, Any]]] = {
    "page": bench_report,
    "links_page": lambda: stored("multi_gpu_h200*.json"),
    "mxfp8": lambda: stored("mxfp8_h200.json"),
}
PAGE_TEXT = f"# Page\n{BEGIN}\nold\n{END}\n" + "".join(
    f"<!-- begin {name} -->\nold\n<!-- end {name} -->\n" for name in mxfp8.TABLES
)


def words_of(program: str, report: Path, target: Path) -> list[str]:
    if program == "mxfp8":
        return ["--page", str(target), str(report)]
    return [str(report), "--output", str(target)]


def refused(program: str, folder: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a program says of a report with this content; nothing else happens."""
    report, target = folder / "given.json", folder / "page.md"
    report.write_bytes(content)
    target.write_text(PAGE_TEXT)
    with pytest.raises(SystemExit) as stopped:
        MAIN[program](words_of(program, report, target))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert target.read_text() == PAGE_TEXT
    assert sorted(path.name for path in folder.iterdir()) == ["given.json", "page.md"]
    assert line.startswith(f"error: {report}: must be a report of ")
    return line


def other_reports(program: str) -> list[bytes]:
    names = [path for path in RESULTS.glob("*.json") if path.stat().st_size < 200_000]
    own = {"page": "bench_", "links_page": "multi_gpu_", "mxfp8": "mxfp8_h200"}[program]
    return [path.read_bytes() for path in names if not path.name.startswith(own)]


@pytest.mark.parametrize("program", MAIN)
def test_files_that_are_no_report_of_the_program(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.dumps(REPORT[program]()).encode()
    broken = [b"", b"\xff\xfe\0", b"{}", b"[1, 2]", b"7", b"null", b'{"rows": []}', b"[" * 99_999]
    broken += [
        b'{"links": []}',
        b'{"checks": {}}',
        b"9" * 5000,
        whole[: len(whole) // 2],
        whole[:-1],
    ]
    for content in [*broken, *other_reports(program)]:
        refused(program, tmp_path, content, capsys)


def test_a_report_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.md"
    target.write_text(PAGE_TEXT)
    for program, main in MAIN.items():
        for report in (tmp_path / "absent.json", tmp_path):
            with pytest.raises(SystemExit):
                main(words_of(program, report, target))
            (line,) = capsys.readouterr().err.splitlines()
            assert str(report) in line
    assert target.read_text() == PAGE_TEXT


@pytest.mark.parametrize("program", MAIN)
def test_pages_that_cannot_be_filled(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, target = tmp_path / "given.json", tmp_path / "page.md"
    report.write_text(json.dumps(REPORT[program]()))
    twice = PAGE_TEXT + PAGE_TEXT
    for content in (None, b"", b"\xff\xfe", twice.encode(), b"<!-- tables: begin -->"):
        target.unlink(missing_ok=True)
        if content is not None:
            target.write_bytes(content)
        with pytest.raises(SystemExit) as stopped:
            MAIN[program](words_of(program, report, target))
        (line,) = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2 and str(target) in line
        if content is None:
            assert "must be an existing page with the markers '<!-- " in line
        assert (target.read_bytes() if target.exists() else None) == content
        assert not (tmp_path / "given.svg").exists()


PARTIAL: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("page", lambda r: r.update({key: [] for key in page.BENCH.some_of}), "nothing was measured"),
    ("page", lambda r: r.update(saving_cost={"qwen3": 0}), "saving_cost['qwen3'] must be"),
    ("page", lambda r: r.update(left_out={"SonicMoE": ""}), "left_out['SonicMoE'] must be a text"),
    ("page", lambda r: r["device"].update(gpu_id="a|b"), "device.gpu_id must be a name"),
    ("page", lambda r: r["rows"][3].update(sustained_ms=NAN), "rows[3].sustained_ms must be"),
    ("page", lambda r: r["rows"][3].update(sustained_ms=0), "rows[3].sustained_ms must be"),
    ("page", lambda r: r["rows"][3].update(ratio_bursts=-1.0), "rows[3].ratio_bursts must be"),
    ("page", lambda r: r["rows"][3].update(tflops="9"), "rows[3].tflops must be"),
    ("page", lambda r: r["rows"][3].pop("case"), "rows[3].case is missing"),
    ("page", lambda r: r.pop("bits"), "bits is missing"),
    ("page", lambda r: r.pop("device"), "device is missing"),
    ("page", lambda r: r["growth"].pop(), "growth holds forward alone at ranks 2"),
    ("page", lambda r: r.pop("ceilings"), "ceilings must hold tflops"),
    ("page", lambda r: r["saving"].pop(0), "saving holds no save=all of qwen3, ring 128"),
    ("links_page", lambda r: r.update(links=[], layers=[]), "nothing was measured"),
    ("links_page", lambda r: r["layers"][0].update(case="foo"), "layers[0].case must be one of"),
    ("links_page", lambda r: r["layers"][0].update(ms=0), "layers[0].ms must be"),
    ("links_page", lambda r: r["layers"][0].update(tflops=NAN), "layers[0].tflops must be"),
    ("links_page", lambda r: r["layers"][0].update(R=3), "layers[0].R must be one of 1, 2, 4, 8"),
    ("links_page", lambda r: r["layers"][0].update(T=1), "T, H, I, E, K of qwen3 in layers"),
    ("links_page", lambda r: r.pop("hidden"), "hidden is missing"),
    ("links_page", lambda r: r["device"].update(gpu=["a"]), "device.gpu must be a name"),
    ("links_page", lambda r: r.update(links=r["links"][:4]), "links holds no pull, 3 warps"),
    (
        "links_page",
        lambda r: r.update(layers=[x for x in r["layers"] if "nothing" not in x["contender"]]),
        "layers holds no mok_ref, nothing remote for qwen3 forward, R = 1",
    ),
    ("mxfp8", lambda r: r.update(rows=[]), "nothing was measured"),
    ("mxfp8", lambda r: r["rows"][1].update(tokens=7), "tokens of qwen3 in rows must be 8192, got"),
    ("mxfp8", lambda r: r["rows"].append(r["rows"][1]), "each case once, got qwen3 twice"),
    ("mxfp8", lambda r: r["rows"][1].update(case="foo"), "rows[1].case must be one of"),
    ("mxfp8", lambda r: r["rows"][1]["ms"].update({"bf16 step": 0}), "ms.bf16 step must be"),
    ("mxfp8", lambda r: r["rows"][1]["ms"].pop("bf16 step"), "rows[1].ms.bf16 step is missing"),
    ("mxfp8", lambda r: r["rows"][1].update(ratios={"kernel": 0}), "ratios.kernel must be"),
]


@pytest.mark.parametrize(("program", "change", "text"), PARTIAL)
def test_what_a_report_lacks_is_named(
    program: str,
    change: Callable[[dict[str, Any]], Any],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = REPORT[program]()
    if program == "links_page":
        report["links"] = report["links"] or stored("multi_gpu_h200*_2.json")["links"]
    change(report)
    assert text in refused(program, tmp_path, json.dumps(report).encode(), capsys)


def test_texts_of_a_check_stay_in_their_cell() -> None:
    device = {"gpu": "G", "driver": "1", "cuda": "13.0", "date": "today", "gpus": 2, "heap": "H"}
    lines = links_page.checks_lines([{"device": device, "checks": {"a": "no | x\nmore"}}])
    assert any(line.endswith("| no \\| x more |") for line in lines)


def test_pictures_come_after_everything_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    for draw in ("draw_growth", "draw_runs"):
        monkeypatch.setattr(page, draw, lambda rows, path: drawn.append(path))
    first, second, target = (tmp_path / name for name in ("a.json", "b.json", "page.md"))
    first.write_text(json.dumps(bench_report()))
    second.write_text("{}")
    target.write_text(PAGE_TEXT)
    with pytest.raises(ValueError, match=r"b\.json: must be a report of bench --device cuda"):
        page.write_page([first, second], target)
    assert drawn == [] and target.read_text() == PAGE_TEXT
    page.write_page([first], target)
    assert drawn == [tmp_path / "page.svg", tmp_path / "a.svg"]
    assert "(page.svg)" in target.read_text() and "(a.svg)" in target.read_text()


def test_a_run_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for draw in ("draw_growth", "draw_runs"):
        monkeypatch.setattr(page, draw, lambda *_: None)
    monkeypatch.chdir(tmp_path)
    first, second, target = (tmp_path / name for name in ("a.json", "b.json", "page.md"))
    report = bench_report()
    first.write_text(json.dumps(report))
    target.write_text(PAGE_TEXT)
    with pytest.raises(ValueError, match=r"must be named once, got a\.json twice"):
        page.write_page([first, Path("a.json")], target)
    second.write_text(json.dumps(report | {"saving": []}))
    with pytest.raises(ValueError, match=r"of different runs, got one in .*a\.json, .*b\.json"):
        page.write_page([first, second], target)
    assert target.read_text() == PAGE_TEXT
    changes: list[dict[str, Any]] = [{"device": report["device"] | {"time": "00:01 UTC"}}]
    for change in [*changes, {"rows": []}]:
        second.write_text(json.dumps(report | change))
        page.write_page([first, second], target)


def test_a_picture_replaces_no_report(tmp_path: Path) -> None:
    report, target = tmp_path / "a.svg", tmp_path / "page.md"
    report.write_text(json.dumps(bench_report()))
    target.write_text(PAGE_TEXT)
    with pytest.raises(ValueError, match="picture must be another file than report"):
        page.write_page([report], target)


# --------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("value", "shape", "text"),
    [
        ({"a": [1, -1]}, {"a": [COUNT]}, "a[1] must be a whole number >= 0, got -1"),
        ({"a": True}, {"a": COUNT}, "a must be a whole number"),
        ({"a": 2.0}, {"a": one_of(1, 2)}, "a must be one of 1, 2, got 2.0"),
        ({"a": []}, {"a": one_of("x")}, "a must be one of x"),
        ({"a": 1e-300}, {"a": POSITIVE}, "a must be a number from"),
        ({"a": float("inf")}, {"a": POSITIVE}, "a must be a number from"),
        ({"a": 10**400}, {"a": POSITIVE}, "a must be a number from"),
        ({"a": "x|y"}, {"a": NAME}, "a must be a name"),
        ({"a": {"b\n": 1}}, {"a": Each(COUNT)}, "the key 'b\\n' of a must be a name"),
        ({"a": {"b": "x"}}, {"a": Each(COUNT)}, "a['b'] must be"),
        ({"a": 1}, {"a": {"b": COUNT}}, "a must be an object, got 1"),
        ({"a": {}}, {"a": [COUNT]}, "a must be a list, got {}"),
        ({}, {"a": {"b": COUNT}}, "a is missing"),
        ({"b": "x"}, {"a": Maybe(COUNT), "b": Maybe(COUNT)}, "b must be a whole number"),
    ],
)
def test_shapes(value: Any, shape: Any, text: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_shape(value, shape)
    assert str(raised.value).startswith(text)


def test_shapes_let_other_keys_through() -> None:
    check_shape({"a": 1, "more": object()}, {"a": COUNT, "b": Maybe(COUNT)})


def test_a_table_is_put_between_its_markers_alone(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    target.write_text("x <a>\nold\n</a> y <b>\nold\n</b> z")
    write_between_markers(target, {("<a>", "</a>"): "one", ("<b>", "</b>"): "two"})
    assert target.read_text() == "x <a>\none\n</a> y <b>\ntwo\n</b> z"
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_nothing_is_measured_for_a_report_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "none" / "r.json"
    with pytest.raises(ValueError, match="output must lie in a folder"):
        bench_on_cpu("16x16x16x2x1", "1", "forward", 1, nowhere, True)
    with pytest.raises(ValueError, match="output must lie in a folder"):
        bench_cuda("qwen3", output=nowhere)  # said before that there is no GPU
    assert capsys.readouterr() == ("", "")


def test_writing_a_report_replaces_no_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    neighbours = ("r.part", "r.json.part", ".r.json.tmp", "r.tmp")
    for name in neighbours:
        (tmp_path / name).write_text("mine")
    bench_on_cpu("16x16x16x2x1", "1", "forward", 1, tmp_path / "r.json", True)
    assert capsys.readouterr().err.startswith("16x16x16x2x1, R = 1: ")
    assert json.loads((tmp_path / "r.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {*neighbours, "r.json"}
    assert all((tmp_path / name).read_text() == "mine" for name in neighbours)
    with pytest.raises(ValueError, match="got the directory"):
        write_whole(tmp_path, "text")
