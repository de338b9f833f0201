"""Every route of the router, its administrators' too, and its server. What is not listed goes to a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from socket import socket
from typing import Any

import msgspec

import maitred
from maitred.api.common_routes import BATCH_ROUTES, METRICS, PAGE, USAGE, probe_routes, resume_batches, role_route
from maitred.api.dialects.anthropic.models import MODELS_QUERY, answer_cards, is_anthropics, model_of
from maitred.api.dialects.anthropic.schemas import ANTHROPIC
from maitred.api.dialects.ollama.routes import router_routes
from maitred.api.dialects.openai.answers import OPENAI
from maitred.api.dialects.responses.stored import response_routes
from maitred.api.http.asgi import AsgiApp
from maitred.api.http.exchange import Exchange
from maitred.api.http.logs import configure_logging
from maitred.api.http.routes import TEXT_ERRORS, Route, RouteTable
from maitred.api.http.server import HttpServer
from maitred.api.ops.live import LoadedModel, LoadedModels
from maitred.api.route.generate import embed, generate, generate_body, pass_through, post_kserve
from maitred.api.route.router import Router
from maitred.core.errors import (
    ConfigError,
    InvalidRequest,
    RouteNotFound,
    Unavailable,
    UnsupportedParameter,
    did_you_mean,
)
from maitred.fleet.actions import MAX_REQUESTS
from maitred.fleet.disagg import Role
from maitred.fleet.prefix_keys import GENERATE_ENDS
from maitred.fleet.swapping import ModelSet, ModelView


class Named(msgspec.Struct, forbid_unknown_fields=True):
    """One replica."""

    name: str


class MaybeNamed(msgspec.Struct, forbid_unknown_fields=True):
    """One replica, or all of them, one by one."""

    name: str | None = None


class ReplicaBounds(msgspec.Struct, forbid_unknown_fields=True):
    """How many replicas there are to be."""

    min: int
    max: int


class LoadAsked(msgspec.Struct, forbid_unknown_fields=True):
    """One of several models, by its name or an alias."""

    model: str
    keep_alive_s: float | None = None  # without a request it is kept so long, below 0 for ever; null is its own


class UnloadAsked(msgspec.Struct, forbid_unknown_fields=True):
    """One of several models, put out as soon as it is idle."""

    model: str


class Accepted(msgspec.Struct, frozen=True):
    """It begins; GET /admin/fleet shows how far it is."""

    status: str = "accepted"


class RoutedWorker(msgspec.Struct, frozen=True):
    """A replica whose KV others pull."""

    worker: str  # the replica's name
    role: Role
    state: str
    kv_addresses: tuple[str, ...]
    num_running: int  # as it told


class FleetRoles(msgspec.Struct, frozen=True):
    """The replicas and their roles."""

    workers: tuple[RoutedWorker, ...]


_decode_named = msgspec.json.Decoder(Named)
_decode_maybe_named = msgspec.json.Decoder(MaybeNamed)
_decode_bounds = msgspec.json.Decoder(ReplicaBounds)
_decode_load = msgspec.json.Decoder(LoadAsked)
_decode_unload = msgspec.json.Decoder(UnloadAsked)


async def show_fleet(router: Router, exchange: Exchange) -> None:
    await exchange.answer_json(router.fleet.core.view(router.clock.now()))


async def show_choices(router: Router, exchange: Exchange) -> None:
    """Where one of the last requests went, and why."""
    made = router.fleet.choices.of(exchange.parameter)
    if made is None:
        raise RouteNotFound(f"{exchange.parameter!r} is none of the last {MAX_REQUESTS:,} requests that were sent")
    await exchange.answer_json(made)


async def show_roles(router: Router, exchange: Exchange) -> None:
    """The replicas that hand KV over, and what each is sent first."""
    core = router.fleet.core.fleet
    found = [
        RoutedWorker(name, replica.facts.worker.role, replica.state.value, live.kv_addresses, replica.load)
        for name, live in sorted(router.fleet.replicas.items())
        if (replica := core.by_name.get(name)) is not None and replica.facts.worker is not None
    ]
    await exchange.answer_json(FleetRoles(tuple(found)))


async def drain(router: Router, exchange: Exchange) -> None:
    body = await exchange.json(_decode_named)
    router.fleet.hear(router.fleet.core.drained, _known(router, body.name))
    await exchange.answer_json(Accepted(), 202)


async def restart(router: Router, exchange: Exchange) -> None:
    body = await exchange.json(_decode_maybe_named)
    _require_launched(router)
    core = router.fleet.core
    names = sorted(core.fleet.by_name) if body.name is None else [_known(router, body.name)]
    router.fleet.hear(core.restarted, names)
    await exchange.answer_json(Accepted(), 202)


async def scale(router: Router, exchange: Exchange) -> None:
    body = await exchange.json(_decode_bounds)
    _require_launched(router)
    if not 0 <= body.min <= body.max or not body.max:
        raise InvalidRequest(f"min is {body.min} and max {body.max}; 0 <= min <= max, and max is at least 1")
    router.fleet.hear(router.fleet.core.scaled, body.min, body.max)
    await exchange.answer_json(Accepted(), 202)


async def show_models(router: Router, exchange: Exchange) -> None:
    """Several models: which are in memory, how much they take, and which requests wait."""
    several = _several(router)
    cards = {card["id"]: card for card in router.models.cards(exchange.caller)}
    found = [_loaded(view, cards[view.name]) for view in router.fleet.core.view(router.clock.now()).models]
    await exchange.answer_json(LoadedModels(tuple(found), memory_bytes=several.memory_bytes))


def _loaded(view: ModelView, card: dict[str, Any]) -> LoadedModel:
    told, own = card.get("meta") or {}, ("aliases", "state", "memory_bytes", "pinned", "in_flight", "waiting", "error")
    return LoadedModel(
        num_parameters=told.get("n_params"),  # of a loaded one, as all of `told`
        device=told.get("device"),
        dtype=told.get("dtype"),
        weights_bytes=told.get("size"),
        kv_bytes=told.get("kv_size"),
        id=view.name,
        root=str(card.get("root") or view.name),
        since=card["created"],
        max_model_len=card.get("max_model_len") or 0,
        expires_at=card["expires_at"],
        **{name: getattr(view, name) for name in own},
    )


async def load_model(router: Router, exchange: Exchange) -> None:
    body = await exchange.json(_decode_load)
    _several(router)
    router.fleet.hear(router.fleet.core.load_asked, body.model, body.keep_alive_s)
    await exchange.answer_json(Accepted(), 202)


async def unload_model(router: Router, exchange: Exchange) -> None:
    body = await exchange.json(_decode_unload)
    _several(router)
    router.fleet.hear(router.fleet.core.unload_asked, body.model)
    await exchange.answer_json(Accepted(), 202)


def _several(router: Router) -> ModelSet:
    if router.fleet.core.several is None:
        raise UnsupportedParameter("this router loads and unloads no models; start it with --models FILE")
    return router.fleet.core.several


def _require_launched(router: Router) -> None:
    if router.fleet.core.several is not None:
        raise UnsupportedParameter("several models have a replica each; use POST /admin/models/load and unload")
    if router.fleet.launching is None:
        text = "the replicas of this router run elsewhere; it starts and stops only those of --replicas"
        raise UnsupportedParameter(text)


def _known(router: Router, name: str) -> str:
    names = router.fleet.core.fleet.by_name
    if name not in names:
        raise InvalidRequest(
            f"there is no replica {name!r}{did_you_mean(name, names)}; there are: {', '.join(sorted(names)) or 'none'}",
            param="name",
        )
    return name


_ERRORS = (400, 401, 403, 404, 413, 429, 500, 502, 503, 504)


async def _models(router: Router, exchange: Exchange) -> None:
    """The union: what any replica serves, but for others' adapters."""
    cards = router.models.cards(exchange.caller)
    await (
        answer_cards(exchange, cards)
        if is_anthropics(exchange)
        else exchange.answer_json({"object": "list", "data": cards})
    )


async def _model(router: Router, exchange: Exchange) -> None:
    name, form = exchange.parameter, model_of if is_anthropics(exchange) else dict
    served = await router.models.named_in(exchange.scope["path"])
    card = next((card for card in router.models.cards(exchange.caller) if card["id"] == name), None)
    if card is not None:
        await exchange.answer_json(form(card))
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
_order = partial(Route, method="POST", answer=Accepted, errors=(400, 401, 403, 413, 415))

ROUTES = RouteTable(
    (
        _generation(path="/v1/chat/completions", summary="Answer a conversation.", span="chat"),
        _generation(path="/v1/completions", summary="Continue one or more texts.", span="text_completion"),
        *response_routes(generate_body),
        Route(method="POST", path="/v1/embeddings", handler=embed, summary="Vectors of texts.", errors=_ERRORS),
        Route(method="POST", path="/v1/rerank", handler=embed, summary="Documents by a query.", errors=_ERRORS),
        Route(method="POST", path="/v1/score", handler=embed, summary="Scores of pairs.", errors=_ERRORS),
        _generation(
            path="/v1/messages", summary="Answer a conversation of Anthropic's clients.", span="chat", format=ANTHROPIC
        ),
        _passed_on(
            method="POST", path="/v1/messages/count_tokens", summary="Tokens of a prompt of theirs.", format=ANTHROPIC
        ),
        Route(path="/v1/models", handler=_models, summary="The models of all replicas.", query=MODELS_QUERY),
        Route(path="/v1/models/{model:path}", handler=_model, summary="One model.", errors=(401, 404)),
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
        *router_routes(_models, generate_body, embed, pass_through),
        *probe_routes(health=_health, ready=_ready),
        Route(path="/version", handler=_version, summary="The version of the router."),
        *BATCH_ROUTES,
        METRICS,
        USAGE,
        *PAGE,
        Route(
            path="/admin/fleet",
            handler=show_fleet,
            summary="Who is held, and which replicas there are.",
            admin="see the fleet",
            errors=(401, 403),
        ),
        Route(
            path="/admin/fleet/choices/{id:path}",
            handler=show_choices,
            summary="Where one of the last requests went, and each term of the choice.",
            admin="see choices",
            errors=(401, 403, 404),
        ),
        role_route(show_roles, answer=FleetRoles),
        Route(
            path="/admin/models",
            handler=show_models,
            summary="Several models: what is in memory, and what waits for it.",
            admin="see what is loaded",
            answer=LoadedModels,
            errors=(400, 401, 403),
        ),
        _order(
            path="/admin/models/load",
            handler=load_model,
            summary="Load one of several models, as soon as there is memory for it.",
            admin="load models",
            body=LoadAsked,
        ),
        _order(
            path="/admin/models/unload",
            handler=unload_model,
            summary="Put one of several models out, as soon as it is idle.",
            admin="unload models",
            body=UnloadAsked,
        ),
        _order(
            path="/admin/fleet/drain",
            handler=drain,
            summary="Let a replica finish what it has, and give it no more.",
            admin="drain a replica",
            body=Named,
        ),
        _order(
            path="/admin/fleet/restart",
            handler=restart,
            summary="Start one replica anew, or all one by one; no request is lost.",
            admin="restart replicas",
            body=MaybeNamed,
        ),
        _order(
            path="/admin/fleet/scale",
            handler=scale,
            summary="Change how many replicas there may be.",
            admin="scale the fleet",
            body=ReplicaBounds,
        ),
    ),
    OPENAI,
    fallback=FALLBACK,
)


def make_server(
    router: Router,
    *,
    more: Iterable[Route] = (),
    is_ending: Callable[[], bool] = lambda: False,
    on_open: Callable[[str, int], None] = lambda host, port: None,
) -> HttpServer:
    """`on_open` is told host and port once requests are welcome; the search for replicas begins then."""

    def opened(host: str, port: int) -> None:
        router.start()
        on_open(host, port)
        resume_batches(router)

    def give_up(cause: str) -> None:
        server.failure, server.should_exit = ConfigError(cause), True
        if not router.fleet.core.fleet.ready:
            router.drain(0.0)  # what is held, or comes now, has none to wait for
            router.cut_all()

    table = RouteTable((*ROUTES.routes, *more), OPENAI, fallback=FALLBACK)
    server = HttpServer(AsgiApp(router, table), router.config, is_ending=is_ending, on_open=opened)
    router.give_up = give_up
    return server


def route(
    router: Router,
    listener: socket | None = None,
    *,
    more: Iterable[Route] = (),
    is_ending: Callable[[], bool] = lambda: False,
    on_open: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serve until SIGTERM or SIGINT; then finish what is in flight and return. `listener` is a bound socket, `more`
    routes are beside the router's own. Raises why no replica can be started.
    """
    router.metrics.num_log_lines_dropped = configure_logging(router.config)
    server = make_server(router, more=more, is_ending=is_ending, on_open=on_open)
    server.run([listener] if listener is not None else None)
    if server.failure is not None:
        raise server.failure
