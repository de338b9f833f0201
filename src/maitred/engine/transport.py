"""The place where an engine runs, as its supervisor sees it: commands in, reports out, and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from maitred.engine.frames import Begin, Command, Report


class Transport(Protocol):
    """One engine, in a process or a thread, from its start to its end.

    Its `on_exit` is called once, in a thread of its own, when the engine has ended. `send` and `receive` are for one
    thread at a time.
    """

    last_words: str | None
    """Why it ended or will, if that is known."""

    @property
    def pid(self) -> int: ...

    @property
    def name(self) -> str:
        """`process 14021` or `thread`."""

    @property
    def num_wrong_frames(self) -> int:
        """Messages on either side that were no frame."""

    @property
    def fd(self) -> int:
        """Readable when there may be reports; then call `receive` until it gives none."""

    @property
    def ended(self) -> bool: ...

    @property
    def over(self) -> bool:
        """Whether the engine has ended, and what it wrote was read."""

    @property
    def returncode(self) -> int:
        """Exit status of an ended engine; minus the signal that killed it."""

    def cause(self) -> str:
        """Why it ended, in words that go on after its name."""

    def send(self, command: Command) -> None:
        """Never waits. For after its first report. Raises RequestTooLarge."""

    def receive(self) -> Iterator[Report]:
        """Reports that have come."""

    def wait_readable(self, seconds: float) -> bool: ...

    def heard_beat(self, num_wrong_commands: int) -> None:
        """The engine beats, and has dropped so many commands that were none."""

    def kill(self) -> None:
        """End it as soon as can be."""

    def stop(self) -> None:
        """Ask it to end after its step, and see to it that it does; idempotent."""

    def close(self) -> None:
        """Give back what an ended one leaves; idempotent."""


OnExit = Callable[[Transport], None]
OpenTransport = Callable[[Begin, OnExit], Transport]
"""Starts an engine that will load what it is told to."""
