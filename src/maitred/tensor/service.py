"""The service of tensor models: what every protocol asks for, and the one form in which tensors cross processes.

A tensor's bytes are as KServe v2 sends them raw (https://kserve.github.io/website: "binary tensor data"): numbers
little-endian and in row-major order, a BYTES element after its length in four bytes, BF16 as its two upper bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from maitred.core.errors import ModelNotFound
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.repository import IndexEntry

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview
else:
    Buffer = memoryview  # what a decoder makes of it: a look at the frame


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
    """Inference request; it has its caller, as a chat's RequestSpec has."""

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
    priority: int = 0  # of the policy, as a chat's
    tenant: str = ""
    weight: float = 1.0
    key_id: str = ""
    arrived_at: float = 0.0  # s, Clock.now()
    start_by: float | None = None  # s, Clock.now()
    finish_by: float | None = None  # s, Clock.now()


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


class ModelTable(Protocol):
    """Models that there are."""

    def config(self, model: str, version: int = 0, label: str = "") -> ANY_MESSAGE:
        """The ModelConfig as it is served, gaps filled. Raises ModelNotFound."""
        ...

    def versions(self, model: str) -> Sequence[int]:
        """Return the versions that answer now, ascending; none for a model that is not served."""
        ...


class TensorService(ModelTable, Protocol):
    """The models of one server. All of it is asked on the event loop; what waits is a coroutine.

    Errors are `maitred.core.errors`: ModelNotFound, InvalidRequest, Unavailable, Overloaded, RequestTimeout ...
    """

    async def infer(self, request: InferRequest) -> InferResponse:
        """Waits for its batch. Cancelling it gives up its place at once."""
        ...

    def index(self, *, ready_only: bool = False) -> Sequence[IndexEntry]: ...

    def statistics(self, model: str = "", version: int = 0) -> Sequence[ModelStatistics]:
        """Return the statistics of all models, of one, or of one version. Raises ModelNotFound."""
        ...

    async def load(self, model: str, config: str | None = None) -> None:
        """Load as `tensor.control.ModelControl.load`."""
        ...

    async def unload(self, model: str) -> None: ...
