"""An answer as bytes: head and first piece of the body in one system call, framed as the head says (RFC 9112, 6)."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

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
