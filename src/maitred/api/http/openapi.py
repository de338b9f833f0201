"""The OpenAPI 3.1 document, made from the same structs that check requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec

import maitred
from maitred.api.dialects.openai import schemas as s
from maitred.api.dialects.openai.usage import USAGE_QUERY, UsagePage
from maitred.api.generate.time_limits import HEADERS, MAX_MS
from maitred.api.http.errors import ErrorBody
from maitred.api.ops.admin import PolicyChange, PolicyView
from maitred.api.ops.health import DecodeHealth
from maitred.api.ops.live import LoadedModels
from maitred.api.ops.live_feed import LiveFrame
from maitred.scheduler.queue_view import QueueView

_REF = "#/components/schemas/{name}"
_GENERATION_ERRORS = (400, 401, 403, 404, 413, 415, 429, 500, 503, 504)


class Operation(NamedTuple):
    """One method of one path, as the document describes it."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None  # of the streamed form
    text: str | None = None  # content type of an answer that is not JSON
    errors: tuple[int, ...] = (401,)
    query: Mapping[str, dict[str, Any]] = {}  # name -> schema


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        s.ChatCompletionRequest,
        s.ChatCompletion,
        s.ChatCompletionChunk,
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue one or more texts.",
        s.CompletionRequest,
        s.Completion,
        s.Completion,
        errors=_GENERATION_ERRORS,
    ),
    Operation("get", "/v1/models", "List the names of the model.", answer=s.ModelList),
    Operation("get", "/v1/models/{model}", "One model.", answer=s.ModelCard, errors=(401, 404)),
    Operation(
        "get",
        "/v1/organization/usage/completions",
        "Tokens and requests by time and tenant, from the ledger; for administrators.",
        answer=UsagePage,
        errors=(400, 401, 403, 404),
        query=USAGE_QUERY,
    ),
    Operation(
        "post",
        "/tokenize",
        "Text or messages to tokens.",
        s.TokenizeRequest,
        s.TokenizeResponse,
        errors=(400, 401, 404, 413, 415),
    ),
    Operation(
        "post",
        "/detokenize",
        "Tokens to text.",
        s.DetokenizeRequest,
        s.DetokenizeResponse,
        errors=(400, 401, 404, 413, 415),
    ),
    Operation("get", "/health", "Whether the engine lives.", errors=(503,)),
    Operation(
        "get",
        "/health/decode",
        "Whether one token comes through the engine, as the least urgent request.",
        answer=DecodeHealth,
        errors=(401, 500, 503),
    ),
    Operation("get", "/ready", "Whether new requests are welcome.", errors=(503,)),
    Operation("get", "/readyz", "The same as /ready.", errors=(503,)),
    Operation("get", "/version", "The version of the server.", answer=s.VersionResponse),
    Operation("get", "/metrics", "Metrics for Prometheus.", text="text/plain", errors=(401, 403)),
    Operation("get", "/admin/queue", "Who waits, where and why.", answer=QueueView, errors=(400, 401, 403, 404, 503)),
    Operation("get", "/admin/policy", "The policy in force.", answer=PolicyView, errors=(401, 403, 404, 503)),
    Operation(
        "post",
        "/admin/policy",
        "Change the policy or its parameters; no request is lost.",
        PolicyChange,
        PolicyView,
        errors=(400, 401, 403, 404, 413, 415, 503),
    ),
    Operation(
        "get",
        "/admin/live",
        "Watch slots, queue and KV blocks; at most five events a second.",
        event=LiveFrame,
        errors=(401, 403, 404, 503),
    ),
    Operation("get", "/admin/models", "What is in memory, and since when.", answer=LoadedModels, errors=(401, 403)),
    Operation("get", "/", "The page: chat and live view.", text="text/html", errors=()),
    Operation("get", "/static/{name}", "A file of the page.", text="*/*", errors=(401, 404)),
    Operation("get", "/openapi.json", "This document.", text="application/json"),
)


@cache
def openapi_document() -> dict[str, Any]:
    """The whole document; the same for every app of this version."""
    types = {t for op in OPERATIONS for t in (op.body, op.answer, op.event) if t is not None} | {ErrorBody}
    ordered = sorted(types, key=lambda t: t.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "maitred",
            "version": maitred.__version__,
            "description": "OpenAI's API with vLLM's extensions. Unknown fields are accepted; known fields that this "
            "version does not do are refused with code unsupported_parameter.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path}".translate(str.maketrans("/{}.", "____")),
        "responses": {
            "200": {"description": "The answer.", **_content(operation)},
            **{str(status): _error(status) for status in operation.errors},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": _schema(operation.body)}}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": name == "start_time", "schema": schema}
        for name, schema in operation.query.items()
    ]
    if operation.body is not None and operation.event is not None:
        described["parameters"] = [_milliseconds(field, header) for field, header in HEADERS.items()]
    for name in ("model", "name"):
        if f"{{{name}}}" in operation.path:
            parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        described["parameters"] = parameters
    return described


def _milliseconds(field: str, header: str) -> dict[str, Any]:
    description = f"As the field {field}, which counts where both are sent."
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_MS}
    return {"name": header, "in": "header", "description": description, "schema": schema}


def _content(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = _schema(operation.answer)
    if operation.event is not None:
        content["text/event-stream"] = _events(operation.event)
    if operation.text is not None:
        content[operation.text] = {}
    return {"content": content} if content else {}


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}


def _events(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """One server-sent event; what goes wrong under way is told in one too."""
    either = {"anyOf": [_schema(kind)["schema"], _schema(ErrorBody)["schema"]]}
    told = {"type": "string", "contentMediaType": "application/json", "contentSchema": either}
    data = {"anyOf": [{"const": "[DONE]"}, told]}
    return {"schema": {"type": "object", "properties": {"data": data}}}


def _error(status: int) -> dict[str, Any]:
    return {"description": f"Error {status}.", "content": {"application/json": _schema(ErrorBody)}}
