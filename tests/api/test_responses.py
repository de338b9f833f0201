"""The Responses API at one server, asked by OpenAI's own client: items, events, what is kept, and what runs alone."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import llguidance
import openai
import pytest

from maitred.api.dialects.responses.answers import CustomInput
from maitred.api.dialects.responses.reading import regex_of_lark
from maitred.core.request import RequestSpec
from tests.api.conftest import strict_client
from tests.api.test_tools import TEMPLATE, prompt_of
from tests.conftest import start_server
from tests.fakes_api import FakeReplica, FakeTenants, make_model, running_server, says, table_of
from tests.waiting import HANGS_S, until

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PATCH = """start: begin hunk+ "*** End Patch" LF?
begin: "*** Begin Patch" LF
hunk: "*** Add File: " name LF ("+" line LF -> added)+
  | "*** Delete File: " name LF  // nothing follows
name: /(.+)/
line: /(.*)/
%import common.LF
"""
APPLY = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}}
PATCHED = '*** Begin Patch\n*** Add File: a.py\n+print("caf\u00e9 \U0001f600\\n")\n*** End Patch\n'
Serving = Callable[[str], tuple[FakeReplica, openai.OpenAI]]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """One server, whose engine says the text that it is called with, and OpenAI's client of it."""
    replica = FakeReplica()
    model = make_model(chat_template=TEMPLATE, max_model_len=4096)
    with running_server(replica, model) as server, strict_client(server.url) as client:

        def begin(text: str) -> tuple[FakeReplica, openai.OpenAI]:
            replica.answer = says(text)
            replica.submitted.clear()
            return replica, client

        yield begin


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[list[Any], Any]:
    """All events, whose numbers have no gap, and the response at their end."""
    events = list(client.responses.create(model="tiny", stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    return events, events[-1].response


def joined(events: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")


def told(response: Any) -> list[dict[str, Any]]:
    """The items without what differs from answer to answer."""
    items = [item.model_dump(exclude_none=True) for item in response.output]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_thoughts_text_and_calls_are_items_whole_and_streamed_alike(serving: Serving):
    _, client = serving(f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}")
    asked: dict[str, Any] = {"input": "hi", "tools": [WEATHER]}
    whole = client.responses.create(model="tiny", **asked)
    assert [item["type"] for item in told(whole)] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "hm"
    assert (whole.output_text, json.loads(whole.output[2].arguments)) == ("I look.", {"city": "Rome"})
    assert len({item.id for item in whole.output} | {item.call_id for item in whole.output[2:]}) == 6
    events, response = streamed(client, **asked)
    assert told(response) == told(whole)
    assert joined(events, "reasoning_text") == "hm"
    assert joined(events, "output_text") == "I look."
    assert joined(events, "function_call_arguments") == 2 * whole.output[2].arguments
    assert (response.status, response.usage) == ("completed", whole.usage)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in response.output]
    with client.responses.stream(model="tiny", **asked) as stream:
        assert told(stream.get_final_response())[1]["content"][0]["text"] == "I look."


def test_each_event_has_its_type_on_a_line_and_nothing_comes_after_the_last(serving: Serving):
    _, client = serving("Hi")
    answer = client.responses.with_raw_response.create(model="tiny", input="hi", stream=True)
    events = [event for event in answer.http_response.read().decode().split("\n\n") if event]
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data[6:])['type']}"
    assert events[-1].startswith("event: response.completed\n")


def test_a_cut_answer_is_incomplete_and_an_empty_one_is_an_empty_message(serving: Serving):
    _, client = serving("Hello, world!")
    _, cut = streamed(client, input="hi", max_output_tokens=5)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.output_text, cut.output[0].status) == ("Hello", "incomplete")
    _, client = serving("")
    assert told(client.responses.create(model="tiny", input="hi"))[0]["content"][0]["text"] == ""


def test_thoughts_come_as_a_summary_or_sealed_and_go_back_into_the_prompt(serving: Serving):
    replica, client = serving("<think>\nhm\n</think>\n\nI see.")
    include: Any = ["reasoning.encrypted_content"]
    events, response = streamed(
        client, input="hi", store=False, include=include, reasoning={"effort": "low", "summary": "auto"}
    )
    assert joined(events, "reasoning_summary_text") == "hm"
    thoughts, message = (item.model_dump(exclude_none=True) for item in response.output)
    assert (thoughts["summary"][0]["text"], thoughts["content"]) == ("hm", [])
    sealed = {**thoughts, "summary": []}
    for sent in (thoughts, sealed):
        client.responses.create(model="tiny", input=[{"role": "user", "content": "hi"}, sent, message])
        assert "<assistant><think>\nhm\n</think>\n\nI see.<assistant>" in prompt_of(replica.submitted[-1])
    other = {**sealed, "encrypted_content": base64.b64encode(b"of another server").decode()}
    raw = client.responses.with_raw_response.create(model="tiny", input=[{"role": "user", "content": "hi"}, other])
    assert raw.headers["x-maitred-ignored-fields"] == "input.reasoning.encrypted_content"


def test_a_next_turn_has_the_prompt_of_a_chat_with_all_that_was_said(serving: Serving):
    replica, client = serving(f"I look.\n{CALL}")
    asked: dict[str, Any] = {"model": "tiny", "tools": [WEATHER]}
    first = client.responses.create(input="Rome?", instructions="Be short.", **asked)
    call = first.output[-1]
    replica.answer = says("Sunny.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    second = client.responses.create(input=[result], previous_response_id=first.id, **asked)
    assert (second.previous_response_id, second.output_text) == (first.id, "Sunny.")
    third = client.responses.create(input="And now?", previous_response_id=second.id, **asked)
    function = {"name": call.name, "arguments": call.arguments}
    chat = [
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "sun"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "And now?"},
    ]
    tool = {"type": "function", "function": {name: WEATHER[name] for name in ("name", "parameters")}}
    client.chat.completions.create(model="tiny", messages=chat, tools=[tool])
    assert replica.submitted[-2].prompt_token_ids == replica.submitted[-1].prompt_token_ids
    assert "Be short." not in prompt_of(replica.submitted[-1])
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    kinds = ["message", "message", "function_call", "function_call_output", "message", "message"]
    assert [item.type for item in items] == kinds
    assert [item.id for item in client.responses.input_items.list(third.id)] == [item.id for item in reversed(items)]
    refers: Any = [{"type": "item_reference", "id": item.id} for item in items]
    client.responses.create(input=refers, **asked)
    assert replica.submitted[-1].prompt_token_ids == replica.submitted[-2].prompt_token_ids


def test_a_custom_tool_has_a_text_within_its_grammar_letter_by_letter(serving: Serving):
    arguments = json.dumps({"input": PATCHED}, ensure_ascii=False)
    replica, client = serving(f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>')
    asked: dict[str, Any] = {
        "input": "Write a.py.",
        "tools": [APPLY, WEATHER],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
    }
    events, response = streamed(client, **asked)
    [call] = response.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", PATCHED)
    assert joined(events, "custom_tool_call_input") == PATCHED
    assert fits(replica.submitted[0], arguments)
    assert not fits(replica.submitted[0], arguments.replace("Add File", "Put File"))
    done: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done!"}
    client.responses.create(model="tiny", input=[done], previous_response_id=response.id, tools=[APPLY])
    assert arguments in prompt_of(replica.submitted[-1])
    assert "Done!" in prompt_of(replica.submitted[-1])


def fits(spec: RequestSpec, arguments: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, spec.grammar)
    tokens = tokenizer.tokenize_str(f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>')
    return bool(matcher.try_consume_tokens(tokens) == len(tokens))


def test_lark_that_is_regular_is_a_regular_expression():
    pattern = regex_of_lark(PATCH)
    assert pattern is not None
    assert re.fullmatch(pattern, "*** Begin Patch\n*** Delete File: b\n*** Add File: c\n+x\n+\n*** End Patch")
    assert not re.fullmatch(pattern, "*** Begin Patch\n*** End Patch")
    sums = 'start: INT (("+" | "-"i) INT)~1..2\nINT: "0".."9"+\n%ignore " "'
    assert [bool(re.fullmatch(regex_of_lark(sums) or "", text)) for text in ("1 + 22", "1+2 -3", "1", "1+2+3+4")] == [
        *(True, True, False, False)
    ]
    for refused in (
        'start: "(" start ")" | "x"',
        "start: missing",
        'start: "a',
        "start: A\n%import common.NOTHING -> A",
    ):
        assert regex_of_lark(refused) is None, refused


def test_text_of_a_custom_tool_is_the_same_wherever_it_is_cut():
    sent = json.dumps({"input": 'a"\\\n\u00e9\U0001f600 \x01'})
    for size in range(1, len(sent)):
        reader = CustomInput()
        assert (
            "".join(reader.push(sent[at : at + size]) for at in range(0, len(sent), size)) == json.loads(sent)["input"]
        )


def test_tools_that_are_not_here_are_named_and_refused_only_where_one_is_demanded(serving: Serving):
    replica, client = serving("Hi")
    hosted: Any = [
        {"type": "web_search"},
        {"type": "namespace", "name": "x", "description": "", "tools": [WEATHER]},
        WEATHER,
    ]
    raw = client.responses.with_raw_response.create(model="tiny", input="hi", tools=hosted)
    assert raw.headers["x-maitred-ignored-tools"] == "web_search, namespace"
    assert "weather" in prompt_of(replica.submitted[0])
    assert "web_search" not in prompt_of(replica.submitted[0])
    choices: Any = ({"type": "web_search"}, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]})
    for choice in choices:
        with pytest.raises(openai.BadRequestError, match="tool_choice demands"):
            client.responses.create(model="tiny", input="hi", tools=hosted, tool_choice=choice)
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}, {"type": "mcp"}],
    }
    client.responses.create(model="tiny", input="hi", tools=hosted, tool_choice=allowed)
    recursive = {**APPLY, "format": {**APPLY["format"], "definition": 'start: "(" start ")" | "x"'}}  # type: ignore[dict-item]
    raw = client.responses.with_raw_response.create(model="tiny", input="hi", tools=[recursive])
    assert raw.headers["x-maitred-schema-ignored"] == "tools.apply_patch.format"


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "input is missing"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content\[0\]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, r"input\[0\].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x_0"}]}, "there is no item 'msg_x_0'"),
        ({"input": [1], "previous_response_id": None}, "input"),
        ({"input": [{"type": "item_reference", "id": 5}, 1]}, "list of items"),
        ({"input": [1], "background": True}, "list of items"),
        ({"input": "x", "request_id": "a b"}, "request_id"),
        ({"input": "x", "conversation": "conv_1"}, "conversation is not supported: send previous_response_id"),
        ({"input": "x", "max_tokens": 4}, "send max_output_tokens"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"input": "x", "previous_response_id": "resp_1"}, "there is no response 'resp_1'"),
        ({"input": "x", "background": True, "store": False}, "background needs"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "xml"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
         "text.format.schema cannot be compiled"),
        ({"input": "x", "tools": True}, "tools must be"),
        ({"input": "x", "tools": [{"type": "custom", "format": 5}]}, r"tools\[0\].format"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"input": "x", "tools": [{"type": "custom", "format": {"type": "grammar"}}]}, r"tools\[0\].format"),
        ({"input": "x", "min_tokens": 9, "max_output_tokens": 8}, r"is over max_output_tokens \(8\)"),
        ({"input": "x", "max_output_tokens": 9999}, r"and max_output_tokens \(9999\) add up"),
        ({"input": "x", "think": True}, "send reasoning.effort"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"maximum": {}}}}}, "text.format.schema"),
        ({"input": "x", "tools": [{"type": "web_search"}, {**WEATHER, "name": "a b"}]}, r"tools\[1\].name is 'a b'"),
        ({"input": "x", "tools": [{"type": "mcp"}, {**WEATHER, "parameters": {"type": "x"}}]},
         r"tools\[1\].parameters cannot be compiled"),
        ({"instructions": "a", "input": [{"role": "user", "content": "b"}, {"role": "critic", "content": "c"}]},
         r"input\[1\].role is 'critic'"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": []}]}, r"input\[0\].arguments"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_named(serving: Serving, asked: dict[str, Any], named: str):
    _, client = serving("Hi")
    with pytest.raises(openai.APIStatusError, match=named) as raised:
        client.post("/responses", body={"model": "tiny", **asked}, cast_to=object)
    assert raised.value.status_code in (400, 404)


def test_unread_items_and_wishes_are_named(serving: Serving):
    _, client = serving("Hi")
    items: Any = [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"role": "user", "content": "hi"}]
    raw = client.responses.with_raw_response.create(
        model="tiny",
        input=items,
        truncation="auto",
        text={"verbosity": "low"},
        extra_body={"stream_options": {"include_obfuscation": False}},
    )
    ignored = raw.headers["x-maitred-ignored-fields"]
    assert ignored == "input.web_search_call, truncation, text.verbosity, stream_options"
    calls: Any = [
        {"type": "function_call", "name": "f", "call_id": f"c{number}", "arguments": "{"} for number in range(2)
    ]
    form: Any = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "of_mine": 1}
    raw = client.responses.with_raw_response.create(
        model="tiny", instructions="x", input=[*items, *calls], text={"format": form}
    )
    assert raw.headers["x-maitred-arguments-emptied"] == "input.2, input.3"
    assert raw.headers["x-maitred-ignored-fields"] == "text.format.of_mine, input.web_search_call"


def test_log_probabilities_are_those_of_the_text(serving: Serving):
    _, client = serving("Hi")
    include: Any = ["message.output_text.logprobs"]
    events, response = streamed(client, input="hi", include=include, top_logprobs=2)
    known = response.output[0].content[0].logprobs
    assert [one.token for one in known][:2] == ["H", "i"]
    assert [len(one.top_logprobs) for one in known] == [2] * len(known)
    deltas = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert deltas == [one.token for one in known][: len(deltas)]
    assert (
        client.responses.create(model="tiny", input="hi", include=include).output[0].content[0].logprobs[0].token == "H"
    )


def test_a_schema_is_parsed_into_the_clients_own_type(serving: Serving):
    import pydantic

    class Zip(pydantic.BaseModel):
        zip: int

    replica, client = serving('{"zip": 7}')
    assert client.responses.parse(model="tiny", input="hi", text_format=Zip).output_parsed == Zip(zip=7)
    assert "zip" in replica.submitted[0].grammar


def test_what_is_not_stored_deleted_or_anothers_is_not_there():
    replica = FakeReplica(held=False)
    tenants = FakeTenants(table_of({"a": {}, "b": {}}))
    with (
        running_server(replica, make_model(), tenants=tenants) as server,
        strict_client(server.url, "a") as client,
        strict_client(server.url, "b") as other,
    ):
        unstored = client.responses.create(model="tiny", input="hi", store=False)
        stored = client.responses.create(model="tiny", input="hi")
        assert client.responses.retrieve(stored.id) == stored
        for asking, id in ((client, unstored.id), (other, stored.id)):
            for ask in (asking.responses.retrieve, asking.responses.delete, asking.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    ask(id)
            with pytest.raises(openai.NotFoundError):
                asking.responses.create(model="tiny", input="hi", previous_response_id=id)
        replica.token_s = 0.05
        stream = client.responses.create(model="tiny", input="hi", stream=True)
        id = next(iter(stream)).response.id
        replica.held, replica.token_s = True, 0.0
        assert client.responses.retrieve(id).status == "in_progress"
        replica.held = False
        client.responses.delete(id)
        assert list(stream)[-1].type == "response.completed"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)


def test_a_background_response_runs_on_is_followed_from_anywhere_and_cancelled(serving: Serving):
    replica, client = serving("Hello, world!")
    replica.held = True
    try:
        queued = client.responses.create(model="tiny", input="hi", background=True)
        assert (queued.status, queued.background) == ("queued", True)
        with pytest.raises(openai.BadRequestError, match="is queued"):
            client.responses.create(model="tiny", input="hi", previous_response_id=queued.id)
        doomed = client.responses.create(model="tiny", input="hi", background=True, stream=True)
        begun = [next(iter(doomed)) for _ in range(2)]
        assert [event.type for event in begun] == ["response.created", "response.queued"]
        cancelled = client.responses.cancel(begun[0].response.id)
        assert cancelled.status == client.responses.cancel(cancelled.id).status == "cancelled"
        assert list(doomed)[-1].response.status == "cancelled"
        following = client.responses.retrieve(queued.id, stream=True)
        first = [next(iter(following)) for _ in range(2)]
    finally:
        replica.held = False
    events = first + list(following)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert joined(events, "output_text") == "Hello, world!"
    until(lambda: client.responses.retrieve(queued.id).status == "completed")
    assert client.responses.retrieve(queued.id) == events[-1].response
    assert list(client.responses.retrieve(queued.id, stream=True, starting_after=4)) == events[5:]
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(model="tiny", input="hi").id)


def test_what_fails_under_way_is_told_as_a_failed_response(serving: Serving):
    replica, client = serving("Hello, world!")
    replica.fail_after = 3
    try:
        events, response = streamed(client, input="hi")
        assert (events[-1].type, response.status) == ("response.failed", "failed")
        assert "NaN" in response.error.message
        assert client.responses.retrieve(response.id).status == "failed"
        alone = client.responses.create(model="tiny", input="hi", background=True)
        until(lambda: client.responses.retrieve(alone.id).status == "failed")
        assert client.responses.retrieve(alone.id).error.code == "server_error"
    finally:
        replica.fail_after = None
    wrong = client.responses.create(model="nothing", input="hi", background=True)
    until(lambda: client.responses.retrieve(wrong.id).status == "failed")
    assert client.responses.retrieve(wrong.id).error.code == "invalid_prompt"


def test_a_killed_servers_responses_are_there_and_the_unfinished_have_failed(tmp_path: Path):
    replica, before, after = FakeReplica(), tmp_path / "before", tmp_path / "after"
    with running_server(replica, make_model(), state_dir=str(before)) as server, strict_client(server.url) as client:
        done = client.responses.create(model="tiny", input="hi")
        replica.held = True
        alone = client.responses.create(model="tiny", input="hi", background=True)
        shutil.copytree(before, after)
        replica.held = False
    with (
        running_server(FakeReplica(), make_model(), state_dir=str(after)) as server,
        strict_client(server.url) as client,
    ):
        assert client.responses.retrieve(done.id) == done
        failed = client.responses.retrieve(alone.id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert [event.type for event in client.responses.retrieve(alone.id, stream=True)] == ["response.failed"]
        assert client.responses.create(model="tiny", input="x", previous_response_id=done.id).output_text


def test_an_answer_of_the_result_cache_is_counted_and_stored_as_any():
    replica = FakeReplica()
    with running_server(replica, make_model(), result_cache_bytes=2**20) as server, strict_client(server.url) as client:
        first, again = (streamed(client, input="hi", temperature=0) for _ in range(2))
        assert (len(replica.submitted), told(again[1])) == (1, told(first[1]))
        for events, response in (first, again):  # each is kept, and deleted, by itself
            assert client.responses.retrieve(response.id) == response
            assert {event.item_id for event in events if hasattr(event, "item_id")} == {response.output[0].id}
        client.responses.delete(first[1].id)
        assert client.responses.retrieve(again[1].id) == again[1]


def test_a_full_disk_costs_no_answer_which_says_that_it_is_not_stored(tmp_path: Path):
    with running_server(FakeReplica(), make_model(max_model_len=8192), state_dir=str(tmp_path / "state")) as server:
        server.server.app.stored._db.execute("PRAGMA max_page_count = 1")
        with strict_client(server.url) as client:
            answer = client.responses.create(model="tiny", input="hi" * 200, instructions="x" * 5_000)
            assert (answer.output_text, answer.store) == ("Hello, world!", False)
            assert httpx.get(f"{server.url}/v1/responses/{answer.id}", timeout=HANGS_S).status_code == 404


LOOP_PATCH = """start: "*** Begin Patch" LF "*** Update File: app.py" LF "@@" LF line~1..3 "*** End Patch" LF?
line: ("+" | "-" | " ") /[^\\n]{1,20}/ LF
%import common.LF
"""
LOOP_TOOLS: list[Any] = [
    {
        "type": "function", "name": "shell", "description": "Runs a command.", "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"enum": ["cat", "python", "app.py"]}, "maxItems": 2}},
            "required": ["command"],
        },
    },
    {**APPLY, "format": {"type": "grammar", "syntax": "lark", "definition": LOOP_PATCH}},
    {"type": "web_search", "external_web_access": False},
    {"type": "namespace", "name": "agents", "description": "Others.", "tools": []},
]  # fmt: skip


@pytest.mark.soak
def test_a_coding_agents_loop_of_read_edit_and_run_ends_on_a_small_model():
    """What Codex sends: the whole conversation each time, nothing stored, thoughts sealed, tools that are not here."""
    items: Any = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Write to the workspace."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix app.py, then run it."}]},
    ]
    choices: Any = ({"type": "function", "name": "shell"}, {"type": "custom", "name": "apply_patch"})
    results = ("print(helo)", "Success. Updated the following files:\nM app.py\n", "hello\n", "")
    asked: dict[str, Any] = {
        "model": "smollm2", "instructions": "You are a coding agent. " * 60, "tools": LOOP_TOOLS, "store": False,
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "temperature": 0,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "thread-1", "max_output_tokens": 300,
    }  # fmt: skip
    server = start_server("smollm2")
    try:
        client, shares = strict_client(server.url), []
        for choice, result in zip((*choices, choices[0], "none"), results, strict=True):
            raw = client.responses.with_raw_response.create(input=items, tool_choice=choice, stream=True, **asked)
            assert raw.headers["x-maitred-ignored-tools"] == "web_search, namespace"
            response: Any = list(raw.parse())[-1].response
            shares.append(response.usage.input_tokens_details.cached_tokens / response.usage.input_tokens)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type.endswith("_call")]
            items += [{"type": f"{call.type}_output", "call_id": call.call_id, "output": result} for call in calls]
            assert (response.status, len(calls)) == ("completed", choice != "none")
        [patch] = [item["input"] for item in items if item["type"] == "custom_tool_call"]
        assert patch.startswith("*** Begin Patch\n*** Update File: app.py\n@@\n")
        assert min(shares[1:]) > 0.8
    finally:
        server.stop()


def test_what_is_kept_and_told_again_is_whole_json(serving: Serving):
    _, client = serving("Hi")
    with httpx.Client(base_url=str(client.base_url)[:-3], timeout=HANGS_S) as http:

        def sent(content: bytes) -> httpx.Response:
            return http.post("/v1/responses", content=content, headers={"content-type": "application/json"})

        odd = b'{"input": [{"role": "user", "content": "hi", "of_mine": 1e999}]}'
        id = sent(odd).json()["id"]
        listed = http.get(f"/v1/responses/{id}/input_items")
        assert b'"of_mine":1e999' in listed.content
        assert listed.json()["data"][0]["content"][0]["text"] == "hi"
        item = {"type": "item_reference", "id": listed.json()["data"][0]["id"]}
        assert http.post("/v1/responses", json={"input": [item]}).status_code == 200
        for body, param in (
            (b'{"input": "hi", "metadata": {"a": "\xff"}}', None),
            (b'{"input": "hi", "background": true, "\xff": 1}', None),
            (b'{"input": [{"type": "item_reference", "id": 1e999}]}', "input.id"),
            (b'{"input": [{"id": [], "role": "user", "content": "hi"}], "background": true}', "input[0].id"),
        ):
            refused = sent(body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), body


def test_several_cancellations_at_once_are_one(tmp_path: Path):
    replica = FakeReplica()
    replica.held = True
    with running_server(replica, state_dir=str(tmp_path)) as server, httpx.Client(base_url=server.url) as http:
        of = f"/v1/responses/{http.post('/v1/responses', json={'input': 'hi', 'background': True}).json()['id']}"
        with ThreadPoolExecutor(4) as pool:
            told = list(pool.map(lambda _: http.post(f"{of}/cancel").json()["status"], range(4)))
        assert [*told, http.get(of).json()["status"]] == ["cancelled"] * 5
        replica.held = False
