"""The requests of a fleet, from their arrival to their end: held, in flight, tried again, refused. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from maitred.core import errors
from maitred.fleet.actions import Action, Move, Refuse
from maitred.fleet.binding import Binder, use_of
from maitred.fleet.config import FleetConfig
from maitred.fleet.fleet_request import AnswerUsage, Failure, FailureKind, FleetRequest, Place
from maitred.fleet.prefix_index import Lessons
from maitred.fleet.replicas import FleetReplica, Health, Replicas
from maitred.fleet.sizing import Counts, Sizing
from maitred.fleet.swapping import Swapping

T = TypeVar("T")
MIN_DEAD_ENTRIES = 64  # below this a heap with dead entries in it is not worth compacting


class _Entry(NamedTuple, Generic[T]):
    at: float
    sequence: int  # unique, so that what is due is never compared
    due: T


class Timers(Generic[T]):
    """`is_living` tells whether an entry still means something; it must, while `at` is not over, be cheap."""

    def __init__(self, is_living: Callable[[T], bool]) -> None:
        self._is_living = is_living
        self._heap: list[_Entry[T]] = []
        self._sequence = 0
        self._compact_over = MIN_DEAD_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, due: T) -> None:
        self._sequence += 1
        heappush(self._heap, _Entry(at, self._sequence, due))
        if len(self._heap) > self._compact_over:
            self._compact()

    def next_at(self) -> float | None:
        """When the next living entry falls due."""
        heap = self._heap
        while heap and not self._is_living(heap[0].due):
            heappop(heap)
        return heap[0].at if heap else None

    def take_due(self, now: float) -> Iterator[T]:
        """Yield what is due, the earliest first; more may be added meanwhile."""
        while (at := self.next_at()) is not None and at <= now:
            yield heappop(self._heap).due

    def _compact(self) -> None:
        """Costs as much as was added since the last time, or less."""
        self._heap = [entry for entry in self._heap if self._is_living(entry.due)]
        heapify(self._heap)
        self._compact_over = 2 * len(self._heap) + MIN_DEAD_ENTRIES


class DueKind(Enum):
    """An event of a request that may fall due."""

    START = "start"  # its start_by
    FINISH = "finish"  # its finish_by
    HOLD = "hold"  # the hold timeout
    SPILL = "spill"  # it has waited past its tier


class RequestDue(NamedTuple):
    """An event of one request, due."""

    what: DueKind
    request: FleetRequest


class Requests:
    """All requests. Methods that return actions have updated the state; the core's driver carries the actions out."""

    def __init__(
        self,
        config: FleetConfig,
        fleet: Replicas,
        binder: Binder,
        lessons: Lessons,
        health: Health,
        sizing: Sizing,
        swapping: Swapping | None = None,
    ) -> None:
        self._config, self._fleet, self._binder = config, fleet, binder
        self._lessons, self._health, self._sizing, self._swapping = lessons, health, sizing, swapping
        self._living: dict[str, FleetRequest] = {}
        self.waiting = binder.waiting
        self.timers: Timers[RequestDue] = Timers(lambda due: due.request.place is not Place.GONE)
        self.models = self._all_models()  # that are served, or were by the last that served any, or may be
        self.num_arrived = self.num_ended = 0
        self.served_s = 0.0  # of those that ended, from their slot to their end

    def counts(self) -> Counts:
        num_held, num_background = self.waiting.num_held, self.waiting.num_background
        num_bound = len(self) - num_held
        if num_background:  # held for what others leave: it asks for a replica only where none serves
            num_held += int(not num_bound) - num_background
        return Counts(num_held, num_bound, self.num_arrived, self.num_ended, self.served_s)

    def __len__(self) -> int:
        return len(self._living)

    def __iter__(self) -> Iterator[FleetRequest]:
        return iter(self._living.values())

    def get(self, request_id: str) -> FleetRequest | None:
        return self._living.get(request_id)

    def bound(self, request_id: str) -> FleetRequest | None:
        """None too while it is held."""
        request = self._living.get(request_id)
        return request if request is not None and request.place is Place.BOUND else None

    def all_bound(self) -> list[FleetRequest]:
        return [request for request in self if request.place is Place.BOUND]

    # -- they come

    def arrive(self, request: FleetRequest, now: float) -> list[Action]:
        self._health.budget.arrived()
        self.num_arrived += 1
        self._lessons.estimate(request)
        fit = fitting_tiers(request, self._fleet)
        error = why_never(request, self._fleet, self.models, fit)
        if error is None and self._swapping is not None:
            error = self._swapping.came(request, now)
        if error is not None:
            return [Refuse(request.request_id, error)]
        self._living[request.request_id] = request
        if request.finish_by is not None:
            self.timers.add(request.finish_by, RequestDue(DueKind.FINISH, request))
        spill_after_s = allow_tiers(request, self._fleet, fit)
        bind = self._binder.bind_at_once(request, now)
        return [bind] if bind is not None else self._hold([(request, spill_after_s)], now)

    def hold(self, requests: Sequence[FleetRequest], now: float) -> list[Action]:
        """Hold requests until each can be bound, which may be at once."""
        for request in requests:
            if request.first_tier and not self.may_go_past(request.first_tier - 1, request):
                self.falls_back(request)
        return self._hold([(request, self._allow_tiers(request)) for request in requests], now)

    def _hold(self, spills: list[tuple[FleetRequest, float | None]], now: float) -> list[Action]:
        """`spills`: requests, each with the seconds after which it may go to the next tier too."""
        for request, _ in spills:
            self._binder.hold(request, now)
        actions = self.dispatch(now)
        for request, spill_after_s in spills:
            if request.place is Place.HELD:
                self._watch(request, spill_after_s, now)
        return actions

    def dispatch(self, now: float) -> list[Action]:
        """Bind held requests in order, as far as there is room."""
        return self._binder.dispatch(now)

    def _allow_tiers(self, request: FleetRequest) -> float | None:
        return allow_tiers(request, self._fleet, fitting_tiers(request, self._fleet))

    def _watch(self, request: FleetRequest, spill_after_s: float | None, now: float) -> None:
        if request.start_by is not None:
            self.timers.add(request.start_by, RequestDue(DueKind.START, request))
        if spill_after_s is not None:
            self.timers.add(now + spill_after_s, RequestDue(DueKind.SPILL, request))
        self.timers.add(now + self._config.hold_timeout_s, RequestDue(DueKind.HOLD, request))

    def may_go_past(self, tier: int, request: FleetRequest) -> bool:
        """Whether a replica of a later tier is ready for the request, and has not said that it is full."""
        later = sum(1 << number for number in fitting_tiers(request, self._fleet) if number > tier)
        usable = self._fleet.usable(use_of(request)._replace(tiers=later))
        return any(not replica.is_full for replica in self._fleet.of(usable))

    def falls_back(self, request: FleetRequest) -> bool:
        """Give up later tiers for an answer that was not sure enough; False where there was none, or another began."""
        if not request.first_tier or request.has_begun:
            return False
        request.first_tier, request.num_spills, request.fell_back = 0, 0, True
        return True

    # -- they go

    def finish(self, request: FleetRequest, usage: AnswerUsage | None, now: float) -> list[Action]:
        """End a request whose answer came to its end."""
        if usage is not None:
            if usage.num_output_tokens is not None:
                self.waiting.progressed(request, max(0, usage.num_output_tokens - request.num_outputs))
                request.num_outputs = usage.num_output_tokens
            self._lessons.told(request, self._fleet.at(request.replica), usage)
        self.num_ended += 1
        self.served_s += now - (now if request.bound_at is None else request.bound_at)
        return self.end(request)

    def end(self, request: FleetRequest) -> list[Action]:
        actions = self._free(request) if request.place is Place.BOUND else []
        del self._living[request.request_id]
        self.waiting.ended(request)
        request.place = Place.GONE
        return actions

    def refuse(self, request: FleetRequest, error: errors.MaitredError, failure: Failure | None = None) -> list[Action]:
        return [Refuse(request.request_id, error, failure), *self.end(request)]

    def _free(self, request: FleetRequest) -> list[Action]:
        """Take a request out of flight; a drained replica may be empty by that."""
        replica = self._fleet.at(request.replica)
        self._binder.release(request)
        request.place = Place.HELD
        return [*self._sizing.emptied(replica)]

    # -- their replica fails, or is to go

    def fail(self, requests: list[FleetRequest], replica: FleetReplica, failure: Failure, now: float) -> list[Action]:
        """Their attempts failed: each is held again, or refused."""
        actions: list[Action] = []
        again = []
        for request in requests:
            actions += self._free(request)
            request.num_deaths += failure.is_death or request.has_begun
            request.barred |= 1 << replica.bit
            if failure.kind is FailureKind.SILENT and request.silent_at is None:
                request.silent_at = replica.bit
            error = self._health.why_no_more(request, replica) or self._why_no_end(request)
            if error is None or (isinstance(error, errors.Unavailable) and self.falls_back(request)):
                again.append(request)
            else:
                actions += self.refuse(request, error, failure)
        return actions + self.hold(again, now)

    def lived(self, replica: FleetReplica) -> None:
        """A silent replica is heard of again: it counts as no death of its requests, once for each."""
        for request in self._living.values():
            if request.silent_at == replica.bit:
                request.silent_at, request.num_deaths = -1, request.num_deaths - 1

    def at(self, replica: FleetReplica) -> list[FleetRequest]:
        """Requests in flight at the replica, and those whose prompts it computes for others."""
        for_others = map(self._living.__getitem__, self._fleet.work.prompts_at(replica.name))
        return [*replica.in_flight.values(), *for_others]

    def movable(self, replica: FleetReplica) -> list[FleetRequest]:
        """Requests of `at` that another replica can go on with, or begin."""
        return [r for r in self.at(replica) if not r.has_begun or self._health.can_resume(r, replica)]

    def flee(self, replica: FleetReplica, now: float) -> list[Action]:
        """The engine of `replica` hangs: requests that another replica takes go there, the others stay. Each goes once,
        for it may be what engines hang by.
        """
        actions = self.move_on(replica, [r for r in self.movable(replica) if not r.has_fled], now, "hung")
        for action in actions:
            if isinstance(action, Move):
                self._living[action.request_id].has_fled = True
        return actions

    def abandon(self, replica: FleetReplica, failure: Failure, now: float) -> list[Action]:
        """Fail all requests in flight at the replica, and those whose prompts it computed for others."""
        requests = self.at(replica)
        moves: list[Action] = [Move(r.request_id, replica.name, failure.kind.value) for r in requests]
        return moves + self.fail(requests, replica, failure, now)

    def put_back(self, request: FleetRequest, now: float) -> list[Action]:
        """Hold a request again whose replica had no room; no failure is counted."""
        return self._free(request) + self.hold([request], now)

    def pass_by(self, request: FleetRequest, replica: FleetReplica, failure: Failure, now: float) -> list[Action]:
        """The replica refuses this request: another one is asked, where there is one."""
        request.barred |= 1 << replica.bit
        if self._fleet.usable(use_of(request)) & ~request.barred or self.falls_back(request):
            return self.put_back(request, now)
        told = f"request {request.request_id}: every replica that may take it limits its rate; try again later"
        return self.refuse(request, errors.Unavailable(told), failure) + self.dispatch(now)

    def move_on(
        self, replica: FleetReplica, requests: Iterable[FleetRequest], now: float, reason: str = "drain"
    ) -> list[Action]:
        """Move requests that another replica may take; the move is not their fault."""
        actions: list[Action] = []
        moved = []
        for request in requests:
            if request.has_begun and self._config.resume == "exact":
                request.fingerprint = replica.facts.fingerprint
            if self._fleet.usable(use_of(request)):
                actions += [Move(request.request_id, replica.name, reason), *self._free(request)]
                moved.append(request)
        return actions + self.hold(moved, now)

    def _why_no_end(self, request: FleetRequest) -> errors.MaitredError | None:
        """Why a part of an answer stays one; None while a replica that could go on with it is there, or will be."""
        if not request.has_begun or self._sizing.is_on or self._fleet.known(use_of(request)) or self._loads(request):
            return None
        return errors.EngineDead(f"request {request.request_id}: no replica that is left computes the same numbers")

    # -- the fleet changes

    def look_again(self) -> list[Action]:
        """Check held requests again: other models are served, or in other tiers."""
        self.models = self._all_models() or self.models
        actions: list[Action] = []
        for request in list(self.waiting):
            fit = fitting_tiers(request, self._fleet)
            error = why_never(request, self._fleet, self.models, fit) or self._why_no_end(request)
            if error is not None:
                actions += self.refuse(request, error)
            else:
                allow_tiers(request, self._fleet, fit)
                self.waiting.move(request, use_of(request))
        return actions

    def _all_models(self) -> tuple[str, ...]:
        return tuple(sorted({*self._fleet.models, *(self._swapping.names if self._swapping is not None else ())}))

    def _loads(self, request: FleetRequest) -> bool:
        """Whether the request's model is one of several, and so will be loaded for it."""
        return self._swapping is not None and request.model in self._swapping.names

    def unbar(self, bit: int) -> None:
        """Lift the bars on a bit that will be another replica's."""
        for request in self:
            if request.barred >> bit & 1:
                request.barred &= ~(1 << bit)
                self.waiting.move(request, use_of(request))

    # -- what falls due

    def fell_due(self, due: RequestDue, now: float) -> list[Action]:
        what, request = due
        waited_s = now - request.arrived_at
        if what is DueKind.FINISH:
            told = f"request {request.request_id}: not done after {waited_s:.1f} s"
            return self.refuse(request, errors.RequestTimeout(told))
        if request.place is not Place.HELD or (what is DueKind.START and request.has_begun):
            return []
        if what is DueKind.START:
            told = f"request {request.request_id}: no replica had room for it in {waited_s:.1f} s"
            return self.refuse(request, errors.QueueTimeout(told))
        return self._spill(request, now) if what is DueKind.SPILL else self._held_long(request, now)

    def _spill(self, request: FleetRequest, now: float) -> list[Action]:
        request.num_spills += 1
        spill_after_s = self._allow_tiers(request)
        if spill_after_s is not None:
            self.timers.add(now + spill_after_s, RequestDue(DueKind.SPILL, request))
        self.waiting.move(request, use_of(request))
        return []

    def _held_long(self, request: FleetRequest, now: float) -> list[Action]:
        """Refuse a request for which no replica that may take it was there for the hold timeout; one of several models
        has a bound of its own.
        """
        if self._loads(request):
            return []
        since = self._alone_since(request, now)
        due_at = since + self._config.hold_timeout_s
        if due_at > now:
            self.timers.add(due_at, RequestDue(DueKind.HOLD, request))
            return []
        told = f"request {request.request_id}: no replica that may take it was there for {now - since:.1f} s"
        return self.refuse(request, errors.QueueTimeout(told))

    def _alone_since(self, request: FleetRequest, now: float) -> float:
        """When the last replica that could take it went, or said that it is full; now while there is one."""
        use = use_of(request)
        if any(not replica.is_full for replica in self._fleet.of(self._fleet.usable(use))):
            return now
        known = self._fleet.of(self._fleet.known(use))
        return max([request.held_at, self._fleet.last_left_at, *(replica.unready_since for replica in known)])

    def check_invariants(self) -> None:
        """Asserts that each is in one place; slow."""
        bound = self.all_bound()
        self._binder.check_invariants(bound)
        for replica in self._fleet:
            assert replica.in_flight == {r.request_id: r for r in bound if r.replica == replica.bit}
            assert replica.num_own == sum(r.num_samples for r in replica.in_flight.values())


def why_never(
    request: FleetRequest, fleet: Replicas, models: tuple[str, ...], fit: list[int]
) -> errors.MaitredError | None:
    """Why no replica will serve it, however long it waits. `models` are those known, none before a replica has told
    them; `fit` are its `fitting_tiers`.
    """
    if models and request.model is not None and request.model not in models:
        there = ", ".join(models)
        return errors.ModelNotFound(f"no replica serves the model {request.model!r}; there are: {there}", param="model")
    if fit:
        return None
    tiers = fleet.tiers[:1] if request.is_local else fleet.tiers
    limits = ", ".join(f"{tier.max_prompt_tokens} in {tier.name}" for tier in tiers)
    why = ", which x-maitred-privacy: local keeps it in" if request.is_local else ""
    return errors.PromptTooLong(f"the prompt has {request.num_inputs} tokens; at most {limits}{why}", param="messages")


def fitting_tiers(request: FleetRequest, fleet: Replicas) -> list[int]:
    """Numbers of the tiers that take so long a prompt, in order; without those that serve other models, if any serves
    its own. An estimate refuses nothing: a prompt that by it fits no tier goes to the tier of the longest prompts.
    """
    limits = [tier.max_prompt_tokens for tier in (fleet.tiers[:1] if request.is_local else fleet.tiers)]
    fit = [number for number, limit in enumerate(limits) if limit is None or request.num_inputs <= limit]
    fit = [number for number in fit if number >= request.first_tier]
    if not fit and not request.num_counted:
        return [limits.index(max(limit for limit in limits if limit is not None))]
    if request.model is None:
        return fit
    holders = fleet.models.get(request.model, 0)
    return [number for number in fit if holders & fleet.in_tier(number)] or fit


def allow_tiers(request: FleetRequest, fleet: Replicas, fit: list[int]) -> float | None:
    """Writes which of `fit` it may use now. Returns (s) after which it may use the next too, None where none is."""
    allowed = fit[: request.num_spills + 1]
    request.tiers = sum(1 << number for number in allowed)
    return fleet.tiers[allowed[-1]].spill_after_s if len(fit) > len(allowed) else None
