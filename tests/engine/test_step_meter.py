"""What the meter makes of steps."""

from __future__ import annotations

import pytest

from maitred.engine.memory import GIB, swap_bytes
from maitred.engine.step_meter import StepMeter
from maitred.errors import OutOfMemory
from maitred.step import BlockCopy, ScheduledRow, SchedulerOutput


def plan(*num_tokens: int, swaps: bool = False) -> SchedulerOutput:
    rows = tuple(ScheduledRow(f"r{i}", 0, count, True) for i, count in enumerate(num_tokens))
    return SchedulerOutput(step=0, rows=rows, swap_outs=(BlockCopy(0, 0),) if swaps else ())


def make_meter() -> StepMeter:
    return StepMeter(bytes_per_block=10, out_bytes_per_s=100.0, in_bytes_per_s=200.0)


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
