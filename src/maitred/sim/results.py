"""Results of a simulated (or recorded) run, in memory that does not grow with the number of requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from maitred.core.objectives import parse_slo
from maitred.core.request import RequestState
from maitred.sim.profile import EdgeModel

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
RELATIVE_ERROR = 0.001  # of a quantile
_COUNTS = ("num_finished", "num_good", "num_tokens", "num_cached_tokens", "num_preemptions", "num_here")
SLOW_GAPS_ALLOWED = 0.01  # an ITL objective holds for 99% of a request's gaps

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_LOWEST, _HIGHEST = 1e-7, 1e8  # s; what is outside counts as the end
UNITS_PER_S = 10**15


class Sketch:
    """A distribution of times: mean and largest exact, quantiles within 0.1% of a value of that rank.

    Logarithmic buckets, at most 17,300 of them; sketches add up without loss.
    Source: DDSketch, Masson et al. 2019, arXiv:1908.10693.
    """

    __slots__ = ("_buckets", "_whole", "count", "largest")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self._whole = 0  # their sum, in units that make it the same in whatever order they come
        self.largest = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """`times` equal values of at least 0."""
        bounded = _LOWEST if value < _LOWEST else min(value, _HIGHEST)
        bucket = math.ceil(math.log(bounded) * _PER_LOG)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + times
        self.count += times
        self._whole += round(value * UNITS_PER_S) * times
        self.largest = max(self.largest, value)

    def merge(self, other: Sketch) -> None:
        for bucket, times in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + times
        self.count += other.count
        self._whole += other._whole
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float | None:
        return self._whole / UNITS_PER_S / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value of rank ceil(share * count); None when there is none."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(_value_of(bucket), self.largest)
        return None

    def curve(self) -> Iterator[tuple[float, float]]:
        """(value, share of values at most this), rising."""
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            yield min(_value_of(bucket), self.largest), seen / self.count

    def to_json(self) -> dict[str, float | None]:
        """mean, p50, p90, p99, max; all None when it is empty."""
        quantiles = {name: self.quantile(share) for name, share in QUANTILES.items()}
        return {"mean": self.mean, **quantiles, "max": self.largest if self.count else None}


def _value_of(bucket: int) -> float:
    if bucket <= math.ceil(math.log(_LOWEST) * _PER_LOG):
        return 0.0
    return 2 * _GROWTH**bucket / (_GROWTH + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Objectives that a good request meets, in seconds, besides its own; None asks for nothing."""

    ttft_s: float | None = None
    itl_s: float | None = None
    """Objective for 99% of a request's gaps."""
    tpot_s: float | None = None
    """Mean gap of a request."""
    e2e_s: float | None = None

    @classmethod
    def parse(cls, slo: Iterable[str]) -> Objectives:
        """Of `--slo`. Raises ConfigError."""
        return cls(**{f"{name}_s": bound for name, bound in map(parse_slo, slo)})


@dataclass(slots=True)
class GroupResults:
    """Results of one tenant, or of all."""

    ttft_s: Sketch = field(default_factory=Sketch)
    itl_s: Sketch = field(default_factory=Sketch)
    tpot_s: Sketch = field(default_factory=Sketch)  # of requests with two tokens or more
    e2e_s: Sketch = field(default_factory=Sketch)
    queue_s: Sketch = field(default_factory=Sketch)
    num_finished: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # refused, or given up: how many for which reason
    num_good: int = 0
    num_tokens: int = 0  # of finished requests, prompt and output
    num_cached_tokens: int = 0  # of their prompts
    num_preemptions: int = 0  # of them
    weight: float = 1.0
    background: bool = False  # of requests of that class
    # the requests' rates of service (tokens per second of stay), for Jain's index
    rates: float = 0.0
    squared_rates: float = 0.0
    # how long it had a request here
    busy_s: float = 0.0
    num_here: int = 0
    busy_since: float = 0.0

    def entered(self, now: float) -> None:
        if self.num_here == 0:
            self.busy_since = now
        self.num_here += 1

    def left(self, now: float) -> None:
        self.num_here -= 1
        if self.num_here == 0:
            self.busy_s += now - self.busy_since

    def finished(self, request: RequestState, good: bool, edge: EdgeModel) -> None:
        """`request` has its times."""
        arrived, ended = request.arrived_at, request.finished_at
        assert request.first_scheduled_at is not None
        assert request.first_token_at is not None
        assert ended is not None
        self.queue_s.add(request.first_scheduled_at - arrived)
        ttft_s, e2e_s = times_of(request, edge)
        self.ttft_s.add(ttft_s)
        self.e2e_s.add(e2e_s)
        if request.num_output_tokens > 1:
            self.tpot_s.add((e2e_s - ttft_s) / (request.num_output_tokens - 1))
        num_tokens = request.num_tokens
        rate = num_tokens / max(ended - arrived, 1e-9)
        self.rates += rate
        self.squared_rates += rate * rate
        self.num_finished += 1
        self.num_good += good
        self.num_tokens += num_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.num_preemptions += request.num_preemptions

    def merge(self, other: GroupResults) -> None:
        for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s"):
            getattr(self, name).merge(getattr(other, name))
        self.failures.update(other.failures)
        for name in (*_COUNTS, "rates", "squared_rates"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def num_failed(self) -> int:
        return self.failures.total()

    @property
    def service_rate(self) -> float:
        """Tokens per second while it had requests here, for each unit of weight."""
        return self.num_tokens / self.busy_s / self.weight if self.busy_s > 0 else 0.0

    @property
    def jain(self) -> float:
        """Return Jain's index over its requests' rates of service."""
        count = self.num_finished
        return self.rates**2 / (count * self.squared_rates) if self.squared_rates > 0 else 1.0

    @property
    def slo_attainment(self) -> float:
        total = self.num_finished + self.num_failed
        return self.num_good / total if total else 1.0

    def to_json(self, duration_s: float, jain: float | None = None) -> dict[str, Any]:
        return {
            "ttft_s": self.ttft_s.to_json(),
            "itl_s": self.itl_s.to_json(),
            "tpot_s": self.tpot_s.to_json(),
            "e2e_s": self.e2e_s.to_json(),
            "queue_s": self.queue_s.to_json(),
            "goodput_rps": self.num_good / duration_s if duration_s > 0 else 0.0,
            "slo_attainment": self.slo_attainment,
            "jain": self.jain if jain is None else jain,
            "num_finished": self.num_finished,
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
            "failed": dict(sorted(self.failures.items())),
        }


def times_of(request: RequestState, edge: EdgeModel) -> tuple[float, float]:
    """TTFT and E2E of a finished request as its client has them."""
    assert request.first_token_at is not None
    assert request.finished_at is not None
    ttft_s, e2e_s = request.first_token_at - request.arrived_at, request.finished_at - request.arrived_at
    prompt, output, name = request.num_prompt_tokens, request.num_output_tokens, request.request_id
    return ttft_s + edge.first_token_s(prompt, name), e2e_s + edge.whole_s(prompt, output, name)


def jain_index(values: Iterable[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has it all. Source: Jain et al. 1984."""
    listed = list(values)
    squares = math.fsum(x * x for x in listed)
    return math.fsum(listed) ** 2 / (len(listed) * squares) if squares > 0 else 1.0


class SimulatedResults:
    """A whole run: per tenant, and what a report draws."""

    def __init__(self, objectives: Objectives | None = None, edge: EdgeModel | None = None) -> None:
        """`edge` is what each client sees besides the engine; None adds nothing."""
        self.objectives = objectives or Objectives()
        self.edge = edge or EdgeModel()
        self.tenants: dict[str, GroupResults] = {}
        self.began_at: float | None = None  # s, first arrival
        self.ended_at = 0.0  # s, last end
        self.num_steps = 0
        self.num_row_steps = 0  # rows of all steps
        self.num_drafts = self.num_accepted_drafts = 0
        self.busy_units = 0  # time in steps, as a sketch's sum
        self.tickets = Tickets()
        self.queue_length = Series()

    def tenant(self, name: str, weight: float = 1.0, *, background: bool = False) -> GroupResults:
        """Made when first asked for; the tenant of requests without one is `default`. Those of the class background are
        a group of their own.
        """
        name = (name or "default") + (" (background)" if background else "")
        group = self.tenants.get(name)
        if group is None:
            group = self.tenants[name] = GroupResults(weight=weight, background=background)
        return group

    @property
    def _others(self) -> list[GroupResults]:
        """Groups without the class background, if there are any."""
        groups = list(self.tenants.values())
        return [group for group in groups if not group.background] or groups

    def arrived(self, group: GroupResults, now: float) -> None:
        if self.began_at is None:
            self.began_at = now
        group.entered(now)

    def finished(
        self,
        group: GroupResults,
        request: RequestState,
        *,
        num_slow_gaps: int = 0,
        slots: Sequence[Sequence[float]] = (),
        moves: Sequence[tuple[float, float]] = (),
    ) -> None:
        """`slots` are the times (from, to) in which it had one; empty is from its first step to its end. `moves` are
        those in which it waited for its KV.
        """
        group.finished(request, not self.missed(request, num_slow_gaps), self.edge)
        assert request.finished_at is not None
        self._left(group, request.finished_at)
        self.tickets.add(request, slots, moves)

    def failed(self, group: GroupResults, now: float, reason: str) -> None:
        """Refused by admission or by a limit, or given up."""
        group.failures[reason] += 1
        self._left(group, now)

    def _left(self, group: GroupResults, now: float) -> None:
        group.left(now)
        self.ended_at = max(self.ended_at, now)

    def missed(self, request: RequestState, num_slow_gaps: int) -> list[str]:
        """Names of the objectives that a finished request did not meet; a good one met all."""
        assert request.finished_at is not None
        ttft_s, e2e_s = times_of(request, self.edge)
        num_gaps = request.num_output_tokens - 1
        tpot_s = (e2e_s - ttft_s) / num_gaps if num_gaps else 0.0
        asked = self.objectives
        bounds = (
            ("ttft", ttft_s, asked.ttft_s),
            ("ttft", ttft_s, request.ttft_slo_s),
            ("tpot", tpot_s, asked.tpot_s),
            ("e2e", e2e_s, asked.e2e_s),
            ("deadline", request.finished_at, request.finish_by),
        )
        missed = [name for name, value, bound in bounds if bound is not None and value > bound]
        if asked.itl_s is not None and num_slow_gaps > SLOW_GAPS_ALLOWED * num_gaps:
            missed.append("itl")
        return missed

    @property
    def total(self) -> GroupResults:
        """Results of all, without the class background."""
        whole = GroupResults()
        for group in self._others:
            whole.merge(group)
        return whole

    @property
    def num_preemptions(self) -> int:
        return sum(group.num_preemptions for group in self.tenants.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(group.num_cached_tokens for group in self.tenants.values())

    @property
    def busy_s(self) -> float:
        """Time in steps."""
        return self.busy_units / UNITS_PER_S

    @property
    def utilisation(self) -> float:
        """The share of the time in which the engine was in a step."""
        return min(1.0, self.busy_s / self.duration_s) if self.duration_s > 0 else 0.0  # sums round

    @property
    def duration_s(self) -> float:
        """First arrival to last end."""
        return self.ended_at - (self.began_at or 0.0)

    @property
    def jain(self) -> float:
        """Return Jain's index over the tenants' rates of service by weight; with one tenant, over its requests."""
        groups = self._others
        return self.total.jain if len(groups) == 1 else jain_index(group.service_rate for group in groups)

    def to_json(self) -> dict[str, Any]:
        """The figures of `maitred simulate --json` for one policy."""
        tenants = {name: group.to_json(self.duration_s) for name, group in sorted(self.tenants.items())}
        whole = self.total.to_json(self.duration_s, self.jain)
        drafts = {"num_drafts": self.num_drafts, "num_accepted_drafts": self.num_accepted_drafts}
        drafts = drafts if self.num_drafts else {}
        return {**whole, "utilisation": self.utilisation, **drafts, "tenants": tenants}


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request's stay, for the timeline; times in seconds."""

    request_id: str
    tenant: str
    arrived_at: float
    scheduled_at: float
    first_token_at: float
    finished_at: float
    num_preemptions: int
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    slots: tuple[tuple[float, float], ...]  # from, to: when it was not put out
    moves: tuple[tuple[float, float], ...] = ()  # from, to: when it waited for its KV, handed over


class Tickets:
    """The first requests that finished."""

    LIMIT = 400

    def __init__(self) -> None:
        self.kept: list[Ticket] = []

    def add(
        self, request: RequestState, slots: Sequence[Sequence[float]] = (), moves: Sequence[tuple[float, float]] = ()
    ) -> None:
        if len(self.kept) >= self.LIMIT:
            return
        times = (request.arrived_at, request.first_scheduled_at, request.first_token_at, request.finished_at)
        arrived, scheduled, first, ended = (at if at is not None else request.arrived_at for at in times)
        stays = tuple((began, until) for began, until in slots) or ((scheduled, ended),)
        self.kept.append(
            Ticket(
                request.request_id,
                request.tenant,
                arrived,
                scheduled,
                first,
                ended,
                request.num_preemptions,
                request.priority,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.num_cached_tokens,
                stays,
                tuple(moves),
            )
        )


class Series:
    """A figure over time: the largest value in each of at most 2,000 spans; spans double when the run grows."""

    LIMIT = 2000

    def __init__(self, span_s: float = 0.01) -> None:
        self.span_s = span_s
        self._peaks: dict[int, int] = {}

    def add(self, at: float, value: int) -> None:
        span = int(at / self.span_s)
        if value > self._peaks.get(span, -1):
            self._peaks[span] = value
            if len(self._peaks) > self.LIMIT:
                self._widen()

    def points(self) -> list[tuple[float, int]]:
        """(s, value), in order."""
        return [(span * self.span_s, value) for span, value in sorted(self._peaks.items())]

    def _widen(self) -> None:
        self.span_s *= 2
        wider: dict[int, int] = {}
        for span, value in self._peaks.items():
            wider[span // 2] = max(value, wider.get(span // 2, 0))
        self._peaks = wider
