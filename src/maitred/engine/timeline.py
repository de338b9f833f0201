"""The time of a start by phases, which follow one another, so that they add up to the whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from maitred.core.clock import Clock

OnPhase = Callable[[str, str], None]
"""(the phase that ends now, what happened in it for people, or nothing)"""


class Timeline:
    """Phases of one start, in order, in seconds. What is not ended by name belongs to the phase that ends next."""

    def __init__(self, clock: Clock, *, age_s: float = 0.0) -> None:
        """`age_s` have passed already; they belong to the first phase that ends."""
        self._clock = clock
        self._ended_at = clock.now() - age_s
        self.phases: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Count the time since the last end as this phase."""
        now = self._clock.now()
        self._add(phase, now - self._ended_at)
        self._ended_at = now

    def end_nested(self, phases: Mapping[str, float], rest: str) -> None:
        """Count the time since the last end as these phases of another timeline, and `rest` around them."""
        now = self._clock.now()
        for phase, seconds in phases.items():
            self._add(phase, seconds)
        self._add(rest, max(0.0, now - self._ended_at - sum(phases.values())))
        self._ended_at = now

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())

    def describe(self) -> str:
        """A line for people, the longest phases named and the short ones together."""
        long = {phase: seconds for phase, seconds in self.phases.items() if seconds >= 0.01}
        others = self.total_s - sum(long.values())
        told = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in long.items())
        return f"started in {self.total_s:.2f} s: {told}, others {others:.2f}"

    def over(self, budget_s: float) -> str | None:
        """Report of a start that took longer: its longest phase; None says nothing."""
        if self.total_s <= budget_s:
            return None
        phase, seconds = max(self.phases.items(), key=lambda item: item[1])
        return f"slow start: {self.total_s:.2f} s, over --start-budget-s {budget_s:g}; {phase} took {seconds:.2f} s"

    def _add(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds


def process_age_s() -> float:
    """Since this process began, Python's own start included; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, since boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
