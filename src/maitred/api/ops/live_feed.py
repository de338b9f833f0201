"""One feed of frames for all watchers: asked of the engine seldom enough, encoded once, never queued."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import accumulate

import msgspec

from maitred.core.errors import EngineDead, Overloaded
from maitred.core.step import RequestTiming
from maitred.engine.live_view import LiveView
from maitred.engine.replica import Replica

LOWEST_S = 1e-4
GROWTH = 1.06  # from a bucket to the next, so a percentile is right to 3%
NUM_BUCKETS = 288  # up to about half an hour
SLICE_S = 5.0
NUM_SLICES = 12
MAX_TENANTS = 64  # with a token count of their own

_BOUNDS = [LOWEST_S * GROWTH**index for index in range(NUM_BUCKETS - 1)]  # bucket i holds what is at most _BOUNDS[i]


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds, over the last minute; null where nothing happened."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class RecentTimes:
    """The last NUM_SLICES * SLICE_S seconds of one kind of duration. For the event loop alone, hence without a lock."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._slices = [[0] * NUM_BUCKETS for _ in range(NUM_SLICES)]
        self._number = int(monotonic() / SLICE_S)  # of the current slice, since the clock began
        self._current = self._slices[self._number % NUM_SLICES]
        self._turns_at = (self._number + 1) * SLICE_S

    def observe(self, seconds: float, times: int = 1) -> None:
        if self._monotonic() >= self._turns_at:
            self._turn()
        self._current[bisect_left(_BOUNDS, seconds)] += times

    def percentiles(self) -> Percentiles:
        if self._monotonic() >= self._turns_at:
            self._turn()
        counts = [sum(column) for column in zip(*self._slices, strict=True)]
        total = sum(counts)
        if not total:
            return Percentiles(0)
        return Percentiles(total, *(_quantile(counts, total * share) for share in (0.5, 0.9, 0.99)))

    def _turn(self) -> None:
        """Forget the slices whose time has come round again."""
        now = int(self._monotonic() / SLICE_S)
        for number in range(max(self._number + 1, now - NUM_SLICES + 1), now + 1):
            self._slices[number % NUM_SLICES] = [0] * NUM_BUCKETS
        self._number, self._turns_at = now, (now + 1) * SLICE_S
        self._current = self._slices[now % NUM_SLICES]


def _quantile(counts: list[int], rank: float) -> float:
    """The middle of the bucket in which the `rank`-th smallest lies."""
    index = next(i for i, seen in enumerate(accumulate(counts)) if seen >= rank)
    return float(f"{LOWEST_S * GROWTH ** (index - 0.5):.3g}")


class Latencies:
    """Latencies of all answers: to the first token, between tokens, in the queue; tokens by tenant."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.first_token, self.between_tokens, self.queue = (RecentTimes(monotonic) for _ in range(3))
        self.tokens_by_tenant: dict[str, int] = {}  # generated, since the start

    def answer_ended(self, timing: RequestTiming) -> None:
        self.first_token.observe(timing.ttft_s)
        self.queue.observe(timing.queue_s)

    def tokens_came(self, tenant: str, num_tokens: int) -> None:
        tokens = self.tokens_by_tenant
        if tenant in tokens or len(tokens) < MAX_TENANTS:
            tokens[tenant] = tokens.get(tenant, 0) + num_tokens


FRAME_S = 0.2  # between frames while there is work
IDLE_S = 0.5
COST_FACTOR = 200  # a pause is at least so many times the last snapshot's cost, so it takes at most 0.5% of the engine
MAX_PAUSE_S = 2.0  # one that stood in line for a processor says little of its cost; the page calls 4 s ill
SUMMARY_S = 1.0  # percentiles are computed this often
MAX_WATCHERS = 32


class LiveFrame(msgspec.Struct, frozen=True):
    """The engine, and what only the edge knows."""

    sequence: int  # 1, 2, 3 ... since the first watcher
    model: str
    seats: tuple[int, ...]  # row of each of `engine.running`; a request keeps its own
    first_token: Percentiles
    between_tokens: Percentiles
    queue: Percentiles
    tokens_by_tenant: dict[str, int]  # generated since the start
    engine: LiveView


def pause_s(view: LiveView) -> float:
    """Time (s) to wait before the engine is asked again."""
    busy = view.num_running or view.num_waiting or view.lanes
    return max(FRAME_S if busy else IDLE_S, min(MAX_PAUSE_S, COST_FACTOR * view.cost_s))


class LiveFeed:
    """Runs while there are watchers. Belongs to the event loop alone."""

    def __init__(
        self, replica: Replica, latencies: Latencies, model: str, *, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """`is_over` says that the server is going; then every watcher's frames end."""
        self._replica, self._latencies, self._model, self._is_over = replica, latencies, model, is_over
        self._showing: _Showing | None = None

    @property
    def num_watchers(self) -> int:
        return self._showing.num_watchers if self._showing is not None else 0

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Events with the newest frame; a slow watcher misses frames. Raises EngineDead or Overloaded."""
        if self.num_watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} are watching already; close one of them", retry_after_s=5.0)
        if self._showing is None or self._showing.ended:
            self._showing = _Showing(self._replica, self._latencies, self._model, self._is_over)
        showing = self._showing
        showing.num_watchers += 1
        try:
            async for frame in showing.frames():
                yield frame
        finally:
            showing.num_watchers -= 1
            if not showing.num_watchers:
                showing.stop()


class _Showing:
    """One task that asks the engine, from the first watcher to the last, and its newest frame."""

    def __init__(self, replica: Replica, latencies: Latencies, model: str, is_over: Callable[[], bool]) -> None:
        self._replica, self._latencies, self._model, self._is_over = replica, latencies, model, is_over
        self._encode = msgspec.json.Encoder().encode
        self._slots = SlotRows()
        self._sequence, self._event = 0, b""
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self.ended = False
        self.num_watchers = 0
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        self.ended = True
        self._task.cancel()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        seen = 0
        while True:
            while self._sequence == seen and not self.ended:
                await self._changed.wait()
            if self._sequence == seen:
                break
            seen = self._sequence
            yield self._event
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        try:
            await self._show()
        except Exception as error:  # raised again by every watcher
            self._error = error
        finally:
            self.ended = True
            self._changed.set()

    async def _show(self) -> None:
        loop, summary_at = asyncio.get_running_loop(), float("-inf")
        times = [Percentiles(0)] * 3
        while not self._is_over():
            view = await self._look()
            if loop.time() - summary_at >= SUMMARY_S:
                summary_at, times = loop.time(), self._times()
            self._publish(view, times)
            for part in _parts(pause_s(view)):
                await asyncio.sleep(part)
                if self._is_over():
                    return

    async def _look(self) -> LiveView:
        """Raises EngineDead also for an engine that is silent and counts as ill: a picture that stands still lies."""
        looking = asyncio.ensure_future(self._replica.live_view())
        try:
            while not (await asyncio.wait([looking], timeout=IDLE_S))[0]:
                state = self._replica.state()
                if not state.alive:
                    raise EngineDead(state.error or "the engine stopped")
            return looking.result()
        finally:
            looking.cancel()

    def _times(self) -> list[Percentiles]:
        latencies = self._latencies
        return [each.percentiles() for each in (latencies.first_token, latencies.between_tokens, latencies.queue)]

    def _publish(self, view: LiveView, times: list[Percentiles]) -> None:
        self._sequence += 1
        frame = LiveFrame(
            sequence=self._sequence,
            model=self._model,
            seats=tuple(self._slots.rows_of(request.id for request in view.running)),
            first_token=times[0],
            between_tokens=times[1],
            queue=times[2],
            tokens_by_tenant=self._latencies.tokens_by_tenant,
            engine=view,
        )
        self._event = b"data: " + self._encode(frame) + b"\n\n"
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class SlotRows:
    """The row of the picture that a running request has: the lowest free one, kept until it no longer runs, as when it
    is preempted. A batch has no order, but people follow a request by its row.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._free: list[int] = []

    def rows_of(self, request_ids: Iterable[str]) -> list[int]:
        """Rows of all running requests, in their order; requests not named have ended or were preempted."""
        running = list(request_ids)
        for gone in self._rows.keys() - set(running):
            heappush(self._free, self._rows.pop(gone))
        for request_id in running:
            if request_id not in self._rows:
                self._rows[request_id] = heappop(self._free) if self._free else len(self._rows)
        return [self._rows[request_id] for request_id in running]


def _parts(seconds: float) -> Iterator[float]:
    """A pause in pieces, so that a server that goes is not kept waiting."""
    while seconds > 0:
        yield min(seconds, IDLE_S)
        seconds -= IDLE_S
