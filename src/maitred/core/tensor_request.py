"""Tensor request: what a client asks of a model without tokens, what its scheduler knows, and the batch it runs in.

A scheduler has no tensors: inputs and outputs stay with the batch's runner, and are found by request id. A tensor's
bytes are as KServe v2 sends them raw (https://kserve.github.io/website: "binary tensor data"): numbers little-endian
and in row-major order, a BYTES element after its length in four bytes, BF16 as its two upper bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from maitred.core.errors import ModelNotFound
from maitred.core.request import NO_TERMS, Charges, FinishReason, RequestStatus, Terms, UnderTerms
from maitred.core.step import RequestTiming

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview
else:
    Buffer = memoryview  # what a decoder makes of it: a look at the frame


class LaneKey(NamedTuple):
    """Lane: what may share a batch."""

    model: str
    version: int
    bucket: str = ""  # of shapes; unlike ones share no batch


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Specification of a tensor request. It never changes, crosses processes and is logged as it stands."""

    request_id: str
    arrived_at: float  # s, Clock.now() at admission; of a step of an ensemble, that of the whole
    lane: LaneKey
    num_rows: int = 1  # of the model's batch dimension
    work: float = 1.0  # predicted seconds of computing, as input tokens at the measured prefill rate
    level: int = 0  # Triton's priority, 1 is most urgent; 0 is the model's default level
    timeout_s: float | None = None  # for the queue, where the model lets a request have its own
    terms: Terms = NO_TERMS  # for the policy, as a chat's
    num_tokens: int = 0  # of the text that its inputs are; for the ledger alone


@dataclass(slots=True, eq=False)
class TensorRequest(UnderTerms):
    """A tensor request in its scheduler, which alone writes here. To a policy (`policy.queued.Queued`) its inputs are
    its work in tokens, and its answer is one output.
    """

    spec: TensorSpec
    request_id: str = field(init=False)
    terms: Terms = field(init=False)
    arrived_at: float = field(init=False)
    num_inputs: int = field(init=False)
    start_by: float | None = field(init=False)  # the spec's, or the model's timeout if that is earlier
    queued_at: float = 0.0  # s, when it came to its lane: a batch waits for others from here on
    level: int = 0  # of the model's priority levels, resolved; 0 where it has none
    behind: bool = False  # its timeout is over, and it waits behind those of its level whose is not
    key: tuple[Any, ...] = ()  # by the policy
    status: RequestStatus = RequestStatus.WAITING  # RUNNING until its answer may be told
    num_computed: int = 0
    num_losses: int = 0  # batches that were lost with it
    compute_us: int = 0  # its part of the time of its batches
    in_order: bool = False  # its answer comes after those of its tenant's requests before it
    answered: bool = False  # its batch is done; it waits for the answers before its own
    finish_reason: FinishReason | None = None  # set while it runs if it was given up meanwhile
    error: str | None = None
    first_scheduled_at: float | None = None  # s
    finished_at: float | None = None  # s

    def __post_init__(self) -> None:
        self.request_id, self.arrived_at, self.terms = self.spec.request_id, self.spec.arrived_at, self.spec.terms
        self.num_inputs, self.start_by = max(1, round(self.spec.work)), self.terms.start_by

    @property
    def num_rows(self) -> int:
        return self.spec.num_rows

    @property
    def max_outputs(self) -> int:
        return 1

    @property
    def expected_outputs(self) -> float | None:
        return 1.0

    @property
    def num_outputs(self) -> int:
        return 0

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        return ()

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def charges(self) -> Charges:
        return Charges(
            num_prompt_tokens=0 if self.first_scheduled_at is None else self.spec.num_tokens,
            first_scheduled_at=self.first_scheduled_at,
            num_rows=self.spec.num_rows,
            compute_us=self.compute_us,
        )

    @property
    def timing(self) -> RequestTiming:
        """Timing of a finished request: waiting, and from its first batch to the answer."""
        assert self.finished_at is not None
        scheduled = self.finished_at if self.first_scheduled_at is None else self.first_scheduled_at
        whole_s = self.finished_at - self.arrived_at
        return RequestTiming(
            queue_s=scheduled - self.arrived_at, prefill_s=self.finished_at - scheduled, decode_s=0.0, ttft_s=whole_s
        )


class Batch(NamedTuple):
    """Requests that one instance of a model runs together; plain and immutable."""

    number: int  # 0, 1, 2 ... of this scheduler
    lane: LaneKey
    instance: int  # of the model
    request_ids: tuple[str, ...]  # their rows in this order
    num_rows: int


class BatchOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Outcome of a batch. The outputs are where the inputs were."""

    compute_us: int = 0  # the instance was busy so long
    error: str | None = None  # of all of it
    errors: tuple[tuple[str, str], ...] = ()  # (request id, what was wrong) of some of its requests
    lost: bool = False  # the instance died or hung: its requests run again


# ---- how a model is batched, after Triton's model_config.proto


class QueueRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """ModelQueuePolicy: limits of waiting requests, of a model or of one of its priority levels."""

    max_size: int = 0  # requests; 0 has no limit
    timeout_s: float = 0.0  # 0 has none
    delays: bool = False  # after its timeout a request waits behind the others (DELAY); else it is given up (REJECT)
    allow_override: bool = False  # requests may have an earlier timeout of their own

    def timeout_of(self, spec: TensorSpec) -> float:
        """s; 0 has none. A request's own only shortens the model's, as with Triton."""
        own = spec.timeout_s
        if self.allow_override and own is not None and 0.0 < own < self.timeout_s:
            return own
        return self.timeout_s


class Instance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Instances of ModelInstanceGroup, with its ModelRateLimiter where that is on."""

    resources: tuple[tuple[str, int], ...] = ()  # how many it holds while it runs; named with the device if not global
    weight: int = 1  # ModelRateLimiter.priority: twice the weight, half the turns


DEFAULT_QUEUE = QueueRules()


class BatchRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rules by which a model's requests become batches: ModelDynamicBatching, max_batch_size and its instances."""

    max_batch_size: int = 0  # rows; 0 is a model without a batch dimension
    dynamic: bool = False  # without it each request runs alone
    preferred_sizes: tuple[int, ...] = ()  # rows; none is max_batch_size alone
    delay_s: float = 0.0  # the longest that a request waits for others
    auto_delay: bool = False  # the delay follows arrivals and measured batch times instead
    preserve_ordering: bool = False  # a tenant's answers come in the order of its requests
    num_levels: int = 0  # of priority; 0 has none
    default_level: int = 0
    queue: QueueRules = DEFAULT_QUEUE
    level_queues: tuple[tuple[int, QueueRules], ...] = ()
    instances: tuple[Instance, ...] = (Instance(),)
    machine_share: float = 1.0  # of the machine, what a running instance takes: its threads over all

    @property
    def batches(self) -> bool:
        return self.dynamic and self.max_batch_size > 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Preferred ones, ascending."""
        return tuple(sorted(set(self.preferred_sizes))) or (self.max_batch_size,)

    def level_of(self, spec: TensorSpec) -> int:
        """Return the priority level; the default for a request that names none, or one that does not exist."""
        return spec.level if 1 <= spec.level <= self.num_levels else self.default_level

    def queue_of(self, level: int) -> QueueRules:
        return dict(self.level_queues).get(level, self.queue)


# ---- tensors, and what a model's server is asked


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A named tensor. `data` is looked at, never copied, until it leaves the process."""

    name: str
    datatype: str  # of KServe v2: BOOL, UINT8 ... FP64, BF16, BYTES
    shape: tuple[int, ...]
    data: Buffer


def num_bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(memoryview(each.data).nbytes for each in tensors)


class SequenceControl(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's place in a sequence (Triton's sequence_id, sequence_start, sequence_end)."""

    correlation_id: int | str
    start: bool = False
    end: bool = False


class InferRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Inference request."""

    request_id: str  # ours, unique
    model: str
    version: int = 0  # 0 is the model's default, its highest
    label: str = ""  # of a version, instead of its number
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[str, ...] = ()  # none is all
    into: Mapping[str, Any] = {}  # where outputs go, in registered regions; it stays with the server
    level: int = 0  # Triton's priority, 1 is most urgent; 0 is the model's default
    timeout_s: float | None = None  # for the queue, where the model lets a request have its own
    sequence: SequenceControl | None = None
    num_tokens: int = 0  # of the text that its inputs are; for the ledger
    terms: Terms = NO_TERMS
    arrived_at: float = 0.0  # s, Clock.now()

    @property
    def adapter(self) -> str:
        """The model, as the ledger names it."""
        return self.model

    @property
    def sample_index(self) -> int:
        return 0


class InferResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of a model."""

    model: str
    version: int
    outputs: tuple[Tensor, ...] = ()
    queue_us: int = 0
    compute_us: int = 0  # its part of its batch


def unknown_model(model: str, version: int = 0, *, label: str = "", served: Sequence[int] = ()) -> ModelNotFound:
    """Return the error in Triton's words, which its clients look for, and what is served."""
    which = f" version {version}" if version else f" with the label {label!r}" if label else ""
    there = f"; served are: {', '.join(map(str, sorted(served)))}" if served else ""
    return ModelNotFound(f"Request for unknown model: {model[:200]!r}{which} is not found{there}", param="model")


DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
"""Names of ModelStatistics as Triton has them, each a pair of count and nanoseconds."""


class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Statistics of one version since it was loaded, as Triton's extension: counts, and nanoseconds by use."""

    model: str
    version: int
    last_inference_ms: int = 0  # Unix time
    inference_count: int = 0  # rows
    execution_count: int = 0  # batches
    success: tuple[int, int] = (0, 0)  # (count, ns), and so all below
    fail: tuple[int, int] = (0, 0)
    queue: tuple[int, int] = (0, 0)
    compute_input: tuple[int, int] = (0, 0)
    compute_infer: tuple[int, int] = (0, 0)
    compute_output: tuple[int, int] = (0, 0)
    cache_hit: tuple[int, int] = (0, 0)
    cache_miss: tuple[int, int] = (0, 0)
    batches: tuple[tuple[int, int, int], ...] = ()  # (rows, count, ns of the inference)


class BatchTimes(msgspec.Struct, frozen=True, array_like=True):
    """A batch, and what its time went to (ns)."""

    model: str
    version: int
    num_requests: int
    num_rows: int
    input_ns: int
    infer_ns: int
    output_ns: int
    num_padded: int = 0  # elements along the length that are padding
    num_elements: int = 0  # of all, where lengths share buckets


class ModelState(Enum):
    """A version's state, by Triton's names."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class IndexEntry:
    """A line of the index. `reason` tells why a version is not served, or why one that is was not replaced."""

    name: str
    version: int | None = None  # None while nothing is known of a model but its folder
    state: ModelState | None = None
    reason: str = ""


class ModelChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A load or an unload of a tensor model, as an administrator asks for it."""

    model: str
    loads: bool
    config: str | None = None  # in place of the folder's
