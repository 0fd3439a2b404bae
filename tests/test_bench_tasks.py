"""The table of a kernel's tasks, from stamps made by hand."""

from __future__ import annotations

import json
from pathlib import Path

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
    with pytest.raises(ValueError, match=r"x\.npz: no stamps of this benchmark"):
        tasks.load_stamps(path)


@pytest.mark.parametrize("arguments", [[], ["nocase"], ["qwen3", "--read", "x.npz"]])
def test_wrong_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        tasks.main(arguments)
    assert stopped.value.code == 2 and "give --read or cases of" in capsys.readouterr().err
