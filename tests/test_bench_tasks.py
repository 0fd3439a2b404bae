"""The table of a kernel's tasks, from stamps made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mok_ref.bench import tasks
from mok_ref.bench.cases import CASES
from mok_ref.planner.trace import STAMP, STAMP_KINDS, read_trace


def stamps_of(*records: tuple[str, int, int, int]) -> np.ndarray:
    """(kind, warp, start, end) in ns."""
    stamps = np.zeros(len(records), STAMP)
    for stamp, (kind, warp, start, end) in zip(stamps, records, strict=True):
        stamp["kind"], stamp["warp"] = STAMP_KINDS.index(kind), warp
        stamp["start"], stamp["end"] = start, end
    return stamps[np.argsort(stamps["start"], kind="stable")]


TWO_MACROBATCHES = stamps_of(
    ("pull", 2, 0, 5),
    ("dgrad_hidden", 4, 5, 10),
    ("dgrad_input", 8, 8, 20),
    ("load", 0, 20, 24),
    ("wgrad", 4, 22, 30),
    ("store", 4, 30, 32),
    ("pull", 2, 32, 36),
    ("dgrad_input", 4, 35, 40),
    ("wgrad", 8, 41, 50),
)


def test_launches_are_told_apart_by_their_products() -> None:
    parts = tasks.phases_of(TWO_MACROBATCHES)
    kinds = {name: [STAMP_KINDS[k] for k in part["kind"]] for name, part in parts.items()}
    assert kinds == {
        "dgrad": ["pull", "dgrad_hidden", "dgrad_input", "store", "pull", "dgrad_input"],
        "wgrad": ["load", "wgrad", "wgrad"],
    }


def test_nothing_recorded_has_no_phases() -> None:
    assert tasks.phases_of(np.zeros(0, STAMP)) == {}
    assert tasks.rows_of(CASES["qwen3"], np.zeros(0, STAMP), 1e9) == []


def test_rows_name_share_and_floor() -> None:
    case = CASES["qwen3"]
    stamps = stamps_of(("gate_up", 4, 0, 40_000), ("wait_operands", 4, 40_000, 50_000))
    rows = {r.kind: r for r in tasks.rows_of(case, stamps, 1e9)}
    assert rows["gate_up"].share == pytest.approx(0.8)
    assert rows["gate_up"].mean_us == pytest.approx(40.0)
    # 128 x 256 x 2048 products at 2048 a clock
    assert rows["gate_up"].floor_us == pytest.approx(32.768)
    assert rows["wait_operands"].floor_us is None


@pytest.mark.parametrize(
    ("kind", "depth"), [("gate_up", 2048), ("down", 768), ("dgrad_input", 1536), ("wgrad", None)]
)
def test_depth_of_a_tile(kind: str, depth: int | None) -> None:
    assert tasks.depth_of(CASES["qwen3"], kind) == depth


def test_the_text_names_lost_tasks() -> None:
    times = [tasks.PhaseTime("qwen3", "forward", {"forward": 1.25}, 1.5, 1.4, 7)]
    rows = tasks.rows_of(CASES["qwen3"], stamps_of(("gate_up", 4, 0, 40_000)), 1e9)
    text = tasks.table_text(rows, times)
    assert "qwen3 forward: 1.400 ms, 1.500 ms with stamps; forward 1.250 ms; 7 tasks" in text
    assert "gate_up              1     40.00" in text


def recorded() -> list[tasks.Recorded]:
    stamps = stamps_of(("gate_up", 4, 0, 40_000), ("down", 8, 40_000, 50_000))
    return [tasks.Recorded("qwen3", "forward", stamps, 0, 1.5, 1.4, 1e9)]


def test_stamps_survive_a_file_and_the_table_is_made_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, table = tmp_path / "stamps.npz", tmp_path / "table.json"
    tasks.save_stamps(path, recorded(), {"gpu": "H200"})
    assert tasks.main(["--read", str(path), "--output", str(table), "--traces", str(tmp_path)]) == 0
    assert "qwen3 forward: 1.400 ms" in capsys.readouterr().out
    document = json.loads(table.read_text())
    assert document["device"] == {"gpu": "H200"} and len(document["times"]) == 1
    spans = read_trace(tmp_path / "qwen3-forward.json")
    assert sorted(span.name.split(" ")[0] for span in spans) == ["down", "gate_up"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.zeros(1))
    with pytest.raises(
        ValueError, match=r"x\.npz: must be stamps of bench\.tasks: facts is missing"
    ):
        tasks.load_stamps(path)


def saved(path: Path, facts: Any, stamps: np.ndarray) -> Path:
    np.savez(path, facts=np.array(json.dumps(facts)), stamps0=stamps)
    return path


def facts_of(**changes: Any) -> dict[str, Any]:
    """What a file says about one recorded call."""
    times = {"traced_ms": 1.5, "plain_ms": 1.4, "clock_hz": 1e9}
    one = {"case": "qwen3", "direction": "forward", "lost": 0, **times, **changes}
    return {"device": {"gpu": "G"}, "recorded": [{k: v for k, v in one.items() if v is not None}]}


STAMPS = stamps_of(("gate_up", 4, 0, 40_000), ("down", 8, 40_000, 50_000))
BACKWARDS, UNKNOWN = STAMPS.copy(), STAMPS.copy()
BACKWARDS["end"], UNKNOWN["kind"] = 0, 99


@pytest.mark.parametrize(
    ("facts", "stamps", "text"),
    [
        (facts_of(case="foo"), STAMPS, r"recorded\[0\]\.case must be one of"),
        (facts_of(direction="sideways"), STAMPS, r"recorded\[0\]\.direction must be one of"),
        (facts_of(traced_ms=None), STAMPS, r"recorded\[0\]\.traced_ms is missing"),
        (facts_of(plain_ms=float("nan")), STAMPS, r"recorded\[0\]\.plain_ms must be"),
        (facts_of(clock_hz=0), STAMPS, r"recorded\[0\]\.clock_hz must be"),
        (facts_of(lost=-1), STAMPS, r"recorded\[0\]\.lost must be"),
        ([1], STAMPS, "it must be an object"),
        ({"device": {}, "recorded": []}, STAMPS, "recorded is empty"),
        ({"recorded": []}, STAMPS, "device is missing"),
        (facts_of(), UNKNOWN, r"stamps0: stamps\.kind must be below"),
        (facts_of(), BACKWARDS, r"stamps0: stamps\.end must not precede"),
        (facts_of(), np.zeros(3), r"stamps0: stamps must have dtype"),
        (facts_of(), STAMPS[None], "stamps0 must be an array of one axis"),
    ],
)
def test_stamps_that_no_run_makes_are_refused(
    facts: Any, stamps: np.ndarray, text: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "s.npz", facts, stamps)
    with pytest.raises(ValueError, match=rf"s\.npz: must be stamps of bench\.tasks: {text}"):
        tasks.load_stamps(path)


def test_fields_of_a_later_version_are_let_through(tmp_path: Path) -> None:
    (one,), device = tasks.load_stamps(saved(tmp_path / "s.npz", facts_of(more=1), STAMPS))
    assert one.case == "qwen3" and device == {"gpu": "G"}


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path / "s.npz", facts_of(), STAMPS).read_bytes()
    path = tmp_path / "x.npz"
    for content in (b"", b"\xff\xfe", b"PK\3\4", b"{}", whole[: len(whole) // 2], whole[:-30]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.npz: "):
            tasks.load_stamps(path)


def test_files_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "require_gpu", lambda what: pytest.fail("it went on"))
    read, folder = saved(tmp_path / "s.npz", facts_of(), STAMPS), str(tmp_path)
    before = read.read_bytes()
    for words, text in (
        (["qwen3", "--traces", f"{folder}/none"], "--traces must be a folder"),
        (["qwen3", "--traces", str(read)], "--traces must be a folder"),
        (["qwen3", "--output", f"{folder}/none/x.json"], "--output must lie in a folder"),
        (["qwen3", "--stamps", f"{folder}/x"], "--stamps must end in .npz"),
        (["--read", str(read), "--stamps", str(read)], "--stamps must be another file than --read"),
        (
            ["qwen3", "--traces", folder, "--output", f"{folder}/qwen3-forward.json"],
            "--traces must be another file than --output",
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            tasks.main(words)
        (line,) = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2 and text in line
    assert read.read_bytes() == before and [read] == list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["nocase"], ["qwen3", "--read", "x.npz"]])
def test_wrong_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        tasks.main(arguments)
    assert stopped.value.code == 2 and "give --read or cases of" in capsys.readouterr().err
