"""Chat messages as templates read them: contents as text, thoughts by their names, arguments of calls as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from maitred.core.errors import InvalidRequest, UnsupportedContent
from maitred.text.answer_format import AnswerFormat, CallFormat, Marked, Slot, plain
from maitred.text.marks import MarkedText, Marks

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


_NO_MARKS = Marks(())
_Message = Mapping[str, Any]


def with_tools(
    format: AnswerFormat, messages: Sequence[_Message], tools: Sequence[_Message] | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables that `ChatTemplate.render` takes, so that its model hears of the tools, and of calls.

    Raises as `plain_messages` does.
    """
    chat = plain_messages(messages)
    if not format.writes_calls and format.calls is not None:
        chat = [_as_content(message, format, format.calls) for message in chat]
        chat = _alternating(chat) if format.tools_system_text else chat
    if not tools:
        return chat, {}
    if format.tools_system_text is not None:
        return _told_first(chat, format.tools_system_text(tools)), {}
    if format.tools_in_system:
        return _told_in_system(chat, tools), {}
    return chat, {format.tools_variable: list(tools)}


def written_calls(format: CallFormat, calls: Sequence[_Message]) -> MarkedText:
    """Calls, as `tool_calls` has them with arguments as objects, as their model writes them.

    Names, ids and values are a client's: what looks like a mark in them is letters.
    """
    pieces: list[tuple[str, bool]] = [(plain(format.begin), False)]
    for number, call in enumerate(calls):
        pieces += [(plain(format.separator), False)] if number else []
        pieces += [(plain(format.call_begin), False), *_written_call(format, call, number)]
        pieces.append((plain(format.call_end), False))
    return _marked_text([*pieces, (plain(format.end), False)])


def _written_call(format: CallFormat, call: _Message, number: int) -> list[tuple[str, bool]]:
    function = call["function"]
    values = {Slot.NAME: function["name"], Slot.ID: call.get("id", ""), Slot.INDEX: str(number + format.index_from)}
    pieces: list[tuple[str, bool]] = []
    for piece in format.call:
        if piece is Slot.PAIRS:
            pieces += _written_pairs(format, function["arguments"])
        elif piece is Slot.ARGUMENTS:
            told = function["arguments"]
            pieces.append((told if isinstance(told, str) else json.dumps(told, ensure_ascii=False), True))
        else:
            pieces.append((values[piece], True) if isinstance(piece, Slot) else (plain((piece,)), False))
    return pieces


def _written_pairs(format: CallFormat, arguments: _Message) -> list[tuple[str, bool]]:
    pairs = format.pairs
    assert pairs is not None
    pieces: list[tuple[str, bool]] = []
    for number, (key, value) in enumerate(arguments.items() if isinstance(arguments, Mapping) else ()):
        is_text = isinstance(value, str)
        begin: Marked = pairs.value_begin if is_text else pairs.value_begin_of.get("object", pairs.value_begin)
        quote = (plain(pairs.quote), False) if is_text else ("", False)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        pieces += [(plain(pairs.separator) if number else "", False), (plain(pairs.key_begin), False), (key, True)]
        pieces += [(plain(begin), False), quote, (text, True), quote, (plain(pairs.value_end), False)]
    return pieces


def _marked_text(pieces: Sequence[tuple[str, bool]]) -> MarkedText:
    spans: list[tuple[int, int]] = []
    at = 0
    for text, is_clients in pieces:
        if is_clients:
            spans.append((at, at + len(text)))
        at += len(text)
    return MarkedText("".join(text for text, _ in pieces), spans, _NO_MARKS)


def _as_content(message: _Message, format: AnswerFormat, calls: CallFormat) -> dict[str, Any]:
    """Calls become content; so do results, where there is no role for them."""
    if message.get("tool_calls"):
        written = written_calls(calls, message["tool_calls"])
        content = message.get("content")
        before = [(content + "\n", True)] if content else []
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**kept, "content": _marked_text([*before, *written.parts()])}
    if message.get("role") != "tool" or format.tool_role == "tool":
        return dict(message)
    if format.tool_role != "user":
        return {**message, "role": format.tool_role}
    return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}


def _alternating(chat: Sequence[_Message]) -> list[dict[str, Any]]:
    """Neighbours of one role made one message: such templates take turns only."""
    made: list[dict[str, Any]] = []
    for message in chat:
        if made and message.get("role") == made[-1].get("role") == "user":
            made[-1] = {**made[-1], "content": f"{made[-1].get('content') or ''}\n{message.get('content') or ''}"}
        else:
            made.append(dict(message))
    return made


def _told_first(chat: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if not chat or chat[0].get("role") not in ("system", "developer", "user"):
        return [{"role": "user", "content": text}, *chat]
    return [{**chat[0], "content": f"{text}\n\n{chat[0].get('content') or ''}"}, *chat[1:]]


def _told_in_system(chat: list[dict[str, Any]], tools: Sequence[_Message]) -> list[dict[str, Any]]:
    told = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if chat and chat[0].get("role") == "system":
        return [{**chat[0], "tools": told}, *chat[1:]]
    return [{"role": "system", "content": "You are a helpful assistant with some tools.", "tools": told}, *chat]
