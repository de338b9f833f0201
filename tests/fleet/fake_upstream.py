"""A server of raw bytes, to be as wrong as a test wants: it reads requests, and a script answers each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Seen:
    """One request, as it came."""

    start: str  # "POST /v1/completions HTTP/1.1"
    headers: dict[str, str]
    body: bytes
    connection: int  # which one it came on, from 0

    @property
    def path(self) -> str:
        return self.start.split()[1]


Script = Callable[["Seen", asyncio.StreamWriter], Awaitable[object]]


@dataclass(slots=True)
class FakeUpstream:
    """Answers by `script`; `requests` are those that came whole."""

    script: Script
    port: int = 0
    num_connections: int = 0
    num_open: int = 0
    requests: list[Seen] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.num_connections, self.num_open = self.num_connections, self.num_connections + 1, self.num_open + 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                seen = await read_request(reader, number)
                self.requests.append(seen)
                await self.script(seen, writer)
                await writer.drain()
        self.num_open -= 1
        writer.close()


async def read_request(reader: asyncio.StreamReader, number: int = 0) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(head[0], headers, body, number)


@asynccontextmanager
async def fake_upstream(script: Script, port: int = 0) -> AsyncIterator[FakeUpstream]:
    """Listens until the block ends, on a free port unless one is given."""
    fake = FakeUpstream(script)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", port)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()


def says(*pieces: bytes, then: str = "") -> Script:
    """Writes these bytes to whoever asks. `then`: `close` or `reset` the connection, or `wait` for ever."""

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        await _ending(writer, then)

    return script


async def _ending(writer: asyncio.StreamWriter, then: str) -> None:
    if then == "wait":
        await asyncio.Event().wait()
    elif then == "reset":
        writer.transport.abort()
    elif then == "close":
        writer.close()


def whole(body: bytes, status: str = "200 OK", headers: str = "content-type: application/json\r\n") -> bytes:
    """An answer with its length."""
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)
