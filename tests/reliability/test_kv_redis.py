"""KV in Redis between real servers: what one computed another reads, and a Redis that dies costs no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.config import TiersConfig
from maitred.core.errors import ConfigError
from maitred.storage.redis import PREFIX
from tests.conftest import ServerProcess, start_server
from tests.storage.redis_server import RunningRedis, needs_redis
from tests.waiting import HANGS_S, until

STORY = "The maître d' decides who is seated next, keeps every table full, and knows the regulars. " * 12
BODY: dict[str, Any] = {"prompt": STORY, "max_tokens": 24, "temperature": 0.9, "seed": 3, "n": 2, "ignore_eos": True}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RunningRedis]:
    made = RunningRedis(tmp_path)
    made.start()
    yield made
    made.kill()


def complete(server: ServerProcess, **changes: Any) -> dict[str, Any]:
    return httpx.post(f"{server.url}/v1/completions", json=BODY | changes, timeout=HANGS_S).json()


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def stored(server: ServerProcess) -> int:
    (tier,) = httpx.get(f"{server.url}/admin/kv").json()["tiers"]
    return int(tier["stored_blocks"]) if not tier["waiting_blocks"] else 0


def is_read_by(second: ServerProcess, first: ServerProcess, prompt: str) -> bool:
    """Whether it was; on a busy machine a fetch may seem slower than computing. The text is the same either way."""
    before, said = stored(first), complete(first, prompt=prompt)
    until(lambda: stored(first) > before)
    found = complete(second, prompt=prompt)
    assert found["choices"] == said["choices"]
    return cached(found) >= said["usage"]["prompt_tokens"] - 16


def is_damaged_for(second: ServerProcess, first: ServerProcess, redis: RunningRedis, prompt: str) -> bool:
    """Whether it was fetched with a flipped bit, and counted. The text is the same either way, for a greedy one too."""
    before, body = stored(first), {"prompt": prompt, "temperature": 0.9, "n": 4}
    said = complete(first, **body)
    until(lambda: stored(first) > before)
    flip_all(redis)
    assert complete(second, **body)["choices"] == said["choices"]
    greedy = {"prompt": prompt, "temperature": 0, "n": 1}
    assert complete(second, **greedy)["choices"] == complete(first, **greedy)["choices"]
    (tier,) = httpx.get(f"{second.url}/admin/kv").json()["tiers"]
    return bool(tier["dropped"].get("damaged"))


def flip_all(redis: RunningRedis) -> None:
    """A bit of each block that is there."""
    from redis import Redis

    client = Redis(port=redis.port)
    for name in client.scan_iter(PREFIX + b"*"):
        value = bytearray(client.get(name))
        value[len(value) // 2] ^= 4
        client.set(name, bytes(value))


@needs_redis
def test_what_one_server_computed_another_reads_and_a_redis_that_lies_or_dies_costs_no_answer(redis: RunningRedis):
    first = start_server("--kv-redis", redis.url)
    try:
        second = start_server("--kv-redis", redis.url)
        try:
            assert any(is_read_by(second, first, f"{number}. {STORY}") for number in range(10))
            assert any(is_damaged_for(second, first, redis, f"{number} bits. {STORY}") for number in range(10))
            redis.kill()
            other = "Of soups and stews. " + STORY
            assert complete(second, prompt=other)["choices"] == complete(first, prompt=other)["choices"]
        finally:
            second.stop()
    finally:
        first.stop()


def test_a_bound_that_holds_no_block_is_refused():
    with pytest.raises(ConfigError, match="kv_redis_max_block_bytes"):
        TiersConfig(kv_redis_max_block_bytes=0)
