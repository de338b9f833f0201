"""KV from elsewhere: a request waits for it out of the queue, finds it in the cache, or computes what did not come."""

from __future__ import annotations

import pytest

from maitred.core.cost_model import SwapCosts
from maitred.core.request import Charges, FinishReason, RequestState, RequestStatus, ResumePoint, SamplingParams
from maitred.policy.policies import POLICIES
from maitred.scheduler.queue_view import queue_view
from maitred.scheduler.reservations import GivenUp, ReservedBlocks
from tests.fakes import make_request, make_samples, make_scheduler
from tests.scheduler.checking import CheckingExecutor
from tests.scheduler.running import Run, tokens_by_request


def reserve(run: Run, request: RequestState, num_tokens: int = 1000) -> ReservedBlocks | None:
    reserved = run.scheduler.reserve(request.request_id, num_tokens, run.now)
    run.scheduler.check_invariants()
    return reserved


def arrive(run: Run, request: RequestState, reserved: ReservedBlocks, num_blocks: int | None = None) -> bool:
    """Writes the KV of so many of the reserved blocks, or of all."""
    block_ids = reserved.block_ids[:num_blocks]
    assert isinstance(run.executor, CheckingExecutor)
    run.executor.bring(block_ids, request, reserved.start)
    num_tokens = reserved.start + len(block_ids) * run.scheduler.kv_cache.block_size
    came = run.scheduler.kv_arrived(request.request_id, num_tokens, run.now)
    run.scheduler.check_invariants()
    return came


def test_whole_blocks_below_the_last_token_are_reserved_and_found_when_they_came():
    request = make_request("a", prompt=12)
    run = Run(make_scheduler(), request)
    reserved = reserve(run, request)
    assert reserved is not None
    assert (reserved.start, reserved.end, len(reserved.block_ids)) == (0, 8, 2)
    assert request.status is RequestStatus.WAITING_FOR_KV
    assert arrive(run, request, reserved)
    assert run.scheduler.stats.num_blocks_used == 0
    assert tokens_by_request(run.step()) == {"a": 4}
    assert request.num_cached_tokens == 8
    run.to_end()


def test_what_is_cached_here_is_kept_and_only_the_rest_is_reserved():
    first = make_request("a", prompt=9, max_tokens=1)
    run = Run(make_scheduler(num_blocks=8), first)
    run.to_end()
    longer = make_request("b", prompt=[*first.spec.prompt_token_ids, *range(12)])
    run.add(longer)
    reserved = reserve(run, longer)
    assert reserved is not None
    assert (reserved.start, reserved.end) == (8, 20)
    assert arrive(run, longer, reserved)
    assert tokens_by_request(run.step()) == {"b": 1}


def test_what_came_in_part_is_found_and_the_rest_is_computed():
    request = make_request("a", prompt=17)
    run = Run(make_scheduler(), request)
    reserved = reserve(run, request)
    assert reserved is not None
    assert arrive(run, request, reserved, num_blocks=3)
    assert tokens_by_request(run.step()) == {"a": 5}


def test_when_nothing_came_it_is_an_ordinary_request():
    request = make_request("a", prompt=12)
    run = Run(make_scheduler(), request)
    reserved = reserve(run, request)
    assert reserved is not None
    assert arrive(run, request, reserved, num_blocks=0)
    assert tokens_by_request(run.step()) == {"a": 12}
    assert not run.scheduler.kv_arrived("a", 8, run.now)  # twice is once
    run.to_end()


def test_others_pass_it_and_it_comes_back_to_its_old_place():
    requests = [make_request(name, prompt=12, arrived_at=at) for at, name in enumerate("abc")]
    run = Run(make_scheduler(max_num_seqs=1), *requests)
    reserved = reserve(run, requests[0])
    assert reserved is not None
    assert tokens_by_request(run.step()) == {"b": 12}
    assert arrive(run, requests[0], reserved)
    assert [r.request_id for r in run.scheduler.waiting] == ["a", "c"]
    run.to_end()


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_it_keeps_its_place_also_when_the_policy_changes_meanwhile(policy: str):
    requests = [
        make_request(f"r{i}", prompt=12, arrived_at=i / 8, priority=i % 2, tenant=f"t{i % 3}") for i in range(6)
    ]
    run = Run(make_scheduler(policy=policy), *requests)
    before = [r.request_id for r in run.scheduler.waiting]
    reserved = [(request, reserve(run, request)) for request in requests[1:4]]
    run.scheduler.set_policy("fcfs")
    run.scheduler.set_policy(policy)
    for request, each in reserved:
        assert each is not None
        assert arrive(run, request, each, num_blocks=0)
    assert [r.request_id for r in run.scheduler.waiting] == before
    run.to_end()


def test_the_wait_is_queue_time_and_is_told_to_people():
    request = make_request("a", prompt=12, max_tokens=1)
    run = Run(make_scheduler(), request)
    reserved = reserve(run, request)
    assert reserved is not None
    stats, (waiting,) = run.scheduler.stats, queue_view(run.scheduler, 0.0).waiting
    assert (stats.num_waiting, stats.num_blocks_used, run.scheduler.num_queued) == (1, 2, 0)
    assert waiting.reason == "KV of its prompt is on its way from elsewhere"
    run.now = 5.0
    assert arrive(run, request, reserved)
    run.to_end()
    timing = run.progress[-1].timing
    assert timing is not None
    assert (timing.queue_s, timing.total_s) == (5.0, 6.0)


def test_nothing_is_reserved_where_nothing_is_gained():
    cached = make_request("cached", prompt=9, max_tokens=1)
    run = Run(make_scheduler(), cached)
    run.to_end()
    again = make_request("again", prompt=cached.spec.prompt_token_ids)
    short, running = make_request("short", prompt=4), make_request("running")
    logprobs = make_request("logprobs", prompt=12, sampling=SamplingParams(prompt_logprobs=0))
    run.add(running)
    run.step()
    run.add(again, short, logprobs)
    before = run.scheduler.stats
    assert [reserve(run, r) for r in (cached, again, short, running, logprobs)] == [None] * 5
    assert run.scheduler.stats == before
    without_cache = Run(make_scheduler(enable_prefix_caching=False), request := make_request(prompt=12))
    assert reserve(without_cache, request) is None


def test_nothing_is_reserved_out_of_blocks_or_out_of_those_that_the_first_in_the_queue_needs():
    running, first = make_request("running", prompt=8, max_tokens=8), make_request("first", prompt=24)
    run = Run(make_scheduler(num_blocks=8), running)
    run.step()
    late = make_request("late", prompt=12, arrived_at=1.0)
    run.add(first, late)
    assert reserve(run, late) is None
    assert reserve(run, first) is not None
    assert reserve(run, late) is None
    run.scheduler.abort("first", run.now)
    assert reserve(run, late) is not None


def test_a_running_request_gets_what_is_set_aside_before_anybody_is_preempted():
    """The newest lease first, then the reservation of the last in line."""
    cached = make_request("cached", prompt=9, max_tokens=1)
    run = Run(make_scheduler(num_blocks=8), cached)
    run.to_end()
    assert len(run.scheduler.hold("old", cached.block_hashes[:1], 0.0)) == 1
    assert len(run.scheduler.hold("new", cached.block_hashes, 0.0)) == 2
    running = make_request("running", prompt=4, max_tokens=28)
    waiting = [make_request(name, prompt=9, arrived_at=at) for at, name in enumerate("ab", 1)]
    run.add(running)
    run.step()
    run.add(*waiting)
    assert reserve(run, waiting[0]) is not None
    assert reserve(run, waiting[1], 4) is not None
    given_up = []
    while not running.finished:
        run.step()
        if run.scheduler.given_up != ((), ()):
            given_up.append(run.scheduler.given_up)
    assert given_up == [GivenUp((), (name,)) for name in ("new", "old")] + [GivenUp((name,), ()) for name in "ba"]
    assert run.scheduler.stats.num_preemptions == 0
    run.to_end()


def test_late_kv_for_a_reservation_that_was_given_up_changes_nothing():
    running, waiting = make_request("running", prompt=4, max_tokens=28), make_request("waiting", prompt=20)
    run = Run(make_scheduler(num_blocks=8), running)
    run.step()
    run.add(waiting)
    reserved = reserve(run, waiting)
    assert reserved is not None
    while waiting.status is RequestStatus.WAITING_FOR_KV:
        run.step()
    assert not run.scheduler.kv_arrived("waiting", reserved.end, run.now)
    run.to_end()


def test_nobody_runs_while_what_is_set_aside_is_given_up_for_the_first_in_line():
    """Unless that comes after the one it is reserved for: then a step would do nothing until the KV is here."""
    early, late = make_request("early", prompt=24, arrived_at=0.0), make_request("late", prompt=24, arrived_at=1.0)
    run = Run(make_scheduler(num_blocks=8), late)
    assert reserve(run, late) is not None
    run.add(early)
    assert run.scheduler.can_step
    assert tokens_by_request(run.step()) == {"early": 24}
    assert run.scheduler.given_up == GivenUp(("late",), ())
    run = Run(make_scheduler(num_blocks=8), early := make_request("early", prompt=24))
    reserved = reserve(run, early)
    assert reserved is not None
    run.add(make_request("late", prompt=24, arrived_at=1.0))
    assert not run.scheduler.can_step
    assert run.step().rows == ()
    assert arrive(run, early, reserved)
    run.to_end()


def test_an_end_while_it_waits_frees_its_blocks_at_once():
    for reason in (FinishReason.ABORT, FinishReason.SHED, FinishReason.QUEUE_TIMEOUT, FinishReason.TIMEOUT):
        deadline = {FinishReason.QUEUE_TIMEOUT: {"start_by": 3.0}, FinishReason.TIMEOUT: {"finish_by": 3.0}}.get(reason)
        request = make_request("a", prompt=12, **deadline or {})
        run = Run(make_scheduler(), request)
        assert reserve(run, request) is not None
        assert (run.scheduler.has_work, run.scheduler.can_step) == (True, False)
        if deadline:
            assert run.scheduler.next_deadline == 3.0
            (progress,) = run.scheduler.expire(3.0)
            assert progress.finish_reason is reason
        else:
            assert run.scheduler.finish("a", reason, 3.0) is not None
        assert run.scheduler.given_up == GivenUp(("a",), ())
        run.scheduler.check_invariants()
        assert (run.scheduler.stats.num_blocks_used, run.scheduler.has_work) == (0, False)


def test_samples_wait_along_and_all_of_them_find_the_prompt():
    samples = make_samples("p", 3, prompt=13)
    run = Run(make_scheduler(), *samples[:2], make_request("other", prompt=4, arrived_at=1.0))
    reserved = reserve(run, samples[0])
    assert reserved is not None
    run.add(samples[2])  # the last of them comes late
    assert all(r.status is RequestStatus.WAITING_FOR_KV for r in samples)
    assert reserve(run, samples[1]) is None
    assert tokens_by_request(run.step()) == {"other": 4}
    assert arrive(run, samples[0], reserved)
    assert tokens_by_request(run.step()) == {"other": 1, "p-0": 1}
    run.to_end()
    assert len({tuple(r.output_token_ids) for r in samples}) == 3


def test_samples_go_on_when_the_one_they_wait_along_with_ends():
    samples = make_samples("p", 3, prompt=13)
    run = Run(make_scheduler(), *samples)
    assert reserve(run, samples[0]) is not None
    run.scheduler.abort("p-1", run.now)
    run.scheduler.check_invariants()
    run.scheduler.abort("p-0", run.now)
    run.scheduler.check_invariants()
    assert tokens_by_request(run.step()) == {"p-2": 13}
    run.to_end()


def test_the_output_of_a_resumed_request_comes_too():
    point = ResumePoint(
        output_token_ids=list(range(8)), charges=Charges(8, 0, 8, 0, 1.0, 2.0), last_token_at=3.0, stalled_at=4.0
    )
    request = make_request("a", prompt=8, max_tokens=9, resumed=point)
    run = Run(make_scheduler())
    run.now = 5.0
    run.add(request)
    reserved = reserve(run, request)
    assert reserved is not None
    assert reserved.end == 12
    run.now = 7.0
    assert arrive(run, request, reserved)
    assert tokens_by_request(run.step()) == {"a": 4}
    timing = run.progress[-1].timing
    assert timing is not None
    assert (timing.stall_s, timing.total_s) == (3.0, 8.0)


def test_a_swapped_request_waits_only_for_more_than_it_has_on_the_host():
    older = make_request("older", prompt=8, max_tokens=16)
    newer = make_request("newer", prompt=8, max_tokens=16, arrived_at=1.0)
    run = Run(make_scheduler(num_blocks=8, num_host_blocks=8), older, newer)
    run.scheduler.set_swap_costs(SwapCosts(16, 1e12, 1e12, 0.25))
    while not newer.num_swapped_tokens and run.scheduler.has_work:
        run.step()
    assert newer.num_swapped_tokens > 4
    assert reserve(run, newer) is None
    run.to_end()


def test_what_is_held_stays_and_can_be_held_again_until_it_is_released():
    first = make_request("a", prompt=13, max_tokens=1)
    run = Run(make_scheduler(num_blocks=4), first)
    run.to_end()
    scheduler, hashes = run.scheduler, first.block_hashes
    blocks = scheduler.hold("lease", hashes, run.now)
    assert len(blocks) == 3
    assert scheduler.hold("lease", [b"stranger"], run.now) == ()
    assert scheduler.stats.num_blocks_used == 3
    assert scheduler.hold("lease", hashes[:2], run.now) == blocks[:2]
    scheduler.check_invariants()
    assert scheduler.stats.num_blocks_used == 2
    assert [scheduler.release("lease", run.now) for _ in range(2)] == [True, False]
    scheduler.check_invariants()
    assert scheduler.stats.num_blocks_used == 0


def test_who_wants_the_same_tokens_waits_along_and_finds_them():
    prompt = list(range(12))
    first, second = make_request("a", prompt=prompt), make_request("b", prompt=prompt)
    other = make_request("c", prompt=[9, *prompt])
    run = Run(make_scheduler(num_blocks=32), first, second, other)
    reserved = reserve(run, first)
    assert reserved is not None
    assert reserve(run, second) is None
    assert second.status is RequestStatus.WAITING_FOR_KV
    assert run.scheduler.waits_along("b")
    assert reserve(run, other) is not None
    assert arrive(run, first, reserved)
    assert not run.scheduler.waits_along("b")
    assert tokens_by_request(run.step()) == {"a": 4, "b": 4}
    assert second.num_cached_tokens == 8


@pytest.mark.parametrize("ends", ["first", "second"])
def test_who_waits_along_computes_when_the_other_ends_and_may_end_itself(ends: str):
    prompt = list(range(12))
    first, second = make_request("a", prompt=prompt), make_request("b", prompt=prompt)
    run = Run(make_scheduler(), first, second)
    reserved = reserve(run, first)
    assert reserved is not None
    reserve(run, second)
    run.scheduler.finish({"first": "a", "second": "b"}[ends], FinishReason.ABORT, run.now)
    run.scheduler.check_invariants()
    if ends == "first":
        assert tokens_by_request(run.step()) == {"b": 12}
    else:
        assert arrive(run, first, reserved)
        assert tokens_by_request(run.step()) == {"a": 4}
    run.to_end()
