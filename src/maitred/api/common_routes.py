"""Routes that a server of one engine and a router have alike, one record each: probes, usage, metrics,
the page, files and batches."""

from __future__ import annotations

from functools import partial
from typing import Any

from maitred.api.dialects.anthropic.schemas import ANTHROPIC, BatchParams
from maitred.api.dialects.openai import batch_schemas as b
from maitred.api.dialects.openai import usage
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.api.http.routes import Handler, Route
from maitred.api.http.service import Service
from maitred.api.ops import page
from maitred.api.ops.page import FILES
from maitred.core.errors import RouteNotFound


def probe_routes(*, health: Handler, ready: Handler) -> tuple[Route, ...]:
    """Routes polled by supervisors and load balancers; none needs a key."""
    polled = partial(Route, is_open=True, is_polled=True, errors=(503,))
    return (
        polled(path="/health", handler=health, summary="Whether it lives."),
        polled(path="/ready", handler=ready, summary="Whether new requests are welcome."),
        polled(path="/readyz", handler=ready, summary="The same as /ready."),
    )


def role_route(show: Handler, *, answer: type, more_errors: tuple[int, ...] = ()) -> Route:
    """The route of the workers and their roles; a router's workers are whole servers."""
    return Route(
        path="/admin/roles",
        handler=show,
        summary="The workers: what each is for, and how it is.",
        answer=answer,
        admin="see roles",
        errors=(401, 403, *more_errors),
    )


USAGE = Route(
    path="/v1/organization/usage/completions",
    handler=usage.show_usage,
    summary="Tokens and requests by time and tenant, from the ledger; for administrators.",
    admin="read usage",
    answer=usage.UsagePage,
    errors=(400, 401, 403, 404, 503),
    query=usage.USAGE_QUERY,
)


async def _metrics(server: Service, exchange: Exchange) -> None:
    """The Prometheus page, or OpenMetrics when the Accept header asks for it; it names tenants, so not for them."""
    told, content_type = server.observer.metrics.page(exchange.headers.get(b"accept", b"").decode("latin-1"))
    await exchange.answer(told, 200, ((b"content-type", content_type.encode()),))


METRICS = Route(
    path="/metrics",
    handler=_metrics,
    summary="Metrics for Prometheus.",
    admin="read metrics",
    while_loading=True,
    text="text/plain",
    errors=(401, 403),
)

PAGE = (
    Route(
        path="/", handler=page.index, summary="The page: chat and live view.", is_open=True, text="text/html", errors=()
    ),
    Route(
        path="/static/{name}",
        handler=page.asset,
        summary="A file of the page.",
        is_open=True,
        open_names=FILES,
        is_asset=True,
        text="*/*",
        errors=(401, 404),
    ),
)


async def _batches(app: Service, exchange: Exchange) -> None:
    """Answer by the handler of the method, the route's path, and what follows the id in the request's."""
    # SQLite, for those who leave something here
    if exchange.format is ANTHROPIC:
        from maitred.api.dialects.anthropic.batches import HANDLERS  # noqa: PLC0415
    else:
        from maitred.api.dialects.openai.batches import HANDLERS  # noqa: PLC0415
    route, (id, _, more) = exchange.route, exchange.parameter.partition("/")
    if route is None or (route.method, route.path, more) not in HANDLERS:
        raise RouteNotFound(f"there is nothing at {shortened(exchange.scope['path'])}")
    await HANDLERS[route.method, route.path, more](app, exchange, id)


def resume_batches(app: Service) -> None:
    """Go on, in the event loop, with batches that an earlier process did not finish."""
    if app.config.state_dir is not None:
        from maitred.api.batches import batches_of  # noqa: PLC0415 - likewise

        batches_of(app).resume()


_PAGE: dict[str, dict[str, Any]] = {"after": {"type": "string"}, "limit": {"type": "integer", "minimum": 1}}
_LISTED = {**_PAGE, "order": {"enum": ["asc", "desc"]}, "purpose": {"type": "string"}}
_file = partial(Route, handler=_batches, answer=b.FileObject, errors=(400, 401, 404, 408, 413, 415, 503))
_batch = partial(Route, handler=_batches, answer=b.BatchObject, errors=(400, 401, 404, 413, 415, 503))
_messages = partial(_batch, answer=None, text="application/json", format=ANTHROPIC)
BATCH_ROUTES = (
    _file(
        method="POST",
        path="/v1/files",
        summary="Leave a file.",
        body=b.FileForm,
        body_type="multipart/form-data",
    ),
    _file(path="/v1/files", summary="List files.", answer=b.StoredList, query=_LISTED),
    _file(path="/v1/files/{id:path}", summary="A file; with /content after its id, what is in it."),
    _file(method="DELETE", path="/v1/files/{id:path}", summary="Delete a file.", answer=b.Deleted),
    _batch(
        method="POST",
        path="/v1/batches",
        summary="Answer a file of requests with what no other request uses.",
        body=b.BatchCreate,
        tells_ignored=True,
    ),
    _batch(path="/v1/batches", summary="List batches.", answer=b.StoredList, query=_PAGE),
    _batch(path="/v1/batches/{id:path}", summary="One batch."),
    _batch(method="POST", path="/v1/batches/{id:path}", summary="Cancel a batch, with /cancel after its id."),
    _messages(
        method="POST",
        path="/v1/messages/batches",
        summary="Answer many messages with what no other request uses.",
        body=BatchParams,
    ),
    _messages(path="/v1/messages/batches", summary="List Anthropic's batches.", query=_PAGE),
    _messages(path="/v1/messages/batches/{id:path}", summary="One of them; with /results, what became of its lines."),
    _messages(method="POST", path="/v1/messages/batches/{id:path}", summary="Cancel it, with /cancel after its id."),
    _messages(method="DELETE", path="/v1/messages/batches/{id:path}", summary="Delete it, once it has ended."),
)
