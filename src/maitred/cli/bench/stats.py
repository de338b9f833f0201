"""Statistics of a load test: exact percentiles, throughput, goodput under objectives, errors by kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

from maitred.cli.bench.record import Record
from maitred.core.objectives import percentile

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in five figures, in the unit of its values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """None when there is no value."""
    present = sorted(value for value in values if value is not None)
    if not present:
        return None
    p50, p90, p99 = (percentile(present, percent) for percent in PERCENTILES)
    return Spread(len(present), math.fsum(present) / len(present), p50, p90, p99, present[-1])


# ---- objectives


def _itl_p99(record: Record) -> float | None:
    gaps = sorted(record.itls_s())
    return percentile(gaps, 99) if gaps else None


# What of a request an objective bounds; None (a single chunk has no ITL) meets every bound.
OBJECTIVES: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft_s,
    "itl": _itl_p99,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
}


def meets(record: Record, slos: dict[str, float]) -> bool:
    """A failed request meets nothing."""
    if not record.ok:
        return False
    values = ((OBJECTIVES[name](record), bound) for name, bound in slos.items())
    return all(value is None or value <= bound for value, bound in values)


# ---- the whole


@dataclass(slots=True)
class ErrorKind:
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a run; times in seconds, rates per second of `duration_s` (first send to last token)."""

    num_requests: int
    num_completed: int
    num_failed: int
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    peak_in_flight: int
    ttft_s: Spread | None
    itl_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    stall_s: Spread | None  # longest silence within a request
    client_lag_s: Spread | None  # how late we were ourselves
    slos_s: dict[str, float] = field(default_factory=dict)
    num_good: int = 0
    goodput_per_s: float = 0.0
    errors: dict[str, ErrorKind] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(records: Sequence[Record], slos: dict[str, float], *, peak_in_flight: int = 0) -> Summary:
    done = [record for record in records if record.ok]
    began_s = min((record.sent_s for record in records), default=0.0)
    duration_s = max((record.ended_s for record in records), default=0.0) - began_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_good = sum(meets(record, slos) for record in records)
    input_tokens, output_tokens = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    return Summary(
        num_requests=len(records),
        num_completed=len(done),
        num_failed=len(records) - len(done),
        duration_s=duration_s,
        input_tokens=input_tokens,
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output_tokens,
        requests_per_s=len(done) * per_s,
        input_tokens_per_s=input_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        peak_in_flight=peak_in_flight,
        ttft_s=spread(record.ttft_s for record in done),
        itl_s=spread(gap for record in done for gap in record.itls_s()),
        tpot_s=spread(record.tpot_s for record in done),
        e2e_s=spread(record.e2e_s for record in done),
        stall_s=spread(record.stall_s for record in done),
        client_lag_s=spread(record.lag_s for record in records),
        slos_s=slos,
        num_good=num_good,
        goodput_per_s=num_good * per_s,
        errors=_errors(records),
    )


def _errors(records: Iterable[Record]) -> dict[str, ErrorKind]:
    kinds: dict[str, ErrorKind] = {}
    for record in records:
        if record.failure is not None:
            kinds.setdefault(record.failure.kind, ErrorKind(0, record.failure.message)).count += 1
    return kinds
