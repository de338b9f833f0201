"""Commands to an engine, its reports, and the transport that carries them: msgspec structs, msgpack between processes;
decoded by type, never pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from maitred.config import EngineConfig
from maitred.core import errors
from maitred.core.cost_model import CostModel
from maitred.core.replica import DraftCounts, HandoverCounts, KVFigures
from maitred.core.request import Charges, FinishReason, RequestSpec
from maitred.core.step import RequestProgress, RequestTiming
from maitred.core.tensor_request import BatchTimes, IndexEntry, InferRequest, InferResponse
from maitred.engine.memory import MemoryPlan
from maitred.engine.model_facts import AdapterFacts, ModelFacts


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message; on the wire an array that begins with the name of its class."""


# -- commands


class Begin(Frame, frozen=True, tag=True):
    """The first of all: what to load."""

    config: EngineConfig
    served_model_names: tuple[str, ...]
    log_level: int  # of `logging`


class Submit(Frame, frozen=True, tag=True):
    """A request, new or resumed: samples of one prompt, in order, so that they share its KV."""

    specs: tuple[RequestSpec, ...]  # `core.request.prompt_told_once`


class SharedPlace(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the memory that server and engine share."""

    offset: int
    num_bytes: int


class Infer(Frame, frozen=True, tag=True):
    """A request to a tensor model."""

    request: InferRequest  # without the data of inputs that have a place
    places: tuple[SharedPlace | None, ...] = ()  # of its inputs


class Abort(Frame, frozen=True, tag=True):
    """End a request of either kind; one that is to be shed only if it is in no step yet."""

    request_id: str
    reason: FinishReason


class Ask(Frame, frozen=True, tag=True):
    """One of `engine.queries`, to be answered between two steps."""

    number: int
    query: str
    argument: msgspec.Raw


class KnowAdapters(Frame, frozen=True, tag=True):
    """LoRA adapters that requests may name from now on; nothing is read yet."""

    adapters: tuple[AdapterFacts, ...]


class ForgetAdapter(Frame, frozen=True, tag=True):
    """No request will name it again."""

    key: str


class Free(Frame, frozen=True, tag=True):
    """Outputs in shared memory that were read."""

    offsets: tuple[int, ...]


class Keep(Frame, frozen=True, tag=True):
    """Outputs of an earlier engine that are being read: offsets and bytes."""

    blocks: tuple[tuple[int, int], ...]


class Stop(Frame, frozen=True, tag=True):
    """End after the current step."""


Command = Begin | Submit | Infer | Abort | Ask | KnowAdapters | ForgetAdapter | Free | Keep | Stop

# -- reports


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """Figures of `ReplicaState`, by the same names, that the parent cannot count itself; as of the last step."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    num_state_snapshots: int = 0
    expert_load_ratio: float = 0.0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_state_evictions: int = 0
    drafts: DraftCounts = msgspec.field(default_factory=DraftCounts)
    predicted_drafts: DraftCounts = msgspec.field(default_factory=DraftCounts)
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    step_costs: CostModel | None = None  # where workers hand over
    handovers: HandoverCounts = msgspec.field(default_factory=HandoverCounts)
    adapter_bytes: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    execute_s: float = 0.0
    host_s: float = 0.0
    kv_tiers: KVFigures = KVFigures()
    num_background_running: int = 0
    num_background_waiting: int = 0
    num_background_tokens: int = 0


_SPEEDS = ("prefill_tokens_per_s", "decode_tokens_per_s")
_OF_BLOCKS = ("num_blocks", "num_blocks_used", "num_blocks_cached", "num_state_snapshots", "expert_load_ratio")
_OF_REQUESTS = ("num_running", "num_waiting", "num_background_running", "num_background_waiting")
_GAUGES = frozenset({"adapter_bytes", "step_costs", *_OF_REQUESTS, *_OF_BLOCKS, *_SPEEDS})
_COUNTERS = tuple(name for name in Figures.__struct_fields__ if name not in {*_GAUGES, "kv_tiers"})


def counted(now: Figures, past: Figures) -> dict[str, Any]:
    """Counters of this engine and of those before it together, by name."""
    tiers = now.kv_tiers + past.kv_tiers.counters()
    return {name: getattr(now, name) + getattr(past, name) for name in _COUNTERS} | {"kv_tiers": tiers}


class Hello(Frame, frozen=True, tag=True):
    """The child's socket is there to be connected to."""

    pid: int


class Told(Frame, frozen=True, tag=True):
    """A line about the start, for the server's user."""

    line: str


class Ready(Frame, frozen=True, tag=True):
    facts: ModelFacts
    memory_plan: MemoryPlan
    deterministic: bool  # tokens do not depend on the batch: a resumed request goes on as it would have
    start_phases: dict[str, float] = {}
    kv_addresses: tuple[str, ...] = ()  # where others pull its KV
    token_budget: int = 0  # of a step
    num_kv_layers: int = 1  # that leave one by one while a prompt is computed
    step_costs: CostModel | None = None  # measured before it was ready


class Failed(Frame, frozen=True, tag=True):
    """Loading failed, and why: an error of `maitred.core.errors`."""

    kind: str
    message: str


class BlockChanges(msgspec.Struct, frozen=True, array_like=True):
    """Hashes of KV blocks that can be found by prefix from now on, and that cannot any more."""

    stored: list[bytes]
    removed: list[bytes]


class Stepped(Frame, frozen=True, tag=True):
    """Progress of a step, or an end between two steps; also sent without progress when figures or blocks are news."""

    progress: list[RequestProgress]
    num_queued: int
    figures: Figures | None
    blocks: BlockChanges | None = None  # where they are wanted


class Answer(Frame, frozen=True, tag=True):
    number: int
    result: msgspec.Raw


class Refused(Frame, frozen=True, tag=True):
    """The answer is an error."""

    number: int
    kind: str
    message: str


class Ended(Frame, frozen=True, tag=True):
    """A tensor request's answer, or the kind and the message of its error."""

    request_id: str
    result: InferResponse | None
    finish_reason: FinishReason
    kind: str = ""
    message: str = ""
    charges: Charges = Charges()
    timing: RequestTiming | None = None
    places: tuple[SharedPlace | None, ...] = ()  # of the result's outputs, whose data is there


class Ran(Frame, frozen=True, tag=True):
    """A batch ran."""

    times: BatchTimes


class Looked(Frame, frozen=True, tag=True):
    """A tensor request was looked for in the response cache."""

    model: str
    version: int
    hit: bool
    ns: int


class StepEnded(Frame, frozen=True, tag=True):
    """A request ended that an ensemble made of a model, or of another ensemble."""

    model: str
    version: int  # 0 is the highest
    succeeded: bool
    total_ns: int
    queue_ns: int


class ServedVersion(msgspec.Struct, frozen=True, array_like=True):
    model: str
    number: int
    config: bytes  # a ModelConfig in protobuf's wire format
    labels: tuple[str, ...] = ()


class ModelsTold(Frame, frozen=True, tag=True):
    """All tensor models that are known, and those that answer now."""

    index: tuple[IndexEntry, ...]
    served: tuple[ServedVersion, ...]


News = Ended | Ran | Looked | StepEnded | ModelsTold


class TensorsTold(Frame, frozen=True, tag=True):
    """What happened to tensor models and their requests, in order."""

    news: list[News]


class Died(Frame, frozen=True, tag=True):
    """Last words."""

    message: str


class Beat(Frame, frozen=True, tag=True):
    """The process is there. `round_number` changes with every step; `busy` says whether one is under way.
    `num_wrong_frames` came to it and were dropped, or came from strangers."""

    round_number: int
    busy: bool
    num_wrong_frames: int


Report = Hello | Told | Ready | Failed | Stepped | Answer | Refused | TensorsTold | Died | Beat

encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
WRONG_FRAME = (msgspec.DecodeError, errors.MaitredError, ValueError, RecursionError)
"""What the decoders raise for bytes that are no frame; config and sampling check their own values."""

# -- errors by name

_KINDS: Mapping[str, type[errors.MaitredError]] = {
    kind.__name__: kind
    for kind in (
        errors.ConfigError,
        errors.CheckpointError,
        errors.OutOfMemory,
        errors.KernelError,
        errors.InvalidRequest,
        errors.PromptTooLong,
        errors.EngineDead,
        errors.ModelNotFound,
        errors.Overloaded,
        errors.QueueTimeout,
        errors.RequestTimeout,
        errors.RequestTooLarge,
        errors.Unavailable,
    )
}


def error_of(kind: str, message: str) -> errors.MaitredError:
    """The error that crossed; of a kind not known here, EngineDead."""
    return _KINDS.get(kind, errors.EngineDead)(message)


# ---- transports


class Transport(Protocol):
    """One engine, in a process or a thread, from its start to its end.

    Its `on_exit` is called once, in a thread of its own, when the engine has ended. `send` and `receive` are for one
    thread at a time.
    """

    last_words: str | None
    """Why it ended or will, if that is known."""

    @property
    def pid(self) -> int: ...

    @property
    def name(self) -> str:
        """`process 14021` or `thread`."""

    @property
    def num_wrong_frames(self) -> int:
        """Messages on either side that were no frame."""

    @property
    def fd(self) -> int:
        """Readable when there may be reports; then call `receive` until it gives none."""

    @property
    def ended(self) -> bool: ...

    @property
    def over(self) -> bool:
        """Whether the engine has ended, and what it wrote was read."""

    @property
    def returncode(self) -> int:
        """Exit status of an ended engine; minus the signal that killed it."""

    def cause(self) -> str:
        """Why it ended, in words that go on after its name."""

    def send(self, command: Command) -> None:
        """Never waits. For after its first report. Raises RequestTooLarge."""

    def receive(self) -> Iterator[Report]:
        """Reports that have come."""

    def wait_readable(self, seconds: float) -> bool: ...

    def heard_beat(self, num_wrong_commands: int) -> None:
        """The engine beats, and has dropped so many commands that were none."""

    def kill(self) -> None:
        """End it as soon as can be."""

    def stop(self) -> None:
        """Ask it to end after its step, and see to it that it does; idempotent."""

    def close(self) -> None:
        """Give back what an ended one leaves; idempotent."""


OnExit = Callable[[Transport], None]
OpenTransport = Callable[[Begin, OnExit], Transport]
"""Starts an engine that will load what it is told to."""
