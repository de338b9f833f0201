"""Fetch or compute: one rule, and what is measured of a tier for it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maitred.kv.tiers import FetchMeter, KVFingerprint, break_even_tokens, worth_fetching
from maitred.scheduler.swap import SwapCosts, worth_swapping

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
