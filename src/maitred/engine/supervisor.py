"""When a dead engine is started again, when a silent one counts as stuck, and why one died, in words. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

STEADY_S = 10.0  # an engine that lived so long ends the row of failures
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0


class BackOff:
    """Delays between restarts: none before the first, then doubling; ends after `max_restarts` in a row."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_in_row = 0
        self.num_restarts = 0  # in all

    def died(self, lived_s: float) -> float | None:
        """An engine died that had been ready for `lived_s`, 0 if it never was. When to start the next one, in seconds
        from now; None for never.
        """
        if lived_s >= STEADY_S:
            self._num_in_row = 0
        if self._num_in_row >= self._max_restarts:
            return None
        delay_s = 0.0 if self._num_in_row == 0 else min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._num_in_row - 1))
        self._num_in_row += 1
        self.num_restarts += 1
        return delay_s


@dataclass(slots=True)
class Watchdog:
    """How long the engine's process has been silent, and how long it has been in one step.

    Asked every `tick_s`, and counts that time alone: what passes while the asker does not run (a suspended machine, a
    stopped process) is nobody's fault. Silence counts from the first heartbeat on: loading may take its time.
    """

    tick_s: float
    silent_s: float = 0.0
    stuck_s: float = 0.0
    _asked_at: float | None = None
    _heard: bool = False
    _round: int = -1
    _busy: bool = False
    _moved: bool = True

    def beat(self, round_number: int, busy: bool) -> None:
        """A heartbeat came."""
        self.silent_s = 0.0
        self._heard = True
        self._moved = self._moved or round_number != self._round or not busy
        self._round, self._busy = round_number, busy

    def stepped(self) -> None:
        """A step's outcome came, which is as good."""
        self.silent_s = 0.0
        self._moved = True

    def tick(self, now: float) -> None:
        passed_s = 0.0 if self._asked_at is None else min(now - self._asked_at, 2 * self.tick_s)
        self._asked_at = now
        self.silent_s += passed_s if self._heard else 0.0
        self.stuck_s = 0.0 if self._moved or not self._busy else self.stuck_s + passed_s
        self._moved = False


def cause_of_death(returncode: int, last_words: str | None) -> str:
    """`killed by SIGKILL`, `ended with exit code 1: RuntimeError: ...`: one line."""
    if returncode < 0:
        how = f"was killed by {_signal_name(-returncode)}"
        if -returncode == signal.SIGKILL:
            how += " (by hand, or for want of memory)"
    else:
        how = f"ended with exit code {returncode}"
    words = " ".join((last_words or "").split())
    return f"{how}: {words}" if words else how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
