"""Reads calls of tools in one format: their heads, up to where they are calls for certain, and their arguments."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from maitred.text.answer_format import CallFormat, Marked, PairsFormat, Pieces, Slot
from maitred.text.feed import (
    Feed,
    JsonScan,
    Reading,
    find,
    held_from,
    json_string,
    match,
    pass_json,
    skip_json,
    skip_one,
    skip_space,
    skip_words,
    words,
)

_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_MAX_REFS = 8
_STRING = frozenset({"string"})
_BARE = re.compile(r"[^\s{}\[\],:]+(?: +[^\s{}\[\],:]+)*")  # a key, a number or a name
_SPACED = re.compile(r"([,:])\s*")
_Emit = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Begin:
    """A literal before a value, and of what types the value then is; None for any."""

    words: list[str]
    space: str  # at its end, which is not the value's
    types: frozenset[str] | None


class PairReader:
    """Reads the pairs of one call."""

    def __init__(
        self,
        pairs: PairsFormat,
        encode: Callable[[Marked], str],
        call_end: str,
        schema: Mapping[str, Any] | None,
        emit: _Emit,
    ) -> None:
        self._key_begin, self._separator = words(encode(pairs.key_begin)), words(encode(pairs.separator))
        self._begins = _begins(pairs, encode)
        value_end = encode(pairs.value_end)
        self._end = words(value_end)
        self._end_space = value_end[: len(value_end) - len(value_end.lstrip())]
        self._quote = encode(pairs.quote)
        self._call_end = words(call_end)
        self._schema = schema or {}
        self._emit = emit

    def read(self, feed: Feed) -> Reading[None]:
        """Read from behind the name to behind the call's end; the arguments are emitted as a JSON object."""
        self._emit("{")
        num_read = 0
        while True:
            at = yield from skip_words(feed, 0, self._call_end)
            if at is not None and self._call_end:
                feed.cut(at)
                break
            at = yield from skip_words(feed, 0, self._separator if num_read else ())
            at = yield from skip_words(feed, at or 0, self._key_begin)
            if at is None:
                if feed.ended and (not feed.text.strip() or self._may_go_on(feed.text.strip())):
                    feed.cut(len(feed.text))
                    return  # cut short: so are the arguments
                break
            if not (yield from self._pair(feed, at, ", " if num_read else "")):
                return
            num_read += 1
        self._emit("}")

    def _may_go_on(self, rest: str) -> bool:
        """Return whether the text ends inside a literal."""
        return any(part and part[0].startswith(rest) for part in (self._call_end, self._key_begin, self._separator))

    def _pair(self, feed: Feed, at: int, before: str) -> Reading[bool]:
        """False when the text ends inside it."""
        firsts = sorted({begin.words[0] for begin in self._begins})
        found = yield from find(feed, at, firsts)
        if found is None:
            feed.cut(len(feed.text))
            return False
        key = feed.text[at : found[0]].strip()
        for begin in self._begins:
            behind = yield from skip_words(feed, found[0], begin.words)
            if behind is not None:
                break
        else:
            begin, behind = self._begins[0], found[0] + len(found[1])
        self._emit(f"{before}{encode_basestring(key)}: ")
        feed.cut(behind)
        types = begin.types if begin.types is not None else types_of(self._property(key), self._schema)
        if self._quote:
            return (yield from self._quoted(feed))
        yield from self._skip_exactly(feed, begin.space)
        if types == _STRING:
            return (yield from self._text(feed, self._end, self._end_space))
        return (yield from self._typed(feed, types))

    def _property(self, key: str) -> Any:
        properties = self._schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
        return self._schema.get("additionalProperties")

    def _skip_exactly(self, feed: Feed, space: str) -> Reading[None]:
        while len(feed.text) < len(space) and space.startswith(feed.text) and not feed.ended:
            yield
        if space and feed.text.startswith(space):
            feed.cut(len(space))

    def _text(self, feed: Feed, end: Sequence[str], end_space: str) -> Reading[bool]:
        """A text up to the literal behind it, as a JSON string."""
        self._emit('"')
        stops = [end_space + end[0], end[0]]
        while (at := feed.text.find(end[0])) < 0:
            held = len(feed.text) if feed.ended else held_from(feed.text, stops)
            self._emit(encode_basestring(feed.cut(held))[1:-1])
            if feed.ended:
                return False
            yield
        self._emit(encode_basestring(feed.cut(at).removesuffix(end_space))[1:])
        behind = yield from skip_words(feed, 0, end)
        feed.cut(len(end[0]) if behind is None else behind)
        return True

    def _typed(self, feed: Feed, types: frozenset[str] | None) -> Reading[bool]:
        """A value whose type its whole text decides."""
        found = yield from find(feed, 0, self._end[:1])
        if found is None:
            self._emit(feed.cut(len(feed.text)))
            return False
        raw = feed.text[: found[0]].removesuffix(self._end_space)
        self._emit(typed_json(raw, types))
        feed.cut(found[0])
        behind = yield from skip_words(feed, 0, self._end)
        feed.cut(len(found[1]) if behind is None else behind)
        return True

    def _quoted(self, feed: Feed) -> Reading[bool]:
        """A text between quotes, or any other value up to the comma or bracket behind it."""
        at = yield from skip_words(feed, 0, [self._quote])
        if at is not None:
            feed.cut(at)
            return (yield from self._text(feed, [self._quote], ""))
        depth = 0
        stops = [self._quote, *'{}[],"']
        while (found := (yield from find(feed, 0, stops))) is not None:
            at, stop = found
            if depth == 0 and stop in "}],":
                self._emit(_bare_json(feed.cut(at)).strip())
                return True
            if stop == '"':
                text = yield from json_string(feed, at)
                self._emit(_bare_json(feed.cut(at)))
                self._emit(feed.cut(1 if text is None else text[1] - at))
                continue
            depth += (stop in ("{", "[")) - (stop in ("}", "]"))
            self._emit(_bare_json(feed.cut(at if stop == self._quote else at + 1)))
            if stop == self._quote:
                feed.cut(len(stop))
                if not (yield from self._text(feed, [stop], "")):
                    return False
        self._emit(_bare_json(feed.cut(len(feed.text))))
        return False


def _begins(pairs: PairsFormat, encode: Callable[[Marked], str]) -> list[_Begin]:
    types_by: dict[str, set[str]] = {}
    for type_name, text in pairs.value_begin_of.items():
        types_by.setdefault(encode(text), set()).add(type_name)
    others = [_begin(text, frozenset(types)) for text, types in types_by.items()]
    return [_begin(encode(pairs.value_begin), _STRING if others else None), *others]


def _begin(text: str, types: frozenset[str] | None) -> _Begin:
    return _Begin(words(text), text[len(text.rstrip()) :], types)


def typed_json(raw: str, types: frozenset[str] | None) -> str:
    """A value's text as JSON of one of the types, if it is that; as a string otherwise. None is any type."""
    text = _PYTHON_NAMES.get(raw.strip(), raw.strip())
    try:
        found = _type_of(json.loads(text, parse_constant=_refused))
    except (ValueError, RecursionError):
        return _python_json(raw, types) or encode_basestring(raw)
    if found == "string" and (types is None or "string" in types):
        return encode_basestring(raw)  # the quotes are the text's own
    fits = types is None or "string" not in types or found in types or (found == "integer" and "number" in types)
    return text if fits else encode_basestring(raw)


def _python_json(raw: str, types: frozenset[str] | None) -> str | None:
    """Lists and objects as Python writes them, which many templates do."""
    if types is None or not types <= {"array", "object", "null"}:
        return None
    try:
        return json.dumps(ast.literal_eval(raw.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _refused(constant: str) -> None:
    raise ValueError(constant)


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """The JSON types that a schema allows, as far as it says; None for any."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFS:
        return None
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"]))
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if isinstance(schema.get("$ref"), str):
        return types_of(_referred(schema["$ref"], root), root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            found = [types_of(choice, root, depth + 1) for choice in schema[word]]
            return None if None in found else frozenset().union(*filter(None, found))
    return None


def _referred(path: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    for name in path.removeprefix("#").split("/")[1:]:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _bare_json(raw: str) -> str:
    """Return the JSON of a piece with bare keys and without texts."""
    return _SPACED.sub(r"\1 ", _BARE.sub(_bare_word, raw.lstrip()))


def _bare_word(found: re.Match[str]) -> str:
    word = _PYTHON_NAMES.get(found[0], found[0])
    is_key = found.string[found.end() :].lstrip().startswith(":")
    if is_key:
        return encode_basestring(word)
    try:
        json.loads(word)
    except ValueError:
        return encode_basestring(word)
    return word


_ARGUMENT_KEYS = ("arguments", "parameters")  # models mix them up
_NAME = re.compile(r"[\w.:/-]*")
_FIELDS = {Slot.ID: re.compile(r"[A-Za-z0-9_-]*"), Slot.INDEX: re.compile(r"\d*")}
Schemas = Mapping[str, Mapping[str, Any]]


class Sink(NamedTuple):
    """Receiver of calls."""

    begin: Callable[[str, str | None], None]  # name, and the id that the model gave
    arguments: Callable[[str], None]


class _Head(NamedTuple):
    """A call that has begun for certain, read up to its arguments."""

    at: int
    name: str
    id: str | None = None
    arguments: str | None = None  # JSON that was read already, or that is known to be empty
    closed: bool = False  # all of `call` is read


class CallReader:
    """Reads calls from a feed. `encode` gives a literal as the feed has it."""

    def __init__(
        self, format: CallFormat, encode: Callable[[Pieces], str], tools: Schemas | None, feed: Feed, sink: Sink
    ) -> None:
        """`tools`: name -> schema of its parameters; None: any name is a tool's."""
        self._format, self._encode, self._tools, self._feed, self._sink = format, encode, tools, feed, sink
        self._names = sorted(tools or (), key=len, reverse=True)
        self._first = words(encode(format.begin) + encode(format.call_begin))
        self._next = words(encode(format.call_begin))
        self._separator, self._end = words(encode(format.separator)), words(encode(format.end))
        self._call_end = words(encode(format.call_end))
        self.reached = 0
        """End of the text that was JSON and turned out to be no call: no call begins before it."""
        self.trigger = self._first[0] if self._first else None
        """Words that begin a first call; None where that is only the `{` of its JSON."""

    def read(self, at: int) -> Reading[bool]:
        """Read all calls from `at`, if there is one; the feed then begins behind them, and is unchanged otherwise."""
        self.reached = at
        begins = yield from skip_words(self._feed, at, self._first)
        head = None if begins is None else (yield from self._head(begins))
        if head is None:
            is_cut = self.trigger is not None and self._feed.ended and self._is_cut_head(at, begins)
            if is_cut:  # cut before it was a call for certain: what was begun is no text
                self._feed.cut(len(self._feed.text))
            return is_cut
        while head is not None:
            yield from self._body(head)
            head = yield from self._next_head()
        behind = yield from skip_words(self._feed, 0, self._end)
        if behind is None and self._feed.ended and _is_prefix(self._feed.text, self._end):
            behind = len(self._feed.text)
        behind = yield from skip_space(self._feed, behind or 0)
        self._feed.cut(behind)
        return True

    def _is_cut_head(self, at: int, begins: int | None) -> bool:
        """Return whether the text ends where a call's head may go on."""
        if begins is None:
            return _is_prefix(self._feed.text[at:], self._first)
        rest = self._feed.text[begins:].strip()
        if not rest:
            return True
        if self._format.kind == "json":
            name = re.search(rf'"{re.escape(self._format.name_key)}"\s*:\s*"([^"]*)"', rest)
            is_open = rest.startswith("{") and JsonScan().end_in(rest, 0) is None
            return is_open and (name is None or self._is_tool(name[1]))
        slots = takewhile(lambda piece: piece not in (Slot.ARGUMENTS, Slot.PAIRS), self._format.call)
        key_begin = self._format.pairs.key_begin if self._format.pairs else ()
        head = [*slots, *key_begin]
        literals = [[name if piece is Slot.NAME else self._encode((piece,)) for piece in head] for name in self._names]
        return any(_is_prefix(rest, words("".join(parts))) for parts in literals)

    def _next_head(self) -> Reading[_Head | None]:
        if not self._format.several:
            return None
        at = yield from skip_words(self._feed, 0, self._separator)
        if at is None:
            return None
        at = yield from skip_words(self._feed, at, self._next)
        return None if at is None else (yield from self._head(at))

    def _head(self, at: int) -> Reading[_Head | None]:
        if self._format.kind == "json":
            return (yield from self._object_head(at))
        return (yield from self._pieces_head(at))

    # Name, then arguments.

    def _pieces_head(self, at: int) -> Reading[_Head | None]:
        name: str | None = None
        own_id: str | None = None
        for piece in self._format.call:
            if piece is Slot.NAME:
                found = yield from self._name(at)
                if found is None or name not in (None, found[0]):
                    return None
                name, at = found
            elif piece is Slot.ID or piece is Slot.INDEX:
                at = yield from skip_space(self._feed, at)
                text, at = yield from match(self._feed, at, _FIELDS[piece])
                own_id = text if piece is Slot.ID else own_id
            elif isinstance(piece, Slot):
                return None if name is None else (yield from self._begin_of_arguments(at, name, own_id or None))
            else:
                behind = yield from skip_words(self._feed, at, words(self._encode((piece,))))
                if behind is None:
                    return None
                at = behind
        return None

    def _begin_of_arguments(self, at: int, name: str, own_id: str | None) -> Reading[_Head | None]:
        if self._format.pairs is None:
            at = yield from skip_space(self._feed, at)
            if self._feed.text.startswith("{", at):
                return _Head(at, name, own_id)
            starts = [self._call_end]
        else:
            starts = [self._call_end, words(self._encode(self._format.pairs.key_begin))]
        for start in starts:
            if (yield from skip_words(self._feed, at, start)) is not None:
                return _Head(at, name, own_id, None if self._format.pairs else "{}")
        return None

    def _name(self, at: int) -> Reading[tuple[str, int] | None]:
        at = yield from skip_space(self._feed, at)
        if self._tools is None:
            text, end = yield from match(self._feed, at, _NAME)
            return (text, end) if text else None
        while not self._feed.ended and self._may_grow(self._feed.text[at:]):
            yield
        found = next((name for name in self._names if self._feed.text.startswith(name, at)), None)
        return None if found is None else (found, at + len(found))

    def _may_grow(self, text: str) -> bool:
        return any(len(name) > len(text) and name.startswith(text) for name in self._names)

    # One JSON object.

    def _object_head(self, at: int) -> Reading[_Head | None]:
        feed = self._feed
        name: str | None = None
        own_id: str | None = None
        arguments: str | None = None
        behind = yield from skip_one(feed, at, "{")
        while behind is not None:
            closing = yield from skip_one(feed, behind, "}")
            if closing is not None:
                return None if name is None else _Head(closing, name, own_id, arguments or "{}", closed=True)
            key = yield from json_string(feed, behind)
            value_at = None if key is None else (yield from skip_one(feed, key[1], ":"))
            if key is None or value_at is None:
                return None
            if key[0] in (self._format.arguments_key, *_ARGUMENT_KEYS):
                value_at = yield from skip_space(feed, value_at)
                if name is not None and feed.text.startswith("{", value_at):
                    return _Head(value_at, name, own_id)
            end = yield from skip_json(feed, value_at)
            self.reached = len(feed.text) if end is None and feed.ended else end or value_at
            if end is None:
                return None
            value = feed.text[value_at:end].strip()
            if key[0] == self._format.name_key:
                text = yield from json_string(feed, value_at)
                if text is None or not self._is_tool(text[0]):
                    return None
                name = text[0]
            elif key[0] in (self._format.arguments_key, *_ARGUMENT_KEYS):
                if value[:1] != "{" and value != "null":
                    return None
                arguments = None if value == "null" else value
            elif key[0] == self._format.id_key:
                own_id = value.strip('"') or None
            if self.trigger is None and name is None:
                return None  # without a mark, only an object that begins with a tool's name is a call
            comma = yield from skip_one(feed, end, ",")
            behind = end if comma is None else comma
        return None

    def _is_tool(self, name: Any) -> bool:
        return isinstance(name, str) and (self._tools is None or name in self._tools)

    # Arguments.

    def _body(self, head: _Head) -> Reading[None]:
        self._feed.cut(head.at)
        self._sink.begin(head.name, head.id)
        if head.arguments is not None:
            self._sink.arguments(head.arguments)
        elif self._format.pairs is not None:
            call_end = self._encode(self._format.call_end)
            schema = (self._tools or {}).get(head.name)
            yield from PairReader(self._format.pairs, self._encode, call_end, schema, self._sink.arguments).read(
                self._feed
            )
            return
        else:
            yield from pass_json(self._feed, self._sink.arguments)
        if self._format.kind == "json" and not head.closed:
            yield from self._rest_of_object()
        yield from self._skip_end()

    def _rest_of_object(self) -> Reading[None]:
        """Fields behind the arguments, which come too late to be told."""
        for character in ",}":
            at = yield from skip_one(self._feed, 0, character)
            if at is not None:
                self._feed.cut(at - 1)
                yield from pass_json(self._feed, _drop, depth=1)
                return

    def _skip_end(self) -> Reading[None]:
        at = yield from skip_words(self._feed, 0, self._call_end)
        if at is not None:
            self._feed.cut(at)
        elif self._feed.ended and _is_prefix(self._feed.text, self._call_end):
            self._feed.cut(len(self._feed.text))


def _is_prefix(text: str, parts: list[str]) -> bool:
    """Return whether the text ends inside a literal of these words."""
    return "".join(parts).startswith("".join(text.split()))


def _drop(text: str) -> None:
    pass
