"""Host side of the Hopper forward path: sizes, structs and rules that need no GPU."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok_ref.config import MoEConfig
from mok_ref.gpu import compiler, hopper
from mok_ref.gpu.workspace import derive_sizes


def header(name: str) -> str:
    return (compiler.cuda_source_dir() / name).read_text(encoding="utf-8")


def compiles(body: str) -> None:
    """Compile a few lines behind tile.cuh; a failing static_assert is a RuntimeError."""
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    options = core.ProgramOptions(
        arch="sm_90a", std="c++17", include_path=[str(compiler.cuda_source_dir())]
    )
    source = f'#include "tile.cuh"\nnamespace mok {{ {body} }}'
    core.Program(source, "c++", options).compile("cubin")


def test_maps_are_in_the_order_of_the_kernels_struct() -> None:
    struct = re.search(r"struct ForwardMaps \{(.*?)\};", header("experts.cuh"), re.DOTALL)
    assert struct is not None
    declared = re.findall(r"TensorMap ([^;]+);", struct.group(1))
    names = [name.strip() for line in declared for name in line.split(",")]
    assert names == list(hopper.FORWARD_MAPS.names or ())
    assert hopper.FORWARD_MAPS.itemsize == 128 * len(names)


def test_shared_memory_and_threads_are_what_the_kernel_was_compiled_for() -> None:
    compiles(f"static_assert(kForwardSharedBytes == {hopper.SHARED_BYTES});")
    compiles(f"static_assert(kForwardThreads == {hopper.THREADS});")


def test_a_wrong_size_would_be_seen() -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    with pytest.raises(Exception, match="static"):
        compiles(f"static_assert(kForwardSharedBytes == {hopper.SHARED_BYTES + 8});")


@pytest.mark.parametrize("macros", [(), ("MOK_CLUSTER_SIZE=2",)], ids=["single", "cluster"])
def test_megakernel_compiles_without_spills(macros, tmp_path, monkeypatch) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    monkeypatch.setenv("MOK_REF_CACHE", str(tmp_path))
    (usage,) = compiler.resource_usage(compiler.compile_cubin(hopper.SOURCE, "sm_90a", macros))
    assert usage.name == hopper.KERNEL
    assert usage.spill_store_bytes == usage.spill_load_bytes == usage.stack_bytes == 0
    assert usage.registers * hopper.THREADS <= 65536  # else the launch is refused


@given(
    st.integers(1, 3000),
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 4096),
)
def test_workspace_has_room_for_the_counters(tokens, experts, top_k, ranks, width) -> None:
    config = MoEConfig(64, width, experts * ranks, top_k, ranks)
    sizes = derive_sizes(config, 0, tokens)
    needed = hopper.num_forward_counters(sizes.max_row_blocks, sizes.max_tokens)
    if hopper.combines(config, tokens):
        needed += hopper.num_combine_counters(sizes.max_row_blocks, sizes.max_tokens)
    assert needed <= sizes.num_counters
    assert sizes.macro_blocks % sizes.mini_blocks == 0


@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
def test_only_the_bf16_kernel_makes_y(dtype: str) -> None:
    config = MoEConfig(64, 64, 8, 2, dtype=dtype)
    tokens = hopper.COMBINE_FROM_TOKENS
    sizes = derive_sizes(config, 0, tokens)
    assert hopper.combines(config, tokens) == (dtype == "bf16")
    words = 1024 + 8 * sizes.max_row_blocks
    if dtype == "bf16":
        words += hopper.num_combine_counters(sizes.max_row_blocks, tokens)
    assert sizes.num_counters == words


@given(st.integers(1, 20000))
def test_minibatch_fills_the_multiprocessors(width: int) -> None:
    rows = hopper.default_minibatch(width)
    assert rows % 128 == 0 and 2048 <= rows <= 8192
    tiles = rows // 128 * -(-width // 128)
    assert tiles >= hopper.MINIBATCH_TILES or rows == 8192


@pytest.mark.parametrize(
    ("widths", "possible"),
    [((16, 16, 0), True), ((2880, 2880, 8), True), ((16, 20, 0), False), ((16, 16, 4), False)],
)
def test_widths_that_fit_tensor_maps(widths: tuple[int, int, int], possible: bool) -> None:
    assert hopper.supports(*widths) is possible
