"""What the live view says of a scheduler, and that its size is bounded."""

from __future__ import annotations

import msgspec
import pytest

from maitred.core.clock import ManualClock
from maitred.engine.live_view import (
    CACHED,
    FIRST_OWNER,
    FREE,
    MAX_CELLS,
    MAX_RUNNING,
    MAX_TENANTS,
    MAX_WAITING,
    OTHER,
    SHARED,
    LiveView,
    live_view,
    look_at,
    run_lengths,
)
from maitred.scheduler.engine_core import EngineCore
from maitred.scheduler.scheduler import Scheduler
from tests.engine.clients import ask, follow, running_client
from tests.fakes import FakeExecutor, make_request, make_samples, make_scheduler, token_at


def stepped(scheduler: Scheduler, steps: int, executor: FakeExecutor, now: float = 1.0) -> None:
    for _ in range(steps):
        plan = scheduler.schedule(now)
        scheduler.update(plan, executor.execute(plan), now)


def cells_of(view: LiveView) -> list[int]:
    runs = view.blocks.runs
    return [code for code, length in zip(runs[::2], runs[1::2], strict=True) for _ in range(length)]


def test_phases_times_and_lengths_are_the_requests_own():
    scheduler, executor = make_scheduler(max_num_batched_tokens=8, num_blocks=64), FakeExecutor()
    scheduler.add(make_request("long", prompt=20, max_tokens=30, arrived_at=0.25), 0.5)
    stepped(scheduler, 1, executor)
    (long,) = live_view(scheduler, 2.0).running
    assert (long.id, long.phase, long.arrived_at, long.started_at, long.first_token_at) == (
        "long",
        "prefill",
        0.25,
        1.0,
        None,
    )
    assert (long.num_computed_tokens, long.num_prompt_tokens, long.num_blocks) == (8, 20, 5)
    stepped(scheduler, 3, executor, now=3.0)
    (long,) = live_view(scheduler, 4.0).running
    assert (long.phase, long.first_token_at, long.num_output_tokens) == ("decode", 3.0, 2)


def test_drafts_are_told_of_each_request_and_of_all():
    scheduler, executor = make_scheduler(num_drafts=lambda request, num_rows: 3), FakeExecutor(draft_at=_wrong_at_odd)
    for name in ("a", "b"):
        scheduler.add(make_request(name, prompt=8, max_tokens=30, prediction_token_ids=(5,) * (name == "b")), 0.0)
    stepped(scheduler, 2, executor)
    view = live_view(scheduler, 2.0)
    assert [request.num_draft_tokens for request in view.running] == [6, 6]
    assert all(0 < request.num_accepted_tokens < 6 for request in view.running)
    assert view.counters.num_draft_tokens == 12
    assert view.counters.num_accepted_tokens == sum(request.num_accepted_tokens for request in view.running)


def _wrong_at_odd(request_id: str, position: int) -> int:
    return 0 if position % 2 else token_at(request_id, position)


def test_those_who_wait_come_with_their_state_and_reason():
    scheduler, executor = make_scheduler(max_num_seqs=1, policy="priority", num_blocks=64), FakeExecutor()
    scheduler.add(make_request("low", priority=5, max_tokens=50), 0.0)
    stepped(scheduler, 2, executor)
    scheduler.add(make_request("late", priority=5, arrived_at=2.0), 2.0)
    scheduler.add(make_request("urgent", priority=0, max_tokens=50, arrived_at=2.0), 2.0)
    stepped(scheduler, 1, executor, now=2.0)
    view = live_view(scheduler, 3.0)
    assert [r.id for r in view.running] == ["urgent"]
    assert [(w.id, w.state) for w in view.waiting] == [("low", "preempted"), ("late", "waiting")]
    assert view.waiting[0].reason == "first in line: all 1 slots are taken"
    assert view.waiting[0].num_output_tokens == 2
    assert (view.num_running, view.num_waiting, view.counters.num_preemptions) == (1, 2, 1)


def test_a_sample_whose_leader_computes_the_prompt_is_told_apart():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    for sample in make_samples("many", 3, prompt=20):
        scheduler.add(sample, 0.0)
    stepped(scheduler, 1, FakeExecutor())
    waiting = live_view(scheduler, 1.0).waiting
    assert [(w.id, w.state) for w in waiting] == [("many-1", "sibling"), ("many-2", "sibling")]
    assert waiting[0].reason == "another sample of the same prompt computes the prompt first"


def test_the_block_map_is_the_pool_block_by_block():
    scheduler, executor = make_scheduler(num_blocks=40, max_num_batched_tokens=200), FakeExecutor()
    prefix = list(range(2000, 2012))
    scheduler.add(make_request("gone", prompt=[*range(3000, 3009)], max_tokens=1), 0.0)
    stepped(scheduler, 1, executor)
    scheduler.add(make_request("one", prompt=[*prefix, 1, 2], max_tokens=50, arrived_at=1.0), 1.0)
    stepped(scheduler, 1, executor)
    scheduler.add(make_request("two", prompt=[*prefix, 3], max_tokens=50, arrived_at=2.0), 2.0)
    stepped(scheduler, 2, executor, now=2.0)
    view = live_view(scheduler, 3.0)
    kv = scheduler.kv_cache
    expected = []
    for block in range(40):
        owners = [i for i, r in enumerate(view.running) if block in scheduler.request(r.id).block_table]
        if len(owners) > 1:
            expected.append(SHARED)
        elif owners:
            expected.append(FIRST_OWNER + owners[0])
        else:
            expected.append(CACHED if block in kv.findable else FREE)
    assert cells_of(view) == expected
    assert {SHARED, CACHED, FREE, FIRST_OWNER, FIRST_OWNER + 1} == set(expected)
    assert (view.blocks.num_used, view.blocks.blocks_per_cell) == (kv.num_used, 1)


@pytest.mark.parametrize("num_blocks", [1, 1023, 1024, 1025, 20_000, 100_001])
def test_the_map_covers_every_block_in_a_bounded_number_of_cells(num_blocks: int):
    scheduler = make_scheduler(num_blocks=num_blocks)
    blocks = live_view(scheduler, 0.0).blocks
    num_cells = sum(blocks.runs[1::2])
    assert num_cells <= MAX_CELLS
    assert (num_cells - 1) * blocks.blocks_per_cell < num_blocks <= num_cells * blocks.blocks_per_cell


def test_of_long_tables_enough_is_read_to_show_them():
    scheduler = make_scheduler(num_blocks=40_000, max_num_batched_tokens=200_000, max_num_seqs=4)
    for name in ("a", "b"):
        scheduler.add(make_request(name, prompt=60_000, max_tokens=5), 0.0)
    stepped(scheduler, 1, FakeExecutor())
    view = live_view(scheduler, 1.0)
    held = [cells_of(view).count(FIRST_OWNER + i) * view.blocks.blocks_per_cell for i in range(2)]
    assert all(abs(blocks - 15_000) < 200 for blocks in held), held
    assert OTHER not in cells_of(view)


def test_a_long_shared_prefix_hides_nobodys_own_blocks():
    scheduler, executor = make_scheduler(num_blocks=1000, max_num_batched_tokens=4096, max_num_seqs=40), FakeExecutor()
    prefix = list(range(5000, 6000))
    scheduler.add(make_request("r0", prompt=[*prefix, 1], max_tokens=50), 0.0)
    stepped(scheduler, 1, executor)
    for i in range(1, 40):
        scheduler.add(make_request(f"r{i}", prompt=[*prefix, i + 1], max_tokens=50, arrived_at=float(i)), 1.0)
    stepped(scheduler, 2, executor)
    codes = cells_of(live_view(scheduler, 2.0))
    assert codes.count(SHARED) == 250
    assert {FIRST_OWNER + i for i in range(40)} <= set(codes)


def test_its_size_is_bounded_whatever_is_served():
    scheduler = make_scheduler(num_blocks=30_000, max_num_seqs=512, max_num_batched_tokens=60_000, policy="vtc")
    for i in range(900):
        scheduler.add(
            make_request(f"{i:x}.{'n' * 128}-{i}", prompt=37, max_tokens=90, tenant=f"t{i % 50}" * 20, weight=2.0), 0.0
        )
    stepped(scheduler, 3, FakeExecutor())
    view = live_view(scheduler, 2.0)
    assert (view.num_running, view.num_waiting) == (512, 388)
    assert (len(view.running), len(view.waiting), len(view.tenants)) == (MAX_RUNNING, MAX_WAITING, MAX_TENANTS)
    assert len({request.id for request in view.running}) == MAX_RUNNING, "shortened, and still told apart"
    assert len(msgspec.json.encode(view)) < 64 * 1024


def test_it_crosses_a_process_border_as_it_is():
    scheduler = make_scheduler()
    scheduler.add(make_request("r"), 0.0)
    stepped(scheduler, 1, FakeExecutor())
    view = live_view(scheduler, 2.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=LiveView) == view


def test_looking_tells_what_it_cost_and_changes_nothing():
    class Turning(ManualClock):
        def now(self) -> float:
            self.advance(0.5)
            return super().now()

    scheduler = make_scheduler()
    scheduler.add(make_request("r"), 0.0)
    core = EngineCore(scheduler, FakeExecutor(), Turning())
    core.step()
    before = scheduler.stats
    view = look_at(core, Turning())
    assert view.cost_s == 0.5
    assert view.execute_s == core.execute_s > 0
    assert scheduler.stats == before
    scheduler.check_invariants()


def test_runs_and_lengths_alternate():
    assert run_lengths([0, 0, 3, 0]) == (0, 2, 3, 1, 0, 1)
    assert run_lengths([]) == ()


def test_the_first_in_line_are_those_of_the_whole_order():
    for policy in ("fcfs", "priority", "vtc", "mlfq", "sjf", "rr"):
        scheduler = make_scheduler(policy=policy, max_num_seqs=2, num_blocks=200)
        executor = FakeExecutor()
        for i in range(60):
            fields = {"prompt": 4 + i * 7 % 23, "priority": i % 3, "tenant": f"t{i % 4}", "arrived_at": i * 0.01}
            scheduler.add(make_request(f"r{i}", max_tokens=3, **fields), 1.0)
            if i % 5 == 0:
                scheduler.abort(f"r{i // 2}", 1.0)
        stepped(scheduler, 6, executor)
        for count in (0, 1, 7, 100):
            assert scheduler.next_in_line(count) == list(scheduler.waiting[:count]), policy


async def test_an_engine_in_its_own_process_gives_the_same_view():
    async with running_client() as engine:
        await follow(engine, ask(max_tokens=7))
        view = await engine.live_view()
    assert (view.num_running, view.num_waiting) == (0, 0)
    assert (view.counters.num_generated_tokens, view.counters.num_finished) == (7, 1)
    assert sum(view.blocks.runs[1::2]) * view.blocks.blocks_per_cell >= view.blocks.num_blocks > 0
