"""`mok-ref tune`: measure ring and minibatch sizes on the machine at hand, keep the best.

Bits do not depend on these sizes (contract, section 6), so tuning can never change a result. What
was found is stored in one JSON file beside the compiled kernels, under a key that digests the
device and everything the best sizes depend on; `tuned` looks it up when a layer is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig

from .errors import require

SCHEMA = "mok_ref.tuning/1"
MINIBATCHES = (1024, 2048, 4096, 8192)
SLOTS = (2, 4, 8)


@dataclass(frozen=True)
class Tried:
    """One measured configuration: median milliseconds of forward and backward together."""

    minibatch: int
    macrobatch: int
    ms: float
    samples: int


def tuning_path() -> Path:
    """Beside the cubins: $MOK_REF_CACHE, else the user's cache directory."""
    from mok_ref.gpu.compiler import cache_dir

    return cache_dir() / "tuning.json"


def device_name(device: str) -> str:
    """Name under which measurements of "cpu" or "cuda" are kept."""
    if device == "cpu":
        return "cpu"
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())


def token_bucket(num_tokens: int) -> int:
    """T rounded up to a power of two: nearby batch sizes share what was measured."""
    return 1 << max(0, int(num_tokens - 1).bit_length())


def key_facts(config: MoEConfig, name: str, num_tokens: int) -> dict[str, Any]:
    """Everything the best sizes depend on."""
    return {
        "device": name,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "shared_intermediate_size": config.shared_intermediate_size,
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "ep_size": config.ep_size,
        "dtype": config.dtype,
        "arithmetic": config.arithmetic,
        "tokens": token_bucket(num_tokens),
    }


def tuning_key(config: MoEConfig, name: str, num_tokens: int) -> str:
    text = json.dumps(key_facts(config, name, num_tokens), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read_tuning(path: Path) -> dict[str, Any]:
    """All stored entries; an absent or foreign file holds none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    is_ours = isinstance(table, dict) and table.get("schema") == SCHEMA
    return dict(table["entries"]) if is_ours and isinstance(table.get("entries"), dict) else {}


def tuned(config: MoEConfig, device: str, num_tokens: int, path: Path | None = None) -> MoEConfig:
    """`config` with measured minibatch and macrobatch, where it names none and some are stored.

    Entries that are no valid sizes are ignored: a damaged cache costs speed, never a result.
    """
    if config.minibatch is not None or config.macrobatch is not None:
        return config
    path = path or tuning_path()
    if not path.is_file():
        return config
    entry = read_tuning(path).get(tuning_key(config, device_name(device), num_tokens))
    if not isinstance(entry, dict):
        return config
    try:
        return replace(config, minibatch=entry["minibatch"], macrobatch=entry["macrobatch"])
    except (KeyError, ValueError):
        return config


def store_tuning(
    config: MoEConfig, name: str, num_tokens: int, best: Tried, path: Path | None = None
) -> str:
    """Add or replace one entry; returns its key. The file is replaced whole."""
    path = path or tuning_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = read_tuning(path)
    key = tuning_key(config, name, num_tokens)
    entries[key] = {
        **key_facts(config, name, num_tokens),
        "minibatch": best.minibatch,
        "macrobatch": best.macrobatch,
        "ms": best.ms,
        "samples": best.samples,
        "measured": time.strftime("%Y-%m-%d"),
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    text = json.dumps({"schema": SCHEMA, "entries": entries}, indent=1)
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return key


def sizes_to_try(num_rows: int) -> list[tuple[int, int]]:
    """(minibatch, macrobatch) worth measuring for `num_rows` rows of a rank."""
    whole = -(-num_rows // ROW_TILE) * ROW_TILE
    found = set()
    for minibatch in MINIBATCHES:
        if minibatch > MINIBATCHES[0] and minibatch >= 2 * whole:
            continue
        slots = [*SLOTS, -(-whole // minibatch)]
        found |= {(minibatch, minibatch * count) for count in slots if count >= 1}
    most = 2 * max(whole, MINIBATCHES[0])
    return sorted(pair for pair in found if pair[1] <= most)


def layer_timer(
    config: MoEConfig, num_tokens: int, device: str, backward: bool, seed: int
) -> Callable[[MoEConfig, int], float]:
    """A function that runs the layer `repeats` times on all ranks and returns the median ms.

    Inputs are drawn once; ranks are virtual (one process), on the CPU or on one GPU.
    """
    from mok_ref.testing import random_bf16

    rng = np.random.default_rng([seed, config.num_experts])
    tokens = [num_tokens] * config.ep_size
    h, i = config.hidden_size, config.intermediate_size
    x = [random_bf16(rng, (t, h)) for t in tokens]
    ids = [random_ids(rng, t, config) for t in tokens]
    weights = [
        (
            random_bf16(rng, (config.num_local_experts(r), i, h), h**-0.5),
            random_bf16(rng, (config.num_local_experts(r), i, h), h**-0.5),
            random_bf16(rng, (config.num_local_experts(r), h, i), i**-0.5),
        )
        for r in range(config.ep_size)
    ]

    def run(tried: MoEConfig, repeats: int) -> float:
        def one_rank(heap: Any) -> list[float]:
            rank = heap.rank
            inputs = (x[rank], *ids[rank])
            return time_rank(tried, heap, inputs, weights[rank], repeats, backward)

        samples = on_ranks(device, config.ep_size)(one_rank)
        slowest = [max(parts) for parts in zip(*samples, strict=True)]
        return statistics.median(slowest)

    return run


def random_ids(
    rng: np.random.Generator, num_tokens: int, config: MoEConfig
) -> tuple[np.ndarray, np.ndarray]:
    """(T, K) ids and weights; ids repeat where K > E."""
    shape = (num_tokens, config.top_k)
    if config.top_k <= config.num_experts:
        keys = rng.random((num_tokens, config.num_experts))
        ids = np.argsort(keys, axis=1)[:, : config.top_k]
    else:
        ids = rng.integers(0, config.num_experts, shape)
    return ids.astype(np.int32), rng.random(shape).astype(np.float32)


def on_ranks(device: str, size: int) -> Callable[[Callable[[Any], Any]], list[Any]]:
    if device == "cpu":
        from mok_ref.heap import run_ranks

        return lambda function: run_ranks(size, function)
    from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks

    return lambda function: run_virtual_cuda_ranks(size, function)


def time_rank(
    config: MoEConfig,
    heap: Any,
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    weights: tuple[np.ndarray, np.ndarray, np.ndarray],
    repeats: int,
    backward: bool,
) -> list[float]:
    """Milliseconds of each repeat on this rank, after one call that warms caches."""
    from mok_ref.experts import ExpertWeights
    from mok_ref.layer import moe_backward, moe_forward

    x, topk_ids, topk_weights = inputs
    experts = ExpertWeights(*weights)
    if heap.device == "cuda":
        import cupy

        x, topk_ids, topk_weights = (cupy.asarray(a) for a in (bits(x), topk_ids, topk_weights))
        experts = ExpertWeights(*(cupy.asarray(bits(w)) for w in weights))
    workspace = new_workspace(config, heap, len(x))
    times = []
    for _ in range(repeats + 1):
        heap.barrier()
        begin = time.perf_counter()
        _, context = moe_forward(
            config, heap, x, topk_ids, topk_weights, experts, workspace=workspace
        )
        if backward:
            moe_backward(context, x)
        synchronize(heap)
        times.append((time.perf_counter() - begin) * 1e3)
    workspace.close()
    return times[1:]


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def new_workspace(config: MoEConfig, heap: Any, num_tokens: int) -> Any:
    if heap.device == "cuda":
        from mok_ref.gpu.workspace import DeviceWorkspace

        return DeviceWorkspace(config, heap, num_tokens)
    from mok_ref.workspace import Workspace

    return Workspace(config, heap, num_tokens)


def synchronize(heap: Any) -> None:
    if heap.device == "cuda":
        import cupy

        cupy.cuda.get_current_stream().synchronize()


def tune(
    config: MoEConfig,
    num_tokens: int,
    device: str = "cpu",
    repeats: int = 5,
    backward: bool = True,
    seed: int = 0,
    path: Path | None = None,
    sizes: Sequence[tuple[int, int]] | None = None,
    progress: Callable[[Tried], None] | None = None,
) -> list[Tried]:
    """Measure, store the best, return everything tried, the best first.

    num_tokens   per rank
    device       "cuda"; "cpu" measures too, but stores only where `path` is given: the CPU layer
                 looks no sizes up
    Raises: ValueError naming the argument.
    """
    require(repeats >= 1, f"repeats must be at least 1, got {repeats=}")
    require(num_tokens >= 1, f"num_tokens must be at least 1, got {num_tokens=}")
    require(device in ("cpu", "cuda"), f"device must be cpu or cuda, got {device!r}")
    require(seed >= 0, f"seed must be >= 0, got {seed=}")
    timer = layer_timer(config, num_tokens, device, backward, seed)
    tried = []
    for minibatch, macrobatch in sizes or sizes_to_try(num_tokens * config.top_k):
        candidate = replace(config, minibatch=minibatch, macrobatch=macrobatch)
        ms = timer(candidate, repeats)
        tried.append(Tried(minibatch, macrobatch, ms, repeats))
        if progress:
            progress(tried[-1])
    tried.sort(key=lambda t: t.ms)
    if device != "cpu" or path is not None:
        store_tuning(config, device_name(device), num_tokens, tried[0], path)
    return tried
