"""Every route of the router. What is not listed goes to a replica."""

from __future__ import annotations

from functools import partial

import maitred
from maitred.api.common_routes import METRICS, PAGE, probe_routes, role_route, usage_route
from maitred.api.dialects.openai.format import OPENAI
from maitred.api.http.exchange import Exchange
from maitred.api.http.routes import Route, RouteTable
from maitred.api.route import admin
from maitred.api.route.generate import embed, generate, pass_through, post_kserve
from maitred.api.route.router import Router
from maitred.api.tensor.error_text import TEXT_ERRORS
from maitred.core.errors import Unavailable
from maitred.fleet.routed_body import GENERATE_ENDS

_ERRORS = (400, 401, 403, 404, 413, 429, 500, 502, 503, 504)


async def _models(router: Router, exchange: Exchange) -> None:
    """The union: what any replica serves, but for others' adapters."""
    await exchange.answer_json({"object": "list", "data": router.models.cards(exchange.caller)})


async def _model(router: Router, exchange: Exchange) -> None:
    name = exchange.parameter
    served = await router.models.named_in(exchange.scope["path"])
    card = next((card for card in router.models.cards(exchange.caller) if card["id"] == name), None)
    if card is not None:
        await exchange.answer_json(card)
    elif served is None:
        raise router.models.not_found(name, exchange.caller)
    else:  # one of tensors, or what TF Serving tells of it
        await pass_through(router, exchange)


async def _health(router: Router, exchange: Exchange) -> None:
    await exchange.answer(b"", 200, ())


async def _ready(router: Router, exchange: Exchange) -> None:
    """200 while requests are welcome: a replica is there, or one would be started for them."""
    if router.draining:
        raise Unavailable("the router is shutting down; send requests elsewhere")
    if not router.fleet.is_ready:
        raise Unavailable("no replica is ready yet; requests are held")
    await exchange.answer(b"", 200, ())


async def _version(router: Router, exchange: Exchange) -> None:
    await exchange.answer_json({"version": maitred.__version__, "name": "maitred-route"})


FALLBACK = Route(
    method="*", path="/{path:path}", handler=pass_through, summary="Whatever a replica answers.", errors=_ERRORS
)

_passed_on = partial(Route, handler=pass_through, errors=_ERRORS)
_generation = partial(Route, method="POST", handler=generate, errors=_ERRORS)
_order = partial(Route, method="POST", answer=admin.Accepted, errors=(400, 401, 403, 413, 415))

ROUTES = RouteTable(
    (
        _generation(path="/v1/chat/completions", summary="Answer a conversation.", span="chat"),
        _generation(path="/v1/completions", summary="Continue one or more texts.", span="text_completion"),
        Route(method="POST", path="/v1/embeddings", handler=embed, summary="Vectors of texts.", errors=_ERRORS),
        Route(method="GET", path="/v1/models", handler=_models, summary="The models of all replicas."),
        Route(method="GET", path="/v1/models/{model:path}", handler=_model, summary="One model.", errors=(401, 404)),
        _passed_on(method="POST", path="/v1/models/{model:path}", summary="TF Serving's predict, classify, regress."),
        _passed_on(
            method="GET", path="/v2/{path:path}", summary="KServe v2: what a replica tells.", format=TEXT_ERRORS
        ),
        Route(
            method="POST",
            path="/v2/{path:path}",
            handler=post_kserve,
            summary="KServe v2: infer, generate.",
            format=TEXT_ERRORS,
            span="text_completion",
            span_ends=GENERATE_ENDS,
            errors=_ERRORS,
        ),
        *probe_routes(health=_health, ready=_ready),
        Route(method="GET", path="/version", handler=_version, summary="The version of the router."),
        METRICS,
        usage_route(lambda router: router.ledger),
        *PAGE,
        Route(
            method="GET",
            path="/admin/fleet",
            handler=admin.show_fleet,
            summary="Who is held, and which replicas there are.",
            admin="see the fleet",
            errors=(401, 403),
        ),
        Route(
            method="GET",
            path="/admin/fleet/choices/{id:path}",
            handler=admin.show_choices,
            summary="Where one of the last requests went, and each term of the choice.",
            admin="see choices",
            errors=(401, 403, 404),
        ),
        role_route(admin.show_roles, answer=admin.FleetRoles),
        _order(
            path="/admin/fleet/drain",
            handler=admin.drain,
            summary="Let a replica finish what it has, and give it no more.",
            admin="drain a replica",
            body=admin.Named,
        ),
        _order(
            path="/admin/fleet/restart",
            handler=admin.restart,
            summary="Start one replica anew, or all one by one; no request is lost.",
            admin="restart replicas",
            body=admin.MaybeNamed,
        ),
        _order(
            path="/admin/fleet/scale",
            handler=admin.scale,
            summary="Change how many replicas there may be.",
            admin="scale the fleet",
            body=admin.ReplicaBounds,
        ),
    ),
    OPENAI,
    fallback=FALLBACK,
)
