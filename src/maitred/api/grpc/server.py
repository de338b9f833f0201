"""The gRPC server: services on one port beside HTTP's, on the same event loop, and `grpc.health.v1` among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from pathlib import Path

import grpc

from maitred.api.grpc.calls import Call, Method, RpcService, handler_of
from maitred.api.grpc.inference import InferenceService
from maitred.api.grpc.tfserving import ModelService, PredictionService
from maitred.api.http.app import App
from maitred.api.tensor.extensions import Extensions
from maitred.core.errors import ConfigError, RouteNotFound
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.protocol_fields import HEALTH, HEALTH_MESSAGES, NOT_SERVING, SERVICE_UNKNOWN, SERVING

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
