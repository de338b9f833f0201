"""Arguments written as keys and values, made JSON as they come."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from maitred.text.answer_format import PairsFormat, Text
from maitred.text.feed import Feed, Reading, find, held_from, json_string, skip_words, words

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
        encode: Callable[[Text], str],
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


def _begins(pairs: PairsFormat, encode: Callable[[Text], str]) -> list[_Begin]:
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
