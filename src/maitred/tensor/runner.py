"""Runs the lanes: requests come in, batches go to instances in threads, answers come out.

One thread owns it and calls `turn` after every event, and when `wake_in_s` is over; batch threads call `wake` when a
batch has ended, so that `turn` is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from maitred.core.clock import Clock
from maitred.core.errors import KernelError, MaitredError, QueueTimeout, RequestTimeout, Unavailable
from maitred.core.request import Charges, FinishReason
from maitred.core.step import RequestProgress, RequestTiming
from maitred.core.tensor_request import (
    Batch,
    BatchOutcome,
    BatchTimes,
    InferRequest,
    InferResponse,
    LaneKey,
    TensorSpec,
)
from maitred.engine.frames import News, Ran
from maitred.scheduler.engine_core import TensorLanes
from maitred.tensor.batching import Batching, BatchRun, Rows, rules_of, run_batch
from maitred.tensor.served_models import LoadedVersion, ServedModels

MOST_BATCHES = 1024  # that run at once; a thread each, made when it is needed
MOST_LANES = 1024  # whose rows are measured
FIRST_ROW_S = 0.001  # of an unmeasured model
NEWS = 0.2  # weight of the last batch in what a row is believed to take
PREFILL_S_PER_TOKEN = 1 / 2000  # until prompts were measured, or for good where there are none


class TensorAnswer(NamedTuple):
    """Result of a request."""

    result: InferResponse | MaitredError
    finish_reason: FinishReason
    charges: Charges = Charges()
    timing: RequestTiming | None = None


Done = Callable[[TensorAnswer], None]


class Flow(Protocol):
    """Flow that takes requests of some models over, such as ensembles: it begins others in their stead."""

    def __len__(self) -> int:
        """Requests begun and not ended."""

    def take(self, loaded: LoadedVersion, request: InferRequest, done: Done) -> Done | None:
        """None for a request that it takes: then it calls `done` once, maybe at once. Else what the next one is to
        call. Raises as `TensorRunner.begin`.
        """

    def cancel(self, request_id: str, reason: FinishReason) -> bool:
        """Cancel a request; False if it was not here."""

    def turn(self) -> None:
        """Looks what is due."""

    @property
    def next_at(self) -> float | None:
        """When `turn` may have something to do though nothing happened (s)."""


@dataclass(slots=True, eq=False)
class _Held:
    """Version that takes requests, or has running batches."""

    loaded: LoadedVersion
    batching: Batching
    lease: ExitStack
    num_runs: int = 0
    retired: bool = False


@dataclass(slots=True)
class _Waiting:
    request: InferRequest
    held: _Held
    rows: Rows
    done: Done
    answer: tuple[object, ...] | MaitredError = field(default=())


class TensorRunner:
    """Requests of loaded models, from `begin` to their answer."""

    def __init__(
        self,
        lanes: TensorLanes,
        models: ServedModels,
        clock: Clock,
        *,
        wake: Callable[[], None],
        tell: Callable[[News], None],
        s_per_token: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._lanes, self._models, self._clock = lanes, models, clock
        self._wake, self._tell_news, self._s_per_token = wake, tell, s_per_token
        self.flows: list[Flow] = []
        self._held: dict[tuple[str, int], _Held] = {}  # as the lanes have them
        self._waiting: dict[str, _Waiting] = {}
        self._row_s: dict[LaneKey, float] = {}
        self._ended: deque[tuple[Batch, _Held, list[str], Future[BatchRun]]] = deque()
        self._threads = ThreadPoolExecutor(MOST_BATCHES, thread_name_prefix="maitred-batch")

    def __len__(self) -> int:
        """Requests in lanes and batches, and what flows have begun."""
        return len(self._waiting) + sum(map(len, self.flows))

    # -- models

    def models_changed(self) -> None:
        """Take in models after every load and unload: lanes as the models are now."""
        served = {(entry.name, entry.version) for entry in self._models.index(ready_only=True)}
        for name, version in served:
            assert version is not None
            with self._models.lease(name, version) as loaded:
                self._hold(loaded)
        for key in [key for key in self._held if key not in served]:
            self._lanes.unload(*key)
            self._drop_unloaded(*key)

    def _hold(self, loaded: LoadedVersion) -> _Held:
        key = (loaded.name, loaded.number)
        held = self._held.get(key)
        if held is not None and held.loaded is loaded:
            return held
        lease = ExitStack()
        lease.enter_context(self._models.lease(*key))
        new = self._held[key] = _Held(loaded, Batching(loaded.config), lease)
        self._lanes.load(*key, rules_of(loaded.config))
        if held is not None:
            self._retire(held)
        return new

    def _retire(self, held: _Held) -> None:
        held.retired = True
        if not held.num_runs:
            held.lease.close()

    def _drop_unloaded(self, name: str, version: int) -> None:
        """Retire a version once its last request has ended; one that was only replaced is loaded still."""
        if not self._lanes.has_model(name, version) and (held := self._held.pop((name, version), None)) is not None:
            self._retire(held)

    # -- requests

    def begin(self, request: InferRequest, done: Done) -> None:
        """`done` is called once, in this thread: from `turn`, `cancel`, or here where a flow has the answer. Raises
        ModelNotFound, InvalidRequest, Overloaded, and does not call it then.
        """
        with self._models.lease(request.model, request.version or None, request.label or None) as loaded:
            for flow in self.flows:
                left = flow.take(loaded, request, done)
                if left is None:
                    return
                done = left
            self._enqueue(loaded, request, done)

    def stand(self, request: InferRequest, done: Done) -> None:
        """Begin a request in its lane whatever a flow says."""
        with self._models.lease(request.model, request.version or None, request.label or None) as loaded:
            self._enqueue(loaded, request, done)

    def _enqueue(self, loaded: LoadedVersion, request: InferRequest, done: Done) -> None:
        held = self._hold(loaded)
        rows = held.batching.rows(request)
        self._lanes.add(self._spec(request, rows, LaneKey(loaded.name, loaded.number, rows.bucket)))
        self._waiting[request.request_id] = _Waiting(request, held, rows, done)

    def _spec(self, request: InferRequest, rows: Rows, lane: LaneKey) -> TensorSpec:
        seconds = rows.num_rows * self._row_s.get(lane, FIRST_ROW_S)
        return TensorSpec(
            request_id=request.request_id,
            arrived_at=request.arrived_at or self._clock.now(),
            lane=lane,
            num_rows=rows.num_rows,
            work=seconds / (self._s_per_token() or PREFILL_S_PER_TOKEN),
            level=request.level,
            timeout_s=request.timeout_s,
            terms=request.terms,
            num_tokens=request.num_tokens,
        )

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Cancel a request at once; one with a running batch ends with it. False for one that is not here."""
        if any(flow.cancel(request_id, reason) for flow in self.flows):
            return True
        is_here = request_id in self._waiting
        if (progress := self._lanes.finish(request_id, reason)) is not None:
            self._tell(progress)
        return is_here

    # -- batches

    def turn(self) -> None:
        """Take in ended batches, end requests out of time, and begin all batches that may go."""
        while self._ended:
            self._take_in(*self._ended.popleft())
        for progress in self._lanes.expire():
            self._tell(progress)
        for flow in self.flows:
            flow.turn()
        for batch in self._lanes.dispatch():
            self._start(batch)

    @property
    def wake_in_s(self) -> float | None:
        """When `turn` may have something to do though nothing happened."""
        if self._ended:
            return 0.0
        now = self._clock.now()
        waits = [at - now for flow in self.flows if (at := flow.next_at) is not None]
        waits += [wait_s] if (wait_s := self._lanes.wake_in_s) is not None else []
        return max(0.0, min(waits)) if waits else None

    def _start(self, batch: Batch) -> None:
        held = self._held[batch.lane[:2]]
        held.num_runs += 1
        rows = [self._waiting[request_id].rows for request_id in batch.request_ids]
        running = self._threads.submit(run_batch, held.loaded.instances[batch.instance], held.batching, rows)
        running.add_done_callback(lambda future: self._note_end(batch, held, future))

    def _note_end(self, batch: Batch, held: _Held, run: Future[BatchRun]) -> None:
        """Note a batch's end, in its thread."""
        self._ended.append((batch, held, list(batch.request_ids), run))
        self._wake()

    def _take_in(self, batch: Batch, held: _Held, request_ids: list[str], future: Future[BatchRun]) -> None:
        error = future.exception()
        failed = None if error is None else KernelError(f"the batch failed: {type(error).__name__}: {error}")
        run = future.result() if failed is None else BatchRun([failed] * len(request_ids))
        waiting = [self._waiting[request_id] for request_id in request_ids]
        for one, answer in zip(waiting, run.answers, strict=True):
            one.answer = answer
        errors = tuple(
            (one.request.request_id, str(one.answer)) for one in waiting if isinstance(one.answer, MaitredError)
        )
        if not run.lost:
            self._measure(batch, held, [one.rows for one in waiting], run)
        told = self._lanes.completed(batch, BatchOutcome(compute_us=run.compute_us, errors=errors, lost=run.lost))
        for progress in told:
            self._tell(progress)
        held.num_runs -= 1
        if held.retired:
            self._retire(held)

    def _measure(self, batch: Batch, held: _Held, rows: list[Rows], run: BatchRun) -> None:
        row_s = run.compute_us / 1e6 / batch.num_rows
        before = self._row_s.get(batch.lane, row_s)
        if batch.lane not in self._row_s and len(self._row_s) >= MOST_LANES:
            del self._row_s[next(iter(self._row_s))]
        self._row_s[batch.lane] = before + NEWS * (row_s - before)
        times = (run.input_ns, run.infer_ns, run.output_ns)
        lane, padding = batch.lane, held.batching.num_padded(rows)
        self._tell_news(Ran(BatchTimes(lane.model, lane.version, len(rows), batch.num_rows, *times, *padding)))

    def _tell(self, progress: RequestProgress) -> None:
        """Tell a request's end to its caller."""
        waiting = self._waiting.pop(progress.request_id)
        reason, charges, timing = progress.finish_reason, progress.charges, progress.timing
        assert reason is not None
        assert charges is not None
        assert timing is not None
        waiting.done(TensorAnswer(self._result(waiting, progress, charges, timing), reason, charges, timing))
        if waiting.held.loaded.replaced:
            self._drop_unloaded(waiting.held.loaded.name, waiting.held.loaded.number)

    def _result(
        self, waiting: _Waiting, progress: RequestProgress, charges: Charges, timing: RequestTiming
    ) -> InferResponse | MaitredError:
        request = waiting.request
        match progress.finish_reason:
            case FinishReason.STOP:
                assert not isinstance(waiting.answer, MaitredError)
                return InferResponse(
                    model=request.model,
                    version=waiting.held.loaded.number,
                    outputs=waiting.answer,  # type: ignore[arg-type]
                    queue_us=round(timing.queue_s * 1e6),
                    compute_us=charges.compute_us,
                )
            case FinishReason.ERROR:
                own = waiting.answer if isinstance(waiting.answer, MaitredError) else None
                return own or KernelError(progress.error or "the batch failed")
            case reason:
                return why_ended(request.model, reason)

    def close(self) -> None:
        """Waits for the batches that run."""
        self._threads.shutdown()
        for held in self._held.values():
            held.lease.close()


def why_ended(model: str, reason: FinishReason | None) -> MaitredError:
    """Why a request was not answered; the queue's time-out as Triton tells it, which its clients look for."""
    match reason:
        case FinishReason.QUEUE_TIMEOUT:
            return QueueTimeout(f"Request timeout expired: model {model!r}, before the request was in a batch")
        case FinishReason.TIMEOUT:
            return RequestTimeout(f"model {model!r}: the request was not done in time")
        case _:
            return Unavailable(f"model {model!r}: the request was given up")
