"""Host side of the Hopper backward path: sizes, structs, maps and rules that need no GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mok_ref.config import MoEConfig
from mok_ref.gpu import compiler, hopper_backward
from mok_ref.gpu import layer as gpu_layer
from mok_ref.gpu.launch import NUM_MULTIPROCESSORS
from mok_ref.gpu.params import LAYER_PARAMS, new_params
from mok_ref.gpu.workspace import derive_sizes


def header(name: str) -> str:
    return (compiler.cuda_source_dir() / name).read_text(encoding="utf-8")


def compiles(body: str, cluster_size: int = 1) -> None:
    """Compile a few lines behind the kernels' headers; a failing static_assert raises."""
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    options = core.ProgramOptions(
        arch="sm_90a",
        std="c++17",
        include_path=[str(compiler.cuda_source_dir())],
        define_macro=[("MOK_CLUSTER_SIZE", str(cluster_size))],
    )
    includes = '#include "backward_schedule.cuh"\n'
    core.Program(f"{includes}namespace mok {{ {body} }}", "c++", options).compile("cubin")


def declared_maps(struct: str) -> list[str]:
    text = header("backward_params.cuh")
    found = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.DOTALL)
    assert found is not None
    lines = re.findall(r"TensorMap ([^;]+);", found.group(1))
    return [name.strip().split("[")[0] for line in lines for name in line.split(",")]


def test_maps_are_in_the_order_of_the_kernels_structs() -> None:
    assert declared_maps("DgradOperands") == list(hopper_backward.DGRAD_OPERANDS)
    assert declared_maps("WgradMaps") == list(hopper_backward.WGRAD_MAPS.names or ())


@pytest.mark.parametrize("struct", ["DgradParams", "WgradParams", "DgradMaps", "WgradMaps"])
def test_struct_sizes_are_those_of_the_compiler(struct: str) -> None:
    dtype = {
        "DgradParams": hopper_backward.DGRAD_PARAMS,
        "WgradParams": hopper_backward.WGRAD_PARAMS,
        "DgradMaps": hopper_backward.DGRAD_MAPS,
        "WgradMaps": hopper_backward.WGRAD_MAPS,
    }[struct]
    compiles(f"static_assert(sizeof({struct}) == {dtype.itemsize});")


@pytest.mark.parametrize("struct", ["DgradParams", "WgradParams"])
def test_fields_are_in_the_order_of_the_kernels_structs(struct: str) -> None:
    text = re.search(rf"struct {struct} \{{(.*?)\n\}};", header("backward_params.cuh"), re.DOTALL)
    assert text is not None
    names = re.findall(r"^\s+(?:const )?\w+\*? (\w+)(?:\[\w+\])?;", text.group(1), re.MULTILINE)
    dtype = getattr(hopper_backward, {"DgradParams": "DGRAD_PARAMS"}.get(struct, "WGRAD_PARAMS"))
    assert names == list(dtype.names)


def test_shared_memory_and_threads_are_what_the_kernels_were_compiled_for() -> None:
    compiles(f"static_assert(kSharedBytes == {hopper_backward.SHARED_BYTES});")
    cluster = hopper_backward.CLUSTER_SHARED_BYTES
    compiles(f"static_assert(kSharedBytes == {cluster});", hopper_backward.CLUSTER_SIZE)
    compiles(f"static_assert(kThreads == {hopper_backward.THREADS});")
    compiles(f"static_assert(kBlockGroup == {hopper_backward.BLOCK_GROUP});")


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, wgrad",
    [
        (hopper_backward.SOURCE, hopper_backward.WGRAD_PAIRS),
        (hopper_backward.CLUSTER_SOURCE, hopper_backward.WGRAD),
    ],
)
def test_no_kernel_spills(source: str, wgrad: str, tmp_path, monkeypatch) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    monkeypatch.setenv("MOK_REF_CACHE", str(tmp_path))
    path = compiler.compile_cubin(source)
    usage = {kernel.name: kernel for kernel in compiler.resource_usage(path)}
    assert {wgrad, "moe_dgrad_hopper", "moe_dgrad_clamp_hopper"} <= set(usage)
    for kernel in usage.values():
        assert kernel.spill_store_bytes == kernel.spill_load_bytes == 0
    assert all(kernel.registers * hopper_backward.THREADS <= 65536 for kernel in usage.values())


@pytest.fixture
def encoded(monkeypatch) -> list[tuple[Any, ...]]:
    """Arguments of every tensor map that would be encoded."""
    calls: list[tuple[Any, ...]] = []

    def encode(
        pointer: int, dims: tuple, strides: tuple, box: tuple, element: str = "BFLOAT16"
    ) -> np.ndarray:
        calls.append((dims, strides, box, {"BFLOAT16": 2, "FLOAT32": 4}[element]))
        return np.full(16, len(calls), np.uint64)

    monkeypatch.setattr(hopper_backward, "encode_tiled", encode)
    return calls


@pytest.mark.parametrize("columns", [8, 56, 64, 72, 256, 2880])
def test_maps_obey_the_copy_engines_rules(columns: int, encoded) -> None:
    hopper_backward.encode_rows(1 << 20, columns, 37, 3)
    hopper_backward.encode_columns(1 << 20, columns, 37, 3)
    for in_bf16 in (False, True):
        hopper_backward.encode_gradient(1 << 20, columns, 37, 3, in_bf16)
    for dims, strides, box, size in encoded:
        assert len(dims) == len(box) == len(strides) + 1
        assert all(stride % 16 == 0 and stride < 1 << 40 for stride in strides)
        assert box[0] * size == 128  # the span of the 128-byte swizzle
        assert all(1 <= extent <= 256 for extent in box)
        assert np.prod(dims, dtype=np.int64) == 3 * 37 * columns  # the whole array, nothing else


def test_nothing_to_map_is_zeros(encoded) -> None:
    assert not hopper_backward.encode_rows(0, 64, 64).any()
    assert not hopper_backward.encode_columns(1 << 20, 64, 0).any()
    assert encoded == []


@pytest.mark.parametrize("hidden, inner", [(7168, 2048), (2048, 768), (16, 16), (4096, 14336)])
def test_a_step_keeps_every_cta_at_work(hidden: int, inner: int) -> None:
    layer = new_params(LAYER_PARAMS, hidden_size=hidden, intermediate_size=inner, mini_blocks=1)
    tiles = -(-hidden // 256) + -(-inner // 256)
    blocks = hopper_backward._mini_blocks(layer)
    group = hopper_backward.BLOCK_GROUP
    wanted = 6 * NUM_MULTIPROCESSORS
    assert blocks % group == 0 and blocks * tiles >= wanted > (blocks - group) * tiles


@pytest.mark.parametrize(
    "tokens, experts, in_bf16, in_turns",
    [
        (8192, 128, True, True),  # 512 rows per expert
        (32768, 128, True, False),  # 2048
        (32768, 128, False, True),
        (8192, 16, False, False),  # 4096
    ],
)
def test_warpgroups_take_turns_where_experts_have_few_rows(
    tokens: int, experts: int, in_bf16: bool, in_turns: bool
) -> None:
    layer = new_params(LAYER_PARAMS, num_tokens=tokens, num_experts=experts, top_k=8, ep_size=1)
    name = hopper_backward._wgrad_name(layer, {"dw_is_bf16": in_bf16})
    assert name == (hopper_backward.WGRAD_PAIRS if in_turns else hopper_backward.WGRAD)


def test_launches_cover_the_worst_routing() -> None:
    config = MoEConfig(64, 64, 8, 2, macrobatch=256, grad_dtype="bf16")
    sizes = derive_sizes(config, 0, 1000)
    macros = hopper_backward.num_macrobatches(sizes)
    assert macros * sizes.macro_blocks >= sizes.max_row_blocks > (macros - 1) * sizes.macro_blocks
    extra = hopper_backward.extra_buffers(config, sizes)
    assert extra["straddling"].shape == (3, 2, 64, 64)
    once = derive_sizes(MoEConfig(64, 64, 8, 2, grad_dtype="bf16"), 0, 1000)
    whole = SimpleNamespace(**once._asdict() | {"macro_blocks": once.max_row_blocks})
    assert hopper_backward.extra_buffers(config, whole)["straddling"].shape[1] == 0


@pytest.mark.parametrize(("multiprocessors", "ctas"), [(1, 2), (2, 2), (5, 4), (132, 132)])
def test_a_grid_is_whole_clusters_and_never_empty(multiprocessors, ctas, monkeypatch) -> None:
    grids = []
    monkeypatch.setattr(hopper_backward, "load_kernel", lambda *_: None)
    monkeypatch.setattr(hopper_backward, "_num_multiprocessors", lambda: multiprocessors)
    monkeypatch.setattr(hopper_backward, "Launch", lambda _, grid, *__: grids.append(grid))
    for source in (hopper_backward.SOURCE, hopper_backward.CLUSTER_SOURCE):
        hopper_backward._launch(hopper_backward.WGRAD_PAIRS, source=source)
    assert grids == [(ctas,), (ctas,)]


def test_dx_comes_after_a_chain_that_still_reads_what_lies_there() -> None:
    path = SimpleNamespace(
        launch_backward_with_dx=None, last_launch_has_rows=lambda sizes, layer: sizes
    )
    num_bytes = 8 * 16 * 2

    def early(x: int, dy: int, shared: int, path: Any = path, has_rows: bool = True) -> bool:
        layer: Any = dict(x_in=x, num_tokens=8, hidden_size=16, shared_intermediate_size=shared)
        back: Any = dict(dx=4096, dy_in=dy)
        return gpu_layer._dx_comes_early(SimpleNamespace(sizes=has_rows), path, layer, back)

    assert early(0, 8192, shared=24) and early(4096, 4096, shared=0)
    assert early(4096 - num_bytes, 4096 + num_bytes, shared=24)
    assert not early(4096, 8192, shared=24) and not early(0, 4096 + num_bytes - 2, shared=24)
    assert not early(0, 8192, shared=0, path=SimpleNamespace())
    assert not early(0, 8192, shared=0, has_rows=False)


@pytest.mark.parametrize(
    ("ranks", "macrobatch", "has_rows"),
    [(1, None, True), (1, 1024, True), (2, None, True), (4, None, False), (4, 9216, True)],
)
def test_dx_is_made_beside_products_where_a_balanced_load_has_some(
    ranks: int, macrobatch: int | None, has_rows: bool
) -> None:
    config = MoEConfig(64, 64, 4 * ranks, 2, ranks, macrobatch=macrobatch, minibatch=1024)
    sizes = derive_sizes(config, 0, 1024)
    layer = new_params(LAYER_PARAMS, num_tokens=1024, top_k=2, num_local_experts=4)
    assert hopper_backward.last_launch_has_rows(sizes, layer) is has_rows
    assert (hopper_backward.num_macrobatches(sizes) > 1) == (
        (ranks, macrobatch) in ((1, 1024), (4, None))
    )
