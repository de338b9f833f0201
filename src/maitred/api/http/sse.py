"""An answer that comes piece by piece, as its format has it: events as they are made, comments while silent, an end."""

from __future__ import annotations

import asyncio
import time

from maitred.api.http.exchange import Exchange


class EventStream:
    """Writes events to one client. The answer begins with the first event or comment, so errors before have a status.

    Two tasks write: the request's own, and the Watch that keeps a silent stream open. Each write is whole events, so
    they may alternate in any order; only the beginning is guarded.
    """

    def __init__(self, exchange: Exchange, *, silence_s: float) -> None:
        self._exchange = exchange
        self._silence_s = silence_s
        self._starting = asyncio.Lock()
        self._last_write_at = time.monotonic()

    async def write(self, events: bytes) -> None:
        """Send whole events."""
        if not self._exchange.started:
            await self._start()
        self._last_write_at = time.monotonic()
        # Not the exchange's own `send`, which would find nothing to note: this is done for each token.
        await self._exchange.raw_send({"type": "http.response.body", "body": events, "more_body": True})

    async def keep_alive(self) -> None:
        """Send a comment if nothing was sent for two thirds of the time a stream may be silent; asked every third."""
        comment = self._exchange.format.stream.keep_alive
        if comment and time.monotonic() - self._last_write_at >= self._silence_s * 2 / 3:
            await self.write(comment)

    async def done(self, last_events: bytes = b"") -> None:
        """Send the last events and what ends the stream, and end the answer."""
        if not self._exchange.started:
            await self._start()
        await self._exchange.send(
            {"type": "http.response.body", "body": last_events + self._exchange.format.stream.end}
        )

    @property
    def num_end_bytes(self) -> int:
        """Number of bytes that `done` writes after the last events."""
        return len(self._exchange.format.stream.end)

    async def _start(self) -> None:
        async with self._starting:
            if not self._exchange.started:
                self._exchange.streaming = True
                headers = list(self._exchange.format.stream.headers)
                await self._exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
