"""Grammar worker as a process of the engine's: two channels to it, and its end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from maitred.executor.grammar_frames import (
    Compile,
    Filled,
    Outcomes,
    Step,
    decode_answer,
    decode_compiled,
    encode,
)

# -P: the current folder, which may be a model's with Python code in it, is no place for modules
WORKER = (sys.executable, "-P", "-m", "maitred.executor.grammar_worker")


class WorkerLost(Exception):
    """It ended, or did not answer in time."""


class GrammarProcess:
    """One worker process. Steps are for one thread, compilations for another."""

    def __init__(self, memory_fd: int, arguments: Sequence[str], *, start_s: float, command: Sequence[str]) -> None:
        """`start_s`: how long its first answers may take (s). Raises OSError when there is no process for it."""
        self._steps, theirs = Pipe()
        self._compilations, theirs_too = Pipe()
        self._start_s = start_s
        self._answered = False
        descriptors = [theirs.fileno(), theirs_too.fileno(), memory_fd]
        with theirs, theirs_too:  # its own copies are all that is left open there: it ends when ours are closed
            self._process = subprocess.Popen(
                [*command, *map(str, descriptors), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for us
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, step: Step) -> None:
        """Raises WorkerLost."""
        try:
            self._steps.send_bytes(encode(step))
        except OSError:
            raise WorkerLost from None

    def receive(self, limit_s: float) -> Outcomes | Filled:
        """The next answer to a step. Raises WorkerLost."""
        return decode_answer(self._await(self._steps, limit_s))

    def compile(self, grammar: str, limit_s: float) -> str:
        """What is wrong with it; empty when nothing is. Raises WorkerLost."""
        try:
            self._compilations.send_bytes(encode(Compile(grammar)))
        except OSError:
            raise WorkerLost from None
        return decode_compiled(self._await(self._compilations, limit_s)).error

    def kill(self) -> None:
        """Idempotent; nothing of it is there when this returns."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for channel in (self._steps, self._compilations):
            with suppress(OSError):
                channel.close()

    def _await(self, channel: Connection, limit_s: float) -> bytes:
        until = time.monotonic() + (limit_s if self._answered else max(limit_s, self._start_s))
        try:
            if not channel.poll(max(0.0, until - time.monotonic())):
                raise WorkerLost
            message = channel.recv_bytes()
        except (EOFError, OSError):
            raise WorkerLost from None
        self._answered = True
        return message
