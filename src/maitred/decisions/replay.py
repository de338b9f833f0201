"""Replay: makes the plans of a recorded run again, with a fresh scheduler, and says where they first differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from maitred.core.request import FinishReason, RequestState
from maitred.core.step import ModelOutput, SampledRow, SchedulerOutput
from maitred.core.tensor_request import Batch, TensorRequest
from maitred.decisions import log
from maitred.decisions.codec import Header, read_log
from maitred.kv.pages import kv_cache_manager
from maitred.policy.policies import POLICIES
from maitred.policy.policy import PolicyFactory
from maitred.scheduler.scheduler import Scheduler
from maitred.scheduler.speculation import Speculation


class ReplayedStep(NamedTuple):
    """One step, just scheduled again and not yet updated: `scheduler` can be looked at."""

    step: log.Step
    replayed: SchedulerOutput
    scheduler: Scheduler
    batches: str | None = None  # how batches that went before or during it differ, in words

    @property
    def equal(self) -> bool:
        return self.batches is None and self.step.plan == self.replayed

    @property
    def difference(self) -> str | None:
        """The first one, in words."""
        words = self.batches or _difference("plan", self.step.plan, self.replayed)
        return None if words is None else f"step {self.step.plan.step}: {words}"


class LoggedOutcomes:
    """Recorded outcomes, as far as scheduling can tell: the stop rule and the block hasher of a replay, and how many
    tokens were drafted.

    Holds one step at a time. Tokens are all 0: nothing in the scheduler looks at them.
    """

    def __init__(self) -> None:
        self._drafted: dict[str, int] = {}
        self._sampling: list[str] = []
        self._outcomes: dict[str, log.Outcome] = {}
        self._num_left: dict[str, int] = {}

    def set_plan(self, plan: SchedulerOutput) -> None:
        """The one that is made next was this."""
        self._drafted = {row.request_id: row.num_drafts for row in plan.rows if row.num_drafts}
        self._sampling = [row.request_id for row in plan.rows if row.samples]

    def num_drafts(self, request: RequestState, num_rows: int) -> int:
        """Return the number of drafts as recorded, where no rule is known that decided it."""
        return self._drafted.get(request.request_id, 0)

    def set_step(self, outcomes: Iterable[log.Outcome]) -> ModelOutput:
        """Makes these the current outcomes; returns them as the executor would have."""
        self._outcomes = {outcome.request_id: outcome for outcome in outcomes}
        self._num_left = {outcome.request_id: outcome.num_tokens for outcome in self._outcomes.values()}
        rows = [row for outcome in self._outcomes.values() if (row := _sampled_row(outcome)) is not None]
        told = {row.request_id for row in rows}
        postponed = [SampledRow(name, (), postponed=True) for name in self._sampling if name not in told]
        return ModelOutput((*rows, *postponed))

    def stop_rule(self, request: RequestState) -> FinishReason | None:
        """The recorded reason, with the last token of the step."""
        self._num_left[request.request_id] -= 1
        if self._num_left[request.request_id] > 0:
            return None
        return self._outcomes[request.request_id].finish_reason

    def hasher(self, request: RequestState, num_blocks: int) -> tuple[bytes, ...]:
        return self._outcomes[request.request_id].new_hashes


def _sampled_row(outcome: log.Outcome) -> SampledRow | None:
    if outcome.finish_reason is FinishReason.ERROR:
        return SampledRow(outcome.request_id, (), error="as recorded")
    if not outcome.num_tokens:
        ended = outcome.finish_reason is FinishReason.STOP
        return SampledRow(outcome.request_id, (), complete=True) if ended else None
    num_accepted, num_forced = outcome.num_accepted, outcome.num_forced
    if not outcome.num_drafts:  # none, or a version that did not say
        num_accepted = outcome.num_tokens - 1 - num_forced
    tokens = (0,) * max(outcome.num_tokens, num_accepted + 1 + num_forced)
    return SampledRow(
        outcome.request_id, tokens, num_accepted=num_accepted, num_forced=num_forced, num_drafts=outcome.num_drafts
    )


def fresh_scheduler(
    header: Header, outcomes: LoggedOutcomes, policies: Mapping[str, PolicyFactory] = POLICIES
) -> Scheduler:
    """Return a scheduler like the recorded one at its begin; `policies` must hold those that the log names."""
    kv_cache = kv_cache_manager(
        header.groups,
        num_pages=header.num_pages,
        num_blocks=header.num_blocks,
        block_size=header.block_size,
        hasher=outcomes.hasher,
        enable_prefix_caching=header.enable_prefix_caching,
        num_host_blocks=header.num_host_blocks,
        num_state_slots=header.num_state_slots,
    )
    most = header.num_speculative_tokens
    return Scheduler(
        header.config,
        kv_cache,
        outcomes.stop_rule,
        policies=policies,
        num_drafts=outcomes.num_drafts if not most else None,
        speculation=Speculation(most) if most else None,
    )


Watch = Callable[[log.Event, Scheduler], object]
"""Told of each event once the scheduler has been, which can be looked at."""


def replay(
    frames: Iterable[bytes],
    policies: Mapping[str, PolicyFactory] = POLICIES,
    watch: Watch = lambda event, scheduler: None,
) -> Iterator[ReplayedStep]:
    """Each recorded step along with the plan made for it now. Ends after the first that differs: from there on the
    recorded outcomes belong to another run. Raises ConfigError for a damaged log.
    """
    header, steps = read_log(frames)
    outcomes = LoggedOutcomes()
    scheduler = fresh_scheduler(header, outcomes, policies)
    running: dict[int, Batch] = {}
    for step in steps:
        batches, plan = _apply_all(step.events, scheduler, running, watch), step.plan
        if step.taken and batches is None:
            outcomes.set_plan(step.plan)
            plan = scheduler.schedule(step.scheduled_at)
            batches = _apply_all(step.during, scheduler, running, watch) if plan == step.plan else None
        replayed = ReplayedStep(step, plan, scheduler, batches)
        yield replayed
        if not replayed.equal:
            return
        if step.taken:
            scheduler.update(replayed.replayed, outcomes.set_step(step.outcomes), step.updated_at)


def first_difference(frames: Iterable[bytes]) -> str | None:
    """Return where the replay of a log leaves the record, in words; None when every plan is equal."""
    return next((step.difference for step in replay(frames) if not step.equal), None)


def _apply_all(
    events: Iterable[log.Event], scheduler: Scheduler, running: dict[int, Batch], watch: Watch
) -> str | None:
    """The first difference of the batches that go, in words; `running` are those under way, by number."""
    for event in events:
        if isinstance(event, log.Dispatched):
            dispatched = scheduler.dispatch(event.now)
            if dispatched != event.batches:
                return _difference("batches", event.batches, dispatched)
            running |= {batch.number: batch for batch in dispatched}
        elif isinstance(event, log.Completed):
            scheduler.completed(running.pop(event.number), event.outcome, event.now)
        elif isinstance(event, log.TensorEvent):
            _apply_tensor(event, scheduler)
        else:
            _apply(event, scheduler)
        watch(event, scheduler)
    return None


def _apply_tensor(event: log.TensorEvent, scheduler: Scheduler) -> None:
    match event:
        case log.ModelLoaded(_, name, version, rules):
            scheduler.lanes.load(name, version, rules)
        case log.ModelUnloaded(_, name, version):
            scheduler.lanes.unload(name, version)
        case log.TensorArrived(now, spec):
            scheduler.add_tensor(TensorRequest(spec), now)
        case log.TensorEnded(now, request_id, reason):
            scheduler.finish(request_id, reason, now)
        case log.TensorsExpired(now):
            scheduler.expire_tensors(now)


def _apply(event: log.Event, scheduler: Scheduler) -> None:
    match event:
        case log.Arrived(now, spec):
            scheduler.add(RequestState(spec), now)
        case log.Ended(now, request_id, reason):
            scheduler.finish(request_id, reason, now)
        case log.Configured(_, config):
            scheduler.configure(config)
        case log.Measured(_, costs):
            scheduler.set_swap_costs(costs)
        case log.StepsMeasured(_, costs):
            scheduler.set_step_costs(costs)
        case log.Reserved(now, request_id, num_tokens):
            scheduler.reserve(request_id, num_tokens, now)
        case log.KvArrived(now, request_id, num_tokens):
            scheduler.kv_arrived(request_id, num_tokens, now)
        case log.Held(now, lease, digests):
            scheduler.hold(lease, log.split_digests(digests), now)
        case log.Released(now, lease):
            scheduler.release(lease, now)


def _difference(name: str, recorded: Any, replayed: Any) -> str | None:
    if recorded == replayed:
        return None
    for part, was, is_now in _parts(recorded, replayed):
        difference = _difference(name + part, was, is_now)
        if difference is not None:
            return difference
    return f"{name} was {recorded!r}, is {replayed!r}"


def _parts(recorded: Any, replayed: Any) -> list[tuple[str, Any, Any]]:
    """Pairs to compare one by one, each with the end of its name; none when the two are best shown whole."""
    if is_dataclass(recorded):
        names = [field.name for field in fields(recorded) if field.compare]
        return [(f".{name}", getattr(recorded, name), getattr(replayed, name)) for name in names]
    if isinstance(recorded, tuple) and isinstance(replayed, tuple):
        named: tuple[str, ...] | None = getattr(recorded, "_fields", None)
        pairs = enumerate(zip(recorded, replayed, strict=False))
        return [(f".{named[i]}" if named else f"[{i}]", was, is_now) for i, (was, is_now) in pairs]
    return []
