"""What goes wrong on our side: a status before the stream begins, an error object and [DONE] after."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from maitred.api.http.app import LONG_BYTES, TINY_BYTES, TINY_S, TextThreads
from maitred.core.clock import ManualClock
from maitred.text.tokenizer import Tokenizer
from tests.api.conftest import MESSAGES, strict_client
from tests.api.test_disconnect import endless, send
from tests.fakes_api import EOS, FakeReplica, byte_tokenizer, make_model, running_server, says
from tests.waiting import HANGS_S, joined, until

CHAT = {"model": "tiny", "messages": MESSAGES}


def post(server: Any, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, **fields}, timeout=HANGS_S)


def test_a_request_whose_logits_are_nan_gets_a_500_and_a_stream_ends_with_an_error_object():
    replica = FakeReplica(fail_after=3)
    with running_server(replica) as server:
        answer, stream = post(server), post(server, stream=True)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "generation_failed")
        assert (error["param"], "NaN" in error["message"], stream.status_code) == (None, True, 200)
        *chunks, error, done = [line for line in stream.text.split("\n\n") if line]
        assert len(chunks) == 4, "the role and three tokens"
        assert '"error":{"message":"logits are NaN"' in error
        assert done == "data: [DONE]"
        with pytest.raises(openai.InternalServerError):
            strict_client(server.url).chat.completions.create(**CHAT)
        with pytest.raises(openai.APIError, match="NaN"):
            list(strict_client(server.url).chat.completions.create(**CHAT, stream=True))
        replica.fail_after = 0
        answer = post(server, stream=True)  # before its first token
        assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {**CHAT, "n": 4}), ("/v1/completions", {"prompt": ["b", "a", "c"], "max_tokens": 300})],
)
def test_one_bad_sample_or_prompt_ends_the_others(path, body):
    replica = FakeReplica(lambda r: [ord("x")] * (300 if r.sample_index or r.prompt_token_ids[0] == ord("a") else 1))
    replica.token_s, replica.fail_after = 0.01, 5
    with running_server(replica) as server:
        answer = httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=HANGS_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
        until(lambda: not replica.live)


def test_a_dead_engine_is_503_everywhere_but_the_process_answers():
    replica = FakeReplica(dead="cuda is gone")
    with running_server(replica) as server:
        for path in ("/health", "/ready"):
            answer = httpx.get(server.url + path)
            assert answer.status_code == 503
        assert "cuda is gone" in httpx.get(f"{server.url}/health").json()["error"]["message"]
        for stream in (False, True):
            answer = post(server, stream=stream)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert "maitred_engine_up 0.0" in httpx.get(f"{server.url}/metrics").text


def test_an_engine_that_dies_in_a_stream_is_told_in_it():
    with running_server(FakeReplica(die_after=2)) as server:
        streamed, whole = post(server, stream=True), post(server)
    assert '"code":"engine_dead"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert whole.status_code == 503


def test_health_and_readiness_are_not_the_same():
    welcome = False
    with running_server(is_ready=lambda: welcome) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        for path in ("/ready", "/readyz"):
            assert httpx.get(server.url + path).status_code == 503
        answer = post(server)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        welcome = True
        assert (httpx.get(f"{server.url}/ready").status_code, post(server).status_code) == (200, 200)


def test_more_requests_than_the_server_holds_are_turned_away_at_once():
    replica = FakeReplica(endless, queued=True)
    with running_server(replica, max_concurrent_requests=5) as server:
        held = [send(server, "/v1/chat/completions", {"messages": MESSAGES, "n": 2}) for _ in range(2)]
        until(lambda: len(replica.live) == 4)
        answer = post(server, n=2)  # at once: those it would wait for do not end by themselves
        assert answer.status_code == 503
        assert float(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.json()["error"]["code"] == "server_overloaded"
        for connection in held:
            connection.close()
        until(lambda: not replica.live)
        replica.answer, replica.queued = says("again"), False
        assert post(server, n=5).status_code == 200
        assert post(server, n=6).status_code == 400, "waiting would not help"


def test_a_silent_stream_is_kept_open_by_comments():
    replica = FakeReplica(says("ok"), held=True)
    with running_server(replica, sse_keep_alive_s=0.1) as server:
        body = {**CHAT, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=HANGS_S) as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(8)] == [": keep-alive", ""] * 4
            replica.held = False
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        replica.held = True
        stream = strict_client(server.url).chat.completions.create(**CHAT, stream=True)  # a comment began it
        replica.held = False
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ok"


def test_comments_can_be_turned_off_and_a_stream_has_its_headers(http):
    with running_server(FakeReplica(says("l"), token_s=0.3), sse_keep_alive_s=0.0) as server:
        assert "keep-alive" not in post(server, stream=True).text
    answer = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")


def test_an_error_of_ours_tells_nothing_of_our_inside(caplog):
    def broken(request: Any) -> list[int]:
        raise RuntimeError("secret path /etc/x")

    with running_server(FakeReplica(broken)) as server:
        answer = post(server)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert "secret" in caplog.text


def test_a_prompt_is_tokenised_beside_the_event_loop():
    """Other requests are answered while one is tokenised, however long that takes."""
    begun, may_end = threading.Event(), threading.Event()

    class HeldTokenizer(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
            begun.set()
            assert may_end.wait(HANGS_S)
            return super().encode(text, add_special_tokens=add_special_tokens, most=most)

    tokenizer = byte_tokenizer()
    tokenizer.__class__ = HeldTokenizer
    with running_server(FakeReplica(), make_model(tokenizer=tokenizer)) as server:
        big = threading.Thread(
            target=lambda: httpx.post(f"{server.url}/tokenize", json={"prompt": "word é"}, timeout=HANGS_S)
        )
        big.start()
        assert begun.wait(HANGS_S)
        for _ in range(10):
            assert httpx.get(f"{server.url}/health", timeout=HANGS_S).status_code == 200
        may_end.set()
        joined(big)


def test_a_short_prompt_waits_for_no_long_one():
    """However many long ones are being tokenised, or wait for that."""
    long_ones, may_end = threading.Semaphore(0), threading.Event()

    class HeldTokenizer(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
            if len(text) > LONG_BYTES:
                long_ones.release()
                assert may_end.wait(HANGS_S)
            return super().encode(text, add_special_tokens=add_special_tokens, most=most)

    tokenizer = byte_tokenizer()
    tokenizer.__class__ = HeldTokenizer
    with (
        running_server(FakeReplica(), make_model(tokenizer=tokenizer, max_model_len=50_000)) as server,
        ThreadPoolExecutor(8) as pool,
    ):

        def tokenize(text: str) -> int:
            answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=HANGS_S)
            return int(answer.json()["count"])

        many = [pool.submit(tokenize, "x" * (LONG_BYTES + 1)) for _ in range(8)]
        assert long_ones.acquire(timeout=HANGS_S)
        assert tokenize("short") == 5
        assert not long_ones.acquire(blocking=False), "they go one at a time"
        may_end.set()
        assert [answer.result(HANGS_S) for answer in many] == [LONG_BYTES + 1] * 8


def test_tokenize_and_detokenize_are_inverse(http):
    tokens = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 6
    assert (tokens["max_model_len"], tokens["token_strs"][0]) == (512, "h")
    assert http.post("/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]}).json() == {"prompt": "héllo"}
    chat = http.post("/tokenize", json={"model": "tiny", "messages": MESSAGES}).json()
    assert chat["tokens"][8] == EOS
    assert chat["token_strs"] is None


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": MESSAGES}), ("/tokenize", {"prompt": 3}),
    ("/tokenize", {"prompt": "x" * 40_000}), ("/detokenize", {}), ("/detokenize", {"tokens": "a"}),
    ("/detokenize", {"tokens": [257]}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [10**40]}),
])  # fmt: skip
def test_the_text_routes_refuse_what_they_cannot_do(http, path, body):
    assert http.post(path, json=body).status_code == 400
    assert http.post(path, json={**body, "model": "other", "prompt": "a", "tokens": [1]}).status_code == 404


@contextmanager
def texts(clock: ManualClock) -> Iterator[TextThreads]:
    threads = TextThreads(clock.now)
    try:
        yield threads
    finally:
        threads.close()


def test_short_texts_stay_on_the_loop_once_one_was_quick_and_leave_it_when_one_was_not():
    clock = ManualClock()

    def work(seconds: float = 0.0) -> bool:
        """Whether it is done on the event loop."""
        clock.advance(seconds)
        return threading.current_thread() is threading.main_thread()

    async def run(threads: TextThreads) -> None:
        assert not await threads.run(10, work)  # which may have to read the tokenizer first
        assert await threads.run(10, work)
        assert not await threads.run(TINY_BYTES + 1, work)
        assert not await threads.run(10, work, may_take_long=True)
        assert await threads.run(10, lambda: work(2 * TINY_S))
        assert not await threads.run(10, lambda: work(2 * TINY_S))
        assert not await threads.run(10, work)
        assert await threads.run(10, work)

    with texts(clock) as threads:
        asyncio.run(run(threads))


def test_a_short_text_that_fails_tells_how_long_it_took_too():
    clock = ManualClock()

    def fail() -> None:
        clock.advance(2 * TINY_S)
        raise ValueError

    async def run(threads: TextThreads) -> None:
        await threads.run(10, threading.get_ident)
        failed = await asyncio.gather(threads.run(10, fail), return_exceptions=True)
        assert isinstance(failed[0], ValueError)
        assert await threads.run(10, threading.get_ident) != threading.get_ident()

    with texts(clock) as threads:
        asyncio.run(run(threads))
