"""One HTTP request and its answer on plain ASGI: body within limits, JSON to a struct, JSON out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from maitred.api.auth import Caller
from maitred.api.errors import ClientGone, HttpError, RequestTooSlow, UnsupportedMediaType
from maitred.api.turns import Turns
from maitred.errors import InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from maitred.api.generation import Generation

T = TypeVar("T")
Header = tuple[bytes, bytes]
TOO_SLOW = "maitred.too_slow"  # in the scope: the connection gave up on the body
SMALL_BYTES = 64 * 1024  # of a body: reading and decoding so much takes a tenth of a millisecond, and waits for no turn
UNCOUNTED_BYTES = 1024 * 1024  # a body up to this is decoded in a few milliseconds, whatever is in it
MAX_ITEMS = 200_000
MAX_KEYS = 200_000
KEY, COLON, ITEM = b'":', b":", b","
MARKS = {COLON: "keys", ITEM: "items"}  # what each is a sign of; texts have both, and only keys are told from colons
JSON_HEADERS = ((b"content-type", b"application/json"),)
# "... - at `$.messages[0].content`", and for keys of an object "- at `key` in `$.logit_bias`"
_PATH = re.compile(r" - at (?:`?key`? in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


@dataclass(slots=True, eq=False)
class Exchange:
    """A request being answered. `send` notes how far the answer is, so that errors know what is still possible."""

    scope: Scope
    receive: Receive
    raw_send: Send
    request_id: str
    max_body_bytes: int
    turns: Turns  # for bodies that are not small
    headers: dict[bytes, bytes]  # of the request, names in lower case, the first of equals
    caller: Caller = field(init=False)  # set before any route is asked
    route: str = "other"  # the path as declared, for metrics
    log: dict[str, Any] = field(default_factory=dict)  # what the access line says besides
    generation: Generation | None = None  # what the answer is made of, on the routes that generate
    trace_header: Header | None = None  # of a request that is traced
    status: int | None = None  # set once the answer began
    streaming: bool = False  # the answer that began is an event stream
    complete: bool = False
    num_body_bytes: int = 0  # of the request, as far as they were read
    num_marks: dict[bytes, int] = field(default_factory=dict)  # of MARKS in them, once the body is over UNCOUNTED_BYTES
    standing_headers: Callable[[], Iterable[Header]] = tuple  # of every answer, asked when it begins

    @property
    def started(self) -> bool:
        return self.status is not None

    async def send(self, message: Message) -> None:
        """Send an ASGI message; every answer carries its x-request-id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = ((b"x-request-id", self.request_id.encode()), *self.standing_headers())
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
        size = 0
        while True:
            await self.turn()  # the connection reads on when it is asked to
            message = await self.receive()
            if message["type"] == "http.disconnect":
                if TOO_SLOW in self.scope:
                    raise RequestTooSlow("the body did not come in time")  # the client has been told
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            self.num_body_bytes = size
            if size > self.max_body_bytes:
                raise self._too_large()
            chunks.append(chunk)
            if size > UNCOUNTED_BYTES:
                self._count(chunks if not self.num_marks else (chunk,))
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def turn(self) -> None:
        """Before each piece of work on the body; a small one waits for nothing."""
        if self.num_body_bytes > SMALL_BYTES:
            await self.turns.mine()

    def _count(self, chunks: Iterable[bytes]) -> None:
        """As they come: counting a whole body would hold up everybody for as long as decoding it does."""
        for mark in MARKS:
            self.num_marks[mark] = self.num_marks.get(mark, 0) + sum(chunk.count(mark) for chunk in chunks)

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
        apart: Callable[[bytes], bytes] | None = None,
    ) -> T:
        """The body as a struct; raises InvalidRequest whose `param` is the path of the wrong field.

        `max_items` bounds what decoding may cost the event loop; it counts commas, which texts have too. `apart` finds
        the part of the body that is kept raw and measured elsewhere.
        """
        media_type = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != b"application/json":
            raise UnsupportedMediaType("send the body as JSON, with the header Content-Type: application/json")
        body = await self.body()
        await self.turn()
        await self._check_items(body, {ITEM: max_items, COLON: MAX_KEYS}, apart)
        return decode_json(body, decoder)

    async def _check_items(
        self, body: bytes, limits: Mapping[bytes, int], apart: Callable[[bytes], bytes] | None
    ) -> None:
        """Refuse a body with so many items or keys that decoding alone would hold up everybody."""
        for mark, limit in limits.items():
            num = self.num_marks.get(mark, 0)
            if num > limit and apart is not None:
                num -= apart(body).count(mark)
                await self.turn()
            if num > limit and mark is COLON:
                num = await self._num_keys(body)
            if num > limit:
                text = f"the body has about {num} {MARKS[mark]} in JSON; at most {limit}"
                raise InvalidRequest(text, code="too_many_items")

    async def _num_keys(self, body: bytes) -> int:
        """Finding two characters takes five times as long as one, so it is for bodies with many colons."""
        num = 0
        for start in range(0, len(body), UNCOUNTED_BYTES):
            num += body.count(KEY, start, start + UNCOUNTED_BYTES + 1)  # one on the border, too
            await self.turns.mine()
        return num

    async def answer_json(self, value: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        await self.answer(msgspec.json.encode(value), status, (*JSON_HEADERS, *headers))

    async def answer(self, body: bytes, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self.send({"type": "http.response.body", "body": body})

    async def answer_error(self, error: HttpError) -> None:
        await self.answer(error.encoded(), error.status, (*JSON_HEADERS, *error.headers))


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T], *, at: str = "") -> T:
    """`body` decoded and checked; every way in which JSON can be wrong is an InvalidRequest. `at` is where it stood."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        param = _param(message, at)
        where = f" at {param}" if param and "missing required" not in message else ""
        raise InvalidRequest(_PATH.sub("", message) + where, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def _param(message: str, at: str) -> str | None:
    """The path of the field that a ValidationError is about."""
    found = _PATH.search(message)
    path = found.group(1).replace("[...]", "") if found else ""  # msgspec does not name the keys of an object
    missing = _MISSING.search(message)
    steps = [step for step in (at, path, missing.group(1) if missing else "") if step]
    return ".".join(steps).replace(".[", "[") or None
