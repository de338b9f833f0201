"""Is told of the router's HTTP requests: counts them, traces them, and writes the access log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from maitred.api.http.errors import CLIENT_GONE_STATUS
from maitred.api.http.exchange import Exchange
from maitred.api.ops.observer import Observed, log_access, tracing_to
from maitred.api.ops.promises import Promises
from maitred.api.route.metrics import RouteMetrics
from maitred.clock import Clock
from maitred.cluster.actions import Bind
from maitred.config import ServerConfig
from maitred.objectives import new_pace

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from maitred.api.ops.tracing import Tracing


class RouteObserver:
    """Belongs to the event loop."""

    def __init__(self, config: ServerConfig, clock: Clock, metrics: RouteMetrics, promises: Promises) -> None:
        """Raises ConfigError for traces without what they need."""
        self.metrics, self._clock, self._promises = metrics, clock, promises
        self._tracing = tracing_to(config.otlp_endpoint)
        self._spans: dict[Exchange, Span] = {}  # of the requests that are traced, until they have ended

    def began(self, exchange: Exchange, operation: str) -> Observed:
        """A request came; `operation` names what generates, and is empty for what does not."""
        self.metrics.num_in_flight += 1
        if operation and not self._promises.is_empty:
            exchange.paces = (new_pace(keeps_gaps=self._promises.keeps_gaps),)
        span = None
        if self._tracing is not None and operation:
            span = self._spans[exchange] = _begin(self._tracing, exchange)
        return Observed(time.monotonic(), operation, span)

    def attempted(self, exchange: Exchange, bind: Bind, held_s: float) -> None:
        """It goes to a replica, for the first time or again, having been held for `held_s` in all."""
        span = self._spans.get(exchange)
        if span is not None:
            told: dict[str, str | float] = {"maitred.replica": bind.choice.replica, "maitred.held_s": held_s}
            span.add_event("attempt", told | {"maitred.attempt": bind.attempt, "maitred.resumes": bind.resumes})

    def client_gone(self, exchange: Exchange) -> None:
        exchange.status = CLIENT_GONE_STATUS
        self.metrics.num_cancelled += 1

    def ended(self, exchange: Exchange, observed: Observed) -> None:
        self.metrics.num_in_flight -= 1
        self.metrics.http_answered(exchange.route_name, exchange.status or CLIENT_GONE_STATUS)
        if observed.operation:
            self._promises.ended(exchange, observed.began_at)
        log_access(exchange, time.monotonic() - observed.began_at)
        if self._tracing is not None and observed.span is not None:
            del self._spans[exchange]
            told = {f"maitred.{name}": exchange.log.get(name) for name in ("replica", "held_ms")}
            observed.span.set_attributes({name: value for name, value in told.items() if value is not None})
            self._tracing.end(observed.span, observed.operation, exchange, self._clock.now())

    def close(self) -> None:
        """Send the last traces."""
        if self._tracing is not None:
            self._tracing.close()


def _begin(tracing: Tracing, exchange: Exchange) -> Span:
    """The request's span; what replicas do for it is below that, and no longer below the client's."""
    span = tracing.begin(exchange)
    exchange.trace_header = tracing.header_of(span)
    others = [header for header in exchange.scope["headers"] if header[0] != b"traceparent"]
    exchange.scope["headers"] = [*others, exchange.trace_header]
    return span
