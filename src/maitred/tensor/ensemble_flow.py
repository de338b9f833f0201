"""Requests of ensembles: each step is a request of its own in its model's lane, with tenant and times of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from maitred.core.clock import Clock
from maitred.core.errors import InvalidRequest, MaitredError, Unavailable
from maitred.core.request import Charges, FinishReason
from maitred.core.step import RequestTiming
from maitred.core.tensor_request import InferRequest, InferResponse, Tensor
from maitred.tensor.batching import Batching
from maitred.tensor.config import ANY_MESSAGE, inputs_of
from maitred.tensor.ensembles import EnsembleRun, Step, StepInputs
from maitred.tensor.instance import reshaped
from maitred.tensor.runner import Answer, Done
from maitred.tensor.served_models import LoadedVersion


@dataclass(slots=True, eq=False)
class _Whole:
    """Ensemble request with steps that have not answered."""

    request: InferRequest
    version: int
    run: EnsembleRun
    done: Done
    num_rows: int
    running: dict[int, str] = field(default_factory=dict)  # request ids of steps, by their number
    compute_us: int = 0
    first_scheduled_at: float | None = None  # s
    failure: tuple[MaitredError, FinishReason] | None = None  # what ended it; steps that run still are waited for


OnStep = Callable[[str, int, Answer], None]
"""Told of a model, its version (0 is the highest), and how a request for it ended."""


class EnsembleFlow:
    """A Flow. `begin` and `cancel` are the runner's."""

    def __init__(
        self,
        begin: Callable[[InferRequest, Done], None],
        cancel: Callable[[str, FinishReason], None],
        clock: Clock,
        on_step: OnStep,
    ) -> None:
        self._begin, self._cancel, self._clock, self._on_step = begin, cancel, clock, on_step
        self._wholes: dict[str, _Whole] = {}

    def __len__(self) -> int:
        return len(self._wholes)

    def take(self, loaded: LoadedVersion, request: InferRequest, done: Done) -> Done | None:
        if loaded.plan is None:
            return done
        if request.request_id in self._wholes:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        num_rows = _num_rows(loaded.config, request)
        run = EnsembleRun(loaded.plan, _model_shapes(loaded.config, request.inputs), request.outputs)
        whole = self._wholes[request.request_id] = _Whole(request, loaded.number, run, done, num_rows)
        self._go_on(whole)
        return None

    def cancel(self, request_id: str, reason: FinishReason) -> bool:
        whole = self._wholes.get(request_id)
        if whole is None:
            return False
        self._fail(whole, Unavailable(f"model {whole.request.model!r}: the request was given up"), reason)
        return True

    def turn(self) -> None:
        """Steps have deadlines of their own, which are the whole's."""

    @property
    def next_at(self) -> float | None:
        return None

    # -- steps

    def _go_on(self, whole: _Whole) -> None:
        """Begins all steps that may go; those that one of them leads to at once, too."""
        for ready in whole.run.ready():
            if whole.failure is not None:
                break
            self._begin_step(whole, ready)
        if not whole.running and (whole.failure is not None or whole.run.is_done):
            self._end(whole)

    def _begin_step(self, whole: _Whole, ready: StepInputs) -> None:
        request_id = f"{whole.request.request_id}/{ready.number}"
        whole.running[ready.number] = request_id
        try:
            self._begin(_step_request(whole, ready, request_id), partial(self._answered, whole, ready))
        except MaitredError as error:
            del whole.running[ready.number]
            self._fail(whole, error, FinishReason.ERROR)

    def _answered(self, whole: _Whole, ready: StepInputs, answer: Answer) -> None:
        whole.running.pop(ready.number)
        self._on_step(ready.step.model, ready.step.version, answer)
        whole.compute_us += answer.charges.compute_us
        times = (whole.first_scheduled_at, answer.charges.first_scheduled_at)
        whole.first_scheduled_at = min((at for at in times if at is not None), default=None)
        if isinstance(answer.result, MaitredError):
            self._fail(whole, answer.result, answer.finish_reason)
        elif whole.failure is None:
            whole.run.answered(ready.step, answer.result.outputs)
        if whole.failure is None:
            self._go_on(whole)
        elif not whole.running:
            self._end(whole)

    def _fail(self, whole: _Whole, error: MaitredError, reason: FinishReason) -> None:
        """Give up the other steps; one with a running batch ends with it, so that its time is charged."""
        if whole.failure is None:
            whole.failure = (error, reason)
            for request_id in tuple(whole.running.values()):
                self._cancel(request_id, reason)

    def _end(self, whole: _Whole) -> None:
        if self._wholes.pop(whole.request.request_id, None) is None:
            return
        now, arrived_at = self._clock.now(), whole.request.arrived_at
        scheduled_at = now if whole.first_scheduled_at is None else whole.first_scheduled_at
        arrived_at = arrived_at or scheduled_at
        queue_s = max(0.0, scheduled_at - arrived_at)
        timing = RequestTiming(queue_s=queue_s, prefill_s=now - scheduled_at, decode_s=0.0, ttft_s=now - arrived_at)
        charges = Charges(
            first_scheduled_at=whole.first_scheduled_at, num_rows=whole.num_rows, compute_us=whole.compute_us
        )
        result, reason = whole.failure or (self._response(whole, queue_s), FinishReason.STOP)
        whole.done(Answer(result, reason, charges, timing))

    def _response(self, whole: _Whole, queue_s: float) -> InferResponse:
        return InferResponse(
            model=whole.request.model,
            version=whole.version,
            outputs=whole.run.outputs(),
            queue_us=round(queue_s * 1e6),
            compute_us=whole.compute_us,
        )


def _step_request(whole: _Whole, ready: StepInputs, request_id: str) -> InferRequest:
    """Return a step's request. The whole waits to start: once one of its steps has run, no other is late to start."""
    step: Step = ready.step
    return msgspec.structs.replace(
        whole.request,
        request_id=request_id,
        model=step.model,
        version=step.version,
        label="",
        inputs=ready.inputs,
        outputs=tuple(step.outputs),
        start_by=whole.request.start_by if whole.first_scheduled_at is None else None,
    )


def _num_rows(config: ANY_MESSAGE, request: InferRequest) -> int:
    """Raises InvalidRequest for inputs that are not the ensemble's."""
    num_rows = Batching(config).rows(request).num_rows
    if not 1 <= num_rows <= max(1, config.max_batch_size):
        raise InvalidRequest(
            f"batch-size must be from 1 to {config.max_batch_size} for {config.name}, and is {num_rows}"
        )
    return num_rows


def _model_shapes(config: ANY_MESSAGE, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return shapes as the steps have them, where the ensemble's config reshapes what clients send."""
    specs = {spec.name: spec for spec in inputs_of(config) if spec.reshape is not None}
    if not specs:
        return inputs
    return tuple(_reshaped(tensor, specs[tensor.name], config) if tensor.name in specs else tensor for tensor in inputs)


def _reshaped(tensor: Tensor, spec: ANY_MESSAGE, config: ANY_MESSAGE) -> Tensor:
    shape = reshaped(tensor.shape, spec.dims, spec.model_dims, batched=config.max_batch_size > 0)
    return msgspec.structs.replace(tensor, shape=shape)
