"""Shapes: what a composed grammar takes and what it refuses, text by text, and tokens where marks are tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import llguidance
import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.structured_outputs import StructuredOutputsParams
from maitred.text.answer_format import AnswerFormat, CallFormat, Mark, PairsFormat, ReasoningFormat, Slot
from maitred.text.schema import bounded_pattern, ignored_keywords, json_source, source_of
from maitred.text.shape import FunctionTool, ToolChoice, compose

MARK, END_MARK, THINK, END_THINK = range(256, 260)


class Bytes:
    """A vocabulary of the bytes and four marks."""

    eos_token_id, bos_token_id = 260, None
    tokens = [bytes([i]) for i in range(256)] + [b"<call>", b"</call>", b"<think>", b"</think>", b"<eos>"]
    special_token_ids = range(256, 261)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
ADDRESS = json_source({"type": "object", "properties": {"zip": {"type": "integer"}}, "required": ["zip"]}, "schema")


def tool(name: str, parameters: dict[str, Any]) -> FunctionTool:
    return FunctionTool(name, parameters, json_source(parameters, "tools[0]"), {})


TOOLS = [tool("weather", WEATHER), tool("stop", NOTHING)]
AUTO = ToolChoice(names=("weather", "stop"))
CALL = ('{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}")
LETTERS = CallFormat("json", (), ("<tool_call>\n",), CALL, ("\n</tool_call>",), ("\n",))
TOKENS = CallFormat("json", (), (Mark("<call>", MARK),), CALL, (Mark("</call>", END_MARK),))
BARE = CallFormat(
    "json", (), (), ('{"name": "', Slot.NAME, '", "parameters": ', Slot.ARGUMENTS, "}"), (), several=False,
    arguments_key="parameters",
)  # fmt: skip
PAIRS = CallFormat(
    "pairs",
    (),
    ("<tool_call>\n<function=",),
    (Slot.NAME, ">\n", Slot.PAIRS),
    ("</function>\n</tool_call>",),
    ("\n",),
    pairs=PairsFormat(("<parameter=",), (">\n",), ("\n</parameter>\n",)),
)
THOUGHTS = ReasoningFormat(("<think>",), ("</think>",), "\n", "\n", "\n\n")
THOUGHT_TOKENS = ReasoningFormat((Mark("<think>", THINK),), (Mark("</think>", END_THINK),))


def takes(grammar: str, *pieces: str | int) -> bool:
    """Whether the text, with tokens among it, is a whole answer."""
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = [t for piece in pieces for t in ([piece] if isinstance(piece, int) else list(piece.encode()))]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def composed(calls: CallFormat | None = None, reasoning: ReasoningFormat | None = None, **asked: Any) -> str:
    return compose(AnswerFormat("test", calls, reasoning), **asked)


def test_nothing_binds_an_answer_to_which_nothing_was_asked():
    assert composed(LETTERS, THOUGHTS) == ""
    assert composed(None, None, tools=TOOLS, choice=AUTO) == ""


def test_json_is_spaced_as_dumps_writes_it_and_escaped_as_json_may_be():
    grammar = composed(content=ADDRESS)
    assert takes(grammar, '{"zip": 12345}')
    assert not takes(grammar, '{"zip":12345}')
    assert not takes(grammar, ' {"zip": 12345}')

    grammar = composed(content=json_source({"type": "string"}, "schema"))
    assert takes(grammar, '"\\u00e9\\u202f\\n\\"é"')

    source = source_of(StructuredOutputsParams(json=ADDRESS.text, whitespace_pattern="[ ]*"), "structured_outputs")
    grammar = composed(content=source)
    assert takes(grammar, '{   "zip"  :1}')
    assert not takes(grammar, '{"zip"' + 40 * " " + ":1}")


@pytest.mark.parametrize("form", [LETTERS, PAIRS])
def test_free_text_may_be_followed_by_calls_of_listed_tools_that_fit(form: CallFormat):
    grammar = composed(form, tools=TOOLS, choice=AUTO)
    assert takes(grammar, "Just text, with < and { in it.")
    good = {
        "json": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "pairs": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    }[form.kind]
    assert takes(grammar, good)
    assert takes(grammar, "I look.\n" + good)
    assert takes(grammar, good + "\n" + good)
    assert not takes(grammar, good.replace("weather", "wether"))
    assert not takes(grammar, good.replace("city", "town"))
    assert not takes(grammar, good + " and more")
    assert not takes(grammar, good[:-3])


def test_one_call_is_the_end_where_calls_are_not_parallel():
    grammar = composed(LETTERS, tools=TOOLS, choice=ToolChoice(names=("stop",), is_required=True, parallel=False))
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    assert takes(grammar, call)
    assert not takes(grammar, call + "\n" + call)
    assert not takes(grammar, "text")
    matcher = llguidance.LLMatcher(TOKENIZER, grammar)
    matcher.consume_tokens(list(call.encode()))
    assert matcher.is_stopped()


def test_a_mark_that_is_a_token_is_not_met_by_its_letters():
    grammar = composed(TOKENS, tools=TOOLS, choice=AUTO)
    arguments = '{"name": "stop", "arguments": {}}'
    assert takes(grammar, "Now: ", MARK, arguments, END_MARK)
    assert takes(grammar, "<call>anything at all</call>")
    assert not takes(grammar, MARK, "anything", END_MARK)
    assert not takes(grammar, MARK, arguments, "</call>")


def test_a_bare_object_is_a_call_and_beside_a_schema_content_fits():
    grammar = composed(BARE, tools=TOOLS, choice=AUTO)
    assert takes(grammar, '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}')
    assert takes(grammar, "No { call.")
    assert not takes(grammar, '{"name": "other", "parameters": {}}')

    for form in (LETTERS, BARE):
        grammar = composed(form, tools=TOOLS, choice=AUTO, content=ADDRESS)
        assert takes(grammar, '{"zip": 1}')
        assert not takes(grammar, "text")
    assert takes(grammar, '{"name": "stop", "parameters": {}}')


@pytest.mark.parametrize(
    ("reasoning", "begin", "end"), [(THOUGHTS, "<think>", "</think>"), (THOUGHT_TOKENS, THINK, END_THINK)]
)
def test_a_schema_binds_after_the_thoughts(reasoning: ReasoningFormat, begin: str | int, end: str | int):
    grammar = composed(None, reasoning, content=ADDRESS)
    assert takes(grammar, begin, "\nanything {\n", end, '\n\n{"zip": 1}')
    assert takes(grammar, '{"zip": 1}')
    assert not takes(grammar, begin, "\nanything\n", end, "\n\ntext")
    opened = composed(None, reasoning, content=ADDRESS, in_thoughts=True)
    assert takes(opened, "anything", end, '{"zip": 1}')
    assert not takes(opened, '{"zip": 1}')
    without = composed(None, reasoning, content=ADDRESS, may_think=False)
    assert not takes(without, begin, "thought", end, '{"zip": 1}')


@pytest.mark.parametrize("reasoning", [THOUGHTS, THOUGHT_TOKENS])
@pytest.mark.parametrize("calls", [LETTERS, TOKENS])
def test_a_call_begun_inside_thoughts_is_bound(calls: CallFormat, reasoning: ReasoningFormat):
    grammar = composed(calls, reasoning, tools=TOOLS, choice=AUTO, in_thoughts=True)
    call = '{"name": "stop", "arguments": {}}'
    begin, end = ("<tool_call>\n", "\n</tool_call>") if calls is LETTERS else (MARK, END_MARK)
    think_end = "</think>" if reasoning is THOUGHTS else END_THINK
    assert takes(grammar, "hm ", begin, call, end)
    assert not takes(grammar, "hm ", begin, "nothing", end)
    assert takes(grammar, "hm", think_end, "text ", begin, call, end)
    assert takes(grammar, "hm", think_end, "text")


def test_pairs_keep_the_schemas_order_and_every_required_key():
    grammar = composed(PAIRS, tools=TOOLS, choice=ToolChoice(names=AUTO.names, is_required=True))

    def call(*pairs: tuple[str, str]) -> str:
        told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
        return f"<tool_call>\n<function=weather>\n{told}</function>\n</tool_call>"

    assert takes(grammar, call(("city", "Rome\nand < more"), ("days", "3")))
    assert not takes(grammar, call(("days", "3")))
    assert not takes(grammar, call(("city", "Rome"), ("days", "three")))


@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"]])
def test_pairs_with_separators_may_leave_out_what_is_not_required(required: Sequence[str]):
    form = CallFormat(
        "pairs", (), ("call:",), (Slot.NAME, "{", Slot.PAIRS, "}"), (), several=False,
        pairs=PairsFormat((), (":",), (), (",",)),
    )  # fmt: skip
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in "abc"}, "required": list(required)}
    grammar = composed(form, tools=[tool("f", schema)], choice=ToolChoice(names=("f",), is_required=True))
    for keys in ("", "a", "b", "c", "ab", "ac", "bc", "abc", "ba", "aa"):
        fits = all(key in keys for key in required) and all(a < b for a, b in pairwise(keys))
        assert takes(grammar, "call:f{" + ",".join(f"{key}:1" for key in keys) + "}") is fits, keys


def test_harmonys_channels_hold_thoughts_then_a_call_or_content():
    form = AnswerFormat(
        "harmony",
        CallFormat(
            "name_json",
            (),
            ("<|channel|>commentary to=functions.",),
            (Slot.NAME, " <|constrain|>json<|message|>", Slot.ARGUMENTS),
            ("<|call|>",),
            several=False,
        ),
        ReasoningFormat(("<|channel|>analysis<|message|>",), ("<|end|>",)),
        channels=True,
        content_begin=("<|channel|>final<|message|>",),
        message_begin=("<|start|>assistant",),
    )
    thoughts = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    grammar = compose(form, tools=TOOLS, choice=AUTO, content=ADDRESS)
    assert takes(grammar, thoughts + '<|channel|>final<|message|>{"zip": 1}')
    assert takes(grammar, thoughts * 2 + call + '{"city": "Rome"}')
    assert not takes(grammar, thoughts + call + "{}")
    assert not takes(grammar, thoughts + "<|channel|>final<|message|>text")
    free = compose(form, tools=TOOLS, choice=AUTO)
    assert takes(free, "<|channel|>final<|message|>text")


def test_blanks_are_always_bounded():
    bounded = ["[ \\n]{0,16}", "\\s{1,16}", "a{20,20}", "[*+]?"]
    assert list(map(bounded_pattern, ("[ \\n]*", "\\s+", "a{20,}", "[*+]?"))) == bounded


def test_what_is_no_schema_is_refused_with_its_place():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for schema in ("{", "[1]", 3, None, "[" * 100_000, {"a": deep}):
        with pytest.raises(InvalidRequest) as told:
            json_source(schema, "response_format.json_schema.schema")
        assert told.value.param == "response_format.json_schema.schema"
        assert told.value.code == "unsupported_schema"


def test_structural_tags_bind_what_follows_a_trigger():
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    grammar = source_of(StructuredOutputsParams(structural_tag=tag), "structured_outputs").text
    assert takes(grammar, "One and <f=add>2</f> is three.")
    assert not takes(grammar, "One and <f=add>two</f>.")


KEYS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CLOSED = {**KEYS, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "is_left_out"),
    [
        ({**CLOSED, "minProperties": 2}, True),
        ({**KEYS, "minProperties": 1}, True),
        ({"allOf": [CLOSED, {"minProperties": 2}]}, True),
        ({**CLOSED, "minProperties": 1}, False),
        ({**CLOSED, "minProperties": 2, "required": ["a", "b"]}, False),
        ({"additionalProperties": {"type": "integer"}, "minProperties": 2}, False),
    ],
)
def test_a_number_of_keys_that_cannot_be_enforced_keeps_no_object_open(schema: dict[str, Any], is_left_out: bool):
    """llguidance warns of it, and then takes no end of the object."""
    source = json_source({"type": "array", "items": schema}, "schema")
    assert source.left_out == (("minProperties",) if is_left_out else ())
    grammar = composed(content=source)
    assert takes(grammar, '[{"a": 1, "b": 2}]')
    assert takes(grammar, "[{}]") is is_left_out


def test_a_property_may_be_called_as_a_keyword_is():
    schema = {**KEYS, "properties": {"minProperties": {"type": "integer"}, "a": {}}, "required": ["minProperties"]}
    source = json_source(schema, "schema")
    assert source.left_out == ()
    assert takes(composed(content=source), '{"minProperties": 3}')
    assert not takes(composed(content=source), "{}")


def test_keywords_that_were_left_out_have_their_names():
    told = [
        'Unimplemented keys: ["not", "if"]',
        "Unknown format: foo",
        "oneOf not fully supported, falling back to anyOf.",
    ]
    assert ignored_keywords(told) == ["format", "if", "not", "oneOf"]
