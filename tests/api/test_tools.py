"""Tools, thoughts and structured answers over HTTP: what the engine is asked, and how its text is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from maitred.core.request import RequestSpec, ThinkingLimit
from tests.fakes_api import EOS, FakeReplica, make_model, running_server, says
from tests.waiting import HANGS_S

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = """\
{%- if tools %}<system>Tools: {{ tools | tojson }}</s>{% endif -%}
{%- for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif -%}
{{ m.content or "" }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}
{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}</s>{% endfor -%}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>
{% endif %}{% endif -%}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"zip": {"type": "integer"}}, "required": ["zip"]}


Serving = Callable[[str], tuple[FakeReplica, httpx.Client]]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """One server, whose engine says the text that it is called with, and a client of it."""
    replica = FakeReplica()
    with (
        running_server(replica, make_model(chat_template=TEMPLATE)) as server,
        httpx.Client(base_url=server.url, timeout=HANGS_S) as client,
    ):

        def begin(text: str) -> tuple[FakeReplica, httpx.Client]:
            replica.answer = says(text)
            replica.submitted.clear()
            return replica, client

        yield begin


def prompt_of(spec: RequestSpec) -> str:
    return bytes(token for token in spec.prompt_token_ids if token < EOS).decode()


def streamed(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The message that the deltas of a stream make, and its end."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    response = http.post(CHAT, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content", "reasoning"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append(
                        {"id": call["id"], "type": "function", "function": {**call["function"]}}
                    )
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    return message


def test_a_call_is_told_whole_and_streamed_alike(serving: Serving):
    replica, http = serving("I look.\n" + CALL)
    body = {**ASK, "tools": [WEATHER, STOP], "request_id": "same"}
    choice = http.post(CHAT, json=body).json()["choices"][0]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I look.")
    [call] = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    stream = streamed(http, body)
    assert stream["tool_calls"] == message["tool_calls"]
    assert (stream["content"], stream["finish_reason"]) == ("I look.", "tool_calls")
    assert "<system>Tools:" in prompt_of(replica.submitted[0])
    assert "weather" in replica.submitted[0].grammar


def test_a_chunk_tells_one_thing_and_a_call_begins_with_its_name(serving: Serving):
    """As OpenAI streams it: instructor reads the first call of a chunk alone, others take a name or arguments."""
    _, http = serving(f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}")
    asked = {**ASK, "tools": [WEATHER], "stream": True, "logprobs": True}
    chunks = [
        json.loads(line[6:])["choices"][0]
        for line in http.post(CHAT, json=asked).text.splitlines()
        if line.startswith("data: {")
    ]
    deltas = [chunk["delta"] for chunk in chunks]
    assert (deltas[0], deltas[-1]) == ({"role": "assistant", "content": ""}, {})
    kinds = [{name.removesuffix("_content") for name in delta} for delta in deltas[1:-1]]
    assert all(len(kind) <= 1 for kind in kinds)
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(listed) == 1 for listed in calls)
    for index in range(2):
        [first, *more] = [call for [call] in calls if call["index"] == index]
        assert first["id"]
        assert (first["type"], first["function"]) == ("function", {"name": "weather", "arguments": ""})
        assert all(set(call) == {"index", "function"} and call["function"]["arguments"] for call in more)


def test_calls_alone_have_no_content_and_samples_are_read_each_by_itself(serving: Serving):
    _, http = serving(CALL)
    message = http.post(CHAT, json={**ASK, "tools": [WEATHER]}).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1
    _, http = serving(CALL)
    choices = http.post(CHAT, json={**ASK, "tools": [WEATHER], "n": 2, "temperature": 0}).json()["choices"]
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in choices]
    assert len(set(ids)) == 2


def test_without_tools_nothing_is_a_call_and_a_named_tool_binds_to_that_one(serving: Serving):
    replica, http = serving(CALL)
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = http.post(CHAT, json={**ASK, **more}).json()["choices"][0]["message"]
        assert message["content"] == CALL
        assert "tool_calls" not in message
    assert [spec.grammar for spec in replica.submitted] == ["", ""]
    replica, http = serving(CALL)
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {**ASK, "tools": [WEATHER, STOP], "tool_choice": choice}
    assert http.post(CHAT, json=body).json()["choices"][0]["finish_reason"] == "tool_calls"
    assert streamed(http, body)["finish_reason"] == "tool_calls"
    assert "weather" in replica.submitted[0].grammar
    assert "stop" not in replica.submitted[0].grammar


def test_thoughts_stand_apart_under_both_names_and_are_counted(serving: Serving):
    _, http = serving("<think>\nhm\n</think>\n\nYes.")
    answer = http.post(CHAT, json=ASK).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Yes.", "hm", "hm")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] >= len("hm\n</think>")
    stream = streamed(http, ASK)
    assert (stream["content"], stream["reasoning"], stream["reasoning_content"]) == ("Yes.", "hm", "hm")
    hidden = http.post(CHAT, json={**ASK, "include_reasoning": False}).json()["choices"][0]["message"]
    assert hidden["content"] == "Yes."
    assert "reasoning" not in hidden


def test_thoughts_that_the_prompt_began_or_that_led_to_nothing_are_thoughts(serving: Serving):
    replica, http = serving("hm\n</think>\n\nYes.")
    for asked in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": True}}):
        message = http.post(CHAT, json={**ASK, **asked}).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("Yes.", "hm")
        assert prompt_of(replica.submitted[-1]).endswith("<think>\n")
    http.post(CHAT, json={**ASK, "reasoning_effort": "none"})
    assert not prompt_of(replica.submitted[-1]).endswith("<think>\n")
    replica, http = serving("Yes.")
    messages = [*ASK["messages"], {"role": "assistant", "content": None, "reasoning_content": "hm"}, *ASK["messages"]]
    assert http.post(CHAT, json={**ASK, "messages": messages}).status_code == 200
    assert "<think>\nhm\n</think>" in prompt_of(replica.submitted[0])


def test_a_budget_of_thoughts_reaches_the_engine(serving: Serving):
    replica, http = serving("Yes.")
    http.post(CHAT, json={**ASK, "thinking_token_budget": 7, "reasoning_effort": "high"})
    limit = replica.submitted[0].thinking
    assert isinstance(limit, ThinkingLimit)
    assert (limit.num_tokens, limit.opened, bytes(limit.end).strip()) == (7, True, b"</think>")


@pytest.mark.parametrize(("asked", "told"), [
    ({"response_format": {"type": "json_object"}}, "object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, "zip"),
    ({"structured_outputs": {"json": SCHEMA}}, "zip"),
    ({"structured_outputs": {"regex": "[a-c]+"}}, "[a-c]+"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
    ({"structured_outputs": {"grammar": 'root ::= "a"+'}}, "start"),
    ({"response_format": {"type": "text"}}, ""),
])  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_shape_becomes_the_grammar_of_the_request(serving: Serving, path: str, asked: dict[str, Any], told: str):
    replica, http = serving("a")
    body = ASK if path == CHAT else {"model": "tiny", "prompt": "a"}
    response = http.post(path, json={**body, **asked})
    assert response.status_code == 200, response.text
    assert told in replica.submitted[0].grammar
    assert bool(replica.submitted[0].grammar) is bool(told)


def test_what_of_a_schema_is_not_enforced_is_named_and_refused_where_it_is_strict(serving: Serving):
    _, http = serving("{}")
    shape = {"name": "a", "schema": {**SCHEMA, "not": {}, "if": {}}}
    asked = {"type": "json_schema", "json_schema": shape}
    for stream in (False, True):
        response = http.post(CHAT, json={**ASK, "response_format": asked, "stream": stream})
        assert (response.status_code, response.headers["x-maitred-schema-ignored"]) == (200, "if, not")
    strict = http.post(CHAT, json={**ASK, "response_format": {**asked, "json_schema": {**shape, "strict": True}}})
    error = strict.json()["error"]
    assert (strict.status_code, error["code"]) == (400, "unsupported_schema")
    assert error["param"] == "response_format.json_schema.schema"
    assert "if, not" in error["message"]


def test_a_tools_pattern_that_cannot_be_enforced_is_left_out_and_asked_of_tools_that_may_be_called(serving: Serving):
    replica, http = serving("Yes.")
    address = {"type": "object", "properties": {"to": {"type": "string", "pattern": "^(?!\\.)[a-z.]+$"}}}
    mail = {"name": "mail", "parameters": address}
    body = {**ASK, "tools": [WEATHER, {"type": "function", "function": mail}]}
    response = http.post(CHAT, json=body)
    assert (response.status_code, response.headers["x-maitred-schema-ignored"]) == (200, "pattern")
    assert "mail" in replica.submitted[0].grammar
    assert "?!" not in replica.submitted[0].grammar
    strict = {**body, "tools": [WEATHER, {"type": "function", "function": {**mail, "strict": True}}]}
    refused = http.post(CHAT, json=strict)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[1].function.parameters")
    for choice in ("none", {"type": "function", "function": {"name": "weather"}}):
        spared = http.post(CHAT, json={**strict, "tool_choice": choice})
        assert spared.status_code == 200, spared.text
        assert "x-maitred-schema-ignored" not in spared.headers


@pytest.mark.parametrize(("asked", "param"), [
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": 5}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "no JSON"}}, "structured_outputs.structural_tag"),
    ({"response_format": {"type": "structural_tag", "structures": [5], "triggers": [5]}},
     "response_format.structural_tag"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}},
     "response_format.json_schema.schema"),
    ({"tools": [STOP], "tool_choice": {"type": "function", "function": {"name": "go"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [STOP], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": 5}}}, "tool_choice"),
    ({"tools": [STOP, STOP]}, "tools[1].function.name"),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
     "tools[0].function.parameters"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": [], "function": {"name": "a"}}]}]},
     "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused_with_its_path(serving: Serving, asked: dict[str, Any], param: str):
    _, http = serving("a")
    response = http.post(CHAT, json={**ASK, **asked})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_conversation_with_calls_and_their_results_goes_on(serving: Serving):
    replica, http = serving("Sunny.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "25 degrees"},
    ]
    answer = http.post(CHAT, json={**ASK, "messages": messages, "tools": [WEATHER]})
    assert answer.json()["choices"][0]["message"]["content"] == "Sunny."
    prompt = prompt_of(replica.submitted[0])
    assert '"arguments": {"city": "Rome"}}' in prompt
    assert "<tool>25 degrees" in prompt


def test_a_call_that_was_cut_is_taken_as_history_and_the_header_tells_what_is_shown(serving: Serving):
    replica, http = serving("Sunny.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "arguments were cut"}
    messages = [*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    answer = http.post(CHAT, json={**ASK, "messages": messages, "tools": [WEATHER]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-maitred-arguments-emptied"] == "messages.1.tool_calls.0"
    assert '"arguments": {}}' in prompt_of(replica.submitted[0])


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_binds_as_in_llama_cpp(serving: Serving, path: str, kind: str):
    replica, http = serving("a")
    body = ASK if path == CHAT else {"model": "tiny", "prompt": "a"}
    response = http.post(path, json={**body, "response_format": {"type": kind, "schema": SCHEMA}})
    assert response.status_code == 200, response.text
    assert "x-maitred-ignored-fields" not in response.headers
    assert "zip" in replica.submitted[0].grammar


@pytest.mark.parametrize(("asked", "name"), [
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, "response_format.value"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
     "response_format.json_schema"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strickt": True}}},
     "response_format.json_schema.strickt"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather", "x": 1}}},
     "tool_choice.function.x"),
    ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
])  # fmt: skip
def test_fields_that_nothing_reads_in_nested_objects_are_named_and_refused_where_strict(
    serving: Serving, asked: dict[str, Any], name: str
):
    _, http = serving("a")
    told = http.post(CHAT, json={**ASK, **asked})
    assert (told.status_code, told.headers["x-maitred-ignored-fields"]) == (200, name)
    with running_server(FakeReplica(), make_model(chat_template=TEMPLATE), strict_fields=True) as strict:
        refused = httpx.post(strict.url + CHAT, json={**ASK, **asked}, timeout=HANGS_S)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
