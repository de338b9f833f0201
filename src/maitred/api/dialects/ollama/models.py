"""What Ollama's clients ask about models: which there are, what each can do, and vectors of texts.

Names are those of /v1/models, vectors those of /v1/embeddings.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.types import Message

from maitred.api.dialects.kserve.generate import body_of
from maitred.api.dialects.ollama.chat import OnlyLoaded, empty_reply, rfc3339
from maitred.api.generate.complete import complete
from maitred.api.generate.dialect import Dialect
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder, decode_small
from maitred.api.http.errors import shortened, told_names
from maitred.api.http.exchange import IGNORED_FIELDS, JSON_HEADERS, Exchange
from maitred.api.http.routes import Handler
from maitred.api.http.service import Service
from maitred.core.errors import InvalidRequest, ModelNotFound
from maitred.fleet.prefix_keys import keep_alive_s, without_latest
from maitred.fleet.told import USAGE

VERSION = "0.33.0"  # of Ollama, whose API this is; clients ask for a least one
NO_FILES = (
    "files of models are not managed through this API: start the server with the model's path or hub id (maitred serve "
    "MODEL; a hub id is downloaded then), and delete, copy or convert files yourself (maitred models, maitred optimize)"
)
FOREVER_S = 2**63 // 10**9  # Ollama's keep_alive without an end


class NamedModel(msgspec.Struct):
    """Fields of routes that are of one model."""

    model: str | None = None
    name: str | None = None  # the older field
    stream: bool | None = None
    keep_alive: float | str | None = None
    # whether anything is asked
    prompt: str | None = None
    messages: list[Raw] | None = None


class EmbedRequest(msgspec.Struct, kw_only=True):
    """Fields of either route; `prompt` is the older one's text."""

    model: str | None = None
    input: Raw | UnsetType = UNSET
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None  # None is true
    keep_alive: Raw | UnsetType = UNSET
    options: Raw | UnsetType = UNSET


_EMBED, _NAMED = BodyDecoder(EmbedRequest), msgspec.json.Decoder(NamedModel)


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.answer_json({"version": VERSION})


async def no_files(service: Service, exchange: Exchange) -> None:
    raise InvalidRequest(NO_FILES)


async def converse(dialects: Mapping[str, Dialect], app: App, exchange: Exchange) -> None:
    """Generate, or only see that the model is there."""
    try:
        await complete(dialects[exchange.scope["path"]], app, exchange)
    except OnlyLoaded as loaded:
        await exchange.answer_json(loaded.reply)


async def steered(generate: Callable[..., Awaitable[None]], router: Any, exchange: Exchange) -> None:
    """Have a replica generate, which keeps its model as `keep_alive` says; asked for nothing and to keep it for no
    time, unload it, one of several, as soon as it is idle.
    """
    body, sent = await body_of(exchange), NamedModel()
    with suppress(msgspec.DecodeError, ValueError, RecursionError):  # of which the replica tells
        sent = _NAMED.decode(body) if b"keep_alive" in body else sent
    if keep_alive_s(sent.keep_alive) == 0:
        if router.fleet.core.several is None:
            exchange.tell(IGNORED_FIELDS, ("keep_alive",))
        elif not sent.prompt and not sent.messages:
            name = router.models.untagged(sent.model) or router.fleet.core.several.models[0].name
            await router.models.check(name, exchange.caller)
            router.fleet.hear(router.fleet.core.unload_asked, name)
            is_chat = exchange.scope["path"] == "/api/chat"
            await exchange.answer_json(empty_reply(sent.model or name, "unload", is_chat=is_chat))
            return
    await generate(router, exchange, body)


async def pull(cards_of: Handler, service: Service, exchange: Exchange) -> None:
    """POST /api/pull of a model that is here. Raises ModelNotFound, which says how others come."""
    body = decode_small(await body_of(exchange), _NAMED)
    _card_of((await _told_by(cards_of, service, exchange))[0], body)
    headers = JSON_HEADERS if body.stream is False else exchange.format.stream.headers
    await exchange.answer(b'{"status":"success"}\n', 200, headers)


async def _told_by(handler: Handler, service: Service, exchange: Exchange, body: Any = None) -> tuple[Any, Any]:
    """Another route's answer to the same caller: its JSON, and headers for a router. Raises what the route raises."""
    inner, pieces, headers = copy.copy(exchange), list[bytes](), list[Any]()

    async def receive() -> Message:
        inner.receive = exchange.receive  # which tells from now on whether the client is there
        return {"type": "http.request", "body": msgspec.json.encode(body)}

    async def send(message: Message) -> None:
        headers.extend(message.get("headers", ()))
        pieces.append(message.get("body", b""))

    inner.receive, inner.raw_send, inner.num_body_bytes = receive, send, 0
    inner.headers = {name: value for name, value in exchange.headers.items() if name != b"content-length"}
    inner.headers[b"content-type"] = b"application/json"
    try:
        await handler(service, inner)
    finally:
        inner.large_bodies.release(inner)
    exchange.told = inner.told
    return msgspec.json.decode(b"".join(pieces)), tuple(header for header in headers if header[0] == USAGE)


async def embed(embeddings: Handler, app: App, exchange: Exchange) -> None:
    """POST /api/embed and, with one text and one vector, /api/embeddings; by the handler of /v1/embeddings."""
    began = time.monotonic()
    sent = _EMBED.decode(await body_of(exchange))
    body = sent.body
    is_older, given = body.prompt is not None, body.input if body.prompt is None else body.prompt
    if given is UNSET:
        raise InvalidRequest("input is missing; send a text or a list of texts", param="input")
    app.ignored_fields.heed(exchange, sent.unknown, _EMBED.known)
    asked = {"model": without_latest(body.model), "input": given, "dimensions": body.dimensions}
    asked["truncate_prompt_tokens"] = None if body.truncate is False else -1
    told, usage = await _told_by(embeddings, app, exchange, asked)
    vectors = [each["embedding"] for each in told["data"]]
    answer = {"embedding": vectors[0]} if is_older else {"model": body.model or told["model"], "embeddings": vectors}
    if not is_older:
        answer["prompt_eval_count"] = told["usage"]["prompt_tokens"]
        answer["total_duration"] = int((time.monotonic() - began) * 1e9)
    await exchange.answer_json(answer, headers=usage)


def _card_of(told: dict[str, Any], asked: NamedModel) -> dict[str, Any]:
    """The card of the model that is named, with or without `:latest`. Raises ModelNotFound, which says how others come,
    and InvalidRequest where none is named.
    """
    if not (name := asked.model or asked.name):
        raise InvalidRequest("model is required", param="model")
    cards: dict[str, dict[str, Any]] = {card["id"]: card for card in told["data"]}
    if (card := cards.get(name) or cards.get(without_latest(name) or "")) is not None:
        return card
    there = told_names(list(cards))
    raise ModelNotFound(f"there is no model {shortened(repr(name))}; there are: {there}; {NO_FILES}", param="model")


async def list_models(cards_of: Handler, service: Service, exchange: Exchange) -> None:
    """GET /api/tags, and /api/ps: models in memory, each once. `cards_of` is the handler of /v1/models."""
    cards = (await _told_by(cards_of, service, exchange))[0]["data"]
    if exchange.scope["path"] == "/api/tags":
        await exchange.answer_json({"models": [_listed(card) for card in cards]})
        return
    loaded = {_same(card): card for card in reversed(cards) if card.get("state") in (None, "ready")}
    await exchange.answer_json({"models": [_running(card) for card in reversed(loaded.values())]})


def _same(card: dict[str, Any]) -> str:
    """What names of one loaded model share."""
    return str(card.get("alias_of") or (card["id"] if "state" in card else _digest(card)))


def _meta(card: dict[str, Any]) -> dict[str, Any]:
    return card.get("meta") or {}


def _listed(card: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": card["id"],
        "model": card["id"],
        "modified_at": rfc3339(card.get("created") or 0),
        "size": _meta(card).get("size", 0),
        "digest": _digest(card),
        "details": _details(card),
    }


def _running(card: dict[str, Any]) -> dict[str, Any]:
    size = card.get("memory_bytes") or _meta(card).get("size", 0) + _meta(card).get("kv_size", 0)
    return _listed(card) | {
        "size": size,
        "size_vram": size if _meta(card).get("device", "cpu") != "cpu" else 0,
        "context_length": card.get("max_model_len") or 0,
        "expires_at": rfc3339(card.get("expires_at") or (card.get("created") or 0) + FOREVER_S),
    }


def _digest(card: dict[str, Any]) -> str:
    """64 hex digits, which names of one model share."""
    known = _meta(card).get("digest") or f"{card.get('root')} {card.get('parent')}"
    return hashlib.sha256(known.encode()).hexdigest()


def _details(card: dict[str, Any]) -> dict[str, Any]:
    meta, family = _meta(card), _meta(card).get("family", "")
    size, unit, letter = meta.get("n_params", 0), 10**6, "M"  # told as 7B, 134.52M, 0.63M
    if size >= 10**9:
        unit, letter = 10**9, "B"
    return {
        "parent_model": card.get("parent") or "",
        "format": "gguf" if str(card.get("root")).endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": f"{round(size / unit, 2):g}{letter}" if meta else "",
        "quantization_level": str(meta.get("dtype", "")).upper().partition(" ")[0].rstrip(","),
    }


async def show(cards_of: Handler, app: App, exchange: Exchange) -> None:
    """POST /api/show: what a model can do, which clients read before they offer it. Raises ModelNotFound."""
    body = decode_small(await body_of(exchange), _NAMED)
    card, model = _card_of((await _told_by(cards_of, app, exchange))[0], body), app.model
    capabilities, template = ["embedding"], ""
    if app.is_model(card["id"]) or card.get("parent"):
        capabilities, template = await app.text.run(0, lambda: _read(app), may_take_long=True)
    details = _details(card)
    family = details["family"] or "unknown"
    parameters = [f"{field} {value}\n" for field, value in model.generation_defaults.items()]
    told = {
        "modelfile": "".join((f"FROM {card.get('root')}\n", *(f"PARAMETER {each}" for each in parameters))),
        "parameters": "".join(parameters),
        "template": template,
        "details": details,
        "model_info": {
            "general.architecture": family,
            "general.basename": card["id"],
            "general.parameter_count": _meta(card).get("n_params"),
            f"{family}.context_length": card.get("max_model_len"),
        },
        "capabilities": capabilities,
        "modified_at": rfc3339(card.get("created") or 0),
    }
    await exchange.answer_json(told)


def _read(app: App) -> tuple[list[str], str]:
    """The language model's capabilities, and its template; read from files."""
    format, template = app.model.answer_format, app.model.chat_template
    knows_tools = template is not None and format.calls is not None and format.tools_system_text is None
    can = {"tools": knows_tools, "thinking": format.reasoning is not None}
    return [*app.model.uses, *(name for name, true in can.items() if true)], "" if template is None else template.source
