from __future__ import annotations

import pytest

from maitred.core.request import FinishReason, RequestState, SamplingParams
from maitred.core.step import ModelOutput, SampledRow
from maitred.scheduler.notes import Lack
from tests.fakes import TokenAt, make_request, make_samples, make_scheduler, token_at
from tests.scheduler.checking import CheckingExecutor
from tests.scheduler.running import Run


def four(request: RequestState, num_rows: int) -> int:
    return 4


def wrong(request_id: str, position: int) -> int:
    return 0


def right_in_front(request_id: str, position: int) -> int:
    """Right at two of three positions."""
    return token_at(request_id, position) if position % 3 else 0


def drafting(*requests: RequestState, draft_at: TokenAt = token_at, **settings: object) -> Run:
    scheduler = make_scheduler(**{"num_drafts": four, **settings})
    return Run(scheduler, *requests, executor=CheckingExecutor(scheduler.kv_cache.block_size, token_at, draft_at))


def test_right_drafts_give_their_number_and_one_more_token_a_step():
    request = make_request(prompt=8, max_tokens=40)
    run = drafting(request)
    run.steps(3)
    assert [len(p.new_token_ids) for p in run.progress] == [5, 5, 5]
    assert request.output_token_ids == [token_at(request.request_id, 8 + i) for i in range(15)]


def test_positions_of_wrong_drafts_are_computed_again():
    request = make_request(prompt=8, max_tokens=6)
    run = drafting(request, draft_at=wrong)
    plans = run.to_end()
    assert [(plan.rows[0].start, plan.rows[0].num_known, plan.rows[0].num_drafts) for plan in plans] == [
        (0, 8, 4), (8, 1, 4), (9, 1, 3), (10, 1, 2), (11, 1, 1), (12, 1, 0),
    ]  # fmt: skip
    assert request.output_token_ids == [token_at(request.request_id, 8 + i) for i in range(6)]


@pytest.mark.parametrize("draft_at", [token_at, wrong, right_in_front])
def test_tokens_are_those_of_a_run_without_drafts(draft_at: TokenAt):
    def served(**settings: object) -> list[list[int]]:
        requests = [
            *make_samples("s", 3, prompt=10, max_tokens=12),
            *(make_request(f"r{i}", prompt=5 + i, max_tokens=9) for i in range(4)),
        ]
        run = drafting(*requests, draft_at=draft_at, num_blocks=12, max_num_seqs=4, **settings)
        run.to_end()
        assert run.scheduler.stats.num_preemptions > 0
        return [request.output_token_ids for request in requests]

    assert served() == served(num_drafts=None)


def test_drafts_never_come_to_more_than_max_tokens():
    request = make_request(prompt=8, max_tokens=7)
    run = drafting(request)
    assert [plan.rows[0].num_drafts for plan in run.to_end()] == [4, 1]
    assert request.num_output_tokens == 7
    assert request.finish_reason is FinishReason.LENGTH


def test_a_stop_token_in_an_accepted_run_ends_it_there():
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(token_at("a", 10),), logprobs=0)
    request = make_request("a", prompt=8, max_tokens=20, sampling=sampling)
    run = drafting(request)
    run.step()
    assert request.finish_reason is FinishReason.STOP
    assert request.stop_reason == token_at("a", 10)
    (progress,) = run.progress
    assert progress.new_token_ids == (token_at("a", 8), token_at("a", 9), token_at("a", 10))
    assert [entry.token_ids for entry in progress.logprobs or ()] == [(token,) for token in progress.new_token_ids]
    assert progress.charges is not None
    assert progress.charges.num_generated_tokens == run.scheduler.stats.num_generated_tokens == 3


def test_drafts_take_the_free_blocks_and_preempt_nobody():
    """Blocks of 4 for 5 requests that begin with 2 blocks each and end with 3."""
    requests = [make_request(prompt=7, max_tokens=6) for _ in range(5)]
    run = drafting(*requests, num_blocks=15, draft_at=wrong)
    plans = run.to_end()
    assert any(len(row.new_block_ids) > 0 for plan in plans for row in plan.rows if row.num_drafts)
    assert run.scheduler.stats.num_preemptions == 0


def test_where_blocks_lack_there_are_as_many_drafts_as_those_held_take():
    request, other = make_request(prompt=6, max_tokens=7), make_request(prompt=6, max_tokens=7)
    run = drafting(request, other, num_blocks=4, enable_prefix_caching=False)
    assert [row.num_drafts for row in run.step().rows] == [2, 2]


def test_blocks_of_rejected_drafts_are_back_after_the_step():
    request = make_request(prompt=8, max_tokens=40)
    run = drafting(request, num_drafts=lambda request, num_rows: 9, draft_at=wrong)
    assert len(run.step().rows[0].new_block_ids) == 5
    assert len(request.block_table) == run.scheduler.stats.num_blocks_used == 2


def test_only_blocks_of_accepted_tokens_are_found_by_prefix():
    request = make_request("a", prompt=8, max_tokens=40)
    run = drafting(request, draft_at=right_in_front)
    while request.num_output_tokens < 12:
        run.step()
        known = [*request.spec.prompt_token_ids, *request.output_token_ids]
        assert run.scheduler.stats.num_blocks_cached == request.num_computed_tokens // 4
        assert run.scheduler.kv_cache.find_prefix(make_request(prompt=[*known, 7])).num_tokens >= 8
        assert request.num_computed_tokens == len(known) - 1


def test_drafts_take_the_budget_that_prompts_leave():
    first = make_request(prompt=8, max_tokens=40)
    run = drafting(first, max_num_batched_tokens=14)
    run.step()
    run.add(make_request(prompt=12, max_tokens=4))
    plan = run.step()
    assert [(row.num_known, row.num_drafts) for row in plan.rows] == [(1, 1), (12, 0)]
    assert plan.num_tokens == 14


def test_what_the_first_in_the_queue_lacks_is_never_what_drafts_took():
    run = drafting(make_request(prompt=8, max_tokens=40), max_num_batched_tokens=12, max_num_seqs=1)
    run.add(make_request(prompt=8, max_tokens=40))
    run.step()
    assert run.scheduler.blocked is not None
    assert run.scheduler.blocked.lack is Lack.SLOTS


@pytest.mark.parametrize("draft_at", [token_at, wrong, right_in_front])
def test_a_tenant_is_counted_for_tokens_it_got_and_for_no_draft(draft_at: TokenAt):
    def counter(num_drafts: object) -> float:
        request = make_request("a", prompt=8, max_tokens=12, tenant="t")
        run = drafting(request, policy="vtc", num_drafts=num_drafts, draft_at=draft_at)
        while request.num_output_tokens < 11:
            run.step()
        counted = run.scheduler.order.policy.terms(request)["counter_tokens"]
        return counted - request.num_output_tokens * run.scheduler.config.output_token_weight

    assert counter(four) == counter(None) == 8


def test_drafts_are_counted_by_their_place_and_those_from_a_prediction_apart():
    asked = make_request("a", prompt=8, max_tokens=11)
    predicting = make_request("p", prompt=8, max_tokens=11, prediction_token_ids=(1, 2, 3))
    run = drafting(asked, predicting, draft_at=right_in_front)
    run.to_end()
    stats = run.scheduler.stats
    for request, counts in ((asked, stats.drafts), (predicting, stats.predicted_drafts)):
        assert (counts.num_tokens, counts.num_accepted) == (request.num_draft_tokens, request.num_accepted_tokens)
        assert counts.num_rows >= counts.accepted[0] >= counts.accepted[1] > 0 == counts.accepted[3]
    both = stats.drafts + stats.predicted_drafts
    assert both.accepted == [2 * count for count in stats.drafts.accepted]
    assert both.num_rows == 2 * stats.drafts.num_rows


def test_an_outcome_of_another_number_of_tokens_than_were_accepted_is_a_bug_of_the_executor():
    scheduler = make_scheduler(num_drafts=four)
    scheduler.add(make_request("a", max_tokens=40), 0.0)
    plan = scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="num_accepted=1"):
        scheduler.update(plan, ModelOutput((SampledRow("a", (5,), num_accepted=1),)), 1.0)
