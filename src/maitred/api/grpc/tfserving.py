"""`tensorflow.serving.PredictionService` and `ModelService`: Predict, GetModelMetadata and GetModelStatus."""

from __future__ import annotations

from functools import partial

from maitred.api.dialects.tfserving.rows import SIGNATURE, SIGNATURE_DEF, check_signature, metadata, statuses
from maitred.api.grpc.calls import Call, Method, RpcService
from maitred.api.http.app import App
from maitred.api.tensor.lease import infer, new_id, tensors_of
from maitred.core.errors import InvalidRequest, UnsupportedParameter
from maitred.core.tensor_request import InferRequest, InferResponse, Tensor, num_bytes_of
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.tfs_fields import MESSAGES, PACKAGE, tensor_from_proto, tensor_to_proto


class PredictionService(RpcService):
    """Models by name, and by version or label; version 0 and none are the default."""

    name = f"{PACKAGE}.PredictionService"

    def __init__(self, app: App) -> None:
        self._app = app
        self.methods = {
            "Predict": Method(MESSAGES["PredictRequest"].FromString, self._predict),
            "GetModelMetadata": Method(MESSAGES["GetModelMetadataRequest"].FromString, self._metadata),
        }

    async def _predict(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        name, version, label = _spec(message)
        check_signature(message.model_spec.signature_name)
        request = InferRequest(
            request_id=new_id(),
            model=name,
            version=version,
            label=label,
            inputs=await self._app.text.run(message.ByteSize(), partial(_inputs, message)),
            outputs=tuple(message.output_filter),
        )
        answer = await infer(self._app, call.caller, request, limits=call.limits)
        return await self._app.text.run(num_bytes_of(answer.outputs), partial(_predicted, answer))

    async def _metadata(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        for field in message.metadata_field:
            if field != SIGNATURE_DEF:
                raise UnsupportedParameter(f"the metadata field {field[:80]!r} is not supported")
        return metadata(tensors_of(self._app), *_spec(message))


def _inputs(message: ANY_MESSAGE) -> tuple[Tensor, ...]:
    return tuple(tensor_from_proto(name, proto) for name, proto in message.inputs.items())


def _predicted(answer: InferResponse) -> ANY_MESSAGE:
    told = MESSAGES["PredictResponse"]()
    told.model_spec.name, told.model_spec.signature_name = answer.model, SIGNATURE
    told.model_spec.version.value = answer.version
    for tensor in answer.outputs:
        told.outputs[tensor.name].CopyFrom(tensor_to_proto(tensor))
    return told


class ModelService(RpcService):
    """The state of a model's versions."""

    name = f"{PACKAGE}.ModelService"

    def __init__(self, app: App) -> None:
        self._app = app
        self.methods = {"GetModelStatus": Method(MESSAGES["GetModelStatusRequest"].FromString, self._status)}

    async def _status(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        return statuses(tensors_of(self._app), *_spec(message))


def _spec(message: ANY_MESSAGE) -> tuple[str, int, str]:
    """Name, version and label. Raises InvalidRequest."""
    spec = message.model_spec
    if not spec.name:
        raise InvalidRequest("model_spec must name a model", param="model_spec")
    if spec.version.value < 0:
        raise InvalidRequest(f"model_spec has version {spec.version.value}; versions are over 0", param="model_spec")
    return spec.name, spec.version.value, spec.version_label
