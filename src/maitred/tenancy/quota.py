"""Quota: the use and the limits of a tenant. Time is an argument; each check takes microseconds and never waits.

A request takes its tokens before it runs, prompt and most output, and gives back what it did not need when it ends: so
limits hold at every moment, whatever the answers turn out to be. Its computing is not known before: that is counted
when it ends, and over the limit the next request waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from maitred.core.errors import InsufficientQuota, RateLimited
from maitred.tenancy.shared import SharedQuota, SharedQuotas, SharedWindow
from maitred.tenancy.tenant import Limits, Tenant

WINDOW_S = 60.0
US_PER_MS = 1000
SLOT_S = 0.5
SILENT_SHARE, SILENT_LEAST = 4, 256
FULL_RETRY_S = 1.0  # the end of a request cannot be known


class LimitLeft(NamedTuple):
    """What is left of a limit in a minute; all of it in `reset_s`."""

    name: str
    limit: int
    left: int
    reset_s: float


class SlidingWindow:
    """Amounts taken in the last 60 s, in slots of half a second, so at most 121 numbers.

    An amount counts until 60 s after the end of its slot. Hence no 60 s whatsoever see more than the limit, which a
    token bucket of the same rate would let through twice (a full bucket, and what flows in meanwhile).
    """

    def __init__(self) -> None:
        self.total = 0
        self._slots: deque[list[int]] = deque()  # [slot, amount], oldest first

    def take(self, amount: int, now: float) -> int:
        """Count `amount`; the slot is for `give_back`."""
        self.expire(now)
        slot = int(now // SLOT_S)
        if not self._slots or self._slots[-1][0] < slot:
            self._slots.append([slot, 0])
        self._slots[-1][1] += amount
        self.total += amount
        return self._slots[-1][0]

    def give_back(self, slot: int, amount: int) -> int:
        """Uncount a part of what was taken then, and say how much: nothing when it has left the window."""
        for entry in reversed(self._slots):
            if entry[0] <= slot:
                if entry[0] < slot:
                    return 0
                entry[1] -= amount
                self.total -= amount
                return amount
        return 0

    def expire(self, now: float) -> None:
        while self._slots and _ends(self._slots[0][0]) <= now:
            self.total -= self._slots.popleft()[1]

    def until_free(self, amount: int, limit: int, now: float) -> float:
        """Seconds until `amount` more stay within `limit`, if nothing else comes; `amount` is at most `limit`."""
        excess = self.total + amount - limit
        for slot, taken in self._slots:
            if excess <= 0:
                break
            excess -= taken
            if excess <= 0:
                return max(0.0, _ends(slot) - now)
        return 0.0

    def until_empty(self, now: float) -> float:
        """Seconds until all of the limit is there again."""
        used = [slot for slot, amount in self._slots if amount]
        return max(0.0, _ends(used[-1]) - now) if used else 0.0


def _ends(slot: int) -> float:
    return (slot + 1) * SLOT_S + WINDOW_S


class TenantQuota:
    """One tenant's use. `limits` may be replaced at any time; what was used stays used."""

    def __init__(self, name: str, limits: Limits, spent_tokens: int = 0) -> None:
        self.name, self.limits = name, limits
        self.spent_tokens = spent_tokens  # of ended requests
        self.reserved_tokens = 0  # of those in flight
        self.num_in_flight = 0  # samples
        self.num_waiting = 0  # of those, without a first token
        self.shared: SharedQuota | None = None  # where other routers let the same tenant in
        self._requests, self._tokens = SlidingWindow(), SlidingWindow()
        self._compute = SlidingWindow()  # us, of ended requests

    def enter(self, num_samples: int, now: float) -> QuotaLease:
        """Let one HTTP request in. Raises RateLimited or InsufficientQuota and changes nothing."""
        limits = self.limits
        self._requests.expire(now)
        if limits.token_budget is not None and self.spent_tokens >= limits.token_budget:
            raise InsufficientQuota(
                f"the token budget of tenant {self.name!r} is used up: {self.spent_tokens} of {limits.token_budget} "
                "tokens; ask its administrator for more"
            )
        self._check_room("concurrency", "in flight", self.num_in_flight, num_samples, limits.concurrency)
        self._check_room("max_queue", "waiting", self.num_waiting, num_samples, limits.max_queue)
        self._check_compute(now)
        per_minute = limits.requests_per_minute
        if per_minute is not None and self._requests.total + 1 > per_minute:
            raise RateLimited(
                f"tenant {self.name!r} may send {per_minute} requests in a minute, and has; try again later",
                limit="requests_per_minute",
                retry_after_s=self._requests.until_free(1, per_minute, now),
            )
        if per_minute is not None and self.shared is not None:
            self._take_shared(self.shared.requests, "requests_per_minute", 1, per_minute, now)
        self._requests.take(1, now)
        self.num_in_flight += num_samples
        self.num_waiting += num_samples
        return QuotaLease(self, num_samples)

    def computed(self, compute_us: int, now: float) -> None:
        """Count the computing of a request that has ended."""
        if compute_us:
            self._compute.take(compute_us, now)

    def _check_compute(self, now: float) -> None:
        per_minute = self.limits.compute_ms_per_minute
        self._compute.expire(now)
        if per_minute is None or self._compute.total < per_minute * US_PER_MS:
            return
        raise RateLimited(
            f"tenant {self.name!r} may compute for {per_minute} ms in a minute, and did for "
            f"{self._compute.total / US_PER_MS:.0f} ms; try again later",
            limit="compute_ms_per_minute",
            retry_after_s=self._compute.until_free(1, per_minute * US_PER_MS, now),
        )

    def _check_room(self, name: str, what: str, held: int, wanted: int, limit: int | None) -> None:
        if limit is None or held + wanted <= limit:
            return
        raise RateLimited(
            f"tenant {self.name!r} has {held} samples {what}, and this request has {wanted}; its {name} is {limit}",
            limit=name,
            retry_after_s=FULL_RETRY_S if wanted <= limit else None,
        )

    def silent_max_tokens(self, num_prompt_tokens: int, num_samples: int, now: float) -> int | None:
        """Output tokens for each sample of a request that names no max_tokens; None leaves the usual default.

        A quarter of what is left, so that several such requests fit beside each other; but at least 256, for which it
        rather waits than be cut short.
        """
        limits, bounds = self.limits, []
        self._tokens.expire(now)
        for limit, taken, spent in (
            (limits.tokens_per_minute, self._tokens.total, 0),
            (limits.token_budget, self.spent_tokens + self.reserved_tokens, self.spent_tokens),
        ):
            if limit is not None:
                share = (limit - taken - num_prompt_tokens) // SILENT_SHARE
                least = min(SILENT_LEAST * num_samples, limit - spent - num_prompt_tokens)
                bounds.append(max(share, least))
        return min(bounds) // num_samples if bounds else None

    def reserve(self, num_tokens: int, now: float) -> int:
        """Take `num_tokens` before they are used; the slot is for `settle`. Raises as `enter`."""
        self._check_budget(num_tokens)
        self._tokens.expire(now)
        limit = self.limits.tokens_per_minute
        if limit is not None and self._tokens.total + num_tokens > limit:
            fits = num_tokens <= limit
            raise RateLimited(
                f"the request needs {num_tokens} tokens, prompt and max_tokens of every sample, and tenant "
                f"{self.name!r} has {max(0, limit - self._tokens.total)} left of {limit} in a minute; "
                + ("try again later, or with a smaller max_tokens" if fits else "ask for fewer"),
                limit="tokens_per_minute",
                retry_after_s=self._tokens.until_free(num_tokens, limit, now) if fits else None,
            )
        if limit is not None and self.shared is not None:
            self._take_shared(self.shared.tokens, "tokens_per_minute", num_tokens, limit, now)
        self.reserved_tokens += num_tokens
        return self._tokens.take(num_tokens, now)

    def _take_shared(self, window: SharedWindow, name: str, amount: int, limit: int, now: float) -> None:
        left = window.left(now, limit)
        if left is not None and amount > left:
            raise RateLimited(
                f"tenant {self.name!r} has {left} left of its {name} of {limit}, and this request takes {amount}; what "
                "other routers let in counts too; try again later",
                limit=name,
                retry_after_s=FULL_RETRY_S,
            )
        window.take(amount)

    def _check_budget(self, num_tokens: int) -> None:
        budget = self.limits.token_budget
        if budget is None or self.spent_tokens + self.reserved_tokens + num_tokens <= budget:
            return
        left = max(0, budget - self.spent_tokens)
        text = (
            f"the request needs up to {num_tokens} tokens, and tenant {self.name!r} has {left} left of its budget of "
            f"{budget}"
        )
        if num_tokens > left:
            raise InsufficientQuota(f"{text}; send less text, or ask for a smaller max_tokens")
        raise RateLimited(
            f"{text}, of which requests in flight hold {self.reserved_tokens}; try again when they are done",
            limit="token_budget",
            retry_after_s=FULL_RETRY_S,
        )

    def settle(self, slot: int, reserved: int, used: int) -> None:
        """The request ended: `used` of its `reserved` tokens stay counted."""
        self.reserved_tokens -= reserved
        self.spent_tokens += used
        unused = self._tokens.give_back(slot, max(0, reserved - used))
        if self.shared is not None and self.limits.tokens_per_minute is not None:
            self.shared.tokens.give_back(unused)

    def headers(self, now: float) -> Iterator[tuple[str, str]]:
        """The x-ratelimit headers, for the limits there are."""
        for name, limit, left, reset_s in self.left(now):
            yield f"x-ratelimit-limit-{name}", str(limit)
            yield f"x-ratelimit-remaining-{name}", str(left)
            yield f"x-ratelimit-reset-{name}", duration_text(reset_s)

    def left(self, now: float) -> Iterator[LimitLeft]:
        """What is left of the limits there are."""
        for name, window, limit, unit in (
            ("requests", self._requests, self.limits.requests_per_minute, 1),
            ("tokens", self._tokens, self.limits.tokens_per_minute, 1),
            ("compute-ms", self._compute, self.limits.compute_ms_per_minute, US_PER_MS),
        ):
            if limit is not None:
                window.expire(now)
                yield LimitLeft(name, limit, max(0, (limit * unit - window.total) // unit), window.until_empty(now))

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls; slow."""
        assert 0 <= self.num_waiting <= self.num_in_flight
        assert self.reserved_tokens >= 0
        for window in (self._requests, self._tokens, self._compute):
            assert window.total == sum(amount for _, amount in window._slots)
            assert all(amount >= 0 for _, amount in window._slots)


class QuotaLease:
    """One HTTP request's share of its tenant's limits, from `TenantQuota.enter` to `end`."""

    def __init__(self, quota: TenantQuota, num_samples: int) -> None:
        self._quota = quota
        self._num_samples = self._num_waiting = num_samples
        self._slot = self._reserved = 0
        self.ended = False

    def reserve(self, num_tokens: int, now: float) -> None:
        """Take the tokens of the whole request, once it is known how many. Raises RateLimited or InsufficientQuota."""
        assert not self._reserved, "reserved twice"
        self._slot = self._quota.reserve(num_tokens, now)
        self._reserved = num_tokens

    def first_token(self) -> None:
        """Note that one of its samples has left the queue."""
        if self._num_waiting and not self.ended:
            self._num_waiting -= 1
            self._quota.num_waiting -= 1

    def end(self, used_tokens: int) -> None:
        """Give back everything but the tokens used; idempotent."""
        if self.ended:
            return
        self.ended = True
        self._quota.num_in_flight -= self._num_samples
        self._quota.num_waiting -= self._num_waiting
        if self._reserved:
            self._quota.settle(self._slot, self._reserved, used_tokens)


class QuotaBook:
    """The quotas of all tenants; what a tenant used outlives changes of the table."""

    def __init__(self, spent_tokens: Mapping[str, int]) -> None:
        self._spent = spent_tokens  # by tenant, before this process
        self._quotas: dict[str, TenantQuota] = {}
        self.shared: SharedQuotas | None = None  # set where several routers let the same tenants in

    def of(self, tenant: Tenant) -> TenantQuota:
        quota = self._quotas.get(tenant.name)
        if quota is None:
            quota = TenantQuota(tenant.name, tenant.limits, self._spent.get(tenant.name, 0))
            self._quotas[tenant.name] = quota
        quota.limits = tenant.limits
        if self.shared is not None and quota.shared is None:
            quota.shared = self.shared.of(tenant.name)
        return quota

    def computed(self, tenant: str, compute_us: int, now: float) -> None:
        """A request of this tenant's ended; one that is not known here has no limit here."""
        if tenant in self._quotas:
            self._quotas[tenant].computed(compute_us, now)


def duration_text(seconds: float) -> str:
    """Return the duration as OpenAI writes it in headers: `0s`, `12ms`, `59s`, `1m30s`, `2h0m5s`; rounded up."""
    if seconds <= 0:
        return "0s"
    millis = math.ceil(seconds * 1000)
    if millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(math.ceil(millis / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
