"""One streamed answer: pieces of text and thoughts as they come, the calls in it, and what it cost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from maitred.api.dialects.openai.schemas import TimingMs
from maitred.cli.endpoint import Endpoint, Refused, Unreachable, error_text
from maitred.cli.sse import DONE, SSEParser
from maitred.core.errors import ServerError

CHAT_PATH = "/v1/chat/completions"
MIN_RATE_TOKENS = 8  # of fewer, a rate says next to nothing
WHOLE = ("stop", "tool_calls")  # how an answer ends whose calls are complete


class Piece(NamedTuple):
    text: str
    is_thought: bool = False


@dataclass(slots=True)
class StreamedCall:
    """One call of a tool; `arguments` is JSON text that grows while it streams."""

    index: int
    id: str
    name: str = ""
    arguments: str = ""

    def message(self) -> dict[str, object]:
        """The call as the API wants it back, in the message of the assistant."""
        function = {"name": self.name, "arguments": self.arguments or "{}"}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Answer:
    """Grows while `stream` runs."""

    text: str = ""
    thoughts: str = ""
    calls: list[StreamedCall] = field(default_factory=list)
    num_tokens: int | None = None  # as the server counts them
    timing: TimingMs | None = None  # from the engine's clock; other servers tell none
    finish_reason: str | None = None
    asked_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    last_at: float | None = None

    def message(self) -> dict[str, object] | None:
        """The answer as the API wants it back; None where there is nothing to send. Broken-off calls are left out."""
        calls = [call.message() for call in self.calls] if self.finish_reason in WHOLE else []
        if not (self.text or calls):
            return None
        message: dict[str, object] = {"role": "assistant", "content": self.text or None}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        return message | ({"tool_calls": calls} if calls else {})

    def describe(self) -> str:
        """`first token 80 ms, 42 tokens, 35.1 tokens/s, 2 ms in the queue`.

        When chunks arrive says little of when tokens were made, so of a server that tells no times there is no rate:
        `first text 80 ms, 42 tokens in 1.25 s`.
        """
        if self.first_at is None or self.last_at is None:
            return "no tokens"
        count = [] if self.num_tokens is None else [f"{self.num_tokens} tokens"]
        if self.timing is not None:
            parts = [f"first token {self.timing.ttft:.0f} ms", *count, *self._rate(self.timing)]
            parts.append(f"{self.timing.queue:.0f} ms in the queue")
        else:
            took = " ".join([*count, f"in {self.last_at - self.asked_at:.2f} s"])
            parts = [f"first text {1000 * (self.first_at - self.asked_at):.0f} ms", took]
        if self.finish_reason == "length":
            parts.append("cut at the length limit")
        return ", ".join(parts)

    def _rate(self, timing: TimingMs) -> Iterator[str]:
        """Rate of the tokens after the first, where there are enough of them."""
        parts_ms = timing.queue + timing.schedule + timing.prefill + timing.decode + timing.stall
        after_first_ms = parts_ms - timing.ttft
        if self.num_tokens is not None and self.num_tokens >= MIN_RATE_TOKENS and after_first_ms > 0:
            yield f"{1000 * (self.num_tokens - 1) / after_first_ms:,.1f} tokens/s"

    async def stream(self, endpoint: Endpoint, request: Mapping[str, object]) -> AsyncIterator[Piece]:
        """Thoughts and text, piece by piece. Raises Refused, Unreachable or ServerError."""
        parser = SSEParser()
        async with endpoint.post(CHAT_PATH, msgspec.json.encode(request)) as reply:
            if reply.status != 200:
                raise Refused(reply.status, error_text(reply.status, await reply.read()))
            async for piece in reply.body:
                for data in parser.feed(piece):
                    if data != DONE:
                        for taken in self._take(data):
                            yield taken
        if self.finish_reason is None:
            raise Unreachable("the answer ended too early; see the server's log")

    def _take(self, data: bytes) -> list[Piece]:
        event = _decoded(data)
        if "error" in event:
            raise ServerError(error_text(500, data))
        pieces: list[Piece] = []
        for choice in event.get("choices") or ():
            pieces += self._grow(choice.get("delta") or {})
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if usage := event.get("usage"):
            self.num_tokens = usage.get("completion_tokens")
            self.timing = _timing(usage.get("timing_ms"))
        return pieces

    def _grow(self, delta: Mapping[str, Any]) -> Iterator[Piece]:
        """Thoughts come under two names, of which servers send either or both."""
        thoughts = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        calls = delta.get("tool_calls") or ()
        if thoughts or text or calls:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
        self.thoughts += thoughts
        self.text += text
        for piece in calls:
            self._grow_call(piece)
        if thoughts:
            yield Piece(thoughts, is_thought=True)
        if text:
            yield Piece(text)

    def _grow_call(self, piece: Mapping[str, Any]) -> None:
        index = piece.get("index", len(self.calls))
        call = next((call for call in self.calls if call.index == index), None)
        if call is None:
            is_taken = any(call.id == piece.get("id") for call in self.calls)
            call = StreamedCall(index, f"call_{index}" if is_taken or not piece.get("id") else piece["id"])
            self.calls.append(call)
        function = piece.get("function") or {}
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""


def _timing(told: object) -> TimingMs | None:
    """None where there is none, or one that another kind of server means otherwise."""
    try:
        return msgspec.convert(told, TimingMs)
    except msgspec.ValidationError:
        return None


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except msgspec.DecodeError:
        event = None
    if not isinstance(event, dict):
        raise ServerError("the server's stream is not what OpenAI's API sends; check --url")
    return event
