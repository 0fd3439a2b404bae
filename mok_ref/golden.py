"""Golden cases: inputs with the outputs that every implementation must reproduce.

A folder holds pairs `case<NAME>.npz` and `out<NAME>.npz`; the outputs were once computed and agreed
upon, and nothing rewrites them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mok_ref.casefile import (
    DIGESTS,
    OUTPUT_EXPERTS,
    OUTPUT_REPLICATED,
    Case,
    load_case,
    output_check,
    read_npz,
    save_case,
    write_npz,
)
from mok_ref.experts import ExpertWeights
from mok_ref.routing import RoutingOptions
from mok_ref.runner import (
    Plan,
    RandomCase,
    RunResult,
    Settings,
    check_settings,
    make_plan,
    run_virtual,
)
from mok_ref.testing import assert_bitwise_equal, random_bf16
from mok_ref.verify import in_units_of_16


@dataclass(frozen=True)
class GoldenCheck:
    """One golden case: digest as computed now (empty where nothing could be computed).

    `fault` is empty where every stored bit agrees.
    """

    name: str
    digest: str
    fault: str


def golden_pairs(folder: str | Path) -> list[tuple[str, Path, Path]]:
    """(name, case file, output file) of a folder, sorted by name. Raises: ValueError if empty."""
    folder = Path(folder)
    cases = sorted(folder.glob("case*.npz"))
    if not cases:
        raise ValueError(f"folder must hold golden cases (case*.npz), got {folder}")
    return [(path.stem[4:].lstrip("_"), path, folder / f"out{path.stem[4:]}.npz") for path in cases]


def check_case(case_file: Path, out_file: Path, settings: Settings) -> tuple[str, str]:
    """(digest, fault) of one case, as stored or split and placed otherwise by `settings`.

    Raises: ValueError or OSError for unreadable files.
    """
    case = load_case(case_file)
    expected = read_npz(out_file, output_check(case))
    result = run_virtual(make_plan(case, replace(settings, backward="dx" in expected)))
    left_out = differing_by_definition(case, result.plan)
    stored = {key: value for key, value in expected.items() if key not in DIGESTS}
    if sorted(stored) != sorted(result.tensors):
        return result.digest, f"tensors {sorted(result.tensors)} instead of {sorted(stored)}"
    for name, tensor in stored.items():
        if name in left_out:
            continue
        try:
            assert_bitwise_equal(result.tensors[name], tensor, name)
        except AssertionError as error:
            return result.digest, str(error)
    return result.digest, _digest_fault(expected, result, left_out)


def _digest_fault(
    expected: dict[str, np.ndarray], result: RunResult, left_out: tuple[str, ...]
) -> str:
    """What is wrong with the stored digests of tensors that are as stored; empty if nothing."""
    if not left_out and "digest" in expected and str(expected["digest"]) != result.digest:
        return f"digest {result.digest} instead of {expected['digest']}"
    if "digests" not in expected:
        return ""
    stored, now = (
        sorted(line for line in map(str, lines) if line.partition(" ")[0] not in left_out)
        for lines in (expected["digests"], result.output_arrays()["digests"])
    )
    if stored == now:
        return ""
    differing = sorted(set(now) ^ set(stored)) or stored
    return f"digests: the stored lines are not those of the tensors, first at {differing[0]!r}"


def differing_by_definition(case: Case, plan: Plan) -> tuple[str, ...]:
    """Results that other ranks may change: those of spec 4.2 (round_robin) and 6.10 (splits)."""
    stored = make_plan(case, Settings()).splits
    if len(plan.splits) == len(stored):
        return ()
    left_out: tuple[str, ...] = OUTPUT_EXPERTS if plan.config.row_order == "round_robin" else ()
    if not (in_units_of_16(stored) and in_units_of_16(plan.splits)):
        left_out = (*left_out, *OUTPUT_REPLICATED)
    return left_out


def check_folder(
    folder: str | Path, settings: Settings, report: Callable[[GoldenCheck], None]
) -> bool:
    """Check every pair of a folder, whatever the others give; True if all bits agree.

    A case that cannot be read or run, and a half without its partner, is a fault of its own.
    Raises: ValueError for settings that fit no case, or a folder without cases.
    """
    check_settings(settings)
    good = True
    for name, case_file, out_file in golden_pairs(folder):
        try:
            check = GoldenCheck(name, *check_case(case_file, out_file, settings))
        except FileNotFoundError as error:
            check = GoldenCheck(name, "", f"there is no {Path(error.filename).name}")
        except (ValueError, OSError, MemoryError) as error:
            check = GoldenCheck(name, "", str(error))
        report(check)
        good &= not check.fault
    for name in orphans(folder):
        report(GoldenCheck(name, "", f"there is no case for out{name}.npz"))
        good = False
    return good


def orphans(folder: str | Path) -> list[str]:
    """NAMEs of `out<NAME>.npz` whose `case<NAME>.npz` is gone."""
    found = sorted(path.stem[3:] for path in Path(folder).glob("out*.npz"))
    return [name for name in found if not (Path(folder) / f"case{name}.npz").exists()]


def make_folder(folder: str | Path, report: Callable[[str], None]) -> None:
    """Write the built-in cases that a folder lacks, and the outputs of cases that have none.

    Files that exist are never rewritten.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in BUILT_IN.items():
        path = folder / f"case_{name}.npz"
        if not path.exists():
            save_case(path, make())
            report(str(path))
    for _, case_file, out_file in golden_pairs(folder):
        if not out_file.exists():
            case = load_case(case_file)
            result = run_virtual(make_plan(case, Settings(backward=case.dy is not None)))
            write_npz(out_file, result.output_arrays())
            report(str(out_file))


# --------------------------------------------------------------------------- built-in cases


def _empty_experts() -> Case:
    """Only experts 0 to 3 of 8 get rows; ranks 2 and 3 of 4 get none."""
    case = RandomCase(48, 32, 24, num_experts=8, top_k=2, seed=11).make()
    assert case.topk_ids is not None
    return replace(case, topk_ids=case.topk_ids % 4, splits=np.full(4, 12, np.int32))


def _missing_routes() -> Case:
    """Slots of -1 with non-zero weights, whole tokens without a route, weights <= 0."""
    case = RandomCase(40, 48, 32, num_experts=4, top_k=4, shared_size=16, seed=12).make()
    assert case.topk_ids is not None and case.topk_weights is not None
    ids, weights = case.topk_ids.copy(), case.topk_weights.copy()
    ids[::2, 1::2] = -1
    ids[5] = -1
    ids[-1] = -1
    weights[3] = 0.0
    return replace(case, topk_ids=ids, topk_weights=weights, splits=np.array([16, 24], np.int32))


def _uneven_splits() -> Case:
    """Ranks with 0, 1 and many tokens, round_robin order."""
    case = RandomCase(70, 16, 40, num_experts=4, top_k=2, shared_size=8, seed=13).make()
    return replace(case, splits=np.array([1, 0, 66, 3], np.int32), order="round_robin")


def _repeated_expert() -> Case:
    """K > E: the same expert in several slots of a token, each counts."""
    case = RandomCase(33, 34, 18, num_experts=3, top_k=5, seed=14).make()
    return replace(case, splits=np.array([16, 16, 1], np.int32))


def _placement() -> Case:
    """Seven experts on three ranks by a placement, one rank without experts."""
    case = RandomCase(48, 24, 40, num_experts=7, top_k=3, seed=15).make()
    owners = np.array([2, 0, 2, 2, 0, 0, 2], np.int32)
    return replace(case, placement=owners, splits=np.array([16, 16, 16], np.int32))


def _router_softmax() -> Case:
    """A router in the case: softmax, renormalised, with a shared expert and a clamp."""
    case = RandomCase(
        64, 40, 24, num_experts=8, top_k=3, shared_size=16, swiglu_limit=0.5, router=True, seed=16
    ).make()
    return replace(case, splits=np.full(4, 16, np.int32))


def _router_grouped() -> Case:
    """Sigmoid scores, a bias for the choice, grouped choice, a scale; mxfp8 experts."""
    case = RandomCase(48, 64, 48, num_experts=8, top_k=3, router=True, seed=17).make()
    bias = (np.arange(8, dtype=np.float32) - 4) / 16
    options = RoutingOptions(3, "sigmoid", bias, 4, 2, "top2", True, 2.5)
    return replace(case, routing=options, dtype="mxfp8", splits=np.array([16, 32], np.int32))


def _logits_closed() -> Case:
    """Logits are given; -Inf closes experts, ties go to the lower id, some slots stay empty."""
    case = RandomCase(32, 32, 16, num_experts=6, top_k=2, router=True, seed=18).make()
    rng = np.random.default_rng([18, 1])
    logits = rng.integers(-2, 3, (32, 6)).astype(np.float32)
    logits[:, 4] = -np.inf
    logits[7, 1:] = -np.inf
    logits[9] = -np.inf
    options = RoutingOptions(2, num_groups=3, keep_groups=2, group_score="max", scale=1.5)
    return replace(
        case, w_router=None, logits=logits, routing=options, splits=np.array([16, 16], np.int32)
    )


def _clamp_shared_mxfp8() -> Case:
    """Clamp and shared expert of another width with mxfp8 experts and the OCP scale rule."""
    case = RandomCase(
        48, 72, 40, num_experts=4, top_k=2, shared_size=56, swiglu_limit=0.25, seed=19
    ).make()
    return replace(case, dtype="mxfp8", scale_rule="ocp", splits=np.array([32, 16], np.int32))


def _special_values() -> Case:
    """NaN, infinities, signed zeros and subnormal numbers in x and dy; several row blocks."""
    case = RandomCase(160, 16, 8, num_experts=2, top_k=2, seed=20).make()
    assert case.dy is not None
    x, dy = case.x.copy(), case.dy.copy()
    x[0, 3], x[1, 0], x[2, 5], x[3, :] = 0x7FC1, 0x7F80, 0xFF80, 0x8000
    x[4, :] = np.arange(1, 17)  # subnormal bf16
    dy[10, 2], dy[11, 4], dy[12, :] = 0x7F80, 0xFFC0, 0x0001
    return replace(case, x=x, dy=dy, splits=np.array([96, 64], np.int32))


def _forward_only() -> Case:
    """No dy: outputs hold y alone. The shared expert is wider than the routed ones."""
    rng = np.random.default_rng([21, 1])
    case = RandomCase(17, 20, 12, num_experts=4, top_k=1, seed=21).make()
    gate, up, down = (
        random_bf16(rng, s, 0.2).view(np.uint16) for s in ((30, 20),) * 2 + ((20, 30),)
    )
    return replace(case, dy=None, shared=ExpertWeights(gate, up, down))


BUILT_IN: dict[str, Callable[[], Case]] = {
    "empty_experts": _empty_experts,
    "missing_routes": _missing_routes,
    "uneven_splits": _uneven_splits,
    "repeated_expert": _repeated_expert,
    "placement": _placement,
    "router_softmax": _router_softmax,
    "router_grouped": _router_grouped,
    "logits_closed": _logits_closed,
    "clamp_shared_mxfp8": _clamp_shared_mxfp8,
    "special_values": _special_values,
    "forward_only": _forward_only,
}
