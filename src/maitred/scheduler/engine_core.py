"""One engine without threads or I/O: scheduler, executor and clock, a step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec

from maitred.config import SchedulerConfig
from maitred.core.clock import Clock
from maitred.core.cost_model import CostModel, SwapCosts
from maitred.core.replica import TierView
from maitred.core.request import FinishReason, RequestSpec, RequestState
from maitred.core.step import Executor, ModelOutput, RequestProgress, SchedulerOutput
from maitred.core.tensor_request import Batch, BatchOutcome, BatchRules, TensorRequest, TensorSpec
from maitred.kv.tiers import FindableBlocks
from maitred.scheduler.reservations import GivenUp, ReservedBlocks
from maitred.scheduler.scheduler import Scheduler
from maitred.scheduler.state import SchedulerStats

# Of the device's rate: so short ones pass long ones, and a request waits for others' 128 times its own work at most.
AGEING_SHARE = 1 / 128
AGEING = "ageing_tokens_per_s"  # of the policies that have a use for it
MIN_STEPS, NEWS = 3, 1.5  # steps with prompts until the rate is believed; told again when so many times more or less
MIN_PREFILL_TOKENS = 32  # fewer say little beside what every step costs
SMOOTHING = 0.2

P = ParamSpec("P")


class StepTimes(NamedTuple):
    """Times of one step (s, of the engine's clock)."""

    scheduled_at: float
    execute_at: float
    executed_at: float

    @property
    def execute_s(self) -> float:
        return self.executed_at - self.execute_at


class StepListener:
    """Told of one engine's steps, and of what happens between them, in the engine's thread. Override what is of use:
    a method that is not overridden is never called.
    """

    follows_steps = True
    """False leaves out `scheduled`, `stepped`, `told` and `ended`; `EngineCore.follow` changes it."""
    has_figures = True
    """False leaves out `figures`; looked at when `follows_steps` changes."""
    follows_background = False
    """True follows steps from the first request of the class background on."""
    follows_decoding = True
    """False where steps that decode alone tell it nothing, unless they end a request."""

    def begin(self, core: EngineCore) -> None:
        """Called once, when the core is made."""

    def close(self) -> None:
        """Give back memory and threads; the executor is still there."""

    # -- of a step

    def scheduled(self, plan: SchedulerOutput) -> None:
        """The plan is executed next; until `stepped`, what happens happens during the step."""

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        """The scheduler has the step's outcome; no other request gets its blocks before this returns."""

    def told(self, progress: list[RequestProgress]) -> None:
        """The requests' clients hear this next; items may be replaced."""

    # -- of requests

    def added(self, request: RequestState, now: float) -> None: ...

    def stopped(self, request_id: str, reason: FinishReason, now: float) -> None:
        """A request was ended from outside a plan: aborted, out of time, or finished by a stop string."""

    def ended(self, request_id: str) -> None:
        """A request has ended, for any reason; its blocks are free. After a step, if the step ended it."""

    # -- of the scheduler

    def configured(self, config: SchedulerConfig, now: float) -> None: ...

    def measured(self, costs: SwapCosts | CostModel, now: float) -> None: ...

    # -- of KV from elsewhere

    def reserved(self, request_id: str, num_tokens: int, now: float) -> None: ...

    def kv_arrived(self, request_id: str, num_tokens: int, now: float) -> None: ...

    def held(self, lease: str, block_hashes: Sequence[bytes], now: float) -> None:
        """`block_hashes` are of the blocks that were there."""

    def released(self, lease: str, now: float) -> None: ...

    def given_up(self, given_up: GivenUp) -> None:
        """Told before anything is written to the blocks; asks nothing of the core."""

    def evicted(self, blocks: Mapping[bytes, int]) -> None:
        """Blocks by hash leave the cache; told before anything is written to them."""

    # -- of lanes

    def model_loaded(self, name: str, version: int, rules: BatchRules, now: float) -> None: ...

    def model_unloaded(self, name: str, version: int, now: float) -> None: ...

    def tensor_added(self, spec: TensorSpec, now: float) -> None: ...

    def tensor_ended(self, request_id: str, reason: FinishReason, now: float) -> None: ...

    def tensors_expired(self, now: float) -> None: ...

    def dispatched(self, batches: tuple[Batch, ...], now: float) -> None: ...

    def completed(self, batch: Batch, outcome: BatchOutcome, now: float) -> None: ...

    def flush(self, now: float) -> None:
        """Nothing more comes for now; not while a step is under way."""

    # -- what an engine tells of itself

    def figures(self) -> Mapping[str, Any]:
        """Figures of `ReplicaState`, by name."""
        return {}

    def tier_views(self) -> Sequence[TierView]:
        """Views of KV that outlives requests, or comes from elsewhere."""
        return ()

    def clear_tiers(self, done: Callable[[int], None]) -> bool:
        """Empty the tiers; `done` is told later how many blocks there were. False where there are none."""
        return False

    def recording(self) -> bytes:
        """The last requests and steps, encoded; empty where none are kept."""
        return b""


class Moments:
    """For each moment, the methods of the listeners that override it, in the listeners' order."""

    def __init__(self, listeners: Sequence[StepListener]) -> None:
        self.listeners = listeners
        self.find()

    def find(self) -> None:
        """Find the methods, anew when a listener begins or ends to follow steps."""
        listeners, following = self.listeners, [each for each in self.listeners if each.follows_steps]
        self.telling = [each for each in listeners if each.has_figures]
        self.follows_decoding = any(each.follows_decoding for each in following)
        self.scheduled = overriding(following, StepListener.scheduled)
        self.stepped = overriding(following, StepListener.stepped)
        self.told = overriding(following, StepListener.told)
        self.ended = overriding(following, StepListener.ended)
        self.added = overriding(listeners, StepListener.added)
        self.stopped = overriding(listeners, StepListener.stopped)
        self.configured = overriding(listeners, StepListener.configured)
        self.measured = overriding(listeners, StepListener.measured)
        self.reserved = overriding(listeners, StepListener.reserved)
        self.kv_arrived = overriding(listeners, StepListener.kv_arrived)
        self.held = overriding(listeners, StepListener.held)
        self.released = overriding(listeners, StepListener.released)
        self.given_up = overriding(listeners, StepListener.given_up)
        self.evicted = overriding(listeners, StepListener.evicted)
        self.model_loaded = overriding(listeners, StepListener.model_loaded)
        self.model_unloaded = overriding(listeners, StepListener.model_unloaded)
        self.tensor_added = overriding(listeners, StepListener.tensor_added)
        self.tensor_ended = overriding(listeners, StepListener.tensor_ended)
        self.tensors_expired = overriding(listeners, StepListener.tensors_expired)
        self.dispatched = overriding(listeners, StepListener.dispatched)
        self.completed = overriding(listeners, StepListener.completed)
        self.flush = overriding(listeners, StepListener.flush)


def overriding(
    listeners: Iterable[StepListener], method: Callable[Concatenate[Any, P], None]
) -> tuple[Callable[P, None], ...]:
    """The listeners' own methods in place of this one of `StepListener`."""
    name = method.__name__
    return tuple(getattr(each, name) for each in listeners if getattr(type(each), name) is not method)


class EngineCore:
    """Requests in, progress out. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        *listeners: StepListener,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Each moment is told in the order of `listeners`; `wake`, called in any thread, ends the driver's wait."""
        self._scheduler, self._executor, self.clock, self._wake = scheduler, executor, clock, wake
        self.findable = FindableBlocks(scheduler.kv_cache)
        self._called: deque[Callable[[], object]] = deque()
        self.execute_s = 0.0  # total time in the executor
        self.host_s = 0.0  # total time of steps outside it
        self.last_step_at: float | None = None  # s, when a step last ended
        self._expired: list[RequestProgress] = []  # in the step under way
        self._scheduled_at = 0.0  # s, the step under way
        self._times = StepTimes(0.0, 0.0, 0.0)  # of the plan executed last
        self._ageing, self._speed = Ageing(), SpeedMeter()
        self._moments = Moments((*listeners, self._speed, self._ageing, HostShares()))
        scheduler.kv_cache.evicted = {} if self._moments.evicted else None
        for listener in self._moments.listeners:
            listener.begin(self)

    # -- a step

    def step(self) -> list[RequestProgress]:
        """Schedule, execute, update; progress of every request that got something."""
        plan = self.schedule()
        output = self.execute(plan)
        return self.update(plan, output)

    def schedule(self) -> SchedulerOutput:
        """Make the next plan, after ending requests whose time is over; `execute` and `update` must follow."""
        now = self.clock.now()
        self._expired = self._expire(now)
        plan = self._scheduler.schedule(now)
        self._scheduled_at = now
        if self._moments.given_up:
            self._tell_given_up()
        if self._moments.evicted:
            self._tell_evicted()
        for tell in self._moments.scheduled:
            tell(plan)
        return plan

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        """Execute the plan; the only part of a step that another thread may run."""
        began_at = self.clock.now()
        output = self._executor.execute(plan)
        self._times = StepTimes(self._scheduled_at, began_at, self.clock.now())
        return output

    def update(self, plan: SchedulerOutput, output: ModelOutput) -> list[RequestProgress]:
        """Take in the outcome of the plan; progress of every request that got something."""
        times, moments = self._times, self._moments
        self.execute_s += times.execute_s
        self._scheduler.charge(plan, self.execute_s)
        progress = self._scheduler.update(plan, output, times.executed_at)
        for stepped in moments.stepped:
            stepped(plan, output, progress, times)
        return self._tell(self._expired + progress, times)

    def decode_on(self, times: Sequence[StepTimes], token: int) -> list[RequestProgress]:
        """Take in steps as `steady_requests` promised them, each of which gave each request this token; the last may
        end some, whose progress is returned.
        """
        charged_s = []
        for each in times:
            self.execute_s += each.execute_s
            charged_s.append(self.execute_s)
        return self._tell(self._scheduler.decode_on(charged_s, token, times[-1].executed_at), times[-1])

    def _tell(self, progress: list[RequestProgress], times: StepTimes) -> list[RequestProgress]:
        moments = self._moments
        if moments.ended:
            self._tell_ended(progress)
        self.last_step_at = self.clock.now()
        self.host_s += times.execute_at - times.scheduled_at + (self.last_step_at - times.executed_at)
        for told in moments.told:
            told(progress)
        return progress

    # -- what there is

    @property
    def has_work(self) -> bool:
        """Whether there are requests."""
        return self._scheduler.has_work

    @property
    def can_step(self) -> bool:
        """Whether a step would compute anything: not while all requests wait for KV from elsewhere."""
        return self._scheduler.can_step

    @property
    def steady_requests(self) -> list[RequestState]:
        """As `Scheduler.steady_requests`; none while a listener wants to hear of each step."""
        return [] if self._moments.follows_decoding or self._called else self._scheduler.steady_requests

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

    @property
    def moments(self) -> Moments:
        """The listeners' methods, for what happens to lanes."""
        return self._moments

    @property
    def prefill_s_per_token(self) -> float | None:
        """Time to compute a token of a prompt in the executor; None until it was measured."""
        return self._ageing.s_per_token

    @property
    def block_changes(self) -> FindableBlocks | None:
        """Hashes of blocks that can be found, and that cannot any more; None while no router wants them."""
        return self.findable if self._scheduler.kv_cache.changes is not None else None

    def figures(self) -> dict[str, Any]:
        """Figures of `ReplicaState` beside the scheduler's, by name."""
        return {name: each for listener in self._moments.telling for name, each in listener.figures().items()}

    def tier_views(self) -> tuple[TierView, ...]:
        """Views of KV that outlives requests, or comes from elsewhere."""
        return tuple(view for listener in self._moments.listeners for view in listener.tier_views())

    def clear_tiers(self, done: Callable[[int], None]) -> None:
        """Empty the tiers; `done` is told, here, how many blocks there were."""
        if not any(listener.clear_tiers(done) for listener in self._moments.listeners):
            done(0)

    def recording(self) -> bytes:
        """The last requests and steps as `engine.traffic` encodes them; empty where none are kept."""
        return b"".join([listener.recording() for listener in self._moments.listeners])

    # -- requests

    def add(self, spec: RequestSpec) -> RequestState:
        """Add a request; returns its state, to be read only. Raises RequestError when it can never be served."""
        now, request = self.clock.now(), RequestState(spec)
        self._scheduler.add(request, now)
        if request.background:
            for listener in self._moments.listeners:
                self.follow(listener, listener.follows_steps or listener.follows_background)
        for tell in self._moments.added:
            tell(request, now)
        return request

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
        now = self.clock.now()
        progress = self._scheduler.finish(request_id, reason, now, stop_reason=stop_reason)
        self._tell_given_up()
        if progress is None:
            return None
        for tell in self._moments.stopped:
            tell(request_id, reason, now)
        last = [progress]
        self._tell_ended(last)
        for told in self._moments.told:
            told(last)
        return last[0]

    def shed(self, request_id: str) -> RequestProgress | None:
        """Gives up a request that is in no step yet; None when it is, or not here (any more)."""
        waiting = self._scheduler.waits_to_start(request_id)
        return self.finish(request_id, FinishReason.SHED) if waiting else None

    # -- calls from other threads

    def call_soon(self, action: Callable[[], object]) -> None:
        """Call `action` in the engine's thread, between two steps; from any thread."""
        self._called.append(action)
        self._wake()

    @property
    def is_called(self) -> bool:
        """Whether an action of `call_soon` waits to be run."""
        return bool(self._called)

    def run_called(self) -> bool:
        """Run the waiting actions, before each step and when the driver was woken. Returns whether there were any."""
        has_called = bool(self._called)
        while self._called:
            self._called.popleft()()
        return has_called

    # -- KV from elsewhere

    def reserve(self, request_id: str, num_tokens: int) -> ReservedBlocks | None:
        """Reserve as `Scheduler.reserve`; another thread may fill the blocks until `kv_arrived`, or `given_up`."""
        now = self.clock.now()
        reserved = self._scheduler.reserve(request_id, num_tokens, now)
        self._tell_evicted()
        if reserved is not None or self._scheduler.waits_along(request_id) is not None:
            for tell in self._moments.reserved:
                tell(request_id, num_tokens, now)
        return reserved

    def kv_arrived(self, request_id: str, num_tokens: int) -> bool:
        """Note KV as `Scheduler.kv_arrived`."""
        now = self.clock.now()
        came = self._scheduler.kv_arrived(request_id, num_tokens, now)
        for tell in self._moments.kv_arrived if came else ():
            tell(request_id, num_tokens, now)
        return came

    def hold(self, lease: str, block_hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Hold blocks as `Scheduler.hold`; another thread may read them until `release`, or `given_up`."""
        now = self.clock.now()
        blocks = self._scheduler.hold(lease, block_hashes, now)
        for tell in self._moments.held if blocks else ():
            tell(lease, block_hashes[: len(blocks)], now)
        return blocks

    def release(self, lease: str) -> bool:
        """Release as `Scheduler.release`."""
        now = self.clock.now()
        was_held = self._scheduler.release(lease, now)
        for tell in self._moments.released if was_held else ():
            tell(lease, now)
        return was_held

    # -- settings

    def follow(self, listener: StepListener, follows: bool) -> None:
        """Tell a listener of steps, or no more."""
        if listener.follows_steps != follows:
            listener.follows_steps = follows
            self._moments.find()

    def measure_prefill(self) -> None:
        """Measure `prefill_s_per_token` from now on, also where the policy has no use for it."""
        self._ageing.want(self)

    def tell_router(self, wanted: bool) -> None:
        """Measure what a router over several engines needs, from now on or no more: cached blocks and speed."""
        self.findable.tell_changes(wanted)
        self._speed.restart()
        self.follow(self._speed, wanted)

    def configure(self, config: SchedulerConfig) -> None:
        """Changes policy and limits, losing nothing. Raises ConfigError and changes nothing."""
        self._scheduler.configure(config)
        now = self.clock.now()
        for tell in self._moments.configured:
            tell(config, now)

    def set_swap_costs(self, costs: SwapCosts) -> None:
        """Tells the scheduler what copying KV to the host, and computing it again, take."""
        self._scheduler.set_swap_costs(costs)
        self._tell_measured(costs)

    def set_step_costs(self, costs: CostModel) -> None:
        """Tells the scheduler what steps and drafts take."""
        self._scheduler.set_step_costs(costs)
        self._tell_measured(costs)

    def close(self) -> None:
        """Close listeners, then give back the executor's memory and threads."""
        for listener in self._moments.listeners:
            listener.close()
        self._executor.close()

    # -- small things

    def _expire(self, now: float) -> list[RequestProgress]:
        expired = self._scheduler.expire(now)
        if self._moments.given_up:
            self._tell_given_up()
        for progress in expired:
            assert progress.finish_reason is not None
            for tell in self._moments.stopped:
                tell(progress.request_id, progress.finish_reason, now)
        return expired

    def _tell_ended(self, progress: Iterable[RequestProgress]) -> None:
        for each in progress:
            if each.finish_reason is not None:
                for tell in self._moments.ended:
                    tell(each.request_id)

    def _tell_given_up(self) -> None:
        given_up = self._scheduler.given_up
        if given_up.request_ids or given_up.leases:
            for tell in self._moments.given_up:
                tell(given_up)

    def _tell_evicted(self) -> None:
        if evicted := self._scheduler.kv_cache.evicted:
            for tell in self._moments.evicted:
                tell(evicted)
            evicted.clear()

    def _tell_measured(self, costs: SwapCosts | CostModel) -> None:
        now = self.clock.now()
        for tell in self._moments.measured:
            tell(costs, now)


class HostShares(StepListener):
    """Keeps, for each request in the engine, the host's total time at its first step and at its first token, and tells
    it in the timing of those that end.

    A step that starts and ends no request, while all running ones have a first token, costs one comparison.
    """

    follows_decoding = False

    def __init__(self) -> None:
        self._starting: dict[str, float] = {}  # s, total when first scheduled; no token yet
        self._decoding: dict[str, tuple[float, float]] = {}  # s, of its prefill; total at its first token

    def begin(self, core: EngineCore) -> None:
        self._core = core

    def scheduled(self, plan: SchedulerOutput) -> None:
        for new in plan.new_requests:
            if new.request_id not in self._decoding:  # else it is in a step again
                self._starting.setdefault(new.request_id, self._core.host_s)

    def told(self, progress: list[RequestProgress]) -> None:
        host_s, starting = self._core.host_s, self._starting
        for index, each in enumerate(progress):
            if starting and each.new_token_ids and each.request_id in starting:
                self._decoding[each.request_id] = (host_s - starting.pop(each.request_id), host_s)
            if each.finish_reason is not None:
                progress[index] = self._ended(each, host_s)

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


class Ageing(StepListener):
    """Learns the time of a prompt's token, where it is wanted, and ages waiting requests by it: where the policy has a
    use for a rate, and none was given.
    """

    follows_steps = False

    def __init__(self) -> None:
        self._meter = PrefillMeter()
        self._is_wanted = self._ages = False
        self._rate: float | None = None  # of ageing, as configured last

    @property
    def s_per_token(self) -> float | None:
        return self._meter.s_per_token

    def begin(self, core: EngineCore) -> None:
        self._core = core
        self.configured(core.scheduler.config, core.clock.now())

    def want(self, core: EngineCore) -> None:
        """Measure whatever the policy is."""
        self._is_wanted = True
        core.follow(self, True)

    def configured(self, config: SchedulerConfig, now: float) -> None:
        is_mine = self._ages and config.ageing_tokens_per_s == self._rate
        self._ages = (is_mine or config.ageing_tokens_per_s is None) and AGEING not in config.policy_args
        self._rate = config.ageing_tokens_per_s
        self._core.follow(self, self._is_wanted or self._has_use)

    @property
    def _has_use(self) -> bool:
        return self._ages and AGEING in self._core.scheduler.order.policy.arguments

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        if self._meter.observe(plan, times.execute_s) and self._has_use:
            self._age()

    def _age(self) -> None:
        """Set how fast waiting outweighs work from this device's speed; anew when that is quite another.

        All keys are then computed anew from what the requests carry, so that no request loses the time it has waited.
        """
        meter, told = self._meter, self._rate
        if meter.num_steps < MIN_STEPS or meter.s_per_token is None:
            return
        rate = min(max(AGEING_SHARE / meter.s_per_token, 0.001), 1e9)
        if told is None or not told / NEWS < rate < told * NEWS:
            self._rate = rate
            self._core.configure(replace(self._core.scheduler.config, ageing_tokens_per_s=rate))


class SpeedMeter(StepListener):
    """Speed of this device, as a router compares devices: tokens of prompts, and of output, in a second; 0 is not
    measured yet. Decoding is at the batch sizes there were lately.
    """

    follows_steps = False

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was measured."""
        self._prefill = PrefillMeter()
        self._decode_tokens_per_s = 0.0

    def figures(self) -> Mapping[str, Any]:
        s_per_token = self._prefill.s_per_token
        return {
            "prefill_tokens_per_s": 1 / s_per_token if s_per_token else 0.0,
            "decode_tokens_per_s": self._decode_tokens_per_s,
        }

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        execute_s = times.execute_s
        self._prefill.observe(plan, execute_s)
        if plan.rows and execute_s > 0 and all(row.num_known <= 1 for row in plan.rows):
            rate = sum(row.num_tokens for row in plan.rows) / execute_s
            before = self._decode_tokens_per_s or rate
            self._decode_tokens_per_s = before + SMOOTHING * (rate - before)


class TensorLanes:
    """Tensor requests in, batches and last progress out. In the engine's thread, also while a step is under way."""

    def __init__(self, scheduler: Scheduler, clock: Clock, moments: Moments) -> None:
        self._scheduler, self._clock, self._moments = scheduler, clock, moments

    def load(self, name: str, version: int, rules: BatchRules) -> None:
        self._scheduler.lanes.load(name, version, rules)
        for tell in self._moments.model_loaded:
            tell(name, version, rules, self._clock.now())

    def unload(self, name: str, version: int) -> None:
        self._scheduler.lanes.unload(name, version)
        for tell in self._moments.model_unloaded:
            tell(name, version, self._clock.now())

    def has_model(self, name: str, version: int) -> bool:
        """Loaded, or with requests that have not ended."""
        return any(model.key == (name, version) for model in self._scheduler.lanes.models)

    def add(self, spec: TensorSpec) -> None:
        """Raises InvalidRequest, ModelNotFound or Overloaded."""
        now = self._clock.now()
        self._scheduler.add_tensor(TensorRequest(spec), now)
        for tell in self._moments.tensor_added:
            tell(spec, now)

    def finish(self, request_id: str, reason: FinishReason) -> RequestProgress | None:
        """None when it is not here, or when its batch runs, with which it ends."""
        if request_id not in self._scheduler.lanes:
            return None
        now = self._clock.now()
        progress = self._scheduler.finish(request_id, reason, now)
        for tell in self._moments.tensor_ended:
            tell(request_id, reason, now)
        return progress

    def expire(self) -> list[RequestProgress]:
        now = self._clock.now()
        told = self._scheduler.expire_tensors(now)
        for tell in self._moments.tensors_expired if told else ():
            tell(now)
        return told

    def dispatch(self) -> tuple[Batch, ...]:
        now = self._clock.now()
        batches = self._scheduler.dispatch(now)
        for tell in self._moments.dispatched if batches else ():
            tell(batches, now)
        return batches

    def completed(self, batch: Batch, outcome: BatchOutcome) -> list[RequestProgress]:
        now = self._clock.now()
        told = self._scheduler.completed(batch, outcome, now)
        for tell in self._moments.completed:
            tell(batch, outcome, now)
        return told

    def close(self) -> None:
        for tell in self._moments.flush:
            tell(self._clock.now())

    @property
    def wake_in_s(self) -> float | None:
        """Seconds until `expire` or `dispatch` may have something to do; None until something happens."""
        now = self._clock.now()
        at = self._scheduler.next_wake(now)
        return None if at is None else max(0.0, at - now)
