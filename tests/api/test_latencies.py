"""Percentiles of the last minute, and places in the picture."""

from __future__ import annotations

import random

import pytest

from maitred.api.ops.live_feed import GROWTH, MAX_TENANTS, NUM_SLICES, SLICE_S, Latencies, RecentTimes, SlotRows
from maitred.core.clock import ManualClock
from maitred.core.step import RequestTiming


@pytest.mark.parametrize("scale", [0.003, 0.05, 3.0, 40.0])
def test_percentiles_are_right_to_the_width_of_a_bucket(scale: float):
    times, draw = RecentTimes(ManualClock(1000.0).now), random.Random(3)
    values = sorted(draw.lognormvariate(0, 1) * scale for _ in range(5000))
    for value in values:
        times.observe(value)
    found = times.percentiles()
    assert found.count == 5000
    for share, at in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert at == pytest.approx(values[round(share * 5000) - 1], rel=GROWTH - 1)


def test_what_is_older_than_a_minute_is_forgotten():
    clock = ManualClock(17.0)
    times = RecentTimes(clock.now)
    times.observe(5.0)
    clock.advance(30.0)
    times.observe(0.5, times=3)
    assert times.percentiles().count == 4
    clock.advance(NUM_SLICES * SLICE_S - 30.0)
    assert times.percentiles().count == 3
    clock.advance(10_000.0)
    assert times.percentiles().count == 0
    assert times.percentiles().p50 is None
    times.observe(1.0)
    assert times.percentiles().count == 1


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9, 1e9])
def test_values_beyond_the_buckets_count_in_the_last_ones(value: float):
    times = RecentTimes(ManualClock().now)
    times.observe(value)
    assert times.percentiles().count == 1


def test_an_answer_counts_once_for_first_token_and_queue():
    latencies = Latencies(ManualClock().now)
    latencies.answer_ended(RequestTiming(queue_s=1.0, prefill_s=2.0, decode_s=4.0, ttft_s=3.0))
    assert latencies.first_token.percentiles().p50 == pytest.approx(3.0, rel=0.06)
    assert latencies.queue.percentiles().p50 == pytest.approx(1.0, rel=0.06)
    assert latencies.between_tokens.percentiles().count == 0


def test_tokens_are_told_apart_for_so_many_tenants_only():
    latencies = Latencies(ManualClock().now)
    for i in range(2 * MAX_TENANTS):
        latencies.tokens_came(f"t{i}", 1)
    latencies.tokens_came("t0", 5)
    assert len(latencies.tokens_by_tenant) == MAX_TENANTS
    assert latencies.tokens_by_tenant["t0"] == 6


def test_a_request_keeps_its_row_and_newcomers_take_the_lowest():
    plan = SlotRows()
    assert plan.rows_of(["a", "b", "c"]) == [0, 1, 2]
    assert plan.rows_of(["c", "a"]) == [2, 0]
    assert plan.rows_of(["d", "c", "a", "e"]) == [1, 2, 0, 3]
    assert plan.rows_of([]) == []
    assert plan.rows_of(["a"]) == [0]


def test_rows_are_never_shared_and_never_more_than_ever_ran():
    plan, draw = SlotRows(), random.Random(1)
    for _ in range(500):
        running = draw.sample([f"r{i}" for i in range(40)], draw.randint(0, 12))
        rows = plan.rows_of(running)
        assert len(set(rows)) == len(rows)
        assert all(row < 12 for row in rows)
