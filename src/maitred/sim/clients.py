"""Clients of a simulated engine or fleet: each request's arrival, its terms, and its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import msgspec

from maitred.core.errors import MaitredError, Overloaded, RateLimited
from maitred.core.request import FinishReason, RequestSpec, RequestState
from maitred.core.step import RequestProgress, SampledRow
from maitred.gate.admission import AdmissionController
from maitred.gate.gate import Gate, Lease
from maitred.sim.results import GroupResults, SimulatedResults
from maitred.sim.workload import Arrival, ask_of, next_turn, request_of
from maitred.tenancy.caller import Caller, anybody
from maitred.tenancy.quota import QuotaBook
from maitred.tenancy.tenant import Tenant

ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request while it is here."""

    arrival: Arrival
    caller: Caller
    spec: RequestSpec
    group: GroupResults
    sampled: SampledRow  # the same after every step: tokens are all 0, nothing in the scheduler looks at them
    state: RequestState | None = None  # once a scheduler has it
    last_token_at: float = -1.0  # s; before the first token, negative
    num_slow_gaps: int = 0
    lease: Lease | None = None  # once the gate let it in
    slots: list[list[float]] = field(default_factory=list)  # from, to (s): when it had one; the last may lack its end
    moves: list[tuple[float, float]] = field(default_factory=list)  # from, to (s): when its KV was waited for

    def begin_again(self) -> None:
        """Start over: the request is on no engine any more, and what it had there is lost."""
        self.state, self.last_token_at, self.num_slow_gaps = None, -1.0, 0
        self.spec = msgspec.structs.replace(self.spec, resumed=None)
        self.slots.clear()
        self.moves.clear()


class Clients:
    """Clients under the terms and limits of `tenants`; a request that those or `admission` refuse counts as failed."""

    def __init__(
        self,
        results: SimulatedResults,
        block_size: int,
        tenants: Mapping[str, Tenant] | None = None,
        admission: AdmissionController | None = None,
    ) -> None:
        self.results = results
        self._block_size = block_size
        quotas = QuotaBook({})
        self._callers = {name: Caller(tenant, quotas.of(tenant)) for name, tenant in (tenants or {}).items()}
        self._anybody = anybody()
        self._gate = Gate(admission)
        self.hear_each_step = admission is not None or bool(tenants)  # for limits that look at progress
        self._events: list[tuple[float, int, Arrival]] = []  # a heap: the next to come
        self._num_events = 0
        self._source: Iterator[Arrival] = iter(())

    # -- they come

    def begin(self, source: Iterator[Arrival]) -> None:
        """`source` is read as time goes on, one ahead."""
        self._source = source
        self._expect_next_of_source()

    @property
    def next_at(self) -> float | None:
        """Return when the next request comes (s); None when none does, unless an answer triggers one."""
        return self._events[0][0] if self._events else None

    def take(self) -> SimulatedRequest:
        """The next one."""
        at, order, arrival = heappop(self._events)
        if order % 2:
            self._expect_next_of_source()
        caller = self._callers.get(arrival.tenant, self._anybody)
        if arrival.background:
            caller = replace(caller, background=True)
        weight = arrival.weight if caller.is_anybody else caller.tenant.weight
        group = self.results.tenant(arrival.tenant, weight, background=arrival.background)
        self.results.arrived(group, at)
        spec = request_of(arrival, self._block_size)
        return SimulatedRequest(arrival, caller, spec, group, SampledRow(arrival.request_id, (0,)))

    def pass_gate(self, live: SimulatedRequest) -> tuple[str, ...]:
        """Ids of those that leave the queue for it. Raises RateLimited, InsufficientQuota or Overloaded."""
        now = live.arrival.at
        live.lease = self._gate.enter(live.caller, ask_of(live.arrival, live.caller.tenant), now)
        admitted = self._gate.admit(live.lease, [live.spec], now)
        (live.spec,) = admitted.specs
        return admitted.shed

    def _expect_next_of_source(self) -> None:
        arrival = next(self._source, None)
        if arrival is not None:
            self._expect(arrival, is_first=True)

    def _expect(self, arrival: Arrival, *, is_first: bool = False) -> None:
        self._num_events += 1  # ties go by the order in which they were expected; odd is of the source
        heappush(self._events, (arrival.at, 2 * self._num_events + is_first, arrival))

    # -- what comes of it

    def progressed(self, progress: Iterable[RequestProgress], num_queued: int, now: float) -> None:
        self._gate.progressed(progress, num_queued, now)

    def refused(self, live: SimulatedRequest, error: MaitredError, now: float) -> None:
        if live.lease is not None:
            live.lease.end(0)
        self.results.failed(live.group, now, _reason_of(error))

    def given_up(self, live: SimulatedRequest, reason: FinishReason, now: float) -> None:
        """Count a request that was given up before any engine had begun it."""
        assert live.lease is not None
        live.lease.end(0)
        self.results.failed(live.group, now, reason.value)

    def ended(self, live: SimulatedRequest, reason: FinishReason, now: float) -> None:
        assert live.state is not None
        assert live.lease is not None
        live.lease.end(live.state.num_tokens)
        live.caller.quota.computed(live.state.compute_us, now)
        if reason in ENDED_BY_ITSELF:
            live.slots[-1].append(now)
            self.results.finished(
                live.group, live.state, num_slow_gaps=live.num_slow_gaps, slots=live.slots, moves=live.moves
            )
            asked = live.arrival
            after_s = self.results.edge.whole_s(asked.prompt_tokens, asked.output_tokens, asked.request_id)
            follower = next_turn(asked, now + after_s)
            if follower is not None:
                self._expect(follower)
        else:
            self.results.failed(live.group, now, reason.value)


def _reason_of(error: MaitredError) -> str:
    """Return the reason in a word, as the figures have it."""
    if isinstance(error, Overloaded):
        return error.reason
    return error.limit if isinstance(error, RateLimited) else "too_long"
