"""Ends a request's work when its client goes away or the server stops, and keeps silent streams open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType

from starlette.types import Message

from maitred.api.http.errors import ClientGone
from maitred.api.http.exchange import Exchange
from maitred.errors import MaitredError


class Watch:
    """`async with Watch(exchange):` around the work of one request, body already read.

    A second task listens to the connection. When it ends, the body of the `with` is cancelled at its current await,
    so generators under it run their `finally` in the same turn of the loop, and ClientGone is raised. `cut(error)`
    does the same for a reason of ours. `on_silence` is called three times in `silence_s`
    seconds, and the pending work is not touched for that.
    """

    def __init__(
        self, exchange: Exchange, *, silence_s: float = 0.0, on_silence: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._exchange = exchange
        keeps_open = on_silence is not None and silence_s > 0
        self._listen_s = silence_s / 3 if keeps_open else None
        self._on_silence = on_silence if keeps_open else None
        self._reason: MaitredError | ClientGone | None = None

    def cut(self, error: MaitredError | ClientGone) -> None:
        """End the work; the `with` raises `error`."""
        if self._reason is None and not self._exchange.complete:
            self._reason = error
            self._worker.cancel()

    async def __aenter__(self) -> Watch:
        worker = asyncio.current_task()
        assert worker is not None
        self._worker = worker
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.cancel()
        if self._reason is None:
            return
        if error is None:  # the cancellation is still on its way to us
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        self._worker.uncancel()
        if error is None or isinstance(error, asyncio.CancelledError):
            raise self._reason

    async def _listen(self) -> None:
        while True:
            try:
                message = await self._heard()
            except TimeoutError:
                if self._on_silence is not None:
                    await self._on_silence()
                continue
            if message["type"] == "http.disconnect":
                self.cut(ClientGone())
                return

    async def _heard(self) -> Message:
        if self._listen_s is None:
            return await self._exchange.receive()
        async with asyncio.timeout(self._listen_s):
            return await self._exchange.receive()
