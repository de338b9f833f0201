"""A fleet without models: simulated engines behind the router's own core, and its autoscaler, on one clock.

The router's way to its replicas takes no time. Prefix keys are told four times a second, as by live replicas; the keys
of a prompt are made of its blocks' names, one for as many tokens as a live key covers of English.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from heapq import heappop, heappush
from math import floor
from random import Random
from typing import Any

from xxhash import xxh3_64_intdigest as key_of

from maitred.config import DEFAULT_TOKEN_BUDGET, SchedulerConfig
from maitred.core.cost_model import CostModel, StepShape
from maitred.core.errors import MaitredError
from maitred.core.request import FinishReason
from maitred.fleet.actions import Bind, Move, Refuse, Start
from maitred.fleet.config import FleetConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.disagg import DEFAULT_HANDOVER, HandoverConfig, Role, WorkerFacts
from maitred.fleet.driver import Driver
from maitred.fleet.fleet_request import AnswerUsage, FleetRequest, request_of
from maitred.fleet.replicas import ReplicaFacts, Report, State
from maitred.fleet.sizing import Autoscale, as_asked
from maitred.fleet.swapping import ModelSet
from maitred.gate.admission import AdmissionController
from maitred.kv.pages import part_of
from maitred.policy.predictor import Foretold, predictor_named
from maitred.scheduler.engine_core import StepListener
from maitred.sim.clients import ENDED_BY_ITSELF, Clients, SimulatedRequest
from maitred.sim.devices import SimulatedTarget
from maitred.sim.engine import EngineSetup, SimulatedEngine
from maitred.sim.fleet_figures import FleetResults
from maitred.sim.handover import Handovers, SimulatedReplica
from maitred.sim.links import SimulatedDisk, SimulatedLink
from maitred.sim.profile import Jitter
from maitred.sim.results import SimulatedResults
from maitred.sim.workload import Arrival
from maitred.tenancy.tenant import Tenant

BEAT_S = 0.25
KEY_TOKENS = 64  # of a prefix key: 256 bytes of English
MOST_CHANGES = 1 << 30  # all


class _Phase(IntEnum):
    """Order of events at one moment."""

    STEP_ENDS = 0
    TRANSFER = 1
    REPORT = 2
    READY = 3
    ARRIVAL = 4
    TICK = 5
    STEP = 6


Happen = Callable[[SimulatedReplica, float], None]
Event = tuple[float, int, int, int, Happen, SimulatedReplica]


class FleetSimulation(Driver[SimulatedRequest]):
    """One fleet and one workload. A request's tenant, gate and edge are as in `Simulation`."""

    def __init__(
        self,
        setup: FleetSetup,
        results: SimulatedResults,
        *,
        seed: int | None = None,  # of the jitter; None has none
        tenants: Mapping[str, Tenant] | None = None,
        admission: AdmissionController | None = None,
        listener_of: Callable[[str], StepListener] | None = None,  # of an engine, by its name
    ) -> None:
        self.results, self.figures = results, FleetResults()
        self._setup, self._seed, self._listener_of = setup, seed, listener_of
        engine = setup.replicas[0].engine
        self._block_size, self._key_blocks = engine.block_size, max(1, KEY_TOKENS // engine.block_size)
        self._clients = Clients(results, engine.block_size, tenants, admission)
        self._at: dict[str, SimulatedReplica] = {}  # request -> where it is bound to
        self._replicas: dict[str, SimulatedReplica] = {}
        self._unused = list(range(len(setup.replicas)))  # numbers of setups, in order
        predictor = predictor_named(engine.predictor, self._true_length)
        asked = results.objectives
        core = ClusterCore(
            setup.config,
            setup.scheduler,
            policies=engine.policies,
            predictor=predictor,
            autoscale=setup.autoscale,
            handover=replace(setup.handover, ttft_s=asked.ttft_s, tpot_s=asked.tpot_s or asked.itl_s),
            several=setup.several,
        )
        super().__init__(core, self)
        rules = self.core.policy.groups, self.core.policy.outranks
        self._handovers = self._make_handovers(setup)
        hears_each_step = self._clients.hear_each_step or self._handovers is not None
        # else the first tells all, and the end how many
        self._counts_tokens = rules != (None, None) or self._handovers is not None
        self._foresees = not (hears_each_step or self._counts_tokens)
        mean_speed = sum(r.tokens_per_s for r in setup.replicas) / len(setup.replicas)
        self._speeds = [r.tokens_per_s / mean_speed for r in setup.replicas]
        self._events: list[Event] = []
        self._num_events = 0
        self._now = 0.0

    def run(self, arrivals: Iterator[Arrival]) -> SimulatedResults:
        """Run until the last request has ended; `arrivals` is read as time goes on, one ahead."""
        self._clients.begin(arrivals)
        self._open()
        while self.requests or self._clients.next_at is not None:
            self._advance()
        self.figures.ended(max(self._now, self.results.ended_at))
        return self.results

    @property
    def replicas(self) -> Mapping[str, SimulatedReplica]:
        """Replicas by name."""
        return self._replicas

    def to_json(self) -> dict[str, Any]:
        """The figures of `maitred simulate --fleet --json`, once it has run; busy is a share of all replicas' time."""
        figures = self.results.to_json()
        replica_s = self.figures.replica_s
        figures["utilisation"] = self.results.busy_s / replica_s if replica_s > 0 else 0.0
        figures |= self.figures.to_json(self.results)
        return figures if self._handovers is None else {**figures, **self._handovers.to_json()}

    def now(self) -> float:
        """The moment that the simulation has come to."""
        return self._now

    # -- what happens next

    def _advance(self) -> None:
        events, arrives_at, tick_at = self._events, self._clients.next_at, self.core.next_tick()
        at, phase = (events[0][0], events[0][1]) if events else (float("inf"), _Phase.STEP)
        if arrives_at is not None and (arrives_at, _Phase.ARRIVAL) < (at, phase):
            at, phase = arrives_at, _Phase.ARRIVAL
        if tick_at is not None and (tick_at, _Phase.TICK) < (at, phase):
            at, phase = max(tick_at, self._now), _Phase.TICK
        moved_at = None if self._handovers is None else self._handovers.next_at
        if moved_at is not None and (moved_at, _Phase.TRANSFER) < (at, phase):
            at, phase = max(moved_at, self._now), _Phase.TRANSFER
        self._now = at
        if phase == _Phase.ARRIVAL:
            self._arrive(self._clients.take())
        elif phase == _Phase.TICK:
            self.do(self.core.tick(at))
        elif at == moved_at and phase == _Phase.TRANSFER and self._handovers is not None:
            self._handovers.advance(at)
        else:
            *_, happen, replica = heappop(events)
            if not replica.is_gone:
                happen(replica, at)

    def _happens_at(self, now: float) -> bool:
        """Return whether another event happens, which the next step may be about."""
        arrives_at = self._clients.next_at
        return (bool(self._events) and self._events[0][0] <= now) or (arrives_at is not None and arrives_at <= now)

    def _expect(self, at: float, phase: _Phase, happen: Happen, replica: SimulatedReplica) -> None:
        self._num_events += 1
        heappush(self._events, (at, phase, replica.number, self._num_events, happen, replica))

    # -- requests

    def _arrive(self, live: SimulatedRequest) -> None:
        at, request_id = live.arrival.at, live.spec.request_id
        self.requests[request_id] = live
        try:
            for shed in self._clients.pass_gate(live):
                self._shed(shed, at)
            self.hear(self.core.arrived, self._request_of(live))
        except MaitredError as error:
            self._refuse(request_id, error)
        self.results.queue_length.add(at, self.core.num_held)

    def _request_of(self, live: SimulatedRequest) -> FleetRequest:
        arrival, spec = live.arrival, live.spec
        conversation, _, _ = arrival.request_id.rpartition("#")
        session = conversation or (arrival.request_id if arrival.turns else "")
        keys = tuple([key_of(name) for name in spec.block_hashes[self._key_blocks - 1 :: self._key_blocks]])
        request = request_of(spec, keys, key_of(session.encode()) if session else None)
        request.model = arrival.model or None
        return request

    def _shed(self, request_id: str, now: float) -> None:
        """Shed the request where it has not begun."""
        replica = self._at.get(request_id)
        if replica is not None and not replica.engine.scheduler.waits_to_start(request_id):
            return
        live = self.requests.pop(request_id)
        self._take_back(request_id)
        self._clients.given_up(live, FinishReason.SHED, now)
        self.hear(self.core.aborted, request_id)

    def _refuse(self, request_id: str, error: MaitredError) -> None:
        self._take_back(request_id)
        self._clients.refused(self.requests.pop(request_id), error, self._now)

    def _take_back(self, request_id: str) -> None:
        """Take the request back from its replica, if it has one; the result of the step under way is lost."""
        replica = self._at.pop(request_id, None)
        if replica is None:
            return
        if self._handovers is not None:
            self._handovers.drop(request_id, self._now)
        self._catch_up(replica)
        replica.engine.take_back(request_id)
        replica.progress = [told for told in replica.progress if told.request_id != request_id]
        self.figures.changed(replica.name, -1, self._now)
        self.requests[request_id].begin_again()

    # -- what the core decides

    def bound(self, live: SimulatedRequest, bind: Bind) -> None:
        now, replica = self._now, self._replicas[bind.choice.replica]
        try:
            self._add(live, replica, bind, now)
        except MaitredError as error:
            self._refuse(bind.request_id, error)
            self.hear(self.core.ended, bind.request_id, None)
            return
        self._at[bind.request_id] = replica
        self.figures.changed(replica.name, 1, now)
        self._wake(replica, now)

    def moved(self, live: SimulatedRequest, move: Move) -> None:
        self._take_back(move.request_id)

    def refused(self, live: SimulatedRequest, refuse: Refuse) -> None:
        self._refuse(refuse.request_id, refuse.error)

    def _add(self, live: SimulatedRequest, replica: SimulatedReplica, bind: Bind, now: float) -> None:
        if self._handovers is None:
            self._catch_up(replica)
            replica.engine.wait_until(now)
            replica.engine.add(live)
            return
        prefill, peer = (self._replicas.get(name or "") for name in (bind.choice.prefill, bind.choice.fetch_from))
        self._handovers.bind(live, replica, prefill, peer, now)

    def _wake(self, replica: SimulatedReplica, now: float) -> None:
        if not replica.is_stepping:
            replica.is_stepping = True
            self._expect(max(now, replica.engine.clock.now()), _Phase.STEP, self._step, replica)

    # -- replicas work

    def _step(self, replica: SimulatedReplica, now: float) -> None:
        engine = replica.engine
        if not engine.can_step:
            replica.is_stepping = False
            return
        engine.wait_until(now)
        if self._foresees and engine.foresee():
            self._expect(engine.foreseen[-1].ends_at, _Phase.STEP_ENDS, self._end_foreseen, replica)
            self._note_foreseen(replica)
            return
        replica.progress = engine.step()
        if self._handovers is not None:
            self._handovers.stepped(replica, now, engine.clock.now())
        self._expect(engine.clock.now(), _Phase.STEP_ENDS, self._end_step, replica)

    def _end_foreseen(self, replica: SimulatedReplica, now: float) -> None:
        foreseen = replica.engine.foreseen
        if foreseen and foreseen[-1].ends_at == now:  # else something came before
            replica.progress = replica.engine.decode_on(len(foreseen))
            self._end_step(replica, now)

    def _catch_up(self, replica: SimulatedReplica, *, goes_on: bool = False) -> None:
        """Do the foreseen steps that have begun, and forget the others unless it goes on: something else happens."""
        engine, now = replica.engine, self._now
        if not engine.foreseen:
            return
        num_begun = sum([step.begins_at < now for step in engine.foreseen])
        if num_begun:
            replica.progress = engine.decode_on(num_begun)
        if goes_on and engine.foreseen:
            return
        if replica.noted_at > now:
            replica.reports_at = None
        if not engine.foreseen or engine.clock.now() > now:
            self._expect(engine.clock.now(), _Phase.STEP_ENDS, self._end_step, replica)
        else:
            engine.clock.set(engine.foreseen[0].begins_at)
            self._expect(engine.clock.now(), _Phase.STEP, self._step, replica)
        engine.forget_foreseen()

    def _end_step(self, replica: SimulatedReplica, now: float) -> None:
        progress, replica.progress = replica.progress, []
        core, engine = self.core, replica.engine
        if self._handovers is not None:
            progress = self._handovers.told(replica, progress, now)
        if progress:
            self._clients.progressed(progress, core.num_held, now)
        for told in progress:
            if told.new_token_ids and (self._counts_tokens or told.charges is not None):
                core.progressed(told.request_id, len(told.new_token_ids), now)
            if told.finish_reason is not None:
                self._end(told.request_id, told.finish_reason, replica, now)
        self._note_changes(replica, now)
        engine.rest()
        at = engine.clock.now()
        if at > now or self._happens_at(now):
            self._expect(at, _Phase.STEP, self._step, replica)
        else:
            self._step(replica, now)

    def _end(self, request_id: str, reason: FinishReason, replica: SimulatedReplica, now: float) -> None:
        live = self.requests.pop(request_id)
        del replica.engine.live[request_id]
        self.figures.changed(self._at.pop(request_id).name, -1, now)
        self._clients.ended(live, reason, now)
        state = live.state
        assert state is not None
        complete = reason in ENDED_BY_ITSELF
        if complete:
            self.figures.num_prompt_tokens += state.num_prompt_tokens
        if complete and self._setup.disk is not None:
            self._setup.disk.store(state.block_hashes)
        usage = AnswerUsage(state.num_prompt_tokens, state.num_output_tokens, state.num_cached_tokens, complete)
        self.hear(self.core.ended, request_id, usage)

    def _note_changes(self, replica: SimulatedReplica, now: float) -> None:
        """Note changes of a replica's cache, told at its next beat."""
        if replica.reports_at is None and replica.engine.kv_cache.changes:
            self._report_after(replica, now)

    def _note_foreseen(self, replica: SimulatedReplica) -> None:
        """Note the first change that foreseen steps bring."""
        if replica.reports_at is None and (foreseen := replica.engine.foreseen):
            num_steps = replica.engine.steps_to_full_block()
            if num_steps <= len(foreseen):
                self._report_after(replica, foreseen[num_steps - 1].ends_at)

    def _report_after(self, replica: SimulatedReplica, at: float) -> None:
        offset = BEAT_S * replica.number / len(self._setup.replicas)
        replica.noted_at, replica.reports_at = at, BEAT_S * (floor((at - offset) / BEAT_S) + 1) + offset
        self._expect(replica.reports_at, _Phase.REPORT, self._report, replica)

    def _report(self, replica: SimulatedReplica, now: float) -> None:
        if replica.reports_at != now:
            return  # the step that was to bring the changes did not come to be
        replica.reports_at = None
        self._catch_up(replica, goes_on=True)
        changes = replica.engine.kv_cache.changes
        assert changes is not None
        stored, removed = (self._keys_of(names) for names in changes.take(MOST_CHANGES))
        self._note_foreseen(replica)
        if stored or removed:
            self.hear(self.core.reported, replica.name, Report(stored=stored, removed=removed))

    def _keys_of(self, names: Sequence[bytes]) -> list[int]:
        """Return the keys of blocks that are the last of a key."""
        every = self._key_blocks
        return [key_of(name) for name in names if (int.from_bytes(name[-4:], "little") + 1) % every == 0]

    # -- replicas come and go

    def _open(self) -> None:
        """Open the first replicas, begun so long before that their starts teach what a start takes."""
        low, high, began_at = self._setup.low, len(self._setup.replicas), -self._setup.cold_start_s
        if self._setup.several is not None:
            self.hear(self.core.tick)
            return
        names = [f"replica-{number + 1}" for number in range(high)]
        if low is not None:
            names = [start.name for start in self.core.scaled(low, high, began_at) if isinstance(start, Start)]
        if self._handovers is not None:
            names = list(self._setup.workers())
        for name in names:
            replica = self._make(name, State.READY)
            self.figures.started(name, self._speeds[replica.number], 0.0)
            self._is_ready(replica, 0.0)

    def start(self, name: str, origin: str) -> None:
        takes_s = self._setup.cold_start_s if origin == "cold" else self._setup.wake_s
        takes_s = self._setup.load_s.get(name, takes_s)
        replica = self._replicas.get(name) or self._make(name, State.READY)
        replica.facts = replace(replica.facts, state=State.READY)
        self.figures.starts.append((self._now, name))
        self.figures.started(replica.name, self._speeds[replica.number], self._now)
        self._expect(self._now + takes_s, _Phase.READY, self._is_ready, replica)

    def _is_ready(self, replica: SimulatedReplica, now: float) -> None:
        self.figures.ready(replica.name)
        self.hear(self.core.joined, replica.facts)

    def stop(self, name: str) -> None:
        """Stop a replica: it ends, or falls asleep; either way its cache is gone."""
        replica = self._replicas.pop(name)
        if replica.has_engine:
            self._catch_up(replica)
        replica.is_gone = True
        self._unused.append(replica.number)
        self._unused.sort()
        self.figures.stopped(name, self._now)
        self.hear(self.core.left, name)
        num_asleep = sum(1 for other in self._replicas.values() if other.facts.state is State.ASLEEP)
        if num_asleep < self._setup.num_asleep and name not in self._replicas:
            self.hear(self.core.joined, self._make(name, State.ASLEEP).facts)

    def _make(self, name: str, state: State) -> SimulatedReplica:
        number = self._setup.number_for(name, self._unused)
        self._unused.remove(number)
        setup = self._setup.replicas[number]
        facts = ReplicaFacts(
            name=name,
            state=state,
            slots=setup.engine.scheduler.max_num_seqs,
            tokens_per_s=setup.tokens_per_s if setup.tells_speed else None,
            is_launched=self._setup.low is not None or self._setup.several is not None,
            worker=setup.worker,
        )
        self._replicas[name] = made = SimulatedReplica(name, number, facts, self._make_engine)
        return made

    def _make_engine(self, replica: SimulatedReplica) -> SimulatedEngine:
        setup, name = self._setup.replicas[replica.number], replica.name
        jitter = None if self._seed is None else Jitter(setup.cost_model, Random(f"{self._seed}/{name}"))
        listeners: list[StepListener] = [] if self._listener_of is None else [self._listener_of(name)]
        if self._handovers is not None:
            listeners.append(self._handovers.listener_of(replica))
        engine = SimulatedEngine(setup.engine, setup.cost_model, self.results, jitter=jitter, listeners=listeners)
        engine.kv_cache.tell_changes(True)
        return engine

    def _make_handovers(self, setup: FleetSetup) -> Handovers | None:
        if setup.disk is None and (setup.link is None or setup.handover.handover == "never"):
            return None
        return Handovers(setup.link, setup.disk, wake=self._wake, rid=self._is_rid, expect=self._expect_transfer)

    def _is_rid(self, request_id: str, now: float) -> None:
        self.do(self.core.handed_over(request_id, now))

    def _expect_transfer(self, at: float, happen: Happen, replica: SimulatedReplica) -> None:
        self._expect(at, _Phase.TRANSFER, happen, replica)

    def _true_length(self, request: Foretold) -> float:
        return float(self.requests[request.request_id].arrival.output_tokens)


# ---- setup


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetup:
    """One replica: an engine on a device."""

    engine: EngineSetup
    cost_model: CostModel
    tells_speed: bool = True
    """The router knows how fast its device is."""
    worker: WorkerFacts | None = None
    """Facts that it tells of itself where it may hand KV over."""

    @property
    def tokens_per_s(self) -> float:
        """Return the prompt tokens a second, in steps of as many tokens as there may be."""
        budget = self.engine.scheduler.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
        return budget / self.cost_model.step_s(StepShape(prefill_tokens=budget, rows=1))


def facts_of(role: Role, target: SimulatedTarget, engine: EngineSetup, link: SimulatedLink | None) -> WorkerFacts:
    """Facts that a worker of this role tells of itself."""
    return WorkerFacts(
        role=role,
        costs=target.cost_model,
        token_budget=engine.scheduler.token_budget,
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
        bytes_per_token=target.kv_bytes_per_token * part_of(engine.groups, engine.block_size),
        num_layers=target.num_layers,
        bandwidth=0.0 if link is None else link.bandwidth,
        latency_s=0.0 if link is None else link.latency_s,
        shares_link=link is not None and link.is_shared,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """A router and what is behind it."""

    config: FleetConfig
    scheduler: SchedulerConfig
    """Scheduler of the router's queue: its policy."""
    replicas: Sequence[ReplicaSetup]
    """Replicas, as many as there may be at once, in the order in which they are started."""
    low: int | None = None
    """Fewest there are to be, and as many are there at the beginning; None keeps all of them."""
    autoscale: Autoscale = as_asked
    cold_start_s: float = 30.0
    wake_s: float = 3.0
    num_asleep: int = 0
    """Replicas that are kept asleep when they are stopped, and so need `wake_s` to start."""
    handover: HandoverConfig = DEFAULT_HANDOVER
    """Hand-over, with the objectives by which results are judged."""
    link: SimulatedLink | None = None
    """Link between workers."""
    several: ModelSet | None = None
    """Several models in place of alike replicas; `replicas` are their setups, in the same order."""
    load_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a load of each takes."""
    disk: SimulatedDisk | None = None
    """Disk on which all workers store KV; only where all tell their facts as workers."""

    def workers(self) -> Iterator[str]:
        """Named after their roles."""
        counts = Counter(one.worker.role for one in self.replicas if one.worker is not None)
        for role, count in counts.items():
            yield from (f"{role.value}-{i + 1}" for i in range(count))

    def number_for(self, name: str, unused: Sequence[int]) -> int:
        """Return the number of the first unused replica, of the role that `name` begins with if it names one; a
        model's own.
        """
        if self.several is not None:
            return [model.name for model in self.several.models].index(name)
        of_role = [n for n in unused if (told := self.replicas[n].worker) and name.startswith(told.role)]
        return (of_role or unused)[0]
