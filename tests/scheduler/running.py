"""Running a scheduler in tests: a step at a time, or to the end, with the contents of the cache checked."""

from __future__ import annotations

from maitred.core.request import RequestState
from maitred.core.step import RequestProgress, SchedulerOutput
from maitred.scheduler.scheduler import Scheduler
from tests.fakes import FakeExecutor
from tests.scheduler.checking import CheckingExecutor


class Run:
    """A scheduler with an executor; time stands at the number of steps so far, in seconds."""

    def __init__(self, scheduler: Scheduler, *requests: RequestState, executor: FakeExecutor | None = None) -> None:
        self.scheduler = scheduler
        self.executor = executor or CheckingExecutor(scheduler._kv.block_size)
        self.progress: list[RequestProgress] = []
        self.now = 0.0
        self.add(*requests)

    def add(self, *requests: RequestState) -> None:
        for request in requests:
            self.scheduler.add(request, self.now)
            self.scheduler.check_invariants()

    def step(self) -> SchedulerOutput:
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_invariants()
        output = self.executor.execute(plan)
        self.now += 1.0
        self.progress += self.scheduler.update(plan, output, self.now)
        self.scheduler.check_invariants()
        return plan

    def steps(self, count: int) -> list[SchedulerOutput]:
        return [self.step() for _ in range(count)]

    def to_end(self, limit: int = 1000) -> list[SchedulerOutput]:
        plans = []
        while self.scheduler.has_work:
            assert len(plans) < limit, "it does not end"
            plans.append(self.step())
        return plans


def tokens_by_request(plan: SchedulerOutput) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in plan.rows}
