"""Is told of the router's HTTP requests: counts them, and writes the access log."""

from __future__ import annotations

import time

from maitred.api.http.errors import CLIENT_GONE_STATUS
from maitred.api.http.exchange import Exchange
from maitred.api.ops.observer import log_access
from maitred.api.route.metrics import RouteMetrics


class RouteObserver:
    """Belongs to the event loop."""

    def __init__(self, metrics: RouteMetrics) -> None:
        self.metrics = metrics

    def began(self, exchange: Exchange, operation: str) -> float:
        self.metrics.num_in_flight += 1
        return time.monotonic()

    def client_gone(self, exchange: Exchange) -> None:
        exchange.status = CLIENT_GONE_STATUS
        self.metrics.num_cancelled += 1

    def ended(self, exchange: Exchange, observed: float) -> None:
        self.metrics.num_in_flight -= 1
        self.metrics.http_answered(exchange.route_name, exchange.status or CLIENT_GONE_STATUS)
        log_access(exchange, time.monotonic() - observed)
