"""What crosses between the HTTP process and the engine's: msgspec structs as msgpack, decoded by type, never pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from maitred.config import EngineConfig
from maitred.engine.memory import MemoryPlan
from maitred.engine.model_facts import ModelFacts
from maitred.errors import (
    CheckpointError,
    ConfigError,
    EngineDead,
    InvalidRequest,
    KernelError,
    MaitredError,
    OutOfMemory,
    PromptTooLong,
)
from maitred.request import FinishReason, Request, SamplingParams
from maitred.step import RequestProgress


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message; on the wire an array that begins with the name of its class."""


# -- to the engine's process


class Begin(Frame, frozen=True, tag=True):
    """The first of all: what to load."""

    config: EngineConfig
    served_model_names: tuple[str, ...]
    log_level: int  # of `logging`


class Submit(Frame, frozen=True, tag=True):
    """A request, new or resumed; fields as in `Request`, where they are explained."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrived_at: float
    max_tokens: int
    seed: int
    sample_index: int
    parent_id: str | None
    priority: int
    tenant: str
    weight: float
    ttft_slo_s: float | None
    start_by: float | None
    finish_by: float | None
    features: tuple[float, ...]
    cache_salt: str
    eos_token_ids: tuple[int, ...]
    bad_word_token_ids: tuple[tuple[int, ...], ...]
    block_hashes: list[bytes]
    # over nothing only for a resumed one
    output_token_ids: list[int]
    num_cached_tokens: int
    num_charged_prompt_tokens: int
    num_preemptions: int
    first_scheduled_at: float | None
    first_token_at: float | None
    last_token_at: float | None
    stalled_prefill_s: float
    stalled_decode_s: float


class Abort(Frame, frozen=True, tag=True):
    request_id: str
    reason: FinishReason


class Shed(Frame, frozen=True, tag=True):
    """Give it up if it is in no step yet."""

    request_id: str


class Ask(Frame, frozen=True, tag=True):
    """One of `engine.calls`, to be answered between two steps."""

    number: int
    call: str
    argument: msgspec.Raw


class Stop(Frame, frozen=True, tag=True):
    """End after the current step."""


Command = Begin | Submit | Abort | Shed | Ask | Stop

# -- from the engine's process


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """What `ReplicaState` has of the same names and the parent cannot count itself; as of the last step."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    execute_s: float = 0.0
    host_s: float = 0.0


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What the mirror of a request must know besides its progress; told with its first progress and with its last."""

    request_id: str
    num_charged_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    first_scheduled_at: float | None
    first_token_at: float | None


class Hello(Frame, frozen=True, tag=True):
    """Its socket is there to be connected to."""

    pid: int


class Told(Frame, frozen=True, tag=True):
    """A line for whoever starts the server."""

    line: str


class Ready(Frame, frozen=True, tag=True):
    facts: ModelFacts
    memory_plan: MemoryPlan
    deterministic: bool  # tokens do not depend on the batch: a resumed request goes on as it would have
    start_phases: dict[str, float] = {}


class Failed(Frame, frozen=True, tag=True):
    """Loading failed, and why: an error of `maitred.errors`."""

    kind: str
    message: str


class Stepped(Frame, frozen=True, tag=True):
    """What a step gave, or an end between two steps; also sent without progress when the figures are news."""

    progress: list[RequestProgress]
    num_queued: int
    marks: list[Mark]
    figures: Figures | None


class Answer(Frame, frozen=True, tag=True):
    number: int
    result: msgspec.Raw


class Refused(Frame, frozen=True, tag=True):
    """The answer is an error."""

    number: int
    kind: str
    message: str


class Died(Frame, frozen=True, tag=True):
    """Last words."""

    message: str


class Beat(Frame, frozen=True, tag=True):
    """The process is there. `round_number` changes with every step; `busy` says whether one is under way.
    `num_wrong_frames` came to it and were dropped, or came from strangers."""

    round_number: int
    busy: bool
    num_wrong_frames: int


Report = Hello | Told | Ready | Failed | Stepped | Answer | Refused | Died | Beat

encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
WRONG_FRAME = (msgspec.DecodeError, MaitredError, ValueError, RecursionError)
"""What the decoders raise for bytes that are no frame; config and sampling check their own values."""

# -- to and from our own types

_SUBMITTED = tuple(name for name in Submit.__struct_fields__ if name not in ("prompt_token_ids", "block_hashes"))


def submit_of(request: Request) -> Submit:
    """`request` as it is now, whether new or half done."""
    values: dict[str, Any] = {name: getattr(request, name) for name in _SUBMITTED}
    return Submit(prompt_token_ids=list(request.prompt_token_ids), block_hashes=list(request.block_hashes), **values)


def request_of(frame: Submit) -> Request:
    return Request(
        num_prompt_tokens=len(frame.prompt_token_ids),
        **{name: getattr(frame, name) for name in Submit.__struct_fields__},
    )


def mark_of(request: Request) -> Mark:
    return Mark(*(getattr(request, name) for name in Mark.__struct_fields__))


# -- errors by name

_KINDS: Mapping[str, type[MaitredError]] = {
    kind.__name__: kind
    for kind in (ConfigError, CheckpointError, OutOfMemory, KernelError, InvalidRequest, PromptTooLong, EngineDead)
}


def error_of(kind: str, message: str) -> MaitredError:
    """The error that crossed; of a kind not known here, EngineDead."""
    return _KINDS.get(kind, EngineDead)(message)
