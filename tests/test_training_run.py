"""Whole runs: same bits on any number of ranks, resume, actions, checkpoints, command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mok_ref.cli import main
from mok_ref.heap import run_ranks
from mok_ref.numerics import to_bf16
from mok_ref.routing import RoutingOptions
from mok_ref.training import checkpoint as files
from mok_ref.training.balance import BalanceOptions
from mok_ref.training.capacity import CapacityOptions
from mok_ref.training.checkpoint import CheckpointOptions
from mok_ref.training.choosers import LitterOptions
from mok_ref.training.data import ByteText, load_text, train_batch, valid_batches
from mok_ref.training.loop import read_records, train
from mok_ref.training.model import LayerControl, Model
from mok_ref.training.monitors import ActionOptions, MonitorOptions
from mok_ref.training.parameters import ModelConfig, Parameters
from mok_ref.training.report import events, report_run
from mok_ref.training.router import RouterConfig, load_routes
from mok_ref.training.snapshot import Snapshots
from mok_ref.training.trainer import CollapseOptions, TrainConfig, Trainer
from mok_ref.training.unlocking import UnlockOptions

TINY = ModelConfig(
    sequence=16, hidden=16, num_layers=1, num_heads=2, intermediate=16, num_experts=4,
    shared_intermediate=8,
)  # fmt: skip
CONFIG = TrainConfig(
    TINY,
    steps=4,
    batch=4,
    balance=BalanceOptions(0.01, 0.0, 0.001, 0.001, 0.001),
    capacity=CapacityOptions(start=1.0, low=1.0),
    unlock=UnlockOptions(2, 1, 1),
    checkpoint=CheckpointOptions(2, 2),
    valid_every=2,
    valid_batches=1,
)


@pytest.fixture(scope="module")
def text() -> ByteText:
    return load_text()


@pytest.fixture(scope="module")
def reference(text: ByteText) -> list[str]:
    """What CONFIG gives on one rank without any interruption."""
    return loss_bits(run_ranks(1, lambda heap: train(CONFIG, heap, text))[0])


def run(config: TrainConfig, text: ByteText, ranks: int = 1) -> list[dict]:
    """Records of rank 0."""
    return run_ranks(ranks, lambda heap: train(config, heap, text))[0]


def loss_bits(records: list[dict]) -> list[str]:
    return [f"{r['loss_bits']} {r.get('valid_loss')}" for r in records]


# --------------------------------------------------------------------------- bits


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_loss_has_the_same_bits_on_any_number_of_ranks(ranks, text, reference) -> None:
    """8 ranks: four of them have no tokens, and 4 experts live on 8 ranks."""
    records = run_ranks(ranks, lambda heap: train(CONFIG, heap, text))
    for of_rank in records:
        assert loss_bits(of_rank) == reference


ROUTERS = {
    "deepseek": RouterConfig(
        options=RoutingOptions(2, "sigmoid", num_groups=2, keep_groups=1, renormalize=True)
    ),
    "litter": RouterConfig("litter", litter=LitterOptions(2, 2)),
    "expert_choice": RouterConfig("expert_choice"),
    "balanced": RouterConfig("balanced"),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_every_chooser_trains_with_the_same_bits(name, text) -> None:
    config = replace(
        CONFIG,
        model=replace(TINY, router=ROUTERS[name]),
        steps=2,
        unlock=None,
        capacity=None,
        balance=BalanceOptions(0.01, 0.01 if name == "litter" else 0.0, z=0.001),
    )
    runs = [run_ranks(r, lambda heap: train(config, heap, text))[0] for r in (1, 2)]
    assert loss_bits(runs[0]) == loss_bits(runs[1])


def test_a_different_seed_has_different_bits(text, reference) -> None:
    other = run_ranks(1, lambda h: train(replace(CONFIG, seed=1), h, text, stop_at=1))[0]
    assert loss_bits(other) != reference[:1]


def test_recompute_has_the_same_bits(text, reference) -> None:
    config = replace(CONFIG, model=replace(TINY, recompute=True))
    assert loss_bits(run_ranks(2, lambda heap: train(config, heap, text))[0]) == reference


def test_tensor_parallel_dense_model_has_the_same_bits(text) -> None:
    dense = replace(TINY, ffn="dense", intermediate=64)
    runs = []
    for ranks, cut in ((1, False), (2, True), (4, True)):
        model = replace(dense, tensor_parallel=cut)
        runs.append(loss_bits(run(replace(CONFIG, model=model, steps=2, unlock=None), text, ranks)))
    assert runs[0] == runs[1] == runs[2]


def test_replayed_routes_give_the_same_bits(text, tmp_path) -> None:
    """The routes of a run, from a file; replayed on other ranks they give one run."""
    path = tmp_path / "routes.npz"
    short = replace(CONFIG, steps=2, valid_every=0)
    run_ranks(2, lambda heap: train(short, heap, text, record_to=path))
    routes = load_routes(path)
    assert [ids.shape for ids, _ in routes] == [(64, 2)] * 2
    model = replace(TINY, router=RouterConfig("replay"))
    config = replace(short, model=model, balance=BalanceOptions(), unlock=None, capacity=None)
    runs = [run_ranks(r, lambda heap: train(config, heap, text, replay=routes))[0] for r in (1, 4)]
    assert loss_bits(runs[0]) == loss_bits(runs[1])
    load = np.bincount(routes[1][0][routes[1][0] >= 0], minlength=4)
    assert runs[0][1]["layers"][0]["load"] == load.tolist()
    with pytest.raises(ValueError, match="route file must have 2 calls, got 1"):
        run_ranks(1, lambda heap: train(config, heap, text, replay=routes[:1]))


# --------------------------------------------------------------------------- gradients


def test_model_gradients_match_finite_differences(text) -> None:
    """Every replicated parameter, in the oracle arithmetic."""
    config = replace(TINY, arithmetic="float64", num_layers=2)
    batch = train_batch(text, "fd", 2, 16)

    def rank(heap):
        parameters = Parameters(config, 0, heap.rank, heap.size)
        model = Model(config, heap, 2, parameters)
        parameters.values = {k: v.astype(np.float64) for k, v in parameters.values.items()}
        control = [LayerControl(4, BalanceOptions())] * 2
        saved = model.forward(batch, control)
        grads = model.backward(saved, control).replicated
        rng = np.random.default_rng(0)
        for name, gradient in grads.items():
            index = tuple(int(rng.integers(n)) for n in gradient.shape)
            if name == "embed":
                index = (int(batch[0, 0]), index[1])
            losses = []
            for sign in (1, -1):
                value = parameters.values[name]
                before = value[index]
                value[index] += sign * 1e-6
                losses.append(float(model.forward(batch, control).loss.mean()))
                value[index] = before
            slope = (losses[0] - losses[1]) / 2e-6
            assert gradient[index] == pytest.approx(slope, rel=1e-3, abs=1e-8), name
        return len(grads)

    assert run_ranks(1, rank)[0] == 3 + 2 * 6


def test_ordinary_layer_agrees_with_the_layer_up_to_rounding(text) -> None:
    """The baseline computes the same function, in no fixed order."""
    losses = {}
    for ffn in ("moe", "ordinary"):
        model = replace(TINY, ffn=ffn, arithmetic="fast", shared_intermediate=0)
        config = replace(CONFIG, model=model, capacity=None, unlock=None, valid_every=0)
        losses[ffn] = [r["loss"] for r in run(config, text)]
    # bf16 roundings of ties differ at most; four steps of rate 6e-4 cannot blow that up
    np.testing.assert_allclose(losses["moe"], losses["ordinary"], rtol=2e-3)
    config = replace(CONFIG, model=replace(TINY, ffn="ordinary"))
    with pytest.raises(ValueError, match=r"^ffn='ordinary' needs one rank, got 2"):
        run_ranks(2, lambda heap: train(config, heap, text))


# --------------------------------------------------------------------------- checkpoints


def interrupted(text: ByteText, run_dir: Path, ranks: int = 2, stop_at: int = 3, **changes) -> None:
    config = replace(CONFIG, **changes)
    run_ranks(ranks, lambda heap: train(config, heap, text, run_dir, stop_at=stop_at))


@pytest.mark.parametrize("ranks", [1, 4])
def test_resume_continues_with_the_same_bits(ranks, text, reference, tmp_path) -> None:
    interrupted(text, tmp_path)
    rest = run_ranks(ranks, lambda heap: train(CONFIG, heap, text, tmp_path, resume=True))[0]
    assert loss_bits(rest) == reference[2:]
    assert loss_bits(read_records(tmp_path)) == reference


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
@pytest.mark.parametrize("kind", ["shared-000002", "layer0-expert001-000002", "manifest-000002"])
def test_damaged_files_are_refused_by_name(damage, kind, text, saved_run, tmp_path) -> None:
    shutil.copytree(saved_run, tmp_path / "run")
    path = next((tmp_path / "run" / "checkpoints").glob(f"{kind}.*"))
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "altered":
        place = len(data) - 3 if path.suffix == ".safetensors" else data.index(b'"step": 2') + 8
        data[place] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    message = "found none" if (damage, kind[:8]) == ("missing", "manifest") else path.name
    with pytest.raises(ValueError, match=message):
        run_ranks(1, lambda h: train(CONFIG, h, text, tmp_path / "run", resume=True))


@pytest.fixture(scope="module")
def saved_run(text, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved")
    interrupted(text, run_dir)
    return run_dir


def test_unchanged_experts_are_not_written_again(text, tmp_path) -> None:
    """Two experts stay locked: their files are of the first checkpoint, all others' are newer."""
    unlock = UnlockOptions(2, 1, 100)
    interrupted(text, tmp_path, stop_at=4, unlock=unlock, valid_every=0)
    manifest = files.read_manifest(tmp_path / "checkpoints", "manifest-000004.json")
    written = {key: entry["file"][-18:-12] for key, entry in manifest["experts"].items()}
    assert written == {"0/0": "000004", "0/1": "000004", "0/2": "000002", "0/3": "000002"}
    assert manifest["consistent"]
    options = CheckpointOptions(2, 2, full_every=4)
    interrupted(text, tmp_path / "full", stop_at=4, unlock=unlock, checkpoint=options)
    manifest = files.read_manifest(tmp_path / "full" / "checkpoints", "manifest-000004.json")
    assert all("000004" in entry["file"] for entry in manifest["experts"].values())


def test_parts_of_different_steps_are_not_resumed_by_accident(text, reference, tmp_path) -> None:
    """Shared parameters every step, experts every second: resume takes the last whole state."""
    options = CheckpointOptions(shared_every=1, experts_every=2, keep=9)
    interrupted(text, tmp_path, stop_at=3, checkpoint=options, valid_every=0)
    folder = tmp_path / "checkpoints"
    consistent = {n: files.read_manifest(folder, n)["consistent"] for n in files.manifests(folder)}
    assert list(consistent.values()) == [True, True, False]
    assert files.newest(folder, "consistent") == "manifest-000002.json"

    def load_mixed(heap):
        trainer = Trainer(CONFIG, heap, text)
        snapshots = Snapshots(folder, trainer)
        with pytest.raises(ValueError, match=r"^checkpoint manifest-000003.json must hold all"):
            snapshots.load("manifest-000003.json")
        snapshots.load("manifest-000003.json", allow_mixed=True)
        return trainer.state.step

    assert run_ranks(1, load_mixed) == [3]


def test_resume_from_a_named_checkpoint(text, reference, tmp_path) -> None:
    """An older one, although the newest is damaged; what came later is forgotten."""
    options = CheckpointOptions(1, 1, keep=9)
    interrupted(text, tmp_path, stop_at=3, checkpoint=options)
    folder = tmp_path / "checkpoints"
    (folder / "manifest-000003.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"^checkpoint manifest manifest-000003.json must be whole"
    ):
        run_ranks(1, lambda heap: train(CONFIG, heap, text, tmp_path, resume=True))
    name = "manifest-000001.json"
    rest = run_ranks(1, lambda heap: train(CONFIG, heap, text, tmp_path, resume=name))[0]
    assert loss_bits(rest) == reference[1:]
    assert files.newest(folder, "consistent") == "manifest-000004.json"
    with pytest.raises(ValueError, match=r"^checkpoint must be named like"):
        run_ranks(1, lambda heap: train(CONFIG, heap, text, tmp_path, resume="../x"))


def test_another_model_or_text_is_refused(text, saved_run, tmp_path) -> None:
    shutil.copytree(saved_run, tmp_path / "run")
    other = replace(CONFIG, model=replace(TINY, hidden=32))
    with pytest.raises(ValueError, match=r"must be of the same model \(hidden\), got 16 there, 32"):
        run_ranks(1, lambda heap: train(other, heap, text, tmp_path / "run", resume=True))
    for field in ("seed", "batch"):
        other = replace(CONFIG, **{field: 8})
        with pytest.raises(ValueError, match=f"must be of the same {field}, got . there, 8 here"):
            run_ranks(1, lambda heap: train(other, heap, text, tmp_path / "run", resume=True))  # noqa: B023
    book = tmp_path / "book.txt"
    book.write_bytes(b"to be or not to be, that is the question\n" * 200)
    with pytest.raises(ValueError, match="must be of the same text"):
        run_ranks(1, lambda h: train(CONFIG, h, load_text(book), tmp_path / "run", resume=True))


def test_a_new_run_takes_no_used_folder(text, saved_run, tmp_path) -> None:
    """Two runs in one folder would be neither; nothing of the old one is touched."""
    shutil.copytree(saved_run, tmp_path / "run")
    before = contents(tmp_path / "run")
    for ranks in (1, 2):
        with pytest.raises(
            ValueError, match=r"^run_dir must be new or empty .* a run saved at step 2"
        ):
            run_ranks(ranks, lambda heap: train(CONFIG, heap, text, tmp_path / "run"))
    assert contents(tmp_path / "run") == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"^run_dir must be new or empty .* with files"):
        run_ranks(1, lambda heap: train(CONFIG, heap, text, tmp_path))
    with pytest.raises(ValueError, match=r"^run_dir must be a folder"):
        run_ranks(1, lambda heap: train(CONFIG, heap, text, tmp_path / "notes.txt"))


@pytest.mark.parametrize("changes", [{}, {"seed": 5}], ids=["same", "refused"])
def test_a_resume_that_does_nothing_writes_nothing(changes, text, saved_run, tmp_path) -> None:
    shutil.copytree(saved_run, tmp_path / "run")
    before = contents(tmp_path / "run")
    config = replace(CONFIG, steps=2, **changes)
    resume = lambda heap: train(config, heap, text, tmp_path / "run", resume=True)  # noqa: E731
    if changes:
        with pytest.raises(ValueError, match="must be of the same seed"):
            run_ranks(1, resume)
    else:
        assert run_ranks(1, resume) == [[]]
    assert contents(tmp_path / "run") == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def no_step(self: Trainer) -> dict:
    raise AssertionError("a step was run")


def test_what_would_fail_later_is_refused_before_the_first_step(
    text, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Trainer, "step", no_step)
    short = replace(text, valid=text.valid[:17])
    replays = replace(CONFIG, model=replace(TINY, router=RouterConfig("replay")), steps=1)
    routes = [(np.full((64, 2), 4, np.int32), np.zeros((64, 2), np.float32))]
    cases = [
        ("record_to must end in .npz", {"record_to": tmp_path / "routes"}),
        ("output must lie in a folder", {"record_to": tmp_path / "gone" / "routes.npz"}),
        ("text must be longer than sequence", {"text": short}),
        ("replay must be given", {"config": replays}),
        (r"route file must choose experts -1\.\.3", {"config": replays, "replay": routes}),
        (
            r"route file must hold \(64, 2\) routes",
            {"config": replays, "replay": [(ids[:9], weights[:9]) for ids, weights in routes]},
        ),
    ]
    for message, changes in cases:
        options = {"config": CONFIG, "text": text, **changes}
        with pytest.raises(ValueError, match=message):
            run_ranks(1, lambda heap: train(heap=heap, **options))  # noqa: B023


def test_a_run_without_safetensors_stops_before_the_first_step(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Trainer, "step", no_step)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(
        RuntimeError, match=r"safetensors, which is not installed: pip install .*train"
    ):
        run_ranks(1, lambda heap: train(CONFIG, heap, text, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


def test_old_checkpoints_are_pruned_with_their_files(text, tmp_path) -> None:
    options = CheckpointOptions(1, 1, keep=1)
    interrupted(text, tmp_path, stop_at=4, checkpoint=options, valid_every=0)
    folder = tmp_path / "checkpoints"
    assert files.manifests(folder) == ["manifest-000004.json"]
    used = set(files.files_of([files.read_manifest(folder, "manifest-000004.json")]))
    assert {p.name for p in folder.glob("*.safetensors")} == used
    assert files.pointed(folder, "latest") == "manifest-000004.json"


# --------------------------------------------------------------------------- alarms, actions

ACTIVE = replace(
    CONFIG,
    model=replace(TINY, arithmetic="fast", router=RouterConfig(options=RoutingOptions(1))),
    steps=12,
    balance=BalanceOptions(0.05),
    capacity=None,
    unlock=None,
    valid_every=0,
)


def test_a_provoked_collapse_is_seen_and_answered(text, tmp_path) -> None:
    config = replace(
        ACTIVE,
        collapse=CollapseOptions(4, strength=9.0),
        actions=ActionOptions(raise_aux=True),
    )
    records = run_ranks(1, lambda heap: train(config, heap, text, tmp_path))[0]
    assert not any("entropy" in a for r in records[:4] for a in r["alarms"])
    assert records[4]["layers"][0]["load"] == [64, 0, 0, 0]
    assert any("entropy 0.000" in a for a in records[4]["alarms"])
    assert records[4]["actions"] == ["auxiliary coefficient 0.05 -> 0.15"]
    assert records[5]["aux_coefficient"] == pytest.approx(0.15)
    assert [e["kind"] for e in events(records)][:2] == ["alarm", "action"]
    summary = report_run(tmp_path)
    assert summary["layers"][0]["entropy_min"] == 0
    assert Path(summary["picture"]).stat().st_size > 10_000


def damaged_run(
    text: ByteText, run_dir: Path, config: TrainConfig, factor: float = 64, ranks: int = 1
) -> list[dict]:
    """A run whose shared weights are blown up before step 6, as a fault of memory would."""
    original = Trainer.step

    def step(self: Trainer) -> dict:
        if self.state.step == 6 and self.state.salt == 0:
            values = self.parameters.values
            self.parameters.values = {k: v * np.float32(factor) for k, v in values.items()}
            self.parameters.master = self.parameters.master * np.float32(factor)
        return original(self)

    Trainer.step = step  # type: ignore[method-assign]
    try:
        return run_ranks(ranks, lambda heap: train(config, heap, text, run_dir))[0]
    finally:
        Trainer.step = original  # type: ignore[method-assign]


def test_a_bad_loss_rolls_back_to_the_last_good_checkpoint(text, tmp_path) -> None:
    actions = ActionOptions(rollback_after=2)
    config = replace(ACTIVE, actions=actions, monitor=MonitorOptions(entropy_share=0.0))
    records = damaged_run(text, tmp_path / "on", config)
    back = [r for r in records if "rolled_back_to" in r]
    assert [(r["step"], r["rolled_back_to"]) for r in back] == [(7, 6)]
    assert records[6]["loss"] > 2 * records[5]["loss"]  # the damage
    after = records[records.index(back[0]) + 1 :]
    assert [r["step"] for r in after] == list(range(6, 12))
    assert max(r["loss"] for r in after) < 1.2 * records[5]["loss"]
    off = damaged_run(text, tmp_path / "off", replace(config, actions=ActionOptions()))
    assert off[-1]["loss"] > 2 * records[-1]["loss"]  # without the action it stays bad


def test_nan_logits_end_the_run_or_roll_it_back(text, tmp_path) -> None:
    """On two ranks: both hear of it, whichever rank's tokens were hit."""
    with pytest.raises(ValueError, match=r"^logits must not be NaN .* in layer 0 at step 6"):
        damaged_run(text, tmp_path / "off", ACTIVE, np.nan, ranks=2)
    config = replace(ACTIVE, actions=ActionOptions(rollback_after=1))
    records = damaged_run(text, tmp_path / "on", config, np.nan, ranks=2)
    assert [r["rolled_back_to"] for r in records if "rolled_back_to" in r] == [6]
    assert records[-1]["step"] == 11 and np.isfinite(records[-1]["loss"])


def test_an_outlier_gradient_is_clipped(text) -> None:
    """With a limit of half a median most experts are outliers: their norms come down to it."""
    monitor = MonitorOptions(outlier=0.5)
    runs = {}
    for clip in (False, True):
        config = replace(
            ACTIVE, steps=1, monitor=monitor, actions=ActionOptions(clip_outliers=clip)
        )
        runs[clip] = run(config, text)[0]["layers"][0]
    raw = np.array(runs[True]["gradient_norms_raw"])
    bound = np.sort(raw[raw > 0])[(np.count_nonzero(raw) - 1) // 2] * 0.5
    np.testing.assert_allclose(runs[True]["gradient_norms"], np.minimum(raw, bound), rtol=1e-6)
    np.testing.assert_array_equal(runs[False]["gradient_norms"], raw)


def test_new_experts_start_as_a_copy_of_the_most_used(text) -> None:
    """Unlocked on another rank than their source."""

    def rank(heap, init):
        config = replace(CONFIG, unlock=UnlockOptions(2, 2, 1, init=init), steps=2)
        trainer = Trainer(config, heap, text)
        record = trainer.step()
        state = trainer.parameters.experts[0]
        load = record["layers"][0]["load"]
        return state.ids.tolist(), state.master["gate"].copy(), int(np.argmax(load))

    for init in ("copy", "fresh"):
        parts = run_ranks(4, lambda heap: rank(heap, init))  # noqa: B023
        gate = np.concatenate([master for _, master, _ in parts])
        source = parts[0][2]
        assert source < 2
        for new in (2, 3):
            assert (gate[new] == gate[source]).all() == (init == "copy")


# --------------------------------------------------------------------------- capacity


def test_dropped_routes_are_counted_and_independent_of_ranks(text) -> None:
    options = CapacityOptions(start=0.5, low=0.5, high=0.5)
    config = replace(CONFIG, capacity=options, unlock=None, steps=1, valid_every=0)
    layers = [
        run_ranks(r, lambda heap: train(config, heap, text))[0][0]["layers"][0] for r in (1, 4)
    ]
    load, dropped = np.array(layers[0]["load"]), layers[0]["dropped"]
    assert dropped == np.maximum(load - 16, 0).sum()  # 128 routes, 4 experts, factor 0.5
    assert dropped == layers[1]["dropped"] and layers[0]["load"] == layers[1]["load"]


# --------------------------------------------------------------------------- data


def test_batches_are_fixed_and_validation_is_held_out(text) -> None:
    batch = train_batch(text, "0/0/batch0", 4, 16)
    np.testing.assert_array_equal(batch, train_batch(text, "0/0/batch0", 4, 16))
    assert batch.shape == (4, 17) and (batch != train_batch(text, "0/0/batch1", 4, 16)).any()
    assert len(text.valid) == (len(text.train) + len(text.valid)) // 10
    first, last = valid_batches(text, 2, 16, 3)[0][0], valid_batches(text, 2, 16, 3)[-1][-1]
    np.testing.assert_array_equal(first, text.valid[:17])
    np.testing.assert_array_equal(last, text.valid[-17:])


def test_config_survives_json() -> None:
    values = json.loads(json.dumps(CONFIG.to_json()))
    assert TrainConfig.from_json(values).to_json() == CONFIG.to_json()
    litter = replace(CONFIG, model=replace(TINY, router=ROUTERS["litter"]))
    assert TrainConfig.from_json(json.loads(json.dumps(litter.to_json()))).model.router.litter


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(sequence=24), "sequence"),
        (dict(num_heads=3), "hidden"),
        (dict(ffn="sparse"), "ffn"),
        (dict(tensor_parallel=True), "tensor_parallel"),
    ],
)
def test_model_options_are_refused_by_name(change: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        replace(TINY, **change)


# --------------------------------------------------------------------------- command line

SMALL = (
    "--steps 3 --batch 4 --sequence 16 --hidden 16 --layers 1 --heads 2 --intermediate 16 "
    "--experts 4 --valid-every 0 --json"
)


def run_command(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*launcher, sys.executable, "-m", "mok_ref", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
    )


def command_bits(done: subprocess.CompletedProcess) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss_bits"] for line in done.stdout.splitlines()]


@pytest.mark.mpi
def test_processes_under_mpiexec_give_the_bits_of_one_rank() -> None:
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip('needs mpiexec: pip install ".[mpi]"')
    one = command_bits(run_command("train", *SMALL.split()))
    four = command_bits(run_command("train", *SMALL.split(), launcher=(mpiexec, "-n", "4")))
    assert one == four and len(one) == 3


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--unlock", "2:x"), "unlock"),
        (("--router", "hash"), "--router must be one of"),
        (("--hidden", "15"), "hidden must be divisible by --heads"),
        (("--sequence", "30"), "got sequence=30"),
        (("--checkpoint-every", "5"), "--checkpoint-every must go with --run-dir"),
        (("--rollback-after", "2"), "--rollback-after must go with --run-dir"),
        (("--drop", "score"), "--drop must go with --capacity"),
        (("--seed", "-1"), "--seed must be at least 0"),
        (("--ranks", "0"), "--ranks must be at least 1"),
        (("--valid-every", "-1"), "--valid-every must be at least 0"),
        (("--aux", "nan"), "--aux must be finite"),
        (("--shared", "-3"), "--shared must be at least 0"),
        (("--capacity", "0"), "--capacity must be finite and above 0"),
        (("--collapse", "1:nan"), "finite strength"),
        (("--config", __file__), "--config must be the JSON of a run"),
        (("--save-routes", "routes"), "--save-routes must end in .npz"),
        (("--collapse", "soon"), "collapse"),
        (("--resume",), "resume"),
        (("--run-dir", "/nonexistent", "--resume"), "config.json"),
        (("--steps", "0"), "steps"),
    ],
)
def test_command_line_refuses_in_one_line(words, name, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *SMALL.split(), *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and name in error
    assert "self." not in error


def command(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_resuming_a_finished_run_says_so(tmp_path, capsys) -> None:
    where = ("--run-dir", str(tmp_path / "run"))
    options = [word for word in SMALL.split() if word != "--json"]
    status, out, _ = command(capsys, *options, *where)
    assert status == 0 and "step 1, loss" in out and "nats per byte" in out
    status, _, err = command(capsys, *options, *where)
    assert status == 2 and "--run-dir must be new or empty unless --resume is given" in err
    for steps in ("3", "2"):
        status, out, _ = command(capsys, *where, "--resume", "--steps", steps)
        assert status == 0 and f"already at step 3, --steps {steps} asks for no more" in out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["steps"] == 3
    status, _, err = command(capsys, *where, "--resume", "--steps", "5", "--seed", "5")
    assert status == 2 and "must be of the same seed, got 0 there, 5 here" in err
    status, out, _ = command(capsys, *where, "--resume", "--steps", "4", "--json")
    assert status == 0 and [json.loads(line)["step"] for line in out.splitlines()] == [3]


def test_unknown_keys_of_a_config_are_named_with_the_known_ones(tmp_path, capsys) -> None:
    values = CONFIG.to_json()
    for place in (values, values["optimizer"], values["model"]):
        place["colour"] = "red"
        (tmp_path / "c.json").write_text(json.dumps(values))
        status, _, err = command(capsys, "--config", str(tmp_path / "c.json"))
        del place["colour"]
        known = "rate" if place is values["optimizer"] else "num_experts"
        assert status == 2 and "colour" in err and (place is values or known in err)


def test_the_picture_names_its_axes_and_survives_a_roll_back(tmp_path, monkeypatch) -> None:
    """Every axis has a name; of a step run twice the heat map shows the second time."""
    pytest.importorskip("matplotlib")
    import mok_ref.plotting
    from mok_ref.training.report import draw_run

    figures = []
    monkeypatch.setattr(mok_ref.plotting, "save", lambda figure, path: figures.append(figure))
    steps, loads = [0, 1, 2, 1, 2], [[4, 0], [4, 0], [4, 0], [1, 3], [2, 2]]
    records = [
        {
            "step": step, "loss": 1.0, "alarms": [], "actions": [], "aux_coefficient": 0.1,
            "num_open": 2, "layers": [{"entropy": 0.5, "overflow": 0.0, "load": load}],
        }
        for step, load in zip(steps, loads)
    ]  # fmt: skip
    draw_run(tmp_path / "report.png", records, entropy_share=0.25)
    loss, entropy, heat, controls, scale = figures[0].axes
    assert all(axes.get_ylabel() for axes in (loss, entropy, heat, controls, scale))
    assert controls.get_xlabel() == "step" and "0.25" in entropy.get_title()
    assert heat.images[0].get_array().tolist() == [[1.0, 0.25, 0.5], [0.0, 0.75, 0.5]]
    assert all(tick == int(tick) for tick in controls.get_xticks())


def test_help_shows_every_default(capsys) -> None:
    status, out, _ = command(capsys, "--help")
    assert status == 0
    for option in ("--steps", "--batch", "--hidden", "--rate", "--valid-every", "--aux"):
        after = out.split(f"{option} ")[1]
        assert "default" in after[: after.index("  --")]


# --------------------------------------------------------------------------- effects


def test_litters_touch_fewer_ranks(text) -> None:
    """8 experts on 4 ranks, 2 per token: one litter is one rank."""
    plain = RoutingOptions(2, renormalize=True)
    touched = {}
    for name, router in (
        ("top-k", RouterConfig(options=plain)),
        ("litter", RouterConfig("litter", plain, LitterOptions(2, 4, 1, renormalize=True))),
    ):
        model = replace(TINY, num_experts=8, router=router, arithmetic="fast")
        config = replace(CONFIG, model=model, steps=1, unlock=None, capacity=None, valid_every=0)
        touched[name] = run(config, text, 4)[0]["layers"][0]["ranks_touched"]
    assert touched["litter"] == 1 and touched["top-k"] > 1.5


def test_values_are_the_rounded_masters(text) -> None:
    """bf16 values after a step are those of the float32 masters, and differ from before."""
    trainers = run_ranks(1, lambda heap: Trainer(CONFIG, heap, text))
    trainer = trainers[0]
    before = trainer.parameters.values["unembed"].copy()
    trainer.step()
    whole = trainer.parameters.unflatten(to_bf16(trainer.parameters.master))
    np.testing.assert_array_equal(trainer.parameters.values["unembed"], whole["unembed"])
    assert (before != whole["unembed"]).any()
