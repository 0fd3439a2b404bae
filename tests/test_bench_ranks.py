"""Virtual ranks are timed beside one rank: who has which layer, calls how often, meets whom."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from host_cupy import host_cuda_device

from mok_ref.bench import gpu, variants
from mok_ref.bench.cases import BenchCase

CASE = BenchCase("tiny", 8, 16, 16, 4, 2)
COUNT = 15  # calls of a turn


class Mark:
    """An event that has passed when it is recorded."""

    def __init__(self, **_: Any) -> None:
        self.ms = 0.0

    def record(self) -> None:
        self.ms = 1e3 * time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Mark) -> float:
        return later.ms - self.ms


@dataclass
class Layer:
    """Counts its calls; each of them meets the other ranks, as the layer's do."""

    case: BenchCase
    grad_dtype: str
    heap: Any = None

    def __post_init__(self) -> None:
        self.heap = self.heap or SimpleNamespace(rank=0, size=1, barrier=lambda: None)
        self.calls: list[str] = []
        LAYERS.append(self)

    def forward(self, save: str) -> None:
        self.calls.append(save)
        self.heap.barrier()

    def backward(self) -> None:
        self.calls.append("backward")
        self.heap.barrier()

    def close(self) -> None:
        self.heap.barrier()


LAYERS: list[Layer] = []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_and_one_rank_take_turns(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        Event=Mark,
        synchronize=lambda: None,
        stream=lambda stream: nullcontext(),
        ExternalStream=lambda address: None,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu, "OurLayer", Layer)
    monkeypatch.setattr(variants, "rank_inputs", lambda inputs, rank, size: inputs.case)
    monkeypatch.setattr(variants, "TURN_RATE", COUNT * CASE.flops("backward") / 0.5)
    LAYERS.clear()
    with host_cuda_device():
        inputs: Any = SimpleNamespace(case=CASE)
        found = variants.time_ranks(inputs, size, rounds=2)
    sizes = {1, size}
    assert set(found) == {(s, d) for s in sizes for d in ("forward", "backward")}
    for (_, direction), timing in found.items():
        count = COUNT if direction == "backward" else 2 * COUNT
        assert [len(turn) for turn in timing.sustained] == [count - 1 - count // 3] * 2
        assert all(ms >= 0 for turn in timing.sustained for ms in turn)
    assert len(LAYERS) == (1 if size == 1 else size + 1)
    turn = {"forward": ["none"] * 2 * COUNT, "backward": ["all", *["backward"] * COUNT]}
    for layer in LAYERS:
        assert layer.grad_dtype == "bf16"
        assert layer.calls == 3 * turn["forward"] + 3 * turn["backward"]
