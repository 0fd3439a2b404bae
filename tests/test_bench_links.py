"""Bandwidth and layers on several GPUs: tables, formulas, routes, the page; no GPU needed."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu.host_cuda import compiler as host_compiler
from host_cupy import host_cuda_device

from mok_ref.bench import links, links_layer, links_page, links_run
from mok_ref.bench.report_files import BEGIN, END
from mok_ref.gpu import compiler
from mok_ref.gpu.params import NUM_SYMMETRIC, SYMMETRIC_BUFFERS
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks

ROOT = Path(__file__).resolve().parents[1]
MPI_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
REPORTS = sorted((ROOT / "docs" / "results").glob("multi_gpu_*.json"))


# --------------------------------------------------------------------------- bandwidth


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_row_of_a_schedule_is_remote_and_named_once(size: int) -> None:
    named = []
    for rank in range(size):
        peer, row = links.remote_tables(rank, size, 384, np.random.default_rng(rank))
        assert (peer == rank).any() == (size == 1)
        assert sorted(row) == list(range(384))
        assert len(set(peer)) == max(1, size - 1)
        named += list(zip(peer.tolist(), row.tolist(), strict=True))
    assert len(set(named)) == size * 384  # no two ranks push to the same place


def test_rates_count_bytes_and_milliseconds() -> None:
    assert links.gigabytes_per_s(331e6, 1.0) == pytest.approx(331)
    row = links.link_row("pull", 2048, 1, 1 << 20, 132, 0.5)
    assert row["gb_per_s"] == pytest.approx((1 << 20) / 0.5e-3 / 1e9)


def test_messages_are_whole_row_blocks_that_hold_the_bytes() -> None:
    for hidden in links.SWEEP_HIDDEN:
        for mib in links.SWEEP_MIB:
            rows = links.rows_of(mib * links.MIB, hidden)
            assert rows % 128 == 0
            assert 0 <= 2 * hidden * rows - mib * links.MIB < 2 * hidden * 128


def test_modes_count_every_crossing() -> None:
    assert [mode.transfers for mode in (links.PULL, links.PUSH, links.BOTH)] == [1, 1, 2]
    points = links.sweep_points(132)
    assert len(points) == len(set(points))
    assert {mode for _, mode, _ in points} == set(links.MODES)


def test_no_two_rows_of_the_test_pattern_are_equal() -> None:
    rows = np.concatenate([links.pattern(rank, np.arange(256), 64) for rank in range(4)])
    assert rows.dtype == np.uint16 and len(np.unique(rows, axis=0)) == len(rows)
    again = links.pattern(2, np.array([7, 3]), 64)
    assert np.array_equal(again, rows[2 * 256 + np.array([7, 3])])


def test_transfer_kernel_is_the_megakernels_code_and_does_not_spill(tmp_path, monkeypatch) -> None:
    text = (compiler.cuda_source_dir() / links.SOURCE).read_text(encoding="utf-8")
    assert "dispatch_forward(params)" in text and "push_rows(" in text
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    monkeypatch.setenv("MOK_REF_CACHE", str(tmp_path))
    (usage,) = compiler.resource_usage(compiler.compile_cubin(links.SOURCE))
    assert usage.name == links.KERNEL
    assert usage.spill_store_bytes == usage.spill_load_bytes == usage.stack_bytes == 0


# --------------------------------------------------------------------------- layers


def test_hidden_share() -> None:
    assert links_layer.hidden_share(4.0, 1.0, 4.0) == 1  # the layer takes as long as its products
    assert links_layer.hidden_share(4.0, 1.0, 5.0) == 0  # one after the other
    assert links_layer.hidden_share(1.0, 4.0, 4.5) == 0.5  # bound by links
    assert links_layer.hidden_share(4.0, 0.0, 4.0) == 1


def test_remote_rows_are_those_of_the_busiest_rank() -> None:
    rng = np.random.default_rng(0)
    everyones = [rng.integers(-1, 12, (20, 3), dtype=np.int32) for _ in range(3)]
    received, sent = [0] * 3, [0] * 3
    for source, ids in enumerate(everyones):
        for expert in ids.ravel().tolist():
            if expert >= 0 and expert // 4 != source:
                received[expert // 4] += 1
                sent[source] += 1
    assert links_layer.remote_rows(everyones, 12) == max(received + sent)


def test_own_table_redirects_rows_and_nothing_else() -> None:
    table = np.arange(NUM_SYMMETRIC * 3, dtype=np.uint64).reshape(NUM_SYMMETRIC, 3)
    own = links_layer.own_table(table, 1)
    for name, buffer in SYMMETRIC_BUFFERS.items():
        same = name not in links_layer.ROWS_OF_PEERS
        assert (own[buffer] == (table[buffer] if same else table[buffer, 1])).all(), name
    kept = set(SYMMETRIC_BUFFERS) - set(links_layer.ROWS_OF_PEERS)
    assert {"topk_ids", "num_tokens"} <= kept  # the schedule still sees every rank's routes


@pytest.mark.parametrize(
    "size, expected", [(1, [1]), (2, [2, 1]), (8, [8, 4, 2, 1]), (6, [6, 2, 1])]
)
def test_groups_divide_the_job(size: int, expected: list[int]) -> None:
    assert links_run.group_sizes(size) == expected


def test_ranks_divide_the_experts_of_every_case() -> None:
    assert links_run.group_sizes(8, links_layer.LAYER_CASES) == [8, 4, 2, 1]
    assert links_run.group_sizes(256, ["dsv3"])[-1] == 1
    for size, case in ((3, "dsv3"), (6, "qwen3:mxfp8"), (256, "qwen3")):
        with pytest.raises(ValueError, match=rf"the \d+ experts of {case}, got {size}"):
            links_run.group_sizes(size, ["dsv3", case] if size == 256 else [case])


@pytest.mark.parametrize("parts, is_refused", [("links", False), ("links,bits", True)])
def test_ranks_are_checked_before_anything_is_measured(
    parts: str, is_refused: bool, monkeypatch, capsys
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(links_run, "require_gpu", lambda what: None)
    monkeypatch.setattr(links_run, "run", lambda *given: ran.append(given) or True)
    job = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=3, rank=0))
    monkeypatch.setattr("mok_ref.heap.mpi.import_mpi", lambda: job)
    if is_refused:
        with pytest.raises(SystemExit):
            links_run.main(["--parts", parts])
        assert "must divide the 128 experts of qwen3, got 3" in capsys.readouterr().err
    else:
        links_run.main(["--parts", parts, "--cases", "dsv3,dsv3"])
    assert [given[0] for given in ran] == ([] if is_refused else [["dsv3"]])


@pytest.mark.parametrize("program", ["links_run", "worker"])
@pytest.mark.parametrize("is_word_right", [True, False])
def test_an_error_of_every_process_is_one_line(program: str, is_word_right: bool) -> None:
    if shutil.which("mpiexec", path=MPI_PATH) is None:
        pytest.skip("no mpiexec")
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    script = str(ROOT / "tests" / "gpu" / "multi_gpu_worker.py")
    started = [script] if program == "worker" else ["-m", "mok_ref.bench.links_run"]
    words = [] if is_word_right else ["--nothing"]
    hidden = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": MPI_PATH}
    done = subprocess.run(
        ["mpiexec", "-n", "3", sys.executable, *started, *words],
        capture_output=True, text=True, timeout=120, env=os.environ | hidden, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and ("--nothing" in line) == (not is_word_right)


@pytest.mark.parametrize("kind", ["ValueError", "KeyError"])
def test_an_error_of_one_process_ends_them_all(kind: str) -> None:
    """Rank 1 fails while the others wait for it in a collective."""
    if shutil.which("mpiexec", path=MPI_PATH) is None:
        pytest.skip("no mpiexec")
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    program = f"""
from mok_ref.bench import links_run
def run(*given):
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        raise {kind}("no such thing")
    MPI.COMM_WORLD.Barrier()
links_run.run, links_run.require_gpu = run, lambda what: None
links_run.main(["--parts", "links"])
"""
    done = subprocess.run(
        ["mpiexec", "-n", "3", sys.executable, "-c", program],
        capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": MPI_PATH},
    )  # fmt: skip
    lines = done.stderr.strip().splitlines()
    if kind == "ValueError":
        assert done.returncode == 2 and lines == ["error: rank 1: no such thing"]
    else:
        assert done.returncode == 1 and lines[-1] == "KeyError: 'no such thing'"


def test_layer_rows_count_flops_of_both_directions() -> None:
    case = links_layer.LAYER_CASES["qwen3"]
    forward = links_layer.layer_row(case, 2, "mok_ref", links_layer.FORWARD, 1.0)
    both = links_layer.layer_row(case, 2, "mok_ref", links_layer.STEP, 1.0)
    assert forward["tflops"] == pytest.approx(6 * 8192 * 8 * 2048 * 768 / 1e9)
    assert both["tflops"] == pytest.approx(3 * forward["tflops"])


@pytest.mark.parametrize(
    "arguments, message",
    [(["--cases", "huge"], "cases must be of"), (["--parts", "all"], "parts must be of")],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        links_run.parse(arguments)


def test_the_first_round_of_every_contender_warms_up(monkeypatch) -> None:
    launched = []

    def launches(call: Any, count: int, warm: int) -> list[float]:
        launched.append((call(), count, warm))
        return [100.0 if len(launched) <= 2 else float(len(call()))] * count

    monkeypatch.setattr(links_layer, "launches_ms", launches)
    prepared: list[str] = []
    heap = SimpleNamespace(host_barrier=lambda phase: None, check=lambda: None)
    calls = {"a": lambda: "x", "bb": lambda: "yy"}
    found = links_layer.time_calls(heap, calls, lambda ms: 2 * ms, prepared.append)
    assert found == {"a": 2.0, "bb": 4.0}
    assert len(launched) == 2 * (links_layer.ROUNDS + 1)
    assert set(launched) == {(x, links_layer.PER_ROUND, links_layer.WARM) for x in ("x", "yy")}
    assert prepared[-1] == links_layer.OURS and set(prepared[:2]) == {"a", "bb"}


# --------------------------------------------------------------------------- the page


def bench_report() -> dict[str, Any]:
    reports = [json.loads(path.read_text()) for path in REPORTS]
    return copy.deepcopy(links_page.merged([r for r in reports if "links" in r])[0])


def test_reports_of_one_machine_and_kernel_are_one_and_the_last_time_counts() -> None:
    report = bench_report()
    again, other = copy.deepcopy(report), copy.deepcopy(report)
    again["layers"] = [again["layers"][0] | {"ms": 77.0}]
    again["links"], again["bits"] = [], {"new": "equal"}
    other["device"]["kernels"] = "others"
    one, two = links_page.merged([report, again, other])
    assert one["layers"][0]["ms"] == 77.0 and one["layers"][1:] == report["layers"][1:]
    assert one["links"] == report["links"] and one["bits"] == report["bits"] | {"new": "equal"}
    assert two["layers"] == report["layers"]


def test_sizes_that_were_not_measured_stay_empty() -> None:
    report = bench_report()
    lines = links_page.layer_table(report)
    assert any(line.startswith("R = 4 and R = 8: not measured") for line in lines)
    assert all(line.endswith("| – | – |") for line in lines if "| mok_ref |" in line)
    for row in list(report["layers"]):
        report["layers"].append(row | {"R": 4, "tflops": 123.4})
    lines = links_page.layer_table(report)
    assert any(line.startswith("R = 8: not measured") for line in lines)
    assert all("| 123 | – |" in line for line in lines if "| mok_ref |" in line)


def test_figures_at_their_aim_are_bold() -> None:
    rates = {("pull", 64, 1, 8): 329.9, ("push", 64, 1, 8): 355.0}
    assert links_page.aimed(rates, ("pull", 64, 1, 8), links_page.PULL_AIM) == "330"
    assert links_page.aimed(rates, ("push", 64, 1, 8), links_page.PUSH_AIM) == "**355**"
    assert links_page.aimed(rates, ("push", 64, 2, 8), links_page.PUSH_AIM) == links_page.EMPTY
    report = bench_report()
    report["hidden"] = [
        report["hidden"][0] | {"hidden": 0.899},
        report["hidden"][0] | {"hidden": 0.9},
    ]
    shares = [line.rsplit("|", 2)[1].strip() for line in links_page.hidden_table(report)[4:6]]
    assert shares == ["0.90", "**0.90**"]


def test_unequal_bits_are_shown() -> None:
    report = bench_report()
    report["bits"] = {"a": "equal", "b": "y: 3 of 9 differ"}
    assert any(
        "1 of 2 equal; b: y: 3 of 9 differ" in line for line in links_page.bits_lines(report)
    )
    checks = {
        "golden 0": "equal (bf16, hopper kernels)",
        "golden 1": "AssertionError: y differs",
        "fault row 1": "equal",
    }
    device = {"heap": "CudaIpcHeap", "gpus": 2, "gpu": "GPU", "date": "today"}
    lines = links_page.checks_lines([{"checks": checks, "device": device}])
    assert "| a stored golden case | `golden 1` | AssertionError: y differs |" in lines
    assert "| 1 of 2 golden cases |  | equal: 1 bf16, hopper kernels |" in lines


def test_checks_say_what_they_try_and_which_kernels_ran(worker) -> None:
    assert set(links_page.CHECKS) == {n for n in worker.CHECKS if not n.startswith("golden")}
    device = {"heap": "CudaIpcHeap", "gpus": 2, "gpu": "GPU", "date": "today"}
    for kernels, text in ((links_page.MXFP8_WAS_PORTABLE[0], "portable kernels"), ("new", "equal")):
        made = {"checks": {"mxfp8 layer": "equal"}, "device": device | {"kernels": kernels}}
        (line,) = (line for line in links_page.checks_lines([made]) if "mxfp8 layer" in line)
        assert text in line and ("portable" in line) == (kernels != "new")
    made = {"checks": {"golden 0": "no"}, "device": device}
    assert "| 0 of 1 golden cases |  | none equal |" in links_page.checks_lines([made])


def test_published_figures_keep_their_dtype() -> None:
    lines = [line for line in links_page.neighbour_lines() if "LigerCute" in line]
    assert lines and all(
        line.startswith(("- qwen3 forward:", "- qwen3 backward:")) for line in lines
    )


def test_every_layer_row_has_a_prediction() -> None:
    pytest.importorskip("mok_ref.planner.layer_prediction")
    report = bench_report()
    row = next(r for r in report["layers"] if r["R"] == 2 and r["contender"] == links_layer.OURS)
    ms, share = links_page.predicted(row)
    assert 0.2 < ms / row["ms"] < 5 and 0 <= share <= 1
    slower = links_page.predicted(row | {"contender": links_layer.OURS_FLOAT32})
    assert slower[0] >= ms


def test_main_replaces_the_tables_between_the_marks(tmp_path) -> None:
    output = tmp_path / "page.md"
    output.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    report = bench_report()
    report["layers"] = report["layers"][:1]
    (tmp_path / "r.json").write_text(json.dumps(report))
    links_page.main([str(tmp_path / "r.json"), "--output", str(output)])
    text = output.read_text()
    assert text.startswith(f"before\n{BEGIN}\n### ") and text.endswith(f"{END}\nafter\n")
    assert "\nold\n" not in text


# --------------------------------------------------------------------------- the worker's checks


class ThreadComm:
    """What a check needs of a communicator, for virtual ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.met = threading.Barrier(size)

    def of(self, rank: int) -> SimpleNamespace:
        def allgather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.met.wait(60)
            everyone = list(self.values)
            self.met.wait(60)
            return everyone

        def gather(value: Any) -> list[Any] | None:
            everyone = allgather(value)
            return everyone if rank == 0 else None

        return SimpleNamespace(rank=rank, allgather=allgather, gather=gather)


@pytest.fixture
def worker() -> Any:
    if host_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    with host_cuda_device():
        from gpu import multi_gpu_worker

        yield multi_gpu_worker


def verdicts(worker: Any, name: str) -> list[str]:
    """What both ranks find of one check, on virtual ranks of the CPU."""
    everyone, found = ThreadComm(2), ["", ""]

    def work(heap: Any) -> None:
        comm = everyone.of(heap.rank)
        found[heap.rank] = worker.first_fault(worker.run_check(comm, lambda: heap, name), comm)

    run_virtual_cuda_ranks(2, work, timeout_s=60)
    return found


def test_checks_pass_on_right_bits(worker) -> None:
    for name in ("golden 0", "fault row 24"):
        assert all(text.startswith("equal") for text in verdicts(worker, name)), name
    assert verdicts(worker, "mxfp8 layer") == ["equal (mxfp8, portable kernels)"] * 2


def test_a_check_fails_on_wrong_bits(worker, monkeypatch) -> None:
    original = worker.read_npz

    def altered(path: Path) -> dict[str, np.ndarray]:
        stored = dict(original(path))
        stored["y"] = stored["y"].copy()
        stored["y"].flat[5] ^= 1
        return stored

    monkeypatch.setattr(worker, "read_npz", altered)
    assert all(text.startswith("AssertionError: y: ") for text in verdicts(worker, "golden 0"))
