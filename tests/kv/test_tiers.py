"""Fetch or compute: one rule, and what is measured of a tier for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maitred.core.cost_model import SwapCosts
from maitred.core.errors import ConfigError
from maitred.kv.host import KVHost, open_kv_host
from maitred.kv.tiers import FetchMeter, KVFingerprint, break_even_tokens, worth_fetching
from maitred.scheduler.planning import worth_swapping

# -- tiers


MIB = 2**20


def test_a_fetch_is_worth_it_only_below_the_time_of_computing():
    assert worth_fetching(100 * MIB, 1024, bandwidth=1000 * MIB, latency_s=0.1, prefill_s_per_token=0.000196)
    assert not worth_fetching(100 * MIB, 1024, bandwidth=1000 * MIB, latency_s=0.1, prefill_s_per_token=0.000195)


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 16), st.floats(1e6, 1e11), st.floats(1e6, 1e11), st.floats(1e-6, 1))
def test_a_swap_is_a_fetch_that_waits_for_the_copy_out(num_bytes, num_tokens, out_speed, in_speed, prefill_s):
    costs = SwapCosts(num_bytes, out_speed, in_speed, prefill_s)
    before = 3 * num_bytes / out_speed + 3 * num_bytes / in_speed < num_tokens * prefill_s
    assert worth_swapping(costs, 3, num_tokens) is before  # to the last bit: logs of old servers replay


@given(st.floats(1, 1e6), st.floats(1e6, 1e11), st.floats(0, 1), st.floats(1e-6, 1e-2))
def test_break_even_is_where_the_rule_turns(bytes_per_token, bandwidth, latency_s, prefill_s):
    assume(abs(prefill_s - bytes_per_token / bandwidth) > 1e-9 * prefill_s)  # floats are too coarse between
    tokens = break_even_tokens(bytes_per_token, bandwidth, latency_s, prefill_s)

    def fetched(num_tokens):
        return worth_fetching(num_tokens * bytes_per_token, num_tokens, bandwidth, latency_s, prefill_s)

    if tokens is None:
        assert not fetched(1)
        assert not fetched(10**9)
    elif tokens < 10**9:  # floats are too coarse beyond
        assert fetched(tokens + 1 + tokens // 10**6)
        assert not fetched(max(0, tokens - 2 - tokens // 10**6))


def test_the_meter_finds_both_terms_of_fetches_of_many_sizes():
    meter = FetchMeter(bandwidth=1e6, latency_s=1.0)
    for i in range(40):
        num_bytes = (1 + i % 7) * MIB
        meter.fetched(num_bytes, 0.002 + num_bytes / 2e9)
    assert meter.bandwidth == pytest.approx(2e9, rel=1e-3)
    assert meter.latency_s == pytest.approx(0.002, rel=1e-3)


def test_the_meter_foretells_the_usual_fetch_also_where_all_are_alike():
    meter = FetchMeter(bandwidth=1e9, latency_s=0.001)
    for _ in range(5):
        meter.fetched(8 * MIB, 0.05)
    assert meter.seconds_for(8 * MIB) == pytest.approx(0.05)
    assert meter.latency_s == pytest.approx(0.001)


def test_the_meter_follows_a_link_that_became_slow():
    meter = FetchMeter(bandwidth=1e9, latency_s=0.001)
    for speed in (2e9, 1e8):
        for i in range(64):
            meter.fetched((1 + i % 3) * MIB, (1 + i % 3) * MIB / speed)
    assert meter.seconds_for(2 * MIB) == pytest.approx(2 * MIB / 1e8, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 100)), max_size=30))
def test_whatever_is_measured_the_terms_stay_possible(fetches):
    meter = FetchMeter(bandwidth=1e9, latency_s=0.001)
    for num_bytes, seconds in fetches:
        meter.fetched(num_bytes, seconds)
    assert meter.bandwidth > 0
    assert meter.latency_s >= 0


def test_whatever_decides_the_bytes_of_a_block_decides_the_fingerprint():
    ours = KVFingerprint(**{field.name: "same" for field in fields(KVFingerprint)})
    others = [replace(ours, **{field.name: "other"}) for field in fields(KVFingerprint)]
    assert len({fingerprint.digest() for fingerprint in [ours, *others]}) == 1 + len(others)
    assert replace(others[0], revision="same").digest() == ours.digest()


# -- host


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
