"""KV tier in host memory: what is written comes back, what is oldest goes, and who wants to know is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from maitred.core.errors import ConfigError
from maitred.kv.host import KVHost, open_kv_host

BLOCK = 64


def keys_of(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def rows_of(*numbers: int) -> memoryview:
    return memoryview(b"".join(bytes([number]) * BLOCK for number in numbers))


def read(host: KVHost, *numbers: int) -> tuple[int, bytes]:
    into = memoryview(bytearray(len(numbers) * BLOCK))
    count = host.read(keys_of(*numbers), into)
    return count, bytes(into[: count * BLOCK])


def write(host: KVHost, *numbers: int) -> int:
    return host.write(keys_of(*numbers), rows_of(*numbers))


def known(host: KVHost, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if host.num_known(keys_of(number))]


def test_what_was_written_is_read_up_to_the_first_that_lacks():
    host = open_kv_host(10 * BLOCK, BLOCK)
    assert write(host, 1, 2, 4) == 3
    assert read(host, 1, 2, 3, 4) == (2, bytes(rows_of(1, 2)))
    assert (host.stats.num_blocks, host.stats.num_bytes) == (3, 3 * BLOCK)
    assert (host.stats.num_hits, host.stats.num_misses) == (2, 2)


def test_what_was_used_longest_ago_goes_first():
    host = open_kv_host(3 * BLOCK + 5, BLOCK)
    write(host, 1, 2, 3)
    read(host, 1)
    host.touch(keys_of(2))
    write(host, 4)
    assert known(host, range(6)) == [1, 2, 4]
    write(host, 5)
    assert known(host, range(6)) == [2, 4, 5]
    assert read(host, 5) == (1, bytes(rows_of(5)))
    assert host.stats.num_evicted == 2


def test_it_tells_which_blocks_came_and_went():
    host = open_kv_host(2 * BLOCK, BLOCK)
    write(host, 1)
    host.tell_changes(True)
    write(host, 2, 3)
    assert host.changes is not None
    came, gone = host.changes.take(99)
    assert set(came) - set(gone) == set(keys_of(2, 3))
    host.tell_changes(False)
    assert host.changes is None


def test_cleared_and_closed_it_has_nothing_and_stores_nothing():
    host = open_kv_host(4 * BLOCK, BLOCK)
    write(host, 1, 2)
    assert host.clear() == 2
    assert write(host, 3) == 1
    host.close()
    assert write(host, 4) == host.num_known(keys_of(3)) == host.stats.num_bytes == 0


def test_a_bound_below_one_block_is_refused():
    with pytest.raises(ConfigError, match="--kv-host-bytes is 63, and one block takes 64"):
        open_kv_host(BLOCK - 1, BLOCK)
