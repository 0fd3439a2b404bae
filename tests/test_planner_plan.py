"""Plans: reproducible, readable back, with reasons, within their time limits."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest

from mok_ref.config import MoEConfig
from mok_ref.planner import make_plan, parse_plan, plan_text
from mok_ref.planner.choice import Choice
from mok_ref.planner.hardware import load_hardware
from mok_ref.planner.models import load_model
from mok_ref.planner.plan import make_question, moe_config_options, sharding_text
from mok_ref.planner.reasons import WARNING
from mok_ref.planner.search import Question, parse_routing, search, splits, workload_for
from mok_ref.planner.skew import first_break, skew_report


@pytest.fixture(scope="module")
def plan():
    return make_plan("qwen3-30b", "h200", tokens=2048, num_simulated=2)


def test_a_plan_survives_its_file(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.write(path)
    assert parse_plan(path.read_text(encoding="utf-8"), "plan.json") == plan
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_question_has_the_same_answer(plan):
    assert make_plan("qwen3-30b", "h200", tokens=2048, num_simulated=2) == plan


def test_a_plan_predicts_what_its_own_simulation_says(plan):
    from mok_ref.planner.prediction import predict

    assert predict(plan.setting()).seconds * 1e3 == pytest.approx(plan.predicted["forward"]["ms"])


def test_a_plan_says_what_was_asked_for(plan):
    p = plan.predicted
    for direction in ("forward", "backward"):
        assert {"ms", "tflops", "mfu", "hidden_share", "link_share"} <= set(p[direction])
        assert 0 < p[direction]["mfu"] < 1
    assert p["step"]["tokens_per_second"] > 0
    assert {"weights of experts", "optimizer of experts", "ring", "peer buffers"} <= set(
        plan.memory["parts"]
    )
    text = plan_text(plan)
    for word in ("Why", "What breaks first", "Alternatives", "minibatch", "placement", "tokens/s"):
        assert word in text
    assert len(plan.reasons) >= 5 and len(plan.alternatives) >= 3


def test_a_plan_configures_the_layer(plan):
    options = moe_config_options(plan)
    config = MoEConfig(**options)
    assert config.ep_size == plan.choice["ep_size"]
    assert config.owner_of_expert.tolist() == plan.placement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other"}, "schema must be"),
        ({"reasons": None}, "missing reasons"),
        ({"surplus": 1}, "unknown surplus; a plan has alternatives, "),
        ({"memory": {}}, "not a whole plan: KeyError"),
        ({"choice": {"ep": 8}}, "not a whole plan: TypeError"),
    ],
)
def test_a_wrong_plan_file_is_refused(plan, change, message):
    table = {**json.loads(plan.to_json()), **change}
    table = {key: value for key, value in table.items() if value is not None}
    with pytest.raises(ValueError, match=f"p.json: {message}"):
        parse_plan(json.dumps(table), "p.json")


def test_a_truncated_plan_file_is_refused(plan):
    with pytest.raises(ValueError, match=r"p\.json: not a JSON file"):
        parse_plan(plan.to_json()[:500], "p.json")


def question(model="qwen3-30b", hardware="h200", tokens=2048, **options):
    return make_question(model, hardware, tokens, **options)[0]


def test_groups_stay_inside_a_fast_domain_unless_asked():
    two = replace(load_hardware("h200"), num_domains=2)
    inside = list(splits(Question(load_model("qwen3-30b"), two, 512)))
    across = list(splits(Question(load_model("qwen3-30b"), two, 512, cross_domain=True)))
    assert max(ep * tp for ep, tp, _ in inside) == 8
    assert max(ep * tp for ep, tp, _ in across) == 16
    assert all(ep * tp * dp <= 16 for ep, tp, dp in inside + across)


def test_tensor_parallel_slices_are_multiples_of_128():
    assert {tp for _, tp, _ in splits(question("qwen3-30b"))} == {1, 2}  # 768 = 6 * 128


def test_candidates_that_fit_come_first_and_the_fastest_of_them():
    found = search(question(tokens=4096), num_simulated=2)
    assert [c.memory.fits for c in found] == sorted((c.memory.fits for c in found), reverse=True)
    # no candidate, simulated or by the closed form, claims more than the chosen one
    assert found[0].simulated is not None
    assert found[0].tokens_per_second == max(c.tokens_per_second for c in found if c.memory.fits)
    others = [c.closed_tokens_per_second for c in found[1:] if c.memory.fits]
    assert len(others) >= 2 and others == sorted(others, reverse=True)


@pytest.mark.parametrize(
    ("model", "hardware", "options"),
    [
        ("deepseek-v3", "h100", {}),
        ("deepseek-v3", "h200", {"num_simulated": 1}),
        ("mixtral-8x7b", "h200", {"ep_size": 3}),
    ],
)
def test_where_nothing_fits_the_plan_needs_least_and_says_so(model, hardware, options):
    made = make_plan(model, hardware, tokens=512, **options)
    assert not made.memory["fits"] and "DOES NOT FIT" in plan_text(made)
    assert made.alternatives
    assert made.memory["total"] / 1e9 <= min(other["memory_gb"] for other in made.alternatives)
    needs = [other["memory_gb"] for other in made.alternatives]
    assert needs == sorted(needs)


def test_the_text_of_a_plan_keeps_to_80_columns_and_to_one_part_a_line(plan):
    text = plan_text(plan)
    assert max(map(len, text.splitlines())) <= 80
    for name in [*plan.predicted["step"]["parts"], *plan.memory["parts"]]:
        assert "," not in name
    only = make_plan("tiny-litters", "h200", tokens=64, gpus=1, num_simulated=1)
    assert only.alternatives == [] and "none: no other split" in plan_text(only)


def test_recorded_routing_keeps_the_tokens_that_were_asked_for(tmp_path):
    ids = np.random.default_rng(0).integers(0, 128, (100, 8)).astype(np.int32)
    np.savez(tmp_path / "r.npz", topk_ids=ids)
    made = make_plan(
        "qwen3-30b", "h200", tokens=512, routing=str(tmp_path / "r.npz"), num_simulated=1
    )
    assert made.workload().tokens.tolist() == [512] * made.choice["ep_size"]
    assert not any(reason.startswith(WARNING) for reason in made.reasons)
    np.savez(tmp_path / "r.npz", topk_ids=ids % 8)
    workload_for.cache_clear()
    doubtful = make_plan(
        "qwen3-30b", "h200", tokens=512, routing=str(tmp_path / "r.npz"), num_simulated=1
    )
    assert doubtful.reasons[0].startswith(f"{WARNING} r.npz never chooses experts 8 to 127")


def test_skew_breaks_a_plan_and_the_sentence_says_how():
    ask = question(tokens=2048)
    best = search(ask, 1)[0]
    cases = skew_report(ask, best)
    assert cases[-1].title == "all to one"
    assert cases[-1].slowdown > 1.5 > cases[0].slowdown
    assert cases[-1].hottest_rank == max(case.hottest_rank for case in cases)
    text = first_break(cases)
    assert "rank" in text and "planned time" in text
    assert first_break([]) == "nothing breaks up to all tokens on the same experts"


def test_measured_load_changes_the_placement(tmp_path):
    ids = np.minimum(np.random.default_rng(0).zipf(1.3, (4096, 8)) - 1, 127).astype(np.int32)
    path = tmp_path / "routes.npz"
    np.savez(path, topk_ids=ids)
    made = make_plan("qwen3-30b", "h200", tokens=512, routing=str(path), num_simulated=1, ep_size=8)
    assert made.predicted["placement"] != "in order"


@pytest.mark.parametrize(("text", "skew"), [("uniform", 0.0), ("zipf:1.5", 1.5), ("zipf", 1.0)])
def test_routing_words(text, skew):
    assert parse_routing(text) == skew


@pytest.mark.parametrize("text", ["zipf:x", "zipf:-1", "even", "zipf:nan"])
def test_wrong_routing_words_are_refused(text):
    with pytest.raises(ValueError, match="routing must be"):
        parse_routing(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens must be in 1.."),
        ({"accumulate": 0}, "accumulate must be in 1.."),
        ({"ep_size": 0}, "ep_size must be at least 1"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"ep_size": 1000}, "ep_size and tp_size must fit the machine"),
    ],
)
def test_wrong_questions_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan("qwen3-30b", "h200", **{"tokens": 512, **options})


def test_a_72_rank_plan_takes_less_than_ten_seconds():
    begin = time.process_time()
    made = make_plan("deepseek-v3", "gb300-nvl72", tokens=4096)
    assert time.process_time() - begin < 10
    assert made.chosen.num_gpus in (64, 72) and made.memory["fits"]


@pytest.mark.slow
@pytest.mark.parametrize("cross_domain", [False, True])
def test_a_4096_rank_plan_takes_less_than_a_minute(cross_domain):
    begin = time.process_time()
    made = make_plan("deepseek-v3", "gb300-racks", 4096, 4096, cross_domain=cross_domain)
    assert time.process_time() - begin < 60
    assert made.chosen.num_gpus == 4096


# ------------------------------------------------------------------ commands

ASK = ["plan", "--model", "tiny-litters", "--hardware", "h200", "--tokens", "64", "--best", "1"]


def run_command(*arguments):
    """(exit status, ValueError's text or None) of `mok-ref plan ...` in this process."""
    import typer

    from mok_ref.planner.commands import register

    app = typer.Typer()
    register(app)
    try:
        return app(list(arguments), standalone_mode=False) or 0, None
    except ValueError as error:
        return 2, str(error)


@pytest.mark.parametrize("option", ["--model", "--hardware"])
def test_either_list_alone_shows_the_names(option, capsys):
    assert run_command("plan", option, "list") == (0, None)
    assert "qwen3-30b" in capsys.readouterr().out
    assert run_command("plan", option, "h200")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x.foo"], "--output must end in .json, got 'x.foo'"),
        (["--html", "x.json"], "--html must end in .html or .htm"),
        (["--trace", "gone/x.json"], "--trace must lie in a folder"),
        (["--output", "x.json", "--trace", "x.json"], "must be another file than"),
        (["--ep", "1000"], "--ep and --tp must fit the machine, got --ep=1000"),
        (["--gpus", "0"], "--gpus must be at least 1"),
        (["--dtype", "fp4"], "--dtype must be"),
    ],
)
def test_wrong_options_are_refused_in_the_users_words(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, text = run_command(*ASK, *arguments)
    assert status == 2 and message in text
    assert list(tmp_path.iterdir()) == []


def test_every_file_written_is_named(tmp_path, capsys):
    names = {"--output": "p.json", "--trace": "t.json", "--html": "p.html"}
    paths = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    assert run_command(*ASK, *paths, "--json") == (0, None)
    shown = capsys.readouterr()
    json.loads(shown.out)
    for name in names.values():
        assert str(tmp_path / name) in shown.err and (tmp_path / name).is_file()
    assert run_command("report", str(tmp_path / "p.json"), "--json") == (0, None)
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "p.report.html")}


def test_a_plan_that_does_not_fit_has_exit_status_1(capsys):
    assert run_command("plan", "--model", "deepseek-v3", "--hardware", "h100", "--best", "1") == (
        1,
        None,
    )
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize("gpus", [1, 8])
def test_one_rank_hides_nothing(gpus):
    text = plan_text(make_plan("tiny-litters", "h200", 512, gpus, ep_size=gpus, num_simulated=1))
    table = text.partition("communication hidden")[2].partition("Memory")[0]
    assert ("link share: bytes" in table) == (gpus > 1)
    end = r"\d+% +\d+%$" if gpus > 1 else r"- +-$"
    assert len(re.findall(rf"(?:forward|backward) .*% +{end}", table, re.MULTILINE)) == 2
    assert ("communication is hidden" in text.replace("\n    ", " ")) == (gpus > 1)


@pytest.mark.parametrize(
    ("dp", "sharding", "text"),
    [
        (1, "none", "none"),
        (1, "gradients", "gradients, optimizer: experts one copy, rest over 4 GPUs"),
        (3, "optimizer", "optimizer: experts over 3, rest over 12 GPUs"),
    ],
)
def test_sharding_in_words(dp, sharding, text):
    assert sharding_text(Choice(4, dp_size=dp, sharding=sharding)) == text
    assert sharding_text(Choice(1, sharding="optimizer")) == "nothing to share: one GPU"


def test_a_plan_that_fills_the_memory_warns():
    """The same plan on a machine of hardly more memory than it needs, and of plenty."""
    machine = load_hardware("h200").with_gpus(8)
    need = make_plan("tiny-litters", machine, 512, num_simulated=1).memory["total"]
    for room, is_tight in ((1.01, True), (2.0, False)):
        roomy = replace(machine, memory_bytes=need * room)
        made = make_plan("tiny-litters", roomy, 512, num_simulated=1)
        assert made.memory["fits"]
        warned = [r for r in made.reasons if r.startswith(f"{WARNING} beside the reserve only")]
        assert len(warned) == is_tight
        assert "a reserve for the driver's context" in "".join(made.reasons)
        assert "GB of it a reserve; " in plan_text(made)


def test_where_nothing_fits_memory_decides_and_is_said_to():
    """Sizes that are faster are listed with the reason against them; equal memory: the fastest."""
    small = replace(load_hardware("h200").with_gpus(2), memory_bytes=7e9)
    made = make_plan("qwen3-30b", small, 4096, num_simulated=1)
    assert not made.memory["fits"]
    (minibatch,) = [reason for reason in made.reasons if reason.startswith("minibatch")]
    assert minibatch.endswith("; no size fits: the ring's memory decides, not time)")
    (moved,) = [reason for reason in made.reasons if reason.startswith("rows are moved by")]
    others = [float(change) for change in re.findall(r"([+-][\d.]+)%", moved)]
    assert others and min(others) >= 0
    roomy = make_plan("tiny-litters", "h200", 512, 2, num_simulated=1)
    assert roomy.memory["fits"] and "no size fits" not in "".join(roomy.reasons)


def test_a_bound_is_explained_by_times():
    made = make_plan("tiny-litters", "gb300-nvl72", 4096, 8, ep_size=8, num_simulated=1)
    (bound,) = [reason for reason in made.reasons if reason.startswith("forward is bound")]
    assert re.match(r"forward is bound by \w+ \([\d.]+ ms, (products|links) [\d.]+ ms\)", bound)
    assert "of their nominal 900 GB/s, of which rows reach" in bound
