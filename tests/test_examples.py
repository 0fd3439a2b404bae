"""Every example says what it does when it is asked to, and does nothing it was not asked for."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import python_run

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


OF_EXTRAS = ("cupy", "cuda", "mpi4py", "matplotlib", "safetensors", "scipy", "torch")


def run_copy(example: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a copy in a checkout that holds nothing else, from its root; checks that nothing was
    made: examples write beside themselves or into the working directory."""
    copy = folder / "examples" / example.name
    copy.parent.mkdir()
    shutil.copy(example, copy)
    code = "import os, runpy, sys; os.chdir(sys.argv[1]); sys.argv = sys.argv[2:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = python_run([sys.executable, "-B", "-c", code, str(folder), str(copy), *words])
    assert [path for path in folder.rglob("*") if path not in (copy, copy.parent)] == []
    return done


def test_all_examples_are_found() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("word", ["--help", "-h"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_help_prints_the_text_of_an_example_and_does_nothing_else(
    example: Path, word: str, tmp_path: Path
) -> None:
    done = run_copy(example, tmp_path, word)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    text = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8")), clean=False)
    assert text is not None and text.strip() in done.stdout


@pytest.mark.parametrize("words", [("--nothing",), ("page", "bits", "one too many", "two")])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_wrong_words_are_one_line_and_status_2(
    example: Path, words: tuple[str, ...], tmp_path: Path
) -> None:
    done = run_copy(example, tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert any(word in done.stderr for word in words)


@pytest.mark.parametrize(
    ("name", "words"),
    [("05_train_byte_model", ("text", "5")), ("09_bench", ()), ("01_text_through_four_ranks", ())],
)
def test_what_readme_says_to_need_no_extra_runs_without(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    example = next(path for path in EXAMPLES if path.stem == name)
    code = "import os, runpy, sys; os.chdir(sys.argv[1]); sys.argv = sys.argv[2:]; "
    code += f"sys.modules.update(dict.fromkeys({OF_EXTRAS})); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = python_run([sys.executable, "-B", "-c", code, str(tmp_path), str(example), *words])
    assert done.returncode == 0, done.stderr
