"""Signals that end a server, before and after it handles them itself: noted, so that it still ends in order."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class EndSignal:
    """Signal handler that notes whether a signal came."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def note_signals() -> None:
    """Note signals from now on; ignore SIGHUP, for which there may be nothing to read again. For the main thread."""
    ending = EndSignal()
    for number in SIGNALS:
        signal.signal(number, ending)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def noted() -> EndSignal:
    """Signals noted so far, and from now on; none ever unless `note_signals` was called."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, EndSignal) else EndSignal()


def ignore_signals() -> None:
    """Ignore signals in the last lines of a process: Python's own end would put the system's handlers back."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
