"""A whole run: steps, validation, checkpoints, roll-backs, the record on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mok_ref.casefile import check_writable
from mok_ref.training import checkpoint as files
from mok_ref.training.data import ByteText
from mok_ref.training.monitors import is_collapse
from mok_ref.training.snapshot import Snapshots
from mok_ref.training.trainer import Routes, TrainConfig, Trainer

Progress = Callable[[dict[str, Any]], None]


def train(
    config: TrainConfig,
    heap: Any,
    text: ByteText,
    run_dir: Path | None = None,
    resume: bool | str = False,
    stop_at: int | None = None,
    progress: Progress | None = None,
    replay: Routes | None = None,
    record_to: Path | None = None,
) -> list[dict[str, Any]]:
    """Train on this rank of `heap`; every rank calls it. Returns the records of all steps run.

    run_dir    where config.json, metrics.jsonl and checkpoints/ go: a new or empty folder, unless
               resuming; None: nothing is written
    resume     continue from the newest checkpoint whose parts are all of one step, or from the
               one named ("best" or a manifest's name); later ones are then forgotten. Model, seed,
               batch and text must be the checkpoint's; nothing is written if no step is left
    stop_at    stop before this step (a run killed on purpose, for tests)
    progress   called with each record, on rank 0
    record_to  write the routes of all steps to this file, for a replay

    Whatever would end the run in the middle is looked for before the first step.
    Raises: ValueError naming the argument; RuntimeError without safetensors.
    """
    check_before_start(config, text, run_dir, bool(resume), replay, record_to)
    heap.barrier()  # every rank has looked before any writes
    trainer = Trainer(config, heap, text, replay)
    trainer.record_routes = record_to is not None
    snapshots = None if run_dir is None else Snapshots(run_dir / "checkpoints", trainer)
    log = RunLog(run_dir, heap.rank)
    if resume:
        resume_run(snapshots, resume if isinstance(resume, str) else None)
    records: list[dict[str, Any]] = []
    last = config.steps if stop_at is None else min(stop_at, config.steps)
    if trainer.state.step < last:
        log.start(config, text, trainer.state.step)
    while trainer.state.step < last:
        record = trainer.step()
        finish_step(trainer, snapshots, record)
        log.write(record)
        records.append(record)
        if progress is not None and heap.rank == 0:
            progress(record)
    if record_to is not None and records and heap.rank == 0:
        trainer.save_routes(record_to)
    heap.barrier()
    trainer.close()
    return records


def check_before_start(
    config: TrainConfig,
    text: ByteText,
    run_dir: Path | None,
    resume: bool,
    replay: Routes | None,
    record_to: Path | None,
) -> None:
    """Refuse what would fail or do harm only after some steps. No rank writes before it is done."""
    if run_dir is None and resume:
        raise ValueError("run_dir must be given to resume, got None")
    if run_dir is not None:
        files.safetensors_numpy()
        check_run_dir(run_dir, resume)
    if record_to is not None:
        if record_to.suffix != ".npz":
            raise ValueError(f"record_to must end in .npz, got {str(record_to)!r}")
        check_writable(record_to)
    sequence = config.model.sequence
    if len(text.train) <= sequence or (config.valid_every and len(text.valid) <= sequence + 1):
        raise ValueError(
            f"text must be longer than sequence in both its parts, got {sequence=}, "
            f"{len(text.train)} bytes to train on and {len(text.valid)} held out"
        )
    if config.model.router.kind == "replay":
        check_replay(config, replay)


def check_run_dir(run_dir: Path, resume: bool) -> None:
    """A new run takes a new or an empty folder, so that two runs are never mixed."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run_dir must be a folder, got the file {str(run_dir)!r}")
    if not resume and run_dir.is_dir() and any(run_dir.iterdir()):
        manifests = files.manifests(run_dir / "checkpoints")
        held = f"a run saved at step {files.step_of(manifests[-1])}" if manifests else "files"
        raise ValueError(
            f"run_dir must be new or empty unless resume is given, got {str(run_dir)!r} with {held}"
        )


def check_replay(config: TrainConfig, replay: Routes | None) -> None:
    """Routes for every step and layer, of this batch and these experts."""
    if replay is None:
        raise ValueError("replay must be given for the router kind 'replay', got None")
    calls = config.steps * config.model.num_layers
    if len(replay) < calls:
        raise ValueError(f"route file must have {calls} calls, got {len(replay)}")
    tokens, top_k = config.batch * config.model.sequence, config.model.router.num_slots
    experts = config.model.num_experts
    for call, (ids, weights) in enumerate(replay[:calls]):
        if ids.shape != (tokens, top_k) or weights.shape != ids.shape:
            raise ValueError(
                f"route file must hold ({tokens}, {top_k}) routes per call, got {ids.shape} "
                f"and {weights.shape} in call {call}"
            )
        if ids.min() < -1 or ids.max() >= experts:
            raise ValueError(
                f"route file must choose experts -1..{experts - 1}, got {ids.min()}..{ids.max()} "
                f"in call {call}"
            )


def finish_step(trainer: Trainer, snapshots: Snapshots | None, record: dict[str, Any]) -> None:
    """Validation, checkpoint and, if an action asks for it, the roll-back."""
    config, state = trainer.config, trainer.state
    done, is_best = state.step, False
    due = config.valid_every and (done % config.valid_every == 0 or done == config.steps)
    if due and config.model.router.kind != "replay":  # a file has routes for training only
        valid = float(trainer.validate())
        record["valid_loss"] = valid
        is_best = valid < state.best_valid
        state.best_valid = min(valid, state.best_valid)
    if record["roll_back"] and snapshots is not None:
        roll_back(snapshots, record)
        return
    if snapshots is None:
        return
    shared, experts, full = config.checkpoint.due(done)
    at_end = done == config.steps
    if shared or experts or is_best or at_end:
        everything = is_best or at_end
        good = not is_collapse(record["alarms"])
        record["checkpoint"] = snapshots.save(
            shared or everything, experts or everything, full, good
        )
        if is_best:
            snapshots.mark_best()


def roll_back(snapshots: Snapshots, record: dict[str, Any]) -> None:
    """Back to the last good checkpoint; the monitor keeps what it learned, the data are new."""
    name = files.newest(snapshots.directory, "good")
    snapshots.heap.barrier()  # everybody has looked before anybody writes again
    if name is None:
        record["actions"].append("no good checkpoint to roll back to")
        return
    before = snapshots.trainer.state
    snapshots.load(name)
    if snapshots.heap.rank == 0:
        files.drop_after(snapshots.directory, snapshots.trainer.state.step)
    snapshots.heap.barrier()
    after = snapshots.trainer.state
    after.salt = before.salt + 1
    after.monitor.rollbacks, after.monitor.aux = before.monitor.rollbacks, before.monitor.aux
    record["actions"].append(f"rolled back to step {after.step}")
    record["rolled_back_to"] = after.step


def resume_run(snapshots: Snapshots | None, wanted: str | None) -> None:
    """Load the newest consistent checkpoint, or the one named. Raises ValueError without one."""
    if snapshots is None:
        raise ValueError("run_dir must be given to resume, got None")
    folder = snapshots.directory
    name = files.newest(folder, "consistent") if wanted is None else wanted
    if wanted == "best":
        name = files.pointed(folder, "best")
    if name is None:
        raise ValueError(f"run_dir must hold a checkpoint to resume, found none in {folder}")
    step = files.step_of(name)
    snapshots.load(name)
    if wanted is not None and snapshots.heap.rank == 0:
        files.drop_after(folder, step)
    snapshots.heap.barrier()


class RunLog:
    """config.json and metrics.jsonl of a run; rank 0 writes."""

    def __init__(self, run_dir: Path | None, rank: int) -> None:
        self.path = run_dir if rank == 0 else None

    def start(self, config: TrainConfig, text: ByteText, step: int) -> None:
        """A new file, or, when resuming at `step`, the old one without later records."""
        if self.path is None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        about = {"config": config.to_json(), "text": text.source, "text_sha256": text.sha256}
        files.write_atomic(self.path / "config.json", json.dumps(about, indent=1).encode())
        kept = "".join(
            json.dumps(record) + "\n"
            for record in (read_records(self.path) if step else [])
            if record["step"] < step
        )
        files.write_atomic(self.path / "metrics.jsonl", kept.encode())

    def write(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            with open(self.path / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """All whole lines of metrics.jsonl (a killed run may leave half a line at the end)."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
