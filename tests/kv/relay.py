"""A relay on loopback between those who pull KV and its sources, which does something to the bytes of one transfer.

Whoever dials it says first where it wants to go, `HOST:PORT` and a line's end, unless the relay has one target.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from maitred.kv.wire import PREFIX

SOURCE, RECEIVER = "source", "receiver"
WINDOW_BYTES = 2**16  # so that a source is not done with a transfer that is held here

NAME_AT = PREFIX.size + 2  # in a frame: behind the marks of an array and of a text

Strike = Callable[[bytes], bytes | None]
"""What is passed on in place of the next bytes; None cuts the connection."""


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 4]) + data[1:]


def cut(data: bytes) -> None:
    """Nothing more comes."""


@dataclass
class Fault:
    """Strikes once: `after` so many bytes `towards` one end, or with the message of that name."""

    strike: Strike
    towards: str
    after: int | bytes
    struck: threading.Event = field(default_factory=threading.Event)
    num_seen: int = 0

    def place(self, data: bytes) -> int | None:
        """Where in these bytes it strikes, if it does."""
        if isinstance(self.after, bytes):
            at = data.find(self.after)
            return None if at < 0 else max(0, at - NAME_AT)
        at, self.num_seen = self.after - self.num_seen, self.num_seen + len(data)
        return at if at < len(data) else None


class Relay:
    """Any number of connections; one fault at a time."""

    def __init__(self, target: tuple[str, int] | None = None) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._fault: Fault | None = None
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def fault(self, strike: Strike, *, towards: str = RECEIVER, after: int | bytes = 0) -> Fault:
        """Of the bytes that come from now on."""
        self._fault = Fault(strike, towards, after)
        return self._fault

    def close(self) -> None:
        _shut(self._listener, *self._ends)

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.socket() as far, suppress(OSError):
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
            far.connect(self._target or _wanted(near))
            self._ends |= {near, far}
            back = threading.Thread(target=self._pump, args=(near, far, SOURCE), daemon=True)
            back.start()
            self._pump(far, near, RECEIVER)
            back.join()
            self._ends -= {near, far}

    def _pump(self, source: socket.socket, target: socket.socket, towards: str) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                passed = self._passed(data, target, towards)
                if passed is None:
                    break
                target.sendall(passed)
        _shut(source, target)

    def _passed(self, data: bytes, target: socket.socket, towards: str) -> bytes | None:
        with self._lock:
            fault = self._fault
            place = fault.place(data) if fault is not None and fault.towards == towards else None
            if fault is None or place is None:
                return data
            self._fault = None
        target.sendall(data[:place])
        fault.struck.set()
        return fault.strike(data[place:])


def _wanted(near: socket.socket) -> tuple[str, int]:
    words = b""
    while not words.endswith(b"\n"):
        words += near.recv(1) or b"\n"
    host, _, port = words.decode().strip().rpartition(":")
    return host, int(port)


def _shut(*socks: socket.socket) -> None:
    for sock in socks:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
