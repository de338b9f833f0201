"""Service level objectives of requests: how `--slo` is written, and what of a request each one bounds. Pure."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from maitred.core.errors import ConfigError

NAMES = ("ttft", "itl", "tpot", "e2e")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_seconds(text: str) -> float | None:
    """`20ms` -> 0.02; None for what is no time."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text.replace(" ", ""))
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def parse_slo(text: str) -> tuple[str, float]:
    """`ttft:200ms` -> ("ttft", 0.2). Raises ConfigError."""
    match = re.fullmatch(r"([a-z0-9]+):([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text.replace(" ", ""))
    if match is None or match[1] not in NAMES:
        raise ConfigError(f"--slo is {text!r}; write NAME:TIME, such as ttft:200ms, NAME one of {', '.join(NAMES)}")
    return match[1], float(match[2]) * _SECONDS[match[3]]


def promised(slos: Iterable[str]) -> dict[str, float | None]:
    """Return the promises (s) of first tokens and of the time between tokens. Raises ConfigError."""
    bounds_s = dict(map(parse_slo, slos))
    return {"ttft_s": bounds_s.get("ttft"), "tpot_s": bounds_s.get("tpot", bounds_s.get("itl"))}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of sorted, non-empty `values`; between two of them linearly, as numpy's default."""
    at = (len(values) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


@dataclass(slots=True, eq=False)
class Pace:
    """Times of one sample's tokens, in seconds of one clock."""

    first_at: float | None = None
    last_at: float | None = None
    num_first_tokens: int = 0  # that came at once with the first
    num_tokens: int = 0
    gaps_s: array[float] | None = None  # inter-token latencies; None does not keep them

    def came(self, now: float, num_tokens: int) -> float | None:
        """The time since the token before, of each of `num_tokens` that share it; None for the first ones."""
        gap_s = None
        if self.last_at is None:
            self.first_at, self.num_first_tokens = now, num_tokens
        else:
            gap_s = (now - self.last_at) / num_tokens
            if self.gaps_s is not None:
                self.gaps_s.extend((gap_s,) * num_tokens)
        self.last_at = now
        self.num_tokens += num_tokens
        return gap_s

    def itl_p99_s(self) -> float | None:
        return percentile(sorted(self.gaps_s), 99) if self.gaps_s else None

    def tpot_s(self) -> float | None:
        """Time per output token after those that came first; None where nothing came after them."""
        if self.first_at is None or self.last_at is None or self.num_tokens <= self.num_first_tokens:
            return None
        return (self.last_at - self.first_at) / (self.num_tokens - self.num_first_tokens)


def new_pace(*, keeps_gaps: bool) -> Pace:
    """`keeps_gaps`: an objective asks for inter-token latencies, which take 8 bytes a token."""
    return Pace(gaps_s=array("d") if keeps_gaps else None)


def values_s(pace: Pace, began_at: float) -> dict[str, float | None]:
    """Return the value that each objective bounds, of a sample of a request that began then; None meets every bound."""
    return {
        "ttft": pace.first_at - began_at if pace.first_at is not None else None,
        "itl": pace.itl_p99_s(),
        "tpot": pace.tpot_s(),
        "e2e": pace.last_at - began_at if pace.last_at is not None else None,
    }


def met(bounds_s: Mapping[str, float], paces: Iterable[Pace], began_at: float) -> dict[str, bool]:
    """Return for each objective whether every sample kept to it."""
    values = [values_s(pace, began_at) for pace in paces]
    return {
        name: all((value := of_one[name]) is None or value <= bound for of_one in values)
        for name, bound in bounds_s.items()
    }


def broken_by(bounds_s: Mapping[str, float], paces: Sequence[Pace], began_at: float, now: float) -> dict[str, bool]:
    """Return for each objective whether a request given up at `now` had broken it, whatever would have followed."""
    has_begun = any(pace.first_at is not None for pace in paces)
    waited_s = {"ttft": 0.0 if has_begun else now - began_at, "e2e": now - began_at}
    kept = met(bounds_s, paces, began_at)
    return {name: not kept[name] or waited_s.get(name, 0.0) > bound for name, bound in bounds_s.items()}
