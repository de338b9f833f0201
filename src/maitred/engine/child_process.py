"""An engine in a child process: its start, the sockets between the two, what it writes, and its end."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from maitred.core.errors import ConfigError, RequestTooLarge
from maitred.engine import frames
from maitred.engine.restarts import cause_of_death

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


def in_child_process(command: Sequence[str] = CHILD) -> frames.OpenTransport:
    """Engines in processes that `command` starts."""
    return partial(ChildProcess, command=command)


class ChildProcess:
    """A Transport to a process. Its sockets are for the thread that uses them."""

    def __init__(self, begin: frames.Begin, on_exit: frames.OnExit, *, command: Sequence[str] = CHILD) -> None:
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
                frames.decode_report,
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

    def send(self, command: frames.Command) -> None:
        """Never waits. For after its first report. Raises RequestTooLarge."""
        self._commands.send(command, zmq.NOBLOCK)

    def receive(self) -> Iterator[frames.Report]:
        """Reports that have come; what is no frame is dropped and counted."""
        for report in self._reports.receive():
            if isinstance(
                report, frames.Hello
            ):  # it has bound its socket; one that connects queues what it cannot send yet
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
                self.send(frames.Stop())
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

    def _wait(self, on_exit: frames.OnExit) -> None:
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


# ---- sockets of a child and its parent


logger = logging.getLogger(__name__)
MAX_FRAME_BYTES = 128 * 2**20  # a prompt of a million tokens and its hashes take 7 MB
COMMANDS, REPORTS = "commands", "reports"  # the sockets' names in the folder
MAX_SOCKET_PATH = 100  # bytes; the system's own limit is 107
_PREFIX = "maitred-s-"
F = TypeVar("F")


class SocketFolder:
    """A private folder, locked as long as its maker lives: what `kill -9` left, the next one removes.

    Raises OSError, and ConfigError where there is no place for it.
    """

    def __init__(self) -> None:
        try:
            temporary = Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            text = "set TMPDIR to a folder that can be written, or give a container one: --tmpfs /tmp"
            raise ConfigError(f"{error.strerror or error}; {text}") from None
        for left in temporary.glob(f"{_PREFIX}*"):
            _remove_if_abandoned(left)
        self._lock: int | None = None
        while self._lock is None:  # another one's start may take it for abandoned before it is locked
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock = _locked(self.path)
        if len(os.fsencode(self.path / COMMANDS)) > MAX_SOCKET_PATH:
            self.remove()
            raise ConfigError(f"{self.path} is too long for a socket's name; set TMPDIR to a shorter folder")

    def remove(self) -> None:
        """Takes no descriptor, for there may be none left; idempotent."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def address_of(folder: Path, name: str) -> bytes:
    """A socket's address, as bytes: a path need not be UTF-8."""
    return b"ipc://" + os.fsencode(folder / name)


def _locked(folder: Path) -> int | None:
    """A descriptor of the folder that holds its lock; None if another process has removed it."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks: no other process gets one either
        fcntl.flock(lock, fcntl.LOCK_EX)
    if folder.exists():
        return lock
    os.close(lock)
    return None


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):  # it is in use, or another process was faster
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        for name in (COMMANDS, REPORTS):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


class Sender:
    """Connects once: later the socket has no name any more, so what the other side closes does not come back."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, linger_ms: int, high_water_mark: int) -> None:
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self._closings = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def connect(self, address: bytes) -> None:
        self._socket.connect(address)  # type: ignore[arg-type]  # bytes are taken as they are

    def send(self, frame: object, flags: int = 0) -> None:
        """Raises RequestTooLarge for what the other side would drop, and zmq.Again as ZeroMQ does."""
        data = frames.encode(frame)
        if len(data) > MAX_FRAME_BYTES:
            raise RequestTooLarge(
                f"{type(frame).__name__} takes {len(data)} bytes between the server and its engine, "
                f"the limit is {MAX_FRAME_BYTES}; send less, or ask for less at once"
            )
        self._socket.send(data, flags)

    def was_cut_off(self) -> bool:
        """Whether the other side closed the connection: nothing arrives there any more. From any one thread."""
        return bool(self._closings.poll(0))

    def close(self) -> None:
        """Close; frames already sent leave, as long as they may linger; the context's end waits for that."""
        self._closings.close(0)
        self._socket.close()


class Receiver(Generic[F]):
    """The bound end. What is no frame, or a larger one than there may be, is dropped and counted.

    ZeroMQ itself closes the connection at twice that size, before it has read any of it; that says no word to us. So
    a connection more than there should be, whatever it sends, is counted as well; and the right sender sees that it
    was cut off.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: bytes,
        decode: Callable[[bytes], F],
        *,
        sender: str,  # in words
        num_connections: int,
        high_water_mark: int,
    ) -> None:
        self._decode, self._sender, self._num_connections = decode, sender, num_connections
        self._num_dropped = self._num_accepted = 0
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, high_water_mark)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
        self._arrivals = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._socket.bind(address)  # type: ignore[arg-type]

    @property
    def fd(self) -> int:
        """Readable when there may be frames; then call `receive` until it gives none."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def num_wrong(self) -> int:
        """Messages that were dropped, and connections of strangers; of these, as of the last `look`."""
        return self._num_dropped + max(0, self._num_accepted - self._num_connections)

    def wait(self, seconds: float | None = None) -> bool:
        """Whether there is something to receive; None waits for ever."""
        return bool(self._socket.poll(None if seconds is None else int(seconds * 1000)))

    def wait_or(self, fd: int, at_most_s: float | None = None) -> None:
        """Wait until there is something to receive, or `fd` can be read, of which all is read; or so long."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(fd, zmq.POLLIN)
        if any(found == fd for found, _ in poller.poll(None if at_most_s is None else ceil(1000 * at_most_s))):
            os.read(fd, 4096)

    def receive(self) -> Iterator[F]:
        """Frames that have come."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(data) > MAX_FRAME_BYTES:
                    raise ValueError(f"the limit is {MAX_FRAME_BYTES}")
                frame = self._decode(data)
            except frames.WRONG_FRAME as error:
                self._num_dropped += 1
                logger.warning("dropped a frame of %d bytes from %s's socket: %s", len(data), self._sender, error)
                continue
            yield frame

    def look(self) -> None:
        """Count the connections made since. From any one thread."""
        while self._arrivals.poll(0):
            self._arrivals.recv_multipart()
            self._num_accepted += 1
            if self._num_accepted > self._num_connections:
                logger.warning("somebody else connected to %s's socket", self._sender)
