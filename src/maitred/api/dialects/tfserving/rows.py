"""TF Serving's JSON as tensors, and back: `instances` by rows, `inputs` by columns, `examples` by features."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import json_format

from maitred.api.http.bodies import SMALL_BYTES
from maitred.api.tensor.json_values import Numbers, array_of_json, encoded, json_of_array, loaded
from maitred.core.errors import InvalidRequest, ModelNotFound
from maitred.core.tensor_request import IndexEntry, ModelState, Tensor
from maitred.engine.tensors import TensorModels
from maitred.tensor.arrays import array_of, datatype_of, tensor_of
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, DeclaredTensor, inputs_of, outputs_of, parameters_of
from maitred.tensor.repository import LABEL
from maitred.tensor.tfs_fields import MESSAGES, PACKAGE, TYPES

SIGNATURE = "serving_default"  # a model has this one
SIGNATURE_DEF = "signature_def"  # the one field of metadata that can be asked for
_SIGNATURE_MAP = f"type.googleapis.com/{PACKAGE}.SignatureDefMap"
_METHOD = "tensorflow/serving/predict"
_STATES: Mapping[ModelState | None, str] = {
    None: "START",
    ModelState.LOADING: "LOADING",
    ModelState.READY: "AVAILABLE",
    ModelState.UNLOADING: "UNLOADING",
    ModelState.UNAVAILABLE: "END",
}


def check_signature(name: str) -> None:
    if name not in ("", SIGNATURE):
        raise InvalidRequest(f"signature_name is {name[:80]!r}; models here have {SIGNATURE!r}", param="signature_name")


def version_number(tensors: TensorModels, model: str, version: int, label: str) -> int:
    """The version that is meant; 0 is the default one. Raises ModelNotFound."""
    if version or not label:
        return version or max(tensors.versions(model), default=0)
    return int(parameters_of(tensors.config(model, 0, label))[LABEL + label])


def statuses(tensors: TensorModels, model: str, version: int = 0, label: str = "") -> ANY_MESSAGE:
    """A GetModelStatusResponse, of every version where none is asked for. Raises ModelNotFound."""
    asked = version_number(tensors, model, version, label) if version or label else 0
    told = MESSAGES["GetModelStatusResponse"]()
    for entry in tensors.index():
        if entry.name == model and entry.version is not None and asked in (0, entry.version):
            _add_status(told, entry)
    if not told.model_version_status:
        what = f"version {asked}" if asked else "any version"
        raise ModelNotFound(f"could not find {what} of model {model[:200]!r}", param="model")
    return told


def _add_status(told: ANY_MESSAGE, entry: IndexEntry) -> None:
    status = told.model_version_status.add(version=entry.version or 0)
    status.state = MESSAGES["ModelVersionStatus"].State.Value(_STATES[entry.state])
    failed = entry.state is ModelState.UNAVAILABLE and entry.reason not in ("", "unloaded")
    status.status.error_code = "UNKNOWN" if failed else "OK"
    status.status.error_message = entry.reason if failed else ""


def metadata(tensors: TensorModels, model: str, version: int = 0, label: str = "") -> ANY_MESSAGE:
    """A GetModelMetadataResponse. Raises ModelNotFound."""
    told = MESSAGES["GetModelMetadataResponse"]()
    signatures = _signatures(tensors.config(model, version, label))
    told.model_spec.name = model
    told.model_spec.version.value = version_number(tensors, model, version, label)
    told.metadata[SIGNATURE_DEF].type_url = _SIGNATURE_MAP
    told.metadata[SIGNATURE_DEF].value = signatures.SerializeToString()
    return told


def metadata_json(tensors: TensorModels, model: str, version: int, label: str) -> dict[str, Any]:
    """Metadata of a model for REST, where numbers of 64 bits are strings. Raises ModelNotFound."""
    signatures = _signatures(tensors.config(model, version, label))
    number = str(version_number(tensors, model, version, label))
    return {
        "model_spec": {"name": model, "signature_name": "", "version": number},
        "metadata": {SIGNATURE_DEF: as_json(signatures)},
    }


def as_json(message: ANY_MESSAGE) -> dict[str, Any]:
    """A message with every field, by the names of the wire."""
    told: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return told


def _signatures(config: ANY_MESSAGE) -> ANY_MESSAGE:
    told, batched = MESSAGES["SignatureDefMap"](), config.max_batch_size > 0
    signature = told.signature_def[SIGNATURE]
    signature.method_name = _METHOD
    for infos, specs in ((signature.inputs, inputs_of(config)), (signature.outputs, outputs_of(config))):
        _fill(infos, specs, batched=batched)
    return told


def _fill(infos: Any, specs: Sequence[DeclaredTensor], *, batched: bool) -> None:
    for spec in specs:
        info = infos[spec.name]
        info.name, info.dtype = spec.name, TYPES[datatype_of(spec.data_type)][0]
        for size in (WILDCARD, *spec.dims) if batched else spec.dims:
            info.tensor_shape.dim.add(size=size)


B64 = "b64"
BINARY = "_bytes"  # outputs whose names end so are told in base64


class Decoded(NamedTuple):
    inputs: tuple[Tensor, ...]
    by_rows: bool


def object_of(body: bytes, specs: Sequence[DeclaredTensor]) -> dict[str, Any]:
    """NaN and Infinity are numbers here; see `loaded` for a large body. Raises InvalidRequest."""
    try:
        names = ("instances", "inputs", *(spec.name for spec in specs))
        found = loaded(body, names) if len(body) > SMALL_BYTES else json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"JSON Parse error: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest("the body must be a JSON object")
    signature = found.get("signature_name", "")
    if not isinstance(signature, str):
        raise InvalidRequest("signature_name must be a string", param="signature_name")
    check_signature(signature)
    return found


def predict_inputs(body: bytes, specs: Sequence[DeclaredTensor]) -> Decoded:
    """Raises InvalidRequest, which names the input."""
    found = object_of(body, specs)
    if ("instances" in found) == ("inputs" in found):
        raise InvalidRequest("send either instances or inputs")
    by_rows = "instances" in found
    columns = _of_rows(found["instances"], specs) if by_rows else _of_columns(found["inputs"], specs)
    known = {spec.name: spec for spec in specs}
    return Decoded(tuple(_tensor(known[name], values) for name, values in columns.items()), by_rows)


def _of_rows(rows: Any, specs: Sequence[DeclaredTensor]) -> dict[str, Any]:
    if isinstance(rows, Numbers):
        return {_only(specs, "instances"): rows}
    if not isinstance(rows, list) or not rows:
        raise InvalidRequest("instances must be a list with at least one element", param="instances")
    named = [_is_named(row) for row in rows]
    if not any(named):
        return {_only(specs, "instances"): rows}
    names = set(rows[0]) if named[0] else set()
    for at, row in enumerate(rows):
        if not named[at] or set(row) != names:
            raise InvalidRequest(f"instances[{at}] must be an object with the keys {sorted(names)}", param="instances")
    _check_names(names, specs)
    return {name: [row[name] for row in rows] for name in names}


def _of_columns(columns: Any, specs: Sequence[DeclaredTensor]) -> dict[str, Any]:
    if not _is_named(columns):
        return {_only(specs, "inputs"): columns}
    _check_names(set(columns), specs)
    return dict(columns)


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and set(value) != {B64}


def _only(specs: Sequence[DeclaredTensor], key: str) -> str:
    if len(specs) != 1:
        told = ", ".join(spec.name for spec in specs)
        raise InvalidRequest(f"{key} has values without names, and the model has the inputs {told}", param=key)
    return specs[0].name


def _check_names(names: set[str], specs: Sequence[DeclaredTensor]) -> None:
    unknown = names - {spec.name for spec in specs}
    if unknown:
        raise InvalidRequest(f"{min(unknown)[:200]!r} is no input of the model")
    absent = {spec.name for spec in specs if not spec.optional} - names
    if absent:
        raise InvalidRequest(f"the input {min(absent)!r} is missing")


def _tensor(spec: DeclaredTensor, values: Any) -> Tensor:
    return tensor_of(spec.name, _array(spec, values), spec.data_type)


def _array(spec: DeclaredTensor, values: Any) -> np.ndarray:
    return array_of_json(spec.name, spec.data_type, values, _text)


def _text(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, dict) and set(value) == {B64} and isinstance(value[B64], str):
        try:
            return base64.b64decode(value[B64], validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest(f"input {name!r} has a b64 that is no base64", param=name) from None
    raise InvalidRequest(f"input {name!r} must have strings, or objects with the key b64", param=name)


# ---- classify and regress


def example_inputs(body: bytes, specs: Sequence[DeclaredTensor]) -> tuple[Tensor, ...]:
    """A feature is an input; what `context` has is of every example. Raises InvalidRequest."""
    found = object_of(body, specs)
    context, examples = found.get("context", {}), found.get("examples")
    if not isinstance(context, dict) or not isinstance(examples, list) or not examples:
        raise InvalidRequest("examples must be a list with at least one object, and context an object")
    rows = []
    for at, example in enumerate(examples):
        if not isinstance(example, dict) or set(example) & set(context):
            raise InvalidRequest(f"examples[{at}] must be an object without the features of context")
        rows.append({**context, **example})
    columns, known = _of_rows(rows, specs), {spec.name: spec for spec in specs}
    return tuple(_feature(known[name], values) for name, values in columns.items())


def _feature(spec: DeclaredTensor, values: list[Any]) -> Tensor:
    """Features are flat lists, or one value: they take the shape that the model has for a row."""
    array = _array(spec, [value if isinstance(value, list | Numbers) else [value] for value in values])
    if WILDCARD not in spec.dims and array.size == len(values) * prod(spec.dims):
        array = array.reshape(len(values), *spec.dims)
    return tensor_of(spec.name, array, spec.data_type)


def classes(outputs: Sequence[Tensor]) -> bytes:
    """Label and score of each class of each example. Raises InvalidRequest for a model that has no such outputs."""
    named = {output.name: output for output in outputs}
    labels, scores = named.get("classes"), named.get("scores")
    if labels is None and scores is None and len(outputs) == 1:
        scores = outputs[0]
    found = [array_of(each) for each in (labels, scores) if each is not None]
    if not found or any(array.ndim != 2 or array.shape != found[0].shape for array in found):
        raise InvalidRequest("the model cannot classify: it has no outputs classes or scores of shape [rows, classes]")
    pairs = np.empty((*found[0].shape, 2), object)
    pairs[..., 0] = "" if labels is None else _array_told(labels)
    pairs[..., 1] = 0.0 if scores is None else _array_told(scores)
    return _object(result=json_of_array(pairs, _encoded))


def regressions(outputs: Sequence[Tensor]) -> bytes:
    """A number for each example. Raises InvalidRequest for a model that has none."""
    named = {output.name: output for output in outputs}
    output = named.get("outputs", outputs[0] if len(outputs) == 1 else None)
    shape = () if output is None else output.shape
    if output is None or not 1 <= len(shape) <= 2 or shape[1:] not in ((), (1,)):
        raise InvalidRequest("the model cannot regress: it has no output of shape [rows] or [rows, 1]")
    return _object(result=_json_of(_array_told(output).reshape(-1)))


# ---- answers


def predictions(outputs: Sequence[Tensor], *, by_rows: bool) -> bytes:
    """Encode outputs by rows or by columns, as asked; without names where there is one output."""
    columns = {output.name: _array_told(output) for output in outputs}
    if not by_rows:
        told = {name: _json_of(array) for name, array in columns.items()}
        return _object(outputs=_object(**told) if len(told) > 1 else next(iter(told.values())))
    if any(not output.shape or output.shape[0] != outputs[0].shape[0] for output in outputs):
        raise InvalidRequest("the outputs have unlike numbers of rows; send inputs by columns")
    if len(columns) == 1:
        return _object(predictions=_json_of(next(iter(columns.values()))))
    rows = (
        _object(**{name: _json_of(array[at, ...]) for name, array in columns.items()})
        for at in range(outputs[0].shape[0])
    )
    return _object(predictions=b"[" + b",".join(rows) + b"]")


def _object(**told: bytes) -> bytes:
    """JSON object of values that are JSON already."""
    return b"{" + b",".join(encoded(name) + b":" + value for name, value in told.items()) + b"}"


def _json_of(array: np.ndarray) -> bytes:
    return json_of_array(array, _encoded if array.dtype.hasobject else None)


def _encoded(array: np.ndarray) -> bytes:
    return encoded(array.tolist())


def _array_told(output: Tensor) -> np.ndarray:
    array = array_of(output)
    if output.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if not array.dtype.hasobject:
        return array
    told = np.empty(array.shape, object)
    told.reshape(-1)[:] = [_told_text(output.name, value) for value in array.reshape(-1)]
    return told


def _told_text(name: str, value: bytes) -> Any:
    """A text that is no UTF-8 goes in base64 too, rather than be damaged."""
    if not name.endswith(BINARY):
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass
    return {B64: base64.b64encode(value).decode()}
