"""An engine in a thread of this process. It shares what no process shares, and cannot be killed within a step."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from maitred.engine.frames import Beat, Begin, Command, OnExit, OpenTransport, Report, Stop
from maitred.engine.loop import Builder, run_engine

STOP_S = 3.0  # a step that lasts longer is left to its thread, which ends with this process


def in_thread(build: Builder) -> OpenTransport:
    """Engines that `build` makes, each in a thread."""
    return partial(EngineThread, build=build)


class EngineThread:
    """A Transport to a thread. What crosses is handed over as it is, so it must not be changed."""

    def __init__(self, begin: Begin, on_exit: OnExit, *, build: Builder) -> None:
        self.last_words: str | None = None
        self._link = _ThreadLink()
        self._returncode = 1  # unless it is told to stop
        self._over = False  # it sends nothing any more
        self._thread = threading.Thread(
            target=self._run, args=(begin, build, on_exit), name="maitred-engine", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def name(self) -> str:
        return "thread"

    @property
    def num_wrong_frames(self) -> int:
        return 0

    @property
    def fd(self) -> int:
        return self._link.fd

    @property
    def ended(self) -> bool:
        return self._over

    @property
    def over(self) -> bool:
        return self._over

    @property
    def returncode(self) -> int:
        return self._returncode

    def cause(self) -> str:
        return f"ended: {self.last_words}" if self.last_words else "ended"

    def send(self, command: Command) -> None:
        self._link.post(command)

    def receive(self) -> Iterator[Report]:
        yield from self._link.reports()
        yield self._link.beat()

    def wait_readable(self, seconds: float) -> bool:
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def heard_beat(self, num_wrong_commands: int) -> None:
        """Nothing to do: no other process can reach a thread."""

    def kill(self) -> None:
        """Stop the engine after the step it is in: a thread cannot be ended before."""
        self._link.post(Stop())

    def stop(self) -> None:
        self.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)
        self.close()

    def close(self) -> None:
        if self.ended:
            self._link.close()

    def _run(self, begin: Begin, build: Builder, on_exit: OnExit) -> None:
        try:
            self._returncode = run_engine(begin, self._link, build)
        finally:
            self._over = True
            on_exit(self)


class _ThreadLink:
    """Both ends: commands wait in a queue, reports in another, whose descriptor is readable while it holds some."""

    def __init__(self) -> None:
        self.round_number = 0
        self._busy = False
        self._commands: deque[Command] = deque()
        self._came = threading.Condition()
        self._is_woken = False
        self._reports: deque[Report] = deque()
        self._signalled = threading.Lock()  # held while a byte is on its way
        self.fd, self._bell = os.pipe()
        os.set_blocking(self.fd, False)
        self._closed = False

    # -- the engine's end

    def commands(self, *, wait: bool, at_most_s: float | None = None, beside: bool = False) -> Iterator[Command]:
        self._busy = beside or not wait
        if wait:
            with self._came:
                self._came.wait_for(lambda: self._commands or self._is_woken, at_most_s)
                self._is_woken = False
            self._busy = True
        while self._commands:
            yield self._commands.popleft()

    def wake(self) -> None:
        with self._came:
            self._is_woken = True
            self._came.notify()

    def send(self, report: Report) -> None:
        self._reports.append(report)
        if self._signalled.acquire(blocking=False):
            with suppress(OSError):  # closed: no reader any more
                os.write(self._bell, b"\0")

    def rest(self) -> None:
        self._busy = False

    # -- the client's end

    def post(self, command: Command) -> None:
        with self._came:
            self._commands.append(command)
            self._came.notify()

    def reports(self) -> Iterator[Report]:
        if self._signalled.locked() and not self._closed:
            with suppress(BlockingIOError):
                os.read(self.fd, 1)
                self._signalled.release()
        while self._reports:
            yield self._reports.popleft()

    def beat(self) -> Beat:
        return Beat(self.round_number, self._busy, 0)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.fd)
            os.close(self._bell)
