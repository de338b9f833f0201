"""Admission control: refuse at once requests whose first token would come too late, and those over a limit.

An overloaded server that lets every request in makes every request late (Beyer et al., "Site Reliability Engineering",
chapters 21 and 22), so it is decided on arrival, from the measured drain rate, and the refusal says when to come again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import NamedTuple, Protocol

from maitred.config import AdmissionConfig, SchedulerConfig
from maitred.core.errors import Overloaded
from maitred.core.request import FinishReason, Terms

PROMPT_WEIGHT = 0.25
UNKNOWN_OUTPUT = 128  # tokens, until answers were seen

MIN_RETRY_S, MAX_RETRY_S = 1.0, 120.0  # OpenAI's clients do not come again at all after more
REASONS = ("requests", "tokens", "class", "objective")
UNKNOWN_SLACK = 0.6  # of the objective, until it is known how wrong forecasts are
UNKNOWN_SHARE = 8  # of a batch may wait, one in so many, until it is known how fast work leaves
AIM = 0.8  # of the objective: what is foretold changes, and a shorter queue keeps the slots as full
MAX_SLACK = 0.7  # of the objective: some requests must get in to show that forecasts got better
PRIORITY_FIRST = ("priority", "interactive")  # policies under which the less urgent stand behind the more urgent
Foretell = Callable[[int], float | None]
"""Seconds to the first token of a new prompt of so many tokens, as predicted by its placement; None if unknown."""
NUM_CLASSES = 16  # priorities from this on share what is learned


@dataclass(slots=True, eq=False)
class _Admitted:
    """A request let in, until its end."""

    priority: int
    num_prompt_tokens: int
    work: float  # see drain_rate.py
    admitted_at: float
    foretold_s: float | None  # from then to the first token, if there was a queue
    num_output: int = 0
    started: bool = False  # its first token came


class _Caller(NamedTuple):
    """Facts of a request before it is admitted; for one that is only checked early, without its size."""

    priority: int
    ttft_slo_s: float | None
    num_prompt_tokens: int = 0
    arrived_at: float = 0.0


class Queueable(Protocol):
    """Facts asked of a request that wants to queue; a `RequestSpec` has them, and a router's estimate of one."""

    @property
    def request_id(self) -> str: ...

    @property
    def sample_index(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def terms(self) -> Terms: ...

    @property
    def arrived_at(self) -> float: ...


class _Verdict(NamedTuple):
    reason: str | None = None  # None lets it in
    shed: tuple[str, ...] = ()  # if these leave
    foretold_s: float | None = None


_LET_IN = _Verdict()


class AdmissionController:
    """Decide which requests may queue. Holds no lock and reads no clock: the gate calls it, and tells it of progress.

    A request waits until its first token; running ones are not touched. With `priority_first` (the queue's order heeds
    priorities), only requests as urgent count as ahead of a newcomer.
    """

    def __init__(
        self, config: AdmissionConfig, *, max_num_seqs: int, priority_first: bool = False, num_engines: int = 1
    ) -> None:
        """`max_num_seqs` is of all engines."""
        self.config, self._num_engines = config, num_engines
        self.num_refused = dict.fromkeys(REASONS, 0)
        self.foretell: Foretell = lambda num_tokens: None  # else by the rate at which work leaves
        self._max_num_seqs = max_num_seqs
        self._priority_first = priority_first
        self._caps = {int(priority): cap for priority, cap in config.max_queued_by_priority.items()}
        self._admitted: dict[str, _Admitted] = {}
        self._waiting: dict[int, dict[str, _Admitted]] = {}  # by priority, in order of arrival
        self._waiting_work: dict[int, float] = {}
        self._num_waiting = 0
        self._waiting_tokens = 0
        self._rate, self._mean_output = DrainRate(), MeanOutput()
        self._late_by: dict[int, LateBy] = {}
        self._work_done = 0.0  # since the last look at the queue
        self._queued_before = False  # was there a queue at that look
        self._looked_at: float | None = None
        self._owed_work, self._owed_at = 0.0, 0.0  # of refused requests, which will be back

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """Take in another number of slots of each engine, or another policy."""
        self.resize(self._num_engines * scheduler.max_num_seqs)
        self._priority_first = scheduler.policy in PRIORITY_FIRST

    def resize(self, max_num_seqs: int) -> None:
        """Take in the number of slots now: of one engine, or of all of a fleet."""
        self._max_num_seqs = max_num_seqs

    @property
    def num_slots(self) -> int:
        return self._max_num_seqs

    # -- before the queue

    def check_early(self, priority: int, ttft_slo_s: float | None, now: float) -> None:
        """Check a request before any work is done for it: raises Overloaded if even the smallest cannot get in."""
        caller = _Caller(priority, ttft_slo_s, 0, now)
        verdict = self._judge(caller, now)
        if verdict.reason is not None:
            raise self._turned_away(verdict.reason, self._mean_output.mean, now)

    def admit(self, request: Queueable, now: float) -> tuple[str, ...]:
        """Lets it in, and names those that must leave the queue for it (see `FinishReason.SHED`).

        Raises Overloaded. Further samples of a prompt go with the first, which was admitted just before.
        """
        work = PROMPT_WEIGHT * request.num_prompt_tokens + self._mean_output.expected(request.max_tokens)
        terms = request.terms
        caller = _Caller(terms.priority, terms.ttft_slo_s, request.num_prompt_tokens, request.arrived_at)
        verdict = self._judge(caller, now) if request.sample_index == 0 else _LET_IN
        if verdict.reason is not None:
            raise self._turned_away(verdict.reason, work, now)
        for request_id in verdict.shed:
            self._stop_waiting(request_id)
        entry = _Admitted(
            priority=terms.priority,
            num_prompt_tokens=request.num_prompt_tokens,
            work=work,
            admitted_at=now,
            foretold_s=verdict.foretold_s,
        )
        self._admitted[request.request_id] = entry
        self._wait(request.request_id, entry)
        return verdict.shed

    def admit_all(self, requests: Sequence[Queueable], now: float) -> tuple[str, ...]:
        """Admit all of them as `admit` does, or none: a refusal takes the others out again, and sheds none."""
        shed: list[str] = []
        for position, request in enumerate(requests):
            try:
                shed += self.admit(request, now)
            except Overloaded:
                for admitted in requests[:position]:
                    self.leave(admitted.request_id)
                for request_id in reversed(shed):
                    self._wait(request_id, self._admitted[request_id])
                raise
        return tuple(shed)

    def retry_after_s(self, now: float) -> float:
        """Return when a request refused now would find room: after the queue, and after those refused before."""
        rate = self._rate.per_s
        if rate is None:
            return MIN_RETRY_S
        self._forgive(rate, now)
        return max(MIN_RETRY_S, min(MAX_RETRY_S, (self._owed_work + sum(self._waiting_work.values())) / rate))

    # -- what the engine did

    def tokens_came(self, request_id: str, num_tokens: int, now: float) -> None:
        """Count tokens of an admitted request; with the first, its prompt is done and it waits no longer."""
        entry = self._admitted.get(request_id)
        if entry is None:
            return
        entry.num_output += num_tokens
        self._work_done += num_tokens
        if not entry.started:
            entry.started = True
            self._work_done += PROMPT_WEIGHT * entry.num_prompt_tokens
            self._stop_waiting(request_id)
            if entry.foretold_s is not None:
                self._late(entry.priority).add(now - entry.admitted_at - entry.foretold_s)

    def look(self, num_queued: int, now: float) -> None:
        """Look at so many requests without a place in the engine: the work done since the last look tells how fast it
        leaves, if there was a queue then and is one now.
        """
        work, self._work_done = self._work_done, 0.0
        if self._looked_at is not None and self._queued_before and num_queued > 0 and now > self._looked_at:
            self._rate.served(work, now - self._looked_at)
        self._queued_before, self._looked_at = num_queued > 0, now

    def leave(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Forget a request that has ended or is not wanted any more; unknown ids are ignored."""
        entry = self._admitted.get(request_id)
        if entry is None:
            return
        self._stop_waiting(request_id)
        del self._admitted[request_id]
        if entry.num_output and reason in (FinishReason.STOP, FinishReason.LENGTH):  # a vector has none
            self._mean_output.saw(entry.num_output)

    # -- to look at

    @property
    def num_inside(self) -> int:
        return len(self._admitted)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a first token."""
        return self._num_waiting

    @property
    def drain_per_s(self) -> float:
        """Work per second, 0 while unknown; see drain_rate.py."""
        return self._rate.per_s or 0.0

    def foretold_wait_s(self, priority: int = 0) -> float:
        """Predicted time to the first token of a small request that came now; 0 while unknown."""
        caller = _Caller(priority, None)
        placed_s = self.foretell(0)
        return (self._foretold_s(caller) if placed_s is None else placed_s) or 0.0

    # -- judging

    def _judge(self, caller: _Caller, now: float) -> _Verdict:
        if not self._num_waiting and not self._caps and self.config.max_queued_requests:
            return _LET_IN
        sheddable = self._less_urgent(caller.priority)
        config = self.config
        shed: list[str] = []
        freed_tokens, freed_work = 0, 0.0

        def over() -> str | None:
            num_waiting = self._num_waiting - len(shed)
            if num_waiting >= config.max_queued_requests:
                return "requests"
            tokens = self._waiting_tokens - freed_tokens + caller.num_prompt_tokens
            if config.max_queued_tokens is not None and num_waiting and tokens > config.max_queued_tokens:
                return "tokens"
            return None if self._in_time(caller, freed_work, now) else "objective"

        if (full := self._over_class_cap(caller.priority)) is not None:
            return _Verdict(full)
        while (reason := over()) is not None:
            in_vain = reason == "objective" and self._is_shedding_vain(caller)
            victim = None if in_vain else next(sheddable, None)
            if victim is None:
                return _Verdict(reason)
            request_id, entry = victim
            shed.append(request_id)
            freed_tokens += entry.num_prompt_tokens
            if not self._priority_first:
                freed_work += entry.work
        return _Verdict(None, tuple(shed), self._expected_s(caller, freed_work))

    def _is_shedding_vain(self, caller: _Caller) -> bool:
        """Return whether shedding gains nothing: the less urgent are behind it, or its placement counts them anyway."""
        return self._priority_first or self.foretell(caller.num_prompt_tokens) is not None

    def _over_class_cap(self, priority: int) -> str | None:
        """A cap of class p counts p and all that are less urgent, so it keeps room for those above."""
        for least, cap in self._caps.items():
            if priority >= least and sum(len(w) for p, w in self._waiting.items() if p >= least) >= cap:
                return "class"
        return None

    def _less_urgent(self, priority: int) -> Iterator[tuple[str, _Admitted]]:
        """Return the requests that may be shed for one of this priority, the least urgent and latest first."""
        for each in sorted((p for p in self._waiting if p > priority), reverse=True):
            yield from reversed(self._waiting[each].items())

    def _in_time(self, caller: _Caller, freed_work: float, now: float) -> bool:
        slo_s = caller.ttft_slo_s if caller.ttft_slo_s is not None else self.config.ttft_objective_s
        if slo_s is None:
            return True
        foretold_s = self._expected_s(caller, freed_work)
        if foretold_s is None:
            return self._free_places() or self._num_waiting < max(1, self._max_num_seqs // UNKNOWN_SHARE)
        slack_s = self._late(caller.priority).slack_s
        slack_s = UNKNOWN_SLACK * slo_s if slack_s is None else min(max(0.0, slack_s), MAX_SLACK * slo_s)
        return (now - caller.arrived_at) + foretold_s + slack_s <= AIM * slo_s

    def _free_places(self) -> bool:
        """Return whether a place is free: no request waits, or the last step left none over and there are slots."""
        return not self._num_waiting or (not self._queued_before and len(self._admitted) < self._max_num_seqs)

    def _expected_s(self, caller: _Caller, freed_work: float) -> float | None:
        """Return the expected wait: its placement's prediction, else by the rate, 0 where a place is free."""
        placed_s = self.foretell(caller.num_prompt_tokens)
        return placed_s if placed_s is not None or self._free_places() else self._foretold_s(caller, freed_work)

    def _foretold_s(self, caller: _Caller, freed_work: float = 0.0) -> float | None:
        """Return the time to the first token: the work ahead, and its own prompt. None while the rate is unknown."""
        rate = self._rate.per_s
        if rate is None:
            return None
        ahead = sum(w for p, w in self._waiting_work.items() if p <= caller.priority or not self._priority_first)
        return max(0.0, ahead - freed_work + PROMPT_WEIGHT * caller.num_prompt_tokens) / rate

    def _late(self, priority: int) -> LateBy:
        return self._late_by.setdefault(min(priority, NUM_CLASSES - 1), LateBy())

    # -- book-keeping

    def _turned_away(self, reason: str, work: float, now: float) -> Overloaded:
        self.num_refused[reason] += 1
        retry_after_s = self.retry_after_s(now)
        self._owed_work += work
        text = f"{self._explain(reason)}; come again in {retry_after_s:.0f} s"
        return Overloaded(text, retry_after_s=retry_after_s, reason=reason)

    def _explain(self, reason: str) -> str:
        if reason == "objective":
            return f"{self._num_waiting} requests wait, too many for a first token within the objective"
        if reason == "tokens":
            limit = self.config.max_queued_tokens
            return f"the prompts that wait have {self._waiting_tokens} tokens, the limit is {limit}"
        if reason == "class":
            return f"{self._num_waiting} requests wait, as many as may of this priority"
        return f"{self._num_waiting} requests wait, the limit is {self.config.max_queued_requests}"

    def _forgive(self, rate: float, now: float) -> None:
        """Reduce the work of refused requests at the drain rate, at which they are assumed to come back."""
        self._owed_work = max(0.0, self._owed_work - rate * max(0.0, now - self._owed_at))
        self._owed_at = now

    def _wait(self, request_id: str, entry: _Admitted) -> None:
        self._waiting.setdefault(entry.priority, {})[request_id] = entry
        self._waiting_work[entry.priority] = self._waiting_work.get(entry.priority, 0.0) + entry.work
        self._num_waiting += 1
        self._waiting_tokens += entry.num_prompt_tokens

    def _stop_waiting(self, request_id: str) -> None:
        entry = self._admitted[request_id]
        waiting = self._waiting.get(entry.priority, {})
        if waiting.pop(request_id, None) is None:
            return
        self._waiting_work[entry.priority] -= entry.work
        if not waiting:
            del self._waiting[entry.priority], self._waiting_work[entry.priority]
        self._num_waiting -= 1
        self._waiting_tokens -= entry.num_prompt_tokens


def admission_of(config: AdmissionConfig, scheduler: SchedulerConfig, num_engines: int = 1) -> AdmissionController:
    """The admission controller in front of engines that are configured so."""
    return AdmissionController(
        config,
        max_num_seqs=num_engines * scheduler.max_num_seqs,
        priority_first=scheduler.policy in PRIORITY_FIRST,
        num_engines=num_engines,
    )


class DrainRate:
    """Work per second of the saturated engine, with exponential forgetting; idle time teaches nothing.

    Work is counted in tokens: one for each output token, PROMPT_WEIGHT for each prompt token. A step of decoding serves
    few tokens and a step of prefill many, so a prompt's token is the cheaper one; the right ratio differs by machine,
    and what this one is wrong by shows up in the rate and in the errors, both of which are measured.
    """

    MEMORY_S = 5.0
    MIN_EVIDENCE_S = 0.25
    MIN_STEPS = 8  # prompts are counted when their first token comes, which makes a single step look fast

    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0
        self._num_steps = 0

    @property
    def per_s(self) -> float | None:
        """Work a second; None until there was a queue for long enough."""
        enough = self._num_steps >= self.MIN_STEPS and self._seconds >= self.MIN_EVIDENCE_S
        return self._work / self._seconds if enough and self._work > 0 else None

    def served(self, work: float, seconds: float) -> None:
        """Count so much work in this time, while others waited."""
        self._num_steps += 1
        keep = exp(-seconds / self.MEMORY_S)
        self._work = self._work * keep + work
        self._seconds = self._seconds * keep + seconds


class MeanOutput:
    """Mean length of recent answers."""

    MEMORY = 200  # answers

    def __init__(self) -> None:
        self._mean = 0.0
        self._num_seen = 0

    def saw(self, num_tokens: int) -> None:
        self._num_seen = min(self._num_seen + 1, self.MEMORY)
        self._mean += (num_tokens - self._mean) / self._num_seen

    @property
    def mean(self) -> float:
        return self._mean if self._num_seen else float(UNKNOWN_OUTPUT)

    def expected(self, max_tokens: int) -> float:
        return min(float(max_tokens), self.mean)


class LateBy:
    """How much later than foretold first tokens came: a high quantile of the last few hundred, in seconds.

    As in conformal prediction, that much slack covers whatever the forecast lacks (prefill, policy, a machine that
    slows down), so that all but the given share of those admitted are in time.
    """

    CAPACITY = 256
    MIN_SEEN = 32
    SHARE = 0.998

    def __init__(self) -> None:
        self._by_time: deque[float] = deque()
        self._by_size: list[float] = []

    def add(self, late_s: float) -> None:
        if len(self._by_time) == self.CAPACITY:
            del self._by_size[bisect_left(self._by_size, self._by_time.popleft())]
        self._by_time.append(late_s)
        insort(self._by_size, late_s)

    @property
    def slack_s(self) -> float | None:
        """Slack (s); None until enough was seen."""
        if len(self._by_size) < self.MIN_SEEN:
            return None
        return self._by_size[min(int(self.SHARE * len(self._by_size)), len(self._by_size) - 1)]
