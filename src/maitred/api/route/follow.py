"""Follows replicas: what each is, which models it has, how it does; and starts those of the router's own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from math import log
from typing import Any

import msgspec

from maitred.api.http.errors import shortened, told_names
from maitred.api.http.fleet_headers import FleetToken
from maitred.api.http.logs import log_fields
from maitred.api.route.fleet import Fleet, LiveReplica
from maitred.api.route.messages import message_of, reached_by
from maitred.core.errors import ModelNotFound
from maitred.fleet.prefix_keys import without_latest
from maitred.fleet.replicas import Kind, ReplicaFacts, Report, State
from maitred.fleet.told import Began, Computed, Count, Ended, Fingerprint, FleetEvent, KeysChanged, Load
from maitred.fleet.upstream import Broken, UpstreamAsk, UpstreamFailed, request_head
from maitred.tenancy.caller import Caller

logger = logging.getLogger("maitred.fleet")
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 2.0  # between two looks at one that is not there; doubled with each
POLL_S = 1.0  # between two looks at one that tells nothing by itself
ANSWER_S = 5.0  # what is asked here costs a replica a moment
MAX_TOLD_BYTES = 4 * 1024 * 1024
MAX_EVENT_BYTES = 1024 * 1024
MAX_MODELS = 10_000  # and adapters
NAME = "maitred"  # what `/version` of ours says that it is
PAUSE_S = 1.0  # between two looks at the models of all replicas
LOOK_S = 1.0  # that a request waits for one
BEFORE_NAMES = ("/v1/models/", "/v2/models/")  # of paths
AFTER_NAMES = ("/", ":")
OF_ALL = "/v2/models/stats"
Learn = Callable[[Fleet, LiveReplica], Awaitable[None]]
"""Asks a replica for its models, and tells the fleet."""


class _Version(msgspec.Struct):
    """Fields read of our own servers' version, and of others' as far as they have them."""

    name: str | None = None
    models: tuple[str, ...] | None = None
    tensor_models: tuple[str, ...] = ()
    slots: Count | None = None
    fingerprint: Fingerprint | None = None


class _Models(msgspec.Struct):
    data: list[dict[str, Any]] = msgspec.field(default_factory=list)


_decoder: msgspec.json.Decoder[FleetEvent] = msgspec.json.Decoder(FleetEvent)


class Follower:
    """Follows replicas; `token` is the fleet's, which ours ask for before they tell of themselves."""

    def __init__(self, token: FleetToken) -> None:
        self._headers = token.shown()

    def start(self, fleet: Fleet, live: LiveReplica) -> asyncio.Task[None]:
        return asyncio.create_task(self._follow(fleet, live), name=f"follow {live.facts.name}")

    async def probe(self, fleet: Fleet, live: LiveReplica) -> None:
        """Ask whether the replica can serve again."""
        try:
            told = await self._look(live)
        except UpstreamFailed:
            told = None
        if fleet.replicas.get(live.facts.name) is not live:
            return
        if told is not None:
            fleet.tell(live, told)
        fleet.hear(fleet.core.probed, live.facts.name, told is not None and told.state is State.READY)

    async def learn_models(self, fleet: Fleet, live: LiveReplica) -> None:
        """Ask one that is ready for its models, between the looks of its follower."""
        try:
            told = await self._look(live)
        except UpstreamFailed:
            return
        if fleet.replicas.get(live.facts.name) is live and told.state is live.facts.state is State.READY:
            self._tell(fleet, live, replace(live.facts, models=told.models))

    async def _follow(self, fleet: Fleet, live: LiveReplica) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            try:
                told = await self._look(live)
                self._tell(fleet, live, told)
                if told.state is State.READY:
                    delay_s = FIRST_DELAY_S
                    await self._stay(fleet, live)
            except UpstreamFailed as failed:
                self._tell(fleet, live, replace(live.facts, error=str(failed)))
                if failed.broken in (Broken.REFUSED, Broken.SILENT):
                    fleet.hear(fleet.core.probed, live.facts.name, False)
            except Exception:  # a fault of ours costs one look, not the replica
                logger.exception("following %s failed", live.facts.name)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    def _tell(self, fleet: Fleet, live: LiveReplica, told: ReplicaFacts) -> None:
        if told == live.facts:
            return
        if told.state is not live.facts.state or told.error != live.facts.error:
            fields = {"replica": told.name, "kind": told.kind.value, "state": told.state.value, "error": told.error}
            log_fields(logger, logging.INFO, "replica", fields)
        fleet.tell(live, told)

    # -- what it is

    async def _look(self, live: LiveReplica) -> ReplicaFacts:
        """What the replica says of itself now. Raises UpstreamFailed when it says nothing."""
        facts, told = await self._what_it_is(live)
        why_not = await self._why_not_ready(live, facts)
        if why_not is not None:
            return replace(facts, state=State.STARTING, error=why_not)
        listed = await self._models(live, told.models or ())
        models = (*listed, *(name for name in told.tensor_models[:MAX_MODELS] if name not in listed))
        return replace(facts, state=State.READY, models=models, error=None)

    async def _what_it_is(self, live: LiveReplica) -> tuple[ReplicaFacts, _Version]:
        """Told by what `/version` says, never by its status; with the rest of that."""
        _, body = await self._get(live, "/version")
        told = _decoded(body, _Version)
        if told.name != NAME:
            return replace(live.facts, kind=Kind.FOREIGN, has_beats=False), _Version()
        fingerprint = str(told.fingerprint) if told.fingerprint is not None else None
        facts = replace(live.facts, kind=Kind.MAITRED, slots=told.slots, fingerprint=fingerprint)
        return facts, told

    async def _why_not_ready(self, live: LiveReplica, facts: ReplicaFacts) -> str | None:
        """Why requests are not welcome, or None; a server without such a question is asked for its models."""
        status, body = await self._get(live, "/ready" if facts.kind is Kind.MAITRED else "/health")
        if status in (200, 204, 404, 405, 501):
            return None
        return message_of(body) or f"it answers {status} when asked for its health"

    async def _models(self, live: LiveReplica, named: tuple[str, ...]) -> tuple[str, ...]:
        """Models as the replica lists them; where it lists none without a key, those that it `named`."""
        status, body = await self._get(live, "/v1/models")
        if status != 200 and named:
            live.cards = [{"id": name, "object": "model", "owned_by": NAME} for name in named]
            return named
        if status != 200:
            raise UpstreamFailed(Broken.WRONG, f"{live.origin.url}/v1/models answers {status}: {message_of(body)}")
        cards = [card for card in _decoded(body, _Models).data if isinstance(card.get("id"), str)]
        live.cards = cards[:MAX_MODELS]
        live.adapters = frozenset(card["id"] for card in live.cards if card.get("parent"))
        return tuple(card["id"] for card in live.cards)

    async def _get(self, live: LiveReplica, path: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await live.upstream.send(UpstreamAsk(request_head("GET", path, live.origin, self._headers, 0)))
                return answer.status, await answer.whole(MAX_TOLD_BYTES)
        except TimeoutError:
            text = f"{live.origin.url}{path} gave no answer within {ANSWER_S:g} s"
            raise UpstreamFailed(Broken.SILENT, text) from None

    # -- while it is there

    async def _stay(self, fleet: Fleet, live: LiveReplica) -> None:
        """Returns, or raises UpstreamFailed, when it must be looked at anew."""
        if live.facts.kind is Kind.MAITRED and self._headers and await self._listen(fleet, live):
            return
        while True:
            await asyncio.sleep(POLL_S)
            told = await self._look(live)
            self._tell(fleet, live, told)
            if told.state is not State.READY or told.kind is not live.facts.kind:
                return

    async def _listen(self, fleet: Fleet, live: LiveReplica) -> bool:
        """Take in its events until they end; False when it has none for us."""
        name = live.facts.name
        answer = await live.upstream.send(
            UpstreamAsk(request_head("GET", "/fleet/events", live.origin, self._headers, 0))
        )
        try:
            if answer.status != 200:
                body = await answer.whole(MAX_TOLD_BYTES)
                fields = {"replica": name, "status": answer.status, "error": message_of(body)}
                log_fields(logger, logging.WARNING, "a replica tells nothing of itself; is its token another?", fields)
                return False
            self._tell(fleet, live, replace(live.facts, has_beats=True))
            reader = EventReader()
            while piece := await answer.piece():
                for event in reader.feed(piece):
                    self._take_in(fleet, live, event)
        finally:
            answer.abort()
            if fleet.replicas.get(name) is live:
                fleet.hear(fleet.core.reported, name, Report(is_broken=True))
                fleet.tell(live, replace(live.facts, has_beats=False))
        return True

    def _take_in(self, fleet: Fleet, live: LiveReplica, event: FleetEvent) -> None:
        name = live.facts.name
        match event:
            case Began():
                fleet.hear(fleet.core.reported, name, Report(is_snapshot=True))
            case KeysChanged(stored, removed):
                fleet.hear(fleet.core.reported, name, Report(stored=stored, removed=removed))
            case Ended(request_id, usage):
                fleet.bills.computed(name, request_id, usage)
            case Computed(us_by_tenant):
                fleet.on_computed(us_by_tenant)
            case Load(state=told_state):
                speed = _about(event.prefill_tokens_per_s)
                if told_state == "draining":
                    fleet.hear(fleet.core.leaving, name, event.drain_s or 0.0)
                is_welcome = told_state in ("ready", "asleep")  # a replica that sleeps by itself wakes up for a request
                state = State.READY if is_welcome else State.STARTING
                worker, facts = event.worker, None
                live.kv_addresses = ()
                if worker is not None:
                    facts, live.kv_addresses = worker.facts, reached_by(worker.addresses, live.origin.host)
                told = replace(live.facts, state=state, error=event.error, tokens_per_s=speed, worker=facts)
                self._tell(fleet, live, told)
                fleet.hear(fleet.core.reported, name, Report(num_in_flight=event.num_running + event.num_waiting))


def _about(speed: float) -> float | None:
    """Round to a power of 1.1, so that a figure that wavers changes nothing; None while it is not known."""
    return round(1.1 ** round(log(speed, 1.1)), 1) if speed > 0 else None


def _decoded(body: bytes, kind: type[msgspec.Struct]) -> Any:
    """An empty one where it says something else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return kind()


def union_of_cards(replicas: Sequence[LiveReplica]) -> list[dict[str, Any]]:
    """Cards of all models that are served, each once, as the first replica by name lists it."""
    cards: dict[str, dict[str, Any]] = {}
    for live in sorted(replicas, key=lambda live: live.facts.name):
        for card in live.cards:
            cards.setdefault(card["id"], card)
    return list(cards.values())


class EventReader:
    """Events out of what a replica tells on `GET /fleet/events`, in pieces as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[FleetEvent]:
        """The events that are whole now. Raises UpstreamFailed for what is none."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise UpstreamFailed(Broken.WRONG, f"an event of a replica has over {MAX_EVENT_BYTES} bytes")
        for event in events:
            if event.startswith(b"data: {"):  # not a comment, nor the end
                yield _event(event[6:])


def _event(told: bytes) -> FleetEvent:
    try:
        return _decoder.decode(told)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UpstreamFailed(Broken.WRONG, f"an event of a replica cannot be read: {error}") from None


class ModelNames:
    """Names that the replicas answer to: which a caller may use, and a new look where a request brings another one.

    Models come and go with replicas, which are followed; a replica tells of adapters only when it is asked. Belongs to
    the event loop.
    """

    def __init__(self, fleet: Fleet, learn: Learn) -> None:
        self._fleet, self._learn = fleet, learn
        self._created, self._looked_at = int(time.time()), -PAUSE_S
        self._next: asyncio.Task[None] | None = None  # a look that has not begun

    def cards(self, caller: Caller) -> list[dict[str, Any]]:
        """Cards of what any replica serves, but for adapters that are not the caller's."""
        cards = union_of_cards(list(self._fleet.replicas.values()))
        if self._fleet.core.swapping is not None:
            cards = self._of_several(cards)
        return [card for card in cards if not card.get("parent") or caller.tenant.may_use(card["id"])]

    def untagged(self, name: str | None) -> str | None:
        """`name` as it is served: clients of Ollama write `:latest` behind names without a tag, or leave it out."""
        models = self._fleet.core.models
        if name is None or name in models:
            return name
        bare = without_latest(name)
        return next((each for each in (bare, f"{name}:latest") if each in models), bare)

    def _of_several(self, cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Cards of all models and their aliases, loaded or not, with their states; then those of adapters."""
        known, now = {card["id"]: card for card in cards}, self._fleet.clock.now()
        found = []
        for view in self._fleet.core.view(now).models:
            expires_at = None if view.expires_in_s is None else round(time.time() + view.expires_in_s, 1)
            told = {"state": view.state, "memory_bytes": view.memory_bytes, "expires_at": expires_at}
            for name in (view.name, *view.aliases):
                plain = {"id": name, "object": "model", "created": self._created, "owned_by": NAME, "root": view.name}
                which = {"aliases": view.aliases} if name == view.name else {"alias_of": view.name}
                found.append(known.pop(name, plain) | told | which)
        return [*found, *known.values()]

    async def check(self, name: str | None, caller: Caller) -> None:
        """Raises ModelNotFound, for others' adapters as for what is not there. Before any replica has told its models,
        all names pass.
        """
        core = self._fleet.core
        if name is None or not core.models:
            return
        if name not in core.models:
            await self._look()
        if name not in core.models or not (caller.tenant.may_use(name) or not self._is_adapter(name)):
            raise self.not_found(name, caller)

    async def named_in(self, path: str) -> str | None:
        """The model that a path asks for, if a replica serves it: /v2/models/NAME/infer, /v1/models/NAME:predict."""
        if not path.startswith(BEFORE_NAMES) or path == OF_ALL:
            return None
        if not any(name in self._fleet.core.models for name in _names_in(path)):
            await self._look()
        return next((name for name in _names_in(path) if name in self._fleet.core.models), None)

    def not_found(self, name: str, caller: Caller) -> ModelNotFound:
        there = told_names([str(card["id"]) for card in self.cards(caller)]) or "none yet"
        return ModelNotFound(f"no replica serves the model {shortened(repr(name))}; there are: {there}", param="model")

    def _is_adapter(self, name: str) -> bool:
        return any(name in live.adapters for live in self._fleet.replicas.values())

    async def _look(self) -> None:
        """Returns when all replicas were asked after this call, or when that takes too long. Of several models only
        adapters come later than the file that names them: a look of the last second has to do.
        """
        if self._fleet.core.swapping is not None and asyncio.get_running_loop().time() < self._looked_at + PAUSE_S:
            return
        if self._next is None:
            self._next = asyncio.create_task(self._look_in_turn(), name="look for models")
        await asyncio.wait({self._next}, timeout=PAUSE_S + LOOK_S)

    async def _look_in_turn(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._looked_at + PAUSE_S - loop.time())
        self._next, self._looked_at = None, loop.time()  # requests from now on need another look
        await asyncio.gather(*(self._learn(self._fleet, live) for live in self._fleet.replicas.values()))


def _names_in(path: str) -> Iterator[str]:
    """The longest first: names of language models may have slashes."""
    _, _, name = path.partition("/models/")
    while name:
        yield name
        name = name[: max(map(name.rfind, AFTER_NAMES))] if any(mark in name for mark in AFTER_NAMES) else ""
