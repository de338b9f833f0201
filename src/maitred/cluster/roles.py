"""Roles follow the load: which worker changes its role when load turns, and how many each role should have. Pure.

Prefill is busy by the seconds of prompts that come in a second, decode by the pace of its rows against what is promised
and by the KV that they hold (Splitwise, arXiv:2311.18677, moves machines between pools; NVIDIA Dynamo's planner sizes
both by such forecasts). A worker changes its role where the busiest role is then much less busy. No flapping: nothing
is turned back within TURN_BACK_S of a switch, and a second one the same way within that time takes more gain, so that a
steady load sees one switch in TURN_BACK_S at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from maitred.bounds import Bounds
from maitred.cluster.actions import Action, Start, Switch
from maitred.cluster.autoscale import DEFAULT_OBJECTIVE_S, FleetFigures
from maitred.cluster.disagg import HandoverConfig, Role, WorkerFacts, WorkerLoad, chunks_s, decode_step_s
from maitred.cluster.replicas import Replica, ReplicaFacts, Replicas, State
from maitred.cluster.sizing import START_S, Autoscale

EVERY_S = 1.0
BUSY = 0.6  # with less, nobody need help
GAIN, QUICK_GAIN = 0.8, 0.6  # of how busy the busiest role is, what must be left at most; the second within TURN_BACK_S
SUSTAINED_S, SETTLED_S, TURN_BACK_S = 2.0, 4.0, 30.0
FULL_PREFILL, FULL_KV = 0.8, 0.9  # of time, of blocks: as busy as a role should be
LAX_PACE = 3.0  # times that of a row alone, where no pace is promised
CLEAR_S = 5.0  # a backlog of prompts is to be cleared in that time
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Split(NamedTuple):
    """How busy the two roles are, with so many workers each; 1 is as busy as they should be."""

    num_prefill: int
    num_decode: int
    prefill: float
    decode: float

    @property
    def busiest(self) -> float:
        return max(self.prefill, self.decode)


def splits(workers: Sequence[WorkerLoad], prompts_s: float, config: HandoverConfig) -> Iterator[Split]:
    """All in which neither role is empty; `prompts_s` are the seconds of prompts that come in a second."""
    costs = workers[0]._replace(rows=0, context_tokens=0)
    queued_s = chunks_s(costs, sum(w.queued_tokens for w in workers), 0)
    rows, context = sum(w.rows for w in workers), sum(w.context_tokens for w in workers)
    held = sum(w.facts.num_blocks - w.free_blocks for w in workers)
    for num_decode in range(1, len(workers)):
        num_prefill = len(workers) - num_decode
        pace_s = decode_step_s(costs._replace(rows=math.ceil(rows / num_decode), context_tokens=context // num_decode))
        decode = max(pace_s / _promised_pace_s(costs, config), held / num_decode / costs.facts.num_blocks / FULL_KV)
        yield Split(num_prefill, num_decode, (prompts_s + queued_s / CLEAR_S) / num_prefill / FULL_PREFILL, decode)


def _promised_pace_s(worker: WorkerLoad, config: HandoverConfig) -> float:
    return config.tpot_s or LAX_PACE * decode_step_s(worker._replace(rows=1, context_tokens=0))


class RoleSwitching:
    """Asked each second. What it remembers follows from what it was told, so that a log replays."""

    def __init__(self, config: HandoverConfig) -> None:
        self._config = config
        self._wanted: tuple[Role, float] | None = None  # role that more should have, and since when
        self._last: tuple[Role, float] | None = None  # role that one was given last, and when

    def decide(self, workers: Sequence[WorkerLoad], prompts_s: float, now: float) -> tuple[str, Role] | None:
        """(worker, its new role); `workers` are those of the two roles."""
        num_prefill = sum(w.facts.role is Role.PREFILL for w in workers)
        role = self._better(workers, num_prefill, prompts_s, now)
        if role is None:
            self._wanted = None
            return None
        if self._wanted is None or self._wanted[0] is not role:
            self._wanted = (role, now)
        if now - self._wanted[1] < SUSTAINED_S:
            return None
        self._wanted, self._last = None, (role, now)
        idlest = min((w for w in workers if w.facts.role is OTHER[role]), key=lambda w: (_work_of(w), w.name))
        return idlest.name, role

    def _better(self, workers: Sequence[WorkerLoad], num_prefill: int, prompts_s: float, now: float) -> Role | None:
        """The role that one more worker should have; None while the split is well enough."""
        if not 1 <= num_prefill < len(workers):
            return None
        by_size = {split.num_prefill: split for split in splits(workers, prompts_s, self._config)}
        here, best = by_size[num_prefill], min(by_size.values(), key=lambda split: split.busiest)
        if here.busiest < BUSY or best.num_prefill == num_prefill:
            return None
        role = Role.PREFILL if best.num_prefill > num_prefill else Role.DECODE
        gain = GAIN
        if self._last is not None and now - self._last[1] < TURN_BACK_S:
            if role is not self._last[0] or now - self._last[1] < SETTLED_S:
                return None
            gain = QUICK_GAIN
        return role if best.busiest <= gain * here.busiest else None


def _work_of(worker: WorkerLoad) -> float:
    return worker.queued_tokens + worker.context_tokens


class RoleScaling(NamedTuple):
    """How many workers a role may have, and what says how many there are to be."""

    bounds: Bounds
    autoscale: Autoscale


class Roles:
    """The roles of a fleet's workers, at the core's every second."""

    def __init__(self, fleet: Replicas, config: HandoverConfig, scaling: Mapping[Role, RoleScaling]) -> None:
        """Where they are scaled, nobody switches."""
        self._fleet, self._config, self._scaling = fleet, config, scaling
        self._switching = RoleSwitching(config) if config.role_switching and not scaling else None
        self._targets = {role: given.bounds.low for role, given in scaling.items()}
        self._begun: dict[str, float] = {}  # starts under way
        self._num_started: dict[Role, int] = {}
        self._start_s = START_S
        self._served_s: dict[Role, tuple[float, float]] = {}  # as told, and as counted until then
        self.next_at: float | None = None

    def tick(self, num_held: int, drain: Callable[[Replica], list[Action]], now: float) -> list[Action]:
        """When it is due; `drain` begins with one that is too much."""
        if self.next_at is None or now < self.next_at:
            return []
        self.next_at = now + EVERY_S
        if self._switching is None:
            return [action for role in self._scaling for action in self._resize(role, num_held, drain, now)]
        loads = [self._fleet.work.load(r.name, _facts(r), now) for r in self._of_both_roles()]
        switch = self._switching.decide(loads, self._fleet.work.prompts_s(now), now)
        return [] if switch is None else [Switch(*switch)]

    def changed(self, now: float) -> None:
        """Who there is, or what they told."""
        has_use = bool(self._scaling) or (self._switching is not None and len(self._of_both_roles()) > 1)
        self.next_at = (self.next_at or now) if has_use else None

    def is_there(self, name: str, now: float) -> None:
        began_at = self._begun.pop(name, None)
        if began_at is not None:
            self._start_s = now - began_at

    # -- how many

    def _resize(self, role: Role, num_held: int, drain: Callable[[Replica], list[Action]], now: float) -> list[Action]:
        given, here = self._scaling[role], self._of(role)
        target = given.autoscale(self._figures(role, here, num_held, now), now)
        target = self._targets[role] = min(max(target, given.bounds.low, 1), given.bounds.high)
        actions: list[Action] = [self._start(role, now) for _ in range(target - len(here))]
        here.sort(key=lambda r: (r.state is State.READY, self._fleet.work.num_here(r.name), -r.bit))
        for replica in here[: max(0, len(here) - target)]:
            if replica.state is State.READY:
                actions += drain(replica)
        return actions

    def _start(self, role: Role, now: float) -> Start:
        number = self._num_started[role] = self._num_started.get(role, self._scaling[role].bounds.low) + 1
        name = f"{role.value}-{number}"
        self._fleet.put(ReplicaFacts(name=name, state=State.STARTING, is_launched=True), now)
        self._begun[name] = now
        return Start(name, "cold")

    def _figures(self, role: Role, here: Sequence[Replica], num_held: int, now: float) -> FleetFigures:
        """Prompts are computed one at a time, but as many may be there as half of the objective has time for: a slot
        each, held that many times as long. Answers share a worker as far as their pace and its blocks allow.
        """
        demand, given = self._fleet.work.demand[role], self._scaling[role]
        ready = [r for r in here if r.state is State.READY]
        if role is Role.PREFILL:
            mean_s = demand.served_s / max(1, demand.num_ended)
            slots = times = max(1.0, (self._config.ttft_s or DEFAULT_OBJECTIVE_S) / 2 // max(mean_s, 1e-3))
            in_flight = min(demand.num_here, int(len(ready) * slots))
            held = demand.num_here - in_flight
        else:
            slots, times = min((self._slots(_facts(r), r.slots) for r in ready), default=1.0), 1.0
            in_flight, held = demand.num_here, num_held
        served_s, counted_s = self._served_s.get(role, (0.0, 0.0))
        served_s += (demand.served_s - counted_s) * times
        self._served_s[role] = served_s, demand.served_s
        return FleetFigures(
            low=given.bounds.low,
            high=given.bounds.high,
            target=self._targets[role],
            num_ready=len(ready),
            ready_in_s=[max(0.0, self._begun.get(r.name, now) + self._start_s - now) for r in here if r not in ready],
            next_start_s=[self._start_s],
            slots=slots,
            num_in_flight=in_flight,
            num_held=held,
            num_arrived=demand.num_arrived,
            num_ended=demand.num_ended,
            served_s=served_s,
        )

    def _slots(self, facts: WorkerFacts, most: int) -> float:
        """Rows of the usual length that keep the pace and find blocks."""
        mean = self._fleet.work.mean_tokens
        worker, fitting = WorkerLoad("", facts), FULL_KV * facts.num_blocks * facts.block_size / max(1.0, mean)
        promised_s = _promised_pace_s(worker, self._config)
        low, high = 1, max(1, min(most, int(fitting)))
        while low < high:
            rows = (low + high + 1) // 2
            pace_s = decode_step_s(worker._replace(rows=rows, context_tokens=round(rows * mean)))
            low, high = (rows, high) if pace_s <= promised_s else (low, rows - 1)
        return float(low)

    def _of(self, role: Role) -> list[Replica]:
        """There, or on their way."""
        return [r for r in self._fleet if r.state is not State.DRAINING and role_of(r) is role]

    def _of_both_roles(self) -> list[Replica]:
        return [r for r in self._fleet if r.state is State.READY and r.facts.worker is not None and role_of(r) in OTHER]


def role_of(replica: Replica) -> Role | None:
    """As it told, else as it was named when its start was asked for."""
    if replica.facts.worker is not None:
        return replica.facts.worker.role
    return next((role for role in Role if replica.name.startswith(f"{role.value}-")), None)


def _facts(replica: Replica) -> WorkerFacts:
    assert replica.facts.worker is not None
    return replica.facts.worker
