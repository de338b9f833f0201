"""One connection's timeouts and limits, beneath HTTP: slow or silent clients, endless heads, clients that do not read.

uvicorn parses and answers; what it has no bounds for is bounded here. Nothing of a refused request reaches a route.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NoReturn

import httptools
from starlette.types import Message
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from maitred.api.http.errors import HeadTooLarge, RequestTooSlow, http_error
from maitred.api.http.exchange import CONNECTION, TOO_SLOW
from maitred.api.http.logs import ACCESS, log_fields
from maitred.api.http.routes import DialectFormat
from maitred.config import ServerConfig
from maitred.core.errors import InvalidRequest, RequestError, Unavailable
from maitred.engine.limits import is_spare

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; besides, what comes of a body without a byte of it: trailers
MAX_FRAMING_BYTES = 1024 * 1024  # sizes and extensions of chunks, and an eighth of the body more: 200,000 of one byte
MAX_HEADERS = 100
MAX_PIPELINED = 16  # requests that wait for the answers before theirs
MAX_PIPELINED_BYTES = 256 * 1024  # of their bodies: reading goes on, to see the connection end, so it needs a bound
MIN_BODY_BYTES_PER_S = 16 * 1024  # each so many bytes of a body give it a second more
LINGER_S = 5.0  # to read on after an answer that did not wait for the body; closing at once could lose the answer
SEND_BUFFER_BYTES = 256 * 1024  # in the kernel, where Linux makes it twice as many; it would take megabytes otherwise
HOST = re.compile(rb"[A-Za-z0-9._:\[\]%~-]*")


class RequestPhase(Enum):
    """The part of a request that the client is sending."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class _Refused(Exception):
    """Stops the parser; what the client hears is kept in the connection."""


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the request's head is over the limit of {MAX_HEAD_BYTES} bytes")


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's protocol with deadlines and limits. One timer for reading, armed only while something is missing."""

    def __init__(
        self,
        limits: ServerConfig,
        answers: DialectFormat,
        refused: Callable[[int], None],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits, self._answers, self._refused = limits, answers, refused  # which is told of a status
        self._phase = RequestPhase.NOTHING
        self._in_work: RequestResponseCycle | None = None  # uvicorn's `cycle` is the last that came, perhaps pipelined
        self._num_messages = 0  # begun
        self._num_head_bytes = self._num_body_bytes = self._num_framing_bytes = 0
        self._body_began_at = 0.0
        self._refusal: RequestError | Unavailable | None = None
        self._on_gone: Callable[[], None] | None = None  # of the request in work
        self._reading_timer: asyncio.TimerHandle | None = None
        self._writing_timer: asyncio.TimerHandle | None = None

    # the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        plain = transport.get_extra_info("socket")
        if plain is not None and plain.family != socket.AF_UNIX:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if plain is not None and is_spare(plain.fileno()):
            self._refuse(Unavailable("the server's descriptors (ulimit -n) are taken; try again", retry_after_s=1.0))
            return
        limit = self._limits.max_connections
        if len(self.connections) > limit:
            self._refuse(Unavailable(f"the server holds {limit} connections, its limit; try again", retry_after_s=1.0))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_writing_timer()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._on_gone is not None:
            self._on_gone()
        if self._in_work is not None:
            self.cycle = self._in_work  # it is the one to hear of it
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        phase, num_messages, num_body_bytes = self._phase, self._num_messages, self._num_body_bytes
        if phase is not RequestPhase.BODY:
            self._num_head_bytes += len(data)  # of a head that is whole now this was too much, and no longer counts
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            nonsense = InvalidRequest("what came is no HTTP/1.1 request, or not from here on", code="invalid_http")
            self._refuse(self._refusal or nonsense)
            return
        if self._is_refused():
            return
        if self.pipeline:
            self._wait_beside()
        if self._is_refused():
            return
        if self._phase is RequestPhase.BODY:
            if phase is RequestPhase.BODY and num_messages == self._num_messages:
                self._check_framing(len(data), self._num_body_bytes - num_body_bytes)
            if self._reading_timer is None and not self._is_refused():
                self._await_body()
        elif self._phase is RequestPhase.HEAD or (num_messages == self._num_messages and phase is RequestPhase.NOTHING):
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())
            elif self._reading_timer is None:
                self._await_head()

    def _wait_beside(self) -> None:
        """uvicorn stops reading while requests wait for the one in work, and would not see the client go away."""
        if sum(len(cycle.body) for cycle, _ in self.pipeline) > MAX_PIPELINED_BYTES:
            text = (
                f"over {MAX_PIPELINED_BYTES} bytes came of requests that wait on one connection; wait for the answers"
            )
            self._refuse(InvalidRequest(text, code="too_many_pipelined"))
        else:
            self.flow.resume_reading()

    def _is_refused(self) -> bool:
        return self._refusal is not None

    def _parse(self, data: bytes) -> None:
        """The parser takes what follows an `Upgrade` for another protocol's bytes, and would find the next request in
        its body. Nothing here speaks one, so the header is not there (RFC 9110, 7.8).
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                data = self._head_without_upgrade() + data[stopped.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))

    def _check_framing(self, num_came: int, num_of_body: int) -> None:
        """Bound a body's framing, which costs time, and trailers, which cost memory; neither is used."""
        self._num_framing_bytes += num_came - num_of_body
        self._num_head_bytes = 0 if num_of_body else self._num_head_bytes + num_came
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"over {MAX_HEAD_BYTES} bytes came, and none of them is the body's"))
        elif self._num_framing_bytes > MAX_FRAMING_BYTES + self._num_body_bytes // 8:
            text = f"beside {self._num_body_bytes} bytes of the body {self._num_framing_bytes} came; send larger chunks"
            self._refuse(InvalidRequest(text, code="too_many_chunks"))

    # the parser

    def on_message_begin(self) -> None:
        self._phase = RequestPhase.HEAD
        self._num_messages += 1
        self._size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._size += len(url)
        if self._size > MAX_HEAD_BYTES:
            self._stop(_too_large())
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > MAX_HEAD_BYTES:
            self._stop(_too_large())
        if self._phase is RequestPhase.BODY:  # a trailer: the request began without it, and goes on without it
            return
        if len(self.headers) >= MAX_HEADERS:
            self._stop(HeadTooLarge(f"the request has more than {MAX_HEADERS} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop(InvalidRequest("this server is no proxy", code="invalid_http"))
            return  # it comes again without, see `_parse`
        self._check_version()
        self._check_host()
        self._check_coding()
        if len(self.pipeline) >= MAX_PIPELINED:
            text = f"over {MAX_PIPELINED} requests wait on one connection; wait for their answers"
            self._stop(InvalidRequest(text, code="too_many_pipelined"))
        self._stop_reading_timer()
        self._phase, self._num_head_bytes = RequestPhase.BODY, 0
        self._num_body_bytes = self._num_framing_bytes = 0
        self._body_began_at = self.loop.time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._phase, self._num_head_bytes = RequestPhase.NOTHING, 0
        self._stop_reading_timer()
        super().on_message_complete()

    def _check_version(self) -> None:
        """Refuse 0.9, whose answers have no status, and 2.0, which has no lines: the parser takes both."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop(InvalidRequest(f"this server speaks HTTP/1.1, not HTTP/{version}", code="invalid_http"))

    def _check_host(self) -> None:
        """Check for one Host, of characters that hosts have (RFC 9112, 3.2). Nothing here is decided by its value."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._stop(InvalidRequest(f"the request has {len(hosts)} Host headers; send one", code="invalid_http"))
        if hosts and not HOST.fullmatch(hosts[0]):
            self._stop(InvalidRequest("the Host header is no host", code="invalid_http"))

    def _check_coding(self) -> None:
        """Refuse other codings: they would be taken for the body, and a proxy before us may read a list differently."""
        codings = [value.strip(b" \t").lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self.parser.get_http_version() != "1.1"):
            text = "Transfer-Encoding may be `chunked`, once, and in HTTP/1.1"
            self._stop(InvalidRequest(text, code="invalid_http"))

    def _stop(self, error: RequestError) -> NoReturn:
        """Refuse the request within a callback of the parser, which ends there; `data_received` hears of it."""
        self._refusal = error
        raise _Refused

    # the answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._in_work = cycle
        cycle.scope[CONNECTION] = self  # type: ignore[literal-required]
        sender = ResponseSender(cycle)
        cycle.transport, cycle.send = sender, sender.send  # type: ignore[assignment, method-assign]
        super()._start_asgi_task(cycle, app)

    def when_gone(self, call: Callable[[], None]) -> None:
        """Have `call` called if the client goes away before the answer in work is complete; its request was read."""
        self._on_gone = call
        self.flow.resume_reading()
        if self.transport.is_closing():
            call()

    def break_off(self) -> None:
        """Close after what was written, without an end of the answer in work: its reader sees that it is not whole."""
        if self._in_work is not None:
            self._in_work.disconnected = True
        self.transport.close()

    def on_response_complete(self) -> None:
        self._on_gone = None
        super().on_response_complete()
        self._await_readers_end()
        if self._phase is RequestPhase.BODY and self.cycle.response_complete and not self.transport.is_closing():
            self.cycle.body.clear()  # no longer needed
            self._start_reading_timer(LINGER_S, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing_timer is None:
            self._writing_timer = self.loop.call_later(self._limits.send_timeout_s, self._reads_too_slowly)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing_timer()
        self._await_readers_end()

    def _await_readers_end(self) -> None:
        """The end of an answer is too little to pause for, and a closed connection stays until its last byte left."""
        if self._writing_timer is None and self._has_unread_end():
            seconds = self._limits.send_timeout_s
            self._writing_timer = self.loop.call_later(seconds, self._end_is_unread, self._num_messages)

    def _has_unread_end(self) -> bool:
        """Whether an answer is complete, and some of it did not leave yet."""
        return self.cycle is not None and self.cycle.response_complete and self.transport.get_write_buffer_size() > 0

    def _end_is_unread(self, num_messages: int) -> None:
        self._writing_timer = None
        if self._num_messages > num_messages:  # what is there now is of a later answer
            self._await_readers_end()
        elif self._has_unread_end():
            self._reads_too_slowly()

    def _reads_too_slowly(self) -> None:
        """Drop the connection with its buffer, which would never leave; the request hears of a client gone."""
        self._writing_timer = None
        self._note(499, "slow_reader")
        self.transport.abort()

    # deadlines

    def _await_head(self) -> None:
        self._start_reading_timer(self._limits.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._reading_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # it is still being answered, and need not say more before that
        elif self._num_head_bytes == 0:
            self.transport.close()  # it never said anything
        else:
            self._refuse(RequestTooSlow(f"the request's head did not come within {self._limits.header_timeout_s:g} s"))

    def _await_body(self) -> None:
        allowed_s = self._limits.body_timeout_s + self._num_body_bytes / MIN_BODY_BYTES_PER_S
        left_s = self._body_began_at + allowed_s - self.loop.time()
        self._start_reading_timer(max(0.0, left_s), self._body_is_late)

    def _body_is_late(self) -> None:
        self._reading_timer = None
        allowed_s = self._limits.body_timeout_s + self._num_body_bytes / MIN_BODY_BYTES_PER_S
        if self.flow.read_paused or self.pipeline:  # for us
            self._start_reading_timer(self._limits.body_timeout_s, self._body_is_late)
        elif self.loop.time() < self._body_began_at + allowed_s:  # more came since
            self._await_body()
        else:
            self.scope[TOO_SLOW] = True  # type: ignore[literal-required]
            self._refuse(
                RequestTooSlow(
                    f"after {allowed_s:.0f} s only {self._num_body_bytes} bytes of the body had come; it may take "
                    f"{self._limits.body_timeout_s:g} s, and a second more for each {MIN_BODY_BYTES_PER_S} bytes"
                )
            )

    def _start_reading_timer(self, seconds: float, late: Callable[[], None]) -> None:
        self._stop_reading_timer()
        self._reading_timer = self.loop.call_later(seconds, late)

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _stop_writing_timer(self) -> None:
        if self._writing_timer is not None:
            self._writing_timer.cancel()
            self._writing_timer = None

    # refusals

    def _refuse(self, error: RequestError | Unavailable) -> None:
        """Answer below the application and hang up; in the middle of another answer, only hang up."""
        self._refusal = error
        self._stop_reading_timer()
        answer = http_error(error)
        answering = self._in_work is not None and self._in_work.response_started and not self._in_work.response_complete
        if not answering and not self.transport.is_closing():
            body = self._answers.error_body(answer)
            headers = (
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
                *answer.headers,
            )
            lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[answer.status] + lines + b"\r\n" + body)
        if (
            self.cycle is None or TOO_SLOW not in self.cycle.scope
        ):  # the application counts that one, when it hears of the disconnect
            self._refused(answer.status)
            self._note(answer.status, answer.code)
        self.transport.close()

    def _note(self, status: int, code: str | None) -> None:
        client = self.client[0] if self.client else None
        log_fields(ACCESS, logging.INFO, "connection ended", {"status": status, "client": client, "error": code})


WITHOUT_BODY = (204, 304)


class ResponseSender:
    """Takes the place of `cycle.send` and `cycle.transport`. uvicorn's own looks through each header with two regular
    expressions, and writes the head by itself.
    """

    __slots__ = ("_cycle", "_head", "_is_chunked", "_left", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport
        self._head = b""  # kept back until some of the body is there
        self._is_chunked = False
        self._left: int | None = None  # bytes of the body; None where it has no length, or there is none

    async def send(self, message: Message) -> None:
        """An ASGI message; waits while the client does not read. Raises RuntimeError for a head or a body that would
        be taken for something else.
        """
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if not cycle.response_started:
            self._begin(message["status"], message.get("headers", ()))
        elif cycle.response_complete:
            raise RuntimeError("the answer is complete already")
        else:
            self._go_on(message.get("body", b""), message.get("more_body", False))

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        cycle, has_body = self._cycle, status not in WITHOUT_BODY and self._cycle.scope["method"] != "HEAD"
        lines, left, closes = [], None, False
        for name, value in (*cycle.default_headers, *headers):
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                left = int(value)
            elif name == b"connection" and b"close" in value.lower():
                closes = True
        if closes:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        if has_body and left is None:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"%b%b\r\n" % (STATUS_LINE[status], b"".join(lines))
        if head.count(b"\n") != len(lines) + 2 or head.count(b"\r") != len(lines) + 2 or b"\0" in head:
            raise RuntimeError("a header of the answer would be taken for two")
        self._head, self._left = head, left if has_body else None
        cycle.response_started, cycle.waiting_for_100_continue = True, False

    def _go_on(self, body: bytes, more: bool) -> None:
        if self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        elif self._left is None:
            body = b""
        else:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError(f"the body is not as long as its head says, by {self._left} bytes")
        if self._head:
            body, self._head = self._head + body, b""
        if body:
            self._transport.write(body)
        if not more:
            self._end()

    def _end(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()

    # as the cycle's transport

    def write(self, data: bytes) -> None:
        """100 Continue."""
        self._transport.write(data)

    def close(self) -> None:
        """Close in the middle of an answer, which then ends where it is."""
        if self._head:
            self._transport.write(self._head)
            self._head = b""
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
