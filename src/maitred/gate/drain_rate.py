"""How fast work leaves, measured only while there is a queue, and how far off the waits foretold from it were.

Work is counted in tokens: one for each output token, PROMPT_WEIGHT for each prompt token. A step of decoding serves few
tokens and a step of prefill many, so a prompt's token is the cheaper one; the right ratio differs by machine, and what
this one is wrong by shows up in the rate and in the errors, both of which are measured.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import exp

PROMPT_WEIGHT = 0.25
UNKNOWN_OUTPUT = 128  # tokens, until answers were seen


class DrainRate:
    """Work per second of the saturated engine, with exponential forgetting; idle time teaches nothing."""

    MEMORY_S = 5.0
    MIN_EVIDENCE_S = 0.25
    MIN_STEPS = 8  # prompts are counted when their first token comes, which makes a single step look fast

    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0
        self._num_steps = 0

    @property
    def per_s(self) -> float | None:
        """Work a second; None until there was a queue for long enough."""
        enough = self._num_steps >= self.MIN_STEPS and self._seconds >= self.MIN_EVIDENCE_S
        return self._work / self._seconds if enough and self._work > 0 else None

    def served(self, work: float, seconds: float) -> None:
        """Count so much work in this time, while others waited."""
        self._num_steps += 1
        keep = exp(-seconds / self.MEMORY_S)
        self._work = self._work * keep + work
        self._seconds = self._seconds * keep + seconds


class MeanOutput:
    """Mean length of recent answers."""

    MEMORY = 200  # answers

    def __init__(self) -> None:
        self._mean = 0.0
        self._num_seen = 0

    def saw(self, num_tokens: int) -> None:
        self._num_seen = min(self._num_seen + 1, self.MEMORY)
        self._mean += (num_tokens - self._mean) / self._num_seen

    @property
    def mean(self) -> float:
        return self._mean if self._num_seen else float(UNKNOWN_OUTPUT)

    def expected(self, max_tokens: int) -> float:
        return min(float(max_tokens), self.mean)


class LateBy:
    """How much later than foretold first tokens came: a high quantile of the last few hundred, in seconds.

    As in conformal prediction, that much slack covers whatever the forecast lacks (prefill, policy, a machine that
    slows down), so that all but the given share of those admitted are in time.
    """

    CAPACITY = 256
    MIN_SEEN = 32
    SHARE = 0.998

    def __init__(self) -> None:
        self._by_time: deque[float] = deque()
        self._by_size: list[float] = []

    def add(self, late_s: float) -> None:
        if len(self._by_time) == self.CAPACITY:
            del self._by_size[bisect_left(self._by_size, self._by_time.popleft())]
        self._by_time.append(late_s)
        insort(self._by_size, late_s)

    @property
    def slack_s(self) -> float | None:
        """Slack (s); None until enough was seen."""
        if len(self._by_size) < self.MIN_SEEN:
            return None
        return self._by_size[min(int(self.SHARE * len(self._by_size)), len(self._by_size) - 1)]
