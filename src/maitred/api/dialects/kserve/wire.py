"""Infer's bodies over HTTP: KServe v2's JSON with Triton's binary tensor data, as requests and answers of the service.

A body is JSON, then the bytes of the inputs that have a `binary_data_size`, in their order; the header
Inference-Header-Content-Length tells where the JSON ends. With 0 the whole body is the only input's data (Triton's raw
binary requests). What is sent in binary is looked at where it lies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from maitred.api.http.bodies import SMALL_BYTES
from maitred.api.tensor.extensions import CLASSIFICATION, RegionPlace, View, flag, integer, keep, place_of, terms_of
from maitred.api.tensor.json_values import Numbers, flat_of_json, json_of_array, loaded
from maitred.core.errors import InvalidRequest
from maitred.core.tensor_request import Buffer, InferRequest, InferResponse, Tensor
from maitred.tensor.arrays import MOST_DIMS, array_of, data_type_of, datatype_of, tensor_of
from maitred.tensor.config import WILDCARD, DeclaredTensor
from maitred.tensor.instance import NUMPY_TYPES

T = TypeVar("T")
BINARY_SIZE, BINARY, ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"
_NO_JSON = ("FP16", "BF16")  # have no numbers in JSON, as with Triton
_LENGTH_BYTES = 4  # before an element of BYTES

Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Classes = Callable[[str, Tensor, int], Tensor]  # of a model's output: the k largest


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MOST_DIMS)]  # a model's are fewer
    parameters: dict[str, Any] = {}
    data: Any = msgspec.UNSET  # a list, or Numbers


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Body(msgspec.Struct):
    inputs: tuple[_Input, ...]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: tuple[_Output, ...] = ()


class WantedOutput(NamedTuple):
    """How one output is to be answered."""

    place: RegionPlace | None
    num_classes: int  # 0 is all of it
    is_binary: bool


class InferAsked(NamedTuple):
    """A request, and what its answer needs of it."""

    id: str
    request: InferRequest
    wanted: Mapping[str, WantedOutput]
    is_binary: bool  # outputs that are not named


_decoder = msgspec.json.Decoder(_Body)


def asked(body: bytes, header_bytes: int, request: InferRequest, view: View) -> InferAsked:
    """Parse `body`; `request` gives the caller and the model. Raises InvalidRequest."""
    content = memoryview(body)
    found = object_of(content[:header_bytes], _decoder, ("data",))
    terms = terms_of(found.parameters)
    inputs = _inputs(found.inputs, content[header_bytes:], view)
    by_default = flag(found.parameters, ALL_BINARY)
    wanted = {each.name: _wanted(each) for each in found.outputs}
    whole = msgspec.structs.replace(
        request,
        inputs=inputs,
        outputs=tuple(each.name for each in found.outputs),
        into={name: view(*each.place) for name, each in wanted.items() if each.place is not None},
        level=terms.level,
        timeout_s=terms.timeout_s,
        sequence=terms.sequence,
    )
    return InferAsked(found.id, whole, wanted, by_default)


def raw_asked(body: bytes, request: InferRequest, specs: Sequence[DeclaredTensor], *, batched: bool) -> InferAsked:
    """The body is the data of the model's only input, and a batch of one. Raises InvalidRequest."""
    if len(specs) != 1:
        raise InvalidRequest(f"a raw binary request needs a model of one input, and this one has {len(specs)}")
    spec = specs[0]
    datatype = datatype_of(spec.data_type)
    data = len(body).to_bytes(_LENGTH_BYTES, "little") + body if datatype == "BYTES" else body
    shape = (1, *_raw_dims(spec, len(body))) if batched else _raw_dims(spec, len(body))
    whole = msgspec.structs.replace(request, inputs=(Tensor(spec.name, datatype, shape, memoryview(data)),))
    return InferAsked("", whole, {}, is_binary=True)


def _raw_dims(spec: DeclaredTensor, num_bytes: int) -> tuple[int, ...]:
    """The shape of raw bytes; one dimension may be a wildcard, whose length the bytes give."""
    kind, known = NUMPY_TYPES[spec.data_type], math.prod(size for size in spec.dims if size != WILDCARD)
    if spec.dims.count(WILDCARD) > 1:
        raise InvalidRequest(f"the shape of input {spec.name!r} {list(spec.dims)} does not follow from raw bytes")
    count = 1 if kind.hasobject else num_bytes // kind.itemsize
    return tuple(count // max(1, known) if size == WILDCARD else size for size in spec.dims)


def _inputs(inputs: Sequence[_Input], binary: memoryview, view: View) -> tuple[Tensor, ...]:
    tensors, at = [], 0
    for each in inputs:
        place = _one_source(each)
        if place is not None:
            tensors.append(Tensor(each.name, each.datatype, each.shape, view(*place).read()))
        elif each.data is not msgspec.UNSET:
            tensors.append(_of_json(each))
        else:
            end = at + integer(each.parameters, BINARY_SIZE)
            if end > len(binary):
                raise InvalidRequest(f"input {each.name!r} needs {end - len(binary)} more bytes than the body has")
            tensors.append(Tensor(each.name, each.datatype, each.shape, binary[at:end]))
            at = end
    if at != len(binary):
        raise InvalidRequest(f"the body has {len(binary) - at} bytes after its JSON that no input takes")
    return tuple(tensors)


def _one_source(each: _Input) -> RegionPlace | None:
    """The input's place in shared memory, if any. Raises InvalidRequest unless its data is in exactly one place."""
    place = place_of(each.name, each.parameters) if each.parameters else None
    sources = (each.data is not msgspec.UNSET, BINARY_SIZE in each.parameters, place is not None)
    if sum(sources) != 1:
        raise InvalidRequest(
            f"input {each.name[:80]!r} must have one of data, {BINARY_SIZE} in its parameters, shared_memory_region in "
            f"its parameters; it has {sum(sources)}"
        )
    return place


def _of_json(each: _Input) -> Tensor:
    data_type = data_type_of(each.datatype)
    if each.datatype in _NO_JSON or data_type not in NUMPY_TYPES:
        raise InvalidRequest(f"input {each.name[:80]!r} of datatype {each.datatype[:20]!r} cannot be sent as JSON")
    if not isinstance(each.data, list | Numbers):
        raise InvalidRequest(f"the data of input {each.name[:80]!r} must be a list")
    array = flat_of_json(each.name, data_type, each.data, _text)
    if array.size != math.prod(each.shape):
        wants = math.prod(each.shape)
        raise InvalidRequest(f"input {each.name[:80]!r} has {array.size} values, and its shape wants {wants}")
    return tensor_of(each.name, array.reshape(each.shape), data_type)


def _text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise InvalidRequest(f"input {name[:80]!r} is of BYTES, so its data must be strings", param=name)
    return value.encode("utf-8", "surrogatepass")


def _wanted(output: _Output) -> WantedOutput:
    place = place_of(output.name, output.parameters)
    num_classes, is_binary = integer(output.parameters, CLASSIFICATION), flag(output.parameters, BINARY)
    if place is not None and (num_classes or is_binary):
        raise InvalidRequest(f"output {output.name[:80]!r} goes to shared memory, so it is not classified nor binary")
    return WantedOutput(place, num_classes, is_binary)


# ---- answers


class InferAnswer(NamedTuple):
    """A body; `header_bytes` of it are JSON where binary data follows, else None."""

    body: bytes
    header_bytes: int | None


def answered(of: InferAsked, response: InferResponse, classes: Classes) -> InferAnswer:
    """Raises InvalidRequest for what cannot be answered as it was asked for."""
    by_default = WantedOutput(None, 0, of.is_binary)
    outputs: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    for each in response.outputs:
        wanted = of.wanted.get(each.name, by_default)
        tensor = classes(response.model, each, wanted.num_classes) if wanted.num_classes else each
        told: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        outputs.append(told)
        if wanted.place is not None:
            told["parameters"] = wanted.place.told(keep(tensor, wanted.place, of.request.into[tensor.name]))
        elif wanted.is_binary:
            told["parameters"] = {BINARY_SIZE: memoryview(tensor.data).nbytes}
            binary.append(tensor.data)
        else:
            told["data"] = _as_json(tensor)
    named = {"id": of.id} if of.id else {}
    told = {**named, "model_name": response.model, "model_version": str(response.version), "outputs": outputs}
    header = msgspec.json.encode(told)
    return InferAnswer(b"".join((header, *binary)), len(header)) if any(map(len, binary)) else InferAnswer(header, None)


def _as_json(tensor: Tensor) -> msgspec.Raw:
    """A flat list, as Triton answers; numbers that JSON has not are NaN, Infinity and -Infinity."""
    if tensor.datatype in _NO_JSON:
        raise InvalidRequest(f"output {tensor.name!r} of {tensor.datatype} cannot be answered as JSON; ask for binary")
    array = array_of(tensor).reshape(-1)
    return msgspec.Raw(json_of_array(array, _json_of_texts if array.dtype.hasobject else None))


def _json_of_texts(array: np.ndarray) -> bytes:
    return msgspec.json.encode([text.decode("utf-8", "replace") for text in array.tolist()])


def object_of(content: memoryview, decoder: msgspec.json.Decoder[T], lists: tuple[str, ...] = ()) -> T:
    """NaN, Infinity and -Infinity are numbers too, as with Triton. `lists`: under which keys a large body may have long
    lists of numbers, which are `Numbers` then. Raises InvalidRequest.
    """
    is_large = len(content) > SMALL_BYTES
    try:
        return msgspec.convert(loaded(bytes(content), lists), decoder.type) if is_large else decoder.decode(content)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request is not as KServe v2 has it: {error}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if is_large or not any(word in bytes(content) for word in (b"NaN", b"Infinity")):
            raise InvalidRequest(f"the request is no JSON: {error}") from None
    try:
        return msgspec.convert(json.loads(bytes(content)), decoder.type)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request is no JSON: {error}") from None
