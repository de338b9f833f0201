"""The gate in front of a running engine: refusals come at once, whatever the step under way does."""

from __future__ import annotations

import asyncio
import threading

from maitred.config import AdmissionConfig, SchedulerConfig
from maitred.core.clock import WallClock
from maitred.core.request import FinishReason, RequestSpec
from maitred.core.step import ModelOutput, RequestProgress, SchedulerOutput
from maitred.engine.client import EngineClient
from maitred.gate.admission import AdmissionController, admission_of
from maitred.gate.gate import Ask, Gate
from maitred.scheduler.engine_core import EngineCore
from maitred.tenancy.caller import anybody
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


class GatedEngine:
    """One slot behind a gate, and a first request in a step that does not end."""

    def __init__(self, **config: object) -> None:
        self.executor = HeldExecutor()
        self.admission = AdmissionController(AdmissionConfig(**config), max_num_seqs=1)  # type: ignore[arg-type]
        self.gate = Gate(self.admission)
        core = EngineCore(make_scheduler(max_num_seqs=1), self.executor, WallClock())
        self.client: EngineClient = client_of(core)
        self.client.on_progress = self.gate.progressed

    async def all_of(self, spec: RequestSpec) -> list[RequestProgress]:
        now = WallClock().now()
        lease = self.gate.enter(anybody(), Ask(priority=spec.terms.priority), now)
        admitted = self.gate.admit(lease, [spec], now)
        for request_id in admitted.shed:
            self.client.abort(request_id, FinishReason.SHED)
        try:
            return [progress async for progress in self.client.submit(admitted.specs[0])[0]]
        finally:
            lease.end(0)

    async def begin(self, *specs: RequestSpec) -> list[asyncio.Task[list[RequestProgress]]]:
        """The requests, submitted in this order."""
        tasks = [asyncio.create_task(self.all_of(spec)) for spec in specs]
        await asyncio.sleep(0)
        return tasks

    async def in_a_step(self) -> None:
        await asyncio.to_thread(self.executor.entered.wait, HANGS_S)


async def test_one_that_is_in_a_step_is_not_shed():
    engine = GatedEngine(max_queued_requests=1)
    (running,) = await engine.begin(make_spec(priority=3))
    await engine.in_a_step()
    (urgent,) = await engine.begin(make_spec(priority=0))  # the gate does not know yet that the other one runs
    engine.executor.let_go.set()
    assert (await running)[-1].finish_reason is FinishReason.LENGTH
    assert (await urgent)[-1].finish_reason is FinishReason.LENGTH
    await engine.client.close()


async def test_an_abort_makes_room_before_the_engine_knows_of_it():
    engine = GatedEngine(max_queued_requests=1)
    (gone,) = await engine.begin(make_spec())
    await engine.in_a_step()
    gone.cancel()
    await until_async(gone.done)
    (next_one,) = await engine.begin(make_spec())
    engine.executor.let_go.set()
    assert (await next_one)[-1].finish_reason is FinishReason.LENGTH
    await engine.client.close()


def test_the_gate_counts_the_slots_of_all_engines_and_learns_of_another_number():
    gate = Gate(AdmissionController(AdmissionConfig(), max_num_seqs=1))
    gate.reconfigure(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, policy="priority"))
    assert gate.admission is not None
    assert (gate.admission._max_num_seqs, gate.admission._priority_first) == (3, True)
    gate = Gate(admission_of(AdmissionConfig(), SchedulerConfig(max_num_seqs=2), 3))
    assert gate.admission is not None
    assert gate.admission._max_num_seqs == 6
    gate.reconfigure(SchedulerConfig(max_num_seqs=4))
    assert gate.admission._max_num_seqs == 12
