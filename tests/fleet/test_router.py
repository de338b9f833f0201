"""What clients and replicas see of a router, whatever the replicas do."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from maitred.api.http.fleet_headers import FleetToken
from maitred.config import AdmissionConfig
from maitred.fleet.actions import MAX_REQUESTS, Bind, Choices
from maitred.fleet.balance import Choice
from maitred.storage.ledger import Ledger
from tests.api.test_pages import counted
from tests.api.test_tenants import table_of
from tests.cli.running import maitred_thread
from tests.conftest import free_port
from tests.fakes_api import FakeTenants
from tests.fleet.routers import (
    DONE,
    LAST_CHUNK,
    MODEL,
    STREAM_HEAD,
    WHOLE_STREAM,
    FakeUpstream,
    Script,
    Seen,
    a_server,
    asked,
    chat,
    chunk,
    client_of,
    completion,
    event,
    fake_upstream,
    one_of_ours,
    routed,
    running_router,
    says,
    whole,
)
from tests.waiting import until_async

CHAT = "/v1/chat/completions"
WELL = says(whole(completion()))
FULL = says(whole(b'{"error":{"message":"busy"}}', "503 Service Unavailable", "retry-after: 1\r\n"))


async def test_an_answer_comes_as_the_replica_gave_it():
    given = whole(
        completion(),
        headers="content-type: application/json\r\nconnection: keep-alive, x-private\r\n"
        "x-private: no\r\nx-kept: yes\r\nx-maitred-tenant: me\r\nx-maitred-ignored-fields: poems\r\n",
    )
    async with routed(says(given)) as (running, [fake]), client_of(running) as client:
        told = await client.post(
            CHAT,
            json=chat(),
            headers={"x-request-id": "mine", "x-maitred-tenant": "admin", "x-forwarded-for": "10.1.1.1", "te": "gzip"},
        )
        assert told.content == completion()
        assert told.headers["x-maitred-replica"] == fake.url.removeprefix("http://")
        assert told.headers["x-maitred-held-ms"].isdigit()
        assert (told.headers["x-request-id"], told.headers["x-kept"]) == ("mine", "yes")
        assert told.headers["x-maitred-ignored-fields"] == "poems"
        assert not {"x-private", "x-maitred-tenant"} & set(told.headers)
        [seen] = asked(fake)
        assert json.loads(seen.body) == chat()
        assert seen.headers["x-request-id"] == "mine"
        assert seen.headers["x-forwarded-for"] == "10.1.1.1, 127.0.0.1"
        assert not {"x-maitred-tenant", "te", "accept-encoding"} & set(seen.headers)


async def test_streams_come_piece_by_piece():
    turn = asyncio.Event()

    async def in_turns(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("one")[:10]))
        await writer.drain()
        writer.write(chunk(event("one")[10:]))
        await turn.wait()
        writer.write(chunk(event("two")) + chunk(DONE) + LAST_CHUNK)

    async with (
        routed(in_turns) as (running, _),
        client_of(running) as client,
        client.stream("POST", CHAT, json=chat(stream=True)) as told,
    ):
        pieces = told.aiter_bytes()
        assert await anext(pieces) == event("one")
        turn.set()
        assert b"".join([piece async for piece in pieces]) == event("two") + DONE


@pytest.mark.parametrize("fault", [
    says(then="reset"),
    says(b"HTTP/1.1 200 OK\r\ncontent-le", then="close"),
    says(whole(completion())[:-5], then="close"),
    says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"),
    says(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, then="wait"),
    says(b"nonsense\r\n\r\n"),
    says(whole(b'{"error":{"message":"engine died"}}')),
    says(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + completion()[:-5], then="close"),
    says(whole(b"{}", "500 Internal Server Error")),
    FULL,
])  # fmt: skip
async def test_before_the_first_byte_another_replica_is_asked(fault):
    async with routed(fault, WELL, balance="round_robin") as (running, fakes), client_of(running) as client:
        for _ in range(4):
            told = await client.post(CHAT, json=chat())
            assert told.content == completion()
            assert told.headers["x-maitred-replica"] == fakes[1].url.removeprefix("http://")
        assert asked(fakes[0])


CUT = {
    "broken off": chunk(event("two")[:9]),
    "ended": LAST_CHUNK,
    "ended within an event": chunk(event("two")[:9]) + LAST_CHUNK,
    "half an object": chunk(b'data: {"id": "x", "cho\n\n') + chunk(DONE) + LAST_CHUNK,
    "no event end": chunk(b"data: " + b"x" * (5 * 1024 * 1024)),
}


@pytest.mark.parametrize("rest", CUT.values(), ids=CUT)
async def test_a_foreign_stream_that_has_not_ended_does_not_look_complete(rest):
    end = "close" if rest is CUT["broken off"] else ""
    one = says(STREAM_HEAD + chunk(event("one")) + rest, then=end)
    async with routed(one) as (running, _), client_of(running) as client:
        told = await client.post(CHAT, json=chat(stream=True))
        first, error, done = told.content.split(b"\n\n", 2)
        assert first + b"\n\n" == event("one")
        assert (json.loads(error.removeprefix(b"data: "))["error"]["type"], done) == ("server_error", DONE)


@pytest.mark.parametrize("nothing", [b"", b": ping\n\n", b'data: {"error":{"message":"engine died"}}\n\n'])
async def test_a_stream_that_says_nothing_before_it_ends_is_asked_of_another_replica(nothing):
    fault = says(STREAM_HEAD + (chunk(nothing) if nothing else b"") + LAST_CHUNK)
    good = says(WHOLE_STREAM)
    async with routed(fault, good, balance="round_robin") as (running, fakes), client_of(running) as client:
        for _ in range(2):
            told = await client.post(CHAT, json=chat(stream=True))
            assert told.content.endswith(event("one") + event("two") + DONE)
            assert b"error" not in told.content
        assert asked(fakes[0])


FINISHED = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
OWN_ERROR = b'data: {"error": {"message": "engine died"}}\n\n'


@pytest.mark.parametrize(
    "end",
    [FINISHED, FINISHED + DONE, FINISHED + b"data: [DONE]\n", DONE, OWN_ERROR, b": ping\r\n\r\n" + OWN_ERROR + DONE],
)
async def test_a_foreign_stream_that_ended_ends_once(end):
    close_delimited = says(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event("one") + end, then="close"
    )
    async with routed(close_delimited) as (running, _), client_of(running) as client:
        told = await client.post(CHAT, json=chat(stream=True))
        assert told.content == (event("one") + end).removesuffix(b"data: [DONE]\n").removesuffix(DONE) + DONE


LIMITED = says(whole(b'{"error":{"message":"slow"}}', "429 Too Many Requests", "retry-after: 7\r\nset-cookie: a=b\r\n"))


async def test_streams_of_an_ollama_server_come_line_by_line_and_what_is_cut_is_told():
    def line(text: str, **fields: Any) -> bytes:
        return chunk(json.dumps({"message": {"content": text}, "done": False, **fields}).encode() + b"\n")

    head = STREAM_HEAD.replace(b"text/event-stream", b"application/x-ndjson")
    last = line("", done=True, done_reason="stop", prompt_eval_count=9, eval_count=4)
    good = head + line("one") + line("two") + last + LAST_CHUNK
    answers = [good, head + line("one"), head + chunk(b'{"error":"no memory"}\n') + LAST_CHUNK]
    paths: list[str] = []

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        paths.append(seen.path)
        writer.write(answers.pop(0) if answers[1:] else answers[0])
        writer.close()

    async with routed(script) as (running, _), client_of(running) as client:
        ask = {**chat(), "model": f"{MODEL}:latest"}
        told = await client.post("/api/chat", json=ask)
        assert [part["message"]["content"] for part in map(json.loads, told.text.splitlines())] == ["one", "two", ""]
        assert told.headers["content-type"] == "application/x-ndjson"
        cut = [json.loads(each) for each in (await client.post("/api/chat", json=ask)).text.splitlines()]
        assert (cut[0]["message"]["content"], [*cut[1]]) == ("one", ["error"])
        assert (await client.post("/api/chat", json=ask)).status_code >= 500
        listed = (await client.get("/api/tags")).json()["models"]
        assert [model["name"] for model in listed] == [MODEL]
        missing = await client.post("/api/show", json={"model": "nope"})
        assert (missing.status_code, [*missing.json()]) == (404, ["error"])
    assert {*paths} == {"/api/chat"}


async def test_streams_of_anthropic_s_form_end_by_their_last_event_and_their_usage_is_read(tmp_path: Path):
    def told(kind: str, **fields: Any) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **fields}).encode())

    begun = told("message_start", message={"usage": {"input_tokens": 5, "cache_read_input_tokens": 20}})
    said = told("content_block_delta", index=0, delta={"type": "text_delta", "text": "one"})
    ended = told("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7}) + told("message_stop")
    full = whole(b"{}", "529 Overloaded", "retry-after: 1\r\n")
    answers = [full, begun + said + ended, begun + said]
    seen: list[Seen] = []

    async def script(asked_for: Seen, writer: asyncio.StreamWriter) -> None:
        seen.append(asked_for)
        answer = answers.pop(0)
        writer.write(answer if answer is full else STREAM_HEAD + chunk(answer) + LAST_CHUNK)

    path, body = "/v1/messages", {"model": MODEL, "max_tokens": 9, "stream": True, "messages": chat()["messages"]}
    async with routed(script, server={"api_keys": ("key",)}) as (running, _), client_of(running) as client:
        client.headers.update({"x-api-key": "key", "anthropic-version": "2023-06-01"})
        ledger = running.router.ledger = Ledger(tmp_path / "ledger")
        assert (await client.post(path, json=body)).content == begun + said + ended  # asked again where it was full
        cut = (await client.post(path, json=body)).content
        assert cut.startswith(begun + said + b'event: error\ndata: {"error":{"type":"api_error"')
        ledger.close()
        [card] = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["type"]) == (MODEL, "model")
        missing = await client.get("/v1/models/nope")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        del client.headers["x-api-key"]
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert not any("x-api-key" in each.headers for each in seen)
    with closing(sqlite3.connect(tmp_path / "ledger")) as db:
        rows = db.execute("SELECT prompt_tokens, cached_tokens, generated_tokens FROM request ORDER BY opened_at")
        assert rows.fetchall()[0] == (25, 20, 7)


async def test_a_429_of_a_foreign_server_is_tried_elsewhere_and_passed_on_where_all_say_so():
    async with routed(LIMITED, WELL, balance="round_robin") as (running, fakes), client_of(running) as client:
        answers = [await client.post(CHAT, json=chat()) for _ in range(4)]
        assert [answer.content for answer in answers] == [completion()] * 4
        assert asked(fakes[0])
        assert running.states == ["ready", "ready"]
    async with routed(LIMITED, LIMITED) as (running, fakes), client_of(running) as client:
        told = await client.post(CHAT, json=chat())
        assert (told.status_code, told.headers["retry-after"]) == (429, "7")
        assert (told.json()["error"]["message"], [len(asked(fake)) for fake in fakes]) == ("slow", [1, 1])


async def test_a_path_that_a_foreign_server_has_not_is_asked_elsewhere_and_missing_in_the_clients_dialect():
    none = says(whole(b'{"detail":"Not Found"}', "404 Not Found"))
    async with routed(none, WELL, balance="round_robin") as (running, fakes), client_of(running) as client:
        answers = [await client.post(CHAT, json=chat()) for _ in range(4)]
        assert [answer.content for answer in answers] == [completion()] * 4
        assert running.states == ["ready", "ready"]
        assert asked(fakes[0])
    async with routed(none) as (running, _), client_of(running) as client:
        told = await client.post("/v1/messages", json=chat(max_tokens=9))
        assert (told.status_code, told.json()["error"]["type"]) == (404, "not_found_error")
        assert told.json()["error"]["message"].endswith("at /v1/messages: 404, Not Found")
        assert "/api/chat: 404" in (await client.post("/api/chat", json=chat())).json()["error"]
        alone = (await client.post("/v1/responses", json={"model": MODEL, "input": "a", "background": True})).json()
        failed = await client.get(f"/v1/responses/{alone['id']}", params={"stream": "true"})
        assert "/v1/responses: 404" in failed.text


async def test_a_replica_sets_no_cookie_and_sends_no_client_elsewhere():
    cookie = says(whole(completion(), headers="content-type: application/json\r\nset-cookie: a=b\r\n"))
    away = says(whole(b"", "307 Away", "location: http://elsewhere/v1/chat/completions\r\n"))
    async with routed(cookie) as (running, [fake]), client_of(running) as client:
        told = await client.post(CHAT, json=chat(), headers={"cookie": "session=1"})
        assert told.content == completion()
        assert "set-cookie" not in told.headers
        assert "cookie" not in asked(fake)[0].headers
    async with routed(away) as (running, _), client_of(running) as client:
        for _ in range(4):
            told = await client.post(CHAT, json=chat())
            assert (told.status_code, "location" in told.headers) == (502, False)
            assert "redirect" in told.json()["error"]["message"]
        assert running.states == ["ready"], "a path that redirects is no fault of the replica"


async def test_clients_hear_an_error_of_all_replicas_but_not_where_these_are(caplog: pytest.LogCaptureFixture):
    async with routed(says(then="reset")) as (running, [fake]), client_of(running) as client:
        told = await client.post(CHAT, json=chat())
        assert told.status_code == 503
        assert str(fake.port) not in told.text
        assert "the replica that had it failed" in told.text
    async with routed(says(whole(b'{"error":"mine"}', "500 Oh"))) as (running, _), client_of(running) as client:
        told = await client.post(CHAT, json=chat())
        assert (told.status_code, told.content) == (500, b'{"error":"mine"}')


async def test_who_finds_all_full_is_held_until_one_has_room():
    num_refused = 0

    async def full_at_first(seen: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal num_refused
        num_refused += 1
        await (FULL if num_refused == 1 else WELL)(seen, writer)

    async with routed(full_at_first) as (running, [fake]), client_of(running) as client:
        told = await client.post(CHAT, json=chat())
        assert told.content == completion()
        assert int(told.headers["x-maitred-held-ms"]) >= 900
        assert (running.states, len(asked(fake))) == (["ready"], 2)


async def test_with_nobody_there_requests_are_held_and_served_when_somebody_comes():
    port = free_port()
    with running_router(f"http://127.0.0.1:{port}") as running:
        async with client_of(running) as client:
            told = asyncio.create_task(client.post(CHAT, json=chat()))
            await until_async(lambda: running.router.fleet.core.num_held == 1)
            async with fake_upstream(a_server(WELL), port):
                assert (await told).content == completion()
                assert int((await told).headers["x-maitred-held-ms"]) > 0


async def test_what_is_held_where_no_replica_can_be_started_is_sent_away_at_once():
    with running_router("http://127.0.0.1:1", server={"drain_timeout_s": 3600.0}) as running:
        async with client_of(running) as client:
            told = asyncio.create_task(client.post(CHAT, json=chat()))
            await until_async(lambda: running.router.fleet.core.num_held == 1)
            (held,) = running.router.fleet.requests.values()
            held._decision.get_loop().call_soon_threadsafe(running.router.give_up, "there is no such model")
            assert (await told).status_code == 503


async def test_who_is_held_too_long_hears_so():
    with running_router(f"http://127.0.0.1:{free_port()}", hold_timeout_s=0.1) as running:
        async with client_of(running) as client:
            told = await client.post(CHAT, json=chat())
            assert told.status_code == 503
            assert told.headers["retry-after"]
            assert told.json()["error"]["code"] == "queue_timeout"
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200


async def test_held_streams_are_kept_open():
    port = free_port()
    with running_router(f"http://127.0.0.1:{port}", server={"sse_keep_alive_s": 0.1}) as running:
        async with client_of(running) as client, client.stream("POST", CHAT, json=chat(stream=True)) as told:
            pieces = told.aiter_bytes()
            assert await anext(pieces) == b": keep-alive\n\n"
            async with fake_upstream(a_server(says(WHOLE_STREAM)), port):
                rest = b"".join([piece async for piece in pieces])
            assert rest.replace(b": keep-alive\n\n", b"") == event("one") + event("two") + DONE


async def test_who_leaves_while_held_or_streaming_is_forgotten_and_frees_the_slot():
    async with routed(says(STREAM_HEAD + chunk(event("one")), then="wait"), slots=1, reserve=0.0) as (running, [fake]):
        async with client_of(running) as client:
            async with client.stream("POST", CHAT, json=chat(stream=True)) as told:
                pieces = told.aiter_bytes()
                assert await anext(pieces) == event("one")
                held = asyncio.create_task(client.post(CHAT, json=chat()))
                await until_async(lambda: running.router.fleet.core.num_held == 1)
                fake.script = a_server(WELL)
            assert (await held).content == completion()
        await until_async(lambda: running.router.fleet.core.num_requests == 0)
    with running_router(f"http://127.0.0.1:{free_port()}") as running:
        async with client_of(running) as client:
            task = asyncio.create_task(client.post(CHAT, json=chat()))
            await until_async(lambda: running.router.fleet.core.num_held == 1)
            task.cancel()
            await until_async(lambda: running.router.fleet.core.num_held == 0)
            assert 'outcome="cancelled"' in (await client.get("/metrics")).text


async def test_other_paths_go_to_a_replica_as_they_are():
    async def echo(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(seen.start.encode() + b"|" + seen.body))

    async with routed(echo) as (running, _), client_of(running) as client:
        told = await client.put("/v1/some%2Fthing?a=b&c", content=b"\x00binary")
        assert told.content == b"PUT /v1/some%2Fthing?a=b&c HTTP/1.1|\x00binary"
        assert (await client.head("/anything")).status_code == 200
        assert (await client.get("/admin/queue")).status_code == 404
        assert (await client.delete("/fleet/events")).status_code == 404


async def test_the_models_are_those_of_all():
    async with (
        fake_upstream(a_server(WELL, models=("a", "b"))) as one,
        fake_upstream(a_server(WELL, models=("b",))) as two,
    ):
        with running_router(one.url, two.url) as running:
            await running.wait_for("ready", "ready")
            async with client_of(running) as client:
                cards = (await client.get("/v1/models")).json()["data"]
                assert sorted(card["id"] for card in cards) == ["a", "b"]
                assert (await client.get("/v1/models/b")).json()["owned_by"] == "somebody"
                told = await client.post(CHAT, json={**chat(), "model": "c"})
                assert told.status_code == 404
                assert "no replica serves the model 'c'" in told.json()["error"]["message"]
                for _ in range(3):
                    await client.post(CHAT, json={**chat(), "model": "a"})
                assert len(asked(one)) == 3


async def test_a_drained_replica_gets_no_more():
    async with routed(WELL, WELL) as (running, fakes), client_of(running) as client:
        name = fakes[0].url.removeprefix("http://")
        told = await client.post("/admin/fleet/drain", json={"name": name})
        assert told.status_code == 202
        for _ in range(5):
            assert (await client.post(CHAT, json=chat())).content == completion()
        assert not asked(fakes[0])
        assert "draining" in running.states
        wrong = await client.post("/admin/fleet/drain", json={"name": "nobody"})
        assert wrong.status_code == 400
        assert name in wrong.json()["error"]["message"]
        for path, body in (("restart", {}), ("scale", {"min": 1, "max": 2})):
            assert "run elsewhere" in (await client.post(f"/admin/fleet/{path}", json=body)).json()["error"]["message"]


async def test_the_limits_of_a_server_hold_and_without_keys_a_clients_is_the_replicas_affair():
    async with routed(WELL, server={"api_keys": ("key",), "max_body_bytes": 1000}) as (running, [fake]):
        async with client_of(running) as client:
            assert (await client.post(CHAT, json=chat())).status_code == 401
            assert (await client.get("/admin/fleet")).status_code == 401
            client.headers["authorization"] = "Bearer key"
            assert (await client.post(CHAT, json=chat("x" * 1000))).status_code == 413
            assert (await client.post(CHAT, json=chat())).status_code == 200
            assert (await client.get(CHAT)).status_code == 405
        assert "authorization" not in asked(fake)[0].headers
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(running.url).port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()
    async with routed(WELL) as (running, [fake]), client_of(running) as client:
        await client.post(CHAT, json=chat(), headers={"authorization": "Bearer theirs"})
        assert asked(fake)[0].headers["authorization"] == "Bearer theirs"


async def test_what_fails_at_a_replica_is_seen_in_the_metrics():
    async with routed(says(then="reset"), WELL, balance="round_robin") as (running, _), client_of(running) as client:
        await client.post(CHAT, json=chat())
        await client.post(CHAT, json=chat())
        page = (await client.get("/metrics")).text
        assert 'maitred_fleet_attempts_total{outcome="reset"} 1.0' in page
        assert 'outcome="answered"' in page
        assert "maitred_fleet_queue_wait_seconds_count 2.0" in page


async def test_a_tenants_limits_hold_at_the_router_and_replicas_are_told_who_asks():
    terms = {"small": {"weight": 3.0, "requests_per_minute": 2}, "poor": {"token_budget": 100}}
    tenants, token = FakeTenants(table_of(terms)), FleetToken(b"0123456789abcdef")
    async with fake_upstream(one_of_ours(WELL)) as fake:
        with running_router(fake.url, tenants=tenants, token=token) as running:
            await running.wait_for("ready")
            async with client_of(running) as client:
                keys = {name: {"authorization": f"Bearer {name}"} for name in terms}
                told = [await client.post(CHAT, json=chat(max_tokens=20), headers=keys["small"]) for _ in range(3)]
                assert [answer.status_code for answer in told] == [200, 200, 429]
                assert told[0].headers["x-ratelimit-limit-requests"] == "2"
                assert (await client.post(CHAT, json=chat(max_tokens=200), headers=keys["poor"])).status_code == 429
                assert (await client.post(CHAT, json=chat(max_tokens=20), headers=keys["poor"])).status_code == 200
                assert (await client.get("/admin/fleet", headers=keys["poor"])).status_code == 403
        first, *_, last = asked(fake)
        assert first.headers["x-maitred-fleet-token"] == "0123456789abcdef"
        assert (first.headers["x-maitred-tenant"], first.headers["x-maitred-weight"]) == ("small", "3")
        assert first.headers["x-maitred-salt"] != last.headers["x-maitred-salt"]
        assert "authorization" not in first.headers
        quota = running.router.authenticator.quotas
        assert quota.of(tenants.table.tenants["poor"]).spent_tokens == 7


async def test_what_a_foreign_server_tells_of_tokens_is_bounded_and_the_next_requests_row_is_written(tmp_path: Path):
    told = iter(
        [
            {"prompt_tokens": 2**63, "completion_tokens": 7},
            {"prompt_tokens": 5, "completion_tokens": -100_000, "prompt_tokens_details": {"cached_tokens": 3}},
            {"prompt_tokens": 5.0, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": -9}},
            {"prompt_tokens": 5, "completion_tokens": "2", "prompt_tokens_details": {"cached_tokens": 99}},
            {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": "none"},
        ]
    )

    async def tells(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(json.dumps({"id": "x", "choices": [], "usage": next(told)}).encode()))

    tenants, path = FakeTenants(table_of({"a": {"tokens_per_minute": 3_000}})), tmp_path / "ledger"
    async with routed(tells, tenants=tenants, balance="prefix") as (running, _), client_of(running) as client:
        client.headers["authorization"] = "Bearer a"
        ledger = running.router.ledger = Ledger(path)
        for _ in range(5):
            answer = await client.post(CHAT, json=chat("a" * 2_000, max_tokens=9))
            assert answer.status_code == 200
        ledger.close()
        assert running.router.authenticator.quotas.of(tenants.table.tenants["a"]).spent_tokens == 7 + 5 + 7 + 5 + 7
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT prompt_tokens, cached_tokens, generated_tokens FROM request ORDER BY opened_at")
        assert rows.fetchall() == [(0, 0, 7), (5, 3, 0), (5, 0, 2), (5, 5, 0), (5, 0, 2)]


def counts_words(num_told: list[str]) -> Script:
    """A server for which each word is a token, and that notes which prompts it counted."""

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path in ("/tokenize", "/v1/messages/count_tokens"):
            text = json.loads(seen.body)["messages"][0]["content"]
            num_told.append(text)
            field = "count" if seen.path == "/tokenize" else "input_tokens"
            writer.write(whole(json.dumps({field: len(text.split())}).encode()))
        else:
            writer.write(whole(completion(num_prompt_tokens=len(seen.body) // 4)))

    return script


LONG_WORDS, MANY_WORDS = "incomprehensibilities " * 20, "a " * 200
LOCAL = {"x-maitred-privacy": "local"}


async def test_a_pinned_request_stays_in_its_tier_and_out_of_the_cache():
    counted: list[str] = []
    async with (
        fake_upstream(a_server(counts_words(counted))) as edge,
        fake_upstream(a_server(counts_words([]))) as cloud,
    ):
        tiers = {"edge": {"replicas": [edge.url], "max_prompt_tokens": 30}, "cloud": {}}
        with running_router(edge.url, cloud.url, tiers=tiers, server={"result_cache_bytes": 100_000}) as running:
            await running.wait_for("ready", "ready")
            async with client_of(running) as client:

                async def told(text: str, **headers: str) -> tuple[int, str | None]:
                    answer = await client.post(CHAT, json=chat(text, temperature=0), headers=headers)
                    return answer.status_code, answer.headers.get("x-maitred-cache")

                assert await told(LONG_WORDS, **LOCAL) == (200, None)
                assert await told(LONG_WORDS) == (200, "miss"), "what was pinned was kept"
                assert (await told(MANY_WORDS), await told(MANY_WORDS)) == ((200, "miss"), (200, "hit"))
                assert await told(MANY_WORDS, **LOCAL) == (400, None)
                assert await told("hello", **{"x-maitred-privacy": "locol"}) == (400, None)
        assert (counted, len(asked(cloud))) == ([LONG_WORDS, MANY_WORDS], 2)


async def test_a_router_gives_similar_prompts_one_answer_by_vectors_of_its_replicas_and_bills_no_tenant_for_them():
    plain, vectors = (
        says(whole(completion())),
        {"near": [1, 0.1], "nearer": [1, 0], "nearest": [1, 0.05], "far": [0, 1]},
    )

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path != "/v1/embeddings":
            return await plain(seen, writer)
        texts = json.loads(seen.body)["input"]
        if unknown := [text for text in texts if text not in vectors]:
            return writer.write(whole(json.dumps({"error": {"message": f"{unknown}"}}).encode(), "503 Busy"))
        data = [{"embedding": b64encode(np.float32(vectors[text]).tobytes()).decode()} for text in texts]
        writer.write(whole(json.dumps({"data": data, "usage": {"prompt_tokens": 9}}).encode()))

    cache = {"result_cache_bytes": 100_000, "result_cache_semantic": f"{MODEL}:0.97", "result_cache_check": 0.3}
    tenants = FakeTenants(table_of({"a": {"semantic_cache": True, "token_budget": 200}, "b": {}}))
    async with routed(script, server=cache, tenants=tenants) as (running, (fake,)), client_of(running) as client:

        async def told(text: str, key: str = "a") -> str:
            body = chat(text, temperature=0, max_tokens=9)
            answer = await client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            return answer.headers["x-maitred-cache"]

        assert [await told(text) for text in ("near", "far", "nearer")] == ["miss"] * 3, "the first hit is checked"
        assert (await told("nearest"), await told("nearer")) == ("similar; cosine=0.9988", "hit")
        assert (await told("near", "b"), await told("nearer", "b")) == ("miss", "miss"), "b did not ask for it"
        used = running.router.authenticator.quotas.of(tenants.table.tenants["a"]).spent_tokens
        assert used == 3 * 7, "and vectors are billed to no tenant"
        assert await told("unknown") == "miss", "it is answered without them"
        num_asked = [seen.path for seen in asked(fake)].count("/v1/embeddings")
        assert await told("near far") == "miss"
        assert [seen.path for seen in asked(fake)].count("/v1/embeddings") == num_asked, "and not asked again at once"


async def test_a_tenants_limit_of_tokens_refuses_no_prompt_by_an_estimate():
    tenants = FakeTenants(table_of({"a": {"tokens_per_minute": 60}}))
    async with routed(counts_words([]), tenants=tenants) as (running, _), client_of(running) as client:
        client.headers["authorization"] = "Bearer a"
        assert (await client.post(CHAT, json=chat(MANY_WORDS, max_tokens=9))).status_code == 429
        assert (await client.post(CHAT, json=chat(LONG_WORDS, max_tokens=9))).status_code == 200
    async with routed(counts_words([]), tenants=tenants) as (running, _), client_of(running) as client:
        client.headers["x-api-key"] = "a"
        assert (await client.post("/v1/messages", json=chat(LONG_WORDS, max_tokens=9))).status_code == 200


async def test_a_queue_has_its_limit_at_the_router_and_the_more_urgent_take_the_place_of_others():
    release = asyncio.Event()

    async def waits(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(whole(completion()))

    terms = AdmissionConfig(max_queued_requests=1)
    async with routed(waits, slots=1, policy="priority", admission=terms) as (running, [fake]):
        async with client_of(running) as client:

            def send(**fields: Any) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post(CHAT, json=chat(**fields)))

            runs = [send(), send()]  # a slot and the reserve
            await until_async(lambda: len(asked(fake)) == 2)
            held = send(priority=5)
            await until_async(lambda: running.router.fleet.core.num_held == 1)
            refused = await client.post(CHAT, json=chat(priority=5))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
            assert "retry-after" in refused.headers
            urgent = send(priority=0)
            assert (await held).status_code == 503
            assert "more urgent" in (await held).json()["error"]["message"]
            release.set()
            assert [(await task).status_code for task in (*runs, urgent)] == [200] * 3
        assert running.router.admission.num_inside == 0


async def test_while_no_replica_is_there_everybody_is_held_whatever_the_objective():
    terms = AdmissionConfig(ttft_objective_s=0.001)
    port = free_port()
    with running_router(f"http://127.0.0.1:{port}", admission=terms) as running:
        async with client_of(running) as client:
            tasks = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(5)]
            await until_async(lambda: running.router.fleet.core.num_held == 5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_each_term_of_a_choice_is_told(capsys):
    async with routed(answers, answers, server={"api_keys": ()}) as (running, fakes), client_of(running) as client:
        asked = await client.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "mine"})
        told = (await client.get("/admin/fleet/choices/chatcmpl-mine")).json()
        assert told["request_id"] == "mine"
        assert [choice["replica"] for choice in told["choices"]] == [asked.headers["x-maitred-replica"]]
        assert len(told["choices"][0]["candidates"]) == len(fakes)
        assert (await client.get("/admin/fleet/choices/another")).status_code == httpx.codes.NOT_FOUND
        assert await maitred_thread("why", "mine", "--url", running.url) == 0
    shown = capsys.readouterr().out
    assert f"attempt 1: sent to {asked.headers['x-maitred-replica']}" in shown
    assert shown.count("->") == 1


def test_only_the_last_requests_are_remembered():
    choices = Choices()
    for number in range(MAX_REQUESTS + 5):
        choices.bound(Bind(f"request-{number:05}", Choice("a"), 1), 0.0)
    choices.bound(Bind("request-00100", Choice("b"), 2, resumes=True), 0.5)
    assert choices.of("request-00004") is None
    assert [(made.replica, made.resumes) for made in choices.of("request-00100").choices] == [("a", False), ("b", True)]


async def answers(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """As it was asked: streamed, whole, or not at all."""
    if b'"stream":true' in seen.body.replace(b" ", b""):
        writer.write(WHOLE_STREAM)
    else:
        writer.write(whole(completion(), "500 Broken" if b"fail" in seen.body else "200 OK"))


async def test_the_router_counts_the_promises_that_its_fleet_kept_or_none():
    async with routed(answers, server={"slo": ("ttft:60s", "e2e:0.000001s")}) as (running, _):
        async with client_of(running) as client:
            for fields in ({"stream": True}, {}):
                assert (await client.post("/v1/chat/completions", json=chat(**fields))).status_code == 200
            assert (await client.post("/v1/chat/completions", json=chat("fail"))).status_code == 500
        counts = await asyncio.to_thread(counted, running.url)
    assert (counts["ttft", True], counts["ttft", False]) == (2, 1)
    assert counts["e2e", False] == counts["all", False] == 3  # nobody answers in a microsecond
    async with routed(answers) as (running, _):
        httpx_answer = await asyncio.to_thread(httpx.post, f"{running.url}/v1/chat/completions", json=chat())
        assert (httpx_answer.status_code, await asyncio.to_thread(counted, running.url)) == (200, {})


TOKEN = FleetToken(b"0123456789abcdef0123456789abcdef")


def body(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


def with_adapters(adapters: list[str]) -> Script:
    """One of ours that tells by its events that nothing happens, and lists what is in `adapters` when it is asked."""

    async def well(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(completion()))

    other = one_of_ours(well)

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path == "/fleet/events":
            writer.write(STREAM_HEAD)
        elif seen.path == "/v1/models":
            cards = [{"id": MODEL, "parent": None}, *({"id": name, "parent": MODEL} for name in adapters)]
            writer.write(whole(json.dumps({"object": "list", "data": cards}).encode()))
        else:
            await other(seen, writer)

    return script


def num_looks(fake: FakeUpstream) -> int:
    return sum(seen.path == "/v1/models" for seen in fake.requests)


async def test_an_adapter_loaded_since_the_last_look_is_found_by_the_first_request_for_it():
    adapters: list[str] = []
    async with fake_upstream(with_adapters(adapters)) as fake:
        with running_router(fake.url, token=TOKEN) as running:
            await running.wait_for("ready")
            async with client_of(running) as client:
                assert (await client.post(CHAT, json=body(MODEL))).status_code == 200
                before = num_looks(fake)
                adapters += ["sql", "chat"]
                told = await asyncio.gather(*(client.post(CHAT, json=body("sql")) for _ in range(5)))
                assert [one.status_code for one in told] == [200] * 5
                assert before < num_looks(fake) <= before + 2, "they shared looks"
                assert (await client.post(CHAT, json=body("chat"))).status_code == 200
                wrong = await client.post(CHAT, json=body("sqm"))
                assert wrong.status_code == 404
                assert wrong.json()["error"]["message"] == (
                    "no replica serves the model 'sqm'; there are: mini, sql, chat"
                )
                assert (await client.get("/v1/models/sql")).json()["parent"] == MODEL


async def test_a_tenants_adapters_are_its_own():
    tenants = FakeTenants(table_of({"sql": {"adapters": ["sql"]}, "all": {"adapters": ["*"]}, "no": {}}))
    async with fake_upstream(with_adapters(["sql", "chat"])) as fake:
        with running_router(fake.url, token=TOKEN, tenants=tenants) as running:
            await running.wait_for("ready")
            async with client_of(running) as client:
                seen = {}
                for key in ("sql", "all", "no"):
                    headers = {"authorization": f"Bearer {key}"}
                    cards = (await client.get("/v1/models", headers=headers)).json()["data"]
                    answers = [await client.post(CHAT, json=body(name), headers=headers) for name in ("sql", "chat")]
                    seen[key] = [card["id"] for card in cards], [answer.status_code for answer in answers]
                assert seen == {
                    "sql": ([MODEL, "sql"], [200, 404]),
                    "all": ([MODEL, "sql", "chat"], [200, 200]),
                    "no": ([MODEL], [404, 404]),
                }
                refused = answers[0].json()["error"]["message"]
                assert refused == "no replica serves the model 'sql'; there are: mini"
    assert [one.headers.get("x-maitred-adapter") for one in asked(fake)] == ["sql", "sql", "chat"]


def serving(*names: str, models: list[str] | None = None) -> Script:
    """One of ours with these models of tensors beside the language model; `models` may change meanwhile."""
    served = models if models is not None else [*names]

    async def echo(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(seen.body or json.dumps(seen.path).encode()))

    other = one_of_ours(echo)

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path == "/version":
            told = {"version": "1", "name": "maitred", "models": [MODEL], "tensor_models": served}
            writer.write(whole(json.dumps(told).encode()))
        else:
            await other(seen, writer)

    return script


@asynccontextmanager
async def two(first: Script, second: Script) -> AsyncIterator[tuple[httpx.AsyncClient, list[FakeUpstream]]]:
    async with fake_upstream(first) as one, fake_upstream(second) as other:
        with running_router(one.url, other.url) as running:
            await running.wait_for("ready", "ready")
            async with client_of(running) as client:
                yield client, [one, other]


async def test_what_names_a_model_of_tensors_goes_to_a_replica_that_serves_it():
    paths = ("/v2/models/boxes", "/v2/models/boxes/versions/2/config", "/v1/models/boxes", "/v1/models/boxes/metadata")
    async with two(serving("faces"), serving("boxes")) as (client, (faces, boxes)):
        for path in paths:
            assert (await client.get(path)).json() == path
        for path in ("/v2/models/boxes/infer", "/v1/models/boxes:predict", "/v1/models/boxes/labels/new:predict"):
            assert (await client.post(path, content=b"\x00\x01 no JSON")).content == b"\x00\x01 no JSON"
        assert (await client.post("/v2/models/faces/infer", json={})).status_code == 200
        assert [seen.path for seen in asked(faces)] == ["/v2/models/faces/infer"]
        assert len(asked(boxes)) == len(paths) + 3
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == [MODEL], "chats ask none of them"


async def test_a_model_loaded_since_the_last_look_is_found():
    models: list[str] = []
    async with two(serving(), serving(models=models)) as (client, (_, second)):
        models.append("late")
        assert (await client.post("/v2/models/late/infer", json={})).status_code == 200
        assert [seen.path for seen in asked(second)] == ["/v2/models/late/infer"]


async def test_what_belongs_to_one_replica_is_refused_in_the_protocols_own_form():
    async with two(serving("boxes"), serving("boxes")) as (client, (first, second)):
        for path in ("/v2/repository/models/boxes/unload", "/v2/systemsharedmemory/region/mine/register"):
            refused = await client.post(path, json={})
            assert refused.status_code == 404
            assert refused.json() == {"error": f"{path} is not passed on to replicas; ask one at its own address"}
        assert (await client.get("/v1/models/nobody")).json()["error"]["code"] == "model_not_found"
        assert not asked(first) + asked(second)


@pytest.mark.parametrize("path", ["/v2/models/boxes/infer", "/v1/models/boxes:predict"])
async def test_a_replica_that_dies_before_it_answers_costs_nothing(path):
    dead: list[Seen] = []

    async def dies(seen: Seen, writer: asyncio.StreamWriter) -> None:
        dead.append(seen)
        writer.transport.abort()

    well = serving("boxes")

    def until_asked(script: Script) -> Script:
        async def chosen(seen: Seen, writer: asyncio.StreamWriter) -> None:
            is_first = seen.path == path and not dead
            await (dies if is_first else script)(seen, writer)

        return chosen

    async with two(until_asked(well), until_asked(well)) as (client, _):
        assert ((await client.post(path, json={"inputs": []})).json(), len(dead)) == ({"inputs": []}, 1)
