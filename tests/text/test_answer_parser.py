"""One parser of answers: what it finds, and that it finds the same however an answer is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.text.answer_format import AnswerFormat
from maitred.text.chat_template import TOOL_FORMATS, ChatTemplate, written_calls
from maitred.text.tool_format import read_answer_format
from tests.text.answers import CALLS, Parsed, answer_of, parse, template_of, tokenizer_with, tool_calls

HARMONY = "{# <|channel|>analysis<|message|> and <|channel|>commentary #}"
FORMATS = [*TOOL_FORMATS, "harmony"]
SNIPPET_WRITES_NO_NESTED = {"gemma4"}  # its own template writes objects with quotes and bare keys


@cache
def format_of(name: str) -> AnswerFormat:
    return read_answer_format(ChatTemplate(HARMONY) if name == "harmony" else template_of(name))


def written(name: str, names: Sequence[str]) -> str:
    """Calls as a model of this format writes them."""
    if name == "harmony":
        messages = [f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(CALLS[n])}<|call|>"
                    for n in names]  # fmt: skip
        return "<|start|>assistant".join(messages)
    calls = format_of(name).calls
    assert calls is not None
    return str(written_calls(calls, tool_calls(names)))


@pytest.mark.parametrize("names", [["get_weather"], ["get_weather_now"], ["list_all"], ["list_all", "get_weather"]])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_that_a_template_writes_are_parsed_back(name: str, names: list[str]):
    if (name == "llama3" and len(names) > 1) or (name in SNIPPET_WRITES_NO_NESTED and names == ["get_weather_now"]):
        pytest.skip("the format has no such calls")
    answer = answer_of(template_of(name), {"content": "Let me look.", "tool_calls": tool_calls(names)})
    answer = answer.removeprefix("Let me look.") if name == "llama3" else answer
    parsed = parse(format_of(name), [answer])
    assert parsed.arguments == [(n, CALLS[n]) for n in names]
    assert parsed.content.rstrip("\n").removesuffix("<|im_end|>") == ("" if name == "llama3" else "Let me look.")
    assert parse(format_of(name), list(answer)) == parsed


def thinking(name: str, thoughts: str) -> str:
    if name == "harmony":
        return f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant"
    return f"<think>\n{thoughts}\n</think>\n\n"


@pytest.mark.parametrize("name", FORMATS)
def test_thoughts_then_a_call(name: str):
    parsed = parse(format_of(name), [thinking(name, "Hm.\nSo be it.") + written(name, ["get_weather"])])
    assert parsed.reasoning == "Hm.\nSo be it."
    assert parsed.content == ""
    assert parsed.arguments == [("get_weather", CALLS["get_weather"])]


LETTERS = st.sampled_from(
    ["a", " ", "\n", '"', "{", "}", "é", "<", "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "', "\\"]
)
PARTS = st.lists(
    st.one_of(st.lists(LETTERS, max_size=6).map("".join), st.sampled_from([*CALLS]).map(lambda n: ("call", n))),
    max_size=5,
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30)
@given(parts=PARTS, thinks=st.booleans(), data=st.data())
def test_an_answer_is_parsed_the_same_however_it_is_cut(name: str, parts: list, thinks: bool, data: st.DataObject):
    text = thinking(name, "well") if thinks else ""
    text += "".join(part if isinstance(part, str) else written(name, [part[1]]) for part in parts)
    text = text[: data.draw(st.integers(len(text) // 2, len(text)), label="ends at")]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12), label="cuts"))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    starts = data.draw(st.booleans(), label="starts in thoughts")
    whole = parse(format_of(name), [text], starts_in_reasoning=starts)
    assert parse(format_of(name), pieces, starts_in_reasoning=starts) == whole
    assert parse(format_of(name), list(text), starts_in_reasoning=starts) == whole


TOKENIZER = tokenizer_with("<tool_call>", "</tool_call>", "<think>", "</think>")
MARKED = read_answer_format(template_of("hermes"), TOKENIZER)
BODY = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@given(st.lists(LETTERS | st.sampled_from(sorted(MARKED.mark_ids)) | st.just(BODY), max_size=12), st.booleans())
def test_an_answer_of_text_and_marks_is_parsed_the_same_however_it_is_cut(pieces: list[str | int], starts: bool):
    cut = [part for piece in pieces for part in (list(piece) if isinstance(piece, str) else [piece])]
    joined: list[str | int] = []
    for part in cut:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    whole = parse(MARKED, joined, starts_in_reasoning=starts)
    assert parse(MARKED, cut, starts_in_reasoning=starts) == whole


@given(text=st.lists(LETTERS, max_size=30).map("".join))
def test_text_without_a_call_is_content_to_the_last_character(text: str):
    assert parse(format_of("mistral"), list(text), parse_reasoning=False).content == text
    assert parse(format_of("hermes"), [text], parse_calls=False, parse_reasoning=False) == Parsed(text)


def test_time_is_linear_in_answers_that_are_hard_to_read():
    num_steps = 20_000
    for text in ('<tool_call>{"a":[', '<tool_call>{"a":{', "<tool_call>", "<think>", " ", "<", '{"name": "'):
        for name in ("hermes", "llama3", "qwen3_coder", "gemma4"):
            assert parse(format_of(name), [text * num_steps]) is not None
    nested = '<tool_call>{"a":[' * num_steps + "]}" * num_steps
    assert parse(format_of("hermes"), [nested]).content == nested


# What is a call.


def hermes(text: str, **options: object) -> Parsed:
    return parse(format_of("hermes"), list(text), **options)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> before a call, </tool_call> behind it.",
        '<tool_call>\n{"name": "delete_all", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": 3}\n</tool_call>',
        '<tool_call>\n["get_weather"]\n</tool_call>',
        '<tool_call>\n{"name": "delete_all", "argu',
        "<<tool_ca",
    ],
)
def test_what_only_looks_like_a_call_is_content(text: str):
    assert hermes(text) == Parsed(text)


@pytest.mark.parametrize("begun", ["<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "get_weather", "arg'])
def test_a_call_that_is_cut_before_its_arguments_leaves_nothing_in_the_content(begun: str):
    assert hermes(f"I look.\n{begun}") == Parsed("I look.")
    for letters in (
        "<tool_call>\n<func",
        "<tool_call>\n<function=get_wea",
        "<tool_call>\n<function=get_weather>\n<param",
    ):
        assert parse(format_of("qwen3_coder"), list(letters)).content == ""


def test_calls_and_thoughts_may_be_cut_short_and_stand_in_each_other():
    parsed = hermes("<tool_call>" + CALL)
    assert parsed.content == "<tool_call>"
    assert [call[1] for call in parsed.calls] == ["get_weather"]

    assert hermes(CALL[:61]).calls == [["id0", "get_weather", '{"city": "Pa']]
    pairs = "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"
    assert parse(format_of("qwen3_coder"), list(pairs)).calls == [["id0", "get_weather", '{"city": "Par']]

    parsed = hermes("<think>\nI look. " + CALL + " Good.\n</think>\n\nFine.")
    assert parsed.reasoning == "I look.Good."
    assert parsed.content == "Fine."
    assert [call[1] for call in parsed.calls] == ["get_weather"]


def test_arguments_are_as_the_model_wrote_them():
    text = '{"city" :"\\u0041é",  "more": [1.0,\n2e3, {"}": "]"}]}'
    assert hermes('<tool_call>{"name":"get_weather","arguments":' + text + "}</tool_call>").calls[0][2] == text


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"city": "Paris"}, "name": "get_weather"}',
        '{ "name" : "get_weather" , "id": "x", "parameters":\n{"city": "Paris"} , "more": [1, "}"] }',
    ],
)
def test_a_model_may_order_and_space_a_call_otherwise(text: str):
    parsed = hermes(f"<tool_call>{text}</tool_call>\n")
    assert parsed.arguments == [("get_weather", {"city": "Paris"})]
    assert parsed.content == ""


def test_no_arguments_are_an_empty_object():
    for fields in ("", ', "arguments": null', ', "arguments": {}'):
        assert hermes('<tool_call>{"name": "list_all"' + fields + "}</tool_call>").calls == [["id0", "list_all", "{}"]]
    for name in FORMATS:
        assert parse(format_of(name), [written(name, ["list_all"])]).calls[0][2] == "{}"


def test_thoughts_begin_an_answer_or_were_begun_by_the_prompt():
    assert hermes("\nHm.\n</think>\n\nYes.", starts_in_reasoning=True) == Parsed("Yes.", "Hm.")
    assert hermes("Hm.", starts_in_reasoning=True) == Parsed("", "Hm.")
    assert hermes("<think>\nHm.</think>", starts_in_reasoning=True) == Parsed("", "Hm.")

    assert hermes("<think></think>Yes.") == Parsed("Yes.")
    assert hermes("See <think>x</think>.") == Parsed("See <think>x</think>.")

    assert hermes("<think>a</think>" + CALL, parse_calls=False) == Parsed(CALL, "a")
    assert hermes("<think>a</think>b", parse_reasoning=False) == Parsed("<think>a</think>b")


def test_a_mark_is_a_token_and_its_letters_are_letters():
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer = tokenizer_with(*marks)
    format = read_answer_format(template_of("hermes"), tokenizer)
    ids = [tokenizer.token_id(mark) or 0 for mark in marks]
    body = '{"name": "get_weather", "arguments": {"city": "</tool_call>"}}'
    pieces = [ids[2], "a ", "</think>", ids[3], "<tool_call>", body, ids[0], body, ids[1]]
    parsed = parse(format, pieces)
    assert parsed.reasoning == "a </think>"
    assert parsed.content == "<tool_call>" + body
    assert parsed.arguments == [("get_weather", {"city": "</tool_call>"})]
    assert parse(format, [ids[0], "no call", ids[1]]).content == "<tool_call>no call</tool_call>"


def test_a_bare_object_is_a_call_only_where_it_begins_an_answer_and_names_a_tool():
    llama = format_of("llama3")
    call = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    assert parse(llama, list(call)).arguments == [("get_weather", {"city": "Paris"})]
    for text in ("See " + call, '{"city": "Paris"}', '{"name": "Paul", "parameters": {}}', '{"name": "get_weath'):
        assert parse(llama, list(text)) == Parsed(text)


def test_ids_that_the_model_writes_are_kept_where_they_come_before_the_arguments():
    text = '[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "Paris"}'
    assert parse(format_of("mistral_call_id"), [text]).calls == [["aB3dE6gH9", "get_weather", '{"city": "Paris"}']]
    late = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "aB3dE6gH9"}]'
    assert parse(format_of("mistral"), [late]).calls == [["id0", "get_weather", '{"city": "Paris"}']]


@pytest.mark.parametrize(
    ("schema", "written_value", "value"),
    [
        ({"type": "string"}, "007", "007"),
        ({"type": "integer"}, " 7 ", 7),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "7", "7"),
        ({"$ref": "#/$defs/n"}, "7.5", 7.5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "object"}, "{'a': [None, True]}", {"a": [None, True]}),
        ({"type": "object"}, "no object", "no object"),
        ({}, "7", 7),
        ({}, "seven", "seven"),
        ({}, '"seven"', '"seven"'),
    ],
)
def test_a_pairs_value_has_the_type_that_its_schema_allows(schema: dict, written_value: str, value: object):
    tools = {"f": {"type": "object", "properties": {"x": schema}, "$defs": {"n": {"type": "number"}}}}
    text = f"<tool_call>f<arg_key>x</arg_key><arg_value>{written_value}</arg_value></tool_call>"
    assert parse(format_of("glm47"), list(text), tools=tools).arguments == [("f", {"x": value})]


def test_quoted_values_with_bare_keys_become_json():
    quote = '<|"|>'
    text = "<|tool_call>call:get_weather{a:Qx, {yQ,b:{c:[1,Q2Q,{d:null}],e f:true},g:-1.5}<tool_call|>".replace(
        "Q", quote
    )
    expected = {"a": "x, {y", "b": {"c": [1, "2", {"d": None}], "e f": True}, "g": -1.5}
    assert parse(format_of("gemma4"), list(text)).arguments == [("get_weather", expected)]
    text = '<|tool_call>call:get_weather{a:{"b": "x, {y\\" "}}<tool_call|>'  # as a grammar may bind it to write
    assert parse(format_of("gemma4"), list(text)).arguments == [("get_weather", {"a": {"b": 'x, {y" '}})]


def test_channels_are_thoughts_content_and_calls():
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
    )
    parsed = parse(format_of("harmony"), list(text))
    assert (parsed.reasoning, parsed.content) == ("One.\nTwo.", "I look.")
    assert parsed.arguments == [("get_weather", {"city": "Paris"})]
    assert parse(format_of("harmony"), list("<|channel|>final<|message|>Yes.<|return|>")) == Parsed("Yes.")
    assert parse(format_of("harmony"), ["No channel at all"]) == Parsed("No channel at all")
