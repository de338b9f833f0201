"""Threads that move KV between the pool and its tiers, and what they share with the engine's thread."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Guard:
    """Whether a thread may still touch the blocks; `end` waits for the piece under way."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def end(self) -> None:
        with self.lock:
            self.is_over = True


class ThreadOfJobs:
    """A thread that does one thing after another; none is started before there is something to do."""

    def __init__(self, name: str, *, niceness: int = 0) -> None:
        """`niceness` as the system's: how much others of this process go before it."""
        self._name, self._niceness = name, niceness
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def give(self, job: Callable[[], None]) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def end(self, seconds: float) -> bool:
        """End the thread after its queued jobs, waiting at most `seconds`; whether all were done."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._niceness:
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + self._niceness
            )
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("KV could not be moved; it is computed")
