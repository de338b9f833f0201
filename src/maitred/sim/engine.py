"""One simulated engine: the real core, scheduler and KV bookkeeping, on a clock that a cost model turns."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from maitred.config import SchedulerConfig
from maitred.core.clock import ManualClock
from maitred.core.cost_model import ALIKE_TOKENS, CostModel, Slowness, StepShape, shape_of
from maitred.core.errors import MaitredError
from maitred.core.request import FinishReason, RequestState
from maitred.core.step import ModelOutput, RequestProgress, SampledRow, ScheduledRow, SchedulerOutput
from maitred.gate.admission import AdmissionController
from maitred.kv.manager import KVCacheManager
from maitred.kv.pages import KVGroups, kv_cache_manager
from maitred.policy.policies import POLICIES
from maitred.policy.policy import PolicyFactory
from maitred.policy.predictor import Foretold, predictor_named
from maitred.scheduler.engine_core import EngineCore, StepListener, StepTimes
from maitred.scheduler.scheduler import Scheduler
from maitred.scheduler.speculation import Speculation
from maitred.sim.baselines import Baseline, Batches, ContiguousKVCacheManager, KVWaste, shape_without_kv
from maitred.sim.clients import Clients, SimulatedRequest
from maitred.sim.profile import Jitter
from maitred.sim.results import UNITS_PER_S, GroupResults, SimulatedResults
from maitred.sim.tensors import TensorSimulation
from maitred.sim.workload import Arrival, block_hashes
from maitred.tenancy.tenant import Tenant

SlownessAt = Callable[[float], Slowness]
"""Slowness of the machine at a time (s since the first arrival)."""
MOST_FORESEEN = 32  # steps: more would mostly be in vain, since something else happens before
IDLE_STEP_S = 1e-3  # a step with nothing to do, while all requests wait for something other than a slot


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Configuration of an engine, as far as its scheduling depends on it."""

    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    predictor: str = "oracle"
    """Name in PREDICTORS, in place of `scheduler.predictor`: the oracle's truth is only known here."""
    policies: Mapping[str, PolicyFactory] = field(default_factory=lambda: POLICIES)
    """Policies by name; installed ones may be among them."""
    acceptance: float | None = None
    """Chance that a draft is accepted after those before it; None drafts nothing."""
    num_speculative_tokens: int = 5
    """Most drafts of a request in a step."""
    num_state_slots: int = 0
    """Of recurrent layers' states."""
    groups: KVGroups | None = None
    """Of layers, where blocks consist of `num_pages` pages."""
    num_pages: int = 0
    baseline: Baseline | None = None
    """Baseline that `Simulation` runs in place of what is served; None is what is served."""


class SimulatedEngine:
    """Simulated engine. Without `jitter` every step takes what the cost model says, and without `slowness` the
    machine's speed is always that of the cost model. Steps and gaps between tokens are counted in `results`; ends are
    its user's to count.
    """

    def __init__(
        self,
        setup: EngineSetup,
        cost_model: CostModel,
        results: SimulatedResults,
        *,
        jitter: Jitter | None = None,
        slowness: SlownessAt | None = None,
        listeners: Sequence[StepListener] = (),
    ) -> None:
        self._setup = setup
        self.clock = ManualClock()
        self._executor = _SimulatedExecutor(self.clock, cost_model, results, jitter, slowness, setup.acceptance)
        self.live = self._executor.live_requests  # by id; removed when it ends
        baseline = setup.baseline or Baseline()
        if baseline.kv_layout == "none":
            self._executor.shape_of = shape_without_kv
        books: dict[str, Any] = {
            "num_blocks": setup.num_blocks,
            "block_size": setup.block_size,
            "hasher": self._hash_output,
            "enable_prefix_caching": setup.enable_prefix_caching and baseline.keeps_prefixes,
        }
        if baseline.kv_layout == "contiguous":
            self.kv_cache: KVCacheManager = ContiguousKVCacheManager(**books)
        else:
            num_pages = setup.num_pages or setup.num_blocks
            slots = setup.num_state_slots
            self.kv_cache = kv_cache_manager(setup.groups, num_pages=num_pages, num_state_slots=slots, **books)
        predictor = predictor_named(setup.predictor, self._true_length)
        drafts = setup.acceptance is not None
        self.scheduler = Scheduler(
            setup.scheduler,
            self.kv_cache,
            self._stop_rule,
            predictor,
            setup.policies,
            speculation=Speculation(setup.num_speculative_tokens) if drafts else None,
        )
        self.core = EngineCore(self.scheduler, self._executor, self.clock, *listeners)
        self.core.set_step_costs(cost_model)

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def can_step(self) -> bool:
        """Return whether a request is here that does not wait for KV."""
        return self.core.can_step

    def wait_until(self, now: float) -> None:
        """Advance the clock to a time; do nothing if it is further already, after a step that ends later."""
        self.clock.advance(max(0.0, now - self.clock.now()))

    def add(self, live: SimulatedRequest) -> None:
        """Add a request, for the next step at the earliest. Raises RequestError when it can never be served."""
        self.live[live.spec.request_id] = live
        try:
            live.state = self.core.add(live.spec)
        except MaitredError:
            del self.live[live.spec.request_id]
            raise

    def step(self) -> list[RequestProgress]:
        """Execute a step; its outcome is known when the engine's clock says so."""
        return self.core.step()

    def rest(self) -> None:
        """The gap after a step."""
        self.clock.advance(self._executor.gap_s)

    # -- many steps at a time

    @property
    def foreseen(self) -> deque[ForeseenStep]:
        """Steps that `foresee` found, and `decode_on` has not done."""
        return self._executor.foreseen

    def foresee(self, until: float = inf) -> bool:
        """Find the next steps, if all running requests decode and nothing else happens in them: those that begin before
        `until`, up to the first that ends a request. Return whether there are any.
        """
        requests = self.core.steady_requests if self._executor.beside is None else []
        if not requests:
            return False
        left = [self.live[one.request_id].arrival.output_tokens - len(one.output_token_ids) for one in requests]
        most, size, free = min(MOST_FORESEEN, *left), self._setup.block_size, self.kv_cache.num_free
        begin = [-one.num_computed_tokens % size for one in requests]  # the step in which each begins a block
        while most and sum([(most - first + size - 1) // size for first in begin if first < most]) > free:
            most //= 2
        deadline = self.core.next_deadline
        self._executor.foresee(requests, most, until if deadline is None else min(until, deadline))
        return bool(self.foreseen)

    def steps_to_full_block(self) -> int:
        """Return after how many of the foreseen steps a block is full."""
        size = self._setup.block_size
        return 1 + min((-1 - one.num_computed_tokens) % size for one in self.scheduler.running)

    def decode_on(self, num_steps: int) -> list[RequestProgress]:
        """Do the first of the foreseen steps; the clock stands at the last one's end. Progress of requests that end."""
        return self.core.decode_on(self._executor.decode_on(self.scheduler.running, num_steps), token=0)

    def forget_foreseen(self) -> None:
        """Something happens that comes before the rest of the foreseen steps."""
        self._executor.forget_foreseen()

    def run_beside(self, tensors: TensorSimulation) -> None:
        """Run batches of tensor models beside the step under way, which takes longer for them."""
        self._executor.beside = tensors

    def take_back(self, request_id: str) -> None:
        """Take a request back, to go on elsewhere or nowhere."""
        self.core.abort(request_id)
        self.live.pop(request_id, None)

    def _stop_rule(self, request: RequestState) -> FinishReason | None:
        arrival = self.live[request.request_id].arrival
        num_output = len(request.output_token_ids)
        if num_output < arrival.output_tokens:
            return None
        return FinishReason.STOP if num_output < arrival.max_tokens else FinishReason.LENGTH

    def _true_length(self, request: Foretold) -> float:
        return float(self.live[request.request_id].arrival.output_tokens)

    def _hash_output(self, request: RequestState, num_blocks: int) -> list[bytes]:
        arrival = self.live[request.request_id].arrival
        return block_hashes(arrival, len(request.block_hashes), num_blocks, self._setup.block_size)


class ForeseenStep(NamedTuple):
    """One step of requests that decode."""

    begins_at: float
    ends_at: float
    step_s: float
    gap_s: float  # after it
    drawn: Sequence[float]  # by the jitter


class _SimulatedExecutor:
    """Turns the clock by the step's time and gives every row that samples a token."""

    def __init__(
        self,
        clock: ManualClock,
        cost_model: CostModel,
        results: SimulatedResults,
        jitter: Jitter | None,
        slowness: SlownessAt | None,
        acceptance: float | None,
    ) -> None:
        self._acceptance = acceptance
        self.live_requests: dict[str, SimulatedRequest] = {}
        self.shape_of = shape_of
        self.gap_s = 0.0  # after the last step
        self.beside: TensorSimulation | None = None
        self.foreseen: deque[ForeseenStep] = deque()
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
        step_s, gap_s = self._times(self.shape_of(plan.rows), self._clock.now())
        if self._acceptance is not None:
            step_s += draft_chain_s(self._cost_model, [row.num_drafts for row in plan.rows])
        if self.beside is not None:
            step_s = self.beside.step(self._clock.now(), step_s)
        self._clock.advance(step_s)
        self.gap_s = gap_s
        results.num_steps += 1
        results.num_row_steps += num_rows
        results.busy_units += round(step_s * UNITS_PER_S)
        return ModelOutput(tuple(self._sample(plan, self._clock.now())))

    def foresee(self, requests: Sequence[RequestState], most: int, until: float) -> None:
        """Find the times of steps of these rows; see `SimulatedEngine.foresee`."""
        now, num_rows, starts = self._clock.now(), len(requests), [one.num_computed_tokens for one in requests]
        jitter, context, num_same, groups = self._jitter, sum(starts) + num_rows, 0, 0
        while len(self.foreseen) < most and now < until:
            if not num_same:  # steps until a context is twice as long
                groups = len({at.bit_length() if at > ALIKE_TOKENS else 0 for at in starts})
                num_same = min((1 << max(at, ALIKE_TOKENS + 1).bit_length()) - at for at in starts)
                num_same = min([num_same, *(ALIKE_TOKENS + 1 - at for at in starts if at <= ALIKE_TOKENS)])
                starts = [at + num_same for at in starts]
            step_s, gap_s = self._times(StepShape(num_rows, 0, num_rows, context, 0, num_rows, groups), now)
            ends_at = now + step_s
            self.foreseen.append(ForeseenStep(now, ends_at, step_s, gap_s, () if jitter is None else jitter.drawn))
            now, context, num_same = ends_at + gap_s, context + num_rows, num_same - 1

    def decode_on(self, requests: Sequence[RequestState], num_steps: int) -> list[StepTimes]:
        """Do foreseen steps, but for what the scheduler knows of them."""
        steps, results, counts = [self.foreseen.popleft() for _ in range(num_steps)], self._results, Counter[int]()
        gaps, groups, slow_gap_s = Counter[tuple[int, float]](), dict[int, GroupResults](), self._slow_gap_s
        later = [step.ends_at - last.ends_at + self._edge_gap_s for last, step in pairwise(steps)]
        num_slow = 0 if slow_gap_s is None else sum(gap_s > slow_gap_s for gap_s in later)
        for live in [self.live_requests[one.request_id] for one in requests]:
            first_gap_s = steps[0].ends_at - live.last_token_at + self._edge_gap_s
            groups[id(live.group)] = live.group
            counts[id(live.group)] += 1
            gaps[id(live.group), first_gap_s] += 1
            live.num_slow_gaps += num_slow + (slow_gap_s is not None and first_gap_s > slow_gap_s)
            live.last_token_at = steps[-1].ends_at
        for (group, gap_s), times in gaps.items():
            groups[group].itl_s.add(gap_s, times)
        for group, num_rows in counts.items():
            for gap_s in later:
                groups[group].itl_s.add(gap_s, num_rows)
        results.num_steps += num_steps
        results.num_row_steps += num_steps * len(requests)
        results.busy_units += sum([round(step.step_s * UNITS_PER_S) for step in steps])
        self.gap_s = steps[-1].gap_s
        self._clock.set(steps[-1].ends_at)
        return [StepTimes(step.begins_at, step.begins_at, step.ends_at) for step in steps]

    def forget_foreseen(self) -> None:
        if self._jitter is not None:
            self._jitter.undone.extendleft(draw for step in reversed(self.foreseen) for draw in reversed(step.drawn))
        self.foreseen.clear()

    def _times(self, shape: StepShape, now: float) -> tuple[float, float]:
        """(the step's, the gap's after it)."""
        costs, jitter = self._cost_model, self._jitter
        gap_s, times = costs.gap_s(shape.rows), 1.0
        if self._slowness is None:
            step_s = costs.step_s(shape)
        else:
            slowness = self._slowness(now)
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
        live_requests, sampled, results = self.live_requests, list[SampledRow](), self._results
        gaps: dict[tuple[int, float], int] = {}
        groups: dict[int, GroupResults] = {}
        for row in plan.rows:
            if not row.samples:
                continue
            live = live_requests[row.request_id]
            if row.num_drafts:
                sampled.append(self._drafted(row))
                results.num_drafts += row.num_drafts
                results.num_accepted_drafts += sampled[-1].num_accepted
            else:
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

    def _drafted(self, row: ScheduledRow) -> SampledRow:
        """Return the drafts; which are right is a function of request and position, the same in every run."""
        first = row.start + row.num_known
        num_accepted, acceptance = 0, self._acceptance or 0.0
        while num_accepted < row.num_drafts and chance(row.request_id, first + num_accepted) < acceptance:
            num_accepted += 1
        tokens = (0,) * (num_accepted + 1)
        return SampledRow(row.request_id, tokens, num_accepted=num_accepted, num_drafts=row.num_drafts)

    def close(self) -> None:
        """Holds nothing."""


def draft_chain_s(costs: CostModel, lengths: Sequence[int]) -> float:
    """Return the time of making up so many drafts for each row: a link of the chain for all that are as long."""
    return sum(costs.draft_s(sum(length >= depth for length in lengths)) for depth in range(1, max(lengths) + 1))


def chance(request_id: str, position: int) -> float:
    """A number in [0, 1) that is spread evenly and always the same."""
    return zlib.crc32(f"{position}:{request_id}".encode()) / 2**32


class Simulation:
    """One engine and one workload; see `SimulatedEngine` and `Clients` for what may be given.

    A request's time outside the engine is that of `results.edge`; the engine's decisions do not depend on it.
    """

    def __init__(
        self,
        setup: EngineSetup,
        cost_model: CostModel,
        results: SimulatedResults,
        *,
        jitter: Jitter | None = None,
        slowness: SlownessAt | None = None,
        tenants: Mapping[str, Tenant] | None = None,
        admission: AdmissionController | None = None,
        listener: StepListener | None = None,
        tensors: Callable[[Scheduler], TensorSimulation] | None = None,
    ) -> None:
        """Simulate one engine; `tensors` puts tensor models, and their requests, beside the language model."""
        self.results = results
        baseline, padded = setup.baseline, dict[str, Arrival]()
        self.kv_waste = None if baseline is None else KVWaste(padded)
        listeners = [each for each in (listener, self.kv_waste) if each is not None]
        self._engine = SimulatedEngine(
            setup, cost_model, results, jitter=jitter, slowness=slowness, listeners=listeners
        )
        self.scheduler, self._core, self._clock = self._engine.scheduler, self._engine.core, self._engine.clock
        self._clients = Clients(results, setup.block_size, tenants, admission)
        self._batches: Batches | None = None
        if baseline is not None and baseline.batching != "continuous":
            self._batches = Batches(self._core, self._engine.live, baseline, padded)
        self.tensors = None if tensors is None else tensors(self.scheduler)
        if self.tensors is not None:
            self._engine.run_beside(self.tensors)
        self._shed: list[RequestProgress] = []  # since the last step; told along with the next one's progress

    def run(self, arrivals: Iterator[Arrival]) -> SimulatedResults:
        """Run until the last request has ended; `arrivals` is read as time goes on, one ahead."""
        clients, core, engine, clock = self._clients, self._core, self._engine, self._clock
        clients.begin(arrivals)
        while core.has_work or self._next_at is not None:
            if not core.has_work and (next_at := self._next_at) is not None:
                engine.wait_until(next_at)
            now = clock.now()
            if self.tensors is not None:
                self.tensors.run_until(now)
            while (next_at := clients.next_at) is not None and next_at <= now:
                self._take_in(clients.take())
            if self._batches is not None:
                self._add_batch(self._batches, now)
            if core.has_work:
                progress, self._shed = self._shed, []
                foresees = not clients.hear_each_step and engine.foresee(inf if next_at is None else next_at)
                self._settle(progress + (engine.decode_on(len(engine.foreseen)) if foresees else core.step()))
                engine.rest()
        self._settle(self._shed)
        return self.results

    @property
    def _next_at(self) -> float | None:
        """Return when the next request comes, or a batch ends."""
        next_at = self._clients.next_at
        if self._batches is not None:
            return _first(next_at, self._batches.begins_at(next_at))
        return next_at if self.tensors is None else _first(next_at, self.tensors.next_at)

    def _add_batch(self, batches: Batches, now: float) -> None:
        begins_at = batches.begins_at(self._clients.next_at)
        for live in batches.take() if begins_at is not None and begins_at <= now else ():
            try:
                self._engine.add(live)
            except MaitredError as error:
                self._clients.refused(live, error, now)

    def _take_in(self, live: SimulatedRequest) -> None:
        try:
            for request_id in self._clients.pass_gate(live):
                shed = self._core.shed(request_id)
                self._shed += [shed] if shed is not None else []
            (self._engine.add if self._batches is None else self._batches.hold)(live)
        except MaitredError as error:
            self._clients.refused(live, error, self._clock.now())
        self.results.queue_length.add(live.arrival.at, len(self._engine.live) - self.scheduler.num_running)

    def _settle(self, progress: list[RequestProgress]) -> None:
        if progress:
            self._clients.progressed(progress, self._core.num_queued, self._clock.now())
        for told in progress:
            if told.finish_reason is not None:
                live = self._engine.live.pop(told.request_id)
                if self._batches is not None:
                    self._batches.end(live)
                self._clients.ended(live, told.finish_reason, self._clock.now())


def _first(*times: float | None) -> float | None:
    return min((at for at in times if at is not None), default=None)
