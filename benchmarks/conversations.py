"""A conversation trace like Mooncake's (Qin et al. 2024, arXiv:2407.00079, table 2 and figure 5), made from a seed.

Sessions come by a Poisson process; each of their turns is sent at a time that is set, has the whole conversation so far
as its prompt, and adds some. Prompts are 12,000 tokens on average with a long tail, answers 343, as in that trace; all
begin with one system prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from maitred.sim.traces import BLOCK_TOKENS, TraceLine, TraceWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    sessions_per_s: float
    duration_s: float
    seed: int = 0
    system_blocks: int = 2  # of 512 tokens
    first_tokens: float = 4500.0  # median of a session's first prompt
    more_tokens: float = 1200.0  # median that a turn adds
    spread: float = 1.0  # sigma of both, lognormal
    mean_turns: float = 4.0  # geometric
    think_s: float = 45.0  # mean from one turn to the next
    max_tokens: int = 100_000  # a session ends before that

    def workload(self) -> TraceWorkload:
        rng, lines, at, number = Random(self.seed), list[TraceLine](), 0.0, 0
        while (at := at + rng.expovariate(self.sessions_per_s)) < self.duration_s:
            lines += self._session(rng, at, f"s{number}")
            number += 1
        return TraceWorkload(sorted(lines, key=lambda line: line.timestamp))

    def _session(self, rng: Random, at: float, name: str) -> list[TraceLine]:
        lines = []
        length = self.system_blocks * BLOCK_TOKENS + self._drawn(rng, self.first_tokens)
        while length < self.max_tokens and at < self.duration_s:
            answer = self._drawn(rng, 240.0)
            own = [f"{name}/{i}" for i in range(length // BLOCK_TOKENS - self.system_blocks)]
            hash_ids = (*range(self.system_blocks), *own)
            lines.append(TraceLine(timestamp=at * 1000, input_length=length, output_length=answer, hash_ids=hash_ids))
            if rng.random() < 1 / self.mean_turns:
                break
            length += answer + self._drawn(rng, self.more_tokens)
            at += rng.expovariate(1 / self.think_s)
        return lines

    def _drawn(self, rng: Random, median: float) -> int:
        return max(1, round(median * rng.lognormvariate(0, self.spread)))
