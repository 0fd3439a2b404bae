"""Simulators against arithmetic that can be done by hand, and against each other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mok_ref.planner.choice import Choice
from mok_ref.planner.closed_form import Setting, estimate
from mok_ref.planner.hardware import load_hardware
from mok_ref.planner.minibatch_simulation import simulate
from mok_ref.planner.placement import in_order, place_experts
from mok_ref.planner.prediction import MOST_RANKS, predict, programmes_of
from mok_ref.planner.programme import Programme
from mok_ref.planner.stages import KernelConstants, LayerShape, StageCosts, fitted_constants
from mok_ref.planner.task_simulation import simulate_tasks
from mok_ref.planner.workload import make_workload

H200 = load_hardware("h200")


def setting_of(ranks=4, tokens=2048, shape=None, skew=0.0, hardware=H200, **choice):
    shape = shape or LayerShape(2048, 768, 32, 4)
    work = make_workload(ranks, tokens, shape.num_experts, shape.top_k, skew, seed=1)
    owner = place_experts(work.expert_load, ranks).owner
    options = {"minibatch": 2048, "macrobatch": 8192, **choice}
    return Setting(hardware, shape, Choice(ranks, **options), fitted_constants(), work, owner)


# ------------------------------------------------------------------ minibatches, by hand


def chain(steps, num=1, bytes_in=0.0):
    """One rank's programme of plain steps, each waiting for its own pull from rank `num - 1`."""
    programme = Programme()
    programme.pull_bytes = np.zeros((len(steps), num))
    programme.pull_bytes[:, -1] = bytes_in
    programme.push_bytes = np.zeros((len(steps), num))
    programme.gate = [-1] * len(steps)
    for q, seconds in enumerate(steps):
        programme.add("gate_up", q, seconds, needs=q)
    return programme


def idle(num):
    programme = Programme()
    programme.pull_bytes = programme.push_bytes = np.zeros((0, num))
    return programme


def test_compute_alone_adds_up():
    assert simulate([chain([0.5, 0.25, 0.125])], H200).seconds == pytest.approx(0.875, rel=0.02)


def test_a_link_alone_takes_bytes_over_rate():
    size = 1e9
    run = simulate([chain([1e-9] * 4, 2, size), idle(2)], H200)
    assert run.seconds == pytest.approx(4 * size / H200.link_rate, rel=0.02)
    assert run.received.tolist() == [4 * size, 0.0]
    assert run.sent.tolist() == [0.0, 4 * size]


def test_compute_hides_all_pulls_but_the_first():
    size = 0.1 * H200.link_rate  # 0.1 s
    run = simulate([chain([0.2] * 5, 2, size), idle(2)], H200)
    assert run.seconds == pytest.approx(0.1 + 5 * 0.2, rel=0.02)
    assert run.wait_pull[0] == pytest.approx(0.1, rel=0.05)


def test_two_readers_of_one_rank_halve_its_link():
    size = 1e9
    programmes = [chain([1e-9], 3, size), chain([1e-9], 3, size), idle(3)]
    assert simulate(programmes, H200).seconds == pytest.approx(2 * size / H200.link_rate, rel=0.04)


def test_a_slower_network_joins_domains():
    size = 1e8
    programmes = [chain([1e-9], 2, size), idle(2)]
    run = simulate(programmes, H200, np.array([0, 1]))
    assert run.seconds == pytest.approx(size / H200.network_rate, rel=0.02)


def test_a_ring_slot_is_not_filled_before_it_is_free():
    programme = chain([0.1, 0.1, 0.1], 2, 0.1 * H200.link_rate)
    programme.gate = [-1, 0, 1]  # pull q waits for step q-1: nothing overlaps
    run = simulate([programme, idle(2)], H200)
    assert run.seconds == pytest.approx(0.6, rel=0.02)


def test_few_communication_sms_cap_a_pull():
    size = 1e9
    programmes = [chain([1e-9], 2, size), idle(2)]
    run = simulate(programmes, H200, communication_sms=2)
    assert run.seconds == pytest.approx(size / (2 * H200.sm_link_bytes_per_s), rel=0.02)


def test_a_programme_that_cannot_go_on_is_an_error():
    programme = chain([0.1, 0.1])
    programme.gate = [-1, 1]  # the second pull waits for its own step
    with pytest.raises(RuntimeError, match="no rank can go on"):
        simulate([programme], H200)


# ------------------------------------------------------------------ a layer


def test_bytes_are_those_of_the_traffic_matrix():
    setting = setting_of()
    traffic = setting.work.traffic(setting.owner)
    np.fill_diagonal(traffic, 0)
    run = predict(setting).simulation
    pulled = traffic.sum(axis=0) * setting.shape.pull_row_bytes
    pushed = traffic.sum(axis=0) * setting.shape.push_row_bytes
    served = traffic.sum(axis=1)
    assert run.received == pytest.approx(pulled + served * setting.shape.push_row_bytes)
    assert run.sent == pytest.approx(pushed + served * setting.shape.pull_row_bytes)


def test_mxfp8_pulls_33_of_64_bytes():
    plain = setting_of().shape
    assert replace(plain, dtype="mxfp8").pull_row_bytes / plain.pull_row_bytes == 33 / 64


def test_no_layer_is_faster_than_its_compute_or_its_links():
    for ranks in (1, 2, 8):
        setting = setting_of(ranks)
        for is_backward in (False, True):
            p = predict(setting, is_backward)
            busiest = max(p.simulation.sent.max(), p.simulation.received.max())
            assert p.seconds >= p.simulation.compute.max()
            assert p.seconds >= busiest / H200.link_rate * 0.97
            assert 0 <= p.hidden_share <= 1 and p.mfu < 1


def test_a_slower_link_never_helps():
    times = [
        predict(setting_of(8, hardware=H200.scaled(1.0, share))).seconds
        for share in (1.0, 0.5, 0.25, 0.125)
    ]
    assert times == sorted(times) and times[-1] > 1.5 * times[0]


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("minibatch", [1024, 2048, 4096])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_minibatches_agree_with_tasks(is_backward, ranks, minibatch, slots):
    """Task by task is the truth that the minibatch level approximates: what was found is 18 % (26 %
    in backward, where a ring of one slot hides nothing), and less with more slots."""
    setting = setting_of(ranks, 4096, minibatch=minibatch, macrobatch=minibatch * slots)
    slowest = int(np.argmax(setting.work.rows_of_ranks(setting.owner)))
    tasks = simulate_tasks(setting, slowest, is_backward)
    tolerance = 0.27 if is_backward else 0.20 if slots == 1 else 0.15
    assert predict(setting, is_backward).seconds == pytest.approx(tasks.seconds, rel=tolerance)


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_the_closed_form_is_near_the_simulation(ranks, is_backward):
    """Where it is used: a ring of four minibatches and more rows than a ring holds."""
    setting = setting_of(ranks, 8192, skew=0.5)
    simulated = predict(setting, is_backward).seconds
    assert estimate(setting, is_backward).seconds == pytest.approx(simulated, rel=0.2)


@pytest.mark.parametrize(("tokens", "tolerance"), [(512, 0.30), (2048, 0.15), (8192, 0.08)])
def test_a_hierarchical_group_agrees_with_a_full_one(tokens, tolerance, monkeypatch):
    """Two domains of 16: one domain with a mean field outside, against all 32 ranks. The mean field
    spreads traffic evenly over the layer, which is the better the more minibatches there are."""
    hardware = replace(H200, gpus_per_domain=16, num_domains=2)
    setting = setting_of(32, tokens, hardware=hardware, shape=LayerShape(2048, 768, 64, 4))
    full = predict(setting).seconds
    monkeypatch.setattr("mok_ref.planner.prediction.MOST_RANKS", 16)
    assert MOST_RANKS >= 72
    assert predict(setting).seconds == pytest.approx(full, rel=tolerance)


def test_saving_nothing_costs_a_recomputation_in_backward_only():
    saved, none = (setting_of(1, 16384, save=save) for save in ("all", "none"))
    extra = predict(none, True).seconds - predict(saved, True).seconds
    # gate and up are 4 of backward's 12 parts; where SMs wait anyway, some of it is free
    assert 0.15 < extra / predict(saved, True).seconds < 0.45
    assert predict(none).seconds <= predict(saved).seconds * 1.001


# ------------------------------------------------------------------ tasks


def test_tasks_never_overlap_on_an_sm_and_wait_for_what_they_need():
    setting = setting_of(2, 1024, minibatch=512, macrobatch=1024)
    run = simulate_tasks(setting, 0, with_spans=True)
    by_sm = defaultdict(list)
    for span in run.spans:
        by_sm[span.rank].append((span.start, span.end))
    for spans in by_sm.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))
    first_pull = min(s.end for s in run.spans if s.name.startswith("pull"))
    assert min(s.start for s in run.spans if s.name == "gate_up") >= first_pull
    first_hidden = min(s.end for s in run.spans if s.name == "gate_up")
    assert min(s.start for s in run.spans if s.name == "down") >= first_hidden


def test_every_tile_is_run_once():
    setting = setting_of(2, 1024)
    rows = setting.work.expert_load[setting.owner == 0]
    blocks = int((-(-rows // 128)).sum())
    assert simulate_tasks(setting, 0).num_tiles == blocks * (768 // 128 + 2048 // 256)


def test_sm_time_is_accounted_for():
    setting = setting_of(2, 1024)
    run = simulate_tasks(setting, 1)
    middle = run.seconds - run.head - run.tail
    assert sum(run.spent.values()) == pytest.approx(middle * setting.costs.compute_sms)


def test_the_shared_expert_hides_the_first_pull():
    shape = LayerShape(2048, 768, 32, 4, shared_intermediate_size=768)
    slow = H200.scaled(1.0, 0.2)
    bare = simulate_tasks(setting_of(4, hardware=slow), 0).spent["waiting for rows"]
    hidden = simulate_tasks(setting_of(4, shape=shape, hardware=slow), 0).spent["waiting for rows"]
    assert hidden < bare


# ------------------------------------------------------------------ stages


def test_time_is_proportional_to_rows_and_zero_for_none():
    costs = StageCosts(LayerShape(2048, 768, 8, 2), H200, KernelConstants())
    rows = np.full(8, 4096.0)
    for stage in (costs.gate_up, costs.down, costs.dgrad_hidden, costs.dgrad_input):
        assert stage(2 * rows) == pytest.approx(2 * stage(rows), rel=0.05)
        assert stage(np.zeros(8)) == 0.0
    assert costs.wgrad(np.zeros(8)) == 0.0


def test_a_tail_of_rows_costs_half_a_tile():
    costs = StageCosts(LayerShape(2048, 2048, 1, 1), H200, KernelConstants(), sustained=False)
    assert costs.down(np.array([6400.0 + 1])) > costs.down(np.array([6400.0])) * 1.005
    assert costs.down(np.array([6401.0])) == pytest.approx(costs.down(np.array([6464.0])), rel=0.02)


def test_tensor_parallel_slices_the_columns():
    whole = StageCosts(LayerShape(2048, 2048, 8, 2), H200, KernelConstants())
    half = StageCosts(LayerShape(2048, 2048, 8, 2, tp_size=2), H200, KernelConstants())
    rows = np.full(8, 1024.0)
    assert half.gate_up(rows) == pytest.approx(whole.gate_up(rows) / 2, rel=0.12)


def test_idle_ranks_have_no_work():
    setting = replace(setting_of(2), owner=np.zeros(32, np.int32))
    assert programmes_of(setting, False)[1].compute_seconds == 0.0
    assert predict(setting).seconds > predict(setting_of(2)).seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minibatch": 100}, "minibatch must be a multiple of 128"),
        ({"macrobatch": 3000}, "macrobatch must be a multiple of minibatch"),
        ({"ep_size": 0}, "ep_size must be an integer >= 1"),
        ({"save": "some"}, "save must be one of"),
        ({"sharding": "x"}, "sharding must be one of"),
    ],
)
def test_a_wrong_choice_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Choice(**{"ep_size": 2, **change})


def test_in_order_placement_of_a_divisible_model_is_the_layers_default():
    assert in_order(np.ones(8), 4).owner.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
