"""ModelInfer's messages as requests and answers of the tensor service.

Raw contents go by without a copy of ours; typed contents, which clients may send instead, become bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maitred.errors import InvalidRequest
from maitred.tensor.arrays import data_type_of, texts_as_bytes
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.protocol_fields import MESSAGES, RAW_OUTPUT_CONTENTS
from maitred.tensor.raw_contents import joined
from maitred.tensor.service import Buffer, InferRequest, InferResponse, SequenceControl, Tensor

REGION, REGION_SIZE, REGION_OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
CLASSIFICATION = "classification"
FINAL = "triton_final_response"
RESERVED = ("triton_enable_empty_final_response",)  # each answer here is final, so that it changes nothing

View = Callable[[str, int, int], memoryview]  # of a registered region: its name, an offset, so many bytes
Classes = Callable[[str, Tensor, int], Tensor]  # of an output: the k largest, as `score:index:label`

_CONTENTS: Mapping[str, str] = {  # the field of InferTensorContents that holds a datatype; FP16 and BF16 are raw
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class Place(NamedTuple):
    """A part of a registered region."""

    region: str
    offset: int
    byte_size: int


def version_of(text: str) -> int:
    """The number of a version; empty is 0, the default. Raises InvalidRequest."""
    if text and not (text.isascii() and text.isdigit() and 0 < len(text) <= 18):
        raise InvalidRequest(f"{text[:40]!r} is no model version, which is a number over 0", param="model_version")
    return int(text or "0")


def infer_request(message: ANY_MESSAGE, raw: Sequence[memoryview], request_id: str, view: View) -> InferRequest:
    """Raises InvalidRequest where fields, contents and parameters do not go together."""
    parameters = {name: parameter_value(each) for name, each in message.parameters.items()}
    timeout_us = _integer(parameters, "timeout")
    return InferRequest(
        request_id=request_id,
        model=message.model_name,
        version=version_of(message.model_version),
        inputs=_inputs(message.inputs, raw, view),
        outputs=tuple(each.name for each in message.outputs),
        level=_integer(parameters, "priority"),
        timeout_s=timeout_us / 1e6 if timeout_us else None,
        sequence=_sequence(parameters),
    )


def parameter_value(parameter: ANY_MESSAGE) -> Any:
    """What is set of its members; None where nothing is."""
    chosen = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, chosen) if chosen is not None else None


def _inputs(inputs: Sequence[ANY_MESSAGE], raw: Sequence[memoryview], view: View) -> tuple[Tensor, ...]:
    places = [_place(each) for each in inputs]
    num_sent = places.count(None)
    if raw and len(raw) != num_sent:
        raise InvalidRequest(f"there are {len(raw)} raw_input_contents for {num_sent} inputs outside of shared memory")
    left, tensors = iter(raw), []
    for each, place in zip(inputs, places, strict=True):
        if place is not None:
            data: Buffer = view(*place)
        elif raw and each.HasField("contents"):
            raise InvalidRequest(f"input {each.name!r} has contents beside raw_input_contents; send one of them")
        else:
            data = next(left) if raw else _typed(each)
        tensors.append(Tensor(each.name, each.datatype, tuple(each.shape), data))
    return tuple(tensors)


def _typed(each: ANY_MESSAGE) -> bytes:
    field = _CONTENTS.get(each.datatype)
    if field is None:
        raise InvalidRequest(f"input {each.name!r} of datatype {each.datatype[:20]!r} must be sent as raw contents")
    values = getattr(each.contents, field)
    if each.datatype == "BYTES":
        return texts_as_bytes(values)
    kind = NUMPY_TYPES[data_type_of(each.datatype)]
    try:
        return np.array(values, kind).tobytes()
    except OverflowError:
        raise InvalidRequest(f"input {each.name!r} has a number that is no {each.datatype}") from None


def _place(each: ANY_MESSAGE) -> Place | None:
    if REGION not in each.parameters:
        return None
    parameters = {name: parameter_value(value) for name, value in each.parameters.items()}
    region, size = parameters[REGION], _integer(parameters, REGION_SIZE)
    if not isinstance(region, str) or not size:
        raise InvalidRequest(f"{each.name!r} names a {REGION} and must say its {REGION_SIZE}")
    return Place(region, _integer(parameters, REGION_OFFSET), size)


def _integer(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"the parameter {name!r} must be an integer of 0 or more", param=name)
    return value


def _flag(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"the parameter {name!r} must be a bool_param", param=name)
    return value


def _sequence(parameters: Mapping[str, Any]) -> SequenceControl | None:
    for name in parameters:
        if name.startswith("triton_") and name not in RESERVED:
            raise InvalidRequest(f"the parameter {name[:80]!r} is Triton's own; known is {RESERVED[0]}")
    start, end = _flag(parameters, "sequence_start"), _flag(parameters, "sequence_end")
    known = parameters.get("sequence_id", 0)
    if isinstance(known, bool) or not isinstance(known, int | str):
        raise InvalidRequest("the parameter 'sequence_id' must be an integer or a string", param="sequence_id")
    return SequenceControl(correlation_id=known, start=start, end=end) if known else None


def infer_response(
    message: ANY_MESSAGE, answer: InferResponse, view: View, classes: Classes
) -> tuple[ANY_MESSAGE, list[Buffer]]:
    """The answer to `message`, and its raw contents, which go beside it: one for each output."""
    told = MESSAGES["ModelInferResponse"](model_name=answer.model, model_version=str(answer.version), id=message.id)
    asked = {each.name: each for each in message.outputs}
    contents = []
    for tensor in answer.outputs:
        wanted = asked.get(tensor.name)
        if wanted is not None and CLASSIFICATION in wanted.parameters:
            count = _integer({CLASSIFICATION: parameter_value(wanted.parameters[CLASSIFICATION])}, CLASSIFICATION)
            tensor = classes(answer.model, tensor, count)  # noqa: PLW2901  what is answered in its place
        output = told.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        place = None if wanted is None else _place(wanted)
        contents.append(tensor.data if place is None else _kept(output, tensor, place, view))
    return told, contents


def _kept(output: ANY_MESSAGE, tensor: Tensor, place: Place, view: View) -> bytes:
    """Writes an output into its region. Raises InvalidRequest where it is larger than its place there."""
    data = memoryview(tensor.data).cast("B") if memoryview(tensor.data).nbytes else memoryview(b"")
    if data.nbytes > place.byte_size:
        raise InvalidRequest(
            f"output {tensor.name!r} has {data.nbytes} bytes, and its place in region {place.region!r} "
            f"{place.byte_size}"
        )
    view(place.region, place.offset, data.nbytes)[:] = data
    output.parameters[REGION].string_param = place.region
    output.parameters[REGION_SIZE].int64_param = data.nbytes
    if place.offset:
        output.parameters[REGION_OFFSET].int64_param = place.offset
    return b""


def written(told: ANY_MESSAGE, contents: Sequence[Buffer]) -> bytes:
    """A ModelInferResponse as it is sent."""
    return joined(told.SerializeToString(), RAW_OUTPUT_CONTENTS, contents)


def in_stream(told: ANY_MESSAGE, contents: Sequence[Buffer]) -> bytes:
    """A ModelStreamInferResponse around it."""
    told.parameters[FINAL].bool_param = True
    return joined(b"", 2, [written(told, contents)])


def error_in_stream(message: ANY_MESSAGE, error: str) -> bytes:
    """An error of one request, which leaves the stream open."""
    told = MESSAGES["ModelStreamInferResponse"](error_message=error)
    told.infer_response.id, told.infer_response.model_name = message.id, message.model_name
    told.infer_response.model_version = message.model_version
    told.infer_response.parameters[FINAL].bool_param = True
    encoded: bytes = told.SerializeToString()
    return encoded
