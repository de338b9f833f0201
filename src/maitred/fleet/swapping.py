"""Which of several models are loaded: the policy's order says which is next, last use which is put out. Pure.

A model is one launched replica of its name. A request for a model that is not loaded waits in the policy's queue like
any other. Requests of loaded models pass it for a bounded time, so that A A B A C is served as A A A B C and each load
serves as many as wait for it; then the order is kept strictly until its model is there (docs/fleet.md, Several models).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, NamedTuple

from maitred.core.errors import ConfigError, InvalidRequest, MaitredError, Unavailable, did_you_mean
from maitred.engine.memory import format_bytes
from maitred.fleet.binding import Waiting
from maitred.fleet.fleet_request import FleetRequest
from maitred.fleet.replicas import Replicas, State

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # until a model that could not be loaded is tried for another request
MAX_KEEP_ALIVE_S = 100 * 365 * 24 * 3600.0
GAP_SHARE = 0.2  # of the newest gap between two requests of a model, in their mean

Place = tuple[Any, ...]  # of a request in the policy's order; smaller is served first


def bounded(keep_alive_s: float | None) -> float | None:
    """Time (s) as it is kept: None, without an end, for one below 0 and one that no clock and no date have."""
    return keep_alive_s if keep_alive_s is not None and 0 <= keep_alive_s <= MAX_KEEP_ALIVE_S else None


class Residence(str, Enum):
    """Whether a model is in memory."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetModel:
    """One of several models behind one address."""

    name: str
    names: tuple[str, ...] = ()  # what requests may call it besides: aliases, adapters, models of its repository
    aliases: tuple[str, ...] = ()  # those of `names` that stand for the whole model
    words: tuple[str, ...] = ()  # of `maitred serve`, which start it
    memory_bytes: int = 0  # weights and KV, as planned before it was ever loaded
    pinned: bool = False  # loaded at the start, and never put out
    keep_alive_s: float | None = None  # without a request for so long (s) it is put out; None is when memory is needed

    @property
    def all_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.name, *self.names)))


class ModelSet(NamedTuple):
    """Models, and the memory that those loaded share."""

    models: tuple[FleetModel, ...]
    memory_bytes: int

    def check(self) -> None:
        """Raises ConfigError for a name that stands twice, and for a model that could never be loaded."""
        owners: dict[str, str] = {}
        for model in self.models:
            for name in model.all_names:
                if owners.setdefault(name, model.name) != model.name:
                    raise ConfigError(f"models: {model.name} and {owners[name]} both answer to {name!r}; drop one")
        pinned = sum(model.memory_bytes for model in self.models if model.pinned)
        for model in self.models:
            others = pinned - model.memory_bytes * model.pinned
            if model.memory_bytes + others > self.memory_bytes:
                beside = f", and pinned models {format_bytes(others)} beside it" if others else ""
                raise ConfigError(
                    f"model {model.name} needs {format_bytes(model.memory_bytes)} for weights and KV{beside}; models "
                    f"may take {format_bytes(self.memory_bytes)}: raise --models-memory-bytes, or lower its "
                    "kv_cache_memory_bytes or max_model_len"
                )


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model at one moment; names of fields are those of the JSON."""

    name: str
    aliases: tuple[str, ...]
    state: str
    memory_bytes: int  # as the loaded process told, else as planned
    pinned: bool
    in_flight: int
    waiting: int
    expires_in_s: float | None  # until it is put out for want of requests; None is not for that
    error: str | None  # why it could not be loaded the last time


@dataclass(slots=True, eq=False)
class _Book:
    """What is known of one model; written by `Swapping`."""

    model: FleetModel
    memory_bytes: int
    keep_alive_s: float | None
    is_asked: bool = False  # to be loaded, whether a request waits or not
    is_dismissed: bool = False  # to be put out as soon as it is idle
    is_going: bool = False  # its process was told to end
    wanted_at: float | None = None  # since when requests wait for it to be loaded
    since: float = 0.0  # the same, of the model or of any behind it in the order, which waits for its load too
    ready_at: float = 0.0
    used_at: float = 0.0  # when a request last waited or ran
    begun_at: float = 0.0  # when its load began
    load_s: float = 0.0  # what the last one took
    came_at: float | None = None  # when its last request came
    gap_s: float = inf  # mean, from one of its requests to the next
    was_busy: bool = False
    was_ready: bool = False
    failure: str | None = None
    num_failures: int = 0  # in a row
    retry_at: float = 0.0


@dataclass(slots=True)
class Swaps:
    """Models to load now, and to put out; the rest is of the decision while it is made."""

    firsts: Mapping[str, FleetRequest]  # the first of those that wait for each model
    free: int  # bytes
    budget: int  # free bytes and those becoming free, beyond what models before in the order need
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    planned: set[str] = field(default_factory=set)  # to make room, now or when they are idle
    closed: dict[str, Place | None] = field(default_factory=dict)


class Swapping:
    """Several models, their replicas and their waiting requests. `decide` after whatever happens, and at `next_at`."""

    def __init__(self, several: ModelSet, swap_wait_s: float, fleet: Replicas, waiting: Waiting) -> None:
        """Raises ConfigError as `ModelSet.check`."""
        several.check()
        self._several, self._swap_wait_s, self._fleet, self._waiting = several, swap_wait_s, fleet, waiting
        self._books = {m.name: _Book(m, m.memory_bytes, m.keep_alive_s, is_asked=m.pinned) for m in several.models}
        self._owner = {name: m.name for m in several.models for name in m.all_names}
        self.names = self._owner.keys()  # that requests may ask for
        self._closing: Mapping[str, Place | None] = {}
        self.closed: dict[str | None, Place | None] = {}
        """By what requests call a model: only requests before this place are bound there; None is none."""
        self.next_at: float | None = None

    def names_of(self, name: str) -> tuple[str, ...]:
        """Names that a model's replica answers to; none of a replica that is no model's."""
        return self._books[name].model.all_names if name in self._books else ()

    def waits_for(self, name: str) -> list[FleetRequest]:
        """Requests that wait for a model, or for a place in it."""
        return [request for request in self._waiting if self._owner.get(request.model or "") == name]

    def state(self, name: str) -> Residence:
        replica = self._fleet.by_name.get(name)
        if replica is None:
            return Residence.UNLOADED
        if self._books[name].is_going or replica.state is State.DRAINING:
            return Residence.UNLOADING
        return Residence.LOADING if replica.state is State.STARTING else Residence.READY

    def views(self, now: float) -> tuple[ModelView, ...]:
        waiting = Counter(self._owner.get(request.model or "") for request in self._waiting)
        return tuple(self._view(book, waiting[name], now) for name, book in self._books.items())

    def _view(self, book: _Book, num_waiting: int, now: float) -> ModelView:
        model, expires_at = book.model, self._expires_at(book)
        return ModelView(
            name=model.name,
            aliases=model.aliases,
            state=self.state(model.name).value,
            memory_bytes=book.memory_bytes,
            pinned=model.pinned,
            in_flight=len(self._in_flight(model.name)),
            waiting=num_waiting,
            expires_in_s=None if expires_at is None else max(0.0, expires_at - now),
            error=book.failure,
        )

    # -- what is asked, and what becomes of it

    def came(self, request: FleetRequest, now: float) -> MaitredError | None:
        """Note when a request came, and how long it keeps its model. Returns why it is refused: a moment ago the model
        could not be loaded.
        """
        book = self._books.get(self._owner.get(request.model or "", ""))
        if book is None:
            return None
        last_s = inf if book.came_at is None else now - book.came_at
        book.gap_s = last_s if book.gap_s == inf else book.gap_s + GAP_SHARE * (last_s - book.gap_s)
        book.came_at = now
        if request.keep_alive_s is not None:
            book.keep_alive_s = bounded(request.keep_alive_s)
        return self._cannot_load(book, now) if now < book.retry_at else None

    def asked(self, name: str, keep_alive_s: float | None, now: float) -> None:
        """Load a model though no request waits for it; `keep_alive_s` in place of its own, where given, below 0 for
        ever. Raises InvalidRequest for an unknown one.
        """
        book = self._book(name)
        book.is_asked, book.is_dismissed, book.retry_at, book.used_at = True, False, 0.0, now
        if keep_alive_s is not None:
            book.keep_alive_s = bounded(keep_alive_s)

    def dismissed(self, name: str) -> None:
        """Put a model out as soon as it is idle. Raises InvalidRequest for an unknown one, and for a pinned one."""
        book = self._book(name)
        if book.model.pinned:
            raise InvalidRequest(f"the model {book.model.name!r} is pinned, so it stays in memory", param="model")
        book.is_asked, book.is_dismissed = False, self.state(book.model.name) is not Residence.UNLOADED

    def failed(self, name: str, cause: str, now: float) -> MaitredError:
        """A model could not be loaded: the error for requests that waited for it."""
        book = self._books[name]
        book.failure, book.num_failures = cause, book.num_failures + 1
        book.retry_at = now + min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(book.num_failures - 1, 10))
        book.is_asked &= book.model.pinned
        return self._cannot_load(book, now)

    def _cannot_load(self, book: _Book, now: float) -> MaitredError:
        text = f"the model {book.model.name!r} cannot be loaded: {book.failure}"
        return Unavailable(text, retry_after_s=max(FIRST_RETRY_S, book.retry_at - now))

    def _book(self, name: str) -> _Book:
        if name not in self._owner:
            there = ", ".join(sorted(self._books))
            meant = did_you_mean(name, self._owner)
            raise InvalidRequest(f"there is no model {name!r}{meant}; there are: {there}", param="model")
        return self._books[self._owner[name]]

    # -- the decision

    def decide(self, now: float) -> Swaps:
        """Models to load and to put out now; writes `closed` and `next_at`."""
        firsts = self._firsts()
        for name, book in self._books.items():
            self._look(book, self.state(name), name in firsts, now)
        plan = self._plan(firsts)
        wanted, since = self._wanted(firsts, now), now
        for name in reversed(wanted):
            self._books[name].since = since = min(since, self._books[name].wanted_at or 0.0)
        for name in wanted:
            self._make_room(plan, name, now)
        plan.unloads += [n for n in self._books if n not in plan.planned and self._is_over(n, firsts, now)]
        for name in plan.unloads:
            book = self._books[name]
            book.is_going, book.keep_alive_s = True, book.model.keep_alive_s  # one that was asked for ends here
        self._closing = plan.closed
        self.closed = {each: place for name, place in plan.closed.items() for each in self.names_of(name)}
        self.next_at = min((at for at in self._times() if at > now), default=None)
        return plan

    def _firsts(self) -> dict[str, FleetRequest]:
        found: dict[str, FleetRequest] = {}
        for use, order in self._waiting.queues():
            name, request = self._owner.get(use.model or ""), order.head()
            if name is None or request is None:
                continue
            if name not in found or self._waiting.place(request) < self._waiting.place(found[name]):
                found[name] = request
        return found

    def _look(self, book: _Book, state: Residence, waits: bool, now: float) -> None:
        """Take in what has changed for one model."""
        is_ready = state is Residence.READY
        if is_ready and not book.was_ready:
            book.ready_at = book.used_at = now
            book.load_s = now - book.begun_at
            book.failure, book.num_failures = None, 0
            book.is_asked &= book.model.pinned
        if is_ready:
            told = self._fleet.by_name[book.model.name].facts.memory_bytes
            book.memory_bytes = max(told or 0, book.memory_bytes)
        busy = waits or bool(self._in_flight(book.model.name))
        if busy or book.was_busy:
            book.used_at = now
        book.was_ready, book.was_busy = is_ready, busy
        is_wanted = (waits or book.is_asked) and not is_ready
        book.wanted_at = None if not is_wanted else now if book.wanted_at is None else book.wanted_at
        book.is_dismissed &= state is not Residence.UNLOADED
        book.is_going &= state is not Residence.UNLOADED

    def _in_flight(self, name: str) -> Sized:
        replica = self._fleet.by_name.get(name)
        return () if replica is None else replica.in_flight

    def _plan(self, firsts: Mapping[str, FleetRequest]) -> Swaps:
        taken = Counter[Residence]()
        for name, book in self._books.items():
            taken[self.state(name)] += book.memory_bytes
        free = self._several.memory_bytes - taken.total() + taken[Residence.UNLOADED]
        return Swaps(firsts, free, free + taken[Residence.UNLOADING])

    def _wanted(self, firsts: Mapping[str, FleetRequest], now: float) -> list[str]:
        """Models that are not loaded and should be: by the policy's order of their first requests, then those asked."""
        out = [n for n, book in self._books.items() if self.state(n) is Residence.UNLOADED and book.retry_at <= now]
        waited_for = sorted((n for n in out if n in firsts), key=lambda n: self._waiting.place(firsts[n]))
        return waited_for + [name for name in out if name not in firsts and self._books[name].is_asked]

    def _make_room(self, plan: Swaps, name: str, now: float) -> None:
        """Load a model where it fits, and no model before it in the order needs that memory. Else plan which others
        make room: those that are idle at once, others once requests behind its first have passed that long enough.
        """
        needed = self._needed(name)
        if needed <= min(plan.free, plan.budget):
            plan.loads.append(name)
            self._books[name].begun_at = now
            plan.free -= needed
            plan.budget -= needed
            return
        chosen: list[str] = []
        for other in self._put_out_order(plan, name, now):
            if plan.budget >= needed:
                break
            chosen.append(other)
            plan.budget += self._books[other].memory_bytes
        plan.planned.update(chosen)
        plan.budget -= needed
        place = self._waiting.place(plan.firsts[name]) if name in plan.firsts else None
        goes = all(self._may_go(other, name, place, plan, now) for other in chosen)
        plan.unloads += chosen if goes else ()
        plan.closed |= {other: place for other in chosen if goes or self._turn_ends_at(other, name) <= now}

    def _needed(self, name: str) -> int:
        """Bytes to be free for a model; one that told more than could ever be free is loaded alone."""
        pinned = [b.memory_bytes for n, b in self._books.items() if b.model.pinned and n != name]
        return min(self._books[name].memory_bytes, max(0, self._several.memory_bytes - sum(pinned)))

    def _put_out_order(self, plan: Swaps, wanted: str, now: float) -> Iterator[str]:
        """Models that may make room, the first to go first: those that have begun to, then by last use those that no
        request waits for, idle ones before busy ones, then those whose next request is last in the policy's order.
        """
        here = (Residence.READY, Residence.LOADING)
        present = [n for n, b in self._books.items() if self.state(n) in here and not b.model.pinned]

        def last_use(name: str) -> tuple[bool, float, str]:
            is_kept = bool(self._in_flight(name)) or self._lingers_until(name, wanted) > now
            return is_kept, self._books[name].used_at, name

        unawaited = sorted((n for n in present if n not in plan.firsts), key=last_use)
        awaited = sorted(
            (n for n in present if n in plan.firsts), key=lambda n: self._waiting.place(plan.firsts[n]), reverse=True
        )
        order = sorted([*unawaited, *awaited], key=lambda name: name not in self._closing)
        return (name for name in order if name not in plan.planned)

    def _may_go(self, other: str, name: str, place: Place | None, plan: Swaps, now: float) -> bool:
        """Whether a loaded model is idle: nothing is in flight there, and what waits for it is behind in the order and
        has had its turn.
        """
        if self.state(other) is not Residence.READY or self._in_flight(other):
            return False
        for_background = place is not None and place[0]  # which ends no turn
        if for_background or self._turn_ends_at(other, name) > now:
            return other not in plan.firsts and self._lingers_until(other, name) <= now
        return other not in plan.firsts or place is None or self._waiting.place(plan.firsts[other]) > place

    def _lingers_until(self, other: str, name: str) -> float:
        """Until when an idle model is kept for requests that are expected sooner than it could be loaded again: others
        wait for it as long as a load takes and no longer, like skis are rented until they could have been bought
        (Karlin et al. 1988).
        """
        book = self._books[other]
        if book.gap_s >= book.load_s:
            return book.used_at
        return min(book.used_at, self._turn_ends_at(other, name) - self._swap_wait_s) + book.load_s

    def _turn_ends_at(self, other: str, name: str) -> float:
        """Until when requests of a loaded model may pass those that wait for another which needs its memory."""
        return max(self._books[other].ready_at, self._books[name].since) + self._swap_wait_s

    # -- for want of requests

    def _expires_at(self, book: _Book) -> float | None:
        if book.model.pinned or book.keep_alive_s is None or self.state(book.model.name) is not Residence.READY:
            return None
        return None if book.was_busy else book.used_at + book.keep_alive_s

    def _is_over(self, name: str, firsts: Mapping[str, FleetRequest], now: float) -> bool:
        """Whether an idle model is to be put out though its memory is not needed."""
        book, is_ready = self._books[name], self.state(name) is Residence.READY
        expires_at = self._expires_at(book)
        is_due = book.is_dismissed or (expires_at is not None and expires_at <= now)
        return is_due and is_ready and not self._in_flight(name) and name not in firsts

    def _times(self) -> Iterator[float]:
        """When something may fall due."""
        for name, book in self._books.items():
            expires_at = self._expires_at(book)
            if expires_at is not None:
                yield expires_at
            if book.is_asked:
                yield book.retry_at
            if book.wanted_at is not None and self.state(name) is Residence.UNLOADED:
                for other in self._books:
                    yield self._turn_ends_at(other, name)
                    yield self._lingers_until(other, name)
