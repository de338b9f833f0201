"""All that binds one answer, thoughts, calls and content, as one grammar for llguidance.

Literals of the format are met as tokens where they are tokens; free text never holds a special token. Syntax:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from maitred.core.request import ThinkingLimit
from maitred.text.answer_format import AnswerFormat, CallFormat, Mark, Marked, PairsFormat, Pieces, Slot
from maitred.text.schema import Source, quoted

_TERMINALS = [
    r"TEXT: /(.|\n)*/",
    r"BLANKS: /[ \t\r\n]{0,8}/",
    r"ID: /[A-Za-z0-9_-]{1,64}/",
    r"INDEX: /[0-9]{1,3}/",
    r"NO_OBJECT: /([^{ \t\r\n](.|\n)*)?/",
]


class Shape(NamedTuple):
    """The grammar of the answers to a prompt, and the way to read them."""

    grammar: str = ""  # empty binds nothing
    thinking: ThinkingLimit | None = None
    marks: Collection[int] | None = None  # tokens that are no text; None where none are looked for
    ignored: tuple[str, ...] = ()  # keywords of schemas that were left out
    unknown: tuple[str, ...] = ()  # fields of the request's own objects that nothing reads
    emptied: tuple[str, ...] = ()  # earlier calls whose arguments are no JSON object, shown as {}


NO_SHAPE = Shape()


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments
    source: Source  # of it
    definition: Mapping[str, Any]  # as the chat template takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    names: tuple[str, ...] = ()  # that may be called
    is_required: bool = False  # at least one call, and nothing else
    parallel: bool = True  # several at a time


NO_CALLS = ToolChoice()


def compose(
    format: AnswerFormat,
    *,
    content: Source | None = None,
    tools: Sequence[FunctionTool] = (),
    choice: ToolChoice = NO_CALLS,
    in_thoughts: bool = False,
    may_think: bool = True,
) -> str:
    """The grammar of an answer; empty where nothing binds it.

    `content` is a JSON schema for what is neither thought nor call. With `in_thoughts` the prompt ends in thoughts that
    it began; without `may_think` there are no others.
    """
    called = [tool for tool in tools if tool.name in choice.names] if format.calls is not None else []
    if content is None and not called:
        return ""
    grammar = _Grammar(format, choice, called)
    if format.channels:
        grammar.rule("start", grammar.channels(content))
        return grammar.text()
    calls = grammar.calls() if called else None
    body = grammar.body(calls, content)
    reasoning = format.reasoning
    if reasoning is None or not (in_thoughts or may_think):
        grammar.rule("start", body)
        return grammar.text()
    rest = f"BLANKS ({body})" if content is not None or choice.is_required else f"({body})"
    thoughts = grammar.after_text(reasoning.end, rest, "thoughts_end")
    if calls is not None:
        thoughts = f"{thoughts} | {calls.after_text}"  # a call begun inside them
    grammar.rule("thoughts", thoughts)
    grammar.rule("start", "thoughts" if in_thoughts else f"{body} | {grammar.literal(reasoning.begin)} thoughts")
    return grammar.text()


@dataclass(frozen=True, slots=True)
class _Calls:
    """Expressions of one call or more."""

    alone: str  # with nothing before them
    after_text: str


@dataclass(slots=True)
class _Grammar:
    """Rules of the main grammar, and the named ones beside it."""

    format: AnswerFormat
    choice: ToolChoice
    called: Sequence[FunctionTool]
    rules: list[str] = field(default_factory=lambda: list(_TERMINALS))
    beside: list[Mapping[str, Any]] = field(default_factory=list)

    def rule(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def schema(self, name: str, schema: object) -> str:
        """An expression for JSON that fits it."""
        self.beside.append({"name": name, "json_schema": schema})
        return f"@{name}"

    def text(self) -> str:
        lark = "\n".join(self.rules)
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.beside]}, ensure_ascii=False)

    def channels(self, content: Source | None) -> str:
        """Harmony: messages of thoughts, then one that is a call or content. A call's end is the answer's."""
        form, reasoning = self.format, self.format.reasoning
        assert reasoning is not None
        assert form.calls is not None
        ended = self.after_text(reasoning.end, self.literal(form.message_begin), "thoughts_end")
        thoughts = self.rule("thoughts", f"{self.literal(reasoning.begin)} {ended}")
        last = [f"{self.literal(form.calls.call_begin)} {self._any_call()}"] if self.called else []
        if not self.choice.is_required:
            bound = "TEXT" if content is None else self.schema("content", json.loads(content.text))
            last.append(f"{self.literal(form.content_begin)} {bound}")
        return f"{thoughts}* ({' | '.join(last)})"

    def body(self, calls: _Calls | None, content: Source | None) -> str:
        """Return the grammar of what follows the thoughts."""
        if calls is not None and self.choice.is_required:
            return calls.alone
        if content is not None:
            schema = json.loads(content.text)
            if calls is not None and not self._begins_by_itself:
                return self.schema("content", _either(schema, self.format.calls, self.called))
            bound = self.schema("content", schema)
            return bound if calls is None else f"{calls.alone} | {bound}"
        assert calls is not None
        return f"{calls.after_text} | {'TEXT' if self._begins_by_itself else 'NO_OBJECT'}"

    @property
    def _begins_by_itself(self) -> bool:
        """Return whether a call's beginning tells it from text."""
        calls = self.format.calls
        return calls is not None and bool(calls.begin or calls.call_begin)

    def after_text(self, begin: Marked, rest: str, name: str) -> str:
        """Free text up to the first `begin`, and what follows it."""
        trigger, more = _trigger(begin)
        if isinstance(trigger, Mark):
            return f"TEXT {_token(trigger)} {self.literal(more)} {rest}"
        self.rules.append(f"{name}[lazy]: TEXT {quoted(trigger)}")
        return f"{name} {self.literal(more)} {rest}"

    def literal(self, pieces: Marked) -> str:
        return self.pieces(pieces, {})

    def pieces(self, pieces: Pieces, slots: Mapping[Slot, str]) -> str:
        """Literals, those that touch as one, and expressions in place of slots."""
        parts: list[str] = []
        letters = ""
        for piece in pieces:
            if isinstance(piece, str):
                letters += piece
                continue
            expression = _token(piece) if isinstance(piece, Mark) else slots[piece]
            if isinstance(piece, Slot) and expression.startswith('"'):  # a name
                letters += json.loads(expression)
                continue
            parts += [quoted(letters), expression]
            letters = ""
        return " ".join(filter(None, [*parts, quoted(letters)]))

    def calls(self) -> _Calls:
        """Return the grammar of as many calls as the choice and the format allow."""
        form = self.format.calls
        assert form is not None
        one = self._any_call()
        more = ""
        if self.choice.parallel and form.several:
            more = f"({self.literal((*form.separator, *form.call_begin))} {one} {self.literal(form.call_end)})*"
        rest = f"{one} {self.literal(form.call_end)} {more} {self.literal(form.end)}"
        begin = (*form.begin, *form.call_begin)
        alone = self.rule("calls", f"{self.literal(begin)} {rest}")
        after_text = self.after_text(begin, rest, "call_begin") if begin else alone
        return _Calls(alone, after_text)

    def _any_call(self) -> str:
        form = self.format.calls
        assert form is not None
        return self.rule("call", " | ".join(self._call(form, tool, number) for number, tool in enumerate(self.called)))

    def _call(self, form: CallFormat, tool: FunctionTool, number: int) -> str:
        arguments = json.loads(tool.source.text)
        slots = {Slot.NAME: quoted(tool.name), Slot.INDEX: "INDEX", Slot.ID: "ID"}
        if form.id_length is not None:
            slots[Slot.ID] = f"/[A-Za-z0-9]{{{form.id_length}}}/"
        if form.pairs is None:
            slots[Slot.ARGUMENTS] = self.schema(f"arguments_{number}", arguments)
        else:
            slots[Slot.PAIRS] = self.rule(f"pairs_{number}", self._pairs(form.pairs, arguments, number))
        return self.pieces(form.call, slots)

    def _pairs(self, form: PairsFormat, schema: Mapping[str, Any], number: int) -> str:
        """Keys in the schema's order, the required ones all."""
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
        pairs: list[str] = []
        for place, (key, value) in enumerate(properties.items()):
            name = f"pair_{number}_{place}"
            self._pair(form, name, key, {**shared, **value} if isinstance(value, Mapping) else shared)
            pairs.append(name if key in required else f"{name}?")
        if not form.separator:
            return " ".join(pairs) or '""'
        return _joined(pairs, self.literal(form.separator)) or '""'

    def _pair(self, form: PairsFormat, name: str, key: str, schema: Mapping[str, Any]) -> None:
        kind = schema.get("type")
        begin = form.value_begin_of.get(kind, form.value_begin) if isinstance(kind, str) else form.value_begin
        head = (*form.key_begin, key, *begin)
        if kind == "string" and "enum" not in schema and "const" not in schema:
            self.rule(name, f"{self.literal((*head, *form.quote))} {name}_end")
            self.rule(f"{name}_end", self.after_text((*form.quote, *form.value_end), "", f"{name}_text"))
        elif kind == "string":
            texts = schema["enum"] if "enum" in schema else [schema["const"]]
            ends = [(*head, *form.quote, text, *form.quote, *form.value_end) for text in texts]
            self.rule(name, " | ".join(map(self.literal, ends)))
        else:
            value = self.schema(f"{name}_value", schema)
            self.rule(name, f"{self.literal(head)} {value} {self.literal(form.value_end)}")


def _either(content: Mapping[str, Any], form: CallFormat | None, tools: Sequence[FunctionTool]) -> Mapping[str, Any]:
    """A schema of content or of a call that begins as an object does: only within one schema are both begun at once."""
    assert form is not None
    options = content["x-guidance"]
    choices: list[Any] = [_moved(content, "#/anyOf/0/")]
    for number, tool in enumerate(tools, start=1):
        arguments = _moved(json.loads(tool.source.text), f"#/anyOf/{number}/properties/{form.arguments_key}/")
        properties = {form.name_key: {"const": tool.name}, form.arguments_key: arguments}
        choices.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    return {"anyOf": choices, "x-guidance": options}


def _moved(schema: Any, root: str) -> Any:
    """The schema as part of another, at `root`: its references to itself have the new place."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items() if name != "x-guidance"}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = root + target[1:].lstrip("/") if target != "#" else root.rstrip("/")
    return moved


def _trigger(begin: Marked) -> tuple[str | Mark, Marked]:
    """Return the words that tell a call from text, and what follows them; blanks before it belong to the text."""
    first, *rest = begin
    if isinstance(first, Mark):
        return first, tuple(rest)
    if not first.strip():
        return _trigger(tuple(rest))
    found = re.match(r"\s*(\S+)", first)
    assert found is not None
    return found[1], (first[found.end() :], *rest)


def _joined(pairs: Sequence[str], separator: str) -> str:
    """Rules in order, of which those that end in `?` may be left out, with a separator between two that are there."""
    needed = [pair for pair in pairs if not pair.endswith("?")]
    if not pairs:
        return ""
    first = 0 if not needed else list(pairs).index(needed[0])
    if needed:
        before = " ".join(f"({pair[:-1]} {separator})?" for pair in pairs[:first])
        after = " ".join(
            f"({separator} {pair[:-1]})?" if pair.endswith("?") else f"{separator} {pair}"
            for pair in pairs[first + 1 :]
        )
        return f"{before} {pairs[first]} {after}"
    choices = [
        " ".join([pair[:-1], *(f"({separator} {later})?" for later in (p[:-1] for p in pairs[number + 1 :]))])
        for number, pair in enumerate(pairs)
    ]
    return f"({' | '.join(choices)})?"


def _token(mark: Mark) -> str:
    return f"<[{mark.token_id}]>"
