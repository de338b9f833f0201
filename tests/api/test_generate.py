"""Triton's generate and generate_stream: the tokens of /v1/completions, asked for by text_input."""

from __future__ import annotations

import json
import socket
from functools import partial

import httpx
import pytest

from maitred.core.clock import ManualClock
from tests.api.test_tenants import table_of
from tests.fakes_api import EOS, FakeReplica, FakeTenants, make_model, running_server
from tests.waiting import HANGS_S, until

PROMPT = "tell \u00e9"
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 12, "stop": ["zz"], "frequency_penalty": 0.25}


def countdown(request):
    """Tokens that follow from the prompt, so that another prompt is seen."""
    return [*(65 + (token + at) % 26 for at, token in enumerate(request.prompt_token_ids)), EOS]


@pytest.fixture(scope="module")
def served():
    with running_server(FakeReplica(countdown)) as server:
        yield server


def asked(http, path, **body):
    return http.post(path, json=body)


@pytest.fixture
def ask(served):
    with httpx.Client(base_url=served.url, timeout=HANGS_S) as http:
        yield partial(asked, http)


def generate(ask, action="generate", model="tiny", **body):
    return ask(f"/v2/models/{model}/{action}", **{"text_input": PROMPT, **body})


def events(answer):
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n") if event]


@pytest.mark.parametrize("body", [
    {"sampling_parameters": SAMPLING},
    {"sampling_parameters": json.dumps(SAMPLING)},
    {"parameters": SAMPLING},
    SAMPLING,
    {"parameters": {"sampling_parameters": SAMPLING, "temperature": "1.5", "stream": False}},
    {"sampling_parameters": SAMPLING | {"temperature": "0.5", "max_tokens": "12", "top_p": "0.9"}},
])  # fmt: skip
def test_the_engine_is_asked_as_by_a_completion(served, ask, body):
    whole = ask("/v1/completions", prompt=PROMPT, **SAMPLING).json()["choices"][0]["text"]
    wanted = served.replica.submitted[-1]
    answer = generate(ask, exclude_input_in_output=True, id="mine", **body)
    told = {"model_name": "tiny", "model_version": "1", "text_output": whole, "id": "mine"}
    assert (answer.status_code, answer.json()) == (200, told)
    streamed = events(generate(ask, "generate_stream", **body)) if "parameters" not in body else []
    assert "".join(each["text_output"] for each in streamed) in ("", whole)
    for asked in served.replica.submitted[-2 if streamed else -1 :]:
        assert (asked.prompt_token_ids, asked.sampling) == (wanted.prompt_token_ids, wanted.sampling)
        assert (asked.max_tokens, asked.seed) == (wanted.max_tokens, wanted.seed)


def test_a_text_goes_before_its_continuation_unless_streamed_and_several_are_a_list(ask):
    plain = generate(ask, exclude_input_in_output=True).json()["text_output"]
    assert generate(ask).json()["text_output"] == PROMPT + plain
    assert generate(ask, exclude_input_in_output=False).json()["text_output"] == PROMPT + plain
    (once,) = events(generate(ask, "generate_stream", stream=False))
    assert once == {"model_name": "tiny", "model_version": "1", "text_output": PROMPT + plain}
    pieces = events(generate(ask, "generate_stream"))
    assert "".join(each["text_output"] for each in pieces) == plain
    assert len(pieces) > 2
    answer = generate(ask, model="tiny/versions/1", exclude_input_in_output=True, parameters={"n": 2}).json()
    first, second = answer["text_output"]
    assert first == second
    pieces = events(generate(ask, "generate_stream", parameters={"n": 2}))
    assert ["".join(each["text_output"][at] for each in pieces) for at in range(2)] == [first, second]


@pytest.mark.parametrize(("path", "body", "status", "says"), [
    ("tiny/generate", {"stream": True}, 400, "ask generate_stream"),
    ("tiny/generate_stream", {"stream": True, "exclude_input_in_output": False}, 400, "exclude_input_in_output"),
    ("tiny/generate", {"text_input": ["a"]}, 400, "text_input"),
    ("tiny/generate", {"text_input": None}, 400, "text_input"),
    ("tiny/generate", {"stream": "yes"}, 400, "stream"),
    ("tiny/generate", {"parameters": {"temprature": 1}}, 400, "temperature"),
    ("tiny/generate", {"temprature": 1}, 400, "temperature"),
    ("tiny/generate", {"sampling_parameters": {"stream": True}}, 400, "beside sampling_parameters"),
    ("tiny/generate", {"sampling_parameters": {"prompt": "a"}}, 400, "text_input"),
    ("tiny/generate", {"sampling_parameters": {"logprobs": 1}}, 400, "text_output alone"),
    ("tiny/generate", {"sampling_parameters": {"use_beam_search": True}}, 400, "use_beam_search"),
    ("tiny/generate", {"sampling_parameters": {"temperature": "hot"}}, 400, "temperature is 'hot'"),
    ("tiny/generate", {"sampling_parameters": {"temperature": 9}}, 400, "temperature is 9"),
    ("tiny/generate", {"sampling_parameters": "{"}, 400, "sampling_parameters is no object"),
    ("tiny/generate", {"sampling_parameters": 3}, 400, "sampling_parameters"),
    ("tiny/generate", {"parameters": []}, 400, "parameters"),
    ("other/generate", {}, 404, "other"),
    ("tiny/versions/2/generate", {}, 404, "version 1"),
    ("tiny/infer", {}, 404, "generate_stream"),
])  # fmt: skip
def test_what_the_client_does_wrong_is_one_text(ask, path, body, status, says):
    answer = ask(f"/v2/models/{path}", **{"text_input": PROMPT, **body})
    assert answer.status_code == status
    assert says in answer.json()["error"]
    assert list(answer.json()) == ["error"]


def test_a_body_need_not_say_that_it_is_json_and_a_fault_within_a_stream_is_its_last_event(served):
    content = json.dumps({"text_input": PROMPT}).encode()
    path, form = f"{served.url}/v2/models/tiny/generate", {"content-type": "application/x-www-form-urlencoded"}
    assert httpx.post(path, content=content, headers=form).status_code == 200
    assert httpx.post(path, content=content, headers=form | {"origin": "http://evil"}).status_code == 415
    assert httpx.post(path, content=b"{", headers=form).json()["error"].startswith("the body is not valid JSON")
    with running_server(FakeReplica(fail_after=3)) as server:
        answer = httpx.post(f"{server.url}/v2/models/tiny/generate_stream", json={"text_input": "a"})
        *_, last = events(answer)
        assert (answer.status_code, list(last)) == (200, ["error"])


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
def test_a_client_that_leaves_frees_its_place(action):
    replica = FakeReplica(lambda request: [ord("x")] * 10_000, token_s=0.01)
    with running_server(replica, make_model(max_model_len=20_000)) as server:
        body = b'{"text_input": "a", "parameters": {"max_tokens": 9000}}'
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANGS_S) as connection:
            head = f"POST /v2/models/tiny/{action} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            until(lambda: replica.live)
        until(lambda: replica.aborted and not replica.live)


def test_keys_limits_and_the_result_cache_hold_here_too():
    table = table_of({"one": {"requests_per_minute": 1}, "boss": {}})
    with running_server(tenants=FakeTenants(table), clock=ManualClock(1000.0)) as server:
        path, body = f"{server.url}/v2/models/tiny/generate", {"text_input": "a"}
        answers = [httpx.post(path, json=body, headers=key) for key in ({}, *[{"authorization": "Bearer one"}] * 2)]
        assert [answer.status_code for answer in answers] == [401, 200, 429]
        assert all(list(answer.json()) == ["error"] for answer in (answers[0], answers[2]))
        assert server.replica.submitted[-1].terms.tenant == "one"
        assert "maitred_tenant_" in httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer boss"}).text
    with running_server(FakeReplica(), result_cache_bytes=1 << 20) as server:
        path = f"{server.url}/v2/models/tiny/generate_stream"
        body = {"text_input": "a", "parameters": {"temperature": 0}}
        first, second = (httpx.post(path, json=body) for _ in range(2))
        assert [each.headers["x-maitred-cache"] for each in (first, second)] == ["miss", "hit"]
        assert (first.text, len(server.replica.submitted)) == (second.text, 1)
