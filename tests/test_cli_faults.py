"""The command line where something outside it goes wrong: ranks that vanish, streams that are
closed, files that are named twice, sizes that no machine has."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli import mok_ref, mpiexec, python_run

import mok_ref as mok_ref_package
from mok_ref.casefile import MAX_RANKS, case_arrays, read_npz, write_npz
from mok_ref.runner import RandomCase
from mok_ref.verify import parse_ranks

GOLDEN = Path(__file__).parent / "golden"
CASE = GOLDEN / "case1.npz"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr of a command that must end with status 2."""
    status, out, err = mok_ref(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


# --------------------------------------------------------------------------- one file, two names


def other_names(path: Path, folder: Path) -> dict[str, Path]:
    """The same file by a detour, by a symbolic and by a hard link."""
    soft, hard = folder / "soft.npz", folder / "hard.npz"
    soft.symlink_to(path)
    os.link(path, hard)
    return {"itself": path, "detour": folder / ".." / folder.name / path.name,
            "soft": soft, "hard": hard}  # fmt: skip


@pytest.mark.parametrize("name", ["itself", "detour", "soft", "hard"])
@pytest.mark.parametrize("option", ["--output", "--save-input"])
def test_the_case_is_never_overwritten(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copy(CASE, tmp_path / "case.npz"))
    before = path.read_bytes()
    written = other_names(path, tmp_path)[name]
    error = refused(capsys, "run", "--input", path, option, written)
    assert error == f"{option} must be another file than --input, got {written}"
    assert path.read_bytes() == before


def test_results_and_case_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where neither exists yet."""
    files = ("--output", tmp_path / "x.npz", "--save-input", f"{tmp_path}/./x.npz")
    error = refused(capsys, "run", "--tokens", 8, *files)
    assert "--save-input must be another file than --output" in error
    assert list(tmp_path.iterdir()) == []


def test_a_picture_is_not_the_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copy(CASE, tmp_path / "case.svg"))
    error = refused(capsys, "schedule", "--input", path, "--plot", path)
    assert error == f"--plot must be another file than --input, got {path}"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that looks writable")
def test_an_output_that_cannot_be_written_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write to /proc by its permissions, and yet no file can be made there."""
    monkeypatch.setattr("mok_ref.runner.run_virtual", lambda *_: pytest.fail("it ran"))
    error = refused(capsys, "run", "--tokens", 8, "--output", "/proc/x.npz")
    assert "--output must lie in a folder that can be written to, got /proc/x.npz" in error
    assert ".tmp" not in error


# --------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "inf", "1e300"])
def test_a_time_limit_is_one(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "run", "--tokens", 8, "--timeout", seconds)
    assert error.startswith("timeout must be a number of seconds > 0, at most 1e+06, got")


@pytest.mark.parametrize("command", ["run", "schedule"])
def test_ranks_have_an_upper_limit(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, command, "--tokens", 8, "--ranks", 10**11)
    assert error == f"ranks must be at most {MAX_RANKS}, got {10**11}"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1-99999999999", f"be in 1..{MAX_RANKS}, got '1-99999999999'"),
        ("9" * 5000, f"be in 1..{MAX_RANKS}, got '{'9' * 40}'"),
        ("0", f"be in 1..{MAX_RANKS}, got '0'"),
        ("1025", f"be in 1..{MAX_RANKS}, got '1025'"),
        ("1,0-3", f"be in 1..{MAX_RANKS}, got '0-3'"),
        ("4-2", "be ranges low-high, got '4-2'"),
        ("1,2,1", "not name a number twice, got 1 twice"),
        ("4,1-8", "not name a number twice, got 4 twice"),
    ],
)
def test_lists_of_ranks_are_checked_before_they_are_made(text: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"^ranks must {re.escape(rule)}$"):
        parse_ranks(text)
    assert parse_ranks(f"3,1-2,{MAX_RANKS}") == [1, 2, 3, MAX_RANKS]


@pytest.mark.parametrize(
    "sizes",
    [
        ("--tokens", 2 * 10**9, "--hidden", 2 * 10**9),  # more bytes than a pointer counts
        ("--tokens", 2 * 10**9, "--hidden", 10**5),  # more than a machine has
        ("--tokens", 8, "--shared", 2 * 10**9, "--hidden", 10**5),
    ],
)
def test_sizes_that_do_not_fit_into_memory_are_named(
    sizes: tuple, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "run", *sizes)
    assert error.startswith("sizes must fit into memory, got --tokens=")
    for option, size in zip(sizes[::2], sizes[1::2], strict=True):
        assert f"{option}={size}" in error


def test_sizes_beyond_int32_and_negative_seeds_name_their_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--tokens must be at most 2147483647" in refused(capsys, "run", "--tokens", 10**20)
    assert refused(capsys, "run", "--seed", -1) == "--seed must be >= 0, got -1"


# --------------------------------------------------------------------------- streams


def shell(command: str) -> subprocess.CompletedProcess[str]:
    python = f"{sys.executable} -m mok_ref"
    return python_run(["bash", "-c", f"set -o pipefail; {command.replace('mok-ref', python)}"])


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_nowhere(closed: str, tmp_path: Path) -> None:
    """And the output file, which would get their number, holds results alone."""
    done = shell(f"mok-ref run --input {CASE} --output {tmp_path}/out.npz {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        read_npz(tmp_path / "out.npz")["y"].tolist() == read_npz(GOLDEN / "out1.npz")["y"].tolist()
    )
    assert shell(f"mok-ref run --bogus {closed}").returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", ["info", "schedule", "--help"])
def test_a_full_disk_is_one_line_of_error(command: str) -> None:
    done = shell(f"mok-ref {command} >/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["info --json", "schedule --rows 500"])
def test_a_reader_that_has_seen_enough_is_no_error(command: str) -> None:
    done = shell(f"mok-ref {command} | head -c 1")
    assert (done.returncode, done.stderr) == (0, "")


# --------------------------------------------------------------------------- ranks that vanish

STEP = ["run", "--tokens", "40", "--backward", "--placement", "even", "--timeout", "20"]
VANISH = """
import os, signal, sys
from mok_ref import cli, runner
from mok_ref.heap.mpi import MpiSharedHeap
def vanish(heap):
    if heap.rank == int(sys.argv[2]):
        os._exit(0) if sys.argv[1] == "exit" else os.kill(os.getpid(), signal.SIGKILL)
backward, close = runner.moe_backward, MpiSharedHeap.close
def leave_in_backward(context, *rest):
    vanish(context.workspace.heap)
    return backward(context, *rest)
def leave_after_close(heap):
    close(heap)
    vanish(heap)
if sys.argv[3] == "backward":
    runner.moe_backward = leave_in_backward
else:
    MpiSharedHeap.close = leave_after_close
cli.main(sys.argv[4:])
"""


def vanishing(tmp_path: Path, ranks: int, how: str, rank: int, where: str, *options: object):
    script = tmp_path / "vanish.py"
    script.write_text(VANISH)
    return mpiexec(ranks, script, how, rank, where, *STEP, *options)


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["exit", "kill"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_vanishes_in_a_step_is_named(how: str, ranks: int, tmp_path: Path) -> None:
    """Killed, or gone with status 0, which launchers call success."""
    out = tmp_path / "out.npz"
    done = vanishing(tmp_path, ranks, how, 1, "backward", "--output", out)
    assert done.returncode == 2 and not out.exists()
    assert done.stderr.startswith("error: rank ") and done.stderr.count("\n") == 1
    assert ", for rank 1 (last seen in forward, pushing expert outputs" in done.stderr
    assert "is gone" in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "told"), [("exit", "left with status 0"), ("kill", "was killed by signal 9")]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_nobody_waits_for_is_named_by_its_watcher(
    how: str, told: str, ranks: int, tmp_path: Path
) -> None:
    """After the last barrier of the heap, and where there is no other rank."""
    done = vanishing(tmp_path, ranks, how, ranks - 1, "close")
    assert done.returncode != 0
    assert done.stderr == f"error: rank {ranks - 1} {told} before the end of the run\n"


def left_over(mark: str) -> list[str]:
    """Processes whose command line holds `mark`, zombies not counted."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "stat,args"], capture_output=True, text=True
    ).stdout
    return [line for line in listed.splitlines() if mark in line and not line.startswith("Z")]


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps")
def test_a_launcher_that_is_stopped_leaves_no_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    pytest.importorskip("mpi4py", exc_type=ImportError)
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if launcher is None:
        pytest.skip("no mpiexec")
    out = tmp_path / "a_name_of_its_own.npz"
    run = ["run", "--tokens", "20000", "--backward", "--output", str(out)]
    job = subprocess.Popen(
        [launcher, "-n", "2", sys.executable, "-m", "mok_ref", *run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(mok_ref_package.__file__).parents[1])},
    )
    time.sleep(4)
    assert len(left_over(str(out))) == 5  # the launcher, two ranks, their watchers
    job.send_signal(number)
    _, err = job.communicate(timeout=20)
    assert job.returncode != 0
    assert set(err.splitlines()) <= {"error: interrupted"}
    limit = time.monotonic() + 10
    while left_over(str(out)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert left_over(str(out)) == []
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- golden cases


def test_one_unreadable_file_does_not_hide_the_other_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "123":
        for half in ("case", "out"):
            shutil.copy(GOLDEN / f"{half}{name}.npz", tmp_path)
    (tmp_path / "out1.npz").write_bytes((tmp_path / "out1.npz").read_bytes()[:500])
    (tmp_path / "out2.npz").unlink()
    status, text, err = mok_ref(capsys, "golden", "check", tmp_path)
    assert (status, err) == (1, "")
    assert "damaged" in text and "there is no out2.npz" in text
    assert "2 of 3 cases NOT equal" in text


def test_a_case_of_too_many_ranks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = case_arrays(RandomCase(8, 16, 8, num_experts=4, top_k=2).make())
    splits = read_npz(GOLDEN / "case2.npz")["splits"]
    wide = splits.repeat(MAX_RANKS)
    write_npz(tmp_path / "wide.npz", {**arrays, "splits": wide})
    error = refused(capsys, "run", "--input", tmp_path / "wide.npz")
    assert f"splits must have at most {MAX_RANKS} entries, got {len(wide)}" in error
