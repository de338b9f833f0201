"""Bounds of what a stream keeps for someone who does not take it."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from weakref import WeakSet

import msgspec
import pytest

from maitred.core.step import RequestProgress, TokenLogprobs
from maitred.engine.live_requests import MAX_UNREAD_BYTES, UNREAD_MARK, ProgressStream, num_bytes


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
    monkeypatch.setattr("maitred.engine.live_requests.MAX_UNREAD_BYTES_IN_ALL", 12 * UNREAD_MARK)
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
