"""Heaps on the CPU: books of memory, names, limits, and ranks that go apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import SIZES, make_case, rank_step, splits_of

from mok_ref import HeapError, Workspace, moe_backward, moe_forward, run_ranks
from mok_ref.heap import LocalWorld
from mok_ref.heap.cuda_ipc import CudaIpcHeap
from mok_ref.heap.mpi import MpiSharedHeap
from mok_ref.heap.nvshmem import NvshmemHeap
from mok_ref.heap.protocol import RankMismatch
from mok_ref.heap.slabs import SLAB_BYTES, SlabBook
from mok_ref.heap.virtual_cuda import VirtualCudaWorld

# --------------------------------------------------------------------------- slabs


def test_places_never_overlap_and_freed_ones_are_used_again() -> None:
    """Random requests against a plain list of who holds which byte."""
    rng, book = np.random.default_rng(0), SlabBook()
    held: list[Any] = []
    for _ in range(400):
        if held and rng.random() < 0.45:
            book.give(held.pop(rng.integers(len(held))))
            continue
        num_bytes = int(rng.choice([0, 1, 64, 1000, 3 << 20, 20 << 20]))
        place = book.take(num_bytes)
        if place is None:
            book.add(book.new_slab_bytes(num_bytes))
            place = book.take(num_bytes)
        assert place is not None and place.num_bytes >= max(1, num_bytes)
        assert place.offset % 64 == 0
        for other in held:
            apart = place.offset >= other.offset + other.num_bytes
            assert (
                place.slab != other.slab or apart or place.offset + place.num_bytes <= other.offset
            )
        held.append(place)
    while held:
        book.give(held.pop(rng.integers(len(held))))
    assert list(book.sizes.values()) == [SLAB_BYTES]  # one is kept, the rest given back


def test_small_buffers_share_a_slab_and_large_ones_are_given_back() -> None:
    book = SlabBook()
    assert book.take(10) is None
    first = book.add(book.new_slab_bytes(10))
    assert {book.take(1000).slab for _ in range(50)} == {first}
    assert book.take(SLAB_BYTES + 1) is None
    large = book.add(book.new_slab_bytes(SLAB_BYTES + 1))
    assert book.give(book.take(SLAB_BYTES + 1)) == large


# --------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("timeout", [np.nan, 0, -1, np.inf, 10**400, 2e6, True, "9", None])
@pytest.mark.parametrize(
    "make",
    [
        lambda timeout: LocalWorld(1, timeout),
        lambda timeout: run_ranks(1, print, timeout),
        lambda timeout: MpiSharedHeap(timeout_s=timeout),
        lambda timeout: VirtualCudaWorld(1, timeout),
        lambda timeout: CudaIpcHeap(timeout_s=timeout),
        lambda timeout: NvshmemHeap(timeout_s=timeout),
    ],
    ids=["world", "run_ranks", "mpi", "virtual_cuda", "cuda_ipc", "nvshmem"],
)
def test_a_time_limit_is_a_number_of_seconds(make: Callable[[Any], Any], timeout: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^timeout_s must be a number of seconds > 0 and <= 1e\+06"
    ):
        make(timeout)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda heap: heap.peer(-1, "x"), r"rank must be in 0\.\.0, got -1"),
        (lambda heap: heap.peer(1, "x"), r"rank must be in 0\.\.0, got 1"),
        (lambda heap: heap.peer(0, "y"), "heap name must be one that was allocated, got 'y'"),
        (lambda heap: heap.free("y"), "heap name must be one that was allocated, got 'y'"),
        (lambda heap: heap.alloc("x", (1,), np.int8), "heap name must be new, got 'x' twice"),
        (lambda heap: heap.alloc(7, (1,), np.int8), "heap name must be text of at most 128 bytes"),
        (lambda heap: heap.alloc("é" * 65, (1,), np.int8), "heap name must be text of at most 128"),
        (lambda heap: LocalWorld(2).heap(2), r"rank must be in 0\.\.1, got 2"),
        (lambda heap: LocalWorld("2"), "ranks must be >= 1, got '2'"),
    ],
)
def test_ranks_and_names_are_checked(act: Callable[[Any], Any], message: str) -> None:
    heap = LocalWorld(1).heap(0)
    heap.alloc("x", (1,), np.int8)
    with pytest.raises(ValueError, match=f"^{message}"):
        act(heap)


def test_a_closed_heap_says_so() -> None:
    heap = LocalWorld(1).heap(0)
    heap.alloc("x", (1,), np.int8)
    heap.close()
    heap.close()
    assert not heap._world.memory
    acts: list[Callable[[], Any]] = [
        heap.barrier,
        lambda: heap.peer(0, "x"),
        lambda: heap.free("x"),
        lambda: heap.alloc("y", (1,), np.int8),
    ]
    for act in acts:
        with pytest.raises(HeapError, match=r"^the heap of rank 0 is closed$"):
            act()


# --------------------------------------------------------------------------- ranks apart


def errors_of(size: int, work: Callable[[Any], Any]) -> list[str]:
    """What every rank's call raised."""

    def caught(heap: Any) -> str:
        with pytest.raises(ValueError) as error:
            work(heap)
        return str(error.value)

    return run_ranks(size, caught, timeout_s=10)


def test_other_phases_in_one_barrier_are_refused_on_every_rank() -> None:
    def work(heap: Any) -> None:
        for _ in range(3):
            heap.barrier("together")
        heap.barrier("backward" if heap.rank == 2 else "forward")

    texts = errors_of(3, work)
    expected = "calls must be the same on all ranks, got forward on rank {} and backward on rank 2"
    assert texts[:2] == [expected.format(0), expected.format(1)]
    assert texts[2].endswith("got backward on rank 2 and forward on rank 0")


@pytest.mark.parametrize(
    "ask",
    [
        lambda rank: (f"name{rank}", (4,), np.float32),
        lambda rank: ("name", (4 + rank,), np.float32),
        lambda rank: ("name", (4,), (np.float32, np.float64)[rank]),
    ],
    ids=["name", "shape", "dtype"],
)
def test_other_allocations_are_refused_on_every_rank(ask: Callable[[int], Any]) -> None:
    def work(heap: Any) -> None:
        heap.alloc("first", (1,), np.int8)
        try:
            heap.alloc(*ask(heap.rank))
        finally:  # the heap goes on
            assert heap.alloc("name", (2,), np.int8).shape == (2,)

    for text in errors_of(2, work):
        assert text.startswith("calls must be the same on all ranks, got allocating 'name")


def workspaces(heap: Any, **second: Any) -> Workspace:
    config = make_case(SIZES["plain"]).config(2)
    return Workspace(replace(config, **second) if heap.rank else config, heap, 20)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (dict(placement=(1, 0, 1, 0, 1, 0)), "placement=(1, 0, 1, 0, 1, 0)"),
        (dict(row_order="round_robin"), "row_order='round_robin'"),
        (dict(swiglu_limit=7), "swiglu_limit=7.0"),
        (dict(dtype="mxfp8"), "dtype='mxfp8'"),
        (dict(hidden_size=64), "hidden_size=64"),
        (dict(scale_rule="ocp"), "scale_rule='ocp'"),
        (dict(macrobatch=128), "macrobatch=128"),
        (dict(arithmetic="fast"), "arithmetic='fast'"),
    ],
)
def test_other_settings_are_named_when_a_workspace_is_made(change: dict, shown: str) -> None:
    texts = errors_of(2, lambda heap: workspaces(heap, **change))
    start = "workspace must be made with the same settings on all ranks, got "
    assert texts[0].startswith(start) and texts[0].endswith(f" and {shown} on rank 1")
    assert texts[1].startswith(f"{start}{shown} on rank 1 and ")


def test_settings_too_long_to_show_differ_all_the_same() -> None:
    owners = [0] * 300
    config = replace(make_case(SIZES["plain"]).config(2), num_experts=300)

    def work(heap: Any) -> None:
        mine = [*owners[:-1], heap.rank]
        Workspace(replace(config, placement=tuple(mine)), heap, 4)

    assert "... on rank 0 and placement=(0, 0, " in errors_of(2, work)[0]


def test_max_tokens_must_agree_and_saved_rows_need_not() -> None:
    config = make_case(SIZES["plain"]).config(2)
    texts = errors_of(2, lambda heap: Workspace(config, heap, 20 + heap.rank))
    assert texts[0].endswith("got max_tokens=20 on rank 0 and max_tokens=21 on rank 1")
    run_ranks(2, lambda heap: Workspace(config, heap, 20, max_saved_rows=128 * heap.rank))


def test_other_workspaces_in_one_step_are_refused() -> None:
    """Two workspaces of one config, taken in another order on rank 1: forward, then backward."""
    case = make_case(SIZES["plain"])
    config, splits = case.config(2), splits_of(37, 2)

    def forward(heap: Any) -> None:
        pair = [Workspace(config, heap, 37) for _ in range(2)]
        rank_step(heap, case, config, splits, pair[heap.rank])

    def backward(heap: Any) -> None:
        mine = slice(0, 16) if heap.rank == 0 else slice(16, 37)
        experts = config.experts_of(heap.rank)
        weights = type(case.weights)(*(w[experts] for w in case.weights))
        inputs = (case.x[mine], case.topk_ids[mine], case.topk_weights[mine], weights, case.shared)
        contexts = [moe_forward(config, heap, *inputs)[1] for _ in range(2)]
        moe_backward(contexts[heap.rank], case.dy[mine])

    for name, work in (("forward", forward), ("backward", backward)):
        for text in errors_of(2, work):
            assert text.startswith(f"{name} must take the same workspace on all ranks, got layer")


def test_mismatch_is_an_error_of_both_kinds() -> None:
    assert issubclass(RankMismatch, HeapError) and issubclass(RankMismatch, ValueError)


# --------------------------------------------------------------------------- private workspaces


def forwards_only(heap: Any, steps: int, keep: int = 0) -> int:
    """Buffers held after some forwards without backward, the first `keep` contexts kept."""
    case = make_case(SIZES["plain"])
    config, splits = case.config(heap.size), splits_of(37, heap.size)
    first = int(splits[: heap.rank].sum())
    mine, experts = slice(first, first + int(splits[heap.rank])), config.experts_of(heap.rank)
    weights = type(case.weights)(*(w[experts] for w in case.weights))
    kept = []
    for step in range(steps):
        inputs = (case.x[mine], case.topk_ids[mine], case.topk_weights[mine], weights, case.shared)
        _, context = moe_forward(config, heap, *inputs)
        if step < keep:
            kept.append(context)
        del context
    held = len(heap._world.memory)
    for context in kept:
        moe_backward(context, case.dy[mine])
    return held


def test_forwards_without_backward_hold_one_workspace() -> None:
    for ranks in (1, 2):
        assert run_ranks(ranks, lambda heap: forwards_only(heap, 6)) == run_ranks(
            ranks, lambda heap: forwards_only(heap, 1)
        )


def test_a_kept_context_keeps_its_workspace_and_one_rank_suffices() -> None:
    held = run_ranks(2, lambda heap: forwards_only(heap, 1))[0]
    assert run_ranks(2, lambda heap: forwards_only(heap, 4, keep=2))[0] == 3 * held

    def one_sided(heap: Any) -> int:
        case = make_case(SIZES["no-token"])
        config = case.config(2)
        experts = config.experts_of(heap.rank)
        weights = type(case.weights)(*(w[experts] for w in case.weights))
        inputs = (case.x, case.topk_ids, case.topk_weights, weights, case.shared)
        contexts = []
        for _ in range(3):
            context = moe_forward(config, heap, *inputs)[1]
            if heap.rank == 0:
                contexts.append(context)
            del context
        return len(heap._world.memory)

    assert run_ranks(2, one_sided)[0] == 3 * held


# --------------------------------------------------------------------------- MPI processes


@pytest.mark.mpi
def test_many_forwards_without_backward(mpi_run) -> None:
    """More workspaces of nine buffers than an MPI library has windows for."""
    result = mpi_run(2, "forwards", "250")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["windows", "1"]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("phases", "calls must be the same on all ranks, got "),
        ("long phases", "calls must be the same on all ranks, got "),
        ("names", "calls must be the same on all ranks, got allocating '"),
        ("settings", "workspace must be made with the same settings on all ranks, got row_order="),
    ],
)
def test_mpi_ranks_apart_are_told(what: str, message: str, mpi_run) -> None:
    result = mpi_run(2, "apart", what)
    assert result.returncode != 0
    assert [report["rank"] for report in result.reports] == [0, 1]
    for report in result.reports:
        assert report["error"].startswith(message)
        assert report["seconds"] < 10


@pytest.mark.mpi
def test_windows_are_bounded_by_name(mpi_run) -> None:
    result = mpi_run(2, "many_windows")
    assert result.returncode != 0
    assert len(result.reports) == 2
    for report in result.reports:
        assert report["error"].startswith("heap must have at most 3 windows, got one more for 'b3'")
