"""An OpenAI server as commands see it: at a URL, or the same application in this process without a port."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from maitred.errors import ConfigError, ServerError

MAX_ERROR_TEXT = 300  # characters of a foreign error message that are worth showing


class Unreachable(ServerError):
    """The server cannot be reached, or it went away in the middle of an answer."""


class Untrusted(Unreachable):
    """Somebody answers there, but not as a server that this address and this machine would trust."""


class TimedOut(Unreachable):
    """The server accepted the request and gave no whole answer in time."""


class Refused(ServerError):
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
    """Where requests go. Leaving the context of `post` early cancels the request."""

    def post(self, path: str, body: bytes) -> AbstractAsyncContextManager[Reply]: ...

    def get(self, path: str) -> AbstractAsyncContextManager[Reply]: ...


def error_text(status: int, body: bytes) -> str:
    """What a server says went wrong, in whatever shape it says it."""
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
        raise Refused(reply.status, error_text(reply.status, body) + "; check --url and --api-key")
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
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._session: Any = None

    async def __aenter__(self) -> HttpEndpoint:
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=10),
            headers=self._headers,
            auto_decompress=True,
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    def post(self, path: str, body: bytes) -> AbstractAsyncContextManager[Reply]:
        return self._request("POST", path, body)

    def get(self, path: str) -> AbstractAsyncContextManager[Reply]:
        return self._request("GET", path, None)

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: bytes | None) -> AsyncIterator[Reply]:
        import aiohttp

        try:
            async with self._session.request(method, self.url + path, data=body) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                yield Reply(response.status, headers, response.content.iter_any())
        except TimeoutError:
            raise TimedOut(f"{self.url} gave no answer in time; send less at once, or raise the time limit") from None
        except aiohttp.ClientConnectorCertificateError as error:
            cause = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
            remedy = "name the file with its authority's certificate in SSL_CERT_FILE"
            raise Untrusted(f"the certificate of {self.url} is not trusted: {cause}; {remedy}") from None
        except aiohttp.ClientConnectorSSLError:
            raise Untrusted(f"{self.url} does not speak HTTPS as we do; without a certificate it is http://") from None
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            cause = os.strerror(number) if number is not None and number > 0 else error.os_error.strerror
            raise Unreachable(f"cannot reach {self.url}: {cause}; start a server there, or check --url") from error
        except aiohttp.InvalidURL:
            raise ConfigError(f"url is {self.url!r}; it must look like http://127.0.0.1:8000") from None
        except aiohttp.ClientError as error:
            cause = str(error) or type(error).__name__
            secret = isinstance(error, aiohttp.ServerDisconnectedError) and self.url.startswith("http:")
            hint = ", or write https:// if it has a certificate" if secret else ""
            raise Unreachable(f"the connection to {self.url} broke: {cause}; see the server's log{hint}") from error


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
