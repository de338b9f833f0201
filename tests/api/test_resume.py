"""Streams that one replica began and another goes on with: whatever was told by then, the client has the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from maitred.fleet.told import FRAME, SEED, TELL, ToldTokens
from tests.conftest import ServerProcess, start_server
from tests.waiting import HANGS_S

TOKEN = "0123456789abcdef0123456789abcdef"
ROUTER = {"x-maitred-fleet-token": TOKEN, TELL.decode(): "1", "content-type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAYS = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    token = tmp_path_factory.mktemp("fleet") / "token"
    token.write_text(TOKEN + "\n")
    server: ServerProcess = start_server("--fleet-token-file", str(token))
    with httpx.Client(base_url=server.url, timeout=HANGS_S) as client:
        yield client
    server.stop()


def told_stream(replica: httpx.Client, path: str, body: bytes) -> bytes:
    answer = replica.post(path, content=body, headers=ROUTER)
    assert answer.status_code == 200, answer.text
    return answer.content


def writes(told: bytes) -> list[bytes]:
    """A stream cut before each of its frames."""
    begins = []
    at = told.find(FRAME)
    while at >= 0:
        begins.append(at)
        at = told.find(FRAME, at + 1)
    begins[0] = 0  # the head comes with the first
    return [told[begin:end] for begin, end in zip(begins, [*begins[1:], len(told)], strict=True)]


def resumed(replica: httpx.Client, path: str, body: bytes, told: ToldTokens) -> bytes:
    answer = replica.post("/fleet/resume", content=told.resume_body(path, body, age_s=1.0, ttft_s=0.5), headers=ROUTER)
    assert answer.status_code == 200, answer.text
    return answer.content


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"temperature": 0}),
    "a seed, drawn by the server": (CHAT, {"temperature": 1.0}),
    "samples": (CHAT, {"n": 3, "seed": 5, "logprobs": True, "top_logprobs": 2}),
    "penalties": (CHAT, {"seed": 7, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
    "usage in every chunk": (
        CHAT,
        {"n": 2, "seed": 1, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "a stop string": (CHAT, {"temperature": 0, "stop": ["sea", "ship", "e t"], "min_tokens": 2}),
    "ids": (TEXT, {"prompt": "Once upon", "seed": 3, "return_token_ids": True, "logprobs": 1}),
    "an echo": (TEXT, {"prompt": "The old man", "seed": 2, "echo": True, "n": 2}),
    "an echo with logprobs": (TEXT, {"prompt": "The old man", "seed": 2, "echo": True, "logprobs": 2, "n": 2}),
    "prompts": (TEXT, {"prompt": ["One", "Two little"], "n": 2, "temperature": 1.0, "logprobs": 0}),
    "bytes of characters": (TEXT, {"prompt": "é", "seed": 9, "temperature": 2.0, "logprobs": 1}),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_stream_goes_on_from_wherever_it_broke_off(replica, name):
    path, fields = ASKED[name]
    said = {} if path == TEXT else {"messages": SAYS}
    body = json.dumps({"stream": True, "max_tokens": 10, "stream_options": {"include_usage": True}, **said, **fields})
    told_stream(replica, path, body.encode())  # what is cached from now on stays so
    pieces = writes(told_stream(replica, path, body.encode()))
    everything = ToldTokens()
    undisturbed = client_has(everything.feed(b"".join(pieces)))
    for num_told in range(1, len(pieces) + 1, 3 if len(pieces) > 12 else 2):
        told = ToldTokens()
        relayed = told.feed(b"".join(pieces[:num_told]))
        rest = ToldTokens()
        rest_of = rest.feed(resumed(replica, path, body.encode(), told)) if num_told < len(pieces) else b""
        both = client_has(relayed + rest_of)
        assert both["generated"] == sorted(both["generated"])
        assert {**both, "generated": 0} == {**undisturbed, "generated": 0}


TRITON: dict[str, dict[str, Any]] = {
    "samples": {"n": 2, "seed": 5},
    "drawn by the server": {"parameters": {"temperature": 1.0}},
    "in one piece, with its text": {"stream": False, "exclude_input_in_output": False, "seed": 3},
}


@pytest.mark.parametrize("name", TRITON)
def test_a_stream_of_tritons_generate_goes_on_from_wherever_it_broke_off(replica, name):
    path = "/v2/models/maitred-mini/generate_stream"
    body = json.dumps({"text_input": "The old man", "max_tokens": 10, **TRITON[name]}).encode()
    told_stream(replica, path, body)
    pieces = writes(told_stream(replica, path, body))
    undisturbed = texts_of(ToldTokens().feed(b"".join(pieces)))
    assert any(undisturbed)
    for num_told in range(1, len(pieces), 3):
        told = ToldTokens()
        relayed = told.feed(b"".join(pieces[:num_told]))
        rest = ToldTokens().feed(resumed(replica, path, body, told))
        assert texts_of(relayed + rest) == undisturbed


OLLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "thoughts": ("chat", {"messages": SAYS, "think": True}),
    "a prompt and its context": ("generate", {"prompt": "The sea?", "logprobs": True, "options": {"seed": 3}}),
}


@pytest.mark.parametrize("name", OLLAMA)
def test_a_stream_of_ollamas_goes_on_from_wherever_it_broke_off(replica, name):
    path, body = f"/api/{OLLAMA[name][0]}", json.dumps(OLLAMA[name][1]).encode()
    told_stream(replica, path, body)
    pieces = writes(told_stream(replica, path, body))
    undisturbed = without_durations(ToldTokens().feed(b"".join(pieces)))
    for num_told in range(1, len(pieces), 3):
        told = ToldTokens()
        relayed = told.feed(b"".join(pieces[:num_told]))
        rest = ToldTokens().feed(resumed(replica, path, body, told))
        assert without_durations(relayed + rest) == undisturbed


def without_durations(lines: bytes) -> dict[str, Any]:
    told = [json.loads(line) for line in lines.splitlines()]
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]
    says = [line.get("message", line) for line in told]
    return {
        "text": "".join(part.get("content", "") + part.get("response", "") for part in says),
        "thinking": "".join(part.get("thinking", "") for part in says),
        "tokens": [each["token"] for line in told for each in line.get("logprobs", ())],
        "times": {line["created_at"] for line in told},
        "end": {name: value for name, value in told[-1].items() if not name.endswith("_duration")},
    }


def texts_of(events: bytes) -> list[str]:
    """Of each sample all of its text."""
    told = [json.loads(line[6:])["text_output"] for line in events.split(b"\n") if line.startswith(b"data: ")]
    return ["".join(parts) for parts in zip(*([one] if isinstance(one, str) else one for one in told), strict=True)]


def test_a_large_body_and_a_resumed_stream_go_on_too(replica):
    body = json.dumps({"messages": SAYS, "stream": True, "max_tokens": 48, "seed": 4}).encode()
    body = body[:-1] + b" " * 20_000 + b"}"
    pieces = writes(told_stream(replica, CHAT, body))
    told = ToldTokens()
    relayed = told.feed(b"".join(pieces[:2]))
    rest = ToldTokens().feed(resumed(replica, CHAT, body, told))
    assert client_has(relayed + rest)["choices"] == client_has(ToldTokens().feed(b"".join(pieces)))["choices"]
    body = json.dumps({"messages": SAYS, "stream": True, "max_tokens": 12, "seed": 4, "n": 2}).encode()
    pieces = writes(told_stream(replica, CHAT, body))
    told = ToldTokens()
    undisturbed = client_has(ToldTokens().feed(b"".join(pieces)))
    relayed = told.feed(b"".join(pieces[:5]))
    while True:
        pieces = writes(resumed(replica, CHAT, body, told))
        relayed += told.feed(b"".join(pieces[:4]) + (pieces[4][:-7] if len(pieces) > 4 else b""))
        told.broke_off()
        if len(pieces) <= 4:
            break
    assert client_has(relayed)["choices"] == undisturbed["choices"]


def test_nobody_else_hears_of_tokens(replica):
    body = {"messages": SAYS, "stream": True, "max_tokens": 3}
    for headers in ({TELL.decode(): "1"}, {**ROUTER, "x-maitred-fleet-token": "another, as long as the first"}):
        assert b": " + b"tokens" not in replica.post(CHAT, json=body, headers=headers).content
    without = {name: value for name, value in ROUTER.items() if name != TELL.decode()}
    assert FRAME not in replica.post(CHAT, json=body, headers=without).content


def test_a_whole_answer_asked_again_under_the_routers_seed_is_the_same(replica):
    body = {"prompt": ["One", "Two"], "max_tokens": 8, "temperature": 1.0, "n": 2}

    def texts(**headers: str) -> list[str]:
        told = replica.post(TEXT, json=body, headers=headers).json()
        return [choice["text"] for choice in told["choices"]]

    seeded = {**ROUTER, SEED.decode(): "77"}
    assert texts(**seeded) == texts(**seeded) != texts(**{**seeded, SEED.decode(): "78"})
    unbelieved = {SEED.decode(): "77"}
    assert texts(**unbelieved) != texts(**unbelieved)
    assert replica.post(TEXT, json=body, headers={**seeded, SEED.decode(): "-1"}).status_code == 400


def test_what_cannot_be_resumed_is_told_in_words(replica):
    body = json.dumps({"messages": SAYS, "stream": True, "max_tokens": 6, "seed": 4}).encode()
    told = ToldTokens()
    told.feed(b"".join(writes(told_stream(replica, CHAT, body))[:3]))

    def asked(status: int, *, headers: dict[str, str] = ROUTER, path: str = CHAT, **fields: Any) -> str:
        sent = json.loads(told.resume_body(path, body)) | fields
        answer = replica.post("/fleet/resume", json=sent, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]["message"]

    head = json.loads(told.resume_body(CHAT, body))["head"]
    sample = {"index": 0, "token_ids": [1, 2]}
    assert "the fleet's token" in asked(403, headers={**ROUTER, "x-maitred-fleet-token": "x" * 32})
    assert "none of the paths" in asked(400, path="/v1/embeddings")
    assert "--resume" in asked(409, head={**head, "fingerprint": "another"})
    assert "only streams" in asked(400, body={"messages": SAYS, "max_tokens": 6})
    assert "seeds" in asked(400, head={**head, "seeds": []})
    assert "no sample 1" in asked(400, samples=[{**sample, "index": 1}])
    assert "twice" in asked(400, samples=[sample, sample])
    assert "none of the" in asked(400, samples=[{**sample, "token_ids": [10**6]}])
    assert "had ended" in asked(400, samples=[{**sample, "token_ids": [5] * 6}])
    assert "age_s" in asked(400, age_s=-1)


def client_has(events: bytes) -> dict[str, Any]:
    """All that a stream says, put together."""
    lines = [line[6:] for line in events.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices: dict[int, list[Any]] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    usage = [without_times(chunk.get("usage")) for chunk in chunks]
    return {
        "ids": {(chunk["id"], chunk["created"]) for chunk in chunks},
        "choices": {index: together(parts) for index, parts in choices.items()},
        "usage": usage[-1],
        "generated": [told["completion_tokens"] for told in usage if told],
    }


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    deltas = [part["delta"] for part in parts if "delta" in part]
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    return {
        "text": "".join(part.get("text", "") for part in parts) + "".join(d.get("content") or "" for d in deltas),
        "calls": calls_of(deltas),
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "logprobs": {name: [x for told in logprobs for x in told[name] or ()] for name in (logprobs or [{}])[0]},
        "token_ids": [token for part in parts for token in part.get("token_ids") or ()],
        "prompts": [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part],
        "end": (parts[-1]["finish_reason"], parts[-1].get("stop_reason")),
    }


def calls_of(deltas: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call."""
    calls: list[list[str]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls") or ()):
        if "id" in piece:
            calls.append([piece["id"], piece["function"]["name"], ""])
        calls[piece["index"]][2] += piece["function"]["arguments"]
    return [(id, name, arguments) for id, name, arguments in calls]


def without_times(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    return {name: told for name, told in usage.items() if name not in ("timing_ms", "engine_ms")} if usage else None
