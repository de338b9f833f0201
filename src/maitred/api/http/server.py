"""The server around the application: listening, signals, a graceful end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from socket import socket
from types import FrameType
from typing import Protocol

import uvicorn

from maitred.api.http.asgi import AsgiApp
from maitred.api.http.connection import GuardedConnection
from maitred.api.http.logs import ERRORS
from maitred.api.http.service import Service
from maitred.api.http.tls import Certificate
from maitred.config import ServerConfig
from maitred.engine.starting import Engine, StartingEngine

CUT_S = 2.0  # requests that may not finish have this long to tell their clients


class BesideServer(Protocol):
    """Another protocol's server, on the same event loop."""

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError if it is not free."""

    async def stop(self, within_s: float) -> None:
        """Stop; calls under way have `within_s` left."""


class HttpServer(uvicorn.Server):
    """uvicorn, except for its end: the first signal drains, the second or the drain's time-out cuts, and the exit code
    is ours.

    While it drains it goes on listening, to answer new requests with a 503 rather than refuse connections. uvicorn
    raises the signal again when it is done, which would end the process with the signal's status.
    """

    def __init__(
        self,
        app: AsgiApp,
        config: ServerConfig,
        *,
        starting: StartingEngine | None = None,
        is_ending: Callable[[], bool] = lambda: False,
        on_open: Callable[[str, int], None] | None = None,
        beside: BesideServer | None = None,
    ) -> None:
        """`starting` is what the app waits for to open; without, it is open already. `beside` is for `grpc_port`."""
        metrics = app.app.observer.metrics
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                loop="uvloop",
                http=partial(GuardedConnection, config, app.routes.format, partial(metrics.http_answered, "other")),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # clients may not choose the address that the log shows
                timeout_keep_alive=75,
            )
        )
        self._certificate: Certificate | None = None
        if config.ssl_certfile is not None:
            self._certificate = Certificate(config.ssl_certfile, config.ssl_keyfile)
            self.config.load()
            self.config.ssl = self._certificate.context
        self.app: Service = app.app
        self._drain_timeout_s = config.drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._starting, self._is_ending, self._on_open = starting, is_ending, on_open
        self._opening: asyncio.Task[None] | None = None
        self._beside = beside
        self._grpc_port = config.grpc_port
        self.engine: Engine | None = None
        """What `starting` gave, once it has."""
        self.failure: Exception | None = None
        """Why it never opened, if it did not."""

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self._certificate is not None:
            self._freshening = asyncio.create_task(self._certificate.keep_fresh())
        if self._beside is not None and self._grpc_port is not None:
            port = await self._beside.start(self.config.host, self._grpc_port)
            logging.getLogger("maitred.start").info("gRPC is served on port %d", port)
        host, port = (sockets or [s for server in self.servers for s in server.sockets])[0].getsockname()[:2]
        if self._starting is not None:
            self._opening = asyncio.create_task(self._open_when_loaded(self._starting, host, port))
        else:
            self._opened(host, port)
        if self._is_ending():
            self._signalled(signal.SIGTERM)

    async def _open_when_loaded(self, starting: StartingEngine, host: str, port: int) -> None:
        try:
            came = self.engine = await asyncio.to_thread(starting.wait)
            self.app.open(came.replica, came.model, came.admission)
            self._opened(host, port)
        except Exception as error:
            self.failure, self.should_exit = error, True

    def _opened(self, host: str, port: int) -> None:
        self.app.replica.attach(asyncio.get_running_loop())  # to see its engine die before the first request
        if self._on_open is not None:
            self._on_open(host, port)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        if self._draining is None:  # no signal: should_exit was set
            await self._drain()
        if self._starting is not None and self._opening is not None:
            await self._stop_opening(self._starting, self._opening)
        if self._certificate is not None:
            self._freshening.cancel()
        if self._beside is not None:
            await self._beside.stop(CUT_S)
        self.config.timeout_graceful_shutdown = int(CUT_S)
        try:
            await super().shutdown(sockets)
        finally:
            self.app.close()

    async def _stop_opening(self, starting: StartingEngine, opening: asyncio.Task[None]) -> None:
        """Give up loading. A server that is told to stop reports no failure for its missing engine."""
        if not opening.done():
            starting.give_up()
            await opening
            self.failure = None

    async def _drain(self) -> None:
        """Wait for what is in flight; what takes longer ends with an error object rather than a silent break."""
        self.app.in_flight.drain(self._drain_timeout_s)
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self.app.in_flight.emptied()
        except TimeoutError:
            self._cut(f"{self._drain_timeout_s:g} s have passed")
        self.should_exit = True

    def _cut(self, why: str) -> None:
        """End what is in flight, and log that it was not let finish."""
        ERRORS.warning(
            "%s: what is in flight ends with an error (%d requests)", why, self.app.observer.metrics.num_in_flight
        )
        self.app.in_flight.cut_all()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        hangup = self._certificate.hearing_hangup(loop) if self._certificate is not None else nullcontext()

        def heard(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._signalled, number)

        try:
            # not the loop's own handlers: between those and the ones before, the system's would end the process
            before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not in the main thread: the code that started us stops us
            yield
            return
        try:
            with hangup:
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int) -> None:
        if self._draining is not None:
            self._cut("a second signal came")
            self.should_exit = True
        else:
            in_flight = self.app.observer.metrics.num_in_flight
            words = "the server ends; %d requests in flight have %g s to finish, and a second %s stops at once"
            again = "Ctrl-C" if number == signal.SIGINT else "signal"
            ERRORS.info(words, in_flight, self._drain_timeout_s, again)
            self._draining = asyncio.get_running_loop().create_task(self._drain())
