"""The door of a running engine: refusals come at once, whatever the step under way does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from maitred.clock import WallClock
from maitred.config import AdmissionConfig, SchedulerConfig
from maitred.engine.client import EngineClient
from maitred.engine.core import EngineCore
from maitred.errors import Overloaded
from maitred.gate.admission import AdmissionController
from maitred.request import FinishReason, RequestSpec
from maitred.step import ModelOutput, RequestProgress, SchedulerOutput
from tests.engine.worlds import client_of
from tests.fakes import FakeExecutor, make_scheduler, make_spec
from tests.waiting import HANGS_S, until_async


class HeldExecutor(FakeExecutor):
    """Stays in its step until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let_go = threading.Event(), threading.Event()

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self.entered.set()
        assert self.let_go.wait(HANGS_S)
        return super().execute(plan)


def held_engine(**config: object) -> tuple[EngineClient, HeldExecutor, AdmissionController]:
    """One slot, and a first request in a step that does not end."""
    executor = HeldExecutor()
    admission = AdmissionController(AdmissionConfig(**config), max_num_seqs=1)  # type: ignore[arg-type]
    core = EngineCore(make_scheduler(max_num_seqs=1), executor, WallClock())
    return client_of(core, admission=admission), executor, admission


async def all_of(engine: EngineClient, request: RequestSpec) -> list[RequestProgress]:
    return [progress async for progress in engine.submit(request)]


async def begin(engine: EngineClient, *requests: RequestSpec) -> list[asyncio.Task[list[RequestProgress]]]:
    """The requests, submitted in this order."""
    tasks = [asyncio.create_task(all_of(engine, request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def test_a_refusal_does_not_wait_for_the_step_under_way():
    engine, executor, admission = held_engine(max_queued_requests=2)
    tasks = await begin(engine, make_spec(), make_spec())
    await asyncio.to_thread(executor.entered.wait, HANGS_S)
    for _ in range(20):
        with pytest.raises(Overloaded) as refused:
            await all_of(engine, make_spec())
    assert refused.value.retry_after_s >= 1.0
    assert admission.num_refused["requests"] == 20
    executor.let_go.set()
    assert [len(done) for done in await asyncio.gather(*tasks)] == [4, 4], "those let in are served"
    assert admission.num_inside == 0
    await engine.close()


async def test_a_less_urgent_one_leaves_the_queue_for_a_more_urgent_one():
    engine, executor, admission = held_engine(max_queued_requests=2)
    running, low = await begin(engine, make_spec(), make_spec(priority=3))
    await asyncio.to_thread(executor.entered.wait, HANGS_S)
    (urgent,) = await begin(engine, make_spec(priority=0))
    executor.let_go.set()
    assert [p.finish_reason for p in await low] == [FinishReason.SHED]
    assert (await urgent)[-1].finish_reason is FinishReason.LENGTH
    assert (await running)[-1].finish_reason is FinishReason.LENGTH
    assert admission.num_inside == 0
    await engine.close()


async def test_one_that_is_in_a_step_is_not_shed():
    engine, executor, _ = held_engine(max_queued_requests=1)
    (running,) = await begin(engine, make_spec(priority=3))
    await asyncio.to_thread(executor.entered.wait, HANGS_S)
    (urgent,) = await begin(engine, make_spec(priority=0))  # the door does not know yet that the other one runs
    executor.let_go.set()
    assert (await running)[-1].finish_reason is FinishReason.LENGTH
    assert (await urgent)[-1].finish_reason is FinishReason.LENGTH
    await engine.close()


async def test_an_abort_makes_room_at_the_door():
    engine, executor, admission = held_engine(max_queued_requests=1)
    stream = engine.submit(make_spec())
    executor.let_go.set()
    await stream.aclose()
    await until_async(lambda: admission.num_inside == 0)
    await engine.close()


async def test_a_queued_request_ends_when_its_time_is_up():
    engine, executor, _ = held_engine()
    now = WallClock().now()
    running, late = await begin(engine, make_spec(max_tokens=30), make_spec(start_by=now + 0.01))
    await asyncio.to_thread(executor.entered.wait, HANGS_S)
    await asyncio.sleep(0.02)
    executor.let_go.set()
    assert [p.finish_reason for p in await late] == [FinishReason.QUEUE_TIMEOUT]
    await running
    await engine.close()


async def test_the_door_learns_of_another_number_of_slots():
    engine, executor, admission = held_engine(max_queued_requests=1)
    executor.let_go.set()
    await engine.configure(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, policy="priority"))
    assert (admission._max_num_seqs, admission._priority_first) == (3, True)
    await engine.close()
