"""One HTTP request and its answer on plain ASGI: bounded body, JSON to a struct, unknown fields, JSON or events out."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Message, Receive, Scope, Send

from maitred.api.generate.outcome import Outcome
from maitred.api.http.bodies import SMALL_BYTES, BodyDecoder, LargeBodies, Sent, decode_small
from maitred.api.http.errors import ClientGone, HttpError, RequestTooSlow, UnsupportedMediaType, shortened
from maitred.api.http.logs import ERRORS, log_fields
from maitred.api.http.routes import DialectFormat, Route
from maitred.core.errors import InvalidRequest, RequestTooLarge, did_you_mean
from maitred.core.objectives import Pace
from maitred.tenancy.caller import Caller

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
Header = tuple[bytes, bytes]
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")  # what a client may call its request
CONNECTION = "maitred.connection"  # in the scope: the GuardedConnection that the request came on
ON_BEHALF = "maitred.on_behalf"  # in the scope of a request of our own: gives its Caller, or raises
TOO_SLOW = "maitred.too_slow"  # in the scope: the connection gave up on the body
JSON_HEADERS = ((b"content-type", b"application/json"),)


@dataclass(slots=True, eq=False)
class Exchange:
    """A request being answered. `send` notes how far the answer is, so that errors know what is still possible."""

    scope: Scope
    receive: Receive
    raw_send: Send
    request_id: str
    max_body_bytes: int
    large_bodies: LargeBodies
    headers: dict[bytes, bytes]  # of the request, names in lower case, the first of equals
    format: DialectFormat  # of the path that was asked for
    caller: Caller = field(init=False)  # set before any route is asked
    from_router: bool = False  # it shows the fleet's token
    route: Route | None = None  # once it is found
    parameter: str = ""  # of its path
    log: dict[str, Any] = field(default_factory=dict)  # what the access line says besides
    outcome: Outcome | None = None  # what the answer is made of, on the routes that generate
    recording: object = None  # of what is answered, for the result cache
    paces: Sequence[Pace] = ()  # when the tokens of its answer came, on those routes, by sample
    trace_header: Header | None = None  # of a request that is traced
    span: Any = None  # of OpenTelemetry, likewise
    status: int | None = None  # set once the answer began
    streaming: bool = False  # the answer that began is an event stream
    complete: bool = False
    is_handed_over: bool = False  # another worker computed the prompt than the answer
    goes_on_elsewhere: bool = False  # a router can have another replica go on where this answer stops
    num_body_bytes: int = 0  # of the request, as far as they were read
    told: tuple[Header, ...] = ()  # headers of its answer, whatever that is
    field_names: Callable[[], Mapping[str, str]] = dict  # fields as our errors name them -> as the client wrote them
    standing_headers: Callable[[], Iterable[Header]] = tuple  # of every answer, asked when it begins

    @property
    def started(self) -> bool:
        return self.status is not None

    @property
    def route_name(self) -> str:
        """The route's name for metrics and traces; unknown paths share one name."""
        return self.route.template if self.route is not None else "other"

    @property
    def query(self) -> dict[str, str]:
        """Fields of the query that have a value, the last one of each name."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1")))

    def query_number(self, name: str, least: int, most: int, default: int) -> int:
        """Field of the query that is a whole number. Raises InvalidRequest for one that is none, or out of bounds."""
        sent = self.query.get(name, str(default))
        value = int(sent) if re.fullmatch(r"-?[0-9]{1,17}", sent) else least - 1
        if not least <= value <= most:
            told = f"{name} is {shortened(repr(sent), 40)}; it must be from {least} to {most}"
            raise InvalidRequest(told, param=name)
        return value

    def tell(self, header: bytes, names: Collection[str]) -> None:
        """Name them, if there are any, in a header of the answer, whatever that is."""
        if names:
            self.told += ((header, names_told(names)),)

    def page(self, items: Sequence[dict[str, Any]], after: str, *, most: int) -> dict[str, Any]:
        """The part of `items` with ids that the query's `limit` (at most `most`, 20 unless told) and `after`, its field
        with the id of the one before, ask for. Raises InvalidRequest.
        """
        limit, last, ids = (
            self.query_number("limit", 1, most, 20),
            self.query.get(after),
            [item["id"] for item in items],
        )
        if last is not None and last not in ids:
            raise InvalidRequest(f"{after} is {shortened(repr(last), 80)}, which is none here", param=after)
        start = 0 if last is None else ids.index(last) + 1
        told = ids[start : start + limit] or [None]
        page = {"data": items[start : start + limit], "first_id": told[0], "last_id": told[-1]}
        return {**page, "has_more": len(ids) > start + limit}

    async def send(self, message: Message) -> None:
        """Send an ASGI message; every answer carries its request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            request_id = self.request_id.encode()
            own = (*((name, request_id) for name in self.format.id_headers), *self.told, *self.standing_headers())
            message["headers"] = [*message.get("headers", ()), *own]
        elif not message.get("more_body", False):
            self.complete = True
        await self.raw_send(message)

    async def body(self) -> bytes:
        """The whole body; raises RequestTooLarge as soon as its length says so, declared or counted."""
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self.max_body_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        more = True
        while more and not self.is_large:
            more = await self._read_into(chunks)
        if self.is_large:
            try:
                async with self.large_bodies.coming(self):
                    self.large_bodies.hold(self, self.num_body_bytes)
                    while more:
                        more = await self._read_into(chunks)
                        self.large_bodies.hold(self, self.num_body_bytes)
            except BaseException:
                chunks.clear()  # an error keeps its frames until they are collected
                raise
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @property
    def is_large(self) -> bool:
        return self.num_body_bytes > SMALL_BYTES

    async def _read_into(self, chunks: list[bytes]) -> bool:
        """The next piece of the body; whether there is more."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            if TOO_SLOW in self.scope:
                raise RequestTooSlow("the body did not come in time")  # the client has been told
            raise ClientGone
        chunk = message.get("body", b"")
        self.num_body_bytes += len(chunk)
        if self.num_body_bytes > self.max_body_bytes:
            raise self._too_large()
        chunks.append(chunk)
        return bool(message.get("more_body", False))

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Around decoding what the body has: a large one waits for those before it."""
        return self.large_bodies.turn() if self.is_large else nullcontext()

    def _too_large(self) -> RequestTooLarge:
        limit = self.max_body_bytes
        return RequestTooLarge(
            f"the request body is over the limit of {limit} bytes; the server's --max-body-bytes sets it"
        )

    async def json_body(self) -> bytes:
        """The whole body, which the request says is JSON; raises UnsupportedMediaType for another."""
        media_type = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != b"application/json":
            raise UnsupportedMediaType("send the body as JSON, with the header Content-Type: application/json")
        return await self.body()

    async def json(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Decode a short body; raises InvalidRequest whose `param` is the path of the wrong field."""
        return decode_small(await self.json_body(), decoder)

    async def sent(self, decoder: BodyDecoder[S]) -> Sent[S]:
        """The body as a struct, and what else is in it; raises InvalidRequest as `json` does."""
        body = await self.json_body()
        async with self.turn():
            return decoder.decode(body)

    async def answer_json(self, value: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        await self.answer(msgspec.json.encode(value), status, (*JSON_HEADERS, *headers))

    async def answer(self, body: bytes, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self.send({"type": "http.response.body", "body": body})

    async def answer_error(self, error: HttpError) -> None:
        status = self.format.statuses.get(error.code, error.status)
        await self.answer(self.format.error_body(error), status, (*JSON_HEADERS, *error.headers))


IGNORED_FIELDS = b"x-maitred-ignored-fields"
SCHEMA_IGNORED = b"x-maitred-schema-ignored"
ARGUMENTS_EMPTIED = b"x-maitred-arguments-emptied"  # of earlier calls: they were no JSON object
IGNORED_TOOLS = b"x-maitred-ignored-tools"  # types of tools that run elsewhere, or are unknown
LEFT_OUT = b"x-maitred-left-out"  # of the prompt: what means nothing to the model, and changes from turn to turn
VERSION = b"x-maitred-version"  # of the model that answers, on its shelf
# headers that follow from a body and the model: routers and caches pass them on
TOLD_OF_BODIES = frozenset((IGNORED_FIELDS, SCHEMA_IGNORED, ARGUMENTS_EMPTIED, IGNORED_TOOLS, LEFT_OUT, VERSION))
MAX_TOLD = 10  # names in a header
MAX_LOGGED = 256  # names in the log of one server: looking for a near miss takes 0.2 ms
NEAR = 0.75  # difflib's ratio of a slip of the pen: temprature is one, top_n none
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def names_told(names: Iterable[str]) -> bytes:
    """`a, b, +3 more`: at most MAX_TOLD names as a header may have them, the rest counted."""
    every = tuple(names)
    told = [name for name in every if _NAME.fullmatch(name)][:MAX_TOLD]
    more = [f"+{len(every) - len(told)} more"] if len(every) > len(told) else []
    return ", ".join((*told, *more)).encode()


class IgnoredFields:
    """One server's handling of unknown fields."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def heed(self, exchange: Exchange, unknown: Sequence[str], known: Iterable[str]) -> None:
        """`unknown` were sent, and `known` there are. Raises InvalidRequest where the server is strict."""
        if not unknown:
            return
        if self._strict:
            raise _refusal(unknown[0], known)
        exchange.tell(IGNORED_FIELDS, unknown)
        exchange.log["ignored_fields"] = names_told(unknown).decode()
        for name in unknown[:MAX_TOLD]:
            self._log(exchange, name, known)

    def _log(self, exchange: Exchange, name: str, known: Iterable[str]) -> None:
        """Log each name once, however many requests have it."""
        if name in self._logged or len(self._logged) >= MAX_LOGGED or not _NAME.fullmatch(name):
            return
        self._logged.add(name)
        hint = did_you_mean(name, known, cutoff=NEAR)
        log_fields(
            ERRORS,
            logging.WARNING if hint else logging.INFO,
            f"field {name} is unknown and was ignored{hint}",
            {"request_id": exchange.request_id, "route": exchange.route_name},
        )


def _refusal(name: str, known: Iterable[str]) -> InvalidRequest:
    is_name = _NAME.fullmatch(name)
    shown = name if is_name else shortened(repr(name), 64)
    hint = did_you_mean(name, known, cutoff=NEAR) if is_name else ""
    return InvalidRequest(
        f"{shown} is no field here{hint}; leave it out, or serve without --strict-fields",
        param=name if is_name else None,
        code="unknown_parameter",
    )


class EventStream:
    """Writes events to one client. The answer begins with the first event or comment, so errors before have a status.

    Two tasks write: the request's own, and the Watch that keeps a silent stream open. Each write is whole events, so
    they may alternate in any order; only the beginning is guarded.
    """

    def __init__(self, exchange: Exchange, *, silence_s: float) -> None:
        self._exchange = exchange
        self._silence_s = silence_s
        self._starting = asyncio.Lock()
        self._last_write_at = time.monotonic()

    async def write(self, events: bytes) -> None:
        """Send whole events."""
        if not self._exchange.started:
            await self._start()
        self._last_write_at = time.monotonic()
        # Not the exchange's own `send`, which would find nothing to note: this is done for each token.
        await self._exchange.raw_send({"type": "http.response.body", "body": events, "more_body": True})

    async def keep_alive(self) -> None:
        """Send a comment if nothing was sent for two thirds of the time a stream may be silent; asked every third."""
        comment = self._exchange.format.stream.keep_alive
        if comment and time.monotonic() - self._last_write_at >= self._silence_s * 2 / 3:
            await self.write(comment)

    async def done(self, last_events: bytes = b"") -> None:
        """Send the last events and what ends the stream, and end the answer."""
        if not self._exchange.started:
            await self._start()
        await self._exchange.send(
            {"type": "http.response.body", "body": last_events + self._exchange.format.stream.end}
        )

    @property
    def num_end_bytes(self) -> int:
        """Number of bytes that `done` writes after the last events."""
        return len(self._exchange.format.stream.end)

    async def _start(self) -> None:
        async with self._starting:
            if not self._exchange.started:
                self._exchange.streaming = True
                headers = list(self._exchange.format.stream.headers)
                await self._exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
