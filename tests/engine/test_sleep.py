"""An engine that ends because nobody asks: no death, no request lost, one start for all who come."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from maitred.config import ProcessConfig
from maitred.core.errors import ConfigError, EngineDead, UnsupportedParameter
from maitred.core.request import FinishReason
from maitred.engine import restarts
from maitred.engine.client import EngineClient
from tests.engine.clients import PROMPT, ask, follow, running_client, tokens
from tests.engine.fake_child import Gate, expected
from tests.waiting import is_gone, until_async


@pytest.fixture
def gate(tmp_path) -> Gate:
    return Gate(tmp_path, 10)


def process_of(engine: EngineClient) -> psutil.Process:
    child = engine.supervisor._child
    assert child is not None
    return psutil.Process(child.pid)


async def ticks(engine: EngineClient, count: int = 3) -> None:
    """Its supervisor has looked so often."""
    for _ in range(count):
        before = engine.supervisor._watchdog._asked_at
        await until_async(lambda before=before: engine.supervisor._watchdog._asked_at != before)


async def test_who_comes_to_a_sleeping_engine_waits_for_one_start_and_gets_the_same_tokens():
    async with running_client() as engine:
        before = await follow(engine, ask("before"))
        process = process_of(engine)
        await engine.sleep()
        assert is_gone(process)
        state = engine.state()
        assert (state.alive, state.asleep, state.loading, state.error) == (True, True, False, None)
        told = await asyncio.gather(*(follow(engine, ask(f"r{i}")) for i in range(8)))
        assert all(tokens(each) == tokens(before) == expected(PROMPT, 60) for each in told)
        state = engine.state()
        assert (state.asleep, state.num_sleeps, state.num_restarts, state.num_resumed) == (False, 1, 0, 0)
        assert state.wake_s > 0
        assert state.num_generated_tokens == 9 * 60, "counters go on over both"


async def test_an_engine_sleeps_by_itself_when_nobody_asks_and_not_before(gate: Gate):
    async with running_client(gate.habit, sleep_after_s=0.1) as engine:
        running = asyncio.create_task(follow(engine, ask()))
        await until_async(lambda: engine.state().num_generated_tokens >= 10)
        await ticks(engine)
        assert not engine.state().asleep
        gate.open()
        assert tokens(await running) == expected(PROMPT, 60)
        await until_async(lambda: engine.state().asleep)
        assert tokens(await follow(engine, ask("again"))) == expected(PROMPT, 60)


async def test_sleep_waits_for_requests_or_ends_them(gate: Gate):
    async with running_client(gate.habit) as engine:
        running = asyncio.create_task(follow(engine, ask()))
        await until_async(lambda: engine.state().num_generated_tokens >= 10)
        waiting = asyncio.create_task(engine.sleep())
        await ticks(engine)
        assert not waiting.done()
        aborting = asyncio.create_task(engine.sleep(abort=True))
        await ticks(engine)  # else the request may have ended before it is told
        gate.open()  # its step has to end
        assert (await running)[-1].finish_reason is FinishReason.ABORT
        await asyncio.gather(waiting, aborting)
        assert engine.state().asleep
        await engine.wake_up()
        assert not engine.state().asleep
        await engine.wake_up()  # nothing to do


async def test_whose_sleep_was_given_up_does_not_put_it_to_sleep_later(gate: Gate):
    async with running_client(gate.habit) as engine:
        running = asyncio.create_task(follow(engine, ask()))
        await until_async(lambda: engine.state().num_generated_tokens >= 10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.sleep(), 0.05)
        gate.open()
        await running
        await ticks(engine)
        assert engine.state().num_sleeps == 0


async def test_who_comes_while_the_engine_ends_is_served_by_the_next():
    async with running_client() as engine:
        falling = asyncio.create_task(engine.sleep())
        await until_async(lambda: engine.state().asleep)
        assert tokens(await follow(engine, ask())) == expected(PROMPT, 60)
        await falling
        assert engine.state().num_sleeps == 1


async def test_questions_to_a_sleeping_engine_are_refused_and_do_not_wake_it():
    async with running_client() as engine:
        await engine.sleep()
        with pytest.raises(EngineDead, match="is asleep; the next request wakes it"):
            await engine.live_view()
        assert engine.state().asleep


async def test_an_engine_that_dies_while_it_wakes_is_started_again_as_after_any_death(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    async with running_client(gate.habit) as engine:
        await engine.sleep()
        gate.shut()
        running = asyncio.create_task(follow(engine, ask()))
        await until_async(lambda: engine.supervisor._child is not None)
        os.kill(process_of(engine).pid, signal.SIGKILL)
        await until_async(lambda: engine.state().num_restarts == 1)
        gate.open()
        assert tokens(await running) == expected(PROMPT, 60)
        assert not engine.state().asleep


async def test_an_engine_in_the_servers_own_process_refuses():
    async with running_client(transport="thread", in_process=True) as engine:
        with pytest.raises(UnsupportedParameter, match="serve without --in-process"):
            await engine.sleep()
    with pytest.raises(ConfigError, match="leave in_process out"):
        ProcessConfig(in_process=True, sleep_after_s=1.0)


async def test_a_sleeping_engine_is_closed_like_any_other():
    async with running_client() as engine:
        await engine.sleep()
    with pytest.raises(EngineDead):
        await engine.wake_up()
