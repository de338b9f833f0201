"""Clocks: the system's, and one that is set by hand. All other code takes time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back; only differences mean anything."""

    def now(self) -> float: ...


class WallClock:
    """The machine's monotonic clock, immune to changes of the wall time."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock for tests and simulation: stands still until it is advanced."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now_s += seconds

    def set(self, now_s: float) -> None:
        """Advance to exactly this time."""
        self._now_s = max(self._now_s, now_s)
