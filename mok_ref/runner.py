"""Run a case on virtual ranks, under mpiexec or on the GPU, and gather the batch's results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mok_ref.case_router import DeviceCaseRouter, ReferenceRouter
from mok_ref.casefile import (
    MAX_RANKS,
    OUTPUT_EXPERTS,
    OUTPUT_REPLICATED,
    OUTPUT_TOKENS,
    Case,
)
from mok_ref.config import ARITHMETICS, ROW_TILE, SAVE_MODES, MoEConfig
from mok_ref.experts import ExpertWeights
from mok_ref.heap import run_on_world, run_ranks
from mok_ref.layer import moe_backward, moe_forward
from mok_ref.numerics import canonical_nan
from mok_ref.routing import RoutingOptions
from mok_ref.schedule import default_splits
from mok_ref.testing import digest, random_bf16, random_routes, tensor_digest
from mok_ref.timing import StageClock, stage_time

DEVICES = ("cpu", "cuda")
PATHS = ("auto", "hopper", "portable")
MAX_TIMEOUT_S = 1e6  # more than eleven days is no limit; clocks of the system end at 2^63 ns


@dataclass(frozen=True)
class Settings:
    """How to run a case; None means: as the case says.

    placement  owner ranks, or "even": equal numbers of experts per rank, as far as they divide

    path   which kernels compute products on a GPU: "auto", "hopper" or "portable"
    """

    ranks: int | None = None
    order: str | None = None
    dtype: str | None = None
    scale_rule: str | None = None
    placement: str | tuple[int, ...] | None = None
    macrobatch: int | None = None
    minibatch: int | None = None
    arithmetic: str = "exact"
    save: str = "all"
    backward: bool = False
    device: str = "cpu"
    path: str = "auto"
    timeout_s: float = 120.0


@dataclass(frozen=True, eq=False)
class Plan:
    """A case with everything decided: the layer's configuration and the tokens of each rank."""

    case: Case
    config: MoEConfig
    splits: np.ndarray
    settings: Settings

    def tokens_of(self, rank: int) -> slice:
        ends = np.cumsum(self.splits)
        return slice(int(ends[rank] - self.splits[rank]), int(ends[rank]))


@dataclass(eq=False)
class RankResult:
    """One rank's share: host arrays by output name, seconds per stage, which GPU path ran."""

    tensors: dict[str, np.ndarray]
    stages: dict[str, float]
    path: str


@dataclass(eq=False)
class RunResult:
    """The whole batch: tensors as in an output file, their digest, and how long stages took."""

    plan: Plan
    tensors: dict[str, np.ndarray]
    topk_ids: np.ndarray
    stages: dict[str, float]
    path: str
    digest: str = field(init=False)
    digests: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.digest = digest(self.tensors)
        self.digests = {
            name: tensor_digest(name, self.tensors[name]) for name in sorted(self.tensors)
        }

    def rows_per_expert(self) -> np.ndarray:
        """(E,) routes that reached each expert."""
        routed = self.topk_ids[self.topk_ids >= 0]
        return np.bincount(routed, minlength=self.plan.config.num_experts)

    def rows_per_rank(self) -> tuple[np.ndarray, np.ndarray]:
        """(R,) routed rows and (R,) rows with padding."""
        config, rows = self.plan.config, self.rows_per_expert()
        padded = -(-rows // ROW_TILE) * ROW_TILE
        owners, size = config.owner_of_expert, config.ep_size
        routed = np.bincount(owners, weights=rows, minlength=size).astype(np.int64)
        return routed, np.bincount(owners, weights=padded, minlength=size).astype(np.int64)

    def traffic(self) -> np.ndarray:
        """(R, R) rows that rank i pulls from rank j."""
        return traffic_of(self.plan, self.topk_ids)

    def seconds(self, *names: str) -> float:
        return sum(self.stages.get(name, 0.0) for name in names)

    def output_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of an output file."""
        lines = [f"{name} {value}" for name, value in self.digests.items()]
        return {**self.tensors, "digest": np.asarray(self.digest), "digests": np.asarray(lines)}


# --------------------------------------------------------------------------- preparing


def make_plan(case: Case, settings: Settings, job_size: int | None = None) -> Plan:
    """Decide ranks, splits and configuration; all bad combinations are refused here.

    job_size   number of MPI processes, None outside mpiexec
    Raises: ValueError naming argument, rule and value.
    """
    check_settings(settings)
    if settings.backward and case.dy is None:
        raise ValueError("dy must be in the case for --backward, got none")
    ranks = _num_ranks(case, settings, job_size)
    if case.splits is not None and len(case.splits) == ranks:
        splits = case.splits.astype(np.int64)
    else:
        splits = default_splits(case.num_tokens, ranks)
    return Plan(case, case_config(case, settings, ranks), splits, settings)


def check_settings(settings: Settings) -> None:
    """Refuse what no case could be run with, and options that would do nothing.

    Raises: ValueError naming argument, rule and value.
    """
    choices = {"device": DEVICES, "path": PATHS, "arithmetic": ARITHMETICS, "save": SAVE_MODES}
    for name, allowed in choices.items():
        value = getattr(settings, name)
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    if settings.device == "cpu" and settings.path != "auto":
        raise ValueError(f"path must be auto with device cpu, got {settings.path!r}")
    if settings.device == "cuda" and settings.arithmetic != "exact":
        raise ValueError(f"arithmetic must be exact with device cuda, got {settings.arithmetic!r}")
    if not 0 < settings.timeout_s <= MAX_TIMEOUT_S:  # NaN is refused, too
        raise ValueError(
            f"timeout must be a number of seconds > 0, at most {MAX_TIMEOUT_S:g}, "
            f"got {settings.timeout_s:g}"
        )
    if settings.ranks is not None:
        if settings.ranks < 1:
            raise ValueError(f"ranks must be >= 1, got {settings.ranks}")
        if settings.ranks > MAX_RANKS:
            raise ValueError(f"ranks must be at most {MAX_RANKS}, got {settings.ranks}")


def _num_ranks(case: Case, settings: Settings, job_size: int | None) -> int:
    asked = settings.ranks
    if job_size is None:
        return asked or (1 if case.splits is None else len(case.splits))
    if asked is not None and asked != job_size:
        raise ValueError(f"ranks must be the number of MPI processes {job_size}, got {asked}")
    if asked is None and case.splits is not None and len(case.splits) != job_size:
        raise ValueError(
            f"the number of MPI processes must be the {len(case.splits)} entries of splits "
            f"(or be given again as --ranks, which re-splits), got {job_size}"
        )
    return job_size


def case_config(case: Case, settings: Settings, ranks: int) -> MoEConfig:
    """The layer's configuration for `ranks` ranks. Raises: ValueError."""
    dtype = settings.dtype or case.dtype
    if settings.scale_rule is not None and dtype == "bf16":
        raise ValueError(f"scale_rule must be left out for bf16, got {settings.scale_rule!r}")
    return MoEConfig(
        hidden_size=case.x.shape[1],
        intermediate_size=case.w_gate.shape[1],
        num_experts=len(case.w_gate),
        top_k=case.top_k,
        ep_size=ranks,
        shared_intermediate_size=0 if case.shared is None else len(case.shared.gate),
        swiglu_limit=case.swiglu_limit,
        row_order=settings.order or case.order,
        dtype=dtype,
        scale_rule=settings.scale_rule or case.scale_rule,
        placement=_placement(case, settings, ranks),
        macrobatch=settings.macrobatch,
        minibatch=settings.minibatch,
        arithmetic=settings.arithmetic,
    )


def _placement(case: Case, settings: Settings, ranks: int) -> tuple[int, ...] | None:
    """Owner of each expert; None where E / R in order serves. Bits never depend on it."""
    num_experts, wanted = len(case.w_gate), settings.placement
    if wanted == "even":
        return None if num_experts % ranks == 0 else even_placement(num_experts, ranks)
    if isinstance(wanted, tuple):
        return wanted
    if case.placement is not None:
        highest = int(case.placement.max(initial=0))
        if highest >= ranks:
            raise ValueError(
                f"placement of the case must name ranks below {ranks}, got rank {highest}; "
                "--placement even puts others in its place"
            )
        return tuple(int(owner) for owner in case.placement)
    if num_experts % ranks:
        raise ValueError(
            f"ranks must divide the number of experts, got {num_experts} experts on {ranks} ranks; "
            "--placement even shares them out as evenly as they go"
        )
    return None


def even_placement(num_experts: int, ranks: int) -> tuple[int, ...]:
    """owner[e] = floor(e R / E): in order, numbers of experts that differ by one at most."""
    return tuple(expert * ranks // num_experts for expert in range(num_experts))


# --------------------------------------------------------------------------- one rank


def run_rank(plan: Plan, heap: Any, after_stage: Callable[[str], None] | None = None) -> RankResult:
    """This rank's part of the case: route, forward, and backward if asked for; collective."""
    case, config = plan.case, plan.config
    to_device, to_host = _transfer(heap)
    tokens, experts = plan.tokens_of(heap.rank), config.experts_of(heap.rank)
    weights = ExpertWeights(*(to_device(w[experts]) for w in (case.w_gate, case.w_up, case.w_down)))
    shared = None if case.shared is None else ExpertWeights(*map(to_device, case.shared))
    x, router = to_device(case.x[tokens]), _router(plan, heap, tokens)
    clock = StageClock(after_stage)
    with clock.running():
        with stage_time("routing"):
            ids, topk_weights = (
                _routes(case, tokens, to_device) if router is None else router.forward()
            )
        with stage_time("forward"):
            arguments = (x, ids, topk_weights, weights, shared, _workspace(plan, heap))
            y, context = moe_forward(config, heap, *arguments, save=plan.settings.save)
            _synchronize(heap, config)
        tensors: dict[str, Any] = {"y": y, "topk_ids": ids}
        if router is not None:
            tensors["topk_weights"] = topk_weights
        if plan.settings.backward:
            assert case.dy is not None
            dy = to_device(case.dy[tokens])
            tensors.update(_backward(config, heap, context, dy, router))
    host = {name: to_host(value) for name, value in tensors.items() if value is not None}
    return RankResult(host, clock.seconds, getattr(context, "path", "reference"))


def _transfer(heap: Any) -> tuple[Callable[[Any], Any], Callable[[Any], np.ndarray]]:
    """Functions that bring an array to the heap's device and back."""
    if heap.device == "cpu":
        return np.ascontiguousarray, np.asarray
    import cupy

    return cupy.asarray, cupy.asnumpy


def _workspace(plan: Plan, heap: Any) -> Any:
    """Buffers for kernels that were asked for; None lets the layer make its own."""
    if heap.device == "cpu" or plan.settings.path == "auto":
        return None
    from mok_ref.gpu.workspace import DeviceWorkspace

    return DeviceWorkspace(plan.config, heap, int(plan.splits.max()), path=plan.settings.path)


def _synchronize(heap: Any, config: MoEConfig) -> None:
    """On a GPU: wait for the step and raise what the device reported."""
    if heap.device == "cuda":
        heap.check(config.top_k)


def _router(plan: Plan, heap: Any, tokens: slice) -> Any:
    """The case's router on this rank; None where ids are given."""
    if plan.case.routing is None:
        return None
    if heap.device == "cpu":
        return ReferenceRouter(plan.case, heap, tokens, plan.config.arithmetic)
    return DeviceCaseRouter(plan.case, heap, tokens, int(plan.splits.max()))


def _routes(case: Case, tokens: slice, to_device: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The given ids and weights of this rank's tokens."""
    assert case.topk_ids is not None and case.topk_weights is not None
    return to_device(case.topk_ids[tokens]), to_device(case.topk_weights[tokens])


def _backward(config: MoEConfig, heap: Any, context: Any, dy: Any, router: Any) -> dict[str, Any]:
    """All gradients of this rank by output name."""
    has_dx = router is not None and router.has_weights
    with stage_time("backward"):
        grads = moe_backward(context, dy, None, router.share if has_dx else None)
        _synchronize(heap, config)
    names = ("dx", "d_topk_weights", *OUTPUT_EXPERTS, *OUTPUT_REPLICATED[:3])
    found = {name: getattr(grads, name) for name in names}
    if router is not None:
        with stage_time("router gradient"):
            if not has_dx:
                router.share(grads.d_topk_weights)
            found.update(router.gradients())
            _synchronize(heap, config)
    return found


def routes_of(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """(N, K) expert ids and weights of the whole batch, given or chosen by the case's router."""
    if plan.case.routing is None:
        return _routes(plan.case, slice(None), np.ascontiguousarray)
    return ReferenceRouter(plan.case, None, slice(None), plan.config.arithmetic).forward()


def traffic_of(plan: Plan, topk_ids: np.ndarray) -> np.ndarray:
    """(R, R) rows that rank i pulls from rank j, for the routes of the whole batch."""
    source = np.repeat(np.arange(len(plan.splits)), plan.splits)
    token, slot = np.nonzero(topk_ids >= 0)
    owner = plan.config.owner_of_expert[topk_ids[token, slot]]
    matrix = np.zeros((plan.config.ep_size, plan.config.ep_size), np.int64)
    np.add.at(matrix, (owner, source[token]), 1)
    return matrix


# --------------------------------------------------------------------------- all ranks


def run_virtual(plan: Plan, after_stage: Callable[[str], None] | None = None) -> RunResult:
    """The case on virtual ranks of this process, on the CPU or on one GPU."""

    def rank(heap: Any) -> RankResult:
        return run_rank(plan, heap, after_stage)

    size, timeout_s = plan.config.ep_size, plan.settings.timeout_s
    if plan.settings.device == "cpu":
        return assemble(plan, run_ranks(size, rank, timeout_s))
    from mok_ref.heap.virtual_cuda import VirtualCudaWorld

    return assemble(plan, run_on_world(VirtualCudaWorld(size, timeout_s), rank))


def run_mpi(
    plan: Plan, comm: Any, after_stage: Callable[[str], None] | None = None
) -> RunResult | None:
    """The case with one MPI process per rank; the result on rank 0, None elsewhere."""
    heap: Any
    if plan.settings.device == "cpu":
        from mok_ref.heap.mpi import MpiSharedHeap

        heap = MpiSharedHeap(comm, plan.settings.timeout_s)
    else:
        from mok_ref.heap.cuda_ipc import CudaIpcHeap

        heap = CudaIpcHeap(comm, timeout_s=plan.settings.timeout_s)
    mine = run_rank(plan, heap, after_stage)
    heap.close()
    everyone = comm.gather(mine)
    return None if everyone is None else assemble(plan, everyone)


def assemble(plan: Plan, results: list[RankResult]) -> RunResult:
    """Global tensors from the ranks' shares: tokens in order, experts by id, replicated ones once.

    A stage lasts as long as on its slowest rank.
    """
    config, tensors = plan.config, {}
    shares = [result.tensors for result in results]
    for name in OUTPUT_TOKENS:
        if name in shares[0]:
            tensors[name] = np.concatenate([share[name] for share in shares])
    for name in OUTPUT_EXPERTS:
        if name in shares[0]:
            sample = shares[0][name]
            tensors[name] = np.zeros((config.num_experts, *sample.shape[1:]), sample.dtype)
            for rank, share in enumerate(shares):
                tensors[name][config.experts_of(rank)] = share[name]
    for name in OUTPUT_REPLICATED:
        if name in shares[0]:
            tensors[name] = shares[0][name]
    tensors = {name: canonical_nan(tensor) for name, tensor in tensors.items()}
    topk_ids = tensors["topk_ids"] if plan.case.routing else tensors.pop("topk_ids")
    names = [name for result in results for name in result.stages]
    slowest = {name: max(r.stages.get(name, 0.0) for r in results) for name in dict.fromkeys(names)}
    return RunResult(plan, tensors, topk_ids, slowest, results[0].path)


# --------------------------------------------------------------------------- random cases


def memory_bytes() -> int:
    """Memory of this machine; where it does not tell, the most that an array can have.

    Systems promise more than they have and end the process when it is used.
    """
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


MAX_SIZE = 2**31 - 1  # ids and counts are int32


@dataclass(frozen=True)
class RandomCase:
    """Sizes of a random problem; the same numbers give the same case everywhere."""

    num_tokens: int = 512
    hidden_size: int = 256
    intermediate_size: int = 128
    num_experts: int = 8
    top_k: int = 2
    shared_size: int = 0
    swiglu_limit: float | None = None
    router: bool = False
    seed: int = 0

    def make(self) -> Case:
        """x ~ N(0, 1), weights ~ N(0, 1/fan-in), routes without repetition where E >= K."""
        sizes = ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "top_k")
        for name in (*sizes, "shared_size", "seed"):
            value, low = getattr(self, name), int(name in sizes[1:])
            if value < low:
                raise ValueError(f"{name} must be >= {low}, got {value}")
            if value > MAX_SIZE and name != "seed":
                raise ValueError(f"{name} must be at most {MAX_SIZE}, got {value}")
        given = ", ".join(f"{name}={getattr(self, name)}" for name in (*sizes, "shared_size"))
        experts, hidden = self.num_experts, self.hidden_size
        rows = max(self.num_tokens, experts * self.intermediate_size, self.shared_size)
        largest = max(rows * hidden, self.num_tokens * max(experts, self.top_k))
        try:
            if 8 * largest > memory_bytes():  # drawn in float64
                raise MemoryError
            return self._draw()
        except MemoryError as error:
            raise ValueError(f"sizes must fit into memory, got {given}") from error

    def _draw(self) -> Case:
        rng = np.random.default_rng([self.seed, 0])
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.num_experts

        def bits(shape: tuple[int, ...], fan_in: int) -> np.ndarray:
            return random_bf16(rng, shape, fan_in**-0.5).view(np.uint16)

        inward, outward = (experts, inner, hidden), (experts, hidden, inner)
        case = Case(
            x=bits((self.num_tokens, hidden), 1),
            dy=bits((self.num_tokens, hidden), 1),
            w_gate=bits(inward, hidden),
            w_up=bits(inward, hidden),
            w_down=bits(outward, inner),
            swiglu_limit=self.swiglu_limit,
        )
        if self.shared_size:
            wide = (self.shared_size, hidden)
            gate_up = (bits(wide, hidden), bits(wide, hidden))
            shared = ExpertWeights(*gate_up, bits(wide[::-1], self.shared_size))
            case = replace(case, shared=shared)
        if self.router:
            options = RoutingOptions(self.top_k, renormalize=True)
            options.check_num_experts(experts)
            return replace(case, w_router=bits((experts, hidden), hidden), routing=options)
        ids, weights = random_routes(rng, self.num_tokens, experts, self.top_k)
        return replace(case, topk_ids=ids, topk_weights=weights)
