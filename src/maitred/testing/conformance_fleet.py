"""Properties that a policy must keep when one queue feeds several replicas: call `check_fleet_policy`. Pure and seeded.

    from maitred.testing.conformance_fleet import check_fleet_policy
    check_fleet_policy(my_policy)    # my_policy: PolicyFactory; raises PolicyFault, naming the property and the seed

A real `ClusterCore` in front of real schedulers, each under the same policy, with replicas that die and come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isfinite

from maitred.core.request import RequestSpec, RequestState, Terms
from maitred.core.step import SchedulerOutput
from maitred.fleet.actions import Action, Bind, Move, Refuse, Start, Stop
from maitred.fleet.binding import use_of
from maitred.fleet.config import BALANCES, FleetConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.fleet_request import AnswerUsage, FleetRequest, request_of
from maitred.fleet.replicas import ReplicaFacts, State
from maitred.fleet.swapping import FleetModel, ModelSet
from maitred.policy.parameters import make_policy
from maitred.policy.policy import PolicyFactory
from maitred.testing.conformance import RIVALS, PolicyFault, rival, roomy_scenario, tenant_shape, waiting_tenants
from maitred.testing.conformance_world import CHECKED, Scenario, ServiceMeter, World, answer, scenario_of

SWAP_WAIT_S, LOAD_S = 12.0, 4.0  # of several models; a step takes 1 s


class FleetWorld:
    """The load of a scenario on several replicas, each with as many slots and blocks as the scenario has."""

    def __init__(
        self,
        make: PolicyFactory,
        scenario: Scenario,
        balance: str | None = None,
        num_replicas: int = 3,
        several: ModelSet | None = None,
    ) -> None:
        """Make a fleet; without a balance the seed chooses one. `several` models share its memory, none loaded."""
        balance = balance if balance is not None else BALANCES[scenario.seed % len(BALANCES)]
        self.make, self.scenario = make, scenario
        self.source = World(make, scenario)  # draws requests, and runs none
        self.engines: dict[str, World] = {}
        config = FleetConfig(
            slots=scenario.max_num_seqs, balance=balance, retry_ratio=1.0, max_deaths=100, swap_wait_s=SWAP_WAIT_S
        )
        self.core = ClusterCore(config, scenario.config, policies={CHECKED: make}, several=several)
        self.several, self.loading, self.ready_at = several, dict[str, float](), dict[str, float]()
        self.wanted_at: dict[str, float] = {}  # models not loaded, since when requests wait for them
        self.models: dict[str, str] = {}  # asked for, by request
        self.specs: dict[str, RequestSpec] = {}
        self.where: dict[str, str] = {}  # of those in flight
        self.bindings: list[tuple[str, str]] = []
        self.plans: list[SchedulerOutput] = []  # of the last step
        self.num_ended = self.num_steps = self.num_loads = 0
        self.now = 0.0
        for number in range(num_replicas):
            self.join(f"replica-{number}")

    @property
    def has_work(self) -> bool:
        return self.core.num_requests > 0

    def fault(self, name: str, what: str) -> PolicyFault:
        return PolicyFault(f"fleet: {name}", self.scenario, self.num_steps, what)

    def join(self, name: str) -> None:
        self.engines[name] = World(self.make, self.scenario)
        facts = ReplicaFacts(name=name, models=("m",) if self.several is None else (name,), is_launched=True)
        self.carry_out(self.core.joined(facts, self.now))

    def die(self, name: str) -> None:
        """Kill a replica; all that it had is moved as the core says."""
        places = {request_id: self.place(request_id) for request_id, at in self.where.items() if at == name}
        del self.engines[name]
        actions = self.core.left(name, self.now)
        self.carry_out(actions)
        for request_id, place in places.items():
            if self.core.request(request_id) is not None and place < self.place(request_id):
                raise self.fault(
                    "keeps its place", f"{request_id} was in place {place}, and is later when its replica died"
                )

    def place(self, request_id: str) -> tuple[object, ...]:
        """Return a request's place: its key, because groups may change places meanwhile."""
        request = self.core.request(request_id)
        assert request is not None
        return self.core.key_of(request)

    def add(self, request: RequestState) -> None:
        spec = request.spec
        self.source.requests[spec.request_id] = request
        self.specs[spec.request_id] = spec
        keys = tuple(int.from_bytes(digest[:8], "big") for digest in spec.block_hashes)
        asked = request_of(spec, keys)
        asked.model = self.models.get(spec.request_id)
        self.carry_out(self.core.arrived(asked, self.now))

    def carry_out(self, actions: list[Action]) -> None:
        """Carry out the core's actions, then look at the bound and held requests."""
        started = []
        for action in actions:
            if isinstance(action, Bind):
                self.where[action.request_id] = action.choice.replica
                self.bindings.append((action.request_id, action.choice.replica))
                spec = self.specs[action.request_id]
                self.engines[action.choice.replica].scheduler.add(RequestState(spec), self.now)
                started.append(action.request_id)
            elif isinstance(action, Move):
                del self.where[action.request_id]
            elif isinstance(action, Refuse):
                self.where.pop(action.request_id, None)
                self.num_ended += 1
            elif isinstance(action, Start):
                self.loading[action.name] = self.now + LOAD_S
                self.num_loads += 1
                self._check_memory()
            elif isinstance(action, Stop):
                self._put_out(action.name)
        self._look(started)

    def _put_out(self, name: str) -> None:
        del self.engines[name], self.ready_at[name]
        self.carry_out(self.core.left(name, self.now))

    def _check_memory(self) -> None:
        assert self.several is not None
        used = sum(m.memory_bytes for m in self.several.models if m.name in {*self.engines, *self.loading})
        if used > self.several.memory_bytes:
            raise self.fault("memory", f"models loaded at {self.now:g} s take {used} of {self.several.memory_bytes}")

    def step(self) -> None:
        """Let every replica do a step; a step takes a second."""
        self.plans = []
        self.now += 1.0
        self.num_steps += 1
        for name in [name for name, at in self.loading.items() if at <= self.now]:
            del self.loading[name]
            self.ready_at[name] = self.now
            self.join(name)
        while (due := self.core.next_tick()) is not None and due <= self.now and self.several is not None:
            self.carry_out(self.core.tick(self.now))
        for world in list(self.engines.values()):
            plan = world.scheduler.schedule(self.now)
            self.plans.append(plan)
            for told in world.scheduler.update(plan, answer(plan), self.now):
                self.core.progressed(told.request_id, len(told.new_token_ids), self.now)
                if told.finish_reason is not None:
                    del self.where[told.request_id]
                    self.num_ended += 1
                    self.carry_out(self.core.ended(told.request_id, self._usage(told.request_id), self.now))
        self.source.now = self.now

    def _usage(self, request_id: str) -> AnswerUsage:
        spec = self.specs[request_id]
        return AnswerUsage(spec.num_prompt_tokens, spec.max_tokens, complete=False)

    # -- what must hold after everything that happens

    def _look(self, started: list[str]) -> None:
        held = self.core.held()
        if self.several is not None:
            self._look_at_models(started, held)
            return
        if held and any(self.core.fleet.usable(use_of(request)) & self.core.fleet.room for request in held):
            raise self.fault("work conservation", f"{held[0].request_id} is held while a replica has room")
        policy, groups = self.core.policy, self.core.policy.groups
        for request_id in started:
            ahead = self.core.request(request_id)
            if ahead is None:
                continue
            for waiting in held:
                if groups is not None and groups.group_of(ahead) != groups.group_of(waiting):
                    continue
                until = policy.overtaken_until(waiting)
                if not isfinite(until) or ahead.arrived_at > until:
                    raise self.fault("starvation bound", f"{request_id} is bound before {waiting.request_id}")
                if self.place(waiting.request_id) < self.place(request_id):
                    raise self.fault("no inversion", f"{request_id} is bound before {waiting.request_id}")

    def _look_at_models(self, started: list[str], held: list[FleetRequest]) -> None:
        """No request is bound to a loaded model before one that waits for another and is before it in the order, once
        that one has waited for the bound, and the loaded one has had it too.
        """
        for name in {*self.where.values()}:
            if self.core.fleet.by_name[name].state is not State.READY:
                raise self.fault("no busy model is put out", f"{name} has requests in flight")
        waited_for = {request.model or "" for request in held} - self.ready_at.keys()
        self.wanted_at = {name: self.wanted_at.get(name, self.now) for name in waited_for}
        for request_id in started:
            ahead = self.core.request(request_id)
            if ahead is None or not self.is_alone:
                continue
            for waiting in held:
                since = max(self.ready_at[self.where[request_id]], self.wanted_at.get(waiting.model or "", self.now))
                groups = self.core.policy.groups
                if groups is not None and groups.group_of(ahead) != groups.group_of(waiting):
                    continue
                if self.now > since + SWAP_WAIT_S and self.place(waiting.request_id) < self.place(request_id):
                    raise self.fault("bounded passing", f"{request_id} is bound before {waiting.request_id}")

    @property
    def is_alone(self) -> bool:
        """Whether memory holds one model, so that each that is loaded is in the way of each that waits."""
        return self.several is not None and self.several.memory_bytes == 1

    def check_places(self) -> None:
        """Check that every request is in one place."""
        here = {r.request_id for r in self.core.held()}
        running = [r.request_id for w in self.engines.values() for r in (*w.scheduler.waiting, *w.scheduler.running)]
        if len(here) + len(running) != len(here.union(running)) or set(running) != self.where.keys():
            raise self.fault("conservation", "a request is in two places, or in none")
        if len(here) + len(running) + self.num_ended != len(self.specs):
            raise self.fault("conservation", f"{len(here)} held, {len(running)} in flight, {self.num_ended} ended")
        try:
            self.core.check_invariants()
        except AssertionError as broken:
            raise self.fault("bounded queue", f"the core remembers requests that have gone {broken}") from None


# -- checks of a policy: each raises PolicyFault


def check_fleet_steps(make: PolicyFactory, scenario: Scenario, balance: str | None = None) -> list[tuple[str, str]]:
    """Run a scenario's load to its end, while replicas die and come. Returns each request's replica, as bound."""
    scenario = replace(scenario, num_requests=3 * scenario.num_requests)
    world, dice, num_joined = FleetWorld(make, scenario, balance), World(make, scenario).dice, 3
    while world.has_work or len(world.specs) < scenario.num_requests:
        while len(world.specs) < scenario.num_requests and dice.chance(scenario.arrivals_percent):
            world.add(world.source.draw_request())
        if dice.chance(3) and len(world.engines) > 1:
            world.die(dice.choose(sorted(world.engines)))
        if dice.chance(5) and len(world.engines) < 4:
            num_joined += 1
            world.join(f"replica-{num_joined}")
        world.step()
        world.check_places()
        if world.num_steps > 50 * world.source.max_steps:
            raise world.fault("conservation", f"no end in sight for {world.core.num_requests}")
    return world.bindings


def check_fleet_determinism(make: PolicyFactory, scenario: Scenario, balance: str | None = None) -> None:
    """Two runs bind alike."""
    if check_fleet_steps(make, scenario, balance) != check_fleet_steps(make, scenario, balance):
        raise PolicyFault("fleet: determinism", scenario, 0, "a second run binds otherwise")


def check_fleet_endless_load(make: PolicyFactory, scenario: Scenario, balance: str | None = None) -> None:
    """The least favoured request there can be finishes, whatever comes in for ever."""
    for kind in RIVALS:
        roomy = roomy_scenario(scenario)
        world = FleetWorld(make, roomy, balance, num_replicas=2)
        places = 2 * (roomy.max_num_seqs + 1)
        for _ in range(2 * places):
            world.add(rival(world.source, kind))
        victim = world.source.make_request(prompt=8, max_tokens=3, terms=Terms(priority=2, tenant="victim"))
        world.add(victim)
        asked = world.core.request(victim.request_id)
        assert asked is not None
        max_steps = 300 + 8 * int(world.core.policy.overtaken_until(asked))
        while world.core.request(victim.request_id) is not None:
            if world.num_steps > max_steps:
                raise world.fault("starvation bound", f"after {max_steps} steps one is not done; rivals: {kind}")
            for _ in range(places):
                world.add(rival(world.source, kind))
            world.step()


def check_fleet_fair_share(make: PolicyFactory, scenario: Scenario, balance: str | None = None) -> float:
    """Check that the service of groups that always wait drifts apart by no more than the bound says, over all replicas,
    of a batch as large as all of theirs, and twice the prompts in flight: they count when they are bound, and are
    computed later. Returns the largest drift as a share of it. A policy without groups passes.
    """
    gap = make_policy(make, scenario.config).max_service_gap
    if gap is None:
        return 0.0
    scenario = replace(scenario, num_blocks=max(scenario.num_blocks, 8 * scenario.longest_prompt))
    world = FleetWorld(make, scenario, balance)
    shapes = [tenant_shape(world.source, number) for number in range(2 + scenario.seed % 3)]
    num_places = sum(replica.limit for replica in world.core.fleet)
    num_kv_tokens = len(world.engines) * scenario.num_blocks * scenario.block_size
    bound = gap(scenario.longest_prompt, scenario.longest_output, num_places, num_kv_tokens)
    bound += 2.0 * num_places * scenario.longest_prompt
    bound /= min(weight for _, _, weight in shapes)
    meter = ServiceMeter(len(shapes), scenario.config.output_token_weight)
    for _ in range(max(100, int(bound))):
        for request in waiting_tenants(world.source, shapes, world.core.held(), num_places):
            world.add(request)
        world.step()
        for plan in world.plans:
            meter.read(plan, world.source.requests)
        if meter.widest > bound:
            fault = f"the service of two tenants that always wait differs by {meter.widest:g} tokens, over {bound:g}"
            raise world.fault("fair share", fault)
    return meter.widest / bound


def check_fleet_models(make: PolicyFactory, scenario: Scenario, balance: str | None = None) -> int:
    """Check several models in memory for one, or for two or three of unlike sizes: all requests are answered, no busy
    model is put out, memory suffices, and requests of a loaded model pass others for a bounded time. Returns the loads.
    """
    scenario = replace(scenario, num_requests=2 * scenario.num_requests)
    is_small = scenario.seed % 2 == 0
    models = [FleetModel(name=f"m{n}", memory_bytes=1 if is_small else 1 + n % 3) for n in range(4)]
    several = ModelSet(tuple(models), 1 if is_small else 4)
    world, dice = FleetWorld(make, scenario, balance, 0, several), World(make, scenario).dice
    while world.has_work or len(world.specs) < scenario.num_requests:
        while len(world.specs) < scenario.num_requests and dice.chance(scenario.arrivals_percent):
            request = world.source.draw_request()
            world.models[request.request_id] = models[min(dice.between(0, 3), dice.between(0, 3))].name
            world.add(request)
        world.step()
        world.check_places()
        if world.num_steps > 100 * world.source.max_steps:
            raise world.fault("conservation", f"no end in sight for {world.core.num_requests}")
    return world.num_loads


FLEET_CHECKS: dict[str, Callable[..., object]] = {  # (factory, scenario), and a balance if not the seed's
    "fleet: steps and determinism": check_fleet_determinism,
    "fleet: endless load": check_fleet_endless_load,
    "fleet: fair share": check_fleet_fair_share,
    "fleet: several models": check_fleet_models,
}


def check_fleet_policy(make: PolicyFactory, seeds: Iterable[int] = range(6)) -> None:
    """Run every check, in a fleet for each seed, each under another balance. Raises PolicyFault at the first."""
    for seed in seeds:
        for check in FLEET_CHECKS.values():
            check(make, scenario_of(seed))
