"""The README says nothing that the repository does not hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
