"""An engine in a child process: its start, the two sockets to it, what it writes, and its end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import zmq

from maitred.engine.frames import Begin, Command, Hello, Report, Stop, decode_report
from maitred.engine.restarts import cause_of_death
from maitred.engine.sockets import COMMANDS, REPORTS, Receiver, Sender, SocketFolder, address_of
from maitred.engine.transport import OnExit, OpenTransport

# -P: the current folder, which may be a model's with Python code in it, is no place for modules
CHILD = (sys.executable, "-P", "-m", "maitred.engine.child")
HIGH_WATER_MARK = 1000  # unread reports; then the engine waits
NUM_DESCRIPTORS = 32  # what a child takes of them here, and some more
LAST_LINE_S = 0.5  # its last line is waited for so long, because a grandchild could hold stderr open for ever
STOP_S = 3.0  # a child that was asked to stop and has not ended by then is killed
LOG_LINE = b'{"maitred_log":'


class LogLine(msgspec.Struct):
    """A log record of the child, as a line of its stderr."""

    maitred_log: tuple[int, str, str]  # level, logger, message


_decode_log_line = msgspec.json.Decoder(LogLine).decode


def in_child_process(command: Sequence[str] = CHILD) -> OpenTransport:
    """Engines in processes that `command` starts."""
    return partial(ChildProcess, command=command)


class ChildProcess:
    """A Transport to a process. Its sockets are for the thread that uses them."""

    def __init__(self, begin: Begin, on_exit: OnExit, *, command: Sequence[str] = CHILD) -> None:
        """Raises OSError, zmq.ZMQError or RuntimeError when there is no process, descriptor or thread for it."""
        _probe_descriptors()
        self._context = zmq.Context(io_threads=1)
        self._folder = SocketFolder()
        self._begin = begin
        self._num_wrong_commands = 0  # as its heartbeats say
        self.last_words: str | None = None  # of Python's own, or the last line of stderr
        process = None
        try:
            self._reports = Receiver(
                self._context,
                address_of(self._folder.path, REPORTS),
                decode_report,
                sender="the engine",
                num_connections=2,  # its own thread's and the beating one's
                high_water_mark=HIGH_WATER_MARK,
            )
            self._commands = Sender(self._context, linger_ms=0, high_water_mark=0)  # admission bounds what there is
            process = self._process = subprocess.Popen(
                [*command, str(self._folder.path)],
                stdin=subprocess.PIPE,  # its end tells the child that we are gone
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[] if (shared := begin.config.share.tensor_memory) is None else [shared],
                start_new_session=True,  # Ctrl-C is for us: we drain, and the child works on
            )
            self._said = threading.Thread(target=self._listen, name="maitred-engine-stderr", daemon=True)
            self._said.start()
            self._waiter = threading.Thread(target=self._wait, args=(on_exit,), name="maitred-engine-exit", daemon=True)
            self._waiter.start()
        except BaseException:
            if process is not None:
                process.kill()
                process.wait()
            self._close_sockets()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"process {self.pid}"

    @property
    def num_wrong_frames(self) -> int:
        """Messages that were no frame, and were dropped, here and by the child."""
        return self._reports.num_wrong + self._num_wrong_commands

    @property
    def fd(self) -> int:
        """Readable when there may be reports; then call `receive` until it gives none."""
        return self._reports.fd

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def over(self) -> bool:
        """Whether the child has ended and all it wrote was read."""
        return not self._waiter.is_alive()

    @property
    def returncode(self) -> int:
        """Exit status of the ended child; minus the signal that killed it."""
        return self._process.wait()

    def cause(self) -> str:
        """Why it ended."""
        return cause_of_death(self._process.wait(), self.last_words)

    def send(self, command: Command) -> None:
        """Never waits. For after its first report. Raises RequestTooLarge."""
        self._commands.send(command, zmq.NOBLOCK)

    def receive(self) -> Iterator[Report]:
        """Reports that have come; what is no frame is dropped and counted."""
        for report in self._reports.receive():
            if isinstance(report, Hello):  # it has bound its socket; one that connects queues what it cannot send yet
                self._commands.connect(address_of(self._folder.path, COMMANDS))
                self.send(self._begin)
                continue
            yield report

    def wait_readable(self, seconds: float) -> bool:
        return self._reports.wait(seconds)

    def heard_beat(self, num_wrong_commands: int) -> None:
        """The child holds both sockets: remove them, so that no other finds them. Kill one that hears no more."""
        self._num_wrong_commands = num_wrong_commands
        self._folder.remove()
        self._reports.look()
        if self._commands.was_cut_off():
            self.last_words = self.last_words or "it had closed its connection"
            self.kill()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        """Ask it to end after its step, and see to it that it does; idempotent."""
        if not self.ended:
            with suppress(zmq.Again):  # one that has not said Hello hears nothing
                self.send(Stop())
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self.close()

    def close(self) -> None:
        """Give back what an ended child leaves; idempotent."""
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._context.destroy(linger=0)
        self._folder.remove()

    # threads

    def _wait(self, on_exit: OnExit) -> None:
        self._process.wait()
        self._said.join(LAST_LINE_S)
        on_exit(self)

    def _listen(self) -> None:
        """Pass on what the child writes, until it has ended."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                if line.startswith(LOG_LINE) and self._relog(line):
                    continue
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    self.last_words = text
                    sys.stderr.write(text + "\n")

    def _relog(self, line: bytes) -> bool:
        try:
            level, name, message = _decode_log_line(line).maitred_log
        except msgspec.DecodeError:
            return False
        logging.getLogger(name).log(level, "%s", message)
        return True


def _probe_descriptors() -> None:
    """Raises OSError where there are too few: ZeroMQ would end this process when it gets none for its threads."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while len(taken) < NUM_DESCRIPTORS:
            taken.append(os.dup(taken[0]))
    finally:
        for descriptor in taken:
            os.close(descriptor)
