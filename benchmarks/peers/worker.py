"""What a contender can be asked, and the loop that asks it: a JSON line in, a JSON line out.

    python -m peers.worker CONTENDER OPTIONS_JSON     (from benchmarks/, in the contender's own environment)

Only `maitred_engine.py` imports maitred: peers live in environments of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

BEGAN = time.time()
SEGMENT_STEPS = 16  # decoding steps between two looks at the machine
Prompt = Sequence[int]
Done = tuple[float, list[float]]  # of a request: when it was sent, and when each token came


class Running(Protocol):
    """One request in a contender's hands."""

    def take(self) -> int:
        """Tokens that came since the last call."""


class Contender(Protocol):
    """A loaded model that continues batches. Greedy, end-of-sequence ignored, no prefix cache, no speculation."""

    def add(self, prompt: Prompt, num_tokens: int) -> Running: ...

    def step(self) -> None:
        """Work until there may be something to take."""


def time_first(contender: Contender, prompts: Sequence[Prompt]) -> float:
    """Seconds until each of these requests has its one token."""
    began = time.perf_counter()
    waiting = [contender.add(prompt, 1) for prompt in prompts]
    while waiting:
        contender.step()
        waiting = [request for request in waiting if not request.take()]
    return time.perf_counter() - began


def time_decode(
    contender: Contender, prompts: Sequence[Prompt], num_tokens: int, num_steps: int, between: Callable[[], None]
) -> list[list[float]]:
    """Durations (s) of the first `num_steps` steps in which each of the requests got a token, in segments.

    Requests whose prompts were read first are ahead of the others by a few tokens; `num_tokens` must be large enough
    that none ends before the last has its steps. `between` is called before each segment and after the last, while
    nothing runs.
    """
    running = [contender.add(prompt, num_tokens) for prompt in prompts]
    counts = [0] * len(prompts)
    segments: list[list[float]] = []
    left = num_steps
    while min(counts) < num_tokens:
        if left and min(counts) and (not segments or len(segments[-1]) == SEGMENT_STEPS):
            between()
            segments.append([])
        began = time.perf_counter()
        contender.step()
        fresh = [request.take() for request in running]
        took = time.perf_counter() - began
        if left and min(counts) and set(fresh) == {1}:
            segments[-1].append(took)
            left -= 1
            if left == 0:
                between()
        counts = [count + new for count, new in zip(counts, fresh, strict=True)]
    if left:
        raise RuntimeError(f"only {num_steps - left} of {num_steps} steps decoded all {len(prompts)} requests")
    return segments


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
    return loop_figures(done, clients, time.perf_counter() - began)


def loop_figures(done: Sequence[Done], clients: int, took_s: float) -> dict[str, float]:
    """Rates (tokens/s) and percentiles (s) of a closed loop's requests.

    `steady` leaves out the start and the tail: it is taken from the first completion to the last at which all clients
    still had a request in flight. `whole` is from the first sending to the last token.
    """
    first = sorted(times[0] - sent for sent, times in done)
    gaps = sorted(b - a for _, times in done for a, b in pairwise(times)) or [0.0]
    whole = sum(len(times) for _, times in done) / took_s
    return {
        "steady": steady_rate(done, clients) or whole,
        "whole": whole,
        "together": together_rate(done),
        "ttft_p50": quantile(first, 0.5),
        "ttft_p99": quantile(first, 0.99),
        "itl_p50": quantile(gaps, 0.5),
        "itl_p99": quantile(gaps, 0.99),
    }


def steady_rate(done: Sequence[Done], clients: int) -> float | None:
    """Tokens a second while `clients` requests were in flight, from the first completion on; None for one wave."""
    completions = sorted(times[-1] for _, times in done)
    if len(completions) <= clients:
        return None
    begin, end = completions[0], completions[-clients]
    if end <= begin:
        return None
    return sum(begin < moment <= end for _, times in done for moment in times) / (end - begin)


def together_rate(done: Sequence[Done]) -> float:
    """Tokens a second from when the last request has its first token until the first has its last; 0 if never."""
    begin, end = max(times[0] for _, times in done), min(times[-1] for _, times in done)
    return sum(begin < moment <= end for _, times in done for moment in times) / (end - begin) if end > begin else 0.0


def quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def fill_memory(contender: Contender, prompts: Sequence[Prompt], num_tokens: int) -> dict[str, float]:
    """Runs these requests together; the process's peak, and that of the tokens whose keys and values it held.

    The second is 0 of contenders that do not tell.
    """
    held: Callable[[], int] = getattr(contender, "held_tokens", lambda: 0)
    running, tokens = [contender.add(prompt, num_tokens) for prompt in prompts], 0
    left = [num_tokens] * len(prompts)
    while any(left):
        contender.step()
        left = [missing - request.take() for missing, request in zip(left, running, strict=True)]
        tokens = max(tokens, held())
    return {"peak_mb": peak_mb(), "held_tokens": tokens}


def peak_mb() -> float:
    """Most memory that this process ever had resident; getrusage would count its parent's before exec."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024


def _decode_arguments(ask: dict[str, Any]) -> tuple[Sequence[Prompt], int, int]:
    return ask["prompts"], ask["num_tokens"], ask["num_steps"]


def answer(contender: Contender, ask: dict[str, Any], between: Callable[[], None]) -> dict[str, Any]:
    match ask["cell"]:
        case "prefill":
            return {"first_s": time_first(contender, ask["prompts"])}
        case "decode":
            return {"segments_s": time_decode(contender, *_decode_arguments(ask), between)}
        case "loop":
            return run_closed_loop(contender, ask["prompts"], ask["clients"], ask["num_tokens"])
        case "memory":
            return fill_memory(contender, ask["prompts"], ask["num_tokens"])
    raise ValueError(f"cell {ask['cell']!r} is not known")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")  # peers print to standard output as they like
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    def between() -> None:
        reply({"pause": True})
        sys.stdin.readline()

    options = json.loads(sys.argv[2])
    contender: Contender = importlib.import_module(f"peers.{sys.argv[1]}").load(**options)
    loaded_s = time.time() - BEGAN
    time_first(contender, [list(range(100, 116))])
    reply({"loaded_s": loaded_s, "first_token_s": time.time() - BEGAN})
    while line := sys.stdin.readline():
        reply(answer(contender, json.loads(line), between))


if __name__ == "__main__":
    main()
