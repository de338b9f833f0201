"""What the meter makes of steps."""

from __future__ import annotations

import pytest

from maitred.core.clock import ManualClock
from maitred.core.cost_model import CostModel, Knot, between
from maitred.core.errors import OutOfMemory
from maitred.core.step import BlockCopy, ModelOutput, SampledRow, ScheduledRow, SchedulerOutput
from maitred.engine.memory import GIB, swap_bytes
from maitred.engine.step_meter import StepMeter, SwapMeter
from maitred.scheduler.engine_core import EngineCore
from tests.fakes import FakeExecutor, make_scheduler, make_spec


def plan(*num_tokens: int, swaps: bool = False) -> SchedulerOutput:
    rows = tuple(ScheduledRow(f"r{i}", 0, count, True) for i, count in enumerate(num_tokens))
    return SchedulerOutput(step=0, rows=rows, swap_outs=(BlockCopy(0, 0),) if swaps else ())


def make_meter() -> SwapMeter:
    return SwapMeter(bytes_per_block=10, out_bytes_per_s=100.0, in_bytes_per_s=200.0)


def test_prompt_tokens_share_what_a_step_takes_beyond_one_without_prompts():
    meter = make_meter()
    assert meter.swap_costs(plan(1, 1), 0.010) is None
    costs = meter.swap_costs(plan(1, 100), 0.110)
    assert costs is not None
    assert costs.prefill_s_per_token == pytest.approx(0.001)
    assert costs[:3] == (10, 100.0, 200.0)


def test_only_news_is_told():
    meter = make_meter()
    assert meter.swap_costs(plan(100), 0.1) is not None
    assert meter.swap_costs(plan(100), 0.11) is None
    told = [meter.swap_costs(plan(100), 0.5) for _ in range(8)]
    assert sum(costs is not None for costs in told) in (2, 3, 4)


def test_short_chunks_and_steps_that_swap_say_nothing():
    meter = make_meter()
    assert meter.swap_costs(plan(), 0.1) is None
    assert meter.swap_costs(plan(5), 0.1) is None
    assert meter.swap_costs(plan(100, swaps=True), 0.1) is None


def test_drafts_are_no_prompt():
    drafted = SchedulerOutput(step=0, rows=(ScheduledRow("a", 9, 65, True, num_drafts=64),))
    assert make_meter().swap_costs(drafted, 0.1) is None


def test_host_memory_is_a_share_of_what_is_free_with_a_gpu_and_none_without():
    free = {"available_host_bytes": 100 * GIB, "host_bytes_planned": 0}
    assert swap_bytes(None, on_gpu=True, **free) == 4 * GIB
    assert swap_bytes(None, on_gpu=False, **free) == 0
    assert swap_bytes(None, on_gpu=True, available_host_bytes=10 * GIB, host_bytes_planned=GIB) == 2 * GIB
    assert swap_bytes(7, on_gpu=False, **free) == 7
    with pytest.raises(OutOfMemory, match=r"asks for 95\.00 GiB of host memory, and 90\.00 GiB are left"):
        swap_bytes(95 * GIB, on_gpu=True, **free)


def decode(count: int, *, context: int = 100, drafts: int = 0) -> SchedulerOutput:
    rows = tuple(ScheduledRow(f"r{i}", context, 1 + drafts, True, num_drafts=drafts) for i in range(count))
    return SchedulerOutput(step=0, rows=rows)


def output(plan: SchedulerOutput, made: int = 0, draft_s: float = 0.0) -> ModelOutput:
    return ModelOutput(tuple(SampledRow(row.request_id, (0,), num_drafts=made) for row in plan.rows), draft_s)


def learned(meter: StepMeter, *steps: tuple[SchedulerOutput, ModelOutput, float, float]) -> CostModel:
    told = [costs for step in steps if (costs := meter.step_costs(*step)) is not None]
    return told[-1]


def step(count: int, seconds: float, *, context: int = 100, drafts: int = 0, draft_s: float = 0.0, host_s: float = 0.0):
    plan = decode(count, context=context, drafts=drafts)
    return plan, output(plan, drafts, draft_s), seconds + draft_s, host_s


def test_steps_are_told_by_their_number_of_tokens():
    meter = StepMeter()
    costs = learned(meter, *[step(1, 0.010)] * 4, *[step(8, 0.012)] * 4, *[step(2, 0.011, drafts=7)] * 6)
    assert [knot.size for knot in costs.steps] == [1, 8, 16]
    assert [knot.seconds for knot in costs.steps] == pytest.approx(
        [0.010, 0.0118, 0.0118]
    )  # two that fell are pooled, 4 to 1


def test_a_step_that_stuttered_is_not_told():
    meter = StepMeter()
    steps = [step(4, 0.010 if i % 5 else 0.200) for i in range(60)]
    assert between(learned(meter, *steps).steps, 4) == pytest.approx(0.010, rel=0.1)


def test_context_costs_what_longer_ones_showed():
    meter = StepMeter()
    steps = [step(4, 0.010 + 4 * context * 1e-6, context=context) for context in range(100, 1100, 5)]
    assert learned(meter, *steps).context_token_s == pytest.approx(1e-6, rel=0.05)


def test_drafting_is_told_apart_from_the_step_and_not_while_a_proposer_catches_up():
    meter = StepMeter()
    costs = learned(meter, *[step(3, 0.010, drafts=4, draft_s=0.5)], *[step(3, 0.010, drafts=4, draft_s=0.004)] * 8)
    assert costs.drafts == (Knot(3, pytest.approx(0.001)),)
    assert between(costs.steps, 15) == pytest.approx(0.010)


def test_drafts_that_were_asked_for_and_not_made_take_no_tokens_but_time():
    meter = StepMeter()
    plan = decode(2, drafts=4)
    costs = learned(meter, *[(plan, output(plan, 0, 0.004), 0.014, 0.0)] * 8)
    assert costs.steps == (Knot(2, pytest.approx(0.010)),)
    assert costs.drafts == (Knot(2, pytest.approx(0.001)),)


def test_what_drafts_cost_the_host_is_theirs_and_not_the_steps():
    meter = StepMeter()
    costs = learned(
        meter, *[step(2, 0.010, host_s=0.001)] * 4, *[step(2, 0.010, drafts=4, draft_s=0.004, host_s=0.003)] * 6
    )
    assert costs.drafts == (Knot(2, pytest.approx(0.0015)),)
    assert between(costs.steps, 10) == pytest.approx(0.011)


def test_catching_up_is_told_by_the_token():
    meter = StepMeter()
    drafting = [step(2, 0.010, drafts=4, draft_s=0.004)] * 6
    forgotten = SchedulerOutput(step=0, rows=(), forgotten_request_ids=("r0", "r1")), ModelOutput(()), 0.001, 0.0
    costs = learned(meter, *drafting, forgotten, step(2, 0.010, drafts=4, draft_s=0.004 + 200 * 1e-5))
    assert costs.catch_up_token_s == pytest.approx(1e-5)


def test_steps_are_measured_from_the_first_background_request_on_and_soon_some_join() -> None:
    clock, meter = ManualClock(), StepMeter(follows_steps=False)

    class Timed(FakeExecutor):
        """A token more takes a hundredth of a step."""

        def execute(self, plan: SchedulerOutput) -> ModelOutput:
            clock.advance(0.01 + 0.0001 * plan.num_tokens)
            return super().execute(plan)

    core = EngineCore(make_scheduler(), Timed(), clock, meter)
    core.add(make_spec("chat", max_tokens=90, prompt=40))
    for _ in range(9):
        core.step()
    assert meter.costs is None
    core.add(make_spec("night", max_tokens=4, prompt=12, background=True))
    for step in range(60):
        if step == 5:
            core.add(make_spec("prompt", max_tokens=1, prompt=40))  # tells what more tokens take
        core.step()
    assert core.scheduler.request("chat") is not None
    assert core.scheduler.request("night") is None, "it joined, and has ended"
    assert meter.costs is not None
