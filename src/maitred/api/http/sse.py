"""Server-sent events (WHATWG HTML, 9.2): one `data:` line per event, comments while silent, [DONE] at the end."""

from __future__ import annotations

import asyncio
import time

from maitred.api.http.exchange import Exchange

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect events
)
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


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
        """Send whole events, each ending with an empty line."""
        if not self._exchange.started:
            await self._start()
        self._last_write_at = time.monotonic()
        # Not the exchange's own `send`, which would find nothing to note: this is done for each token.
        await self._exchange.raw_send({"type": "http.response.body", "body": events, "more_body": True})

    async def keep_alive(self) -> None:
        """Send a comment if nothing was sent for two thirds of the time a stream may be silent; asked every third."""
        if time.monotonic() - self._last_write_at >= self._silence_s * 2 / 3:
            await self.write(KEEP_ALIVE)

    async def done(self, last_events: bytes = b"") -> None:
        """Send the last events and [DONE], and end the answer."""
        if not self._exchange.started:
            await self._start()
        await self._exchange.send({"type": "http.response.body", "body": last_events + DONE})

    async def _start(self) -> None:
        async with self._starting:
            if not self._exchange.started:
                self._exchange.streaming = True
                headers = list(SSE_HEADERS)
                await self._exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
