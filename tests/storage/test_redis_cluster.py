"""A Redis cluster of six: values, quotas and notices work there, and go on when a primary dies."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from maitred.core.clock import ManualClock
from maitred.kv.redis import open_kv_redis
from maitred.storage.redis_notices import Bound, Notices
from maitred.storage.redis_quota import QuotaExchange
from maitred.tenancy.shared import SharedQuotas
from tests.kv.test_disk import BLOCK, found, keys_of, rows_of
from tests.storage.redis_server import RunningRedis, free_port, needs_redis, running_redis
from tests.storage.test_redis import store_at, written
from tests.waiting import until, until_async

pytestmark = [needs_redis, pytest.mark.soak]
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


def test_kv_blocks_lie_on_all_primaries_and_outlive_one(nodes: list[RunningRedis]):
    keys = keys_of(NUM_KEYS)
    url = nodes[1].url.replace("redis://", "redis+cluster://")
    tier = open_kv_redis(url, max_block_bytes=BLOCK, bytes_per_block=BLOCK, fingerprint="")
    try:
        until(lambda: tier.write(keys, "", rows_of(keys)) == NUM_KEYS)
        assert found(tier, keys) == NUM_KEYS
        nodes[0].kill()
        until(lambda: tier.write(keys, "", rows_of(keys)) == found(tier, keys) == NUM_KEYS, limit_s=30.0)
        assert tier.clear() == NUM_KEYS
        assert found(tier, keys) == 0
    finally:
        tier.close()
