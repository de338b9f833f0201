"""The router's metrics: counts of its HTTP side, and the fleet as the core sees it when the page is asked for."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import maitred
from maitred.api.http.errors import CLIENT_GONE_STATUS
from maitred.api.http.exchange import Exchange
from maitred.api.http.results import Results
from maitred.api.ops.metrics_page import Histogram, Promises, TenantCounts, family_of, result_cache_samples
from maitred.api.ops.observer import Observed, log_access, tracing_to
from maitred.config import ServerConfig
from maitred.core import metrics as m
from maitred.core.clock import Clock
from maitred.core.metrics import Metric
from maitred.core.objectives import new_pace
from maitred.fleet.actions import Bind
from maitred.fleet.core import ClusterCore
from maitred.fleet.fleet_request import FailureKind, FleetRequest
from maitred.fleet.upstream import ConnectionCounts
from maitred.storage.redis import RedisStore

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from maitred.api.ops.tracing import Tracing


class RouteMetrics(Collector):
    """One router's counts, and its page."""

    def __init__(self, *, promises: Promises | None = None, num_tenants_file_failures: Callable[[], int] = int) -> None:
        self._promises = promises or Promises(())
        self.num_in_flight = 0
        self.num_cancelled = 0
        self.num_log_lines_dropped: Callable[[], int] = lambda: 0
        self.tenants = TenantCounts(num_tenants_file_failures)
        self.queue_wait = Histogram(m.FLEET_QUEUE_WAIT)
        self.results: Results | None = None
        self.store: RedisStore | None = None
        self._answered: Counter[tuple[str, ...]] = Counter()
        self._attempts: Counter[tuple[str, ...]] = Counter()
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._starts = Counter({(origin,): 0 for origin in m.FLEET_ORIGINS})
        self._num_resumed = 0
        self._num_keys_hit = self._num_keys_missed = 0
        self._fleet: tuple[ClusterCore, Clock, ConnectionCounts] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def looks_at(self, core: ClusterCore, clock: Clock, connections: ConnectionCounts) -> None:
        """Show this fleet on the page from now on."""
        self._fleet = core, clock, connections

    def http_answered(self, route: str, status: int) -> None:
        self._answered[route, str(status)] += 1

    def attempted(self, request: FleetRequest, *, resumes: bool) -> None:
        """A request goes to a replica, for the first time or again."""
        self._attempts["sent",] += 1
        self._num_resumed += resumes
        num_hit = round(len(request.keys) * min(1.0, request.num_cached / request.num_inputs))
        self._num_keys_hit += num_hit
        self._num_keys_missed += len(request.keys) - num_hit

    def started(self, origin: str) -> None:
        """A replica of the router's own is to take requests."""
        self._starts[origin,] += 1

    def failed(self, kind: FailureKind) -> None:
        """An attempt failed."""
        self._attempts[kind.value,] += 1

    def routed(self, replica: str, outcome: str, held_s: float) -> None:
        """A request is over: answered, failed or cancelled; `replica` is the last that it was with."""
        self._requests[replica, outcome] += 1
        self.queue_wait.observe(held_s)

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format `accept` asks for. Called in the event loop."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Family]:
        """Called by the registry for each page."""
        yield self.queue_wait.family()
        for metric in m.TENANT_METRICS:
            yield family_of(metric, self.tenants.samples(metric))
        samples = self._http_samples() | self._fleet_samples() | result_cache_samples(self.results)
        samples |= self._redis_samples()
        for metric, values in samples.items():
            yield family_of(metric, values)

    def _http_samples(self) -> dict[Metric, dict[tuple[str, ...], float]]:
        return {
            m.INFO: {(maitred.__version__, ""): 1.0},
            m.HTTP_IN_FLIGHT: {(): float(self.num_in_flight)},
            m.LOOP_TASKS: {(): float(len(asyncio.all_tasks()))},
            m.HTTP_REQUESTS: {labels: float(count) for labels, count in self._answered.items()},
            m.REQUESTS_IN_OBJECTIVE: self._promises.samples(),
            m.REQUESTS_CANCELLED: {(): float(self.num_cancelled)},
            m.LOG_LINES_DROPPED: {(): float(self.num_log_lines_dropped())},
        }

    def _redis_samples(self) -> dict[Metric, dict[tuple[str, ...], float]]:
        if self.store is None or self.results is None:
            return {}
        return {
            m.REDIS_UP: {(): float(self.store.is_up)},
            m.REDIS_DROPPED: {(): float(self.store.num_dropped)},
            m.REDIS_CORRUPT: {(): float(self.results.num_corrupt)},
        }

    def _fleet_samples(self) -> dict[Metric, dict[tuple[str, ...], float]]:
        if self._fleet is None:
            return {}
        core, clock, connections = self._fleet
        view = core.view(clock.now())
        states = Counter(replica.state for replica in view.replicas)
        return {
            m.FLEET_REPLICAS: {(state,): float(states[state]) for state in m.FLEET_STATES},
            m.FLEET_REQUESTS: {labels: float(count) for labels, count in self._requests.items()},
            m.FLEET_STARTS: {labels: float(count) for labels, count in self._starts.items()},
            m.FLEET_ATTEMPTS: {labels: float(count) for labels, count in self._attempts.items()},
            m.FLEET_RESUMES: {(): float(self._num_resumed)},
            m.FLEET_HELD: {(): float(view.held)},
            m.FLEET_OLDEST_HELD: {(): view.oldest_held_s},
            m.FLEET_PREFIX_KEYS: {("hit",): float(self._num_keys_hit), ("miss",): float(self._num_keys_missed)},
            m.FLEET_LOAD_RATIO: {(): _load_ratio([r.in_flight for r in view.replicas if r.state == "ready"])},
            m.FLEET_CONNECTIONS: {
                ("new",): float(connections.num_new),
                ("reused",): float(connections.num_reused),
            },
        }


def _load_ratio(loads: list[int]) -> float:
    """The largest beside the mean; 1 is even, and idle."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


class RouteObserver:
    """Counts the router's HTTP requests, traces them, and writes the access log. Belongs to the event loop."""

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
        """Trace a request on its way to a replica, for the first time or again, held for `held_s` in all."""
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
