"""One streamed answer: pieces of text as they come, and what it cost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from maitred.cli.endpoint import Endpoint, Refused, Unreachable, error_text
from maitred.cli.sse import DONE, SSEParser
from maitred.errors import ServerError

CHAT_PATH = "/v1/chat/completions"


@dataclass(slots=True)
class Answer:
    """Grows while `stream` runs."""

    text: str = ""
    num_tokens: int = 0  # as the server counts them, else chunks
    finish_reason: str | None = None
    asked_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    last_at: float | None = None

    def describe(self) -> str:
        """`first token 80 ms, 42 tokens, 35.1 tokens/s`."""
        if self.first_at is None or self.last_at is None:
            return "no tokens"
        parts = [f"first token {1000 * (self.first_at - self.asked_at):.0f} ms", f"{self.num_tokens} tokens"]
        if self.num_tokens > 1 and self.last_at > self.first_at:
            parts.append(f"{(self.num_tokens - 1) / (self.last_at - self.first_at):.1f} tokens/s")
        if self.finish_reason == "length":
            parts.append("cut at the length limit")
        return ", ".join(parts)

    async def stream(self, endpoint: Endpoint, request: Mapping[str, object]) -> AsyncIterator[str]:
        """The text, piece by piece. Raises Refused, Unreachable or ServerError."""
        parser = SSEParser()
        async with endpoint.post(CHAT_PATH, msgspec.json.encode(request)) as reply:
            if reply.status != 200:
                raise Refused(reply.status, error_text(reply.status, await reply.read()))
            async for piece in reply.body:
                for data in parser.feed(piece):
                    if data != DONE and (text := self._take(data)):
                        yield text
        if self.finish_reason is None:
            raise Unreachable("the answer ended too early; see the server's log")

    def _take(self, data: bytes) -> str:
        event = _decoded(data)
        if "error" in event:
            raise ServerError(error_text(500, data))
        text = ""
        for choice in event.get("choices") or ():
            text += (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
            self.num_tokens += 1
            self.text += text
        if event.get("usage"):
            self.num_tokens = event["usage"].get("completion_tokens") or self.num_tokens
        return text


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except msgspec.DecodeError:
        event = None
    if not isinstance(event, dict):
        raise ServerError("the server's stream is not what OpenAI's API sends; check --url")
    return event
