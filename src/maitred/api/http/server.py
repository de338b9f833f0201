"""The server around the application: listening, certificates, signals, a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from socket import socket
from types import FrameType
from typing import NamedTuple, Protocol

import uvicorn

from maitred.api.http.asgi import AsgiApp
from maitred.api.http.connection import GuardedConnection
from maitred.api.http.logs import ERRORS
from maitred.api.http.service import Service
from maitred.config import ServerConfig
from maitred.core.errors import ConfigError
from maitred.engine.starting import Engine, StartingEngine

logger = logging.getLogger(__name__)
LOOK_S = 1.0  # between two looks at the files
_Stamp = tuple[tuple[int, int, int], ...]
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_EXPLICIT_VERSION, _UTC_TIME = 0xA0, 0x17  # tags; the other kind of time is GeneralizedTime


class Certificate:
    """One SSL context for the life of the server; new handshakes use what was loaded last. TLS 1.2 and later.

    An expired one is used, and told with its date: not every client looks, its owner may know, and the clock that is
    wrong may be ours.
    """

    def __init__(self, certfile: str, keyfile: str | None, *, today: Callable[[], float] = time.time) -> None:
        """`keyfile` None: the key stands in `certfile` too. Raises ConfigError when they cannot be used."""
        self._certfile, self._keyfile, self._today = certfile, keyfile, today
        self._stamp = self._stamp_of_files()
        self._validity: Validity | None = None  # of what is in force, where it can be read
        self._told_fault: str | None = None
        self.context = _server_context()
        self._load(self.context)
        self._read_dates()

    def look(self) -> None:
        """Take in new files. Those that cannot be used are told once and leave the old ones in force."""
        stamp = self._stamp_of_files()
        if stamp != self._stamp:
            self._stamp = stamp
            self.reload()
        self._look_at_dates()

    def reload(self) -> None:
        try:
            self._load(_server_context())  # a try: a context that failed half-way would be left without its key
            self._load(self.context)
        except ConfigError as error:
            logger.error("%s; the certificate before stays in force", error)
        else:
            logger.warning("the certificate of %s is in force", self._certfile)
            self._read_dates()

    async def keep_fresh(self) -> None:
        """Look at the files for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    @contextmanager
    def hearing_hangup(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Reload on SIGHUP, after the handler set before. Outside of the main thread no signals are heard."""
        before = signal.getsignal(signal.SIGHUP)

        def hung_up(number: int, frame: FrameType | None) -> None:
            if callable(before):
                before(number, frame)
            loop.call_soon_threadsafe(self.reload)

        try:
            signal.signal(signal.SIGHUP, hung_up)
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._certfile, self._keyfile, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"cannot use the certificate {self._certfile} with the key {self._keyfile or 'in it'}: {reason}; "
                "--ssl-certfile is a PEM file with the chain, --ssl-keyfile one with its key, without a password"
            ) from None

    def _read_dates(self) -> None:
        self._validity, self._told_fault = None, None
        with contextlib.suppress(OSError, ValueError):
            self._validity = validity_of_chain(self._certfile)
        self._look_at_dates()

    def _look_at_dates(self) -> None:
        """Tell when the certificate in force is none for clients that look at its dates; once."""
        fault = self._validity.fault(self._today()) if self._validity is not None else None
        if fault is not None and fault != self._told_fault:
            logger.warning("the certificate of %s %s: clients that verify it refuse to connect", self._certfile, fault)
        self._told_fault = fault

    def _stamp_of_files(self) -> _Stamp:
        stamps = []
        for name in (self._certfile, self._keyfile):
            if name is not None:
                with contextlib.suppress(OSError):  # between two names of a swap; the next look sees it
                    stat = Path(name).stat()
                    stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(stamps)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    """Asked when the key has one: OpenSSL would ask at the terminal, and wait."""
    raise ValueError("the key has a password")


class Validity(NamedTuple):
    begins: datetime
    ends: datetime

    def fault(self, now: float) -> str | None:
        """What is wrong with the certificate at `now` (unix seconds), in words with the date; None if nothing."""
        if now < self.begins.timestamp():
            return f"is not valid before {self.begins:%Y-%m-%d %H:%M:%S} UTC"
        if now > self.ends.timestamp():
            return f"expired on {self.ends:%Y-%m-%d %H:%M:%S} UTC"
        return None


def validity_of_chain(certfile: str) -> Validity:
    """When all certificates of the chain are valid. Raises OSError, and ValueError for what is not X.509 in PEM."""
    try:
        found = [_validity(ssl.PEM_cert_to_DER_cert(pem)) for pem in _PEM.findall(Path(certfile).read_text("latin-1"))]
        return Validity(max(each.begins for each in found), min(each.ends for each in found))
    except LookupError as error:
        raise ValueError(f"{certfile} holds something else than certificates: {error}") from None


def _validity(certificate: bytes) -> Validity:
    """RFC 5280, 4.1: Certificate { TBSCertificate { [version], serial, signature, issuer, validity ..."""
    fields = _elements(_elements(_elements(certificate)[0][1])[0][1])
    _, validity = fields[4 if fields[0][0] == _EXPLICIT_VERSION else 3]
    begins, ends = (_time(tag, content.decode("ascii")) for tag, content in _elements(validity))
    return Validity(begins, ends)


def _time(tag: int, text: str) -> datetime:
    if tag == _UTC_TIME:  # two digits of the year; 50 and later are of the last century (4.1.2.5.1)
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _elements(content: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element of a DER sequence (X.690, 8.1). Raises ValueError for what is none."""
    elements, at = [], 0
    while at < len(content):
        tag, length, at = content[at], int.from_bytes(content[at + 1 : at + 2], "big"), at + 2
        if length & 0x80:  # so many bytes hold it
            size = length & 0x7F
            length, at = int.from_bytes(content[at : at + size], "big"), at + size
        if at + length > len(content):
            raise ValueError(f"an element of {length} bytes at {at}, of {len(content)}")
        elements.append((tag, content[at : at + length]))
        at += length
    return elements


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
            await starting.checked(came)
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
            self._draining = asyncio.create_task(self._drain())  # which a signal cuts
            await self._draining
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
