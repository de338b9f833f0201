"""Ollama's client asks, and is answered in its own way: chats, prompts, tools, thoughts, shapes and what models can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import ollama
import pytest

from maitred.engine.model_facts import Footprint
from maitred.fleet.prefix_keys import keep_alive_s, prefix_keys, read_asked
from tests.api.test_tools import CALL, SCHEMA, TEMPLATE, WEATHER, prompt_of
from tests.fakes_api import FakeReplica, make_model, running_server, says
from tests.waiting import HANGS_S

HI = [{"role": "user", "content": "hi"}]
HELD = Footprint(
    architecture="LlamaForCausalLM", num_parameters=1_500_000_000, executor="native", device="cpu", dtype="int8",
    kv_dtype="bfloat16", weights_bytes=3000, kv_bytes=500,
)  # fmt: skip
Serving = Callable[[str], FakeReplica]


@pytest.fixture(scope="module")
def url() -> Iterator[tuple[str, FakeReplica]]:
    replica = FakeReplica()
    with running_server(replica, replace(make_model(chat_template=TEMPLATE), footprint=HELD, revision="r1")) as server:
        yield server.url, replica


@pytest.fixture
def asked(url: tuple[str, FakeReplica]) -> FakeReplica:
    url[1].submitted.clear()
    url[1].answer = says("Hello, world!")
    return url[1]


@pytest.fixture(scope="module")
def client(url: tuple[str, FakeReplica]) -> ollama.Client:
    return ollama.Client(url[0], timeout=HANGS_S)


@pytest.fixture(scope="module")
def http(url: tuple[str, FakeReplica]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url[0], timeout=HANGS_S) as client:
        yield client


def test_a_chat_is_answered_whole_and_line_by_line_with_true_counts(client, asked):
    whole = client.chat("tiny:latest", HI, options={"num_predict": 5, "temperature": 0.5, "seed": 3, "stop": ["q"]})
    assert (whole.message.content, whole.done, whole.done_reason) == ("Hello", True, "length")
    assert (whole.model, whole.eval_count, whole.prompt_eval_count) == ("tiny:latest", 5, len(prompt_of_last(asked)))
    sampling = asked.submitted[-1].sampling
    assert (sampling.temperature, sampling.stop, asked.submitted[-1].seed) == (0.5, ("q",), 3)
    *parts, last = client.chat("tiny", HI, stream=True, options={"num_predict": -1, "seed": -1})
    assert "".join(part.message.content for part in parts) == "Hello, world!"
    assert not any(part.done for part in parts)
    assert (last.message.content, last.done_reason, last.eval_count) == ("", "stop", 14)


def prompt_of_last(replica: FakeReplica) -> tuple[int, ...]:
    return replica.submitted[-1].prompt_token_ids


def test_a_stream_is_lines_and_an_error_in_it_is_one_too(http):
    answer = http.post("/api/chat", content=json.dumps({"model": "tiny", "messages": HI}))  # as curl sends it
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len({line["created_at"] for line in lines}) == 1
    with running_server(FakeReplica(fail_after=2)) as server, pytest.raises(ollama.ResponseError, match="NaN"):
        list(ollama.Client(server.url).chat("tiny", HI, stream=True))


def test_a_tool_is_called_with_an_object_and_its_result_comes_back_without_ids(client, asked):
    asked.answer = says("I look.\n" + CALL)
    whole = client.chat("tiny", HI, tools=[WEATHER])
    *_, called, last = client.chat("tiny", HI, tools=[WEATHER], stream=True)
    for message in (whole.message, called.message):
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    assert (whole.message.content, whole.done_reason, last.done_reason) == ("I look.", "stop", "stop")
    asked.answer = says("Sun.")
    said = [*HI, whole.message, {"role": "tool", "tool_name": "weather", "content": "hot"}]
    assert client.chat("tiny", said, tools=[WEATHER]).message.content == "Sun."
    assert f"I look.{CALL}<tool>hot" in prompt_of(asked.submitted[-1])


def test_a_call_that_was_cut_is_text(client, asked):
    asked.answer = says(CALL)
    whole = client.chat("tiny", HI, tools=[WEATHER], options={"num_predict": 55})
    assert (whole.message.tool_calls, whole.done_reason) == (None, "length")
    assert whole.message.content.startswith('{"name": "weather", "arguments": {"ci')


def test_thoughts_have_their_field_and_are_asked_for(client, asked, http):
    asked.answer = says("Hm.\n</think>\n\nYes.")
    whole = client.chat("tiny", HI, think=True)
    assert (whole.message.thinking.strip(), whole.message.content) == ("Hm.", "Yes.")
    assert prompt_of(asked.submitted[-1]).endswith("<assistant><think>\n")
    parts = list(client.generate("tiny", "hi", think="low", stream=True))
    assert "".join(part.thinking or "" for part in parts).strip() == "Hm."
    client.chat("tiny", HI, think=False)
    assert prompt_of(asked.submitted[-1]).endswith("<assistant>")
    with running_server() as server, pytest.raises(ollama.ResponseError, match="does not support thinking"):
        ollama.Client(server.url).chat("tiny", HI, think=True)
    assert "one of low, medium" in http.post("/api/chat", json={"messages": HI, "think": "much"}).json()["error"]


def test_a_format_binds_the_answer(client, asked):
    client.chat("tiny", HI, format=SCHEMA)
    assert "zip" in asked.submitted[-1].grammar
    client.generate("tiny", "hi", format="json", raw=True)
    assert asked.submitted[-1].grammar
    with pytest.raises(ollama.ResponseError, match="format cannot be compiled"):
        client.chat("tiny", HI, format={"type": "objekt"})


def test_a_prompt_is_one_message_or_the_text_itself_and_its_context_goes_on(client, asked):
    first = client.generate("tiny", "hi", system="Be brief.", logprobs=True, top_logprobs=1)
    assert (first.response, first.logprobs[0].token) == ("Hello, world!", "H")
    assert prompt_of(asked.submitted[-1]) == "<system>Be brief.<user>hi<assistant>"
    assert first.context == [*prompt_of_last(asked), *b"Hello, world!", 256]
    *_, last = client.generate("tiny", "more", context=first.context, stream=True)
    assert list(prompt_of_last(asked)[: len(first.context)]) == list(first.context)
    assert last.context == [*prompt_of_last(asked), *b"Hello, world!", 256]
    assert client.generate("tiny", "hi", raw=True).context is None
    assert bytes(prompt_of_last(asked)) == b"hi"


def test_an_empty_prompt_loads_and_more_tokens_than_there_is_room_for_are_cut(client, asked):
    assert client.generate("tiny").done_reason == client.chat("tiny").done_reason == "load"
    assert not asked.submitted
    client.generate("tiny", "hi", options={"num_predict": 9000, "num_ctx": 64})
    assert asked.submitted[-1].max_tokens == 512 - len(prompt_of_last(asked))


@pytest.mark.parametrize(("path", "sent", "told"), [
    ("chat", {"messages": [{**HI[0], "images": ["aaaa"]}]}, "messages[0].images is not supported"),
    ("generate", {"prompt": "hi", "images": ["aaaa"]}, "images is not supported"),
    ("generate", {"prompt": "hi", "suffix": "there"}, "suffix is not supported"),
    ("generate", {"prompt": "hi", "template": "{{ .Prompt }}"}, "--chat-template"),
    ("generate", {"prompt": "hi", "raw": True, "system": "x"}, "leave system and context out"),
    ("chat", {"messages": HI, "options": {"typical_p": 0.5}}, "options.typical_p is not supported"),
    ("chat", {"messages": HI, "options": {"num_predict": 0}}, "options.num_predict is 0"),
    ("generate", {"prompt": "hi", "options": {"temperature": -1}}, "options.temperature is -1"),
    ("chat", {"messages": HI, "options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0"),
    ("chat", {"messages": HI, "format": {"type": 3}}, "format cannot be compiled"),
    ("generate", {"prompt": "hi" * 900}, "prompt has"),
    ("chat", {"messages": HI, "keep_alive": "5 minutes"}, "keep_alive is '5 minutes'; it must be a number of seconds"),
    ("chat", {"messages": HI, "format": "yaml"}, 'format must be "json"'),
    ("pull", {"model": "llama3"}, "maitred serve"),
    ("create", {"model": "mine", "from": "tiny"}, "maitred serve"),
    ("show", {}, "model is required"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(http, path: str, sent: dict[str, Any], told: str):
    answer = http.post(f"/api/{path}", json=sent)
    assert 400 <= answer.status_code < 500
    assert told in answer.json()["error"]


def test_what_has_no_effect_is_named(http, asked):
    options = {"num_gpu": 1, "repeat_last_n": 3, "num_ctx": 100_000, "num_keep": None}
    body = {"messages": HI, "options": options, "keep_alive": "0s", "truncate": True}
    told = http.post("/api/chat", json=body).headers["x-maitred-ignored-fields"]
    assert told == "truncate, options.num_gpu, options.repeat_last_n, options.num_ctx, keep_alive"
    assert "x-maitred-ignored-fields" not in http.post("/api/chat", json={"messages": HI, "keep_alive": "5m"}).headers


def test_whole_answers_and_streams_are_kept_and_replayed_but_not_those_that_could_not_go_on():
    body = {"model": "tiny", "messages": HI, "options": {"temperature": 0}}
    with running_server(result_cache_bytes=100_000) as server, httpx.Client(base_url=server.url) as http:
        for stream in (True, False):
            first, again = [http.post("/api/chat", json={**body, "stream": stream}) for _ in range(2)]
            assert [each.headers["x-maitred-cache"] for each in (first, again)] == ["miss", "hit"]
            assert (first.content, first.headers["content-type"]) == (again.content, again.headers["content-type"])
    with running_server(FakeReplica(fail_after=2), result_cache_bytes=100_000) as server:
        told = [httpx.post(f"{server.url}/api/chat", json=body).headers["x-maitred-cache"] for _ in range(2)]
    assert told == ["miss", "miss"]


def test_models_are_listed_and_shown_with_what_they_can(client, http):
    assert [model.model for model in client.list().models] == ["tiny", "tiny-alias"]
    (running,) = client.ps().models
    assert (running.model, running.size, running.size_vram, running.context_length) == ("tiny", 3500, 0, 512)
    assert running.expires_at.year > 2300
    shown = client.show("tiny:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert (shown.details.family, shown.details.parameter_size) == ("llama", "1.5B")
    assert (shown.modelinfo["general.architecture"], shown.modelinfo["llama.context_length"]) == ("llama", 512)
    assert (shown.template, shown.details.quantization_level) == (TEMPLATE, "INT8")
    with pytest.raises(ollama.ResponseError) as missing:
        client.show("nope")
    assert missing.value.status_code == 404
    assert [part.status for part in client.pull("tiny-alias:latest", stream=True)] == ["success"]
    assert client.pull("tiny").status == "success"
    assert http.delete("/api/delete").status_code == 400
    assert http.head("/api/version").status_code == 200
    with running_server() as server:
        assert ollama.Client(server.url).show("tiny").capabilities == ["completion"]


def test_a_router_reads_the_same_prompt_of_a_chat_and_of_a_prompt():
    said = [{"role": "system", "content": "Be brief."}, *HI]
    chat = json.dumps(
        {"model": "tiny", "messages": said, "options": {"num_predict": 7, "seed": 3}}, separators=(",", ":")
    )
    prompt = json.dumps({"model": "tiny", "prompt": "hi", "system": "Be brief.", "stream": False})
    read, other = read_asked("/api/chat", chat.encode()), read_asked("/api/generate", prompt.encode())
    assert (read.stream, read.max_tokens, read.seed, other.stream) == (True, 7, 3, False)
    assert prefix_keys(read) == prefix_keys(other)
    assert prefix_keys(read).keys


@pytest.mark.parametrize(("sent", "seconds"), [
    (300, 300), (0, 0), (-1, -1), ("0", 0), ("0s", 0), ("5m", 300), ("1h2m3.5s", 3723.5), ("-1m", -60), ("1500ms", 1.5),
    (None, None), ("", None), ("-", None), ("5", None), ("m", None), ("5 m", None), ("5m!", None), ("1" * 9999, None),
])  # fmt: skip
def test_a_keep_alive_is_seconds_or_a_duration_as_go_writes_it(sent: float | str | None, seconds: float | None):
    assert keep_alive_s(sent) == seconds
