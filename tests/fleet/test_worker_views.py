"""Several engines' views as one: sums, and the same bounds as an engine's own."""

from __future__ import annotations

from maitred.core.replica import DraftCounts, ReplicaState
from maitred.core.request import FinishReason
from maitred.engine.live_view import FIRST_OWNER, MAX_CELLS, MAX_RUNNING, OTHER, LiveView, live_view
from maitred.fleet.workers import live_view_of_all, queue_of_all, state_of_all
from maitred.scheduler.queue_view import queue_view
from maitred.scheduler.scheduler import Scheduler
from tests.fakes import FakeExecutor, make_request, make_scheduler


def busy(prefix: str, num_requests: int, num_blocks: int = 64) -> Scheduler:
    """After a step; as many as fit run."""
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_seqs=2 * MAX_RUNNING, max_num_batched_tokens=512)
    for i in range(num_requests):
        scheduler.add(make_request(f"{prefix}{i}", prompt=4, tenant=prefix), 0.0)
    plan = scheduler.schedule(1.0)
    scheduler.update(plan, FakeExecutor().execute(plan), 1.0)
    return scheduler


def cells_of(view: LiveView) -> list[int]:
    runs = view.blocks.runs
    return [code for code, length in zip(runs[::2], runs[1::2], strict=True) for _ in range(length)]


def test_counters_add_up_and_a_dead_one_is_told_only_when_all_are():
    up = ReplicaState(num_blocks=8, num_steps=3, heartbeat_age_s=0.2, num_finished={FinishReason.STOP: 2})
    drafts = DraftCounts(1, 2, [1])
    down = ReplicaState(alive=False, error="it died", loading=True, num_steps=4, heartbeat_age_s=0.1, drafts=drafts)
    both = state_of_all([up, down], 5, {FinishReason.STOP: 1})
    assert (both.alive, both.error, both.loading, both.num_blocks, both.num_steps) == (True, None, False, 8, 7)
    assert (both.num_waiting, both.heartbeat_age_s, both.num_finished[FinishReason.STOP]) == (5, 0.2, 3)
    assert both.drafts == drafts
    none = state_of_all([down, down], 0, {})
    assert (none.alive, none.loading, none.error) == (False, True, "worker 0: it died; worker 1: it died")


def test_requests_keep_their_blocks_on_the_map():
    views = [live_view(busy(name, 3), 2.0) for name in "ab"]
    both = live_view_of_all(views, ())
    assert [request.id for request in both.running] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert (both.num_running, both.blocks.num_blocks, both.blocks.num_used) == (6, 128, 2 * views[0].blocks.num_used)
    cells = cells_of(both)
    for number, request in enumerate(both.running):
        assert cells.count(FIRST_OWNER + number) == request.num_blocks
    assert [(share.name, share.num_running) for share in both.tenants] == [("a", 3), ("b", 3)]
    assert both.counters.num_steps == 2


def test_the_view_of_many_is_as_small_as_that_of_one():
    views = [live_view(busy(name, MAX_RUNNING - 10, 1000), 2.0) for name in "abc"]
    both = live_view_of_all(views, ())
    assert len(both.running) == MAX_RUNNING
    assert len(cells_of(both)) <= MAX_CELLS
    assert both.blocks.blocks_per_cell == 3
    assert max(cells_of(both)) < FIRST_OWNER + MAX_RUNNING
    assert OTHER in cells_of(both), "those past the ones named"


def test_a_page_of_the_queue_is_counted_over_all():
    schedulers = [make_scheduler(max_num_seqs=1) for _ in range(2)]
    for number, scheduler in enumerate(schedulers):
        for i in range(3):
            scheduler.add(make_request(f"{number}{i}"), 0.0)
    views = [queue_view(scheduler, 1.0) for scheduler in schedulers]
    page = queue_of_all(views, views[0].waiting[:1], 2, 3)
    assert (page.num_waiting, page.max_num_seqs, page.offset) == (7, 2, 2)
    assert [(request.position, request.request_id) for request in page.waiting] == [(2, "02"), (3, "10"), (4, "11")]
