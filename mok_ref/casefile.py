"""Case files: one mixture-of-experts problem, or its results, as a plain `.npz` archive.

Files are read without pickle, their names, dtypes and shapes checked before any of their data is
unpacked, and written under a temporary name that is renamed at the end: nothing half-written is
ever left behind. bf16 tensors are uint16 bits.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from mok_ref.config import DTYPES, ROW_ORDERS, SCALE_RULES
from mok_ref.experts import ExpertWeights
from mok_ref.routing import RoutingOptions, check_logits

CONTRACT = 1
MAX_RANKS = 1024

# Key -> (dtype, axes). Equal letters are equal sizes; S is the width of the shared expert.
ARRAYS: dict[str, tuple[type, str]] = {
    "w_gate": (np.uint16, "EIH"),
    "w_up": (np.uint16, "EIH"),
    "w_down": (np.uint16, "EHI"),
    "x": (np.uint16, "NH"),
    "topk_ids": (np.int32, "NK"),
    "topk_weights": (np.float32, "NK"),
    "dy": (np.uint16, "NH"),
    "shared_w_gate": (np.uint16, "SH"),
    "shared_w_up": (np.uint16, "SH"),
    "shared_w_down": (np.uint16, "HS"),
    "w_router": (np.uint16, "EH"),
    "logits": (np.float32, "NE"),
    "choice_bias": (np.float32, "E"),
    "placement": (np.int32, "E"),
    "splits": (np.int32, "R"),
}
TEXTS: dict[str, tuple[str, ...]] = {
    "order": ROW_ORDERS,
    "dtype": DTYPES,
    "scale_rule": SCALE_RULES,
    "score": ("softmax", "sigmoid"),
    "group_score": ("top2", "max"),
}
NUMBERS: dict[str, type] = {
    "swiglu_limit": float,
    "top_k": int,
    "num_groups": int,
    "keep_groups": int,
    "renormalize": bool,
    "scale": float,
    "contract": int,
}
REQUIRED = ("x", "w_gate", "w_up", "w_down")
SHARED = ("shared_w_gate", "shared_w_up", "shared_w_down")
ROUTING_KEYS = (
    "top_k",
    "score",
    "choice_bias",
    "num_groups",
    "keep_groups",
    "group_score",
    "renormalize",
    "scale",
)
# What an output file may hold, as ARRAYS; the digests are texts.
OUTPUTS: dict[str, tuple[type, str]] = {
    "y": (np.uint16, "NH"),
    "dx": (np.uint16, "NH"),
    "d_topk_weights": (np.float32, "NK"),
    "topk_ids": (np.int32, "NK"),
    "topk_weights": (np.float32, "NK"),
    "d_logits": (np.float32, "NE"),
    "dw_gate": (np.float32, "EIH"),
    "dw_up": (np.float32, "EIH"),
    "dw_down": (np.float32, "EHI"),
    "shared_dw_gate": (np.float32, "SH"),
    "shared_dw_up": (np.float32, "SH"),
    "shared_dw_down": (np.float32, "HS"),
    "dw_router": (np.float32, "EH"),
}
DIGESTS = ("digest", "digests")
OUTPUT_TOKENS = ("y", "dx", "d_topk_weights", "topk_ids", "topk_weights", "d_logits")
OUTPUT_EXPERTS = ("dw_gate", "dw_up", "dw_down")
OUTPUT_REPLICATED = ("shared_dw_gate", "shared_dw_up", "shared_dw_down", "dw_router")


@dataclass(frozen=True, eq=False)
class Case:
    """One problem. Given are topk_ids and topk_weights, or w_router or logits with `routing`.

    x (N, H), w_gate, w_up (E, I, H), w_down (E, H, I), dy (N, H), w_router (E, H): uint16 bits
    topk_ids (N, K) int32, topk_weights (N, K) float32, logits (N, E) float32
    splits (R,) int32 tokens per rank, placement (E,) int32 owner ranks
    """

    x: np.ndarray
    w_gate: np.ndarray
    w_up: np.ndarray
    w_down: np.ndarray
    topk_ids: np.ndarray | None = None
    topk_weights: np.ndarray | None = None
    w_router: np.ndarray | None = None
    logits: np.ndarray | None = None
    routing: RoutingOptions | None = None
    dy: np.ndarray | None = None
    shared: ExpertWeights | None = None
    splits: np.ndarray | None = None
    placement: np.ndarray | None = None
    swiglu_limit: float | None = None
    order: str = "canonical"
    dtype: str = "bf16"
    scale_rule: str = "fit"

    @property
    def num_tokens(self) -> int:
        return len(self.x)

    @property
    def top_k(self) -> int:
        if self.routing is not None:
            return self.routing.top_k
        assert self.topk_ids is not None
        return int(self.topk_ids.shape[1])


# --------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Header:
    """What a member of an archive says of its array before any of it is unpacked."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Described = Mapping[str, Header] | Mapping[str, np.ndarray]


def load_case(path: str | Path) -> Case:
    """Read and check a case file.

    Raises: ValueError naming file, key, rule and value; OSError if the file cannot be opened.
    """
    try:
        return case_from_arrays(read_npz(path, check_case_headers))
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if str(path) not in str(error) else error) from error


def read_npz(
    path: str | Path, check: Callable[[Mapping[str, Header]], None] = lambda headers: None
) -> dict[str, np.ndarray]:
    """All arrays of an `.npz` file.

    check   refuses, by ValueError, names, dtypes and shapes that are not expected; it is called
            before any data is unpacked, and what is unpacked then has the size that it was shown
    Raises: ValueError naming the file if it is no such archive, damaged, or larger than memory.
    """
    rule = f"{path}: input must be a complete .npz file without pickled objects, got"
    with open(path, "rb") as raw:
        start = raw.read(6)
        if not start.startswith(b"PK"):
            raise ValueError(f"{rule} {_other_kind(start)}")
        raw.seek(0)
        with _damage(rule, "archive"):
            archive = zipfile.ZipFile(raw)
        with archive:
            members = _members(archive, rule)
            headers = {}
            for key, member in members.items():
                with _damage(rule, key), archive.open(member) as file:
                    headers[key] = _header(file, member.file_size)
            check(headers)
            return {key: _array(archive, members[key], headers[key], rule, key) for key in members}


def _other_kind(start: bytes) -> str:
    """What a file that is no archive begins like."""
    if start == b"\x93NUMPY":
        return "a single array (.npy)"
    return "a file of another kind" if start else "an empty file"


@contextmanager
def _damage(rule: str, what: str) -> Iterator[None]:
    """Whatever the readers of zip and NumPy stumble over in strange bytes, as one ValueError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error is enough
            yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # the file system's, not the file's; a seek to nowhere is the file's
        raise ValueError(f"{rule} a damaged one: {what} cannot be read") from error


def _members(archive: zipfile.ZipFile, rule: str) -> dict[str, zipfile.ZipInfo]:
    """Array name -> member. Raises: ValueError for names that occur twice or are no array's."""
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        key = member.filename.removesuffix(".npy")
        if key == member.filename:
            raise ValueError(f"{rule} a member that is no array: {key[:80]!r}")
        if key in members:
            raise ValueError(f"{rule} {key[:80]!r} twice")
        members[key] = member
    return members


def _header(file: IO[bytes], file_size: int) -> Header:
    """dtype and shape at the start of a member. Raises: ValueError if the data has another size."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, _, dtype = readers[np.lib.format.read_magic(file)](file)
    header = Header(dtype, shape)
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError("no plain array")
    if file.tell() + header.num_bytes != file_size:
        raise ValueError("data of another size than the shape says")
    return header


def _array(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, header: Header, rule: str, key: str
) -> np.ndarray:
    with _damage(rule, key), archive.open(member) as file:
        try:
            return np.lib.format.read_array(file, allow_pickle=False)
        except MemoryError:
            pass
    raise ValueError(
        f"{key} must fit into memory, got shape {header.shape} of {header.dtype.name}: "
        f"{header.num_bytes} bytes"
    )


def case_from_arrays(arrays: Mapping[str, np.ndarray]) -> Case:
    """A checked case. Raises: ValueError naming key, rule and value."""
    check_case_headers(arrays)
    texts = {key: _text(key, arrays[key]) for key in TEXTS if key in arrays}
    numbers = {key: _number(key, arrays[key]) for key in NUMBERS if key in arrays}
    if numbers.get("contract", CONTRACT) != CONTRACT:
        raise ValueError(f"contract must be {CONTRACT}, got {numbers['contract']}")
    plain: dict[str, Any] = {
        key: np.ascontiguousarray(arrays[key]) for key in ARRAYS if key in arrays
    }
    shared = ExpertWeights(*(plain.pop(key) for key in SHARED)) if SHARED[0] in plain else None
    routing = _routing(plain, texts, numbers)
    case = Case(
        **plain,
        shared=shared,
        routing=routing,
        swiglu_limit=numbers.get("swiglu_limit"),
        order=texts.get("order", "canonical"),
        dtype=texts.get("dtype", "bf16"),
        scale_rule=texts.get("scale_rule", "fit"),
    )
    _check_values(case)
    return case


def check_case_headers(arrays: Described) -> None:
    """Keys, dtypes and shapes of a case, from its arrays or from their headers alone.

    Raises: ValueError naming key, rule and value.
    """
    _check_keys(arrays)
    for key in TEXTS:
        if key in arrays:
            _check_text(key, arrays[key])
    for key in NUMBERS:
        if key in arrays:
            _check_number(key, arrays[key])
    _check_axes(arrays, ARRAYS, {})
    if "splits" in arrays and arrays["splits"].shape[0] > MAX_RANKS:
        raise ValueError(
            f"splits must have at most {MAX_RANKS} entries, got {arrays['splits'].shape[0]}"
        )


def output_check(case: Case) -> Callable[[Described], None]:
    """A function that refuses keys, dtypes and shapes which the results of `case` cannot have."""
    num_experts, inner, hidden = case.w_gate.shape
    sizes = {"N": case.num_tokens, "H": hidden, "I": inner, "E": num_experts, "K": case.top_k}
    if case.shared is not None:
        sizes["S"] = len(case.shared.gate)

    def check(arrays: Described) -> None:
        extra = sorted(set(arrays) - {*OUTPUTS, *DIGESTS})
        if extra:
            names = ", ".join((*OUTPUTS, *DIGESTS))
            raise ValueError(f"keys must be among {names}, got extra {', '.join(extra[:9])}")
        _check_axes(arrays, OUTPUTS, {axis: (size, "the case") for axis, size in sizes.items()})
        for key in DIGESTS:
            if key in arrays and (
                arrays[key].dtype.kind != "U"
                or arrays[key].dtype.itemsize > 1024
                or arrays[key].ndim != DIGESTS.index(key)
                or any(size > len(OUTPUTS) for size in arrays[key].shape)
            ):
                raise ValueError(
                    f"{key} must be text, one line per tensor, got {arrays[key].dtype} of shape "
                    f"{arrays[key].shape}"
                )

    return check


def _check_keys(arrays: Described) -> None:
    known = {*ARRAYS, *TEXTS, *NUMBERS}
    extra = sorted(set(arrays) - known)
    if extra:
        names = ", ".join((*ARRAYS, *TEXTS, *NUMBERS))
        raise ValueError(f"keys must be among {names}, got extra {', '.join(extra[:9])}")
    missing = [key for key in REQUIRED if key not in arrays]
    sources = [key for key in ("topk_ids", "w_router", "logits") if key in arrays]
    if len(sources) > 1:
        raise ValueError(
            "exactly one of topk_ids, w_router, logits must say where tokens go, got "
            + " and ".join(sources)
        )
    if not sources:
        missing.append("topk_ids (or w_router or logits)")
    elif sources == ["topk_ids"] and "topk_weights" not in arrays:
        missing.append("topk_weights")
    elif sources != ["topk_ids"] and "top_k" not in arrays:
        missing.append("top_k")
    if any(key in arrays for key in SHARED):
        missing += [key for key in SHARED if key not in arrays]
    if missing:
        raise ValueError(f"keys must be complete, missing {', '.join(missing)}")
    excluded = ROUTING_KEYS if sources == ["topk_ids"] else ("topk_weights",)
    unused = [key for key in excluded if key in arrays]
    if unused:
        raise ValueError(f"{unused[0]} must not be given together with {sources[0]}")


def _check_text(key: str, array: Header | np.ndarray) -> None:
    if array.dtype.kind != "U" or array.ndim != 0:
        raise ValueError(f"{key} must be one string, got {array.dtype} of shape {array.shape}")
    if array.dtype.itemsize > 4 * 64:
        allowed = ", ".join(TEXTS[key])
        raise ValueError(f"{key} must be one of {allowed}, got {array.dtype.itemsize // 4} letters")


def _text(key: str, array: np.ndarray) -> str:
    value = str(array)
    if value not in TEXTS[key]:
        raise ValueError(f"{key} must be one of {', '.join(TEXTS[key])}, got {value!r}")
    return value


def _check_number(key: str, array: Header | np.ndarray) -> None:
    kinds = {float: "fiu", int: "iu", bool: "biu"}[NUMBERS[key]]
    if array.dtype.kind not in kinds or array.ndim != 0:
        raise ValueError(
            f"{key} must be one {NUMBERS[key].__name__}, got {array.dtype} of shape {array.shape}"
        )


def _number(key: str, array: np.ndarray) -> Any:
    if NUMBERS[key] is bool and array not in (0, 1):
        raise ValueError(f"{key} must be one bool, got {array}")
    return NUMBERS[key](array)


def _check_axes(
    arrays: Described, rules: dict[str, tuple[type, str]], known: dict[str, tuple[int, str]]
) -> None:
    """dtypes, numbers of axes, and that equal letters have equal sizes.

    known   letter -> size that is settled already, and what settled it
    """
    sizes = dict(known)
    for key, (dtype, axes) in rules.items():
        if key not in arrays:
            continue
        array = arrays[key]
        if array.dtype != dtype:
            raise ValueError(f"{key} must be {np.dtype(dtype).name}, got {array.dtype}")
        if array.ndim != len(axes):
            raise ValueError(f"{key} must have axes ({', '.join(axes)}), got shape {array.shape}")
        for axis, size in zip(axes, array.shape, strict=True):
            wanted, source = sizes.setdefault(axis, (size, key))
            if size != wanted:
                raise ValueError(
                    f"{key} must have axes ({', '.join(axes)}) with {axis}={wanted} as in "
                    f"{source}, got shape {array.shape}"
                )
            if size == 0 and axis != "N":
                raise ValueError(f"{key} must have {axis} >= 1, got shape {array.shape}")


def _routing(
    plain: dict[str, Any], texts: Mapping[str, str], numbers: Mapping[str, Any]
) -> RoutingOptions | None:
    """Options of the router, taken out of `plain`; None where ids are given."""
    if "topk_ids" in plain:
        return None
    given: dict[str, Any] = {**texts, **numbers}
    if "choice_bias" in plain:
        given["choice_bias"] = plain.pop("choice_bias")
    options = RoutingOptions(**{key: given[key] for key in ROUTING_KEYS if key in given})
    options.check_num_experts(len(plain["w_gate"]))
    return options


def _check_values(case: Case) -> None:
    if case.topk_ids is not None and case.topk_weights is not None:
        num_experts = len(case.w_gate)
        outside = (case.topk_ids < -1) | (case.topk_ids >= num_experts)
        _refuse(outside, case.topk_ids, "topk_ids", f"in -1..{num_experts - 1}")
        _refuse(~np.isfinite(case.topk_weights), case.topk_weights, "topk_weights", "finite")
    if case.logits is not None and case.routing is not None:
        check_logits(case.logits, case.routing)
    if case.swiglu_limit is not None:
        with np.errstate(over="ignore"):
            limit = np.float32(case.swiglu_limit)
        if not (np.isfinite(limit) and limit > 0):
            raise ValueError(f"swiglu_limit must be a finite float32 > 0, got {case.swiglu_limit}")
    if case.splits is not None:
        if (case.splits < 0).any():
            raise ValueError(f"splits must be >= 0, got {int(case.splits.min())}")
        if int(case.splits.sum()) != case.num_tokens:
            raise ValueError(
                f"splits must sum to the {case.num_tokens} rows of x, got {int(case.splits.sum())}"
            )


def _refuse(bad: np.ndarray, values: np.ndarray, name: str, rule: str) -> None:
    if bad.any():
        token, slot = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name} must be {rule}, got {values[token, slot]} at [{token}, {slot}]")


# --------------------------------------------------------------------------- writing


def case_arrays(case: Case) -> dict[str, np.ndarray]:
    """The arrays of a case file; `case_from_arrays` gives the case back."""
    arrays: dict[str, Any] = {key: getattr(case, key, None) for key in ARRAYS}
    if case.shared is not None:
        arrays.update(zip(SHARED, case.shared, strict=True))
    if case.routing is not None:
        arrays.update({key: getattr(case.routing, key) for key in ROUTING_KEYS})
        arrays["scale"] = np.float32(case.routing.scale)
    if case.swiglu_limit is not None:
        arrays["swiglu_limit"] = np.float32(case.swiglu_limit)
    arrays.update(order=case.order, dtype=case.dtype, scale_rule=case.scale_rule, contract=CONTRACT)
    return {key: np.asarray(value) for key, value in arrays.items() if value is not None}


def save_case(path: str | Path, case: Case) -> None:
    """Write a case file."""
    write_npz(path, case_arrays(case))


def write_npz(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an `.npz` file whole or not at all: under a temporary name, then renamed.

    The bytes depend on the arrays alone (no time of day enters).
    """
    with _whole_file(path) as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all: under a temporary name, then renamed; text as UTF-8.

    Raises: ValueError if no file can be written there, OSError.
    """
    with _whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def _whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when the block ends without an error, and is gone otherwise."""
    path = Path(path)
    check_writable(path)
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """Where a file is written before it gets its name: beside it, never too long a name, and this
    thread's own (virtual ranks are threads)."""
    writer = f"{os.getpid()}.{threading.get_native_id()}"
    return path.with_name(f".{path.name[:40]}.{writer}.tmp")


def check_writable(path: str | Path, name: str = "output") -> None:
    """Refuse, before any work is done, a path that no file can be written to.

    A file is made beside it and taken away: permissions alone do not tell.
    Raises: ValueError.
    """
    path = Path(path)
    try:
        is_folder = not path.name or stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        is_folder = False
    except OSError as error:  # a name that is too long, for one
        raise ValueError(f"{name} must be a file name, got {path}: {error.strerror}") from error
    if is_folder:
        raise ValueError(f"{name} must be a file name, got the directory {path}")
    temporary = _temporary(path)
    try:
        with open(temporary, "xb"):
            temporary.unlink()
    except OSError as error:
        raise ValueError(
            f"{name} must lie in a folder that can be written to, got {path}: {error.strerror}"
        ) from error


def check_distinct(**paths: str | Path | None) -> None:
    """Refuse one file for two purposes, under whatever names. Raises: ValueError naming both."""
    given = [(name, Path(path)) for name, path in paths.items() if path is not None]
    for index, (name, path) in enumerate(given):
        for other_name, other in given[:index]:
            if _same_file(path, other):
                raise ValueError(f"{name} must be another file than {other_name}, got {path}")


def _same_file(path: Path, other: Path) -> bool:
    try:
        return os.path.realpath(path) == os.path.realpath(other) or path.samefile(other)
    except OSError:  # one of them does not exist yet
        return False
