"""`--result-cache-bytes`: the same bytes again to the same request of the same tenant, and no work for the engine."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.api.dialects.openai.answers import OPENAI
from maitred.api.http.bodies import LargeBodies
from maitred.api.http.exchange import Exchange
from maitred.api.http.results import Results
from maitred.core.clock import ManualClock
from maitred.storage.ledger import Ledger
from maitred.storage.redis import PREFIX, RedisStore
from maitred.tenancy.caller import anybody
from tests.api.conftest import MESSAGES
from tests.api.test_tenants import table_of
from tests.fakes_api import FakeReplica, FakeTenants, RunningServer, running_server
from tests.storage.redis_server import needs_redis, running_redis
from tests.storage.test_redis import store_at, written
from tests.waiting import until

CHAT = "/v1/chat/completions"
EXACT = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def caching(clock: ManualClock) -> Iterator[RunningServer]:
    with running_server(clock=clock, result_cache_bytes=1_000_000, result_cache_ttl_s=60.0) as server:
        yield server


def ask(server: RunningServer, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}{CHAT}", json=body or EXACT, headers=named)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"seed": 7, "temperature": 1, "n": 2}])
def test_the_second_answer_is_the_first_one_again(caching: RunningServer, more: dict[str, Any]):
    first, second = (ask(caching, EXACT | more) for _ in range(2))
    assert [r.headers["x-maitred-cache"] for r in (first, second)] == ["miss", "hit"]
    assert second.content == first.content, "id and created included"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert second.headers["x-request-id"] != first.headers["x-request-id"]
    assert len(caching.replica.submitted) == more.get("n", 1)


def test_a_hit_names_unknown_fields_and_neither_new_draws_nor_refusals_are_kept(caching: RunningServer):
    for came in ("miss", "hit"):
        headers = ask(caching, EXACT | {"poems": 1}).headers
        assert (headers["x-maitred-cache"], headers.get_list("x-maitred-ignored-fields")) == (came, ["poems"])
    caching.replica.submitted.clear()
    for _ in range(2):
        assert "x-maitred-cache" not in ask(caching, {"messages": MESSAGES}).headers
    assert len(caching.replica.submitted) == 2
    wrong = EXACT | {"max_tokens": 10_000}
    assert [ask(caching, wrong).status_code for _ in range(2)] == [400, 400]


def test_a_client_may_refuse_an_old_answer_or_that_one_is_kept(caching: RunningServer, clock: ManualClock):
    def told(**headers: str) -> str:
        return ask(caching, **headers).headers["x-maitred-cache"]

    assert told(cache_control="no-store") == told() == "miss"
    assert told(cache_control="no-store") == "hit", "it forbids keeping, not giving"
    clock.advance(10.0)
    assert (told(cache_control="max-age=10"), told(cache_control="max-age=10")) == ("miss", "hit")
    assert told(cache_control="no-cache") == "miss"
    until(lambda: ask(caching).headers.get("age") == "0")  # it is kept a moment after it was sent
    clock.advance(59.0)
    old = ask(caching)
    assert (old.headers["x-maitred-cache"], old.headers["age"]) == ("hit", "59")
    clock.advance(1.0)
    assert told() == "miss"


def test_errors_in_mid_stream_and_answers_that_a_quota_may_cut_are_not_kept():
    with running_server(FakeReplica(fail_after=3), result_cache_bytes=1_000_000) as server:
        answers = [ask(server, EXACT | {"stream": True}) for _ in range(2)]
    assert [a.headers["x-maitred-cache"] for a in answers] == ["miss", "miss"]
    assert b"error" in answers[1].content
    tenants = FakeTenants(table_of({"a": {"tokens_per_minute": 10_000}}))
    with running_server(tenants=tenants, result_cache_bytes=1_000_000) as server:
        answer = ask(server, {"messages": MESSAGES, "temperature": 0}, authorization="Bearer a")
    assert "x-maitred-cache" not in answer.headers
    with running_server() as server:
        assert all("x-maitred-cache" not in ask(server).headers for _ in range(2))
        assert len(server.replica.submitted) == 2


def test_a_hit_is_a_request_of_its_tenant_without_tokens_and_nobody_elses(clock: ManualClock, tmp_path: Path):
    tenants = FakeTenants(table_of({"a": {"requests_per_minute": 2, "tokens_per_minute": 400}, "b": {}}))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with running_server(tenants=tenants, ledger=ledger, clock=clock, result_cache_bytes=1_000_000) as server:
        keys = [f"Bearer {name}" for name in ("a", "a", "a", "b")]
        answers = [ask(server, authorization=key) for key in keys]
        ledger.flush()
    ledger.close()
    assert [a.status_code for a in answers] == [200, 200, 429, 200]
    assert [answers[i].headers["x-maitred-cache"] for i in (0, 1, 3)] == ["miss", "hit", "miss"]
    left = [answers[i].headers["x-ratelimit-remaining-tokens"] for i in (0, 1)]
    assert int(left[1]) >= int(left[0])
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        rows = db.execute("SELECT tenant, num_requests, prompt_tokens, generated_tokens FROM request").fetchall()
        assert rows == [("a", 1, 0, 0)], "the fake engine tells the ledger nothing"
        assert db.execute("SELECT status FROM request").fetchone() == ("cached",)


def test_metrics_count_hits_and_misses(caching: RunningServer):
    for _ in range(3):
        ask(caching)
    page = httpx.get(f"{caching.url}/metrics").text
    assert 'maitred_result_cache_requests_total{result="hit"} 2.0' in page
    assert 'maitred_result_cache_requests_total{result="miss"} 1.0' in page


MARKER = b"marker"
BODY = b'{"prompt":"x","temperature":0}'


async def asked(results: Results, answer: bytes = b"{}") -> tuple[str, bytes]:
    """What the cache told, and the body that left, after one request."""
    left: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        left.append(message)

    exchange = Exchange(
        scope={"path": "/v1/completions"},
        receive=None,  # type: ignore[arg-type]  # the body is read already
        raw_send=send,
        request_id="r",
        max_body_bytes=1000,
        large_bodies=LargeBodies(1000),
        headers={},
        format=OPENAI,
    )
    exchange.caller = anybody()
    wanted = results.wanted(exchange, BODY, revision="r", temperature=0, seed=None)
    if not await results.replay(exchange, wanted):
        await exchange.answer(answer, 200, ((b"content-type", b"application/json"),))
        results.keep(exchange, wanted)
    return dict(left[0]["headers"])[b"x-maitred-cache"].decode(), left[1]["body"]


def router(store: RedisStore) -> Results:
    return Results(100_000, 60.0, ManualClock(5.0), shared=store)


async def key_of(store: RedisStore) -> bytes:
    (keys,) = await store.ask([("KEYS", PREFIX + b"*")]) or [[]]
    (key,) = (key for key in keys if not key.endswith((b"probe", MARKER)))
    return bytes(key)


@needs_redis
async def test_one_routers_answer_is_anothers_hit_and_a_damaged_one_is_dropped(tmp_path: Path):
    with running_redis(tmp_path) as server:
        async with store_at(server.url) as store:
            assert await asked(router(store), b"first") == ("miss", b"first")
            await written(store, MARKER)  # in order
            assert await asked(router(store)) == ("hit", b"first")

            key = await key_of(store)
            await store.ask([("SETRANGE", key, 60, b"#")])
            third = router(store)
            assert (await asked(third, b"again"), third.num_corrupt) == (("miss", b"again"), 1)
            await written(store, MARKER, b"2")
            assert await asked(router(store)) == ("hit", b"again")

            server.kill()
            while store.is_up:
                assert await asked(router(store), b"alone") == ("miss", b"alone")
            assert await asked(third) == ("hit", b"again"), "of its own memory"
