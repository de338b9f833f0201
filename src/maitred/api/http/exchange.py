"""One HTTP request and its answer on plain ASGI: body within limits, JSON to a struct, JSON out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from maitred.api.http.auth import Caller
from maitred.api.http.body_room import BodyRoom
from maitred.api.http.decoding import Pieces, decode
from maitred.api.http.errors import ClientGone, HttpError, RequestTooSlow, UnsupportedMediaType
from maitred.api.http.outline import Outline, outline_of
from maitred.api.http.turns import Turns
from maitred.errors import InvalidRequest, Overloaded, RequestTooLarge

if TYPE_CHECKING:
    from maitred.api.generate.generation import Generation
    from maitred.api.http.routes import Route

T = TypeVar("T")
Header = tuple[bytes, bytes]
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")  # what a client may call its request
TOO_SLOW = "maitred.too_slow"  # in the scope: the connection gave up on the body
SMALL_BYTES = 64 * 1024  # of a body: reading and decoding so much takes a tenth of a millisecond, and waits for no turn
UNCOUNTED_BYTES = 1024 * 1024  # a body up to this is decoded in a few milliseconds, whatever is in it
MAX_ITEMS = 200_000
MAX_KEYS = 200_000
JSON_BLANKS = b" \t\r\n"
JSON_HEADERS = ((b"content-type", b"application/json"),)


@dataclass(slots=True, eq=False)
class Exchange:
    """A request being answered. `send` notes how far the answer is, so that errors know what is still possible."""

    scope: Scope
    receive: Receive
    raw_send: Send
    request_id: str
    max_body_bytes: int
    turns: Turns  # for bodies that are not small
    room: BodyRoom  # for those, too
    headers: dict[bytes, bytes]  # of the request, names in lower case, the first of equals
    caller: Caller = field(init=False)  # set before any route is asked
    route: Route | None = None  # once it is found
    parameter: str = ""  # of its path
    log: dict[str, Any] = field(default_factory=dict)  # what the access line says besides
    generation: Generation | None = None  # what the answer is made of, on the routes that generate
    trace_header: Header | None = None  # of a request that is traced
    status: int | None = None  # set once the answer began
    streaming: bool = False  # the answer that began is an event stream
    complete: bool = False
    num_body_bytes: int = 0  # of the request, as far as they were read
    outline: Outline | None = None  # of them, once the body is over UNCOUNTED_BYTES
    standing_headers: Callable[[], Iterable[Header]] = tuple  # of every answer, asked when it begins

    @property
    def started(self) -> bool:
        return self.status is not None

    @property
    def route_name(self) -> str:
        """For metrics and traces; what is not there has one name."""
        return self.route.template if self.route is not None else "other"

    async def send(self, message: Message) -> None:
        """Send an ASGI message; every answer carries its x-request-id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = ((b"x-request-id", self.request_id.encode()), *self.standing_headers())
            message["headers"] = [*message.get("headers", ()), *own]
        elif not message.get("more_body", False):
            self.complete = True
        await self.raw_send(message)

    async def body(self, *, max_items: int = MAX_ITEMS) -> bytes:
        """The whole body; raises RequestTooLarge as soon as its length says so, declared or counted, and InvalidRequest
        as soon as there are too many items or keys in it.
        """
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self.max_body_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        more = True
        while more and self.num_body_bytes <= SMALL_BYTES:
            more = await self._read_into(chunks, max_items)
        if self.num_body_bytes > SMALL_BYTES:
            try:
                async with asyncio.timeout(None) as sending:
                    self.room.hold(self, self.num_body_bytes, sending)
                    while more:
                        more = await self._read_into(chunks, max_items)
                        self.room.hold(self, self.num_body_bytes, sending)
                    if sending.when() is not None:  # over, and it need not wait for anything to hear of it
                        raise TimeoutError
            except TimeoutError:
                chunks.clear()  # an error keeps its frames until they are collected
                text = "bodies of requests fill the memory there is for them, and this one has been coming for longest"
                raise Overloaded(f"{text}; send it again", retry_after_s=1.0) from None
            finally:
                self.room.sent(self)
            await self.turn()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _read_into(self, chunks: list[bytes], max_items: int) -> bool:
        """The next piece of the body; whether there is more."""
        await self.turn()  # the connection reads on when it is asked to
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
        if self.num_body_bytes > UNCOUNTED_BYTES:
            await self._count(chunks if self.outline is None else (chunk,), max_items)
        return bool(message.get("more_body", False))

    async def turn(self) -> None:
        """Before each piece of work on the body; a small one waits for nothing."""
        if self.num_body_bytes > SMALL_BYTES:
            await self.turns.mine()

    async def in_turns(self, pieces: Pieces[T]) -> T:
        """What `pieces` make, each in a turn of its own."""
        while True:
            await self.turn()
            try:
                next(pieces)
            except StopIteration as made:
                result: T = made.value
                return result

    async def _count(self, chunks: Iterable[bytes], max_items: int) -> None:
        """As they come: of what has so many items that decoding costs too much, the rest need not be read."""
        outline = self.outline = self.outline or Outline()
        for chunk in chunks:
            await self.turn()
            outline.add(chunk)
        _check_number(outline.num_items, "items", max_items)
        _check_number(outline.num_keys, "keys", MAX_KEYS)

    def _too_large(self) -> RequestTooLarge:
        limit = self.max_body_bytes
        return RequestTooLarge(
            f"the request body is over the limit of {limit} bytes; the server's --max-body-bytes sets it"
        )

    async def json(
        self,
        decoder: msgspec.json.Decoder[T],
        *,
        max_items: int = MAX_ITEMS,
        apart: str | None = None,
        max_apart: int = 0,
    ) -> T:
        """The body as a struct; raises InvalidRequest whose `param` is the path of the wrong field.

        `max_items` bounds what decoding may cost. `apart` is a raw field with items of its own, up to `max_apart`.
        """
        media_type = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != b"application/json":
            raise UnsupportedMediaType("send the body as JSON, with the header Content-Type: application/json")
        body = await self.body(max_items=max_items + max_apart)
        decoded: T = await self.in_turns(decode(body.lstrip(JSON_BLANKS), decoder.type))
        if apart is not None and self.outline is not None and self.outline.num_items > max_items:
            within = await self.in_turns(outline_of(getattr(decoded, apart)))
            _check_number(self.outline.num_items - within.num_items, "items", max_items)
        return decoded

    async def answer_json(self, value: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        await self.answer(msgspec.json.encode(value), status, (*JSON_HEADERS, *headers))

    async def answer(self, body: bytes, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self.send({"type": "http.response.body", "body": body})

    async def answer_error(self, error: HttpError) -> None:
        await self.answer(error.encoded(), error.status, (*JSON_HEADERS, *error.headers))


def _check_number(num: int, what: str, limit: int) -> None:
    if num > limit:
        raise InvalidRequest(f"the body has over {limit} {what} in JSON; send fewer", code="too_many_items")
