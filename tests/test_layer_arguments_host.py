"""What the device layer refuses before its first launch, and what its workspace takes up: kernels
compiled for the CPU stand in for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gpu import test_layer_gpu as layers
from gpu.host_cuda import compiler
from host_cupy import HostFunction, host_cuda_device

from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.gpu import hopper, hopper_backward, hopper_mxfp8, hopper_mxfp8_backward, layer
from mok_ref.gpu.workspace import DeviceWorkspace, workspace_bytes
from mok_ref.heap.virtual_cuda import run_virtual_cuda_ranks
from mok_ref.layer import Gradients
from mok_ref.testing import assert_bitwise_equal
from mok_ref.validation import gradient_shapes

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="no C++ compiler to build the kernels for the CPU"
)
CONFIG = MoEConfig(32, 16, 4, 2, shared_intermediate_size=24)
TOKENS = 20
INPUTS = layers.make_inputs(CONFIG, (TOKENS,), 1)
SHAPES = gradient_shapes(CONFIG, 0)


class Rank:
    """One rank with its arrays on the device."""

    def __init__(self, heap: Any, training: bool = True) -> None:
        x, ids, weights, experts, shared = layers.rank_arguments(CONFIG, INPUTS, 0)
        self.heap = heap
        self.workspace = DeviceWorkspace(CONFIG, heap, TOKENS, training=training, path="portable")
        self.x, self.ids, self.weights = map(layer.on_device, (x, ids, weights))
        self.experts = ExpertWeights(*map(layer.on_device, experts))
        self.shared = ExpertWeights(*map(layer.on_device, shared))
        self.dy = layer.on_device(layers.rank_dy(INPUTS, 0))

    def forward(self, x: Any = None, workspace: Any = None) -> tuple[Any, Any]:
        arguments = (self.ids, self.weights, self.experts, self.shared)
        workspace = self.workspace if workspace is None else workspace
        x = self.x if x is None else x
        return layer.forward(CONFIG, self.heap, x, *arguments, workspace, "all")

    def step(self, x: Any = None, dy: Any = None) -> dict[str, np.ndarray]:
        y, context = self.forward(x)
        kept = layers.as_host(y).copy()
        found = layers.collect(kept, layer.backward(context, self.dy if dy is None else dy))
        return {name: value.copy() for name, value in found.items()}


def on_one_rank(work: Callable[[Rank], Any], **options: Any) -> Any:
    with host_cuda_device():
        return run_virtual_cuda_ranks(1, lambda heap: work(Rank(heap, **options)), timeout_s=60)[0]


def zeros(shape: tuple[int, ...]) -> Any:
    """Zeros on the device, aligned for the kernels."""
    return aligned(shape, 0)


def aligned(shape: tuple[int, ...], offset: int) -> Any:
    """Float32 zeros that begin `offset` bytes behind a multiple of 16."""
    import cupy

    count = int(np.prod(shape))
    room = cupy.zeros(count + 8, np.float32)
    first = (-room.data.ptr % 16 + offset) // 4
    return room[first : first + count].reshape(shape)


def main_grad(**others: Any) -> Gradients:
    return Gradients(None, None, **{n: zeros(s) for n, s in SHAPES.items()} | others)


# --------------------------------------------------------------------------- router_share

SHARES = {
    "values": (lambda: np.ones((TOKENS, 32), np.float32), r"float32 \(20, 32\)"),
    "few-rows": (lambda: np.full((3, 32), 0x3F80, np.uint16), r"uint16 \(3, 32\)"),
    "one-row": (lambda: np.full((1, 32), 0x3F80, np.uint16), r"uint16 \(1, 32\)"),
    "integers": (lambda: np.ones((TOKENS, 32), np.int32), r"int32 \(20, 32\)"),
    "none": (lambda: None, "NoneType"),
}


@pytest.mark.parametrize("name", SHARES)
def test_router_share_must_return_bf16_rows(name: str) -> None:
    share, got = SHARES[name]
    rule = rf"^router_share must return bfloat16 or uint16 of shape \(20, 32\), got {got}$"

    def work(rank: Rank) -> None:
        _, context = rank.forward()
        with pytest.raises(ValueError, match=rule):
            layer.backward(context, rank.dy, None, lambda d_topk_weights: share())

    on_one_rank(work)


# --------------------------------------------------------------------------- main_grad

MAIN_GRADS: dict[str, tuple[Callable[[], Gradients], str]] = {
    "strided": (
        lambda: main_grad(dw_gate=zeros((4, 16, 64))[..., ::2]),
        "^main_grad.dw_gate must be C-contiguous, got strides ",
    ),
    "twice": (
        lambda: main_grad(**dict.fromkeys(("dw_gate", "dw_up"), zeros(SHAPES["dw_gate"]))),
        "^main_grad.dw_up must not overlap main_grad.dw_gate$",
    ),
    "overlapping": (
        lambda: main_grad(
            **dict(zip(("dw_gate", "dw_up"), overlapping(SHAPES["dw_gate"]), strict=True))
        ),
        "^main_grad.dw_up must not overlap main_grad.dw_gate$",
    ),
    "unaligned": (
        lambda: main_grad(dw_down=aligned(SHAPES["dw_down"], 4)),
        "^main_grad.dw_down must be 16-byte aligned, got address 0x",
    ),
    "host": (
        lambda: main_grad(dw_gate=np.zeros(SHAPES["dw_gate"], np.float32)),
        r"^main_grad.dw_gate must be float32 \(4, 16, 32\) on the device, "
        r"got float32 \(4, 16, 32\) on the host$",
    ),
    "shape": (
        lambda: main_grad(dw_gate=zeros((1,))),
        r"^main_grad.dw_gate must be float32 \(4, 16, 32\) on the device, got float32 \(1,\)$",
    ),
    "none": (
        lambda: main_grad(shared_dw_up=None),
        r"^main_grad.shared_dw_up must be float32 \(24, 32\) on the device, got NoneType$",
    ),
}


def overlapping(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Two arrays of which one begins inside the other."""
    count = int(np.prod(shape))
    room = zeros((count + 4,))
    return room[:count].reshape(shape), room[4:].reshape(shape)


@pytest.mark.parametrize("name", MAIN_GRADS)
def test_main_grad_that_kernels_cannot_write(name: str) -> None:
    """Refused before the first launch: the context serves a right call afterwards."""
    make, message = MAIN_GRADS[name]

    def work(rank: Rank) -> Any:
        expected = rank.step()
        _, context = rank.forward()
        with pytest.raises(ValueError, match=message):
            layer.backward(context, rank.dy, make())
        return expected, layers.collect(expected["y"], layer.backward(context, rank.dy))

    expected, actual = on_one_rank(work)
    for tensor, value in expected.items():
        assert_bitwise_equal(actual[tensor], value, tensor)


def test_a_buffer_that_served_is_checked_again_with_other_strides() -> None:
    def work(rank: Rank) -> None:
        wide = zeros((4, 16, 64))
        good = wide.reshape(-1)[: 4 * 16 * 32].reshape(SHAPES["dw_gate"])
        layer.backward(rank.forward()[1], rank.dy, main_grad(dw_gate=good))
        with pytest.raises(ValueError, match="dw_gate must be C-contiguous"):
            layer.backward(rank.forward()[1], rank.dy, main_grad(dw_gate=wide[..., ::2]))

    on_one_rank(work)


def test_the_workspaces_own_gradients_may_be_continued() -> None:
    def work(rank: Rank) -> None:
        gradients = layer.backward(rank.forward()[1], rank.dy)
        layer.backward(rank.forward()[1], rank.dy, gradients)
        with pytest.raises(ValueError, match=r"^main_grad.dw_up must not overlap the workspace's "):
            place = rank.workspace.dhu_for_test
            layer.backward(rank.forward()[1], rank.dy, main_grad(dw_up=place))

    def with_place(rank: Rank) -> None:
        rank.workspace.scratch("dhu_for_test", SHAPES["dw_up"], np.float32)
        work(rank)

    on_one_rank(with_place)


# --------------------------------------------------------------------------- places of x and dy


def test_x_must_not_lie_in_y_while_backward_may_follow() -> None:
    """With one rank x is read in place, also by backward, and y is written over it."""

    def work(rank: Rank) -> None:
        y, _ = rank.forward()
        for _ in range(2):  # a refused step is not remembered as a good one
            with pytest.raises(ValueError, match=r"^x must not overlap the workspace's y$"):
                rank.forward(y)
        with pytest.raises(ValueError, match=r"^x must not overlap the workspace's shared_y$"):
            rank.forward(rank.workspace.shared_y)
        _, context = rank.forward()
        with pytest.raises(ValueError, match=r"^dy must not overlap the workspace's shared_dx$"):
            layer.backward(context, rank.workspace.shared_dx)
        layer.backward(context, rank.dy)

    on_one_rank(work)


def test_places_that_are_read_before_they_are_written() -> None:
    """x in dx, dy in y or dx, both in their own staging buffers: the same bits as elsewhere."""

    def work(rank: Rank) -> list[tuple[Any, Any]]:
        expected, workspace, found = rank.step(), rank.workspace, []
        for x, dy in (("dx", None), ("x", None), (None, "dy"), (None, "dx")):
            places = []
            for place, values in ((x, rank.x), (dy, rank.dy)):
                if place is not None:
                    workspace.buffers[place][...] = values
                places.append(None if place is None else workspace.buffers[place])
            found.append(rank.step(*places))
        return [(expected, one) for one in found]

    for expected, actual in on_one_rank(work):
        for tensor, value in expected.items():
            assert_bitwise_equal(actual[tensor], value, tensor)


def test_without_backward_layers_may_follow_each_other_in_place() -> None:
    def work(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
        y, _ = rank.forward()
        expected, _ = rank.forward(y.copy())
        expected = layers.as_host(expected).copy()
        y, _ = rank.forward()
        return expected, layers.as_host(rank.forward(y)[0])

    assert_bitwise_equal(*on_one_rank(work, training=False))


# --------------------------------------------------------------------------- workspaces


def test_a_closed_workspace_launches_nothing() -> None:
    def work(rank: Rank) -> None:
        _, context = rank.forward()
        rank.workspace.close()
        rank.workspace.close()
        nothing = mock.patch.object(HostFunction, "run", side_effect=AssertionError("launched"))
        with nothing, pytest.raises(ValueError, match=r"^workspace is closed$"):
            rank.forward()
        with nothing, pytest.raises(ValueError, match=r"^workspace is closed$"):
            layer.backward(context, rank.dy)
        with pytest.raises(ValueError, match=r"^workspace must be a DeviceWorkspace, got int$"):
            rank.forward(workspace=5)

    on_one_rank(work)


def test_clusters_may_be_changed_between_steps(hopper_without_kernels: None) -> None:
    """What was prepared for another number is not launched again; its kernel is loaded before the
    first barrier."""
    config = MoEConfig(64, 32, 4, 2)
    inputs = layers.make_inputs(config, (TOKENS,), 1)

    def work(heap: Any) -> list[list[tuple[str, ...]]]:
        workspace = DeviceWorkspace(config, heap, TOKENS, path="hopper")
        given = [layer.on_device(array) for array in layers.rank_arguments(config, inputs, 0)[:3]]
        experts = ExpertWeights(*map(layer.on_device, layers.rank_arguments(config, inputs, 0)[3]))
        assert workspace.cluster_size == hopper.DEFAULT_CLUSTER_SIZE
        loaded: list[tuple[str, ...]] = []
        plain = hopper.load_kernel

        def load(source: str, name: str, macros: tuple[str, ...], *rest: Any) -> Any:
            loaded.append(macros)
            return plain(source, name, macros, *rest)

        found = []
        for size in (2, 2, 1, 1, 2):
            workspace.cluster_size = size
            loaded.clear()
            with mock.patch.object(hopper, "load_kernel", load):
                layer.forward(config, heap, *given, experts, None, workspace, "all")
            found.append(list(loaded))
        for wrong in (0, 3, True, "2", 2.0):
            with pytest.raises(
                ValueError, match=rf"^cluster_size must be one of 1, 2, got {wrong!r}"
            ):
                workspace.cluster_size = wrong
        return found

    first, *others = run_virtual_cuda_ranks(1, work, timeout_s=60)[0]
    two = [("MOK_CLUSTER_SIZE=2",)] * 2  # in warm_up, then for the launch
    assert [first, *others] == [two, [], [()] * 2, [], two]


@pytest.mark.parametrize("value", [float("nan"), True, "20", 20.5, -1, None])
def test_max_tokens_is_a_number_of_tokens(value: Any) -> None:
    message = rf"^max_tokens must be an integer >= 0, got {value!r}$"

    def work(rank: Rank) -> None:
        with pytest.raises(ValueError, match=message):
            DeviceWorkspace(CONFIG, rank.heap, value, path="portable")

    on_one_rank(work)
    with pytest.raises(ValueError, match=message):
        workspace_bytes(CONFIG, 0, value)


@pytest.mark.parametrize("value", [1.5, True, "7", -5])
def test_max_saved_rows_is_a_number_of_rows(value: Any) -> None:
    message = rf"^max_saved_rows must be an integer >= 0 or None, got {value!r}$"

    def work(rank: Rank) -> None:
        with pytest.raises(ValueError, match=message):
            DeviceWorkspace(CONFIG, rank.heap, 20, value, path="portable")

    on_one_rank(work)
    with pytest.raises(ValueError, match=message):
        workspace_bytes(CONFIG, 0, 20, value)


@pytest.mark.parametrize("rank", [-1, 1, 5, True, 0.0])
def test_a_rank_of_the_layer(rank: Any) -> None:
    message = rf"^rank must be an integer in 0\.\.0, got {rank!r}$"
    with pytest.raises(ValueError, match=message):
        workspace_bytes(CONFIG, rank, 20)


class NoKernel(HostFunction):
    """A kernel of the Hopper path that computes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(SimpleNamespace(), name)  # type: ignore[arg-type]

    def run(self, *shape_and_arguments: Any) -> None:
        pass


@pytest.fixture
def hopper_without_kernels() -> Iterator[None]:
    """The Hopper path's host code with everything it allocates."""
    modules = (hopper, hopper_backward, hopper_mxfp8, hopper_mxfp8_backward)
    kept: dict[str, NoKernel] = {}

    def load(source: str, name: str, *_: Any) -> NoKernel:
        return kept.setdefault(name, NoKernel(name))

    with host_cuda_device(), ExitStack() as stack:
        for module in modules:
            for name, value in (
                ("load_kernel", load),
                ("encode_tiled", lambda *_: np.zeros(16, np.uint64)),
            ):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        for owner, name, value in (
            (hopper, "_num_multiprocessors", lambda device: 2),
            (hopper_backward, "_num_multiprocessors", lambda: 2),
            (hopper_mxfp8, "num_ctas", lambda workspace: 2),
            (layer, "_hopper_refusal", lambda config: ""),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        runtime = __import__("cupy").cuda.runtime
        stack.enter_context(mock.patch.object(runtime, "getDevice", lambda: 0, create=True))
        yield


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shared", [0, 16])
@pytest.mark.parametrize("path", ["hopper", "portable"])
@pytest.mark.parametrize(
    "arguments",
    [
        dict(dtype="bf16"),
        dict(dtype="bf16", grad_dtype="bf16", minibatch=128, macrobatch=128),
        dict(dtype="mxfp8"),
        dict(dtype="mxfp8", minibatch=128, macrobatch=128),
    ],
    ids=["bf16", "bf16-turns", "mxfp8", "mxfp8-turns"],
)
def test_the_memory_function_is_what_a_step_allocates(
    arguments: dict, path: str, shared: int, training: bool, hopper_without_kernels: None
) -> None:
    config = MoEConfig(64, 32, 4, 2, shared_intermediate_size=shared, **arguments)
    inputs = layers.make_inputs(config, (40,), 1)
    names = set(gradient_shapes(config, 0))

    def work(heap: Any) -> dict[str, int]:
        workspace = DeviceWorkspace(config, heap, 40, 0, training, path)
        given = layers.rank_arguments(config, inputs, 0)
        _, context = layer.forward(config, heap, *given, workspace, "all")
        if training:
            layer.backward(context, layers.rank_dy(inputs, 0))
        assert layer.path_name(workspace) == path
        return {n: int(a.nbytes) for n, a in workspace.buffers.items() if n not in names}

    made = run_virtual_cuda_ranks(1, work, timeout_s=60)[0]
    said = workspace_bytes(config, 0, 40, 0, training, path)
    assert said == made | {"total": sum(made.values())}


def test_the_memory_function_counts_the_path_that_can_run() -> None:
    odd = MoEConfig(17, 16, 4, 2)
    assert workspace_bytes(odd, 0, 20) == workspace_bytes(odd, 0, 20, path="portable")
    even = MoEConfig(16, 16, 4, 2)
    assert workspace_bytes(even, 0, 20) == workspace_bytes(even, 0, 20, path="hopper")
    with pytest.raises(ValueError, match="path 'hopper' is not possible here: hidden_size must be"):
        workspace_bytes(odd, 0, 20, path="hopper")
    with pytest.raises(ValueError, match=r"^path must be auto, hopper, portable, got 'fast'$"):
        workspace_bytes(odd, 0, 20, path="fast")


@pytest.mark.parametrize(
    ("dtype", "sizes", "message"),
    [
        ("mxfp8", (16, 16, 4), "shared_intermediate_size must be a multiple of 8, got 4"),
        ("mxfp8", (24, 16, 0), "hidden_size must be a multiple of 16, got 24"),
        (
            "mxfp8",
            (17, 8, 0),
            "hidden_size must be a multiple of 16, got 17; "
            "intermediate_size must be a multiple of 16, got 8",
        ),
        ("bf16", (24, 20, 8), "intermediate_size must be a multiple of 8, got 20"),
        ("mxfp8", (64, 48, 24), ""),
        ("bf16", (24, 40, 0), ""),
    ],
)
def test_a_refusal_names_the_size_that_is_wrong(
    dtype: str, sizes: tuple[int, int, int], message: str
) -> None:
    config = MoEConfig(*sizes[:2], 4, 2, shared_intermediate_size=sizes[2], dtype=dtype)
    with mock.patch("mok_ref.gpu.compiler.device_arch", lambda: "sm_90a"):
        assert layer._hopper_refusal(config) == message
