"""JSON schemas and other shapes from clients, as llguidance takes them, and its warnings in a client's words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from maitred.core.errors import InvalidRequest
from maitred.core.structured_outputs import StructuredOutputsParams

# As Python's json.dumps writes it, which is what models have read most; nothing may be blank without end.
_SPACED_AS_DUMPS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_OPTIONS = {"lenient": True, "json_allow_general_unicode_escapes": True}
UNSUPPORTED_SCHEMA = "unsupported_schema"  # the error's code
MAX_BLANKS = 16  # where a client's pattern has no bound
# an escaped character or a class, which are left alone, or a repetition without end
_UNBOUNDED = re.compile(r"(?P<whole>\\.|\[(?:\\.|[^\]\\])*\])|(?P<sign>[*+])|\{(?P<least>\d+),\}")
# keywords that hold schemas: of the same value, by name, of members; the last of both are of llguidance's own grammars
_PARTS = ("allOf", "anyOf", "oneOf")
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_ITEMS = ("items", "prefixItems", "grammars")
_OF_SCHEMA = ("items", "additionalItems", "additionalProperties", "json_schema")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# keywords whose value, of this type, may be more than llguidance can compile
_MAY_FAIL: Mapping[str, Any] = {
    **dict.fromkeys(("pattern", "$ref", "$schema"), str),
    **dict.fromkeys((*_COUNTS, *_LIMITS), (int, float)),
}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Source(NamedTuple):
    """A shape in a client's words, to be compiled alone: so that a fault has its place."""

    kind: str  # of `llguidance.grammar_from`
    text: str
    path: str  # of the client's field
    is_strict: bool = False  # what cannot be enforced is refused, and not left out
    left_out: tuple[str, ...] = ()  # keywords that are not in `text`


def json_source(schema: object, path: str, *, whitespace_pattern: str | None = None, is_strict: bool = False) -> Source:
    """Return the source of a JSON schema: an object, true, or the text of one. Raises InvalidRequest otherwise."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the schema is no JSON: {error}", param=path, code=UNSUPPORTED_SCHEMA) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequest("the schema must be a JSON object", param=path, code=UNSUPPORTED_SCHEMA)
    options: dict[str, Any] = {**_OPTIONS, **_SPACED_AS_DUMPS}
    if whitespace_pattern is not None:
        options = {**_OPTIONS, "whitespace_pattern": bounded_pattern(whitespace_pattern)}
    left_out: set[str] = set()
    try:
        text = json.dumps({**_enforceable(schema, left_out), "x-guidance": options}, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("the schema is nested too deeply", param=path, code=UNSUPPORTED_SCHEMA) from None
    return Source("json_schema", text, path, is_strict, tuple(left_out))


def _enforceable(schema: Mapping[str, Any], left_out: set[str]) -> Any:
    """Return the schema without a `minProperties` that llguidance 1.9 cannot count, with which no object would end."""

    def edit(made: dict[str, Any], is_part: bool) -> None:
        if "minProperties" in made and not _counts_keys(made, is_part):
            del made["minProperties"]
            left_out.add("minProperties")
        for name in _COUNTS:
            if isinstance(made.get(name), float) and made[name].is_integer():
                made[name] = int(made[name])

    return _edited(schema, edit)


def without_failing(schema: object, compiles: Callable[[Mapping[str, Any]], bool]) -> tuple[Any, set[str]]:
    """A schema, or grammars of schemas, without keywords that do not compile by themselves, and the names of those."""
    left_out: set[str] = set()

    def edit(made: dict[str, Any], is_part: bool) -> None:
        for name, kind in _MAY_FAIL.items():
            alone = {of: made[of] for of in ("type", name) if of in made}
            is_local = name == "$ref" and str(made.get(name)).startswith("#")
            if isinstance(made.get(name), kind) and not is_local and not compiles(alone):
                left_out.add(name)
                del made[name]
        patterns = made.get("patternProperties")
        if isinstance(patterns, Mapping) and not compiles({"patternProperties": dict.fromkeys(patterns, True)}):
            # `additionalProperties` would bind the keys that the patterns were for
            names = {"patternProperties", "additionalProperties"} & made.keys()
            left_out.update(names)
            for name in names:
                del made[name]

    return _edited(schema, edit), left_out


def _edited(schema: Any, edit: Callable[[dict[str, Any], bool], None], *, is_part: bool = False) -> Any:
    """A copy in which `edit` has changed every schema, told whether it `is_part` of one that says more of its value."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    edit(made, is_part)
    for name, value in made.items():
        is_choice = name in _PARTS
        if name in _OF_SCHEMAS and isinstance(value, Mapping):
            made[name] = {key: _edited(inner, edit) for key, inner in value.items()}
        elif (is_choice or name in _ITEMS) and isinstance(value, list):
            made[name] = [_edited(inner, edit, is_part=is_choice) for inner in value]
        elif name in _OF_SCHEMA:
            made[name] = _edited(value, edit)
    return made


def _counts_keys(schema: Mapping[str, Any], is_part: bool) -> bool:
    """Return whether llguidance can count keys: of keys that are all required, or of a closed object that needs one."""
    if is_part or any(name in schema for name in (*_PARTS, "$ref")):
        return False
    properties, required = schema.get("properties"), schema.get("required")
    required = required if isinstance(required, list) else []
    if not isinstance(properties, Mapping) or all(key in required for key in properties):
        return True
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    least = schema["minProperties"]
    return is_closed and isinstance(least, int) and least <= 1


def source_of(shape: StructuredOutputsParams, path: str, *, is_strict: bool = False) -> Source:
    """Return the source of the one kind that is given. Raises InvalidRequest."""
    kind, at = shape.kind, f"{path}.{shape.kind}"
    if kind in ("json", "json_object"):
        schema = shape.json if kind == "json" else ANY_OBJECT
        return json_source(schema, at, whitespace_pattern=shape.whitespace_pattern, is_strict=is_strict)
    if kind == "choice":
        return Source("choice", json.dumps(list(shape.choice or ()), ensure_ascii=False), at)
    if kind == "structural_tag":
        return Source("llguidance", _of_tags(shape.structural_tag, at), at)
    return Source(kind, getattr(shape, kind), at)


def bounded_pattern(pattern: str) -> str:
    """The same regular expression, in which no repetition is without end."""
    return _UNBOUNDED.sub(lambda found: found["whole"] or _bounded(found), pattern)


def _bounded(found: re.Match[str]) -> str:
    least = found["least"] or "01"["*+".index(found["sign"])]
    return f"{{{least},{max(MAX_BLANKS, int(least))}}}"


def ignored_keywords(warnings: Sequence[str]) -> list[str]:
    """Return the keywords left out of a schema, from llguidance's warnings, in no order."""
    names: set[str] = set()
    for text in warnings:
        listed = re.match(r"Unimplemented keys: (\[.*\])", text, re.DOTALL)
        for name in json.loads(listed[1]) if listed else [_keyword_of(text)]:
            names.add(name)
    return sorted(names)


def _keyword_of(warning: str) -> str:
    if warning.startswith("Unknown format"):
        return "format"
    if warning.startswith("min/maxProperties"):
        return "maxProperties"  # the other is not in what it is given
    return warning.split(maxsplit=1)[0].strip(":")


def _of_tags(tag: object, path: str) -> str:
    """vLLM's structural tags: free text, in which a trigger begins one of the structures."""
    with suppress(ValueError):
        tag = json.loads(tag) if isinstance(tag, str) else tag
    structures = tag.get("structures") if isinstance(tag, Mapping) else None
    triggers = tag.get("triggers") if isinstance(tag, Mapping) else None
    if not (
        (isinstance(structures, list) and structures and all(isinstance(each, Mapping) for each in structures))
        and (isinstance(triggers, list) and triggers)
    ):
        raise InvalidRequest(
            'send {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}', param=path
        )
    rules, grammars = [], []
    for number, structure in enumerate(structures):
        begin, schema, end = (structure.get(name) for name in ("begin", "schema", "end"))
        trigger = next((text for text in triggers if text and str(begin).startswith(str(text))), None)
        if trigger is None:
            raise InvalidRequest(f"no trigger begins {begin!r}", param=f"{path}.structures[{number}].begin")
        source = json_source(schema, f"{path}.structures[{number}].schema")
        rules.append(f"head_{number}[lazy]: TEXT {json.dumps(str(trigger))}")
        more = quoted(str(begin)[len(str(trigger)) :])
        rules.append(f"tag_{number}: head_{number} {more} @schema_{number} {quoted(str(end or ''))}")
        grammars.append({"name": f"schema_{number}", "json_schema": json.loads(source.text)})
    any_tag = " | ".join(f"tag_{number}" for number in range(len(structures)))
    lark = "\n".join([f"start: ({any_tag})* TEXT", "TEXT: /(.|\\n)*/", *rules])
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]})


def quoted(text: str) -> str:
    """Return the text as a literal of a Lark grammar; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""
