"""Routers with a result cache, and several over one Redis, a real one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.storage.redis import PREFIX
from tests.api.test_tenants import table_of
from tests.conftest import ServerProcess, start_server
from tests.fakes_api import FakeTenants
from tests.fleet.routers import (
    RunningRouter,
    asked,
    chat,
    client_of,
    completion,
    routed,
    running_router,
    says,
    whole,
)
from tests.fleet.test_end_to_end import start_router
from tests.reliability.test_rolling_restart import Proxy, haproxy
from tests.storage.redis_server import needs_redis, running_redis
from tests.storage.test_redis import store_at
from tests.waiting import HANGS_S, until

CHAT = "/v1/chat/completions"
WELL = says(whole(completion()))
CACHE = {"result_cache_bytes": 1_000_000}
EXACT = chat(temperature=0)


async def ask(running: RunningRouter, key: str = "a", **fields: object) -> httpx.Response:
    async with client_of(running) as client:
        return await client.post(CHAT, json=EXACT | fields, headers={"authorization": f"Bearer {key}"})


def told(*answers: httpx.Response) -> list[str | None]:
    return [answer.headers.get("x-maitred-cache") for answer in answers]


async def test_a_router_gives_an_exact_answer_again_and_asks_no_replica():
    async with routed(WELL, server=CACHE) as (running, [fake]):
        answers = [await ask(running), await ask(running), await ask(running, temperature=0.5)]
        assert told(*answers) == ["miss", "hit", None]
        assert [answer.content for answer in answers] == [completion()] * 3
        assert len(asked(fake)) == 2


@needs_redis
async def test_two_routers_share_answers_and_limits_and_go_on_without_redis(tmp_path: Path):
    tenants = FakeTenants(table_of({"a": {"requests_per_minute": 8}, "free": {}}))
    with running_redis(tmp_path) as server:
        async with routed(WELL, tenants=tenants, redis=server.url, server=CACHE) as (one, [fake]):
            with running_router(fake.url, tenants=tenants, redis=server.url, server=CACHE) as other:
                await other.wait_for("ready")
                assert told(await ask(one, "free")) == ["miss"]
                await _an_answer_is_kept(server.url)
                assert told(await ask(other, "free")) == ["hit"]

                statuses = []
                for running in (one, other) * 8:
                    statuses.append((await ask(running, "a")).status_code)
                    await asyncio.sleep(0.12)
                assert 8 <= statuses.count(200) <= 10
                server.kill()
                for number in range(12):
                    answer = await ask(other, "free", seed=number)
                    assert (answer.status_code, told(answer)) == (200, ["miss"])
                page = other.router.metrics.page("")[0].decode()
                assert "maitred_redis_up 0.0" in page
                assert told(await ask(other, "free", seed=1)) == ["hit"], "of its own memory"


async def _an_answer_is_kept(url: str) -> None:
    """Wait until one is in Redis."""
    async with store_at(url) as store:
        for _ in range(2000):
            (keys,) = await store.ask([("KEYS", PREFIX + b"*")]) or [[]]
            if any(len(key) == len(PREFIX) + 32 for key in keys):
                return
            await asyncio.sleep(0.005)
    raise AssertionError("it was never written")


ASKED = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0}
LONG = ASKED | {"max_tokens": 1000, "stream": True, "ignore_eos": True}
PATH = "/v1/completions"


@dataclass(slots=True)
class Behind:
    """HAProxy, and behind it two routers before one replica."""

    proxy: Proxy
    routers: dict[str, ServerProcess]
    client: httpx.Client

    def kill(self, name: str) -> None:
        os.kill(self.routers[name].process.pid, signal.SIGKILL)

    def with_stream(self) -> str:
        """The router that has one under way."""
        return next(name for name, router in self.routers.items() if self._num_in_flight(router) > 1)

    def _num_in_flight(self, router: ServerProcess) -> float:
        lines = httpx.get(router.url + "/metrics", timeout=HANGS_S).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("maitred_http_requests_in_flight "))


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    replica = start_server()
    routers = {name: start_router(replica.url) for name in "ab"}
    ports = [int(router.url.rpartition(":")[2]) for router in routers.values()]
    proxy = Proxy(tmp_path, *ports)
    try:
        until(lambda: proxy.is_up("a") and proxy.is_up("b"))
        with httpx.Client(base_url=proxy.url, timeout=HANGS_S) as client:
            yield Behind(proxy, routers, client)
    finally:
        proxy.stop()
        for each in (*routers.values(), replica):
            each.stop()


def answered(client: httpx.Client, **fields: Any) -> str:
    answer = client.post(PATH, json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@haproxy
def test_when_a_router_is_killed_the_other_has_all_that_comes_and_a_stream_of_its_is_asked_again(behind: Behind):
    expected = answered(behind.client)
    with behind.client.stream("POST", PATH, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        killed = behind.with_stream()
        behind.kill(killed)
        with httpx.Client(base_url=behind.proxy.url, timeout=HANGS_S) as others:
            assert {answered(others) for _ in range(20)} == {expected}, "HAProxy sends nobody to the dead one twice"
        with pytest.raises(httpx.RemoteProtocolError):  # cut, and not ended as if it were whole
            list(lines)
    again = behind.client.post(PATH, json=LONG)
    assert again.text.endswith("data: [DONE]\n\n")
    until(lambda: not behind.proxy.is_up(killed))
