"""Plans: reproducible, readable back, with reasons, within their time limits."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from mok_ref.config import MoEConfig
from mok_ref.planner import make_plan, parse_plan, plan_text
from mok_ref.planner.hardware import load_hardware
from mok_ref.planner.models import load_model
from mok_ref.planner.plan import make_question, moe_config_options
from mok_ref.planner.search import Question, parse_routing, search, splits
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
    assert {"weights, experts", "optimizer, experts", "ring", "peer buffers"} <= set(
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
        ({"surplus": 1}, "unknown surplus"),
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
    head = found[: sum(c.simulated is not None for c in found)]
    assert [c.memory.fits for c in found] == sorted((c.memory.fits for c in found), reverse=True)
    assert head[0].tokens_per_second == max(c.tokens_per_second for c in head if c.memory.fits)


def test_a_machine_that_is_too_small_is_said_to_be():
    made = make_plan("deepseek-v3", "h200", tokens=128, num_simulated=1)
    assert not made.memory["fits"] and "DOES NOT FIT" in plan_text(made)


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
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
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
