"""Memory for the bodies of requests, of all connections: past a bound, who sends for longest makes room."""

from __future__ import annotations

import asyncio

MAX_HELD_BYTES = 256 * 1024 * 1024  # decoding makes up to five times as much of them, and mostly twice


class BodyRoom:
    """Counts what bodies hold, from their first bytes over SMALL_BYTES until they are tokenised or refused."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._held: dict[object, int] = {}
        self._sending: dict[object, asyncio.Timeout] = {}  # who began first is first

    def hold(self, owner: object, num_bytes: int, sending: asyncio.Timeout) -> None:
        """`owner` holds so many now, and sends on. Those that must make room find their `sending` expired."""
        if sending.when() is not None:  # it has made room, and does not know it yet
            return
        self.num_bytes += num_bytes - self._held.get(owner, 0)
        self._held[owner] = num_bytes
        self._sending[owner] = sending
        while self.num_bytes > self.max_bytes and self._sending:
            longest = next(iter(self._sending))
            self._sending[longest].reschedule(0.0)
            self.release(longest)

    def sent(self, owner: object) -> None:
        """It is all here, or not wanted; from now on it makes room for nobody."""
        self._sending.pop(owner, None)

    def release(self, owner: object) -> None:
        """It holds nothing any more, if it did."""
        self._sending.pop(owner, None)
        self.num_bytes -= self._held.pop(owner, 0)
