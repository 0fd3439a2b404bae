"""Clock stamps of kernels: the device functions of cuda_src/trace.cuh run on the CPU, their records
read by mok_ref.gpu.trace, and what becomes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu.host_cuda import HostKernels
from gpu.host_cuda import compiler as host_compiler
from host_cupy import host_cuda_device

from mok_ref import cli
from mok_ref.casefile import read_npz
from mok_ref.config import MoEConfig
from mok_ref.gpu import compiler, recorded_run, trace
from mok_ref.gpu.compiler import load_kernel  # the stand-in replaces the module's
from mok_ref.planner.minibatch_simulation import Span
from mok_ref.planner.trace import STAMP, STAMP_KINDS, read_trace, spans_from_stamps

CTAS, THREADS, TASKS = 3, 128, 5
STORE, GATE_UP = STAMP_KINDS.index("store"), STAMP_KINDS.index("gate_up")


class HostModule:
    """What CuPy's RawModule is to a recorder."""

    def __init__(self, kernels: HostKernels) -> None:
        self.kernels = kernels

    def get_global(self, name: str) -> Any:
        symbol = self.kernels.symbol(name, trace.TRACE_BUFFER.itemsize)

        def copy_from_host(address: int, num_bytes: int) -> None:
            assert num_bytes == symbol.nbytes
            symbol[:] = np.ctypeslib.as_array(
                (np.ctypeslib.ctypes.c_uint8 * num_bytes).from_address(address)
            )

        return SimpleNamespace(copy_from_host=copy_from_host)


@pytest.fixture(scope="module")
def kernels() -> Iterator[HostKernels]:
    if host_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    compiled = HostKernels("unit_kernels.cu", ("MOK_TRACE=1",))
    yield compiled
    compiled.close()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    with host_cuda_device():
        import cupy

        monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(cupy.cuda.runtime, "deviceGetAttribute", lambda *_: CTAS, raising=False)
        yield


def launch(kernels: HostKernels, rank: int = 0, ctas: int = CTAS, tasks: int = TASKS) -> None:
    kernels.launch("unit_trace", (ctas,), THREADS, [np.int32(rank), np.int32(tasks)])


def recorder_of(kernels: HostKernels, **sizes: int) -> trace.Recorder:
    recorder = trace.Recorder(**{"first_rank": 0, "num_ranks": 1, "capacity": 64} | sizes)
    recorder.attach(HostModule(kernels))
    return recorder


def expected_tasks(rank: int = 0) -> set[tuple[int, ...]]:
    """(rank, SM, kind, warp, row block, column): every warp stores, every second one multiplies."""
    found = set()
    for cta in range(CTAS):
        for warp in range(THREADS // 32):
            kinds = (STORE, GATE_UP) if warp % 2 == 0 else (STORE,)
            found |= {(rank, cta, k, warp, cta, i) for k in kinds for i in range(TASKS)}
    return found


def tasks_of(stamps: np.ndarray) -> list[tuple[int, ...]]:
    names = ("rank", "sm", "kind", "warp", "row_block", "column")
    return list(zip(*(stamps[name].tolist() for name in names), strict=True))


def test_every_task_is_recorded_once(kernels: HostKernels) -> None:
    recorder = recorder_of(kernels)
    launch(kernels)
    stamps = recorder.read()
    assert sorted(tasks_of(stamps)) == sorted(expected_tasks())
    assert (stamps["end"] >= stamps["start"]).all()
    assert recorder.num_lost() == 0


def test_a_warps_time_has_no_gaps(kernels: HostKernels) -> None:
    recorder = recorder_of(kernels)
    launch(kernels)
    stamps = recorder.read()
    for cta in range(CTAS):
        own = stamps[(stamps["sm"] == cta) & (stamps["warp"] == 2)]
        own = own[np.lexsort((own["end"], own["start"]))]
        assert (own["start"][1:] == own["end"][:-1]).all()


def test_a_second_launch_goes_on_behind_the_first(kernels: HostKernels) -> None:
    recorder = recorder_of(kernels)
    launch(kernels)
    launch(kernels)
    assert sorted(tasks_of(recorder.read())) == sorted([*expected_tasks()] * 2)
    recorder.clear()
    assert len(recorder.read()) == 0


def test_tasks_without_room_are_counted_and_nothing_is_written_past_the_end(
    kernels: HostKernels,
) -> None:
    recorder = recorder_of(kernels, capacity=3)
    (buffers,) = recorder._attached.values()
    buffers.records[...] = 0xABAB
    launch(kernels)
    stamps = recorder.read()
    seen = len(expected_tasks())
    assert len(stamps) == CTAS * (THREADS // 32) * 3
    assert recorder.num_lost() == seen - len(stamps)
    unused = np.ones(len(buffers.records), bool)
    warps = np.arange(len(buffers.records)).reshape(CTAS, trace.WARPS)[:, : THREADS // 32]
    unused[warps.ravel()] = False
    assert (buffers.records[unused] == 0xABAB).all()


def test_each_rank_has_records_of_its_own(kernels: HostKernels) -> None:
    recorder = recorder_of(kernels, first_rank=4, num_ranks=2)
    for rank in (5, 4):
        launch(kernels, rank)
    assert set(tasks_of(recorder.read())) == expected_tasks(4) | expected_tasks(5)


@pytest.mark.parametrize("rank", [3, 6, -1])
def test_ranks_of_other_processes_record_nothing(kernels: HostKernels, rank: int) -> None:
    recorder = recorder_of(kernels, first_rank=4, num_ranks=2)
    launch(kernels, rank)
    assert len(recorder.read()) == 0 and recorder.num_lost() == 0


def test_ctas_beyond_the_multiprocessors_record_nothing(kernels: HostKernels) -> None:
    recorder = recorder_of(kernels)
    launch(kernels, ctas=CTAS + 2)
    assert set(tasks_of(recorder.read())) == expected_tasks()


def test_a_detached_recorder_is_left_alone(kernels: HostKernels) -> None:
    recorder = recorder_of(kernels)
    recorder.detach()
    launch(kernels)
    assert len(recorder.read()) == 0


def test_kernels_without_the_macro_have_no_trace(kernels: HostKernels) -> None:
    plain = HostKernels("unit_kernels.cu")
    with pytest.raises(ValueError, match="mok_trace"):
        plain.symbol("mok_trace", 4)
    launch(plain)
    plain.close()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("first_rank", -1, "first_rank must be an integer in 0..65535, got -1"),
        ("num_ranks", 0, "num_ranks must be an integer in 1..65536, got 0"),
        ("num_ranks", 70000, "num_ranks must be an integer in 1..65536, got 70000"),
        ("capacity", 0, "capacity must be an integer in 1..2147483647, got 0"),
        ("capacity", 1.5, "capacity must be an integer in 1..2147483647, got 1.5"),
        ("capacity", True, "capacity must be an integer in 1..2147483647, got True"),
        ("capacity", 2**40, "capacity must be an integer in 1..2147483647, got 1099511627776"),
    ],
)
def test_bad_sizes_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace.Recorder(**{"first_rank": 0, "num_ranks": 1, "capacity": 1} | {name: value})


# --------------------------------------------------------------------------- which kernels


def test_only_kernels_with_stamps_are_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, attached = [], []

    def load_module(source: str, arch: Any = None, macros: Any = ()) -> Any:
        loaded.append((source, macros))
        return SimpleNamespace(get_function=lambda name: (source, name, macros))

    monkeypatch.setattr(compiler, "load_module", load_module)
    compiler._loaded_kernel.cache_clear()
    compiler.record_tasks(SimpleNamespace(attach=lambda module: attached.append(module)))
    try:
        traced = load_kernel("megakernel.cu", "moe_forward_hopper")
        plain = load_kernel("support.cu", "combine")
    finally:
        compiler.record_tasks(None)
        after = load_kernel("megakernel.cu", "moe_forward_hopper")
        compiler._loaded_kernel.cache_clear()
    assert (traced[2], plain[2], after[2]) == (("MOK_TRACE=1",), (), ())
    assert len(attached) == 1


def test_recording_is_not_switched_on_within_itself() -> None:
    with trace.recording() as outer:
        number = compiler.recording_number()
        with pytest.raises(RuntimeError, match="recording is on"), trace.recording():
            pytest.fail("went in")
        assert compiler._recorder is outer and compiler.recording_number() == number > 0
    assert compiler._recorder is None and compiler.recording_number() == 0
    with trace.recording():
        assert compiler.recording_number() > number


def test_headers_are_found_through_other_headers() -> None:
    for source in ("megakernel.cu", "megakernel_backward.cu"):
        assert "trace.cuh" in compiler.headers_of(source)
    assert "trace.cuh" not in compiler.headers_of("support.cu")


def test_names_are_those_of_the_kernels_enumerators() -> None:
    text = (compiler.cuda_source_dir() / "trace.cuh").read_text(encoding="utf-8")
    body = text[text.index("enum TraceKind") : text.index("#if MOK_TRACE")]
    numbers = [int(line.split("=")[1].split(",")[0]) for line in body.splitlines() if "= " in line]
    assert numbers == list(range(len(STAMP_KINDS)))


@pytest.mark.parametrize(
    "source", [name for name in compiler.source_names("sm_90a") if name.startswith("megakernel")]
)
def test_every_kernel_that_stamps_begins_with_trace_start(source: str) -> None:
    """Without it a warp would find another kernel's bytes where its region is kept."""
    names = (source, *compiler.headers_of(source))
    text = "".join((compiler.cuda_source_dir() / n).read_text() for n in names if "trace" not in n)
    assert "trace_task" in text
    assert len(re.findall(r"^ +trace_start\(", text, re.MULTILINE)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("source", ["megakernel.cu", "megakernel_backward.cu"])
def test_without_the_macro_not_a_byte_is_added(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cubin is the one of the same sources without a single call of trace.cuh."""
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    with_calls, _ = compiler._compile(source, "sm_90a", ())
    removed = 0
    for path in compiler.cuda_source_dir().glob("*.cu*"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not re.match(r" +trace_(start|task)\b.*;$", line)]
        removed += len(lines) - len(kept)
        (tmp_path / path.name).write_text("".join(kept), encoding="utf-8")
    assert removed > 20
    monkeypatch.setattr(compiler, "cuda_source_dir", lambda: tmp_path)
    without_calls, _ = compiler._compile(source, "sm_90a", ())
    assert with_calls == without_calls


# --------------------------------------------------------------------------- runs


def test_a_run_returns_its_result_and_all_tasks(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> str:
        assert compiler._recorder is not None
        compiler._recorder.attach(HostModule(kernels))
        launch(kernels)
        return "result"

    result, spans = recorded_run.run_recorded(run, 1)
    assert result == "result" and compiler._recorder is None
    assert len(spans) == len(expected_tasks())
    assert {span.rank for span in spans} == {0} and min(span.start for span in spans) == 0.0


def test_a_run_that_fails_leaves_nothing_switched_on() -> None:
    def run() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        recorded_run.run_recorded(run, 1)
    assert compiler._recorder is None


class Comm:
    """Two processes that hold the same."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, value: Any) -> Any:
        return [value, value] if self.rank == 0 else None


def test_ranks_of_other_processes_are_gathered_on_rank_0() -> None:
    spans = [Span(0, "pull", "pull 0", 0.0, 1.0)]
    stamps = np.zeros(1, STAMP)
    stamps["end"] = 10**9
    assert [(s.rank, s.end) for s in spans_from_stamps(stamps)] == [(0, spans[0].end)]
    assert recorded_run.run_recorded(lambda: 1, 2, Comm(0)) == (1, [])
    assert recorded_run.run_recorded(lambda: 1, 2, Comm(1)) == (1, [])


def plan_of(ranks: int = 2) -> Any:
    config = MoEConfig(256, 128, 8, 2, ranks)
    settings = SimpleNamespace(save="all", backward=True)
    return SimpleNamespace(config=config, splits=np.array([64] * ranks), settings=settings)


def test_the_file_holds_both_timelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mok_ref.planner.tune.device_name", lambda device: "NVIDIA H200")
    ids = np.random.default_rng(0).integers(0, 8, (128, 2)).astype(np.int32)
    measured = [Span(0, "SM 0 math 4", "gate_up 0.0", 0.0, 1e-5)]
    path = tmp_path / "run.json"
    recorded_run.write_timeline(path, plan_of(), ids, measured)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"simulated rank 0", "simulated rank 1", "measured rank 0"}
    kinds = {span.name.split(" ")[0] for span in read_trace(path)}
    assert {"gate_up", "down", "dgrad_hidden", "dgrad_input", "wgrad", "pull"} <= kinds


def test_an_unknown_gpu_has_no_simulation_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mok_ref.planner.tune.device_name", lambda device: "RTX 9090")
    path = tmp_path / "run.json"
    span = Span(0, "SM 0 math 4", "gate_up 0.0", 0.0, 1e-5)
    recorded_run.write_timeline(path, plan_of(), np.zeros((128, 2), np.int32), [span])
    assert len(read_trace(path)) == 1


def test_a_run_without_stamps_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="--trace found nothing to record"):
        recorded_run.write_timeline(tmp_path / "x.json", plan_of(), np.zeros((1, 2)), [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "t.json"], "--trace must go with --device cuda, got device 'cpu'"),
        (["--device", "cuda", "--trace", "t.npz"], "--trace must end in .json, got t.npz"),
        (
            ["--device", "cuda", "--trace", "no/where/t.json"],
            "--trace must lie in a folder that can be written to",
        ),
        (
            ["--device", "cuda", "--path", "portable", "--trace", "t.json", "--save-input=s.npz"],
            "--trace must go with --path auto or hopper, got path 'portable'",
        ),
    ],
)
def test_the_option_is_checked_before_any_work(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        cli.main(["run", *arguments])
    assert done.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_results_are_kept_where_nothing_could_be_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--path auto on a GPU without the Hopper kernels."""
    if host_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    monkeypatch.chdir(tmp_path)
    sizes = ["--tokens", "8", "--hidden", "16", "--intermediate", "16", "--experts", "2"]
    files = ["--trace", "t.json", "--output", "o.npz", "--save-input", "s.npz"]
    with pytest.raises(SystemExit) as done:
        cli.main(["run", "--device", "cuda", *sizes, *files])
    printed = capsys.readouterr()
    assert done.value.code == 2
    assert printed.err.splitlines()[-1].startswith("error: --trace found nothing to record")
    assert "results written to o.npz" in printed.out and "trace written" not in printed.out
    assert read_npz(Path("o.npz"))["digest"].item() in printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.npz", "s.npz"]
