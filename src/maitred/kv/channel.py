"""One end of a connection between peers: frames over a blocking socket, with limits and an end to silence."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable
from contextlib import suppress

from maitred.kv.pieces import (
    MAX_FIRST_BYTES,
    MAX_MESSAGE_BYTES,
    PREFIX,
    AnyMessage,
    Message,
    Refusal,
    body_bytes,
    frame,
    message_of,
)

_FD_BYTES = array("i").itemsize
_PEER = struct.Struct("3i")  # pid, user, group


class Channel:
    """A connection for one thread at a time; `abort` for any. Every failure is a Refusal, and the connection's end.

    `timeout_s` without a byte either way is silence. `on_quiet`, if set, is called after each third of it, so that the
    waiting end says so.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float) -> None:
        self._socket, self.timeout_s = sock, timeout_s
        sock.settimeout(timeout_s / 3)
        self.is_unix = sock.family == getattr(socket, "AF_UNIX", None)
        if not self.is_unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit = MAX_FIRST_BYTES
        """Bytes of a message; `trust` raises it."""
        self.on_quiet: Callable[[], None] | None = None
        self.deadline: float | None = timeout_s + time.monotonic()
        """Of first contact, however many bytes come; lifted when the peer is known."""
        self._is_aborted = False
        self._fds: list[int] = []

    def send(self, message: Message, rows: memoryview | None = None, *, fd: int | None = None) -> None:
        """One message, with the rows of a piece behind it or a descriptor beside it."""
        parts = [memoryview(frame(message))]
        if rows is not None:
            parts.append(rows)
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
        while parts:
            sent = self._patiently(lambda: self._socket.sendmsg(parts, ancillary), is_quiet=False)  # noqa: B023
            ancillary = []
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def receive(self) -> AnyMessage:
        prefix = memoryview(bytearray(PREFIX.size))
        self.read_into(prefix)
        body = memoryview(bytearray(body_bytes(prefix, self.limit)))
        self.read_into(body)
        return message_of(body)

    def read_into(self, view: memoryview) -> None:
        """Fills it, from the socket straight."""
        while view:
            count = self._patiently(lambda: self._read(view), is_quiet=True)  # noqa: B023
            if count == 0:
                raise Refusal("cut", "the peer closed the connection")
            view = view[count:]

    def has_input(self, wait_s: float | None) -> bool:
        """Whether something came within that time; None waits for ever."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if wait_s is None else wait_s * 1000))

    def trust(self) -> None:
        """The peer is known: larger messages, and any time between them."""
        self.limit, self.deadline = MAX_MESSAGE_BYTES, None

    def take_fd(self) -> int | None:
        """The descriptor that came last; the caller's to close."""
        return self._fds.pop() if self._fds else None

    def peer_user(self) -> int:
        """User id of the other end of a unix socket, from the kernel."""
        _, uid, _ = _PEER.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return int(uid)

    def check(self, until: float) -> None:
        """Check a wait for something else than bytes of the socket. Raises Refusal when aborted, or at `until`."""
        if self._is_aborted:
            raise Refusal("aborted", "the transfer was aborted")
        if time.monotonic() >= until:
            raise Refusal("silent", f"nothing came of the peer for {self.timeout_s:g} s")

    def abort(self) -> None:
        """End every wait in this channel; idempotent."""
        self._is_aborted = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def _patiently(self, step: Callable[[], int], *, is_quiet: bool) -> int:
        """`step` until it moves bytes, or nothing moved for `timeout_s`."""
        until = time.monotonic() + self.timeout_s
        while True:
            try:
                count = step()
            except TimeoutError:
                if time.monotonic() >= until:
                    raise Refusal("silent", f"nothing came of the peer for {self.timeout_s:g} s") from None
                if is_quiet and self.on_quiet is not None:
                    self.on_quiet()
                count = -1
            except OSError as error:
                count, why = 0, error.strerror or str(error)
                if not self._is_aborted:
                    raise Refusal("cut", f"the connection to the peer broke: {why}") from None
            if self._is_aborted:
                raise Refusal("aborted", "the transfer was aborted")
            if self.deadline is not None and time.monotonic() >= self.deadline:
                raise Refusal("silent", f"the peer did not say who it is within {self.timeout_s:g} s")
            if count >= 0:
                return count

    def _read(self, view: memoryview) -> int:
        if not self.is_unix:
            return self._socket.recv_into(view)
        count, ancillary, _, _ = self._socket.recvmsg_into(
            [view], socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array("i")
                fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
                self._fds += fds
        return count
