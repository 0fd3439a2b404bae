"""Golden cases: every stored bit, at the stored and at other numbers of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mok_ref.casefile import load_case, read_npz, write_npz
from mok_ref.golden import BUILT_IN, check_case, check_folder, golden_pairs, make_folder
from mok_ref.runner import Settings, make_plan, run_virtual
from mok_ref.testing import tensor_digest

FOLDER = Path(__file__).parent / "golden"
PAIRS = {name: (case_file, out_file) for name, case_file, out_file in golden_pairs(FOLDER)}
GIVEN = [str(i) for i in range(8)]
ON_A_GPU = json.loads((FOLDER / "device_digests.json").read_text(encoding="utf-8"))


def test_all_cases_are_there() -> None:
    assert sorted(PAIRS) == sorted([*GIVEN, *BUILT_IN])


@pytest.mark.parametrize("name", PAIRS)
def test_every_bit(name: str) -> None:
    """Also the digest that a GPU's kernels gave (tests/gpu/golden_digests.py)."""
    digest, fault = check_case(*PAIRS[name], Settings())
    assert fault == ""
    assert digest == ON_A_GPU["cases"][name]["digest"]


def test_every_case_was_run_on_a_gpu_by_both_paths() -> None:
    assert sorted(ON_A_GPU["cases"]) == sorted(PAIRS)
    assert {"gpu", "driver", "date", "arch", "compiler"} <= set(ON_A_GPU["device"])
    paths = {path for case in ON_A_GPU["cases"].values() for path in case["paths"]}
    assert paths == {"hopper", "portable"}


def test_a_digest_of_one_tensor_names_what_changed() -> None:
    """The stored digests are those of the stored outputs, tensor by tensor, none left out."""
    for name, (_, out_file) in PAIRS.items():
        stored = read_npz(out_file)
        tensors = set(stored) - {"digest", "digests"}
        assert set(ON_A_GPU["cases"][name]["digests"]) == tensors, name
        for tensor, expected in ON_A_GPU["cases"][name]["digests"].items():
            assert tensor_digest(tensor, stored[tensor]) == expected, (name, tensor)


@pytest.mark.parametrize("name", PAIRS)
def test_a_small_ring_changes_nothing(name: str) -> None:
    _, fault = check_case(*PAIRS[name], Settings(macrobatch=128, minibatch=128, save="none"))
    assert fault == ""


@pytest.mark.parametrize("name", sorted(set(PAIRS) - {"3", "5", "uneven_splits"}))
def test_one_rank_gives_the_same_bits_in_canonical_order(name: str) -> None:
    """Everything but replicated gradients, which need splits in units of 16 (spec section 6)."""
    case_file, out_file = PAIRS[name]
    case, expected = load_case(case_file), read_npz(out_file)
    backward = "dx" in expected
    result = run_virtual(make_plan(case, Settings(ranks=1, placement="even", backward=backward)))
    splits = np.array([case.num_tokens]) if case.splits is None else case.splits
    filled = np.flatnonzero(splits)
    units_of_16 = (splits[filled[:-1]] % 16 == 0).all()
    for key, tensor in result.tensors.items():
        replicated = key.startswith("shared_dw") or key == "dw_router"
        if units_of_16 or not replicated:
            np.testing.assert_array_equal(tensor, expected[key], err_msg=key)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_cases_are_the_stored_ones(name: str) -> None:
    from mok_ref.casefile import case_arrays

    stored = read_npz(PAIRS[name][0])
    made = case_arrays(BUILT_IN[name]())
    assert sorted(stored) == sorted(made)
    for key, value in made.items():
        np.testing.assert_array_equal(stored[key], value, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["router_grouped", "logits_closed", "uneven_splits"])
def test_the_device_route_with_kernels_compiled_for_the_cpu(name: str) -> None:
    """`--device cuda` as the command line runs it, router included (no GPU needed)."""
    import mok_ref.gpu.layer
    import mok_ref.gpu.mxfp8
    import mok_ref.gpu.portable
    import mok_ref.gpu.routing  # noqa: F401  (imported before they are given other kernels)

    host_cupy = pytest.importorskip("host_cupy")
    host_cuda = pytest.importorskip("gpu.host_cuda")
    if host_cuda.compiler() is None:
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    with host_cupy.host_cuda_device():
        _, fault = check_case(*PAIRS[name], Settings(device="cuda", path="portable"))
    assert fault == ""


def test_one_wrong_bit_is_found_and_named(tmp_path: Path) -> None:
    case_file, out_file = PAIRS["router_softmax"]
    wrong = read_npz(out_file)
    wrong["dw_router"].view(np.uint32)[3, 5] ^= 1
    write_npz(tmp_path / "out.npz", wrong)
    _, fault = check_case(case_file, tmp_path / "out.npz", Settings())
    assert fault.startswith("dw_router: 1 of ") and "(3, 5)" in fault


def test_a_missing_tensor_is_found(tmp_path: Path) -> None:
    case_file, out_file = PAIRS["0"]
    wrong = read_npz(out_file)
    del wrong["dw_up"]
    write_npz(tmp_path / "out.npz", wrong)
    _, fault = check_case(case_file, tmp_path / "out.npz", Settings())
    assert fault.startswith("tensors ")


@pytest.mark.parametrize("change", ["digits", "name", "missing"])
def test_wrong_stored_digests_are_found(change: str, tmp_path: Path) -> None:
    """The lines of single tensors, although every tensor and the digest of all are right."""
    case_file, out_file = PAIRS["router_softmax"]
    wrong = read_npz(out_file)
    lines = [str(line) for line in wrong["digests"]]
    name, _, digits = lines[2].partition(" ")
    lines[2] = {"digits": f"{name} {digits[::-1]}", "name": f"z {digits}", "missing": ""}[change]
    wrong["digests"] = np.asarray(lines[:2] + lines[3:] if change == "missing" else lines)
    write_npz(tmp_path / "out.npz", wrong)
    _, fault = check_case(case_file, tmp_path / "out.npz", Settings())
    assert fault.startswith("digests: the stored lines are not those of the tensors")


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        (
            "y",
            np.zeros((2**20, 64), np.uint16),
            r"y must have axes \(N, H\) with N=.* as in the case",
        ),
        ("bomb", np.zeros(2**20, np.uint8), "got extra bomb"),
        ("digest", np.zeros(2**20, "U64"), "digest must be text"),
    ],
    ids=["size", "key", "text"],
)
def test_outputs_that_no_run_gives_are_refused_before_they_are_unpacked(
    key: str,
    array: np.ndarray,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case_file, out_file = PAIRS["0"]
    np.savez_compressed(tmp_path / "out.npz", **{**read_npz(out_file), key: array})
    monkeypatch.setattr("mok_ref.golden.run_virtual", lambda plan: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=message):
        check_case(case_file, tmp_path / "out.npz", Settings())


def test_make_writes_what_is_missing_and_nothing_else(tmp_path: Path) -> None:
    for path in PAIRS["forward_only"]:
        shutil.copy(path, tmp_path)
    (tmp_path / "out_forward_only.npz").unlink()
    shutil.copy(PAIRS["1"][0], tmp_path)
    shutil.copy(PAIRS["2"][1], tmp_path / "out1.npz")  # a wrong one: it must stay as it is
    written: list[str] = []
    make_folder(tmp_path, written.append)
    names = {Path(path).name for path in written}
    assert "out_forward_only.npz" in names and "out1.npz" not in names
    assert (tmp_path / "out1.npz").read_bytes() == PAIRS["2"][1].read_bytes()
    again: list[str] = []
    make_folder(tmp_path, again.append)
    assert again == []
    faults = {}
    assert not check_folder(tmp_path, Settings(), lambda check: faults.update({check.name: check}))
    assert [name for name, check in faults.items() if check.fault] == ["1"]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold golden cases"):
        check_folder(tmp_path, Settings(), print)
