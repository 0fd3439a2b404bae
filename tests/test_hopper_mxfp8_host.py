"""Host side of the MXFP8 forward path: structs, sizes, layouts and rules that need no GPU."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu.host_cuda import compiler as host_compiler
from host_cupy import host_cuda_device

from mok_ref.config import MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.gpu import compiler, hopper, hopper_mxfp8, layer
from mok_ref.gpu import mxfp8 as gpu_mxfp8
from mok_ref.gpu.workspace import DeviceWorkspace, derive_sizes
from mok_ref.heap.virtual_cuda import VirtualCudaWorld
from mok_ref.mxfp8 import num_blocks, quantize
from mok_ref.testing import random_bf16


def fields_of(header: str, struct: str) -> list[str]:
    """Names of a struct's fields in their order."""
    text = (compiler.cuda_source_dir() / header).read_text(encoding="utf-8")
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.DOTALL)
    assert body is not None
    plain = re.sub(r"//[^\n]*", "", body.group(1))
    names = []
    for declaration in plain.split(";"):
        words = declaration.replace("*", " ").split()
        if words:
            first = next(i for i, word in enumerate(words) if word not in ("const",))
            names += " ".join(words[first + 1 :]).replace(",", " ").split()
    return names


def compiles(body: str) -> None:
    """Compile a few lines behind mxfp8_tile.cuh; a failing static_assert is an error."""
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    options = core.ProgramOptions(
        arch="sm_90a", std="c++17", include_path=[str(compiler.cuda_source_dir())]
    )
    source = f'#include "mxfp8_tile.cuh"\nnamespace mok {{ {body} }}'
    core.Program(source, "c++", options).compile("cubin")


def test_structs_are_the_kernels() -> None:
    maps, params = hopper_mxfp8.CODE_MAPS, hopper_mxfp8.CODE_PARAMS
    assert fields_of("mxfp8_experts.cuh", "CodeMaps") == list(maps.names or ())
    assert maps.itemsize == 128 * len(maps.names or ())
    assert fields_of("mxfp8_tile.cuh", "CodeParams") == list(params.names or ())
    compiles(f"static_assert(sizeof(CodeParams) == {params.itemsize});")


def test_shared_memory_is_what_the_kernel_was_compiled_for() -> None:
    compiles(f"static_assert(kMxfp8SharedBytes == {hopper_mxfp8.SHARED_BYTES});")
    with pytest.raises(Exception, match="static"):
        compiles(f"static_assert(kMxfp8SharedBytes == {hopper_mxfp8.SHARED_BYTES + 8});")


def test_megakernel_compiles_without_spills(tmp_path, monkeypatch) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    monkeypatch.setenv("MOK_REF_CACHE", str(tmp_path))
    path = compiler.compile_cubin(hopper_mxfp8.SOURCE, "sm_90a")
    (usage,) = compiler.resource_usage(path)
    assert usage.name == hopper_mxfp8.KERNEL
    assert usage.spill_store_bytes == usage.spill_load_bytes == usage.stack_bytes == 0
    assert usage.registers * hopper.THREADS <= 65536  # else the launch is refused


@pytest.mark.parametrize(
    ("widths", "possible"),
    [
        ((16, 16, 0), True),
        ((2880, 2880, 8), True),
        ((64, 48, 24), True),
        ((24, 16, 0), False),
        ((16, 40, 0), False),
        ((16, 16, 4), False),
    ],
)
def test_widths_that_fit_tensor_maps(widths: tuple[int, int, int], possible: bool) -> None:
    assert hopper_mxfp8.supports(*widths) is possible


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 208, 2048])
def test_scale_words_hold_the_bytes_of_two_blocks(columns: int) -> None:
    scales = np.random.default_rng(columns).integers(
        0, 256, (2, 8, num_blocks(columns)), dtype=np.uint8
    )
    words = gpu_mxfp8.column_blocks(scales)
    assert words.shape == (2, hopper_mxfp8.scale_words(columns), 8) and words.dtype == np.uint16
    for row, word in np.ndindex(8, words.shape[1]):
        low, high = words[1, word, row] & 255, words[1, word, row] >> 8
        assert low == scales[1, row, 2 * word]
        assert high == (scales[1, row, 2 * word + 1] if 2 * word + 1 < scales.shape[2] else 0)
    np.testing.assert_array_equal(gpu_mxfp8.row_scales(words, columns), scales)


def test_counters_have_room_for_the_shared_experts_half() -> None:
    for tokens, experts, top_k, ranks in ((1, 1, 1, 1), (3000, 64, 8, 4), (2048, 1, 1, 1)):
        config = MoEConfig(64, 64, experts * ranks, top_k, ranks, dtype="mxfp8")
        sizes = derive_sizes(config, 0, tokens)
        needed = hopper.num_forward_counters(sizes.max_row_blocks, sizes.max_tokens)
        assert needed <= sizes.num_counters // 2


def test_memory_beside_bf16() -> None:
    config = MoEConfig(7168, 2048, 16, 8, 4, dtype="mxfp8")
    table = hopper_mxfp8.memory_bytes(config, 0, 4096)
    assert table["weights"] == (2 * 3 * 4 * 7168 * 2048, 3 * 4 * 7168 * 2048 * 33 // 32)
    assert table["tokens"] == (2 * 4096 * 7168, 4096 * 7168 * 33 // 32)
    assert all(2 * codes == bf16 * 33 // 32 for bf16, codes in table.values())


# ---- held weights: who may believe the codes that lie in a workspace


@pytest.fixture
def workspace(monkeypatch) -> Iterator[Any]:
    """One rank's workspace of this path on the CPU, whose products alone are not computed."""
    if host_compiler() is None:
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    with host_cuda_device():
        monkeypatch.setattr(layer, "_hopper_refusal", lambda config: "")
        monkeypatch.setattr(hopper_mxfp8, "warm_up", lambda workspace: None)
        monkeypatch.setattr(hopper_mxfp8, "routed_experts", lambda *_: lambda stream: None)
        config = MoEConfig(16, 32, 2, 1, dtype="mxfp8")
        yield DeviceWorkspace(config, VirtualCudaWorld(1).heap(0), 4)


def device_weights(seed: int) -> ExpertWeights:
    import cupy

    rng = np.random.default_rng(seed)
    shapes = ((2, 32, 16), (2, 32, 16), (2, 16, 32))
    return ExpertWeights(*(cupy.asarray(random_bf16(rng, s).view(np.uint16)) for s in shapes))


def forward(workspace: Any, weights: ExpertWeights) -> layer.DeviceContext:
    routes = np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
    x = np.zeros((4, 16), np.uint16)
    arguments = (x, *routes, weights, None, workspace, "all")
    return layer.forward(workspace.config, workspace.heap, *arguments)[1]


def codes_are_of(workspace: Any, weights: ExpertWeights) -> bool:
    """Whether the codes that the kernels would read are those of these weights."""
    buffers = hopper_mxfp8.weight_buffers(workspace)
    return all(
        np.array_equal(
            buffers[f"w_{part}_codes"].reshape(array.shape),
            quantize(array.get())[0],
        )
        for part, array in zip(hopper_mxfp8.PARTS, weights, strict=True)
    )


def test_a_forward_reads_the_codes_of_its_own_weights(workspace) -> None:
    a, b = device_weights(1), device_weights(2)
    hopper_mxfp8.hold_weights(workspace, a)
    for weights in (a, b, a, b, b, a):
        forward(workspace, weights)
        assert codes_are_of(workspace, weights)
    hopper_mxfp8.hold_weights(workspace, b)
    for weights in (b, b, a):
        forward(workspace, weights)
        assert codes_are_of(workspace, weights)


def test_held_weights_are_quantised_once_until_released(workspace) -> None:
    weights = device_weights(1)
    hopper_mxfp8.hold_weights(workspace, weights)
    weights.down[...] = 0  # a change in place, which nobody sees
    forward(workspace, weights)
    assert not codes_are_of(workspace, weights)
    hopper_mxfp8.release_weights(workspace)
    forward(workspace, weights)
    assert codes_are_of(workspace, weights)


def test_held_weights_stay_alive_so_that_none_other_has_their_addresses(workspace) -> None:
    weights = device_weights(1)
    alive = [weakref.ref(array) for array in weights]
    hopper_mxfp8.hold_weights(workspace, weights)
    del weights
    gc.collect()
    assert all(array() is not None for array in alive)
    hopper_mxfp8.release_weights(workspace)
    gc.collect()
    assert all(array() is None for array in alive)


def test_backward_refuses_codes_that_were_held_since_its_forward(workspace) -> None:
    context = forward(workspace, device_weights(1))
    hopper_mxfp8.hold_weights(workspace, device_weights(2))
    with pytest.raises(RuntimeError, match="context is stale"):
        layer.backward(context, np.zeros((4, 16), np.uint16))


def say_capturing(patches: pytest.MonkeyPatch) -> None:
    """From now on the stream says that it captures."""
    import cupy

    stream = type(cupy.cuda.get_current_stream())
    patches.setattr(stream, "is_capturing", lambda self: True)


def test_no_weights_are_held_beside_a_graph_that_quantises_over_them(
    workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = device_weights(1), device_weights(2)
    hopper_mxfp8.hold_weights(workspace, a)
    with monkeypatch.context() as capture:
        say_capturing(capture)
        forward(workspace, a)  # quantises nothing
    hopper_mxfp8.hold_weights(workspace, b)
    with monkeypatch.context() as capture:
        say_capturing(capture)
        forward(workspace, a)
    with pytest.raises(RuntimeError, match="hold_weights must run before the workspace's first"):
        hopper_mxfp8.hold_weights(workspace, b)
    forward(workspace, b)
    assert codes_are_of(workspace, b)


def test_what_cannot_be_held_is_refused(workspace, monkeypatch) -> None:
    import cupy

    weights = device_weights(1)
    room = cupy.zeros(2 * 32 * 16 + 8, np.uint16)
    first = next(i for i in range(8) if room[i:].data.ptr % 16)
    for name, array, message in (
        ("gate", np.asarray(weights.gate).view(np.ndarray), "weights.gate must be a C-contiguous"),
        ("up", weights.up[:, ::-1], "weights.up must be a C-contiguous"),
        ("up", room[first : first + 1024].reshape(2, 32, 16), "16-byte aligned array"),
        ("down", weights.down[:1], r"weights.down must have shape \(2, 16, 32\), got \(1, 16, 32"),
        ("down", weights.down.astype(np.float32), "weights.down must be bfloat16 or uint16"),
    ):
        with pytest.raises(ValueError, match=message):
            hopper_mxfp8.hold_weights(workspace, weights._replace(**{name: array}))
    with monkeypatch.context() as capture:
        say_capturing(capture)
        with pytest.raises(RuntimeError, match="hold_weights must run before a capture"):
            hopper_mxfp8.hold_weights(workspace, weights)
    portable = DeviceWorkspace(workspace.config, workspace.heap, 4, path="portable")
    with pytest.raises(ValueError, match="workspace must run moe_forward_mxfp8, got one that runs"):
        hopper_mxfp8.hold_weights(portable, weights)
    assert not hopper_mxfp8._held(workspace)
    workspace.close()
    with pytest.raises(ValueError, match="workspace is closed"):
        hopper_mxfp8.hold_weights(workspace, weights)
