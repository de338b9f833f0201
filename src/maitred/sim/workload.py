"""Workload of a simulated engine: arrivals, prompts, and lengths of answers.

A prompt is not tokens but named spans; a span's name stands for everything up to its end. Equal names at the
same place are equal prompts, so prefixes are shared exactly where a trace or a workload says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, Protocol

from maitred.core.errors import ConfigError
from maitred.core.request import RequestSpec, SamplingParams, Terms
from maitred.gate.gate import Ask, TimeLimits
from maitred.tenancy.tenant import Tenant


class TokenSpan(NamedTuple):
    """The part of a prompt up to token `end`; `name` stands for all tokens from the first one on."""

    name: bytes
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Turn of a conversation, after the one before: its prompt is that one's prompt and answer, and `new_tokens`."""

    think_s: float
    new_tokens: int
    output_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request, or the first of a conversation."""

    at: float  # s since the workload began
    request_id: str
    prompt_tokens: int
    output_tokens: int  # how many it will generate; only the stop rule and the oracle know
    max_tokens: int  # what the client allows
    tenant: str = ""
    model: str = ""  # one of several
    priority: int | None = None  # None says nothing: the tenant's, else 0
    weight: float = 1.0
    ttft_slo_s: float | None = None
    start_within_s: float | None = None  # given up if it is in no step by then, after arrival
    deadline_s: float | None = None  # given up if it is not done by then, after arrival
    background: bool = False
    spans: tuple[TokenSpan, ...] = ()  # shared parts, the first one first; what is after them is the conversation's own
    own: bytes = b""  # name of what is after them
    turns: tuple[Turn, ...] = ()  # still to come

    @property
    def terms(self) -> Terms:
        """Terms that the request asks for, before any gate."""
        return Terms(
            tenant=self.tenant,
            weight=self.weight,
            priority=self.priority or 0,
            ttft_slo_s=self.ttft_slo_s,
            start_by=None if self.start_within_s is None else self.at + self.start_within_s,
            finish_by=None if self.deadline_s is None else self.at + self.deadline_s,
            background=self.background,
        )


class Workload(Protocol):
    """A source that can be gone through once for each policy."""

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """Tenants whose limits are to be kept."""

    def arrivals(self) -> Iterator[Arrival]:
        """Arrivals in order of `at`."""


def of_known_tenants(arrivals: Iterator[Arrival], tenants: Mapping[str, Tenant]) -> Iterator[Arrival]:
    """Raises ConfigError at the first request of a tenant that there are no terms for."""
    for arrival in arrivals:
        if arrival.tenant and arrival.tenant not in tenants:
            raise ConfigError(
                f"request {arrival.request_id} is of tenant {arrival.tenant!r}, and the tenants given are "
                f"{', '.join(sorted(tenants))}; add it to their file"
            )
        yield arrival


def ask_of(arrival: Arrival, tenant: Tenant) -> Ask:
    """A priority out of the tenant's range becomes the nearest in it, where a server would refuse."""
    low, high = tenant.priorities
    return Ask(
        priority=None if arrival.priority is None else max(low, min(high, arrival.priority)),
        limits=TimeLimits(arrival.ttft_slo_s, arrival.start_within_s, arrival.deadline_s),
    )


@lru_cache(maxsize=1024)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def request_of(arrival: Arrival, block_size: int) -> RequestSpec:
    """A request made from hashes in place of tokens, before any terms but its own."""
    at = arrival.at
    return RequestSpec(
        request_id=arrival.request_id,
        prompt_token_ids=(),
        sampling=_sampling(arrival.max_tokens),
        arrived_at=at,
        num_prompt_tokens=arrival.prompt_tokens,
        max_tokens=arrival.max_tokens,
        terms=arrival.terms,
        block_hashes=block_hashes(arrival, 0, arrival.prompt_tokens // block_size, block_size),
    )


def block_hashes(arrival: Arrival, first: int, last: int, block_size: int) -> list[bytes]:
    """Names of blocks [first, last) of the conversation's tokens, prompt and output.

    A block's name is that of the span its last token is in, which stands for everything before it too, and its number:
    two blocks have one name exactly when all that is known of the tokens up to their ends is equal.
    """
    hashes: list[bytes] = []
    for name, end in arrival.spans[bisect_right(arrival.spans, first * block_size, key=_end_of) :]:
        covered = min(end // block_size, last)
        hashes += [name + i.to_bytes(4, "little") for i in range(first + len(hashes), covered)]
    return hashes + [arrival.own + i.to_bytes(4, "little") for i in range(first + len(hashes), last)]


_end_of = attrgetter("end")


def chain(names: Sequence[object], tokens_each: int, root: str = "") -> tuple[TokenSpan, ...]:
    """Spans of a list of block ids, each of `tokens_each` tokens: equal id after equal ids is equal content."""
    spans, digest = [], sha256(root.encode()).digest()
    for number, name in enumerate(names, 1):
        digest = sha256(digest + repr(name).encode()).digest()
        spans.append(TokenSpan(digest[:16], number * tokens_each))
    return tuple(spans)


def next_turn(arrival: Arrival, ended_at: float) -> Arrival | None:
    """The next request of a conversation, or None when that was the last."""
    if not arrival.turns:
        return None
    turn, *rest = arrival.turns
    conversation, _, number = arrival.request_id.rpartition("#")
    conversation, turn_number = (conversation, int(number) + 1) if conversation else (arrival.request_id, 2)
    return Arrival(
        at=ended_at + turn.think_s,
        request_id=f"{conversation}#{turn_number}",
        prompt_tokens=arrival.prompt_tokens + arrival.output_tokens + turn.new_tokens,
        output_tokens=turn.output_tokens,
        max_tokens=turn.max_tokens,
        tenant=arrival.tenant,
        model=arrival.model,
        priority=arrival.priority,
        weight=arrival.weight,
        ttft_slo_s=arrival.ttft_slo_s,
        start_within_s=arrival.start_within_s,
        deadline_s=arrival.deadline_s,
        background=arrival.background,
        spans=arrival.spans,
        own=arrival.own,
        turns=tuple(rest),
    )


MOST_SAMPLED = 20_000  # arrivals of a workload that are looked at


class Demand:
    """Requests to plan for: those of a workload, at any rate."""

    def __init__(self, workload: Workload) -> None:
        self._first = list(islice(workload.arrivals(), MOST_SAMPLED))
        prompts, fresh, outputs, known = [], [], [], set[bytes]()
        for arrival in self._first:
            cached = max((end for name, end in arrival.spans if name in known), default=0)
            known.update(name for name, _ in arrival.spans)
            prompts.append(arrival.prompt_tokens)
            fresh.append(max(1, arrival.prompt_tokens - cached))
            outputs.append(arrival.output_tokens)
            for turn in arrival.turns:
                prompts.append(prompts[-1] + outputs[-1] + turn.new_tokens)
                fresh.append(turn.new_tokens)
                outputs.append(turn.output_tokens)
        self.num_requests = len(prompts)
        self.mean_prompt, self.mean_output = sum(prompts) / len(prompts), sum(outputs) / len(outputs)
        self.mean_fresh = sum(fresh) / len(fresh)
        self.fresh = sorted(fresh)  # prompt tokens that no cache, however large, can have
        self.longest = max(map(sum, zip(prompts, outputs, strict=True)))
        lasts_s = self._first[-1].at
        self.rate = (
            self.num_requests / lasts_s if lasts_s > 0 else 0.0
        )  # requests a second as they come, turns included

    @property
    def mean_context(self) -> float:
        """Mean length of a request while it decodes."""
        return self.mean_prompt + self.mean_output / 2

    def at(self, rate: float, num_requests: int, *, answers: bool = True) -> list[Arrival]:
        """The first requests, so stretched that they come at exactly this rate; without answers each ends with its
        first token, and what it would have said is in its next turn's prompt.
        """
        taken, count = [], 0
        for arrival in self._first:
            if count >= num_requests:
                break
            taken.append(arrival)
            count += 1 + len(arrival.turns)
        scale = count / rate / (taken[-1].at or 1.0)
        made = [replace(arrival, at=arrival.at * scale) for arrival in taken]
        return made if answers else [_prompt_alone(arrival) for arrival in made]


def _prompt_alone(arrival: Arrival) -> Arrival:
    turns, output = [], arrival.output_tokens
    for turn in arrival.turns:
        turns.append(replace(turn, new_tokens=turn.new_tokens + output - 1, output_tokens=1))
        output = turn.output_tokens
    return replace(arrival, output_tokens=1, turns=tuple(turns))
