"""Wrong inputs of the planner's commands: one line that names the file or option, never a trace.

Rows as a user could write them: figures in another unit, tables that are lists, sizes that no
machine has, outputs that would replace an input.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mok_ref.cli import main
from mok_ref.planner.hardware import DATA, parse_hardware
from mok_ref.planner.minibatch_simulation import Span
from mok_ref.planner.models import model_from_table
from mok_ref.planner.plan import make_plan
from mok_ref.planner.search import MOST_TOKENS
from mok_ref.planner.trace import read_timelines, write_trace

H200 = (DATA / "h200.toml").read_text(encoding="utf-8")


def with_line(name: str, line: str) -> str:
    """The H200's file with another line for `name`."""
    text, count = re.subn(rf"^{name} = .*$", line, H200, count=1, flags=re.MULTILINE)
    assert count == 1
    return text


def figure(name: str, value: str) -> str:
    return with_line(name, f'{name} = {{ value = {value}, source = "mine" }}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing name, title, arch"),
        ("\x00", "not a TOML file"),
        (figure("memory_bytes", "141"), r"memory_bytes.value must lie in 1e\+06..1e\+17, got 141"),
        (figure("memory_bytes", "nan"), "memory_bytes.value must be a number >= 0, got nan"),
        (figure("burst_bf16_flops", "800"), r"burst_bf16_flops.value must lie in 1e\+09"),
        (figure("link_bytes_per_s", "450"), r"link_bytes_per_s.value must lie in 1e\+06"),
        (figure("link_bytes_per_s", "inf"), "link_bytes_per_s.value must be a number >= 0"),
        (figure("pull_efficiency", "90"), r"pull_efficiency.value must lie in 0.001..1, got 90"),
        (figure("num_sms", "132.5"), "num_sms.value must be a whole number, got 132.5"),
        (figure("num_sms", "0.5"), "num_sms.value must lie in 1..65536, got 0.5"),
        (figure("barrier_us", "1e9"), r"barrier_us.value must lie in 0..1e\+06"),
        (figure("native_mxfp8", "2"), "native_mxfp8.value must lie in 0..1, got 2"),
        (with_line("name", "name = 5"), "name must be one line of text, got 5"),
        (with_line("title", "title = [1]"), r"title must be one line of text, got \[1\]"),
        (with_line("arch", 'arch = ""'), "arch must be one line of text, got ''"),
        (with_line("gpus_per_domain", "gpus_per_domain = 2000000"), "must be at most 1048576"),
        (with_line("gpus_per_domain", "gpus_per_domain = true"), "must be an integer >= 1"),
        (with_line("num_domains", "num_domains = 1000000"), "must be at most 1048576"),
    ],
)
def test_a_wrong_machine_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^mine.toml: .*{message}") as error:
        parse_hardware(text, "mine.toml")
    assert "\n" not in str(error.value)


def test_domains_without_a_network_are_refused() -> None:
    text = figure("network_bytes_per_s", "0").replace("num_domains = 1", "num_domains = 2")
    with pytest.raises(ValueError, match="network_bytes_per_s must be above 0 with num_domains=2"):
        parse_hardware(text, "mine.toml")


def test_figures_must_be_a_table() -> None:
    text = "name = 'a'\ntitle = 'b'\narch = 'c'\ngpus_per_domain = 1\nnum_domains = 1\n"
    with pytest.raises(ValueError, match=r"figures must be a table \[figures\], got \[1\]"):
        parse_hardware(text + "figures = [1]\n", "mine.toml")


SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": 5}, r"attention must be a table \[attention\], got 5"),
        ({"attention": {"num_heads": -1}}, "attention.num_heads must be an integer in 0.."),
        ({"attention": {"num_heads": "x"}}, "attention.num_heads must be an integer in 0.."),
        ({"attention": {"heads": 1}}, "attention: unknown heads; known are head_dim"),
        ({"routing": {"score": "odd"}}, "routing.score must be one of softmax, sigmoid, got 'odd'"),
        ({"routing": {"num_groups": 0}}, "routing.num_groups must be an integer in 1.."),
        ({"routing": {"keep_groups": 9}}, "routing.keep_groups must be at most num_groups=1"),
        ({"routing": {"scale": float("inf")}}, "routing.scale must be a finite number above 0"),
        ({"routing": {"renormalize": 1}}, "routing.renormalize must be true or false, got 1"),
        ({"name": 5}, "name must be one line of text, got 5"),
        ({"name": " "}, "name must not be empty"),
        ({"title": "a\nb"}, "title must be one line of text"),
        ({"hidden_size": -1}, "hidden_size must be an integer in 1..16777216, got -1"),
        ({"hidden_size": 10**15}, "hidden_size must be an integer in 1..16777216"),
        ({"num_experts": 10**9}, "num_experts must be an integer in 1..65536"),
        ({"top_k": 10**9}, "top_k must be an integer in 1..1024"),
        ({"num_layers": 2.0}, "num_layers must be an integer in 1..65536, got 2.0"),
        ({"vocab_size": -5}, "vocab_size must be an integer in 0.."),
        ({"num_layers": 2, "num_dense_layers": 2}, "num_dense_layers must be below num_layers"),
    ],
)
def test_a_wrong_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^mine: {message}"):
        model_from_table(SIZES | change, "mine")


def test_the_most_tokens_are_planned_quickly() -> None:
    """What is simulated does not grow with the tokens: minibatches are joined."""
    made = make_plan(SIZES | {"name": "small"}, "h200", MOST_TOKENS, 8, num_simulated=1)
    assert made.predicted["forward"]["ms"] > 1.0


# --------------------------------------------------------------------------- commands


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machine.toml").write_text(H200)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    make_plan(SIZES | {"name": "small"}, "h200", 64, 1, num_simulated=1).write(Path("plan.json"))
    shutil.copy("plan.json", "other.json")
    return tmp_path


ASK = ("plan", "--model", "qwen3-30b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*ASK, "--hardware", "binary.toml"), "binary.toml: not a text file"),
        ((*ASK, "--hardware", "gone.toml"), "hardware file must exist, got 'gone.toml'"),
        ((*ASK, "--hardware", "h200", "--tokens", "-5"), "--tokens must be in 1..1048576"),
        ((*ASK, "--hardware", "h200", "--tokens", str(10**12)), "--tokens must be in 1..1048576"),
        ((*ASK, "--hardware", "h200", "--sequence", "0"), "--sequence must be in 1..1048576"),
        ((*ASK, "--hardware", "h200", "--accumulate", "-1"), "--accumulate must be in 1.."),
        ((*ASK, "--hardware", "h200", "--seed", "-1"), "--seed must be >= 0, got --seed=-1"),
        (("report", "plan.json", "--trace", "plan.json"), "--trace must be another file than"),
        (("report", "plan.json", "--measured", "gone.json"), "--measured must be an existing file"),
        (
            ("report", "plan.json", "--measured", "other.json", "--trace", "other.json"),
            "--trace must be another file than --measured",
        ),
        (("report", "plan.json", "--measured", "other.json"), "other.json: not a trace file"),
        (("tune", *["--hidden", "32", "--intermediate", "16", "--experts", "4", "--top-k", "2"],
          *["--tokens", "64", "--device", "cpu", "--seconds", "nan"]), "--seconds must be above 0"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(
    here: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in here.iterdir()}
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and len(err.strip().splitlines()) == 1
    assert message in err
    assert {path: path.read_bytes() for path in here.iterdir()} == before


def test_an_output_that_is_a_link_to_an_input_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "out.json").symlink_to(here / "machine.toml")
    with pytest.raises(SystemExit):
        main([*ASK, "--hardware", "machine.toml", "--output", "out.json"])
    assert "--output must be another file than --hardware" in capsys.readouterr().err
    assert (here / "machine.toml").read_text() == H200


def test_the_default_trace_does_not_replace_the_measured_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy("other.json", "plan.trace.json")
    with pytest.raises(SystemExit):
        main(["report", "plan.json", "--measured", "plan.trace.json"])
    assert "--trace must be another file than --measured" in capsys.readouterr().err


def test_of_a_run_only_the_measured_timeline_lies_beside_a_plan(here: Path) -> None:
    simulated, measured = Span(0, "SM 0", "down", 0.0, 1.0), Span(0, "SM 7 math 4", "x", 0.0, 1.0)
    write_trace(Path("run.json"), [simulated], [measured])
    with pytest.raises(SystemExit) as stopped:
        main(["report", "plan.json", "--measured", "run.json", "--trace", "both.json"])
    assert not stopped.value.code
    timelines = read_timelines(Path("both.json"))
    assert [span.name for span in timelines["measured"]] == ["x"]


def test_a_run_does_not_write_its_routes_over_those_it_replays(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "routes.npz").write_bytes(b"precious")
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--replay", "routes.npz", "--save-routes", "routes.npz"])
    assert stopped.value.code == 2
    assert "--save-routes must be another file than --replay" in capsys.readouterr().err
    assert (here / "routes.npz").read_bytes() == b"precious"
