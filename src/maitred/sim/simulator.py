"""The engine without a model: the real core, scheduler and KV bookkeeping, on a clock that a cost model turns.

`execute` is an event at now + step_time(plan); nothing else differs from the live engine. Requests that come while a
step runs are taken in when it has ended, as the engine's thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from maitred.clock import ManualClock
from maitred.config import SchedulerConfig
from maitred.cost_model import CostModel, Slowness, StepShape, shape_of
from maitred.engine.core import EngineCore, StepObserver
from maitred.errors import MaitredError, Overloaded, RateLimited
from maitred.gate.admission import AdmissionController
from maitred.gate.gate import Gate, Lease
from maitred.kvcache.manager import KVCacheManager
from maitred.policy.policies import POLICIES
from maitred.policy.policy import PolicyFactory
from maitred.policy.predictor import Foretold, predictor_named
from maitred.request import FinishReason, RequestSpec, RequestState
from maitred.scheduler.scheduler import Scheduler
from maitred.sim.jitter import Jitter
from maitred.sim.results import GroupResults, Results
from maitred.sim.workload import Arrival, ask_of, block_hashes, next_turn, request_of
from maitred.step import ModelOutput, RequestProgress, SampledRow, SchedulerOutput
from maitred.tenancy.caller import Caller, anybody
from maitred.tenancy.quota import QuotaBook
from maitred.tenancy.tenant import Tenant

SlownessAt = Callable[[float], Slowness]
"""Of the machine at a time (s since the first arrival)."""
IDLE_STEP_S = 1e-3  # a step with nothing to do, while everybody waits for something other than a slot
ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What of an engine's configuration its scheduling depends on."""

    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    predictor: str = "oracle"
    """One of PREDICTORS, in place of `scheduler.predictor`: the oracle's truth is only known here."""
    policies: Mapping[str, PolicyFactory] = field(default_factory=lambda: POLICIES)
    """By name; installed ones may be among them."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request while it is here."""

    arrival: Arrival
    caller: Caller
    spec: RequestSpec
    group: GroupResults
    sampled: SampledRow  # the same after every step: tokens are all 0, nothing in the scheduler looks at them
    state: RequestState | None = None  # once the scheduler has it
    last_token_at: float = -1.0  # s; before the first token, negative
    num_slow_gaps: int = 0
    lease: Lease | None = None  # once the gate let it in
    slots: list[list[float]] = field(default_factory=list)  # from, to (s): when it had one; the last may lack its end


class Simulation:
    """One engine and one workload. Without `jitter` every step takes what the cost model says, and without `slowness`
    the machine's speed is always that of the cost model.

    What a request spends outside of the engine is that of `results.edge`; the engine's decisions know nothing of it.
    Requests of `tenants` are under their terms and limits; whom those or `admission` turn away counts as failed.
    """

    def __init__(
        self,
        setup: EngineSetup,
        cost_model: CostModel,
        results: Results,
        *,
        jitter: Jitter | None = None,
        slowness: SlownessAt | None = None,
        tenants: Mapping[str, Tenant] | None = None,
        admission: AdmissionController | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self.results = results
        self._setup = setup
        quotas = QuotaBook({})
        self._callers = {name: Caller(tenant, quotas.of(tenant)) for name, tenant in (tenants or {}).items()}
        self._anybody = anybody()
        self._gate = Gate(admission)
        self._shed: list[RequestProgress] = []  # since the last step; told along with the next one's progress
        self._clock = ManualClock()
        self._executor = _SimulatedExecutor(self._clock, cost_model, results, jitter, slowness)
        self._live = self._executor.live_requests
        kv_cache = KVCacheManager(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            hasher=self._hash_output,
            enable_prefix_caching=setup.enable_prefix_caching,
        )
        predictor = predictor_named(setup.predictor, self._true_length)
        self.scheduler = Scheduler(setup.scheduler, kv_cache, self._stop_rule, predictor, setup.policies)
        self._core = EngineCore(self.scheduler, self._executor, self._clock, observer)
        self._events: list[tuple[float, int, Arrival]] = []  # a heap: what comes next, besides the end of a step
        self._num_events = 0
        self._source: Iterator[Arrival] = iter(())

    def run(self, arrivals: Iterator[Arrival]) -> Results:
        """Until the last request has ended; `arrivals` is read as time goes on, one ahead."""
        self._source = arrivals
        self._expect_next_of_source()
        core, clock, events, executor = self._core, self._clock, self._events, self._executor
        while events or core.has_work:
            if not core.has_work:
                clock.advance(max(0.0, events[0][0] - clock.now()))
            now = clock.now()
            while events and events[0][0] <= now:
                self._take_in(heappop(events))
            if core.has_work:
                progress, self._shed = self._shed, []
                self._settle(progress + core.step())
                clock.advance(executor.gap_s)
        self._settle(self._shed)
        return self.results

    # -- what comes

    def _expect_next_of_source(self) -> None:
        arrival = next(self._source, None)
        if arrival is not None:
            self._expect(arrival, is_first=True)

    def _expect(self, arrival: Arrival, *, is_first: bool = False) -> None:
        self._num_events += 1  # ties go by the order in which they were expected; odd is of the source
        heappush(self._events, (arrival.at, 2 * self._num_events + is_first, arrival))

    def _take_in(self, event: tuple[float, int, Arrival]) -> None:
        at, order, arrival = event
        if order % 2:
            self._expect_next_of_source()
        caller = self._callers.get(arrival.tenant, self._anybody)
        weight = arrival.weight if caller.is_anybody else caller.tenant.weight
        group = self.results.tenant(arrival.tenant, weight)
        self.results.arrived(group, at)
        spec = request_of(arrival, self._setup.block_size)
        live = SimulatedRequest(arrival, caller, spec, group, SampledRow(arrival.request_id, (0,)))
        self._live[arrival.request_id] = live
        try:
            self._pass_gate(live, at)
            live.state = self._core.add(live.spec)
        except MaitredError as error:
            self._refused(live, error)
        self.results.queue_length.add(at, len(self._live) - self.scheduler.num_running)

    def _pass_gate(self, live: SimulatedRequest, now: float) -> None:
        """Raises RateLimited, InsufficientQuota or Overloaded."""
        live.lease = self._gate.enter(live.caller, ask_of(live.arrival, live.caller.tenant), now)
        admitted = self._gate.admit(live.lease, [live.spec], now)
        (live.spec,) = admitted.specs
        for request_id in admitted.shed:
            shed = self._core.shed(request_id)
            self._shed += [shed] if shed is not None else []

    def _refused(self, live: SimulatedRequest, error: MaitredError) -> None:
        del self._live[live.spec.request_id]
        if live.lease is not None:
            live.lease.end(0)
        self.results.failed(live.group, self._clock.now(), _reason_of(error))

    # -- what comes of it

    def _settle(self, progress: list[RequestProgress]) -> None:
        if progress:
            self._gate.progressed(progress, self._core.num_queued, self._clock.now())
        for told in progress:
            if told.finish_reason is not None:
                self._ended(self._live.pop(told.request_id), told.finish_reason)

    def _ended(self, live: SimulatedRequest, reason: FinishReason) -> None:
        assert live.state is not None
        assert live.lease is not None
        live.lease.end(live.state.num_tokens)
        if reason in ENDED_BY_ITSELF:
            live.slots[-1].append(self._clock.now())
            self.results.finished(live.group, live.state, num_slow_gaps=live.num_slow_gaps, slots=live.slots)
            after_s = self.results.edge.whole_s(live.arrival.prompt_tokens, live.arrival.output_tokens)
            follower = next_turn(live.arrival, self._clock.now() + after_s)
            if follower is not None:
                self._expect(follower)
        else:
            self.results.failed(live.group, self._clock.now(), reason.value)

    def _stop_rule(self, request: RequestState) -> FinishReason | None:
        arrival = self._live[request.request_id].arrival
        num_output = len(request.output_token_ids)
        if num_output < arrival.output_tokens:
            return None
        return FinishReason.STOP if num_output < arrival.max_tokens else FinishReason.LENGTH

    def _true_length(self, request: Foretold) -> float:
        return float(self._live[request.request_id].arrival.output_tokens)

    def _hash_output(self, request: RequestState, num_blocks: int) -> list[bytes]:
        arrival = self._live[request.request_id].arrival
        return block_hashes(arrival, len(request.block_hashes), num_blocks, self._setup.block_size)


def _reason_of(error: MaitredError) -> str:
    """In a word, as the figures have it."""
    if isinstance(error, Overloaded):
        return error.reason
    return error.limit if isinstance(error, RateLimited) else "too_long"


class _SimulatedExecutor:
    """Turns the clock by the step's time and gives every row that samples a token."""

    def __init__(
        self,
        clock: ManualClock,
        cost_model: CostModel,
        results: Results,
        jitter: Jitter | None,
        slowness: SlownessAt | None,
    ) -> None:
        self.live_requests: dict[str, SimulatedRequest] = {}
        self.gap_s = 0.0  # after the last step
        self._clock, self._cost_model, self._results, self._jitter = clock, cost_model, results, jitter
        self._slowness = slowness
        self._edge_gap_s = results.edge.output_token_s
        self._slow_gap_s = results.objectives.itl_s

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self._note_slots(plan)
        if not plan.rows:
            self.gap_s = IDLE_STEP_S
            return ModelOutput(())
        results, num_rows = self._results, len(plan.rows)
        step_s, gap_s = self._times(shape_of(plan.rows))
        self._clock.advance(step_s)
        self.gap_s = gap_s
        results.num_steps += 1
        results.num_row_steps += num_rows
        results.busy_s += step_s
        return ModelOutput(tuple(self._sample(plan, self._clock.now())))

    def _times(self, shape: StepShape) -> tuple[float, float]:
        """(the step's, the gap's after it)."""
        costs, jitter = self._cost_model, self._jitter
        gap_s, times = costs.gap_s(shape.rows), 1.0
        if self._slowness is None:
            step_s = costs.step_s(shape)
        else:
            slowness = self._slowness(self._clock.now())
            times = slowness.rest
            step_s = costs.slowed_s(shape, slowness) / times  # jitter knows steps of the usual length
        if jitter is not None:
            step_s, gap_s = jitter.step_s(step_s), jitter.gap_s(gap_s)
        return step_s * times, gap_s * times

    def _note_slots(self, plan: SchedulerOutput) -> None:
        now = self._clock.now()
        for request_id in plan.forgotten_request_ids:
            live = self.live_requests.get(request_id)
            if live is not None:  # put out, not ended
                live.slots[-1].append(now)
        for new in plan.new_requests:
            self.live_requests[new.request_id].slots.append([now])

    def _sample(self, plan: SchedulerOutput, now: float) -> list[SampledRow]:
        """The rows' answers; gaps between tokens are counted here, equal ones of a tenant at once."""
        live_requests, sampled = self.live_requests, []
        gaps: dict[tuple[int, float], int] = {}
        groups: dict[int, GroupResults] = {}
        for row in plan.rows:
            if not row.samples:
                continue
            live = live_requests[row.request_id]
            sampled.append(live.sampled)
            last_at = live.last_token_at
            if last_at >= 0.0:
                key = (id(live.group), last_at)
                if key in gaps:
                    gaps[key] += 1
                else:
                    gaps[key] = 1
                    groups[key[0]] = live.group
                if self._slow_gap_s is not None and now - last_at + self._edge_gap_s > self._slow_gap_s:
                    live.num_slow_gaps += 1
            live.last_token_at = now
        for (group_id, last_at), times in gaps.items():
            groups[group_id].itl_s.add(now - last_at + self._edge_gap_s, times)
        return sampled

    def close(self) -> None:
        """Holds nothing."""
