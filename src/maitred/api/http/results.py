"""The result cache in front of an engine or a fleet: looked up, replayed, and filled while answers leave."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Message

from maitred.api.http.exchange import TOLD_OF_BODIES, Exchange, Header
from maitred.core.clock import Clock
from maitred.storage import result_cache

if TYPE_CHECKING:
    from maitred.storage.redis import RedisStore

HEADER = b"x-maitred-cache"
CACHE_CONTROL = b"cache-control"
KEPT_HEADERS = (b"content-type",)
EVENTS = b"text/event-stream"
ERROR_EVENTS = (b'data: {"error"', b"event: error\n", b'\n{"error"')


@dataclass(slots=True)
class WantedAnswer:
    """An answer that may be replayed, or kept for later."""

    key: bytes
    control: result_cache.CacheControl
    revision: str  # what besides the body makes the answer
    similar: Any = None  # of `similar`, where it may have the answer of a similar request


class Results:
    """The result cache of one server or router. With `max_bytes` 0 and no store it does nothing."""

    def __init__(
        self,
        max_bytes: int,
        ttl_s: float,
        clock: Clock,
        *,
        shared: RedisStore | None = None,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self.cache = result_cache.ResultCache(max_bytes, ttl_s)
        self.is_on = max_bytes > 0
        self.num_hits = self.num_misses = self.num_corrupt = 0
        self.num_similar = 0  # of the hits
        self.similar: Any = None  # of `similar`, where similar prompts may have one answer
        self.on_wanted: Callable[[Exchange, bytes, WantedAnswer], None] | None = None  # likewise
        self._shared, self._clock, self._wall_time = shared, clock, wall_time

    def wanted(
        self, exchange: Exchange, body: bytes, *, revision: str, temperature: float | None, seed: int | None
    ) -> WantedAnswer | None:
        """The answer's key; None for what is never cached. `revision` says what besides the body makes the answer."""
        if not self.is_on or not result_cache.is_exact(temperature, seed):
            return None
        path, tenant = exchange.scope["path"], exchange.caller.tenant.name
        key = result_cache.result_key(body, path=path, tenant=tenant, revision=revision)
        wanted = WantedAnswer(key, result_cache.cache_control(exchange.headers.get(CACHE_CONTROL)), revision)
        if self.on_wanted is not None:
            self.on_wanted(exchange, body, wanted)
        return wanted

    async def replay(self, exchange: Exchange, wanted: WantedAnswer | None) -> bool:
        """Answer from the cache, if it is there; else note what is answered, until `keep`. Tells the client which."""
        if wanted is None:
            return False
        answer, how = await self._find(wanted), b"hit"
        if answer is None and wanted.similar is not None and wanted.control.max_age_s != 0:
            found = await wanted.similar.find()
            if found is not None and result_cache.is_fresh(found[0], wanted.control, self._clock.now()):
                self.num_similar += 1
                answer, how = found[0], b"similar; cosine=" + found[1].encode()
        if answer is None:
            self.num_misses += 1
            Recording(exchange, self.cache.max_answer_bytes)
            exchange.log["cache"] = "miss"
            return False
        self.num_hits += 1
        exchange.log["cache"] = how.partition(b";")[0].decode()
        age = max(0, int(self._clock.now() - answer.stored_at))
        headers: tuple[Header, ...] = (
            (b"content-type", answer.content_type),
            (b"age", str(age).encode()),
            (HEADER, how),
            *(header for header in answer.told if header not in exchange.told),
        )
        if answer.content_type.startswith(EVENTS):
            exchange.streaming = True
            headers += tuple(header for header in exchange.format.stream.headers if header[0] not in KEPT_HEADERS)
        await exchange.answer(answer.body, 200, headers)
        return True

    def keep(self, exchange: Exchange, wanted: WantedAnswer | None) -> None:
        """Keep the answer sent; call it once the last byte of a complete and right answer was sent."""
        recording = exchange.recording
        if wanted is None or wanted.control.no_store or not isinstance(recording, Recording):
            return
        now = self._clock.now()
        answer = recording.answer(now)
        if answer is None:
            return
        self.cache.keep(wanted.key, answer)
        if self._shared is not None:
            value = result_cache.packed(wanted.key, answer, self._wall_time(), now)
            self._shared.put(wanted.key, value, self.cache.ttl_s)
        if wanted.similar is not None:
            wanted.similar.kept(answer)

    async def _find(self, wanted: WantedAnswer) -> result_cache.CachedAnswer | None:
        key, now = wanted.key, self._clock.now()
        if wanted.control.max_age_s == 0:
            return None
        answer = self.cache.find(key, now)
        if answer is None and self._shared is not None:
            answer = await self._find_shared(self._shared, key)
        return answer if answer is not None and result_cache.is_fresh(answer, wanted.control, now) else None

    async def _find_shared(self, shared: RedisStore, key: bytes) -> result_cache.CachedAnswer | None:
        value = await shared.get(key)
        if value is None:
            return None
        now = self._clock.now()
        answer = result_cache.unpacked(key, value, self._wall_time(), now)
        if answer is None:
            self.num_corrupt += 1
            shared.drop(key)
            return None
        if now - answer.stored_at >= self.cache.ttl_s:
            return None
        self.cache.keep(key, answer)
        return answer


class Recording:
    """Keeps what goes through `exchange.raw_send`, while it is no longer than `max_bytes`, and tells of the miss."""

    def __init__(self, exchange: Exchange, max_bytes: int) -> None:
        self._send: Callable[[Message], Awaitable[None]] = exchange.raw_send
        self._room, self._end = max_bytes, exchange.format.stream.end
        self._status: int | None = None
        self._content_type = b""
        self._told: tuple[Header, ...] = ()
        self._pieces: list[bytes] = []
        self._complete = False
        exchange.raw_send, exchange.recording = self._sent, self

    def answer(self, now: float) -> result_cache.CachedAnswer | None:
        """The answer to keep; None for what was no success, is too long, or has no end."""
        if self._status != 200 or not self._complete or self._room < 0:
            return None
        body = b"".join(self._pieces)
        if is_events := self._content_type.startswith(EVENTS):
            body = result_cache.without_comments(body)
        was_cut = is_events and not body.endswith(self._end)
        if was_cut or any(error in body for error in ERROR_EVENTS):  # or it could not go on
            return None
        return result_cache.CachedAnswer(self._content_type, body, now, self._told)

    async def _sent(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers: list[Header] = list(message["headers"])
            self._content_type = next((value for name, value in headers if name == b"content-type"), b"")
            self._told = tuple(header for header in headers if header[0] in TOLD_OF_BODIES)
            message["headers"] = [*headers, (HEADER, b"miss")]
        else:
            self._note(message)
        await self._send(message)

    def _note(self, message: Message) -> None:
        piece = message.get("body", b"")
        self._room -= len(piece)
        if self._room >= 0:
            self._pieces.append(piece)
        else:
            self._pieces.clear()
        self._complete = not message.get("more_body", False)
