"""Load of tensors: on a server of KServe v2, whichever it is, by HTTP or gRPC; and on a model in this process.

What is sent is made once, from the model's metadata: numbers from 0 to 1, whole ones 0 or 1.
"""

from __future__ import annotations

import array
import asyncio
import json
import random
import re
import ssl
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count, repeat
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

import grpc
import msgspec
import numpy as np
from google.protobuf import json_format

from maitred.cli.bench import InferOptions
from maitred.cli.command import Options
from maitred.cli.load import LoadFailure, LoadRun, PlannedRequest, Record, RequestLoad
from maitred.core.errors import CheckpointError, ConfigError, MaitredError
from maitred.core.objectives import percentile
from maitred.core.tensor_request import InferRequest, Tensor
from maitred.engine.limits import hand_over_quickly
from maitred.tensor.arrays import data_type_of, made_array, tensor_of
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, ModelConfig
from maitred.tensor.host import LocalTensorService
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.profiling import made_inputs
from maitred.tensor.protocol_fields import INFERENCE, MESSAGES
from maitred.tensor.served_models import OPENERS, ControlMode, Opener

REGION = "maitred-bench"
MAX_REASON = 300  # characters
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class InferCaller(Protocol):
    """One client of the server."""

    async def ask(self) -> LoadFailure | None:
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

    def caller(self) -> InferCaller: ...


@asynccontextmanager
async def connected(asked: InferOptions) -> AsyncIterator[Server]:
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
    def __init__(self, asked: InferOptions) -> None:
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

    def caller(self) -> InferCaller:
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

    async def ask(self) -> LoadFailure | None:
        try:
            answer = await self.answer()
        except (OSError, EOFError) as error:
            await self.close()
            return LoadFailure(type(error).__name__, _line(str(error)))
        return (
            None
            if answer.status == 200
            else LoadFailure(f"HTTP {answer.status}", _line(answer.body.decode(errors="replace")))
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
    def __init__(self, asked: InferOptions) -> None:
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

    def caller(self) -> InferCaller:
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

    async def ask(self) -> LoadFailure | None:
        try:
            await self._call(self._request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return LoadFailure(error.code().name, _line(error.details() or ""))
        return None

    async def close(self) -> None:
        pass


PERCENTS = (50, 90, 99)


@dataclass(slots=True)
class InferFigures:
    """Figures of a run."""

    latencies_s: list[float] = field(default_factory=list)  # of those that were answered
    failures: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)  # the first one of each kind of failure
    span_s: float = 0.0
    rows: int = 1

    def to_json(self) -> dict[str, Any]:
        """Rates by the second, latencies in ms."""
        ordered = sorted(self.latencies_s)
        rate = len(ordered) / self.span_s if self.span_s else 0.0
        told = {f"p{percent}_ms": percentile(ordered, percent) * 1e3 for percent in PERCENTS} if ordered else {}
        counts = {"num_requests": len(ordered), "num_failed": self.failures.total()}
        failed = {"failures": dict(self.failures), "reasons": self.reasons}
        rates = {"span_s": self.span_s, "requests_per_s": rate, "rows_per_s": rate * self.rows}
        return {**counts, **failed, **rates, **told}


def run_infer(options: Options) -> int:
    asked = options[InferOptions]
    figures = asyncio.run(_run_load(asked))
    if asked.json:
        print(msgspec.json.format(msgspec.json.encode(figures.to_json()), indent=2).decode())
    else:
        print("\n".join(lines(figures)))
    return 0 if figures.latencies_s else 1


async def _run_load(asked: InferOptions) -> InferFigures:
    """Run so many clients, or so many requests a second whatever becomes of them; until `num_requests` were sent or
    the time is over. Raises ConfigError for a server that does not tell of the model.
    """
    async with connected(asked) as server:
        tensors = made_tensors(await server.inputs(), asked)
        with _region(tensors, shm=asked.shm) as region:
            if region is not None:
                await server.register(f"/{region.name}", region.size)
            load = InferLoad(server)
            try:
                server.prepare(tensors, in_region=region is not None)
                plan = _planned(asked.rate, asked.num_requests, random.Random(asked.seed))
                run = LoadRun(load, plan, duration_s=asked.duration_s)
                await (run.closed_loop(asked.concurrency or 1) if asked.rate is None else run.open_loop())
                return _measured(run.progress.records, load.now(), asked.rows)
            finally:
                await load.close()
                if region is not None:
                    await server.unregister()


def _planned(rate: float | None, num_requests: int | None, rng: random.Random) -> Iterator[PlannedRequest]:
    """So many, or without end; at exponential gaps where there is a rate."""
    due_s = 0.0
    for index in range(num_requests) if num_requests is not None else count():
        yield PlannedRequest(index, due_s, [], 0)
        due_s += rng.expovariate(rate) if rate is not None else 0.0


class InferLoad(RequestLoad):
    """Asks a server for what it was prepared for. A request waits for no other: each has a caller of its own."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._idle: list[InferCaller] = []

    def prepared(self, request: PlannedRequest) -> Callable[[float], Awaitable[Record]]:
        return lambda due_s: self._ask(request.index, due_s)

    async def _ask(self, index: int, due_s: float) -> Record:
        record = Record(index, due_s, self.now(), 0, 0)
        caller = self._idle.pop() if self._idle else self._server.caller()
        record.failure = await caller.ask()
        self._idle.append(caller)
        record.ended_s = self.now()
        return record

    async def close(self) -> None:
        for caller in self._idle:
            await caller.close()


def _measured(records: Sequence[Record], span_s: float, rows: int) -> InferFigures:
    measured = InferFigures([each.latency_s for each in records if each.ok], span_s=span_s, rows=rows)
    for each in records:
        if each.failure is not None:
            measured.failures[each.failure.kind] += 1
            measured.reasons.setdefault(each.failure.kind, each.failure.message)
    return measured


def made_tensors(inputs: Sequence[Tensor], asked: InferOptions) -> list[Tensor]:
    """Inputs with data. Of each the shape has the rows first already."""
    made = []
    for each in inputs:
        kind = NUMPY_TYPES[data_type_of(each.datatype)]
        dims = tuple(asked.length if size == WILDCARD else size for size in each.shape)
        made.append(tensor_of(each.name, made_array(kind, dims, random=True), data_type_of(each.datatype)))
    return made


@contextmanager
def _region(tensors: Sequence[Tensor], *, shm: bool) -> Iterator[SharedMemory | None]:
    """The inputs one after another in shared memory."""
    if not shm:
        yield None
        return
    region = SharedMemory(create=True, size=sum(memoryview(each.data).nbytes for each in tensors))
    try:
        assert region.buf is not None
        for each, size, at in places(tensors):
            region.buf[at : at + size] = memoryview(each.data).cast("B")
        yield region
    finally:
        region.close()
        region.unlink()


def lines(measured: InferFigures) -> list[str]:
    """Return the figures as lines for people."""
    told = measured.to_json()
    rates = f"{told['requests_per_s']:,.1f} requests/s, {told['rows_per_s']:,.1f} rows/s in {measured.span_s:.1f} s"
    found = [f"{told['num_requests']} answered, {told['num_failed']} failed: {rates}"]
    if measured.latencies_s:
        found.append("latency " + ", ".join(f"p{percent} {told[f'p{percent}_ms']:.2f} ms" for percent in PERCENTS))
    failed = measured.failures.most_common()
    return [*found, *(f"failed {kind}: {count}, the first with: {measured.reasons[kind]}" for kind, count in failed)]


# ---- a model in this process


KEEPER = (sys.executable, "-P", "-m", "maitred.tensor.due")
START_S = 0.3  # until it runs
READ_BYTES = 65536


@dataclass(slots=True)
class LiveRun:
    """Figures of a measured run."""

    latencies_s: list[float] = field(default_factory=list)  # of those that were answered, in that order
    num_failed: int = 0
    num_rows: int = 0  # of batches
    num_batches: int = 0
    compute_s: float = 0.0  # of batches, of each once for each request in it
    span_s: float = 0.0  # from the first request to the last answer
    loop_s: float = 0.0  # CPU time of the event loop's thread

    @property
    def mean_batch(self) -> float:
        return self.num_rows / max(1, self.num_batches)

    @property
    def throughput_rps(self) -> float:
        return len(self.latencies_s) / self.span_s if self.span_s else 0.0


@asynccontextmanager
async def served(
    repository: Path, config: ANY_MESSAGE, openers: Mapping[str, Opener] = OPENERS
) -> AsyncIterator[LocalTensorService]:
    """One model as `config` has it. Raises CheckpointError."""
    hand_over_quickly()
    service = LocalTensorService(repository, ControlMode.EXPLICIT, openers=openers)
    await service.start()
    try:
        await service.load(config.name, json_format.MessageToJson(config))
        yield service
    except MaitredError as error:
        raise CheckpointError(f"{config.name!r}: {error}") from None
    finally:
        await service.close()


class LocalLoad(RequestLoad):
    """Asks one model for the same rows again and again. On the event loop of its service."""

    def __init__(self, service: LocalTensorService, model: str, *, num_rows: int = 1, length: int = 0) -> None:
        super().__init__()
        self._service, self._model = service, model
        self._inputs = made_inputs(service.config(model), num_rows, length)
        self._numbers = count()
        self._come: asyncio.StreamReader | None = None
        self._num_come = 0

    def prepared(self, request: PlannedRequest) -> Callable[[float], Awaitable[Record]]:
        return self._ask

    async def wait_until(self, due_s: float) -> None:
        """Wait for the keeper's next byte; it was told of all times before."""
        assert self._come is not None
        while not self._num_come:
            self._num_come = len(await self._come.read(READ_BYTES))
        self._num_come -= 1

    async def open_loop(self, due_s: Sequence[float]) -> LiveRun:
        """Each comes when it is due (s from now), whatever became of those before it."""
        self.began_at = time.monotonic() + START_S
        keeper = await asyncio.create_subprocess_exec(*KEEPER, stdin=PIPE, stdout=PIPE)
        assert keeper.stdin is not None
        keeper.stdin.write(array.array("d", [self.began_at + due for due in due_s]).tobytes())
        keeper.stdin.close()
        self._come = keeper.stdout
        run = LoadRun(self, (PlannedRequest(index, due, [], 0) for index, due in enumerate(due_s)))
        live = await self._measured(run, run.open_loop())
        await keeper.wait()
        return live

    async def closed_loop(self, in_flight: int, seconds: float) -> LiveRun:
        """Run so many clients, each asking again once it was answered."""
        self.began_at = time.monotonic()
        run = LoadRun(self, repeat(PlannedRequest(0, 0.0, [], 0)), duration_s=seconds)
        return await self._measured(run, run.closed_loop(in_flight))

    async def _ask(self, due_s: float) -> Record:
        record = Record(next(self._numbers), due_s, due_s, 0, 0)
        request = InferRequest(request_id=f"load{record.index}", model=self._model, inputs=self._inputs)
        try:
            await self._service.infer(request)
        except MaitredError as error:
            record.failure = LoadFailure(type(error).__name__, str(error))
        record.ended_s = self.now()
        return record

    async def _measured(self, run: LoadRun, loop: Awaitable[None]) -> LiveRun:
        before, cpu_at = self._totals(), time.thread_time()
        await loop
        loop_s, done = time.thread_time() - cpu_at, [each for each in run.progress.records if each.ok]
        num_rows, num_batches, compute_s = np.subtract(self._totals(), before)
        began_s = min((each.due_s for each in run.progress.records), default=0.0)
        return LiveRun(
            latencies_s=[each.latency_s for each in done],
            num_failed=len(run.progress.records) - len(done),
            num_rows=int(num_rows),
            num_batches=int(num_batches),
            compute_s=float(compute_s),
            span_s=max((each.ended_s - began_s for each in done), default=0.0),
            loop_s=loop_s,
        )

    def _totals(self) -> tuple[int, int, float]:
        told = self._service.statistics(self._model)
        ns = sum(each.compute_input[1] + each.compute_infer[1] + each.compute_output[1] for each in told)
        return sum(each.inference_count for each in told), sum(each.execution_count for each in told), ns / 1e9
