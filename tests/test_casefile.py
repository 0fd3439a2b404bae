"""Case files: what is written comes back, and everything malformed is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mok_ref import casefile
from mok_ref.casefile import ARRAYS, case_arrays, case_from_arrays, load_case, read_npz, write_npz
from mok_ref.golden import BUILT_IN
from mok_ref.runner import RandomCase

ROUTER = RandomCase(20, 16, 8, num_experts=4, top_k=2, shared_size=24, router=True)
ROUTED = RandomCase(20, 16, 8, num_experts=4, top_k=2, shared_size=24, swiglu_limit=0.5)


def arrays(router: bool = False) -> dict[str, np.ndarray]:
    return case_arrays((ROUTER if router else ROUTED).make())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_written_case_comes_back(name: str, tmp_path: Path) -> None:
    case = BUILT_IN[name]()
    casefile.save_case(tmp_path / "case.npz", case)
    again = case_arrays(load_case(tmp_path / "case.npz"))
    expected = case_arrays(case)
    assert list(again) == list(expected)
    for key, value in expected.items():
        assert again[key].dtype == value.dtype, key
        np.testing.assert_array_equal(again[key], value, err_msg=key)


def test_the_same_case_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        casefile.save_case(tmp_path / name, ROUTER.make())
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize(
    "key", ["x", "w_gate", "w_up", "w_down", "topk_ids", "topk_weights", "shared_w_up"]
)
def test_a_missing_key_is_named(key: str) -> None:
    given = arrays()
    del given[key]
    with pytest.raises(ValueError, match=rf"missing.*{key}"):
        case_from_arrays(given)


def test_an_extra_key_is_named() -> None:
    with pytest.raises(ValueError, match="extra top_p"):
        case_from_arrays({**arrays(), "top_p": np.float32(1)})


def test_a_router_needs_top_k_and_excludes_ids() -> None:
    given = arrays(router=True)
    with pytest.raises(ValueError, match="topk_ids and w_router"):
        case_from_arrays({**given, "topk_ids": np.zeros((20, 2), np.int32)})
    with pytest.raises(ValueError, match="topk_weights must not be given together with w_router"):
        case_from_arrays({**given, "topk_weights": np.zeros((20, 2), np.float32)})
    with pytest.raises(ValueError, match="scale must not be given together with topk_ids"):
        case_from_arrays({**arrays(), "scale": np.float32(2)})
    del given["top_k"]
    with pytest.raises(ValueError, match="missing top_k"):
        case_from_arrays(given)


@pytest.mark.parametrize("key", sorted(ARRAYS))
def test_wrong_dtype_and_shape_are_refused(key: str) -> None:
    given = arrays(router=key in ("w_router", "choice_bias"))
    if key == "logits":
        given = {k: v for k, v in arrays(router=True).items() if k != "w_router"}
    optional = {
        "logits": np.zeros((20, 4), np.float32),
        "choice_bias": np.zeros(4, np.float32),
        "placement": np.zeros(4, np.int32),
        "splits": np.array([20], np.int32),
    }
    array = given[key] = optional.get(key, given.get(key))
    case_from_arrays(given)  # the control: as it is, the case is good
    with pytest.raises(ValueError, match=rf"^{key} must be {array.dtype.name}, got float64$"):
        case_from_arrays({**given, key: array.astype(np.float64)})
    with pytest.raises(ValueError, match=rf"^{key} must have axes"):
        case_from_arrays({**given, key: array[None]})
    if key != "splits":  # splits alone may have any length; its sum is checked below
        with pytest.raises(ValueError, match=r"must have axes .* as in"):
            case_from_arrays({**given, key: np.concatenate([array, array])})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"topk_ids": np.full((20, 2), 4, np.int32)},
            r"topk_ids must be in -1..3, got 4 at \[0, 0\]",
        ),
        ({"topk_ids": np.full((20, 2), -2, np.int32)}, "topk_ids must be in -1..3, got -2"),
        ({"topk_weights": np.full((20, 2), np.nan, np.float32)}, "must be finite, got nan"),
        ({"topk_weights": np.full((20, 2), np.inf, np.float32)}, "must be finite, got inf"),
        ({"splits": np.array([16, 16], np.int32)}, "splits must sum to the 20 rows of x, got 32"),
        ({"splits": np.array([-1, 21], np.int32)}, "splits must be >= 0, got -1"),
        ({"swiglu_limit": np.float32(0)}, "swiglu_limit must be a finite float32 > 0, got 0"),
        ({"swiglu_limit": np.float32("nan")}, "swiglu_limit must be a finite float32 > 0, got nan"),
        ({"swiglu_limit": np.zeros(2, np.float32)}, "swiglu_limit must be one float"),
        ({"order": np.asarray("random")}, "order must be one of canonical, round_robin"),
        ({"order": np.asarray(b"canonical")}, "order must be one string"),
        ({"dtype": np.asarray("fp8")}, "dtype must be one of bf16, mxfp8, got 'fp8'"),
        ({"contract": np.asarray(2)}, "contract must be 1, got 2"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case_from_arrays({**arrays(), **{key: np.asarray(v) for key, v in changes.items()}})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_define_no_choice_are_refused(value: float) -> None:
    given = {key: v for key, v in arrays(router=True).items() if key != "w_router"}
    given["logits"] = np.zeros((20, 4), np.float32)
    given["logits"][7, 2] = value
    with pytest.raises(ValueError, match=r"logits must not be NaN or .Inf.*token=7, expert=2"):
        case_from_arrays(given)


@pytest.mark.parametrize("kept", [0, 10, 1000, -1000, -30, -1])
def test_a_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    casefile.save_case(path, ROUTED.make())
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"case.npz: input must be a complete .npz file"):
        load_case(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    casefile.save_case(path, ROUTED.make())
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="complete"):
        load_case(path)


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    np.savez(path, x=np.array([print], dtype=object))
    with pytest.raises(ValueError, match="without pickled objects"):
        load_case(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match="single array"):
        read_npz(tmp_path / "one.npy")
    with pytest.raises(ValueError) as refused:
        read_npz(__file__)
    assert "a file of another kind" in str(refused.value) and "allow_pickle" not in str(
        refused.value
    )


def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.npz"
    write_npz(path, {"y": np.zeros(3)})
    before = path.read_bytes()

    def broken(file, **arrays) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(casefile.np, "savez", broken)
    with pytest.raises(OSError, match="disk full"):
        write_npz(path, {"y": np.ones(3)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]


def test_a_place_that_cannot_be_written_is_refused_early(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="output must lie in a folder"):
        casefile.check_writable(tmp_path / "absent" / "out.npz")
    with pytest.raises(ValueError, match="output must be a file name"):
        casefile.check_writable(tmp_path)
