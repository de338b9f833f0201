"""Routes for machines: version and metrics."""

from __future__ import annotations

from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange
from maitred.api.ops.fleet_feed import identity


async def version(app: App, exchange: Exchange) -> None:
    """What this server is, which a router believes rather than a 200."""
    await exchange.answer_json(identity(app.loaded_model))


async def metrics(app: App, exchange: Exchange) -> None:
    """The Prometheus page, or OpenMetrics when the Accept header asks for it; it names tenants, so not for them."""
    page, content_type = app.observer.metrics.page(exchange.headers.get(b"accept", b"").decode("latin-1"))
    await exchange.answer(page, 200, ((b"content-type", content_type.encode()),))
