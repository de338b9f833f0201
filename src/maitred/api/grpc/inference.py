"""`inference.GRPCInferenceService`: KServe v2 over gRPC with Triton's extensions, against the tensor service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from maitred.api.dialects.kserve import told
from maitred.api.dialects.kserve.told import Models
from maitred.api.grpc.calls import Call, Method, RpcService, grpc_error
from maitred.api.http.app import LONG_BYTES, App
from maitred.api.tensor.extensions import (
    CLASSIFICATION,
    LOGS,
    TRACES,
    Extensions,
    RegionPart,
    RegionPlace,
    View,
    check_unload,
    config_to_load,
    integer,
    keep,
    place_of,
    terms_of,
    version_of,
)
from maitred.api.tensor.lease import infer, new_id, tensors_of
from maitred.core.errors import InvalidRequest, MaitredError, UnsupportedParameter
from maitred.core.tensor_request import (
    DURATIONS,
    Buffer,
    InferRequest,
    InferResponse,
    ModelStatistics,
    Tensor,
    num_bytes_of,
)
from maitred.tensor.arrays import MOST_DIMS, data_type_of, numbers_as_bytes, texts_as_bytes
from maitred.tensor.config import ANY_MESSAGE, inputs_of, outputs_of
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.protocol_fields import INFERENCE, MESSAGES, RAW_INPUT_CONTENTS, RAW_OUTPUT_CONTENTS

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


def _place(each: ANY_MESSAGE) -> RegionPlace | None:
    return place_of(each.name, parameters_of(each))


def _output_place(output: ANY_MESSAGE) -> RegionPlace | None:
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


def _kept(output: ANY_MESSAGE, tensor: Tensor, place: RegionPlace, into: RegionPart) -> bytes:
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


MOST_IN_STREAM = 256  # requests of one stream that wait for their answers
_MEMBERS = {bool: "bool_param", int: "uint32_param", str: "string_param"}  # of a log setting


class _Decoded(NamedTuple):
    message: ANY_MESSAGE
    raw: list[memoryview]


_Waiting = asyncio.Queue[asyncio.Task[bytes] | None]  # a stream's next answer; None ends it


class InferenceService(RpcService):
    """KServe's methods by name: each takes a message and its Call, and gives the answer, whole or encoded."""

    name = f"{INFERENCE}.GRPCInferenceService"

    def __init__(self, app: App, extensions: Extensions) -> None:
        self._app, self._with = app, extensions
        reads = "register shared memory"
        loads = "load and unload models"
        self.methods = {
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
        self, requests: AsyncIterator[_Decoded], call: Call, waiting: _Waiting, running: set[asyncio.Task[bytes]]
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


# ---- raw contents: large fields of bytes are looked at where they lie, and written in one piece


_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


class Split(NamedTuple):
    """A message's bytes without one field, and the contents of that field, which are views."""

    message: bytes
    contents: list[memoryview]


def split(content: bytes, number: int) -> Split:
    """Takes the field of bytes `number` out of a message. Raises ValueError where bytes end early or fit no field."""
    view, contents, kept, kept_from = memoryview(content), [], [], 0
    for start, found, body, end in _fields(content):
        if found == number:
            contents.append(view[body:end])
            kept.append(view[kept_from:start])
            kept_from = end
    return Split(b"".join([*kept, view[kept_from:]]) if contents else content, contents)


def joined(message: bytes, number: int, contents: Iterable[Buffer]) -> bytes:
    """A message with a repeated field of bytes after its other fields: each content is copied once."""
    parts: list[Buffer] = [message]
    for content in contents:
        flat = memoryview(content).cast("B") if memoryview(content).nbytes else b""
        parts += (_varint(number << 3 | _BYTES) + _varint(len(flat)), flat)
    return b"".join(parts)


def _fields(content: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each field its start, number, and where its value starts and ends."""
    at, size = 0, len(content)
    while at < size:
        start = at
        key, at = _read_varint(content, at)
        kind = key & 7
        if kind == _VARINT:
            length = _read_varint(content, at)[1] - at
        elif kind == _BYTES:
            length, at = _read_varint(content, at)
        elif kind in _FIXED:
            length = _FIXED[kind]
        else:
            raise ValueError(f"at byte {start} no field begins")
        if length > size - at:
            raise ValueError(f"at byte {start} a field has {length} bytes, and {size - at} are left")
        yield start, key >> 3, at, at + length
        at += length


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
    value = 0
    for index, byte in enumerate(content[at : at + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError(f"at byte {at} a number does not end")


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))
