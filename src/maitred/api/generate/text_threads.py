"""Text work beside the event loop: what is short has threads of its own, what is long goes one at a time."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
LONG_BYTES = 16 * 1024  # of a body; tokenising so much takes some milliseconds
SHORT_THREADS = max(1, min(3, (os.cpu_count() or 1) - 1))  # more would crowd out the event loop
SWITCH_INTERVAL_S = 0.0005


def hand_over_quickly() -> None:
    """Let the event loop wait no longer than this for Python's lock, which text threads hold when they are not
    tokenising. The interpreter's own 5 ms come anew with every callback of the loop.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))


class TextThreads:
    """Threads for templates, tokenising, and long answers. Who is long waits for those that are, for nobody else."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="maitred-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="maitred-long-text")

    async def run(self, num_bytes: int, function: Callable[[], T]) -> T:
        """What `function` gives, for a body of `num_bytes`. Cancelled before its turn, it is not called."""
        if num_bytes > LONG_BYTES:
            return await self.run_long(function)
        return await asyncio.get_running_loop().run_in_executor(self._short, function)

    async def run_long(self, function: Callable[[], T]) -> T:
        """In the lane of those that take long."""
        return await asyncio.get_running_loop().run_in_executor(self._long, function)

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
