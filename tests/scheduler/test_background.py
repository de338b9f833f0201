"""The class background: behind all others, in their steps only as far as these grow a little, and put out at once."""

from __future__ import annotations

from maitred.core.cost_model import CostModel, Knot
from maitred.core.step import SchedulerOutput
from maitred.scheduler.background import ALONE_S
from maitred.scheduler.notes import Lack, PreemptionCause
from maitred.scheduler.queue_view import queue_view
from maitred.scheduler.speculation import Speculation
from tests.fakes import make_request, make_scheduler
from tests.scheduler.running import Run, tokens_by_request

PER_TOKEN = CostModel(fixed_s=0.010, decode_token_s=0.0005, prefill_token_s=0.0005)


def names(plan: SchedulerOutput) -> set[str]:
    return {row.request_id for row in plan.rows}


def test_they_start_after_all_others_under_every_policy_and_in_its_order_among_themselves() -> None:
    for policy, first in (("fcfs", "late"), ("priority", "urgent"), ("sjf", "short")):
        run = Run(make_scheduler(max_num_seqs=1, policy=policy, predictor="max_tokens"))
        night = {"background": True, "arrived_at": -0.01}
        run.add(
            make_request("late", max_tokens=9, priority=5, **night),
            make_request("short", max_tokens=2, priority=5, background=True),
            make_request("urgent", max_tokens=9, priority=0, background=True),
            make_request("last", prompt=32, max_tokens=5, arrived_at=5.0, priority=9),
        )
        waiting = [request.request_id for request in run.scheduler.waiting]
        assert waiting[:2] == ["last", first]
        started = [new.request_id for plan in run.to_end() for new in plan.new_requests]
        assert started == waiting
        assert run.scheduler.stats.num_preemptions == 0


def test_nothing_joins_a_step_of_others_before_steps_of_its_size_are_measured() -> None:
    run = Run(make_scheduler(), make_request("chat", max_tokens=40), make_request("night", background=True))
    assert [names(plan) for plan in run.steps(3)] == [{"chat"}] * 3
    assert run.scheduler.blocked is not None
    assert run.scheduler.blocked.lack is Lack.SLACK
    run.scheduler.set_step_costs(CostModel(steps=(Knot(8, 0.02), Knot(64, 0.03))))
    assert names(run.step()) == {"chat"}, "what one token takes was not measured"
    run.scheduler.set_step_costs(CostModel(steps=(Knot(1, 0.02), Knot(64, 0.02))))
    assert names(run.step()) == {"chat", "night"}


def test_a_measurement_that_is_too_long_lets_nothing_join_behind_it() -> None:
    run = Run(make_scheduler(), make_request("chat", max_tokens=40), make_request("night", background=True))
    run.scheduler.set_step_costs(CostModel(steps=(Knot(1, 0.010), Knot(4, 0.010), Knot(17, 0.026))))
    run.step()
    assert names(run.step()) == {"chat"}, "no row more for nothing where 16 take 16 ms"


def test_a_prompt_joins_with_as_many_tokens_as_the_slack_has_room_for_and_decoding_goes_before_it() -> None:
    run = Run(make_scheduler(batch_slack=0.25), make_request("chat", max_tokens=60))
    run.scheduler.set_step_costs(PER_TOKEN)
    run.step()
    run.add(make_request("one", prompt=12, max_tokens=30, background=True))
    run.add(make_request("two", prompt=30, max_tokens=30, background=True))
    assert tokens_by_request(run.step()) == {"chat": 1, "one": 5}, "10.5 ms may become 13.125"
    run.steps(2)
    assert tokens_by_request(run.step()) == {"chat": 1, "one": 1, "two": 4}
    assert run.scheduler.stats.num_background_tokens == 12 + 3 + 1 + 4
    view = queue_view(run.scheduler, run.now)
    assert view.num_waiting == 0
    run.add(make_request("three", prompt=30, background=True))
    run.step()
    (waiting,) = queue_view(run.scheduler, run.now).waiting
    assert waiting.background
    assert waiting.reason == "first in line: others are in the step, which it would lengthen by more than 25%"


def test_a_step_of_its_own_is_full_before_steps_are_measured_and_short_from_then_on() -> None:
    run = Run(make_scheduler(num_blocks=400, max_num_batched_tokens=200))
    run.add(*(make_request(prompt=90, max_tokens=8, background=True) for _ in range(4)))
    assert run.step().num_tokens == 200
    run.scheduler.set_step_costs(PER_TOKEN)
    assert run.step().num_tokens == round((ALONE_S - 0.010) / 0.0005)
    run.scheduler.set_step_costs(CostModel(fixed_s=0.1, decode_token_s=0.05, prefill_token_s=0.05))
    assert run.step().num_tokens == 4, "a machine on which one token takes 150 ms"
    run.to_end()


def test_slots_and_blocks_are_given_up_at_once_and_the_prefix_cache_keeps_what_was_computed() -> None:
    run = Run(make_scheduler(num_blocks=24, max_num_seqs=2))
    run.add(*(make_request(f"night {i}", prompt=12, max_tokens=16, background=True) for i in range(2)))
    run.steps(3)
    run.add(make_request("chat", prompt=20, max_tokens=4))
    plan = run.step()
    assert names(plan) == {"chat"}
    (preemption,) = run.scheduler.preemptions
    assert (preemption.cause, preemption.by) == (PreemptionCause.OUTRANKED, "chat")
    assert preemption.request_id == "night 1"
    run.add(make_request("large", prompt=36, max_tokens=4))
    run.step()
    assert {r.request_id for r in run.scheduler.running} == {"chat", "large"}
    plans = run.to_end()
    again = [row for plan in plans for row in plan.rows if row.request_id == "night 0"]
    assert again[0].start >= 12, "its full blocks are still in the cache"
    assert run.scheduler.stats.num_background_running == run.scheduler.stats.num_background_waiting == 0


def test_a_running_request_takes_its_next_block_from_background_work_whatever_is_younger() -> None:
    run = Run(make_scheduler(num_blocks=8, max_num_seqs=4))
    run.add(make_request("night", prompt=12, max_tokens=8, arrived_at=-5.0, background=True))
    run.step()
    run.add(make_request("old", prompt=8, max_tokens=9), make_request("new", prompt=7, max_tokens=9, arrived_at=1.0))
    run.steps(4)
    assert [p.request_id for p in run.scheduler.preemptions] in ([], ["night"])
    assert {r.request_id for r in run.scheduler.running} == {"old", "new"}
    assert run.scheduler.stats.num_preemptions == 1
    run.to_end()


def test_background_service_does_not_push_a_tenants_other_requests_back() -> None:
    run = Run(make_scheduler(policy="vtc", max_num_seqs=1))
    run.add(make_request(prompt=40, max_tokens=12, tenant="a", background=True))
    run.steps(8)
    run.add(make_request("b", tenant="b", arrived_at=1.0), make_request("a", tenant="a"))
    assert [request.request_id for request in run.scheduler.waiting] == ["b", "a"]
    terms = [run.scheduler.terms(name)["counter_tokens"] for name in ("a", "b")]
    assert terms[0] == terms[1], "the night's tokens count for the night alone"
    run.scheduler.set_policy("fcfs")
    assert next(iter(run.scheduler.waiting)).request_id == "a"
    run.scheduler.check_invariants()
    run.to_end()


def test_what_a_batchs_drafts_showed_says_nothing_of_those_of_others() -> None:
    run = Run(make_scheduler(speculation=Speculation(4)), make_request("night", max_tokens=60, background=True))
    run.scheduler.set_step_costs(CostModel(fixed_s=0.010, decode_token_s=0.004, prefill_token_s=0.004))
    assert [plan.rows[0].num_drafts for plan in run.steps(8)][-1] == 4, "all of them were right"
    run.add(make_request("chat", max_tokens=60))
    chats = [row for plan in run.steps(2) for row in plan.rows if row.request_id == "chat"]
    assert [row.num_drafts for row in chats] == [0, 1], "its first drafts, which may be wrong every second time"
    run.to_end()


def test_tensor_batches_have_the_machine_while_the_language_model_does_background_work_alone() -> None:
    run = Run(make_scheduler(), make_request("night", background=True))
    run.step()
    assert not run.scheduler.lanes._ready._llm_has_rows()
    run.add(make_request("chat"))
    assert run.scheduler.lanes._ready._llm_has_rows()
    assert run.scheduler.num_queued == 1
    run.to_end()
