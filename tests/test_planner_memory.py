"""Memory: a model counted by hand, and what each way of sharing saves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mok_ref.planner.choice import Choice
from mok_ref.planner.hardware import load_hardware
from mok_ref.planner.memory import memory_report, parameter_bytes, workspace_bytes
from mok_ref.planner.models import Attention, ModelDescription, load_model

MODEL = ModelDescription(
    "hand", 64, 32, 8, 2, num_layers=3, vocab_size=100, attention=Attention(2, 2, 16)
)
EXPERT = 3 * 64 * 32
# attention 64*16*2*(2+2) per layer, router 64*8 per layer, two tables of 100*64
OTHER = 3 * 64 * 16 * 2 * 4 + 3 * 64 * 8 + 2 * 100 * 64


def test_parameters_by_hand():
    assert MODEL.replicated_parameters == OTHER
    parts = parameter_bytes(MODEL, Choice(4, sharding="none"), experts=2)
    owned = 3 * 2 * EXPERT
    assert parts == {
        "weights of experts": 2.0 * owned,
        "weights of the rest": 2.0 * OTHER,
        "gradients of experts": 4.0 * owned,
        "gradients of the rest": 4.0 * OTHER,
        "optimizer of experts": 12.0 * owned,
        "optimizer of the rest": 12.0 * OTHER,
    }


def test_sharding_divides_states_and_never_weights():
    choice = Choice(4, dp_size=3, sharding="none")
    plain = parameter_bytes(MODEL, choice, 2)
    shared = parameter_bytes(MODEL, replace(choice, sharding="optimizer"), 2)
    more = parameter_bytes(MODEL, replace(choice, sharding="gradients"), 2)
    assert shared["optimizer of experts"] == plain["optimizer of experts"] / 3
    assert shared["optimizer of the rest"] == plain["optimizer of the rest"] / 12
    assert shared["gradients of experts"] == plain["gradients of experts"]
    assert more["gradients of experts"] == plain["gradients of experts"] / 3
    assert more["weights of experts"] == plain["weights of experts"]


def test_workspace_by_hand():
    choice = Choice(2, minibatch=128, macrobatch=256)
    parts = workspace_bytes(MODEL, choice, tokens=10, max_rows=512)
    # ring: x and h in forward; dy, d_gate, d_up and w*h in backward
    assert parts["ring"] == 256 * (64 * 2 + 32 * 2) + 256 * (64 * 2 + 3 * 32 * 2)
    # x, dy; y rows of 2 slots; ids, weights and their gradients
    assert parts["peer buffers"] == 2 * 10 * 64 * 2 + 20 * 64 * 2 + 20 * 12
    assert parts["schedule tables"] == 512 * 8 + 4 * 12 + 2 * 20 * 4


def test_mxfp8_rings_are_smaller():
    bf16 = workspace_bytes(MODEL, Choice(2), 10, 512)["ring"]
    assert workspace_bytes(MODEL, Choice(2, dtype="mxfp8"), 10, 512)["ring"] < bf16


@pytest.mark.parametrize(
    ("save", "recompute", "saved_rows"),
    [("all", False, 3 * 512), ("ring", False, 3 * 256), ("none", False, 0), ("all", True, 512)],
)
def test_saved_gate_and_up(save, recompute, saved_rows):
    choice = Choice(2, minibatch=128, macrobatch=256, save=save)
    owner = np.array([0] * 4 + [1] * 4)
    report = memory_report(
        MODEL, load_hardware("h200"), choice, owner, np.array([512, 256]), 10, recompute
    )
    assert report.parts["saved gate and up"] == saved_rows * 32 * 4
    assert report.total == sum(report.parts.values())


def test_the_uneven_rank_counts():
    choice = Choice(2, minibatch=128, macrobatch=256)
    hardware = load_hardware("h200")
    even = memory_report(MODEL, hardware, choice, np.repeat([0, 1], 4), np.array([1, 1]), 10)
    uneven = memory_report(MODEL, hardware, choice, np.repeat([0, 1], [6, 2]), np.array([1, 1]), 10)
    assert uneven.parts["weights of experts"] == 1.5 * even.parts["weights of experts"]


def test_deepseek_v3_fits_a_rack_and_not_eight_h200():
    model, owner = load_model("deepseek-v3"), np.arange(256) * 8 // 256
    small = memory_report(model, load_hardware("h200"), Choice(8), owner, np.ones(8), 1024)
    assert not small.fits and "experts" in small.largest
    owner = np.arange(256) * 64 // 256
    choice = Choice(64, sharding="gradients")
    assert memory_report(model, load_hardware("gb300-nvl72"), choice, owner, np.ones(64), 1024).fits
