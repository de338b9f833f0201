"""Metrics, latencies, traces and the access log of one server: told what happens, and asked for no decision."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import maitred
from maitred.api.generate.outcome import Sample
from maitred.api.http.errors import CLIENT_GONE_STATUS
from maitred.api.http.exchange import Exchange
from maitred.api.http.logs import ACCESS, log_fields
from maitred.api.ops.live_feed import Latencies
from maitred.api.ops.metrics_page import EdgeMetrics, HttpMetrics, Promises
from maitred.config import ServerConfig
from maitred.core.clock import Clock
from maitred.core.errors import ConfigError
from maitred.engine.replica import LoadingReplica

if TYPE_CHECKING:
    from maitred.api.ops.tracing import Tracing


@dataclass(slots=True)
class Observed:
    """One HTTP request, from its beginning on."""

    began_at: float  # s, monotonic
    operation: str


M = TypeVar("M", bound=HttpMetrics)


class HttpObserver(Generic[M]):
    """Is told of every HTTP request of a server or a router, and asked for no decision. Belongs to the event loop."""

    def __init__(self, config: ServerConfig, clock: Clock, metrics: M) -> None:
        """`clock` is the one that requests' times are of. Raises ConfigError for traces without what they need."""
        self.metrics, self.promises = metrics, metrics.promises
        self._clock = clock
        self._tracing = tracing_to(config.otlp_endpoint)

    def began(self, exchange: Exchange, operation: str) -> Observed:
        """A request came; `operation` names what is traced, and is empty for what is not."""
        if self._tracing is not None and operation:
            exchange.span = self._tracing.begin(exchange)
            exchange.trace_header = self._tracing.header_of(exchange.span)
        self.metrics.num_in_flight += 1
        return Observed(time.monotonic(), operation)

    def client_gone(self, exchange: Exchange) -> None:
        """Count a request that was cancelled because its client left."""
        exchange.status = CLIENT_GONE_STATUS
        self.metrics.num_cancelled += 1

    def ended(self, exchange: Exchange, observed: Observed) -> None:
        """Take the end of a request: it was answered, or its client left."""
        self.metrics.num_in_flight -= 1
        self.metrics.http_answered(exchange.route_name, exchange.status or CLIENT_GONE_STATUS)
        log_access(exchange, time.monotonic() - observed.began_at)
        if observed.operation and not self.promises.is_empty:
            self.promises.ended(exchange, observed.began_at)
        if self._tracing is not None and exchange.span is not None:
            self._tracing.end(exchange.span, observed.operation, exchange, self._clock.now())

    def close(self) -> None:
        """Send the last traces."""
        if self._tracing is not None:
            self._tracing.close()


class Observer(HttpObserver[EdgeMetrics]):
    """Of a server: samples and tokens too."""

    def __init__(
        self,
        config: ServerConfig,
        clock: Clock,
        *,
        start_phases: Mapping[str, float] | None = None,
        num_tenants_file_failures: Callable[[], int] = int,
    ) -> None:
        metrics = EdgeMetrics(
            LoadingReplica(),
            version=maitred.__version__,
            compat=config.metrics_compat,
            start_phases=start_phases,
            start_budget_s=config.start_budget_s,
            promises=Promises(config.slo),
            num_tenants_file_failures=num_tenants_file_failures,
        )
        super().__init__(config, clock, metrics)
        self.latencies = Latencies()
        self.keeps_gaps = self.promises.keeps_gaps

    def tokens_came(self, tenant: str, num_tokens: int, gap_s: float | None) -> None:
        """`num_tokens` of one sample, each `gap_s` after the one before; None for its first ones."""
        if gap_s is not None:
            self.metrics.tokens_came(gap_s, num_tokens)
            self.latencies.between_tokens.observe(gap_s, num_tokens)
        self.latencies.tokens_came(tenant, num_tokens)

    def sample_ended(self, sample: Sample) -> None:
        """Whatever its end was."""
        timing, num_prompt = sample.timing, sample.request.num_prompt_tokens
        self.metrics.sample_finished(timing, num_prompt_tokens=num_prompt, num_tokens=sample.num_tokens)
        if sample.request.adapter:
            adapter = sample.request.adapter.partition("@")[0]
            self.metrics.adapters.ended(adapter, num_prompt, sample.num_tokens)
        if timing is not None:
            self.latencies.answer_ended(timing)


def log_access(exchange: Exchange, duration_s: float) -> None:
    """Log one line for each request."""
    is_asset = exchange.route is not None and exchange.route.is_asset
    level = logging.DEBUG if is_asset and (exchange.status or CLIENT_GONE_STATUS) < 400 else logging.INFO
    if not ACCESS.isEnabledFor(level):
        return
    client = exchange.scope.get("client")
    tenant = exchange.caller.tenant.name if hasattr(exchange, "caller") else None
    fields: dict[str, Any] = {
        "method": exchange.scope["method"],
        "path": exchange.scope["path"],
        "status": exchange.status or CLIENT_GONE_STATUS,
        "ms": round(duration_s * 1000, 1),
        "request_id": exchange.request_id,
        "client": client[0] if client else None,
        "tenant": tenant or None,
        **exchange.log,
    }
    log_fields(ACCESS, level, "access", fields)


def tracing_to(endpoint: str | None) -> Tracing | None:
    """Tracing to `endpoint`; None without one. Raises ConfigError without the extra `otel`."""
    if not endpoint:
        return None
    try:
        from maitred.api.ops.tracing import make_tracing  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError:
        raise ConfigError("traces need OpenTelemetry; install it with: pip install 'maitred[otel]'") from None
    return make_tracing(endpoint, version=maitred.__version__)
