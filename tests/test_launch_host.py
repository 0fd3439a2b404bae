"""Prepared launches: made once per set of arrays, right for every other set, bounded in number."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import host_cupy
import numpy as np
import pytest
from gpu.host_cuda import compiler
from gpu.test_layer_gpu import as_host, collect, make_case, rank_arguments, rank_dy, reference
from host_cupy import host_cuda_device

from mok_ref.gpu import layer
from mok_ref.gpu.launch import (
    MAX_PREPARED,
    Launch,
    ParamBlock,
    early_launcher,
    prepared,
    remember,
)
from mok_ref.gpu.params import LAYER_PARAMS, new_params, set_params
from mok_ref.gpu.workspace import DeviceWorkspace
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.testing import assert_bitwise_equal

needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="no C++ compiler to build the kernels for the CPU"
)


def test_a_block_is_fixed_once_something_was_prepared_from_it() -> None:
    block = new_params(LAYER_PARAMS, rank=3)
    assert isinstance(block, ParamBlock)
    assert prepared(block, "key", lambda: "made") == "made"
    assert prepared(block, "key", lambda: pytest.fail("made again")) == "made"
    with pytest.raises(ValueError, match="read-only"):
        set_params(block, rank=4)
    other = block.copy()
    set_params(other, rank=4)  # a copy is free, and nothing of the first is valid for it
    assert other.prepared == {} and int(block["rank"]) == 3


def test_what_is_remembered_is_bounded() -> None:
    cache: dict[int, int] = {}
    for number in range(3 * MAX_PREPARED):
        assert remember(cache, number, -number) == -number
    assert sorted(cache) == list(range(2 * MAX_PREPARED, 3 * MAX_PREPARED))


def step(config, heap, workspace, x, others, dy):
    y, context = layer.forward(config, heap, x, *others, workspace, "all")
    return collect(as_host(y), layer.backward(context, dy))


def device_arguments(config, inputs):
    """x, what follows it, and dy of a case of one rank, as kernels read them."""
    x, ids, weights, experts, _ = rank_arguments(config, inputs, 0)
    x, ids, weights, dy = map(layer.on_device, (x, ids, weights, rank_dy(inputs, 0)))
    return x, (ids, weights, type(experts)(*map(layer.on_device, experts)), None), dy


def on_one_rank(work: Any) -> Any:
    with host_cuda_device():
        return run_virtual_cuda_ranks(1, work, timeout_s=60)[0]


@needs_compiler
def test_the_same_arrays_are_prepared_once_and_others_anew(monkeypatch) -> None:
    config, inputs = make_case("one_rank")
    made: list[str] = []

    class Counted(Launch):
        __slots__ = ()

        def __init__(self, kernel: Any, *arguments: Any, **options: Any) -> None:
            made.append(kernel._name)
            super().__init__(kernel, *arguments, **options)

    def work(heap):
        import cupy

        from mok_ref.gpu import schedule

        monkeypatch.setattr(schedule, "Launch", Counted)
        workspace = DeviceWorkspace(config, heap, 40, path="portable")
        x, others, dy = device_arguments(config, inputs)
        other_x = cupy.asarray(np.flip(as_host(x), 0))
        results = [step(config, heap, workspace, x, others, dy)]
        first = len(made)
        results.append(step(config, heap, workspace, x, others, dy))
        assert 0 < first == len(made)
        results.append(step(config, heap, workspace, other_x, others, dy))
        assert len(made) == 2 * first and len(workspace.steps) == 2
        workspace.close()
        assert not workspace.steps
        return results

    first, second, flipped = on_one_rank(work)
    expected = reference(config, inputs)[0]
    turned = reference(config, inputs._replace(x=np.flip(inputs.x, 0)))[0]
    for name, value in expected.items():
        assert_bitwise_equal(first[name], value, name)
        assert_bitwise_equal(second[name], value, name)
        assert_bitwise_equal(flipped[name], turned[name], name)


@needs_compiler
def test_a_known_step_only_enqueues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is checked, converted, looked for in the workspace's tables or made again."""
    config, inputs = make_case("one_rank")

    def work(heap):
        workspace = DeviceWorkspace(config, heap, 40, path="portable")
        x, others, dy = device_arguments(config, inputs)
        results = [step(config, heap, workspace, x, others, dy)]
        names = ("on_device", "prepare", "as_output", "set_params", "new_params")
        for name in (*names, "_check_apart", "_check_arrays", "forward_path", "backward_path"):
            monkeypatch.setattr(layer, name, lambda *_, name=name: pytest.fail(name))
        results.append(step(config, heap, workspace, x, others, dy))
        return results

    first, second = on_one_rank(work)
    for name, value in first.items():
        assert_bitwise_equal(second[name], value, name)


@needs_compiler
def test_an_address_with_other_strides_is_another_step() -> None:
    """Same address, shape and dtype, other rows: what lies there is not what is meant."""
    config, inputs = make_case("one_rank")

    def work(heap):
        import cupy

        workspace = DeviceWorkspace(config, heap, 40, path="portable")
        x, ids, weights, experts, _ = rank_arguments(config, inputs, 0)
        others = (layer.on_device(ids), layer.on_device(weights), experts, None)
        given = as_host(x), as_host(rank_dy(inputs, 0))
        count, width = given[0].shape
        rooms = [layer.on_device(cupy.zeros((count, 2 * width), np.uint16)) for _ in given]
        results = []
        for dense in (True, False, True):
            arrays = []
            for room, values in zip(rooms, given, strict=True):
                room[...] = 0x7FFF
                first = room.reshape(-1)[: count * width].reshape(count, width)
                arrays.append(first if dense else room[:, :width])
                arrays[-1][...] = values
            x, dy = arrays
            results.append(step(config, heap, workspace, x, others, dy))
        return results

    actual = on_one_rank(work)
    expected = reference(config, inputs)[0]
    for found in actual:
        for name, value in expected.items():
            assert_bitwise_equal(found[name], value, name)


@needs_compiler
def test_every_recording_has_launches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that stamp their tasks are other kernels: a step that was prepared without them is
    prepared again, once per recording, and serves unchanged when none is on."""
    from mok_ref.gpu import portable, schedule, trace

    config, inputs = make_case("one_rank")
    made: list[int] = []
    loaded: list[int] = []
    warm_up = portable.warm_up

    class Counted(Launch):
        __slots__ = ()

        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append(1)
            super().__init__(*arguments, **options)

    def counted_warm_up(workspace: Any) -> None:
        loaded.append(1)
        warm_up(workspace)

    def work(heap):
        monkeypatch.setattr(schedule, "Launch", Counted)
        monkeypatch.setattr(portable, "warm_up", counted_warm_up)
        workspace = DeviceWorkspace(config, heap, 40, path="portable")
        x, others, dy = device_arguments(config, inputs)
        results, counts = [], []

        def run() -> None:
            made.clear()
            loaded.clear()
            results.append(step(config, heap, workspace, x, others, dy))
            counts.append((len(made), len(loaded)))

        run()
        run()
        for _ in range(2):
            with trace.recording():
                run()
                run()
            run()
        _, context = layer.forward(config, heap, x, *others, workspace, "all")
        with trace.recording():  # a backward within it records, whenever its forward was
            made.clear()
            layer.backward(context, dy)
            assert made
        return results, counts

    results, counts = on_one_rank(work)
    new, old = counts[0], (0, 0)
    assert new[0] > 0 and new[1] == 1
    assert counts == [new, old, new, old, old, new, old, old]
    for result in results:
        for name, value in reference(config, inputs)[0].items():
            assert_bitwise_equal(result[name], value, name)


@needs_compiler
def test_arrays_that_are_not_aligned_are_copied() -> None:
    """Kernels load 16 bytes at a time; a view may begin anywhere."""
    config, inputs = make_case("one_rank")

    def work(heap):
        import cupy

        workspace = DeviceWorkspace(config, heap, 40, path="portable")
        x, *others = rank_arguments(config, inputs, 0)
        room = cupy.zeros(x.size + 8, np.uint16)
        first = next(i for i in range(8) if room[i:].data.ptr % 16)
        shifted = room[first : first + x.size].reshape(x.shape)
        shifted[...] = as_host(x)
        assert layer.on_device(shifted).data.ptr % 16 == 0
        return step(config, heap, workspace, shifted, others, rank_dy(inputs, 0))

    actual = on_one_rank(work)
    for name, value in reference(config, inputs)[0].items():
        assert_bitwise_equal(actual[name], value, name)


@needs_compiler
def test_one_rank_alone_pulls_from_the_callers_array() -> None:
    """x and dy are read in place: their heap buffers stay as they were."""
    config, inputs = make_case("one_rank")

    def work(heap):
        workspace = DeviceWorkspace(config, heap, 40, path="portable")
        workspace.poison()
        x, *others = rank_arguments(config, inputs, 0)
        step(config, heap, workspace, x, others, rank_dy(inputs, 0))
        return as_host(workspace.mine("x")), as_host(workspace.mine("dy"))

    for buffer in on_one_rank(work):
        assert (buffer == 0xFFFF).all()


@needs_compiler
@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
def test_an_address_with_other_rows_is_another_step(dtype: str) -> None:
    """Arrays die and others take their addresses: shapes tell their launches apart."""
    config, inputs = make_case("one_rank")
    config = replace(config, dtype=dtype)
    counts = (40, 23, 40)

    def work(heap):
        workspace = DeviceWorkspace(config, heap, 40, path="portable")
        x, (ids, weights, experts, _), dy = device_arguments(config, inputs)
        rooms = (x, ids, weights, dy)
        results = []
        for count in counts:
            x, ids, weights, dy = (room[:count] for room in rooms)
            results.append(step(config, heap, workspace, x, (ids, weights, experts, None), dy))
        assert len(workspace.steps) == 2
        return results

    actual = on_one_rank(work)
    for count, found in zip(counts, actual, strict=True):
        parts = {name: getattr(inputs, name)[:count] for name in ("x", "ids", "weights", "dy")}
        for name, value in reference(config, inputs._replace(**parts, counts=(count,)))[0].items():
            assert_bitwise_equal(found[name], value, f"{count} {name}")


@pytest.mark.parametrize(("capability", "early"), [("80", False), ("90", True)])
def test_a_kernel_is_launched_early_where_the_device_can(
    capability: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    seen: list[Any] = []

    def launch_early(config: Any, function: Any, arguments: int, extra: int) -> tuple[int]:
        (attribute,) = config.attrs
        seen.append((config.gridDimX, config.gridDimY, config.blockDimX, config.sharedMemBytes))
        seen.append((attribute.value.programmaticStreamSerializationAllowed, int(config.hStream)))
        return (len(seen) // 4,)  # the second launch is refused

    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch_early)
    monkeypatch.setattr(host_cupy.Device, "compute_capability", capability)
    with host_cuda_device():
        plain = sys.modules["cupy"].cuda.driver
        monkeypatch.setattr(plain, "launchKernel", lambda *shape: seen.append(shape))
        launch = early_launcher(1, (3, 2, 1), 64, 512, 0)
        launch(7)
        if not early:
            assert seen == [(1, 3, 2, 1, 64, 1, 1, 512, 7, 0, 0)]
            return
        assert seen == [(3, 2, 64, 512), (1, 7)]
        with pytest.raises(RuntimeError, match="kernel launch refused: 1"):
            launch(7)
