"""Redis that routers share, a real one: whatever befalls it, nobody waits, nothing raises, and it is used again."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from maitred.core.clock import ManualClock
from maitred.core.errors import ConfigError, RateLimited
from maitred.kv.redis import open_kv_redis
from maitred.storage import redis
from maitred.storage.redis import MAX_FAILURES, MAX_QUEUED, PREFIX, Breaker, RedisStore
from maitred.storage.redis_routers import Bound, Notices, QuotaExchange
from maitred.tenancy.quota import QuotaBook
from maitred.tenancy.shared import SharedQuotas
from maitred.tenancy.tenant import Limits, Tenant
from tests.kv.test_disk import BLOCK, found, keys_of, rows_of
from tests.storage.redis_server import RunningRedis, free_port, needs_redis, running_redis, slow_proxy
from tests.waiting import HANGS_S, until, until_async

pytestmark = needs_redis
KEY = b"key"


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
    """Every look-up ends, though no answer comes, and after a few the breaker is open."""
    async with asyncio.timeout(HANGS_S):
        while store.is_up:
            assert await store.get(KEY) is None


async def up_again(store: RedisStore) -> None:
    await until_async(lambda: store.is_up)
    await written(store, b"later", b"on")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """How often the log said that Redis is gone, and that it is back."""
    caplog.set_level(logging.WARNING, "maitred.storage.redis")
    return lambda: [
        sum(words in record.message for record in caplog.records) for words in ("goes on without it", "used again")
    ]


async def test_what_one_router_writes_another_finds_and_a_value_of_another_type_is_no_failure(server: RunningRedis):
    async with store_at(server.url) as one, store_at(server.url) as other:
        await written(one)
        assert await other.get(KEY) == b"value"
        other.drop(KEY)
        await gone(one)
    async with store_at(server.url) as store:
        store.write(("LPUSH", redis.PREFIX + KEY, b"x"))
        await written(store)
        assert store.is_up


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


@pytest.mark.parametrize("is_frozen", [True, False])
async def test_frozen_or_late_look_ups_are_not_waited_for(server: RunningRedis, told: Any, is_frozen: bool):
    async with slow_proxy(server.port) as proxy, store_at(f"redis://127.0.0.1:{proxy.port}") as store:
        await written(store)
        (server.freeze if is_frozen else proxy.passing.clear)()
        await looked_up_until_open(store)
        (server.thaw if is_frozen else proxy.passing.set)()
        await up_again(store)
    assert told() == [1, 1]


async def test_a_full_one_and_a_wrong_password_are_given_up_and_told(tmp_path: Path, told: Any):
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


async def test_what_waits_is_bounded_and_flushed_it_is_empty_and_works(server: RunningRedis, told: Any):
    async with store_at(server.url) as store:
        await written(store)
        before = store.num_dropped
        for _ in range(MAX_QUEUED + 10):
            store.put(KEY, b"v", 60.0)
        assert store.num_dropped - before >= 10
        await until_async(lambda: not store._queue)
        await written(store, b"after")
    async with store_at(server.url) as store:
        await written(store)
        store.write(("FLUSHALL",))
        await until_async(lambda: not store._queue)
        await written(store, b"after")
    assert told() == [0, 0]


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
        assert (heard, await speaker.look()) == (sent, 3)
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


LIMIT = 40
TENANT = Tenant(name="a", limits=Limits(requests_per_minute=LIMIT))


def let_in(book: QuotaBook, wanted: int, now: float) -> int:
    for number in range(wanted):
        try:
            book.of(TENANT).enter(1, now).end(0)
        except RateLimited:
            return number
    return wanted


async def test_two_routers_share_a_limit_and_each_has_its_own_while_redis_is_gone(tmp_path: Path):
    clock = ManualClock(1000.0)
    books = [QuotaBook({}), QuotaBook({})]
    with running_redis(tmp_path) as server:
        async with store_at(server.url) as one, store_at(server.url) as other:
            exchanges = []
            for book, store in zip(books, (one, other), strict=True):
                book.shared = SharedQuotas()
                exchanges.append(QuotaExchange(store, book.shared, clock))
            total = [0, 0]
            for _ in range(LIMIT):
                for number, (book, exchange) in enumerate(zip(books, exchanges, strict=True)):
                    total[number] += let_in(book, 2, clock.now())
                    await exchange.exchange()
            assert LIMIT <= sum(total) <= LIMIT + 2, "one exchange's worth beyond at most"
            assert min(total) >= LIMIT // 4
            for _ in range(3):
                await exchanges[0].exchange()
            key = PREFIX + b"quota:{a}:requests"
            (entries,) = await one.ask([("HVALS", key)]) or [[]]
            assert sum(map(int, entries)) == sum(total), "what was leased and not used went back"

            server.kill()
            while one.is_up:
                await exchanges[0].exchange()
            assert let_in(books[0], LIMIT, clock.now()) == LIMIT - total[0]


async def test_a_bucket_of_another_type_limits_nobody(tmp_path: Path):
    clock, book = ManualClock(1000.0), QuotaBook({})
    book.shared = SharedQuotas()
    with running_redis(tmp_path) as server:
        async with store_at(server.url) as store:
            exchange = QuotaExchange(store, book.shared, clock)
            await store.ask([("SET", PREFIX + b"quota:{a}:requests", "x")])
            assert let_in(book, 1, 1000.0) == 1
            await exchange.exchange()
            assert let_in(book, LIMIT, 1000.0) == LIMIT - 1
            assert store.is_up


NUM_KEYS = 40  # over all primaries


def cli(node: RunningRedis, *words: str) -> str:
    command = ["redis-cli", "-p", str(node.port), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False).stdout


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[RunningRedis]]:
    with ExitStack() as stack:
        servers = []
        for number in range(6):
            folder = tmp_path / str(number)
            folder.mkdir()
            bus = ("--cluster-port", str(free_port()))  # by itself 10,000 above the other, which may be too high
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", *bus)
            servers.append(stack.enter_context(running_redis(folder, *options)))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        cli(servers[0], "--cluster", "create", *addresses, "--cluster-replicas", "1", "--cluster-yes")
        until(lambda: all("cluster_state:ok" in cli(server, "cluster", "info") for server in servers))
        until(lambda: all("master_link_status:down" not in cli(server, "info", "replication") for server in servers))
        yield servers


@pytest.mark.soak
async def test_a_cluster_serves_and_goes_on_without_one_of_its_primaries(nodes: list[RunningRedis]):
    heard: list[Bound] = []
    bound = Bound("http://a:1", 1, ())
    url = nodes[1].url.replace("redis://", "redis+cluster://")
    keys = [f"key{number}".encode() for number in range(NUM_KEYS)]
    async with store_at(url) as one, store_at(url) as other:
        quotas = SharedQuotas()
        exchange, listener = QuotaExchange(one, quotas, ManualClock(1000.0)), Notices(other, heard.append)
        listener.start()
        for key in keys:
            await written(one, key)
        quotas.of("a").requests.left(1000.0, 80)
        await exchange.exchange()
        assert quotas.of("a").requests.left(1000.0, 80) == 80
        Notices(one, heard.append).tell(bound)
        await until_async(lambda: heard == [bound])

        nodes[0].kill()
        await _all_written(one, keys)
        await _all_written(other, keys)
        listener.stop()


async def _all_written(store, keys: list[bytes]) -> None:
    """Within the test's own limit every key can be written and read again."""
    async with asyncio.timeout(60.0):
        for key in keys:
            while await store.get(key) != b"again":
                store.put(key, b"again", 60.0)
                await asyncio.sleep(0.02)


@pytest.mark.soak
def test_kv_blocks_lie_on_all_primaries_and_outlive_one(nodes: list[RunningRedis]):
    keys = keys_of(NUM_KEYS)
    url = nodes[1].url.replace("redis://", "redis+cluster://")
    tier = open_kv_redis(url, max_block_bytes=BLOCK, bytes_per_block=BLOCK, fingerprint="")
    try:
        until(lambda: tier.write(keys, "", rows_of(keys)) == NUM_KEYS)
        assert found(tier, keys) == NUM_KEYS
        nodes[0].kill()
        until(lambda: tier.write(keys, "", rows_of(keys)) == found(tier, keys) == NUM_KEYS, limit_s=30.0)
        assert (tier.clear(), found(tier, keys)) == (NUM_KEYS, 0)
    finally:
        tier.close()
