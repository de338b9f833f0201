"""Progress streams of an engine's requests, bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Protocol
from weakref import WeakSet

from maitred.core.errors import ReadTooSlowly
from maitred.core.step import RequestProgress, TokenLogprobs

MAX_UNREAD_BYTES = 4 * 2**20  # kept for a consumer that does not take them: 14,000 tokens, or 2,000 with 20 logprobs
MAX_UNREAD_BYTES_IN_ALL = 256 * 2**20  # of one engine; then, streams that fall behind by UNREAD_MARK more are ended
UNREAD_MARK = 64 * 1024  # a stream that is read steadily is never so far behind
# What progress takes in memory, within a tenth: a token, a position's log-probabilities, and each of them.
PROGRESS_BYTES, TOKEN_BYTES, POSITION_BYTES, LOGPROB_BYTES = 256, 40, 256, 72


class Aborting(Protocol):
    """Abort, as a stream needs it of its feeder."""

    def abort(self, request_id: str) -> None: ...


class ProgressStream:
    """The progress of one request, for one asyncio consumer; also an asynchronous iterator.

    The engine waits for no consumer: what is not taken is kept, up to a bound, and then the request ends.
    """

    __slots__ = (
        "__weakref__",
        "_engine",
        "_error",
        "_everybody",
        "_items",
        "_loop",
        "_request_id",
        "_waiter",
        "closed",
        "num_unread_bytes",
    )

    def __init__(
        self,
        engine: Aborting,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        everybody: WeakSet[ProgressStream],  # all streams of the engine; this one joins
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._loop = loop
        self._items: deque[tuple[RequestProgress, int]] = deque()  # and its bytes
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._everybody = everybody
        self.closed = False  # its last progress was put, or its consumer went away
        self.num_unread_bytes = 0
        everybody.add(self)

    def put(self, progress: RequestProgress) -> None:
        if self._error is not None:
            return
        behind, size = self.num_unread_bytes, num_bytes(progress)
        self._items.append((progress, size))
        self.num_unread_bytes += size
        self.closed = self.closed or progress.finish_reason is not None
        passed_a_mark = self.num_unread_bytes // UNREAD_MARK > behind // UNREAD_MARK
        if passed_a_mark and behind >= UNREAD_MARK and not self.closed and self._is_too_much(behind):
            self._items.clear()
            self.num_unread_bytes = 0
            self._engine.abort(self._request_id)
            self.fail(ReadTooSlowly(f"the client is {behind // 1024} KiB of tokens behind; the request was ended"))
        self._wake()

    def _is_too_much(self, behind: int) -> bool:
        if behind > MAX_UNREAD_BYTES:
            return True
        return sum(stream.num_unread_bytes for stream in self._everybody) > MAX_UNREAD_BYTES_IN_ALL

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
        progress, size = self._items.popleft()
        self.num_unread_bytes -= size
        return progress

    async def aclose(self) -> None:
        """Give up listening; an unfinished request is aborted."""
        if not self.closed:
            self.closed = True
            self._engine.abort(self._request_id)


def num_bytes(progress: RequestProgress) -> int:
    """Roughly what it takes in memory."""
    size = PROGRESS_BYTES + TOKEN_BYTES * len(progress.new_token_ids)
    return size + logprob_bytes(progress.logprobs or ()) + logprob_bytes(progress.prompt_logprobs or ())


def logprob_bytes(positions: Iterable[TokenLogprobs]) -> int:
    """Roughly what they take in memory."""
    return sum(POSITION_BYTES + LOGPROB_BYTES * len(position.token_ids) for position in positions)
