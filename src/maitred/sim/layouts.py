"""Layouts of workers, simulated at a rate: whole behind the router, or one worker of a role alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Any

from maitred.config import CacheConfig
from maitred.core.cost_model import CostModel
from maitred.core.request import RequestState
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import HandoverConfig, Role
from maitred.sim.devices import SimulatedTarget
from maitred.sim.engine import EngineSetup, Simulation
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup, facts_of
from maitred.sim.links import SimulatedLink
from maitred.sim.profile import Jitter
from maitred.sim.results import GroupResults, Objectives, SimulatedResults, Ticket
from maitred.sim.workload import Arrival, Demand

FREE = CostModel(fixed_s=1e-6)
FREE_LINK = SimulatedLink(1e15, 0.0)


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A device, or several as one worker, that a layout may be made of."""

    name: str
    """As --device has it: h100, h100x4, h100x8ep."""
    target: SimulatedTarget
    price: float = 0.0
    """For an hour of all its devices."""


@dataclass(frozen=True, slots=True)
class Group:
    """Workers of a layout that are alike."""

    role: Role
    candidate: PlannedDevice
    max_num_seqs: int
    token_budget: int
    count: int = 1

    @property
    def costs(self) -> CostModel:
        return self.candidate.target.cost_model

    @property
    def num_devices(self) -> int:
        return self.count * self.candidate.target.num_devices

    @property
    def label(self) -> str:
        limits = f"{self.max_num_seqs} seqs, {self.token_budget} tokens"
        return f"{self.count} {self.role.value} {self.candidate.name} ({limits})"


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """Workers behind one address, or as many times over as there are slices, each with a share of the requests."""

    mode: str
    groups: tuple[Group, ...]
    num_slices: int = 1

    @property
    def handover(self) -> str:
        return {"aggregated": "never", "disaggregated": "always"}.get(self.mode, "auto")

    @property
    def num_devices(self) -> int:
        return self.num_slices * sum(group.num_devices for group in self.groups)

    @property
    def price(self) -> float:
        """For an hour."""
        return self.num_slices * sum(group.count * group.candidate.price for group in self.groups)

    @property
    def label(self) -> str:
        slice_label = " + ".join(group.label for group in self.groups)
        return slice_label if self.num_slices == 1 else f"{self.num_slices:,} x ({slice_label})"

    def changed(self, index: int, more: int) -> WorkerLayout | None:
        """With so many more workers of a group in each slice; None where a role would be left without any."""
        groups = list(self.groups)
        groups[index] = replace(groups[index], count=groups[index].count + more)
        return None if groups[index].count < 1 else replace(self, groups=tuple(groups))

    def part(self, share: float) -> tuple[WorkerLayout, float]:
        """About this share of one slice's workers, and the share of its requests that they are for."""
        groups = tuple(replace(group, count=max(1, round(share * group.count))) for group in self.groups)
        shares = [part.count / group.count for part, group in zip(groups, self.groups, strict=True)]
        return WorkerLayout(self.mode, groups), min(shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFigures:
    """Figures of a layout at a rate, as simulated: those of requests are one slice's, sums are all slices'."""

    layout: WorkerLayout
    rate: float
    attainment: float
    is_met: bool
    figures: GroupResults  # of the requests judged
    tickets: Sequence[Ticket]  # of some of them
    misses: Counter[str]
    tokens_per_s: float  # of answers
    watts: float
    num_row_steps: int

    @property
    def latency_s(self) -> float:
        return self.figures.e2e_s.mean or inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTerms:
    """Terms under which layouts are simulated."""

    demand: Demand
    objectives: Objectives
    attainment: float = 0.9
    """Share of the requests that are to meet every objective."""
    link: SimulatedLink | None = None
    engine: EngineSetup
    """Policy of every worker; its limits and blocks are those of its group."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    seed: int | None = 0

    def engine_of(self, group: Group) -> EngineSetup:
        scheduler = replace(
            self.engine.scheduler, max_num_seqs=group.max_num_seqs, max_num_batched_tokens=group.token_budget
        )
        target, seqs = group.candidate.target, group.max_num_seqs
        return replace(
            self.engine,
            scheduler=scheduler,
            num_blocks=target.num_blocks(self.cache, seqs),
            block_size=self.cache.block_size,
            num_state_slots=target.num_state_slots(self.cache, seqs),
        )

    def replica_of(self, group: Group, link: SimulatedLink | None) -> ReplicaSetup:
        engine = self.engine_of(group)
        worker = None if link is None else facts_of(group.role, group.candidate.target, engine, link)
        return ReplicaSetup(engine=engine, cost_model=group.costs, worker=worker)

    def fleet(
        self, handover: str, replicas: Sequence[ReplicaSetup], link: SimulatedLink | None, results: SimulatedResults
    ) -> FleetSimulation:
        setup = FleetSetup(
            config=FleetConfig(),
            scheduler=replicas[-1].engine.scheduler,
            replicas=replicas,
            handover=HandoverConfig(handover=handover),
            link=link,
        )
        return FleetSimulation(setup, results, seed=self.seed)


class _Lost(Exception):
    """So many requests are not good that the rest cannot mend it."""


class Judged(SimulatedResults):
    """Results of the requests after a warm-up; which objectives were missed is counted."""

    def __init__(
        self, objectives: Objectives, target: SimulatedTarget, arrivals: Sequence[Arrival], warm_up: int
    ) -> None:
        super().__init__(objectives, target.edge)
        self.misses: Counter[str] = Counter()
        self.warm_until = arrivals[min(warm_up, len(arrivals) // 2)].at
        self.num_judged = sum(1 + len(arrival.turns) for arrival in arrivals if arrival.at >= self.warm_until)
        self.ends: list[float] = []

    def finished(self, group: GroupResults, request: RequestState, **more: Any) -> None:
        assert request.finished_at is not None
        self.ends.append(request.finished_at)
        if request.arrived_at >= self.warm_until:
            super().finished(group, request, **more)
        else:
            self._left(group, request.finished_at)

    def missed(self, request: RequestState, num_slow_gaps: int) -> list[str]:
        missed = super().missed(request, num_slow_gaps)
        self.misses.update(missed)
        return missed

    @property
    def num_bad(self) -> int:
        return sum(group.num_finished + group.num_failed - group.num_good for group in self.tenants.values())

    @property
    def attainment(self) -> float:
        return 1 - (self.num_bad - 1e-9) / max(1, self.num_judged) if self.num_bad else 1.0

    def run(self, simulation: Simulation | FleetSimulation, arrivals: Sequence[Arrival], attainment: float) -> bool:
        """Run it; False where it was given up, because too many requests were not good."""
        try:
            simulation.run(self._watched(arrivals, attainment))
        except _Lost:
            return False
        return True

    def _watched(self, arrivals: Iterable[Arrival], attainment: float) -> Iterator[Arrival]:
        """Raises _Lost as soon as too many are bad."""
        allowed = (1 - attainment) * self.num_judged + 1e-9
        for arrival in arrivals:
            if self.num_bad > allowed:
                raise _Lost
            yield arrival


def simulate_worker(terms: PlanTerms, group: Group, rate: float, warm_up: int, num_judged: int) -> Judged:
    """One worker alone: prompts without answers, answers whose prompts cost nothing, or both."""
    arrivals = terms.demand.at(rate, warm_up + num_judged, answers=group.role is not Role.PREFILL)
    goals = Objectives(ttft_s=terms.objectives.ttft_s) if group.role is Role.PREFILL else terms.objectives
    results = Judged(goals, group.candidate.target, arrivals, warm_up)
    if group.role is Role.DECODE:
        decode = replace(terms.replica_of(group, FREE_LINK), tells_speed=False)
        facts = facts_of(Role.PREFILL, group.candidate.target, decode.engine, FREE_LINK)
        replicas = [replace(decode, cost_model=FREE, worker=facts), decode]
        results.run(terms.fleet("always", replicas, FREE_LINK, results), arrivals, terms.attainment)
        return results
    jitter = None if terms.seed is None else Jitter(group.costs, Random(terms.seed))
    results.run(Simulation(terms.engine_of(group), group.costs, results, jitter=jitter), arrivals, terms.attainment)
    return results


def simulate_layout(
    terms: PlanTerms, layout: WorkerLayout, rate: float, warm_up: int, num_judged: int
) -> LayoutFigures:
    """Simulate one slice, at its share of the rate."""
    arrivals = terms.demand.at(rate / layout.num_slices, warm_up + num_judged)
    results = Judged(terms.objectives, layout.groups[-1].candidate.target, arrivals, warm_up)
    link = None if layout.mode == "aggregated" else terms.link
    replicas = [terms.replica_of(group, link) for group in layout.groups for _ in range(group.count)]
    has_ended = results.run(terms.fleet(layout.handover, replicas, link, results), arrivals, terms.attainment)
    busy = results.busy_s / max(1e-9, len(replicas) * results.ended_at)
    return LayoutFigures(
        layout=layout,
        rate=rate,
        attainment=results.attainment,
        is_met=has_ended and results.attainment >= terms.attainment,
        figures=results.total,
        tickets=results.tickets.kept,
        misses=results.misses,
        tokens_per_s=rate * terms.demand.mean_output,
        watts=layout.num_slices * sum(group.count * group.candidate.target.watts(busy) for group in layout.groups),
        num_row_steps=results.num_row_steps,
    )
