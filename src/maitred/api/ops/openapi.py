"""The OpenAPI 3.1 document, made from the routes and from the same structs that check requests."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import msgspec

import maitred
from maitred.api.generate.dialect import HEADERS, MAX_MS
from maitred.api.http.exchange import ARGUMENTS_EMPTIED, IGNORED_FIELDS, MAX_TOLD, SCHEMA_IGNORED
from maitred.api.http.routes import DialectFormat, Route, RouteTable

_REF = "#/components/schemas/{name}"


@cache
def openapi_document(table: RouteTable) -> dict[str, Any]:
    """The whole document."""
    shapes = (shape for route in table.routes for shape in (route.body, route.answer, route.event))
    types = {kind for shape in shapes if shape is not None for kind in _kinds(shape)}
    types |= {(route.format or table.format).error_schema for route in table.routes}
    ordered = sorted(types, key=lambda t: t.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in table.routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, route.format or table.format)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "maitred",
            "version": maitred.__version__,
            "description": "OpenAI's API with vLLM's extensions. Known fields that this version does "
            "not do are refused with code unsupported_parameter; fields that nobody knows are ignored and named in the "
            f"header {IGNORED_FIELDS.decode()}, or, by a server with --strict-fields, refused with code "
            "unknown_parameter.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(route: Route, answers: DialectFormat) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.template}".translate(str.maketrans("/{}.", "____")),
        "responses": {
            "200": {"description": "The answer.", **_told(route), **_content(route, answers)},
            **{str(status): _error(status, answers) for status in route.errors},
        },
    }
    if route.body is not None:
        described["requestBody"] = {"required": True, "content": {route.body_type: _schema(route.body)}}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": name == "start_time", "schema": schema}
        for name, schema in route.query.items()
    ]
    if route.body is not None and route.event is not None:
        described["parameters"] = [_milliseconds(field, header) for field, header in HEADERS.items()]
    name = route.template.partition("{")[2].partition("}")[0]
    if name:
        parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        described["parameters"] = parameters
    return described


def _milliseconds(field: str, header: str) -> dict[str, Any]:
    description = f"As the field {field}, which counts where both are sent."
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_MS}
    return {"name": header, "in": "header", "description": description, "schema": schema}


def _told(route: Route) -> dict[str, Any]:
    if not route.tells_ignored:
        return {}
    text = f"Fields of the body that nobody knows: at most {MAX_TOLD} names, then how many more."
    told = {IGNORED_FIELDS.decode(): {"description": text, "schema": {"type": "string"}}}
    if route.event is not None:
        text = "Keywords of JSON schemas in the body that are not enforced; likewise."
        told[SCHEMA_IGNORED.decode()] = {"description": text, "schema": {"type": "string"}}
        text = "Calls in messages whose arguments are no JSON object, and are shown as {}; likewise."
        told[ARGUMENTS_EMPTIED.decode()] = {"description": text, "schema": {"type": "string"}}
    return {"headers": told}


def _content(route: Route, answers: DialectFormat) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = _schema(route.answer)
    if route.event is not None:
        content["text/event-stream"] = _events(route.event, answers)
    if route.text is not None:
        content[route.text] = {}
    return {"content": content} if content else {}


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}


def _kinds(shape: Any) -> tuple[type[msgspec.Struct], ...]:
    """The structs of a union, or the one that it is."""
    return tuple(get_args(shape)) or (shape,)


def _events(shape: Any, answers: DialectFormat) -> dict[str, Any]:
    """Schema of one server-sent event; errors under way are events too."""
    either = {"anyOf": [_schema(kind)["schema"] for kind in (*_kinds(shape), answers.error_schema)]}
    told = {"type": "string", "contentMediaType": "application/json", "contentSchema": either}
    end = answers.stream.end.decode().removeprefix("data: ").strip()
    data = {"anyOf": [{"const": end}, told]}
    return {"schema": {"type": "object", "properties": {"data": data}}}


def _error(status: int, answers: DialectFormat) -> dict[str, Any]:
    return {"description": f"Error {status}.", "content": {"application/json": _schema(answers.error_schema)}}
