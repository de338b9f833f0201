"""Conformance beside tensor requests: what a policy must keep where chats and batches of several lanes stand under it.

A world of `conformance_world`, and a load of tensor requests on the same scheduler, which comes, runs and is aborted
between its steps and during them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

from msgspec.structs import replace

from maitred.core.request import FinishReason, RequestStatus, Terms
from maitred.core.step import RequestProgress
from maitred.core.tensor_request import Batch, BatchOutcome, BatchRules, Instance, LaneKey, TensorRequest, TensorSpec
from maitred.policy.parameters import make_policy
from maitred.policy.policy import PolicyFactory
from maitred.scheduler.lanes import Lanes
from maitred.testing.conformance_world import Dice, Execute, Scenario, World, answer

LONGEST_WORK = 12


class TensorWorld:
    """Tensor requests of one to three models, with a lane for each of their buckets, beside the chats of a world."""

    def __init__(self, world: World) -> None:
        self.world, self.dice = world, Dice(world.scenario.seed ^ 0x7E4502)
        self.requests: dict[str, TensorRequest] = {}  # all there ever were
        self.num_finished = 0
        self._num_models = self.dice.between(1, 3)
        for number in range(self._num_models):
            self.lanes.load(f"m{number}", 1, self._draw_rules())

    @property
    def lanes(self) -> Lanes:
        return self.world.scheduler.lanes

    def _draw_rules(self) -> BatchRules:
        dice = self.dice
        return BatchRules(
            max_batch_size=dice.between(1, 6),
            dynamic=dice.chance(80),
            delay_s=dice.choose([0.0, 0.0, 1.5]),
            instances=tuple(Instance() for _ in range(dice.between(1, 2))),
            machine_share=dice.choose([0.25, 1.0]),
        )

    def arrive(self, now: float) -> None:
        """Let some more arrive, and perhaps an abort."""
        dice = self.dice
        while len(self.requests) < 2 * self.world.scenario.num_requests and dice.chance(60):
            self.add(self.draw_request(now), now)
        if self.lanes.requests and dice.chance(3):
            self._note(self.world.scheduler.finish(self._any_id(), FinishReason.ABORT, now))

    def _any_id(self) -> str:
        return self.dice.choose(self.lanes.requests).request_id

    def draw_request(self, now: float) -> TensorRequest:
        dice, scenario = self.dice, self.world.scenario
        return self.make_request(
            now,
            model=f"m{dice.between(0, self._num_models - 1)}",
            bucket=dice.choose(["", "", "long"]),
            work=float(dice.between(1, LONGEST_WORK)),
            terms=Terms(
                tenant=f"t{dice.between(0, scenario.num_tenants - 1)}",
                priority=dice.between(0, scenario.num_priorities - 1),
                ttft_slo_s=dice.choose([None, None, 0.0, 2.0, 9.0]),
            ),
        )

    def make_request(self, now: float, *, model: str = "m0", bucket: str = "", **fields: Any) -> TensorRequest:
        """Make a request of one row."""
        lane = LaneKey(model, 1, bucket)
        return TensorRequest(TensorSpec(request_id=f"x{len(self.requests):05d}", arrived_at=now, lane=lane, **fields))

    def add(self, request: TensorRequest, now: float) -> None:
        self.requests[request.request_id] = request
        self.world.scheduler.add_tensor(request, now)

    def complete_some(self, now: float) -> None:
        for batch in self.lanes.batches:
            if self.dice.chance(60):
                self.complete(batch, BatchOutcome(compute_us=400_000, lost=self.dice.chance(10)), now)

    def complete(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        for progress in self.world.scheduler.completed(batch, outcome, now):
            self._note(progress)

    def dispatch(self, now: float) -> str | None:
        """Lets batches go; what is wrong about them, in words."""
        for progress in self.world.scheduler.expire_tensors(now):
            self._note(progress)
        batches = self.world.scheduler.dispatch(now)
        return self._fault_of_order(batches) or self._fault_of_waiting(now) or self._fault_of_places()

    def _note(self, progress: RequestProgress | None) -> None:
        self.num_finished += progress is not None and progress.finish_reason is not None

    # -- properties of a dispatch

    def _fault_of_order(self, batches: Iterable[Batch]) -> str | None:
        """Return a fault of the starvation bound, or an inversion: none of a lane's group starts before its turn."""
        policy = self.world.policy
        rule = policy.groups
        for started in (self.requests[name] for batch in batches for name in batch.request_ids):
            for waiting in self._waiting():
                if waiting.spec.lane != started.spec.lane or waiting.num_losses or started.num_losses:
                    continue
                if rule is not None and rule.group_of(waiting) != rule.group_of(started):
                    continue
                if waiting.key < started.key:
                    return f"{started.request_id} goes before {waiting.request_id}, whose key is smaller"
                if started.arrived_at > policy.overtaken_until(waiting):
                    return f"{started.request_id} goes before {waiting.request_id}, which nobody may overtake any more"
        return None

    def _fault_of_waiting(self, now: float) -> str | None:
        """Return a fault of waiting: no lane holds up a batch beside a free instance; the LLM's share may."""
        at = self.world.scheduler.next_wake(now)
        if at is not None and at <= now:
            return f"a batch may go at {at}, and it is {now}"
        if self.world.scheduler.can_step:
            return None
        for model in self.lanes.models:
            for lane in model.lanes.values() if model.instances else ():
                batch = lane.next_batch(now)
                if batch is not None and batch.at <= now:
                    return f"a batch of {lane.key} waits beside a free instance"
        return None

    def _fault_of_places(self) -> str | None:
        """Return a fault of places: every request is in one place; none is lost."""
        try:
            self.lanes.check_invariants()
        except AssertionError as fault:
            return f"lanes: {fault}"
        here = len(self.lanes.requests)
        if here + self.num_finished != len(self.requests):
            return f"{here} tensor requests here, {self.num_finished} ended, of {len(self.requests)}"
        return None

    def _waiting(self) -> list[TensorRequest]:
        return [one for one in self.lanes.requests if one.status is RequestStatus.WAITING]

    def orders(self) -> dict[tuple[LaneKey, str], list[str]]:
        """Ids of those that wait in order, by lane and group."""
        rule, orders = self.world.policy.groups, dict[tuple[LaneKey, str], list[str]]()
        for request in sorted(self._waiting(), key=lambda one: one.key):
            group = rule.group_of(request) if rule is not None else ""
            orders.setdefault((request.spec.lane, group), []).append(request.request_id)
        return orders


def busy_lane(make: PolicyFactory, scenario: Scenario, execute: Execute = answer) -> TensorWorld:
    """One lane of one instance that runs `max_num_seqs` rows at a time."""
    tensors = TensorWorld(World(make, scenario, execute))
    tensors.lanes.load("m0", 1, BatchRules(max_batch_size=scenario.max_num_seqs, dynamic=True))
    return tensors


def lane_starvation_fault(make: PolicyFactory, scenario: Scenario, rivals: Mapping[str, Terms]) -> str | None:
    """The least favoured request of a lane runs, whatever comes in for ever, at twice what can be served."""
    for kind, rival in rivals.items():
        tensors, now = busy_lane(make, scenario), 0.0
        _add_rivals(tensors, rival, now)
        victim = tensors.make_request(now, work=float(LONGEST_WORK), terms=Terms(priority=2, tenant="victim"))
        tensors.add(victim, now)
        until = tensors.world.policy.overtaken_until(victim)
        if not isfinite(until):
            return f"overtaken_until is {until}; state a finite time"
        while not victim.finished:
            if now > 300 + 8 * until:
                return f"after {now} s one has not run that was overtaken until {until}; rivals: {kind}"
            fault = tensors.dispatch(now)
            if fault is not None:
                return fault
            now += 1.0
            for batch in tensors.lanes.batches:
                tensors.complete(batch, BatchOutcome(compute_us=1_000_000), now)
            _add_rivals(tensors, rival, now)
    return None


def _add_rivals(tensors: TensorWorld, rival: Terms, now: float) -> None:
    for _ in range(2 * tensors.world.scenario.max_num_seqs):
        terms = replace(rival, tenant=rival.tenant or f"a{len(tensors.requests):05d}")
        tensors.add(tensors.make_request(now, work=1.0, terms=terms), now)


def lane_fair_share_fault(
    make: PolicyFactory, scenario: Scenario, shape: Callable[[World, int], tuple[int, int, float]]
) -> str | None:
    """Return a fault of fair shares: the weighted service of groups that always wait in a lane drifts apart by no more
    than `max_service_gap`.
    """
    policy = make_policy(make, scenario.config)
    if policy.groups is None or policy.max_service_gap is None:
        return None
    tensors, output_weight = busy_lane(make, scenario), scenario.config.output_token_weight
    shapes = [shape(tensors.world, number) for number in range(3)]
    bound = policy.max_service_gap(scenario.longest_prompt, 1, scenario.max_num_seqs, 10**9)
    bound /= min(weight for _, _, weight in shapes)
    given = [0.0] * len(shapes)
    widest, now = [0.0, 0.0], 0.0
    for _ in range(100):
        for number, (work, _, weight) in enumerate(shapes):
            while sum(one.tenant == f"t{number}" for one in tensors._waiting()) <= scenario.max_num_seqs:
                terms = Terms(tenant=f"t{number}", weight=weight)
                tensors.add(tensors.make_request(now, work=float(work), terms=terms), now)
        tensors.dispatch(now)
        now += 1.0
        for batch in tensors.lanes.batches:
            for request in (tensors.requests[name] for name in batch.request_ids):
                given[int(request.tenant[1:])] += (request.num_inputs + output_weight) / request.weight
            tensors.complete(batch, BatchOutcome(compute_us=1_000_000), now)
        widest = [min(widest[0], given[0] - given[1]), max(widest[1], given[0] - given[1])]
        if widest[1] - widest[0] > bound:
            return f"the service of two tenants that always wait in a lane differs by {widest}, over {bound:g}"
    return None
