"""KServe v2 over HTTP at `/v2`, with Triton's extensions, against the tensor service.

https://kserve.github.io/website (open inference protocol) and docs/protocol of triton-inference-server/server.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from maitred.api.dialects.kserve import generate, told, wire
from maitred.api.dialects.kserve.told import Models
from maitred.api.generate.complete import complete as complete_text
from maitred.api.generate.dialect import time_limits
from maitred.api.http.app import LONG_BYTES, App
from maitred.api.http.errors import MethodNotAllowed
from maitred.api.http.exchange import JSON_HEADERS, Exchange, Header
from maitred.api.http.routes import TEXT_ERRORS, Route
from maitred.api.tensor.extensions import LOGS, TRACES, Extensions, check_unload, config_to_load, integer, version_of
from maitred.api.tensor.lease import infer, new_id, tensors_of
from maitred.core.errors import InvalidRequest, RequestTooLarge, RouteNotFound, UnsupportedParameter
from maitred.core.tensor_request import InferRequest, InferResponse, num_bytes_of
from maitred.tensor.config import complete, inputs_of

_MODEL = re.compile(
    r"(?P<model>.+?)(?:/versions/(?P<version>[0-9]+))?"
    r"(?:/(?P<action>infer|ready|config|stats|trace/setting))?"
)
_REGION = re.compile(r"(?:region/(?P<name>[^/]+)/)?(?P<action>status|register|unregister)")
_REPOSITORY = re.compile(r"models/(?P<model>[^/]+)/(?P<action>load|unload)")
_BINARY_HEADERS = ((b"content-type", b"application/octet-stream"),)
MOST_CONTROL_BYTES = 1 << 20  # of a body that is no inference, a ModelConfig at most: read on the event loop
_objects = msgspec.json.Decoder(dict[str, Any])


class _Model(NamedTuple):
    name: str
    version: int  # 0 is the default
    action: str


class KServe:
    """The handlers, by what they are asked for."""

    def __init__(self, extensions: Extensions) -> None:
        self._with = extensions

    # -- health and metadata

    async def live(self, app: App, exchange: Exchange) -> None:
        await exchange.answer(b"", 200, ())

    async def ready(self, app: App, exchange: Exchange) -> None:
        """400 while it is not, as Triton answers."""
        await exchange.answer(b"", 200 if app.tensors is not None and app.in_flight.welcome else 400, ())

    async def metadata(self, app: App, exchange: Exchange) -> None:
        await exchange.answer_json(told.server_metadata(self._with.server_id))

    async def get_model(self, app: App, exchange: Exchange) -> None:
        """Metadata, or what comes after the name: ready, config, stats, trace/setting."""
        asked, models = _model(app, exchange), Models(app, exchange.caller)
        match asked.action:
            case "":
                await exchange.answer_json(told.model_metadata(models, asked.name, asked.version))
            case "ready":
                found = told.is_ready(models, asked.name, asked.version)
                await exchange.answer(b"", 200 if found else 400, ())
            case "config":
                await exchange.answer_json(complete(models.config(asked.name, asked.version)))
            case "stats":
                await exchange.answer_json(told.statistics(tensors_of(app), asked.name, asked.version))
            case "trace/setting":
                exchange.caller.require_admin(TRACES)
                models.config(asked.name, asked.version)
                await exchange.answer_json(_traced(self._with.settings.trace({})))
            case _:
                raise MethodNotAllowed(f"{asked.action} is asked by POST", allow="POST")

    async def all_statistics(self, app: App, exchange: Exchange) -> None:
        await exchange.answer_json(told.statistics(tensors_of(app)))

    # -- inference

    async def post_model(self, app: App, exchange: Exchange) -> None:
        if generate.is_generate(exchange.parameter):
            await complete_text(generate.GENERATION, app, exchange)
            return
        asked = _model(app, exchange)
        if asked.action == "trace/setting":
            exchange.caller.require_admin(TRACES)
            Models(app, exchange.caller).config(asked.name, asked.version)
            await self.set_trace(app, exchange)
        elif asked.action == "infer":
            await self._infer(app, exchange, asked)
        else:
            raise MethodNotAllowed(f"{asked.action or 'metadata'} is asked by GET", allow="GET, HEAD")

    async def _infer(self, app: App, exchange: Exchange, model: _Model) -> None:
        Models(app, exchange.caller).check_tensors(model.name)
        body = await generate.body_of(exchange)
        encoding = exchange.headers.get(b"content-encoding", b"").strip().lower()
        limits = time_limits(None, exchange.headers)
        async with app.in_flight.watch(exchange):
            if encoding:
                work = partial(generate.inflated, body, encoding, exchange.max_body_bytes)
                body = await app.text.run(exchange.max_body_bytes, work)
            asked = await self._asked(app, exchange, model, body)
            response = await infer(app, exchange.caller, asked.request, limits=limits)
            answer = await self._written(app, asked, response)
        headers: tuple[Header, ...] = JSON_HEADERS
        if answer.header_bytes is not None:
            headers = (*_BINARY_HEADERS, (generate.HEADER_LENGTH, str(answer.header_bytes).encode()))
        await _answer(app, exchange, answer.body, headers)

    async def _asked(self, app: App, exchange: Exchange, model: _Model, body: bytes) -> wire.InferAsked:
        request = InferRequest(request_id=new_id(), model=model.name, version=model.version)
        num_json_bytes = generate.header_length(exchange.headers.get(generate.HEADER_LENGTH), len(body))
        if num_json_bytes or not body:
            owner = exchange.caller.tenant.name
            work = partial(wire.asked, body, num_json_bytes, request, partial(self._with.regions.view, owner))
            num_region_bytes = min(LONG_BYTES, self._with.regions.num_bytes(owner))  # a copy is long and quick
            return await app.text.run(max(num_json_bytes, num_region_bytes), work)
        config = Models(app, exchange.caller).config(model.name, model.version)
        return wire.raw_asked(body, request, inputs_of(config), batched=config.max_batch_size > 0)

    async def _written(self, app: App, asked: wire.InferAsked, response: InferResponse) -> wire.InferAnswer:
        classes = partial(self._with.labels.classify, tensors_of(app))
        work = partial(wire.answered, asked, response, classes)
        return await app.text.run(num_bytes_of(response.outputs), work)

    # -- the repository

    async def index(self, app: App, exchange: Exchange) -> None:
        ready = (await _json_of(exchange)).get("ready", False)
        if not isinstance(ready, bool):
            raise InvalidRequest("ready must be true or false", param="ready")
        await exchange.answer_json(told.index(Models(app, exchange.caller).index(ready_only=ready)))

    async def repository(self, app: App, exchange: Exchange) -> None:
        """Load and unload."""
        found = _REPOSITORY.fullmatch(exchange.parameter)
        if found is None:
            raise RouteNotFound("post to /v2/repository/index, or to /v2/repository/models/NAME/load or /unload")
        parameters = (await _json_of(exchange)).get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidRequest("parameters must be an object", param="parameters")
        await (_load if found["action"] == "load" else _unload)(app, found["model"], parameters)
        await exchange.answer(b"", 200, JSON_HEADERS)

    # -- shared memory and settings

    async def get_regions(self, app: App, exchange: Exchange) -> None:
        name, action = _region(exchange)
        if action != "status":
            raise MethodNotAllowed(f"{action} is asked by POST", allow="POST")
        regions = self._with.regions.status(exchange.caller.tenant.name, name).items()
        await exchange.answer_json(
            [
                {"name": name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size}
                for name, each in regions
            ]
        )

    async def change_regions(self, app: App, exchange: Exchange) -> None:
        (name, action), owner = _region(exchange), exchange.caller.tenant.name
        if action == "status":
            raise MethodNotAllowed("status is asked by GET", allow="GET, HEAD")
        if action == "register":
            fields = await _json_of(exchange)
            key = fields.get("key")
            if not name or not isinstance(key, str) or "byte_size" not in fields:
                raise InvalidRequest("a region is registered at .../region/NAME/register with key and byte_size")
            self._with.regions.register(owner, name, key, integer(fields, "offset"), integer(fields, "byte_size"))
        else:
            self._with.regions.unregister(owner, name)
        await exchange.answer(b"", 200, JSON_HEADERS)

    async def get_trace(self, app: App, exchange: Exchange) -> None:
        await exchange.answer_json(_traced(self._with.settings.trace({})))

    async def set_trace(self, app: App, exchange: Exchange) -> None:
        sent = await _json_of(exchange)
        changes = {name: _texts(name, value) for name, value in sent.items()}
        await exchange.answer_json(_traced(self._with.settings.trace(changes)))

    async def get_logging(self, app: App, exchange: Exchange) -> None:
        await exchange.answer_json(self._with.settings.log({}))

    async def set_logging(self, app: App, exchange: Exchange) -> None:
        await exchange.answer_json(self._with.settings.log(await _json_of(exchange)))


async def _answer(app: App, exchange: Exchange, body: bytes, headers: tuple[Header, ...]) -> None:
    """Compressed where the client likes that best."""
    encoding = generate.accepted(exchange.headers.get(b"accept-encoding", b""))
    if encoding:
        body = await app.text.run(len(body), partial(generate.deflated, body, encoding))
        headers = (*headers, (b"content-encoding", encoding), (b"vary", b"accept-encoding"))
    await exchange.answer(body, 200, headers)


async def _load(app: App, model: str, parameters: dict[str, Any]) -> None:
    await tensors_of(app).load(model, config_to_load(parameters))


async def _unload(app: App, model: str, parameters: dict[str, Any]) -> None:
    check_unload(parameters)
    await tensors_of(app).unload(model)


async def _no_cuda_regions(app: App, exchange: Exchange) -> None:
    """None to tell of or to forget: clients unregister all of them to begin with."""
    if _region(exchange)[1] == "register":
        raise UnsupportedParameter("CUDA shared memory is not supported; register system shared memory")
    await exchange.answer(b"[]" if exchange.scope["method"] != "POST" else b"", 200, JSON_HEADERS)


async def _json_of(exchange: Exchange) -> dict[str, Any]:
    """The body's JSON object; empty without a body."""
    body = await generate.body_of(exchange)
    if len(body) > MOST_CONTROL_BYTES:
        raise RequestTooLarge(f"the body has {len(body)} bytes; this path takes at most {MOST_CONTROL_BYTES}")
    return wire.object_of(memoryview(body), _objects) if body else {}


def _model(app: App, exchange: Exchange) -> _Model:
    """The model and action that the path names; only the language model has names with slashes."""
    found = _MODEL.fullmatch(exchange.parameter)
    if found is None or ("/" in found["model"] and not Models(app, exchange.caller).has_language_model(found["model"])):
        raise RouteNotFound("there is /v2/models/NAME[/versions/V], and infer, ready, config, stats after it")
    return _Model(found["model"], version_of(found["version"] or ""), found["action"] or "")


def _region(exchange: Exchange) -> tuple[str, str]:
    """The region's name (empty for all) and the action, from the path."""
    found = _REGION.fullmatch(exchange.parameter)
    if found is None:
        raise RouteNotFound("there is [region/NAME/]status, register and unregister")
    return found["name"] or "", found["action"]


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Values of a trace setting: a text, a list of texts, or null for no change."""
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) for each in listed):
        raise InvalidRequest(f"{name[:80]!r} must be a string or a list of strings", param=name)
    return tuple(listed)


def _traced(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A list for the level alone."""
    return {name: list(value) if name == "trace_level" else value[0] for name, value in settings.items()}


Handler = Callable[[App, Exchange], Awaitable[None]]


def kserve_routes(extensions: Extensions) -> tuple[Route, ...]:
    """All of `/v2`. What is registered, set and named by `extensions` is shared with gRPC."""
    it = KServe(extensions)
    loads, regions = "load and unload models", "register shared memory"
    reads = (400, 401, 404)
    asks = (400, 401, 403, 404, 413, 415, 429, 503, 504)

    def route(method: str, path: str, handler: Handler, summary: str, **fields: Any) -> Route:
        return Route(
            method=method,
            path=f"/v2{path}",
            handler=handler,
            summary=summary,
            format=TEXT_ERRORS,
            text="application/json",
            **fields,
        )

    health = {"is_open": True, "while_loading": True, "is_polled": True, "errors": (400,)}
    return (
        route("GET", "", it.metadata, "Name, version and extensions of the server.", while_loading=True),
        route("GET", "/health/live", it.live, "Whether the server answers.", **health),
        route("GET", "/health/ready", it.ready, "Whether models are asked for with success.", **health),
        route("GET", "/models/stats", it.all_statistics, "Counts and times of every tensor model."),
        route("GET", "/models/{model:path}", it.get_model, "A model's metadata, ready, config, stats.", errors=reads),
        route("POST", "/models/{model:path}", it.post_model, "Infer, generate.", errors=asks, **generate.SPOKEN),
        route("POST", "/repository/index", it.index, "The models of the repository and their states."),
        route("POST", "/repository/{action:path}", it.repository, "Load or unload a model.", admin=loads),
        route("GET", "/systemsharedmemory/{action:path}", it.get_regions, "Registered regions.", admin=regions),
        route("POST", "/systemsharedmemory/{action:path}", it.change_regions, "Register, unregister.", admin=regions),
        route("GET", "/cudasharedmemory/{action:path}", _no_cuda_regions, "None.", admin=regions),
        route("POST", "/cudasharedmemory/{action:path}", _no_cuda_regions, "Refused.", admin=regions),
        route("GET", "/trace/setting", it.get_trace, "What is traced.", admin=TRACES),
        route("POST", "/trace/setting", it.set_trace, "Trace settings.", admin=TRACES),
        route("GET", "/logging", it.get_logging, "What is logged.", admin=LOGS),
        route("POST", "/logging", it.set_logging, "Change what is logged.", admin=LOGS),
    )
