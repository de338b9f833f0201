"""Sockets between hosts: where a source listens, how a receiver connects, and pieces as bytes behind their headers."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from maitred.core.errors import ConfigError
from maitred.kv.channel import Channel
from maitred.kv.handshake import Ring, expect
from maitred.kv.pieces import AnyMessage, Piece, Refusal, Renew, Welcome

SLOT_BYTES = 2**19  # a copy, its checksum and the kernel's copy of it stay in a second-level cache


class TcpOutbox:
    """A source's memory for one piece at a time, which is in the kernel's hands when `send` returns."""

    def __init__(self, channel: Channel, slot_bytes: int) -> None:
        self._channel, self._slot, self.slot_bytes = channel, memoryview(bytearray(slot_bytes)), slot_bytes
        self.ring, self.num_bytes = Ring(slot_bytes), slot_bytes

    def slot(self, num_bytes: int) -> tuple[int, memoryview]:
        return 0, self._slot[:num_bytes]

    def take(self, message: AnyMessage) -> None:
        """Take the news that the receiver waits."""
        expect(message, Renew)

    def send(self, piece: Piece, rows: memoryview) -> None:
        self._channel.send(piece, rows)

    def close(self) -> None:
        """Nothing outlives the connection."""


class TcpInbox:
    """A receiver's memory for a piece's bytes, which is reused."""

    def __init__(self, channel: Channel, welcome: Welcome) -> None:
        self._channel, self._slot = channel, memoryview(bytearray(welcome.slot_bytes))

    def rows_of(self, piece: Piece) -> memoryview:
        rows = self._slot[: piece.num_bytes]
        self._channel.read_into(rows)
        return rows

    def done_with(self, piece: Piece) -> None:
        """Nothing to send: the memory is ours."""

    def close(self) -> None:
        """Nothing outlives the connection."""


def listen(host: str, port: int, *, has_token: bool) -> socket.socket:
    """Raises ConfigError for an address that is not here, or that strangers reach without a token."""
    if not has_token and not _is_loopback(host):
        raise ConfigError(
            f"KV transfers listen on {host}, where others reach them, without a fleet token; "
            "give every worker --fleet-token-file, or listen on 127.0.0.1"
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=16)
    except OSError as error:
        raise ConfigError(f"KV transfers cannot listen on {host}:{port}: {error.strerror or error}") from None


def dial(host: str, port: int, *, timeout_s: float) -> socket.socket:
    """Raises Refusal."""
    try:
        return socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise Refusal("cut", f"cannot reach {host}:{port}: {error.strerror or error}") from None


def address_of(listener: socket.socket, transport: str = "tcp") -> str:
    host, port = listener.getsockname()[:2]
    return f"{transport}:{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
