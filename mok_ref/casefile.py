"""Case files: one mixture-of-experts problem, or its results, as a plain `.npz` archive.

Files are read without pickle, checked key by key, and written under a temporary name that is
renamed at the end: nothing half-written is ever left behind. bf16 tensors are uint16 bits.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok_ref.config import DTYPES, ROW_ORDERS, SCALE_RULES
from mok_ref.experts import ExpertWeights
from mok_ref.routing import RoutingOptions, check_logits

CONTRACT = 1

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


def load_case(path: str | Path) -> Case:
    """Read and check a case file.

    Raises: ValueError naming file, key, rule and value; OSError if the file cannot be opened.
    """
    try:
        return case_from_arrays(read_npz(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if str(path) not in str(error) else error) from error


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz` file. Raises: ValueError if it is not one, or truncated."""
    try:
        with open(path, "rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            with file:
                return {key: file[key] for key in file.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path}: input must be a complete .npz file without pickled objects, got: {reason}"
        ) from error


def case_from_arrays(arrays: Mapping[str, np.ndarray]) -> Case:
    """A checked case. Raises: ValueError naming key, rule and value."""
    _check_keys(arrays)
    texts = {key: _text(key, arrays[key]) for key in TEXTS if key in arrays}
    numbers = {key: _number(key, arrays[key]) for key in NUMBERS if key in arrays}
    _check_arrays(arrays)
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


def _check_keys(arrays: Mapping[str, np.ndarray]) -> None:
    known = {*ARRAYS, *TEXTS, *NUMBERS}
    extra = sorted(set(arrays) - known)
    if extra:
        raise ValueError(f"keys must be among the documented ones, got extra {', '.join(extra)}")
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


def _text(key: str, array: np.ndarray) -> str:
    if array.dtype.kind != "U" or array.ndim != 0:
        raise ValueError(f"{key} must be one string, got {array.dtype} of shape {array.shape}")
    value = str(array)
    if value not in TEXTS[key]:
        raise ValueError(f"{key} must be one of {', '.join(TEXTS[key])}, got {value!r}")
    return value


def _number(key: str, array: np.ndarray) -> Any:
    kinds = {float: "fiu", int: "iu", bool: "b"}[NUMBERS[key]]
    if key == "renormalize" and array.dtype.kind in "iu" and array.ndim == 0 and array in (0, 1):
        return bool(array)
    if array.dtype.kind not in kinds or array.ndim != 0:
        raise ValueError(
            f"{key} must be one {NUMBERS[key].__name__}, got {array.dtype} of shape {array.shape}"
        )
    return NUMBERS[key](array)


def _check_arrays(arrays: Mapping[str, np.ndarray]) -> None:
    """dtypes, numbers of axes, and that equal letters have equal sizes."""
    sizes: dict[str, tuple[int, str]] = {}
    for key, (dtype, axes) in ARRAYS.items():
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
    path = Path(path)
    check_writable(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            np.savez(file, **dict(arrays))  # type: ignore[arg-type]
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Refuse, before any work is done, a path that no file can be written to.

    Raises: ValueError.
    """
    path = Path(path)
    if path.is_dir() or not path.name:
        raise ValueError(f"output must be a file name, got the directory {path}")
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"output must lie in a folder that can be written to, got {path}")
