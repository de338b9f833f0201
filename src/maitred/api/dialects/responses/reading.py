"""A body of the Responses API as the chat that it asks for: items to messages, its tools to functions."""

from __future__ import annotations

import ast
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.api.dialects.openai import refusals
from maitred.api.dialects.openai.reading import MAX_SHAPE_BYTES
from maitred.api.dialects.openai.schemas import ChatMessage, ContentPart
from maitred.api.dialects.responses.schemas import InputItem, InputPart, ResponsesRequest, TextOptions
from maitred.api.http.bodies import decode_json
from maitred.api.http.errors import shortened
from maitred.core.errors import InvalidRequest

MAX_ITEM_BRACES = 512 * 1024  # of an input that is a list; so many empty items are 100 MB
_TEXT = msgspec.json.Decoder(str)
_ITEMS = msgspec.json.Decoder(list[InputItem])
_encode = msgspec.json.encode
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_CALLS = ("function_call", "custom_tool_call")
_SAID = ("reasoning", *_CALLS)  # by the assistant
_KINDS = ("message", *_SAID, "function_call_output", "custom_tool_call_output")
_MADE_HERE = "maitred:"  # begins our `encrypted_content`
_FIELD_NAMES = {  # of a chat's fields
    **dict.fromkeys(("prompt", "messages"), "input"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    **dict.fromkeys(("response_format", "response_format.json_schema"), "text.format"),
    "reasoning_effort": "reasoning.effort",
}


@dataclass(slots=True)
class Translation:
    """Makes a body's items, tools and format those of a chat; knows what a chat does not have, and what stood where."""

    custom_tools: list[str] = field(default_factory=list)
    ignored_tools: dict[str, None] = field(default_factory=dict)  # types that this server does not have
    unread: dict[str, None] = field(default_factory=dict)  # fields that nothing reads
    unenforced: list[str] = field(default_factory=list)  # formats of custom tools
    messages: list[tuple[str, Sequence[str]]] = field(default_factory=list)  # path of each, and those of its calls
    tools: list[str] = field(default_factory=list)  # path of each

    def field_names(self) -> dict[str, str]:
        """The client's names of a chat's fields."""
        names = _FIELD_NAMES | {f"tools[{number}].function": at for number, at in enumerate(self.tools)}
        for number, (at, calls) in enumerate(self.messages):
            names[f"messages[{number}]"] = at
            for place, call in enumerate(calls):
                path = f"messages[{number}].tool_calls[{place}]"
                names |= dict.fromkeys((path, f"{path}.function"), call)
        return names

    def read(self, body: ResponsesRequest) -> None:
        """Give the body a chat's messages, tools and format; in a thread. Raises RequestError."""
        if body.instructions:
            body.messages.append(ChatMessage(role="system", content=body.instructions))
            self.messages.append(("instructions", ()))
        for at, calls, message in self._messages(read_items(body.input)):
            body.messages.append(message)
            self.messages.append((at, calls))
        body.input = UNSET
        if body.truncation == "auto":
            self.unread["truncation"] = None
        if body.text is not None:
            self._read_format(body, body.text)
        if body.stream_options is not None:
            self.unread["stream_options"] = None
        if body.tools is not UNSET:
            self._read_tools(body)
        choice = _choice(refusals.any_value(body.tool_choice, "tool_choice", MAX_SHAPE_BYTES))
        body.tool_choice = UNSET if choice is None else Raw(_encode(choice))

    def _read_format(self, body: ResponsesRequest, text: TextOptions) -> None:
        form = refusals.any_value(text.format, "text.format", MAX_SHAPE_BYTES)
        if isinstance(form, Mapping) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {name: of for name, of in form.items() if name != "type"}}
        body.response_format = UNSET if form is None else Raw(_encode(form))
        if text.verbosity not in (None, "medium"):
            self.unread["text.verbosity"] = None

    # -- the input

    def _messages(self, items: Sequence[InputItem]) -> Iterator[tuple[str, Sequence[str], ChatMessage]]:
        """Messages of the items, each with the path of its first one and those of its calls."""
        turn: _Turn | None = None
        for number, item in enumerate(items):
            at, kind = f"input[{number}]", item.type or ("message" if item.role is not None else "item_reference")
            is_said = kind in _SAID or item.role == "assistant"
            if kind == "item_reference":
                told = f"{at} refers to {shortened(repr(item.id))}, which is not kept here; send the item"
                raise InvalidRequest(told, param=f"{at}.id")
            if kind not in _KINDS:
                self.unread[f"input.{kind[:40]}"] = None
                continue
            if turn is not None and (not is_said or (turn.is_said and kind in ("message", "reasoning"))):
                yield turn.at, [*turn.calls], turn.message()
                turn = None
            if is_said:
                turn = turn or _Turn(at)
                self._say(turn, item, kind, at)
            elif kind == "message":
                yield at, (), ChatMessage(role=item.role or "", content=_content(item.content, f"{at}.content"))
            else:
                if item.call_id is None:
                    raise InvalidRequest(f"{at}.call_id is missing: which call was answered?", param=f"{at}.call_id")
                output = _content(item.output, f"{at}.output")
                yield at, (), ChatMessage(role="tool", tool_call_id=item.call_id, content=output or "")
        if turn is not None:
            yield turn.at, [*turn.calls], turn.message()

    def _say(self, turn: _Turn, item: InputItem, kind: str, at: str) -> None:
        if kind == "reasoning":
            parts = (item.content if isinstance(item.content, list) else None) or item.summary or []
            thoughts = "\n".join(part.text or "" for part in parts) or _unsealed(item.encrypted_content or "")
            if thoughts:
                turn.thoughts.append(thoughts)
            elif item.encrypted_content:
                self.unread["input.reasoning.encrypted_content"] = None
        elif kind in _CALLS:
            if item.name is None or item.call_id is None:
                missing = f"{at}.{'name' if item.name is None else 'call_id'}"
                raise InvalidRequest(f"{missing} is missing", param=missing)
            is_custom = kind == "custom_tool_call"
            arguments = _encode({"input": item.input or ""}).decode() if is_custom else item.arguments or "{}"
            function = {"name": item.name, "arguments": arguments}
            turn.calls[at] = {"id": item.call_id, "type": "function", "function": function}
        else:
            turn.content = _content(item.content, f"{at}.content")

    # -- the tools

    def _read_tools(self, body: ResponsesRequest) -> None:
        sent = refusals.any_value(body.tools, "tools", MAX_SHAPE_BYTES) or []
        if not isinstance(sent, list):
            raise InvalidRequest("tools must be a list", param="tools")
        functions = [function for number, tool in enumerate(sent) if (function := self._function(tool, number))]
        # a chat without tools is no shaped one
        body.tools = Raw(_encode([{"type": "function", "function": of} for of in functions])) if functions else UNSET

    def _function(self, tool: Any, number: int) -> dict[str, Any] | None:
        """None for a tool that is not here."""
        at, kind = f"tools[{number}]", tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"{at}.type is missing", param=f"{at}.type")
        if kind not in ("custom", "function"):
            self.ignored_tools[kind] = None
            return None
        self.tools.append(at)
        if kind == "custom":
            return self._custom(tool, at)
        return {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name)}

    def _custom(self, tool: Mapping[str, Any], at: str) -> dict[str, Any]:
        """A function of one text, which is bound to the tool's grammar as far as that is regular."""
        form, name = tool.get("format") or {"type": "text"}, str(tool.get("name"))
        self.custom_tools.append(name)
        fields = form if isinstance(form, Mapping) else {}
        kind, syntax, definition = (fields.get(name) for name in ("type", "syntax", "definition"))
        text: dict[str, Any] = {"type": "string"}
        if kind == "grammar" and syntax in ("lark", "regex") and isinstance(definition, str):
            text["description"] = f"fits this {syntax} grammar:\n{definition}"
            pattern = definition if syntax == "regex" else regex_of_lark(definition)
            if pattern is None:
                self.unenforced.append(f"tools.{name}.format")
            else:
                text["pattern"] = f"^(?:{pattern})$"
        elif kind != "text":
            raise InvalidRequest(
                f'{at}.format must be {{"type": "text"}}, or a grammar with its syntax, lark or regex, and definition',
                param=f"{at}.format",
            )
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
        return {"name": name, "description": tool.get("description") or "", "parameters": schema}


def sealed(thoughts: str) -> str:
    """Thoughts as `encrypted_content`, which a client sends back unread; nobody is kept from reading them."""
    return _MADE_HERE + b64encode(thoughts.encode("utf-8", "replace")).decode()


def _unsealed(sent: str) -> str:
    """Empty for what another server made."""
    with suppress(ValueError):
        if sent.startswith(_MADE_HERE):
            return b64decode(sent[len(_MADE_HERE) :], validate=True).decode()
    return ""


def read_items(sent: Raw | UnsetType) -> list[InputItem]:
    """Items of an input that was sent. Raises InvalidRequest."""
    assert not isinstance(sent, UnsetType), "it was looked for"
    raw = bytes(sent)
    if raw[:1] == b'"':
        return [InputItem(role="user", content=decode_json(sent, _TEXT, at="input"))]
    if raw.count(b"{") > MAX_ITEM_BRACES:
        raise InvalidRequest(f"input has over {MAX_ITEM_BRACES} items and parts", param="input", code="too_many_items")
    return decode_json(sent, _ITEMS, at="input")


@dataclass(slots=True)
class _Turn:
    """Items that the assistant made one after the other, which are one message of a chat."""

    at: str  # path of the first
    thoughts: list[str] = field(default_factory=list)
    content: str | list[ContentPart] | None = None
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)  # by their paths

    @property
    def is_said(self) -> bool:
        """Whether more thoughts or text would be another message's."""
        return bool(self.calls) or self.content is not None

    def message(self) -> ChatMessage:
        message = ChatMessage(role="assistant", content=self.content)
        if self.calls:
            message.tool_calls = Raw(_encode([*self.calls.values()]))
        if self.thoughts:
            message.reasoning_content = "\n".join(self.thoughts)
        elif not self.is_said:
            message.content = ""
        return message


def _content(sent: str | list[InputPart] | None, at: str) -> str | list[ContentPart] | None:
    if not isinstance(sent, list):
        return sent
    parts = []
    for number, part in enumerate(sent):
        where = f"{at}[{number}]"
        if part.type not in _TEXT_PARTS:
            raise refusals.unsupported_content(where, f"a part of type {shortened(repr(part.type))}")
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
        parts.append(ContentPart(type="text", text=text))
    return parts


def _choice(sent: Any) -> Any:
    """Choice as chats have it. Raises InvalidRequest for one that demands a tool which this server does not have."""
    kind = sent.get("type") if isinstance(sent, Mapping) else None
    if kind is None:
        return sent
    if kind in ("function", "custom"):
        return _named(sent)
    listed = sent.get("tools") if kind == "allowed_tools" else []
    if not isinstance(listed, list):
        raise InvalidRequest("tool_choice.tools must be a list", param="tool_choice")
    own = [_named(tool) for tool in listed if isinstance(tool, Mapping) and tool.get("type") in ("function", "custom")]
    if own or (kind == "allowed_tools" and sent.get("mode") != "required"):
        return {"type": "allowed_tools", "allowed_tools": {"mode": sent.get("mode"), "tools": own}} if own else "none"
    raise InvalidRequest(
        f"tool_choice demands {shortened(repr(kind))}, and this server has no such tool; it has functions and custom "
        "tools of the client's",
        param="tool_choice",
        code="unsupported_tool",
    )


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.get("name")}}


MAX_PATTERN_CHARS = 64 * 1024
_COMMON = {  # https://github.com/lark-parser/lark/blob/master/lark/grammars/common.lark
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
}
_LARK = re.compile(
    r"(?P<blank>\s+|//[^\n]*)|%import +common\.(?P<imported>\w+)(?: *-> *(?P<as>\w+))?"
    r"|%import +common *\((?P<several>[\w\s,]+)\)|(?P<ignore>%ignore)"
    r"|[?!]*(?P<define>[A-Za-z_]\w*)(?:\.-?\d+)?\s*:"
    r'|"(?P<low>\\.|[^"\\])"\s*\.\.\s*"(?P<high>\\.|[^"\\])"|(?P<text>"(?:\\.|[^"\\])*")(?P<any_case>i?)'
    r"|/(?P<regex>(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\[])+)/(?P<flags>[imslux]*)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<alias>->\s*\w+)|~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?|(?P<mark>[()\[\]|?*+])",
    re.DOTALL,
)
_MARKS = {"(": "(?:", "[": "(?:", "]": ")?"}


def regex_of_lark(grammar: str) -> str | None:
    """Regular expression of the texts that fit a Lark grammar; None for one that is recursive, or is none.

    The text of a custom tool stands in JSON, where a regular expression can be enforced and a grammar cannot.
    """
    rules: dict[str, list[re.Match[str]]] = {}
    terminals, current, at = dict[str, str](), "", 0
    while at < len(grammar):
        found = _LARK.match(grammar, at)
        if found is None:
            return None
        at = found.end()
        if found["imported"] or found["several"]:
            for name in re.findall(r"\w+", found["imported"] or found["several"]):
                terminals[found["as"] or name] = _COMMON.get(name, "")
        elif found["define"] or found["ignore"]:
            current = found["define"] or "%ignore"
            rules.setdefault(current, [])
        elif not found["blank"] and not found["alias"]:
            rules.setdefault(current, []).append(found)
    try:
        ignored = _expanded("%ignore", rules, terminals, (), "") if "%ignore" in rules else ""
        between = f"(?:{ignored})*" if ignored else ""
        return f"{between}(?:{_expanded('start', rules, terminals, (), between)})"
    except (KeyError, ValueError, RecursionError, SyntaxError):
        return None


def _expanded(
    name: str,
    rules: Mapping[str, Sequence[re.Match[str]]],
    terminals: Mapping[str, str],
    above: tuple[str, ...],
    between: str,
) -> str:
    """Raises KeyError for what is not defined, and ValueError for a rule within itself."""
    if name in above:
        raise ValueError(name)
    if terminals.get(name):
        return terminals[name]
    between = "" if name.isupper() else between
    parts: list[str] = []
    for piece in rules[name]:
        if piece["mark"]:
            parts.append(_MARKS.get(piece["mark"], piece["mark"]))
        elif piece["least"]:
            parts.append(f"{{{piece['least']},{piece['most'] or piece['least']}}}")
        else:
            atom = (
                _expanded(piece["name"], rules, terminals, (*above, name), between) if piece["name"] else _atom(piece)
            )
            parts.append(f"(?:{atom}{'' if piece['name'] and not piece['name'].isupper() else between})")
        if len(parts[-1]) > MAX_PATTERN_CHARS:
            raise ValueError(name)
    return "".join(parts)


def _atom(piece: re.Match[str]) -> str:
    if piece["low"]:
        return f"[{piece['low']}-{piece['high']}]"
    if piece["regex"]:
        flags = "".join(sorted({*piece["flags"]} - {"u", "l"}))
        regex = piece["regex"].replace("\\/", "/")
        return f"(?{flags}:{regex})" if flags else regex
    text = re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", ast.literal_eval(piece["text"]))
    return f"(?i:{text})" if piece["any_case"] else text
