"""Forced tokens: known at once, computed by the request's next rows, as a prompt's are."""

from __future__ import annotations

import pytest

from maitred.core.request import FinishReason, RequestState, SamplingParams
from maitred.core.step import ModelOutput, SampledRow
from tests.fakes import make_request, make_samples, make_scheduler, token_at
from tests.scheduler.checking import CheckingExecutor
from tests.scheduler.running import Run


def forcing(*requests: RequestState, num_forced: int = 5, **settings: object) -> Run:
    """After every sampled token so many more are forced."""
    scheduler = make_scheduler(**settings)
    executor = CheckingExecutor(scheduler.kv_cache.block_size)
    executor.forced_after = lambda request_id, position: num_forced
    return Run(scheduler, *requests, executor=executor)


def shapes(run: Run, num_steps: int) -> list[list[tuple[int, bool]]]:
    return [[(row.num_tokens, row.samples) for row in plan.rows] for plan in run.steps(num_steps)]


def test_the_next_row_computes_all_that_is_known_and_samples():
    request = make_request(prompt=8, max_tokens=18)
    run = forcing(request)
    assert shapes(run, 3) == [[(8, True)], [(6, True)], [(6, True)]]
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == [token_at(request.request_id, 8 + i) for i in range(18)]
    assert [(len(p.new_token_ids), p.num_forced) for p in run.progress] == [(6, 5)] * 3


def test_every_row_gets_one_token_first_and_a_row_that_falls_short_does_not_sample():
    run = forcing(*(make_request(prompt=4, max_tokens=30) for _ in range(2)), max_num_batched_tokens=8, max_num_seqs=2)
    assert shapes(run, 4) == [
        [(4, True), (4, True)],
        [(6, True), (2, False)],
        [(6, True), (2, False)],
        [(6, True), (2, True)],
    ]


def test_prompts_take_what_catching_up_leaves_of_the_budget():
    run = forcing(make_request(prompt=4, max_tokens=30), max_num_batched_tokens=12)
    run.step()
    run.add(make_request(prompt=20, max_tokens=4))
    assert shapes(run, 1) == [[(6, True), (6, False)]]


def test_where_blocks_lack_a_row_computes_what_has_room_and_nobody_is_preempted():
    first, other = make_request(prompt=4, max_tokens=12), make_request(prompt=4, max_tokens=4)
    run = forcing(first, other, num_blocks=5, enable_prefix_caching=False)
    run.to_end()
    assert run.scheduler.stats.num_preemptions == 0
    assert first.num_output_tokens == 12


def test_a_stop_token_among_forced_ones_ends_the_request_there():
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(token_at("a", 10),))
    request = make_request("a", prompt=8, max_tokens=20, sampling=sampling)
    run = forcing(request)
    run.step()
    assert (request.num_output_tokens, request.finish_reason) == (3, FinishReason.STOP)
    assert (run.progress[0].new_token_ids, run.progress[0].num_forced) == (tuple(request.output_token_ids), 2)


def test_tokens_are_those_of_a_run_without_forced_ones():
    def served(num_forced: int) -> list[list[int]]:
        requests = [
            *make_samples("s", 3, prompt=10, max_tokens=12),
            *(make_request(f"r{i}", prompt=5 + i, max_tokens=9) for i in range(4)),
        ]
        run = forcing(*requests, num_forced=num_forced, num_blocks=12, max_num_seqs=4)
        run.to_end()
        assert run.scheduler.stats.num_preemptions > 0 or num_forced > 3
        return [request.output_token_ids for request in requests]

    assert served(3) == served(7) == served(0)


@pytest.mark.parametrize("num_forced", [0, 1, 4])
def test_a_tenant_is_counted_for_forced_tokens_as_for_sampled_ones(num_forced: int):
    request = make_request("a", prompt=8, max_tokens=30, tenant="t")
    run = forcing(request, policy="vtc", num_forced=num_forced)
    while request.num_output_tokens < 20:
        run.step()
    weight = run.scheduler.config.output_token_weight
    assert run.scheduler.order.policy.terms(request)["counter_tokens"] == 8 + weight * request.num_output_tokens


@pytest.mark.parametrize(
    ("sampling", "max_tokens"),
    [({"ignore_eos": True}, 20), ({"min_tokens": 15}, 20), ({}, 3)],
    ids=["ignore_eos", "min_tokens", "at max_tokens"],
)
def test_a_complete_grammar_ends_the_request_with_stop(sampling: dict[str, object], max_tokens: int):
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    request = make_request("a", prompt=8, max_tokens=max_tokens, sampling=params)
    scheduler = make_scheduler()
    scheduler.add(request, 0.0)
    plan = scheduler.schedule(0.0)
    row = SampledRow("a", (5, 6, 7), num_forced=2, complete=True)
    (told,) = scheduler.update(plan, ModelOutput((row,)), 1.0)
    assert (told.new_token_ids, told.finish_reason) == ((5, 6, 7), FinishReason.STOP)


def test_a_complete_grammar_whose_last_token_is_over_max_tokens_ends_with_length():
    request = make_request("a", prompt=8, max_tokens=2)
    scheduler = make_scheduler()
    scheduler.add(request, 0.0)
    row = SampledRow("a", (5, 6, 7), num_forced=2, complete=True)
    (told,) = scheduler.update(scheduler.schedule(0.0), ModelOutput((row,)), 1.0)
    assert (told.new_token_ids, told.finish_reason) == ((5, 6), FinishReason.LENGTH)


def test_a_postponed_row_computes_its_last_position_again_and_tells_nothing():
    request = make_request("a", prompt=8, max_tokens=3)
    run = forcing(request, num_forced=0)
    asked: list[int] = []

    def postponed(request_id: str, position: int) -> bool:
        asked.append(position)
        return asked.count(position) < 3

    run.executor.postponed = postponed
    plans = run.to_end()
    assert [(plan.rows[0].start, plan.rows[0].num_tokens) for plan in plans] == [
        (0, 8), (7, 1), (7, 1), (8, 1), (8, 1), (8, 1), (9, 1), (9, 1), (9, 1),
    ]  # fmt: skip
    assert request.output_token_ids == [token_at("a", 8 + i) for i in range(3)]
    assert len(run.progress) == 3
    assert run.progress[0].charges is not None
