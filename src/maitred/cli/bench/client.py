"""Sends one request of a load test and writes down when each piece of the answer came."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from maitred.cli.bench.prompts import PlannedRequest, as_text
from maitred.cli.bench.record import Chunk, Failure, Record
from maitred.cli.endpoint import Endpoint, Refused, TimedOut, Unreachable, error_text
from maitred.cli.sse import DONE, SSEParser
from maitred.core.errors import MaitredError

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


@dataclass(slots=True)
class LoadClient:
    """Sends to one endpoint; `began_at` is the moment (time.perf_counter) from which all times count."""

    endpoint: Endpoint
    form: RequestForm
    began_at: float = field(default_factory=time.perf_counter)

    def now(self) -> float:
        return time.perf_counter() - self.began_at

    async def send(self, request: PlannedRequest, body: bytes) -> Record:
        """Never raises for what the server does: a failure is part of the record."""
        sent_s = self.now()
        record = Record(request.index, request.due_s, sent_s, len(request.token_ids), request.output_len)
        try:
            await self._stream(record, body)
        except Refused as error:
            record.failure = Failure(f"HTTP {error.status}", str(error))
        except TimedOut as error:
            record.failure = Failure("timeout", str(error))
        except Unreachable as error:
            record.failure = Failure("unreachable", str(error))
        except StreamFault as error:
            record.failure = Failure("stream error", str(error))
        record.ended_s = record.chunks[-1].at_s if record.ok and record.chunks else self.now()
        return record

    async def _stream(self, record: Record, body: bytes) -> None:
        parser, stream = SSEParser(), _Stream(record)
        async with self.endpoint.post(self.form.path, body) as reply:
            if reply.status != 200:
                raise Refused(reply.status, error_text(reply.status, await reply.read()))
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
