"""Grammar worker as a process of the engine's: two channels to it, and its end."""

from __future__ import annotations

import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from maitred.executor.grammar_frames import (
    Compile,
    Compiled,
    Filled,
    Outcomes,
    Step,
    decode_answer,
    decode_compiled,
    encode,
)

# -P: the current folder, which may be a model's with Python code in it, is no place for modules
WORKER = (sys.executable, "-P", "-m", "maitred.executor.grammar_worker")
SEND_S = 5  # a step larger than the channel's buffer waits for its reader


class WorkerLost(Exception):
    """The worker ended, or did not answer in time."""


class GrammarProcess:
    """One worker process. Steps are for one thread, compilations for another."""

    def __init__(self, memory_fd: int, arguments: Sequence[str], *, start_s: float, command: Sequence[str]) -> None:
        """`start_s`: how long its first answers may take (s). Raises OSError when there is no process for it."""
        self._steps, theirs = Pipe()
        _limit_sending(self._steps)
        self._compilations, theirs_too = Pipe()
        self._start_s = start_s
        self._has_answered = False
        self._sent_at = 0.0  # the last step
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
        self._sent_at = time.monotonic()
        try:
            self._steps.send_bytes(encode(step))
        except OSError:
            raise WorkerLost from None

    def receive(self, limit_s: float, patience_s: float = math.inf) -> Outcomes | Filled | None:
        """The next answer to a step; None when it is not there after `patience_s`, though not due yet. Raises
        WorkerLost when it has not come `limit_s` after the step was sent.
        """
        left_s = self._sent_at + self._limit(limit_s) - time.monotonic()
        if patience_s < left_s and not self._is_there(self._steps, patience_s):
            return None
        return decode_answer(self._await(self._steps, left_s))

    def compile(self, grammar: str, limit_s: float) -> Compiled:
        """Raises WorkerLost."""
        try:
            self._compilations.send_bytes(encode(Compile(grammar)))
        except OSError:
            raise WorkerLost from None
        return decode_compiled(self._await(self._compilations, self._limit(limit_s)))

    def kill(self) -> None:
        """Idempotent; nothing of it is there when this returns."""
        self._process.kill()
        self._process.wait()

    def _limit(self, limit_s: float) -> float:
        return limit_s if self._has_answered else max(limit_s, self._start_s)

    def _await(self, channel: Connection, limit_s: float) -> bytes:
        if not self._is_there(channel, limit_s):
            raise WorkerLost
        try:
            message = channel.recv_bytes()
        except (EOFError, OSError):
            raise WorkerLost from None
        self._has_answered = True
        return message

    def _is_there(self, channel: Connection, limit_s: float) -> bool:
        """Return whether there is something to receive, or the channel's end, within `limit_s`."""
        try:
            return channel.poll(max(0.0, limit_s))
        except OSError:
            raise WorkerLost from None


def _limit_sending(channel: Connection) -> None:
    """A worker that reads nothing keeps its engine for SEND_S at most."""
    with socket.socket(fileno=os.dup(channel.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
