"""The history of one tensor request, from the replay of its log: what its lane waited for, and its batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from maitred.core.errors import ConfigError
from maitred.core.request import RequestStatus
from maitred.core.tensor_request import Batch, TensorRequest
from maitred.decisions.codec import read_log
from maitred.decisions.log import Completed, Dispatched, Event, TensorArrived
from maitred.decisions.replay import replay
from maitred.policy.policies import POLICIES
from maitred.policy.policy import PolicyFactory
from maitred.scheduler.notes import LaneWait
from maitred.scheduler.scheduler import Scheduler

MAX_CHANGES = 8  # of what a lane waits for while nothing happens; each is a timer that ends


@dataclass(slots=True)
class TensorWait:
    """One wait in its lane, in s of the log's clock."""

    began_at: float
    ended_at: float
    for_reason: dict[LaneWait, float] = field(default_factory=dict)  # s; of INSTANCES, by the requests that ran:
    for_batches: dict[tuple[Batch, ...], float] = field(default_factory=dict)  # s, of its model, all at once

    @property
    def total_s(self) -> float:
        return self.ended_at - self.began_at


@dataclass(slots=True)
class LoggedBatch:
    """A batch that it was in."""

    batch: Batch
    began_at: float  # s
    ended_at: float | None = None  # s
    compute_us: int = 0  # of the whole batch
    lost: bool = False  # its instance died, and it ran again


@dataclass(slots=True)
class TensorHistory:
    request: TensorRequest  # as it was at its end, or at the log's
    policy: str
    num_ahead: int = 0  # requests that waited in its lane when it came
    num_rows_ahead: int = 0
    waits: list[TensorWait] = field(default_factory=list)
    runs: list[LoggedBatch] = field(default_factory=list)


def is_tensor(frames: Iterable[bytes], request_id: str) -> bool:
    """Return whether a tensor request of this id arrived."""
    return any(
        isinstance(event, TensorArrived) and event.spec.request_id == request_id
        for step in read_log(frames)[1]
        for event in (*step.events, *step.during)
    )


def steps_of_one(ids: Sequence[str]) -> Sequence[str]:
    """`ids` where they are steps of one ensemble's request, WHOLE/0, WHOLE/1 ...; else nothing."""
    wholes = {whole if number.isdecimal() else "" for whole, _, number in (name.rpartition("/") for name in ids)}
    return ids if len(wholes) == 1 and "" not in wholes else ()


def tensor_history_of(
    frames: Iterable[bytes], request_id: str, policies: Mapping[str, PolicyFactory] = POLICIES
) -> TensorHistory:
    """Replays up to its end. Raises ConfigError when the log is damaged, or its decisions are not made again."""
    builder = _Builder(request_id)
    for step in replay(frames, policies, builder.see):
        if not step.equal:
            raise ConfigError(f"the log cannot be explained: replay differs at {step.difference}")
        if builder.history is not None and builder.history.request.finished:
            break
    if builder.history is None:
        raise ConfigError(f"no tensor request {request_id!r} arrived in this log")
    return builder.history


class _Builder:
    """Follows one request, event by event. What its lane waits for is told ahead, until the next event."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.history: TensorHistory | None = None
        self._reasons: list[tuple[LaneWait, float]] = []  # and until when (s), one after the other
        self._batches: tuple[Batch, ...] = ()  # of its model, that run meanwhile

    def see(self, event: Event, scheduler: Scheduler) -> None:
        if self.history is None:
            self._arrive(event, scheduler)
        else:
            self._pass_time(self.history, event.now)
        if self.history is None:
            return
        match event:
            case Dispatched(_, batches):
                self._begin(self.history, batches, event.now)
            case Completed():
                self._end(self.history, event)
        if self.history.request.status is RequestStatus.WAITING:
            self._look_ahead(self.history.request, scheduler, event.now)
        else:
            self._reasons = []

    def _arrive(self, event: Event, scheduler: Scheduler) -> None:
        if not isinstance(event, TensorArrived) or event.spec.request_id != self._request_id:
            return
        request, lane = scheduler.lanes.request(self._request_id), event.spec.lane
        assert request is not None, "it has just been added"
        others = [one for one in scheduler.lanes.requests if one.spec.lane == lane and one is not request]
        waiting = [one for one in others if one.status is RequestStatus.WAITING]
        rows = sum(one.num_rows for one in waiting)
        self.history = TensorHistory(request, scheduler.config.policy, len(waiting), rows)
        self.history.waits.append(TensorWait(event.now, event.now))

    def _look_ahead(self, request: TensorRequest, scheduler: Scheduler, now: float) -> None:
        lanes, key, self._reasons = scheduler.lanes, request.spec.lane, []
        self._batches = tuple(batch for batch in lanes.batches if batch.lane[:2] == key[:2])
        for _ in range(MAX_CHANGES):
            why, until = lanes.why_not(key, now)
            self._reasons.append((why, until))
            if until == inf:
                return
            now = until
        self._reasons[-1] = (self._reasons[-1][0], inf)

    def _pass_time(self, history: TensorHistory, now: float) -> None:
        wait = history.waits[-1]
        for why, until in self._reasons:
            passed = max(0.0, min(until, now) - wait.ended_at)
            wait.ended_at += passed
            wait.for_reason[why] = wait.for_reason.get(why, 0.0) + passed
            if why is LaneWait.INSTANCES:
                wait.for_batches[self._batches] = wait.for_batches.get(self._batches, 0.0) + passed
        if self._reasons:
            wait.ended_at = now

    def _begin(self, history: TensorHistory, batches: tuple[Batch, ...], now: float) -> None:
        mine = next((batch for batch in batches if self._request_id in batch.request_ids), None)
        if mine is not None:
            history.runs.append(LoggedBatch(mine, now))

    def _end(self, history: TensorHistory, event: Completed) -> None:
        run = history.runs[-1] if history.runs else None
        if run is None or run.ended_at is not None or run.batch.number != event.number:
            return
        run.ended_at, run.compute_us, run.lost = event.now, event.outcome.compute_us, event.outcome.lost
        if not history.request.finished and history.request.status is RequestStatus.WAITING:
            history.waits.append(TensorWait(event.now, event.now))
