"""Traces and pictures: whole, readable back, self-contained."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from mok_ref.planner import make_plan
from mok_ref.planner.minibatch_simulation import Span
from mok_ref.planner.pictures import (
    curves_picture,
    matrix_picture,
    memory_picture,
    timeline_picture,
)
from mok_ref.planner.report import (
    html_report,
    plan_trace,
    read_lines,
    traffic_megabytes,
    write_pictures,
)
from mok_ref.planner.svg import Drawing, shade, ticks
from mok_ref.planner.trace import (
    STAMP,
    STAMP_KINDS,
    read_timelines,
    read_trace,
    spans_from_stamps,
    summarize,
    write_trace,
)

SPANS = [
    Span(0, "pull", "pull 0", 0.0, 1e-3),
    Span(0, "SM 2", "gate_up 0", 1e-3, 2e-3),
    Span(1, "SM 10", "down 0", 2e-3, 2.5e-3),
]


@pytest.fixture(scope="module")
def plan():
    return make_plan("tiny-litters", "h200", tokens=512, num_simulated=1, ep_size=4)


def same(spans):
    return [(s.rank, s.lane, s.name, round(s.start, 9), round(s.end, 9)) for s in spans]


def test_a_trace_survives_its_file(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, SPANS)
    assert same(read_trace(path)) == same(SPANS)
    document = json.loads(path.read_text())
    assert {event["ph"] for event in document["traceEvents"]} == {"X", "M"}
    assert all(e["dur"] >= 0 for e in document["traceEvents"] if e["ph"] == "X")


def test_simulated_and_measured_lie_side_by_side(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, SPANS, SPANS[:1])
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "simulated rank 0", 1: "simulated rank 1", 2: "measured rank 0"}
    assert len(read_trace(path)) == 4
    timelines = read_timelines(path)
    assert {name: len(spans) for name, spans in timelines.items()} == {
        "simulated": 3,
        "measured": 1,
    }
    text = html_report(path)
    assert "Timeline, simulated" in text and "Time by kind, measured" in text


def test_device_stamps_become_spans():
    stamps = np.zeros(4, STAMP)
    stamps["sm"], stamps["rank"], stamps["row_block"] = [0, 5, 5, 9], 3, [7, 1, 1, 2]
    kinds = ("pull", "gate_up", "store", "store")
    stamps["kind"] = [STAMP_KINDS.index(k) for k in kinds]
    stamps["warp"] = [1, 8, 2, 4]
    stamps["start"] = [1_000_000, 1_002_000, 1_004_000, 1_004_000]
    stamps["end"] = [1_001_000, 1_004_000, 1_005_000, 1_005_000]
    assert same(spans_from_stamps(stamps)) == [
        (3, "SM 0 pull 1", "pull 7.0", 0.0, 1e-6),
        (3, "SM 5 math 8", "gate_up 1.0", 2e-6, 4e-6),
        (3, "SM 5 store 2", "store 1.0", 4e-6, 5e-6),
        (3, "SM 9 math 4", "store 2.0", 4e-6, 5e-6),
    ]
    assert spans_from_stamps(np.zeros(0, STAMP)) == []


def test_time_is_summarised_by_role_and_kind():
    spans = [
        Span(0, "SM 0 math 4", "gate_up 1.0", 0.0, 3.0),
        Span(0, "SM 0 math 4", "wait_operands 0.0", 3.0, 4.0),
        Span(0, "SM 1 math 4", "gate_up 2.0", 2.0, 4.0),
        Span(0, "SM 1 pull 1", "pull 2.0", 0.0, 1.0),
    ]
    found = {(k.role, k.kind): (k.number, k.seconds, k.share) for k in summarize(spans)}
    assert found == {
        ("math", "gate_up"): (2, 5.0, 0.625),
        ("math", "wait_operands"): (1, 1.0, 0.125),
        ("math", "idle"): (2, 2.0, 0.25),
        ("pull", "pull"): (1, 1.0, 0.25),
        ("pull", "idle"): (1, 3.0, 0.75),
    }
    assert summarize([]) == []


def test_simulated_lanes_are_summarised_too():
    spans = [Span(0, "SM 3", "down", 0.0, 1.0), Span(0, "pull", "pull 0", 0.0, 0.5)]
    assert [(k.role, k.kind) for k in summarize(spans) if k.kind != "idle"] == [
        ("pull", "pull"),
        ("tiles", "down"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kind": 99}, "stamps.kind must be below"), ({"end": 1}, "stamps.end must not precede")],
)
def test_damaged_stamps_are_refused(change, message):
    stamps = np.zeros(1, STAMP)
    stamps["start"], stamps["end"] = 5, 9
    for name, value in change.items():
        stamps[name] = value
    with pytest.raises(ValueError, match=message):
        spans_from_stamps(stamps)


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{", "{}", '{"traceEvents": [{"ph": "X"}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x\.json: not a trace file"):
            read_trace(path)


PICTURES = {
    "timeline": lambda: timeline_picture(SPANS, "a <b> & c"),
    "no timeline": lambda: timeline_picture([], "empty"),
    "matrix": lambda: matrix_picture(np.arange(16.0).reshape(4, 4), "traffic"),
    "one rank": lambda: matrix_picture(np.ones((1, 1)), "traffic"),
    "memory": lambda: memory_picture({"weights": 3e9, "none": 0.0}, 2e9),
    "curves": lambda: curves_picture({"loss": [(0, 2.0), (1, float("nan")), (2, 1.0)]}, "loss"),
    "no curves": lambda: curves_picture({"loss": []}, "loss"),
    "flat curve": lambda: curves_picture({"loss": [(3, 1.0)]}, "loss"),
}


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_pictures_are_well_formed(name):
    root = ElementTree.fromstring(PICTURES[name]())
    assert root.tag.endswith("svg")
    assert "nan" not in "".join(ElementTree.tostring(root, "unicode").lower().split("<title"))


def test_the_traffic_picture_shows_numbers_where_they_fit():
    def texts(size):
        matrix = np.arange(1.0, size * size + 1).reshape(size, size)
        root = ElementTree.fromstring(matrix_picture(matrix, "t"))
        return [t.text for t in root.iter() if t.tag.endswith("text")]

    assert {"2.0", "16"} <= set(texts(4))
    assert "1599" not in texts(40)
    assert any("destination" in text for text in texts(4))
    assert any("0 MB" in text for text in texts(40))  # the colour scale has its ends


def test_bars_lie_where_their_times_say():
    root = ElementTree.fromstring(timeline_picture(SPANS, "t"))
    bars = [r for r in root.iter() if r.tag.endswith("rect") and len(r)]
    assert len(bars) == 3
    lefts = [float(bar.get("x")) for bar in bars]
    widths = [float(bar.get("width")) for bar in bars]
    assert lefts[1] - lefts[0] == pytest.approx(widths[0], abs=0.02)
    assert widths[2] == pytest.approx(widths[1] / 2, abs=0.02)


def test_ticks_are_round_and_inside():
    assert ticks(0.0, 10.0) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert ticks(1.0, 1.0) == [1.0]
    assert all(0.13 <= t <= 0.87 for t in ticks(0.13, 0.87))


def test_shades_and_escapes():
    assert (shade(0.0), shade(2.0)) == ("#ffffff", "#164278")
    drawing = Drawing(10, 10)
    drawing.text(0, 0, "<&>")
    assert "&lt;&amp;&gt;" in drawing.render()


def check_page(text):
    """No address that a browser would fetch; every picture well formed."""
    without_tables = re.sub(r"<table>.*?</table>|<pre>.*?</pre>", "", text, flags=re.S)
    assert not re.search(r"(src|href)\s*=", text)
    assert set(re.findall(r"https?://[^'\" <]+", without_tables)) <= {"http://www.w3.org/2000/svg"}
    for picture in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(picture)


def test_the_report_of_a_plan_has_every_picture(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.write(path)
    text = html_report(path)
    check_page(text)
    assert text.count("<svg") == 5
    for word in ("Communication", "Roofline", "Memory", "What breaks first", "Hardware figures"):
        assert word in text


def test_pictures_are_files_of_their_own(plan, tmp_path):
    names = {path.name for path in write_pictures(plan, tmp_path / "svg")}
    assert names == {
        "timeline-ranks.svg",
        "timeline-tasks.svg",
        "communication.svg",
        "roofline.svg",
        "memory.svg",
    }
    for name in names:
        ElementTree.parse(tmp_path / "svg" / name)


def test_the_traffic_picture_counts_bytes_both_ways(plan):
    setting = plan.setting()
    matrix = traffic_megabytes(setting)
    rows = setting.work.counts.sum()
    assert matrix.sum() == pytest.approx(rows * 64 * (2 + 2) / 1e6)


def test_the_trace_of_a_plan_holds_ranks_and_tiles(plan, tmp_path):
    path = tmp_path / "trace.json"
    plan_trace(plan, path)
    spans = read_trace(path)
    assert {s.rank for s in spans} == set(range(plan.choice["ep_size"] + 1))
    assert {"pull", "compute", "push"} <= {s.lane for s in spans}
    assert any(s.lane.startswith("SM ") for s in spans)
    check_page(html_report(path))


def test_the_report_of_a_run(tmp_path):
    lines = [
        {"step": i, "loss": 5.0 - i, "alarms": ["<low>"] if i == 1 else [], "actions": [],
         "layers": [{"entropy": 0.9}, {"entropy": 0.8}]}
        for i in range(3)
    ]  # fmt: skip
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3
    page = html_report(tmp_path)
    check_page(page)
    assert "&lt;low&gt;" in page and "entropy, layer 1" in page and "loss 5.0000 to 3.0000" in page


def test_a_damaged_line_inside_a_run_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nbroken\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is not JSON"):
        html_report(tmp_path)


def test_a_source_that_is_nothing_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.arange(300))
    with pytest.raises(ValueError, match=r"report needs a plan or a trace"):
        html_report(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="report needs a folder with"):
        html_report(tmp_path)
    with pytest.raises(ValueError, match="report needs an existing"):
        html_report(tmp_path / "no.json")
