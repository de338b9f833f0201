"""Bodies no client should send: always a 4xx in the usual shape, soon, and the server lives on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import string
import time
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw, UnsetType

from maitred.api.dialects.kserve.generate import GenerateRequest
from maitred.api.dialects.openai.refusals import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    MAX_LISTED,
    TOKENIZE_REFUSED,
    prompts_of,
)
from maitred.api.dialects.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from maitred.api.http.bodies import MAX_TEXTS, SMALL_BYTES, BodyDecoder, LargeBodies, decode_json, decode_small
from maitred.config import ServerConfig
from maitred.core.errors import InvalidRequest, Overloaded, RequestTooLarge
from tests.api.conftest import MESSAGES
from tests.fakes_api import FakeReplica, RunningServer, make_model, running_server
from tests.waiting import HANGS_S, until

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
HEAD = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"prompt":"hi","tokens":[1],'
BROKEN = {
    "empty": b"",
    "not_json": b"hello",
    "cut": HEAD,
    "no_object": b"[1]",
    "null": b"null",
    "nan": HEAD + b'"temperature":NaN,"model":NaN}',
    "infinity": HEAD + b'"temperature":-Infinity,"model":Infinity}',
    "deep_list": b"[" * 1_000_000,
    "deep_object": HEAD + b'"metadata":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    "deep_unknown": HEAD + b'"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep_refused": HEAD + b'"tools":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "lone_surrogate": b'{"model":"\\ud800","messages":[],"prompt":"x","tokens":[1]}',
    "surrogate_in_text": b'{"model":"tiny","messages":[{"role":"user","content":"\\udc00"}],"prompt":"\\ud83d"}',
    "not_utf8": b'{"model":"\xff\xfe"}',
    "bad_key": HEAD + b'"\xc3\x28":1, "model": 3}',
    "nul": b'{"model":"ti\x00ny"}',
    "utf16": '{"model":"tiny"}'.encode("utf-16"),
    "bom": b"\xef\xbb\xbf{}",
    "blank_of_another_kind": b"\x0b" + HEAD[:-1] + b"}",
    "endless_int": b'{"model":' + b"9" * 100_000 + b"}",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_body_is_refused(http, path, name):
    response = http.post(path, content=BROKEN[name], headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text[:300]
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.text) < 1500


@pytest.mark.parametrize("digits", [20, 400, 100_000])
@pytest.mark.parametrize("field", ["seed", "max_tokens", "n", "top_k", "min_tokens", "priority", "logit_bias"])
def test_huge_integers_are_out_of_range(http, field, digits):
    value = b"9" * digits if field != "logit_bias" else b'{"1":' + b"9" * digits + b"}"
    body = HEAD + b'"%s":%s}' % (field.encode(), value)
    for path in PATHS[:2]:
        response = http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text[:300]
        assert response.json()["error"]["param"] == field
        assert len(response.text) < 2000


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_no_object_is_told_what_it_is(http, path):
    error = http.post(path, json=[1]).json()["error"]
    assert error["message"] == "Expected `object`, got `array` as the whole body"
    assert error["param"] is None


@pytest.mark.parametrize("item", [b"1,", b"[],", b"1, "])
def test_a_prompt_of_over_a_million_items_is_refused_before_it_is_decoded(http, item):
    body = b'{"model":"tiny","prompt":[' + item * MAX_LISTED + item.rstrip(b", ") + b"]}"
    response = http.post(PATHS[1], content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_items")
    assert response.json()["error"]["param"] == "prompt"


def test_a_prompt_of_a_million_items_is_decoded_duplicate_keys_are_tolerated_and_messages_are_counted(http):
    assert prompts_of(msgspec.Raw(b"[" + b"1," * (MAX_LISTED - 1) + b"1]")) == [[1] * MAX_LISTED]
    body = b'{"model":"x","model":"tiny","prompt":"ab"}'
    assert http.post(PATHS[1], content=body, headers={"content-type": "application/json"}).status_code == 200
    body = json.dumps({"model": "tiny", "messages": MESSAGES * 50_000}).encode()
    response = http.post(PATHS[0], content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    headers = {"content-type": "application/json; charset=utf-8"}
    assert http.post(PATHS[1], content=b'{"model":"tiny","prompt":"ab"}', headers=headers).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_only_announced_json_is_taken(http, kind):
    """A page elsewhere can make a browser send these without asking; application/json needs a CORS preflight."""
    headers = {} if kind is None else {"content-type": kind}
    response = http.post(PATHS[1], content=b'{"model":"tiny","prompt":"ab"}', headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.fixture(scope="module")
def small():
    with running_server(max_body_bytes=1000) as server:
        yield server


def body_of(size: int) -> bytes:
    body = b'{"model":"tiny","prompt":"ab","user":""}'
    return body[:-2] + b"x" * (size - len(body)) + body[-2:]


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 413), (500_000, 413)])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_body_limit_holds_to_the_byte(small, size, status, chunked):
    body = body_of(size)
    assert len(body) == size
    content = (body[i : i + 333] for i in range(0, size, 333)) if chunked else body
    response = httpx.post(f"{small.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status
    if status == 413:
        assert response.json()["error"]["code"] == "request_too_large"
        assert "1000" in response.text


def test_a_declared_length_is_enough_to_refuse_and_one_byte_chunks_are_read(small):
    with socket.create_connection(("127.0.0.1", small.port), timeout=HANGS_S) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 99999999999\r\nexpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    body = body_of(900)
    response = httpx.post(
        f"{small.url}/v1/completions",
        content=(body[i : i + 1] for i in range(len(body))),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 200


MANY = MAX_TEXTS + 1
FULL = {
    "messages": b'{"model":"tiny","messages":[' + b'{"role":""},' * MANY + b'{"role":""}]}',
    "parts": b'{"model":"tiny","messages":[{"role":"user","content":[' + b'{"type":""},' * MANY + b"{}]}]}",
    "stops": b'{"model":"tiny","messages":[],"stop":[' + b'"",' * MANY + b'""]}',
    "backslashes": b'{"model":"tiny","messages":[],"stop":[' + b'"\\\\",' * 2 * MANY + b'""]}',
    "keys": b'{"model":"tiny","messages":[],' + b'"a":0,' * MANY + b'"a":0}',
}


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("path", PATHS)
def test_a_body_of_too_many_texts_is_refused_before_it_is_decoded(http, name, path):
    response = http.post(path, content=FULL[name], headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_items")
    assert f"over {MAX_TEXTS} texts" in response.json()["error"]["message"]


def test_quotes_within_a_text_open_none_and_a_long_text_is_no_list_of_items(http):
    body = {"model": "tiny", "prompt": "a", "user": '"\\",' * MANY}
    assert http.post(PATHS[1], json=body).status_code == 200
    with running_server(FakeReplica(), make_model(max_model_len=3_000_000)) as server:
        messages = [{"role": "user", "content": "a, b, " * 50_000}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        response = httpx.post(f"{server.url}{PATHS[0]}", json=body, timeout=HANGS_S)
    assert response.status_code == 200


def test_more_messages_than_the_context_has_tokens_are_refused_before_they_are_rendered():
    class Unused:
        source = ""

        def render(self, *args: object, **kwargs: object) -> str:
            raise AssertionError("it was rendered")

    with running_server(FakeReplica(), make_model(chat_template=Unused())) as server:
        body = {"model": "tiny", "messages": MESSAGES * 1025}
        response = httpx.post(f"{server.url}{PATHS[0]}", json=body, timeout=HANGS_S)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "1025" in response.json()["error"]["message"]


PROMPT = b'{"model":"tiny","prompt":'
CHAT = b'{"model":"tiny","messages":['
MESSAGE = b'{"role":"user","content":"' + b"x" * 290 + b'"}'
LIST = b"[" + b"300," * 900 + b"1]"
TOKENS = b'{"model":"tiny","tokens":['
AT_THE_LIMIT = {  # path, head, what is repeated up to the limit or so many times, tail
    "escapes": (PATHS[1], PROMPT + b'"', b"\\n", None, b'"}'),
    "one wide character": (PATHS[1], PROMPT + b'"', b"x", None, "\U0001f600".encode() + b'"}'),
    "texts": (PATHS[1], PROMPT + b"[", b'"' + b"\\n" * 3000 + b'",', 1000, b'"a"]}'),
    "empty texts": (PATHS[1], PROMPT + b"[", b'"",', None, b'""]}'),
    "escapes in chat": (PATHS[0], CHAT + b'{"role":"user","content":"', b"\\ud83d\\ude00", None, b'"}]}'),
    "token ids": (PATHS[1], PROMPT + b"[", b"1,", None, b"1]}"),
    "as many token ids as may be": (PATHS[1], PROMPT + b"[", b"300,    ", MAX_LISTED - 1, b"1]}"),
    "lists of token ids": (PATHS[1], PROMPT + b"[", LIST + b",", 1000, LIST + b"]}"),
    "lists": (PATHS[1], PROMPT + b"[", b"[],", None, b"[]]}"),
    "long token ids": (PATHS[1], PROMPT + b"[", b"9" * 4200 + b",", None, b"1]}"),
    "token ids as text": (PATHS[3], TOKENS, b"1,", None, b"1]}"),
    "messages": (PATHS[0], CHAT, MESSAGE + b",", 20_000, MESSAGE + b"]}"),
    "messages of no parts": (PATHS[0], CHAT, b'{"role":"","content":[]},', 80_000, b"{}]}"),
    "parts": (PATHS[0], CHAT + b'{"role":"user","content":[', b'{"type":"text","text":"a"},', 60_000, b"{}]}]}"),
    "stop": (PATHS[1], PROMPT + b'"a","stop":["', b"\\n", None, b'"]}'),
    "stop tokens": (PATHS[1], PROMPT + b'"a","stop_token_ids":[', b"1,", None, b"1]}"),
    "allowed tokens": (PATHS[1], PROMPT + b'"a","allowed_token_ids":[', b"1,", None, b"1]}"),
    "biases": (PATHS[1], HEAD + b'"logit_bias":{', b'"1":1,', 200_000, b'"1":1}}'),
    "metadata": (PATHS[0], HEAD + b'"metadata":{', b'"1":"",', 100_000, b'"1":""}}'),
    "variables": (PATHS[0], HEAD + b'"chat_template_kwargs":{"a":[', b"{},", None, b"{}]}}"),
    "a key": (PATHS[1], b'{"', b"\\n", None, b'":1}'),
    "digits": (PATHS[1], PROMPT + b'"a","temperature":', b"1", None, b"}"),
    "numbers in vain": (PATHS[1], PROMPT + b'"a",', b'"top_p":1e300,', 200_000, b'"top_p":2}'),
    "one unknown field": (PATHS[1], PROMPT + b'"a",', b'"x":1,', 200_000, b'"top_p":2}'),
    "quotes": (PATHS[1], PROMPT + b'"a","x":', b'""', None, b"}"),
    "spaces": (PATHS[1], b"{", b" ", None, b'"model":"tiny"}'),
    "depth": (PATHS[1], PROMPT, b"[", None, b""),
}


def body_at_the_limit(name: str) -> tuple[str, bytes]:
    """Path and body."""
    path, head, item, times, tail = AT_THE_LIMIT[name]
    body = head + item * (times or (ServerConfig().max_body_bytes - len(head) - len(tail)) // len(item)) + tail
    assert len(body) <= ServerConfig().max_body_bytes
    return path, body


@pytest.mark.parametrize("name", AT_THE_LIMIT)
def test_a_wrong_body_at_the_limit_is_refused_whatever_is_in_it(http, name):
    path, body = body_at_the_limit(name)
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text[:300]
    assert http.get("/health").status_code == 200


@pytest.fixture(scope="module")
def token_ids_s() -> float:
    """What a body full of token ids takes here and now, 60 ms on a quiet machine."""
    ids = b"[" + b"300," * (ServerConfig().max_body_bytes // 4 - 1) + b"1]"
    return processor_s(msgspec.json.Decoder(list[int]).decode, ids)


@pytest.mark.parametrize("name", AT_THE_LIMIT)
def test_whatever_is_in_a_body_decoding_it_takes_little_longer_than_as_many_token_ids(token_ids_s, name):
    path, body = body_at_the_limit(name)
    assert any(processor_s(decode_as_sent, path, body) < 2.5 * token_ids_s for _ in range(3))


def processor_s(call: Callable[..., object], *args: object) -> float:
    began = time.thread_time()
    call(*args)
    return time.thread_time() - began


CHAT_BODY = BodyDecoder(ChatCompletionRequest, CHAT_REFUSED)
TEXT_BODY = BodyDecoder(CompletionRequest, COMPLETION_REFUSED)
DECODERS: dict[str, BodyDecoder[Any]] = {
    PATHS[0]: CHAT_BODY, PATHS[1]: TEXT_BODY, PATHS[2]: BodyDecoder(TokenizeRequest, TOKENIZE_REFUSED),
    PATHS[3]: BodyDecoder(DetokenizeRequest),
}  # fmt: skip


def decode_as_sent(path: str, body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        sent = DECODERS[path].decode(body).body
        if isinstance(sent, CompletionRequest):
            prompts_of(sent.prompt)


def test_a_flood_of_fields_that_nobody_knows_is_decoded_as_soon_and_one_is_named(token_ids_s):
    flood = PROMPT + b'"a",' + b",".join(b'"k%d":1' % i for i in range(250_000)) + b',"typical_p":0.5}'
    assert any(processor_s(decode_as_sent, PATHS[1], flood) < 2.5 * token_ids_s for _ in range(3))
    sent = TEXT_BODY.decode(flood)
    assert sent.unknown == ("k0",)
    assert bytes(sent.refused["typical_p"]) == b"0.5", "what is refused is found in any crowd"


def test_a_long_text_and_a_long_field_without_effect_are_taken_whole(http):
    text = '\n"\\\u00e9\u6f22\U0001f600 x' * 30_000
    with running_server(FakeReplica(), make_model(max_model_len=4_000_000)) as server:
        body = {"model": "tiny", "prompt": text, "max_tokens": 1, "echo": True}
        for sent in (json.dumps(body), json.dumps(body, ensure_ascii=False)):
            answer = httpx.post(
                f"{server.url}{PATHS[1]}", content=sent.encode(), headers={"content-type": "application/json"},
                timeout=HANGS_S,
            )  # fmt: skip
            assert answer.json()["choices"][0]["text"].startswith(text)
    body = PROMPT + b'"ab","user":"' + b"\\n" * 4_000_000 + b'","metadata":{"a":"b"}}'
    answer = http.post(PATHS[1], content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200


PAD = b'"user":"' + b"x" * SMALL_BYTES + b'"'
WRONG = {
    "messages[3].content[1].text": (
        CHAT_BODY,
        b'{%b,"messages":[%b{"role":"user","content":[{"type":"text"},{"type":"text","text":3}]}]}'
        % (PAD, b'{"role":"user","content":"hello"},' * 3),
    ),
    "messages[2].role": (CHAT_BODY, b'{"messages":[%b{}],%b}' % (b'{"role":"user","content":"hello"},' * 2, PAD)),
    "messages": (CHAT_BODY, b'{%b,"messages":{"role":"user"}}' % PAD),
    "prompt": (TEXT_BODY, b'{%b,"stop_token_ids":[1,2,3]}' % PAD),
    "stop_token_ids[9]": (CHAT_BODY, b'{"messages":[],%b,"stop_token_ids":[%b"a,b"]}' % (PAD, b"1000, " * 9)),
    "temperature": (CHAT_BODY, b'{"temperature":1,"messages":[],%b,"temperature":"hot"}' % PAD),
}


@pytest.mark.parametrize("param", WRONG)
def test_a_complaint_about_a_large_body_names_the_same_place_as_about_a_small_one(param):
    decoder, sent = WRONG[param]
    with pytest.raises(InvalidRequest) as large:
        decoder.decode(sent)
    with pytest.raises(InvalidRequest) as small:
        decoder.decode(sent.replace(PAD, b'"user":"x"'))
    assert large.value.param == small.value.param == param
    assert str(large.value) == str(small.value)


def test_a_kept_field_does_not_keep_its_body_and_no_large_body_may_have_any_field():
    body = PROMPT + b'"ab","metadata":{"a":"b"},' + PAD + b"}"
    sent = TEXT_BODY.decode(body).body
    assert (bytes(sent.prompt), bytes(sent.metadata)) == (b'"ab"', b'{"a":"b"}')
    assert len(memoryview(sent.metadata).obj) < SMALL_BYTES
    with pytest.raises(RequestTooLarge, match=f"at most {SMALL_BYTES}"):
        decode_small(b'{"policy":"%b"}' % (b"x" * SMALL_BYTES), msgspec.json.Decoder(dict[str, str]))


def test_large_bodies_are_decoded_in_order_and_what_comes_meanwhile_is_answered_before_the_next():
    async def run() -> list[tuple[int, int]]:
        loop, bodies, had, turn = asyncio.get_running_loop(), LargeBodies(1), [], 0

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(next_turn)

        async def decode(index: int) -> None:
            async with bodies.turn():
                had.append((index, turn))

        next_turn()
        decoding = [asyncio.ensure_future(decode(index)) for index in range(6)]
        await asyncio.sleep(0)
        decoding[2].cancel()
        decoding[3].cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
        await decode(6)  # when nobody waits any more
        return had

    had = asyncio.run(run())
    assert [index for index, _ in had] == [0, 1, 4, 5, 6]
    turns = [turn for _, turn in had]
    assert min(after - before for before, after in pairwise(turns)) >= 3, "one to read, one to answer"


def test_a_body_for_which_there_is_no_room_is_sent_away_even_if_it_is_all_there():
    async def run() -> int:
        bodies = LargeBodies(1)
        with pytest.raises(Overloaded):
            async with bodies.coming("a"):
                bodies.hold("a", bodies.max_bytes + 1)
        return bodies.num_bytes

    assert asyncio.run(run()) == 0


def test_who_made_room_holds_nothing_any_more_before_it_hears_of_it():
    async def run() -> list[int]:
        bodies, seen = LargeBodies(1), []
        some = bodies.max_bytes // 2 + 1
        with contextlib.suppress(Overloaded):
            async with bodies.coming("first"), bodies.coming("second"):
                bodies.hold("first", some)
                bodies.hold("second", some)
                seen.append(bodies.num_bytes)
                bodies.hold("first", some + 1)
                seen.append(bodies.num_bytes)
                await asyncio.Event().wait()
        bodies.release("second")
        return [num_bytes - some for num_bytes in seen] + [bodies.num_bytes]

    assert asyncio.run(run()) == [0, 0, 0]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server with room for two bodies of 300,000 bytes."""
    monkeypatch.setattr("maitred.api.http.bodies.MAX_HELD_BYTES", 0)
    with running_server(max_body_bytes=300_000) as server:
        yield server


def held_bytes(server: RunningServer) -> int:
    return server.server.app.large_bodies.num_bytes


def begin_body(server: RunningServer, size: int) -> socket.socket:
    """Send that much of a body of 300,000 bytes, and no more."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANGS_S)
    headers = b"host: x\r\ncontent-type: application/json\r\ncontent-length: 300000\r\n"
    body = PROMPT + b'"' + b"x" * (size - len(PROMPT) - 1)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + headers + b"\r\n" + body)
    return connection


def test_when_bodies_fill_their_room_the_one_that_has_been_coming_for_longest_is_sent_away(crowded):
    with begin_body(crowded, 250_000) as first:
        until(lambda: held_bytes(crowded) == 250_000)
        with begin_body(crowded, 250_000) as second:
            until(lambda: held_bytes(crowded) == 500_000)
            with begin_body(crowded, 250_000) as third:
                told = first.recv(4096)
                assert told.startswith(b"HTTP/1.1 503")
                assert b"retry-after" in told
                until(lambda: held_bytes(crowded) == 500_000)
                for connection in (second, third):
                    connection.sendall(b"x" * 49_998 + b'"}')
                    assert connection.recv(4096).startswith(b"HTTP/1.1 400")  # too long for the model
    until(lambda: held_bytes(crowded) == 0)


def test_small_bodies_need_no_room(crowded):
    with begin_body(crowded, 299_000), begin_body(crowded, 299_000):
        until(lambda: held_bytes(crowded) == 598_000)
        body = {"model": "tiny", "prompt": "ab"}
        assert httpx.post(f"{crowded.url}{PATHS[1]}", json=body, timeout=HANGS_S).status_code == 200
        assert held_bytes(crowded) == 598_000
    until(lambda: held_bytes(crowded) == 0)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("path", PATHS[:2])
def test_a_body_needs_its_room_until_it_is_tokenised_or_as_long_as_it_is_to_be_echoed(path, echo):
    replica = FakeReplica(queued=True)
    text = "x" * 100_000
    body = {"model": "tiny", "prompt": text, "messages": [{"role": "user", "content": text}], "echo": echo}
    sent = json.dumps(body).encode()
    headers = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}\r\n"
    with running_server(replica, make_model(max_model_len=200_000)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANGS_S) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\n{headers}\r\n".encode() + sent)
            until(lambda: replica.live)
            assert held_bytes(server) == (len(sent) if echo else 0)
        until(lambda: not replica.live)
        until(lambda: held_bytes(server) == 0)


class _Counted(msgspec.Struct):
    text: str
    count: int
    ids: list[int] = []


@pytest.mark.parametrize(("sent", "read"), [
    (b'{"text": "20.0, \\"20.0\\"", "count": 20.0, "ids": [1.0, -2.00, 3]}', 20),
    (b'{"text": "a", "count": 20.5}', None),
    (b'{"text": "a", "count": 20.0e1}', None),
    (b'{"text": "a", "count": "20.0"}', None),
    (b'{"text": "a", "count": 20.0, "ids": [1.5]}', None),
])  # fmt: skip
def test_a_whole_number_with_a_point_is_an_integer(sent: bytes, read: int | None):
    decoder = msgspec.json.Decoder(_Counted)
    if read is None:
        with pytest.raises(InvalidRequest):
            decode_json(sent, decoder)
        return
    assert decode_json(sent, decoder) == _Counted('20.0, "20.0"', read, [1, -2, 3])


class Options(msgspec.Struct):
    fast: bool | None = None


class Item(msgspec.Struct):
    text: str


class Order(msgspec.Struct, kw_only=True):
    name: str
    items: list[Item] = []
    options: Options | None = None
    told: Options | UnsetType = UNSET
    either: str | list[int] | None = None
    kept: Raw | UnsetType = UNSET


ORDERS = BodyDecoder(Order, ("later", "never"))
LONG_NAME = "x" * SMALL_BYTES
NAMES = ("later", "never", "nmae", "x y", 'a"b', "ä", "", "items.x", "options.fast")
values = st.sampled_from([None, True, 1, 0.5, "", "null", [], {}, {"name": 1}])
options = st.dictionaries(st.sampled_from(["fast", "slow", 'a"b']), st.sampled_from([None, True, False]))
orders = st.builds(
    lambda order, others: order | others,
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", LONG_NAME])},
        optional={
            "items": st.lists(st.fixed_dictionaries({"text": st.just("a")}, optional={"more": values}), max_size=2),
            "options": st.none() | options,
            "told": options,
            "either": st.sampled_from([None, "a", [1]]),
            "kept": values,
        },
    ),
    st.dictionaries(st.sampled_from(NAMES), values),
)


@given(orders)
def test_every_other_field_is_found_and_the_body_is_as_if_there_were_none(order: dict[str, Any]):
    body = json.dumps(order).encode()
    sent = ORDERS.decode(body)
    own = {name: value for name, value in order.items() if name in Order.__struct_fields__}
    assert as_plain(sent.body) == as_plain(msgspec.json.decode(json.dumps(own), type=Order))
    assert {name: msgspec.json.decode(value) for name, value in sent.refused.items()} == {
        name: order[name] for name in ("later", "never") if name in order
    }
    assert sorted(sent.unknown) == sorted(unknown_in(order))


def unknown_in(order: dict[str, Any]) -> list[str]:
    """The slow way."""
    expected = {*Order.__struct_fields__, "later", "never"}
    nested = [(name, order.get(name) or {}) for name in ("options", "told")]
    return [
        *(name for name, value in order.items() if name not in expected and value is not None),
        *(f"{at}.{name}" for at, of in nested for name, value in of.items() if name != "fast" and value is not None),
    ]


def as_plain(order: Order) -> Any:
    return msgspec.json.decode(msgspec.json.encode(order))


def test_the_last_of_two_equal_fields_counts_and_those_within_a_list_are_not_looked_through():
    assert ORDERS.decode(b'{"name":"a","items":[{"text":"b","more":1}]}').unknown == ()
    for pad in ("", LONG_NAME):
        sent = ORDERS.decode(b'{"later":1,"name":"","later":2,"other":1,"name":"%b","other":2}' % pad.encode())
        assert (sent.body.name, bytes(sent.refused["later"]), sent.unknown) == (pad, b"2", ("other",))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 256, 257, 512]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-300, 1e300, 5e-324, 0.5, 1.0, 2.0]),
    st.text(max_size=5),
    st.sampled_from(["", "none", "auto", "tiny", "text", "x" * 2000, "\u202e\x1b[31m", "</s>", "\x00"]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(string.ascii_lowercase, max_size=4), st.integers(-2, 300).map(str)), inner),
        st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "json_object"]), "text": inner}),
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "x"]), "content": inner}),
    ),
    max_leaves=5,
)


def names_of(body: type[msgspec.Struct], refused: Collection[str] = ()) -> list[str]:
    return [*body.__struct_fields__, *refused, "nobody_knows"]


BASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "/v1/chat/completions": (
        names_of(ChatCompletionRequest, CHAT_REFUSED),
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    ),
    "/v1/completions": (
        names_of(CompletionRequest, COMPLETION_REFUSED),
        {"model": "tiny", "prompt": "ab", "max_tokens": 2},
    ),
    "/v2/models/tiny/generate": (
        names_of(GenerateRequest, [*CompletionRequest.__struct_fields__, *COMPLETION_REFUSED]),
        {"text_input": "ab", "parameters": {"max_tokens": 2}},
    ),
    "/tokenize": (names_of(TokenizeRequest, TOKENIZE_REFUSED), {"prompt": "ab"}),
    "/detokenize": (names_of(DetokenizeRequest), {"tokens": [1, 2]}),
}


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        if isinstance(error, str):  # of a dialect with nothing but its text
            error = dict.fromkeys(("type", "param", "code"), None) | {"message": error}
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert len(error["message"]) < 1200


@pytest.mark.parametrize("path", BASES)
def test_no_value_of_any_field_makes_a_5xx(http, path):
    names, base = BASES[path]

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(names), anything, min_size=1, max_size=3))
    def run(fields: dict[str, Any]) -> None:
        check(http.post(path, json={**base, **fields}))

    run()


@pytest.mark.parametrize("path", BASES)
def test_no_body_at_all_makes_a_5xx(http, path):
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=200))
    def run(body: bytes) -> None:
        check(http.post(path, content=body, headers={"content-type": "application/json"}))

    run()


POST_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("request_bytes", [
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /%ff%fe%00 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /v1/models/%00%0d%0aset-cookie:x HTTP/1.1\r\nhost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT evil:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"BREW /pot HTTP/1.1\r\nhost: x\r\n\r\n",
    POST_HEAD + b"content-length: -1\r\n\r\n",
    POST_HEAD + b"content-length: 1e3\r\n\r\n",
    POST_HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
    POST_HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}   ",
    POST_HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    POST_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    POST_HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
    POST_HEAD + b"transfer-encoding: gzip\r\n\r\n{}",
    POST_HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b",
    POST_HEAD + b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\ncontent-length: 2\r\n\r\n{}",
    POST_HEAD + b"x-request-id: a\r\nx-request-id: b\r\ncontent-length: 2\r\n\r\n{}",
    POST_HEAD + b"bad header\r\ncontent-length: 2\r\n\r\n{}",
    POST_HEAD + b"x: a\x00b\r\ncontent-length: 2\r\n\r\n{}",
    POST_HEAD + b"content-length: 2\r\n\r\n{}" * 3,
])  # fmt: skip
def test_bytes_that_are_hardly_http_do_no_harm(served, request_bytes):
    with socket.create_connection(("127.0.0.1", served.port), timeout=HANGS_S) as connection:
        connection.sendall(request_bytes)
        answer = b""
        with contextlib.suppress(OSError):  # the server may have hung up already
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
    assert b"set-cookie" not in answer.split(b"\r\n\r\n")[0]
    assert httpx.get(f"{served.url}/health").status_code == 200
