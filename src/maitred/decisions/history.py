"""History of one request, from the replay of its log: what it waited for, which went first, how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from maitred.core.errors import ConfigError
from maitred.core.request import FinishReason, RequestState, RequestStatus
from maitred.decisions.codec import read_log
from maitred.decisions.log import Arrived, Configured, Ended, KvArrived, Reserved, TensorArrived
from maitred.decisions.replay import ReplayedStep, replay
from maitred.policy.policies import POLICIES
from maitred.policy.policy import PolicyFactory
from maitred.scheduler.notes import Blocked, Lack, Preemption
from maitred.scheduler.scheduler import Scheduler

MAX_LISTED = 5


@dataclass(slots=True)
class Wait:
    """One wait in the queue."""

    began_at: float  # s
    ended_at: float  # s
    for_lack: dict[Lack, float] = field(default_factory=dict)  # s in which the first in the queue lacked this
    as_first_s: float = 0.0  # of it, as the first in the queue
    for_leader_s: float = 0.0  # until another sample had computed the prompt
    for_kv_s: float = 0.0  # until KV had come from elsewhere, or was given up
    until_step_s: float = 0.0  # until the step under way had ended
    most_blocks_short: int = 0  # of the first in the queue
    overtaking: set[str] = field(default_factory=set)  # ids of those that arrived later and started earlier

    @property
    def total_s(self) -> float:
        return self.ended_at - self.began_at


@dataclass(slots=True)
class Start:
    """Start of a request: out of the queue and into a slot."""

    at: float  # s
    policy: str
    num_reused_tokens: int  # whose KV was there: prefix cache, or another sample
    terms: dict[str, float]


@dataclass(slots=True)
class PreemptionAt:
    """A preemption, of it or by it; the other one as it was, if there is one."""

    at: float  # s
    preemption: Preemption
    other: RequestState | None


@dataclass(slots=True)
class RequestHistory:
    request: RequestState
    arrived_at: float
    policy: str
    max_num_seqs: int
    num_running_then: int = 0
    ahead: tuple[RequestState, ...] = ()  # waited, when it came, and were served before it or still wait before it
    terms: dict[str, float] = field(default_factory=dict)  # of its score, when it came
    waits: list[Wait] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    preemptions: list[PreemptionAt] = field(default_factory=list)
    preempted_others: list[PreemptionAt] = field(default_factory=list)
    policy_changes: list[tuple[float, str]] = field(default_factory=list)
    first_token_at: float | None = None
    num_tokens: int = 0
    ended_at: float | None = None  # None: the log ends before it does
    finish_reason: FinishReason | None = None


def ids_like(frames: Iterable[bytes], words: str) -> list[str]:
    """Return the id that is `words` among the requests that arrived, else all that contain it."""
    found: dict[str, None] = {}
    for step in read_log(frames)[1]:
        for event in (*step.events, *step.during):
            if isinstance(event, Arrived | TensorArrived) and words in event.spec.request_id:
                if event.spec.request_id == words:
                    return [words]
                found[event.spec.request_id] = None
    return list(found)


def the_one(ids: Sequence[str], words: str) -> str:
    """Raises ConfigError when there is none, or several."""
    if not ids:
        raise ConfigError(f"no request {words!r} arrived in this log; its id is in the answer, and in x-request-id")
    if len(ids) > 1:
        some = ", ".join(ids[:MAX_LISTED]) + (", ..." if len(ids) > MAX_LISTED else "")
        raise ConfigError(f"{len(ids)} requests have {words!r} in their id: {some}; give more of it")
    return ids[0]


def history_of(
    frames: Iterable[bytes], request_id: str, policies: Mapping[str, PolicyFactory] = POLICIES
) -> RequestHistory:
    """Replays up to its end. Raises ConfigError when the log is damaged, or its decisions are not made again."""
    builder: _HistoryBuilder | None = None
    for step in replay(frames, policies):
        if not step.equal:
            raise ConfigError(f"the log cannot be explained: replay differs at {step.difference}")
        if builder is None:
            arrived = next(
                (e for e in step.step.events if isinstance(e, Arrived) and e.spec.request_id == request_id), None
            )
            if arrived is None:
                continue
            builder = _HistoryBuilder(step, arrived)
        if builder.take(step):
            break
    if builder is None:
        raise ConfigError(f"no request {request_id!r} arrived in this log")
    builder.close()
    return builder.history


class _HistoryBuilder:
    """Follows one request from the step in which it arrived."""

    def __init__(self, step: ReplayedStep, arrived: Arrived) -> None:
        self._request_id = arrived.spec.request_id
        self._last_at: float | None = None  # when the last step was scheduled, and what it left behind:
        self._blocked: Blocked | None = None
        self._waits_for_leader = False
        self._for_kv_since: float | None = None
        request = step.scheduler.request(arrived.spec.request_id)
        config = step.scheduler.config
        if request is None:  # it ended before the step
            request = RequestState(arrived.spec)
        self.history = RequestHistory(request, arrived.spec.arrived_at, config.policy, config.max_num_seqs)
        self.history.terms = step.scheduler.terms(arrived.spec.request_id)
        self._look_around(step)
        until_step_s = max(0.0, step.step.scheduled_at - arrived.spec.arrived_at)
        self._wait: Wait | None = Wait(arrived.spec.arrived_at, arrived.spec.arrived_at, until_step_s=until_step_s)

    def take(self, step: ReplayedStep) -> bool:
        """Takes in one step; True when the request has ended."""
        at, history = step.step.scheduled_at, self.history
        self._wait_until(at, self._for_kv_s(step))
        for event in step.step.events:
            if isinstance(event, Ended) and event.request_id == self._request_id:
                return self._end(event.reason, event.now)
            if isinstance(event, Configured):
                history.policy_changes.append((event.now, event.config.policy))
        self._note_preemptions(step)
        self._note_start(step)
        self._last_at, self._blocked = at, step.scheduler.blocked
        self._waits_for_leader = step.scheduler.awaits_leader(history.request)
        if self._wait is not None:
            started = {new.request_id for new in step.replayed.new_requests}
            self._wait.overtaking |= {name for name in started if self._came_later(step.scheduler, name)}
        return self._note_outcome(step)

    def _look_around(self, step: ReplayedStep) -> None:
        scheduler, me = step.scheduler, self.history.request
        admitted = [scheduler.request(new.request_id) for new in step.replayed.new_requests]
        before = [r for r in admitted if r is not None and r is not me]
        waiting = list(scheduler.waiting)
        if me in waiting:
            before += waiting[: waiting.index(me)]
        elif me.status is RequestStatus.RUNNING:
            before = before[: [r is me for r in admitted].index(True)]
        self.history.ahead = tuple(before)
        self.history.num_running_then = scheduler.num_running - sum(r is not None for r in admitted)

    def _wait_until(self, at: float, for_kv_s: float) -> None:
        """The time since the last step went by with waiting for KV, and with what that step said."""
        wait = self._wait
        if wait is None:
            return
        wait.for_kv_s += for_kv_s
        if self._last_at is not None:
            passed = max(0.0, at - self._last_at - for_kv_s)
            if self._waits_for_leader:
                wait.for_leader_s += passed
            elif self._blocked is not None:
                lack = self._blocked.lack
                wait.for_lack[lack] = wait.for_lack.get(lack, 0.0) + passed
                wait.most_blocks_short = max(wait.most_blocks_short, self._blocked.num_blocks_short)
                wait.as_first_s += passed if self._blocked.request_id == self._request_id else 0.0
        wait.ended_at = at

    def _for_kv_s(self, step: ReplayedStep) -> float:
        """Return the part of the time since the last step for KV: from a reservation until it came, or was given up."""
        total, since = 0.0, self._for_kv_since
        for event in step.step.events:
            if isinstance(event, Reserved) and self._concerns_me(event.request_id, step.scheduler):
                since = event.now
            elif isinstance(event, KvArrived | Ended) and self._concerns_me(event.request_id, step.scheduler):
                total += event.now - since if since is not None else 0.0
                since = None
        at, waits_on = step.step.scheduled_at, self.history.request.status is RequestStatus.WAITING_FOR_KV
        self._for_kv_since = at if waits_on else None
        return total + (at - since if since is not None else 0.0)

    def _concerns_me(self, request_id: str, scheduler: Scheduler) -> bool:
        """Return whether it is the request, or an unstarted sample of its prompt: they wait for KV together."""
        if request_id == self._request_id or self.history.starts:
            return request_id == self._request_id
        other, parent = scheduler.request(request_id), self.history.request.spec.parent_id
        return parent is not None and other is not None and other.spec.parent_id == parent

    def _note_preemptions(self, step: ReplayedStep) -> None:
        for preemption in step.scheduler.preemptions:
            if preemption.request_id == self._request_id:
                by = step.scheduler.request(preemption.by) if preemption.by is not None else None
                self.history.preemptions.append(PreemptionAt(step.step.scheduled_at, preemption, by))
                self._wait = Wait(step.step.scheduled_at, step.step.scheduled_at)
            elif preemption.by == self._request_id:
                victim = step.scheduler.request(preemption.request_id)
                self.history.preempted_others.append(PreemptionAt(step.step.scheduled_at, preemption, victim))

    def _note_start(self, step: ReplayedStep) -> None:
        if not any(new.request_id == self._request_id for new in step.replayed.new_requests):
            return
        row = next(row for row in step.replayed.rows if row.request_id == self._request_id)
        self.history.starts.append(
            Start(
                step.step.scheduled_at, step.scheduler.config.policy, row.start, step.scheduler.terms(self._request_id)
            )
        )
        self._close_wait()

    def close(self) -> None:
        """The log ends here."""
        self._close_wait()

    def _close_wait(self) -> None:
        if self._wait is not None:
            self.history.waits.append(self._wait)
            self._wait = None

    def _came_later(self, scheduler: Scheduler, request_id: str) -> bool:
        other = scheduler.request(request_id)
        return other is not None and other.arrived_at > self.history.arrived_at

    def _note_outcome(self, step: ReplayedStep) -> bool:
        for outcome in step.step.outcomes:
            if outcome.request_id == self._request_id:
                if outcome.num_tokens and self.history.first_token_at is None:
                    self.history.first_token_at = step.step.updated_at
                self.history.num_tokens += outcome.num_tokens
                if outcome.finish_reason is not None:
                    return self._end(outcome.finish_reason, step.step.updated_at)
        return False

    def _end(self, reason: FinishReason, at: float) -> bool:
        if self._wait is not None:
            self._wait.ended_at = at
        self._close_wait()
        self.history.finish_reason, self.history.ended_at = reason, at
        return True
