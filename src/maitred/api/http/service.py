"""What a server and a router are alike: clients' keys, the gate, observer, results, ledger and the fleet's token."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Protocol

from maitred.api.http.auth import Authenticator
from maitred.api.http.bodies import LargeBodies
from maitred.api.http.fleet_headers import FleetToken
from maitred.api.http.results import Results
from maitred.api.ops.observer import HttpObserver
from maitred.config import ServerConfig
from maitred.core.clock import Clock
from maitred.core.replica import ReplicaState
from maitred.gate.gate import Gate
from maitred.storage.ledger import Ledger

if TYPE_CHECKING:
    from maitred.storage.redis import RedisStore
    from maitred.storage.state import StateStore


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
