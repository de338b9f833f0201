"""Frames between a server and the tensor models in its engine, within `engine.frames.ToTensors` and
`OfTensors`. Plain data: nothing here needs protobuf or a runtime, but what it imports.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from maitred.core.request import Charges, FinishReason
from maitred.core.step import RequestTiming
from maitred.core.tensor_request import BatchTimes, IndexEntry, InferRequest, InferResponse
from maitred.tensor.shared import Place

# -- commands


class Infer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request: InferRequest  # without the data of inputs that have a place
    places: tuple[Place | None, ...] = ()  # of its inputs


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    reason: FinishReason


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int  # of the question
    model: str
    config: str | None


class Unload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    model: str


class Free(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outputs in shared memory that were read."""

    offsets: tuple[int, ...]


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outputs of an earlier engine that are being read: offsets and bytes."""

    blocks: tuple[tuple[int, int], ...]


MemoryCommand = Free | Keep
Command = Infer | Cancel | Load | Unload | MemoryCommand

# -- news


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """An error of `maitred.core.errors`."""

    kind: str
    message: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a request."""

    request_id: str
    result: InferResponse | None
    finish_reason: FinishReason
    problem: Problem | None = None
    charges: Charges = Charges()
    timing: RequestTiming | None = None
    places: tuple[Place | None, ...] = ()  # of the result's outputs, whose data is there


class Ran(msgspec.Struct, frozen=True, array_like=True, tag=True):
    times: BatchTimes


class Looked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request was looked for in the response cache."""

    model: str
    version: int
    hit: bool
    ns: int


class StepEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request that an ensemble made of a model, or of another ensemble."""

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


class Models(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All models that are known, and those that answer now."""

    index: tuple[IndexEntry, ...]
    served: tuple[ServedVersion, ...]


class Changed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A load or unload is done, or why it is not."""

    number: int
    problem: Problem | None = None


News = Ended | Ran | Looked | StepEnded | Models | Changed

decode_command: Callable[[msgspec.Raw], Command] = msgspec.msgpack.Decoder(Command).decode
decode_news: Callable[[msgspec.Raw], list[News]] = msgspec.msgpack.Decoder(list[News]).decode


def problem_of(error: Exception) -> Problem:
    return Problem(type(error).__name__, str(error))
