"""What an engine does while a step is under way: it serves what it has beside its language model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec

from maitred.engine.core import EngineCore
from maitred.engine.frames import Command, Report, ToTensors
from maitred.step import ModelOutput


class Link(Protocol):
    """The engine's end of a transport."""

    round_number: int
    """Changes with every round of the loop, so that the other end sees a step that does not end."""

    def commands(self, *, wait: bool, at_most_s: float | None = None, beside: bool = False) -> Iterator[Command]:
        """What has come; with `wait`, at least one, unless `wake` was called or so many seconds went by. `beside` says
        that a step is under way meanwhile.
        """

    def wake(self) -> None:
        """From any thread: whoever waits for commands, now or next, waits no more."""

    def send(self, report: Report) -> None:
        """Raises RequestTooLarge."""

    def rest(self) -> None:
        """No step is under way any more."""


class Beside(Protocol):
    """What an engine serves beside its language model, also while a step is under way; `tensor.host` is one."""

    def begin(self, core: EngineCore, send: Callable[[Report], None], wake: Callable[[], None]) -> None:
        """Before the engine says that it is ready."""

    def obey(self, message: msgspec.Raw) -> None: ...

    def turn(self) -> None:
        """After whatever happened, and when `wake_in_s` is over."""

    @property
    def wake_in_s(self) -> float | None: ...

    def close(self) -> None: ...


class DuringStep:
    """Steps are executed in a thread of their own; the engine's thread takes commands meanwhile, and keeps those of the
    language model for when the step is over.
    """

    def __init__(self, link: Link, beside: Beside) -> None:
        self._link, self._beside = link, beside
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="maitred-step")
        self._kept: deque[Command] = deque()

    def execute(self, execute: Callable[[], ModelOutput]) -> ModelOutput:
        step = self._thread.submit(execute)
        step.add_done_callback(self._wake)
        while not step.done():
            for command in self._link.commands(wait=True, at_most_s=self._beside.wake_in_s, beside=True):
                if isinstance(command, ToTensors):
                    self._beside.obey(command.message)
                else:
                    self._kept.append(command)
            self._beside.turn()
        return step.result()

    def kept(self, wait: bool) -> Generator[Command, None, bool]:
        """Commands that came during the last step; whether to wait for others."""
        wait = wait and not self._kept
        while self._kept:
            yield self._kept.popleft()
        return wait

    def close(self) -> None:
        self._thread.shutdown()

    def _wake(self, step: Future[ModelOutput]) -> None:
        self._link.wake()
