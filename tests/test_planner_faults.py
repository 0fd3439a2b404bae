"""Wrong inputs of the planner's commands: one line that names the file or option, never a trace.

Rows as a user could write them: figures in another unit, tables that are lists, sizes that no
machine has, outputs that would replace an input.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mok_ref.bench.cases import CASES
from mok_ref.cli import main
from mok_ref.config import MoEConfig
from mok_ref.gpu import compiler
from mok_ref.heap import cuda_device
from mok_ref.heap.protocol import HeapError
from mok_ref.planner import layer_prediction, validity
from mok_ref.planner.hardware import DATA, parse_hardware
from mok_ref.planner.layer_prediction import predict_layer
from mok_ref.planner.measurements import kernel_rows
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


@pytest.mark.parametrize(
    ("name", "peak"),
    [("sustained_bf16", "bf16"), ("burst_bf16", "bf16"), ("sustained_fp8", "fp8")],
)
def test_a_rate_above_the_peak_is_refused(name: str, peak: str) -> None:
    message = rf"mine.toml: {name}_flops.value must be at most peak_{peak}_flops = \S+, got 3e\+15"
    with pytest.raises(ValueError, match=message):
        parse_hardware(figure(f"{name}_flops", "3e15"), "mine.toml")
    with pytest.raises(ValueError, match=r"_flops.value must be at most peak_\w+ = 1e\+09"):
        parse_hardware(figure(f"peak_{peak}_flops", "1e9"), "mine.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 100_000, "mine.toml: not a TOML file"),
        ("a = " + "9" * 5000, "mine.toml: not a TOML file: Exceeds the limit"),
        (with_line("num_domains", "num_domains = " + "9" * 4000), r"mine.toml: .* 99+\.\.\."),
        (figure("num_sms", "1" + "0" * 4000), r"mine.toml: num_sms.value must lie in 1..65536"),
        (figure("num_sms", "1e40"), r"mine.toml: num_sms.value must lie in 1..65536, got 1e\+40"),
        (H200 + '"a\\nb" = 1\n', r"mine.toml: unknown 'a\\nb'"),
    ],
    ids=["deep", "digits", "many domains", "many SMs", "1e40 SMs", "odd key"],
)
def test_a_wrong_file_is_one_short_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_hardware(text, "mine.toml")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1200


@pytest.mark.parametrize("num_sms", [1, 16, 17])
def test_a_small_machine_is_planned(num_sms: int) -> None:
    """Only as many SMs are set aside for communication as there are."""
    machine = parse_hardware(figure("num_sms", str(num_sms)), "mine.toml")
    made = make_plan(SIZES | {"name": "small"}, machine, 256, 2, num_simulated=1)
    assert made.chosen.communication_sms < num_sms and made.predicted["forward"]["ms"] > 0
    assert any("rows are moved by" in reason for reason in made.reasons)


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


# --------------------------------------------------------------------------- traces

EVENT = {"name": "gate_up 0.0", "ph": "X", "ts": 0, "dur": 1, "pid": 0, "tid": 0}
LANE = {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0}
WRONG_EVENTS: list[tuple[Any, str]] = [
    (None, "event 1 must be an object, got None"),
    (EVENT | {"pid": "a"}, "event 1: pid must be an integer to 2^53, got 'a'"),
    (EVENT | {"pid": None}, "event 1: pid must be an integer"),
    (EVENT | {"pid": 1.5}, "event 1: pid must be an integer"),
    (EVENT | {"tid": [1]}, "event 1: tid must be an integer or text, got [1]"),
    (EVENT | {"name": 3}, "event 1: name must be text, got 3"),
    (EVENT | {"name": None}, "event 1: name must be text, got None"),
    (EVENT | {"name": ["a"]}, "event 1: name must be text, got ['a']"),
    (EVENT | {"name": "\ud800"}, "event 1: name must be text, got"),
    (EVENT | {"ts": 10**400}, "event 1: ts must be a number in 0..1e+18, got 1000"),
    (EVENT | {"ts": "1"}, "event 1: ts must be a number in 0..1e+18, got '1'"),
    (EVENT | {"ts": True}, "event 1: ts must be a number in 0..1e+18, got True"),
    (EVENT | {"ts": float("nan")}, "event 1: ts must be a number in 0..1e+18, got nan"),
    (EVENT | {"dur": float("inf")}, "event 1: dur must be a number in 0..1e+18, got inf"),
    (EVENT | {"dur": -5}, "event 1: dur must be a number in 0..1e+18, got -5"),
    (LANE, "event 1: args must be an object, got None"),
    (LANE | {"args": {"name": 7}}, "event 1: name must be text, got 7"),
]


@pytest.mark.parametrize(("event", "message"), WRONG_EVENTS)
def test_a_wrong_event_is_refused(
    here: Path, event: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps({"traceEvents": [EVENT, event]})
    refused_trace(here, text.encode(), f"trace.json: not a trace file: {message}", capsys)


WRONG_TRACES = {
    "events of no length": (b'{"traceEvents":[%s]}' % json.dumps(EVENT | {"dur": 0}).encode(),
                            "not a trace file: dur must be above 0 in one event at least"),
    "no list": (b'{"traceEvents":{"a":1}}', "not a trace file: traceEvents must be a list, got"),
    "deep": (b"[" * 200_000, "not a JSON file: nested too deeply"),
    "deep events": (b'{"traceEvents":' + b"[" * 200_000, "not a trace file: nested too deeply"),
    "digits": (b'{"traceEvents":' + b"9" * 5000 + b"}", "not a trace file: Exceeds the limit"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), WRONG_TRACES.values(), ids=list(WRONG_TRACES))
def test_a_wrong_trace_is_refused(
    here: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused_trace(here, content, f"trace.json: {message}", capsys)


def refused_trace(
    here: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says why, status 2, no page."""
    (here / "trace.json").write_bytes(content)
    before = sorted(here.iterdir())
    with pytest.raises(SystemExit) as stopped:
        main(["report", "trace.json"])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and message in line
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("lane", ["SM \u00b2", "SM " + "9" * 5000, "SM ", "", "</svg>"])
def test_lanes_of_other_programs_have_any_name(here: Path, lane: str) -> None:
    events = [LANE | {"args": {"name": lane}}, EVENT, {"name": "other", "ph": "i"}]
    events.append({"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 1}})
    (here / "trace.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(SystemExit) as stopped:
        main(["report", "trace.json", "--output", "page.html"])
    assert not stopped.value.code and "</svg></text>" not in (here / "page.html").read_text()


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
    name = "plan.report.trace.json"
    shutil.copy("other.json", name)
    with pytest.raises(SystemExit):
        main(["report", "plan.json", "--measured", name])
    told = f"{name} (--trace's default) must be another file than --measured"
    assert told in capsys.readouterr().err


def test_a_report_does_not_replace_what_plan_wrote(here: Path) -> None:
    """The names of the documentation: plan.html and plan.trace.json stay what they are."""
    write_trace(Path("plan.trace.json"), [Span(0, "SM 0", "down", 0.0, 1.0)])
    Path("plan.html").write_text("precious")
    before = Path("plan.trace.json").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        main(["report", "plan.json", "--measured", "plan.trace.json"])
    assert not stopped.value.code
    assert Path("plan.html").read_text() == "precious"
    assert Path("plan.trace.json").read_bytes() == before
    assert Path("plan.report.html").is_file() and Path("plan.report.trace.json").is_file()


TUNE = ("tune", "--hidden", "32", "--intermediate", "16", "--experts", "4", "--top-k", "2")
HINT = re.escape("; --device cpu measures the CPU layer")


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that must end with status 2 and print nothing else."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "" and len(err.splitlines()) == 1
    return err


def test_tune_without_cupy_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    err = refused([*TUNE, "--tokens", "64"], capsys)
    assert re.fullmatch(rf"error: CuPy is missing: pip install .*\[gpu\].*{HINT}\n", err)


def test_tune_without_a_driver_names_the_way_around(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_driver() -> None:
        raise HeapError("no CUDA device is usable: cudaErrorInsufficientDriver")

    monkeypatch.setattr(cuda_device, "import_cupy", no_driver)
    err = refused([*TUNE, "--tokens", "64"], capsys)
    assert re.fullmatch(rf"error: no CUDA device is usable: cudaError\w+{HINT}\n", err)


def test_build_and_pictures_say_first_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "drawing needs matplotlib: pip install" in refused(
        ["schedule", "--tokens", "64", "--plot", "x.svg"], capsys
    )
    compiler.compiler_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    try:
        assert "compiling kernels needs cuda-core" in refused(["build"], capsys)
    finally:
        compiler.compiler_version.cache_clear()


@pytest.mark.parametrize(("module", "extra"), [("cupy", "gpu"), ("scipy.optimize", "train")])
def test_a_module_that_an_extra_brings_is_never_a_traceback(
    module: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def needs_it(**_: Any) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("mok_ref.info.collect", needs_it)
    err = refused(["info"], capsys)
    assert err.startswith(f"error: {module} is missing: pip install") and f"[{extra}]" in err


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


# --------------------------------------------------------------------------- reports, validity

LETTERS = {"T": 64, "H": 256, "I": 128, "E": 8, "K": 2}
ROW = {"case": "mine", **LETTERS, "direction": "forward", "ms_ours": 1.5}
LAYER = {
    "case": "mine",
    **LETTERS,
    "direction": "forward",
    "contender": "mok_ref",
    "R": 2,
    "ms": 1.5,
}
BENCH = {"case": "qwen3", "direction": "forward", "contender": "mok_ref", "sustained_ms": 1.5,
         "bursts_ms": 1.4}  # fmt: skip
MXFP8 = {"case": "qwen3", "tokens": 64, "hidden": 256, "intermediate": 128, "experts": 8,
         "top_k": 2, "ms": {"mxfp8 step": 1.5}}  # fmt: skip
NAN = float("nan")


def rows(row: Any) -> dict[str, Any]:
    return {"rows": [row]}


def layers(row: Any) -> dict[str, Any]:
    return {"layers": [row]}


WRONG_REPORTS: list[tuple[dict[str, Any], str]] = [
    ({"device": []}, "device must be an object, got []"),
    ({"device": {"gpu": ["H200"]}}, "device.gpu must be one line of text, got ['H200']"),
    (rows(ROW | {"ms_ours": NAN}), "rows[0].ms_ours must be a number above 0"),
    (rows(ROW | {"ms_ours": -1}), "rows[0].ms_ours must be a number above 0"),
    (rows(ROW | {"ms_ours": 0}), "rows[0].ms_ours must be a number above 0"),
    (rows(ROW | {"ms_ours": "1.5"}), "rows[0].ms_ours must be a number above 0"),
    (rows(ROW | {"ms_ours": True}), "rows[0].ms_ours must be a number above 0"),
    (rows(ROW | {"T": 0}), "rows[0].T must be an integer in 1..16777216, got 0"),
    (rows(ROW | {"H": 10**19}), "rows[0].H must be an integer in 1..16777216, got 1000"),
    (rows(ROW | {"K": 2.5}), "rows[0].K must be an integer in 1..1024, got 2.5"),
    (rows(ROW | {"direction": "sideways"}), "rows[0].direction must be one of forward, backward"),
    (rows(ROW | {"case": 7}), "rows[0].case must be one line of text, got 7"),
    (rows(ROW | {"ranks": 0}), "rows[0]: ranks must be an integer in 1.."),
    (rows(ROW | {"ranks": 10**6}), "rows[0]: ranks * E must be at most"),
    (rows(ROW | {"dtype": "fp4"}), "rows[0].dtype must be one of bf16, mxfp8, got 'fp4'"),
    (rows(ROW | {"mode": "fast"}), "rows[0]: mode must be one of sustained, bursts, got 'fast'"),
    (rows(ROW | {"minibatch": 100}), "rows[0]: minibatch must be a positive multiple of 128"),
    (rows({"case": "mine", "ms_ours": 1.0}), "rows[0]: row without direction, T, H, I, E, K"),
    (layers({}), "layers[0].contender must be one line of text, got None"),
    (layers(None), "layers[0] must be an object, got None"),
    (layers({"contender": "mok_ref"}), "layers[0]: row without case, direction, T, H, I, E, K"),
    (layers(LAYER | {"ms": NAN}), "layers[0].ms must be a number above 0"),
    (layers(LAYER | {"R": 0}), "layers[0].R must be an integer in 1..65536, got 0"),
    (layers(LAYER) | {"bits": []}, "bits must be an object, got []"),
    (rows({"contender": "mok_ref"}), "rows[0]: row without case, direction, sustained_ms"),
    (rows(BENCH | {"bursts_ms": -1.0}), "rows[0].bursts_ms must be a number above 0"),
    (rows(BENCH | {"direction": None}), "rows[0].direction must be one of forward, backward"),
    (rows(MXFP8 | {"ms": {"mxfp8 step": 0}}), "rows[0].ms['mxfp8 step'] must be a number above 0"),
    (rows(MXFP8 | {"tokens": -1}), "rows[0].tokens must be an integer in 1..16777216, got -1"),
]


@pytest.mark.parametrize(("report", "message"), WRONG_REPORTS)
def test_a_wrong_report_is_refused(
    tmp_path: Path, report: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused_report(tmp_path, json.dumps(report).encode(), message, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "not a JSON file: nested too deeply"),
        (b"\xff", "not a text file"),
        (b'{"device":' + b"9" * 5000 + b"}", "not a JSON file: Exceeds the limit"),
    ],
    ids=["deep", "bytes", "digits"],
)
def test_a_damaged_report_is_refused(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused_report(tmp_path, content, message, capsys)


def refused_report(
    folder: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the file, status 2, the page as it was."""
    (folder / "run.json").write_bytes(content)
    page = folder / "page.md"
    page.write_text("precious")
    with pytest.raises(SystemExit) as stopped:
        validity.main(["--results", str(folder), "--output", str(page)])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and f"run.json: {message}" in line
    assert page.read_text() == "precious"


@pytest.mark.parametrize("report", [rows(ROW), layers(LAYER), rows(BENCH), rows(MXFP8)])
def test_whole_reports_are_read(tmp_path: Path, report: dict[str, Any]) -> None:
    """The rows above are wrong in nothing else; other programs' rows may be anything."""
    (tmp_path / "run.json").write_text(json.dumps(report))
    assert kernel_rows([tmp_path / "run.json"])
    (name,) = report
    if "contender" in report[name][0]:
        report[name].append({"contender": "torch", "ms": "much"})
        (tmp_path / "run.json").write_text(json.dumps(report))
        assert kernel_rows([tmp_path / "run.json"])


# --------------------------------------------------------------------------- one layer

WRONG_LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"mode": "fast"}, "mode must be one of sustained, bursts, got 'fast'"),
    ({"dw_dtype": "int8"}, "dw_dtype must be one of float32, bf16, got 'int8'"),
    ({"shared": -1}, "shared must be an integer in 0..16777216, got -1"),
    ({"shared": 1.5}, "shared must be an integer in 0..16777216, got 1.5"),
    ({"save": "some"}, "save must be one of all, ring, none, got 'some'"),
    ({"save": ["all"]}, r"save must be one of all, ring, none, got \['all'\]"),
    ({"save": "some", "direction": "backward"}, "save must be one of all, ring, none, got 'some'"),
    ({"save": "none", "direction": "backward"}, "save must be all with direction backward"),
    ({"direction": "sideways"}, "direction must be one of forward, backward, got 'sideways'"),
    ({"dtype": "fp8"}, "dtype must be one of bf16, mxfp8, got 'fp8'"),
    ({"minibatch": 0}, "minibatch must be a positive multiple of 128, got 0"),
    ({"minibatch": "256"}, "minibatch must be a positive multiple of 128, got '256'"),
    ({"macrobatch": True}, "macrobatch must be a positive multiple of 128, got True"),
    ({"minibatch": 256, "macrobatch": 384}, "macrobatch must be a multiple of minibatch"),
    ({"communication_sms": 1.0}, "communication_sms must be an integer in 0.."),
    ({"communication_sms": 132}, "communication_sms must be in 0..131, got 132"),
    ({"native_fp8": "maybe"}, "native_fp8 must be true or false, got 'maybe'"),
    ({"hardware": None}, "hardware must be a name or a .toml file, got None"),
    ({"ranks": True}, "ranks must be an integer in 1..[0-9]+, got True"),
    ({"ranks": 3}, "ranks must divide E, got ranks=3, E=8"),
    ({"ranks": 100_000}, "ranks must divide E, got ranks=100000, E=8"),
    ({"ranks": 1 << 23}, "ranks must be an integer in 1.."),
    (
        {"case": {"T": 10**19}},
        r"case's T \(num_tokens\) must be an integer in 1..16777216, got 1000",
    ),
    ({"case": {"E": True}}, r"case's E \(num_experts\) must be an integer in 1..[0-9]+, got True"),
    ({"case": {"E": 65536}, "ranks": 256}, r"ranks \* E must be at most"),
    ({"case": {"routing": None}}, "routing must be one of uniform, zipf, got None"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_LAYERS)
def test_a_wrong_layer_is_refused(change: dict[str, Any], message: str) -> None:
    case = LETTERS | change.pop("case", {})
    with pytest.raises(ValueError, match=message) as error:
        predict_layer(case, **change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", [None, 5, [1, 2], {}])
def test_what_is_no_case_is_refused(case: Any) -> None:
    with pytest.raises(ValueError, match=r"case's T \(num_tokens\) must be an integer"):
        predict_layer(case)


def test_a_layer_of_more_slots_than_experts_is_predicted() -> None:
    """Ids are drawn with replacement then, as in the first case of the benchmark."""
    assert CASES["dsv3-rank"].top_k > CASES["dsv3-rank"].num_experts
    few, more = (predict_layer(LETTERS | {"K": slots, "T": 8192}).seconds for slots in (8, 17))
    assert 0 < few < more


def test_a_layer_that_names_its_ring_alone_takes_the_rows_of_one_minibatch() -> None:
    sizes = MoEConfig(256, 128, 8, 2, macrobatch=256).ring_rows(10_000, 1024)
    assert sizes == (256, 256)
    both = dict(zip(("macrobatch", "minibatch"), sizes, strict=True))
    alone = predict_layer(LETTERS | {"T": 8192}, macrobatch=256).seconds
    assert alone == predict_layer(LETTERS | {"T": 8192}, **both).seconds


def test_too_many_ranks_are_one_line_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        layer_prediction.main(["64x256x128x8x2", "--ranks", "100000"])
    err = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and "ranks must divide E, got ranks=100000" in err[-1]
