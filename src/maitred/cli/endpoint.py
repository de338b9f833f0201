"""An OpenAI server as commands see it: at a URL, or the same application in this process without a port."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator, Container, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from maitred.core.errors import ConfigError, ServerError
from maitred.fleet import upstream
from maitred.fleet.config import parse_target

DONE = b"[DONE]"


class SSEParser:
    """Feed it bytes as they come; an event counts once its blank line is there."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events completed by `piece`; comments (keep-alive) and other fields are dropped."""
        text = self._rest + piece
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        return [data for event in events if (data := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


MAX_ERROR_TEXT = 300  # characters of a foreign error message that are worth showing
ADMIN_HINT = "; give an administrator's --api-key"


class Unreachable(ServerError):
    """The server cannot be reached, or it went away in the middle of an answer."""


class Untrusted(Unreachable):
    """A server answers there, but not one that this address and this machine would trust."""


class TimedOut(Unreachable):
    """The server accepted the request and gave no whole answer in time."""


class ServerRefused(ServerError):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.status = status


@dataclass(slots=True)
class Reply:
    """An answer whose body is still arriving. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.body])


class Endpoint(Protocol):
    """Destination of requests. Leaving the context of `post` early cancels the request."""

    def post(self, path: str, body: bytes) -> AbstractAsyncContextManager[Reply]: ...

    def get(self, path: str) -> AbstractAsyncContextManager[Reply]: ...


def error_text(status: int, body: bytes) -> str:
    """The error text in a server's answer, whatever shape it has."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        found = body.decode("utf-8", "replace").strip() or f"status {status} without a message"
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:MAX_ERROR_TEXT]


async def first_model(endpoint: Endpoint) -> str:
    """The first name that /v1/models lists."""
    async with endpoint.get("/v1/models") as reply:
        body = await reply.read()
    if reply.status != 200:
        raise ServerRefused(reply.status, error_text(reply.status, body) + "; check --url and --api-key")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise ServerError("the server lists no model at /v1/models; name one with --model") from None


def base_url(url: str) -> str:
    """`http://host:8000/v1/` -> `http://host:8000`. Raises ConfigError when it is not an HTTP address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url is {url!r}; it must look like http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


class HttpEndpoint:
    """A server at a URL. Use as an asynchronous context manager; any number of requests may be in flight."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float | None = None) -> None:
        self.url = base_url(url)
        self._origin = parse_target(self.url).origin
        self._headers = [(b"content-type", b"application/json")]
        if api_key is not None:
            self._headers.append((b"authorization", f"Bearer {api_key}".encode()))
        self._timeout_s = timeout_s
        self._upstream: upstream.Upstream

    async def __aenter__(self) -> HttpEndpoint:
        counts = upstream.ConnectionCounts()
        self._upstream = upstream.Upstream(self._origin, counts=counts, connect_timeout_s=10.0, max_idle=sys.maxsize)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._upstream.close()

    def post(self, path: str, body: bytes) -> AbstractAsyncContextManager[Reply]:
        return self._request("POST", path, body)

    def get(self, path: str) -> AbstractAsyncContextManager[Reply]:
        return self._request("GET", path, b"")

    async def whole(
        self, path: str, body: bytes | None = None, *, hint: str = "", hint_at: Container[int] = (404,)
    ) -> bytes:
        """The whole answer to a GET, or to a POST of `body`, of an administrator. Raises Refused, Unreachable."""
        async with self.get(path) if body is None else self.post(path, body) as reply:
            answer = await reply.read()
        if reply.status not in (200, 202):
            more = ADMIN_HINT if reply.status in (401, 403) else hint if reply.status in hint_at else ""
            raise ServerRefused(reply.status, error_text(reply.status, answer) + more)
        return answer

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[Reply]:
        ask = upstream.UpstreamAsk(upstream.request_head(method, path, self._origin, self._headers, len(body)), body)
        answer: upstream.UpstreamAnswer | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._upstream.send(ask)
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}
                yield Reply(answer.status, headers, _pieces(answer))
        except TimeoutError:
            raise TimedOut(f"{self.url} gave no answer in time; send less at once, or raise the time limit") from None
        except upstream.UpstreamFailed as failed:
            raise self._told(failed) from failed
        finally:
            if answer is not None:
                answer.abort()

    def _told(self, failed: upstream.UpstreamFailed) -> Unreachable:
        cause = failed.__cause__
        if isinstance(cause, ssl.SSLCertVerificationError):
            remedy = "name the file with its authority's certificate in SSL_CERT_FILE"
            return Untrusted(f"the certificate of {self.url} is not trusted: {cause.verify_message}; {remedy}")
        if isinstance(cause, ssl.SSLError):
            return Untrusted(f"{self.url} does not speak HTTPS as we do; without a certificate it is http://")
        if failed.broken is upstream.Broken.REFUSED:
            number = getattr(cause, "errno", None) or 0
            why = os.strerror(number) if number > 0 else getattr(cause, "strerror", None) or str(cause) or "no answer"
            return Unreachable(f"cannot reach {self.url}: {why}; start a server there, or check --url")
        hint = "" if self._origin.is_tls else ", or write https:// if it has a certificate"
        return Unreachable(f"the connection broke: {failed}; see the server's log{hint}")


async def _pieces(answer: upstream.UpstreamAnswer) -> AsyncIterator[bytes]:
    while piece := await answer.piece():
        yield piece


class AppEndpoint:
    """An ASGI application in this process: what it answers is what it would send over a port."""

    def __init__(self, app: Any, *, api_key: str | None = None) -> None:
        self._app = app
        self._headers = [(b"host", b"in-process"), (b"content-type", b"application/json")]
        if api_key is not None:
            self._headers.append((b"authorization", f"Bearer {api_key}".encode()))

    def post(self, path: str, body: bytes) -> AbstractAsyncContextManager[Reply]:
        return self._request("POST", path, body)

    def get(self, path: str) -> AbstractAsyncContextManager[Reply]:
        return self._request("GET", path, b"")

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[Reply]:
        exchange = _Exchange(body)
        task = asyncio.create_task(self._app(self._scope(method, path, body), exchange.receive, exchange.send))
        task.add_done_callback(exchange.ended)
        try:
            start = await exchange.sent.get()
            if start is None or start["type"] != "http.response.start":
                _raise_failure(task)
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
            yield Reply(start["status"], headers, exchange.body(task))
        finally:
            exchange.left.set()
            if not exchange.complete:
                task.cancel()
            await asyncio.wait([task])  # also after the last byte, for what the application still has to do

    def _scope(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [*self._headers, (b"content-length", str(len(body)).encode())],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 80),
            "state": {},
        }


class _Exchange:
    """One request and its response between us and the application."""

    def __init__(self, body: bytes) -> None:
        self._request: bytes | None = body
        self.sent: asyncio.Queue[Any] = asyncio.Queue()  # None is the end
        self.left = asyncio.Event()  # we went away
        self.complete = False  # the last piece of the answer was sent

    async def receive(self) -> dict[str, Any]:
        if self._request is not None:
            body, self._request = self._request, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        self.sent.put_nowait(message)

    def ended(self, task: asyncio.Task[None]) -> None:
        self.sent.put_nowait(None)

    async def body(self, task: asyncio.Task[None]) -> AsyncIterator[bytes]:
        while (message := await self.sent.get()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                return
        _raise_failure(task)


def _raise_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.done() and (error := task.exception()) is not None:
        raise error
    raise Unreachable("the application ended without a complete answer")
