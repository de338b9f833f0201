"""Routes for machines: version and metrics."""

from __future__ import annotations

import msgspec

import maitred
from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange


class VersionResponse(msgspec.Struct):
    version: str


async def version(app: App, exchange: Exchange) -> None:
    await exchange.answer_json(VersionResponse(maitred.__version__))


async def metrics(app: App, exchange: Exchange) -> None:
    """The Prometheus page, or OpenMetrics when the Accept header asks for it; it names tenants, so not for them."""
    page, content_type = app.observer.metrics.page(exchange.headers.get(b"accept", b"").decode("latin-1"))
    await exchange.answer(page, 200, ((b"content-type", content_type.encode()),))
