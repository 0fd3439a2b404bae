"""Compiling, caching and describing the CUDA sources: no GPU needed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mok_ref.config import MoEConfig
from mok_ref.gpu import compiler, errors, params, workspace
from mok_ref.gpu.workspace import buffer_table, derive_sizes, workspace_bytes

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

C_TYPES = {
    "i32": np.int32,
    "u32": np.uint32,
    "u64": np.uint64,
    "i64": np.int64,
    "float": np.float32,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for the whole run, away from the user's."""
    monkeypatch.setenv("MOK_REF_CACHE", str(tmp_path_factory.getbasetemp() / "cubins"))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_100a"])
def test_support_kernels_compile_without_spills(arch: str) -> None:
    usage = compiler.resource_usage(compiler.compile_cubin("support.cu", arch))
    names = {kernel.name for kernel in usage}
    assert {"rank_barrier", "schedule_fill", "combine_forward_8", "stage_inputs"} <= names
    for kernel in usage:
        assert kernel.registers > 0
        assert kernel.spill_store_bytes == kernel.spill_load_bytes == kernel.stack_bytes == 0, (
            kernel
        )


def test_cache_hit_returns_the_same_file_without_compiling(monkeypatch) -> None:
    first = compiler.compile_cubin("support.cu")
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.compile_cubin("support.cu") == first
    assert first.read_bytes()[:4] == b"\x7fELF"


def test_key_changes_with_sources_macros_target_and_flags(monkeypatch, tmp_path) -> None:
    keys = {
        compiler.cache_key("support.cu", "sm_90a", ()),
        compiler.cache_key("support.cu", "sm_80", ()),
        compiler.cache_key("support.cu", "sm_90a", ("MOK_MAX_RANKS=64",)),
    }
    for path in compiler.cuda_source_dir().iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(compiler, "cuda_source_dir", lambda: tmp_path)
    assert compiler.cache_key("support.cu", "sm_90a", ()) in keys  # same sources elsewhere
    with (tmp_path / "sync.cuh").open("a") as file:
        file.write("\n")
    keys.add(compiler.cache_key("support.cu", "sm_90a", ()))
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "fmad=true"))
    keys.add(compiler.cache_key("support.cu", "sm_90a", ()))
    assert len(keys) == 5


def test_a_source_that_does_not_compile_shows_the_compilers_words(monkeypatch, tmp_path) -> None:
    (tmp_path / "config.cuh").write_text("#pragma once\n")
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void f() { undeclared = 1; }\n')
    monkeypatch.setattr(compiler, "cuda_source_dir", lambda: tmp_path)
    with pytest.raises(RuntimeError, match="undeclared"):
        compiler.compile_cubin("broken.cu")
    assert not list(compiler.cache_dir().glob("broken*"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("nothing.cu",), "source_name must be one of"),
        (("support.cu", "hopper"), "arch must look like"),
        (("support.cu", "sm_90a", ("a b",)), "macros must look like"),
        (("support.cu", "sm_90a", ("X=1;evil()",)), "macros must look like"),
    ],
)
def test_bad_requests(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compiler.compile_cubin(*arguments)


def test_hopper_files_are_compiled_for_hopper_only() -> None:
    everywhere = set(compiler.source_names("sm_80"))
    assert "support.cu" in everywhere
    assert "megakernel.cu" in set(compiler.source_names("sm_90a")) - everywhere


def struct_fields(name: str) -> list[tuple[str, str]]:
    """(C type, field) of a struct in params.cuh; arrays and pointers marked."""
    text = (compiler.cuda_source_dir() / "params.cuh").read_text(encoding="utf-8")
    body = re.search(rf"^struct {name} \{{$(.*?)^\}};$", text, re.MULTILINE | re.DOTALL)
    assert body, f"struct {name} is not in params.cuh"
    pattern = r"^\s+(?:const )?(\w+)\s*(\*?)\s*(\w+)(\[[^\]]+\])?;"
    found = re.findall(pattern, body.group(1), re.MULTILINE)
    return [("pointer" if star else kind + array, field) for kind, star, field, array in found]


@pytest.mark.parametrize("name", list(params.STRUCTS))
def test_parameter_blocks_mirror_the_header(name: str) -> None:
    dtype = params.STRUCTS[name]
    header = struct_fields(name)
    assert [field for _, field in header] == list(dtype.names)
    for kind, field in header:
        mirrored = dtype.fields[field][0]
        if kind == "pointer":
            assert mirrored == np.uint64, field
        elif kind in C_TYPES:
            assert mirrored == C_TYPES[kind], field
        else:
            assert mirrored.shape or mirrored.names, field


def test_enums_mirror_the_header() -> None:
    text = (compiler.cuda_source_dir() / "params.cuh").read_text(encoding="utf-8")
    phases = re.findall(r"kPhase\w+ = (\d+)", text)
    assert sorted(map(int, phases)) == sorted(errors.PHASES)
    for name, code in params.SYMMETRIC_BUFFERS.items():
        constant = "k" + "".join(part.capitalize() for part in name.split("_"))
        assert f"{constant} = {code}," in text


def test_set_params_refuses_unknown_fields() -> None:
    block = params.new_params(params.LAYER_PARAMS, rank=3)
    assert int(block["rank"]) == 3
    with pytest.raises(KeyError, match="no_such_field"):
        params.set_params(block, no_such_field=1)


def test_timeout_message_names_rank_peer_phase_and_epoch() -> None:
    record = np.zeros((), params.ERROR_RECORD)
    record["rank"], record["peer"], record["phase"] = 2, 3, 1
    record["epoch"], record["expected"], record["seen"], record["wait_us"] = 7, 7, 6, 5_000_000
    text = errors.timeout_message(record)
    for part in (
        "rank 2 waited 5.00 s for rank 3",
        "before the forward kernel",
        "epoch 7",
        "seen 6",
    ):
        assert part in text
    record["peer"], record["phase"], record["counter"] = -1, 8, 11
    assert "counter 11 expected 7, seen 6" in errors.timeout_message(record)


def test_input_message_decodes_kind_place_and_value() -> None:
    word = 0 << 60 | (5 * 2 + 1) << 32 | (-7 & 0xFFFFFFFF)
    assert "got -7 at rank 1, token 5, slot 1" in errors.input_message(word, 2, 1)
    nan = int(np.float32(np.nan).view(np.uint32))
    assert "topk_weights must be finite, got nan" in errors.input_message(1 << 60 | nan, 2, 0)
    logit = 2 << 60 | (7 * 16 + 9) << 32 | nan
    assert "got nan at rank 3, token 7, expert 9" in errors.input_message(logit, 2, 3, 16)


def test_memory_function_is_the_allocation_table() -> None:
    config = MoEConfig(64, 32, 8, 2, ep_size=2, shared_intermediate_size=16)
    sizes = derive_sizes(config, 0, 100)
    table = buffer_table(config, 0, sizes)
    report = workspace_bytes(config, 0, 100)
    assert report.items() >= {name: b.num_bytes for name, b in table.items()}.items()
    assert report["total"] == sum(size for name, size in report.items() if name != "total")
    assert report["x"] == 100 * 64 * 2
    # Worst case: every route of both ranks on this rank's four experts, each segment padded.
    assert sizes.max_row_blocks == -(-(2 * 100 * 2 + 4 * 127) // 128)
    assert workspace_bytes(config, 0, 100, max_saved_rows=0)["gate_saved"] == 0
    inference = workspace_bytes(config, 0, 100, training=False)
    assert inference["total"] < report["total"] and "dy" not in inference


def test_warps_of_the_schedule_fit_their_shared_memory() -> None:
    for experts in (0, 1, 8, 128, 512, 4000, 5632):
        for walk in (1, 32, 8192):
            warps = workspace.schedule_warps(experts, walk)
            assert 1 <= warps <= workspace.MAX_SCHEDULE_WARPS
            assert (warps + 3) * max(1, experts) <= workspace.SCHEDULE_WORDS
    with pytest.raises(ValueError, match="a rank must own at most 5632 experts, got 5633"):
        workspace.schedule_warps(5633, 8)
