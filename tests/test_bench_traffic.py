"""Counted bytes and instructions: what ncu wrote, and the page's tables made of it; no GPU."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mok_ref.bench import traffic
from mok_ref.bench.cases import CASES
from mok_ref.bench.energy import dense_bytes, layer_bytes
from mok_ref.bench.entry import kernels_name
from mok_ref.bench.page import tables_of
from mok_ref.bench.page_power import (
    joules_table,
    parts_table,
    power_table,
    traffic_table,
)
from mok_ref.bench.traffic import CALLS, COUNTERS, TrafficError, TrafficRow, find_ncu, rows_of
from mok_ref.bench.variants import Instruments

HEAD = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'


def lines_of(number: int, kernel: str, values: tuple[int, ...]) -> list[str]:
    """What ncu writes of one kernel: a line per metric."""
    return [
        f'"{number}","call{number}/{kernel}","{metric}","unit","{value:,}"'
        for (metric, _), value in zip(COUNTERS.values(), values, strict=True)
    ]


def log_of(num_calls: int) -> str:
    """Two kernels in each call; the second counts 1,000 of everything."""
    lines = ["==PROF== Connected to process 1", HEAD]
    for number in range(num_calls):
        lines += lines_of(number, "first", (1_000_000 * (number + 1), 2, 3, 4, 5, 6, 8, 8))
        lines += lines_of(number, "second/part", (1000,) * len(COUNTERS))
    return "\n".join(lines)


def test_a_call_is_the_sum_of_its_kernels() -> None:
    cases = ("qwen3", "mixtral")
    rows = rows_of(log_of(len(cases) * len(CALLS)), cases)
    assert [(r.case, r.direction, r.contender) for r in rows] == [
        (case, *call) for case in cases for call in CALLS
    ]
    expected = (1_001_000, 1002, 32 * 1003, 32 * 1004, 32 * 1005, 1006, 252, 1008)
    assert rows[0] == TrafficRow("qwen3", "forward", "dense cuBLAS", *expected)
    assert rows[-1].dram_read == 10_001_000


def test_what_was_not_counted_is_named() -> None:
    with pytest.raises(TrafficError, match=r"no dram__bytes_read\.sum of qwen3 backward"):
        rows_of(log_of(len(CALLS) - 1), ("qwen3",))
    fewer = "\n".join(line for line in log_of(len(CALLS)).splitlines() if "inst_" not in line)
    with pytest.raises(TrafficError, match=r"no smsp__inst_executed\.sum of qwen3 forward"):
        rows_of(fewer, ("qwen3",))


def test_without_ncu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic.shutil, "which", lambda _: None)
    with pytest.raises(TrafficError, match="needs ncu"):
        Instruments.of(["qwen3", "traffic"])
    assert Instruments.of(["qwen3", "save"]) == Instruments(None, None)
    monkeypatch.setattr(traffic.shutil, "which", lambda name: f"/bin/{name}")
    assert find_ncu() == "/bin/ncu"


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (
            ('"call1/first","dram__bytes_read.sum","unit","2,000,000"', '"call1/first"'),
            "ends early",
        ),
        (("2,000,000", "n/a"), r"gave 'n/a' for dram__bytes_read\.sum of call1/first"),
        (("2,000,000", "nan"), "gave 'nan' for"),
        (("2,000,000", "-1"), "gave '-1' for"),
        (('"Metric Value"', '"Value"'), "no table with the columns"),
    ],
)
def test_what_is_no_count_is_told_in_one_line(cut: tuple[str, str], text: str) -> None:
    log = log_of(len(CALLS))
    assert cut[0] in log
    with pytest.raises(TrafficError, match=text):
        rows_of(log.replace(*cut), ("qwen3",))


def test_what_a_program_prints_before_the_table_is_no_row() -> None:
    log = log_of(len(CALLS)).replace(HEAD, f'"a quoted line"\n{HEAD}')
    assert rows_of(log, ("qwen3",)) == rows_of(log_of(len(CALLS)), ("qwen3",))


def fake_ncu(folder: Path, script: str) -> str:
    """A program in ncu's place: $LOG is where the counts go, $ARGS all its words."""
    path = folder / "ncu"
    find = 'for word; do [ "$last" = --log-file ] && LOG=$word; last=$word; done; ARGS="$*"'
    path.write_text(f"#!/bin/sh\n{find}\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_ncu_runs_the_calls(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text(log_of(len(CALLS)))
    check = 'case "$ARGS" in *"-m mok_ref.bench.traffic qwen3") ;; *) exit 3;; esac'
    made = SimpleNamespace(traffic=[])
    ncu = fake_ncu(tmp_path, f"{check}; cp '{tmp_path}/counts' \"$LOG\"")
    traffic.bench_traffic(made, ncu, ("qwen3",))
    assert len(made.traffic) == len(CALLS)


def test_errors_of_ncu_are_told(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, 'echo "==ERROR== ERR_NVGPUCTRPERM - no" > "$LOG"; echo more; exit 1')
    with pytest.raises(TrafficError, match="ended with 1: ==ERROR== ERR_NVGPUCTRPERM"):
        traffic.bench_traffic(SimpleNamespace(traffic=[]), ncu, ("qwen3",))
    missing = fake_ncu(tmp_path, "exit 5")
    with pytest.raises(TrafficError, match="ended with 5: no word"):
        traffic.bench_traffic(SimpleNamespace(traffic=[]), missing, ("qwen3",))


def test_ncu_that_does_not_end_is_stopped_with_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "SECONDS_PER_CASE", 1)
    alive = tmp_path / "alive"
    ncu = fake_ncu(tmp_path, f"(sleep 60) & echo $! > '{alive}'; wait")
    with pytest.raises(TrafficError, match="ncu took more than 1 s"):
        traffic.bench_traffic(SimpleNamespace(traffic=[]), ncu, ("qwen3",))
    status = Path(f"/proc/{alive.read_text().strip()}/stat")
    end = time.monotonic() + 10
    while time.monotonic() < end:  # a zombie is no program that runs
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.02)
    raise AssertionError("the program under ncu still runs")


def test_the_watched_program_refuses_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["qwen4"]):
        with pytest.raises(SystemExit):
            traffic.main(words)
        assert "error: cases must be of dsv3-rank" in capsys.readouterr().err


def run_with_traffic() -> dict[str, Any]:
    """A run of forward of qwen3: dense moves 1 GB, the layer 3 GB."""
    mega, giga = 10**6, 10**9
    dense = 750 * mega, 250 * mega, 4 * giga, 500 * mega, 250 * mega
    ours = 2500 * mega, 500 * mega, 8 * giga, 1 * giga, 2750 * mega
    rows = [
        TrafficRow("qwen3", "forward", "dense cuBLAS", *dense, 239 * mega, 9, 10),
        TrafficRow("qwen3", "forward", "mok_ref", *ours, 239 * mega, 7, 10),
    ]
    device = {"gpu": "G", "driver": "1", "cuda": "13.0", "date": "2026-11-29"}
    device["kernels"] = kernels_name()
    return {"device": device, "rows": [], "bits": {}, "traffic": [asdict(row) for row in rows]}


def test_counted_bytes_stand_beside_those_that_must_move() -> None:
    case, run = CASES["qwen3"], run_with_traffic()
    must = [dense_bytes(case, "forward"), layer_bytes(case, "forward", ring=True)]
    once = " | ".join(f"{value / 1e9:.2f}" for value in must)
    (line,) = [line for line in traffic_table([run]) if line.startswith("| qwen3")]
    counted = "1.00 | 3.00 | 4.5 | 9.0 | 0.2 | 2.8 | 239 | 239 | 90.0 | 70.0"
    assert line == f"| qwen3 | forward | {once} | {counted} |"
    assert traffic_table([run | {"traffic": []}]) == []
    own = "| qwen3 | forward | mok_ref | 2.50 | 0.50 | 8.00 | 1.00 | 2.75 | 239 | 70.0 |"
    assert own in tables_of(run)


COPY = {"idle_watts": 100.0, "watts": 500.0, "tbytes_per_s": 4.0, "pj_per_byte": 100.0}
PRICE = {"joules_per_tflop": 0.5, "l2_pj_per_byte": 25.0, "copy_pj_per_byte": 100.0}
PRICE |= {"nj_per_instruction": 0.5}


def run_with_energy() -> dict[str, Any]:
    """Forward of qwen3; nothing counted in this run."""
    energy = [
        {"case": "qwen3", "direction": "forward", "contender": who, "ms": ms, "joules": joules}
        | {"watts": 700.0, "mhz": mhz}
        for who, ms, joules, mhz in (
            ("dense cuBLAS", 1.0, 0.7, 1500.0),
            ("mok_ref", 1.25, 0.875, 1200.0),
        )
    ]
    return run_with_traffic() | {"traffic": [], "energy": energy, "copy": COPY}


def test_time_is_cycles_and_clock() -> None:
    run = run_with_energy()
    assert power_table([run])[-1] == "| qwen3 | forward | 0.800 | 1.000 | 0.800 | 1200 | 1500 |"
    own = "| qwen3 | forward | mok_ref | 1.250 | 0.875 | 700 | 1200 | 1.50 |"
    assert own in tables_of(run)
    assert power_table([run_with_traffic()]) == []
    halves = [run | {"energy": [row]} for row in run["energy"]]
    assert power_table(halves) == []  # never a ratio across runs
    assert power_table([halves[0], run])[-1] == power_table([run])[-1]
    with pytest.raises(KeyError, match="copy must hold"):
        tables_of(run | {"copy": {}})


def test_joules_are_an_account_of_what_was_counted() -> None:
    runs = [run_with_energy(), run_with_traffic()]
    tflops = CASES["qwen3"].flops("forward") / 1e12
    ours = [0.125, 0.5 * tflops, 9e9 * 25e-12, 3e9 * 75e-12, 239e6 * 0.5e-9]
    line = joules_table(runs, PRICE)[-1]
    cells = " | ".join(f"{value:.3f}" for value in (*ours, sum(ours), 0.875))
    assert line == f"| qwen3 | forward | mok_ref | {cells} |"
    assert "| qwen3 | forward | dense cuBLAS | 0.100 |" in joules_table(runs, PRICE)[-2]
    assert joules_table(runs, None) == joules_table(runs[:1], PRICE) == []


def test_parts_are_compared_with_the_whole_layer() -> None:
    times = {"dense cuBLAS": (0.75, 1600.0), "whole layer": (1.0, 1500.0), "no sum": (0.9, 1500.0)}
    parts = [
        {"case": "qwen3", "direction": "forward", "what": what, "ms": ms, "mhz": mhz}
        for what, (ms, mhz) in times.items()
    ]
    assert parts_table({"parts": parts})[-3:] == [
        "| qwen3 | forward | dense cuBLAS | 0.750 | 1600 | 1.20 | 25.0 % | 20.0 % |",
        "| qwen3 | forward | whole layer | 1.000 | 1500 | 1.50 |  |  |",
        "| qwen3 | forward | no sum | 0.900 | 1500 | 1.35 | 10.0 % | 10.0 % |",
    ]
    with pytest.raises(KeyError, match="no whole layer of qwen3 forward"):
        parts_table({"parts": [parts[0], parts[2]]})
