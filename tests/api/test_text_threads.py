"""Where a request's text work is done: on the event loop only what is short, and was quick last time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from maitred.api.http.app import TINY_BYTES, TINY_S, TextThreads
from maitred.core.clock import ManualClock


@contextmanager
def texts(clock: ManualClock) -> Iterator[TextThreads]:
    threads = TextThreads(clock.now)
    try:
        yield threads
    finally:
        threads.close()


def test_short_texts_stay_on_the_loop_once_one_was_quick_and_leave_it_when_one_was_not():
    clock = ManualClock()

    def work(seconds: float = 0.0) -> bool:
        """Whether it is done on the event loop."""
        clock.advance(seconds)
        return threading.current_thread() is threading.main_thread()

    async def run(threads: TextThreads) -> None:
        assert not await threads.run(10, work)  # which may have to read the tokenizer first
        assert await threads.run(10, work)
        assert not await threads.run(TINY_BYTES + 1, work)
        assert not await threads.run(10, work, may_take_long=True)
        assert await threads.run(10, lambda: work(2 * TINY_S))
        assert not await threads.run(10, lambda: work(2 * TINY_S))
        assert not await threads.run(10, work)
        assert await threads.run(10, work)

    with texts(clock) as threads:
        asyncio.run(run(threads))


def test_a_short_text_that_fails_tells_how_long_it_took_too():
    clock = ManualClock()

    def fail() -> None:
        clock.advance(2 * TINY_S)
        raise ValueError

    async def run(threads: TextThreads) -> None:
        await threads.run(10, threading.get_ident)
        failed = await asyncio.gather(threads.run(10, fail), return_exceptions=True)
        assert isinstance(failed[0], ValueError)
        assert await threads.run(10, threading.get_ident) != threading.get_ident()

    with texts(clock) as threads:
        asyncio.run(run(threads))
