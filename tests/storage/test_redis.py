"""Redis that routers share, a real one: whatever befalls it, nobody waits, nothing raises, and it is used again."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from maitred.core.errors import ConfigError
from maitred.storage import redis
from maitred.storage.redis import LOOK_UP_S, MAX_FAILURES, MAX_QUEUED, Breaker, RedisStore
from maitred.storage.redis_notices import Bound, Notices
from tests.storage.redis_server import RunningRedis, needs_redis, running_redis, slow_proxy
from tests.waiting import until_async

pytestmark = needs_redis
KEY = b"key"
SLACK_S = 1.0  # of a busy machine; without a limit each look-up below would take for ever


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningRedis]:
    with running_redis(tmp_path) as running:
        yield running


@asynccontextmanager
async def store_at(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, probe_s=0.1)
    store.start()
    try:
        yield store
    finally:
        await store.close()


async def written(store: RedisStore, key: bytes = KEY, value: bytes = b"value") -> None:
    """Put, and wait until it is there."""
    store.put(key, value, 60.0)
    for _ in range(2000):
        if await store.get(key) == value:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it was never written")


async def gone(store: RedisStore, key: bytes = KEY) -> None:
    """Wait until it is there no more."""
    for _ in range(2000):
        if await store.get(key) is None:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it was never deleted")


async def looked_up_until_open(store: RedisStore) -> None:
    """No look-up takes longer than it may, and after a few the breaker is open."""
    for _ in range(50):
        began = time.monotonic()
        assert await store.get(KEY) is None
        assert time.monotonic() - began < LOOK_UP_S + SLACK_S
        if not store.is_up:
            return
    raise AssertionError("the breaker never opened")


async def up_again(store: RedisStore) -> None:
    await until_async(lambda: store.is_up, limit_s=10.0)
    await written(store, b"later", b"on")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """How often the log said that Redis is gone, and that it is back."""
    caplog.set_level(logging.WARNING, "maitred.storage.redis")
    return lambda: [
        sum(words in record.message for record in caplog.records) for words in ("goes on without it", "used again")
    ]


async def test_what_one_router_writes_another_finds(server: RunningRedis):
    async with store_at(server.url) as one, store_at(server.url) as other:
        await written(one)
        assert await other.get(KEY) == b"value"
        other.drop(KEY)
        await gone(one)


async def test_killed_and_started_again_it_is_used_again_and_each_is_told_once(server: RunningRedis, told: Any):
    async with store_at(server.url) as store:
        await written(store)
        server.kill()
        await looked_up_until_open(store)
        for _ in range(20):
            store.put(KEY, b"lost", 60.0)
        assert store.num_dropped >= 20
        server.start()
        await up_again(store)
        assert await store.get(KEY) is None
    assert told() == [1, 1]


async def test_down_at_the_start_it_is_found_when_it_comes(tmp_path: Path, told: Any):
    late = RunningRedis(tmp_path)
    async with store_at(late.url) as store:
        await looked_up_until_open(store)
        late.start()
        try:
            await up_again(store)
        finally:
            late.kill()
    assert told() == [1, 1]


async def test_frozen_it_costs_a_look_up_30_ms_and_then_nothing(server: RunningRedis, told: Any):
    async with store_at(server.url) as store:
        await written(store)
        server.freeze()
        await looked_up_until_open(store)
        server.thaw()
        await up_again(store)
    assert told() == [1, 1]


async def test_one_that_answers_late_is_given_up_until_it_is_faster(server: RunningRedis, told: Any):
    async with slow_proxy(server.port) as proxy, store_at(f"redis://127.0.0.1:{proxy.port}") as store:
        await written(store)
        proxy.passing.clear()
        await looked_up_until_open(store)
        proxy.passing.set()
        await up_again(store)
    assert told() == [1, 1]


async def test_a_full_one_that_takes_no_writes_is_given_up(tmp_path: Path, told: Any):
    with running_redis(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction") as full:
        async with store_at(full.url) as store:
            while store.is_up:
                store.put(KEY, b"value", 60.0)
                await asyncio.sleep(0.01)
            assert await store.get(KEY) is None
    assert told() == [1, 0]


async def test_a_wrong_password_is_told_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture, told: Any):
    with running_redis(tmp_path, "--requirepass", "right") as locked:
        async with store_at(f"redis://:wrong@127.0.0.1:{locked.port}") as store:
            await looked_up_until_open(store)
        async with store_at(f"redis://:right@127.0.0.1:{locked.port}") as store:
            await written(store)
    assert told() == [1, 0]
    assert "password" in caplog.text
    assert ":wrong" not in caplog.text


async def test_flushed_it_is_empty_and_works(server: RunningRedis, told: Any):
    async with store_at(server.url) as store:
        await written(store)
        store.write(("FLUSHALL",))
        await until_async(lambda: not store._queue)
        await written(store, b"after")
    assert told() == [0, 0]


async def test_a_value_of_another_type_is_deleted_and_no_failure(server: RunningRedis):
    async with store_at(server.url) as store:
        store.write(("LPUSH", redis.PREFIX + KEY, b"x"))
        await written(store)
        assert store.is_up


async def test_what_waits_to_be_written_is_bounded(server: RunningRedis):
    async with store_at(server.url) as store:
        await written(store)
        before = store.num_dropped
        for _ in range(MAX_QUEUED + 10):
            store.put(KEY, b"v", 60.0)
        assert store.num_dropped - before >= 10
        await until_async(lambda: not store._queue)
        await written(store, b"after")


async def test_routers_hear_of_each_others_sessions_and_prefixes(server: RunningRedis):
    heard: list[Bound] = []
    async with store_at(server.url) as one, store_at(server.url) as other:
        speaker, listener = Notices(one, heard.append), Notices(other, heard.append)
        sent = [Bound("http://a:1", 2**64 - 1, ()), Bound("http://b:1", None, (1, 2**63))]
        for notice in sent:
            speaker.tell(notice)
        one.write(("XADD", redis.PREFIX + b"notices", "*", "notice", b"\xc1"))
        listener.start()
        await until_async(lambda: len(heard) == 2 and listener.num_unreadable == 1)
        assert heard == sent
        assert await speaker.look() == 3
        assert heard == sent, "its own are no news to it"
        listener.stop()


def test_a_breaker_opens_after_failures_in_a_row_and_tells_each_change_once():
    breaker = Breaker()
    for _ in range(MAX_FAILURES - 1):
        assert not breaker.failed()
    assert not breaker.worked()
    assert [breaker.failed() for _ in range(MAX_FAILURES + 1)] == [False] * (MAX_FAILURES - 1) + [True, False]
    assert [breaker.worked(), breaker.worked()] == [True, False]


async def test_a_wrong_url_and_a_missing_package_are_told_plainly(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"redis is 'redis://127\.0\.0\.1:x'") as refused:
        RedisStore("redis://u:secret@127.0.0.1:x")
    assert "secret" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ConfigError, match=r"pip install 'maitred\[redis\]'"):
        RedisStore("redis://127.0.0.1")
