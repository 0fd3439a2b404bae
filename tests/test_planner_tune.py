"""mok-ref tune: what is measured, what is kept, and that the device layer takes it."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.host_cuda import compiler as host_compiler
from host_cupy import host_cuda_device

from mok_ref.config import MoEConfig
from mok_ref.gpu import hopper
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.planner import tune as tuning
from mok_ref.planner.tune import Candidate, Search, Tried, candidates, own_choice, store_tuning

CONFIG = MoEConfig(32, 16, 4, 2, ep_size=2)


class Times:
    """A timer that knows the answers; counts how often each candidate was asked for."""

    def __init__(self, ms: dict[Candidate, float], clock: Any = None, cost: float = 1.0) -> None:
        self.ms, self.clock, self.cost = ms, clock, cost
        self.asked: list[Candidate] = []

    def __call__(self, config: MoEConfig, candidate: Candidate, samples: int) -> list[float]:
        self.asked.append(candidate)
        if self.clock is not None:
            self.clock.now += self.cost
        return [self.ms[candidate]] * samples


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


A, B, C, D, E = (Candidate(128 * i, 1024 * i) for i in range(1, 6))


def test_the_fastest_wins_and_the_best_are_measured_again() -> None:
    timer = Times({A: 5.0, B: 4.0, C: 3.0, D: 2.0, E: 9.0})
    search = Search(timer, CONFIG, None)
    search.run([A, B, C, D, E], 2, 1e6, 0)
    assert search.best(A) == D and search.ranking() == [D, C, B, A, E]
    assert search.tried(D) == Tried(D.minibatch, D.macrobatch, 2.0, 2 + 2 * tuning.FINAL_ROUNDS)
    assert search.tried(A).samples == 2 + 2 * tuning.FINAL_ROUNDS  # what one has now, too
    assert search.tried(E).samples == 2


def test_noise_does_not_replace_the_layers_own_choice() -> None:
    search = Search(Times({A: 1.0, B: 0.995}), CONFIG, None)
    search.run([A, B], 1, 1e6, 0)
    assert search.best(A) == A
    assert search.best(C) == B  # it was not measured


def test_the_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(tuning, "time", clock)
    timer = Times(dict.fromkeys((A, B, C, D, E), 1.0), clock, cost=3.0)
    Search(timer, CONFIG, None).run([A, B, C, D, E], 1, 8.0, 0)
    assert timer.asked[:3] == [A, B, C] and clock.now <= 8.0 + 3.0
    timer = Times({A: 1.0}, clock, cost=100.0)
    Search(timer, CONFIG, None).run([A, B], 1, 8.0, 0)
    assert timer.asked == [A]  # the first at least


def test_the_layers_own_choice_is_measured_first() -> None:
    with host_cuda_device():
        found = candidates(CONFIG, 64, "cuda", None)
    assert (found[0].minibatch, found[0].macrobatch) == own_choice(CONFIG, 64)
    assert len(found) == len(set(found)) and {c.cluster_size for c in found} == {1}


def test_clusters_are_tried_where_the_kernel_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_cuda_device():
        import cupy

        monkeypatch.setattr(cupy.cuda.Device, "compute_capability", "90")
        assert tuning.cluster_sizes(CONFIG, "cuda") == (1, 2)
        assert tuning.cluster_sizes(MoEConfig(36, 16, 4, 2), "cuda") == (1,)
        assert tuning.cluster_sizes(MoEConfig(32, 16, 4, 2, dtype="mxfp8"), "cuda") == (1,)
    assert tuning.cluster_sizes(CONFIG, "cpu") == (1,)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOK_REF_CACHE", str(tmp_path))
    return tmp_path / "tuning.json"


def sizes_of_a_workspace(config: MoEConfig, num_tokens: int) -> tuple[int, int, int, int]:
    """(mini, macro) blocks, cluster size of the workspace and of its kernel."""

    def one_rank(heap: Any) -> tuple[int, int, int, int]:
        workspace = DeviceWorkspace(config, heap, num_tokens)
        kernel = hopper._kernel_of(workspace)
        sizes = workspace.sizes
        workspace.close()
        return sizes.mini_blocks, sizes.macro_blocks, workspace.cluster_size, kernel.cluster_size

    first, *others = run_virtual_cuda_ranks(config.ep_size, one_rank)
    assert all(other == first for other in others)
    return first


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
def test_the_device_layer_takes_what_was_measured(cache: Path) -> None:
    with host_cuda_device():
        before = sizes_of_a_workspace(CONFIG, 64)
        found = tuning.tune(CONFIG, 64, "cuda", 1, sizes=[(256, 512)], seconds=30)
        assert [(t.minibatch, t.macrobatch) for t in found] == [(256, 512)]
        after = sizes_of_a_workspace(CONFIG, 64)
        other_tokens = sizes_of_a_workspace(CONFIG, 256)
    assert before[:2] != (2, 4) and after == (2, 4, 1, 1)
    assert other_tokens[:2] != (2, 4)
    (entry,) = json.loads(cache.read_text())["entries"].values()
    assert (entry["device"], entry["ms"]) == ("host", found[0].ms)


def test_a_stored_cluster_size_reaches_the_kernel(cache: Path) -> None:
    store_tuning(CONFIG, "host", 64, Tried(128, 256, 1.0, 1, cluster_size=1))
    with host_cuda_device():
        assert sizes_of_a_workspace(CONFIG, 64) == (1, 2, 1, 1)
        named = MoEConfig(32, 16, 4, 2, ep_size=2, minibatch=128, macrobatch=128)
        assert sizes_of_a_workspace(named, 64) == (1, 1, 2, 2)  # nothing measured: the default


DAMAGED = {
    "no UTF-8": b"\xff\xfe\x00",
    "deep nesting": b"[" * 200_000,
    "an integer of 5000 digits": b'{"schema":"mok_ref.tuning/1","entries":{"a":'
    + b"9" * 5000
    + b"}}",
    "a list": b"[1]",
    "entries as a list": b'{"schema":"mok_ref.tuning/1","entries":[1]}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_file_is_empty_and_is_repaired(cache: Path, content: bytes) -> None:
    cache.write_bytes(content)
    assert tuning.tuned(CONFIG, "cpu", 64) == CONFIG
    assert tuning.tuned_cluster_size(CONFIG, "cpu", 64) == 1
    store_tuning(CONFIG, "cpu", 64, Tried(128, 256, 1.0, 1))
    assert tuning.tuned(CONFIG, "cpu", 64).macrobatch == 256


WRONG_SIZES: list[dict[str, Any]] = [
    *({"cluster_size": size} for size in (0, 3, "2", None, [2], 2.0, True, 1 << 80)),
    *({"minibatch": size} for size in ("128", 128.0, True, None, -128, 0, 100, [128], {}, 384)),
    *({"macrobatch": size} for size in ("256", 256.0, None, 64, 1 << 40, 2**100, float("inf"))),
    {"minibatch": 1 << 40, "macrobatch": 1 << 40},
    {"minibatch": 896, "macrobatch": 896},  # the layer has at most 768 rows
    {"minibatch": 128, "macrobatch": 896},
    {"minibatch": None, "macrobatch": None},
]


@pytest.mark.parametrize("wrong", WRONG_SIZES, ids=str)
def test_an_entry_that_is_no_sizes_is_ignored(cache: Path, wrong: dict[str, Any]) -> None:
    key = store_tuning(CONFIG, "cpu", 64, Tried(128, 256, 1.0, 1, cluster_size=2))
    assert tuning.tuned_cluster_size(CONFIG, "cpu", 64) == 2
    table = json.loads(cache.read_text())
    table["entries"][key] |= wrong
    cache.write_text(json.dumps(table))
    assert tuning.tuned(CONFIG, "cpu", 64) == CONFIG
    assert tuning.tuned_cluster_size(CONFIG, "cpu", 64) == 1


def test_what_tune_would_measure_is_taken() -> None:
    assert tuning.most_rows(CONFIG, 64) == 768
    for config in (CONFIG, MoEConfig(64, 32, 3, 1), MoEConfig(64, 32, 128, 8, ep_size=8)):
        for tokens in (1, 64, 65, 4096):
            rows = tuning.most_rows(config, tokens)
            found = candidates(config, tokens, "cpu", None)
            assert all(tuning.are_sizes(candidate, rows) for candidate in found)


@pytest.mark.parametrize("pair", [(100, 200), (128, 200), (1024, 1024), (128.0, 256), (0, 0)])
def test_sizes_that_the_layer_would_not_take_are_refused(pair: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sizes must be pairs of multiples of 128"):
        tuning.tune(CONFIG, 64, sizes=[pair], path=tmp_path / "tuning.json")


WRITERS, ENTRIES = 4, 10


def store_several(path: Path, writer: int) -> None:
    for entry in range(ENTRIES):
        config = MoEConfig(64, 32 * (1 + writer * ENTRIES + entry), 8, 2)
        store_tuning(config, "cpu", 64, Tried(128, 256, 1.0, 1), path)


@pytest.mark.skipif(tuning.fcntl is None, reason="this system has no file locks")
def test_processes_that_store_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=store_several, args=(path, i)) for i in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    assert len(tuning.read_tuning(path)) == WRITERS * ENTRIES
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tuning.json", "tuning.json.lock"]


@pytest.mark.skipif(tuning.fcntl is None, reason="this system has no file locks")
def test_the_wait_for_a_lock_ends(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    with (
        tuning.locked(path),
        pytest.raises(RuntimeError, match=r"tuning.json.lock must be free, another process"),
        tuning.locked(path, 0.05),
    ):
        pass
    with tuning.locked(path, 0.05):  # free again
        pass


@pytest.mark.parametrize("name", ["file/tuning.json", "folder"])
def test_a_store_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(tuning, "LayerTimer", None)  # nothing is measured
    with pytest.raises(ValueError, match="tuning file") as error:
        tuning.tune(CONFIG, 64, path=tmp_path / name)
    assert "\n" not in str(error.value)


def test_inputs_of_the_timer() -> None:
    timer = tuning.LayerTimer(CONFIG, 48, "cpu", backward=False, seed=1)
    ids = timer.inputs[0][1]
    assert ids.shape == (48, 2) and all(len(set(row)) == 2 for row in ids.tolist())
    assert len(timer.weights[1][0]) == CONFIG.num_local_experts(1)
    assert np.array_equal(timer.weights[0][0][0], timer.weights[0][0][1])


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be above 0"):
        tuning.tune(CONFIG, 8, seconds=seconds)
