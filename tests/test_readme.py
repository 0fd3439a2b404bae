"""The README says nothing that the repository does not hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import mpiexec

import mok_ref

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_it_names_exists() -> None:
    paths = set(re.findall(r"`((?:mok_ref|cuda_src|tests|examples|docs)/[\w./]+)`", README))
    paths |= set(re.findall(r"\]\(([\w./]+)\)", README))
    assert len(paths) > 30
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*pytest$", README, re.MULTILINE)
    assert len(commands) == 1
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "grep -E '^python3 -m venv .*pytest$' README.md" in script


def test_the_first_example_prints_the_digest_of_the_readme(tmp_path: Path) -> None:
    expected = re.search(r"^digest [0-9a-f]{64}$", README, re.MULTILINE)
    assert expected is not None
    example = ROOT / "examples" / "01_text_through_four_ranks.py"
    done = subprocess.run(
        [sys.executable, str(example), "--plot", str(tmp_path / "x.png")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(mok_ref.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == expected[0]


def test_its_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    names: dict = {}
    exec(compile(code[1], "README.md", "exec"), names)
    y, gradients = names["results"][3]
    assert y.shape == (16, 64) and gradients.dw_down.shape == (2, 64, 48)
    assert re.fullmatch(r"y [0-9a-f]{64}\n", capsys.readouterr().out)


@pytest.mark.mpi
def test_its_mpi_example_prints_the_same_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the text says: both blocks in one file, without the last two lines of the first."""
    first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(first, "README.md", "exec"), {})
    script = tmp_path / "both.py"
    script.write_text("".join(first.splitlines(keepends=True)[:-2]) + second)
    done = mpiexec(4, script)
    assert (done.returncode, done.stdout) == (0, capsys.readouterr().out), done.stderr


def test_every_command_is_in_its_table() -> None:
    from typer.main import get_command

    from mok_ref import cli

    cli._register_more_commands()
    names = set(get_command(cli.app).commands)  # type: ignore[attr-defined]
    told = set(re.findall(r"^\| `mok-ref (\w+)", README, re.MULTILINE))
    assert names == told


def test_every_page_is_one_link_away() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages - set(re.findall(r"\]\(docs/([\w-]+\.md)\)", README)) == set()


def test_no_page_installs_the_package_by_its_name() -> None:
    """It is on no index."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
    pages += list((ROOT / "examples").glob("*.py"))
    hint = re.compile(r"pip install ['\"]?mok[-_]ref")
    assert [page.name for page in pages if hint.search(page.read_text(encoding="utf-8"))] == []
