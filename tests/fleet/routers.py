"""A router in a thread of this process, in front of whatever a test puts there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from maitred.api.http.auth import Authenticator
from maitred.api.http.fleet_headers import FleetToken
from maitred.api.route.router import Router
from maitred.api.route.routes import make_server
from maitred.config import AdmissionConfig, SchedulerConfig, ServerConfig
from maitred.fleet.config import FleetConfig, SharedConfig, parse_target
from maitred.fleet.swapping import ModelSet
from maitred.storage.key_files import TenantFile
from tests.waiting import HANGS_S, joined, until_async

MODEL = "mini"


@dataclass(slots=True)
class RunningRouter:
    url: str
    router: Router

    @property
    def states(self) -> list[str]:
        return [replica.state for replica in self.router.fleet.core.view(self.router.clock.now()).replicas]

    async def wait_for(self, *states: str) -> None:
        await until_async(lambda: self.states == list(states))


@contextmanager
def running_router(
    *urls: str,
    token: FleetToken | None = None,
    tenants: TenantFile | None = None,
    policy: str = "fcfs",
    redis: str | None = None,
    admission: AdmissionConfig | None = None,
    server: dict[str, Any] | None = None,
    several: ModelSet | None = None,
    **fleet: Any,
) -> Iterator[RunningRouter]:
    """On a free loopback port; the block ends with a graceful stop. `fleet` and `server` are fields of configs."""
    config = ServerConfig(**{"port": 0, "log_level": "warning", "drain_timeout_s": 1.0, **(server or {})})
    router = Router(
        config, FleetConfig(**fleet), SchedulerConfig(policy=policy), tuple(parse_target(url) for url in urls),
        admission=admission, token=token, authenticator=Authenticator(config.api_keys, tenants),
        shared=SharedConfig(redis=redis), several=several,
    )  # fmt: skip
    listening = threading.Event()
    where: list[int] = []

    def on_open(host: str, port: int) -> None:
        where.append(port)
        listening.set()

    running = make_server(router, on_open=on_open)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    assert listening.wait(HANGS_S), "the router did not start"
    try:
        yield RunningRouter(f"http://127.0.0.1:{where[0]}", router)
    finally:
        running.should_exit = True
        joined(thread)


_OF_ROUTERS = ("/v1/models", "/health", "/version", "/ready", "/fleet/events")


def a_server(answer: Script, *, models: tuple[str, ...] = (MODEL,)) -> Script:
    """A foreign server that is well: `answer` is for what is not asked of its health and models."""
    cards = [{"id": name, "object": "model", "owned_by": "somebody"} for name in models]

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path == "/v1/models":
            writer.write(whole(json.dumps({"object": "list", "data": cards}).encode()))
        elif seen.path == "/health":
            writer.write(whole(b""))
        elif seen.path == "/version":
            writer.write(whole(b'{"version":"0.11.0"}'))
        else:
            await answer(seen, writer)

    return script


def one_of_ours(answer: Script) -> Script:
    """As `maitred serve`, which tells nothing of its prefixes."""
    foreign = a_server(answer)

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path == "/version":
            writer.write(whole(json.dumps({"version": "1", "name": "maitred", "models": [MODEL], "slots": 4}).encode()))
        elif seen.path == "/ready":
            writer.write(whole(b""))
        elif seen.path == "/fleet/events":
            writer.write(whole(b"{}", "404 Not Found"))
        else:
            await foreign(seen, writer)

    return script


def asked(fake: FakeUpstream) -> list[Seen]:
    """What clients sent there."""
    return [seen for seen in fake.requests if seen.path not in _OF_ROUTERS]


@asynccontextmanager
async def routed(*answers: Script, **config: Any) -> AsyncIterator[tuple[RunningRouter, list[FakeUpstream]]]:
    """A router in front of one fake for each of `answers`; all are ready."""
    contexts = [fake_upstream(a_server(answer)) for answer in answers]
    fakes = [await context.__aenter__() for context in contexts]
    with running_router(*(fake.url for fake in fakes), **config) as running:
        await running.wait_for(*["ready"] * len(fakes))
        yield running, fakes
        for context in contexts:
            await context.__aexit__(None, None, None)


def completion(text: str = "hi", num_prompt_tokens: int = 5) -> bytes:
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 2, "total_tokens": num_prompt_tokens + 2}
    return json.dumps({"id": "x", "choices": [{"message": {"content": text}}], "usage": usage}).encode()


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


@asynccontextmanager
async def client_of(running: RunningRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=HANGS_S) as client:
        yield client


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


DONE = b"data: [DONE]\n\n"
WHOLE_STREAM = STREAM_HEAD + chunk(event("one")) + chunk(event("two")) + chunk(DONE) + LAST_CHUNK
