"""Latencies of the last minute: counts in logarithmic buckets, at well under a microsecond a token."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

import msgspec

from maitred.core.step import RequestTiming

LOWEST_S = 1e-4
GROWTH = 1.06  # from a bucket to the next, so a percentile is right to 3%
NUM_BUCKETS = 288  # up to about half an hour
SLICE_S = 5.0
NUM_SLICES = 12
MAX_TENANTS = 64  # with a token count of their own

_BOUNDS = [LOWEST_S * GROWTH**index for index in range(NUM_BUCKETS - 1)]  # bucket i holds what is at most _BOUNDS[i]


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds, over the last minute; null where nothing happened."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class RecentTimes:
    """The last NUM_SLICES * SLICE_S seconds of one kind of duration. For the event loop alone, hence without a lock."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._slices = [[0] * NUM_BUCKETS for _ in range(NUM_SLICES)]
        self._number = int(monotonic() / SLICE_S)  # of the current slice, since the clock began
        self._current = self._slices[self._number % NUM_SLICES]
        self._turns_at = (self._number + 1) * SLICE_S

    def observe(self, seconds: float, times: int = 1) -> None:
        if self._monotonic() >= self._turns_at:
            self._turn()
        self._current[bisect_left(_BOUNDS, seconds)] += times

    def percentiles(self) -> Percentiles:
        if self._monotonic() >= self._turns_at:
            self._turn()
        counts = [sum(column) for column in zip(*self._slices, strict=True)]
        total = sum(counts)
        if not total:
            return Percentiles(0)
        return Percentiles(total, *(_quantile(counts, total * share) for share in (0.5, 0.9, 0.99)))

    def _turn(self) -> None:
        """Forget the slices whose time has come round again."""
        now = int(self._monotonic() / SLICE_S)
        for number in range(max(self._number + 1, now - NUM_SLICES + 1), now + 1):
            self._slices[number % NUM_SLICES] = [0] * NUM_BUCKETS
        self._number, self._turns_at = now, (now + 1) * SLICE_S
        self._current = self._slices[now % NUM_SLICES]


def _quantile(counts: list[int], rank: float) -> float:
    """The middle of the bucket in which the `rank`-th smallest lies."""
    index = next(i for i, seen in enumerate(accumulate(counts)) if seen >= rank)
    return float(f"{LOWEST_S * GROWTH ** (index - 0.5):.3g}")


class Latencies:
    """Latencies of all answers: to the first token, between tokens, in the queue; tokens by tenant."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.first_token, self.between_tokens, self.queue = (RecentTimes(monotonic) for _ in range(3))
        self.tokens_by_tenant: dict[str, int] = {}  # generated, since the start

    def answer_ended(self, timing: RequestTiming) -> None:
        self.first_token.observe(timing.ttft_s)
        self.queue.observe(timing.queue_s)

    def tokens_came(self, tenant: str, num_tokens: int) -> None:
        tokens = self.tokens_by_tenant
        if tenant in tokens or len(tokens) < MAX_TENANTS:
            tokens[tenant] = tokens.get(tenant, 0) + num_tokens
