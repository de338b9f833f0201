"""The lanes of one engine, for the code that runs batches: each change gets its time, and the observer hears it."""

from __future__ import annotations

from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.request import FinishReason
from maitred.core.step import RequestProgress
from maitred.core.tensor_request import Batch, BatchOutcome, BatchRules, TensorRequest, TensorSpec
from maitred.scheduler.scheduler import Scheduler


class TensorObserver(Protocol):
    """Told of everything that happens to lanes, in order; `decisions.log.Recorder` is one."""

    def model_loaded(self, name: str, version: int, rules: BatchRules, now: float) -> None: ...

    def model_unloaded(self, name: str, version: int, now: float) -> None: ...

    def tensor_added(self, spec: TensorSpec, now: float) -> None: ...

    def tensor_ended(self, request_id: str, reason: FinishReason, now: float) -> None: ...

    def tensors_expired(self, now: float) -> None: ...

    def dispatched(self, batches: tuple[Batch, ...], now: float) -> None: ...

    def completed(self, batch: Batch, outcome: BatchOutcome, now: float) -> None: ...

    def flush(self, now: float) -> None:
        """Nothing more comes for now; not while a step is under way."""


class TensorLanes:
    """Tensor requests in, batches and last progress out. In the engine's thread, also while a step is under way."""

    def __init__(self, scheduler: Scheduler, clock: Clock, observer: TensorObserver | None = None) -> None:
        self._scheduler, self._clock, self._observer = scheduler, clock, observer

    def load(self, name: str, version: int, rules: BatchRules) -> None:
        self._scheduler.lanes.load(name, version, rules)
        if self._observer is not None:
            self._observer.model_loaded(name, version, rules, self._clock.now())

    def unload(self, name: str, version: int) -> None:
        self._scheduler.lanes.unload(name, version)
        if self._observer is not None:
            self._observer.model_unloaded(name, version, self._clock.now())

    def has_model(self, name: str, version: int) -> bool:
        """Loaded, or with requests that have not ended."""
        return any(model.key == (name, version) for model in self._scheduler.lanes.models)

    def add(self, spec: TensorSpec) -> None:
        """Raises InvalidRequest, ModelNotFound or Overloaded."""
        now = self._clock.now()
        self._scheduler.add_tensor(TensorRequest(spec), now)
        if self._observer is not None:
            self._observer.tensor_added(spec, now)

    def finish(self, request_id: str, reason: FinishReason) -> RequestProgress | None:
        """None when it is not here, or when its batch runs, with which it ends."""
        if request_id not in self._scheduler.lanes:
            return None
        now = self._clock.now()
        progress = self._scheduler.finish(request_id, reason, now)
        if self._observer is not None:
            self._observer.tensor_ended(request_id, reason, now)
        return progress

    def expire(self) -> list[RequestProgress]:
        now = self._clock.now()
        told = self._scheduler.expire_tensors(now)
        if told and self._observer is not None:
            self._observer.tensors_expired(now)
        return told

    def dispatch(self) -> tuple[Batch, ...]:
        now = self._clock.now()
        batches = self._scheduler.dispatch(now)
        if batches and self._observer is not None:
            self._observer.dispatched(batches, now)
        return batches

    def completed(self, batch: Batch, outcome: BatchOutcome) -> list[RequestProgress]:
        now = self._clock.now()
        told = self._scheduler.completed(batch, outcome, now)
        if self._observer is not None:
            self._observer.completed(batch, outcome, now)
        return told

    def close(self) -> None:
        if self._observer is not None:
            self._observer.flush(self._clock.now())

    @property
    def wake_in_s(self) -> float | None:
        """Seconds until `expire` or `dispatch` may have something to do; None until something happens."""
        now = self._clock.now()
        at = self._scheduler.next_wake(now)
        return None if at is None else max(0.0, at - now)
