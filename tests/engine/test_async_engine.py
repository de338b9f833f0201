"""The engine as a Replica: streams, aborts, stop strings, death, and many requests at once."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Callable
from weakref import WeakSet

import msgspec
import pytest
from maitred.engine.async_engine import AsyncEngine

from maitred.clock import WallClock
from maitred.engine.core import EngineCore
from maitred.engine.output import TextDelta, stream_text
from maitred.engine.progress_streams import MAX_UNREAD_BYTES, UNREAD_MARK, ProgressStream, num_bytes
from maitred.errors import EngineDead, ReadTooSlowly
from maitred.request import FinishReason, SamplingParams
from maitred.step import ModelOutput, RequestProgress, SchedulerOutput, TokenLogprobs
from tests.engine.worlds import scripted_engine
from tests.fakes import FakeExecutor, make_request, make_scheduler
from tests.waiting import HANGS_S, until_async

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
    assert engine.state().num_blocks_used > 0
    await stream.aclose()
    await until_async(lambda: engine.state().num_finished[FinishReason.ABORT] == n)
    assert engine.state().num_blocks_used == 0
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
    await until_async(lambda: engine.state().num_running + engine.state().num_waiting == 0)
    assert engine.state().num_blocks_used == 0
    await engine.close()


async def test_a_stop_string_ends_the_request_in_the_engine_too():
    engine, model, requests = scripted_engine("a b c d e f g h", long(stop=["c"]), wrap=as_class(SlowExecutor))
    deltas = [delta async for delta in stream_text(engine, model, requests)]
    assert "".join(delta.text for delta in deltas) == "a b "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "c")
    assert deltas[-1].timing is not None
    assert engine.state().num_finished[FinishReason.STOP] == 1
    assert engine.state().num_blocks_used == 0
    await engine.close()


async def test_a_dead_engine_says_so_to_everybody_and_takes_nothing_more():
    engine, model, requests = scripted_engine("x", long(), wrap=as_class(BrokenExecutor))
    with pytest.raises(EngineDead, match="the model fell over"):
        [delta async for delta in stream_text(engine, model, requests)]
    await until_async(lambda: not engine.state().alive)
    assert "the model fell over" in (engine.state().error or "")
    with pytest.raises(EngineDead):
        [delta async for delta in stream_text(engine, model, requests)]


async def test_close_ends_open_streams_and_the_thread():
    engine, model, requests = scripted_engine("x", long(), wrap=as_class(SlowExecutor))
    stream = stream_text(engine, model, requests)
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineDead, match="shut down"):
        [delta async for delta in stream]
    assert not any(thread.name == "maitred-engine" for thread in threading.enumerate())


KIB = 1024


async def test_who_does_not_take_what_comes_is_ended_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr("maitred.engine.progress_streams.MAX_UNREAD_BYTES", 100 * KIB)
    core = EngineCore(make_scheduler(num_blocks=50_000), FakeExecutor(), WallClock())
    engine = AsyncEngine(core, WallClock())
    stream = engine.submit(make_request(max_tokens=190_000))
    await until_async(lambda: engine.state().num_finished[FinishReason.ABORT] == 1)
    assert stream.num_unread_bytes == 0
    with pytest.raises(ReadTooSlowly, match="KiB of tokens behind"):
        [item async for item in stream]
    assert engine.state().num_blocks_used == 0
    await engine.close()


class Aborted:
    """An engine, as far as a stream has to do with it."""

    def abort(self, request_id: str) -> None:
        """It ends."""


def opener() -> Callable[[], ProgressStream]:
    """Opens streams of one engine, into which the test puts what it likes."""
    everybody: WeakSet[ProgressStream] = WeakSet()
    return lambda: ProgressStream(Aborted(), "r", asyncio.get_running_loop(), everybody)


def tokens(count: int, *, logprobs: int = 0) -> RequestProgress:
    """With so many of the most likely ones besides."""
    at = TokenLogprobs(*((tuple(range(1000, 1001 + logprobs)),) * 3))
    return RequestProgress("r", (1234,) * count, logprobs=(at,) * count if logprobs else None)


@pytest.mark.parametrize(("logprobs", "fewest", "most"), [(0, 10_000, 16_000), (20, 1_500, 2_500)])
async def test_how_far_one_may_fall_behind_is_measured_in_bytes(logprobs, fewest, most):
    stream, count = opener()(), 0
    while not stream.closed:
        stream.put(tokens(1, logprobs=logprobs))
        count += 1
    assert fewest < count < most


def test_progress_is_as_large_as_it_is_said_to_be():
    for progress in (tokens(1), tokens(8), tokens(4, logprobs=1), tokens(1, logprobs=20), tokens(300, logprobs=20)):
        wire, kept = msgspec.msgpack.encode(progress), []
        tracemalloc.start()
        kept += [msgspec.msgpack.decode(wire, type=RequestProgress) for _ in range(100)]
        size = tracemalloc.get_traced_memory()[0] / len(kept)
        tracemalloc.stop()
        assert size == pytest.approx(num_bytes(progress), rel=0.5)


async def test_a_step_may_give_more_than_is_kept_to_who_takes_it():
    stream = opener()()
    for _ in range(3):
        stream.put(tokens(4000, logprobs=20))
        assert stream.num_unread_bytes > MAX_UNREAD_BYTES
        await anext(stream)
        assert stream.num_unread_bytes == 0
    assert not stream.closed


async def test_when_all_together_keep_too_much_those_who_fall_further_behind_end(monkeypatch):
    monkeypatch.setattr("maitred.engine.progress_streams.MAX_UNREAD_BYTES_IN_ALL", 12 * UNREAD_MARK)
    open_stream = opener()
    behind = [open_stream() for _ in range(5)]
    for stream in behind:
        for _ in range(2 * UNREAD_MARK // num_bytes(tokens(10))):
            stream.put(tokens(10))
    for _ in range(1000):  # one that keeps up, beside them
        (good := open_stream()).put(tokens(10))
        await anext(good)
    for _ in range(1000):
        behind[0].put(tokens(10))
    assert [stream.closed for stream in behind] == [True, False, False, False, False]
    assert not good.closed


class Gated(FakeExecutor):
    """No step ends until a test says so."""

    may_end = threading.Event()

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self.may_end.wait(HANGS_S)
        return super().execute(plan)


async def test_a_step_that_does_not_end_is_told_while_it_lasts():
    executor = Gated()
    executor.may_end = threading.Event()
    engine = AsyncEngine(EngineCore(make_scheduler(), executor, WallClock()), WallClock(), step_timeout_s=0.5)
    engine.attach(asyncio.get_running_loop())
    stream = engine.submit(make_request(max_tokens=3))
    await until_async(lambda: not engine.state().alive)
    assert "has been in one step for" in (engine.state().error or "")
    executor.may_end.set()
    assert len([item async for item in stream]) == 3
    await until_async(lambda: engine.state().alive and not engine._busy)
    await engine.close()


async def test_closing_a_stream_twice_or_after_its_end_does_nothing():
    engine, _, requests = scripted_engine("x", SamplingParams(temperature=0.0, max_tokens=3))
    stream = engine.submit(requests[0])
    items = [item async for item in stream]
    assert items[-1].finish_reason is not None
    await stream.aclose()
    await stream.aclose()
    engine.abort(requests[0].request_id)
    await engine.close()
