"""Buckets cover the time asked for without gap or overlap, and lose nothing of what falls into it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import InvalidRequest
from maitred.tenancy.usage import UsageKey, UsageSum, fill_buckets, usage_pages

T0 = 1_700_000_000


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.sampled_from(["1m", "1h", "1d"]), st.integers(1, 31))
def test_pages_of_buckets_cover_the_time_once(start, length, width, limit):
    end, at, edges = start + length, start, []
    for _ in range(200):
        query, following = usage_pages(start_time=at, end_time=end, now=0, bucket_width=width, limit=limit)
        buckets = list(query.buckets())
        assert len(buckets) <= limit
        assert all(query.bucket_of(second) == first for first, last in buckets for second in (first, last - 1))
        edges += buckets
        if following is None:
            assert edges[-1][1] == end
            break
        at = following
    assert edges[0][0] == start
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))


def test_sums_stand_in_their_bucket_by_key():
    query, following = usage_pages(start_time=T0, end_time=T0 + 7200, now=0, bucket_width="1h", group_by=["project_id"])
    a, b = UsageKey(tenant="a"), UsageKey(tenant="b")
    one = UsageSum(1, 10, 4, 5)
    first = query.bucket_of(T0)
    buckets = fill_buckets(query, [(first, b, one), (first, a, one), (first, b, one)])
    assert following is None
    assert buckets[0].sums == [(a, one), (b, UsageSum(2, 20, 8, 10))]
    assert [bucket.sums for bucket in buckets[1:]] == [[]] * (len(buckets) - 1)


def test_without_an_end_the_last_bucket_is_the_present_one():
    query, following = usage_pages(start_time=T0, end_time=None, now=T0 + 90, bucket_width="1m")
    assert (query.end, following) == ((T0 + 90) // 60 * 60 + 60, None)
    assert query.bucket_of(T0 + 90.7) == list(query.buckets())[-1][0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bucket_width": "1w"}, "bucket_width"),
        ({"limit": 0}, "limit"),
        ({"limit": 32}, "limit"),
        ({"end_time": T0}, "end_time"),
        ({"start_time": -1}, "start_time"),
        ({"end_time": 2**63}, "start_time"),
        ({"group_by": ["line_item"]}, "group_by"),
    ],
)
def test_what_cannot_be_asked_is_named(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        usage_pages(**{"start_time": T0, "end_time": T0 + 10**6, "now": T0, **fields})
    assert caught.value.param == param
