"""Flows: stages between a tensor request and its lane, in order: the response cache, sequences, ensembles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from time import perf_counter_ns

import msgspec

from maitred.core.clock import Clock
from maitred.core.errors import InvalidRequest, MaitredError, Unavailable
from maitred.core.request import Charges, FinishReason
from maitred.core.step import RequestTiming
from maitred.core.tensor_request import InferRequest, InferResponse, Tensor
from maitred.engine.frames import Looked, News, StepEnded
from maitred.storage.result_cache import CachedAnswer as Kept
from maitred.storage.result_cache import ResultCache
from maitred.tensor.batching import Batching
from maitred.tensor.config import ANY_MESSAGE, inputs_of
from maitred.tensor.ensembles import EnsembleRun, EnsembleStep, StepInputs
from maitred.tensor.instance import reshaped
from maitred.tensor.runner import Done, TensorAnswer, TensorRunner
from maitred.tensor.sequences import SequenceFlow
from maitred.tensor.served_models import LoadedVersion


def add_flows(runner: TensorRunner, clock: Clock, cache: ResultCache, tell: Callable[[News], None]) -> None:
    runner.flows += [
        CacheFlow(cache, clock, tell),
        SequenceFlow(runner.stand, clock),
        EnsembleFlow(runner.begin, runner.cancel, clock, tell),
    ]


# ---- the response cache


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Tensor, ...]).decode


def cache_key(request: InferRequest, files_print: bytes) -> bytes:
    """The print of the model's files, and sha256 over it, the tenant, the wanted outputs and the inputs."""
    digest = sha256(files_print)
    parts: list[bytes | memoryview] = [request.terms.tenant.encode("utf-8", "surrogatepass"), _encode(request.outputs)]
    for tensor in sorted(request.inputs, key=lambda each: each.name):
        data = memoryview(tensor.data).cast("B")
        parts += [_encode((tensor.name, tensor.datatype, tensor.shape)), data]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return files_print + digest.digest()


class CacheFlow:
    """A Flow: answers of models with `response_cache { enable: true }`, by tenant, model files and inputs.

    The answers stand in the server's result cache: one budget, and the least recently used of all goes first. What a
    reload replaced is dropped.
    """

    def __init__(self, cache: ResultCache, clock: Clock, tell: Callable[[News], None]) -> None:
        self._cache, self._clock, self._tell = cache, clock, tell
        self._loads: dict[int, LoadedVersion] = {}  # by their ids

    def __len__(self) -> int:
        return 0

    def take(self, loaded: LoadedVersion, request: InferRequest, done: Done) -> Done | None:
        if not loaded.config.response_cache.enable or not self._cache.max_bytes:
            return done
        self._loads[id(loaded)] = loaded
        begun = perf_counter_ns()
        key, now = cache_key(request, loaded.files_print), self._clock.now()
        found = self._cache.find(key, now)
        looked_ns = perf_counter_ns() - begun
        if found is None:
            return partial(self._keep, loaded, key, looked_ns, done)
        self._tell(Looked(loaded.name, loaded.number, True, looked_ns))
        response = InferResponse(model=request.model, version=loaded.number, outputs=_decode(found.body))
        timing = RequestTiming(
            queue_s=0.0, prefill_s=0.0, decode_s=0.0, ttft_s=max(0.0, now - (request.arrived_at or now))
        )
        done(TensorAnswer(response, FinishReason.STOP, Charges(), timing))
        return None

    def _keep(self, loaded: LoadedVersion, key: bytes, looked_ns: int, done: Done, answer: TensorAnswer) -> None:
        begun = perf_counter_ns()
        if isinstance(answer.result, InferResponse):
            if not loaded.replaced:
                self._cache.keep(key, Kept(b"", _encode(answer.result.outputs), self._clock.now()))
            self._tell(Looked(loaded.name, loaded.number, False, looked_ns + perf_counter_ns() - begun))
        done(answer)

    def cancel(self, request_id: str, reason: FinishReason) -> bool:
        return False

    def turn(self) -> None:
        """Drops the answers of what is served no more."""
        for key in [key for key, loaded in self._loads.items() if loaded.replaced]:
            self._cache.drop_all(self._loads.pop(key).files_print)

    @property
    def next_at(self) -> float | None:
        return None


# ---- ensembles


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


class EnsembleFlow:
    """A Flow: each step of an ensemble is a request of its own in its model's lane, with tenant and times of the whole.

    `begin` and `cancel` are the runner's.
    """

    def __init__(
        self,
        begin: Callable[[InferRequest, Done], None],
        cancel: Callable[[str, FinishReason], object],
        clock: Clock,
        tell: Callable[[News], None],
    ) -> None:
        self._begin, self._cancel, self._clock, self._tell = begin, cancel, clock, tell
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

    def _answered(self, whole: _Whole, ready: StepInputs, answer: TensorAnswer) -> None:
        whole.running.pop(ready.number)
        if answer.timing is not None:
            total_ns, queue_ns = round(answer.timing.total_s * 1e9), round(answer.timing.queue_s * 1e9)
            succeeded = isinstance(answer.result, InferResponse)
            self._tell(StepEnded(ready.step.model, ready.step.version, succeeded, total_ns, queue_ns))
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
        whole.done(TensorAnswer(result, reason, charges, timing))

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
    step: EnsembleStep = ready.step
    terms = whole.request.terms
    if whole.first_scheduled_at is not None:
        terms = msgspec.structs.replace(terms, start_by=None)
    return msgspec.structs.replace(
        whole.request,
        request_id=request_id,
        model=step.model,
        version=step.version,
        label="",
        inputs=ready.inputs,
        outputs=tuple(step.outputs),
        terms=terms,
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
