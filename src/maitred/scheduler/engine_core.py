"""One engine without threads or I/O: scheduler, executor and clock, a step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

from maitred.config import SchedulerConfig
from maitred.core.clock import Clock
from maitred.core.cost_model import CostModel
from maitred.core.replica import HandoverCounts, TierFigures, TierView
from maitred.core.request import FinishReason, RequestSpec, RequestState
from maitred.core.step import Executor, ModelOutput, NewRequest, RequestProgress, SchedulerOutput
from maitred.core.tensor_request import Batch, BatchOutcome, BatchRules, TensorRequest, TensorSpec
from maitred.kv.tiers import FindableBlocks
from maitred.scheduler.reservations import GivenUp, ReservedBlocks
from maitred.scheduler.scheduler import Scheduler
from maitred.scheduler.stats import SchedulerStats
from maitred.scheduler.swap import SwapCosts

# Of the device's rate: so short ones pass long ones, and a request waits for others' 128 times its own work at most.
AGEING_SHARE = 1 / 128
AGEING = "ageing_tokens_per_s"  # of the policies that have a use for it
MIN_STEPS, NEWS = 3, 1.5  # steps with prompts until the rate is believed; told again when so many times more or less
MIN_PREFILL_TOKENS = 32  # fewer say little beside what every step costs
SMOOTHING = 0.2


ExecuteBeside = Callable[[Callable[[], ModelOutput]], ModelOutput]
"""Calls what executes a step, and does something else meanwhile."""
MeasureSwaps = Callable[[SchedulerOutput, float], SwapCosts | None]
MeasureSteps = Callable[[SchedulerOutput, ModelOutput, float, float], CostModel | None]


class TensorObserver(Protocol):
    """Told of everything that happens to lanes, in order; `decisions.log.Recorder` is one."""

    def model_loaded(self, name: str, version: int, rules: BatchRules, now: float) -> None: ...

    def model_unloaded(self, name: str, version: int, now: float) -> None: ...

    def tensor_added(self, spec: TensorSpec, now: float) -> None: ...

    def tensor_ended(self, request_id: str, reason: FinishReason, now: float) -> None: ...

    def tensors_expired(self, now: float) -> None: ...

    def dispatched(self, batches: tuple[Batch, ...], now: float) -> None: ...

    def completed(self, batch: Batch, outcome: BatchOutcome, now: float) -> None: ...

    def flush(self, now: float) -> None:
        """Nothing more comes for now; not while a step is under way."""


class StepObserver(TensorObserver, Protocol):
    """Told of everything that a scheduler was told, in order; `decisions.log.Recorder` is one."""

    def added(self, request: RequestState, now: float) -> None: ...

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        """A request was ended from outside: aborted, or finished by a stop string."""

    def configured(self, config: SchedulerConfig, now: float) -> None: ...

    def measured(self, costs: SwapCosts | CostModel, now: float) -> None: ...

    def reserved(self, request_id: str, num_tokens: int, now: float) -> None: ...

    def kv_arrived(self, request_id: str, num_tokens: int, now: float) -> None: ...

    def held(self, lease: str, block_hashes: Sequence[bytes], now: float) -> None:
        """The hashes of the blocks that were there."""

    def released(self, lease: str, now: float) -> None: ...

    def scheduled(self) -> None:
        """A step is under way; what is told from here until `stepped` happened during it."""

    def stepped(
        self,
        plan: SchedulerOutput,
        output: ModelOutput,
        progress: list[RequestProgress],
        scheduled_at: float,
        updated_at: float,
    ) -> None: ...


class FollowsKV(Protocol):
    """Fetches, gives or stores KV, as `kv_tiers.KVTiers` does. Told in the engine's thread."""

    def entered(self, request: RequestState) -> None: ...

    def ended(self, request_id: str) -> None: ...

    def given_up(self, given_up: GivenUp) -> None:
        """Told before anything is written to the blocks; asks nothing of the core."""


class GivesKV(Protocol):
    """Gives KV away while it is computed, as `kv_peers.KVPeers` does. Told in the engine's thread."""

    def scheduled(self, plan: SchedulerOutput) -> None:
        """The plan is executed next."""

    def computed(self) -> None:
        """The plan was executed, and its blocks can be found; no other request gets them before this returns."""


class EngineTiers(Protocol):
    """KV that outlives requests, for views and metrics; `kv_tiers.KVTiers` is one. Called in the engine's thread."""

    def views(self) -> list[TierView]: ...

    def figures(self) -> dict[str, TierFigures]: ...

    def clear(self, done: Callable[[int], None]) -> None: ...

    def knows(self, key: bytes) -> bool:
        """Whether a request that has nothing but hashes would find this block."""

    def evicted(self, blocks: Mapping[bytes, int]) -> None:
        """Blocks by hash that leave the cache; told before anything is written to them."""


class EngineCore:
    """Requests in, progress out. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        observer: StepObserver | None = None,
        measure_swaps: MeasureSwaps | None = None,
        measure_steps: MeasureSteps | None = None,
    ) -> None:
        """Both are told each plan and how long it took (s), the executor and, of steps, the host; they give news."""
        self._scheduler, self._executor, self._clock, self._observer = scheduler, executor, clock, observer
        self._measure_swaps, self._measure_steps = measure_swaps, measure_steps
        self.tensor_lanes = TensorLanes(scheduler, clock, observer)
        self.execute_beside: ExecuteBeside | None = None  # while tensor models are served
        self._prefill = PrefillMeter()
        self.speed: SpeedMeter | None = None  # while a router wants to know
        self.kv_followers: list[FollowsKV] = []
        self.kv_giver: GivesKV | None = None  # while a peer waits for KV that is being computed
        self.kv_tiers: EngineTiers | None = None
        self.findable = FindableBlocks(scheduler.kv_cache)
        self.kv_handovers: HandoverCounts | None = None
        self.view_of_peers: Callable[[], TierView] | None = None
        self.on_given_up: Callable[[GivenUp], None] | None = None  # as a follower is told
        self.wake: Callable[[], None] = lambda: None  # ends the driving thread's wait; called in any thread
        self._called: deque[Callable[[], object]] = deque()
        self._ages_by_device = _leaves_ageing_open(scheduler.config)
        self.told_step_costs: CostModel | None = None
        self.execute_s = 0.0  # total time in the executor
        self.host_s = 0.0  # total time of steps outside it
        self._host_shares = HostShares()
        self.last_step_at: float | None = None  # s, when a step last ended

    @property
    def has_work(self) -> bool:
        """Whether there are requests."""
        return self._scheduler.has_work

    @property
    def can_step(self) -> bool:
        """Whether a step would compute anything: not while all requests wait for KV from elsewhere."""
        return self._scheduler.can_step

    @property
    def next_deadline(self) -> float | None:
        """Earliest time (s) at which a request may run out of time; the next step from then on notices."""
        return self._scheduler.next_deadline

    @property
    def num_queued(self) -> int:
        return self._scheduler.num_queued

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for views of requests; change it only through this class, so the log is complete."""
        return self._scheduler

    def add(self, spec: RequestSpec) -> RequestState:
        """Add a request; returns its state, to be read only. Raises RequestError when it can never be served."""
        now, request = self._clock.now(), RequestState(spec)
        self._scheduler.add(request, now)
        if self._observer is not None:
            self._observer.added(request, now)
        for follower in self.kv_followers:
            follower.entered(request)
        return request

    @property
    def prefill_s_per_token(self) -> float | None:
        """Time to compute a token of a prompt in the executor; None until it was measured."""
        return self._prefill.s_per_token

    def place_of_newcomer(self, spec: RequestSpec) -> Callable[[], tuple[Any, ...]]:
        """Asked at any time, where it would stand in the policy's order if it were added; smaller is served first."""
        return partial(self._scheduler.place_of_newcomer, RequestState(spec))

    def abort(self, request_id: str) -> RequestProgress | None:
        """Frees its blocks at once; its last progress, or None when it is not here (any more)."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(
        self, request_id: str, reason: FinishReason, *, stop_reason: int | str | None = None
    ) -> RequestProgress | None:
        """Ends a request for a reason found in its text; as `abort` otherwise."""
        now = self._clock.now()
        progress = self._scheduler.finish(request_id, reason, now, stop_reason=stop_reason)
        self._tell_given_up()
        if progress is not None and self._observer is not None:
            self._observer.ended(request_id, reason, now)
        for follower in self.kv_followers if progress is not None else ():
            follower.ended(request_id)
        return self._host_shares.told([progress], self.host_s)[0] if progress is not None else None

    def shed(self, request_id: str) -> RequestProgress | None:
        """Gives up a request that is in no step yet; None when it is, or not here (any more)."""
        waiting = self._scheduler.waits_to_start(request_id)
        return self.finish(request_id, FinishReason.SHED) if waiting else None

    def call_soon(self, action: Callable[[], object]) -> None:
        """Call `action` in the engine's thread, between two steps; from any thread."""
        self._called.append(action)
        self.wake()

    @property
    def is_called(self) -> bool:
        """Whether an action of `call_soon` waits to be run."""
        return bool(self._called)

    def run_called(self) -> bool:
        """Run the waiting actions, before each step and whenever `wake` was called. Returns whether there were any."""
        has_called = bool(self._called)
        while self._called:
            self._called.popleft()()
        return has_called

    def reserve(self, request_id: str, num_tokens: int) -> ReservedBlocks | None:
        """Reserve as `Scheduler.reserve`; another thread may fill the blocks until `kv_arrived`, or `on_given_up`."""
        now = self._clock.now()
        reserved = self._scheduler.reserve(request_id, num_tokens, now)
        self._tell_evicted()
        if self._observer is not None and (reserved is not None or self._scheduler.waits_along(request_id) is not None):
            self._observer.reserved(request_id, num_tokens, now)
        return reserved

    def kv_arrived(self, request_id: str, num_tokens: int) -> bool:
        """Note KV as `Scheduler.kv_arrived`."""
        now = self._clock.now()
        came = self._scheduler.kv_arrived(request_id, num_tokens, now)
        if came and self._observer is not None:
            self._observer.kv_arrived(request_id, num_tokens, now)
        return came

    def hold(self, lease: str, block_hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Hold blocks as `Scheduler.hold`; another thread may read them until `release`, or `on_given_up`."""
        now = self._clock.now()
        blocks = self._scheduler.hold(lease, block_hashes, now)
        if blocks and self._observer is not None:
            self._observer.held(lease, block_hashes[: len(blocks)], now)
        return blocks

    def release(self, lease: str) -> bool:
        """Release as `Scheduler.release`."""
        now = self._clock.now()
        held = self._scheduler.release(lease, now)
        if held and self._observer is not None:
            self._observer.released(lease, now)
        return held

    def _tell_given_up(self) -> None:
        given_up = self._scheduler.given_up
        if not given_up.request_ids and not given_up.leases:
            return
        if self.on_given_up is not None:
            self.on_given_up(given_up)
        for follower in self.kv_followers:
            follower.given_up(given_up)

    def _tell_evicted(self) -> None:
        evicted = self._scheduler.kv_cache.evicted
        if evicted and self.kv_tiers is not None:
            self.kv_tiers.evicted(evicted)
            evicted.clear()

    def tell_router(self, wanted: bool) -> None:
        """Measure what a router over several engines needs, from now on or no more: cached blocks and speed."""
        self.findable.tell_changes(wanted)
        self.speed = SpeedMeter() if wanted else None

    @property
    def block_changes(self) -> FindableBlocks | None:
        """Hashes of blocks that can be found, and that cannot any more; None while no router wants them."""
        return self.findable if self._scheduler.kv_cache.changes is not None else None

    def configure(self, config: SchedulerConfig) -> None:
        """Changes policy and limits, losing nothing. Raises ConfigError and changes nothing."""
        ageing, before = config.ageing_tokens_per_s, self._scheduler.config.ageing_tokens_per_s
        self._configure(config)
        kept = self._ages_by_device and ageing == before and AGEING not in config.policy_args
        self._ages_by_device = _leaves_ageing_open(config) or kept

    def _configure(self, config: SchedulerConfig) -> None:
        self._scheduler.configure(config)
        if self._observer is not None:
            self._observer.configured(config, self._clock.now())

    def set_swap_costs(self, costs: SwapCosts) -> None:
        """Tells the scheduler what copying KV to the host, and computing it again, take."""
        self._scheduler.set_swap_costs(costs)
        if self._observer is not None:
            self._observer.measured(costs, self._clock.now())

    def set_step_costs(self, costs: CostModel) -> None:
        """Tells the scheduler what steps and drafts take."""
        self.told_step_costs = costs
        self._scheduler.set_step_costs(costs)
        if self._observer is not None:
            self._observer.measured(costs, self._clock.now())

    def step(self) -> list[RequestProgress]:
        """Schedules, executes, updates: progress of every request that got something."""
        scheduled_at = self._clock.now()
        expired = self._expire(scheduled_at)
        plan = self._scheduler.schedule(scheduled_at)
        if self._observer is not None:
            self._observer.scheduled()
        self._tell_given_up()
        self._tell_evicted()
        self._host_shares.started(plan.new_requests, self.host_s)
        if self.kv_giver is not None:
            self.kv_giver.scheduled(plan)
        execute_at = self._clock.now()
        execute = partial(self._executor.execute, plan)
        output = execute() if self.execute_beside is None else self.execute_beside(execute)
        updated_at = self._clock.now()
        self.execute_s += updated_at - execute_at
        self._scheduler.charge(plan, self.execute_s)
        progress = self._scheduler.update(plan, output, updated_at)
        if self.kv_giver is not None:
            self.kv_giver.computed()
        if self._observer is not None:
            self._observer.stepped(plan, output, progress, scheduled_at, updated_at)
        self._tell_costs(
            plan, output, updated_at - execute_at, self._clock.now() - updated_at + execute_at - scheduled_at
        )
        if self.speed is not None:
            self.speed.observe(plan, updated_at - execute_at)
        ages = self._ages_by_device and AGEING in self._scheduler.order.policy.arguments
        if (ages or self.kv_followers) and self._prefill.observe(plan, updated_at - execute_at) and ages:
            self._age_by_device()
        self._tell_ended(expired, progress)
        self.last_step_at = self._clock.now()
        self.host_s += (execute_at - scheduled_at) + (self.last_step_at - updated_at)
        return self._host_shares.told(expired + progress, self.host_s)

    def _tell_costs(self, plan: SchedulerOutput, output: ModelOutput, execute_s: float, host_s: float) -> None:
        """Pass on costs that are news; after a step is noted, so for the next. Drafts cost the host time too."""
        if self._measure_swaps is not None and (swaps := self._measure_swaps(plan, execute_s)) is not None:
            self.set_swap_costs(swaps)
        measure_steps = self._measure_steps
        if measure_steps is not None and (steps := measure_steps(plan, output, execute_s, host_s)) is not None:
            self.set_step_costs(steps)

    def _tell_ended(self, *progress: Sequence[RequestProgress]) -> None:
        for told in chain(*progress) if self.kv_followers else ():
            if told.finish_reason is not None:
                for follower in self.kv_followers:
                    follower.ended(told.request_id)

    def _age_by_device(self) -> None:
        """Set how fast waiting outweighs work from this device's speed; anew when that is quite another.

        All keys are then computed anew from what the requests carry, so that no request loses the time it has waited.
        """
        meter, config = self._prefill, self._scheduler.config
        if meter.num_steps < MIN_STEPS or meter.s_per_token is None:
            return
        rate = min(max(AGEING_SHARE / meter.s_per_token, 0.001), 1e9)
        told = config.ageing_tokens_per_s
        if told is None or not told / NEWS < rate < told * NEWS:
            self._configure(replace(config, ageing_tokens_per_s=rate))

    def _expire(self, now: float) -> list[RequestProgress]:
        expired = self._scheduler.expire(now)
        self._tell_given_up()
        if self._observer is not None:
            for progress in expired:
                assert progress.finish_reason is not None
                self._observer.ended(progress.request_id, progress.finish_reason, now)
        return expired

    def close(self) -> None:
        """Gives back the executor's memory and threads."""
        self._executor.close()


def _leaves_ageing_open(config: SchedulerConfig) -> bool:
    return config.ageing_tokens_per_s is None and AGEING not in config.policy_args


class HostShares:
    """Keeps, for each request in the engine, the host's total time at its first step and at its first token.

    A step that starts and ends no request, while all running ones have a first token, costs one comparison.
    """

    def __init__(self) -> None:
        self._starting: dict[str, float] = {}  # s, total when first scheduled; no token yet
        self._decoding: dict[str, tuple[float, float]] = {}  # s, of its prefill; total at its first token

    def started(self, new_requests: Iterable[NewRequest], host_s: float) -> None:
        """Requests that are in a step, maybe again."""
        for new in new_requests:
            if new.request_id not in self._decoding:
                self._starting.setdefault(new.request_id, host_s)

    def told(self, progress: Sequence[RequestProgress], host_s: float) -> list[RequestProgress]:
        """`progress`, with the host's share in the timing of those that ended."""
        if self._starting:
            for p in progress:
                if p.new_token_ids and p.request_id in self._starting:
                    self._decoding[p.request_id] = (host_s - self._starting.pop(p.request_id), host_s)
        return [self._ended(p, host_s) if p.finish_reason is not None else p for p in progress]

    def _ended(self, progress: RequestProgress, host_s: float) -> RequestProgress:
        request_id = progress.request_id
        started = self._starting.pop(request_id, None)
        prefill_s, first_token = self._decoding.pop(request_id, (0.0, host_s))
        if started is not None:  # no token came
            prefill_s = host_s - started
        if progress.timing is None:
            return progress
        return progress._replace(timing=progress.timing.with_schedule(prefill_s, host_s - first_token))


class PrefillMeter:
    """A step's time beyond that of a step without prompts is shared by its prompt tokens, smoothed over steps."""

    def __init__(self) -> None:
        self._decode_s: float | None = None  # of a step without prompts
        self.s_per_token: float | None = None  # of a prompt
        self.num_steps = 0  # that it was learned from

    def observe(self, plan: SchedulerOutput, execute_s: float) -> bool:
        """Takes in a step; whether it said something of prompts."""
        if not plan.rows or plan.swap_outs or plan.swap_ins or execute_s <= 0:
            return False
        num_prefill = sum(row.num_known for row in plan.rows if row.num_tokens > 1 and row.num_known > 1)
        if num_prefill == 0:
            self._decode_s = _smoothed(self._decode_s, execute_s)
        if num_prefill < MIN_PREFILL_TOKENS:
            return False
        alone_s = execute_s - (self._decode_s or 0.0) * (len(plan.rows) > 1)
        self.s_per_token = _smoothed(self.s_per_token, max(alone_s, 0.1 * execute_s) / num_prefill)
        self.num_steps += 1
        return True


def _smoothed(before: float | None, new: float) -> float:
    return new if before is None else before + SMOOTHING * (new - before)


class SpeedMeter:
    """Learns from steps; 0 is not measured yet. Decoding is at the batch sizes there were lately."""

    def __init__(self) -> None:
        self._prefill = PrefillMeter()
        self.decode_tokens_per_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        s_per_token = self._prefill.s_per_token
        return 1 / s_per_token if s_per_token else 0.0

    def observe(self, plan: SchedulerOutput, execute_s: float) -> None:
        """Takes in a step."""
        self._prefill.observe(plan, execute_s)
        if plan.rows and execute_s > 0 and all(row.num_known <= 1 for row in plan.rows):
            rate = sum(row.num_tokens for row in plan.rows) / execute_s
            before = self.decode_tokens_per_s or rate
            self.decode_tokens_per_s = before + SMOOTHING * (rate - before)


class TensorLanes:
    """Tensor requests in, batches and last progress out. In the engine's thread, also while a step is under way."""

    def __init__(self, scheduler: Scheduler, clock: Clock, observer: TensorObserver | None = None) -> None:
        self._scheduler, self._clock, self._observer = scheduler, clock, observer

    def load(self, name: str, version: int, rules: BatchRules) -> None:
        self._scheduler.lanes.load(name, version, rules)
        if self._observer is not None:
            self._observer.model_loaded(name, version, rules, self._clock.now())

    def unload(self, name: str, version: int) -> None:
        self._scheduler.lanes.unload(name, version)
        if self._observer is not None:
            self._observer.model_unloaded(name, version, self._clock.now())

    def has_model(self, name: str, version: int) -> bool:
        """Loaded, or with requests that have not ended."""
        return any(model.key == (name, version) for model in self._scheduler.lanes.models)

    def add(self, spec: TensorSpec) -> None:
        """Raises InvalidRequest, ModelNotFound or Overloaded."""
        now = self._clock.now()
        self._scheduler.add_tensor(TensorRequest(spec), now)
        if self._observer is not None:
            self._observer.tensor_added(spec, now)

    def finish(self, request_id: str, reason: FinishReason) -> RequestProgress | None:
        """None when it is not here, or when its batch runs, with which it ends."""
        if request_id not in self._scheduler.lanes:
            return None
        now = self._clock.now()
        progress = self._scheduler.finish(request_id, reason, now)
        if self._observer is not None:
            self._observer.tensor_ended(request_id, reason, now)
        return progress

    def expire(self) -> list[RequestProgress]:
        now = self._clock.now()
        told = self._scheduler.expire_tensors(now)
        if told and self._observer is not None:
            self._observer.tensors_expired(now)
        return told

    def dispatch(self) -> tuple[Batch, ...]:
        now = self._clock.now()
        batches = self._scheduler.dispatch(now)
        if batches and self._observer is not None:
            self._observer.dispatched(batches, now)
        return batches

    def completed(self, batch: Batch, outcome: BatchOutcome) -> list[RequestProgress]:
        now = self._clock.now()
        told = self._scheduler.completed(batch, outcome, now)
        if self._observer is not None:
            self._observer.completed(batch, outcome, now)
        return told

    def close(self) -> None:
        if self._observer is not None:
            self._observer.flush(self._clock.now())

    @property
    def wake_in_s(self) -> float | None:
        """Seconds until `expire` or `dispatch` may have something to do; None until something happens."""
        now = self._clock.now()
        at = self._scheduler.next_wake(now)
        return None if at is None else max(0.0, at - now)
