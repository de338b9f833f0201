"""A body of the Responses API as the chat that it asks for: items to messages, its tools to functions."""

from __future__ import annotations

import ast
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.api.dialects.openai import refusals
from maitred.api.dialects.openai.reading import MAX_SHAPE_BYTES
from maitred.api.dialects.openai.schemas import ChatCompletionRequest, ChatMessage, ContentPart
from maitred.api.dialects.responses.schemas import InputItem, InputPart, ResponsesRequest
from maitred.api.http.bodies import decode_json
from maitred.api.http.errors import shortened
from maitred.core.errors import InvalidRequest

MAX_ITEM_BRACES = 512 * 1024  # of an input that is a list; so many empty items are 100 MB
_TEXT = msgspec.json.Decoder(str)
_ITEMS = msgspec.json.Decoder(list[InputItem])
_encode = msgspec.json.encode
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_MADE_HERE = "maitred:"  # begins our `encrypted_content`


_FIELD_NAMES = {  # of a chat's fields
    **dict.fromkeys(("prompt", "messages"), "input"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    **dict.fromkeys(("response_format", "response_format.json_schema"), "text.format"),
    "reasoning_effort": "reasoning.effort",
}


class Translation(NamedTuple):
    """The parts of a body that a chat does not have, and where those that it has stand in the body."""

    custom_tools: frozenset[str]
    ignored_tools: tuple[str, ...]  # types of the tools that this server does not have
    unread: tuple[str, ...]  # fields that nothing reads
    unenforced: tuple[str, ...]  # formats of custom tools
    messages: Sequence[tuple[str, Sequence[str]]]  # path of each one's first item, and those of its calls
    tools: Sequence[str]  # path of each

    def field_names(self) -> dict[str, str]:
        """The client's names of a chat's fields."""
        names = _FIELD_NAMES | {f"tools[{number}].function": at for number, at in enumerate(self.tools)}
        for number, (at, calls) in enumerate(self.messages):
            names[f"messages[{number}]"] = at
            for place, call in enumerate(calls):
                path = f"messages[{number}].tool_calls[{place}]"
                names |= dict.fromkeys((path, f"{path}.function"), call)
        return names


NOTHING_READ = Translation(frozenset(), (), (), (), (), ())


def translated(body: ResponsesRequest, chat: ChatCompletionRequest) -> Translation:
    """Fill the `chat`'s messages, tools and format with those of the body; in a thread. Raises RequestError."""
    unread: dict[str, None] = {}
    places: list[tuple[str, Sequence[str]]] = []
    if body.instructions:
        chat.messages.append(ChatMessage(role="system", content=body.instructions))
        places.append(("instructions", ()))
    for place, message in _messages(read_items(body.input), unread):
        chat.messages.append(message)
        places.append(place)
    if body.truncation == "auto":
        unread["truncation"] = None
    if body.text is not None:
        form = refusals.any_value(body.text.format, "text.format", MAX_SHAPE_BYTES)
        if isinstance(form, Mapping) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {name: of for name, of in form.items() if name != "type"}}
        chat.response_format = UNSET if form is None else Raw(_encode(form))
        if body.text.verbosity not in (None, "medium"):
            unread["text.verbosity"] = None
    tools = _Tools()
    tools.read(body, chat)
    customs, ignored, unenforced = frozenset(tools.customs), tuple(tools.ignored), tuple(tools.unenforced)
    return Translation(customs, ignored, tuple(unread), unenforced, places, tools.places)


def sealed(thoughts: str) -> str:
    """Thoughts as `encrypted_content`, which a client sends back unread; nobody is kept from reading them."""
    return _MADE_HERE + b64encode(thoughts.encode("utf-8", "replace")).decode()


def _unsealed(sent: str) -> str:
    """Empty for what another server made."""
    with suppress(ValueError):
        if sent.startswith(_MADE_HERE):
            return b64decode(sent[len(_MADE_HERE) :], validate=True).decode()
    return ""


# -- the input


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

    place: tuple[str, list[str]]
    thoughts: list[str] = field(default_factory=list)
    content: str | list[ContentPart] | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_said(self) -> bool:
        """Whether more thoughts or text would be another message's."""
        return bool(self.calls) or self.content is not None

    def message(self) -> tuple[tuple[str, list[str]], ChatMessage]:
        message = ChatMessage(role="assistant", content=self.content)
        if self.calls:
            message.tool_calls = Raw(_encode(self.calls))
        if self.thoughts:
            message.reasoning_content = "\n".join(self.thoughts)
        elif self.content is None and not self.calls:
            message.content = ""
        return self.place, message


def _messages(
    items: Sequence[InputItem], unknown: dict[str, None]
) -> Iterator[tuple[tuple[str, list[str]], ChatMessage]]:
    """Places and messages of the items; types that nothing reads are put into `unknown`."""
    turn: _Turn | None = None
    for number, item in enumerate(items):
        at, kind = f"input[{number}]", item.type or ("message" if item.role is not None else "item_reference")
        is_said = kind in ("reasoning", "function_call", "custom_tool_call") or item.role == "assistant"
        is_known = is_said or kind in ("message", "function_call_output", "custom_tool_call_output")
        if kind == "item_reference":
            raise InvalidRequest(
                f"{at} refers to {shortened(repr(item.id))}, which is not kept here; send the item", param=f"{at}.id"
            )
        if not is_known:
            unknown[f"input.{kind[:40]}"] = None
            continue
        if turn is not None and (not is_said or (turn.is_said and kind in ("message", "reasoning"))):
            yield turn.message()
            turn = None
        if is_said:
            turn = turn or _Turn((at, []))
            _say(turn, item, kind, at, unknown)
        elif kind == "message":
            yield (at, []), ChatMessage(role=item.role or "", content=_content(item.content, f"{at}.content"))
        else:
            if item.call_id is None:
                raise InvalidRequest(f"{at}.call_id is missing: which call was answered?", param=f"{at}.call_id")
            output = _content(item.output, f"{at}.output")
            yield (at, []), ChatMessage(role="tool", tool_call_id=item.call_id, content=output or "")
    if turn is not None:
        yield turn.message()


def _say(turn: _Turn, item: InputItem, kind: str, at: str, unknown: dict[str, None]) -> None:
    if kind == "message":
        turn.content = _content(item.content, f"{at}.content")
    elif kind == "reasoning":
        parts = (item.content if isinstance(item.content, list) else None) or item.summary or []
        thoughts = "\n".join(part.text or "" for part in parts) or _unsealed(item.encrypted_content or "")
        if thoughts:
            turn.thoughts.append(thoughts)
        elif item.encrypted_content:
            unknown["input.reasoning.encrypted_content"] = None
    else:
        if item.name is None or item.call_id is None:
            missing = "name" if item.name is None else "call_id"
            raise InvalidRequest(f"{at}.{missing} is missing", param=f"{at}.{missing}")
        is_custom = kind == "custom_tool_call"
        arguments = _encode({"input": item.input or ""}).decode() if is_custom else item.arguments or "{}"
        function = {"name": item.name, "arguments": arguments}
        turn.place[1].append(at)
        turn.calls.append({"id": item.call_id, "type": "function", "function": function})


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


# -- the tools


@dataclass(slots=True)
class _Tools:
    customs: list[str] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)
    unenforced: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def read(self, body: ResponsesRequest, chat: ChatCompletionRequest) -> None:
        """Give the tools and their choice to the chat."""
        sent = refusals.any_value(body.tools, "tools", MAX_SHAPE_BYTES) or []
        if not isinstance(sent, list):
            raise InvalidRequest("tools must be a list", param="tools")
        functions = {f"tools[{number}]": self._function(tool, f"tools[{number}]") for number, tool in enumerate(sent)}
        self.places = [at for at, of in functions.items() if of]
        if self.places:  # a chat without tools is no shaped one
            chat.tools = Raw(_encode([{"type": "function", "function": functions[at]} for at in self.places]))
        choice = _choice(refusals.any_value(body.tool_choice, "tool_choice", MAX_SHAPE_BYTES))
        chat.tool_choice = UNSET if choice is None else Raw(_encode(choice))

    def _function(self, tool: Any, at: str) -> dict[str, Any]:
        """Empty for a tool that is not here."""
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"{at}.type is missing", param=f"{at}.type")
        if kind == "custom":
            return self._custom(tool, at)
        if kind == "function":
            return {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name)}
        self.ignored[kind] = None
        return {}

    def _custom(self, tool: Mapping[str, Any], at: str) -> dict[str, Any]:
        """A function of one text, which is bound to the tool's grammar as far as that is regular."""
        form, name = tool.get("format") or {"type": "text"}, str(tool.get("name"))
        self.customs.append(name)
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
