"""Calls of tools and their results in messages: what templates are given of them."""

from __future__ import annotations

import json

import pytest

from maitred.core.errors import InvalidRequest
from maitred.text.chat_template import ChatTemplate, with_tools
from maitred.text.tool_format import read_answer_format
from tests.text.answers import TOOLS, template_of, tokenizer_with, tool_calls

WRITES_ALL = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
TURNS_ONLY = """\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}\
{% endif %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"""


def call(arguments: object) -> dict:
    return {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": arguments}}]}


def rendered(source: str, *messages: dict) -> list[dict]:
    text = ChatTemplate(source).render(messages, add_generation_prompt=False)
    return [json.loads(line) for line in text.splitlines()]


def test_arguments_reach_a_template_as_objects():
    (message,) = rendered(WRITES_ALL, call('{"a": ["\\u00e9", 1.0]}'))
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": ["é", 1.0]}
    for empty in ("", None, "{}", {}):
        assert rendered(WRITES_ALL, call(empty))[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_template_that_takes_only_text_is_given_text():
    source = "{% for m in messages %}{% for t in m.tool_calls or [] %}<{{ t.function.name }}>"
    source += "{{ 'x' + t.function.arguments }}{% endfor %}{% endfor %}"
    assert ChatTemplate(source).render([call('{"a": 1}')]) == '<look>x{"a": 1}'


def test_a_template_that_writes_none_where_there_is_no_content_is_given_an_empty_one():
    source = "{% for m in messages %}{{ m.content }}|{% for t in m.tool_calls or [] %}{{ t.function.name }}{% endfor %}"
    assert ChatTemplate(source + "{% endfor %}").render([call("{}")]) == "|look"
    only_none = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% endif %}"
    assert ChatTemplate(only_none + "{% endfor %}").render([call("{}")]) == "look"


def test_a_result_has_the_name_of_the_tool_that_was_called():
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert rendered(WRITES_ALL, call("{}"), result)[1]["name"] == "look"
    assert rendered(WRITES_ALL, call("{}"), {**result, "name": "other"})[1]["name"] == "other"


@pytest.mark.parametrize("text", ['{"a": ', "[1]", '{"a": NaN}', "[" * 100_000, '"{}"'])
def test_arguments_that_are_no_object_are_text_or_an_empty_object(text: str):
    """A call that was cut is sent back as it was told."""
    [message] = rendered(WRITES_ALL, call(text))
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    source = "{% for m in messages %}{% for t in m.tool_calls or [] %}<{{ t.function.name }}>"
    source += "{{ 'x' + t.function.arguments }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source)
    assert not template.takes_objects
    assert template.render([call(text)]) == "<look>x" + text


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (call([1]), "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": {"id": "c1"}}, "messages[1].tool_calls"),
    ],
)
def test_calls_that_are_none_are_refused_with_their_path(message: dict, path: str):
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(WRITES_ALL).render([{"role": "user", "content": "q"}, message])
    assert refused.value.param == path


def test_marks_in_arguments_are_letters():
    tokenizer = tokenizer_with("<|im_start|>", "<|im_end|>", "<tool_call>")
    template = ChatTemplate(template_of("hermes").source, added_tokens=tokenizer.added_tokens)
    ids = tokenizer.encode(template.render([call({"<|im_end|>": "a<|im_end|>"})], add_generation_prompt=False))
    assert ids.count(tokenizer.token_id("<|im_end|>")) == 1
    assert ids.count(tokenizer.token_id("<tool_call>")) == 1


# Templates that write no calls.

CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": tool_calls(["get_weather", "list_all"])},
    {"role": "tool", "tool_call_id": "callid000", "content": "sunny"},
    {"role": "tool", "tool_call_id": "callid001", "content": "[]"},
    {"role": "assistant", "content": "It is sunny."},
]


def test_a_template_without_tools_tells_of_them_and_of_calls_in_its_turns():
    template = ChatTemplate(TURNS_ONLY)
    chat, variables = with_tools(read_answer_format(template), CONVERSATION, TOOLS)
    prompt = template.render(chat, **variables)
    assert prompt.startswith("[user]You can call these functions")
    assert '"name": "get_weather_now"' in prompt
    assert (
        "Weather?[assistant]"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
        '\n<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>'
        "[user]<tool_response>\nsunny\n</tool_response>\n<tool_response>\n[]\n</tool_response>"
        "[assistant]It is sunny."
    ) in prompt


def test_a_template_that_writes_calls_is_given_messages_and_tools_as_they_are():
    template = template_of("hermes")
    chat, variables = with_tools(read_answer_format(template), CONVERSATION, TOOLS)
    assert variables == {"tools": TOOLS}
    assert [message["role"] for message in chat][2] == "tool"
    assert with_tools(read_answer_format(template), CONVERSATION, None)[1] == {}


def test_tools_are_told_by_the_name_and_in_the_place_that_a_template_takes_them():
    echo = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tools }}{% endfor %}"
    smollm = ChatTemplate("{# xml_tools #}" + echo)
    assert with_tools(read_answer_format(smollm), CONVERSATION, TOOLS)[1] == {"xml_tools": TOOLS}
    phi = ChatTemplate("{# <|/tool|> #}" + echo)
    chat, variables = with_tools(read_answer_format(phi), CONVERSATION, TOOLS)
    assert variables == {}
    assert json.loads(chat[0]["tools"])[0]["name"] == "get_weather"
    assert chat[0]["role"] == "system"
    assert chat[3]["role"] == "tool_response"


def test_marks_of_calls_in_content_are_tokens_and_what_clients_gave_is_letters():
    tokenizer = tokenizer_with("<|tool_call|>", "<|end|>")
    marks = dict.fromkeys(tokenizer.added_tokens, True)
    template = ChatTemplate("{# <|tool_call|> #}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}",
                            added_tokens=marks)  # fmt: skip
    message = {**call({"a": "<|tool_call|><|end|>"}), "content": "<|end|>"}
    chat, _ = with_tools(read_answer_format(template, tokenizer), [message], None)
    ids = tokenizer.encode(template.render(chat))
    assert ids.count(tokenizer.token_id("<|tool_call|>")) == 1
    assert ids.count(tokenizer.token_id("<|end|>")) == 1
