"""The two ends of a socket between the processes, one thread's each: what comes out is a frame, and not too large.
And the folder in which the sockets have their names.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Generic, TypeVar

import zmq

from maitred.core.errors import ConfigError, RequestTooLarge
from maitred.engine.frames import WRONG_FRAME, encode

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
        data = encode(frame)
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
            except WRONG_FRAME as error:
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
