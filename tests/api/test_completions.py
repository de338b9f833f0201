"""Text completions through OpenAI's client, echo and scoring by hand."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import msgspec
import pytest

from maitred.api.dialects.openai.answers import (
    PACKED,
    CompletionLogprobsWriter,
    TokenNames,
    chat_logprobs,
    named_prompt_logprobs,
    packed_chat_logprobs,
)
from maitred.api.http.app import KeptLogprobs
from maitred.core.errors import InvalidRequest, Overloaded
from maitred.core.step import TokenLogprobs
from tests.api.conftest import MESSAGES
from tests.api.test_chat import events_of
from tests.fakes_api import EOS, FakeReplica, make_model, running_server, says
from tests.waiting import HANGS_S, until


def complete(http: httpx.Client, **fields: Any) -> Any:
    response = http.post("/v1/completions", json={"model": "tiny", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(http: httpx.Client, **fields: Any) -> dict[int, dict[str, Any]]:
    """What a stream adds up to, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    response = http.post("/v1/completions", json={"model": "tiny", "stream": True, **fields})
    assert response.status_code == 200, response.text
    for event in events_of(response.text):
        for choice in event["choices"]:
            total = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            total["text"] += choice["text"]
            total["finish_reason"] = choice["finish_reason"] or total["finish_reason"]
            if choice["logprobs"]:
                lists = total["logprobs"] or {name: [] for name in choice["logprobs"]}
                total["logprobs"] = {name: lists[name] + choice["logprobs"][name] for name in lists}
    return choices


def test_the_default_is_sixteen_tokens(http, served):
    complete(http, prompt="ab")
    assert served.replica.submitted[-1].max_tokens == 16
    complete(http, prompt="a" * 505)
    assert served.replica.submitted[-1].max_tokens == 7, "a default makes no prompt too long"


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("ab", 1), (["ab"], 1), (["ab", "c"], 2), ([97, 98], 1), ([[97, 98], [99]], 2)]
)
def test_each_form_of_prompt_is_taken(client, prompt, prompts):
    answer = client.completions.create(model="tiny", prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * prompts))
    assert {choice.text for choice in answer.choices} == {"Hello, world!"}
    assert answer.usage.prompt_tokens == (2 if prompts == 1 else 3)


def test_prompts_times_n_come_prompt_major():
    by_prompt_and_sample = FakeReplica(lambda r: [r.prompt_token_ids[0], ord("0") + r.sample_index, EOS])
    with running_server(by_prompt_and_sample) as server, httpx.Client(base_url=server.url) as http:
        whole = [c["text"] for c in complete(http, prompt=["a", "b"], n=2)["choices"]]
        stream = streamed(http, prompt=["a", "b"], n=2)
    assert (whole, [stream[index]["text"] for index in range(4)]) == (["a0", "a1", "b0", "b1"], whole)


def test_logprobs_are_parallel_lists_and_zero_reports_the_chosen_token(client):
    logprobs = client.completions.create(model="tiny", prompt="ab", logprobs=2, max_tokens=2).choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["H", "e"], [0, 1])
    assert logprobs.token_logprobs == [-1.5, -1.5]
    assert logprobs.top_logprobs == [{"Z": -0.5, "H": -1.5}, {"Z": -0.5, "e": -1.5}]
    logprobs = client.completions.create(model="tiny", prompt="ab", logprobs=0, max_tokens=1).choices[0].logprobs
    assert logprobs.top_logprobs == [{"H": -1.5}]


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_echo_repeats_the_prompt(client, prompt):
    assert client.completions.create(model="tiny", prompt=prompt, echo=True).choices[0].text == "abHello, world!"


def test_an_echo_with_logprobs_covers_the_prompt_and_scoring_generates_nothing(http, served):
    choice = complete(http, prompt="ab", echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert choice["text"] == "abHe"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "H", "e"],
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [None, -1.5, -1.5, -1.5],
        "top_logprobs": [None, {"Z": -0.5, "b": -1.5}, {"Z": -0.5, "H": -1.5}, {"Z": -0.5, "e": -1.5}],
    }
    answer = complete(http, prompt="abc", echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("fields", [
    {}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 2}, {"echo": True, "logprobs": 2, "n": 3},
    {"echo": True, "logprobs": 0, "max_tokens": 0}, {"stop": "wor"},
    {"prompt": ["ab", "cd"], "n": 2, "logprobs": 1},
])  # fmt: skip
def test_a_stream_adds_up_to_the_whole_answer(http, fields):
    fields = {"prompt": "ab", **fields}
    whole = complete(http, **fields)["choices"]
    stream = streamed(http, **fields)
    for choice in whole:
        expected = {name: choice[name] for name in ("text", "logprobs", "finish_reason")}
        assert stream[choice["index"]] == expected


def test_offsets_count_characters_when_tokens_are_bytes():
    with running_server(FakeReplica(says("é!"))) as server, httpx.Client(base_url=server.url) as http:
        logprobs = complete(http, prompt="ü", echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xbc", "bytes:\\xc3", "bytes:\\xa9", "!", "</s>"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3]


def test_token_ids_prompt_logprobs_and_usage_are_told_when_asked(http, served):
    complete(http, prompt="ab", add_special_tokens=False, return_token_ids=True)
    assert list(served.replica.submitted[-1].prompt_token_ids) == [97, 98]
    choice = complete(http, prompt="ab", return_token_ids=True, prompt_logprobs=0, max_tokens=1)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [72])
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"}}]
    assert len(complete(http, prompt="ab", n=2, best_of=2)["choices"]) == 2
    body = {"model": "tiny", "prompt": "ab", "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(http.post("/v1/completions", json=body).text)
    assert (events[-1]["choices"], events[-1]["usage"]["prompt_tokens"]) == ([], 2)
    assert all(event["usage"] is None for event in events[:-1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_with_many_log_probabilities_is_written_beside_the_event_loop(http, monkeypatch, path):
    sent = {"prompt": "ab"} if path == "/v1/completions" else {"messages": MESSAGES}
    fields = {"model": "tiny", **sent, "prompt_logprobs": 2, "n": 2, "request_id": "same"}
    writers = []

    def noted(*words):
        writers.append(threading.current_thread().name)
        return named_prompt_logprobs(*words)

    route = "completions" if path == "/v1/completions" else "chat"
    monkeypatch.setattr(f"maitred.api.dialects.openai.{route}.named_prompt_logprobs", noted)
    few = http.post(path, json=fields).json()
    monkeypatch.setattr("maitred.api.generate.complete.MANY_LOGPROBS", 1)
    many = http.post(path, json=fields).json()
    assert many["choices"] == few["choices"]
    assert many.get("prompt_logprobs") == few.get("prompt_logprobs")
    half = len(writers) // 2
    assert half > 0
    assert not any(name.startswith("maitred-long-text") for name in writers[:half])
    assert all(name.startswith("maitred-long-text") for name in writers[half:])


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_TOKENS = 100


def positions(num: int, num_top: int = 2) -> list[TokenLogprobs]:
    """Whole characters and halves of them."""
    return [
        TokenLogprobs(
            token_ids=tuple((97 + 7 * at + 31 * rank) % 256 for rank in range(num_top + 1)),
            logprobs=tuple(-0.25 * rank for rank in range(num_top + 1)),
            ranks=tuple(range(num_top + 1)),
        )
        for at in range(num)
    ]


@pytest.mark.parametrize("num", [0, 1, PACKED, 2 * PACKED + 1])
def test_written_piece_by_piece_log_probabilities_are_the_same(num):
    tokenizer = make_model().tokenizer
    names = TokenNames(tokenizer, as_ids=False)

    def writer() -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(tokenizer, names, 2, skip_special_tokens=True, context=())

    known = positions(num)
    encode = msgspec.json.encode
    assert encode(packed_chat_logprobs(known, names, 2)) == encode(chat_logprobs(known, names, 2))
    assert encode(writer().packed_output(known)) == encode(writer().output(known))


@pytest.mark.parametrize(("path", "fields"), [
    (TEXT, {"prompt": "ab", "logprobs": 20, "n": 2}),
    (TEXT, {"prompt": ["ab", "cd"], "logprobs": 20}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 2}),
])  # fmt: skip
def test_an_answer_with_more_log_probabilities_than_are_kept_ends_unless_it_is_streamed(monkeypatch, path, fields):
    limit = 2000 * NUM_TOKENS  # one sample has less, two have more
    monkeypatch.setattr("maitred.api.http.app.MAX_KEPT_BYTES", limit)
    replica = FakeReplica(answer=lambda request: [ord("x")] * 400)
    body = {"model": "tiny", "max_tokens": NUM_TOKENS, **fields}
    with running_server(replica) as server, httpx.Client(base_url=server.url, timeout=HANGS_S) as http:
        error = http.post(path, json=body).json()["error"]
        assert (error["code"], error["param"]) == ("answer_too_large", "logprobs")
        assert str(limit) in error["message"]
        assert "stream: true" in error["message"]
        assert not replica.live
        until(lambda: server.server.app.kept_logprobs.num_bytes == 0)
        streamed = http.post(path, json={**body, "stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")
        assert streamed.count('"finish_reason":"length"') == 2
        alone = {name: value for name, value in body.items() if name != "n"} | {"max_tokens": NUM_TOKENS // 2}
        assert http.post(path, json=alone).status_code == 200
        until(lambda: server.server.app.kept_logprobs.num_bytes == 0)


def test_all_answers_together_keep_only_so_much_and_who_keeps_little_goes_on(monkeypatch):
    monkeypatch.setattr("maitred.api.http.app.MAX_KEPT_BYTES_IN_ALL", 100_000)
    monkeypatch.setattr("maitred.api.http.app.MAX_UNREAD_BYTES", 30_000)
    keeping = KeptLogprobs()
    with keeping.answer() as first:
        first(positions(200))
        held = keeping.num_bytes
        assert held == 200 * (256 + 3 * 72)
        with keeping.answer() as second:
            second(positions(30))
            assert held < keeping.num_bytes
            with pytest.raises(Overloaded, match="over 100000 bytes of memory, 37760 of them for this one"):
                second(positions(50))
        assert keeping.num_bytes == held
    assert keeping.num_bytes == 0


def test_one_answer_keeps_only_so_much(monkeypatch):
    monkeypatch.setattr("maitred.api.http.app.MAX_KEPT_BYTES", 3 * (256 + 3 * 72))
    with KeptLogprobs().answer() as keep:
        keep(positions(3))
        with pytest.raises(InvalidRequest, match="over 1416 bytes"):
            keep(positions(1))
