"""The command line: one digest however it is run, and every user error one line and status 2."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mok_ref as mok_ref_package
from mok_ref import cli, install, runner
from mok_ref.casefile import (
    OUTPUT_EXPERTS,
    OUTPUT_REPLICATED,
    OUTPUT_TOKENS,
    case_arrays,
    load_case,
    read_npz,
    write_npz,
)
from mok_ref.install import install_hint
from mok_ref.printing import MINIBATCH_STAGES, num_minibatch_steps
from mok_ref.runner import RandomCase
from mok_ref.testing import digest, tensor_digest

GOLDEN = Path(__file__).parent / "golden"
SMALL = RandomCase(50, 16, 8, num_experts=12, top_k=2, shared_size=24, router=True)
TIME_LIMIT_S = 120


def mok_ref(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of the command line, run in this process."""
    with pytest.raises(SystemExit) as done:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(done.value.code or 0), captured.out, captured.err


def mpiexec(ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Python under mpiexec; skips where there is none."""
    pytest.importorskip("mpi4py", reason='pip install ".[mpi]"', exc_type=ImportError)
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if launcher is None:
        pytest.skip("no mpiexec")
    command = [launcher, "-n", str(ranks), sys.executable, *map(str, arguments)]
    return python_run(command)


def python_run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command whose Python finds the package under test."""
    paths = (os.environ.get("MOK_REF_TEST_PATH"), str(Path(mok_ref_package.__file__).parents[1]))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, env=env)


@pytest.fixture(scope="module")
def case_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("case") / "case.npz"
    write_npz(path, case_arrays(SMALL.make()))
    return path


# --------------------------------------------------------------------------- run


def test_output_file_holds_every_tensor_and_its_digest(
    case_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.npz"
    run = ("run", "--input", case_file, "--backward", "--json", "--output", out)
    status, text, err = mok_ref(capsys, *run)
    assert (status, err) == (0, "")
    report, stored = json.loads(text), read_npz(out)
    tensors = {key: value for key, value in stored.items() if not key.startswith("digest")}
    assert set(tensors) == {*OUTPUT_TOKENS, *OUTPUT_EXPERTS, *OUTPUT_REPLICATED}
    assert str(stored["digest"]) == report["digest"] == digest(tensors)
    assert report["digests"] == {key: tensor_digest(key, tensors[key]) for key in tensors}
    assert [line.split()[0] for line in stored["digests"]] == sorted(tensors)
    assert sum(report["rows_per_rank"]) == (tensors["topk_ids"] >= 0).sum()
    bf16 = {key for key, value in tensors.items() if value.dtype == np.uint16}
    assert bf16 == {"y", "dx"}


def test_forward_alone_writes_y(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    run = ("run", "--input", GOLDEN / "case1.npz", "--output", out)
    status, text, _ = mok_ref(capsys, *run)
    lines = text.splitlines()
    assert (status, lines[0]) == (0, f"results written to {out}") and lines[-1].startswith("digest")
    assert sorted(read_npz(out)) == ["digest", "digests", "y"]
    np.testing.assert_array_equal(read_npz(out)["y"], read_npz(GOLDEN / "out1.npz")["y"])


@pytest.mark.parametrize("changes", [
    ("--ranks", 3),
    ("--ranks", 12, "--macrobatch", 256, "--minibatch", 128),
    ("--ranks", 5, "--placement", "even"),
    ("--ranks", 3, "--placement", "0,2,1,0,2,1,2,2,2,2,0,0", "--save", "none"),
])  # fmt: skip
def test_one_digest_however_it_is_run(
    changes: tuple, case_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("run", "--input", case_file, "--backward", "--json")
    first = json.loads(mok_ref(capsys, *run)[1])
    other = json.loads(mok_ref(capsys, *run, *changes)[1])
    assert other["ranks"] == changes[1] and other["digest"] == first["digest"]


def test_options_override_the_case(case_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("run", "--input", case_file, "--json")
    report = json.loads(mok_ref(capsys, *run, "--order", "round_robin", "--dtype", "mxfp8")[1])
    assert (report["order"], report["dtype"]) == ("round_robin", "mxfp8")
    assert report["digest"] != json.loads(mok_ref(capsys, *run)[1])["digest"]


def test_ranks_resplit_in_units_of_16_and_splits_are_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ("run", "--input", GOLDEN / "case_uneven_splits.npz", "--json")
    assert json.loads(mok_ref(capsys, *run)[1])["splits"] == [1, 0, 66, 3]
    assert json.loads(mok_ref(capsys, *run, "--ranks", 4)[1])["splits"] == [1, 0, 66, 3]
    assert json.loads(mok_ref(capsys, *run, "--ranks", 2)[1])["splits"] == [48, 22]


def test_tables_show_rows_times_and_digest(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = mok_ref(capsys, "run", "--tokens", 40, "--ranks", 2, "--backward")
    assert status == 0
    for word in ("rows with padding", "gate/up", "weight gradients", "tokens/s", "40x256"):
        assert word in text
    assert "shared" not in text and "routing" not in text  # the case has neither
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()[-1].removeprefix("digest ")) == 64


def test_the_progress_bar_counts_what_happens() -> None:
    settings = runner.Settings(ranks=2, backward=True, macrobatch=256, minibatch=128)
    plan = runner.make_plan(RandomCase(40, 16, 8, num_experts=6, top_k=2).make(), settings)
    stages: list[str] = []
    runner.run_virtual(plan, stages.append)
    happened = sum(name in MINIBATCH_STAGES for name in stages)
    assert happened == num_minibatch_steps(plan, [0, 1]) > 0


def test_a_random_case_can_be_saved_and_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "case.npz"
    made = mok_ref(capsys, "run", "--tokens", 20, "--seed", 7, "--json", "--save-input", path)
    again = mok_ref(capsys, "run", "--input", path, "--json")
    assert json.loads(made[1])["digest"] == json.loads(again[1])["digest"]
    assert load_case(path).num_tokens == 20


# --------------------------------------------------------------------------- user errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--bogus"), "No such option: --bogus"),
        (("run", "--ranks", "x"), "Invalid value for '--ranks'"),
        (("run", "--ranks", 0), "ranks must be >= 1, got 0"),
        (("run", "--ranks", 3), "got 8 experts on 3 ranks; --placement even"),
        (("run", "--input", "absent.npz"), "absent.npz: No such file"),
        (("run", "--tokens", 4, "--input", "x.npz"), "--tokens must not be given together"),
        (("run", "--order", "sorted"), "--order must be one of canonical, round_robin"),
        (("run", "--macrobatch", 100), "macrobatch must be a positive multiple of 128"),
        (("run", "--macrobatch", 384, "--minibatch", 256), "macrobatch must be a multiple of mini"),
        (("run", "--placement", "0,0,x"), "placement must be even or ranks like"),
        (("run", "--placement", "0,0"), "placement must name one owner rank per expert, got 2"),
        (("run", "--device", "tpu"), "device must be one of cpu, cuda, got 'tpu'"),
        (("run", "--output", "absent/out.npz"), "--output must lie in a folder"),
        (("run", "--output", "out.txt"), "--output must end in .npz, got out.txt"),
        (("run", "--input", GOLDEN / "case_forward_only.npz", "--backward"), "dy must be in the"),
        (("run", "--experts", 4, "--top-k", 5, "--router"), "--top-k must be at most"),
        (("run", "--hidden", 0), "--hidden must be >= 1, got 0"),
        (("run", "--seed", -1), "seed must be >= 0, got -1"),
        (
            ("run", "--tokens", 10**8, "--hidden", 10**6),
            "sizes must fit into memory, got --tokens=100000000",
        ),
        (("run", "--path", "hopper"), "path must be auto with device cpu, got 'hopper'"),
        (("run", "--timeout", 0), "timeout must be a number of seconds > 0, at most 1e+06, got 0"),
        (
            ("run", "--timeout", "-1"),
            "timeout must be a number of seconds > 0, at most 1e+06, got -1",
        ),
        (
            ("run", "--timeout", "nan"),
            "timeout must be a number of seconds > 0, at most 1e+06, got nan",
        ),
        (("run", "--scale-rule", "ocp"), "--scale-rule must be left out for bf16, got 'ocp'"),
        (
            ("run", "--input", GOLDEN / "case_placement.npz", "--ranks", 1),
            "placement of the case must name ranks below 1, got rank 2; --placement even",
        ),
        (("run", "--input", __file__), "without pickled objects, got a file of another kind"),
        (("schedule", "--rows", "-1"), "rows must be >= 0, got -1"),
        (("golden", "check", GOLDEN, "--path", "hopper"), "path must be auto with device cpu"),
        (("bench", "--sizes", "table"), "got 'table' (which --device cuda knows)"),
        (("bench", "--peers", "dense"), "peers must be left out with device cpu, got 'dense'"),
        (("bench", "--device", "cuda", "--ranks", "1"), "ranks must be left out with device cuda"),
        (("bench", "--directions", "sideways"), "directions must be forward or forward,b"),
        (("bench", "--directions", "backward"), "forward or forward,backward, got 'backward'"),
        (("bench", "--repeats", 0), "repeats must be >= 1, got 0"),
        (("bench", "--repeats", "x"), "'--repeats': Input should be a valid integer, "),
        (("bench", "--repeats", "x"), ", got 'x'"),
        (("bench", "--rounds", ""), ", got ''"),
        (("plan", "--gpus", "1.5"), ", got '1.5'"),
        (("run", "--limit", "1e"), ", got '1e'"),
        (("bench", "--repeats", 10**22), "repeats must be at most 10000, got 10000000000000"),
        (("bench", "--device", "cuda", "--bursts", 10**22), "bursts must be at most 10000, got"),
        (("bench", "--device", "cuda", "--peers="), "peers must be of dense-cublas"),
        (("bench", "--device", "cuda", "--sizes", "foo"), "sizes must be of table"),
        (("bench", "--sizes", "0x8x8x4x2"), "sizes must be numbers in 1..999999999, got '0x8"),
        (("bench", "--sizes", "8x8x8x4x9999"), "sizes must have K in 1..64, got '8x8x8x4x9999'"),
        (("bench", "--sizes", "qwen3:mxfp8"), "got 'qwen3:mxfp8' (which --device cuda knows)"),
        (("bench", "--sizes", "small,small"), "must not name a thing twice, got 'small' twice"),
        (("bench", "--ranks", "1,1"), "ranks must not name a number twice, got 1 twice"),
        (("bench", "--output="), "--output must end in .json, got '.', which names no file"),
        (("build", "--arch", "sm_90a,foo"), "arch must be of sm_80, sm_86, sm_89, sm_90a, "),
        (("bench", "--bursts", 3), "bursts must be left out with device cpu, got 3"),
        (("bench", "--device", "cuda", "--bursts", 0), "bursts must be >= 1, got 0"),
        (("bench", "--rounds", 3), "rounds must be left out with device cpu, got 3"),
        (("bench", "--device", "cuda", "--rounds", 0), "rounds must be >= 1, got 0"),
        (("bench", "--sizes", ""), "sizes must be small, medium or NxHxIxExK, got ''"),
        (("bench", "--ranks", ""), "ranks must look like"),
        (("bench", "--device", "cuda", "--sizes", "small,"), "sizes must be of table"),
        (("bench", "--device", "cuda", "--peers", "torch"), "peers must be of dense-cublas"),
        (("bench", "--device", "cuda", "--directions", "up"), "directions must be forward or"),
        (("bench", "--output", "x.foo"), "--output must end in .json, got x.foo"),
        (("bench", "--sizes", "8x8x8x4x2", "--ranks", "3"), "ranks must hold a divisor of the 4"),
        (("verify", "--ranks", "1,,2"), "ranks must look like 1,8,72"),
        (("schedule", "--plot", "x.gif"), "plot must end in .png, .svg, .pdf, got x.gif"),
        (("golden", "check", "absent"), "folder must hold golden cases"),
        (("bench", "--sizes", "huge"), "sizes must be small, medium or NxHxIxExK, got 'huge'"),
    ],
    ids=lambda value: " ".join(map(str, value[:3])) if isinstance(value, tuple) else "",
)
def test_a_user_error_is_one_line_and_status_2(
    arguments: tuple, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = mok_ref(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_missing_library_names_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    status, _, err = mok_ref(capsys, "schedule", "--tokens", 8, "--plot", tmp_path / "x.png")
    assert status == 2 and install_hint("plot") in err
    status, _, err = mok_ref(capsys, "run", "--tokens", 8, "--device", "cuda")
    assert status == 2 and install_hint("gpu") in err
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- other commands


def test_verify_compares_and_skips(case_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("verify", "--input", case_file)
    status, text, _ = mok_ref(capsys, *run, "--ranks", "1-3,5", "--json")
    report = json.loads(text)
    assert status == 0 and report["equal"] and report["skipped"] == [5]
    canonical = {row["digest"] for row in report["runs"] if row["order"] == "canonical"}
    assert len(canonical) == 1
    pairs = {(r["ranks"], r["digest"]) for r in report["runs"] if r["order"] == "round_robin"}
    assert len(pairs) == 3
    status, text, _ = mok_ref(capsys, *run, "--ranks", "1,2,5")
    last = text.splitlines()[-1]
    assert (
        status == 0 and last == "all bits equal: 11 runs, R = 1, 2; skipped 5 (no divisor of E=12)"
    )
    status, text, err = mok_ref(capsys, *run, "--ranks", "5,6")
    last = text.splitlines()[-1]
    assert (
        (status, err) == (1, "") and last.startswith("NOT verified: fewer than two") and "6" in last
    )


def test_verify_runs_the_case_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own ranks, splits and placement too, which no number in --ranks stands for."""
    run = ("verify", "--input", GOLDEN / "case_placement.npz", "--ranks", "1,7", "--json")
    report = json.loads(mok_ref(capsys, *run)[1])
    own = [row for row in report["runs"] if row["placement"] == "case"]
    assert report["equal"] and [(row["ranks"], row["left_out"]) for row in own] == [(3, "")]
    run = ("verify", "--input", GOLDEN / "case_uneven_splits.npz", "--ranks", "1,2", "--json")
    report = json.loads(mok_ref(capsys, *run)[1])
    assert report["equal"] and "shared_dw_gate" in report["runs"][-1]["left_out"]
    assert "not compared in the case's own splits: dw_gate" in report["summary"]


@pytest.mark.parametrize(
    ("tensor", "order"),
    [("dw_up", "canonical"), ("dw_up", "round_robin"), ("y", "round_robin")],
)
def test_verify_finds_one_wrong_bit(
    tensor: str,
    order: str,
    case_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: one bit of one run is flipped."""
    right = runner.assemble

    def wrong(plan, results):
        is_the_one = plan.config.ep_size == 2 and plan.settings.save == "none"
        if is_the_one and plan.config.row_order == order:
            array = results[1].tensors[tensor].copy()
            array.reshape(-1).view(np.uint8)[0] ^= 1
            results[1].tensors[tensor] = array
        return right(plan, results)

    monkeypatch.setattr(runner, "assemble", wrong)
    status, text, _ = mok_ref(capsys, "verify", "--input", case_file, "--ranks", "1,2", "--json")
    faults = [row["fault"] for row in json.loads(text)["runs"] if row["fault"]]
    assert status == 1 and len(faults) == 1 and faults[0].startswith(f"{tensor}: 1 of ")


def test_schedule_counts_every_route(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "x.svg"
    run = ("schedule", "--tokens", 48, "--ranks", 4)
    status, text, _ = mok_ref(capsys, *run, "--json")
    assert status == 0 and np.sum(json.loads(text)["rows_pulled"]) == 48 * 2
    pytest.importorskip("matplotlib")
    status, text, _ = mok_ref(capsys, *run, "--plot", picture)
    assert status == 0 and text.splitlines()[-1] == f"picture written to {picture}"
    first = picture.read_bytes()
    assert b"<svg" in first
    assert mok_ref(capsys, *run, "--plot", picture)[0] == 0
    assert picture.read_bytes() == first


def test_golden_check_tells_good_from_bad(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("case1.npz", "out1.npz"):
        shutil.copy(GOLDEN / name, tmp_path)
    assert mok_ref(capsys, "golden", "check", tmp_path)[0] == 0
    wrong = read_npz(tmp_path / "out1.npz")
    wrong["y"][0, 0] ^= 1
    write_npz(tmp_path / "out1.npz", wrong)
    status, text, _ = mok_ref(capsys, "golden", "check", tmp_path)
    assert status == 1 and "y: 1 of 1920 differ, first at (0, 0)" in text


def test_golden_check_reports_every_case(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One bad case does not hide the others; a half without its partner is a fault."""
    for name in ("case0", "out0", "case1", "out2", "case_placement", "out_placement"):
        shutil.copy(GOLDEN / f"{name}.npz", tmp_path)
    (tmp_path / "case_bad.npz").write_bytes(b"no archive")
    status, text, _ = mok_ref(capsys, "golden", "check", tmp_path, "--ranks", 2)
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert status == 1 and text.splitlines()[-1] == "4 of 5 cases NOT equal"
    assert " equal " in rows["0"] and "there is no out1.npz" in rows["1"]
    assert "there is no case for out2.npz" in rows["2"] and "case_bad.npz" in rows["bad"]
    assert "--placement even" in rows["placement"]
    for name in ("case1", "out2", "case_bad"):
        (tmp_path / f"{name}.npz").unlink()
    check = ("golden", "check", tmp_path, "--ranks", 2, "--placement", "even")
    status, text, _ = mok_ref(capsys, *check)
    assert status == 0 and text.splitlines()[-1] == "all 2 cases equal"


def test_info_names_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mok_ref import info

    monkeypatch.setattr(info, "_version", lambda name: None)
    status, text, _ = mok_ref(capsys, "info", "--json")
    hints = {row["name"]: row["hint"] for row in json.loads(text)}
    assert status == 0
    for name, (extra, _) in info.OPTIONAL.items():
        assert install_hint(extra) in hints[name]
    states = {row["name"]: row["state"] for row in json.loads(text)}
    assert states["scipy"] == "not installed (optional)" and states["numpy"] == "missing"


def test_help_of_bench_names_every_case_experiment_and_peer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mok_ref.bench.cases import CASES
    from mok_ref.bench.commands import EXPERIMENTS, MAX_COUNT
    from mok_ref.bench.peers import PEERS

    status, text, _ = mok_ref(capsys, "bench", "--help")
    words = set(re.findall(r"[\w:-]+", re.sub(r"-\s+", "-", text)))  # lines break behind hyphens
    peers = {name.lower().replace(" ", "-") for name in PEERS} - {"dense-cublas"} | {"dense"}
    assert status == 0
    assert {*CASES, *EXPERIMENTS, *peers, ":mxfp8", str(MAX_COUNT)} - words == set()


def test_tables_are_as_wide_as_columns_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mok_ref import info

    monkeypatch.setattr(info, "_version", lambda name: None)
    assert max(map(len, mok_ref(capsys, "info")[1].splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, mok_ref(capsys, "info")[1].splitlines())) <= 80


def test_install_hints_name_a_folder_that_pip_can_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is on no index: its bare name would install nothing."""
    monkeypatch.setattr(install, "source_folder", lambda: tmp_path)
    assert install_hint("gpu") == f'pip install "{tmp_path}[gpu]"'
    monkeypatch.chdir(tmp_path)
    assert install_hint("gpu") == 'pip install ".[gpu]"'
    monkeypatch.setattr(install, "source_folder", lambda: None)
    assert install_hint("gpu") == 'pip install ".[gpu]" in a checkout of mok_ref'


def test_no_source_of_the_package_tells_to_install_it_by_name() -> None:
    root = Path(mok_ref_package.__file__).parent
    hint = re.compile(r"pip install ['\"]?mok[-_]ref")
    assert [path.name for path in root.rglob("*.py") if hint.search(path.read_text())] == []


@pytest.mark.parametrize("arguments", [(), ("golden",), ("--help",)])
def test_help_is_formatted(arguments: tuple, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = mok_ref(capsys, *arguments)
    assert (status, err) == (0, "") and out.startswith("Usage: ") and out.count("\n") > 8


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = mok_ref(capsys, "--version")
    assert (status, out) == (0, f"mok_ref {mok_ref_package.__version__}\n")


def test_help_names_the_sizes_of_a_random_case(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(mok_ref(capsys, "run", "--help")[1].split())
    default = RandomCase()
    assert f"tokens N of the whole batch ({default.num_tokens})" in text
    assert f"hidden size H ({default.hidden_size})" in text


def test_bench_reports_rates(capsys: pytest.CaptureFixture[str]) -> None:
    bench = ("bench", "--sizes", "32x32x16x4x2", "--ranks", "1,2,3", "--repeats", 1, "--json")
    rows = json.loads(mok_ref(capsys, *bench)[1])
    assert [row["ranks"] for row in rows] == [1, 2]
    assert rows[0]["digest"] == rows[1]["digest"]
    assert all(row["forward_macs_per_s"] > 0 and row["backward_macs_per_s"] > 0 for row in rows)


def test_import_needs_numpy_and_ml_dtypes_alone() -> None:
    forbidden = ["cupy", "mpi4py", "typer", "rich", "matplotlib", "scipy", "torch"]
    code = f"import mok_ref, sys; print([m for m in {forbidden} if m in sys.modules])"
    assert python_run([sys.executable, "-c", code]).stdout.strip() == "[]"


# --------------------------------------------------------------------------- under mpiexec


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_processes_give_the_digest_of_threads(
    ranks: int, case_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.npz"
    run = ("run", "--input", case_file, "--backward", "--json")
    done = mpiexec(ranks, "-m", "mok_ref", *run, "--output", out)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    expected = json.loads(mok_ref(capsys, *run, "--ranks", 1)[1])
    assert report["ranks"] == ranks and report["digest"] == expected["digest"]
    assert str(read_npz(out)["digest"]) == report["digest"]


@pytest.mark.mpi
def test_help_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    done = mpiexec(3, "-m", "mok_ref", "run", "--help")
    assert done.returncode == 0 and done.stdout.count("Usage: ") == 1


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bogus",), "No such option: --bogus"),
        (("--ranks", 2), "ranks must be the number of MPI processes 3, got 2"),
        (("--input", GOLDEN / "case2.npz"), "must be the 4 entries of splits"),
        (("--input", "absent.npz"), "absent.npz: No such file"),
    ],
)
def test_an_error_of_all_processes_is_told_once(
    arguments: tuple, message: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.npz"
    done = mpiexec(3, "-m", "mok_ref", "run", *arguments, "--output", out)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mpi
def test_an_error_of_one_process_ends_all(tmp_path: Path) -> None:
    """Rank 1 alone meets bad weights in the middle of the run; the others wait at a barrier."""
    script = tmp_path / "one_fails.py"
    script.write_text(
        "from mok_ref import cli, runner\n"
        "right = runner.moe_backward\n"
        "def wrong(context, *rest):\n"
        "    if context.workspace.heap.rank == 1:\n"
        "        raise ValueError('dy must be good, got bad')\n"
        "    return right(context, *rest)\n"
        "runner.moe_backward = wrong\n"
        "cli.main(['run', '--tokens', '40', '--backward', '--experts', '6', '--output', "
        f"{str(tmp_path / 'out.npz')!r}])\n"
    )
    done = mpiexec(3, script)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: dy must be good, got bad"]
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.mpi
def test_the_first_example_gives_one_digest(tmp_path: Path) -> None:
    example = Path(__file__).parents[1] / "examples" / "01_text_through_four_ranks.py"
    options = ("--max-tokens", 300, "--plot", tmp_path / "x.png")
    alone = python_run([sys.executable, str(example), *map(str, options)])
    assert alone.returncode == 0, alone.stderr
    done = mpiexec(4, example, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == alone.stdout.splitlines()[-1]
    assert alone.stdout.splitlines()[-1].startswith("digest ")
    done = mpiexec(3, example, *options)  # three ranks do not divide eight experts
    assert done.stdout.splitlines()[-1] == alone.stdout.splitlines()[-1]


@pytest.mark.mpi
def test_bad_input_of_the_first_example_is_one_line(tmp_path: Path) -> None:
    example = Path(__file__).parents[1] / "examples" / "01_text_through_four_ranks.py"
    for options, message in (
        (("absent.txt",), "error: absent.txt: No such file or directory"),
        (("--plot", "x.gif"), "error: plot must end in .png, .svg, .pdf, got x.gif"),
    ):
        alone = python_run([sys.executable, str(example), *options])
        many = mpiexec(2, example, *options)
        for done in (alone, many):
            assert (done.returncode, done.stderr.splitlines()) == (2, [message])


@pytest.mark.mpi
@pytest.mark.parametrize("command", [("-m", "mok_ref", "run"), (None,)], ids=["cli", "example"])
def test_without_mpi4py_one_line_says_so(
    command: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that stands in front of mpi4py and cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['mpi4py'] = None\n")
    monkeypatch.setenv("MOK_REF_TEST_PATH", str(tmp_path))
    example = Path(__file__).parents[1] / "examples" / "01_text_through_four_ranks.py"
    done = mpiexec(3, *(example if word is None else word for word in command))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: mpi4py with an MPI library is missing: ")
    assert "[mpi]" in line
