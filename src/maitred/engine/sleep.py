"""Sleep: an engine that ends for want of requests, and is started by the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from maitred.core.clock import Clock
from maitred.core.errors import EngineDead


class SleepPhase(Enum):
    AWAKE = "awake"
    ENDING = "ending"  # the engine was told to
    ASLEEP = "asleep"
    WAKING = "waking"  # the next one loads


class SleepState:
    """Whether there is no engine on purpose, and the calls that wait for that to change. On one event loop."""

    def __init__(
        self,
        after_s: float | None,  # without a request; None is never by itself
        clock: Clock,
        *,
        end: Callable[[], None],  # tells the engine to end
        start: Callable[[], None],  # begins another
        hindrance: Callable[[], EngineDead | None],  # why there will be no engine any more
    ) -> None:
        self._after_s, self._clock = after_s, clock
        self._end, self._start, self._hindrance = end, start, hindrance
        self._num_asking = 0
        self._wake_asked = False  # while the engine was still ending
        self._woken_at = 0.0
        self._waiting: list[asyncio.Future[None]] = []
        self.phase = SleepPhase.AWAKE
        self.num_sleeps = 0
        self.wake_s = 0.0  # what the last start out of sleep took

    @property
    def asleep(self) -> bool:
        """True from the engine's order to end until the next one is ready."""
        return self.phase is not SleepPhase.AWAKE

    async def fall_asleep(self) -> None:
        """Returns when the engine's process has ended, which it does once there is no request. Raises EngineDead."""
        self._num_asking += 1
        before = self.num_sleeps  # another call may wake it at once
        try:
            while self.phase is not SleepPhase.ASLEEP and self.num_sleeps == before:
                await self._change()
        finally:
            self._num_asking -= 1

    async def wake_up(self) -> None:
        """Returns when there is an engine. Raises EngineDead."""
        self.wake()
        while self.asleep:
            await self._change()

    def wake(self) -> None:
        """The same without waiting."""
        if self.phase is SleepPhase.ENDING:
            self._wake_asked = True
        elif self.phase is SleepPhase.ASLEEP:
            self.phase, self._woken_at, self._wake_asked = SleepPhase.WAKING, self._clock.now(), False
            self._start()

    # -- what the supervisor tells

    def idle(self, idle_s: float) -> None:
        """The engine is ready, and has had no request for so long."""
        limit_s = 0.0 if self._num_asking else self._after_s
        if limit_s is not None and idle_s > limit_s:
            self.phase = SleepPhase.ENDING
            self._end()

    def ended(self) -> None:
        """The engine did as it was told."""
        self.phase = SleepPhase.ASLEEP
        self.num_sleeps += 1
        self.changed()
        if self._wake_asked:
            self.wake()

    def ready(self) -> None:
        """Note that there is an engine."""
        if self.phase is SleepPhase.WAKING:
            self.wake_s = self._clock.now() - self._woken_at
        self.phase = SleepPhase.AWAKE
        self.changed()

    def lost(self) -> None:
        """Note that there is no engine, and not on purpose."""
        self.phase = SleepPhase.AWAKE
        self.changed()

    def changed(self) -> None:
        """Have all waiting calls look again."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def _change(self) -> None:
        error = self._hindrance()
        if error is not None:
            raise error
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future
