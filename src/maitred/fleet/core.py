"""The router's decisions: hold, bind and preempt requests, and move on those whose replica fails. Pure.

What happens goes in by the methods of `ClusterCore`, what must be done comes out as actions; see docs/fleet.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maitred.config import SchedulerConfig
from maitred.core.errors import InvalidRequest
from maitred.fleet.actions import Action, Probe, Start
from maitred.fleet.binding import Binder, Waiting
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import DEFAULT_HANDOVER, HandoverConfig
from maitred.fleet.fleet_request import AnswerUsage, Failure, FailureKind, FleetRequest
from maitred.fleet.prefix_index import Lessons, PrefixIndex
from maitred.fleet.replicas import Due, FleetReplica, Health, ReplicaDue, ReplicaFacts, Replicas, Report, State, Use
from maitred.fleet.requests import Requests, Timers
from maitred.fleet.sizing import EVERY_S, Autoscale, FleetFigures, Sizing, as_asked
from maitred.fleet.swapping import ModelSet, ModelView, Swapping
from maitred.policy.policies import POLICIES, policy_for
from maitred.policy.policy import PolicyFactory
from maitred.policy.predictor import Predictor, predictor_named


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica; names of fields are those of the JSON."""

    name: str
    url: str
    kind: str
    state: str
    pid: int | None
    in_flight: int
    slots: int
    models: tuple[str, ...]
    tier: str
    prefix_keys: int
    error: str | None


@dataclass(frozen=True, slots=True)
class FleetView:
    """The whole fleet."""

    target: int
    held: int
    oldest_held_s: float
    replicas: tuple[ReplicaView, ...]
    models: tuple[ModelView, ...] = ()  # where there are several


def view_of(fleet: Replicas, index: PrefixIndex, waiting: Waiting, target: int, now: float) -> FleetView:
    oldest = min((r.arrived_at for r in waiting), default=now)
    views = tuple(_replica_view(fleet, index, replica) for replica in fleet)
    return FleetView(target, waiting.num_held, max(0.0, now - oldest), views)


def _replica_view(fleet: Replicas, index: PrefixIndex, replica: FleetReplica) -> ReplicaView:
    facts = replica.facts
    return ReplicaView(
        name=facts.name,
        url=facts.url,
        kind=facts.kind.value,
        state=replica.state.value,
        pid=facts.pid,
        in_flight=len(replica.in_flight),
        slots=replica.slots,
        models=facts.models or (),
        tier=fleet.tiers[replica.tier].name,
        prefix_keys=index.num_keys_of(replica.bit),
        error=replica.error,
    )


SILENT = Failure(FailureKind.SILENT, message="nothing was heard of it")

HAND_OVER_S = 1.0  # before a replica that ends by itself cuts what it has: to stop there, and to go on elsewhere

GONE = Failure(FailureKind.RESET, message="it is gone")
_KEPT = {(State.WARM, State.READY), (State.ASLEEP, State.READY), (State.ASLEEP, State.STARTING)}


class ClusterCore:
    """One fleet. `now` (s) never goes back. Actions are to be carried out in order; call `tick` at `next_tick`."""

    def __init__(
        self,
        config: FleetConfig,
        scheduler: SchedulerConfig,
        *,
        policies: Mapping[str, PolicyFactory] = POLICIES,
        predictor: Predictor | None = None,  # None makes the one that `scheduler` names
        autoscale: Autoscale = as_asked,
        handover: HandoverConfig = DEFAULT_HANDOVER,
        several: ModelSet | None = None,
    ) -> None:
        """`several` models share the replicas' memory, a replica of its name for each; raises ConfigError where one
        could never be loaded.
        """
        self.config, self.scheduler, self.handover, self.several = config, scheduler, handover, several
        self.fleet, self.index = Replicas(config), PrefixIndex()
        both = policy_for(scheduler, policies), policy_for(scheduler, policies)
        self.policy, self._policies = both[0], policies
        self._predictor = predictor or predictor_named(scheduler.predictor)
        self._lessons = Lessons(self._predictor if self.policy.reads_predictions else None, self.index)
        binder = Binder(config, both, self.fleet, self.index, self._lessons, handover)
        self._binder = binder
        self._health = Health(config, self.fleet)
        self._sizing = Sizing(config, self.fleet, autoscale)
        self.swapping = None if several is None else Swapping(several, config.swap_wait_s, self.fleet, binder.waiting)
        self._requests = Requests(config, self.fleet, binder, self._lessons, self._health, self._sizing, self.swapping)
        self._draining = Draining(self.fleet, self._sizing, self._requests, self._health)
        self._watch = Watch(config, self.fleet, self._health, self._requests)
        self._facts_version = -1
        self._scale_at: float | None = None

    # -- requests

    @property
    def num_slots(self) -> int:
        """Slots of all replicas that are ready."""
        return sum(replica.slots for replica in self.fleet.by_name.values() if replica.state is State.READY)

    def arrived(self, request: FleetRequest, now: float) -> list[Action]:
        """A new one. Raises InvalidRequest when its id is in use."""
        if self._requests.get(request.request_id) is not None:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        actions = self._requests.arrive(request, now) + self._swap(now)
        return actions if self._sizing.is_anybody_coming else actions + self._resize(now)

    def progressed(self, request_id: str, num_tokens: int, now: float) -> None:
        """Some of its answer came: so many tokens more, 0 when only bytes were seen."""
        request = self._requests.bound(request_id)
        if request is not None:
            request.has_begun = True
            self.fleet.at(request.replica).heard_at = now
            self._requests.waiting.progressed(request, num_tokens)
            self.fleet.work.progressed(request_id, num_tokens, now)

    def handed_over(self, request_id: str, now: float, is_computed: bool = False) -> list[Action]:
        """Free what the worker that computed the prompt for another held of it, whatever came of the hand-over;
        `is_computed` says that the prompt is, where no token of it was seen.
        """
        if is_computed:
            self.fleet.work.progressed(request_id, 0, now)
        replica = self.fleet.by_name.get(self.fleet.work.prefilled(request_id) or "")
        return ([] if replica is None else self._sizing.emptied(replica)) + self._dispatch(now)

    def ended(self, request_id: str, usage: AnswerUsage | None, now: float) -> list[Action]:
        """The request's answer came to its end, whatever it said; `usage` is None where it is not known."""
        request = self._requests.bound(request_id)
        if request is None:
            return []
        replica = self.fleet.at(request.replica)
        replica.num_failures, replica.heard_at = 0, now
        return self._requests.finish(request, usage, now) + self._dispatch(now)

    def sure_from(self, request_id: str) -> float:
        """Least probability of a token with which the answer of its replica is sent; 0 is any, where the tier says
        none, or no replica of a later tier that may take it is ready.
        """
        request = self._requests.bound(request_id)
        if request is None or request.fell_back:
            return 0.0
        tier = self.fleet.at(request.replica).tier
        below = self.fleet.tiers[tier].escalate_below
        return below if below is not None and self._requests.may_go_past(tier, request) else 0.0

    def model_at(self, name: str, request: FleetRequest) -> str | None:
        """The model to ask the replica for in place of the request's; None is that."""
        replica = self.fleet.by_name.get(name)
        if replica is None or request.model is None or request.model in (replica.facts.models or ()):
            return None
        return self.fleet.tiers[replica.tier].model

    def escalated(self, request_id: str, now: float) -> list[Action]:
        """Its answer has a token that is less probable: hold it for later tiers; the replica did well."""
        request = self._requests.bound(request_id)
        if request is None:
            return []
        replica = self.fleet.at(request.replica)
        replica.num_failures, replica.heard_at = 0, now
        request.first_tier, request.num_spills = replica.tier + 1, 0
        return self._requests.put_back(request, now)

    def aborted(self, request_id: str, now: float) -> list[Action]:
        """The request's client is gone, or it was refused elsewhere; unknown ids are ignored."""
        request = self._requests.get(request_id)
        return [] if request is None else self._requests.end(request) + self._dispatch(now)

    def failed(self, request_id: str, failure: Failure, now: float, at: str | None = None) -> list[Action]:
        """The attempt that is under way failed: where it is bound, or `at` the replica that computed its prompt."""
        request = self._requests.bound(request_id)
        if request is None:
            return []
        replica = self.fleet.at(request.replica) if at is None else self.fleet.by_name.get(at)
        if replica is None:
            return self._requests.put_back(request, now)
        if failure.kind is FailureKind.FULL:
            self._watch.said_full(replica, now + failure.retry_after_s, now)
            return self._requests.put_back(request, now) + self._swap(now)
        if failure.kind is FailureKind.LIMITED:
            return self._requests.pass_by(request, replica, failure, now) + self._swap(now)
        if self._health.failed(replica, failure, now):
            self._watch.expect_probe(replica, now)
        return self._requests.fail([request], replica, failure, now) + self._swap(now)

    def bound_elsewhere(self, url: str, hash_key: int | None, keys: tuple[int, ...], now: float) -> None:
        """Another router sent a request to the replica at `url`, which may be unknown here; `keys` where that tells
        nothing of its cache.
        """
        replica = next((r for r in self.fleet if r.facts.url == url), None)
        if replica is not None:
            self._binder.bound_elsewhere(replica, hash_key, keys)

    # -- replicas

    def joined(self, facts: ReplicaFacts, now: float) -> list[Action]:
        """A replica is there, or tells other facts than before; its state is starting, ready or asleep."""
        is_new = facts.name not in self.fleet.by_name
        if self.swapping is not None:  # it may tell less: of tensors not its own name
            names = (*(facts.models or ()), *self.swapping.names_of(facts.name))
            facts = replace(facts, models=tuple(dict.fromkeys(names)))
        replica = self.fleet.put(facts, now)
        replica.error = facts.error
        self._health.budget.cover(replica.limit)
        if is_new or self._is_news(replica, facts.state):
            self._become(replica, facts.state, now)
        elif replica.state is State.READY and not replica.is_watched:  # it may have begun to tell of itself
            replica.heard_at = now
            self._watch.begin(replica)
        return self._fleet_changed(now)

    def left(self, name: str, now: float, returns: bool = False) -> list[Action]:
        """The replica is gone; its requests go on elsewhere. One that `returns` is started again under its name."""
        replica = self.fleet.by_name.get(name)
        if replica is None:
            return []
        self.fleet.set_state(replica, State.STARTING, now)
        self._lessons.forgot(replica)
        actions = self._requests.abandon(replica, GONE, now)
        if not returns:
            self._sizing.forget(replica)
            self.fleet.remove(replica, now)
            self._requests.unbar(replica.bit)
        return actions + self._fleet_changed(now)

    def load_asked(self, name: str, keep_alive_s: float | None, now: float) -> list[Action]:
        """Load one of several models, and keep it for so long (s) without a request, below 0 for ever; None is its own.
        Raises InvalidRequest for an unknown one.
        """
        if self.swapping is not None:
            self.swapping.asked(name, keep_alive_s, now)
        return self._swap(now)

    def unload_asked(self, name: str, now: float) -> list[Action]:
        """Put one of several models out as soon as it is idle. Raises InvalidRequest for an unknown one."""
        if self.swapping is not None:
            self.swapping.dismissed(name)
        return self._swap(now)

    def load_failed(self, name: str, cause: str, now: float) -> list[Action]:
        """One of several models could not be loaded: requests that wait for it fail with the cause, no others do."""
        replica = self.fleet.by_name.get(name)
        if self.swapping is None or replica is None:
            return []
        actions, error = self._requests.abandon(replica, GONE, now), self.swapping.failed(name, cause, now)
        for request in self.swapping.waits_for(name):
            actions += self._requests.refuse(request, error)
        return actions + self.left(name, now)

    def drained(self, name: str, now: float) -> list[Action]:
        """Send the replica no new requests. Requests without a first token move at once when another replica is
        eligible; the others may finish, and after `replica_drain_s` those that can go on elsewhere do.
        """
        replica = self.fleet.by_name.get(name)
        if replica is None or replica.state is State.DRAINING:
            return []
        return self._drain(replica, now) + self._fleet_changed(now)

    def leaving(self, name: str, within_s: float, now: float) -> list[Action]:
        """The replica drains of itself, and ends what it still has after `within_s`: shortly before that, requests that
        can go on elsewhere do. It may come back under its name.
        """
        replica = self.fleet.by_name.get(name)
        if replica is None or replica.is_leaving:
            return []
        return self._draining.leave(replica, within_s, now) + self._fleet_changed(now)

    def reported(self, name: str, report: Report, now: float) -> list[Action]:
        """A message of its stream of events: it is alive."""
        replica = self.fleet.by_name.get(name)
        if replica is None:
            return []
        if report.is_snapshot or report.is_broken:
            self._lessons.forgot(replica)
        if report.is_broken:
            self.fleet.note_others(replica, replica.num_own)
            return self._dispatch(now)
        self.index.removed(replica.bit, report.removed)
        self.index.stored(replica.bit, report.stored)
        self._requests.waiting.block_cached(report.stored)
        replica.heard_at = now
        if report.num_in_flight is not None:
            self.fleet.note_others(replica, report.num_in_flight)
        if replica.state is State.EJECTED and replica.ejected_for is FailureKind.SILENT:
            return self._is_well(replica, now)
        return self._dispatch(now)

    def probed(self, name: str, is_well: bool, now: float) -> list[Action]:
        """The result of a Probe."""
        replica = self.fleet.by_name.get(name)
        if replica is None:
            return []
        if is_well:
            return self._is_well(replica, now)
        if self._health.eject(replica, FailureKind.SILENT, now):
            self._watch.expect_probe(replica, now)
            return self._requests.abandon(replica, SILENT, now)
        if replica.state is State.EJECTED:
            self._watch.expect_probe(replica, now)
        return []

    def scaled(self, low: int, high: int, now: float) -> list[Action]:
        """Set the bounds on the number of launched replicas."""
        self._sizing.set_bounds(low, high)
        return self._resize(now)

    def restarted(self, names: Sequence[str], now: float) -> list[Action]:
        """Replace these launched replicas one by one, each by a new one that is ready before the old one drains."""
        self._sizing.restart(names)
        return self._resize(now)

    def configured(self, scheduler: SchedulerConfig, now: float) -> list[Action]:
        """Order all held requests by this policy from now on. Raises ConfigError, and changes nothing."""
        both = policy_for(scheduler, self._policies), policy_for(scheduler, self._policies)
        self.policy, self.scheduler = both[0], scheduler
        self._lessons.predictor = self._predictor if self.policy.reads_predictions else None
        self._binder.reorder(both, self._requests.all_bound())
        return self._dispatch(now)

    # -- time

    def tick(self, now: float) -> list[Action]:
        """Whatever has fallen due; call it at `next_tick`, or later."""
        actions = self._watch.tick(now)
        actions += self._draining.tick(now)
        for request_due in self._requests.timers.take_due(now):
            actions += self._requests.fell_due(request_due, now)
        if self._scale_at is not None and self._scale_at <= now:
            actions += self._resize(now)
        return actions + self._dispatch(now)

    def next_tick(self) -> float | None:
        """(s) when something falls due, if nothing else happens; None is never."""
        timers = (self._watch.timers, self._draining.timers, self._requests.timers)
        swap_at = None if self.swapping is None else self.swapping.next_at
        times = (self._scale_at, swap_at, *(each.next_at() for each in timers))
        return min((at for at in times if at is not None), default=None)

    # -- to look at

    def is_idle(self, name: str) -> bool:
        """Whether that replica is there and has no request, or part of one."""
        replica = self.fleet.by_name.get(name)
        return replica is not None and not self._requests.at(replica)

    @property
    def num_held(self) -> int:
        return self._requests.waiting.num_held

    @property
    def num_queued(self) -> int:
        """Held requests without those of the class background."""
        return self._requests.waiting.num_held - self._requests.waiting.num_background

    @property
    def num_requests(self) -> int:
        """Held and in flight."""
        return len(self._requests)

    @property
    def models(self) -> tuple[str, ...]:
        """Names that are served, or were by the last that served any."""
        return self._requests.models

    def foretold_ttft_s(self, num_tokens: int, now: float) -> float | None:
        """Seconds to the first token of such a prompt if it came now, by what chooses its workers; None where nothing
        is foretold, or a request waits for room.
        """
        return self._binder.foretold_ttft_s(num_tokens, now)

    def counter(self, request: FleetRequest, *, is_needed: bool = False) -> str | None:
        """A ready replica that counts the prompt's tokens before the request arrives; None where no tier is too short
        for their estimate, unless counting `is_needed`.
        """
        tiers = self.fleet.tiers[:1] if request.is_local else self.fleet.tiers
        limits = [tier.max_prompt_tokens for tier in tiers if tier.max_prompt_tokens is not None]
        if not is_needed:
            if len(limits) < len(tiers):
                return None
            self._lessons.estimate(request)
            if request.num_inputs <= max(limits):
                return None
        ready = self.fleet.of(self.fleet.usable(Use(request.model, (1 << len(tiers)) - 1, 0, None)))
        return ready[0].name if ready else None

    def request(self, request_id: str) -> FleetRequest | None:
        return self._requests.get(request_id)

    def held(self) -> list[FleetRequest]:
        """The next first; sorts, so it is for people to look at."""
        return self._requests.waiting.in_order()

    def key_of(self, request: FleetRequest) -> tuple[Any, ...]:
        """The policy's order key of one held or in flight; smaller is served first in its group."""
        return self._requests.waiting.key_of(request)

    def view(self, now: float) -> FleetView:
        """GET /admin/fleet."""
        view = view_of(self.fleet, self.index, self._requests.waiting, self._sizing.target, now)
        return view if self.swapping is None else replace(view, models=self.swapping.views(now))

    def figures(self, now: float) -> FleetFigures:
        """Figures for the autoscaler."""
        return self._sizing.figures(self._requests.counts(), now)

    def check_invariants(self) -> None:
        """Asserts that every request is in one place; slow."""
        self._requests.check_invariants()
        self.fleet.check_invariants()
        self.index.check_invariants()

    # -- replicas come and go

    def _become(self, replica: FleetReplica, state: State, now: float) -> None:
        """Take in a replica that is new, or was away; a spare stays out of rotation."""
        replica.heard_at, replica.num_failures, replica.is_full = now, 0, False
        self.fleet.note_others(replica, replica.num_own)
        if state is State.ASLEEP:
            self._sizing.keep(replica)
        is_spare = state is State.READY and self._sizing.is_spare(replica)
        self.fleet.set_state(replica, State.WARM if is_spare else state, now)
        if state is State.STARTING:
            self._watch.expect_back(replica, now)
        if state is State.READY:
            self._sizing.is_there(replica, now)
            self._watch.begin(replica)

    def _is_news(self, replica: FleetReplica, told: State) -> bool:
        """Draining, ejected, asleep and warm are the router's to say; a replica itself only knows if it could serve."""
        if replica.is_leaving:
            return not replica.facts.has_beats  # its last one tells that it has answered all
        if replica.state in (State.DRAINING, State.EJECTED, told):
            return False
        return not self._sizing.is_spare(replica) or (replica.state, told) not in _KEPT

    def _is_well(self, replica: FleetReplica, now: float) -> list[Action]:
        replica.heard_at, replica.num_failures, replica.error = now, 0, None
        if replica.state is State.EJECTED:
            self._requests.lived(replica)
            self._become(replica, State.READY, now)
        return self._fleet_changed(now)

    def _fleet_changed(self, now: float) -> list[Action]:
        """Replicas came or went, or serve other models."""
        refused: list[Action] = []
        if self._facts_version != self.fleet.facts_version:
            self._facts_version = self.fleet.facts_version
            refused = self._requests.look_again()
        return refused + self._dispatch(now) + self._resize(now)

    def _dispatch(self, now: float) -> list[Action]:
        return self._requests.dispatch(now) + self._swap(now)

    def _swap(self, now: float) -> list[Action]:
        """Load and put out models, where there are several."""
        if self.swapping is None:
            return []
        swaps, actions = self.swapping.decide(now), list[Action]()
        self._binder.closed = self.swapping.closed
        for name in swaps.unloads:
            actions += self._drain(self.fleet.by_name[name], now)
        for name in swaps.loads:
            names = self.swapping.names_of(name)
            self.fleet.put(ReplicaFacts(name=name, state=State.STARTING, is_launched=True, models=names), now)
            actions.append(Start(name, "cold"))
        return actions + self._requests.dispatch(now)  # what was closed may not be any more

    def _resize(self, now: float) -> list[Action]:
        if not self._sizing.is_on:
            self._scale_at = None
            return []
        self._sizing.aim(self.figures(now), now)
        starts = self._sizing.starts(now)
        actions: list[Action] = [*starts, *self._sizing.sleeps(now)]
        for name in self._sizing.surplus():
            actions += self._drain(self.fleet.by_name[name], now)
        if self._scale_at is None or self._scale_at <= now:
            self._scale_at = now + EVERY_S
        return actions + self._rotate_in([start.name for start in starts if start.origin == "warm"], now)

    def _drain(self, replica: FleetReplica, now: float) -> list[Action]:
        return self._draining.begin(replica, self.config.replica_drain_s, now)

    def _rotate_in(self, names: list[str], now: float) -> list[Action]:
        for name in names:
            self._become(self.fleet.by_name[name], State.READY, now)
        return self._requests.dispatch(now) if names else []


class Draining:
    """Drains replicas: requests without a token move at once, the rest finish or are handed over. Methods that return
    actions have done their part, as in `Requests`.
    """

    def __init__(self, fleet: Replicas, sizing: Sizing, requests: Requests, health: Health) -> None:
        self._fleet, self._sizing, self._requests, self._health = fleet, sizing, requests, health
        self.timers: Timers[FleetReplica] = Timers(lambda replica: fleet.by_name.get(replica.name) is replica)

    def begin(self, replica: FleetReplica, within_s: float, now: float) -> list[Action]:
        """Drain the replica: it has `within_s` to finish what it has."""
        self._sizing.forget(replica)
        self._fleet.set_state(replica, State.DRAINING, now)
        self._end_at(replica, now + within_s)
        without_token = [r for r in replica.in_flight.values() if not r.has_begun]
        return [*self._sizing.emptied(replica), *self._requests.move_on(replica, without_token, now)]

    def leave(self, replica: FleetReplica, within_s: float, now: float) -> list[Action]:
        """The replica drains by itself, whether asked by the router or not, and cuts what it has after `within_s`."""
        hand_over_s = max(within_s / 2, within_s - HAND_OVER_S)
        actions: list[Action] = []
        if replica.state is not State.DRAINING:
            actions = self.begin(replica, hand_over_s, now)
        elif now + hand_over_s < replica.drain_ends_at:
            self._end_at(replica, now + hand_over_s)
        replica.is_leaving = True
        return actions

    def tick(self, now: float) -> list[Action]:
        """Hand over what is left where the time is over."""
        return [action for replica in self.timers.take_due(now) for action in self._hand_over(replica, now)]

    def _end_at(self, replica: FleetReplica, at: float) -> None:
        replica.drain_ends_at = at
        self.timers.add(at, replica)

    def _hand_over(self, replica: FleetReplica, now: float) -> list[Action]:
        if replica.state is not State.DRAINING or now < replica.drain_ends_at:  # it came back, and drains again
            return []
        return self._requests.move_on(replica, self._requests.movable(replica), now)


class Watch:
    """Watches replicas of a fleet: which have fallen silent, said that they are full, or are to be probed again."""

    def __init__(self, config: FleetConfig, fleet: Replicas, health: Health, requests: Requests) -> None:
        self._config, self._fleet, self._health, self._requests = config, fleet, health, requests
        self.timers: Timers[ReplicaDue] = Timers(self._is_living)

    def tick(self, now: float) -> list[Action]:
        """Whatever has fallen due."""
        return [action for due in self.timers.take_due(now) for action in self._fell_due(due, now)]

    def begin(self, replica: FleetReplica) -> None:
        """Watch a ready replica that reports from time to time, so that its silence is noticed."""
        if replica.facts.has_beats and not replica.is_watched:
            replica.is_watched = True
            self.timers.add(replica.heard_at + self._config.silence_s, ReplicaDue(Due.SILENCE, replica))

    def said_full(self, replica: FleetReplica, until: float, now: float) -> None:
        """The replica answered 'full'; route nothing to it until `until`."""
        if not replica.is_full:
            replica.unready_since = now
        replica.full_until = max(until, replica.full_until)
        self.timers.add(replica.full_until, ReplicaDue(Due.FULL, replica))
        replica.is_full = True

    def expect_probe(self, replica: FleetReplica, now: float) -> None:
        """Probe an ejected replica later. Prompts it computes for others may still come to an end, so they stay."""
        self.timers.add(now + self._health.next_probe_s(replica), ReplicaDue(Due.PROBE, replica))

    def expect_back(self, replica: FleetReplica, now: float) -> None:
        """A replica said that it serves nothing now; where that lasts, its requests go on elsewhere."""
        self.timers.add(now + self._config.silence_s, ReplicaDue(Due.BACK, replica))

    def _is_living(self, due: ReplicaDue) -> bool:
        return self._fleet.by_name.get(due.replica.name) is due.replica

    def _fell_due(self, due: ReplicaDue, now: float) -> list[Action]:
        what, replica = due
        if what is Due.SILENCE:
            return self._silence_due(replica, now)
        if what is Due.PROBE:
            return [Probe(replica.name)] if replica.state is State.EJECTED else []
        if what is Due.BACK:
            return self._back_due(replica, now)
        replica.is_full = now < replica.full_until
        self._fleet.note_room(replica)
        return []

    def _back_due(self, replica: FleetReplica, now: float) -> list[Action]:
        """Looked at again while it has some that cannot go elsewhere yet."""
        is_due = now >= replica.unready_since + self._config.silence_s
        if replica.state is not State.STARTING or not is_due or not self._requests.at(replica):
            return []
        self.expect_back(replica, now)
        return self._requests.flee(replica, now)

    def _silence_due(self, replica: FleetReplica, now: float) -> list[Action]:
        """A beat may have come since; if all fell silent at once, it may be us: then a probe tells. One that is out for
        another reason, and was left what it does for others, is not left it any longer.
        """
        replica.is_watched = False
        if replica.state not in (State.READY, State.EJECTED) or not replica.facts.has_beats:
            return []
        if now < replica.heard_at + self._config.silence_s:
            self.begin(replica)
            return []
        if replica.state is State.EJECTED:
            return self._requests.abandon(replica, SILENT, now)
        if self._health.may_eject() and self._health.eject(replica, FailureKind.SILENT, now):
            self.expect_probe(replica, now)
            return self._requests.abandon(replica, SILENT, now)
        self.timers.add(now + self._config.silence_s, ReplicaDue(Due.SILENCE, replica))
        replica.is_watched = True
        return [Probe(replica.name)]
