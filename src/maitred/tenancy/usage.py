"""Usage rows of a ledger, and their sums: the buckets of `/v1/organization/usage/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maitred.core.errors import InvalidRequest

# bucket width -> seconds, default number of buckets, most buckets; as OpenAI has them
WIDTHS: dict[str, tuple[int, int, int]] = {"1m": (60, 60, 1440), "1h": (3600, 24, 168), "1d": (86400, 7, 31)}
# what usage may be grouped and filtered by: OpenAI's name -> ours
DIMENSIONS: dict[str, str] = {"project_id": "tenant", "api_key_id": "key_id", "model": "model", "service_tier": "tier"}
MAX_TIME = 2**40  # unix seconds
US_PER_HOUR = 3_600_000_000


class UsageKey(NamedTuple):
    """Owner of usage; a field that was not asked for is None."""

    tenant: str | None = None
    key_id: str | None = None
    model: str | None = None
    tier: str | None = None


class UsageSum(NamedTuple):
    """Tokens, requests and computing added up. A prompt of n samples is one request, and its tokens count once."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens
    generated_tokens: int = 0
    rows: int = 0  # of tensor requests
    compute_us: int = 0  # of steps and batches, split over their requests

    def cost(self, price_per_hour: float) -> float:
        """Cost of the computing; in the price's currency."""
        return self.compute_us * price_per_hour / US_PER_HOUR

    def plus(self, other: UsageSum) -> UsageSum:
        return UsageSum(*(a + b for a, b in zip(self, other, strict=True)))


class UsageBucket(NamedTuple):
    """One stretch of time [start, end), unix seconds."""

    start: int
    end: int
    sums: Sequence[tuple[UsageKey, UsageSum]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Question to a ledger; times are unix seconds, [start, end)."""

    start: int
    end: int
    width_s: int = 86400
    group_by: tuple[str, ...] = ()  # fields of UsageKey
    filters: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (field of UsageKey, values that count)

    def bucket_of(self, at: float) -> int:
        """Return where the bucket of `at` begins: buckets end at whole minutes, hours or days, UTC."""
        return max(self.start, int(at) // self.width_s * self.width_s)

    def buckets(self) -> Iterator[tuple[int, int]]:
        """(start, end) of every bucket, those without any usage too."""
        start = self.start
        while start < self.end:
            end = min(self.end, (start // self.width_s + 1) * self.width_s)
            yield start, end
            start = end


def usage_pages(
    *,
    start_time: int,
    end_time: int | None,
    now: int,
    bucket_width: str = "1d",
    group_by: Sequence[str] = (),
    filters: Sequence[tuple[str, Sequence[str]]] = (),
    limit: int | None = None,
) -> tuple[UsageQuery, int | None]:
    """The query for one page of buckets, and where the next page starts, None after the last.

    `group_by` and `filters` have OpenAI's names. Raises InvalidRequest, naming field, value and bounds.
    """
    if bucket_width not in WIDTHS:
        raise InvalidRequest(f"bucket_width is {bucket_width!r}; choose one of 1m, 1h, 1d", param="bucket_width")
    width_s, usual, most = WIDTHS[bucket_width]
    number = usual if limit is None else limit
    if not 1 <= number <= most:
        raise InvalidRequest(f"limit is {number}; for buckets of {bucket_width} it is from 1 to {most}", param="limit")
    last = (now // width_s + 1) * width_s if end_time is None else end_time
    if not 0 <= start_time < MAX_TIME or not 0 <= last < MAX_TIME:
        raise InvalidRequest("start_time and end_time are unix seconds", param="start_time")
    if end_time is not None and end_time <= start_time:
        raise InvalidRequest(f"end_time ({end_time}) must be after start_time ({start_time})", param="end_time")
    page_end = (start_time // width_s + number) * width_s
    query = UsageQuery(
        start=start_time,
        end=max(start_time, min(page_end, last)),
        width_s=width_s,
        group_by=tuple(dict.fromkeys(_dimension(name, "group_by") for name in group_by)),
        filters=tuple((_dimension(name, name), tuple(values)) for name, values in filters),
    )
    return query, page_end if page_end < last else None


def _dimension(name: str, param: str) -> str:
    try:
        return DIMENSIONS[name]
    except KeyError:
        choices = ", ".join(DIMENSIONS)
        raise InvalidRequest(f"{param} is {name!r}; choose from {choices}", param=param) from None


def fill_buckets(query: UsageQuery, rows: Iterable[tuple[int, UsageKey, UsageSum]]) -> list[UsageBucket]:
    """Return buckets in order with their rows; `rows` are (start of bucket, owner, amount), in any order."""
    sums: dict[int, dict[UsageKey, UsageSum]] = {start: {} for start, _ in query.buckets()}
    for start, key, amount in rows:
        held = sums[start]
        held[key] = held.get(key, UsageSum()).plus(amount)
    return [UsageBucket(start, end, sorted(sums[start].items(), key=_in_order)) for start, end in query.buckets()]


def _in_order(item: tuple[UsageKey, UsageSum]) -> tuple[str, ...]:
    return tuple(part or "" for part in item[0])
