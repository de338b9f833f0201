"""The requests being answered: counted, watched for clients that go away, waited for and cut when the server ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import TracebackType

from starlette.types import Message

from maitred.api.http.errors import BrokenOff, ClientGone
from maitred.api.http.exchange import EventStream, Exchange
from maitred.core.errors import MaitredError, Unavailable


class InFlight:
    """Requests being answered. Belongs to the event loop; the end of the server begins with `drain`."""

    def __init__(self, *, is_ready: Callable[[], bool] | None, silence_s: float) -> None:
        """A stream that is silent for two thirds of `silence_s` is kept open with a comment."""
        self.draining = False
        self._drain_ends_at: float | None = None  # s, the event loop's
        self._is_ready, self._silence_s = is_ready, silence_s
        self._num_answering = 0
        self._empty = asyncio.Event()  # set while no request is in flight
        self._empty.set()
        self._watches: set[WatchedWork] = set()

    @property
    def welcome(self) -> bool:
        """Whether new requests are welcome."""
        return not self.draining and (self._is_ready is None or self._is_ready())

    def drain(self, within_s: float) -> None:
        """Refuse new requests; requests in flight have `within_s` left."""
        self.draining, self._drain_ends_at = True, asyncio.get_running_loop().time() + within_s

    @property
    def drain_left_s(self) -> float | None:
        """Time (s) that requests in flight still have; None before a drain."""
        if self._drain_ends_at is None:
            return None
        return max(0.0, self._drain_ends_at - asyncio.get_running_loop().time())

    @property
    def is_empty(self) -> bool:
        """Whether no request is in flight."""
        return self._empty.is_set()

    @property
    def num_watched(self) -> int:
        return len(self._watches)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The server's end waits for what runs inside. Raises Unavailable when requests are not welcome."""
        if not self.welcome:
            state = "shutting down" if self.draining else "not ready yet"
            raise Unavailable(f"the server is {state}; try again", retry_after_s=1.0)
        self._num_answering += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            if not self._num_answering:
                self._empty.set()

    @asynccontextmanager
    async def watch(self, exchange: Exchange, events: EventStream | None = None) -> AsyncIterator[None]:
        """End what runs inside when the client goes away or `cut_all` says so."""
        on_silence = events.keep_alive if events is not None else None
        watch = WatchedWork(exchange, silence_s=self._silence_s, on_silence=on_silence)
        self._watches.add(watch)
        try:
            async with watch:
                yield
        finally:
            self._watches.discard(watch)

    async def emptied(self) -> None:
        """Returns when every request has its answer."""
        await self._empty.wait()

    def cut_all(self) -> None:
        """End every request in flight with an error, or a break where a router goes on with it; for the end of a
        graceful shutdown.
        """
        for watch in list(self._watches):
            goes_on = watch.exchange.goes_on_elsewhere and watch.exchange.started
            words = "the server is shutting down; send the request again"
            watch.cut(BrokenOff(words) if goes_on else Unavailable(words, retry_after_s=1.0))


class WatchedWork:
    """`async with WatchedWork(exchange):` around the work of one request, body already read.

    A second task listens to the connection. When it ends, the body of the `with` is cancelled at its current await,
    so generators under it run their `finally` in the same turn of the loop, and ClientGone is raised. `cut(error)`
    does the same for a reason of ours. `on_silence` is called three times in `silence_s`
    seconds, and the pending work is not touched for that.
    """

    def __init__(
        self, exchange: Exchange, *, silence_s: float = 0.0, on_silence: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.exchange = exchange
        keeps_open = on_silence is not None and silence_s > 0
        self._listen_s = silence_s / 3 if keeps_open else None
        self._on_silence = on_silence if keeps_open else None
        self._reason: MaitredError | ClientGone | None = None

    def cut(self, error: MaitredError | ClientGone) -> None:
        """End the work; the `with` raises `error`."""
        if self._reason is None and not self.exchange.complete:
            self._reason = error
            self._worker.cancel()

    async def __aenter__(self) -> WatchedWork:
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
            with suppress(asyncio.CancelledError):
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
            return await self.exchange.receive()
        async with asyncio.timeout(self._listen_s):
            return await self.exchange.receive()
