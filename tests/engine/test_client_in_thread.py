"""An engine in a thread of this process: streams of text, aborts, stop strings, death, and a step that does not end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from maitred.core.errors import EngineDead
from maitred.core.replica import HandoverCounts
from maitred.core.request import FinishReason, SamplingParams
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.engine.output import TextDelta, stream_text
from maitred.scheduler.engine_core import StepListener
from tests.engine.clients import PROMPT, ask, follow, running_client, tokens
from tests.engine.fake_child import Gate, expected
from tests.engine.worlds import client_of, scripted_core, scripted_engine, served_model
from tests.fakes import FakeExecutor
from tests.waiting import until_async

STEP_S = 0.05  # 200 tokens then take ten seconds


class SlowExecutor(FakeExecutor):
    """Takes its time, so that there is something to interrupt."""

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        time.sleep(STEP_S)
        return super().execute(plan)


class BrokenExecutor(FakeExecutor):
    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        raise RuntimeError("the model fell over")


def as_class(kind: type[FakeExecutor]):
    def wrap(executor: FakeExecutor) -> FakeExecutor:
        executor.__class__ = kind
        return executor

    return wrap


def long(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 200, "ignore_eos": True, **fields})  # type: ignore[arg-type]


class Counting(StepListener):
    def __init__(self, counts: HandoverCounts) -> None:
        self._counts = counts

    def figures(self) -> Mapping[str, Any]:
        return {"handovers": HandoverCounts() + self._counts}


async def test_what_an_idle_engine_counts_beside_its_steps_is_told_without_another_request():
    """KV that comes for a request that was only to fetch it: its pull ends in no step."""
    counts = HandoverCounts()
    core = scripted_core(served_model(), [5], 1, Counting(counts))
    client = client_of(core)
    client.attach(asyncio.get_running_loop())
    is_idle = threading.Event()
    core.call_soon(is_idle.set)
    await until_async(is_idle.is_set)
    core.call_soon(lambda: counts.add("moved"))
    await until_async(lambda: client.state().handovers.outcomes == {"moved": 1})
    await client.close()


async def test_what_is_called_before_the_engine_can_be_woken_is_run_at_its_start():
    core = scripted_core(served_model(), [5], 1)
    is_run = threading.Event()
    core.call_soon(is_run.set)
    client = client_of(core)
    await until_async(is_run.is_set)
    await client.close()


async def test_a_stream_gives_the_text_and_ends_with_a_reason_and_timing():
    engine, model, requests = scripted_engine("One soup, please.", SamplingParams(temperature=0.0, max_tokens=50))
    deltas = [delta async for delta in stream_text(engine, model, requests)]
    assert "".join(delta.text for delta in deltas) == "One soup, please."
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].timing is not None
    assert deltas[-1].timing.queue_s >= 0
    await engine.close()


async def test_samples_are_merged_and_each_ends_once():
    engine, model, requests = scripted_engine("One soup", SamplingParams(temperature=0.0, max_tokens=50, n=4))
    texts, ends = ["", "", "", ""], 0
    async for delta in stream_text(engine, model, requests):
        texts[delta.index] += delta.text
        ends += delta.finish_reason is not None
    assert (texts, ends) == (["One soup"] * 4, 4)
    await engine.close()


@pytest.mark.parametrize("n", [1, 4])
async def test_closing_a_stream_frees_every_block(n: int):
    engine, model, requests = scripted_engine("go on", long(n=n), wrap=as_class(SlowExecutor))
    stream = stream_text(engine, model, requests)
    await anext(stream)
    await until_async(lambda: engine.state().num_blocks_used > 0)  # as of the last report
    await stream.aclose()
    await until_async(lambda: engine.state().num_finished[FinishReason.ABORT] == n)
    await until_async(lambda: engine.state().num_blocks_used == 0)
    await engine.close()


async def test_cancelling_the_consumer_aborts_what_is_still_queued():
    engine, model, requests = scripted_engine("go on", long(), wrap=as_class(SlowExecutor))

    async def consume() -> list[TextDelta]:
        return [delta async for delta in stream_text(engine, model, requests)]

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_async(lambda: engine.state().num_finished[FinishReason.ABORT] == 1)
    await until_async(lambda: engine.state().num_blocks_used == 0)
    await engine.close()


async def test_a_stop_string_ends_the_request_in_the_engine_too():
    engine, model, requests = scripted_engine("a b c d e f g h", long(stop=["c"]), wrap=as_class(SlowExecutor))
    deltas = [delta async for delta in stream_text(engine, model, requests)]
    assert "".join(delta.text for delta in deltas) == "a b "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "c")
    assert deltas[-1].timing is not None
    await until_async(lambda: engine.state().num_finished[FinishReason.STOP] == 1)
    await until_async(lambda: engine.state().num_blocks_used == 0)
    await engine.close()


async def test_a_dead_engine_says_so_to_everybody_and_takes_nothing_more():
    """It may be started again `max_restarts` times, as one in a process may."""
    engine, model, requests = scripted_engine("x", long(), wrap=as_class(BrokenExecutor), max_restarts=0)
    with pytest.raises(EngineDead, match="the engine's thread ended: RuntimeError: the model fell over"):
        [delta async for delta in stream_text(engine, model, requests)]
    assert not engine.state().alive
    assert "the model fell over" in (engine.state().error or "")
    with pytest.raises(EngineDead):
        [delta async for delta in stream_text(engine, model, requests)]
    await engine.close()


async def test_close_ends_open_streams_and_the_thread():
    engine, model, requests = scripted_engine("x", long(), wrap=as_class(SlowExecutor))
    stream = stream_text(engine, model, requests)
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineDead, match="shut down"):
        [delta async for delta in stream]
    assert not any(thread.name == "maitred-engine" for thread in threading.enumerate())


async def test_a_step_that_does_not_end_is_told_while_it_lasts_and_its_requests_go_on_with_the_next_engine(
    tmp_path: Path,
):
    """Nobody can end a thread within its step: it ends after it, and another one is started."""
    gate = Gate(tmp_path, 10)
    async with running_client(gate.habit, transport="thread", step_timeout_s=0.5) as client:

        async def see_it() -> None:
            await until_async(lambda: not client.state().alive)
            assert client.state().error == "the engine has been in one step for 0.5 s; it ends with that step"
            assert client.state().num_restarts == 0
            gate.open()

        told = await follow(client, ask(seed=5), {10: see_it})
        assert tokens(told) == expected(PROMPT, 60, seed=5)
        await until_async(lambda: client.state().alive)
        assert client.state().num_restarts >= 1


async def test_closing_a_stream_twice_or_after_its_end_does_nothing():
    engine, _, requests = scripted_engine("x", SamplingParams(temperature=0.0, max_tokens=3))
    (stream,) = engine.submit(requests[0])
    items = [item async for item in stream]
    assert items[-1].finish_reason is not None
    await stream.aclose()
    await stream.aclose()
    engine.abort(requests[0].request_id)
    await engine.close()
