"""The GPU benchmark's words, model and pages, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mok_ref.bench import (
    commands,
    energy,
    entry,
    gpu,
    links_page,
    links_run,
    mxfp8,
    page,
    tasks,
    timing,
)
from mok_ref.bench.cases import CASES, TABLE_CASES, BenchCase, routes
from mok_ref.bench.commands import parse_directions, parse_peers, parse_sizes
from mok_ref.bench.cpu import bench_cpu, parse_size
from mok_ref.bench.energy import (
    ROUNDS,
    ClockProbe,
    EnergyError,
    EnergyMeter,
    Recorder,
    bench_energy,
    dense_bytes,
    layer_bytes,
    mean_mhz,
    take_turns,
)
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
from mok_ref.bench.page import growth_table, tables_of
from mok_ref.bench.page_runs import (
    WHY,
    cases_table,
    draw_runs,
    other_targets_table,
    peers_table,
    quotients,
    runs_list,
    runs_of_one_kind,
    targets_table,
)
from mok_ref.bench.report_files import (
    BEGIN,
    END,
    anchors_of,
    check_own_links,
    write_between_markers,
)
from mok_ref.bench.timing import Protocol, Timing, time_contenders, turns
from mok_ref.bench.variants import AroundRow, RankRow, SavingRow, time_ranks
from mok_ref.gpu import compiler
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
        "qwen4", "qwen3:fp4", "8x8x8x4", "", "mxfp8:bf16", "mxfp8:mxfp8", "save:mxfp8",
        "08x8x8x4x2", "qwen3:", "qwen3:mxfp8:mxfp8", "\u0664x8x8x4x2", "\u00b2x8x8x4x2",
    ],
)  # fmt: skip
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"^sizes must be of"):
        parse_sizes(f"qwen3,{word}")
    with pytest.raises(ValueError, match=r"^sizes must be small, medium or NxHxIxExK, got"):
        parse_size(word)


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("0x8x8x4x2", "be numbers in 1..999999999, got '0x8x8x4x2'"),
        ("8x8x8x4x0", "be numbers in 1..999999999, got '8x8x8x4x0'"),
        ("9" * 5000 + "x8x8x4x2", "be numbers in 1..999999999, got '" + "9" * 40 + "'"),
        ("8x8x8x4x65", "have K in 1..64, got '8x8x8x4x65'"),
    ],
)
def test_numbers_of_sizes_are_bounded_on_cpu_and_gpu(word: str, rule: str) -> None:
    for parse in (parse_size, parse_sizes):
        with pytest.raises(ValueError, match=f"^sizes must {re.escape(rule)}$"):
            parse(word)
    assert parse_size("8x8x8x4x64").top_k == 64


@pytest.mark.parametrize("parse", [parse_sizes, parse_peers, parse_directions])
def test_a_word_that_is_there_twice_is_refused(parse: Callable[[str], Any]) -> None:
    word = {parse_sizes: "qwen3", parse_peers: "liger", parse_directions: "forward"}[parse]
    with pytest.raises(ValueError, match=f"must not name a thing twice, got '{word}' twice$"):
        parse(f"{word},{word}")


def test_counts_are_bounded_before_anything_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"^rounds must be at most 10000, got 10001$"):
        commands.bench_cuda(rounds=10_001)
    with pytest.raises(ValueError, match=r"^repeats must be at most 10000, got 99999"):
        commands.bench_on_cpu("8x8x8x4x2", "1", "forward", 10**3000 - 1, None, True)


def test_a_case_of_two_words_is_run_once() -> None:
    assert parse_sizes("qwen3,qwen3:bf16,save") == [CASES["qwen3"], "save"]
    assert parse_sizes("sonic,table") == parse_sizes("sonic,table,all")[:6]
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
            asdict(AroundRow("qwen3", "dx", 80.0, 4.0, own_launch=False)),
        ],
        "growth": [asdict(row) for row in growth_rows()],
        "ceilings": CEILINGS,
    }


def test_a_page_holds_what_the_report_has() -> None:
    made = tables_of(report())
    sizes = "8192 2048 768 128 8"
    assert (
        f"| qwen3 ({sizes}) | backward | mok_ref | 4.000 | 600 | 0.500 | – | 4.400 | 0.900 |"
        in made
    )
    assert "dsv3-rank" not in made  # not run
    assert "| qwen3 | 512 / 2048 | none | 0 | 1.000 | 5.000 | +25.0 % |" in made
    assert "| qwen3 | 4 | forward | 2.000 | 1.000 |" in made
    assert "| qwen3 | schedule | 21.0 | 0.5 % of forward | – |" in made
    assert "| qwen3 | y | 75.0 | 1.9 % of forward | 4.02 |" in made
    assert "| qwen3 | dx | 80.0 | inside | 4.00 |" in made
    curves = "\n".join(growth_table(report(), "curves.svg"))
    one = "6.000 | 3.000 | 2.00"
    assert f"| skew | all to one | {one} | {one} | memory |" in curves
    assert "(curves.svg)" in curves


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


def test_turns_of_a_run_and_medians_of_calls_are_told() -> None:
    made = report()
    assert "turns of a contender" not in tables_of(made)
    for row, turns_ms in zip(made["rows"], ([4.0, 4.04], [4.0, 4.0], [4.0], [4.2, 4.0, 4.1])):
        row |= {"turns_ms": turns_ms, "ratio_of_medians": 0.875}
    text = tables_of(made)
    assert "the 3 turns of a contender: 1.0 % apart in the middle row, 5.0 % at most." in text
    assert "| forward | mok_ref | 4.000 | 600 | 0.900 | 0.875 | 4.400 | 0.900 |" in text


def test_kernels_of_a_report_are_named() -> None:
    assert entry.kernels_line({"kernels": entry.kernels_name()}).endswith("the present sources.")
    old = entry.kernels_line({"kernels": "0123456789ab"})
    assert old.startswith("- Older kernels: ") and "0123456789ab" in old
    assert entry.kernels_line({}).startswith("- Older kernels: the report does not name")


def test_host_times_of_older_kernels_are_marked() -> None:
    made = report()
    older = "Host time per forward call with those older kernels and launches: 30"
    assert older in tables_of(made)
    made["device"]["kernels"] = entry.kernels_name()
    assert "Host time per forward call: 30 to 30 us" in tables_of(made)


# --------------------------------------------------------------------------- runs together


def run_of(hour: int, forward: float, kernels: str = "", **more: Any) -> dict[str, Any]:
    """A run of qwen3 at this hour, on a card of its own."""
    made = report()
    made["device"] |= {"time": f"{hour:02}:00 UTC", "gpu_id": f"card{hour}"}
    made["device"]["kernels"] = kernels or entry.kernels_name()
    made["rows"][0]["ratio_sustained"] = forward
    return made | more


def test_a_target_is_judged_by_the_median_over_runs() -> None:
    runs = [run_of(1, 0.85), run_of(2, 0.80), run_of(3, 0.81)]
    (row,) = [line for line in targets_table(runs, TABLE_CASES) if line.startswith("| qwen3")]
    why_not = "[why](#fine-grained-experts-forward)"
    assert row.startswith(f"| qwen3 | **0.810** (0.800 – 0.850) {why_not} | 0.82 | 0.800 ")
    assert row.endswith("| 3 |")
    met = targets_table(runs[:1], TABLE_CASES)[-1]
    assert met.startswith("| qwen3 | 0.850 | 0.82 | 0.800 | 0.75 | **0.500** [why](")


def test_runs_of_other_kernels_are_left_out() -> None:
    present, older = run_of(1, 0.8), run_of(2, 0.7, kernels="0123456789ab")
    assert runs_of_one_kind([older, present]) == [present]
    oldest = run_of(1, 0.6, kernels="ba9876543210")
    assert runs_of_one_kind([older, oldest]) == [older]  # the latest, where none is present


def test_every_run_names_its_card() -> None:
    runs = [run_of(1, 0.8), report()]
    lines = runs_list(runs, {id(run): "[r](r)" for run in runs})
    assert lines[2].startswith("| 2026-11-29 01:00 UTC | G | card1 | 1, 13.0 |")
    assert lines[3] == "| 2026-11-29 | G | not recorded | 1, 13.0 | not recorded | [r](r) |"


def test_shapes_of_the_cases_are_told() -> None:
    assert cases_table([run_of(1, 0.8)])[2:] == [
        "| qwen3 | 8192 | 2048 | 768 | 128 | 8 | uniform |"
    ]
    assert cases_table([]) == []


def test_others_are_compared_inside_a_run() -> None:
    runs = [run_of(1, 0.8), run_of(2, 0.9)]
    for run, ratio in zip(runs, (0.6, 0.9)):
        run["rows"].append(run["rows"][0] | {"contender": "SonicMoE", "ratio_sustained": ratio})
    assert quotients(runs, "qwen3", "forward", "mok_ref", "SonicMoE") == pytest.approx([4 / 3, 1.0])
    (row,) = [line for line in peers_table(runs) if line.startswith("| qwen3")]
    assert "| 0.750 (0.600 – 0.900) | 1.24 (0.99 – 1.48) |" in row  # beside forward that saves


def test_links_to_tables_that_are_not_made_are_named(tmp_path: Path) -> None:
    table = "<\n### A table, here\n[why](#elsewhere)\n>"  # tables may link to any page's headings
    check_own_links(tmp_path, f"[a](#a-table-here) [b](other.md#nothing) {table}", "<", ">")
    with pytest.raises(ValueError, match="links to #no-table, which these reports do not make"):
        check_own_links(tmp_path, f"{table} [b](#no-table)", "<", ">")


def test_the_other_targets_have_rows() -> None:
    runs = [run_of(1, 0.8, saving_cost={"qwen3": 1.05}), run_of(2, 0.8, saving_cost={"qwen3": 1.0})]
    runs[0]["ranks"].append(asdict(RankRow("kimi-16", 4, "forward", 2.0, 1.2)))
    why_not = "[why](#saving-ranks-schedule-host-time)"
    made = other_targets_table(runs)
    saving = "| forward that saves / that does not | qwen3 | 1.025 (1.000 – 1.050) | 1.03 | 2 |"
    assert saving in made
    assert "| schedule kernels alone, us | qwen3 | 21.0 (21.0 – 21.0) | 40.0 | 2 |" in made
    kimi = f"| 4 virtual ranks / one, forward | kimi-16 | **1.200** {why_not} | 1.10 | 1 |"
    assert kimi in made
    assert any(line.startswith("| 4 virtual ranks / one, forward | qwen3 | 1.000") for line in made)
    host = "| host time of a forward call, us | slowest of a run | 30.0 (30.0 – 30.0) | 50.0 | 2 |"
    assert host in made


def test_reasons_of_missed_targets_are_headings_of_the_page() -> None:
    anchors = anchors_of((DOCS / "results.md").read_text("utf-8"))
    assert {link.removeprefix("#") for link in WHY.values()} <= anchors


# --------------------------------------------------------------------------- energy


TINY = BenchCase("tiny", 3, 10, 20, 4, 2, "one")
COPY = {"idle_watts": 100.0, "watts": 500.0, "tbytes_per_s": 4.0, "pj_per_byte": 100.0}


def test_bytes_of_dense_and_of_the_layer_by_hand() -> None:
    rows, expert = 3 * 2, 3 * 10 * 20
    x = y = dx = dy = rows * 10
    gate_up, h = rows * 40, rows * 20
    assert dense_bytes(TINY, "forward") == 2 * (x + gate_up + h + y + expert)
    up_down = (dy + h) + (gate_up + dx)  # data gradients
    assert dense_bytes(TINY, "backward") == 2 * (up_down + (dy + h) + (gate_up + x) + 2 * expert)
    tokens = 3 * 10
    assert layer_bytes(TINY, "forward", False) == 2 * (expert + x + 2 * h + 2 * y + tokens)
    moved = (1 + 4) * expert + (dy + gate_up + 2 * gate_up + h + 2 * dx + tokens)
    assert layer_bytes(TINY, "backward", False) == 2 * (moved + dy + x + gate_up + h)
    for direction in DIRECTIONS:
        ring = layer_bytes(TINY, direction, True) - layer_bytes(TINY, direction, False)
        assert ring == 2 * (tokens + x)


def test_power_is_read_between_steps_of_the_counter() -> None:
    recorder = Recorder(cast(Any, None), [(0.0, 5.0), (1.0, 10.0), (1.5, 20.0), (2.0, 30.0)])
    assert recorder.watts(0.5, 2.5) == 20.0
    with pytest.raises(RuntimeError, match=r"took 1 steps in 0\.90 s"):
        recorder.watts(1.1, 2.0 - 1e-9)


def test_the_clock_is_the_multiprocessors_own() -> None:
    begin = np.array([[7, 1000], [10**12, 1000], [5, 900], [0, 0]], np.uint64)
    after = np.array([[1_400_000, 1_000_000], [1_500_000, 1_000_000], [1, 1], [9, 9]], np.uint64)
    assert mean_mhz(begin, begin + after) == 1400.0  # median of 1400, 1500, 1000; the last is none


def test_the_first_launch_of_the_probe_is_before_what_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def load_kernel(source: str, kernel: str) -> Callable[..., None]:
        done.append(f"load {source} {kernel}")
        return lambda *_: done.append("launch")

    monkeypatch.setattr(compiler, "load_kernel", load_kernel)
    monkeypatch.setattr(gpu, "torch_stream", nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", np)
    probe = ClockProbe()
    assert done == ["load clock.cu stamp_clocks", "launch"]
    probe.stamp()
    assert done[1:] == ["launch", "launch"]  # nothing is loaded again


class FakeClock:
    """Milliseconds that pass in waits alone; a counter of 100 W that moves every 100 ms."""

    def __init__(self, now: int, end: int) -> None:
        self.now, self.end = now, end

    def wait(self, seconds: float) -> bool:
        self.now += round(1000 * seconds)
        return self.now >= self.end

    def perf_counter(self) -> float:
        return self.now / 1000

    def read(self) -> float:
        return 10.0 * (self.now // 100)


@pytest.mark.parametrize("now", [3, 51, 99])
def test_power_of_a_steady_card_is_its_power(now: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(now, now + 900)
    monkeypatch.setattr(energy, "time", clock)
    recorder = Recorder(cast(Any, clock))
    recorder._stop = cast(Any, clock)
    recorder._keep_steps()
    assert recorder.watts(now / 1000, clock.perf_counter()) == pytest.approx(100.0, rel=1e-9)


def test_an_error_of_the_watching_thread_is_raised() -> None:
    def read() -> float:
        raise OSError("fell off the bus")

    recorder = Recorder(cast(Any, SimpleNamespace(read=read)))
    with pytest.raises(EnergyError, match="counter was lost: fell off the bus"), recorder:
        pass


def nvml(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., int]) -> None:
    """A library with these functions alone, and a device for it."""
    device = SimpleNamespace(pci_bus_id="0000:00:00.0")
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda _: SimpleNamespace(**functions))


def test_a_library_that_cannot_tell_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: lambda *_: 0 for name in ("nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2")}
    nvml(monkeypatch, **found)
    with pytest.raises(EnergyError, match="has no nvmlDeviceGetTotalEnergyConsumption"):
        EnergyMeter()
    nvml(monkeypatch, nvmlInit_v2=lambda: 9)
    with pytest.raises(RuntimeError, match="nvmlInit_v2 gave 9"):
        EnergyMeter()


def test_without_a_meter_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: Any) -> None:
        raise AssertionError("measured without a meter")

    nvml(monkeypatch)
    cuda = SimpleNamespace(mem_get_info=lambda: (2**40, 2**40))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(commands, "require_gpu", lambda _: None)
    monkeypatch.setattr(gpu, "device_facts", dict)
    monkeypatch.setattr(gpu, "bench_case", measured)
    with pytest.raises(EnergyError, match="has no nvmlInit_v2"):
        commands.bench_cuda("qwen3,energy")
    with pytest.raises(ValueError, match=r"^sizes must fit into the GPU's 1024 GiB"):
        commands.bench_cuda("99999x99999x99999x99x8")


def test_a_peer_that_raises_drops_out() -> None:
    calls: dict[str, Callable[[], Any]] = {
        name: partial(str, name) for name in ("dense", "peer", "ours")
    }
    failing: dict[str, Exception] = {"peer": ValueError("no kernel")}
    left_out: dict[str, str] = {}

    def measure(call: Callable[[], Any]) -> tuple[float, float, float]:
        name = call()
        if name in failing:
            raise failing[name]
        return 1.0, 2.0, 3.0

    def turns() -> dict[str, Any]:
        return take_turns(calls, measure, ("peer",), lambda n, e: left_out.update({n: str(e)}))

    assert turns() == {name: [(1.0, 2.0, 3.0)] * ROUNDS for name in ("dense", "ours")}
    assert left_out == {"peer": "no kernel"}
    for name, error in (("ours", ValueError("ours")), ("peer", EnergyError("counter"))):
        failing = {name: error}
        with pytest.raises(type(error), match=str(error)):
            turns()


def test_finished_cases_are_kept_when_a_later_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made, kept = gpu.BenchReport({}), []

    def energy_of(case: BenchCase, *_: Any) -> None:
        if case.name == TABLE_CASES[2]:
            raise EnergyError("lost")
        made.energy.append(cast(Any, case.name))

    monkeypatch.setattr(energy, "measure_copy", lambda _: COPY)
    monkeypatch.setattr(energy, "energy_of", energy_of)
    with pytest.raises(EnergyError, match="lost"):
        bench_energy(made, cast(Any, None), (), lambda: kept.append((made.copy, [*made.energy])))
    assert kept[-1] == (COPY, list(TABLE_CASES[:2]))


# --------------------------------------------------------------------------- timing


def test_a_time_is_the_median_over_turns_of_their_means() -> None:
    steps = Timing(sustained=[[1.0, 1.0, 4.0], [2.0, 2.0], [9.0]])
    other = Timing(sustained=[[4.0], [2.0, 2.0, 5.0]])
    assert steps.means("sustained") == [2.0, 2.0, 9.0]
    assert (steps.ms("sustained"), other.ms("sustained")) == (2.0, 3.5)
    assert other.ratio(steps, "sustained") == 1.75  # not paired: turns may be of any number
    assert steps.median("sustained") == 2.0 and other.median("sustained") == 3.0  # of calls


def test_turns_are_long_enough_for_the_clock() -> None:
    protocol = Protocol(repeats=20, skip_s=0.15, turn_s=0.25)
    assert protocol.calls(1.0, 3) == (150, 250)
    assert protocol.calls(100.0, 3) == (2, 7)  # at least 20 calls in 3 turns
    assert protocol.calls(100.0, 1) == (2, 20)
    assert protocol.calls(0.01, 3) == (1000, 1000)
    assert Protocol(repeats=3000).calls(0.01, 1) == (1000, 3000)


def test_every_other_round_is_the_one_before_it_backwards() -> None:
    order = list(turns(["a", "b", "c"], 4, np.random.default_rng(0)))
    rounds = [order[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert rounds[1] == rounds[0][::-1] and rounds[3] == rounds[2][::-1]
    orders = {tuple(turns(["a", "b", "c"], 1, np.random.default_rng(seed))) for seed in range(40)}
    assert len(orders) == 6


def test_who_leaves_the_power_alone_has_its_turn_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[tuple[str, int, int]] = []

    def launches_ms(call: Callable[[], Any], count: int, warm: int) -> list[float]:
        timed.append((call(), count, warm))
        return [10.0] * count

    monkeypatch.setattr(timing, "launches_ms", launches_ms)

    def work_for(_: float, calls: dict[str, Any], __: dict[str, float]) -> None:
        timed.append((",".join(calls), 0, 0))

    monkeypatch.setattr(timing, "_work_for", work_for)
    calls = {name: partial(str, name) for name in ("dense", "light", "ours")}
    protocol = Protocol(rounds=2, bursts=0)
    found = time_contenders(calls, np.random.default_rng(0), protocol, apart=("light",))
    assert timed[3] == ("dense,ours", 0, 0)  # after the three estimates
    names = [name for name, _, _ in timed[4:]]
    assert sorted(names[:2]) == ["dense", "ours"] and names[2:4] == names[:2][::-1]
    assert timed[-1] == ("light", 40, 20) and len(timed) == 9
    assert [len(found[name].sustained) for name in calls] == [2, 1, 2]


def test_a_capture_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
        if call is refuses:
            raise RuntimeError("capture failed\nat a line")
        return call

    def refuses() -> None:
        pass

    times = Timing(sustained=[[1.0]], bursts=[[1.0]])
    monkeypatch.setattr(gpu, "graphed", graphed)
    monkeypatch.setattr(gpu, "time_contenders", lambda calls, *_, **__: dict.fromkeys(calls, times))
    made = gpu.BenchReport({})
    contenders = {"dense cuBLAS": lambda: None, "torch eager": refuses}
    for name in ("small-16", "qwen3"):
        found = gpu._time(CASES[name], contenders, np.random.default_rng(0), Protocol())
        gpu._add_rows(CASES[name], "forward", *found, made)
    assert [row.note for row in made.rows] == ["graph", "no graph: capture failed", "", ""]


def test_a_call_of_several_ranks_ends_with_its_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    key, alone = (2, "forward"), (1, "forward")
    first = {key: [[9.0, 10.0, 13.0, 14.0], [20.0, 21.0, 25.0, 26.0]], alone: [[0.0, 1.0, 3.0]]}
    second = {key: [[8.0, 11.0, 12.0, 15.0], [20.0, 23.0, 24.0, 27.0]]}

    def run_ranks(size: int, part: Callable[..., Any]) -> list[dict[Any, Any]]:
        assert size == 2
        return [first, second]

    event = SimpleNamespace(record=lambda: None)
    cuda = SimpleNamespace(Event=lambda **_: event, synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    fake = SimpleNamespace(run_virtual_cuda_ranks=run_ranks)
    monkeypatch.setitem(sys.modules, "mok_ref.heap.virtual_cuda", fake)
    # the ranks end their calls by turns: the longest interval of each call would be 3 or 4
    found = time_ranks(None, 2)
    assert found[key].sustained == [[2.0, 2.0], [2.0, 2.0]]
    assert found[alone].sustained == [[2.0]]


# --------------------------------------------------------------------------- others


def test_others_that_were_left_out_are_named() -> None:
    made = run_of(1, 0.8, peers={"SonicMoE": "sonic-moe 1"}, left_out={"SonicMoE on qwen3": "no"})
    made["peer_errors"] = {"SonicMoE on qwen3": 0.5}
    text = tables_of(made)
    assert "- Left out: SonicMoE on qwen3: no." in text and "sonic-moe 1" not in text
    assert "against this layer's" not in text
    made["rows"].append(made["rows"][0] | {"contender": "SonicMoE"})
    made |= {"left_out": {}, "peer_errors": {"SonicMoE on qwen3": 0.004}}
    text = tables_of(made)
    assert "- SonicMoE: sonic-moe 1." in text and "at most 4.0e-03." in text


def test_peers_that_are_known() -> None:
    assert parse_peers("sonicmoe,liger,dense") == ("dense cuBLAS", "SonicMoE", "Liger")
    with pytest.raises(ValueError, match="sonicmoe, liger, dense, got 'sonic'"):
        parse_peers("sonic")


def test_the_example_times_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = DOCS.parent / "examples" / "09_bench.py"
    spec = importlib.util.spec_from_file_location("example_bench", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert example.main([str(tmp_path / "r.json")]) == 0
    timings = json.loads((tmp_path / "r.json").read_text())
    assert [(t["name"], t["ranks"]) for t in timings] == [
        (name, ranks) for name in ("64x64x32x8x2", "256x64x32x8x2") for ranks in (1, 2)
    ]
    assert "on the CPU, because" in capsys.readouterr().out


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
        (page.main, ["none.json", "--output", "."], "--output must be a file name, got the direct"),
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
    for runs in ([run_of(1, 0.8), run_of(2, 0.9)], [report() | {"rows": []}]):
        draw_runs(runs, path)
        assert path.read_text(encoding="utf-8").startswith("<?xml")
