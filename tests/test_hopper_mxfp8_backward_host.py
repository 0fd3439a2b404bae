"""Host side of the MXFP8 Hopper backward: structs, maps and kernels as far as no GPU is needed."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mok_ref.config import MoEConfig
from mok_ref.gpu import compiler, hopper_backward, hopper_mxfp8_backward
from mok_ref.gpu.params import BACKWARD_PARAMS, LAYER_PARAMS, new_params

RING = 256


def compiles(body: str) -> None:
    """Compile a few lines behind the kernels' headers; a failing static_assert raises."""
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    options = core.ProgramOptions(
        arch="sm_90a", std="c++17", include_path=[str(compiler.cuda_source_dir())]
    )
    includes = '#define MOK_MXFP8 1\n#include "mxfp8_backward_dgrad.cuh"\n'
    core.Program(f"{includes}namespace mok {{ {body} }}", "c++", options).compile("cubin")


def test_sizes_are_those_of_the_compiler() -> None:
    sizes = {
        "sizeof(MxfpDgradParams)": hopper_mxfp8_backward.DGRAD_PARAMS.itemsize,
        "sizeof(MxfpWgradMaps)": hopper_mxfp8_backward.WGRAD_MAPS.itemsize,
        "kCodeStageBytes": hopper_mxfp8_backward.CODE_STAGE_BYTES,
        "kSharedBytes": hopper_mxfp8_backward.SHARED_BYTES,
        "kThreads": hopper_backward.THREADS,
    }
    compiles("".join(f"static_assert({left} == {right});" for left, right in sizes.items()))


def test_fields_are_in_the_order_of_the_kernels_struct() -> None:
    text = (compiler.cuda_source_dir() / "mxfp8_backward_pull.cuh").read_text(encoding="utf-8")
    body = re.search(r"struct MxfpDgradParams : DgradParams \{(.*?)\n\};", text, re.DOTALL)
    assert body is not None
    names = re.findall(r"^\s+\w+\*? (\w+);", body.group(1), re.MULTILINE)
    assert ["base", *names] == list(hopper_mxfp8_backward.DGRAD_PARAMS.names or ())


@pytest.fixture
def encoded(monkeypatch) -> list[tuple[Any, ...]]:
    """Arguments of every tensor map of codes and scales that would be encoded."""
    calls: list[tuple[Any, ...]] = []

    def encode(pointer: int, dims: tuple, strides: tuple, box: tuple, *kind: str) -> np.ndarray:
        calls.append((pointer, dims, strides, box, kind))
        return np.full(16, len(calls), np.uint64)

    for module in (hopper_backward, hopper_mxfp8_backward):
        monkeypatch.setattr(module, "encode_tiled", encode)
    return calls


def addresses() -> dict[str, int]:
    names = [*hopper_mxfp8_backward.RINGS, "w_gate", "w_up", "w_down"]
    return {
        name: (index + 1) << 20
        for index, name in enumerate([*names, *(f"{name}_scales" for name in names)])
    }


def blocks(hidden: int, inner: int) -> tuple[np.ndarray, np.ndarray]:
    layer = new_params(
        LAYER_PARAMS,
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=3,
        macro_blocks=RING // 128,
        max_saved_rows=RING,
        gate_saved=1 << 30,
        up_saved=1 << 31,
    )
    return layer, new_params(BACKWARD_PARAMS, hw_ring=1 << 32)


@pytest.mark.parametrize("hidden, inner", [(16, 16), (80, 144), (512, 256), (2880, 2880)])
def test_maps_obey_the_copy_engines_rules(hidden: int, inner: int, encoded) -> None:
    layer, back = blocks(hidden, inner)
    again = {"gate": 1 << 33, "up": 1 << 34}
    hopper_mxfp8_backward._dgrad_maps(layer, back, again, addresses())
    hopper_mxfp8_backward._wgrad_maps(layer, back, addresses())
    kinds = set()
    for _, dims, strides, box, kind in encoded:
        kinds.add(kind)
        assert len(dims) == len(box) == len(strides) + 1
        assert all(stride % 16 == 0 for stride in strides)
        assert all(1 <= extent <= 256 for extent in box)
        if kind == hopper_mxfp8_backward.CODES:
            assert box[0] == 64
        if kind == hopper_mxfp8_backward.SCALES:
            assert dims[1] in (-(-hidden // 64), -(-inner // 64)) and strides[0] == 2 * dims[0]
    gradients = ("FLOAT32",)
    assert kinds == {(), gradients, hopper_mxfp8_backward.CODES, hopper_mxfp8_backward.SCALES}


def test_every_map_of_codes_has_its_scales_at_the_same_place(encoded) -> None:
    layer, back = blocks(80, 144)
    at = addresses()
    maps = hopper_mxfp8_backward._dgrad_maps(layer, back, {"gate": 1, "up": 2}, at)
    by_number = {index: call for index, call in enumerate(encoded, 1)}
    scaled = 0
    for name in hopper_backward.DGRAD_OPERANDS:
        codes, scales = (int(maps[side][0][name][0]) for side in ("routed", "shared"))
        if codes == 0 or by_number[codes][4] != hopper_mxfp8_backward.CODES:
            assert scales == 0, name
            continue
        scaled += 1
        assert by_number[codes][0] == at[name.removesuffix("_rows")]
        assert by_number[scales][0] == at[f"{name.removesuffix('_rows')}_scales"]
    assert scaled == 9


CLAMP = "moe_dgrad_mxfp8_clamp_hopper"


def page_spills() -> dict[str, list[tuple[int, ...]]]:
    """NVRTC's version -> (stack, spill stores, spill loads) of dgrad without and with a clamp, as
    docs/mxfp8.md states them."""
    page = Path(__file__).resolve().parents[1] / "docs" / "mxfp8.md"
    text = page.read_text(encoding="utf-8").replace("\n", " ")
    (words,) = re.findall(
        r"reports (\d+) bytes of stack for `moe_dgrad_mxfp8_hopper`, (\d+) bytes of spill "
        r"stores and (\d+) of loads in its code, and (\d+), (\d+) and (\d+) for "
        r"`moe_dgrad_mxfp8_clamp_hopper` \(NVRTC ([\d.]+); "
        r"([\d.]+): (\d+), (\d+), (\d+) and (\d+), (\d+), (\d+)\)",
        text,
    )
    numbers = [int(word) for word in (*words[:6], *words[8:])]
    rows = [tuple(numbers[first : first + 3]) for first in range(0, 12, 3)]
    return {words[6]: rows[:2], words[7]: rows[2:]}


@pytest.mark.slow
def test_products_are_not_serialised_and_spills_are_those_of_the_page() -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    _, log = compiler._compile(hopper_mxfp8_backward.SOURCE, "sm_90a", ())
    assert "wgmma.mma_async instructions are serialized" not in log
    usage = {kernel.name: kernel for kernel in compiler.parse_ptxas_log(log)}
    wgrad = usage.pop("moe_wgrad_mxfp8_hopper")
    assert wgrad.stack_bytes == wgrad.spill_store_bytes == wgrad.spill_load_bytes == 0
    found = [
        (kernel.stack_bytes, kernel.spill_store_bytes, kernel.spill_load_bytes)
        for kernel in (usage.pop("moe_dgrad_mxfp8_hopper"), usage.pop(CLAMP))
    ]
    assert usage == {}
    if compiler.compiler_version() not in page_spills():
        pytest.skip(f"the page says nothing of NVRTC {compiler.compiler_version()}")
    assert found == page_spills()[compiler.compiler_version()]


@pytest.mark.parametrize("shared", [0, 24])
def test_the_shared_experts_kernel_is_loaded_before_the_first_barrier(shared: int) -> None:
    loaded = []

    def load_kernel(source: str, name: str, *_: Any) -> Any:
        loaded.append((source, name))
        return SimpleNamespace(num_regs=1)

    config = MoEConfig(32, 32, 4, 2, dtype="mxfp8", shared_intermediate_size=shared)
    with (
        mock.patch.object(hopper_backward, "load_kernel", load_kernel),
        mock.patch.object(hopper_mxfp8_backward, "load_kernel", load_kernel),
    ):
        hopper_mxfp8_backward.warm_up(SimpleNamespace(config=config))
    assert ((hopper_backward.SOURCE, "moe_dgrad_hopper") in loaded) == bool(shared)
