"""Supervision state that every launcher keeps of a replica: ready or stopping, and when its next step is due."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from maitred.core.clock import Clock
from maitred.engine.restarts import BackOff

MAX_RESTART_DELAY_S = 8.0  # so that one that can start is there within ten seconds


@dataclass(slots=True, eq=False)
class Supervised:
    """Supervision state of one replica, on the launcher's event loop."""

    clock: Clock
    backoff: BackOff = field(default_factory=lambda: BackOff(sys.maxsize, max_delay_s=MAX_RESTART_DELAY_S))
    ready_at: float | None = None  # s; None while it starts
    is_stopping: bool = False
    _timer: asyncio.TimerHandle | None = None

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedule an action in place of the one scheduled before."""
        self.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, action)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def died(self, begin: Callable[[], None], *, own_fault: bool) -> float:
        """The process ended of itself: call `begin` after the delay returned (s), longer with each death in a row."""
        lived_s = self.clock.now() - self.ready_at if self.ready_at is not None else 0.0
        delay_s = self.backoff.died(lived_s, own_fault=own_fault)
        assert delay_s is not None, "replicas are not given up"
        self.later(delay_s, begin)
        return delay_s
