"""A trainer's whole state into a checkpoint directory and back, on any number of ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.training import checkpoint as files
from mok_ref.training.capacity import CapacityState
from mok_ref.training.monitors import MonitorState
from mok_ref.training.parameters import PARTS, ExpertState
from mok_ref.training.trainer import RunState, TrainConfig, Trainer
from mok_ref.training.unlocking import UnlockState

SHA_BYTES = 32


class Snapshots:
    """Checkpoints of one run. Every rank has one; rank 0 writes shared files and manifests."""

    def __init__(self, directory: Path, trainer: Trainer) -> None:
        self.directory, self.trainer = directory, trainer
        self.heap, self.exchange = trainer.heap, trainer.exchange
        self.experts: dict[str, dict[str, Any]] = {}  # "layer/expert" -> file, sha256, updates
        self.shared: dict[str, Any] | None = None
        if self.heap.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
        self.heap.barrier()

    # ----------------------------------------------------------------------- saving

    def save(self, shared: bool, experts: bool, full: bool, good: bool) -> str:
        """Write what is due; collective. Returns the manifest's name.

        A manifest is `consistent` when all its files hold the state of its step; only then can a
        run be resumed with the same bits. It is `good` when no alarm was raised at its step.
        """
        state = self.trainer.state
        if shared or self.shared is None:
            self._save_shared()
        if experts or not self.experts:
            self._save_experts(full)
        assert self.shared is not None
        current = self._expert_updates()
        manifest = {
            "format": files.FORMAT,
            "step": state.step,
            "full": full,
            "good": good,
            "consistent": self.shared["step"] == state.step
            and all(self.experts[key]["updates"] == n for key, n in current.items()),
            "shared": self.shared,
            "experts": self.experts,
            "state": state_to_json(state),
            "config": self.trainer.config.to_json(),
            "text_sha256": self.trainer.text.sha256,
        }
        if self.heap.rank == 0:
            files.write_manifest(self.directory, manifest)
            files.prune(self.directory, self.trainer.config.checkpoint.keep)
        self.heap.barrier()
        return files.manifest_name(state.step)

    def mark_best(self) -> None:
        """best.json -> the manifest just written; collective."""
        if self.heap.rank == 0:
            files.point(self.directory, "best", files.manifest_name(self.trainer.state.step))
        self.heap.barrier()

    def _save_shared(self) -> None:
        """Replicated masters and moments, gathered from the shards; written by rank 0."""
        parameters, state = self.trainer.parameters, self.trainer.state
        gather = lambda name, shard: self.exchange.gather_shards(  # noqa: E731
            f"save_{name}", shard, parameters.bounds
        )
        tensors = {"powers": parameters.moments.powers}
        whole = {
            "master": gather("master", parameters.master),
            "m": gather("m", parameters.moments.m),
            "v": gather("v", parameters.moments.v),
        }
        for kind, flat in whole.items():
            for name, value in parameters.unflatten(flat).items():
                tensors[f"{kind}/{name}"] = value
        for layer, capacity in enumerate(state.capacity):
            tensors[f"capacity/factor{layer}"] = capacity.factor
            tensors[f"capacity/overflow{layer}"] = capacity.overflow
            tensors[f"choice_bias{layer}"] = state.choice_bias[layer]
        name = files.shared_name(state.step)
        digest = np.zeros(SHA_BYTES, np.uint8)
        if self.heap.rank == 0:
            sha = files.write_tensors(self.directory / name, tensors)
            digest = np.frombuffer(bytes.fromhex(sha), np.uint8)
        digest = self.exchange.broadcast("save_shared_sha", digest, 0)
        self.shared = {"file": name, "sha256": digest.tobytes().hex(), "step": state.step}

    def _save_experts(self, full: bool) -> None:
        """Every owner writes its experts that changed since their last file (all, if `full`)."""
        parameters, step = self.trainer.parameters, self.trainer.state.step
        model = self.trainer.config.model
        updates = self._expert_updates()
        changed = [
            key
            for key, n in updates.items()
            if full or key not in self.experts or self.experts[key]["updates"] != n
        ]
        digests = np.zeros((model.num_layers * model.num_experts, SHA_BYTES), np.uint8)
        for layer, local, expert in parameters.owned_experts():
            if f"{layer}/{expert}" not in changed:
                continue
            name = files.expert_name(layer, expert, step)
            tensors = expert_tensors(parameters.experts[layer], local)
            sha = files.write_tensors(self.directory / name, tensors)
            row = layer * model.num_experts + expert
            digests[row] = np.frombuffer(bytes.fromhex(sha), np.uint8)
        digests = self.exchange.sum_integers("save_expert_sha", digests)  # one writer per row
        for key in changed:
            layer, expert = (int(part) for part in key.split("/"))
            self.experts[key] = {
                "file": files.expert_name(layer, expert, step),
                "sha256": digests[layer * model.num_experts + expert].tobytes().hex(),
                "updates": updates[key],
            }

    def _expert_updates(self) -> dict[str, int]:
        """Number of updates of every expert of the model, from the owners."""
        parameters, model = self.trainer.parameters, self.trainer.config.model
        if not parameters.experts:
            return {}
        mine = np.zeros((model.num_layers, model.num_experts), np.int64)
        for layer, local, expert in parameters.owned_experts():
            mine[layer, expert] = parameters.experts[layer].updates[local]
        total = self.exchange.sum_integers("expert_updates", mine)
        return {
            f"{layer}/{expert}": int(total[layer, expert])
            for layer in range(model.num_layers)
            for expert in range(model.num_experts)
        }

    # ----------------------------------------------------------------------- loading

    def load(self, name: str, allow_mixed: bool = False) -> None:
        """Restore a checkpoint; collective. Every file is checked against the manifest.

        Raises: ValueError naming a missing, truncated or altered file, a manifest whose parts are
        of different steps (unless allow_mixed), or one of another model, seed, batch or text.
        """
        manifest = files.read_manifest(self.directory, name)
        self._check(name, manifest, allow_mixed)
        self.shared, self.experts = manifest["shared"], manifest["experts"]
        shared = files.read_tensors(
            self.directory, manifest["shared"]["file"], manifest["shared"]["sha256"]
        )
        parameters = self.trainer.parameters
        flat = {
            kind: parameters.flatten({n: shared[f"{kind}/{n}"] for n in parameters.shapes})
            for kind in ("master", "m", "v")
        }
        parameters.set_replicated(flat["master"], flat["m"], flat["v"], shared["powers"])
        for layer, local, expert in parameters.owned_experts():
            entry = self.experts[f"{layer}/{expert}"]
            tensors = files.read_tensors(self.directory, entry["file"], entry["sha256"])
            restore_expert(parameters.experts[layer], local, tensors)
            parameters.experts[layer].updates[local] = entry["updates"]
        self.trainer.state = state_from_json(manifest["state"], shared)
        self.trainer.refresh_values()

    def _check(self, name: str, manifest: dict[str, Any], allow_mixed: bool) -> None:
        if not manifest["consistent"] and not allow_mixed:
            raise ValueError(
                f"checkpoint {name} must hold all parts of step {manifest['step']}, "
                f"got shared parameters of step {manifest['shared']['step']} or older experts"
            )
        other = differences(manifest["config"], self.trainer.config)
        if other:
            what, there, here = other[0]
            raise ValueError(
                f"checkpoint {name} must be of the same {what}, got {there} there, {here} here"
            )
        if manifest["text_sha256"] != self.trainer.text.sha256:
            raise ValueError(
                f"checkpoint {name} must be of the same text, got SHA-256 {manifest['text_sha256']}"
            )


MAY_CHANGE = ("recompute", "minibatch", "macrobatch")  # of the model, on resume: same bits


def differences(stored: dict[str, Any], config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """(field, stored, here) of everything a resumed run must keep and `config` has otherwise.

    Rates, balance, actions and frequencies may be changed on the way.
    """
    here = json.loads(json.dumps(config.to_json()))  # tuples as a file has them
    both = [(name, stored[name], here[name]) for name in ("seed", "batch")]
    both += [
        (f"model ({name})", stored["model"].get(name), value)
        for name, value in here["model"].items()
        if name not in MAY_CHANGE
    ]
    return [entry for entry in both if entry[1] != entry[2]]


def expert_tensors(state: ExpertState, local: int) -> dict[str, np.ndarray]:
    """What is stored of one expert."""
    tensors: dict[str, np.ndarray] = {}
    for part in PARTS:
        moments = state.moments[part]
        tensors[f"master/{part}"] = state.master[part][local]
        tensors[f"m/{part}"], tensors[f"v/{part}"] = moments.m[local], moments.v[local]
        tensors[f"powers/{part}"] = moments.powers[:, local].ravel()
    return tensors


def restore_expert(state: ExpertState, local: int, tensors: dict[str, np.ndarray]) -> None:
    """The reverse of expert_tensors."""
    for part in PARTS:
        state.master[part][local] = tensors[f"master/{part}"]
        moments = state.moments[part]
        moments.m[local], moments.v[local] = tensors[f"m/{part}"], tensors[f"v/{part}"]
        moments.powers[:, local] = tensors[f"powers/{part}"].reshape(2, 1, 1)


def state_to_json(state: RunState) -> dict[str, Any]:
    """Everything but the arrays. JSON keeps Python floats exactly."""
    return {
        "step": state.step,
        "salt": state.salt,
        "unlock": asdict(state.unlock),
        "monitor": state.monitor.to_json(),
        "best_valid": state.best_valid,
    }


def state_from_json(values: dict[str, Any], shared: dict[str, np.ndarray]) -> RunState:
    """The reverse of state_to_json, with the arrays of the shared file."""
    layers = range(len(values["monitor"]["idle_steps"]))
    return RunState(
        step=values["step"],
        salt=values["salt"],
        unlock=UnlockState(**values["unlock"]),
        monitor=MonitorState(**values["monitor"]),
        capacity=[
            CapacityState(shared[f"capacity/factor{i}"], shared[f"capacity/overflow{i}"])
            for i in layers
        ],
        choice_bias=[shared[f"choice_bias{i}"] for i in layers],
        best_valid=values["best_valid"],
    )
