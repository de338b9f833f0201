"""What crosses between a server and the tensor models in its engine; it stands within `engine.frames.ToTensors` and
`OfTensors`. Plain data: nothing here needs protobuf or a runtime, but what it imports.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from maitred.request import Charges, FinishReason
from maitred.step import RequestTiming
from maitred.tensor.batch_run import BatchTimes
from maitred.tensor.repository import IndexEntry
from maitred.tensor.service import InferRequest, InferResponse

# -- commands


class Infer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request: InferRequest


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


Command = Infer | Cancel | Load | Unload

# -- news


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """An error of `maitred.errors`."""

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


class Ran(msgspec.Struct, frozen=True, array_like=True, tag=True):
    times: BatchTimes


class Looked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request was looked for in the response cache."""

    model: str
    version: int
    hit: bool
    ns: int


class ServedVersion(msgspec.Struct, frozen=True, array_like=True):
    model: str
    number: int
    config: bytes  # a ModelConfig in protobuf's wire format
    labels: tuple[str, ...] = ()


class Models(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All that are known, and those that answer now."""

    index: tuple[IndexEntry, ...]
    served: tuple[ServedVersion, ...]


class Changed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A load or unload is done, or why it is not."""

    number: int
    problem: Problem | None = None


News = Ended | Ran | Looked | Models | Changed

decode_command: Callable[[msgspec.Raw], Command] = msgspec.msgpack.Decoder(Command).decode
decode_news: Callable[[msgspec.Raw], list[News]] = msgspec.msgpack.Decoder(list[News]).decode


def problem_of(error: Exception) -> Problem:
    return Problem(type(error).__name__, str(error))
