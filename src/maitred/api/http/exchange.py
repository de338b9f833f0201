"""One HTTP request and its answer on plain ASGI: body within limits, JSON to a struct, JSON out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from maitred.api.generate.outcome import Outcome
from maitred.api.http.bodies import SMALL_BYTES, LargeBodies, decode_small
from maitred.api.http.body_decoder import BodyDecoder, Sent
from maitred.api.http.errors import ClientGone, HttpError, RequestTooSlow, UnsupportedMediaType
from maitred.api.http.formats import DialectFormat
from maitred.api.http.routes import Route
from maitred.core.errors import RequestTooLarge
from maitred.core.objectives import Pace
from maitred.tenancy.caller import Caller

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
Header = tuple[bytes, bytes]
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")  # what a client may call its request
CONNECTION = "maitred.connection"  # in the scope: the GuardedConnection that the request came on
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
    route: Route | None = None  # once it is found
    parameter: str = ""  # of its path
    log: dict[str, Any] = field(default_factory=dict)  # what the access line says besides
    outcome: Outcome | None = None  # what the answer is made of, on the routes that generate
    recording: object = None  # of what is answered, for the result cache
    paces: Sequence[Pace] = ()  # when the tokens of its answer came, on those routes, by sample
    trace_header: Header | None = None  # of a request that is traced
    status: int | None = None  # set once the answer began
    streaming: bool = False  # the answer that began is an event stream
    complete: bool = False
    is_handed_over: bool = False  # another worker computed the prompt than the answer
    goes_on_elsewhere: bool = False  # a router can have another replica go on where this answer stops
    num_body_bytes: int = 0  # of the request, as far as they were read
    told: tuple[Header, ...] = ()  # headers of its answer, whatever that is
    standing_headers: Callable[[], Iterable[Header]] = tuple  # of every answer, asked when it begins

    @property
    def started(self) -> bool:
        return self.status is not None

    @property
    def route_name(self) -> str:
        """The route's name for metrics and traces; unknown paths share one name."""
        return self.route.template if self.route is not None else "other"

    async def send(self, message: Message) -> None:
        """Send an ASGI message; every answer carries its x-request-id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = ((b"x-request-id", self.request_id.encode()), *self.told, *self.standing_headers())
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
        await self.answer(self.format.error_body(error), error.status, (*JSON_HEADERS, *error.headers))
