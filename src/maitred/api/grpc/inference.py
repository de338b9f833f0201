"""`inference.GRPCInferenceService`: KServe v2 over gRPC with Triton's extensions, against the tensor service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from maitred.api.dialects.kserve import told
from maitred.api.dialects.kserve.told import Models
from maitred.api.grpc.calls import Call, Method
from maitred.api.grpc.errors import grpc_error
from maitred.api.grpc.infer_forms import (
    error_in_stream,
    in_stream,
    infer_request,
    infer_response,
    parameter_value,
    parameters_of,
    written,
)
from maitred.api.http.app import App
from maitred.api.http.text_threads import LONG_BYTES
from maitred.api.tensor.extensions import Extensions
from maitred.api.tensor.lease import infer, new_id, tensors_of
from maitred.api.tensor.parameters import CLASSIFICATION, check_unload, config_to_load, version_of
from maitred.api.tensor.settings import LOGS, TRACES
from maitred.core.errors import MaitredError, UnsupportedParameter
from maitred.core.tensor_request import DURATIONS, Buffer, InferRequest, InferResponse, ModelStatistics, num_bytes_of
from maitred.tensor.config import ANY_MESSAGE, inputs_of, outputs_of
from maitred.tensor.protocol_fields import INFERENCE, MESSAGES, RAW_INPUT_CONTENTS
from maitred.tensor.raw_contents import split

MOST_IN_STREAM = 256  # requests of one stream that wait for their answers
_MEMBERS = {bool: "bool_param", int: "uint32_param", str: "string_param"}  # of a log setting


class _Decoded(NamedTuple):
    message: ANY_MESSAGE
    raw: list[memoryview]


_Waiting = asyncio.Queue[asyncio.Task[bytes] | None]  # a stream's next answer; None ends it


class InferenceService:
    """KServe's methods by name: each takes a message and its Call, and gives the answer, whole or encoded."""

    name = f"{INFERENCE}.GRPCInferenceService"

    def __init__(self, app: App, extensions: Extensions) -> None:
        self._app, self._with = app, extensions
        reads = "register shared memory"
        loads = "load and unload models"
        self.methods: Mapping[str, Method] = {
            "ServerLive": Method(_request("ServerLive"), self._live, is_open=True),
            "ServerReady": Method(_request("ServerReady"), self._ready, is_open=True),
            "ModelReady": Method(_request("ModelReady"), self._model_ready),
            "ServerMetadata": Method(_request("ServerMetadata"), self._metadata),
            "ModelMetadata": Method(_request("ModelMetadata"), self._model_metadata),
            "ModelConfig": Method(_request("ModelConfig"), self._config),
            "ModelInfer": Method(_infer_message, self._infer),
            "ModelStreamInfer": Method(_infer_message, stream=self._stream),
            "ModelStatistics": Method(_request("ModelStatistics"), self._statistics),
            "RepositoryIndex": Method(_request("RepositoryIndex"), self._index),
            "RepositoryModelLoad": Method(_request("RepositoryModelLoad"), self._load, admin=loads),
            "RepositoryModelUnload": Method(_request("RepositoryModelUnload"), self._unload, admin=loads),
            "SystemSharedMemoryStatus": Method(_request("SystemSharedMemoryStatus"), self._regions, admin=reads),
            "SystemSharedMemoryRegister": Method(_request("SystemSharedMemoryRegister"), self._register, admin=reads),
            "SystemSharedMemoryUnregister": Method(
                _request("SystemSharedMemoryUnregister"), self._unregister, admin=reads
            ),
            "CudaSharedMemoryStatus": Method(_request("CudaSharedMemoryStatus"), _no_cuda_regions, admin=reads),
            "CudaSharedMemoryRegister": Method(_request("CudaSharedMemoryRegister"), _refuse_cuda, admin=reads),
            "CudaSharedMemoryUnregister": Method(_request("CudaSharedMemoryUnregister"), _forget_cuda, admin=reads),
            "TraceSetting": Method(_request("TraceSetting"), self._trace, admin=TRACES),
            "LogSettings": Method(_request("LogSettings"), self._log, admin=LOGS),
        }

    # -- health and metadata

    async def _live(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        return MESSAGES["ServerLiveResponse"](live=True)

    async def _ready(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        return MESSAGES["ServerReadyResponse"](ready=self.is_ready)

    @property
    def is_ready(self) -> bool:
        return self._app.tensors is not None and self._app.in_flight.welcome

    async def _model_ready(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        ready = told.is_ready(self._models(call), message.name, version_of(message.version))
        return MESSAGES["ModelReadyResponse"](ready=ready)

    async def _metadata(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        return MESSAGES["ServerMetadataResponse"](**told.server_metadata(self._with.server_id))

    async def _model_metadata(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        models = self._models(call)
        config = models.config(message.name, version_of(message.version))
        batched = config.max_batch_size > 0
        return MESSAGES["ModelMetadataResponse"](
            name=message.name,
            versions=map(str, models.versions(message.name)),
            platform=config.platform or config.backend,
            inputs=[told.tensor(each, batched=batched) for each in inputs_of(config)],
            outputs=[told.tensor(each, batched=batched) for each in outputs_of(config)],
        )

    async def _config(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        config = self._models(call).config(message.name, version_of(message.version))
        return MESSAGES["ModelConfigResponse"](config=config.SerializeToString())

    def _models(self, call: Call) -> Models:
        return Models(self._app, call.caller)

    # -- inference

    async def _infer(self, decoded: _Decoded, call: Call) -> bytes:
        return written(*await self._answered(decoded, call))

    async def _answered(self, decoded: _Decoded, call: Call) -> tuple[ANY_MESSAGE, list[Buffer]]:
        message = decoded.message
        self._models(call).check_tensors(message.model_name)
        request = await self._request(decoded, call)
        answer = await infer(self._app, call.caller, request, limits=call.limits)
        is_classified = any(CLASSIFICATION in each.parameters for each in message.outputs)
        num_bytes = num_bytes_of(answer.outputs) if is_classified else 0
        return await self._app.text.run(num_bytes, partial(self._told, message, request, answer))

    async def _request(self, decoded: _Decoded, call: Call) -> InferRequest:
        """The request, with inputs from the caller's shared memory and typed contents copied in a thread."""
        owner = call.caller.tenant.name
        work = partial(infer_request, *decoded, new_id(), partial(self._with.regions.view, owner))
        num_region_bytes = min(LONG_BYTES, self._with.regions.num_bytes(owner))
        return await self._app.text.run(max(num_region_bytes, decoded.message.ByteSize()), work)

    def _told(
        self, message: ANY_MESSAGE, request: InferRequest, answer: InferResponse
    ) -> tuple[ANY_MESSAGE, list[Buffer]]:
        classes = partial(self._with.labels.classify, tensors_of(self._app))
        return infer_response(message, answer, request.into, classes)

    async def _stream(self, requests: AsyncIterator[_Decoded], call: Call) -> AsyncGenerator[bytes, None]:
        """Answers in the order of their requests, which run beside each other; an error is of its request alone."""
        waiting: _Waiting = asyncio.Queue(MOST_IN_STREAM)
        running: set[asyncio.Task[bytes]] = set()
        reader = asyncio.create_task(self._read_stream(requests, call, waiting, running))
        try:
            while (told := await waiting.get()) is not None:
                yield await told
            await reader
        finally:
            left = (reader, *running)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)  # none may ask anything of a call that has ended

    async def _read_stream(
        self,
        requests: AsyncIterator[_Decoded],
        call: Call,
        waiting: _Waiting,
        running: set[asyncio.Task[bytes]],
    ) -> None:
        try:
            async for decoded in requests:
                task = asyncio.create_task(self._streamed(decoded, call))
                running.add(task)
                task.add_done_callback(running.discard)
                await waiting.put(task)
                while len(running) >= MOST_IN_STREAM:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if running:
                await asyncio.wait(running)
        finally:
            await waiting.put(None)

    async def _streamed(self, decoded: _Decoded, call: Call) -> bytes:
        try:
            return in_stream(*await self._answered(decoded, call))
        except MaitredError as error:
            return error_in_stream(decoded.message, grpc_error(error).message)

    # -- statistics and the repository

    async def _statistics(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        told = tensors_of(self._app).statistics(message.name, version_of(message.version))
        return MESSAGES["ModelStatisticsResponse"](model_stats=map(_told_statistics, told))

    async def _index(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        _one_repository(message)
        told = MESSAGES["RepositoryIndexResponse"]()
        for entry in self._models(call).index(ready_only=message.ready):
            state = entry.state.value if entry.state is not None else ""
            told.models.add(name=entry.name, version=str(entry.version or ""), state=state, reason=entry.reason)
        return told

    async def _load(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        _one_repository(message)
        await tensors_of(self._app).load(message.model_name, config_to_load(parameters_of(message)))
        return MESSAGES["RepositoryModelLoadResponse"]()

    async def _unload(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        _one_repository(message)
        check_unload(parameters_of(message))
        await tensors_of(self._app).unload(message.model_name)
        return MESSAGES["RepositoryModelUnloadResponse"]()

    # -- shared memory and settings

    async def _regions(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        told = MESSAGES["SystemSharedMemoryStatusResponse"]()
        for name, region in self._with.regions.status(call.caller.tenant.name, message.name).items():
            line = told.regions[name]
            line.name, line.key, line.offset, line.byte_size = name, region.key, region.offset, region.byte_size
        return told

    async def _register(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        region = (message.name, message.key, message.offset, message.byte_size)
        self._with.regions.register(call.caller.tenant.name, *region)
        return MESSAGES["SystemSharedMemoryRegisterResponse"]()

    async def _unregister(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        self._with.regions.unregister(call.caller.tenant.name, message.name)
        return MESSAGES["SystemSharedMemoryUnregisterResponse"]()

    async def _trace(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        changes = {name: tuple(each.value) for name, each in message.settings.items()}
        told = MESSAGES["TraceSettingResponse"]()
        for name, values in self._with.settings.trace(changes, message.model_name).items():
            told.settings[name].value.extend(values)
        return told

    async def _log(self, message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
        changes = {name: parameter_value(each) for name, each in message.settings.items()}
        told = MESSAGES["LogSettingsResponse"]()
        for name, value in self._with.settings.log(changes).items():
            setattr(told.settings[name], _MEMBERS[type(value)], value)
        return told


def _request(method: str) -> Any:
    return MESSAGES[f"{method}Request"].FromString


def _infer_message(content: bytes) -> _Decoded:
    message, raw = split(content, RAW_INPUT_CONTENTS)
    return _Decoded(MESSAGES["ModelInferRequest"].FromString(message), raw)


def _one_repository(message: ANY_MESSAGE) -> None:
    if message.repository_name:
        raise UnsupportedParameter("repository_name is not supported: a server has one repository")


def _told_statistics(of: ModelStatistics) -> ANY_MESSAGE:
    duration = MESSAGES["StatisticDuration"]
    parts = {name: duration(count=getattr(of, name)[0], ns=getattr(of, name)[1]) for name in DURATIONS}
    told = MESSAGES["ModelStatistics"](
        name=of.model,
        version=str(of.version),
        last_inference=of.last_inference_ms,
        inference_count=of.inference_count,
        execution_count=of.execution_count,
        inference_stats=MESSAGES["InferStatistics"](**parts),
    )
    for rows, count, ns in of.batches:
        told.batch_stats.add(batch_size=rows, compute_infer=duration(count=count, ns=ns))
    return told


async def _no_cuda_regions(message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
    return MESSAGES["CudaSharedMemoryStatusResponse"]()


async def _refuse_cuda(message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
    raise UnsupportedParameter("CUDA shared memory is not supported; register system shared memory")


async def _forget_cuda(message: ANY_MESSAGE, call: Call) -> ANY_MESSAGE:
    """There are none to forget, and clients unregister all of them to begin with."""
    return MESSAGES["CudaSharedMemoryUnregisterResponse"]()
