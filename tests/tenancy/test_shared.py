"""Quotas of several routers over one bucket: leases ahead of need, and nobody waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import RateLimited
from maitred.tenancy.quota import QuotaBook
from maitred.tenancy.shared import EXCHANGE_S, STALE_S, SharedQuotas, SharedWindow
from maitred.tenancy.tenant import Limits, Tenant

LIMIT = 800
TENANT = Tenant(name="a", limits=Limits(requests_per_minute=LIMIT, tokens_per_minute=10 * LIMIT))


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
        left = router.left(0.0, LIMIT)
        if what == "back":
            given_back = min(amount, used[number])
            router.give_back(given_back)
            used[number] -= given_back
        elif what == "take" and (left is None or amount <= left):
            router.take(amount)
            used[number] += amount
        assert bucket.total + sum(r.owed for r in routers) == sum(used) + sum(r.leased for r in routers)
        if is_fresh and all(r.heard_at is not None and r.limit for r in routers):
            assert sum(used) <= LIMIT


def test_a_lease_covers_what_comes_next_and_goes_back_when_nothing_does():
    bucket, window = Bucket(), SharedWindow()
    window.left(0.0, LIMIT)
    window.take(5)
    bucket.exchange(window, 0.0)
    assert (window.leased, bucket.total) == (20, 25)
    window.take(20)
    assert window.owed == 0
    for _ in range(2):
        bucket.exchange(window, EXCHANGE_S)
    assert (window.leased, bucket.total) == (0, 25)
    assert not window.is_due(STALE_S + 1)


def test_of_a_bucket_not_heard_of_lately_nothing_is_known():
    window = SharedWindow()
    assert window.left(0.0, LIMIT) is None
    Bucket().exchange(window, 0.0)
    assert window.left(STALE_S, LIMIT) == LIMIT
    assert window.left(STALE_S + 0.1, LIMIT) is None
    window.told(0, 0, 2.0)
    window.lost()
    assert window.left(2.0, LIMIT) is None


def test_what_others_let_in_is_refused_here_and_what_was_not_used_comes_back():
    book = QuotaBook({})
    book.shared = SharedQuotas()
    quota = book.of(TENANT)
    assert quota.shared is not None
    lease = quota.enter(1, 0.0)
    assert [name for name, _ in book.shared.due(0.0)] == ["{a}:requests"]
    quota.shared.tokens.limit = 10 * LIMIT
    quota.shared.tokens.told(0, 100, 0.0)
    with pytest.raises(RateLimited, match="other routers") as refused:
        lease.reserve(101, 0.0)
    assert refused.value.retry_after_s == 1.0
    lease.reserve(100, 0.0)
    lease.end(40)
    assert quota.shared.tokens.left(0.0, 10 * LIMIT) == 60
    quota.shared.requests.told(0, 0, 0.5)
    quota.shared.requests.owed = 0
    with pytest.raises(RateLimited, match="requests_per_minute"):
        quota.enter(1, 0.5)
    quota.check_invariants()
