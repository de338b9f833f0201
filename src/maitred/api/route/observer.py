"""Is told of the router's HTTP requests: counts them, and writes the access log."""

from __future__ import annotations

import time

from maitred.api.http.errors import CLIENT_GONE_STATUS
from maitred.api.http.exchange import Exchange
from maitred.api.ops.observer import log_access
from maitred.api.ops.promises import Promises
from maitred.api.route.metrics import RouteMetrics
from maitred.objectives import new_pace


class RouteObserver:
    """Belongs to the event loop."""

    def __init__(self, metrics: RouteMetrics, promises: Promises) -> None:
        self.metrics, self._promises = metrics, promises

    def began(self, exchange: Exchange, operation: str) -> tuple[float, bool]:
        """When, and whether it generates."""
        self.metrics.num_in_flight += 1
        if operation and not self._promises.is_empty:
            exchange.paces = (new_pace(keeps_gaps=self._promises.keeps_gaps),)
        return time.monotonic(), bool(operation)

    def client_gone(self, exchange: Exchange) -> None:
        exchange.status = CLIENT_GONE_STATUS
        self.metrics.num_cancelled += 1

    def ended(self, exchange: Exchange, observed: tuple[float, bool]) -> None:
        self.metrics.num_in_flight -= 1
        self.metrics.http_answered(exchange.route_name, exchange.status or CLIENT_GONE_STATUS)
        began_at, generates = observed
        if generates:
            self._promises.ended(exchange, began_at)
        log_access(exchange, time.monotonic() - began_at)
