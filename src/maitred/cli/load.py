"""Load on a server: the loops that send requests, open or closed, and what came of each and when.

`Load` is a form of requests: completions and chats of an OpenAI server here, tensors in `load_tensors`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from maitred.cli.endpoint import DONE, Endpoint, ServerRefused, SSEParser, TimedOut, Unreachable, error_text
from maitred.cli.simulate_inputs import read_unpacked
from maitred.core.errors import ConfigError, MaitredError
from maitred.sim.synthetic import Draw, arrival_times
from maitred.sim.traces import BLOCK_TOKENS, TraceLine, parse_trace


class LoadFailure(NamedTuple):
    kind: str  # "HTTP 429", "unreachable", "timeout", "stream error" ...
    message: str


class Chunk(NamedTuple):
    at_s: float  # since the run began
    num_tokens: int  # as the server counts them, or 1 when it does not say


@dataclass(slots=True)
class Record:
    """Times are seconds since the run began."""

    index: int
    due_s: float
    sent_s: float
    input_tokens: int  # as asked, then as the server counted
    asked_tokens: int
    ended_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, from the server's prefix cache
    chunks: list[Chunk] = field(default_factory=list)
    finish_reason: str | None = None
    failure: LoadFailure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def lag_s(self) -> float:
        """How late we sent it: the client's own fault, never the server's."""
        return self.sent_s - self.due_s

    @property
    def latency_s(self) -> float:
        """From when it was due to the end of the answer."""
        return self.ended_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        return self.chunks[0].at_s - self.sent_s if self.chunks else None

    @property
    def e2e_s(self) -> float | None:
        return self.ended_s - self.sent_s if self.chunks else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first chunk's tokens."""
        if len(self.chunks) < 2:
            return None
        tokens = max(self.output_tokens, sum(chunk.num_tokens for chunk in self.chunks)) - self.chunks[0].num_tokens
        return (self.chunks[-1].at_s - self.chunks[0].at_s) / max(tokens, 1)

    def itls_s(self) -> list[float]:
        """Inter-token latencies: k tokens in one chunk share the time since the chunk before, so each counts once."""
        gaps: list[float] = []
        for before, chunk in zip(self.chunks, self.chunks[1:], strict=False):
            gaps += [(chunk.at_s - before.at_s) / chunk.num_tokens] * chunk.num_tokens
        return gaps

    @property
    def stall_s(self) -> float | None:
        """The longest silence between two chunks."""
        pairs = zip(self.chunks, self.chunks[1:], strict=False)
        return max((after.at_s - before.at_s for before, after in pairs), default=None)

    def to_json(self) -> dict[str, object]:
        return {
            "index": self.index,
            "due_s": self.due_s,
            "sent_s": self.sent_s,
            "ended_s": self.ended_s,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "error": self.failure._asdict() if self.failure else None,
            "chunks": self.chunks,
        }


# Short common words: most tokenizers spend one token on each, with the space before it.
_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good sentence man think say
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    index: int
    due_s: float  # since the run began; 0 in a closed loop
    token_ids: list[int]
    output_len: int  # tokens to ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Ids that prompts are made of: [low, high)."""

    low: int
    high: int

    def sentence(self, length: int, rng: random.Random) -> list[int]:
        return rng.choices(range(self.low, self.high), k=length)


WORD_VOCABULARY = Vocabulary(low=0, high=len(WORDS))


def as_text(token_ids: Sequence[int]) -> str:
    """One word for each id."""
    return " ".join([WORDS[token % len(WORDS)] for token in token_ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Independent random prompts. Each kind of draw has its own stream, so changing one leaves the others alone."""

    seed: int | str
    vocabulary: Vocabulary
    input_len: Draw
    output_len: Draw
    rate: float | None = None  # requests per second; None is a closed loop
    burstiness: float = 1.0
    shared_prefix_len: int = 0
    num_prefixes: int = 1

    def requests(self) -> Iterator[PlannedRequest]:
        """Requests without end."""
        lengths, texts, choices = (random.Random(f"{self.seed}/{name}") for name in ("lengths", "texts", "prefixes"))
        prefixes = [self._prefix(number) for number in range(self.num_prefixes if self.shared_prefix_len else 0)]
        for index, due_s in enumerate(self._due_times()):
            prefix = choices.choice(prefixes) if prefixes else []
            unique = self.vocabulary.sentence(self.input_len(lengths), texts)
            yield PlannedRequest(index, due_s, prefix + unique, self.output_len(lengths))

    def _prefix(self, number: int) -> list[int]:
        return self.vocabulary.sentence(self.shared_prefix_len, random.Random(f"{self.seed}/prefix/{number}"))

    def _due_times(self) -> Iterator[float]:
        if self.rate is not None:
            return arrival_times(self.rate, self.burstiness, random.Random(f"{self.seed}/arrivals"))
        return iter(lambda: 0.0, None)


def read_trace(path: str) -> list[TraceLine]:
    """Sorted by time. Raises ConfigError with the line at fault."""
    try:
        return parse_trace(read_unpacked(path).splitlines(), f"--trace {path}")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}; give a file of JSON lines") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """Requests as the trace has them, `rate_scale` times as fast and with all lengths times `length_scale`.

    Equal hash ids mean equal blocks after equal blocks, so a prompt made from them hits a prefix cache exactly where
    the original would have.
    """

    lines: list[TraceLine]
    vocabulary: Vocabulary
    seed: int | str
    rate_scale: float = 1.0
    length_scale: float = 1.0
    paced: bool = True  # False leaves the timing to a closed loop
    _texts: random.Random = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_texts", random.Random(f"{self.seed}/texts"))

    def requests(self) -> Iterator[PlannedRequest]:
        began = self.lines[0].timestamp
        for index, line in enumerate(self.lines):
            due_s = (line.timestamp - began) / 1000 / self.rate_scale if self.paced else 0.0
            yield PlannedRequest(index, due_s, self._prompt(line), self._scaled(line.output_length))

    def _prompt(self, line: TraceLine) -> list[int]:
        """Blocks as their ids say, cut to length; what no id covers is unique."""
        length = self._scaled(line.input_length)
        block_len = self._scaled(BLOCK_TOKENS)
        token_ids: list[int] = []
        for hash_id in line.hash_ids:
            if len(token_ids) >= length:
                break
            token_ids += _block(self.vocabulary, self.seed, hash_id, block_len)
        del token_ids[length:]
        return token_ids + self.vocabulary.sentence(length - len(token_ids), self._texts)

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens * self.length_scale))


@lru_cache(maxsize=4096)
def _block(vocabulary: Vocabulary, seed: int | str, hash_id: int | str, length: int) -> tuple[int, ...]:
    return tuple(vocabulary.sentence(length, random.Random(f"{seed}/block/{hash_id}")))


PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class StreamFault(MaitredError):
    """The stream broke the protocol, carried an error, or ended before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """Form of requests: how a planned one becomes JSON."""

    model: str
    endpoint: str = "completions"  # or chat
    as_tokens: bool = True  # token ids, which only the completions endpoint takes
    ignore_eos: bool = True
    continuous_usage: bool = True
    temperature: float | None = 0.0
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def encode(self, request: PlannedRequest) -> bytes:
        body: dict[str, object] = {"model": self.model, "max_tokens": request.output_len, "stream": True}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": as_text(request.token_ids)}]
        else:
            body["prompt"] = request.token_ids if self.as_tokens else as_text(request.token_ids)
        body["stream_options"] = {"include_usage": True}
        if self.continuous_usage:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return msgspec.json.encode(body | dict(self.extra))


class RequestLoad:
    """Sends requests of one form; times are seconds since `began_at`, of the machine's monotonic clock."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.began_at

    async def wait_until(self, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - self.now()))

    def prepared(self, request: PlannedRequest) -> Callable[[float], Awaitable[Record]]:
        """Make what is sent, ahead of its time; gives what sends it, told when it was due, and never raises for what
        the server does: a failure is part of the record.
        """
        raise NotImplementedError


class LoadClient(RequestLoad):
    """Sends to one endpoint of an OpenAI server."""

    def __init__(self, endpoint: Endpoint, form: RequestForm) -> None:
        super().__init__()
        self.endpoint, self.form = endpoint, form

    def prepared(self, request: PlannedRequest) -> Callable[[float], Awaitable[Record]]:
        body = self.form.encode(request)
        return lambda due_s: self.send(replace(request, due_s=due_s), body)

    async def send(self, request: PlannedRequest, body: bytes) -> Record:
        """Never raises for what the server does: a failure is part of the record."""
        sent_s = self.now()
        record = Record(request.index, request.due_s, sent_s, len(request.token_ids), request.output_len)
        try:
            await self._stream(record, body)
        except ServerRefused as error:
            record.failure = LoadFailure(f"HTTP {error.status}", str(error))
        except TimedOut as error:
            record.failure = LoadFailure("timeout", str(error))
        except Unreachable as error:
            record.failure = LoadFailure("unreachable", str(error))
        except StreamFault as error:
            record.failure = LoadFailure("stream error", str(error))
        record.ended_s = record.chunks[-1].at_s if record.ok and record.chunks else self.now()
        return record

    async def _stream(self, record: Record, body: bytes) -> None:
        parser, stream = SSEParser(), _Stream(record)
        async with self.endpoint.post(self.form.path, body) as reply:
            if reply.status != 200:
                raise ServerRefused(reply.status, error_text(reply.status, await reply.read()))
            async for piece in reply.body:
                at_s = self.now()
                for data in parser.feed(piece):
                    stream.take(data, at_s)
        stream.end()


class _Stream:
    """Reads the events of one answer into its record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._counted = 0  # completion tokens the server has told of so far
        self._done = False

    def take(self, data: bytes, at_s: float) -> None:
        if data == DONE:
            self._done = True
            return
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise StreamFault(f"an event is not what OpenAI's API sends: {error}") from None
        if event.error is not None:
            raise StreamFault(error_text(500, data))
        spoken = False
        for choice in event.choices:
            spoken = spoken or _has_text(choice)
            self._record.finish_reason = choice.finish_reason or self._record.finish_reason
        fresh = self._count(event.usage) if event.usage is not None else 0
        if event.choices and (spoken or fresh):
            self._record.chunks.append(Chunk(at_s, max(fresh, 1)))

    def _count(self, usage: _Usage) -> int:
        record = self._record
        fresh, self._counted = usage.completion_tokens - self._counted, usage.completion_tokens
        record.output_tokens = usage.completion_tokens
        record.input_tokens = usage.prompt_tokens or record.input_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        return fresh

    def end(self) -> None:
        record = self._record
        if not self._done and record.finish_reason is None:
            raise StreamFault("the stream ended without a finish reason or [DONE]")
        if not record.chunks:
            raise StreamFault("the stream held no tokens")
        record.output_tokens = record.output_tokens or sum(chunk.num_tokens for chunk in record.chunks)


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta and (delta.content or delta.reasoning or delta.reasoning_content)))


PAUSE_AFTER_FAILURE_S = 0.1  # in a closed loop, so that a server that refuses at once is not hammered


@dataclass(slots=True)
class LoadProgress:
    """The run so far, for display."""

    num_sent: int = 0
    peak_in_flight: int = 0
    records: list[Record] = field(default_factory=list)

    @property
    def num_in_flight(self) -> int:
        return self.num_sent - len(self.records)


class LoadRun:
    """One run against one server. `stop` ends it early: nothing more is sent, what is in flight is dropped."""

    def __init__(self, load: RequestLoad, plan: Iterator[PlannedRequest], *, duration_s: float | None = None) -> None:
        self._load = load
        self._plan = plan
        self._duration_s = duration_s
        self._tasks: set[asyncio.Task[Record]] = set()
        self._main: asyncio.Task[None] | None = None
        self.progress = LoadProgress()
        self.stopped = False

    async def open_loop(self) -> None:
        self._main = asyncio.ensure_future(self._send_when_due())
        await self._finish()

    async def closed_loop(self, concurrency: int) -> None:
        self._main = asyncio.ensure_future(self._keep_busy(concurrency))
        await self._finish()

    def stop(self) -> None:
        self.stopped = True
        for task in [self._main, *self._tasks]:
            if task is not None:
                task.cancel()

    async def _finish(self) -> None:
        assert self._main is not None
        await asyncio.wait([self._main])
        if self._tasks:
            await asyncio.wait(self._tasks)
        if not self._main.cancelled():
            self._main.result()

    async def _send_when_due(self) -> None:
        for request in self._plan:
            if self._duration_s is not None and request.due_s > self._duration_s:
                return
            send = self._load.prepared(request)  # before the wait, so that it delays nothing
            await self._load.wait_until(request.due_s)
            task = asyncio.create_task(self._send(send, request.due_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _keep_busy(self, concurrency: int) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(self._work())

    async def _work(self) -> None:
        for request in self._plan:  # the workers share one iterator
            if self._duration_s is not None and self._load.now() > self._duration_s:
                return
            record = await self._send(self._load.prepared(request), self._load.now())
            if not record.ok:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _send(self, send: Callable[[float], Awaitable[Record]], due_s: float) -> Record:
        progress = self.progress
        progress.num_sent += 1
        progress.peak_in_flight = max(progress.peak_in_flight, progress.num_in_flight)
        record = await send(due_s)
        progress.records.append(record)
        return record
