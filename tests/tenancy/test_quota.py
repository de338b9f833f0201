"""Limits hold over every window; what was reserved and not used comes back; refusals say when to return."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import InsufficientQuota, RateLimited
from maitred.tenancy.quota import SLOT_S, WINDOW_S, QuotaBook, SlidingWindow, TenantQuota, duration_text
from maitred.tenancy.tenant import Limits, Tenant

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


def test_what_was_not_used_comes_back_while_the_minute_lasts():
    held = quota(tokens_per_minute=100)
    lease = held.enter(1, 0.0)
    lease.reserve(90, 0.0)
    with pytest.raises(RateLimited) as refused:
        held.enter(1, 5.0).reserve(20, 5.0)
    assert refused.value.retry_after_s == pytest.approx(WINDOW_S + SLOT_S - 5.0)
    lease.end(30)
    held.enter(1, 5.0).reserve(70, 5.0)
    assert dict(held.headers(5.0))["x-ratelimit-remaining-tokens"] == "0"


def test_ending_after_the_minute_changes_no_window():
    held = quota(tokens_per_minute=100)
    lease = held.enter(1, 0.0)
    lease.reserve(90, 0.0)
    held.enter(1, 70.0).reserve(50, 70.0)
    lease.end(0)
    lease.end(0)
    assert dict(held.headers(70.0))["x-ratelimit-remaining-tokens"] == "50"
    held.check_invariants()


def test_more_than_a_limit_is_never_worth_a_retry():
    for limits in ({"concurrency": 2}, {"max_queue": 2}):
        with pytest.raises(RateLimited) as refused:
            quota(**limits).enter(3, 0.0)
        assert refused.value.retry_after_s is None
    with pytest.raises(RateLimited) as refused:
        quota(tokens_per_minute=10).enter(1, 0.0).reserve(11, 0.0)
    assert refused.value.retry_after_s is None


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
    assert held.silent_max_tokens(10, 1, 0.0) == 256
    assert held.silent_max_tokens(10, 3, 0.0) == 256
    assert quota(spent=40, token_budget=100).silent_max_tokens(10, 1, 0.0) == 50
    assert quota(spent=40, token_budget=100, tokens_per_minute=9000).silent_max_tokens(10, 2, 0.0) == 25


def test_a_refusal_on_arrival_takes_nothing():
    held = quota(requests_per_minute=1)
    held.enter(1, 0.0).end(0)
    for _ in range(3):
        with pytest.raises(RateLimited) as refused:
            held.enter(1, 10.0)
    assert refused.value.retry_after_s == pytest.approx(50.5)
    held.enter(1, 60.5)


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
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "1m0s",
    }


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
