"""Records of the decision log: all that a fresh scheduler needs to make the plans of a run again (`replay`).

For each step it holds what the scheduler was told since the step before (arrivals, ends, changes of policy and
config, KV that comes from elsewhere or is held for others, tensor requests and their batches), `now`, the plan, what it
was told during the step, and the outcome as far as scheduling depends on it (how many tokens, why a request ended,
names of blocks that output filled). Shortened block hashes stand for tokens: no token, text or key is in it.
`codec` makes bytes of it, `files` keeps them in files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel, SwapCosts
from maitred.core.request import DEFAULT_SAMPLING, FinishReason, RequestSpec, RequestState, SamplingParams
from maitred.core.step import ModelOutput, RequestProgress, SchedulerOutput
from maitred.core.tensor_request import Batch, BatchOutcome, BatchRules, TensorSpec
from maitred.scheduler.engine_core import StepListener, StepTimes

WITH_PROMPT_LOGPROBS = SamplingParams(prompt_logprobs=0)  # such a request uses no prefix cache
DIGEST_BYTES = (
    8  # of a block hash; scheduling only asks whether two are equal, and among 2^20 blocks none meet by chance
)


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A request was added; of its spec there is all that scheduling depends on."""

    now: float
    spec: RequestSpec


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Ended from outside: aborted, or by a stop string."""

    now: float
    request_id: str
    reason: FinishReason


class Configured(msgspec.Struct, frozen=True, tag="configured"):
    now: float
    config: SchedulerConfig


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """Swap costs, as the engine measured them."""

    now: float
    costs: SwapCosts


class StepsMeasured(msgspec.Struct, frozen=True, tag="steps_measured"):
    """Times of steps and drafts, as the engine measured them."""

    now: float
    costs: CostModel


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """A request left the queue with blocks for KV from elsewhere; so many of its tokens were asked for."""

    now: float
    request_id: str
    num_tokens: int


class KvArrived(msgspec.Struct, frozen=True, tag="kv_arrived"):
    """The KV of so many of its tokens came, and it queues again."""

    now: float
    request_id: str
    num_tokens: int


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Blocks that a lease holds, by digest."""

    now: float
    lease: str
    digests: bytes


class Released(msgspec.Struct, frozen=True, tag="released"):
    now: float
    lease: str


class ModelLoaded(msgspec.Struct, frozen=True, tag="model_loaded"):
    """A tensor model takes requests from now on, or is batched by other rules."""

    now: float
    name: str
    version: int
    rules: BatchRules


class ModelUnloaded(msgspec.Struct, frozen=True, tag="model_unloaded"):
    now: float
    name: str
    version: int


class TensorArrived(msgspec.Struct, frozen=True, tag="tensor_arrived"):
    now: float
    spec: TensorSpec


class TensorEnded(msgspec.Struct, frozen=True, tag="tensor_ended"):
    """Ended from outside, or given up while its batch runs."""

    now: float
    request_id: str
    reason: FinishReason


class TensorsExpired(msgspec.Struct, frozen=True, tag="tensors_expired"):
    """Some requests ran out of time."""

    now: float


class Dispatched(msgspec.Struct, frozen=True, tag="dispatched"):
    """Batches that went; a call that sent none is not told of."""

    now: float
    batches: tuple[Batch, ...]


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """Outcome of a batch, by its number."""

    now: float
    number: int
    outcome: BatchOutcome


TensorEvent = ModelLoaded | ModelUnloaded | TensorArrived | TensorEnded | TensorsExpired | Dispatched | Completed
Told = Ended | Configured | Measured | StepsMeasured | Reserved | KvArrived | Held | Released | TensorEvent
Event = Arrived | Told


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of a row; rows that gave nothing have none."""

    request_id: str
    num_tokens: int = 0  # kept, not those after the end; all but one and the forced ones were drafts
    finish_reason: FinishReason | None = None
    new_hashes: tuple[bytes, ...] = ()
    num_forced: int = 0
    num_drafts: int = 0  # that were made
    num_accepted: int = 0  # of them, those behind the end included


class Step(msgspec.Struct, frozen=True):
    """`events` since the step before, then schedule(scheduled_at), then what happened `during` the step, then
    update(..., updated_at). Or events alone, where no step was `taken`.
    """

    scheduled_at: float
    updated_at: float
    plan: SchedulerOutput  # tokens and sampling, which take no part in equality, are empty
    events: tuple[Event, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    during: tuple[Event, ...] = ()
    taken: bool = True


class Arrival(NamedTuple):
    """An `Arrived` that is not written out yet. The request's first hashes stay what they are."""

    now: float
    request: RequestState
    num_hashes: int


class Drafted(NamedTuple):
    """Outcome of a request's drafts in a step."""

    request_id: str
    num_drafts: int
    num_accepted: int


class StepRecord(NamedTuple):
    """One step as the engine hands it over: nothing in it changes any more, so it can be encoded later, elsewhere."""

    scheduled_at: float
    updated_at: float
    plan: SchedulerOutput
    progress: tuple[RequestProgress, ...]
    events: tuple[Arrival | Told, ...] = ()
    drafted: tuple[Drafted, ...] = ()
    during: tuple[Arrival | Told, ...] = ()
    taken: bool = True  # False: events alone; the plan is an empty one


NO_PLAN = SchedulerOutput(step=0, rows=())
MAX_EVENTS = 256  # that wait for a step to be written with, where batches run and no step is taken


class Recorder(StepListener):
    """Records one engine; `write` is called once a step. Costs the step a few microseconds."""

    def __init__(self, write: Callable[[StepRecord], object]) -> None:
        self._write = write
        self._before: list[Arrival | Told] = []
        self._events = self._before  # where the next one goes: before the step, or to those during it

    def added(self, request: RequestState, now: float) -> None:
        self._events.append(Arrival(now, request, len(request.block_hashes)))

    def stopped(self, request_id: str, reason: FinishReason, now: float) -> None:
        self._events.append(Ended(now, request_id, reason))

    def configured(self, config: SchedulerConfig, now: float) -> None:
        self._events.append(Configured(now, config))

    def measured(self, costs: SwapCosts | CostModel, now: float) -> None:
        self._events.append(Measured(now, costs) if isinstance(costs, SwapCosts) else StepsMeasured(now, costs))

    def reserved(self, request_id: str, num_tokens: int, now: float) -> None:
        self._events.append(Reserved(now, request_id, num_tokens))

    def kv_arrived(self, request_id: str, num_tokens: int, now: float) -> None:
        self._events.append(KvArrived(now, request_id, num_tokens))

    def held(self, lease: str, block_hashes: Sequence[bytes], now: float) -> None:
        self._events.append(Held(now, lease, b"".join([digest[:DIGEST_BYTES] for digest in block_hashes])))

    def released(self, lease: str, now: float) -> None:
        self._events.append(Released(now, lease))

    def model_loaded(self, name: str, version: int, rules: BatchRules, now: float) -> None:
        self._events.append(ModelLoaded(now, name, version, rules))

    def model_unloaded(self, name: str, version: int, now: float) -> None:
        self._events.append(ModelUnloaded(now, name, version))

    def tensor_added(self, spec: TensorSpec, now: float) -> None:
        self._events.append(TensorArrived(now, replace(spec, terms=replace(spec.terms, key_id=""))))

    def tensor_ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        """Note the end of a tensor request, also of one whose batch still runs."""
        self._events.append(TensorEnded(now, request_id, reason))

    def tensors_expired(self, now: float) -> None:
        """Tell the result of `expire_tensors`, when there is any."""
        self._events.append(TensorsExpired(now))

    def dispatched(self, batches: tuple[Batch, ...], now: float) -> None:
        """Tell the result of `dispatch`, when there is any."""
        self._events.append(Dispatched(now, batches))

    def completed(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        self._events.append(Completed(now, batch.number, outcome))
        if len(self._before) >= MAX_EVENTS and self._events is self._before:
            self.flush(now)

    def flush(self, now: float) -> None:
        """Writes what has happened without a step; not while one is under way."""
        if self._before:
            self._write(StepRecord(now, now, NO_PLAN, (), tuple(self._before), taken=False))
            self._events = self._before = []

    def scheduled(self, plan: SchedulerOutput) -> None:
        self._events = []

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        drafted = [Drafted(row.request_id, row.num_drafts, row.num_accepted) for row in output.rows if row.num_drafts]
        during = () if self._events is self._before else tuple(self._events)
        before = tuple(self._before)
        self._write(
            StepRecord(times.scheduled_at, times.executed_at, plan, tuple(progress), before, tuple(drafted), during)
        )
        self._events = self._before = []


def arrived_of(arrival: Arrival) -> Arrived:
    request = arrival.request
    spec, point = request.spec, request.spec.resumed
    return Arrived(
        arrival.now,
        replace(
            spec,
            prompt_token_ids=(),
            sampling=DEFAULT_SAMPLING if spec.sampling.prompt_logprobs is None else WITH_PROMPT_LOGPROBS,
            block_hashes=[digest[:DIGEST_BYTES] for digest in request.block_hashes[: arrival.num_hashes]],
            seed=0,
            features=(),
            predicted_output_tokens=request.predicted_output_tokens,
            cache_salt="",
            terms=replace(spec.terms, key_id=""),
            eos_token_ids=(),
            bad_word_token_ids=(),
            grammar="",
            thinking=None,
            prediction_token_ids=(),
            kv_from=(),
            resumed=None if point is None else replace(point, output_token_ids=[0] * len(point.output_token_ids)),
        ),
    )


def split_digests(digests: bytes) -> tuple[bytes, ...]:
    return tuple(digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES))
