"""Checkpoints made for experts: one file per expert, one for everything shared.

A checkpoint directory holds

    shared-000050.safetensors              replicated parameters, their moments, choice biases, ...
    layer0-expert003-000040.safetensors    one expert: masters, moments, powers, updates
    manifest-000050.json                   which files make up step 50, their SHA-256, the run state
    latest.json, best.json                 names of manifests

Files are written under a temporary name, flushed, then renamed; the manifest comes last, so a kill
at any moment leaves the former checkpoint whole. An expert whose weights did not change is not
written again: the manifest names its older file. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.install import install_hint

FORMAT = 1


@dataclass(frozen=True)
class CheckpointOptions:
    """How often what is written; 0 switches a kind off.

    shared_every, experts_every   steps between writes of the shared file and of changed experts
    full_every                    steps between checkpoints in which every file is written anew
    keep                          how many checkpoints stay besides best, last good and full ones
    """

    shared_every: int = 50
    experts_every: int = 50
    full_every: int = 0
    keep: int = 3

    def __post_init__(self) -> None:
        for name in ("shared_every", "experts_every", "full_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")

    def due(self, step: int) -> tuple[bool, bool, bool]:
        """(shared, experts, full) after `step` completed steps."""

        def is_due(every: int) -> bool:
            return every > 0 and step % every == 0

        full = is_due(self.full_every)
        return full or is_due(self.shared_every), full or is_due(self.experts_every), full


def safetensors_numpy() -> Any:
    """safetensors.numpy, or an error that says how to get it."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise RuntimeError(
            f"checkpoints need safetensors, which is not installed: {install_hint('train')}"
        ) from error
    return safetensors.numpy


def write_atomic(path: Path, data: bytes) -> str:
    """Write a file so that it is there whole or not at all. Returns its SHA-256."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return hashlib.sha256(data).hexdigest()


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> str:
    """One safetensors file. Returns its SHA-256."""
    contiguous = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
    return write_atomic(path, safetensors_numpy().save(contiguous))


def read_tensors(directory: Path, name: str, sha256: str) -> dict[str, np.ndarray]:
    """Read a file of a manifest; refuse it by name if it is missing, truncated or altered."""
    path = directory / name
    if Path(name).name != name:
        raise ValueError(f"checkpoint file must be inside its directory, got {name!r}")
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(
            f"checkpoint file {name} must exist in {directory}, it does not"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(f"checkpoint file {name} must have SHA-256 {sha256}, got {found}")
    return safetensors_numpy().load(data)


def shared_name(step: int) -> str:
    return f"shared-{step:06d}.safetensors"


def expert_name(layer: int, expert: int, step: int) -> str:
    return f"layer{layer}-expert{expert:03d}-{step:06d}.safetensors"


def manifest_name(step: int) -> str:
    return f"manifest-{step:06d}.json"


def step_of(name: str) -> int:
    """The step in a manifest's name. Raises ValueError for another name."""
    digits = name.removeprefix("manifest-").removesuffix(".json")
    if name != f"manifest-{digits}.json" or not digits.isdecimal():
        raise ValueError(f"checkpoint must be named like {manifest_name(50)}, got {name!r}")
    return int(digits)


def write_manifest(directory: Path, manifest: dict[str, Any]) -> str:
    """Write the manifest (its own digest included) and point latest.json at it."""
    name = manifest_name(manifest["step"])
    body = json.dumps(manifest, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    text = json.dumps({"sha256": digest, "manifest": json.loads(body)}, sort_keys=True, indent=1)
    write_atomic(directory / name, text.encode())
    point(directory, "latest", name)
    return name


def point(directory: Path, pointer: str, name: str) -> None:
    """latest.json or best.json -> a manifest."""
    write_atomic(directory / f"{pointer}.json", json.dumps({"manifest": name}).encode())


def read_manifest(directory: Path, name: str) -> dict[str, Any]:
    """Read and check a manifest; refuse it by name."""
    path = directory / name
    try:
        outer = json.loads(path.read_text())
        manifest, digest = outer["manifest"], outer["sha256"]
    except FileNotFoundError as error:
        raise ValueError(f"checkpoint manifest {name} must exist in {directory}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint manifest {name} must be whole JSON, it is not") from error
    found = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    if found != digest:
        raise ValueError(f"checkpoint manifest {name} must have SHA-256 {digest}, got {found}")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"checkpoint format must be {FORMAT}, got {manifest.get('format')!r}")
    return manifest


def pointed(directory: Path, pointer: str) -> str | None:
    """The manifest that latest.json or best.json names, None if there is none."""
    try:
        return str(json.loads((directory / f"{pointer}.json").read_text())["manifest"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{pointer}.json must name a manifest, it does not") from error


def manifests(directory: Path) -> list[str]:
    """Names of all manifests, oldest first."""
    return sorted(path.name for path in directory.glob("manifest-*.json"))


def newest(directory: Path, key: str) -> str | None:
    """The newest manifest whose `key` ("consistent" or "good") is true and which is consistent."""
    for name in reversed(manifests(directory)):
        manifest = read_manifest(directory, name)
        if manifest["consistent"] and manifest[key]:
            return name
    return None


def drop_after(directory: Path, step: int) -> None:
    """Forget checkpoints of later steps: the run goes on from `step` another way."""
    for name in manifests(directory):
        if step_of(name) > step:
            (directory / name).unlink()
    point(directory, "latest", manifest_name(step))
    best = pointed(directory, "best")
    if best is not None and not (directory / best).exists():
        (directory / "best.json").unlink()


def prune(directory: Path, keep: int) -> None:
    """Remove manifests beyond the newest `keep` (best, last good and full ones stay) and all
    data files that no remaining manifest names. A damaged manifest stops it: nothing is removed."""
    try:
        _prune(directory, keep)
    except ValueError:
        return


def _prune(directory: Path, keep: int) -> None:
    names = manifests(directory)
    stay = {*names[-keep:], pointed(directory, "best"), pointed(directory, "latest")}
    stay |= {newest(directory, "good"), newest(directory, "consistent")}
    stay |= {n for n in names if read_manifest(directory, n)["full"]}
    for name in names:
        if name not in stay:
            (directory / name).unlink()
    used = set(files_of(read_manifest(directory, n) for n in manifests(directory)))
    for path in directory.glob("*.safetensors"):
        if path.name not in used:
            path.unlink()


def files_of(all_manifests: Iterable[dict[str, Any]]) -> Iterable[str]:
    for manifest in all_manifests:
        yield manifest["shared"]["file"]
        for entry in manifest["experts"].values():
            yield entry["file"]
