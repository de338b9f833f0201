"""What a contender can be asked, and the loop that asks it: a JSON line in, a JSON line out.

    python -m peers.worker CONTENDER OPTIONS_JSON     (from benchmarks/, in the contender's own environment)

Only `maitred_engine.py` imports maitred: peers live in environments of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

BEGAN = time.time()
Prompt = Sequence[int]


@dataclass(slots=True)
class Steps:
    """What came of requests that were added together: when each step ended, and how many tokens each request has."""

    began: float
    ended_at: list[float] = field(default_factory=list)
    min_tokens: list[int] = field(default_factory=list)  # of the request with the fewest, after each step

    def note(self, fewest: int) -> None:
        self.ended_at.append(time.perf_counter())
        self.min_tokens.append(fewest)

    @property
    def first_s(self) -> float:
        """Until every request has a token."""
        return next(t for t, n in zip(self.ended_at, self.min_tokens, strict=True) if n) - self.began

    @property
    def decode_s(self) -> list[float]:
        """Durations of the steps in which every request got a token and none was prefilled."""
        steps = pairwise(zip(self.ended_at, self.min_tokens, strict=True))
        return [after - before for (before, have), (after, get) in steps if have and get == have + 1]


class Running(Protocol):
    """One request in a contender's hands."""

    def take(self) -> int:
        """Tokens that came since the last call."""


class Contender(Protocol):
    """A loaded model that continues batches. Greedy, end-of-sequence ignored, no prefix cache, no speculation."""

    def add(self, prompt: Prompt, num_tokens: int) -> Running: ...

    def step(self) -> None:
        """Work until there may be something to take."""


def run_together(contender: Contender, prompts: Sequence[Prompt], num_tokens: int) -> Steps:
    """All prompts at once, to the end."""
    steps = Steps(time.perf_counter())
    running = [contender.add(prompt, num_tokens) for prompt in prompts]
    counts = [0] * len(prompts)
    while min(counts) < num_tokens:
        contender.step()
        counts = [count + request.take() for count, request in zip(counts, running, strict=True)]
        steps.note(min(counts))
    return steps


def run_closed_loop(contender: Contender, prompts: Sequence[Prompt], clients: int, num_tokens: int) -> dict[str, float]:
    """Every prompt once, `clients` of them in flight, the next added when one ends."""
    waiting, live, done = list(prompts), {}, []
    began = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < clients:
            request = contender.add(waiting.pop(), num_tokens)
            live[id(request)] = (request, time.perf_counter(), [])
        contender.step()
        now = time.perf_counter()
        for key, (request, added, times) in list(live.items()):
            times.extend([now] * request.take())
            if len(times) >= num_tokens:
                done.append((added, times))
                del live[key]
    return loop_figures(done, time.perf_counter() - began)


def loop_figures(done: Sequence[tuple[float, Sequence[float]]], took_s: float) -> dict[str, float]:
    """Rates and percentiles (s) of requests given as (sent at, times of tokens)."""
    first = sorted(times[0] - sent for sent, times in done)
    gaps = sorted(b - a for _, times in done for a, b in pairwise(times))
    return {
        "tokens_per_s": sum(len(times) for _, times in done) / took_s,
        "ttft_p50": quantile(first, 0.5),
        "ttft_p99": quantile(first, 0.99),
        "itl_p50": quantile(gaps, 0.5),
        "itl_p99": quantile(gaps, 0.99),
    }


def quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def answer(contender: Contender, ask: dict[str, Any]) -> dict[str, Any]:
    match ask["cell"]:
        case "prefill":
            return {"first_s": run_together(contender, ask["prompts"], 1).first_s}
        case "decode":
            return {"steps_s": run_together(contender, ask["prompts"], ask["num_tokens"]).decode_s}
        case "loop":
            return run_closed_loop(contender, ask["prompts"], ask["clients"], ask["num_tokens"])
        case "memory":
            return {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    raise ValueError(f"cell {ask['cell']!r} is not known")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")  # peers print to standard output as they like
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    options = json.loads(sys.argv[2])
    contender: Contender = importlib.import_module(f"peers.{sys.argv[1]}").load(**options)
    loaded_s = time.time() - BEGAN
    run_together(contender, [list(range(100, 116))], 1)
    reply({"loaded_s": loaded_s, "first_token_s": time.time() - BEGAN, "began": BEGAN})
    for line in sys.stdin:
        reply(answer(contender, json.loads(line)))


if __name__ == "__main__":
    main()
