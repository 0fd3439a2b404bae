"""Schedule, epilogues and input checks of the kernels against the NumPy reference, bit for bit.

Each test runs twice: on a GPU (marker gpu) and, slower, with the kernels compiled for the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mok_ref.combine import combine_forward
from mok_ref.config import MoEConfig
from mok_ref.dispatch import dispatch_backward
from mok_ref.gpu import params as gpu_params
from mok_ref.gpu import schedule
from mok_ref.gpu.errors import BARRIER_INPUTS
from mok_ref.gpu.launch import ParamBlock
from mok_ref.gpu.layer import current_stream
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.numerics import as_values, bf16_to_bits
from mok_ref.schedule import build_schedule
from mok_ref.testing import assert_bitwise_equal, random_routes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


pytestmark = pytest.mark.usefixtures("device")


TABLES = (
    "peer_rank",
    "peer_row",
    "expert_offset",
    "expert_count",
    "row_block_expert",
    "row_block_valid",
)

# name: (tokens per rank, E, K, row order, placement)
CASES = {
    "one_rank": ((37,), 4, 2, "canonical", None),
    "one_token": ((1,), 2, 1, "canonical", None),
    "no_token": ((0, 0), 2, 1, "canonical", None),
    "two_ranks": ((33, 70), 6, 3, "canonical", None),
    "power_of_two": ((64, 64), 8, 2, "canonical", None),
    "uneven": ((1, 128, 7, 64), 8, 2, "canonical", None),
    "empty_ranks": ((0, 5, 0), 6, 4, "canonical", None),
    "eight_ranks": ((16, 0, 31, 5, 64, 1, 2, 300), 16, 4, "canonical", None),
    "placement": ((20, 30, 10), 5, 2, "canonical", (2, 0, 2, 2, 0)),
    "turns_one_rank": ((37,), 4, 2, "round_robin", None),
    "turns": ((33, 70, 0, 5), 8, 3, "round_robin", None),
    "turns_placement": ((40, 11), 5, 9, "round_robin", (1, 1, 0, 1, 1)),
    "many_experts": ((200,), 512, 8, "canonical", None),
    "wide_slots": ((17, 3), 2, 40, "canonical", None),
    "large": ((3000, 5192), 64, 8, "canonical", None),
    "large_turns": ((3000, 5192), 64, 8, "round_robin", None),
}


def make_config(num_ranks: int, num_experts: int, top_k: int, order: str, placement) -> MoEConfig:
    return MoEConfig(
        hidden_size=16,
        intermediate_size=8,
        num_experts=num_experts,
        top_k=top_k,
        ep_size=num_ranks,
        row_order=order,
        placement=placement,
    )


def split(array: np.ndarray, counts: tuple[int, ...], rank: int) -> np.ndarray:
    first = sum(counts[:rank])
    return array[first : first + counts[rank]]


def step_params(workspace: DeviceWorkspace, x, ids, weights) -> ParamBlock:
    block = workspace.params.copy()
    gpu_params.set_params(block, num_tokens=len(x), x_in=x, ids_in=ids, weights_in=weights)
    return block


def launch_tables(workspace: DeviceWorkspace, block: ParamBlock) -> None:
    """What a step launches before its products."""
    stream = current_stream()
    schedule.launch_stage_inputs(workspace, block, stream)
    workspace.heap.barrier(BARRIER_INPUTS)
    schedule.launch_schedule(workspace, block, stream)


def device_schedule(config: MoEConfig, counts, ids, weights, repeats: int = 1):
    """Per rank: (tables, row weights) after `repeats` steps over poisoned buffers."""

    def work(heap):
        import cupy

        workspace = DeviceWorkspace(config, heap, max(counts))
        schedule.warm_up(workspace)
        x = cupy.zeros((counts[heap.rank], config.hidden_size), cupy.uint16)
        mine = [cupy.asarray(split(a, counts, heap.rank)) for a in (ids, weights)]
        for _ in range(repeats):
            workspace.poison()
            heap.barrier()
            block = step_params(workspace, x, *mine)
            launch_tables(workspace, block)
            heap.barrier()
        heap.check(config.top_k)
        table = schedule.read_schedule(workspace)
        return table, workspace.row_weight[: table.num_rows].get()

    return run_virtual_cuda_ranks(len(counts), work, timeout_s=20)


@pytest.mark.parametrize("name", CASES)
def test_schedule_tables(name: str, device: str) -> None:
    if device == "host" and name.startswith("large"):
        pytest.skip("slow on the CPU")
    counts, num_experts, top_k, order, placement = CASES[name]
    config = make_config(len(counts), num_experts, top_k, order, placement)
    rng = np.random.default_rng([7, len(name)])
    ids, weights = random_routes(rng, sum(counts), num_experts, top_k, missing=0.2)
    for rank, (table, row_weight) in enumerate(device_schedule(config, counts, ids, weights, 2)):
        expected = build_schedule(config, rank, ids, np.asarray(counts))
        for field in TABLES:
            assert_bitwise_equal(getattr(table, field), getattr(expected, field), field)
        assert_bitwise_equal(row_weight, reference_row_weights(expected, counts, weights), "weight")


def reference_row_weights(table, counts, weights) -> np.ndarray:
    first = np.concatenate([[0], np.cumsum(counts)])
    rows = first[np.maximum(table.peer_rank, 0)] * weights.shape[1] + table.peer_row
    padded = table.peer_rank < 0
    flat = np.append(weights.ravel(), np.float32(0))
    return np.where(padded, np.float32(0), flat[np.where(padded, -1, rows)]).astype(np.float32)


def test_a_wrong_table_is_noticed() -> None:
    """Negative control: the schedule of other routes does not pass."""
    counts, config = (40,), make_config(1, 4, 2, "canonical", None)
    ids, weights = random_routes(np.random.default_rng(1), 40, 4, 2)
    table, _ = device_schedule(config, counts, ids, weights)[0]
    ids[3, 0] = (ids[3, 0] + 1) % 4
    expected = build_schedule(config, 0, ids, np.asarray(counts))
    with pytest.raises(AssertionError):
        for field in TABLES:
            assert_bitwise_equal(getattr(table, field), getattr(expected, field), field)


@pytest.mark.parametrize("hidden_size", [4, 16, 144, 2880])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 8, 11])
def test_combine(hidden_size: int, shared: bool, top_k: int) -> None:
    rng = np.random.default_rng([hidden_size, top_k])
    num_tokens = 19
    config = MoEConfig(
        hidden_size=hidden_size,
        intermediate_size=8,
        num_experts=16,
        top_k=top_k,
        shared_intermediate_size=8 if shared else 0,
    )
    ids, weights = random_routes(rng, num_tokens, 16, top_k, missing=0.3)
    ids[0] = -1
    rows = rng.standard_normal((num_tokens, top_k, hidden_size)).astype(ml_dtypes.bfloat16)
    rows[ids < 0] = np.nan  # slots without a route hold anything
    start = rng.standard_normal((num_tokens, hidden_size)).astype(ml_dtypes.bfloat16)
    router = rng.standard_normal((num_tokens, hidden_size)).astype(ml_dtypes.bfloat16)
    d_weights = rng.standard_normal((num_tokens, top_k)).astype(np.float32)

    def work(heap):
        import cupy

        workspace = DeviceWorkspace(config, heap, num_tokens)
        workspace.poison()
        x = cupy.zeros((num_tokens, hidden_size), cupy.uint16)
        block = step_params(workspace, x, cupy.asarray(ids), cupy.asarray(weights))
        launch_tables(workspace, block)
        workspace.combine.set(rows.view(np.uint16).reshape(-1, hidden_size))
        workspace.d_topk_weights.set(d_weights.ravel())
        if shared:
            workspace.shared_y.set(start.view(np.uint16))
            workspace.shared_dx.set(start.view(np.uint16))
        schedule.launch_combine(workspace, block, current_stream())
        back = gpu_params.new_params(
            gpu_params.BACKWARD_PARAMS,
            dx=workspace.dx,
            shared_dx=workspace.shared_dx if shared else None,
            d_topk_weights=workspace.d_weights,
            router_dx=(kept := cupy.asarray(router.view(np.uint16))),
        )
        schedule.dispatch_d_weights(workspace, block, back, current_stream())
        schedule.launch_dispatch_backward(workspace, block, back, current_stream())
        heap.check()
        del kept
        return workspace.y.get(), workspace.dx.get(), workspace.d_weights.get()

    y, dx, d_topk_weights = run_virtual_cuda_ranks(1, work)[0]
    begin = as_values(start) if shared else None
    expected = combine_forward(as_values(rows), ids, weights, begin)
    assert_bitwise_equal(y, bf16_to_bits(expected), "y")
    expected = dispatch_backward(as_values(rows), ids, begin, as_values(router))
    assert_bitwise_equal(dx, bf16_to_bits(expected), "dx")
    assert_bitwise_equal(d_topk_weights, np.where(ids < 0, np.float32(0), d_weights), "d_weights")


def test_combine_offsets_beyond_2_31_elements(device: str) -> None:
    """56000 tokens of 8 slots of 7168 columns: 3.2e9 elements; the last token's bits."""
    if device == "host":
        pytest.skip("6.4 GB and a GPU's speed")
    import cupy

    num_tokens, top_k, hidden = 56000, 8, 7168
    rng = np.random.default_rng(9)
    config = MoEConfig(hidden_size=hidden, intermediate_size=8, num_experts=8, top_k=top_k)
    ids = np.full((num_tokens, top_k), -1, np.int32)
    ids[-1] = np.arange(top_k)
    weights = rng.standard_normal((num_tokens, top_k)).astype(np.float32)
    rows = rng.standard_normal((1, top_k, hidden)).astype(ml_dtypes.bfloat16)

    def work(heap):
        workspace = DeviceWorkspace(config, heap, num_tokens, training=False, path="portable")
        x = cupy.zeros((num_tokens, hidden), cupy.uint16)
        block = step_params(workspace, x, cupy.asarray(ids), cupy.asarray(weights))
        launch_tables(workspace, block)
        workspace.combine[-top_k:].set(rows.view(np.uint16)[0])
        schedule.launch_combine(workspace, block, current_stream())
        heap.check()
        return workspace.y[-1:].get(), int(workspace.y[:-1].any())

    last, others = run_virtual_cuda_ranks(1, work)[0]
    expected = combine_forward(as_values(rows), ids[-1:], weights[-1:])
    assert_bitwise_equal(last, bf16_to_bits(expected), "y of the last token")
    assert others == 0  # tokens without a route: exactly +0


@pytest.mark.parametrize(
    "token, slot, id_value, weight, message",
    [
        (5, 1, 4, 1.0, "topk_ids .* got 4 at rank 0, token 5, slot 1"),
        (0, 0, -2, 1.0, "topk_ids .* got -2 at rank 0, token 0, slot 0"),
        (7, 1, 2**31 - 1, 1.0, "got 2147483647 at rank 0, token 7, slot 1"),
        (6, 0, 1, np.nan, "topk_weights must be finite, got nan at rank 0, token 6, slot 0"),
        (6, 1, 1, -np.inf, "topk_weights must be finite, got -inf at rank 0, token 6, slot 1"),
    ],
)
def test_bad_inputs_count_as_no_route_and_are_named(token, slot, id_value, weight, message) -> None:
    config, num_tokens = make_config(1, 4, 2, "canonical", None), 9
    ids, weights = random_routes(np.random.default_rng(2), num_tokens, 4, 2)
    bad_ids, bad_weights = ids.copy(), weights.copy()
    bad_ids[token, slot], bad_weights[token, slot] = id_value, weight
    bad_ids[8, 1] = 9  # a later bad id must not win

    def work(heap):
        import cupy

        workspace = DeviceWorkspace(config, heap, num_tokens)
        x = cupy.zeros((num_tokens, config.hidden_size), cupy.uint16)
        block = step_params(workspace, x, cupy.asarray(bad_ids), cupy.asarray(bad_weights))
        launch_tables(workspace, block)
        table = schedule.read_schedule(workspace)
        later_id = id_value in range(-1, 4)  # ids are reported before weights
        with pytest.raises(ValueError, match="got 9" if later_id else message):
            heap.check(config.top_k)
        heap.check(config.top_k)  # reported once
        return table

    table = run_virtual_cuda_ranks(1, work)[0]
    ids[token, slot] = ids[8, 1] = -1
    expected = build_schedule(config, 0, ids, np.asarray([num_tokens]))
    for field in TABLES:
        assert_bitwise_equal(getattr(table, field), getattr(expected, field), field)


def test_layout_of_the_parameter_blocks() -> None:
    import cupy

    words = cupy.zeros(16, cupy.uint64)
    schedule.load_kernel("support.cu", "params_layout")((1,), (1,), (words,))
    expected = gpu_params.layout_words()
    assert words.get()[: len(expected)].tolist() == expected


def test_schedule_in_a_graph_follows_new_routes(device: str) -> None:
    """Capture once, write other routes in place, replay: the tables of the new routes."""
    if device == "host":
        pytest.skip("graphs need a device")
    counts, config = (300,), make_config(1, 16, 4, "canonical", None)
    rng = np.random.default_rng(3)

    def work(heap):
        import cupy

        workspace = DeviceWorkspace(config, heap, counts[0])
        schedule.warm_up(workspace)
        x = cupy.zeros((counts[0], config.hidden_size), cupy.uint16)
        ids, weights = (cupy.asarray(a) for a in random_routes(rng, counts[0], 16, 4))
        block = step_params(workspace, x, ids, weights)
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        launch_tables(workspace, block)
        graph = stream.end_capture()
        for _ in range(3):
            new_ids, new_weights = random_routes(rng, counts[0], 16, 4, missing=0.5)
            ids.set(new_ids)
            weights.set(new_weights)
            graph.launch(stream)
            table = schedule.read_schedule(workspace)
            expected = build_schedule(config, 0, new_ids, np.asarray(counts))
            for field in TABLES:
                assert_bitwise_equal(getattr(table, field), getattr(expected, field), field)

    run_virtual_cuda_ranks(1, work)
