"""The answer shape that a chat's body asks for: tools, which of them may be called, and the form of the content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from maitred.api.dialects.openai.bounded import any_value
from maitred.api.dialects.openai.schemas import ChatCompletionRequest, GenerationFields
from maitred.api.http.errors import shortened
from maitred.core.errors import InvalidRequest
from maitred.core.structured_outputs import KINDS, StructuredOutputsParams
from maitred.text.schema import Source, json_source, source_of
from maitred.text.shape import Tool, ToolChoice

MAX_TOOLS = 128
MAX_SHAPE_BYTES = 4 * 1024 * 1024  # of tools, and of a schema
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# fields of a response_format by its type; `schema` beside the type is llama.cpp's form
KNOWN_OF_FORM: Mapping[Any, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "json_schema", "schema"),
}
_KNOWN_IN: Mapping[str, tuple[str, ...]] = {
    "response_format.json_schema": ("name", "description", "schema", "strict"),
    "tool_choice": ("type", "function", "allowed_tools"),
    "tool_choice.function": ("name",),
    "tool_choice.allowed_tools": ("mode", "tools"),
}
# keywords that say more of an object's properties than `properties` does
_MORE_PROPERTIES = (
    *("additionalProperties", "unevaluatedProperties", "patternProperties"),
    *("allOf", "anyOf", "oneOf", "$ref", "if"),
)


def tools_of(body: ChatCompletionRequest) -> list[Tool]:
    """Raises InvalidRequest with the path of what is wrong."""
    sent = any_value(body.tools, "tools", MAX_SHAPE_BYTES) or []
    if not isinstance(sent, list) or len(sent) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS}", param="tools")
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(sent)]
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InvalidRequest(f"two tools are named {name!r}", param=f"tools[{number}].function.name")
    return tools


def _tool(sent: Any, path: str) -> Tool:
    if not isinstance(sent, Mapping) or sent.get("type") != "function":
        told = sent.get("type") if isinstance(sent, Mapping) else sent
        raise InvalidRequest(f"{path}.type is {_shown(told)}; only function is known", param=f"{path}.type")
    function = sent.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{path}.function is missing", param=f"{path}.function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.function.name is {_shown(name)}; it must be 1 to 64 characters of A-Z a-z 0-9 _ . -",
            param=f"{path}.function.name",
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(f"{path}.function.parameters must be an object", param=f"{path}.function.parameters")
    at = f"{path}.function.parameters"
    schema = parameters or {"type": "object", "properties": {}}
    source = json_source(_closed(schema), at, is_strict=function.get("strict") is True)
    return Tool(name=name, parameters=schema, source=source, definition=dict(sent))


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function has the parameters that it lists, and no others, unless its schema says more of them."""
    is_open = "properties" not in schema or any(name in schema for name in _MORE_PROPERTIES)
    return schema if is_open else {**schema, "additionalProperties": False}


def choice_of(body: ChatCompletionRequest, tools: Sequence[Tool]) -> ToolChoice:
    """Which tools may be called, and whether one must be. Raises InvalidRequest."""
    sent = any_value(body.tool_choice, "tool_choice", MAX_SHAPE_BYTES)
    parallel = body.parallel_tool_calls is not False
    names = tuple(tool.name for tool in tools)
    if sent in (None, "auto", "none"):
        allowed = names if sent != "none" else ()
        return ToolChoice(names=allowed, parallel=parallel)
    if not tools:
        raise InvalidRequest(f"tool_choice is {_shown(sent)}, but there are no tools", param="tool_choice")
    if sent == "required":
        return ToolChoice(names=names, is_required=True, parallel=parallel)
    if isinstance(sent, Mapping) and sent.get("type") == "function":
        return ToolChoice(names=_named([sent], names), is_required=True, parallel=False)
    if isinstance(sent, Mapping) and isinstance(sent.get("allowed_tools"), Mapping):
        allowed_tools = sent["allowed_tools"]
        listed = _named(allowed_tools.get("tools") or [], names)
        return ToolChoice(names=listed, is_required=allowed_tools.get("mode") == "required", parallel=parallel)
    raise InvalidRequest(
        f"tool_choice is {_shown(sent)}; send none, auto, required, or "
        '{"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _named(listed: Sequence[Any], names: Sequence[str]) -> tuple[str, ...]:
    found: list[Any] = [
        tool["function"].get("name")
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)
        else None
        for tool in listed
    ]
    for name in found:
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names {_shown(name)}, which is none of the tools: {', '.join(names)}", param="tool_choice"
            )
    return tuple(found)


def content_source(body: GenerationFields) -> tuple[Source | None, bool]:
    """Source of the answer text's grammar, and whether it binds all that the model writes. Raises InvalidRequest."""
    wanted = any_shape(body)
    form = any_value(body.response_format, "response_format", MAX_SHAPE_BYTES)
    if form is not None and not isinstance(form, Mapping):
        raise InvalidRequest("response_format must be an object", param="response_format")
    if form is not None and form.get("type") is None:
        raise InvalidRequest("response_format.type is missing", param="response_format.type")
    if form is None or form["type"] == "text":
        return (None, False) if wanted is None else (source_of(wanted, "structured_outputs"), not wanted.binds_content)
    if wanted is not None:
        raise InvalidRequest("send either response_format or structured_outputs, not both", param="structured_outputs")
    return _from_format(form, form["type"])


def _from_format(form: Mapping[str, Any], kind: Any) -> tuple[Source, bool]:
    kind = kind if isinstance(kind, str) else repr(kind)
    if "schema" in KNOWN_OF_FORM.get(kind, ()) and form.get("json_schema") is None and form.get("schema") is not None:
        return json_source(form["schema"], "response_format.schema"), False
    if kind == "json_object":
        return source_of(StructuredOutputsParams(json_object=True), "response_format"), False
    if kind == "structural_tag":
        return source_of(StructuredOutputsParams(structural_tag=form), "response_format"), True
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format.type is {_shown(kind)}; choose one of text, json_object, json_schema, structural_tag",
            param="response_format.type",
        )
    told = form.get("json_schema")
    if not isinstance(told, Mapping) or told.get("schema") is None:
        raise InvalidRequest("response_format.json_schema.schema is missing", param="response_format.json_schema")
    path = "response_format.json_schema.schema"
    return json_source(told["schema"], path, is_strict=told.get("strict") is True), False


def unknown_in_shape(body: GenerationFields) -> tuple[str, ...]:
    """Fields that nothing reads, in objects that `content_source` and `choice_of` have read."""
    choice = body.tool_choice if isinstance(body, ChatCompletionRequest) else UNSET
    sent = {
        "response_format": any_value(body.response_format, "response_format", MAX_SHAPE_BYTES),
        "tool_choice": any_value(choice, "tool_choice", MAX_SHAPE_BYTES),
    }
    form = sent["response_format"] or {}
    found = []
    for path, known in {"response_format": KNOWN_OF_FORM.get(form.get("type"), tuple(form)), **_KNOWN_IN}.items():
        at: Any = sent
        for step in path.split("."):
            at = at.get(step) if isinstance(at, Mapping) else None
        if isinstance(at, Mapping):
            found += [f"{path}.{name}" for name, value in at.items() if name not in known and value is not None]
    return tuple(found)


def any_shape(body: GenerationFields) -> StructuredOutputsParams | None:
    """The body's structured_outputs. Raises InvalidRequest for a field that it has not."""
    sent = any_value(body.structured_outputs, "structured_outputs", MAX_SHAPE_BYTES)
    if sent is None:
        return None
    if not isinstance(sent, Mapping):
        raise InvalidRequest("structured_outputs must be an object", param="structured_outputs")
    given = {name: value for name, value in sent.items() if value not in (None, False) or name == "json"}
    for name in given:
        if name not in (*KINDS, "whitespace_pattern"):
            raise InvalidRequest(
                f"structured_outputs.{name[:64]} is not known; it has {', '.join(KINDS)} and whitespace_pattern",
                param=f"structured_outputs.{name[:64]}",
            )
    return StructuredOutputsParams(**given)


def _shown(value: Any) -> str:
    return shortened(repr(value), 80)
