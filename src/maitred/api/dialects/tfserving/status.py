"""TF Serving's state of each version of a model, and its signature; for REST and gRPC alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from maitred.core.errors import InvalidRequest, ModelNotFound
from maitred.core.tensor_request import IndexEntry, ModelState, TensorService
from maitred.tensor.arrays import datatype_of
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, TensorSpec, inputs_of, outputs_of, parameters_of
from maitred.tensor.repository import LABEL
from maitred.tensor.tfs_fields import MESSAGES, PACKAGE
from maitred.tensor.tfs_forms import TYPES

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


def version_number(tensors: TensorService, model: str, version: int, label: str) -> int:
    """The version that is meant; 0 is the default one. Raises ModelNotFound."""
    if version or not label:
        return version or max(tensors.versions(model), default=0)
    return int(parameters_of(tensors.config(model, 0, label))[LABEL + label])


def statuses(tensors: TensorService, model: str, version: int = 0, label: str = "") -> ANY_MESSAGE:
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


def metadata(tensors: TensorService, model: str, version: int = 0, label: str = "") -> ANY_MESSAGE:
    """A GetModelMetadataResponse. Raises ModelNotFound."""
    told = MESSAGES["GetModelMetadataResponse"]()
    signatures = _signatures(tensors.config(model, version, label))
    told.model_spec.name = model
    told.model_spec.version.value = version_number(tensors, model, version, label)
    told.metadata[SIGNATURE_DEF].type_url = _SIGNATURE_MAP
    told.metadata[SIGNATURE_DEF].value = signatures.SerializeToString()
    return told


def metadata_json(tensors: TensorService, model: str, version: int, label: str) -> dict[str, Any]:
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


def _fill(infos: Any, specs: Sequence[TensorSpec], *, batched: bool) -> None:
    for spec in specs:
        info = infos[spec.name]
        info.name, info.dtype = spec.name, TYPES[datatype_of(spec.data_type)][0]
        for size in (WILDCARD, *spec.dims) if batched else spec.dims:
            info.tensor_shape.dim.add(size=size)
