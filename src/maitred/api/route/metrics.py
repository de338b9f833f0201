"""The router's metrics: its requests and attempts, and the fleet as the core sees it when the page is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric as Family

import maitred
from maitred.api.ops.metrics_page import Histogram, HttpMetrics, Promises, family_of
from maitred.core import metrics as m
from maitred.core.clock import Clock
from maitred.core.metrics import Metric
from maitred.fleet.core import ClusterCore
from maitred.fleet.fleet_request import FailureKind, FleetRequest
from maitred.fleet.upstream import ConnectionCounts
from maitred.storage.redis import RedisStore

if TYPE_CHECKING:
    pass


class RouteMetrics(HttpMetrics):
    """One router's counts, and the fleet as its core sees it."""

    def __init__(self, *, promises: Promises, num_tenants_file_failures: Callable[[], int]) -> None:
        super().__init__(promises, num_tenants_file_failures)
        self.queue_wait = Histogram(m.FLEET_QUEUE_WAIT)
        self.store: RedisStore | None = None
        self._attempts: Counter[tuple[str, ...]] = Counter()
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._starts = Counter({(origin,): 0 for origin in m.FLEET_ORIGINS})
        self._num_resumed = self.num_escalated = self.num_fell_back = 0
        self._num_keys_hit = self._num_keys_missed = 0
        self._fleet: tuple[ClusterCore, Clock, ConnectionCounts] | None = None

    def looks_at(self, core: ClusterCore, clock: Clock, connections: ConnectionCounts) -> None:
        """Show this fleet on the page from now on."""
        self._fleet = core, clock, connections

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

    def collect(self) -> Iterator[Family]:
        """Called by the registry for each page."""
        yield self.queue_wait.family()
        for metric in m.TENANT_METRICS:
            yield family_of(metric, self.tenants.samples(metric))
        samples = self.http_samples() | {m.INFO: {(maitred.__version__, ""): 1.0}}
        samples |= self._fleet_samples() | self._redis_samples()
        for metric, values in samples.items():
            yield family_of(metric, values)

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
            m.FLEET_ESCALATED: {(): float(self.num_escalated)},
            m.FLEET_FELL_BACK: {(): float(self.num_fell_back)},
            m.FLEET_HELD: {(): float(view.held)},
            m.FLEET_OLDEST_HELD: {(): view.oldest_held_s},
            m.FLEET_PREFIX_KEYS: {("hit",): float(self._num_keys_hit), ("miss",): float(self._num_keys_missed)},
            m.FLEET_LOAD_RATIO: {(): _load_ratio([r.in_flight for r in view.replicas if r.state == "ready"])},
            m.FLEET_CONNECTIONS: {("new",): float(connections.num_new), ("reused",): float(connections.num_reused)},
        }


def _load_ratio(loads: list[int]) -> float:
    """The largest beside the mean; 1 is even, and idle."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
