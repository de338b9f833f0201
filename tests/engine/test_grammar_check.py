"""Grammars of clients, compiled in a process with limits: what is wrong is told, and what is hostile harms nobody."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.structured_outputs import StructuredOutputsParams
from maitred.engine import grammar_check
from maitred.engine.grammar_check import GrammarChecker
from maitred.text.schema import Source, json_source, source_of


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.close()


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def refused(checker: GrammarChecker, source: Source) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as told:
        checker.checked(source)
    assert (told.value.code, told.value.param) == ("unsupported_schema", source.path)
    return told.value


def test_a_good_grammar_comes_back_as_llguidance_takes_it(checker: GrammarChecker):
    assert checker.checked(Source("grammar", 'root ::= "a" | "b"', "g")).grammar.startswith("%llguidance")
    assert "[a-z]" in checker.checked(Source("regex", "[a-z]+", "r")).grammar


@pytest.mark.parametrize(
    "source",
    [
        Source("regex", "(" * 60_000 + "a" + ")" * 60_000, "nested groups"),
        Source("regex", "(?=a)b", "look-ahead"),
        Source("grammar", "root ::= root", "a rule that is itself"),
        Source("grammar", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "nested groups of a grammar"),
        Source("grammar", "no grammar", "no grammar"),
        json_source(deep(200), "nested objects"),
        json_source({"$ref": "https://example.com/schema"}, "another's schema, strictly", is_strict=True),
        json_source({"pattern": "(?!a)", "minLength": "two"}, "a schema that is none"),
        json_source({"$ref": "#/$defs/none"}, "a reference to nothing"),
        json_source({"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(1000)]}, "many branches"),
        json_source({"properties": {f"p{i}": {"pattern": "^(a|b){1,100}$"} for i in range(20_000)}}, "a large schema"),
    ],
    ids=lambda source: source.path,
)
def test_what_cannot_be_compiled_is_refused_with_its_place(checker: GrammarChecker, source: Source):
    assert len(str(refused(checker, source))) < 1000


@pytest.mark.parametrize(
    "source",
    [
        Source("regex", "((a{1,129}){1,129}){1,129}", "repeated repetitions"),
        Source("regex", "(a+)+$", "backtracking"),
        json_source({"type": "array", "maxItems": 2**64 - 1, "items": {"type": "string"}}, "many items"),
        json_source({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "a cycle"),
        json_source({"anyOf": [{"properties": {f"k{i}": {}}, "required": [f"k{i}"]} for i in range(1000)]}, "branches"),
    ],
    ids=lambda source: source.path,
)
def test_bombs_of_other_engines_are_harmless_here(checker: GrammarChecker, source: Source):
    """Either answer is honest; the process that gave it is still there."""
    checker.check(source.kind, source.text)
    assert checker.check("regex", f"{source.path}?").error is None


def test_keywords_that_are_left_out_are_told_and_refused_where_strict(checker: GrammarChecker):
    schema = {"type": "object", "not": {"required": ["a"]}, "dependentRequired": {"a": ["b"]}}
    assert checker.checked(json_source(schema, "schema")).ignored == ("dependentRequired", "not")
    error = refused(checker, json_source(schema, "schema", is_strict=True))
    assert "dependentRequired, not" in str(error)
    few = {"type": "object", "properties": {"a": {}}, "minProperties": 1, "maxProperties": 2}
    assert checker.checked(json_source(few, "schema")).ignored == ("maxProperties", "minProperties")


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("pattern", "^(?!\\.)[a-z.]+@[a-z]+$"),  # zod's e-mail addresses begin so
        ("pattern", r"(a)\1"),
        ("maxLength", 10**12),
        ("minimum", 1e300),
        ("$ref", "https://example.com/schema"),
        ("patternProperties", {"a": {"type": "string"}, "b": {"type": "integer"}}),  # a key may match both
    ],
)
def test_a_keyword_that_does_not_compile_is_left_out_alone(checker: GrammarChecker, keyword: str, value: object):
    bound = {"type": "string", "pattern": "^[xy]$", "maxLength": 2.0}  # a whole number, as JSON Schema counts
    schema = {"type": "object", "properties": {"a": {keyword: value}, "b": bound}, "additionalProperties": False}
    found = checker.checked(json_source(schema, "schema"))
    assert found.ignored == (keyword,)
    left = json.loads(found.source.text)["properties"]
    assert left == {"a": {}, "b": bound}
    assert "[xy]" in found.grammar
    error = refused(checker, json_source(schema, "schema", is_strict=True))
    assert f"cannot be enforced: {keyword} (" in str(error)
    tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a"]}
    tagged = source_of(StructuredOutputsParams(structural_tag=tag), "tag")
    assert checker.checked(tagged).ignored == (keyword,)


def test_keys_that_a_pattern_was_for_are_still_allowed_without_it(checker: GrammarChecker):
    schema = {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}}, "additionalProperties": False}
    found = checker.checked(json_source(schema, "schema"))
    assert found.ignored == ("additionalProperties", "patternProperties")
    assert "additionalProperties" not in found.grammar


def test_a_grammar_over_the_bound_is_refused_before_anybody_reads_it(checker: GrammarChecker):
    assert "at most" in str(refused(checker, Source("regex", "a" * (grammar_check.MAX_GRAMMAR_BYTES + 1), "long")))


def test_a_process_that_dies_costs_one_grammar_and_the_next_has_another():
    checker = GrammarChecker()
    assert checker.check("regex", "a").error is None
    process = checker._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)  # so the question waits, and its process dies with it
    killer = threading.Timer(0.2, process.kill)
    killer.start()
    assert checker.check("regex", "b").error is not None
    killer.join()
    assert checker.check("regex", "c").error is None
    checker.close()


def test_a_verdict_is_remembered(checker: GrammarChecker):
    first = checker.check("choice", json.dumps(["x", "y"]))
    checker.close()
    assert checker.check("choice", json.dumps(["x", "y"])) is first
    assert checker._process is None
