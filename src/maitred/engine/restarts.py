"""Rules for dead engines: when one is started again, when a silent one counts as stuck, why it died, in words. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

STEADY_S = 10.0  # an engine that lived so long ends the row of failures
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
FAILURE = 10  # the weight of an engine's own failure; of a death that came from outside it is 1
FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP})


class BackOff:
    """Delays between restarts: none before the first, then doubling; ends after `max_restarts` failures in a row.

    A death that the engine did not cause (`is_own_fault`) weighs a tenth of a failure: repeated kills from outside
    make it give up too, but much later.
    """

    def __init__(self, max_restarts: int, *, max_delay_s: float = MAX_DELAY_S) -> None:
        self._max_restarts, self._max_delay_s = max_restarts, max_delay_s
        self._weight = 0  # of the row, in tenths of a failure
        self.num_restarts = 0  # in all

    def died(self, lived_s: float, *, own_fault: bool = True) -> float | None:
        """An engine died that had been ready for `lived_s`, 0 if it never was. When to start the next one, in seconds
        from now; None for never.
        """
        if lived_s >= STEADY_S:
            self._weight = 0
        num_in_row = self._weight // FAILURE
        if num_in_row >= self._max_restarts:
            return None
        self._weight += FAILURE if own_fault else 1
        self.num_restarts += 1
        if num_in_row == 0:
            return 0.0
        num_doublings = min(num_in_row - 1, 64)  # without a limit a row outgrows any number
        return min(self._max_delay_s, FIRST_DELAY_S * 2.0**num_doublings)

    def found_cause(self) -> None:
        """End the row: the request that killed the engines will not come back."""
        self._weight = 0


@dataclass(slots=True)
class Watchdog:
    """Silence of the engine's process, and the time it has been in one step.

    Asked every `tick_s`, and counts that time alone: time in which the asker does not run (a suspended machine, a
    stopped process, more load than there are cores) is no fault of the engine, and on a machine on which the asker
    comes late the engine may be late too. Silence counts from the first heartbeat on: loading may take its time.
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
        passed_s = 0.0 if self._asked_at is None else min(now - self._asked_at, self.tick_s)
        self._asked_at = now
        self.silent_s += passed_s if self._heard else 0.0
        self.stuck_s = 0.0 if self._moved or not self._busy else self.stuck_s + passed_s
        self._moved = False


def is_own_fault(returncode: int, *, stuck: bool, out_of_memory: bool) -> bool:
    """Whether an engine's death is evidence against it and its requests: it crashed, ended by itself, was stuck in a
    step (and killed by us), or took memory that was not there. Any other signal came from outside, and says nothing.
    """
    return stuck or out_of_memory or returncode >= 0 or -returncode in FAULTS


def cause_of_death(returncode: int, last_words: str | None) -> str:
    """`killed by SIGKILL`, `ended with exit code 1: RuntimeError: ...`: one line."""
    if returncode < 0:
        how = f"was killed by {_signal_name(-returncode)}"
        if -returncode == signal.SIGKILL:
            how += " (by hand, or for want of memory)"
        if -returncode == signal.SIGBUS:
            how += " (a file that it read was cut short meanwhile: is the model's whole?)"
    else:
        how = f"ended with exit code {returncode}"
    words = " ".join((last_words or "").split())
    return f"{how}: {words}" if words else how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
