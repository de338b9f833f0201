"""Samples of one prompt: one computes it, the others share its blocks by copy on write."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from maitred.core.request import FinishReason, RequestState, RequestStatus, SamplingParams, Terms
from maitred.policy.policies import POLICIES
from tests.fakes import make_request, make_samples, make_scheduler, token_at
from tests.scheduler.running import Run, tokens_by_request


def test_followers_wait_for_the_prompt_and_then_compute_only_its_last_token():
    samples = make_samples("p", 3, prompt=20, max_tokens=4)
    run = Run(make_scheduler(max_num_batched_tokens=16), *samples)
    assert tokens_by_request(run.step()) == {"p-0": 16}
    assert [run.scheduler.awaits_leader(sample) for sample in samples] == [False, True, True]
    assert run.scheduler.stats.num_waiting == 2
    assert tokens_by_request(run.step()) == {"p-0": 4}
    assert tokens_by_request(run.step()) == {"p-0": 1, "p-1": 1, "p-2": 1}
    run.to_end()
    for sample in samples:
        assert sample.output_token_ids == [token_at(sample.request_id, i) for i in range(20, 24)]


def test_the_prompts_blocks_are_shared_and_only_its_partly_filled_tail_is_copied():
    samples = make_samples("p", 3, prompt=10, max_tokens=3)
    run = Run(make_scheduler(), *samples)
    run.step()
    plan = run.step()
    assert len({tuple(s.block_table[:2]) for s in samples}) == 1
    assert len({s.block_table[2] for s in samples}) == 3
    assert {copy.source for copy in plan.block_copies} == {samples[0].block_table[2]}
    assert run.scheduler.stats.num_blocks_used == 2 + 3
    assert run.scheduler.stats.num_prompt_tokens == 10


def test_sharing_works_without_the_prefix_cache():
    samples = make_samples("p", 2, prompt=9, max_tokens=3)
    run = Run(make_scheduler(enable_prefix_caching=False), *samples)
    run.steps(2)
    assert samples[0].block_table[:2] == samples[1].block_table[:2]
    run.to_end()


def test_when_the_leader_is_aborted_before_its_prompt_the_next_sample_leads():
    samples = make_samples("p", 3, prompt=20)
    run = Run(make_scheduler(max_num_batched_tokens=8), *samples)
    run.step()
    run.scheduler.abort("p-0", run.now)
    assert not run.scheduler.awaits_leader(samples[2])
    run.step()
    assert [run.scheduler.awaits_leader(sample) for sample in samples[1:]] == [False, True]
    run.to_end()
    assert [s.finish_reason for s in samples[1:]] == [FinishReason.LENGTH] * 2


def test_a_waiting_follower_can_be_aborted():
    samples = make_samples("p", 3, prompt=20)
    run = Run(make_scheduler(max_num_batched_tokens=8), *samples)
    run.step()
    run.scheduler.abort("p-1", run.now)
    run.to_end()
    assert samples[2].finish_reason is FinishReason.LENGTH


def test_a_leader_that_ends_with_its_first_token_leaves_its_prompt_in_the_cache():
    samples = make_samples("p", 2, prompt=9, max_tokens=1)
    run = Run(make_scheduler(), *samples)
    run.to_end()
    assert samples[1].num_cached_tokens == 8
    assert run.scheduler.stats.num_prompt_tokens == 9, "counted once"


def test_a_leader_that_fails_does_not_strand_the_others():
    samples = make_samples("p", 3, prompt=9)
    run = Run(make_scheduler(), *samples)
    run.executor.errors["p-0"] = "logits are NaN"
    run.to_end()
    assert [s.finish_reason for s in samples] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]


def test_a_follower_without_a_living_leader_is_an_ordinary_request():
    leader, follower = make_samples("p", 2, prompt=9)
    run = Run(make_scheduler(), leader)
    run.to_end()
    run.add(follower)
    assert follower.status is RequestStatus.WAITING
    run.to_end()
    assert follower.num_output_tokens == 4


def test_a_late_follower_forks_at_once():
    leader, follower = make_samples("p", 2, prompt=9, max_tokens=8)
    run = Run(make_scheduler(), leader)
    run.steps(3)
    run.add(follower)
    assert tokens_by_request(run.step()) == {"p-0": 1, "p-1": 1}
    run.to_end()


def test_samples_that_ask_for_prompt_logprobs_each_compute_the_prompt():
    samples = make_samples("p", 2, prompt=9, sampling=SamplingParams(prompt_logprobs=0))
    run = Run(make_scheduler(), *samples)
    assert tokens_by_request(run.step()) == {"p-0": 9, "p-1": 9}


def test_a_preempted_sample_comes_back_with_its_own_tokens():
    samples = make_samples("p", 4, prompt=10, max_tokens=14)
    run = Run(make_scheduler(num_blocks=12, max_num_seqs=4), *samples)
    run.to_end()
    assert sum(s.num_preemptions for s in samples) > 0
    for sample in samples:
        assert sample.output_token_ids == [token_at(sample.request_id, i) for i in range(10, 24)]


def test_a_preempted_sample_prefers_its_own_cached_output_to_a_fork():
    leader, follower = make_samples("p", 2, prompt=5, max_tokens=30)
    run = Run(make_scheduler(), leader, follower)
    run.steps(12)
    config = run.scheduler.config
    run.scheduler.configure(replace(config, max_num_seqs=1))
    run.step()
    run.scheduler.configure(config)
    row = run.step().rows[-1]
    assert (row.request_id, row.start, row.num_tokens) == ("p-1", 12, 4)
    run.to_end()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_follower_starts_before_one_that_came_later_though_its_leader_leaves_room(policy: str):
    leader, follower = make_samples("p", 2, prompt=20, max_tokens=3)
    run = Run(make_scheduler(max_num_seqs=2, max_num_batched_tokens=16, policy=policy, ageing_s=0.5), leader, follower)
    run.step()
    later = make_request("later", prompt=20, max_tokens=100, arrived_at=run.now)
    run.add(later)
    assert tokens_by_request(run.step()) == {"p-0": 4}  # the other 12 tokens are nobody's
    assert tokens_by_request(run.step()) == {"p-0": 1, "p-1": 1}
    while later.first_scheduled_at is None:
        run.step()
    assert run.scheduler.blocked is None


def test_the_first_of_a_family_in_the_policys_order_leads_whichever_sample_it_is():
    first, second = make_samples("p", 2, prompt=20)
    second = RequestState(structs.replace(second.spec, terms=Terms(ttft_slo_s=0.1)))
    run = Run(make_scheduler(policy="edf", max_num_batched_tokens=16), first, second)
    assert tokens_by_request(run.step()) == {"p-1": 16}
    assert run.scheduler.awaits_leader(first)
    assert run.scheduler.num_queued == 0
    run.to_end()


def test_a_preempted_leader_gives_the_lead_to_whoever_comes_first():
    samples = make_samples("p", 2, prompt=40, priority=2)
    run = Run(make_scheduler(policy="priority", max_num_seqs=1, max_num_batched_tokens=16), *samples)
    run.step()
    run.add(make_request("urgent", arrived_at=1.0, max_tokens=1))
    run.step()
    assert samples[0].num_preemptions == 1
    assert not run.scheduler.awaits_leader(samples[1])
    run.to_end()
    assert [s.finish_reason for s in samples] == [FinishReason.LENGTH] * 2
