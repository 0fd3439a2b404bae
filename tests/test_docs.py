"""Pages of docs/: links lead somewhere, named files exist, the index lists all, examples run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mok_ref.bench.report_files import anchors_of
from mok_ref.casefile import Case, load_case
from mok_ref.gpu.errors import input_message, timeout_message
from mok_ref.gpu.params import ERROR_RECORD
from mok_ref.runner import Settings, make_plan, run_virtual

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
HOWTO = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = r"mok_ref|cuda_src|tests|examples|docs"
NAMED = re.compile(rf"`((?:{FOLDERS})/[\w./{{}},-]+\.(?:py|cuh?|md|toml))")
MEMBER = re.compile(r"`([\w/]+\.(?:py|cuh?)): (?:[a-z]+ )?(\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    bad = []
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        missing = not target.exists()
        if missing or (anchor and anchor not in anchors_of(target.read_text(encoding="utf-8"))):
            bad.append(link)
    bad += [name for name in NAMED.findall(text) if "{" not in name and not (ROOT / name).exists()]
    assert bad == []


@pytest.mark.parametrize("name", ["kernel_walk.md", "memory_model.md", "mxfp8.md"])
def test_named_functions_exist(name: str) -> None:
    """`file: function` names a word of that file."""
    members = MEMBER.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
    assert members
    bad = []
    for file, member in members:
        homes = [ROOT / file, ROOT / "cuda_src" / file, ROOT / "mok_ref" / file]
        found = [home for home in homes if home.exists()]
        if not found or not re.search(rf"\b{member}\b", found[0].read_text(encoding="utf-8")):
            bad.append(f"{file}: {member}")
    assert bad == []


def test_index_lists_every_page_once() -> None:
    links = LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    here = [link for link in links if "/" not in link]
    assert sorted(here) == sorted(page.name for page in PAGES if page.name != "index.md")


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", HOWTO, re.DOTALL)


def test_howto_compares_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (block for block in python_blocks() if "my_layer(case)" in block)
    monkeypatch.chdir(ROOT)

    def layer(case: Case, swapped: bool = False) -> dict:
        tensors = run_virtual(make_plan(case, Settings(backward=True))).tensors
        return {**tensors, "dx": tensors["y"]} if swapped else tensors

    exec(compile(code, "howto.md", "exec"), {"my_layer": layer})
    with pytest.raises(AssertionError, match=r"dx: .* differ, first at"):
        exec(compile(code, "howto.md", "exec"), {"my_layer": lambda case: layer(case, True)})


def test_howto_writes_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (block for block in python_blocks() if "np.savez" in block)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "howto.md", "exec"), {})
    result = run_virtual(make_plan(load_case("my_case.npz"), Settings(backward=True)))
    assert len(result.plan.splits) == 2 and result.tensors["dw_down"].any()


def test_howto_quotes_real_messages() -> None:
    record = np.zeros((), ERROR_RECORD)
    for name, value in dict(
        peer=2, phase=1, epoch=7, wait_us=60_000_000, expected=7, seen=6
    ).items():
        record[name] = value
    barrier = timeout_message(record)
    for name, value in dict(peer=-1, phase=8, epoch=0, counter=3, expected=32, seen=30).items():
        record[name] = value
    slot = 5 * 2 + 1
    for message in (barrier, timeout_message(record), input_message(slot << 32 | 8, 2, 0)):
        assert f"`{message}`" in HOWTO


def test_walk_quotes_the_shared_memory_of_the_launcher() -> None:
    from mok_ref.gpu import hopper

    page = (ROOT / "docs" / "kernel_walk.md").read_text(encoding="utf-8")
    assert hopper.THREADS == 384
    for number in (hopper.SHARED_BYTES, hopper.STAGES * hopper.STAGE_BYTES, hopper.STAGING_BYTES):
        assert f" {number:,} " in page
