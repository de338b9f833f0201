"""Limits by the minute that several routers share: each holds a lease in bulk, taken ahead of need from one bucket.

No request waits for the bucket. A router spends its lease at once, then what the bucket had left at the last exchange,
which is owed until the next one. So all routers together stay within a limit except for what they let in beyond their
leases within one exchange. Without news of a bucket, each router's own limit holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

EXCHANGE_S = 0.1
STALE_S = 1.0  # after that nothing is known of the bucket
NUM_AHEAD = 4  # exchanges whose need a lease covers
MAX_SHARE = 8  # a lease is at most an eighth of the limit


class Order(NamedTuple):
    """Message of a router to the bucket: `owed` is spent already, `wanted` is a lease, negative for a return."""

    owed: int
    wanted: int
    limit: int


@dataclass(slots=True, eq=False)
class SharedWindow:
    """One limit of one tenant, as one router holds it. Amounts are requests or tokens."""

    leased: int = 0  # counted by the bucket, and not spent
    owed: int = 0  # spent, and not counted
    left_in_bucket: int = 0  # when it was heard of
    heard_at: float | None = None
    asked_at: float | None = None  # by a request, last
    limit: int = 0
    taken: int = 0  # since the last exchange

    def left(self, now: float, limit: int) -> int | None:
        """Return what may be taken now; None is unknown. Asking keeps the exchange going."""
        self.asked_at, self.limit = now, limit
        if self.heard_at is None or now - self.heard_at > STALE_S:
            return None
        return self.leased + max(0, self.left_in_bucket - self.owed)

    def take(self, amount: int) -> None:
        covered = min(self.leased, amount)
        self.leased -= covered
        self.owed += amount - covered
        self.taken += amount

    def give_back(self, amount: int) -> None:
        """Give back a part of what was taken, while it counts."""
        if not self.limit:  # it was taken under no limit
            return
        cancelled = min(self.owed, amount)
        self.owed -= cancelled
        self.leased += amount - cancelled

    def is_due(self, now: float) -> bool:
        """Return whether there is something to tell, or the window was used lately."""
        return bool(self.owed or self.leased) or (self.asked_at is not None and now - self.asked_at <= STALE_S)

    def order(self) -> Order:
        """Begin an exchange; `told` or `lost` ends it."""
        aim = min(self.limit // MAX_SHARE, self.taken * NUM_AHEAD)
        wanted = aim - self.leased
        if wanted < 0 and aim and self.leased <= 2 * aim:
            wanted = 0
        order = Order(self.owed, wanted, self.limit)
        self.owed, self.taken = 0, 0
        self.leased += min(0, wanted)  # amounts on their way back are not spent
        return order

    def told(self, granted: int, left_in_bucket: int, now: float) -> None:
        self.leased += granted
        self.left_in_bucket, self.heard_at = left_in_bucket, now

    def lost(self) -> None:
        """Forget the bucket's count, which is unknown; it begins anew."""
        self.leased = self.owed = 0
        self.heard_at = None


@dataclass(slots=True, eq=False)
class SharedQuota:
    """Shared windows of one tenant."""

    requests: SharedWindow = field(default_factory=SharedWindow)
    tokens: SharedWindow = field(default_factory=SharedWindow)


class SharedQuotas:
    """Shared windows of all tenants that this router has seen."""

    def __init__(self) -> None:
        self._quotas: dict[str, SharedQuota] = {}

    def of(self, tenant: str) -> SharedQuota:
        return self._quotas.setdefault(tenant, SharedQuota())

    def due(self, now: float) -> list[tuple[str, SharedWindow]]:
        """Buckets by name that want an exchange."""
        named = [
            (f"{{{tenant}}}:{name}", window)
            for tenant, quota in self._quotas.items()
            for name, window in (("requests", quota.requests), ("tokens", quota.tokens))
        ]
        return [(name, window) for name, window in named if window.is_due(now)]

    def lost(self) -> None:
        """The buckets are gone."""
        for quota in self._quotas.values():
            quota.requests.lost()
            quota.tokens.lost()
