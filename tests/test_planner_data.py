"""Hardware and models as data: every figure sourced, every mistake in a file named."""

from __future__ import annotations

import math

import pytest

from mok_ref.planner.hardware import FIGURES, known_hardware, load_hardware, parse_hardware
from mok_ref.planner.models import known_models, load_model

PUBLISHED_BILLIONS = {  # total and active parameters as the authors name their models
    "deepseek-v3": (671, 37),
    "qwen3-235b": (235, 22),
    "qwen3-30b": (30.5, 3.3),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "kimi-k2": (1030, 32),
    "glm-4.5": (355, 32),
}


@pytest.mark.parametrize("name", known_hardware())
def test_every_figure_has_a_source(name):
    hardware = load_hardware(name)
    assert set(hardware.sources) == set(FIGURES)
    assert all(len(text) > 8 for text in hardware.sources.values())
    assert hardware.sustained_bf16_flops < hardware.burst_bf16_flops < hardware.peak_bf16_flops
    assert hardware.link_rate < hardware.link_bytes_per_s


def test_an_nvl72_is_one_domain_of_72():
    rack = load_hardware("gb300-nvl72")
    assert (rack.gpus_per_domain, rack.num_domains, rack.num_gpus) == (72, 1, 72)


@pytest.mark.parametrize(
    ("num", "size", "domains"), [(1, 1, 1), (36, 36, 1), (72, 72, 1), (144, 72, 2), (4096, 64, 64)]
)
def test_a_machine_is_cut_into_equal_domains(num, size, domains):
    machine = load_hardware("gb300-racks").with_gpus(num)
    assert (machine.gpus_per_domain, machine.num_domains) == (size, domains)


@pytest.mark.parametrize("num", [0, 73])
def test_a_number_of_gpus_that_does_not_fit_is_refused(num):
    with pytest.raises(ValueError, match="num_gpus"):
        load_hardware("gb300-racks").with_gpus(num)


def edited(old: str, new: str) -> str:
    from mok_ref.planner.hardware import DATA

    text = (DATA / "h200.toml").read_text(encoding="utf-8")
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_sms = { value = 132,", "num_sms = { value = -1,", "num_sms.value must be a number"),
        ("num_sms = { value = 132,", 'num_sms = { value = "x",', "num_sms.value must be a number"),
        ("num_sms = { value = 132,", "nun_sms = { value = 132,", "missing num_sms"),
        ('source = "measured: device attribute"', 'source = " "', "num_sms.source must say"),
        ("gpus_per_domain = 8", "gpus_per_domain = 0", "gpus_per_domain must be an integer >= 1"),
        ("link_latency_us = { value = 2.0", "link_latency_us = { value = 0.0", "must be above 0"),
        ("[figures]", "[figures", "not a TOML file"),
    ],
)
def test_a_wrong_hardware_file_is_refused_by_name(old, new, message):
    with pytest.raises(ValueError, match=f"mine.toml: .*{message}"):
        parse_hardware(edited(old, new), "mine.toml")


def test_a_users_file_is_read_from_disk(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(edited('name = "h200"', 'name = "mine"'), encoding="utf-8")
    assert load_hardware(path).name == "mine"


@pytest.mark.parametrize("value", ["h999", "nowhere/x.toml"])
def test_unknown_hardware_is_refused(value):
    with pytest.raises(ValueError, match="hardware"):
        load_hardware(value)


@pytest.mark.parametrize("name", sorted(PUBLISHED_BILLIONS))
def test_parameter_counts_are_the_published_ones(name):
    total, active = PUBLISHED_BILLIONS[name]
    model = load_model(name)
    assert math.isclose(model.num_parameters / 1e9, total, rel_tol=0.01)
    assert math.isclose(model.active_parameters / 1e9, active, rel_tol=0.09)
    assert model.source.startswith("https://")


def test_the_issues_models_are_there():
    assert {"deepseek-v3", "qwen3-235b", "qwen3-30b", "mixtral-8x7b", "kimi-k2"} <= set(
        known_models()
    )


TINY = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2}


def test_a_dict_describes_a_model():
    model = load_model({**TINY, "routing": {"score": "sigmoid", "num_groups": 4, "keep_groups": 2}})
    assert (model.expert_parameters, model.routing.score) == (3 * 64 * 32, "sigmoid")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer in 1.."),
        ({"top_k": 1.5}, "top_k must be an integer in 1.."),
        ({"num_layers": True}, "num_layers must be an integer in 1.."),
        ({"num_dense_layers": 1}, "num_dense_layers must be below num_layers"),
        ({"width": 3}, "unknown width"),
        ({"routing": {"groups": 2}}, "routing: unknown groups"),
        ({"routing": {"num_groups": 3}}, "num_experts must be divisible by num_groups"),
    ],
)
def test_a_wrong_model_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        load_model({**TINY, **change})


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="missing num_experts, top_k"):
        load_model({"hidden_size": 64, "intermediate_size": 32})
