"""Recorded run: a decision log's step durations, ends of requests, and workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from maitred.core.cost_model import StepShape, shape_of
from maitred.core.request import FinishReason, RequestState
from maitred.decisions.log import Arrived, Ended, Step
from maitred.sim.results import GroupResults, Objectives, Results
from maitred.sim.workload import Arrival

ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


class MeasuredStep(NamedTuple):
    """One step as it was measured."""

    shape: StepShape
    step_s: float  # schedule to update
    gap_s: float | None  # from there to the next schedule; None when the engine was idle in between
    at: float = 0.0  # s, when it was scheduled, by the run's own clock


def measured_steps(steps: Iterable[Step]) -> Iterator[MeasuredStep]:
    """Steps without rows are left out."""
    num_here, previous = 0, None
    for step in steps:
        if previous is not None:
            yield _record(previous, step.scheduled_at if num_here > 0 else None)
        num_here += sum(_change(event) for event in step.events)
        num_here -= sum(outcome.finish_reason is not None for outcome in step.outcomes)
        previous = step if step.plan.rows else None
    if previous is not None:
        yield _record(previous, None)


def _record(step: Step, next_at: float | None) -> MeasuredStep:
    gap_s = None if next_at is None else next_at - step.updated_at
    return MeasuredStep(shape_of(step.plan.rows), step.updated_at - step.scheduled_at, gap_s, step.scheduled_at)


def _change(event: object) -> int:
    return isinstance(event, Arrived) - isinstance(event, Ended)


class RecordedRun(NamedTuple):
    """A run, measured, and what was asked of it."""

    results: Results
    arrivals: list[Arrival]  # in order; `at` counts from the first one


def read_run(steps: Iterable[Step], objectives: Objectives | None = None) -> RecordedRun:
    """Results by the log's own times: a token is there when its step's update is."""
    reading = _Reading(objectives)
    for step in steps:
        reading.take_in(step)
    reading.arrivals.sort(key=lambda arrival: arrival.at)
    return RecordedRun(reading.results, reading.arrivals)


class _Reading:
    def __init__(self, objectives: Objectives | None) -> None:
        self.results = Results(objectives)
        self.arrivals: list[Arrival] = []
        self._began_at: float | None = None
        self._here: dict[str, tuple[RequestState, GroupResults]] = {}

    def take_in(self, step: Step) -> None:
        for event in step.events:
            if isinstance(event, Arrived):
                self._arrived(event)
            elif isinstance(event, Ended):
                self._ended_from_outside(event)
        for new in step.plan.new_requests:
            request, _ = self._here[new.request_id]
            request.num_preemptions += request.first_scheduled_at is not None
        for row in step.plan.rows:
            request, _ = self._here[row.request_id]
            if request.first_scheduled_at is None:
                request.first_scheduled_at = step.scheduled_at
        for outcome in step.outcomes:
            self._told(outcome.request_id, outcome.num_tokens, outcome.finish_reason, step.updated_at)
        if step.plan.rows:
            self.results.num_steps += 1
            self.results.num_row_steps += len(step.plan.rows)
            self.results.busy_s += step.updated_at - step.scheduled_at

    def _arrived(self, event: Arrived) -> None:
        request = RequestState(event.spec)
        if self._began_at is None:
            self._began_at = request.arrived_at
        group = self.results.tenant(request.tenant, request.weight)
        self.results.arrived(group, request.arrived_at)
        self._here[request.request_id] = (request, group)

    def _ended_from_outside(self, event: Ended) -> None:
        _, group = self._here.pop(event.request_id)
        self.results.failed(group, event.now, event.reason.value)

    def _told(self, request_id: str, num_tokens: int, reason: FinishReason | None, now: float) -> None:
        request, group = self._here[request_id]
        if num_tokens:
            if request.first_token_at is None:
                request.first_token_at = now
            elif request.last_token_at is not None:
                group.itl_s.add(now - request.last_token_at)
            request.last_token_at = now
            request.output_token_ids += [0] * num_tokens
        if reason is None:
            return
        del self._here[request_id]
        if reason in ENDED_BY_ITSELF:
            request.finished_at = now
            self.results.finished(group, request)
            self.arrivals.append(self._arrival(request))
        else:
            self.results.failed(group, now, reason.value)

    def _arrival(self, request: RequestState) -> Arrival:
        assert self._began_at is not None
        return Arrival(
            at=request.arrived_at - self._began_at,
            request_id=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            max_tokens=request.max_tokens,
            tenant=request.tenant,
            priority=request.priority,
            weight=request.weight,
            ttft_slo_s=request.ttft_slo_s,
            own=request.request_id.encode(),
        )
