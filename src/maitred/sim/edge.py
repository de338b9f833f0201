"""Edge: the time that a request spends outside the engine, as its client sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeModel:
    """Seconds of HTTP, tokenising and the way between processes; all 0 is the engine alone.

    It has no queue: a front end at the limit of its own processor is slower than this says.
    """

    fixed_s: float = 0.0
    """Time of each request until its client has the first token, at no prompt."""
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0
    """Time of each token after the first by which its client waits longer than the engine."""

    def first_token_s(self, prompt_tokens: int) -> float:
        return self.fixed_s + prompt_tokens * self.prompt_token_s

    def whole_s(self, prompt_tokens: int, output_tokens: int) -> float:
        return self.first_token_s(prompt_tokens) + max(0, output_tokens - 1) * self.output_token_s


class EdgeSample(NamedTuple):
    """One request that had the engine for itself."""

    prompt_tokens: int
    first_token_s: float  # sent to first token at the client, less the steps until then
    num_gaps: int  # tokens after the first
    gaps_s: float  # first token to last at the client, less the same in the engine
