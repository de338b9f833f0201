"""The gRPC server: services on one port beside HTTP's, on the same event loop, and `grpc.health.v1` among them; those
of `tensorflow.serving` (Predict, GetModelMetadata, GetModelStatus) lie here too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from functools import partial
from pathlib import Path

import grpc

from maitred.api.dialects.tfserving.rows import SIGNATURE, SIGNATURE_DEF, check_signature, metadata, statuses
from maitred.api.grpc.calls import Call, Method, RpcService, handler_of
from maitred.api.grpc.inference import InferenceService
from maitred.api.http.app import App
from maitred.api.tensor.extensions import Extensions
from maitred.api.tensor.lease import infer, new_id, tensors_of
from maitred.core.errors import ConfigError, InvalidRequest, RouteNotFound, UnsupportedParameter
from maitred.core.tensor_request import InferRequest, InferResponse, Tensor, num_bytes_of
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.protocol_fields import HEALTH, HEALTH_MESSAGES, NOT_SERVING, SERVICE_UNKNOWN, SERVING
from maitred.tensor.tfs_fields import MESSAGES, PACKAGE, tensor_from_proto, tensor_to_proto

LOOK_S = 1.0  # watchers hear of a change within this time


class HealthService(RpcService):
    """`grpc.health.v1.Health`: of the server, which is the empty name, and of each service."""

    name = f"{HEALTH}.Health"

    def __init__(self, app: App, services: Collection[str]) -> None:
        self._app, self._known = app, {"", self.name, *services}
        decode = HEALTH_MESSAGES["HealthCheckRequest"].FromString
        self.methods = {
            "Check": Method(decode, self._check, is_open=True),
            "Watch": Method(decode, stream=self._watch, is_open=True),
        }

    def _status(self, service: str) -> int:
        if service not in self._known:
            return SERVICE_UNKNOWN
        ready = self._app.tensors is not None and self._app.in_flight.welcome
        return SERVING if ready else NOT_SERVING

    async def _check(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        status = self._status(message.service)
        if status == SERVICE_UNKNOWN:
            raise RouteNotFound(f"there is no service {message.service[:200]!r}")
        return HEALTH_MESSAGES["HealthCheckResponse"](status=status)

    async def _watch(self, messages: AsyncIterator[ANY_MESSAGE], call: Call) -> AsyncGenerator[bytes, None]:
        """The status now, and each time it is another."""
        message, told = await anext(aiter(messages)), None
        while True:
            status = self._status(message.service)
            if status != told:
                yield HEALTH_MESSAGES["HealthCheckResponse"](status=status).SerializeToString()
            told = status
            await asyncio.sleep(LOOK_S)


class GrpcServer:
    """Make, `start` and `stop` it on the event loop of the HTTP server."""

    def __init__(self, app: App, services: Sequence[RpcService]) -> None:
        self._app = app
        self._services = (*services, HealthService(app, [service.name for service in services]))
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens, with the certificate of HTTP where there is one; the port, which 0 leaves to the system. Raises
        ConfigError where it is not free.
        """
        config = self._app.config
        server = self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # two servers on one port would share its clients
            )
        )
        server.add_generic_rpc_handlers(tuple(handler_of(self._app, service) for service in self._services))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._bind(server, address)
        except RuntimeError:
            raise ConfigError(f"gRPC cannot listen on {address}; choose another --grpc-port") from None
        await server.start()
        return bound

    def _bind(self, server: grpc.aio.Server, address: str) -> int:
        config = self._app.config
        if config.ssl_certfile is None:
            return int(server.add_insecure_port(address))
        chain = Path(config.ssl_certfile).read_bytes()
        key = Path(config.ssl_keyfile).read_bytes() if config.ssl_keyfile is not None else chain
        return int(server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)])))

    async def stop(self, within_s: float) -> None:
        """No new calls; those that are under way have so long, then they are cancelled."""
        if self._server is not None:
            await self._server.stop(within_s)


def grpc_server(extensions: Extensions, app: App) -> GrpcServer:
    """A server's, with every service that there is."""
    return GrpcServer(app, (InferenceService(app, extensions), PredictionService(app), ModelService(app)))


# ---- TensorFlow Serving's services


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
