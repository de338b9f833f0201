"""Record of one request of a load test, by the client's monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Failure(NamedTuple):
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
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def lag_s(self) -> float:
        """How late we sent it: the client's own fault, never the server's."""
        return self.sent_s - self.due_s

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
