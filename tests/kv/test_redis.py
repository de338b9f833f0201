"""The KV Redis tier, at a real Redis: servers share blocks; whatever befalls it, nothing raises, no byte is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from maitred.core.errors import ConfigError
from maitred.engine.kv import described
from maitred.kv import redis as kv_redis
from maitred.kv.redis import KVRedis, open_kv_redis
from maitred.kv.tiers import DropReason
from maitred.storage.redis import PREFIX
from tests.kv.test_disk import BLOCK, dropped, found, keys_of, rows_of
from tests.storage.redis_server import RunningRedis, free_port, needs_redis, running_redis
from tests.waiting import until

pytestmark = needs_redis
KEYS = keys_of(20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningRedis]:
    with running_redis(tmp_path) as running:
        yield running


@contextmanager
def tier_at(url: str, fingerprint: str = "this model") -> Iterator[KVRedis]:
    tier = open_kv_redis(url, max_block_bytes=4096, bytes_per_block=BLOCK, fingerprint=fingerprint)
    try:
        yield tier
    finally:
        tier.close()


def stored(tier: KVRedis, keys: Sequence[bytes]) -> None:
    """In one of the next tries: a Redis that has just come is known after a probe."""
    until(lambda: tier.write(keys, rows_of(keys)) == len(keys), limit_s=20.0)


def lost(tier: KVRedis) -> None:
    """Until the breaker is open; nothing is found meanwhile."""
    until(lambda: found(tier, KEYS) == 0 and not tier._store.is_up, limit_s=20.0)
    assert tier.write(KEYS, rows_of(KEYS)) == 0
    assert tier.stats.dropped[DropReason.UNREACHABLE] >= len(KEYS)


def client_of(server: RunningRedis) -> Any:
    from redis import Redis

    return Redis(port=server.port)


def test_what_one_server_stores_another_finds(server: RunningRedis):
    with tier_at(server.url) as one, tier_at(server.url) as other, tier_at(server.url, "another model") as stranger:
        stored(one, KEYS[:15])
        assert one.num_known(KEYS) == 15
        assert other.num_known(KEYS) == 0  # nobody asked yet
        assert found(other, KEYS) == other.num_known(KEYS) == 15
        assert (other.stats.num_hits, other.stats.num_misses, one.stats.num_written) == (15, 5, 15)
        assert other.write(KEYS, rows_of(KEYS)) == 20
        assert other.stats.num_written == 5  # those that it did not know
        assert found(stranger, KEYS) == 0


def test_blocks_that_redis_let_go_end_the_prefix_and_are_known_no_more(server: RunningRedis):
    with tier_at(server.url) as tier:
        stored(tier, KEYS)
        client_of(server).delete(PREFIX + tier._name(KEYS[7]))
        assert found(tier, KEYS) == tier.num_known(KEYS) == 7
        client_of(server).flushall()
        assert found(tier, KEYS) == tier.num_known(KEYS) == 0
        assert not +tier.stats.dropped
        stored(tier, KEYS)
        assert found(tier, KEYS) == 20


def test_a_value_that_was_changed_cut_moved_or_of_another_type_is_a_miss_and_deleted(server: RunningRedis):
    with tier_at(server.url) as tier:
        names = [PREFIX + tier._name(key) for key in KEYS]
        client = client_of(server)

        def changed(name: bytes, *command: Any) -> None:
            stored(tier, KEYS)
            client.delete(name)
            client.execute_command(*command)
            before = tier.stats.dropped.total()
            assert found(tier, KEYS) == tier.num_known(KEYS) == 3
            assert tier.stats.dropped.total() == before + 1
            assert not client.exists(name)

        stored(tier, KEYS)
        good, other = client.get(names[3]), client.get(names[4])
        for place in (0, BLOCK // 2, BLOCK - 1, BLOCK, BLOCK + 7):
            flipped = bytearray(good)
            flipped[place] ^= 4
            changed(names[3], "SET", names[3], bytes(flipped))
        changed(names[3], "SET", names[3], other)
        changed(names[3], "SET", names[3], good[:-1])
        changed(names[3], "LPUSH", names[3], b"x")
        assert dropped(tier) == {DropReason.DAMAGED: 6, DropReason.TORN: 2}
        assert found(tier, KEYS[4:]) == 16


def test_clear_deletes_this_model_s_blocks_and_no_others(server: RunningRedis):
    with tier_at(server.url) as tier, tier_at(server.url, "another model") as other:
        stored(tier, KEYS)
        stored(other, KEYS)
        assert tier.clear() == 20
        assert found(tier, KEYS) == tier.num_known(KEYS) == 0
        assert found(other, KEYS) == 20


def test_killed_nothing_is_found_and_when_it_comes_back_blocks_are_stored_again(server: RunningRedis, caplog):
    with tier_at(server.url) as tier:
        stored(tier, KEYS)
        server.kill()
        lost(tier)
        server.start()
        stored(tier, KEYS)
        assert found(tier, KEYS) == 20
    told = [record.message for record in caplog.records if "Redis at" in record.message]
    assert ["the KV tier goes on without it" in line for line in told] == [True, False]


def test_frozen_it_is_given_up_and_used_when_it_goes_on(server: RunningRedis):
    with tier_at(server.url) as tier:
        stored(tier, KEYS)
        server.freeze()
        lost(tier)
        server.thaw()
        stored(tier, KEYS)
        assert found(tier, KEYS) == 20


def test_down_at_the_start_it_is_found_when_it_comes(tmp_path: Path):
    late = RunningRedis(tmp_path, port=free_port())
    with tier_at(late.url) as tier:
        lost(tier)
        late.start()
        try:
            stored(tier, KEYS)
        finally:
            late.kill()


@pytest.mark.parametrize("option", [("--maxmemory", "1", "--maxmemory-policy", "noeviction"), ("--requirepass", "x")])
def test_a_full_one_and_one_with_another_password_cost_blocks_and_nothing_else(tmp_path: Path, option):
    with running_redis(tmp_path, *option) as server, tier_at(server.url) as tier:
        until(lambda: tier.write(KEYS, rows_of(KEYS)) == 0 and not tier._store.is_up, limit_s=20.0)
        assert found(tier, KEYS) == 0
        assert tier.stats.dropped.total() >= 20


def test_with_a_small_memory_redis_evicts_by_its_own_policy_and_no_byte_is_wrong(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(kv_redis, "KNOWN_S", -1.0)  # nothing is believed to be there
    with (
        running_redis(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru") as server,
        tier_at(server.url) as tier,
    ):
        chains = [keys_of(100, f"chain {i}") for i in range(100)]
        for chain in chains:
            tier.write(chain, rows_of(chain))
        assert 0 < sum(found(tier, [key]) for chain in chains for key in chain[:5]) < 500
        assert not +tier.stats.dropped


def test_after_close_it_answers_that_there_is_nothing(server: RunningRedis):
    with tier_at(server.url) as tier:
        stored(tier, KEYS)
    assert found(tier, KEYS) == tier.write(KEYS, rows_of(KEYS)) == tier.clear() == 0
    tier.close()


def test_a_start_tells_whether_redis_answers_and_not_how_many_blocks_it_knows_of(server: RunningRedis):
    with tier_at(f"redis://127.0.0.1:{free_port()}") as nowhere, tier_at(server.url) as there:
        line = described(nowhere, 16)
        assert "redis cannot be used" in line
        assert "connecting to 127.0.0.1" in line
        assert described(there, 16).startswith("kv      redis answers")
        assert "0 blocks" not in line + described(there, 16)


def test_a_block_over_the_bound_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="is 255, and a block takes 256"):
        open_kv_redis("redis://127.0.0.1:1", max_block_bytes=255, bytes_per_block=BLOCK, fingerprint="")
