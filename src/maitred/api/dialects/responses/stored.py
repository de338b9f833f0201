"""Responses at the server that clients talk to, which expands, counts, keeps and runs them; `answer` makes the tokens.

A response is stored under its tenant: what it is as JSON, and all items that it was asked with. A next turn is asked
with these and its output before its own, so no replica keeps anything. Events are counted here: whatever replicas a
stream had, its sequence numbers are dense.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from starlette.types import Message, Send

from maitred.api.dialects.responses import schemas as s
from maitred.api.dialects.responses.answers import RESPONSES, UNCOUNTED, check_fields, decoder, event
from maitred.api.dialects.responses.reading import read_items
from maitred.api.http.bodies import decode_json
from maitred.api.http.errors import http_error, shortened
from maitred.api.http.exchange import CONNECTION, JSON_HEADERS, EventStream, Exchange
from maitred.api.http.in_flight import WatchedWork
from maitred.api.http.logs import ERRORS
from maitred.api.http.results import HEADER as CACHED
from maitred.api.http.routes import GENERATION_ERRORS, Route
from maitred.api.http.service import Service
from maitred.core.errors import InvalidRequest, RouteNotFound, Unavailable

T = TypeVar("T")
Answer = Callable[[Any, Exchange, bytes], Awaitable[None]]
RESPONSE, EVENTS = "response", "response.events"  # kinds of entries
KEPT_S = 30 * 24 * 3600.0
_OPEN = ("queued", "in_progress")
_FINAL = frozenset(f"response.{status}" for status in ("completed", "incomplete", "failed"))
_BROKE_OFF: Mapping[str, Any] = {"message": "the answer broke off", "type": "server_error"}
_CODES = {"server_error": "server_error", "rate_limit_error": "rate_limit_exceeded"}  # by the type of an error
_NUMBER = re.compile(rb'"sequence_number": ?\d+')  # within a text its quotes would be escaped
_ID = re.compile(rb'"id": ?"resp_(\w+)"')
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.encode


class _Asked(msgspec.Struct):
    """Fields that are done with here, whatever they hold: `answer` tells of wrong ones."""

    input: Raw = Raw(b"[]")
    previous_response_id: Any = None
    background: Any = None
    store: Any = None
    stream: Any = None


class _Item(msgspec.Struct):
    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: Raw = Raw(b"null")


class _Event(msgspec.Struct):
    type: str = ""
    response: dict[str, Raw] | None = None
    error: dict[str, Any] | None = None


class _Stored(msgspec.Struct):
    """Fields of a stored response that are looked at."""

    id: str
    status: str = ""
    background: bool | None = None
    output: list[Raw] | None = None


_ASKED, _ITEM = msgspec.json.Decoder(_Asked), msgspec.json.Decoder(_Item)
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_stored = msgspec.json.Decoder(_Stored).decode
_WRONG = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


async def create(answer: Answer, service: Service, exchange: Exchange) -> None:
    """POST /v1/responses. A replica leaves all this to its router, which shows the fleet's token."""
    body = await exchange.json_body()
    if exchange.from_router:
        await answer(service, exchange, body)
        return
    async with exchange.turn():
        asked = _asked_in(body)
    shelf, patch = TenantResponses(service, exchange), dict[str, Any]()
    if isinstance(asked.previous_response_id, str) or b'"item_reference"' in bytes(asked.input):
        asked.input = await _expanded(shelf, bytes(asked.input), asked.previous_response_id)
        patch["previous_response_id"] = asked.previous_response_id
        body = _rewritten(body, input=asked.input)
    if asked.background is True:
        await _in_background(answer, shelf, exchange, body, asked, patch)
        return
    kept = KeptResponse(shelf, asked.input if asked.store is not False else None, patch, exchange.raw_send)
    exchange.raw_send = kept.send
    try:
        await answer(service, exchange, body)
    finally:
        kept.leave()


def _asked_in(body: bytes) -> _Asked:
    """Raises InvalidRequest. What no decoder looks at is kept and told again, so all of it must be text."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    return decode_json(body, _ASKED)


def _rewritten(body: bytes, **fields: Any) -> bytes:
    dropped = ("previous_response_id", "background")
    return _encode({name: of for name, of in _FIELDS.decode(body).items() if name not in dropped} | fields)


async def _expanded(shelf: TenantResponses, sent: bytes, previous: str | None) -> Raw:
    """All items of the conversation as a JSON list. Raises RouteNotFound, or InvalidRequest for what is not over."""
    own, before = _as_items(sent), list[Raw]()
    if previous is not None:
        told = _decode_stored(await shelf.find(previous, "previous_response_id"))
        if told.status in _OPEN:
            text = f"the response {previous!r} is {told.status}; wait for its end before the next turn"
            raise InvalidRequest(text, param="previous_response_id")
        before = [*await shelf.items(previous), *(told.output or ())]
    if b'"item_reference"' in sent:
        own = [await _referred(shelf, item) for item in own]
    return Raw(b"[%b]" % b",".join(map(bytes, (*before, *own))))


def _as_items(sent: bytes) -> list[Raw]:
    """Items of an input. Raises InvalidRequest for what is none."""
    if sent.lstrip()[:1] == b'"':
        return [Raw(b'{"type":"message","role":"user","content":%b}' % sent)]
    with suppress(*_WRONG):
        items = _LIST.decode(sent)
        if all(bytes(item).startswith(b"{") for item in items):
            return items
    raise InvalidRequest("input must be a text or a list of items", param="input")


async def _referred(shelf: TenantResponses, item: Raw) -> Raw:
    """The item itself, or that of a stored response which it refers to by id."""
    told = decode_json(item, _ITEM, at="input")
    if told.type != "item_reference":
        return item
    id = f"resp_{str(told.id).partition('_')[2].rpartition('_')[0]}"  # ids of items are made of their response's
    stored = await shelf.find(id, "input", f"item {shortened(repr(told.id))}")
    listed = [Raw(_encode(_listed(*item, id))) for item in enumerate(await shelf.items(id))]
    known: dict[str | None, Raw] = {
        _ITEM.decode(raw).id: raw for raw in (*listed, *(_decode_stored(stored).output or ()))
    }
    if told.id not in known:
        raise RouteNotFound(f"there is no item {shortened(repr(told.id))}", param="input")
    return known[told.id]


class TenantResponses:
    """Responses of one tenant, stored or under way."""

    def __init__(self, service: Service, exchange: Exchange) -> None:
        self.service, self._tenant = service, exchange.caller.tenant.name

    def key(self, id: str, kind: str = RESPONSE) -> tuple[str, str, str]:
        return kind, id, self._tenant

    def live(self, id: str) -> KeptResponse | None:
        """The response under way; None where it was deleted too."""
        live: KeptResponse | None = self.service.stored.live.get(self.key(id))
        return None if live is None or live.is_deleted else live

    async def find(self, id: str, param: str | None = None, what: str = "") -> bytes:
        """The response as JSON, as far as it is; one that a server which was killed left open has failed.

        Raises RouteNotFound, for other tenants' too.
        """
        live = self.live(id)
        if live is not None:
            return live.response
        entry = await self._call(self.service.stored.get, *self.key(id), time.time())
        if entry is None:
            code = "previous_response_not_found" if param == "previous_response_id" else None
            raise RouteNotFound(f"there is no {what or f'response {shortened(repr(id))}'}", param=param, code=code)
        if _decode_stored(entry.about).status not in _OPEN:
            return entry.about
        error = {"code": "server_error", "message": "the server ended while it made this response; ask again"}
        failed = _encode(_FIELDS.decode(entry.about) | {"status": "failed", "error": error})
        await self.put(id, failed)
        return failed

    async def items(self, id: str) -> list[Raw]:
        """Items that a response was asked with."""
        return _as_items(await self.content(id) or b"[]")

    async def content(self, id: str, kind: str = RESPONSE) -> bytes:
        return await self._call(self.service.stored.content, *self.key(id, kind))

    async def put(
        self, id: str, about: bytes, content: bytes | None = None, kind: str = RESPONSE, *, busy: bool = False
    ) -> None:
        """Raises Unavailable."""
        now, num_bytes = time.time(), len(about) + len(content or b"")
        put = partial(self.service.stored.put, now=now, expires_at=now + KEPT_S, busy=busy)
        await self._call(put, *self.key(id, kind), about, content, num_bytes=num_bytes)

    async def drop(self, id: str) -> None:
        for kind in (RESPONSE, EVENTS):
            await self._call(self.service.stored.drop, *self.key(id, kind))

    async def _call(self, function: Callable[..., T], *args: Any, num_bytes: int = 0) -> T:
        """Call the store, in a thread where that may take long."""
        with self.service.stored.at_once(num_bytes) as is_short:
            if is_short:
                return function(*args)
        return await asyncio.to_thread(function, *args)


# -- a response on its way to the client


@dataclass(slots=True, eq=False)
class KeptResponse:
    """One response as it is answered: its messages go through `send`, and what it becomes is stored at its end."""

    _shelf: TenantResponses
    _items: Raw | None  # that it is asked with, empty once they are stored; None stores nothing
    _patch: dict[str, Any]  # fields of the response that a replica does not know
    _client: Send | None = None  # None runs in the background
    id: str = ""
    response: bytes = b""  # as far as it is
    events: list[bytes] = field(default_factory=list)  # of one that runs in the background
    grew: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    is_over: bool = False
    is_deleted: bool = False
    has_left: bool = False
    _is_cancelled: bool = False
    _num_events: int = 0
    _is_stream: bool = False
    _is_cached: bool = False  # the answer is a result cache's, under the id of an earlier response
    _ids: tuple[bytes, bytes] | None = None  # of the earlier response and of this one, without `resp_`
    _head: Message | None = None  # held until the body is known
    _body: bytes = b""

    def enter(self) -> None:
        """Register the response, which is found under its id from now on."""
        self._shelf.service.stored.live[self._shelf.key(self.id)] = self

    def leave(self) -> None:
        """Unregister the response, which is stored by now, or deleted."""
        if self._items is not None and (self.is_deleted or self._shelf.live(self.id) is self):
            self._shelf.service.stored.live.pop(self._shelf.key(self.id), None)
        self.has_left = True
        self.grew.set()

    def send(self, message: Message) -> Awaitable[None]:
        """Pass on an ASGI message of the answer, after what must be stored before it."""
        body = message.get("body", b"")
        is_plain = self._is_stream and self._head is None and not self._is_cached and message.get("more_body", False)
        if not (is_plain and body.endswith(UNCOUNTED) and b'"response":{' not in body):
            return self._pass_on(message)
        message["body"] = self._counted(body)  # what a token brings
        return (self._client or self._logged)(message)

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
            self._head = message
            cached = dict(message["headers"]).get(CACHED, b"miss")
            self._is_cached = self._items is not None and not cached.startswith(b"miss")
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if not self._is_stream:
            self._body += body
            if not is_last:
                return
            body = await self._whole(self._own(self._body))
        else:
            body = self._own(body)
            body = b"".join([await self._event(text) for text in body.split(b"\n\n") if text])
            if is_last and not self.is_over:
                body += await self.failed(_BROKE_OFF)
        send = self._client or self._logged
        if self._head is not None:
            headers = [header for header in self._head["headers"] if header[0] != b"content-length"]
            length = [] if self._is_stream else [(b"content-length", b"%d" % len(body))]
            await send({**self._head, "headers": headers + length})
            self._head = None
        await send({**message, "body": body})

    def _own(self, body: bytes) -> bytes:
        """`body` with this response's id in place of a cached one's: each response is kept and deleted by itself."""
        if self._is_cached and self._ids is None and (found := _ID.search(body)) is not None:
            self._ids = found[1], self.id.removeprefix("resp_").encode() or secrets.token_hex(24).encode()
        return body if self._ids is None else body.replace(*self._ids)

    async def _whole(self, body: bytes) -> bytes:
        assert self._head is not None, "it comes before the body"
        if self._head["status"] != 200 or (told := _decode_stored(body)).output is None:
            return body
        self.id = told.id
        return await self._final(_encode(_FIELDS.decode(body) | self._patch) if self._patch else body)

    def _number(self, _: object = None) -> bytes:
        self._num_events += 1
        return b'"sequence_number":%d' % (self._num_events - 1)

    async def _event(self, text: bytes) -> bytes:
        data = next((line[5:] for line in text.split(b"\n") if line.startswith(b"data:")), b"")
        try:
            told = _decode_event(data)
        except _WRONG:
            return text + b"\n\n"  # a comment
        if told.error is not None and told.response is None:
            return await self.failed(told.error)
        if told.response is None:
            return _NUMBER.sub(self._number, text) + b"\n\n"
        response = _encode(told.response | self._patch)
        if told.type in _FINAL:
            return self._response_event(told.type, await self._final(response))
        is_repeated = told.type == "response.created" and bool(self.response)  # it was told as it was queued
        self.response = response
        if self._items is not None and not self.id:
            self.id = _decode_stored(response).id
            self.enter()
        return b"" if is_repeated else self._response_event(told.type, response)

    def _counted(self, events: bytes) -> bytes:
        """Events of ours with their numbers."""
        *texts, _ = events.split(UNCOUNTED)
        return b"".join([b"%b%b}\n\n" % (text, self._number()) for text in texts])

    def _response_event(self, type: str, response: bytes) -> bytes:
        return self._counted(event(type, response=Raw(response)))

    async def _final(self, response: bytes) -> bytes:
        """The response at its end, stored. Where that fails, it says of itself that it is not."""
        if self._items is not None and not self.is_deleted:
            try:
                await self._shelf.put(self.id, response, bytes(self._items) or None)
            except Unavailable:
                ERRORS.warning("a response could not be stored", exc_info=True)
                response = _encode(_FIELDS.decode(response) | {"store": False})
        if self._items is not None and self.is_deleted:  # maybe while it was stored
            await self._shelf.drop(self.id)
        self.response, self.is_over = response, True
        return response

    async def failed(self, error: Mapping[str, Any], status: str = "failed") -> bytes:
        """End the response by an `error` as OpenAI's bodies have it; gives the event that tells of it."""
        code, message = _CODES.get(str(error.get("type")), "invalid_prompt"), str(error.get("message"))
        if not self.response:
            code = error.get("code") or code
            return self._counted(event("error", code=code, message=message, param=error.get("param")))
        fields: dict[str, Any] = {**_FIELDS.decode(self.response), "status": status}
        if status == "failed":
            fields["error"] = {"code": code, "message": message}
        return self._response_event("response.failed", await self._final(_encode(fields | self._patch)))

    # -- in the background

    async def begin(self, response: s.ResponseObject) -> None:
        """Store the response as queued, with its items."""
        self.response = _encode(response)
        await self._shelf.put(self.id, self.response, bytes(self._items or b"[]"), busy=True)
        self._items = Raw()
        self.enter()
        self._log(b"".join(self._response_event(f"response.{kind}", self.response) for kind in ("created", "queued")))

    async def _logged(self, message: Message) -> None:
        """Keep the events of an ASGI message."""
        if self._is_stream and message["type"] == "http.response.body":
            self._log(message["body"])

    def _log(self, told: bytes) -> None:
        self.events += [text + b"\n\n" for text in told.split(b"\n\n") if text and not text.startswith(b":")]
        self.grew.set()
        self.grew = asyncio.Event()

    async def run(self, answer: Answer, exchange: Exchange, body: bytes) -> None:
        """Answer to its end, which is stored whatever that is."""
        status, error = "failed", _BROKE_OFF
        try:
            await answer(self._shelf.service, exchange, body)
            if not self.is_over:
                error = _decode_event(self._body).error or error
        except asyncio.CancelledError:
            status = "cancelled"
        except Exception as caught:
            told = http_error(caught, exchange.field_names())
            error = msgspec.to_builtins(RESPONSES.told(told))["error"]
            if told.status == 500:
                ERRORS.error("request failed", exc_info=caught)
        try:
            if not self.is_over:
                self._log(await self.failed(error, status))
            if not self.is_deleted:
                packed = await asyncio.to_thread(zlib.compress, b"".join(self.events), 1)
                await self._shelf.put(self.id, b"{}", packed, EVENTS)
        except Unavailable:
            ERRORS.warning("the events of a response could not be stored", exc_info=True)
        finally:
            self.leave()

    async def cancel(self) -> None:
        """End a response in the background, and wait until what became of it is stored: a second cancellation, or one
        of what is over, would cost that.
        """
        if self.task is not None:
            if not (self.is_over or self._is_cancelled):
                self._is_cancelled = self.task.cancel()
            await asyncio.wait([self.task])

    async def follow(self, exchange: Exchange, after: int) -> None:
        """Send the events behind the one with the number `after`, and those that come, to the end."""
        silence_s = self._shelf.service.config.sse_keep_alive_s
        stream, at = EventStream(exchange, silence_s=silence_s), after + 1
        async with WatchedWork(exchange, silence_s=silence_s, on_silence=stream.keep_alive):
            while True:
                grew = self.grew
                if at < len(self.events):
                    told, at = b"".join(self.events[at:]), len(self.events)
                    await stream.write(told)
                elif self.has_left:
                    break
                else:
                    await grew.wait()
            await stream.done()


async def _in_background(
    answer: Answer, shelf: TenantResponses, exchange: Exchange, body: bytes, asked: _Asked, patch: dict[str, Any]
) -> None:
    """Answer at once that the response is queued, or follow it; it runs whether a client is there or not."""
    sent = decoder().decode(_rewritten(body))
    check_fields(sent.body, sent.refused)
    _as_items(bytes(asked.input))
    read_items(sent.body.input)  # what is wrong is told at once, and not kept
    if asked.store is False:
        raise InvalidRequest("background needs the response to be stored; leave store out", param="background")
    if shelf.service.in_flight.draining:
        raise Unavailable("the server is shutting down; try again", retry_after_s=1.0)
    id = f"resp_{secrets.token_hex(24)}"
    patch |= {"background": True}
    queued = s.response_of(sent.body, id, sent.body.model or "", status="queued", **patch)
    kept = KeptResponse(shelf, asked.input, patch | {"id": id}, id=id)
    await kept.begin(queued)
    scope = {name: value for name, value in exchange.scope.items() if name != CONNECTION}
    apart = replace(exchange, scope=scope, receive=_never, raw_send=kept.send, log={})
    apart.caller = exchange.caller
    kept.task = asyncio.create_task(kept.run(answer, apart, _rewritten(body, stream=True, request_id=id)))
    if asked.stream is True:
        await kept.follow(exchange, -1)
    else:
        await exchange.answer(kept.response, 200, JSON_HEADERS)


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


# -- stored ones


async def show(service: Service, exchange: Exchange) -> None:
    """GET a response, its events, or the items that it was asked with."""
    id, _, more = exchange.parameter.partition("/")
    shelf = TenantResponses(service, exchange)
    told, asked, after = await shelf.find(id), exchange.query, exchange.query_number("starting_after", -1, 2**53, -1)
    if more == "input_items":
        listed, order = [_listed(*item, id) for item in enumerate(await shelf.items(id))], asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order is {shortened(repr(order))}; it must be asc or desc", param="order")
        page = exchange.page(listed if order == "asc" else listed[::-1], "after", most=100)
        await exchange.answer_json({"object": "list", **page})
    elif more:
        raise RouteNotFound(f"a response has no {shortened(repr(more))}; it has input_items")
    elif asked.get("stream") != "true":
        await exchange.answer(told, 200, JSON_HEADERS)
    elif not _decode_stored(told).background:
        text = "only a response that was made with background: true can be streamed again"
        raise InvalidRequest(text, param="stream")
    elif (live := shelf.live(id)) is not None:
        await live.follow(exchange, after)
    else:
        events, packed = event("response.failed", response=Raw(told)), await shelf.content(id, EVENTS)
        if packed:  # of a server that was killed there is the end alone
            ended = (await asyncio.to_thread(zlib.decompress, packed)).split(b"\n\n")
            events = b"\n\n".join(ended[after + 1 :])
        await EventStream(exchange, silence_s=service.config.sse_keep_alive_s).done(events)


async def change(service: Service, exchange: Exchange) -> None:
    """POST to a response: cancel it."""
    id, _, more = exchange.parameter.partition("/")
    if more != "cancel":
        raise RouteNotFound(f"{shortened(repr(exchange.parameter))} takes no POST; a response has /cancel")
    shelf = TenantResponses(service, exchange)
    told = await shelf.find(id)
    if not _decode_stored(told).background:
        raise InvalidRequest("only a response made with background: true can be cancelled; close its connection")
    live = shelf.live(id)
    if live is not None:
        await live.cancel()
        told = live.response
    await exchange.answer(told, 200, JSON_HEADERS)


async def delete(service: Service, exchange: Exchange) -> None:
    """DELETE a response; one that runs in the background ends, one that a client reads goes on and is not stored."""
    id, shelf = exchange.parameter, TenantResponses(service, exchange)
    await shelf.find(id)
    live = shelf.live(id)
    if live is not None:
        live.is_deleted = True
        await live.cancel()
    await shelf.drop(id)
    await exchange.answer_json({"id": id, "object": "response", "deleted": True})


def _listed(number: int, raw: Raw, id: str) -> dict[str, Any]:
    """An item of an input as it is listed, with an id."""
    told, item = _ITEM.decode(raw), dict[str, Any](status="completed") | _FIELDS.decode(raw)
    kind = item["type"] = told.type or "message"
    item["id"] = told.id or f"{'msg' if kind == 'message' else 'item'}_{id.removeprefix('resp_')}_i{number}"
    if kind == "message" and bytes(told.content)[:1] == b'"':
        part = {"type": "output_text", "annotations": []} if told.role == "assistant" else {"type": "input_text"}
        item["content"] = [{**part, "text": told.content}]
    return item


_PAGE: dict[str, dict[str, Any]] = {
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": 0},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}


def response_routes(answer: Answer) -> tuple[Route, ...]:
    """Routes of responses; `answer` makes one of a body that needs nothing stored."""
    of_one = partial(Route, path="/v1/responses/{id:path}", format=RESPONSES, errors=(400, 401, 404, 503))
    return (
        Route(
            method="POST",
            path="/v1/responses",
            handler=partial(create, answer),
            format=RESPONSES,
            summary="Answer items with items, and keep both.",
            span="chat",
            body=s.ResponsesRequest,
            tells_ignored=True,
            answer=s.ResponseObject,
            event=s.ResponseEvent,
            errors=GENERATION_ERRORS,
        ),
        of_one(
            handler=show,
            summary="A response, its events, or, with /input_items behind its id, the items that it was asked with.",
            answer=s.ResponseObject,
            event=s.ResponseEvent,
            query=_PAGE,
        ),
        of_one(
            method="POST",
            handler=change,
            summary="Cancel a response, with /cancel behind its id.",
            answer=s.ResponseObject,
        ),
        of_one(method="DELETE", handler=delete, summary="Forget a response.", text="application/json"),
    )
