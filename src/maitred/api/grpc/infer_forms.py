"""ModelInfer's messages as requests and answers of the tensor service.

Raw contents go by without a copy of ours; typed contents, which clients may send instead, become bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maitred.api.tensor.parameters import (
    CLASSIFICATION,
    Place,
    View,
    integer,
    keep,
    place_of,
    terms_of,
    version_of,
)
from maitred.api.tensor.regions import RegionPart
from maitred.core.errors import InvalidRequest
from maitred.core.tensor_request import Buffer, InferRequest, InferResponse, Tensor
from maitred.tensor.arrays import MOST_DIMS, data_type_of, numbers_as_bytes, texts_as_bytes
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.protocol_fields import MESSAGES, RAW_OUTPUT_CONTENTS
from maitred.tensor.raw_contents import joined

FINAL = "triton_final_response"

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


def infer_request(message: ANY_MESSAGE, raw: Sequence[memoryview], request_id: str, view: View) -> InferRequest:
    """Raises InvalidRequest where fields, contents and parameters do not go together."""
    terms = terms_of(parameters_of(message))
    return InferRequest(
        request_id=request_id,
        model=message.model_name,
        version=version_of(message.model_version),
        inputs=_inputs(message.inputs, raw, view),
        outputs=tuple(each.name for each in message.outputs),
        into={each.name: view(*place) for each in message.outputs if (place := _output_place(each)) is not None},
        level=terms.level,
        timeout_s=terms.timeout_s,
        sequence=terms.sequence,
    )


def parameters_of(message: ANY_MESSAGE) -> dict[str, Any]:
    return {name: parameter_value(each) for name, each in message.parameters.items()}


def parameter_value(parameter: ANY_MESSAGE) -> Any:
    """The parameter's member that is set; None where none is."""
    chosen = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, chosen) if chosen is not None else None


def _inputs(inputs: Sequence[ANY_MESSAGE], raw: Sequence[memoryview], view: View) -> tuple[Tensor, ...]:
    places = [_place(each) for each in inputs]
    num_sent = places.count(None)
    if raw and len(raw) != num_sent:
        raise InvalidRequest(f"there are {len(raw)} raw_input_contents for {num_sent} inputs outside of shared memory")
    left, tensors = iter(raw), []
    for each, place in zip(inputs, places, strict=True):
        if len(each.shape) > MOST_DIMS:
            raise InvalidRequest(f"input {each.name[:80]!r} has {len(each.shape)} dimensions, and may have {MOST_DIMS}")
        if place is not None:
            data: Buffer = view(*place).read()
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
        return numbers_as_bytes(values, kind)
    except OverflowError:
        raise InvalidRequest(f"input {each.name!r} has a number that is no {each.datatype}") from None


def _place(each: ANY_MESSAGE) -> Place | None:
    return place_of(each.name, parameters_of(each))


def _output_place(output: ANY_MESSAGE) -> Place | None:
    place = _place(output)
    if place is not None and CLASSIFICATION in output.parameters:
        raise InvalidRequest(f"output {output.name!r} goes to shared memory, so it is not classified")
    return place


def infer_response(
    message: ANY_MESSAGE, answer: InferResponse, into: Mapping[str, RegionPart], classes: Classes
) -> tuple[ANY_MESSAGE, list[Buffer]]:
    """The answer to `message`, and its raw contents beside it: one for each output. `into` is its request's."""
    told = MESSAGES["ModelInferResponse"](model_name=answer.model, model_version=str(answer.version), id=message.id)
    asked = {each.name: each for each in message.outputs}
    contents = []
    for tensor in answer.outputs:
        wanted = asked.get(tensor.name)
        if wanted is not None and CLASSIFICATION in wanted.parameters:
            count = integer({CLASSIFICATION: parameter_value(wanted.parameters[CLASSIFICATION])}, CLASSIFICATION)
            tensor = classes(answer.model, tensor, count)  # noqa: PLW2901  what is answered in its place
        output = told.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        place = None if wanted is None else _place(wanted)
        contents.append(tensor.data if place is None else _kept(output, tensor, place, into[tensor.name]))
    return told, contents


def _kept(output: ANY_MESSAGE, tensor: Tensor, place: Place, into: RegionPart) -> bytes:
    for name, value in place.told(keep(tensor, place, into)).items():
        setattr(output.parameters[name], "string_param" if isinstance(value, str) else "int64_param", value)
    return b""


def written(told: ANY_MESSAGE, contents: Sequence[Buffer]) -> bytes:
    """A ModelInferResponse as it is sent."""
    return joined(told.SerializeToString(), RAW_OUTPUT_CONTENTS, contents)


def in_stream(told: ANY_MESSAGE, contents: Sequence[Buffer]) -> bytes:
    """A ModelStreamInferResponse around it: the only answer to its request."""
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
