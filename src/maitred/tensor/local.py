"""Tensor models in this process, on one event loop: the scheduler's lanes, and instances in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from maitred.config import SchedulerConfig
from maitred.core.clock import Clock, WallClock
from maitred.core.errors import MaitredError
from maitred.core.tensor_request import IndexEntry, InferRequest, InferResponse, ModelStatistics
from maitred.engine.frames import Looked, News, Ran, StepEnded
from maitred.engine.tensors import Statistics
from maitred.scheduler.engine_core import Moments, TensorLanes
from maitred.scheduler.scheduler import lone_scheduler
from maitred.storage.result_cache import ResultCache
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.control import ControlMode, ModelControl
from maitred.tensor.flows import add_flows
from maitred.tensor.runner import Answer, TensorRunner
from maitred.tensor.served_models import OPENERS, Opener, ServedModels


class LocalTensorService:
    """A TensorService. Make, `start` and `close` it on the event loop that asks it."""

    def __init__(
        self,
        repository: Path,
        mode: ControlMode = ControlMode.NONE,
        *,
        clock: Clock | None = None,
        scheduler: SchedulerConfig | None = None,
        openers: Mapping[str, Opener] = OPENERS,
        cache: ResultCache | None = None,
    ) -> None:
        self._clock = clock or WallClock()
        self.models = ServedModels(openers)
        self._control = ModelControl(repository, mode, self.models)
        self._statistics = Statistics()
        self._scheduler = lone_scheduler(scheduler or SchedulerConfig())
        self._cache = ResultCache(0, 0.0) if cache is None else cache
        self._loading = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, load: Collection[str] = ()) -> None:
        """Raises CheckpointError for a repository that cannot be read."""
        loop = self._loop = asyncio.get_running_loop()
        lanes = TensorLanes(self._scheduler, self._clock, Moments(()))
        self.runner = TensorRunner(lanes, self.models, self._clock, wake=self._wake(loop), tell=self._told)
        add_flows(self.runner, self._clock, self._cache, self._told)
        await asyncio.to_thread(self._control.start, load)
        self._models_changed()

    def _wake(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._turn)

        return wake

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.runner.close()
        for name in {entry.name for entry in self.models.index()}:
            self.models.drop(name)

    # -- TensorService

    async def infer(self, request: InferRequest) -> InferResponse:
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self.runner.begin(request, lambda told: None if answer.done() else answer.set_result(told))
        self._turn()
        try:
            result = (await answer).result
        except asyncio.CancelledError:
            self.runner.cancel(request.request_id)
            self._turn()
            raise
        if (timing := answer.result().timing) is not None:
            version = result.version if isinstance(result, InferResponse) else request.version
            succeeded = isinstance(result, InferResponse)
            self._statistics.ended(request.model, version, timing, succeeded=succeeded)
        if isinstance(result, MaitredError):
            raise result
        return result

    def index(self, *, ready_only: bool = False) -> Sequence[IndexEntry]:
        return self.models.index(ready_only=ready_only)

    def config(self, model: str, version: int = 0, label: str = "") -> ANY_MESSAGE:
        with self.models.lease(model, version or None, label or None) as loaded:
            return loaded.config

    def versions(self, model: str) -> Sequence[int]:
        return self.models.versions(model)

    def statistics(self, model: str = "", version: int = 0) -> Sequence[ModelStatistics]:
        return self._statistics.of(model, version)

    async def load(self, model: str, config: str | None = None) -> None:
        await self._changed(self._control.load, model, config)

    async def unload(self, model: str) -> None:
        await self._changed(self._control.unload, model)

    async def poll(self) -> None:
        """Load and unload what changed in the repository."""
        await self._changed(self._control.poll)

    # -- small things

    def _told(self, news: News) -> None:
        if isinstance(news, Ran | Looked | StepEnded):
            self._statistics.hear(news)

    async def _changed(self, change: Callable[..., object], *arguments: object) -> None:
        async with self._loading:
            try:
                await asyncio.to_thread(change, *arguments)
            finally:
                self._models_changed()

    def _models_changed(self) -> None:
        self.runner.models_changed()
        ready = self.models.index(ready_only=True)
        self._statistics.serve([(entry.name, entry.version or 0) for entry in ready])
        self._turn()

    def _turn(self) -> None:
        """Run a turn, and again when something may be due."""
        self.runner.turn()
        if self._timer is not None:
            self._timer.cancel()
        wait_s = self.runner.wake_in_s
        self._timer = None if wait_s is None else self._loop.call_later(wait_s, self._turn)
