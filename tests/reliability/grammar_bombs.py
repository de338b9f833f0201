"""Grammars that cost servers like this one their engine, or everybody's answers: what each asks for, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 2**64 - 1
CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
BRANCHES = [{"type": "object", "properties": {f"key_{i}": {"type": "integer"}}} for i in range(1000)]
MEGABYTE = {f"property_{i}": {"type": "string", "maxLength": 40, "description": "x" * 40} for i in range(10_000)}


def tower(height: int) -> str:
    """A repetition of a repetition, and so on."""
    text = "a"
    for _ in range(height):
        text = f"({text}){{1,129}}"
    return text


def schema(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "bomb", "schema": asked}}}


def raw(**asked: Any) -> dict[str, Any]:
    return {"structured_outputs": asked}


def tool(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "bomb", "parameters": parameters}}]}


BOMBS: Mapping[str, Mapping[str, Any]] = {
    "60,000 nested groups, regex": raw(regex="(" * 60_000 + "a" + ")" * 60_000),
    "60,000 nested groups, GBNF": raw(grammar="root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "60,000 nested groups, Lark": raw(grammar="start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "tower of {1,129}, regex": raw(regex=tower(6)),
    "tower of {1,129}, GBNF": raw(grammar="root ::= " + tower(6).replace("a", '"a"')),
    "a rule that is itself": raw(grammar="root ::= root"),
    "$ref cycle": schema(CYCLE),
    "$ref cycle of a tool": tool({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, **CYCLE}),
    "maxItems 2^64-1": schema({"type": "array", "items": {"type": "array", "maxItems": MOST}, "maxItems": MOST}),
    "minItems 2^64-1": schema({"type": "array", "items": {"type": "integer"}, "minItems": MOST}),
    "maxLength 2^64-1": schema({"type": "string", "maxLength": MOST}),
    "(a+)+$": raw(regex="(a+)+$"),
    "(a+)+$ of a schema": schema({"type": "string", "pattern": "^(a+)+$"}),
    "anyOf of 1,000": schema({"anyOf": BRANCHES}),
    "schema of 1 MB": schema({"type": "object", "properties": MEGABYTE}),
    "all of 1 MB required": schema({"type": "object", "properties": MEGABYTE, "required": [*MEGABYTE]}),
}
