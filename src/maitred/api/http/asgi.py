"""The ASGI application: finds the route, and around it request id, API key, errors, one access line, counts."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from functools import partial

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from maitred.api.http.auth import authorization
from maitred.api.http.errors import BrokenOff, ClientGone, HttpError, http_error
from maitred.api.http.exchange import CONNECTION, ON_BEHALF, REQUEST_ID, TOLD_OF_BODIES, Exchange, Header
from maitred.api.http.fleet_headers import BELIEVED, TENANT, without_believed
from maitred.api.http.fleet_headers import HEADER as FLEET_TOKEN
from maitred.api.http.logs import ERRORS, log_fields
from maitred.api.http.routes import FoundRoute, RouteTable
from maitred.api.http.service import Service
from maitred.core.clock import Clock
from maitred.core.errors import EngineDead, Overloaded, Unavailable
from maitred.core.replica import ReplicaState
from maitred.tenancy.caller import Caller

TOLD_AGAIN_S = 60.0
ASKED_BY, TOLD_BY = b"endpoint-load-metrics-format", b"endpoint-load-metrics"  # load reports, see `load_report`
RATE_LIMIT_HEADERS = tuple(
    name
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
    for name in (f"x-ratelimit-{what}-{of}", f"anthropic-ratelimit-{of}-{what}")
)
EXPOSED_HEADERS = (
    *("x-request-id", "retry-after", "retry-after-ms", "x-should-retry", *(h.decode() for h in TOLD_OF_BODIES)),
    *RATE_LIMIT_HEADERS,
)


class AsgiApp:
    """Makes the Exchange that routes answer through, and is the one place where exceptions become answers."""

    def __init__(self, app: Service, routes: RouteTable, told: tuple[Header, ...] = ()) -> None:
        """`told` are headers of every answer."""
        self.app, self.routes, self._told = app, routes, told
        app.asgi = self
        self._outage = Outage(app.clock)
        self._random = random.Random()  # ids are no secrets, and the system's own source costs a system call each
        self._asgi: ASGIApp = self._answer
        if app.config.cors_origins:  # outermost: preflights bring no key, and errors need its headers too
            self._asgi = CORSMiddleware(
                self._answer,
                allow_origins=app.config.cors_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "neither lifespan nor web sockets are spoken here"
        await self._asgi(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        method, path = scope["method"], scope["path"]
        found = self.routes.look(method, path)
        exchange = Exchange(
            scope=scope,
            receive=receive,
            raw_send=send,
            request_id=self._request_id(headers.get(b"x-request-id")),
            max_body_bytes=self.app.config.max_body_bytes,
            large_bodies=self.app.large_bodies,
            headers=headers,
            format=found.format,
            told=self._told,
        )
        exchange.standing_headers = partial(self._standing, exchange)
        observer = self.app.observer
        observed = observer.began(exchange, found.span)
        try:
            exchange.from_router = FLEET_TOKEN in headers and self.app.fleet_token.is_shown_by(headers)
            behalf = scope.get(ON_BEHALF)
            if behalf is None:
                exchange.caller = self._caller(found, headers, is_router=exchange.from_router)
            else:
                exchange.caller = behalf()
            if found.needs_engine:
                self.app.check_loaded()
            route, exchange.parameter = found[:2] if found.route is not None else self.routes.find(method, path)
            assert route is not None, "else it was told what there is"
            exchange.route = route
            if route.admin:
                exchange.caller.require_admin(route.admin)
            await route.handler(self.app, exchange)
        except ClientGone:
            observer.client_gone(exchange)
        except Exception as error:
            await _answer_error(exchange, error, self._outage)
        finally:
            if exchange.is_large:
                exchange.large_bodies.release(exchange)
            observer.ended(exchange, observed)

    def _caller(self, found: FoundRoute, headers: dict[bytes, bytes], *, is_router: bool) -> Caller:
        """The caller of a request. A router that shows the fleet's token vouches for callers, and needs no key on
        routes for routers; from other clients such headers are dropped. Raises InvalidApiKey.
        """
        if is_router and TENANT in headers:
            return self.app.authenticator.vouched(headers)
        if not is_router and not BELIEVED.isdisjoint(headers):
            without_believed(headers)
        is_open = not found.needs_key or (is_router and found.is_for_routers)
        return self.app.authenticator.check(authorization(headers), is_open=is_open)

    def _standing(self, exchange: Exchange) -> list[Header]:
        """Headers of every answer, as of its beginning: the caller's limits, the load for balancers that ask, and that
        a draining server closes the connection.
        """
        headers: list[Header] = []
        if hasattr(exchange, "caller") and not exchange.caller.is_anybody and exchange.caller.tenant.limits.any:
            told = exchange.format.limit_headers(exchange.caller.quota, self.app.clock.now())
            headers += [(name.encode(), value.encode()) for name, value in told]
        asked = exchange.headers.get(ASKED_BY)
        if exchange.trace_header is not None:
            headers.append(exchange.trace_header)
        report = load_report(asked, self.app.replica.state()) if asked is not None else None
        if report is not None:
            headers.append((TOLD_BY, report))
        return [*headers, (b"connection", b"close")] if self.app.in_flight.draining else headers

    def _request_id(self, sent: bytes | None) -> str:
        """The client's own, if it is one that cannot forge a log line or a header, else a new one."""
        if sent is not None and REQUEST_ID.fullmatch(sent):
            return sent.decode()
        return f"{self._random.getrandbits(128):032x}"


class Outage:
    """Logs why requests are sent away: when the reason changes and once a minute, however many clients try."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._why: str | None = None
        self._told_at = 0.0
        self._num_untold = 0

    def tell(self, request_id: str, why: str) -> None:
        """Note one more request that was sent away."""
        now = self._clock.now()
        if why == self._why and now < self._told_at + TOLD_AGAIN_S:
            level, others = logging.DEBUG, None
            self._num_untold += 1
        else:
            level, others = logging.WARNING, self._num_untold or None
            self._why, self._told_at, self._num_untold = why, now, 0
        fields = {"request_id": request_id, "error": why, "others_before": others}
        log_fields(ERRORS, level, "requests are sent away", fields)


def load_report(form: bytes, state: ReplicaState) -> bytes | None:
    """Load for balancers: Open Request Cost Aggregation (ORCA) as Envoy reads it, with the names that gateways for
    language models look for. None for a form that is neither TEXT nor JSON.
    """
    figures = _figures(state)
    match form.strip().upper():
        case b"TEXT":
            return ("TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in figures.items())).encode()
        case b"JSON":
            return b"JSON " + msgspec.json.encode({"named_metrics": figures})
    return None


def _figures(state: ReplicaState) -> Mapping[str, float]:
    return {
        "kv_cache_usage_perc": round(state.num_blocks_used / state.num_blocks, 4) if state.num_blocks else 0.0,
        "num_requests_waiting": float(state.num_waiting),
        "num_requests_running": float(state.num_running),
    }


async def _answer_error(exchange: Exchange, error: Exception, outage: Outage) -> None:
    answer = http_error(error, exchange.field_names())._replace(request_id=exchange.request_id)
    if type(error) in (Unavailable, EngineDead) and not exchange.started:
        if (
            exchange.route is None or not exchange.route.is_polled
        ):  # the poller hears it, and the server's own log tells of the cause
            outage.tell(exchange.request_id, str(error))
    elif answer.status >= 500 and not isinstance(error, Overloaded):  # those are many, and the access line has them
        _log_error(exchange, error, answer)
    exchange.log["error"] = answer.code
    if not exchange.started:
        await exchange.answer_error(answer)
    elif isinstance(error, BrokenOff):
        exchange.scope[CONNECTION].break_off()
    elif exchange.streaming and not exchange.complete:
        event = exchange.format.error_event(answer) + exchange.format.stream.end
        await exchange.send({"type": "http.response.body", "body": event})


def _log_error(exchange: Exchange, error: Exception, answer: HttpError) -> None:
    expected = answer.status in (503, 504) or answer.code == "generation_failed"
    fields = {"request_id": exchange.request_id, "error": str(error)}
    if expected:
        log_fields(ERRORS, logging.WARNING, "request failed", fields)
    else:
        ERRORS.error("request failed", exc_info=error, extra={"fields": fields})
