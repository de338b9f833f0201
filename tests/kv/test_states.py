"""Which snapshots there are, where hits end, and whose slot goes first; that states are right is for the worlds."""

from __future__ import annotations

from maitred.core.request import RequestState, SamplingParams
from maitred.core.step import SchedulerOutput
from maitred.kv.states import StatefulKVCacheManager
from maitred.scheduler.notes import Lack
from tests.fakes import make_request, make_samples, make_scheduler
from tests.scheduler.running import Run

TEXT = list(range(100, 164))


def stateful(*requests: RequestState, num_slots: int = 12, stride: int = 512, **settings: object) -> Run:
    scheduler = make_scheduler(**{"num_state_slots": num_slots, "block_size": 4, **settings})
    assert isinstance(scheduler.kv_cache, StatefulKVCacheManager)
    scheduler.kv_cache.stride = stride
    return Run(scheduler, *requests)


def hit_of(run: Run, prompt: list[int]) -> int:
    return run.scheduler.kv_cache.find_prefix(make_request(prompt=prompt)).num_tokens


def positions(plans: list[SchedulerOutput]) -> list[int]:
    return [save.position for plan in plans for save in plan.state_saves]


def test_the_same_prompt_begins_at_its_last_full_block_before_the_last_token() -> None:
    for num_tokens in (9, 10, 12):
        run = stateful(make_request(prompt=TEXT[:num_tokens], max_tokens=1))
        run.to_end()
        assert hit_of(run, TEXT[:num_tokens]) == 8


def test_another_prompt_begins_at_the_last_stride_that_both_have_and_the_third_where_they_part() -> None:
    """They share 23 tokens: 5 blocks, and a stride of 12."""
    run = stateful(stride=12)
    begun = []
    for tail in (1, 2, 3):
        run.add(request := make_request(prompt=[*TEXT[:23], *[tail] * 9], max_tokens=1))
        run.to_end()
        begun.append(request.num_cached_tokens)
    assert begun == [0, 12, 20]


def test_strides_are_where_they_are_however_a_prompt_is_cut_and_at_most_eight() -> None:
    for budget in (7, 12, 64):
        plans = stateful(
            make_request(prompt=60, max_tokens=1), stride=12, max_num_batched_tokens=budget, max_num_seqs=1
        )
        assert positions(plans.to_end()) == [12, 24, 36, 48, 56]
    plans = stateful(make_request(prompt=60, max_tokens=1), stride=4).to_end()
    assert positions(plans) == [8, 16, 24, 32, 40, 48, 56]


def test_a_conversation_goes_on_where_its_answer_filled_a_block_and_keeps_one_snapshot_of_it() -> None:
    request = make_request(prompt=TEXT[:10], max_tokens=12)
    run = stateful(request)
    plans = run.to_end()
    assert positions(plans) == [8, 12, 16, 20]
    assert hit_of(run, [*TEXT[:10], *request.output_token_ids, 7]) == 20
    assert hit_of(run, [*TEXT[:10], *request.output_token_ids[:8]]) == 8, "12 and 16 were dropped"


def test_samples_begin_at_the_prompts_snapshot() -> None:
    samples = make_samples("s", 3, prompt=11, max_tokens=2)
    run = stateful(*samples)
    plans = run.to_end()
    assert [(row.start, row.num_tokens) for plan in plans for row in plan.rows if row.num_tokens > 1] == [
        (0, 11), (8, 3), (8, 3),
    ]  # fmt: skip
    assert run.scheduler.stats.num_prompt_tokens == 11, "of all samples once"


def test_the_snapshot_used_longest_ago_makes_room_and_a_request_may_take_over_the_last() -> None:
    run = stateful(num_slots=3, max_num_seqs=1)
    prompts = [TEXT[first : first + 6] for first in (0, 20, 40)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        run.add(make_request(prompt=prompt, max_tokens=1))
        run.to_end()
    assert [hit_of(run, prompt) for prompt in prompts] == [4, 0, 4]
    alone = stateful(make_request(prompt=TEXT[:6], max_tokens=1), num_slots=1, max_num_seqs=1)
    assert positions(alone.to_end()) == [], "the only slot is the request's"
    pair = stateful(make_request(prompt=TEXT[:6], max_tokens=1), num_slots=2)
    pair.to_end()
    pair.add(*(make_request(prompt=TEXT[:6], max_tokens=3) for _ in range(2)))
    plan = pair.step()
    assert [row.start for row in plan.rows] == [4, 4]
    assert len(plan.state_copies) == 1, "the second has the snapshot's own slot"


def test_without_prefix_caching_nothing_is_saved() -> None:
    assert positions(stateful(make_request(prompt=20, max_tokens=9), enable_prefix_caching=False).to_end()) == []


def test_more_requests_than_slots_wait() -> None:
    requests = [make_request(prompt=5, max_tokens=3, sampling=SamplingParams(max_tokens=3)) for _ in range(3)]
    run = stateful(*requests, num_slots=2, max_num_seqs=8)
    assert len(run.step().rows) == 2
    assert run.scheduler.blocked is not None
    assert run.scheduler.blocked.lack is Lack.BLOCKS
    run.to_end()
    assert all(len(request.output_token_ids) == 3 for request in requests)
