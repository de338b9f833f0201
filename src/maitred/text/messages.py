"""Chat messages as templates read them: contents as text, thoughts by their names, arguments of calls as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from maitred.core.errors import InvalidRequest, UnsupportedContent

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class CallStyle(Enum):
    """A template's form of calls: whether arguments are text, and what stands for missing content."""

    OBJECTS_NO_CONTENT = (False, None)
    OBJECTS = (False, "")
    TEXTS_NO_CONTENT = (True, None)
    TEXTS = (True, "")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies in which content is text (or None) and calls hold objects. A tool's message has the name of its
    tool.

    Raises InvalidRequest with the path for calls that are none, UnsupportedContent for parts that are not text.
    """
    chat = [_plain_message(message, index) for index, message in enumerate(messages)]
    names: dict[Any, str] = {}
    for message in chat:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message.get("role") == "tool" and message.get("name") is None and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return chat


def styled(chat: Sequence[Mapping[str, Any]], style: CallStyle) -> list[dict[str, Any]]:
    """Return copies with calls as a template of this style takes them."""
    return [_styled(message, style) if message.get("tool_calls") else dict(message) for message in chat]


def _styled(message: Mapping[str, Any], style: CallStyle) -> dict[str, Any]:
    as_text, no_content = style.value
    calls = [(_with_text if as_text else _with_object)(call) for call in message["tool_calls"]]
    return {**message, "content": message.get("content") or no_content, "tool_calls": calls}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    return {**call, "function": {**call["function"], "arguments": {} if isinstance(arguments, str) else arguments}}


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    plain = dict(message)
    if isinstance(plain.get("content"), Sequence) and not isinstance(plain["content"], str):
        plain["content"] = "\n".join(_part_text(part, index) for part in plain["content"])
    reasoning = next((plain[name] for name in _REASONING_FIELDS if plain.get(name) is not None), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if plain.get("tool_calls"):
        plain["tool_calls"] = _plain_calls(plain["tool_calls"], f"messages[{index}].tool_calls")
    else:
        plain.pop("tool_calls", None)  # templates ask whether there is the field
    return plain


def _plain_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(f"{path} must be a list", param=path)
    return [_plain_call(call, f"{path}[{number}]") for number, call in enumerate(calls)]


def _plain_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path}.function must be an object with a name and arguments", param=f"{path}.function")
    arguments = arguments_of(function.get("arguments"), f"{path}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_of(arguments: Any, path: str) -> Mapping[str, Any] | str:
    """Arguments as an object; text that is none, as a call that was cut has, stays text. Raises InvalidRequest."""
    try:
        value = json.loads(arguments or "{}", parse_constant=_refused) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return str(arguments)
    if value is None:
        return {}
    if isinstance(arguments, str) and not isinstance(value, Mapping):
        return arguments
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{path} must be a JSON object, it is a {type(value).__name__}", param=path)
    return value


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _part_text(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise UnsupportedContent(
            f"messages[{index}] has a content part of type {kind!r}; this model takes only text", param="messages"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"messages[{index}] has a content part of type 'text' without text", param="messages")
    return text
