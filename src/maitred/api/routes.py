"""Every route of the server. To add one, add its record here; nothing else lists paths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from maitred.api.common_routes import BATCH_ROUTES, METRICS, PAGE, USAGE, probe_routes, role_route
from maitred.api.dialects.anthropic import models as anthropic_models
from maitred.api.dialects.anthropic import schemas as a
from maitred.api.dialects.anthropic.messages import MESSAGES, count_tokens
from maitred.api.dialects.kserve.generate import GENERATION, SPOKEN, Generated, GenerateRequest
from maitred.api.dialects.ollama import routes as ollama
from maitred.api.dialects.openai import models
from maitred.api.dialects.openai import schemas as s
from maitred.api.dialects.openai.answers import OPENAI
from maitred.api.dialects.openai.chat import CHAT
from maitred.api.dialects.openai.completions import COMPLETIONS
from maitred.api.dialects.openai.vectors import VECTOR_ROUTES
from maitred.api.dialects.responses.answers import DIALECT as RESPONSES
from maitred.api.dialects.responses.stored import response_routes
from maitred.api.generate.complete import complete, complete_body
from maitred.api.generate.dialect import Dialect
from maitred.api.http.app import App
from maitred.api.http.exchange import Exchange
from maitred.api.http.routes import GENERATION_ERRORS, Route, RouteTable
from maitred.api.ops import admin, health, live
from maitred.api.ops.fleet import fleet_routes
from maitred.api.ops.live_feed import LiveFrame
from maitred.api.ops.openapi import openapi_document
from maitred.engine.traffic import WhatIf
from maitred.fleet.prefix_keys import KSERVE_MODELS
from maitred.scheduler.queue_view import QueueView

DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
_TEXT_ERRORS = (400, 401, 404, 413, 415)


def make_routes(more: Sequence[Route] = ()) -> RouteTable:
    """Routes of one server; what some of them own is its own. `more` are routes of
    what else it serves, and stand in for ours with the same method and path.
    """

    async def list_models(app: App, exchange: Exchange) -> None:
        await table.find("GET", "/v1/models")[0].handler(app, exchange)

    async def embeddings(app: App, exchange: Exchange) -> None:
        await table.find("POST", "/v1/embeddings")[0].handler(app, exchange)

    async def document(app: App, exchange: Exchange) -> None:
        await exchange.answer_json(openapi_document(table))

    routes = (
        *_generation(),
        *_models(),
        *ollama.server_routes(list_models, embeddings),
        *probe_routes(health=health.health, ready=health.ready),
        Route(
            path="/health/decode",
            handler=health.Decode(),
            summary="Whether one token comes through the engine, as the least urgent request.",
            answer=health.DecodeHealth,
            errors=(401, 500, 503),
        ),
        METRICS,
        *_sleeping(),
        USAGE,
        *_adapters(),
        *_scheduling(),
        *_workers(),
        *_kv(),
        *_live(),
        *fleet_routes(
            {**DIALECTS, **ollama.DIALECTS, KSERVE_MODELS: GENERATION}, stream=s.Completion, errors=GENERATION_ERRORS
        ),
        *PAGE,
        Route(
            path="/openapi.json",
            handler=document,
            summary="This document.",
            while_loading=True,
            text="application/json",
        ),
    )
    taken = {(route.method, route.path) for route in more}
    ours = (route for route in routes if (route.method, route.path) not in taken)
    table = RouteTable((*ours, *more), OPENAI)
    return table


def _generates(dialect: Dialect, path: str, **more: Any) -> Route:
    """The route at which a dialect's clients ask for tokens."""
    about = {"method": "POST", "format": dialect.format, "errors": GENERATION_ERRORS} | more
    return Route(path=path, handler=partial(complete, dialect), **about)


def _generation() -> tuple[Route, ...]:
    """Routes that generate, and embeddings."""
    return (
        _generates(
            CHAT,
            "/v1/chat/completions",
            summary="Answer a conversation.",
            span="chat",
            body=s.ChatCompletionRequest,
            tells_ignored=True,
            answer=s.ChatCompletion,
            event=s.ChatCompletionChunk,
        ),
        _generates(
            COMPLETIONS,
            "/v1/completions",
            summary="Continue one or more texts.",
            span="text_completion",
            body=s.CompletionRequest,
            tells_ignored=True,
            answer=s.Completion,
            event=s.Completion,
        ),
        *response_routes(partial(complete_body, RESPONSES)),
        _generates(
            MESSAGES,
            "/v1/messages",
            summary="Answer a conversation of Anthropic's clients.",
            span="chat",
            body=a.MessagesRequest,
            tells_ignored=True,
            answer=a.AnthropicMessage,
            event=a.AnthropicEvent,
            errors=(*GENERATION_ERRORS, 529),
        ),
        Route(
            method="POST",
            path="/v1/messages/count_tokens",
            handler=count_tokens,
            format=MESSAGES.format,
            summary="Tokens of the prompt that /v1/messages makes of a body.",
            body=a.MessagesRequest,
            tells_ignored=True,
            answer=a.InputTokens,
            errors=_TEXT_ERRORS,
        ),
        *VECTOR_ROUTES,
        *BATCH_ROUTES,
        _generates(
            GENERATION,
            "/v2/models/{model:path}",
            summary="Continue a text, as Triton's generate and generate_stream after the model's name.",
            body=GenerateRequest,
            answer=Generated,
            event=Generated,
            **SPOKEN,
        ),
    )


def _models() -> tuple[Route, ...]:
    """Routes of model names, and of text to tokens and back."""
    return (
        Route(
            path="/v1/models",
            handler=anthropic_models.list_models,
            summary="List the names of the model; in Anthropic's form where `anthropic-version` is sent.",
            answer=s.ModelList,
            query=anthropic_models.MODELS_QUERY,
        ),
        Route(
            path="/v1/models/{model:path}",
            handler=anthropic_models.get_model,
            summary="One model, in the same forms.",
            answer=s.ModelCard,
            errors=(401, 404),
        ),
        Route(
            method="POST",
            path="/tokenize",
            handler=models.tokenize,
            summary="Text or messages to tokens.",
            body=s.TokenizeRequest,
            tells_ignored=True,
            answer=s.TokenizeResponse,
            errors=_TEXT_ERRORS,
        ),
        Route(
            method="POST",
            path="/detokenize",
            handler=models.detokenize,
            summary="Tokens to text.",
            body=s.DetokenizeRequest,
            tells_ignored=True,
            answer=s.DetokenizeResponse,
            errors=_TEXT_ERRORS,
        ),
    )


def _sleeping() -> tuple[Route, ...]:
    """The engine's process, ended and started again; as vLLM names it."""
    return (
        Route(
            method="POST",
            path="/sleep",
            handler=admin.sleep,
            is_for_routers=True,
            summary="End the engine's process once nobody is served; the next request starts it.",
            admin="put the engine to sleep",
            errors=(400, 401, 403, 404, 503),
            query=admin.SLEEP_QUERY,
        ),
        Route(
            method="POST",
            path="/wake_up",
            handler=admin.wake_up,
            is_for_routers=True,
            summary="Start the engine that sleeps.",
            admin="wake the engine",
            errors=(401, 403, 404, 503),
            query=admin.WAKE_QUERY,
        ),
        Route(
            path="/is_sleeping",
            handler=admin.is_sleeping,
            summary="Whether the engine sleeps.",
            admin="see whether the engine sleeps",
            answer=admin.Sleeping,
            errors=(401, 403, 503),
        ),
    )


def _adapters() -> tuple[Route, ...]:
    """LoRA adapters, as vLLM names it."""
    return (
        Route(
            method="POST",
            path="/v1/load_lora_adapter",
            handler=admin.load_adapter,
            summary="Load a LoRA adapter that lies in --lora-dir.",
            admin=admin.LOADING_ADAPTERS,
            body=admin.LoadAdapter,
            text="text/plain",
            errors=(400, 401, 403, 413, 415, 503),
        ),
        Route(
            method="POST",
            path="/v1/unload_lora_adapter",
            handler=admin.unload_adapter,
            summary="Unload a LoRA adapter, when its last request is done.",
            admin=admin.LOADING_ADAPTERS,
            body=admin.UnloadAdapter,
            text="text/plain",
            errors=(400, 401, 403, 404, 413, 415, 503),
        ),
    )


def _scheduling() -> tuple[Route, ...]:
    """Routes of the queue and its order."""
    return (
        Route(
            path="/admin/queue",
            handler=admin.show_queue,
            summary="Who waits, where and why.",
            admin="see the queue",
            answer=QueueView,
            errors=(400, 401, 403, 404, 503),
        ),
        Route(
            path="/admin/policy",
            handler=admin.show_policy,
            summary="The policy in force.",
            admin="see the policy",
            answer=admin.PolicyView,
            errors=(401, 403, 404, 503),
        ),
        Route(
            method="POST",
            path="/admin/policy",
            handler=admin.change_policy,
            summary="Change the policy or its parameters; no request is lost.",
            admin="change the policy",
            body=admin.PolicyChange,
            answer=admin.PolicyView,
            errors=(400, 401, 403, 404, 413, 415, 503),
        ),
        Route(
            method="POST",
            path="/admin/whatif",
            handler=admin.WhatIfReplay(),
            summary="Replay what was served lately under another policy, or on more slots or engines.",
            admin="replay requests",
            body=WhatIf,
            text="application/json",
            errors=(400, 401, 403, 404, 413, 415, 429, 503, 504),
        ),
    )


def _workers() -> tuple[Route, ...]:
    """Routes of the workers: which engine does what."""
    return (
        role_route(admin.show_roles, answer=admin.Roles, more_errors=(404, 503)),
        Route(
            path="/admin/fleet/choices/{id:path}",
            handler=admin.show_choices,
            summary="Which worker one of the last requests went to, and each term of the choice.",
            admin="see choices",
            errors=(401, 403, 404, 503),
        ),
    )


def _kv() -> tuple[Route, ...]:
    """KV that outlives requests."""
    return (
        Route(
            path="/admin/kv",
            handler=admin.show_kv,
            summary="KV that outlives requests and restarts, by tier.",
            admin="see KV tiers",
            answer=admin.Tiers,
            errors=(401, 403, 404, 503),
        ),
        Route(
            method="DELETE",
            path="/admin/kv",
            handler=admin.clear_kv,
            summary="Empty the KV tiers.",
            admin="empty the KV tiers",
            answer=admin.Cleared,
            errors=(401, 403, 404, 503),
        ),
    )


def _live() -> tuple[Route, ...]:
    """Routes of what goes on now."""
    return (
        Route(
            path="/admin/live",
            handler=live.WatchLive(),
            summary="Watch slots, queue and KV blocks; at most five events a second.",
            admin=live.WATCHING,
            event=LiveFrame,
            errors=(401, 403, 404, 503),
        ),
        Route(
            path="/admin/models",
            handler=live.loaded_models,
            summary="What is in memory, and since when.",
            admin="see what is loaded",
            answer=live.LoadedModels,
            errors=(401, 403),
        ),
    )
