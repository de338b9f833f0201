"""What a server and a router are alike: clients' keys, the gate, observer, results, ledger and the fleet's token."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Message

from maitred.api.http.auth import Authenticator
from maitred.api.http.bodies import LargeBodies
from maitred.api.http.exchange import ON_BEHALF, Header
from maitred.api.http.fleet_headers import FleetToken
from maitred.api.http.results import Results
from maitred.api.ops.observer import HttpObserver
from maitred.config import ServerConfig
from maitred.core.clock import Clock
from maitred.core.replica import ReplicaState
from maitred.gate.gate import Gate
from maitred.storage.ledger import Ledger
from maitred.tenancy.caller import Caller

if TYPE_CHECKING:
    from maitred.storage.redis import RedisStore
    from maitred.storage.state import StateStore

logger = logging.getLogger(__name__)


class Ending(Protocol):
    """A server's orderly end."""

    draining: bool

    def drain(self, within_s: float) -> None:
        """Refuse new requests; requests in flight have `within_s` left."""

    async def emptied(self) -> None:
        """Returns when every request has its answer."""

    def cut_all(self) -> None:
        """End every request in flight with an error."""


class HasState(Protocol):
    """An engine, or a fleet, for reports of the load."""

    def state(self) -> ReplicaState: ...

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Live on `loop` from now on."""


class Service:
    """Routes get it as their first argument, and know which it is."""

    observer: HttpObserver[Any]
    replica: HasState
    in_flight: Ending
    asgi: Any  # the application in front, an AsgiApp, which sets it

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Clock,
        authenticator: Authenticator,
        observer: HttpObserver[Any],
        gate: Gate,
        fleet_token: FleetToken,
        ledger: Ledger | None = None,
        store: RedisStore | None = None,
        salt_secret: bytes | None = None,
    ) -> None:
        """`store` keeps results for several routers. `salt_secret` None is the fleet's token, or is drawn."""
        self.config, self.clock, self.authenticator, self.observer = config, clock, authenticator, observer
        self.gate, self.fleet_token, self.ledger = gate, fleet_token, ledger
        self.large_bodies = LargeBodies(config.max_body_bytes)
        self.results = Results(config.result_cache_bytes, config.result_cache_ttl_s, clock, shared=store)
        observer.metrics.results = self.results
        shared = b"".join(secret for _, secret in fleet_token.shown())
        self.salt_secret = salt_secret or shared or secrets.token_bytes(32)
        self.lasting: dict[str, Any] = {}  # made when it is first asked for, and one for all views of this service
        if config.state_dir is not None:
            _ = self.stored  # a folder that cannot be used is told before anybody asks

    @property
    def stored(self) -> StateStore:
        """What clients left here; opened at its first use, or at the start where there is a folder."""
        if "stored" not in self.lasting:
            from maitred.storage.state import StateStore  # noqa: PLC0415 - sqlite3, for those who use it

            self.lasting["stored"] = StateStore(self.config.state_dir)
        found: StateStore = self.lasting["stored"]
        return found

    async def ask(
        self, path: str, headers: list[Header], body: bytes, behalf: Callable[[], Caller]
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body that the application answers to a request of our own, without a connection."""
        come: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            return come.pop() if come else await asyncio.get_running_loop().create_future()  # the client stays

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path}
        of_us = {"raw_path": path.encode(), "query_string": b"", "headers": headers, ON_BEHALF: behalf}
        try:
            await self.asgi(scope | of_us, receive, send)
        except Exception:  # the answer broke off where a client would have lost its connection
            logger.warning("an answer of %s to a request of our own broke off", path, exc_info=True)
        if len(sent) < 2 or sent[-1].get("more_body"):
            return 503, {}, b""
        told = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
        return sent[0]["status"], told, b"".join(message.get("body", b"") for message in sent[1:])

    def check_loaded(self) -> None:
        """Raises Unavailable before what routes need is there; a router holds requests instead."""

    def open(self, replica: Any, model: Any, admission: Any) -> None:
        """Take the engine that the server waited for; never called where it waits for none."""
        raise AssertionError("a router waits for nothing to open")

    def close(self) -> None:
        """Give back what is held; nothing is answered any more."""
        self.observer.close()
        for made in reversed(self.lasting.values()):
            made.close()
