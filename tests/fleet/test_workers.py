"""Several engines as one replica, each a real process without a model: who gets what, and what a death leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from maitred.config import SchedulerConfig
from maitred.core.clock import WallClock
from maitred.core.errors import ConfigError, EngineDead
from maitred.core.replica import DraftCounts, ReplicaState, state_of_all
from maitred.core.request import FinishReason, RequestSpec, SamplingParams
from maitred.core.step import RequestProgress
from maitred.engine import child_process, restarts, supervisor
from maitred.engine.frames import BlockChanges
from maitred.engine.live_requests import ProgressStream
from maitred.engine.live_view import FIRST_OWNER, MAX_CELLS, MAX_RUNNING, OTHER, LiveView, live_view, live_view_of_all
from maitred.fleet.serve_engine import read_options, start_engine
from maitred.fleet.workers import Workers
from maitred.scheduler.queue_view import queue_of_all, queue_view
from maitred.scheduler.scheduler import Scheduler
from tests.engine.clients import POISON, PROMPT, ask, start_of, tokens
from tests.engine.fake_child import Gate, expected
from tests.fakes import FakeExecutor, make_request, make_samples, make_scheduler
from tests.waiting import until_async


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


def test_counters_and_pages_of_the_queue_are_of_all_and_a_dead_one_is_told_when_all_are():
    up = ReplicaState(num_blocks=8, num_steps=3, heartbeat_age_s=0.2, num_finished={FinishReason.STOP: 2})
    drafts = DraftCounts(1, 2, [1])
    down = ReplicaState(alive=False, error="it died", loading=True, num_steps=4, heartbeat_age_s=0.1, drafts=drafts)
    both = state_of_all([up, down], 5, {FinishReason.STOP: 1})
    assert (both.alive, both.error, both.loading, both.num_blocks, both.num_steps) == (True, None, False, 8, 7)
    assert (both.num_waiting, both.heartbeat_age_s, both.num_finished[FinishReason.STOP]) == (5, 0.2, 3)
    assert both.drafts == drafts
    none = state_of_all([down, down], 0, {})
    assert (none.alive, none.loading, none.error) == (False, True, "worker 0: it died; worker 1: it died")
    schedulers = [make_scheduler(max_num_seqs=1) for _ in range(2)]
    for number, scheduler in enumerate(schedulers):
        for i in range(3):
            scheduler.add(make_request(f"{number}{i}"), 0.0)
    views = [queue_view(scheduler, 1.0) for scheduler in schedulers]
    page = queue_of_all(views, views[0].waiting[:1], 2, 3)
    assert (page.num_waiting, page.max_num_seqs, page.offset) == (7, 2, 2)
    assert [(request.position, request.request_id) for request in page.waiting] == [(2, "02"), (3, "10"), (4, "11")]


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


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(child_process, "STOP_S", 0.3)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path, 10)


@asynccontextmanager
async def running_workers(
    habits: str = "", *, num_workers: int = 2, max_num_seqs: int = 8, policy: str = "fcfs", **process: Any
) -> AsyncIterator[Workers]:
    """All there; at the end nothing is left of any request."""
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, policy=policy)
    workers = Workers(start_of(habits, scheduler, mixed_workers=num_workers, **process), WallClock())
    workers.begin()
    workers.wait()
    workers.attach(asyncio.get_running_loop())
    try:
        await until_async(lambda: all(worker.is_up for worker in workers._workers))
        yield workers
        workers._core.check_invariants()
        assert not workers._requests.prompts
        assert not workers._requests.requests
        assert not any(worker.client._live for worker in workers._workers)
    finally:
        await workers.close()


class Following:
    """A request under way, and what came of it."""

    def __init__(self, workers: Workers, spec: RequestSpec, stream: ProgressStream | None = None) -> None:
        self.told: list[RequestProgress] = []
        self._stream = stream or workers.submit(spec)[0]
        self.task = asyncio.create_task(self._follow())

    @classmethod
    def samples(cls, workers: Workers, specs: Sequence[RequestSpec]) -> list[Following]:
        """Samples of one prompt."""
        return [cls(workers, *each) for each in zip(specs, workers.submit(*specs), strict=True)]

    async def _follow(self) -> list[int]:
        async for progress in self._stream:
            self.told.append(progress)
        return tokens(self.told)

    async def has(self, num_tokens: int) -> None:
        await until_async(lambda: len(tokens(self.told)) >= num_tokens)

    @property
    def reason(self) -> FinishReason | None:
        return self.told[-1].finish_reason


def running_by_worker(workers: Workers) -> list[int]:
    return [len(worker.client._live) for worker in workers._workers]


def kill(workers: Workers, number: int, by: int = signal.SIGKILL) -> None:
    pid = workers.workers()[number].pid
    assert pid is not None
    os.kill(pid, by)


def after(of: Workers, change: int) -> Callable[[], bool]:
    """Whether so many workers have died since."""
    before = of.state().num_restarts
    return lambda: of.state().num_restarts >= before + change


async def test_requests_are_spread_and_a_prompt_goes_where_its_blocks_are(gate: Gate):
    async with running_workers(gate.habit) as workers:
        long = list(range(1, 41))
        first, other = Following(workers, ask("a", long)), Following(workers, ask("b", [90, 91, 92, 93, 94]))
        assert running_by_worker(workers) == [1, 1]
        gate.open()
        assert await first.task == expected(long, 60)
        assert await other.task == expected([90, 91, 92, 93, 94], 60)
        index = workers._core.index
        await until_async(lambda: index.num_keys_of(0) and index.num_keys_of(1))
        gate.open_to(10)
        loaded = [Following(workers, ask(name, long)) for name in ("c", "d")]
        assert running_by_worker(workers) == [2, 0], "40 cached tokens outweigh one more request"
        gate.open()
        for following in loaded:
            assert await following.task == expected(long, 60)
        assert loaded[0].told[-1].charges.num_cached_tokens == 36


async def test_samples_of_a_prompt_share_a_worker_and_give_what_they_gave_alone(gate: Gate):
    specs = [
        structs.replace(state.spec, seed=7)
        for state in make_samples("p", 4, prompt=PROMPT, max_tokens=60, sampling=SamplingParams(n=4, max_tokens=60))
    ]
    async with running_workers(gate.habit) as workers:
        samples = Following.samples(workers, specs)
        assert sorted(running_by_worker(workers)) == [0, 4]
        gate.open()
        for number, sample in enumerate(samples):
            assert await sample.task == expected(PROMPT, 60, seed=7, sample_index=number)


@pytest.mark.parametrize("n", [1, 4])
async def test_a_killed_worker_s_requests_go_on_token_for_token_with_another(gate: Gate, n: int):
    """One that is not started again, so it is the other that goes on."""
    sampling = SamplingParams(n=n, max_tokens=60)
    states = make_samples("p", n, prompt=PROMPT, max_tokens=60, sampling=sampling)
    async with running_workers(gate.habit, max_restarts=0) as workers:
        heard: list[str] = []
        workers.on_progress = lambda progress, num_queued, now: heard.extend(p.request_id for p in progress)
        samples = Following.samples(workers, [state.spec for state in states])
        await samples[0].has(10)
        assert running_by_worker(workers) == [n, 0]
        kill(workers, 0)
        await until_async(lambda: running_by_worker(workers) == [0, n])
        gate.open()
        for number, sample in enumerate(samples):
            assert await sample.task == expected(PROMPT, 60, sample_index=number)
        assert samples[0].told[-1].timing.stall_s > 0
        state = workers.state()
        assert (state.alive, state.num_resumed, state.num_generated_tokens) == (True, n, n * 60)
        assert state.num_prompt_tokens == sum(s.told[-1].charges.num_prompt_tokens for s in samples)
        assert [worker.alive for worker in workers.workers()] == [False, True]
        assert set(heard) == {state.spec.request_id for state in states}
        assert await Following(workers, ask("later", [3, 4])).task == expected([3, 4], 60)


async def test_without_another_worker_they_wait_for_the_next_engine(gate: Gate):
    async with running_workers(gate.habit) as workers:
        asked = [Following(workers, ask(f"r{i}", [i + 1, 50])) for i in range(3)]
        await asyncio.gather(asked[0].has(10), asked[1].has(10))
        is_over = after(workers, 2)
        gate.shut()
        kill(workers, 0)
        kill(workers, 1)
        await until_async(is_over)
        assert workers.state().loading
        newcomer = Following(workers, ask("new", [77, 50]))
        assert workers.state().num_waiting == 4
        gate.open()
        for i, each in enumerate(asked):
            assert await each.task == expected([i + 1, 50], 60)
        assert await newcomer.task == expected([77, 50], 60)
        await until_async(lambda: all(worker.alive for worker in workers.workers()))


async def test_when_the_last_worker_is_given_up_everybody_is_told(gate: Gate):
    async with running_workers(gate.habit, max_num_seqs=1, max_restarts=0) as workers:
        asked = [Following(workers, ask(f"r{i}")) for i in range(5)]
        kill(workers, 0)
        kill(workers, 1)
        for each in asked:
            with pytest.raises(EngineDead, match="SIGKILL"):
                await each.task
        with pytest.raises(EngineDead):
            await Following(workers, ask("late")).task


async def test_one_that_kills_engines_ends_and_everybody_else_goes_on():
    async with running_workers("die_at=3,step_s=0.002", max_restarts=20) as workers:
        good = [Following(workers, ask(f"good{i}", [i + 1, 50], max_tokens=100)) for i in range(4)]
        bad = Following(workers, ask("bad", POISON))
        with pytest.raises(EngineDead, match="engines died while they had this request"):
            await bad.task
        for i, each in enumerate(good):
            assert await each.task == expected([i + 1, 50], 100)
        assert workers.state().num_restarts <= 5


async def test_who_has_no_slot_is_held_in_the_policy_s_order_and_ends_on_time():
    now = WallClock().now
    async with running_workers("step_s=0.003", max_num_seqs=1) as workers:
        running = [Following(workers, ask(f"r{i}", max_tokens=450)) for i in range(4)]  # a slot, and one in reserve
        held = [Following(workers, ask(f"h{i}", priority=i, arrived_at=now())) for i in (3, 2, 1)]
        late = Following(workers, ask("late", start_by=now() + 0.1))
        too_long = Following(workers, ask("long", finish_by=now() + 0.1))
        assert running_by_worker(workers) == [2, 2]
        assert (await late.task, late.reason) == ([], FinishReason.QUEUE_TIMEOUT)
        assert (await too_long.task, too_long.reason) == ([], FinishReason.TIMEOUT)
        names = [request.request_id for request in (await workers.queue_view(offset=0, limit=10)).waiting]
        assert names[2:] == ["h3", "h2", "h1"]
        live = await workers.live_view()
        assert ([request.id for request in live.waiting], live.max_num_seqs) == (names, 2)
        await workers.configure(SchedulerConfig(max_num_seqs=1, policy="priority"))
        assert [request.request_id for request, _ in workers._requests.held()] == ["h1", "h2", "h3"]
        with pytest.raises(ConfigError):
            await workers.configure(SchedulerConfig(policy="none such"))
        workers.abort("h3")
        workers.abort("h2", FinishReason.SHED)
        assert (await held[0].task, held[0].reason) == ([], FinishReason.ABORT)
        assert (await held[1].task, held[1].reason) == ([], FinishReason.SHED)
        for i in (0, 2, 3):
            workers.abort(f"r{i}")
        assert await held[2].task == expected(PROMPT, 60)
        assert await running[1].task == expected(PROMPT, 450)
        await asyncio.gather(*(each.task for each in running))
        ended = {reason.value: count for reason, count in workers.state().num_finished.items() if count}
        assert ended == {"length": 2, "abort": 4, "shed": 1, "queue_timeout": 1, "timeout": 1}


async def test_a_stopped_worker_gets_nobody_new_and_loses_nothing(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "SILENT_S", 0.75)
    async with running_workers(gate.habit) as workers:
        first = Following(workers, ask("a"))
        await first.has(10)
        kill(workers, 0, signal.SIGSTOP)
        await until_async(lambda: not workers.workers()[0].alive)
        assert not workers._workers[0].is_up  # from the same moment on
        others = [Following(workers, ask(f"b{i}", [i + 1, 50])) for i in range(3)]
        assert running_by_worker(workers) == [1, 3]
        gate.open()
        for i, each in enumerate(others):
            assert await each.task == expected([i + 1, 50], 60)
        kill(workers, 0, signal.SIGCONT)
        assert await first.task == expected(PROMPT, 60)
        await until_async(lambda: workers._workers[0].is_up)


async def test_workers_sleep_and_one_wakes_for_one_request():
    async with running_workers() as workers:
        await workers.sleep()
        assert workers.state().asleep
        assert await Following(workers, ask()).task == expected(PROMPT, 60)
        assert [worker.asleep for worker in workers.workers()] == [False, True]
        await workers.wake_up()
        assert not any(worker.asleep for worker in workers.workers())


async def test_a_router_hears_of_a_block_while_any_worker_has_it():
    found: set[bytes] = set()

    def hear(changes: BlockChanges | None) -> None:
        if changes is None:
            found.clear()
        else:
            found.update(changes.stored)
            found.difference_update(changes.removed)

    async with running_workers(max_restarts=0) as workers:
        one, two = ask("a", list(range(1, 41))), ask("b", [9] * 20)
        await asyncio.gather(Following(workers, one).task, Following(workers, two).task)
        workers.tell_router(hear)
        await until_async(lambda: found >= {*one.block_hashes, *two.block_hashes})
        kill(workers, 0)
        await until_async(lambda: not found.issuperset(one.block_hashes) and found.issuperset(two.block_hashes))


async def test_a_server_tells_which_role_no_worker_can_serve(gate: Gate):
    workers = Workers(start_of("", SchedulerConfig(max_num_seqs=8), prefill_workers=1, decode_workers=1), WallClock())
    workers.begin()
    workers.wait()
    workers.attach(asyncio.get_running_loop())

    def lacks(role: str | None) -> bool:
        return workers.state().lacking == (None if role is None else f"no {role} worker is there yet")

    try:
        assert lacks("decode")
        await until_async(lambda: lacks(None))
        assert await Following(workers, ask("a", max_tokens=4)).task
        await workers.sleep()
        assert lacks(None), "a request wakes one"
        await workers.wake_up()
        await until_async(lambda: all(view.alive and not view.asleep for view in workers.workers()))
        for number, role in enumerate(("prefill", "decode")):
            kill(workers, number)
            await until_async(lambda role=role: lacks(role))
            await until_async(lambda: lacks(None))
        workers._core.check_invariants()
    finally:
        await workers.close()


@pytest.mark.parametrize(
    ("slo", "ttft_s", "tpot_s"),
    [((), None, None), (("ttft:500ms", "tpot:40ms"), 0.5, 0.04), (("itl:80ms", "e2e:9s"), None, 0.08)],
)
def test_workers_are_chosen_so_that_what_the_server_promises_is_kept(slo: tuple[str, ...], ttft_s: Any, tpot_s: Any):
    workers = Workers(start_of("", SchedulerConfig(), mixed_workers=2), WallClock(), slo=slo)
    rules = workers._core.handover
    assert (rules.ttft_s, rules.tpot_s) == (ttft_s, tpot_s)


async def test_ray_s_replica_may_have_several_workers():
    engine = await start_engine(read_options({"mixed_workers": 2, "max_num_seqs": 4}))
    try:
        await until_async(lambda: engine._replica.state().num_blocks == 2 * 4 * 2048 // 16)
        engine.check()
    finally:
        await engine._replica.close()
