"""What a scheduler says about a step: why the first in the queue waits, and who was preempted for whom."""

from __future__ import annotations

from dataclasses import replace

from maitred.scheduler.notes import Blocked, Lack, Preemption, PreemptionCause
from tests.fakes import make_request, make_scheduler
from tests.scheduler.running import Run


def test_nothing_is_said_while_nobody_waits():
    run = Run(make_scheduler(), make_request("a"))
    run.step()
    assert run.scheduler.blocked is None


def test_slots_lack_when_as_many_run_as_may():
    run = Run(make_scheduler(max_num_seqs=1), make_request("a"), make_request("b", arrived_at=1.0))
    run.step()
    assert run.scheduler.blocked == Blocked(Lack.SLOTS, "b")


def test_blocks_lack_by_a_number():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    run = Run(scheduler, make_request("a", prompt=10), make_request("b", prompt=9, arrived_at=1.0))
    run.step()  # a has 3 blocks of 4, b needs 3
    assert scheduler.blocked == Blocked(Lack.BLOCKS, "b", num_blocks_short=2)


def test_the_budget_lacks_while_a_long_prompt_takes_it():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    run = Run(scheduler, make_request("a", prompt=20), make_request("b", arrived_at=1.0))
    run.step()
    assert scheduler.blocked == Blocked(Lack.BUDGET, "b")


def test_a_preemption_for_blocks_names_whom_it_was_for_and_stops_admission():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    run = Run(
        scheduler,
        make_request("a", prompt=8, max_tokens=8),
        make_request("b", prompt=8, max_tokens=8, arrived_at=1.0),
    )
    run.steps(2)
    assert scheduler.preemptions == (Preemption("b", PreemptionCause.BLOCKS, by="a"),)
    assert scheduler.blocked == Blocked(Lack.RUNNING_LACK_BLOCKS, "b")
    run.step()
    assert scheduler.preemptions == ()


def test_a_more_urgent_request_is_named_as_the_cause():
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    run = Run(scheduler, make_request("slow", priority=2, max_tokens=9))
    run.step()
    run.add(make_request("urgent", priority=0, arrived_at=1.0))
    run.step()
    assert scheduler.preemptions == (Preemption("slow", PreemptionCause.OUTRANKED, by="urgent"),)


def test_lowered_limits_are_a_cause_too():
    scheduler = make_scheduler(max_num_seqs=2)
    run = Run(scheduler, make_request("a", max_tokens=9), make_request("b", max_tokens=9, arrived_at=1.0))
    run.step()
    scheduler.configure(replace(scheduler.config, max_num_seqs=1))
    run.step()
    assert scheduler.preemptions == (Preemption("b", PreemptionCause.LIMITS),)
