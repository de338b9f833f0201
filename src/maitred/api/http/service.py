"""What application, connections and server need of the routes' object: one engine's App, or a router."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from maitred.api.http.auth import Authenticator
from maitred.api.http.bodies import LargeBodies
from maitred.api.http.exchange import Exchange
from maitred.api.http.fleet_headers import FleetToken
from maitred.config import ServerConfig
from maitred.core.clock import Clock
from maitred.core.replica import ReplicaState


class HttpCounts(Protocol):
    """Counts of every HTTP request, and the page of all metrics."""

    num_in_flight: int

    def http_answered(self, route: str, status: int) -> None: ...

    def page(self, accept: str) -> tuple[bytes, str]:
        """All metrics for Prometheus and their content type, in the format `accept` asks for."""


class HttpObserver(Protocol):
    """Is told of every HTTP request, and asked for no decision."""

    @property
    def metrics(self) -> HttpCounts: ...

    def began(self, exchange: Exchange, operation: str) -> Any: ...

    def client_gone(self, exchange: Exchange) -> None: ...

    def ended(self, exchange: Exchange, observed: Any) -> None:
        """`observed` is what `began` gave."""


class Ending(Protocol):
    """A server's orderly end."""

    @property
    def draining(self) -> bool: ...

    def drain(self, within_s: float) -> None:
        """Refuse new requests; requests in flight have `within_s` left."""

    async def emptied(self) -> None:
        """Returns when every request has its answer."""

    def cut_all(self) -> None:
        """End every request in flight with an error."""


class HasState(Protocol):
    def state(self) -> ReplicaState: ...

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Live on `loop` from now on."""


class Service(Protocol):
    """Routes get it as their first argument, and know which it is."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def authenticator(self) -> Authenticator: ...

    @property
    def fleet_token(self) -> FleetToken:
        """The token that routers show to be believed."""

    @property
    def large_bodies(self) -> LargeBodies: ...

    @property
    def observer(self) -> HttpObserver: ...

    @property
    def in_flight(self) -> Ending: ...

    @property
    def replica(self) -> HasState:
        """The replica, for reports of the load."""

    def check_loaded(self) -> None:
        """Raises Unavailable before what routes need is there."""

    def open(self, replica: Any, model: Any, admission: Any) -> None:
        """Take the engine that the server waited for; never called where it waits for none."""

    def close(self) -> None:
        """Give back what is held; nothing is answered any more."""
