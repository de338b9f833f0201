"""Limits hold over every window; what was reserved and not used comes back; refusals say when to return."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import InsufficientQuota, InvalidRequest, RateLimited
from maitred.tenancy.quota import SLOT_S, WINDOW_S, QuotaBook, SlidingWindow, TenantQuota, duration_text
from maitred.tenancy.shared import EXCHANGE_S, STALE_S, SharedQuotas, SharedWindow
from maitred.tenancy.tenant import Limits, Tenant
from maitred.tenancy.usage import UsageKey, UsageSum, fill_buckets, usage_pages

# what happens: wait (s), samples, prompt + max_tokens, share of it that is used, how many requests later it ends
events = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 3), st.integers(1, 120), st.floats(0, 1), st.integers(0, 4)), max_size=60
)


def quota(spent: int = 0, **limits: int) -> TenantQuota:
    return TenantQuota("acme", Limits(**limits), spent)


@given(events, st.integers(1, 6), st.integers(50, 200))
def test_no_window_of_a_minute_sees_more_than_the_limits(happens, per_minute, tokens_per_minute):
    held = quota(requests_per_minute=per_minute, tokens_per_minute=tokens_per_minute, concurrency=4, max_queue=3)
    now, let_in, used_at, open_leases = 0.0, [], [], []
    for wait, samples, tokens, share, lasts in happens:
        now += wait
        for lease, used, _ in [entry for entry in open_leases if entry[2] == 0]:
            lease.end(used)
        open_leases = [(lease, used, left - 1) for lease, used, left in open_leases if left]
        try:
            lease = held.enter(samples, now)
        except RateLimited:
            held.check_invariants()
            continue
        let_in.append(now)
        try:
            lease.reserve(tokens, now)
        except RateLimited:
            lease.end(0)
        else:
            used = int(tokens * share)
            used_at.append((now, used))
            lease.first_token()
            open_leases.append((lease, used, lasts))
        assert held.num_in_flight <= 4
        held.check_invariants()
    for start in let_in:
        assert sum(start <= at < start + WINDOW_S for at in let_in) <= per_minute
        assert sum(used for at, used in used_at if start <= at < start + WINDOW_S) <= tokens_per_minute
    for lease, used, _ in open_leases:
        lease.end(used)
    assert (held.num_in_flight, held.num_waiting, held.reserved_tokens) == (0, 0, 0)
    assert held.spent_tokens == sum(used for _, used in used_at)


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(1, 50)), max_size=40), st.integers(1, 50))
def test_the_time_to_wait_is_enough_and_not_half_a_second_too_long(happens, amount):
    window, now, limit = SlidingWindow(), 0.0, 50
    for wait, taken in happens:
        now += wait
        window.expire(now)
        if window.total + taken <= limit:
            window.take(taken, now)
    wait = window.until_free(amount, limit, now)
    if wait > SLOT_S:
        window.expire(now + wait - SLOT_S)
        assert window.total + amount > limit
    window.expire(now + wait)
    assert window.total + amount <= limit


@given(st.integers(0, 300), st.lists(st.integers(1, 100), max_size=12))
def test_a_budget_is_never_overdrawn(budget, wanted):
    held = quota(token_budget=budget)
    for tokens in wanted:
        try:
            lease = held.enter(1, 0.0)
            lease.reserve(tokens, 0.0)
        except InsufficientQuota:
            continue
        assert held.spent_tokens + held.reserved_tokens <= budget
        lease.end(tokens)


def test_what_was_not_used_comes_back_while_the_minute_lasts_and_not_after():
    held = quota(tokens_per_minute=100)
    lease = held.enter(1, 0.0)
    lease.reserve(90, 0.0)
    with pytest.raises(RateLimited) as refused:
        held.enter(1, 5.0).reserve(20, 5.0)
    assert refused.value.retry_after_s == pytest.approx(WINDOW_S + SLOT_S - 5.0)
    lease.end(30)
    held.enter(1, 5.0).reserve(70, 5.0)
    assert dict(held.headers(5.0))["x-ratelimit-remaining-tokens"] == "0"
    held = quota(tokens_per_minute=100)
    lease = held.enter(1, 0.0)
    lease.reserve(90, 0.0)
    held.enter(1, 70.0).reserve(50, 70.0)
    lease.end(0)
    lease.end(0)
    assert dict(held.headers(70.0))["x-ratelimit-remaining-tokens"] == "50"
    held.check_invariants()


def test_a_refusal_takes_nothing_and_is_never_worth_a_retry_over_a_limit():
    for limits in ({"concurrency": 2}, {"max_queue": 2}):
        with pytest.raises(RateLimited) as refused:
            quota(**limits).enter(3, 0.0)
        assert refused.value.retry_after_s is None
    with pytest.raises(RateLimited) as refused:
        quota(tokens_per_minute=10).enter(1, 0.0).reserve(11, 0.0)
    assert refused.value.retry_after_s is None
    held = quota(requests_per_minute=1)
    held.enter(1, 0.0).end(0)
    for _ in range(3):
        with pytest.raises(RateLimited) as refused:
            held.enter(1, 10.0)
    assert refused.value.retry_after_s == pytest.approx(50.5)
    held.enter(1, 60.5)


def test_queue_room_comes_back_with_the_first_token_and_slots_with_the_end():
    held = quota(concurrency=2, max_queue=1)
    lease = held.enter(1, 0.0)
    with pytest.raises(RateLimited, match="waiting"):
        held.enter(1, 0.0)
    lease.first_token()
    lease.first_token()
    second = held.enter(1, 0.0)
    second.first_token()
    with pytest.raises(RateLimited, match="in flight"):
        held.enter(1, 0.0)
    lease.end(5)
    held.enter(1, 0.0)


def test_a_budget_held_by_others_may_come_back_but_one_that_is_spent_does_not():
    held = quota(spent=40, token_budget=100)
    held.enter(1, 0.0).reserve(50, 0.0)
    with pytest.raises(RateLimited) as refused:
        held.enter(1, 0.0).reserve(20, 0.0)
    assert refused.value.code == "rate_limit_exceeded"
    with pytest.raises(InsufficientQuota, match="60 left of its budget of 100"):
        held.enter(1, 0.0).reserve(61, 0.0)
    with pytest.raises(InsufficientQuota, match="used up: 100 of 100"):
        quota(spent=100, token_budget=100).enter(1, 0.0)


def test_who_names_no_max_tokens_gets_a_share_of_what_is_left_and_no_crumbs():
    assert quota(concurrency=1).silent_max_tokens(10, 1, 0.0) is None
    held = quota(tokens_per_minute=10_010)
    left = 10_010
    for _ in range(3):
        most = held.silent_max_tokens(10, 1, 0.0)
        assert most == (left - 10) // 4
        held.enter(1, 0.0).reserve(10 + most, 0.0)
        left -= 10 + most
    held.enter(1, 0.0).reserve(4_000, 0.0)
    assert (held.silent_max_tokens(10, 1, 0.0), held.silent_max_tokens(10, 3, 0.0)) == (256, 256)
    assert quota(spent=40, token_budget=100).silent_max_tokens(10, 1, 0.0) == 50
    assert quota(spent=40, token_budget=100, tokens_per_minute=9000).silent_max_tokens(10, 2, 0.0) == 25


def test_what_was_computed_is_counted_when_it_ends_and_over_the_limit_the_next_one_waits():
    held = quota(compute_ms_per_minute=100)
    first, second = held.enter(1, 0.0), held.enter(1, 0.0)
    held.computed(70_000, 0.25)
    first.end(0)
    held.enter(1, 0.3).end(0)
    assert dict(held.headers(0.3))["x-ratelimit-remaining-compute-ms"] == "30"
    held.computed(70_000, 1.25)  # nobody knew before
    second.end(0)
    with pytest.raises(RateLimited, match="may compute for 100 ms in a minute, and did for 140 ms") as refused:
        held.enter(1, 2.0)
    assert refused.value.limit == "compute_ms_per_minute"
    assert refused.value.retry_after_s == pytest.approx(58.5)  # the first of them has left the window
    assert dict(held.headers(2.0)) == {
        "x-ratelimit-limit-compute-ms": "100",
        "x-ratelimit-remaining-compute-ms": "0",
        "x-ratelimit-reset-compute-ms": "1m0s",
    }
    held.enter(1, 60.5)


def test_headers_tell_limit_rest_and_reset_of_what_is_limited():
    assert dict(quota(concurrency=1).headers(0.0)) == {}
    held = quota(requests_per_minute=10, tokens_per_minute=1000)
    assert dict(held.headers(0.0))["x-ratelimit-reset-requests"] == "0s"
    lease = held.enter(1, 0.25)
    lease.reserve(100, 0.25)
    assert dict(held.headers(1.25)) == {
        "x-ratelimit-limit-requests": "10", "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "1m0s", "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900", "x-ratelimit-reset-tokens": "1m0s",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-1, "0s"), (0.0001, "1ms"), (0.012, "12ms"), (0.9999, "1s"), (1, "1s"), (1.2, "2s"), (59.01, "1m0s"),
     (90, "1m30s"), (7205, "2h0m5s")],
)  # fmt: skip
def test_durations_are_written_as_openai_writes_them(seconds, text):
    assert duration_text(seconds) == text


def test_new_limits_hold_at_once_and_forget_nothing():
    book = QuotaBook({"acme": 7})
    book.of(Tenant(name="acme")).enter(1, 0.0)
    held = book.of(Tenant(name="acme", limits=Limits(requests_per_minute=2, concurrency=1)))
    assert (held.num_in_flight, held.spent_tokens) == (1, 7)
    with pytest.raises(RateLimited):
        held.enter(1, 0.0)
    assert book.of(Tenant(name="other")).spent_tokens == 0


SHARED_LIMIT = 800
SHARING = Tenant(name="a", limits=Limits(requests_per_minute=SHARED_LIMIT, tokens_per_minute=10 * SHARED_LIMIT))


class Bucket:
    """What Redis counts, for less than a minute."""

    def __init__(self) -> None:
        self.total = 0

    def exchange(self, window: SharedWindow, now: float) -> None:
        owed, wanted, limit = window.order()
        granted = max(0, min(wanted, limit - self.total - owed))
        self.total += owed + granted + min(0, wanted)
        window.told(granted, max(0, limit - self.total), now)


@settings(max_examples=60)
@given(
    st.booleans(),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["take", "exchange", "back"]), st.integers(1, 300)), max_size=40
    ),
)
def test_nothing_is_lost_between_routers_and_with_fresh_news_they_stay_within_the_limit(is_fresh, steps):
    bucket, routers, used = Bucket(), [SharedWindow() for _ in range(3)], [0, 0, 0]
    for number, what, amount in steps:
        router = routers[number]
        others = [other for other in routers if other is not router]  # told before: a router's news is of all of theirs
        for each in [*others, router] if is_fresh else [router] if what == "exchange" else []:
            bucket.exchange(each, 0.0)
        left = router.left(0.0, SHARED_LIMIT)
        if what == "back":
            given_back = min(amount, used[number])
            router.give_back(given_back)
            used[number] -= given_back
        elif what == "take" and (left is None or amount <= left):
            router.take(amount)
            used[number] += amount
        assert bucket.total + sum(r.owed for r in routers) == sum(used) + sum(r.leased for r in routers)
        if is_fresh and all(r.heard_at is not None and r.limit for r in routers):
            assert sum(used) <= SHARED_LIMIT


def test_a_lease_covers_what_comes_next_and_a_bucket_not_heard_of_is_unknown():
    bucket, window = Bucket(), SharedWindow()
    window.left(0.0, SHARED_LIMIT)
    window.take(5)
    bucket.exchange(window, 0.0)
    assert (window.leased, bucket.total) == (20, 25)
    window.take(20)
    assert window.owed == 0
    for _ in range(2):
        bucket.exchange(window, EXCHANGE_S)
    assert (window.leased, bucket.total) == (0, 25)
    assert not window.is_due(STALE_S + 1)
    window = SharedWindow()
    assert window.left(0.0, SHARED_LIMIT) is None
    Bucket().exchange(window, 0.0)
    assert window.left(STALE_S, SHARED_LIMIT) == SHARED_LIMIT
    assert window.left(STALE_S + 0.1, SHARED_LIMIT) is None
    window.told(0, 0, 2.0)
    window.lost()
    assert window.left(2.0, SHARED_LIMIT) is None


def test_what_others_let_in_is_refused_here_and_what_was_not_used_comes_back():
    book = QuotaBook({})
    book.shared = SharedQuotas()
    quota = book.of(SHARING)
    assert quota.shared is not None
    lease = quota.enter(1, 0.0)
    assert [name for name, _ in book.shared.due(0.0)] == ["{a}:requests"]
    quota.shared.tokens.limit = 10 * SHARED_LIMIT
    quota.shared.tokens.told(0, 100, 0.0)
    with pytest.raises(RateLimited, match="other routers") as refused:
        lease.reserve(101, 0.0)
    assert refused.value.retry_after_s == 1.0
    lease.reserve(100, 0.0)
    lease.end(40)
    assert quota.shared.tokens.left(0.0, 10 * SHARED_LIMIT) == 60
    quota.shared.requests.told(0, 0, 0.5)
    quota.shared.requests.owed = 0
    with pytest.raises(RateLimited, match="requests_per_minute"):
        quota.enter(1, 0.5)
    quota.check_invariants()


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


def test_sums_stand_in_their_bucket_by_key_and_the_last_one_is_the_present():
    query, following = usage_pages(start_time=T0, end_time=T0 + 7200, now=0, bucket_width="1h", group_by=["project_id"])
    a, b = UsageKey(tenant="a"), UsageKey(tenant="b")
    one = UsageSum(1, 10, 4, 5)
    first = query.bucket_of(T0)
    buckets = fill_buckets(query, [(first, b, one), (first, a, one), (first, b, one)])
    assert following is None
    assert buckets[0].sums == [(a, one), (b, UsageSum(2, 20, 8, 10))]
    assert [bucket.sums for bucket in buckets[1:]] == [[]] * (len(buckets) - 1)
    query, following = usage_pages(start_time=T0, end_time=None, now=T0 + 90, bucket_width="1m")
    assert (query.end, following) == ((T0 + 90) // 60 * 60 + 60, None)
    assert query.bucket_of(T0 + 90.7) == list(query.buckets())[-1][0]


@pytest.mark.parametrize(("fields", "param"), [
    ({"bucket_width": "1w"}, "bucket_width"), ({"limit": 0}, "limit"), ({"limit": 32}, "limit"),
    ({"end_time": T0}, "end_time"), ({"start_time": -1}, "start_time"), ({"end_time": 2**63}, "start_time"),
    ({"group_by": ["line_item"]}, "group_by"),
])  # fmt: skip
def test_what_cannot_be_asked_is_named(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        usage_pages(**{"start_time": T0, "end_time": T0 + 10**6, "now": T0, **fields})
    assert caught.value.param == param
