"""Discrete-event simulation of all ranks of an EP group at the grain of minibatches.

State per rank: one compute step at a time, one pull at a time, one push at a time. Transfers are
fluid: between two events they run at max-min fair rates over every GPU's outgoing and incoming
link (and network port, where ranks lie in several domains). Events: a step ends, a transfer ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .hardware import Hardware
from .links import fair_rates
from .programme import Programme

TOGETHER = 0.01  # events closer than this share of a typical step happen at once


@dataclass(frozen=True)
class Span:
    """One bar of a timeline: what ran where, in seconds from the start of the layer."""

    rank: int
    lane: str
    name: str
    start: float
    end: float


@dataclass
class Simulation:
    """seconds until the last rank has finished, and where each rank's time went."""

    seconds: float
    finish: np.ndarray
    compute: np.ndarray
    wait_pull: np.ndarray
    wait_push: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    transfer: np.ndarray
    spans: list[Span] = field(default_factory=list)

    @property
    def hidden_share(self) -> float:
        """Share of transfer time during which the slowest rank computed."""
        slowest = int(np.argmax(self.finish))
        moved = self.transfer[slowest]
        if moved <= 0:
            return 1.0
        exposed = self.finish[slowest] - self.compute[slowest]
        return float(np.clip(1.0 - exposed / moved, 0.0, 1.0))


class Network:
    """Wires of the group: link out, link in, network out, network in of every rank.

    taken (4 R,) is capacity that traffic outside this simulation uses up.
    """

    def __init__(
        self,
        hardware: Hardware,
        domain: np.ndarray,
        pull_ceiling: float,
        taken: np.ndarray,
        unlimited: int | None = None,
    ) -> None:
        num = len(domain)
        one = np.ones(num)
        rates = [hardware.link_rate, hardware.link_rate]
        rates += [hardware.network_rate, hardware.network_rate]
        capacity = np.concatenate([one * rate for rate in rates])
        # traffic from outside never takes a wire wholly
        self.capacity = np.maximum(capacity - taken, 0.05 * capacity) + 1.0
        if unlimited is not None:
            self.capacity[unlimited::num] = 1e18
        self.hardware, self.domain, self.num = hardware, domain, num
        self.pull_ceiling = pull_ceiling
        self.usage = np.zeros((4 * num, 2 * num))
        self.ceiling = np.zeros(2 * num)
        self.left = np.zeros(2 * num)
        self.known_rates: np.ndarray | None = None
        self.has_network = bool((domain != domain[0]).any())

    def start(self, rank: int, is_push: bool, peers: np.ndarray, seconds: float) -> None:
        """Begin a transfer of `peers` (R,) bytes, never faster than in `seconds`."""
        num, column = self.num, rank + (self.num if is_push else 0)
        remote = peers.copy()
        local = float(remote[rank])
        remote[rank] = 0.0
        total = float(remote.sum())
        near = np.where(self.domain == self.domain[rank], remote, 0.0)
        far = remote - near
        mine, theirs = (0, num) if is_push else (num, 0)
        use = np.zeros(4 * num)
        use[mine + rank] = near.sum()
        use[theirs : theirs + num] += near
        use[2 * num + mine + rank] = far.sum()
        use[2 * num + theirs : 2 * num + theirs + num] += far
        size = max(total, 1.0)
        least = max(seconds, local / self.hardware.gather_bytes_per_s, 1e-9)
        if not is_push:
            least = max(least, total / self.pull_ceiling)
        self.known_rates = None
        self.usage[:, column] = use / size
        self.ceiling[column] = size / least
        self.left[column] = size

    def rates(self) -> np.ndarray:
        """Rates of all transfers; they change only when one starts or stops."""
        if self.known_rates is None:
            wires = slice(None if self.has_network else 2 * self.num)
            self.known_rates = fair_rates(self.usage[wires], self.capacity[wires], self.ceiling)
        return self.known_rates

    def stop(self, column: int) -> None:
        self.known_rates = None
        self.ceiling[column] = 0.0
        self.usage[:, column] = 0.0
        self.left[column] = 0.0


class RankState:
    """Where one rank stands in its programme."""

    def __init__(self, programme: Programme) -> None:
        self.programme = programme
        self.num_pulls = len(programme.pull_bytes)
        self.finished = 0  # steps
        self.pulled = 0
        self.is_running = self.is_pulling = self.is_pushing = False
        self.idle_since = self.pull_since = self.push_since = 0.0
        self.ends = np.inf

    @property
    def is_done(self) -> bool:
        steps_done = self.finished == len(self.programme.kinds)
        return steps_done and not self.is_pushing and self.pulled == self.num_pulls


def simulate(
    programmes: Sequence[Programme],
    hardware: Hardware,
    domain: np.ndarray | None = None,
    communication_sms: int = 0,
    taken: np.ndarray | None = None,
    with_spans: bool = False,
    unlimited: int | None = None,
) -> Simulation:
    """Run all programmes to the end.

    domain (R,) tells which ranks share a fast domain; taken (4 R,) is capacity used by others;
    `unlimited` is a rank that stands for many and whose wires never fill.
    Raises: RuntimeError if a programme can never go on (a wrong programme: a ring slot that
    nothing frees).
    """
    num = len(programmes)
    domain = np.zeros(num, int) if domain is None else domain
    movers = communication_sms or hardware.num_sms
    taken = np.zeros(4 * num) if taken is None else taken
    ceiling = movers * hardware.sm_link_bytes_per_s
    network = Network(hardware, domain, ceiling, taken, unlimited)
    run = Run(programmes, network, with_spans)
    return run.to_the_end()


def empty_result(num: int) -> Simulation:
    """A result with every account at zero."""
    seven = [np.zeros(num) for _ in range(7)]
    finish, compute, wait_pull, wait_push, sent, received, transfer = seven
    return Simulation(0.0, finish, compute, wait_pull, wait_push, sent, received, transfer)


class Run:
    """The event loop of one simulation."""

    def __init__(self, programmes: Sequence[Programme], network: Network, with_spans: bool) -> None:
        self.network, self.with_spans = network, with_spans
        self.num = len(programmes)
        self.states = [RankState(programme) for programme in programmes]
        self.ends = np.full(self.num, np.inf)
        self.now = 0.0
        self.result = empty_result(self.num)
        steps = [s for p in programmes for s in p.seconds if s > 0]
        self.tolerance = TOGETHER * float(np.median(steps)) if steps else 0.0

    def to_the_end(self) -> Simulation:
        self.advance(range(self.num))
        while not all(state.is_done for state in self.states):
            rates = self.network.rates()
            with np.errstate(divide="ignore", invalid="ignore"):
                remaining = np.where(rates > 0, self.network.left / rates, np.inf)
            after = min(float(remaining.min()), float(self.ends.min()) - self.now)
            if not np.isfinite(after):
                raise RuntimeError(f"no rank can go on at {self.now:.6f} s: wrong programme")
            self.now += after
            self.network.left -= rates * after
            due = np.flatnonzero(remaining <= after + self.tolerance)
            changed = {self.finish_transfer(int(column)) for column in due}
            for rank in np.flatnonzero(self.ends <= self.now + self.tolerance):
                self.finish_step(int(rank))
                changed.add(int(rank))
            self.advance(sorted(changed))
        self.result.seconds = float(self.result.finish.max())
        return self.result

    def advance(self, ranks: Sequence[int] | range) -> None:
        """Start whatever can start on these ranks."""
        for rank in ranks:
            state = self.states[rank]
            self.start_pull(rank, state)
            self.start_step(rank, state)

    def start_pull(self, rank: int, state: RankState) -> None:
        program, q = state.programme, state.pulled
        if state.is_pulling or q == state.num_pulls or program.gate[q] >= state.finished:
            return
        peers = program.pull_bytes[q]
        state.is_pulling, state.pull_since = True, self.now
        self.network.start(rank, False, peers, 0.0)
        self.count_bytes(rank, peers, is_push=False)

    def start_step(self, rank: int, state: RankState) -> None:
        program, step = state.programme, state.finished
        if state.is_running or step == len(program.kinds):
            return
        waits_for_pull = program.needs[step] >= state.pulled
        waits_for_push = program.pushes[step] >= 0 and state.is_pushing
        if waits_for_pull or waits_for_push:
            return
        idle = self.now - state.idle_since
        waits = self.result.wait_pull if program.needs[step] >= 0 else self.result.wait_push
        waits[rank] += idle
        seconds = program.seconds[step]
        state.is_running, state.idle_since = True, self.now
        self.ends[rank] = self.now + seconds
        self.result.compute[rank] += seconds
        push = program.pushes[step]
        if push >= 0 and program.push_bytes[push].sum() > 0:
            state.is_pushing, state.push_since = True, self.now
            self.network.start(rank, True, program.push_bytes[push], seconds)
            self.count_bytes(rank, program.push_bytes[push], is_push=True)

    def count_bytes(self, rank: int, peers: np.ndarray, is_push: bool) -> None:
        remote = peers.copy()
        remote[rank] = 0.0
        mine, theirs = self.result.received, self.result.sent
        if is_push:
            mine, theirs = theirs, mine
        mine[rank] += remote.sum()
        theirs += remote
        self.result.transfer[rank] += remote.sum() / self.network.hardware.link_rate

    def finish_step(self, rank: int) -> None:
        state = self.states[rank]
        step = state.finished
        self.add_span(rank, "compute", state.programme.kinds[step], step, state.idle_since)
        state.finished += 1
        state.is_running, state.idle_since = False, self.now
        self.ends[rank] = np.inf
        self.result.finish[rank] = self.now

    def finish_transfer(self, column: int) -> int:
        rank, is_push = column % self.num, column >= self.num
        state = self.states[rank]
        self.network.stop(column)
        if is_push:
            state.is_pushing = False
            self.add_span(rank, "push", "push", -1, state.push_since)
        else:
            self.add_span(rank, "pull", "pull", -1, state.pull_since)
            state.is_pulling = False
            state.pulled += 1
        self.result.finish[rank] = self.now
        return rank

    def add_span(self, rank: int, lane: str, name: str, step: int, start: float) -> None:
        if not self.with_spans:
            return
        if step >= 0:
            name = f"{name} {max(self.states[rank].programme.index[step], 0)}"
        self.result.spans.append(Span(rank, lane, name, start, self.now))
