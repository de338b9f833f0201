"""The language model as a model of tensors: text_input, stream, sampling_parameters in, text_output out.

Its inputs and what they mean are those of triton-inference-server/vllm_backend; several answers to one request end with
the parameter triton_final_response, as of Triton's decoupled models.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from maitred.api.dialects.kserve.generate import (
    EXCLUDE,
    MODEL_VERSION,
    SAMPLING,
    STREAM,
    TEXT_INPUT,
    TEXT_OUTPUT,
    Asked,
    TextAnswer,
    ask_of,
    sampling_of,
)
from maitred.api.generate.complete import generating
from maitred.api.http.app import App
from maitred.api.tensor import lease
from maitred.api.tensor.parameters import TERMS
from maitred.errors import InvalidRequest, ModelNotFound
from maitred.gate.terms import NO_LIMITS, TimeLimits
from maitred.tenancy.caller import Caller
from maitred.tensor.arrays import array_of, datatype_of, texts_as_bytes
from maitred.tensor.config import ANY_MESSAGE, WILDCARD
from maitred.tensor.config_fields import DATA_TYPES, ModelConfig
from maitred.tensor.repository import IndexEntry, State
from maitred.tensor.service import InferRequest, InferResponse, Tensor

_INPUTS = {TEXT_INPUT: "TYPE_STRING", STREAM: "TYPE_BOOL", SAMPLING: "TYPE_STRING", EXCLUDE: "TYPE_BOOL"}
_encoded = msgspec.json.encode


def is_language_model(app: App, caller: Caller, name: str) -> bool:
    """Whether it is what `/v1/completions` knows by this name, adapters of the caller's too."""
    return bool(app.model.names) and (app.is_model(name) or app.adapter(name, caller) is not None)


@dataclass(frozen=True, slots=True)
class Models:
    """Those of the repository, and the language model beside them; see `TensorService`."""

    app: App
    caller: Caller

    def config(self, model: str, version: int = 0, label: str = "") -> ANY_MESSAGE:
        if not is_language_model(self.app, self.caller, model):
            return lease.tensors_of(self.app).config(model, version, label)
        if version not in (0, MODEL_VERSION):
            raise ModelNotFound(f"the language model has version {MODEL_VERSION}, not {version}", param="model")
        return _config(model)

    def versions(self, model: str) -> Sequence[int]:
        if is_language_model(self.app, self.caller, model):
            return (MODEL_VERSION,) if self.app.ready else ()
        return lease.tensors_of(self.app).versions(model)

    def index(self, *, ready_only: bool) -> Sequence[IndexEntry]:
        """By its names, without adapters."""
        ready, tensors = self.app.ready, lease.tensors_of(self.app)
        state = State.READY if ready else State.UNAVAILABLE
        own = [IndexEntry(name, MODEL_VERSION, state) for name in self.app.model.names if ready or not ready_only]
        return [*own, *tensors.index(ready_only=ready_only)]


def _config(name: str) -> ANY_MESSAGE:
    config = ModelConfig(name=name, backend="maitred")
    for each, kind in _INPUTS.items():
        config.input.add(name=each, data_type=DATA_TYPES[kind], dims=[1], optional=each != TEXT_INPUT)
    config.output.add(name=TEXT_OUTPUT, data_type=DATA_TYPES["TYPE_STRING"], dims=[WILDCARD])
    config.model_transaction_policy.decoupled = True
    return config


class Told(NamedTuple):
    """One answer to a request."""

    response: InferResponse
    is_last: bool


async def infer(
    app: App, caller: Caller, request: InferRequest, *, parameters: Mapping[str, Any], limits: TimeLimits = NO_LIMITS
) -> InferResponse:
    """The one answer of a model, whichever of the server's it is. `parameters` are the request's. Raises as
    `lease.infer`, and InvalidRequest where a stream is asked for.
    """
    if not is_language_model(app, caller, request.model):
        return await lease.infer(app, caller, request, limits=limits)
    asked = asked_of(request, parameters)
    if asked.stream:
        raise InvalidRequest(f"a request of one answer must not have {STREAM} true; ask by a stream", param=STREAM)
    async with aclosing(responses(app, caller, request, asked, limits)) as told:
        return (await anext(told)).response


async def responses(
    app: App, caller: Caller, request: InferRequest, asked: Asked, limits: TimeLimits = NO_LIMITS
) -> AsyncGenerator[Told, None]:
    """The language model's: one whole, or its pieces as they come. Closing it ends the request. Raises RequestError,
    and as /v1/completions what the server cannot do.
    """
    ask = ask_of(app, caller, asked, request.request_id)
    answer = ask.answer
    assert isinstance(answer, TextAnswer)
    limits = limits.and_also(TimeLimits(queue_timeout_s=request.timeout_s))
    async with generating(app, caller, ask, limits, len(asked.text_input)) as generation:
        stream = answer.stream(generation.outcome)
        async with aclosing(generation.deltas()) as deltas:
            async for sample, delta in deltas:
                texts = stream.texts(sample, delta)
                if texts is not None:
                    yield Told(_response(request.model, texts), is_last=not stream.num_left)


def _response(model: str, texts: Sequence[str]) -> InferResponse:
    data = texts_as_bytes([text.encode("utf-8", "replace") for text in texts])
    return InferResponse(
        model=model, version=MODEL_VERSION, outputs=(Tensor(TEXT_OUTPUT, "BYTES", (len(texts),), data),)
    )


def asked_of(request: InferRequest, parameters: Mapping[str, Any]) -> Asked:
    """Raises InvalidRequest for tensors that the language model has not, or of another type or shape.

    Other parameters than those of KServe and Triton are sampling parameters, and those in the tensor count before them.
    """
    if request.sequence is not None:
        raise InvalidRequest("the language model keeps no sequences; leave out sequence_id", param="sequence_id")
    for name in request.outputs:
        if name != TEXT_OUTPUT:
            raise InvalidRequest(f"the language model has no output {name[:80]!r}; it has {TEXT_OUTPUT}", param=name)
    values = {tensor.name: _value(tensor) for tensor in request.inputs}
    if TEXT_INPUT not in values:
        raise InvalidRequest(f"the input {TEXT_INPUT} is missing", param=TEXT_INPUT)
    sampling = {name: Raw(_encoded(value)) for name, value in parameters.items() if name not in TERMS}
    if request.level:
        sampling["priority"] = Raw(_encoded(request.level))
    return Asked(
        model=request.model,
        version=request.version,
        text_input=values[TEXT_INPUT],
        stream=values.get(STREAM, False),
        exclude_input=values.get(EXCLUDE),
        sampling={**sampling, **(sampling_of(Raw(values[SAMPLING].encode())) if SAMPLING in values else {})},
    )


def _value(tensor: Tensor) -> Any:
    """A text or a truth. Raises InvalidRequest."""
    kind = _INPUTS.get(tensor.name)
    if kind is None:
        raise InvalidRequest(f"the language model has no input {tensor.name[:80]!r}; it has {', '.join(_INPUTS)}")
    wanted = datatype_of(kind)
    if tensor.datatype != wanted or tensor.shape != (1,):
        has = f"{tensor.datatype[:20]} {list(tensor.shape)[:9]}"
        raise InvalidRequest(f"input {tensor.name} must be {wanted} [1], not {has}", param=tensor.name)
    (value,) = array_of(tensor)
    if wanted == "BOOL":
        return bool(value)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {tensor.name} is no UTF-8: {error}", param=tensor.name) from None
