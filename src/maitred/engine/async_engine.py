"""One engine as a Replica: the core steps in a thread of its own, asyncio callers submit and listen."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

from maitred.clock import Clock
from maitred.config import SchedulerConfig
from maitred.engine.core import EngineCore
from maitred.engine.live_view import LiveView, look_at
from maitred.engine.progress_streams import ProgressStream, ProgressStreams
from maitred.engine.restarts import Watchdog
from maitred.errors import EngineDead, MaitredError
from maitred.gate.admission import AdmissionController
from maitred.replica import ReplicaState
from maitred.request import FinishReason, Request
from maitred.scheduler.queue_view import QueueView, queue_view
from maitred.step import RequestProgress

logger = logging.getLogger(__name__)
T = TypeVar("T")
TICK_S = 0.25  # between two looks at the step


class AsyncEngine:
    """A Replica around one EngineCore.

    The core is touched by its own thread alone. Callers leave commands in an inbox that is read between two steps,
    so an abort frees its blocks before the next step; each step's progress reaches the event loop in one call.
    """

    def __init__(
        self,
        core: EngineCore,
        clock: Clock,
        *,
        on_close: Callable[[], None] | None = None,
        on_admitted: Callable[[Request], None] | None = None,  # told in the engine's thread, so it must not wait
        admission: AdmissionController | None = None,  # None lets everybody in
        step_timeout_s: float = math.inf,  # a step that takes longer is told as the engine's end, while it lasts
    ) -> None:
        self._core = core
        self._clock = clock
        self._on_close = on_close
        self._on_admitted = on_admitted
        self._step_timeout_s = step_timeout_s
        self._streams_in = ProgressStreams(
            self, clock, admission, lambda request_id: self._post(lambda: self._shed(request_id))
        )
        self._watchdog: Watchdog | None = None  # since `attach`
        self._round, self._busy = 0, False  # written by the engine's thread
        self._inbox: deque[Callable[[], list[RequestProgress]]] = deque()
        self._wakeup = threading.Condition()
        self._stopping = False
        self._error: BaseException | None = None
        self._streams: dict[str, ProgressStream] = {}  # touched by the event loop alone
        self._questions: set[asyncio.Future[Any]] = set()  # touched by the event loop alone
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="maitred-engine", daemon=True)
        self._thread.start()

    # the event loop's side

    def submit(self, request: Request) -> ProgressStream:
        """Queue `request`; its progress comes out of the stream.

        The first item raises EngineDead when the engine stopped, Overloaded when the request was turned away.
        """
        loop = asyncio.get_running_loop()
        self._loop = loop
        death = self._death() if self._error is not None or self._stopping else None
        stream = self._streams_in.stream_for(request, loop, live=self._streams, death=death)
        if not stream.closed:
            self._streams[request.request_id] = stream
            self._post(lambda: self._add(request))
        return stream

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on look from `loop` whether steps end, for whoever asks for the state. Idempotent."""
        if self._watchdog is None:
            self._watchdog = Watchdog(TICK_S)
            loop.call_soon(self._tick, loop, self._watchdog)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if request_id in self._streams:
            self._post(lambda: self._finish(request_id, reason))

    def state(self) -> ReplicaState:
        """Read without a lock: every figure is one word, and a step's worth of skew between them does no harm."""
        if self._error is not None or self._stopping:
            return ReplicaState(alive=False, error=str(self._death()))
        stuck_s = self._watchdog.stuck_s if self._watchdog is not None else 0.0
        state = self._state_of_core()
        if stuck_s < self._step_timeout_s:
            return state
        return replace(state, alive=False, error=f"the engine has been in one step for {stuck_s:.0f} s")

    async def queue_view(self, *, offset: int, limit: int) -> QueueView:
        """Who waits, as it stands between two steps. Raises EngineDead."""
        return await self._ask(lambda core: queue_view(core.scheduler, self._clock.now(), offset=offset, limit=limit))

    async def live_view(self) -> LiveView:
        """Slots, queue and blocks, as they stand between two steps. Raises EngineDead."""
        return await self._ask(lambda core: look_at(core, self._clock))

    async def scheduler_config(self) -> SchedulerConfig:
        return await self._ask(lambda core: core.scheduler.config)

    async def policy_names(self) -> tuple[str, ...]:
        return await self._ask(lambda core: core.scheduler.policy_names)

    async def configure(self, config: SchedulerConfig) -> None:
        """Changes policy and limits, losing no request; returns when it is done. Raises ConfigError, or EngineDead."""
        await self._ask(lambda core: core.configure(config))
        self._streams_in.reconfigured(config)

    async def close(self) -> None:
        """Stop the thread after its current step; unfinished requests end with EngineDead."""
        await asyncio.to_thread(self.stop)
        self._fail_all(self._death())

    def _state_of_core(self) -> ReplicaState:
        core, stats = self._core, self._core.stats
        idle = core.last_step_at is None or not core.has_work
        return ReplicaState(
            **{field.name: getattr(stats, field.name) for field in fields(stats)},
            last_step_age_s=0.0 if idle else max(0.0, self._clock.now() - (core.last_step_at or 0.0)),
            execute_s=core.execute_s,
            host_s=core.host_s,
        )

    async def _ask(self, question: Callable[[EngineCore], T]) -> T:
        """What `question` finds, asked in the engine's thread between two steps."""
        if self._error is not None or self._stopping:
            raise self._death()
        self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._questions.add(answer)
        self._post(lambda: self._answer(question, answer))
        try:
            return await answer
        finally:
            self._questions.discard(answer)

    def _tick(self, loop: asyncio.AbstractEventLoop, watchdog: Watchdog) -> None:
        watchdog.beat(self._round, self._busy)
        watchdog.tick(self._clock.now())
        if self._error is None and not self._stopping:
            loop.call_later(TICK_S, self._tick, loop, watchdog)

    def _post(self, command: Callable[[], list[RequestProgress]]) -> None:
        with self._wakeup:
            self._inbox.append(command)
            self._wakeup.notify()

    def _death(self) -> EngineDead:
        if self._error is not None:
            return EngineDead(f"the engine stopped: {self._error}")
        return EngineDead("the engine was shut down")

    def _deliver(self, told: tuple[list[RequestProgress], int]) -> None:
        """Progress for everybody, and how many found no place in the step."""
        progress, num_queued = told
        self._streams_in.stepped(progress, num_queued)
        for item in progress:
            stream = self._streams.get(item.request_id)
            if stream is None:
                continue
            stream.put(item)
            if item.finish_reason is not None:
                del self._streams[item.request_id]

    def _fail_all(self, error: BaseException) -> None:
        self._streams_in.closed()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        for answer in self._questions:
            if not answer.done():
                answer.set_exception(error)

    # the engine thread's side

    def stop(self) -> None:
        """Stop stepping and release the executor; idempotent, from any thread."""
        with self._wakeup:
            already, self._stopping = self._stopping, True
            self._wakeup.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if not already and self._on_close is not None:
            self._on_close()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._round, self._busy = self._round + 1, True
                progress = self._take_commands()
                if self._core.has_work:
                    progress += self._core.step()
                if progress:
                    self._call_in_loop(self._deliver, (progress, self._core.num_queued))
                self._busy = False
        except BaseException as error:  # the thread's last act is to tell everybody
            self._error = error
            logger.error("the engine stopped: %s: %s", type(error).__name__, error)
            logger.debug("where it stopped", exc_info=error)
            self._call_in_loop(self._fail_all, self._death())

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when stopping."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._stopping or self._inbox or self._core.has_work)
            return not self._stopping

    def _take_commands(self) -> list[RequestProgress]:
        progress: list[RequestProgress] = []
        while self._inbox:
            progress += self._inbox.popleft()()
        return progress

    def _add(self, request: Request) -> list[RequestProgress]:
        try:
            self._core.add(request)
        except MaitredError as error:  # cannot ever fit: this request's fault, not the engine's
            failed = RequestProgress(request.request_id, finish_reason=FinishReason.ERROR, error=str(error))
            return [failed]
        if self._on_admitted is not None:
            self._on_admitted(request)
        return []

    def _finish(self, request_id: str, reason: FinishReason) -> list[RequestProgress]:
        ended = self._core.finish(request_id, reason)
        return [ended] if ended is not None else []

    def _shed(self, request_id: str) -> list[RequestProgress]:
        ended = self._core.shed(request_id)
        return [ended] if ended is not None else []

    def _answer(self, question: Callable[[EngineCore], T], answer: asyncio.Future[T]) -> list[RequestProgress]:
        try:
            found = question(self._core)
        except MaitredError as error:
            self._call_in_loop(_settle, (answer, error))
        else:
            self._call_in_loop(_settle, (answer, found))
        return []

    def _call_in_loop(self, function: Callable[..., None], argument: object) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop was closed under us: nobody is listening any more
            self._loop = None


def _settle(settled: tuple[asyncio.Future[Any], object]) -> None:
    answer, outcome = settled
    if answer.done():
        return  # nobody waits for it any more
    if isinstance(outcome, MaitredError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
