"""Servers of KServe v2 as a load generator asks them, by HTTP or gRPC: what a model takes, regions, and one request."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

import grpc

from maitred.core.errors import ConfigError
from maitred.core.tensor_request import Tensor
from maitred.tensor.config import WILDCARD
from maitred.tensor.config_fields import ModelConfig
from maitred.tensor.protocol_fields import INFERENCE, MESSAGES

REGION = "maitred-bench"
MAX_REASON = 300  # characters
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Request to send, and its server."""

    url: str
    model: str
    protocol: str  # http or grpc
    rows: int = 1
    length: int = 16  # of dimensions of any length
    shm: bool = False
    api_key: str | None = None


class Failure(NamedTuple):
    kind: str  # a status, or the exception of a connection
    reason: str  # what the server said, or the system; one line


class Caller(Protocol):
    """One client of the server."""

    async def ask(self) -> Failure | None:
        """Sends the request and waits for its answer; what failed, or None."""

    async def close(self) -> None: ...


class Server(Protocol):
    """A server as asked before and after a load. Raises ConfigError where it does not tell."""

    async def inputs(self) -> list[Tensor]:
        """Return the inputs as the model declares them, rows first, without data."""

    async def register(self, key: str, num_bytes: int) -> None: ...

    async def unregister(self) -> None: ...

    def prepare(self, tensors: Sequence[Tensor], *, in_region: bool) -> None:
        """Set what callers send."""

    def caller(self) -> Caller: ...


@asynccontextmanager
async def connected(asked: Asked) -> AsyncIterator[Server]:
    """Return a connection of the URL's protocol."""
    if asked.protocol == "http":
        yield _HttpServer(asked)
        return
    server = _GrpcServer(asked)
    try:
        yield server
    finally:
        await server.close()


def _with_rows(shape: Sequence[int], rows: int, *, batched: bool) -> tuple[int, ...]:
    return (rows, *shape[1:]) if batched and shape and shape[0] == WILDCARD else tuple(shape)


def places(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, int]]:
    """Each with its size, and where it begins in the region."""
    at = 0
    for each in tensors:
        size = memoryview(each.data).nbytes
        yield each, size, at
        at += size


class _Answer(NamedTuple):
    status: int
    body: bytes


class _HttpServer:
    def __init__(self, asked: Asked) -> None:
        self._asked, parts = asked, urlsplit(asked.url if "//" in asked.url else f"//{asked.url}", "http")
        if parts.hostname is None:
            raise ConfigError(f"url is {asked.url!r}; write http://HOST:PORT")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._model = f"/v2/models/{quote(asked.model, safe='')}"
        self._request = b""

    async def inputs(self) -> list[Tensor]:
        told = await self._json("GET", self._model)
        config = await self._json("GET", f"{self._model}/config")
        batched = config.get("max_batch_size", 0) > 0
        return [
            Tensor(each["name"], each["datatype"], _with_rows(each["shape"], self._asked.rows, batched=batched), b"")
            for each in told["inputs"]
        ]

    async def register(self, key: str, num_bytes: int) -> None:
        body = {"key": key, "offset": 0, "byte_size": num_bytes}
        await self._json("POST", f"/v2/systemsharedmemory/region/{REGION}/register", body)

    async def unregister(self) -> None:
        await self._json("POST", f"/v2/systemsharedmemory/region/{REGION}/unregister", {})

    def prepare(self, tensors: Sequence[Tensor], *, in_region: bool) -> None:
        described = []
        for each, size, at in places(tensors):
            region = {"shared_memory_region": REGION, "shared_memory_byte_size": size, "shared_memory_offset": at}
            parameters = region if in_region else {"binary_data_size": size}
            described.append(
                {"name": each.name, "datatype": each.datatype, "shape": each.shape, "parameters": parameters}
            )
        head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
        data = b"" if in_region else b"".join(each.data for each in tensors)
        headers = {"inference-header-content-length": str(len(head))} if data else {}
        self._request = self._bytes("POST", f"{self._model}/infer", head + data, headers)

    def caller(self) -> Caller:
        return _HttpCaller(self._host, self._port, self._tls, self._request)

    def _bytes(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        whole = {"host": f"{self._host}:{self._port}", "content-length": str(len(body)), **headers}
        if self._asked.api_key is not None:
            whole["authorization"] = f"Bearer {self._asked.api_key}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in whole.items())
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body

    async def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        content = b"" if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} if content else {}
        caller = _HttpCaller(self._host, self._port, self._tls, self._bytes(method, path, content, headers))
        try:
            answer = await caller.answer()
        except (OSError, EOFError) as error:
            raise ConfigError(f"{self._asked.url} does not answer: {error}") from None
        finally:
            await caller.close()
        if answer.status != 200:
            raise ConfigError(f"{self._asked.url}{path}: {answer.status} {answer.body[:300].decode(errors='replace')}")
        found: dict[str, Any] = json.loads(answer.body) if answer.body else {}
        return found


class _HttpCaller:
    """A connection that is kept."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, request: bytes) -> None:
        self._where, self._tls, self._request = (host, port), tls, request
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> Failure | None:
        try:
            answer = await self.answer()
        except (OSError, EOFError) as error:
            await self.close()
            return Failure(type(error).__name__, _line(str(error)))
        return (
            None
            if answer.status == 200
            else Failure(f"HTTP {answer.status}", _line(answer.body.decode(errors="replace")))
        )

    async def answer(self) -> _Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._where, ssl=self._tls)
        reader, writer = self._streams
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        body = await reader.readexactly(int(length[1])) if length is not None else b""
        return _Answer(int(head.split(b" ", 2)[1]), body)

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _line(text: str) -> str:
    return " ".join(text.split())[:MAX_REASON]


class _GrpcServer:
    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(asked.url.rpartition("//")[2].rstrip("/"), options)
        key = asked.api_key
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._request = b""

    async def close(self) -> None:
        await self._channel.close()

    async def inputs(self) -> list[Tensor]:
        told = await self._call("ModelMetadata", name=self._asked.model)
        batched = _batches((await self._call("ModelConfig", name=self._asked.model)).config)
        return [
            Tensor(each.name, each.datatype, _with_rows(each.shape, self._asked.rows, batched=batched), b"")
            for each in told.inputs
        ]

    async def register(self, key: str, num_bytes: int) -> None:
        await self._call("SystemSharedMemoryRegister", name=REGION, key=key, byte_size=num_bytes)

    async def unregister(self) -> None:
        await self._call("SystemSharedMemoryUnregister", name=REGION)

    def prepare(self, tensors: Sequence[Tensor], *, in_region: bool) -> None:
        message = MESSAGES["ModelInferRequest"](model_name=self._asked.model)
        for each, size, at in places(tensors):
            told = message.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
            if in_region:
                told.parameters["shared_memory_region"].string_param = REGION
                told.parameters["shared_memory_byte_size"].int64_param = size
                told.parameters["shared_memory_offset"].int64_param = at
            else:
                message.raw_input_contents.append(bytes(each.data))
        self._request = message.SerializeToString()

    def caller(self) -> Caller:
        return _GrpcCaller(self._channel, self._request, self._metadata)

    async def _call(self, method: str, **fields: Any) -> Any:
        call = self._channel.unary_unary(f"/{INFERENCE}.GRPCInferenceService/{method}")
        try:
            content = await call(MESSAGES[f"{method}Request"](**fields).SerializeToString(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise ConfigError(f"{self._asked.url} {method}: {error.code().name} {error.details()}") from None
        return MESSAGES[f"{method}Response"].FromString(content)


def _batches(config: Any) -> bool:
    """Our own messages have a ModelConfig as the bytes that it is sent as."""
    return bool(ModelConfig.FromString(config).max_batch_size > 0)


class _GrpcCaller:
    """A caller on the channel, which carries all of them."""

    def __init__(self, channel: Any, request: bytes, metadata: Any) -> None:
        self._call = channel.unary_unary(f"/{INFERENCE}.GRPCInferenceService/ModelInfer")
        self._request, self._metadata = request, metadata

    async def ask(self) -> Failure | None:
        try:
            await self._call(self._request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return Failure(error.code().name, _line(error.details() or ""))
        return None

    async def close(self) -> None:
        pass
