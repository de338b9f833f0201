"""Preempted requests whose KV goes to the host and back: when, what, and that nothing else changes."""

from __future__ import annotations

from random import Random

from maitred.core.cost_model import SwapCosts
from maitred.core.request import FinishReason, RequestStatus
from maitred.scheduler.planning import worth_swapping
from maitred.scheduler.scheduler import Scheduler
from tests.fakes import make_request, make_scheduler, token_at
from tests.scheduler.running import Run
from tests.scheduler.test_scheduler_properties import make_world

FAST_COPIES = SwapCosts(bytes_per_block=16, out_bytes_per_s=1e9, in_bytes_per_s=1e9, prefill_s_per_token=1e-3)
SLOW_COPIES = FAST_COPIES._replace(in_bytes_per_s=1.0)


def tight_run(
    num_host_blocks: int = 8, costs: SwapCosts | None = FAST_COPIES, caching: bool = False, a_tokens: int = 5
) -> Run:
    """Two requests for which the cache is too small: `b` is preempted in the second step, with two blocks computed."""
    scheduler = make_scheduler(
        num_blocks=5, block_size=4, num_host_blocks=num_host_blocks, enable_prefix_caching=caching
    )
    scheduler.set_swap_costs(costs)
    a = make_request("a", prompt=8, max_tokens=a_tokens)
    b = make_request("b", prompt=8, max_tokens=5, arrived_at=1.0)
    return Run(scheduler, a, b)


def num_host_free(scheduler: Scheduler) -> int:
    return scheduler.kv_cache._host.num_free


def test_a_preempted_request_goes_on_where_it_was():
    run = tight_run()
    plans = run.to_end()
    (out,) = [plan for plan in plans if plan.swap_outs]
    (back,) = [plan for plan in plans if plan.swap_ins]
    assert [copy.target for copy in out.swap_outs] == [copy.source for copy in back.swap_ins] == [0, 1]
    (row,) = [row for row in back.rows if row.request_id == "b"]
    assert (row.start, row.num_tokens) == (8, 1)
    assert run.scheduler.stats.num_swapped_out_blocks == run.scheduler.stats.num_swapped_in_blocks == 2
    assert num_host_free(run.scheduler) == 8


def test_the_tokens_are_the_same_with_and_without():
    outputs = []
    for costs in (FAST_COPIES, SLOW_COPIES, None):
        run = tight_run(costs=costs)
        run.to_end()
        assert (run.scheduler.stats.num_swapped_out_blocks > 0) == (costs is FAST_COPIES)
        outputs.append([progress.new_token_ids for progress in run.progress if progress.request_id == "b"])
    assert outputs[0] == outputs[1] == outputs[2] == [(token_at("b", 8 + i),) for i in range(5)]


def test_a_host_pool_without_room_means_computing_again():
    run = tight_run(num_host_blocks=1)
    assert not any(plan.swap_outs for plan in run.to_end())


def test_an_abort_while_swapped_gives_the_host_blocks_back():
    run = tight_run()
    run.steps(2)
    (b,) = run.scheduler.waiting
    assert (b.num_swapped_tokens, b.host_block_table, b.num_computed_tokens) == (8, [0, 1], 0)
    run.scheduler.finish("b", FinishReason.ABORT, 2.0)
    assert (b.status, b.host_block_table) == (RequestStatus.FINISHED, [])
    run.scheduler.check_invariants()
    run.step()
    assert num_host_free(run.scheduler) == 8


def test_only_what_the_prefix_cache_lost_is_copied_back():
    run = tight_run(caching=True, a_tokens=9)
    plans = run.to_end()
    assert [len(plan.swap_outs) for plan in plans if plan.swap_outs] == [2]
    assert [len(plan.swap_ins) for plan in plans if plan.swap_ins] == [1]  # a took the second of its blocks


def test_nothing_is_copied_back_while_the_prefix_cache_has_it():
    run = tight_run(caching=True)
    plans = run.to_end()
    assert any(plan.swap_outs for plan in plans)
    assert not any(plan.swap_ins for plan in plans)
    assert num_host_free(run.scheduler) == 8


def test_blocks_that_came_back_are_found_by_others():
    run = tight_run(caching=True)
    run.to_end()
    scheduler = run.scheduler
    late = make_request("late", prompt=[token_at("b", i) for i in range(8)] + [7], max_tokens=1)
    run.add(late)
    run.to_end()
    assert late.num_cached_tokens == 8
    assert scheduler.stats.num_blocks_used == 0


def test_the_rule_weighs_bytes_both_ways_against_tokens():
    costs = SwapCosts(bytes_per_block=100, out_bytes_per_s=1000.0, in_bytes_per_s=500.0, prefill_s_per_token=0.01)
    assert worth_swapping(costs, num_blocks=1, num_tokens=31)  # 0.3 s against 0.31 s
    assert not worth_swapping(costs, num_blocks=1, num_tokens=30)


def test_random_load_swaps_in_every_way():
    """The property tests above these worlds check the contents; here, that they get where it matters."""
    num_in = num_partial = num_outs = 0
    for seed in (9, 16, 17, 21, 22, 23, 25):  # of the first thirty, those that swap
        world = make_world(Random(seed))
        for _ in range(200):
            world.act()
        world.drain()
        world.check_outcomes()
        stats = world.scheduler.stats
        num_outs += stats.num_swapped_out_blocks
        num_in += stats.num_swapped_in_blocks
        num_partial += 0 < stats.num_swapped_in_blocks < stats.num_swapped_out_blocks
    assert num_outs > 40
    assert num_in > 20
    assert num_partial > 0
