"""A whole run: steps, validation, checkpoints, roll-backs, the record on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

    run_dir    where config.json, metrics.jsonl and checkpoints/ go; None: nothing is written
    resume     continue from the newest checkpoint whose parts are all of one step, or from the
               one named ("best" or a manifest's name); later ones are then forgotten
    stop_at    stop before this step (a run killed on purpose, for tests)
    progress   called with each record, on rank 0
    record_to  write the routes of all steps to this file, for a replay
    """
    trainer = Trainer(config, heap, text, replay)
    trainer.record_routes = record_to is not None
    snapshots = None if run_dir is None else Snapshots(run_dir / "checkpoints", trainer)
    log = RunLog(run_dir, heap.rank)
    if resume:
        resume_run(snapshots, resume if isinstance(resume, str) else None)
    log.start(config, text, trainer.state.step)
    records: list[dict[str, Any]] = []
    last = config.steps if stop_at is None else min(stop_at, config.steps)
    while trainer.state.step < last:
        record = trainer.step()
        finish_step(trainer, snapshots, record)
        log.write(record)
        records.append(record)
        if progress is not None and heap.rank == 0:
            progress(record)
    if record_to is not None and heap.rank == 0:
        trainer.save_routes(record_to)
    heap.barrier()
    trainer.close()
    return records


def finish_step(trainer: Trainer, snapshots: Snapshots | None, record: dict[str, Any]) -> None:
    """Validation, checkpoint and, if an action asks for it, the roll-back."""
    config, state = trainer.config, trainer.state
    done, is_best = state.step, False
    if config.valid_every and (done % config.valid_every == 0 or done == config.steps):
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
        raise ValueError("resume needs run_dir, got None")
    folder = snapshots.directory
    name = files.newest(folder, "consistent") if wanted is None else wanted
    if wanted == "best":
        name = files.pointed(folder, "best")
    if name is None:
        raise ValueError(f"resume needs a checkpoint in {folder}, found none")
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
