"""Text work: the least of it on the event loop, what is short in threads of its own, what is long one at a time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")
LONG_BYTES = 16 * 1024  # of a body; tokenising so much takes some milliseconds
TINY_BYTES = 1024  # 0.1 to 0.8 ms, where handing it over and back takes 0.1
TINY_S = 0.001  # one that took longer sends the next to a thread, and so does the first
SHORT_THREADS = max(1, min(3, (os.cpu_count() or 1) - 1))  # more would crowd out the event loop


class TextThreads:
    """Threads for templates, tokenising, and long answers. Long work waits for other long work only."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="maitred-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="maitred-long-text")
        self._shaped = ThreadPoolExecutor(1, thread_name_prefix="maitred-shapes")
        self._is_quick = False  # so the last tiny work was; the first reads the tokenizer

    async def run(self, num_bytes: int, function: Callable[[], T], *, may_take_long: bool = False) -> T:
        """Run `function` for a body of `num_bytes`, which predict its time unless it `may_take_long`. If cancelled
        before its turn, it is not called.
        """
        if num_bytes > LONG_BYTES:
            return await self.run_long(function)
        if num_bytes <= TINY_BYTES and not may_take_long:
            function = partial(self._timed, function)
            if self._is_quick:
                return function()
        return await asyncio.get_running_loop().run_in_executor(self._short, function)

    def _timed(self, function: Callable[[], T]) -> T:
        began_s = self._monotonic()
        try:
            return function()
        finally:
            self._is_quick = self._monotonic() - began_s < TINY_S

    async def run_long(self, function: Callable[[], T]) -> T:
        """Run in the lane of long work."""
        return await asyncio.get_running_loop().run_in_executor(self._long, function)

    async def run_shaped(self, function: Callable[[], T]) -> T:
        """Run in the lane of work that may have to check a grammar: an unknown one may take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._shaped, function)

    def close(self) -> None:
        for lane in (self._short, self._long, self._shaped):
            lane.shutdown(wait=False, cancel_futures=True)
