"""The way into an engine, in this process or in one of its own: the door, and the stream of who was let in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Container
from typing import Protocol

from maitred.clock import Clock
from maitred.config import SchedulerConfig
from maitred.errors import EngineDead, Overloaded, ReadTooSlowly
from maitred.request import Request
from maitred.scheduler.admission import PRIORITY_FIRST, AdmissionController
from maitred.step import RequestProgress

MAX_UNREAD = 16_384  # items kept for a consumer that does not take them: some megabytes, and seconds of a busy loop


class Aborting(Protocol):
    """What a stream needs of whoever feeds it."""

    def abort(self, request_id: str) -> None: ...


class ProgressStream:
    """The progress of one request, for one asyncio consumer; also an asynchronous iterator."""

    __slots__ = ("_engine", "_error", "_items", "_loop", "_request_id", "_waiter", "closed")

    def __init__(self, engine: Aborting, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._request_id = request_id
        self._loop = loop
        self._items: deque[RequestProgress] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self.closed = False  # its last progress was put, or its consumer went away

    def put(self, progress: RequestProgress) -> None:
        if self._error is not None:
            return
        self._items.append(progress)
        self.closed = self.closed or progress.finish_reason is not None
        if len(self._items) > MAX_UNREAD and not self.closed:
            self._items.clear()
            self._engine.abort(self._request_id)
            self.fail(ReadTooSlowly(f"the client is over {MAX_UNREAD} tokens behind; the request was ended"))
        self._wake()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[RequestProgress]:
        return self

    async def __anext__(self) -> RequestProgress:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self.closed:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._items.popleft()

    async def aclose(self) -> None:
        """Give up listening; an unfinished request is aborted."""
        if not self.closed:
            self.closed = True
            self._engine.abort(self._request_id)


class Entrance:
    """Lets requests in, or tells them why not. On the event loop: who is turned away hears it at once."""

    def __init__(
        self,
        engine: Aborting,
        clock: Clock,
        admission: AdmissionController | None,  # touched by the event loop alone; None lets everybody in
        shed: Callable[[str], None],  # gives up one that waits, to make room
    ) -> None:
        self._engine, self._clock, self._admission, self._shed = engine, clock, admission, shed

    def stream_for(
        self, request: Request, loop: asyncio.AbstractEventLoop, *, live: Container[str], death: EngineDead | None
    ) -> ProgressStream:
        """Where its progress will come out; closed already when it was not let in, and then the first item raises why:
        `death`, if there is no engine any more, or Overloaded. Raises ValueError for an id that is in `live`.
        """
        stream = ProgressStream(self._engine, request.request_id, loop)
        if death is not None:
            stream.fail(death)
            return stream
        if request.request_id in live:
            raise ValueError(f"request id {request.request_id!r} is already running")
        try:
            if self._admission is not None:
                for request_id in self._admission.admit(request, self._clock.now()):
                    self._shed(request_id)
        except Overloaded as refused:
            stream.fail(refused)
        return stream

    def stepped(self, progress: list[RequestProgress], num_queued: int) -> None:
        """What a step gave, and how many found no place in it."""
        if self._admission is not None:
            self._admission.stepped(progress, num_queued, self._clock.now())

    def reconfigured(self, config: SchedulerConfig) -> None:
        if self._admission is not None:
            first = config.policy in PRIORITY_FIRST
            self._admission.reconfigure(max_num_seqs=config.max_num_seqs, priority_first=first)

    def closed(self) -> None:
        """The engine is gone, and everybody with it."""
        if self._admission is not None:
            self._admission.closed()
