"""The seam of scheduling policies: what a policy is made of. `policies.POLICIES` lists those that there are.

A policy says how requests are ordered inside a group, which group is next, which running requests a waiting one may
preempt, and how long a request may run on. The scheduler supplies everything else, so a policy never touches blocks or
plans. It is pure: no clock, no randomness, no environment. `testing.conformance` checks what it promises.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from maitred.config import PolicyArg


class Queued(Protocol):
    """A request as its policy sees it: tenant, deadlines, cost and progress. All to be read only."""

    # -- the tenant

    @property
    def request_id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def weight(self) -> float:
        """Weight of its tenant: twice the weight, twice the fair share."""

    @property
    def priority(self) -> int:
        """0 is most urgent."""

    # -- by when, in s of the clock, or s after its arrival where `_s` says so

    @property
    def arrived_at(self) -> float: ...

    @property
    def ttft_slo_s(self) -> float | None:
        """Objective from arrival to the first output."""

    @property
    def start_by(self) -> float | None: ...

    @property
    def finish_by(self) -> float | None: ...

    # -- what it costs

    @property
    def num_inputs(self) -> int: ...

    @property
    def max_outputs(self) -> int: ...

    @property
    def expected_outputs(self) -> float | None:
        """Output tokens as predicted, whatever the predictor said; None without a prediction."""

    @property
    def block_hashes(self) -> Sequence[Hashable]:
        """Hashes of the parts of its input, in order, that a cache may hold; empty where there are none."""

    # -- how far it has come

    @property
    def first_scheduled_at(self) -> float | None: ...

    @property
    def num_computed(self) -> int:
        """Inputs and outputs that are computed or planned; 0 while it waits."""

    @property
    def num_outputs(self) -> int: ...


class UsedQuanta(NamedTuple):
    """Quanta of one request under a policy that has quanta."""

    num_used: int
    ended_at: float  # s, when the last of them was used up


class KVNeed(NamedTuple):
    """KV that one request needs, found when it was last looked for; nothing where there is no cache."""

    num_cached: int = 0  # of its inputs and outputs, those whose KV it would find
    num_cached_blocks: int = 0
    num_blocks: int = 0  # that it will hold at its end, as predicted, cached ones among them
    max_blocks: int = 0  # the most that it can hold


NO_KV_NEED = KVNeed()


OrderKey = Callable[[Queued], tuple[Any, ...]]
"""Smaller runs first. Static: asked when a request is added (and when its quantum ends), never while it waits."""

PreemptionRule = Callable[[Queued, Queued], bool]
"""(waiting, running) -> may the first take the slot and blocks of the second? Must be free of cycles."""

Rank = tuple[float, ...]


class GroupRule:
    """Groups of waiting requests (tenants, levels), ordered by the service they have had; this one has all in one.

    Holds the state of one scheduler. The rank of a group may rise in any hook, and fall only in `on_queued` and
    `on_finished`, there only that of the request's own group.
    """

    def group_of(self, request: Queued) -> str:
        """May change only while the request is not waiting."""
        return ""

    def rank(self, group: str) -> Rank:
        """The group of smallest rank is served next; ties go by name."""
        return ()

    def on_queued(self, request: Queued) -> None:
        """Note a request that is about to wait: new, or preempted."""

    def on_started(self, request: Queued) -> None:
        """Note a request that leaves the queue for a slot, with the tokens of its prefix hit computed."""

    def on_scheduled(self, request: Queued, num_tokens: int) -> None:
        """A plan computes so much of it; `num_computed` counts that already."""

    def on_finished(self, request: Queued) -> None:
        """Note a finished request, waiting or running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One way to order requests; see `POLICIES`."""

    source: str
    """The paper or textbook it comes from."""
    bound: str
    """Starvation bound, in words; `overtaken_until` and `max_service_gap` are the same in numbers."""
    order: OrderKey
    """Order inside a group. A preempted request keeps its key, and so its place."""
    overtaken_until: Callable[[Queued], float]
    """Bound on overtaking in a group: a waiting request that arrived later than this (s) of another starts after it."""
    terms: Callable[[Queued], Mapping[str, float]]
    """The parts of its place in the queue, by name, for people to read: `arrived_at_s`, `ageing_s`, `counter_tokens`.
    Asked for one request at a time, never by the scheduler. Without groups they sum up to the first part of `order`."""
    outranks: PreemptionRule | None = None
    """Preemption when slots or blocks lack for the first in the queue; None waits until a running request ends."""
    victim: OrderKey | None = None
    """The largest is preempted first when blocks run out; None takes the last in the policy's own order."""
    resumed: OrderKey | None = None
    """Key of a preempted request, not after the one it had; None keeps that."""
    groups: GroupRule | None = None
    """Rule of groups; None is one group for all, and costs nothing for each row."""
    max_service_gap: Callable[[int, int, int, int], float] | None = None
    """(longest prompt, longest output, max_num_seqs, tokens of the KV pool) -> by how much the weighted service of two
    groups that always wait can drift apart, in input tokens for a weight of 1. Of a policy with `groups`."""
    quantum_end: Callable[[Queued], int] | None = None
    """Position at which a quantum that begins now ends: there it makes room for those that wait, and is given a new
    key. None runs on."""
    quanta: dict[str, UsedQuanta] = field(default_factory=dict)
    """Quanta used up under a policy with `quantum_end`, by request id; a request that has used up none is not in it.
    Written by `ServiceOrder`, which hands them on when the policy changes, so that every request keeps its place.
    """
    kv_needs: dict[str, KVNeed] | None = None
    """KV needs of each request, for a policy whose `order` looks at cached tokens. Written by `ServiceOrder`, which
    then asks for the key again when the cache gains or loses blocks of a waiting request. None does not look.
    """
    heeds_priority: bool = True
    """A request's priority may change its place."""
    reads_predictions: bool = True
    """The expected length of a request's answer may change its place."""
    arguments: Mapping[str, PolicyArg] = field(default_factory=dict)
    """Parameters by name, with the values the policy was made with; `parameters.make_policy` sets them."""


PolicyFactory = Callable[..., Policy]
"""(config, *, parameters) -> a fresh policy. `config` is the SchedulerConfig, all else is by keyword: the policy's own
parameters, see `parameters`."""


def by_arrival(request: Queued) -> tuple[Any, ...]:
    return (request.arrived_at, request.request_id)  # request_id last: ties never depend on dict order


def arrival_term(request: Queued) -> dict[str, float]:
    return {"arrived_at_s": request.arrived_at}
