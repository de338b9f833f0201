"""Tools, calls and their results in messages, for templates that do not write them all themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from maitred.text.answer_format import AnswerFormat, CallFormat, Slot, Text, plain
from maitred.text.marks import MarkedText, Marks
from maitred.text.messages import plain_messages

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
        begin: Text = pairs.value_begin if is_text else pairs.value_begin_of.get("object", pairs.value_begin)
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
