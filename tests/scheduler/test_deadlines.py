"""Requests that run out of time are ended between two steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.clock import ManualClock
from maitred.core.request import FinishReason, RequestState, RequestStatus
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.scheduler.deadlines import MIN_DEAD_ENTRIES, Deadlines
from maitred.scheduler.engine_core import EngineCore
from tests.fakes import FakeExecutor, make_request, make_samples, make_scheduler, make_spec
from tests.scheduler.running import Run


def reasons(run: Run) -> dict[str, FinishReason]:
    return {p.request_id: p.finish_reason for p in run.progress if p.finish_reason is not None}


def test_a_request_that_is_in_no_step_in_time_is_given_up():
    scheduler = make_scheduler(max_num_seqs=1)
    run = Run(scheduler, make_request("first", max_tokens=9), make_request("late", start_by=2.0))
    run.steps(2)
    (ended,) = scheduler.expire(run.now)
    assert (ended.request_id, ended.finish_reason) == ("late", FinishReason.QUEUE_TIMEOUT)
    assert ended.timing is not None
    assert ended.timing.queue_s == 2.0
    assert scheduler.stats.num_finished[FinishReason.QUEUE_TIMEOUT] == 1
    scheduler.check_invariants()


def test_a_started_request_is_not_late_to_start_even_when_it_was_preempted():
    run = Run(make_scheduler(num_blocks=64), make_request("r", start_by=0.5, max_tokens=3))
    run.step()
    assert run.scheduler.expire(9.0) == []


def test_a_running_request_ends_at_its_time_and_frees_its_blocks():
    run = Run(make_scheduler(), make_request("r", finish_by=3.0, max_tokens=50))
    run.steps(3)
    (ended,) = run.scheduler.expire(run.now)
    assert ended.finish_reason is FinishReason.TIMEOUT
    assert not run.scheduler.has_work
    assert run.scheduler.stats.num_blocks_used == 0


def test_all_samples_of_a_prompt_are_late_together():
    blocker = make_request("blocker", max_tokens=30)
    run = Run(make_scheduler(max_num_seqs=1), blocker, *make_samples("p", 3, start_by=1.0))
    run.step()
    assert [p.request_id for p in run.scheduler.expire(run.now)] == ["p-0", "p-1", "p-2"]


def test_samples_whose_leader_has_begun_are_not_late():
    samples = make_samples("p", 3, start_by=1.0, prompt=100, max_tokens=2)
    run = Run(make_scheduler(max_num_batched_tokens=16), *samples)
    run.steps(3)
    assert run.scheduler.awaits_leader(samples[1])
    assert run.scheduler.expire(run.now) == []


def test_ended_requests_are_not_kept_until_their_deadline():
    deadlines = Deadlines()
    for _ in range(1000):
        request = make_request(finish_by=1e9)
        deadlines.add(request)
        request.status = RequestStatus.FINISHED
        deadlines.ended(request)
    assert len(deadlines) <= 2 * MIN_DEAD_ENTRIES + 2


class SlowExecutor(FakeExecutor):
    """A second for each step."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self._clock.advance(1.0)
        return super().execute(plan)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=12))
def test_a_request_ends_late_only_if_its_time_was_up_and_within_a_step(drawn: list[tuple[int, int, int]]):
    clock = ManualClock()
    core = EngineCore(make_scheduler(max_num_seqs=2, num_blocks=32), SlowExecutor(clock), clock)
    requests: list[RequestState] = []
    for start_s, finish_s, max_tokens in drawn:
        spec = make_spec(
            max_tokens=max_tokens, arrived_at=clock.now(), start_by=clock.now() + start_s, finish_by=finish_s + 1.0
        )
        requests.append(core.add(spec))
        core.step()
    while core.has_work:
        core.step()
    for request in requests:
        assert request.finished
        late = request.finish_reason in (FinishReason.QUEUE_TIMEOUT, FinishReason.TIMEOUT)
        assert late == (request.num_output_tokens < request.max_tokens)
        assert request.finish_by is not None
        assert request.finished_at is not None
        assert request.finished_at <= max(request.arrived_at, request.finish_by) + 1.0, "a step at most"
