"""Anthropic's Messages API: what its client sends reaches the engine as a chat, what comes back is what it expects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import pytest

from maitred.fleet.prefix_keys import prefix_keys, read_asked
from tests.api.test_tools import CALL, TEMPLATE, prompt_of
from tests.fakes_api import FakeReplica, RunningServer, make_model, running_server, says
from tests.waiting import HANGS_S, until

MESSAGES = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "How it is there.", "input_schema": CITY}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
THOUGHT = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
NESTED: Any = [{"type": "text", "text": "a"}]
for _ in range(100):
    NESTED = [{"type": "document", "source": {"type": "content", "content": NESTED}}]
MARKER = "<total_tokens>{} tokens left</total_tokens>"


@pytest.fixture(scope="module")
def replica() -> FakeReplica:
    return FakeReplica(num_cached_tokens=4)


@pytest.fixture(scope="module")
def server(replica: FakeReplica) -> Iterator[RunningServer]:
    model = make_model(chat_template=TEMPLATE, max_model_len=2048)
    with running_server(replica, model, api_keys=("letmein",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> anthropic.Anthropic:
    """Anthropic's own, which sends the key as x-api-key."""
    return anthropic.Anthropic(base_url=server.url, api_key="letmein", max_retries=0)


def prompt_for(client: anthropic.Anthropic, replica: FakeReplica, **fields: Any) -> tuple[str, httpx.Headers]:
    replica.answer = says("ok")
    asked = {"model": "tiny", "max_tokens": 9, "messages": HI, **fields}
    told = client.messages.with_raw_response.create(**asked)
    assert client.messages.count_tokens(
        **{name: value for name, value in asked.items() if name not in ("max_tokens", "metadata", "service_tier")}
    ).input_tokens == len(replica.submitted[-1].prompt_token_ids)
    return prompt_of(replica.submitted[-1]), told.headers


def test_blocks_become_the_messages_of_a_chat(client, replica):
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
    failed = {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": [{"type": "text", "text": "no"}]}
    page = {"type": "document", "title": "Page", "source": {"type": "text", "media_type": "text/plain", "data": "one"}}
    prompt, headers = prompt_for(
        client,
        replica,
        system=[{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be short."}],
        messages=[
            {"role": "user", "content": [page, {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "of another server"},
                    {"type": "text", "text": "I look."},
                    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": {"error_code": "unavailable"}},
                    call,
                ],
            },
            {"role": "user", "content": [failed, {"type": "text", "text": "So?"}]},
            {"role": "system", "content": "Be quick."},
            {"role": "critic", "content": "Hm."},
        ],
        tools=[
            WEATHER,
            SEARCH,
            {"type": "bash_20250124", "name": "bash"},
            {"type": "memory_20250818", "name": "memory"},
            {"type": "mcp_toolset", "mcp_server_name": "x"},
            {"type": "computer_20251124", "name": "computer", "display_width_px": 9, "display_height_px": 9},
        ],
        extra_headers={"anthropic-beta": "context-1m-2025-08-07,other-1"},
    )
    tools, _, rest = prompt.partition("<system>Be")
    assert [tool["function"]["name"] for tool in json.loads(tools.removeprefix("<system>Tools: "))] == [
        *("weather", "bash", "memory"),
    ]
    assert rest == (
        " kind.\nBe short.<user>Page\none\nhi"
        f"<assistant><think>\nhm\n</think>\n\nI look.{CALL}"
        "<tool>Error: no<user>So?<system>Be quick.<user>Hm.<assistant>"
    )
    assert headers["x-maitred-ignored-tools"] == "web_search_20250305, mcp_toolset, computer_20251124"
    assert headers["x-maitred-ignored-fields"] == (
        "messages.content.server_tool_use, messages.content.web_search_tool_result, messages.role.critic, "
        "anthropic-beta.context-1m-2025-08-07, anthropic-beta.other-1"
    )


def test_a_late_system_message_is_a_user_s_where_the_template_takes_none():
    first_only = (
        "{% if messages[1:] | selectattr('role', 'eq', 'system') | list %}{{ raise_exception('late') }}{% endif %}"
    )
    replica = FakeReplica(says("ok"))
    with running_server(replica, make_model(chat_template=first_only + TEMPLATE)) as running:
        client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
        prompt, _ = prompt_for(client, replica, system="A.", messages=[*HI, {"role": "system", "content": "B."}])
    assert prompt == "<system>A.<user>hi\nB.<assistant>"


def body_of_turn(number: int) -> dict[str, Any]:
    """As a coding agent sends it: a checksum before the system prompt, a budget behind results, both anew each turn."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.{number}.0d9; cc_entrypoint=cli; cch=fa69{number};"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]
    for turn in range(number):
        call = {"type": "tool_use", "id": f"c{turn}", "name": "weather", "input": {"city": "Rome"}}
        result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": "sun " * 200}
        messages += [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": MARKER.format(99_000 - number)}]},
            {"role": "system", "content": [{"type": "text", "text": MARKER.format(90_000 - number)}]},
        ]
    last = {"type": "text", "text": "Go.", "cache_control": {"type": "ephemeral"}}
    messages.append({"role": "user", "content": [last]})
    reminder = f"<system-reminder>\nToken usage: {number}/9000; {9000 - number} remaining\n</system-reminder>"
    blocks = [billing, "You are of use.", f"Be brief.\n{MARKER.format(number)}\n{reminder}"]
    return {
        "model": "tiny",
        "max_tokens": 9,
        "system": [{"type": "text", "text": text} for text in blocks],
        "messages": messages,
        "metadata": {"user_id": "user_1_account__session_2"},
    }


def test_what_a_client_counts_in_its_prompt_is_left_out_of_it_and_of_the_router_s_keys(server, client, replica):
    before, _ = prompt_for(client, replica, **body_of_turn(1))
    prompt, headers = prompt_for(client, replica, **body_of_turn(2))
    assert headers["x-maitred-left-out"] == "billing-header, token-budget"
    assert prompt.startswith(before.removesuffix("<user>Go.<assistant>"))
    assert prompt.startswith("<system>You are of use.\nBe brief.<user>Do it.<assistant>")
    assert not any(left in prompt for left in ("cch", "tokens left", "remaining"))
    quoted = [{"role": "user", "content": f"What is {MARKER.format(5)}?"}]
    prompt, headers = prompt_for(client, replica, messages=quoted)
    assert ("5 tokens left" in prompt, "x-maitred-left-out" in headers) == (True, False)
    earlier, later = (read_asked(MESSAGES, json.dumps(body_of_turn(number)).encode()) for number in (1, 2))
    kept = len(prefix_keys(earlier).keys) - 1  # but for the last message
    assert prefix_keys(later).keys[:kept] == prefix_keys(earlier).keys[:kept]
    assert (kept > 3, later.user, later.max_tokens) == (True, "user_1_account__session_2", 9)
    other = {**body_of_turn(2), "system": "Another."}
    assert prefix_keys(read_asked(MESSAGES, json.dumps(other).encode())).keys[0] != prefix_keys(later).keys[0]


def test_a_stream_is_told_block_by_block_and_makes_the_whole_answer(client, replica):
    replica.answer = says(THOUGHT)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": HI, "tools": [WEATHER]}
    asked |= {"extra_headers": {"x-request-id": "same"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = client.messages.create(**asked)
    events = list(client.messages.create(**asked, stream=True))
    with client.messages.stream(**asked) as stream:
        made = stream.get_final_message()
    assert [block.to_dict(exclude_unset=False) | {"parsed_output": None} for block in made.content] == [
        block.to_dict(exclude_unset=False) | {"parsed_output": None} for block in whole.content
    ]
    assert (made.usage, made.stop_reason, made.id) == (whole.usage, whole.stop_reason, "msg_same")
    thought, text, call = whole.content
    assert (thought.thinking, bool(thought.signature), text.text) == ("hm", True, "I look.")
    assert (call.name, call.input, whole.stop_reason) == ("weather", {"city": "Rome"}, "tool_use")
    used, prompt = whole.usage, replica.submitted[-1]
    assert (used.cache_read_input_tokens, used.input_tokens) == (4, prompt.num_prompt_tokens - 4)
    assert (used.output_tokens, used.output_tokens_details.thinking_tokens) == (
        len(THOUGHT) + 1,
        len("<think>\nhm\n</think>"),
    )
    assert prompt.thinking.num_tokens == 1024
    kinds = [event.type.removeprefix("content_block_") for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[0].message.usage.input_tokens == used.input_tokens
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    blocks = [(event.type[14:], event.index) for event in events if event.type.endswith(("block_start", "block_stop"))]
    assert blocks == [(what, index) for index in range(3) for what in ("start", "stop")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop_sequences": ["look"]}, ("stop_sequence", "look")),
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"max_tokens": 0}, ("max_tokens", None)),
        ({"max_tokens": 9_999}, ("end_turn", None)),
    ],
)
def test_the_end_has_its_reason(client, replica, fields, reason):
    replica.answer = says("I look.")
    message = client.messages.create(**{"model": "tiny", "max_tokens": 50, "messages": HI, **fields})
    assert (message.stop_reason, message.stop_sequence) == reason
    assert (not message.content) == (fields.get("max_tokens") == 0)


def test_more_tokens_than_the_context_has_are_cut_and_a_cut_call_keeps_its_text(client, replica):
    replica.answer = says("a" * 3000)
    message = client.messages.create(model="tiny", max_tokens=9999, messages=HI, timeout=HANGS_S)
    assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", 2048 - 20)
    replica.answer = says(CALL)
    cut = client.messages.create(model="tiny", max_tokens=60, messages=HI, tools=[WEATHER])
    assert (cut.stop_reason, cut.content[0].input) == ("max_tokens", {"INVALID_JSON": '{"city": "Rome"'})


def test_choices_of_tools_and_schemas_bind_the_answer(client, replica):
    replica.answer = says(CALL)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": HI, "tools": [WEATHER, SEARCH]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "auto"}, {"type": "none"}):
        told = client.messages.create(**asked, tool_choice=choice | {"disable_parallel_tool_use": True})
        is_called = choice["type"] != "none"
        assert [block.type for block in told.content] == (["tool_use"] if is_called else ["text"])
        assert ("weather" in replica.submitted[-1].grammar) == is_called
    form = {"type": "json_schema", "schema": CITY}
    client.messages.create(model="tiny", max_tokens=99, messages=HI, output_config={"format": form, "effort": "max"})
    assert "city" in replica.submitted[-1].grammar


@pytest.mark.parametrize(
    ("fields", "status", "kind", "says"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"messages": [{"content": "hi"}]}, 400, "invalid_request_error", "messages[0].role is missing"),
        ({"model": "nope"}, 404, "not_found_error", "nope"),
        ({"messages": [{"role": "user", "content": "x" * 9999}]}, 400, "invalid_request_error", "prompt is too long"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error",
         "messages[0].content[0] is not supported: it is a block of type image"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, 400, "invalid_request_error",
         "there are no tools"),
        ({"messages": [{"role": "user", "content": NESTED}]}, 400, "invalid_request_error", "nested too deeply"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, 400, "invalid_request_error",
         "output_config.format.schema cannot be compiled"),
        ({"thinking": {"type": "hard"}}, 400, "invalid_request_error", "thinking.type is 'hard'"),
        ({"tools": [{"name": "a"}]}, 400, "invalid_request_error", "tools[0].input_schema is missing"),
        ({"tools": [SEARCH, WEATHER | {"input_schema": {"type": "x"}}]}, 400, "invalid_request_error",
         "tools[1].input_schema cannot be compiled"),
        ({"tools": [WEATHER | {"name": "a b"}]}, 400, "invalid_request_error", "tools[0].name is 'a b'"),
        ({"stop_sequences": ["a"] * 99}, 400, "invalid_request_error", "stop_sequences has 99 strings"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": [1]}]}]},
         400, "invalid_request_error", "messages[0].content[0].input"),
    ],
)  # fmt: skip
def test_errors_are_anthropic_s(server, fields, status, kind, says):
    body = {"model": "tiny", "max_tokens": 5, "messages": HI, **fields}
    told = httpx.post(server.url + MESSAGES, json=body, headers={"x-api-key": "letmein"})
    assert (told.status_code, told.json()["type"], told.json()["error"]["type"]) == (status, "error", kind)
    assert says in told.json()["error"]["message"]
    assert told.json()["request_id"] == told.headers["request-id"] == told.headers["x-request-id"]


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ('"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": 1e999}}]}]', "source.type"),
        ('"messages": [], "output_config": {"format": {"type": [1e999]}}', "output_config.format.type"),
    ],
)
def test_what_no_decoder_looked_at_is_refused_when_it_is_read(server, fields, at):
    headers = {"x-api-key": "letmein", "content-type": "application/json"}
    refused = httpx.post(f"{server.url}/v1/messages", content=f'{{"max_tokens": 1, {fields}}}', headers=headers)
    assert (refused.status_code, at in refused.json()["error"]["message"]) == (400, True)


def test_a_wrong_key_an_overload_and_an_engine_that_fails_are_told_too(server):
    stranger = anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="tiny", max_tokens=5, messages=HI)
    slow = FakeReplica(held=True)
    with running_server(slow, max_concurrent_requests=1) as running:
        client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(client.messages.create, model="tiny", max_tokens=5, messages=HI)
            until(lambda: slow.live)
            with pytest.raises(anthropic.APIStatusError) as raised:
                client.messages.create(model="tiny", max_tokens=5, messages=HI)
            slow.held = False
            assert first.result().content
    assert (raised.value.status_code, raised.value.body["error"]["type"]) == (529, "overloaded_error")
    with running_server(FakeReplica(says("Hello"), fail_after=2)) as running:
        client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.APIStatusError) as raised:
            list(client.messages.create(model="tiny", max_tokens=5, messages=HI, stream=True))
    assert raised.value.body["error"]["type"] == "api_error"


def test_models_are_listed_in_pages(client, server):
    assert [model.id for model in client.models.list(limit=1)] == ["tiny", "tiny-alias"]  # one after the other
    page = client.models.list(limit=1, before_id="tiny-alias")
    assert ([model.id for model in page.data], page.has_more) == (["tiny"], False)
    assert client.models.retrieve("tiny").max_input_tokens == 2048
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("nope")
    with pytest.raises(anthropic.BadRequestError):
        client.models.list(after_id="nope")
    key = {"authorization": "Bearer letmein"}
    many = httpx.get(f"{server.url}/v1/models?{'a=1&' * 1500}", headers=key | {"anthropic-version": "2023-06-01"})
    assert len(many.json()["data"]) == 2
    plain = httpx.get(server.url + "/v1/models", headers=key)
    assert plain.json()["object"] == "list"
