from __future__ import annotations

import pytest

from maitred.config import POLICY_NAMES, SchedulerConfig
from maitred.core.errors import ConfigError, InvalidRequest, PromptTooLong
from maitred.core.request import FinishReason, RequestStatus, SamplingParams
from maitred.core.step import ModelOutput
from tests.fakes import FakeExecutor, make_request, make_scheduler, token_at
from tests.scheduler.running import Run, tokens_by_request


def test_a_prompt_is_computed_in_chunks_and_its_last_chunk_samples():
    run = Run(make_scheduler(max_num_batched_tokens=8), make_request("a", prompt=20, max_tokens=2))
    rows = [plan.rows[0] for plan in run.to_end()]
    assert [(r.start, r.num_tokens, r.samples) for r in rows] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
        (20, 1, True),
    ]


def test_decodes_and_prompt_chunks_share_a_step_and_decodes_come_first():
    run = Run(make_scheduler(max_num_batched_tokens=8), make_request("a", prompt=4, max_tokens=9))
    run.step()
    run.add(make_request("b", prompt=20))
    plan = run.step()
    assert tokens_by_request(plan) == {"a": 1, "b": 7}
    assert [row.request_id for row in plan.rows] == ["a", "b"]


def test_the_budget_left_by_one_prompt_goes_to_the_next():
    requests = [make_request(name, prompt=6, arrived_at=i) for i, name in enumerate("abc")]
    run = Run(make_scheduler(max_num_batched_tokens=16), *requests)
    assert [tokens_by_request(plan) for plan in run.steps(2)] == [
        {"a": 6, "b": 6, "c": 4},
        {"a": 1, "b": 1, "c": 2},
    ]


def test_no_more_requests_run_than_there_are_slots():
    run = Run(make_scheduler(max_num_seqs=2), *(make_request() for _ in range(5)))
    assert max(len(plan.rows) for plan in run.to_end()) == 2


def test_tokens_are_those_the_executor_gave_and_the_last_progress_tells_why_it_ended():
    request = make_request("a", prompt=5, max_tokens=3)
    run = Run(make_scheduler(), request)
    run.to_end()
    assert [p.new_token_ids for p in run.progress] == [(token_at("a", i),) for i in (5, 6, 7)]
    assert [p.finish_reason for p in run.progress] == [None, None, FinishReason.LENGTH]
    assert request.status is RequestStatus.FINISHED


def test_time_is_split_into_queue_prefill_and_decode():
    first, second = make_request(max_tokens=2), make_request(prompt=8, max_tokens=3)
    run = Run(make_scheduler(max_num_seqs=1, max_num_batched_tokens=4), first, second)
    run.to_end()
    timing = run.progress[-1].timing
    assert timing is not None
    assert (timing.queue_s, timing.prefill_s, timing.decode_s) == (3.0, 2.0, 2.0)
    assert run.progress[0].timing is None


def test_an_end_of_sequence_token_ends_a_request_unless_ignored_or_too_early():
    eos = token_at("a", 9)  # the second token
    plain = make_request("a", max_tokens=5, eos_token_ids=(eos,))
    Run(make_scheduler(), plain).to_end()
    assert (plain.num_output_tokens, plain.finish_reason, plain.stop_reason) == (2, FinishReason.STOP, None)
    for sampling in (SamplingParams(ignore_eos=True), SamplingParams(min_tokens=3)):
        goes_on = make_request("a", max_tokens=5, eos_token_ids=(eos,), sampling=sampling)
        Run(make_scheduler(), goes_on).to_end()
        assert (goes_on.num_output_tokens, goes_on.finish_reason) == (5, FinishReason.LENGTH)


def test_a_stop_token_ends_a_request_and_is_its_stop_reason():
    request = make_request("a", max_tokens=5, sampling=SamplingParams(stop_token_ids=[token_at("a", 10)]))
    Run(make_scheduler(), request).to_end()
    assert (request.num_output_tokens, request.finish_reason) == (3, FinishReason.STOP)
    assert request.stop_reason == token_at("a", 10)


def test_a_stop_string_found_outside_ends_a_request_within_the_call():
    request = make_request("a", max_tokens=50)
    run = Run(make_scheduler(), request)
    run.steps(3)
    progress = run.scheduler.finish("a", FinishReason.STOP, 9.0, stop_reason="\n\n")
    assert progress is not None
    assert (progress.finish_reason, progress.stop_reason) == (FinishReason.STOP, "\n\n")
    assert run.scheduler.stats.num_blocks_used == 0
    assert run.step().forgotten_request_ids == ("a",)


def test_an_abort_frees_blocks_within_the_call_and_its_row_in_flight_is_ignored():
    aborted, other = make_request("a"), make_request("b")
    scheduler = make_scheduler()
    executor = FakeExecutor()
    for request in (aborted, other):
        scheduler.add(request, 0.0)
    plan = scheduler.schedule(0.0)
    assert scheduler.abort("a", 0.0) is not None
    assert aborted.block_table == []
    progress = scheduler.update(plan, executor.execute(plan), 1.0)
    assert [p.request_id for p in progress] == ["b"]
    assert scheduler.schedule(1.0).forgotten_request_ids == ("a",)


def test_an_id_may_come_again_at_once_even_while_its_old_row_is_in_flight():
    scheduler, executor = make_scheduler(), FakeExecutor()
    scheduler.add(make_request("a"), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.abort("a", 0.0)
    again = make_request("a")
    scheduler.add(again, 0.0)
    assert scheduler.update(plan, executor.execute(plan), 1.0) == []
    plan = scheduler.schedule(1.0)
    assert plan.forgotten_request_ids == ("a",)
    assert [new.request_id for new in plan.new_requests] == ["a"]
    executor.execute(plan)


def test_a_waiting_request_can_be_aborted_and_unknown_ids_are_ignored():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"), 0.0)
    assert scheduler.abort("a", 1.0) is not None
    assert scheduler.abort("a", 1.0) is None
    assert not scheduler.has_work
    assert scheduler.schedule(1.0).forgotten_request_ids == ()


def test_a_row_that_failed_ends_only_its_request_and_its_blocks_are_not_shared():
    bad, good = make_request("bad", prompt=8), make_request("good", prompt=8)
    run = Run(make_scheduler(), bad, good)
    run.executor.errors["bad"] = "logits are NaN"
    run.to_end()
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "logits are NaN")
    assert run.progress[0].error == "logits are NaN"
    assert good.finish_reason is FinishReason.LENGTH
    assert run.scheduler._kv.find_prefix(make_request(prompt=[*bad.spec.prompt_token_ids, 1])).num_tokens == 0


def test_a_sampling_row_without_an_answer_is_an_error_of_that_request():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"), 0.0)
    (progress,) = scheduler.update(scheduler.schedule(0.0), ModelOutput(()), 1.0)
    assert (progress.finish_reason, progress.error) == (FinishReason.ERROR, "the executor gave no token")


def test_a_request_that_could_never_fit_is_refused_with_the_numbers():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_request(prompt=14, max_tokens=3), 0.0)  # the last token needs no slot
    with pytest.raises(PromptTooLong, match=r"14 tokens with max_tokens 4 needs 5 KV blocks of 4 tokens.* has 4"):
        scheduler.add(make_request(prompt=14, max_tokens=4), 0.0)
    assert scheduler.stats.num_waiting == 1


def test_an_id_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"), 0.0)
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        scheduler.add(make_request("a"), 0.0)


def test_a_second_turn_reuses_the_first_with_its_answer():
    first = make_request(prompt=8, max_tokens=9)
    run = Run(make_scheduler(), first)
    run.to_end()
    second = make_request(prompt=[*first.spec.prompt_token_ids, *first.output_token_ids, 1, 2])
    run.add(second)
    run.to_end()
    assert second.num_cached_tokens == 16
    stats = run.scheduler.stats
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (8 + 19, 16)


def test_when_blocks_run_out_the_last_to_come_is_preempted_and_keeps_its_tokens_and_its_place():
    old = make_request("old", prompt=8, max_tokens=9, arrived_at=0.0)
    new = make_request("new", prompt=8, max_tokens=9, arrived_at=1.0)
    newest = make_request("newest", prompt=8, max_tokens=9, arrived_at=2.0)
    run = Run(make_scheduler(num_blocks=6, block_size=4), old, new, newest)
    while not new.num_preemptions:
        plan = run.step()
    assert (new.status, new.block_table, new.num_computed_tokens) == (RequestStatus.WAITING, [], 0)
    assert new.output_token_ids == [token_at("new", i) for i in range(8, 8 + new.num_output_tokens)]
    assert plan.forgotten_request_ids == ("new",)
    assert run.scheduler.waiting == (new, newest)
    run.to_end()
    assert new.output_token_ids == [token_at("new", i) for i in range(8, 17)]
    assert new.num_preemptions == 1


def test_nobody_is_admitted_in_a_step_that_ran_out_of_blocks():
    old = make_request("old", prompt=8, max_tokens=9, arrived_at=0.0)
    new = make_request("new", prompt=8, max_tokens=9, arrived_at=1.0)
    run = Run(make_scheduler(num_blocks=6, block_size=4), old, new)
    run.steps(2)
    run.add(make_request("tiny", prompt=1, arrived_at=0.5))
    while not new.num_preemptions:
        plan = run.step()
    assert plan.new_requests == ()
    assert [n.request_id for n in run.step().new_requests] == ["tiny"]
    run.to_end()


def test_a_preempted_request_is_described_anew_with_what_it_said():
    old = make_request("old", prompt=8, max_tokens=9, arrived_at=0.0)
    new = make_request("new", prompt=8, max_tokens=9, arrived_at=1.0)
    run = Run(make_scheduler(num_blocks=6, block_size=4), old, new)
    again = [n for plan in run.to_end() for n in plan.new_requests if n.request_id == "new"][1]
    assert again.num_output_tokens == len(again.output_token_ids) > 0
    assert list(again.output_token_ids) == new.output_token_ids[: again.num_output_tokens]


def test_a_request_waits_until_all_it_knows_has_room_and_nobody_overtakes_it():
    running = make_request(prompt=12, max_tokens=4, arrived_at=0.0)
    large = make_request("large", prompt=12, arrived_at=1.0)
    small = make_request("small", prompt=1, arrived_at=2.0)
    run = Run(make_scheduler(num_blocks=6, block_size=4), running, large, small)
    run.steps(2)
    assert run.scheduler.waiting == (large, small)
    run.to_end()


def test_prompt_logprobs_come_chunk_by_chunk_and_only_once_even_after_preemption():
    old = make_request("old", prompt=8, max_tokens=12, arrived_at=0.0)
    asks = make_request(
        "asks", prompt=11, max_tokens=9, arrived_at=1.0, sampling=SamplingParams(prompt_logprobs=0, logprobs=0)
    )
    run = Run(make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=10), old, asks)
    run.to_end()
    assert asks.num_preemptions > 0
    given = [entry.token_ids[0] for p in run.progress for entry in p.prompt_logprobs or ()]
    assert given == list(asks.spec.prompt_token_ids[1:])
    chosen = [entry.token_ids[0] for p in run.progress for entry in p.logprobs or ()]
    assert chosen == asks.output_token_ids


def test_limits_can_shrink_while_requests_run_and_none_is_lost():
    requests = [make_request(max_tokens=9, arrived_at=i) for i in range(4)]
    run = Run(make_scheduler(max_num_seqs=4), *requests)
    run.steps(2)
    run.scheduler.configure(SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1))
    assert tokens_by_request(run.step()) == {requests[0].request_id: 1}
    assert run.scheduler.waiting == tuple(requests[1:])
    run.to_end()
    assert all(r.num_output_tokens == 9 for r in requests)


def test_an_unknown_policy_is_refused_and_the_old_one_stays():
    scheduler = make_scheduler()
    with pytest.raises(ConfigError, match="'lottery'; choose one of edf, fcfs, interactive"):
        scheduler.set_policy("lottery")
    assert scheduler.config.policy == "fcfs"


def test_counts_add_up():
    run = Run(make_scheduler(), make_request(prompt=8, max_tokens=3), make_request(prompt=5, max_tokens=2))
    run.step()
    stats = run.scheduler.stats
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_blocks_used) == (2, 0, 64, 4)
    run.to_end()
    stats = run.scheduler.stats
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generated_tokens) == (3, 13, 5)
    assert stats.num_scheduled_tokens == 13 + 3  # the last token of each is never computed
    assert stats.num_finished[FinishReason.LENGTH] == 2
    assert stats.num_blocks_cached == 3


def test_an_idle_scheduler_makes_empty_plans_that_count_on():
    scheduler = make_scheduler()
    plans = [scheduler.schedule(0.0) for _ in range(3)]
    assert [(plan.step, plan.rows) for plan in plans] == [(0, ()), (1, ()), (2, ())]


def test_the_outcome_of_another_step_is_our_bug():
    scheduler = make_scheduler()
    old = scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="update of step 0 after schedule of step 1"):
        scheduler.update(old, ModelOutput(()), 0.0)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_newcomer_is_told_the_place_that_it_would_get(policy: str):
    scheduler = make_scheduler(policy=policy)
    requests = [
        make_request(prompt=4 + 3 * (i % 4), arrived_at=float(i % 3), priority=i % 2, max_tokens=1 + i)
        for i in range(8)
    ]
    foretold = sorted(requests, key=scheduler.place_of_newcomer)
    for request in requests:
        scheduler.add(request, 3.0)
    assert list(scheduler.waiting) == foretold
