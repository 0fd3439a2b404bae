"""Case files: what is written comes back, and everything malformed is refused by name."""

from __future__ import annotations

import io
import random
import threading
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
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
        ({"swiglu_limit": np.float64(1e300)}, "must be a finite float32 > 0, got 1e.300"),
        ({"order": np.asarray("c" * 65)}, "order must be one of canonical.*, got 65 letters"),
        ({"splits": np.zeros(1025, np.int32)}, "splits must have at most 1024 entries, got 1025"),
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


# --------------------------------------------------------------------------- strange archives


def npy(array: np.ndarray, header: bytes | None = None, version: int = 1) -> bytes:
    """An array as a member of an archive, its header replaced."""
    file = io.BytesIO()
    np.save(file, array)
    if header is None:
        return file.getvalue()
    line = header.ljust(118) + b"\n"
    length = len(line).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + line + array.tobytes()


def archive(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's, of names that occur twice
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in members:
                file.writestr(name, content)
    return path


def members(**changes: bytes) -> list[tuple[str, bytes]]:
    given = {key: npy(value) for key, value in arrays().items()} | changes
    return [(f"{key}.npy", content) for key, content in given.items()]


HEADERS = [
    b"{'descr': '<u2', 'fortran_order': False, 'shape': (20, 16",
    b"{'descr': '<u2', 'fortran_order': False, 'shape': (-20, 16), }",
    b"{'descr': '<u2', 'fortran_order': False, 'shape': (True, 16), }",
    b"{'descr': '<u2', 'fortran_order': False, 'shape': (1099511627776, 16), }",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (20, 16), }",
    b"{'descr': '<U9999999999', 'fortran_order': False, 'shape': (20, 16), }",
    b"{'descr': '<M8[foo]', 'fortran_order': False, 'shape': (20, 16), }",
    b"{'descr': ',', 'fortran_order': False, 'shape': (20, 16), }",
    b"{'descr': 'u2,(', 'fortran_order': False, 'shape': (20, 16), }",
    b"{'descr': ('<u2',), 'fortran_order': False, 'shape': (20, 16), }",
    b"[1,\n  2\n 3",
    b"\x00",
    b"{[]:1}",
    b"'" * 3,
    b"(" * 90,
    b"9" * 5000,
    b"-" * 3000 + b"1",
]


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header[:80].decode())
def test_a_header_that_is_none_is_damage(header: bytes, version: int, tmp_path: Path) -> None:
    """Whatever NumPy and Python's tokenizer raise over it, and no word of theirs beside it."""
    content = npy(arrays()["x"], header, version)
    path = archive(tmp_path / "case.npz", members(x=content))
    with pytest.raises(ValueError, match=r"case.npz: input must be .* a damaged one: x cannot be"):
        load_case(path)


def test_a_file_of_python_2_is_read_without_a_word(tmp_path: Path) -> None:
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (20L, 16L), }"
    path = archive(tmp_path / "case.npz", members(x=npy(arrays()["x"], header)))
    np.testing.assert_array_equal(load_case(path).x, arrays()["x"])


@pytest.mark.parametrize("compressed", [False, True])
def test_any_changed_bytes_give_a_case_or_a_value_error(compressed: bool, tmp_path: Path) -> None:
    plain, path = tmp_path / "plain.npz", tmp_path / "case.npz"
    casefile.save_case(plain, ROUTED.make())
    good = (archive(path, members()) if compressed else plain).read_bytes()
    rng, refused = random.Random(1), 0
    for _ in range(400):
        content = bytearray(good)
        start = max(0, len(content) - 1400) if rng.random() < 0.6 else 0  # the directory
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(start, len(content))] = rng.randrange(256)
        path.write_bytes(content)
        try:
            load_case(path)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 200


def test_names_are_unique_and_arrays(tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    archive(path, [*members(), ("x.npy", npy(arrays()["x"] * 0))])
    with pytest.raises(ValueError, match="got 'x' twice"):
        load_case(path)
    archive(path, [*members(), ("order", b"canonical")])
    with pytest.raises(ValueError, match="got a member that is no array: 'order'"):
        load_case(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bomb": np.zeros(2**24, np.uint8)}, "got extra bomb"),
        ({"w_gate": np.zeros((4, 8, 2**16), np.uint16)}, "with H=16 as in|with H=65536 as in"),
        ({"x": np.zeros((2**20, 16), np.float32)}, "x must be uint16, got float32"),
        ({"order": np.asarray("c" * 2**20)}, "order must be one of .* got 1048576 letters"),
        ({"splits": np.zeros(2**20, np.int32)}, "splits must have at most 1024 entries"),
    ],
    ids=["extra", "shape", "dtype", "text", "splits"],
)
def test_what_does_not_belong_is_refused_before_it_is_unpacked(
    changes: dict[str, np.ndarray], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = members(**{key: npy(value) for key, value in changes.items()})
    path = archive(tmp_path / "case.npz", given)
    assert path.stat().st_size < 10**5  # small as a file
    monkeypatch.setattr(casefile.np.lib.format, "read_array", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match=message):
        load_case(path)


def test_data_of_another_size_than_the_header_says_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archive(tmp_path / "case.npz", members(x=npy(arrays()["x"]) + bytes(2**24)))
    monkeypatch.setattr(casefile.np.lib.format, "read_array", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match="damaged one: x cannot be read"):
        load_case(path)


def test_a_case_larger_than_memory_names_the_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    path = archive(tmp_path / "case.npz", members())
    monkeypatch.setattr(casefile.np.lib.format, "read_array", full)
    message = r"w_gate must fit into memory, got shape \(4, 8, 16\) of uint16: 1024 bytes"
    with pytest.raises(ValueError, match=message):
        load_case(path)


def test_a_missing_file_stays_the_file_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_case(tmp_path / "absent.npz")
    with pytest.raises(IsADirectoryError):
        load_case(tmp_path)


# --------------------------------------------------------------------------- writing


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
    with pytest.raises(ValueError, match=r"--plot must be a file name, got .*: File name too long"):
        casefile.check_writable(tmp_path / ("x" * 300), "--plot")
    casefile.check_writable(tmp_path / ("x" * 255))
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_one_process_may_ask_for_the_same_file_at_once(tmp_path: Path) -> None:
    """Virtual ranks are threads: each has a temporary file of its own."""
    path, together = tmp_path / "out.npz", threading.Barrier(4)

    def name(rank: int) -> Path:
        together.wait(20)
        casefile.check_writable(path)
        return casefile._temporary(path)

    with ThreadPoolExecutor(4) as ranks:
        assert len(set(ranks.map(name, range(4)))) == 4
    assert list(tmp_path.iterdir()) == []


def test_permissions_alone_do_not_make_a_folder_writable() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("no folder that looks writable")
    with pytest.raises(ValueError, match=r"output must lie in a folder .* got /proc/x.npz"):
        casefile.check_writable("/proc/x.npz")


def test_a_write_that_fails_names_the_file_and_not_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file, **arrays) -> None:
        raise OSError(28, "No space left on device", file.name)

    monkeypatch.setattr(casefile.np, "savez", full)
    with pytest.raises(OSError, match="No space left") as error:
        write_npz(tmp_path / "out.npz", {"y": np.ones(3)})
    assert error.value.filename == str(tmp_path / "out.npz")


def test_two_purposes_need_two_files(tmp_path: Path) -> None:
    path, other = tmp_path / "a.npz", tmp_path / "b.npz"
    casefile.check_distinct(input=path, output=other, plot=None)
    path.write_bytes(b"x")
    other.symlink_to(path)
    with pytest.raises(ValueError, match=r"output must be another file than input, got .*b.npz"):
        casefile.check_distinct(input=path, output=other)
