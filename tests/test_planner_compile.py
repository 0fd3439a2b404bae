"""compile, tune and the commands: from a description to steps, the same bits on any ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mok_ref.config import MoEConfig
from mok_ref.planner.compile import compile, train_config, trainable_reason
from mok_ref.planner.models import load_model
from mok_ref.planner.tune import (
    MARGIN,
    Tried,
    read_tuning,
    sizes_to_try,
    store_tuning,
    token_bucket,
    tune,
    tuned,
    tuning_key,
)

MODEL = {
    "name": "test",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_experts": 4,
    "top_k": 2,
    "shared_intermediate_size": 24,
    "vocab_size": 256,
    "attention": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16},
    "routing": {"score": "sigmoid", "num_groups": 2, "keep_groups": 1},
}
BATCH = np.random.default_rng(0).integers(0, 256, (2, 17))


def steps(count=2, **options):
    with compile(MODEL, "h200", gpus=2, batch=2, sequence=16, seed=5, **options) as made:
        return [made.step(BATCH)["loss_bits"] for _ in range(count)]


def test_compile_then_step_has_the_same_bits_on_one_and_two_ranks():
    one = steps(ranks=1)
    assert one == steps(ranks=2)
    assert one[0] != one[1]


def test_a_step_is_the_trainers_own_step():
    from mok_ref.heap import run_ranks
    from mok_ref.training.data import load_text
    from mok_ref.training.trainer import Trainer

    made = compile(MODEL, "h200", gpus=1, batch=2, sequence=16, seed=5)

    def direct(heap):
        trainer = Trainer(train_config(made), heap, load_text())
        return [trainer.step(BATCH)["loss_bits"] for _ in range(2)]

    assert steps(ranks=1) == run_ranks(1, direct)[0]


def test_the_description_reaches_the_trainer():
    config = train_config(compile(MODEL, "h200", gpus=1, batch=2, sequence=16, seed=9))
    options = config.model.router.options
    assert (options.score, options.num_groups, options.keep_groups) == ("sigmoid", 2, 1)
    assert (config.model.shared_intermediate, config.seed, config.batch) == (24, 9, 2)


def test_another_seed_is_another_run():
    with compile(MODEL, "h200", gpus=1, batch=2, sequence=16, seed=6) as made:
        assert made.step(BATCH)["loss_bits"] != steps(1, ranks=1)[0]


def test_a_step_without_a_batch_takes_the_text():
    with compile(MODEL, "here", batch=2, sequence=16) as made:
        record = made.step()
    assert record["step"] == 0 and 3 < record["loss"] < 9


def test_the_plan_is_for_the_named_machine():
    made = compile("deepseek-v3", "gb300-nvl72", tokens=512, ep_size=8)
    assert made.plan.machine().num_gpus == 72
    assert MoEConfig(**made.config_options()).num_experts == 256
    with pytest.raises(ValueError, match="vocab_size must be 256"):
        made.step()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("kimi-k2", "vocab_size"),
        ({**MODEL, "num_layers": 2, "num_dense_layers": 1}, "num_dense_layers"),
        ({**MODEL, "num_layers": 4096, "hidden_size": 8192}, "must fit this machine's memory"),
        (MODEL, None),
    ],
)
def test_what_cannot_be_trained_says_why(model, reason):
    text = trainable_reason(load_model(model))
    assert text is None if reason is None else reason in str(text)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (BATCH[:, :5], "batch must be integers of shape"),
        (BATCH * 1.0, "batch must be integers of shape"),
        (BATCH + 300, "batch must hold bytes"),
        (BATCH - 300, "batch must hold bytes"),
    ],
)
def test_wrong_batches_are_refused(batch, message):
    made = compile(MODEL, "h200", gpus=1, batch=2, sequence=16)
    with pytest.raises(ValueError, match=message):
        made.step(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"optimization": "fast"}, "optimization must be"), ({"batch": 0}, "batch must be")],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        compile(MODEL, "h200", **options)


def test_max_measures_here_and_the_trainer_uses_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MOK_REF_CACHE", str(tmp_path))
    options = {"gpus": 1, "batch": 2, "sequence": 16, "arithmetic": "fast", "ranks": 1}
    with compile(MODEL, "h200", "max", **options) as made:
        best = made.tuned[0]
        assert best.ms <= min(t.ms for t in made.tuned) * (1 + MARGIN)
        layer = made.trainer.trainers[0].model.layer_config
        assert (layer.minibatch, layer.macrobatch) == (best.minibatch, best.macrobatch)
    assert read_tuning(tmp_path / "tuning.json") == {}  # nothing looks CPU sizes up


def test_a_cpu_measurement_is_stored_only_where_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("MOK_REF_CACHE", str(tmp_path))
    tune(CONFIG, 64, repeats=1, sizes=[(128, 128)])
    assert not (tmp_path / "tuning.json").exists()
    tune(CONFIG, 64, repeats=1, sizes=[(128, 128)], path=tmp_path / "mine.json")
    assert len(read_tuning(tmp_path / "mine.json")) == 1


# ------------------------------------------------------------------ tuning

CONFIG = MoEConfig(32, 16, 4, 2, arithmetic="fast")


def test_what_was_measured_is_looked_up(tmp_path):
    path = tmp_path / "tuning.json"
    found = tune(CONFIG, 200, repeats=1, path=path, sizes=[(128, 256), (256, 256)])
    assert [t.ms for t in found[1:]] == sorted(t.ms for t in found[1:])
    assert found[0].ms <= min(t.ms for t in found) * (1 + MARGIN)
    again = tuned(CONFIG, "cpu", 250, path)
    assert (again.minibatch, again.macrobatch) == (found[0].minibatch, found[0].macrobatch)
    assert tuned(CONFIG, "cpu", 1000, path) == CONFIG  # another number of tokens


def test_the_device_workspace_takes_what_was_stored(tmp_path):
    from mok_ref.gpu.workspace import derive_sizes

    path = tmp_path / "tuning.json"
    store_tuning(CONFIG, "cpu", 64, Tried(128, 256, 1.0, 1), path)
    sizes = derive_sizes(tuned(CONFIG, "cpu", 64, path), 0, 64)
    assert (sizes.mini_blocks, sizes.macro_blocks) == (1, 2)


def test_a_layer_that_names_its_batches_keeps_them(tmp_path):
    path = tmp_path / "tuning.json"
    store_tuning(CONFIG, "cpu", 64, Tried(128, 256, 1.0, 1), path)
    named = MoEConfig(32, 16, 4, 2, arithmetic="fast", minibatch=512, macrobatch=512)
    assert tuned(named, "cpu", 64, path) == named


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "other", "entries": {}}'])
def test_a_damaged_cache_costs_speed_only(tmp_path, content):
    path = tmp_path / "tuning.json"
    path.write_text(content)
    assert tuned(CONFIG, "cpu", 64, path) == CONFIG
    store_tuning(CONFIG, "cpu", 64, Tried(128, 256, 1.0, 1), path)
    assert tuned(CONFIG, "cpu", 64, path).macrobatch == 256


def test_an_entry_with_impossible_sizes_is_ignored(tmp_path):
    path = tmp_path / "tuning.json"
    key = store_tuning(CONFIG, "cpu", 64, Tried(128, 256, 1.0, 1), path)
    table = json.loads(path.read_text())
    table["entries"][key]["minibatch"] = 100
    path.write_text(json.dumps(table))
    assert tuned(CONFIG, "cpu", 64, path) == CONFIG


def test_keys_depend_on_everything_that_matters():
    keys = {
        tuning_key(CONFIG, "cpu", 64),
        tuning_key(CONFIG, "H200", 64),
        tuning_key(CONFIG, "cpu", 65),
        tuning_key(MoEConfig(32, 16, 4, 2), "cpu", 64),
        tuning_key(MoEConfig(32, 16, 4, 3, arithmetic="fast"), "cpu", 64),
    }
    assert len(keys) == 5
    assert [token_bucket(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_sizes_worth_trying_are_valid_and_hold_the_rows():
    for rows in (1, 2000, 65_536):
        for minibatch, macrobatch in sizes_to_try(rows):
            MoEConfig(32, 16, 4, 2, minibatch=minibatch, macrobatch=macrobatch)
        assert any(macrobatch >= rows for _, macrobatch in sizes_to_try(rows))


# ------------------------------------------------------------------ commands


def run(arguments, capsys):
    from mok_ref.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    out = capsys.readouterr()
    return int(stopped.value.code or 0), out.out, out.err


def test_plan_and_report_from_the_command_line(tmp_path, capsys):
    plan, trace = tmp_path / "p.json", tmp_path / "t.json"
    arguments = ["plan", "--model", "qwen3-30b", "--hardware", "h200", "--tokens", "512"]
    arguments += ["--best", "1", "--ep", "8", "--output", str(plan), "--trace", str(trace)]
    code, out, _ = run(arguments, capsys)
    assert code == 0 and "What breaks first" in out and plan.is_file() and trace.is_file()
    code, out, _ = run(["report", str(plan)], capsys)
    assert code == 0 and (tmp_path / "p.report.html").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--model", "nothing", "--hardware", "h200"],
        ["plan", "--model", "qwen3-30b", "--hardware", "h200", "--tokens", "0"],
        ["plan", "--model", "qwen3-30b", "--hardware", "h200", "--routing", "odd"],
        ["report", "/nowhere/at/all"],
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments, capsys):
    code, _, err = run(arguments, capsys)
    assert code == 2 and len(err.strip().splitlines()) == 1


def test_tune_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MOK_REF_CACHE", str(tmp_path))
    arguments = ["tune", "--hidden", "32", "--intermediate", "16", "--experts", "4"]
    arguments += ["--top-k", "2", "--tokens", "64", "--repeats", "1", "--arithmetic", "fast"]
    arguments += ["--device", "cpu"]
    code, out, _ = run([*arguments, "--json"], capsys)
    assert code == 0 and json.loads(out)["best"]["ms"] > 0
    assert not Path(tmp_path / "tuning.json").exists()  # nothing looks CPU sizes up
    code, out, _ = run(arguments, capsys)
    assert code == 0 and "not stored" in out
    code, _, err = run([*arguments[:-1], "cuda"], capsys)
    assert code == 2 and "--arithmetic must go with --device cpu" in err
