"""Kinds of faults that users of other layers met in public; each must be right here.

The name after `# seen in` is the public tracker. "Bits" means: equal to the dense formula.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import SIZES, Sizes, ids_with_rows, make_case, rank_step, run_case
from dense import dense_layer
from test_layer import assert_same

from mok_ref import ExpertWeights, HeapError, MoEConfig, Workspace, run_ranks
from mok_ref.dispatch import dispatch_forward, push_rows
from mok_ref.heap import LocalWorld
from mok_ref.install import install_hint
from mok_ref.mxfp8 import quantized_values
from mok_ref.routing import RoutingOptions, route_forward
from mok_ref.schedule import build_schedule
from mok_ref.testing import assert_bitwise_equal, digest
from mok_ref.workspace import max_rows

# --------------------------------------------------------------------------- stale memory


def poison(workspace: Workspace) -> None:
    """Every byte of every buffer 0xFF: NaN in bf16 and float32, a NaN scale, id -1."""
    for name in workspace._names:
        workspace.heap.peer(workspace.heap.rank, name).view(np.uint8)[...] = 0xFF


# seen in DeepEP 589
@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
def test_buffers_full_of_nan(dtype: str) -> None:
    sizes = Sizes(64, 256, 16, 4, 2, shared=24, dtype=dtype)
    cases = [make_case(sizes, seed) for seed in (1, 2)]
    config = cases[0].config(2)

    def work(heap: Any) -> list[dict[str, np.ndarray]]:
        workspace, results = Workspace(config, heap, 40), []
        for case in cases:
            poison(workspace)
            results.append(rank_step(heap, case, config, np.array([32, 32]), workspace))
            heap.barrier()
        return results

    steps = run_ranks(2, work)
    for step, case in enumerate(cases):
        expected = dense_layer(case)
        y = np.concatenate([np.asarray(rank[step]["y"]) for rank in steps])
        dw = np.concatenate([rank[step]["dw_down"] for rank in steps])
        assert_same({"y": y, "dw_down": dw}, {n: expected[n] for n in ("y", "dw_down")})
        assert np.isfinite(y.astype(np.float32)).all() and np.isfinite(dw).all()


# seen in pytorch 193633
def test_tail_rows_at_the_second_step() -> None:
    case = make_case(Sizes(8, 4, 3, 3, 2, shared=2), 3)
    ids = case.topk_ids.copy()
    ids.ravel()[::2] = -1
    case = case.with_ids(ids)
    heap, config = LocalWorld(1).heap(0), case.config(1)
    workspace = Workspace(config, heap, 8)
    for _ in range(2):
        assert_same(rank_step(heap, case, config, np.array([8]), workspace), dense_layer(case))
        poison(workspace)


# seen in DeepEP 753
def test_hundred_times_the_same_routing() -> None:
    case = make_case(Sizes(20, 8, 4, 2, 2, shared=0), 4)
    config, splits = case.config(2), np.array([12, 8])

    def work(heap: Any) -> set[str]:
        workspace, seen = Workspace(config, heap, 16), set()
        for _ in range(100):
            result = rank_step(heap, case, config, splits, workspace)
            table = build_schedule(config, heap.rank, case.topk_ids, splits)
            result |= {f.name: getattr(table, f.name) for f in fields(table)}
            seen.add(digest(result))
        return seen

    assert [len(seen) for seen in run_ranks(2, work)] == [1, 1]


# seen in DeepEP 382
def test_size_sweep_in_one_process() -> None:
    sizes = Sizes(hidden=8, inner=4, experts=2, top_k=2, shared=6)
    cases = [make_case(replace(sizes, num_tokens=n), n) for n in (1, 128, 2, 1024, 3)]
    config = cases[0].config(2)
    splits = [np.array([-(-len(c.x) // 2), len(c.x) // 2]) for c in cases]

    def work(heap: Any) -> list[np.ndarray]:
        workspace = Workspace(config, heap, 512)
        return [
            rank_step(heap, c, config, s, workspace)["dx"]
            for c, s in zip(cases, splits, strict=True)
        ]

    ranks = run_ranks(2, work)
    for position, (case, split) in enumerate(zip(cases, splits, strict=True)):
        swept = np.concatenate([rank[position] for rank in ranks])
        assert_bitwise_equal(swept, run_case(case, split.tolist())["dx"])


# --------------------------------------------------------------------------- uneven ranks


# seen in DeepEP 208, 604
def test_four_uneven_ranks() -> None:
    case = make_case(Sizes(200, 32, 16, 8, 2, shared=0), 5)
    assert_same(run_case(case, [1, 128, 7, 64]), dense_layer(case))


# seen in DeepEP 208, 604
def test_all_pairs_of_small_ranks() -> None:
    sizes = Sizes(hidden=8, inner=4, experts=2, top_k=2, shared=0)
    for a, b in product((0, 1, 2, 3, 5, 6, 7), repeat=2):
        case = make_case(replace(sizes, num_tokens=a + b), a + 10 * b)
        assert_same(run_case(case, [a, b]), dense_layer(case))


# seen in Megatron-LM 1877, DeepEP 374
@pytest.mark.parametrize("splits", [[32, 32, 32, 32], [0, 64, 0, 64]])
def test_ranks_that_receive_nothing(splits: list[int]) -> None:
    case = make_case(Sizes(128, 16, 8, 16, 2, shared=4, pattern="first-quarter"), 6)
    assert case.topk_ids.max() == 3
    result = run_case(case, splits)
    assert_same(result, dense_layer(case))
    assert not result["dw_down"][4:].view(np.uint32).any()  # exactly +0


# seen in UCCL 671
def test_rank_counts_that_are_no_power_of_two() -> None:
    case = make_case(SIZES["plain"], 7)
    assert_same(run_case(case, 3), dense_layer(case))
    with pytest.raises(ValueError, match="num_experts=8, ep_size=3"):
        MoEConfig(16, 8, 8, 2, 3)


# --------------------------------------------------------------------------- values and sizes


# seen in SonicMoE 63
@pytest.mark.parametrize("scale", [0.02, 1.0, 50.0])
def test_small_and_large_activations(scale: float) -> None:
    case = make_case(Sizes(40, 64, 40, 4, 2, shared=24, scale=scale), 8)
    assert_same(run_case(case, 2), dense_layer(case))


# seen in Flux 186
def test_many_experts() -> None:
    sizes = Sizes(16, 256, 256, 512, 8, shared=0)
    case = make_case(replace(sizes, experts=1, pattern="no-route"), 9)
    rng = np.random.default_rng(9)
    some = np.linspace(0, 511, 40).astype(np.int32)
    ids = np.stack([rng.permutation(some)[:8] for _ in range(16)])
    bits = [rng.integers(0, 65536, (512, 256, 256), np.uint16) & 0x80FF | 0x3D00 for _ in range(3)]
    case = replace(case, sizes=sizes, topk_ids=ids, weights=ExpertWeights(*bits))
    result = run_case(case, 2)
    busy = np.unique(ids)
    few = replace(
        case,
        sizes=replace(sizes, experts=len(busy)),
        topk_ids=np.searchsorted(busy, ids).astype(np.int32),
        weights=ExpertWeights(*(w[busy] for w in bits)),
    )
    idle = np.setdiff1d(np.arange(512), busy)
    for name in ("dw_gate", "dw_up", "dw_down"):
        assert not result[name][idle].any()
        result[name] = result[name][busy]
    assert_same(result, dense_layer(few))


# seen in MSLK 158
def test_many_experts_and_four_tokens() -> None:
    case = make_case(Sizes(4, 32, 16, 256, 2, shared=8), 10)
    result = run_case(case, 4)
    assert_same(result, dense_layer(case))
    assert np.isfinite(result["dw_gate"]).all()


# seen in cutlass 2674, DeepGEMM 20, DeepGEMM 268, Liger 1463
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([0, 8, 16, 16, 32], id="tiny"),
        pytest.param([0, 5, 0, 3], id="empty"),
        pytest.param([7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129], id="edges"),
        pytest.param([9, 1, 30, 2, 0, 0, 0, 0], id="empty-range"),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
def test_rows_per_expert(rows: list[int], dtype: str) -> None:
    ids = ids_with_rows(np.random.default_rng(11), rows)
    case = make_case(Sizes(hidden=32, inner=16, experts=len(rows), shared=8, dtype=dtype), 11, ids)
    assert np.bincount(ids[ids >= 0], minlength=len(rows)).tolist() == rows
    assert_same(run_case(case), dense_layer(case))


# seen in flashinfer 3011
def test_same_expert_twice_in_a_token() -> None:
    flat = np.array([5, 88, 88, 65, 3, 3, 88, 5], np.int32)
    ids = np.tile(flat, 140)[: 2 * 270].reshape(-1, 2)
    ids[-1] = 3
    case = make_case(Sizes(hidden=16, inner=8, experts=96, shared=4), 12, ids)
    result = run_case(case, 4)
    assert_same(result, dense_layer(case))
    twice = run_case(case.with_ids(np.where(np.arange(2) == 1, -1, ids)), 4)
    assert (result["y"][-1] != twice["y"][-1]).any()  # both slots count


# seen in vLLM 46408
@pytest.mark.parametrize("shared", [0, 24])
def test_missing_routes_with_weights(shared: int) -> None:
    sizes = Sizes(2, 32, 16, 8, 4, shared=shared)
    case = make_case(sizes, 13, np.array([[2, -1, 5, -1], [-1, -1, -1, -1]], np.int32))
    assert (case.topk_weights != 0).all()
    result = run_case(case, 2)
    assert_same(result, dense_layer(case))
    if not shared:
        assert not result["y"][1].view(np.uint16).any()  # exactly +0
        assert not result["dx"][1].view(np.uint16).any()
    assert not result["d_topk_weights"].view(np.uint32)[case.topk_ids < 0].any()


# seen in DeepEP 154
@pytest.mark.parametrize("hidden", [1, 16, 144, 272, 2880, 3072])
def test_any_hidden_size(hidden: int) -> None:
    case = make_case(Sizes(5, hidden, 8, 2, 2, shared=16), 14)
    assert_same(run_case(case, 2), dense_layer(case))


# seen in ScatterMoE 5
def test_tiny_batch_of_wide_tokens() -> None:
    case = make_case(Sizes(5, 4096, 8, 8, 2, shared=0), 15)
    assert_same(run_case(case, 2), dense_layer(case))


# seen in torchao 4762
def test_zero_tokens_in_mxfp8() -> None:
    case = make_case(Sizes(20, 96, 40, 4, 2, shared=8, dtype="mxfp8"), 16)
    x = case.x.copy()
    x[3], x[5, 32:64] = 0, 0
    case = replace(case, x=x)
    result = run_case(case, 2)
    assert_same(result, dense_layer(case))
    values = quantized_values(np.zeros((1, 32), np.float32))
    assert not values.view(np.uint32).any()


# --------------------------------------------------------------------------- offsets


# seen in Liger 1248, sglang 4727
def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Rows whose element offsets pass 2^31, in sparse files: only touched pages exist."""
    num_tokens, top_k, hidden = 56000, 8, 7168
    shape = (num_tokens * top_k, hidden)
    assert shape[0] * hidden > 2**31
    slots = np.memmap(tmp_path / "slots", np.uint16, "w+", shape=shape)
    config = MoEConfig(hidden, 8, 2, top_k, 1)
    ids = np.full((num_tokens, top_k), -1, np.int32)
    ids[-1] = 1  # only the last token has routes: peer rows 447992..447999
    table = build_schedule(config, 0, ids, np.array([num_tokens]))
    values = np.arange(table.num_rows, dtype=np.uint16)[:, None] + np.zeros(hidden, np.uint16)
    push_rows(table, slice(0, 128), values, lambda rank: slots)
    np.testing.assert_array_equal(slots[-8:], values[:8])
    assert not slots[:8].any()
    out = np.ones((128, hidden), np.uint16)
    dispatch_forward(table, slice(0, 128), 1, 0, 1, lambda rank: slots, out)
    np.testing.assert_array_equal(out[:8], slots[-8:])
    rows = max_rows(MoEConfig(hidden, 8, 512, np.int32(8), np.int32(64)), 0, 2**26)
    assert rows == 64 * 2**26 * 8 + 8 * 127 + (-8 * 127) % 128  # no 32-bit wrap


# seen in Liger 1248, sglang 4727
def test_more_than_half_a_million_rows() -> None:
    """Rows beyond 524288 = 2^31 / 4096: the table counts in int64 and repeats brute force."""
    num_tokens = 70000
    config = MoEConfig(4096, 8, 2, 8, 1)
    ids = np.zeros((num_tokens, 8), np.int32)
    ids[:, 0] = 1
    table = build_schedule(config, 0, ids, np.array([num_tokens]))
    assert table.expert_count.tolist() == [490000, 70000]
    assert table.num_rows > 524288 and table.expert_offset.dtype == np.int64
    assert int(table.expert_offset[-1]) * 4096 > 2**31
    last = table.peer_row[table.segment(1)][:70000]
    token = np.arange(1 << 17)
    walked = np.array([int(f"{t:017b}"[::-1], 2) for t in token])
    np.testing.assert_array_equal(last // 8, walked[walked < num_tokens])


# --------------------------------------------------------------------------- routing


# seen in vLLM 55514, flashinfer 3875
def test_ties_go_to_the_lower_id() -> None:
    zeros = np.zeros((3, 16), np.float32)
    for options in (
        RoutingOptions(4),
        RoutingOptions(4, "sigmoid", renormalize=True),
        RoutingOptions(4, num_groups=4, keep_groups=2),
        RoutingOptions(4, num_groups=4, keep_groups=1, group_score="max"),
    ):
        ids, weights, _ = route_forward(zeros, options)
        np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 3)
        assert np.isfinite(weights).all()
    bias = np.full(16, 12, np.float32)
    low = np.full((2, 16), -18, np.float32)
    options = RoutingOptions(4, "sigmoid", bias, 4, 2, renormalize=True)
    ids, weights, _ = route_forward(low, options)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 2)
    np.testing.assert_array_equal(weights, np.full((2, 4), 0.25, np.float32))


# seen in Megatron-LM 4168
def test_replayed_routing(tmp_path: Path) -> None:
    """ids and weights from a file give the bits of the run that wrote them."""
    case = make_case(SIZES["plain"], 17)
    logits = np.random.default_rng(18).standard_normal((37, 6)).astype(np.float32)
    ids, weights, _ = route_forward(logits, RoutingOptions(3, renormalize=True))
    first = run_case(replace(case, topk_ids=ids, topk_weights=weights), 3)
    np.savez(tmp_path / "routing.npz", topk_ids=ids, topk_weights=weights)
    with np.load(tmp_path / "routing.npz", allow_pickle=False) as stored:
        replayed = replace(case, **{name: stored[name] for name in stored.files})
    assert digest(run_case(replayed, 2)) == digest(first)


# --------------------------------------------------------------------------- missing peers


def test_late_rank_is_named() -> None:
    """A virtual rank that does not arrive: the others stop in time, naming it and themselves."""

    def work(heap: Any) -> None:
        heap.barrier("the first meeting")
        if heap.rank == 2:
            time.sleep(8)
            return
        heap.barrier("the second meeting")

    started = time.monotonic()
    with pytest.raises(HeapError) as caught:
        run_ranks(3, work, timeout_s=0.3)
    assert time.monotonic() - started < 6  # the sleeper is left behind
    message = str(caught.value)
    assert message.startswith(("rank 0 waited", "rank 1 waited"))
    assert "in the second meeting, epoch 2, for rank 2" in message
    assert "last seen in the first meeting, epoch 1" in message


# seen in DeepGEMM (sgl) 57
@pytest.mark.mpi
def test_a_late_start_is_waited_for(mpi_run) -> None:
    result = mpi_run(2, "late_start", "1.5")
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["all"]) == 64


@pytest.mark.mpi
def test_a_start_that_is_too_late_is_named(mpi_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAP_TIMEOUT_S", "0.5")
    result = mpi_run(2, "late_start", "4")
    assert result.returncode != 0
    report = result.reports[0]
    assert report["rank"] == 0 and report["seconds"] < 4
    assert "for rank 1" in report["error"] and "epoch" in report["error"]


# seen in DeepEP 570
@pytest.mark.mpi
@pytest.mark.parametrize("how", ["exit", "kill", "sleep"])
def test_a_peer_that_dies_in_a_step_is_named(
    how: str, mpi_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead (noticed at once) or stuck (after the time limit): rank, phase and epoch are named."""
    monkeypatch.setenv("HEAP_TIMEOUT_S", "1.5" if how == "sleep" else "30")
    started = time.monotonic()
    result = mpi_run(3, "die", how, unwatched=True)
    assert time.monotonic() - started < 15
    assert [report["rank"] for report in result.reports] == [0, 2], result.stderr
    for report in result.reports:
        error = report["error"]
        assert f"rank {report['rank']} waited in forward, pushing expert outputs, epoch" in error
        assert "for rank 1 (last seen in forward, publishing tokens and routes, epoch" in error
        assert ("did not arrive within" if how == "sleep" else "is gone") in error


@pytest.mark.mpi
def test_a_killed_rank_ends_the_whole_job(mpi_run) -> None:
    """Under the launcher as it is, which ends the survivors itself."""
    started = time.monotonic()
    assert mpi_run(3, "die", "kill").returncode != 0
    assert time.monotonic() - started < 15


# seen in TRT-LLM 17034, DeepEP 584
@pytest.mark.mpi
def test_a_bad_input_on_one_rank_ends_the_job(mpi_run) -> None:
    started = time.monotonic()
    result = mpi_run(2, "refuse")
    assert result.returncode != 0
    errors = {report["rank"]: report["error"] for report in result.reports}
    assert errors[1] == "topk_ids must be in -1..71, got 99 at [0, 0]"
    assert time.monotonic() - started < 15


# --------------------------------------------------------------------------- installation

BARE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ImportError(f"{name} is not installed here")

allowed = set(sys.stdlib_module_names) | {"numpy", "ml_dtypes", "mok_ref"}
sys.meta_path.insert(0, Refuse())
import numpy as np
import mok_ref
from mok_ref.testing import random_bf16, random_routes
rng = np.random.default_rng(0)
config = mok_ref.MoEConfig(16, 8, 4, 2, 2)
def work(heap):
    weights = mok_ref.ExpertWeights(
        *(random_bf16(rng, shape) for shape in ((2, 8, 16), (2, 8, 16), (2, 16, 8)))
    )
    x, dy = random_bf16(rng, (5, 16)), random_bf16(rng, (5, 16))
    y, context = mok_ref.moe_forward(config, heap, x, *random_routes(rng, 5, 4, 2), weights)
    return y.shape, mok_ref.moe_backward(context, dy).dx.shape
print(mok_ref.run_ranks(2, work))
for module, name in (("mpi", "import_mpi"), ("cuda_device", "import_cupy")):
    try:
        getattr(__import__(f"mok_ref.heap.{module}", fromlist=[name]), name)()
    except Exception as error:
        print(type(error).__name__, error)
"""


# seen in Triton-distributed 34, DeepEP 55
def test_reference_needs_numpy_and_ml_dtypes_alone() -> None:
    """Everything else is refused at import; each missing extra is named with its command."""
    result = subprocess.run(
        [sys.executable, "-c", BARE], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    layer, mpi, gpu = result.stdout.splitlines()
    assert layer == "[((5, 16), (5, 16)), ((5, 16), (5, 16))]"
    for extra, text in (("mpi", mpi), ("gpu", gpu)):
        assert text.startswith("HeapError")
        assert install_hint(extra) in text
