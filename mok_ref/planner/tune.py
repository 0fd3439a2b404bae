"""`mok-ref tune`: measure ring, minibatch and cluster sizes on the machine at hand, keep the best.

Bits do not depend on these sizes (contract, section 6), so tuning can never change a result. What
was found is stored in one JSON file beside the compiled kernels, under a key that digests the
device and everything the best sizes depend on; `tuned` and `tuned_cluster_size` look it up when a
layer is made.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mok_ref.casefile import check_writable, write_whole
from mok_ref.config import ROW_TILE, MoEConfig
from mok_ref.heap.cuda_device import import_cupy

from .errors import require

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SCHEMA = "mok_ref.tuning/1"
MINIBATCHES = (1024, 2048, 4096, 8192)
SLOTS = (2, 4, 8)
CLUSTER_SIZES = (1, 2)
FINALISTS = 3
FINAL_ROUNDS = 3
LOCK_SECONDS = 20.0  # a file is replaced in milliseconds
CALLS_WITHOUT_PAUSE = {"cpu": 1, "cuda": 10}  # of one sample
MARGIN = 0.01  # what is closer than this to the layer's own choice is noise


@dataclass(frozen=True)
class Candidate:
    """Sizes that may be measured; cluster_size concerns the forward kernel on Hopper alone."""

    minibatch: int
    macrobatch: int
    cluster_size: int = 1


@dataclass(frozen=True)
class Tried:
    """One measured configuration: median milliseconds of forward and backward together."""

    minibatch: int
    macrobatch: int
    ms: float
    samples: int
    cluster_size: int = 1


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
    """All stored entries; an absent, damaged or foreign file holds none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # no file, no UTF-8, no JSON, too many digits
        return {}
    is_ours = isinstance(table, dict) and table.get("schema") == SCHEMA
    return dict(table["entries"]) if is_ours and isinstance(table.get("entries"), dict) else {}


def most_rows(config: MoEConfig, num_tokens: int) -> int:
    """Rows that the routing could give one rank, every expert's segment padded to whole tiles, at
    the largest T that shares an entry with `num_tokens`."""
    routes = config.ep_size * token_bucket(num_tokens) * config.top_k
    rows = routes + config.num_experts * (ROW_TILE - 1)
    return max(ROW_TILE, -(-rows // ROW_TILE) * ROW_TILE)


def are_sizes(candidate: Candidate, rows: int) -> bool:
    """Whether a layer of at most `rows` rows can take these sizes: whole tiles, a ring of whole
    minibatches none of which would never be filled, clusters that a kernel knows."""
    minibatch, macrobatch = candidate.minibatch, candidate.macrobatch
    numbers = (minibatch, macrobatch, candidate.cluster_size)
    return (
        all(type(number) is int for number in numbers)  # neither 1.0 nor True
        and ROW_TILE <= minibatch <= rows
        and minibatch % ROW_TILE == 0
        and minibatch <= macrobatch < rows + minibatch
        and macrobatch % minibatch == 0
        and candidate.cluster_size in CLUSTER_SIZES
    )


def stored_sizes(
    config: MoEConfig, device: str, num_tokens: int, path: Path | None
) -> Candidate | None:
    """What was measured for this layer, where it names no sizes itself.

    Entries that are no valid sizes are ignored: a damaged cache costs speed, never a result.
    """
    if config.minibatch is not None or config.macrobatch is not None:
        return None
    entries = read_tuning(path or tuning_path())
    if not entries:
        return None
    entry = entries.get(tuning_key(config, device_name(device), num_tokens))
    names = ("minibatch", "macrobatch", "cluster_size")
    if not isinstance(entry, dict) or any(name not in entry for name in names):
        return None
    found = Candidate(*(entry[name] for name in names))
    return found if are_sizes(found, most_rows(config, num_tokens)) else None


def tuned(config: MoEConfig, device: str, num_tokens: int, path: Path | None = None) -> MoEConfig:
    """`config` with measured minibatch and macrobatch, where it names none and some are stored."""
    found = stored_sizes(config, device, num_tokens, path)
    if found is None:
        return config
    return replace(config, minibatch=found.minibatch, macrobatch=found.macrobatch)


def tuned_cluster_size(
    config: MoEConfig, device: str, num_tokens: int, path: Path | None = None
) -> int:
    """CTAs that share weight tiles, as measured together with the sizes of `tuned`.

    Without a measurement what mok_ref.gpu.hopper takes by default on a GPU.
    """
    from mok_ref.gpu.hopper import DEFAULT_CLUSTER_SIZE

    found = stored_sizes(config, device, num_tokens, path)
    if found is not None:
        return found.cluster_size
    return 1 if device == "cpu" else DEFAULT_CLUSTER_SIZE


def check_store(path: Path) -> None:
    """Make the folder of `path`; refuse, before anything is measured, what cannot be written.

    Raises: ValueError naming the file, RuntimeError or OSError if it cannot be locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"tuning file ($MOK_REF_CACHE) must lie in a folder that can be made, got {path}: "
            f"{error.strerror}"
        ) from None
    check_writable(path, "tuning file ($MOK_REF_CACHE)")
    with locked(path):  # the file system may know no locks
        pass


@contextmanager
def locked(path: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold `path`'s lock file, so that no other process replaces `path` meanwhile.

    The lock goes with the process that holds it; its file stays. Where the system has no such
    locks (Windows), nothing is locked.
    Raises: RuntimeError if another process holds it for so long.
    """
    if fcntl is None:
        yield
        return
    end = time.monotonic() + seconds
    with open(path.with_name(path.name + ".lock"), "a", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"{file.name} must be free, another process has held it for {seconds:g} s"
                    ) from None
                time.sleep(0.01)
        yield


def store_tuning(
    config: MoEConfig, name: str, num_tokens: int, best: Tried, path: Path | None = None
) -> str:
    """Add or replace one entry; returns its key. The file is replaced whole, under a lock: of
    several processes that store, none loses another's entry.

    Raises: ValueError, RuntimeError or OSError if the file cannot be written.
    """
    path = path or tuning_path()
    check_store(path)
    key = tuning_key(config, name, num_tokens)
    entry = {
        **key_facts(config, name, num_tokens),
        "minibatch": best.minibatch,
        "macrobatch": best.macrobatch,
        "cluster_size": best.cluster_size,
        "ms": best.ms,
        "samples": best.samples,
        "measured": time.strftime("%Y-%m-%d"),
    }
    with locked(path):
        entries = read_tuning(path) | {key: entry}
        text = json.dumps({"schema": SCHEMA, "entries": entries}, indent=1)
        write_whole(path, text)
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


def candidates(
    config: MoEConfig, num_tokens: int, device: str, sizes: Iterable[tuple[int, int]] | None
) -> list[Candidate]:
    """What to measure: what the layer would take by itself, then all others."""
    own = own_choice(config, num_tokens)
    rows = most_rows(config, num_tokens)
    if sizes is not None:
        pairs = list(sizes)
        wrong = [pair for pair in pairs if not are_sizes(Candidate(*pair), rows)]
        require(
            not wrong,
            f"sizes must be pairs of multiples of {ROW_TILE}, macrobatch a multiple of minibatch, "
            f"neither larger than the layer's {rows} rows need, got {wrong[0] if wrong else None}",
        )
    else:
        usual = sizes_to_try(num_tokens * config.top_k)
        pairs = [pair for pair in usual if are_sizes(Candidate(*pair), rows)]
    clusters = cluster_sizes(config, device)
    found = [Candidate(*own)] if sizes is None else []
    found += [Candidate(*pair, size) for pair in (own, *pairs) for size in clusters]
    if sizes is not None:
        found = [c for c in found if (c.minibatch, c.macrobatch) in pairs]
    return list(dict.fromkeys(found))


def own_choice(config: MoEConfig, num_tokens: int) -> tuple[int, int]:
    """(minibatch, macrobatch) of a device layer for which nothing was measured."""
    from mok_ref.gpu.workspace import derive_sizes

    sizes = derive_sizes(replace(config, minibatch=None, macrobatch=None), 0, num_tokens)
    return sizes.mini_blocks * ROW_TILE, sizes.macro_blocks * ROW_TILE


def cluster_sizes(config: MoEConfig, device: str) -> tuple[int, ...]:
    """Sizes that the forward kernel at hand knows."""
    if device == "cpu" or config.dtype != "bf16":
        return (1,)
    import cupy

    from mok_ref.gpu.hopper import supports

    widths = (config.hidden_size, config.intermediate_size, config.shared_intermediate_size)
    is_hopper = str(cupy.cuda.Device().compute_capability) == "90"
    return CLUSTER_SIZES if is_hopper and supports(*widths) else (1,)


class LayerTimer:
    """Times the layer on all ranks of this process with one set of inputs.

    Ranks are virtual, on the CPU or on one GPU. The experts of a rank hold equal weights: that
    changes no time and is drawn quickly.
    """

    def __init__(
        self, config: MoEConfig, num_tokens: int, device: str, backward: bool, seed: int
    ) -> None:
        from mok_ref.testing import random_bf16

        rng = np.random.default_rng([seed, config.num_experts])
        hidden, inner = config.hidden_size, config.intermediate_size
        ranks = range(config.ep_size)
        self.device, self.size, self.backward = device, config.ep_size, backward
        self.inputs = [
            (random_bf16(rng, (num_tokens, hidden)), *random_ids(rng, num_tokens, config))
            for _ in ranks
        ]
        inward, outward = (inner, hidden), (hidden, inner)
        expert = [random_bf16(rng, shape, shape[1] ** -0.5) for shape in (inward, inward, outward)]
        if device == "cuda":
            self.inputs = [tuple(on_device(array) for array in rank) for rank in self.inputs]
        self.weights = [
            [repeated(array, config.num_local_experts(rank), device) for array in expert]
            for rank in ranks
        ]

    def __call__(self, config: MoEConfig, candidate: Candidate, samples: int) -> list[float]:
        """Milliseconds of one call, on the slowest rank, `samples` times.

        On a GPU a sample is the mean of calls that follow each other without a pause.
        """
        tried = replace(config, minibatch=candidate.minibatch, macrobatch=candidate.macrobatch)

        def one_rank(heap: Any) -> list[float]:
            rank = heap.rank
            workspace = new_workspace(tried, heap, len(self.inputs[rank][0]))
            if heap.device == "cuda":
                workspace.cluster_size = candidate.cluster_size
            inputs, weights = self.inputs[rank], self.weights[rank]
            times = time_rank(tried, heap, inputs, weights, workspace, samples, self.backward)
            workspace.close()
            return times

        parts = on_ranks(self.device, self.size)(one_rank)
        if self.device == "cuda":
            release_memory()
        return [max(sample) for sample in zip(*parts, strict=True)]


def on_device(array: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(array.view(np.uint16) if array.dtype.itemsize == 2 else array)


def repeated(array: np.ndarray, times: int, device: str) -> Any:
    """(times, ...) of equal matrices."""
    if device == "cpu":
        return np.repeat(array[None], times, axis=0)
    import cupy

    result = cupy.empty((times, *array.shape), np.uint16)
    result[...] = on_device(array)
    return result


def release_memory() -> None:
    """Give back what the next candidate, on other streams, could not use again."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


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
    inputs: Sequence[Any],
    weights: Sequence[Any],
    workspace: Any,
    samples: int,
    backward: bool,
) -> list[float]:
    """Milliseconds of one call in each sample on this rank, after calls that warm caches."""
    from mok_ref.experts import ExpertWeights
    from mok_ref.layer import moe_backward, moe_forward

    x, topk_ids, topk_weights = inputs
    experts = ExpertWeights(*weights)

    def call() -> None:
        _, context = moe_forward(
            config, heap, x, topk_ids, topk_weights, experts, workspace=workspace
        )
        if backward:
            moe_backward(context, x)

    times = []
    calls = CALLS_WITHOUT_PAUSE[heap.device]
    for sample in range(-1, samples):
        heap.barrier()
        synchronize(heap)
        begin = time.perf_counter()
        for _ in range(calls if sample >= 0 else 1):
            call()
        synchronize(heap)
        if sample >= 0:
            times.append((time.perf_counter() - begin) * 1e3 / calls)
    return times


def new_workspace(config: MoEConfig, heap: Any, num_tokens: int) -> Any:
    if heap.device == "cuda":
        from mok_ref.gpu.workspace import DeviceWorkspace

        return DeviceWorkspace(config, heap, num_tokens)
    from mok_ref.workspace import Workspace

    return Workspace(config, heap, num_tokens)


def synchronize(heap: Any) -> None:
    """Wait for this rank's stream and raise what its device reported."""
    if heap.device == "cuda":
        heap.check()


class Search:
    """Measures candidates until the time is used up, then the best of them again."""

    def __init__(
        self,
        timer: Callable[[MoEConfig, Candidate, int], list[float]],
        config: MoEConfig,
        progress: Callable[[Tried], None] | None,
    ) -> None:
        self.timer, self.config, self.progress = timer, config, progress
        self.samples: dict[Candidate, list[float]] = {}

    def measure(self, candidate: Candidate, samples: int) -> None:
        found = self.samples.setdefault(candidate, [])
        found += self.timer(self.config, candidate, samples)
        if self.progress:
            self.progress(self.tried(candidate))

    def run(self, wanted: Sequence[Candidate], samples: int, seconds: float, seed: int) -> None:
        """All of `wanted` once, as far as three quarters of the time reach (the first at least);
        then the best few and the first, in rounds of random order."""
        end = time.monotonic() + seconds
        for candidate in wanted:
            if self.samples and time.monotonic() > end - 0.25 * seconds:
                break
            self.measure(candidate, samples)
        finalists = [*self.ranking()[:FINALISTS], wanted[0]]
        finalists = list(dict.fromkeys(finalists))
        rng = np.random.default_rng(seed)
        for _ in range(FINAL_ROUNDS if len(self.samples) > 1 else 0):
            for index in rng.permutation(len(finalists)):
                if time.monotonic() < end:
                    self.measure(finalists[index], samples)

    def tried(self, candidate: Candidate) -> Tried:
        found = self.samples[candidate]
        return Tried(
            candidate.minibatch,
            candidate.macrobatch,
            statistics.median(found),
            len(found),
            candidate.cluster_size,
        )

    def ranking(self) -> list[Candidate]:
        return sorted(self.samples, key=lambda c: statistics.median(self.samples[c]))

    def best(self, own: Candidate) -> Candidate:
        """The fastest; the layer's own choice where nothing is clearly faster."""
        fastest = self.ranking()[0]
        if own not in self.samples:
            return fastest
        gain = statistics.median(self.samples[own]) / statistics.median(self.samples[fastest]) - 1
        return fastest if gain > MARGIN else own


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
    seconds: float = 60.0,
) -> list[Tried]:
    """Measure, store the best, return everything tried, the best first.

    num_tokens   per rank
    device       "cuda"; "cpu" measures too, but stores only where `path` is given: the CPU layer
                 looks no sizes up
    sizes        (minibatch, macrobatch) to measure instead of the usual ones
    seconds      no new measurement begins later, except the first
    Raises: ValueError naming the argument; HeapError where no GPU is usable.
    """
    require(repeats >= 1, f"repeats must be at least 1, got {repeats=}")
    require(num_tokens >= 1, f"num_tokens must be at least 1, got {num_tokens=}")
    require(device in ("cpu", "cuda"), f"device must be cpu or cuda, got {device!r}")
    require(seed >= 0, f"seed must be >= 0, got {seed=}")
    require(seconds > 0, f"seconds must be above 0, got {seconds=}")
    if device == "cuda":
        import_cupy()
    is_stored = device != "cpu" or path is not None
    if is_stored:
        check_store(path or tuning_path())
    wanted = candidates(config, num_tokens, device, sizes)
    timer = LayerTimer(config, num_tokens, device, backward, seed)
    search = Search(timer, config, progress)
    search.run(wanted, repeats, seconds, seed)
    best = search.best(Candidate(*own_choice(config, num_tokens)))
    order = [best, *(c for c in search.ranking() if c != best)]
    tried = [search.tried(candidate) for candidate in order]
    if is_stored:
        store_tuning(config, device_name(device), num_tokens, tried[0], path)
    return tried
