"""Single steps of a wired engine, timed: rows that decode together, and one prompt's prefill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from random import Random

from maitred.engine.build import EngineParts
from maitred.engine.intake import make_requests
from maitred.errors import ConfigError
from maitred.request import SamplingParams

PREFILL_REPEATS = 3


class TimedEngine:
    """Steps an engine that nobody else steps. Prompts are random tokens, no two alike."""

    def __init__(self, parts: EngineParts, max_num_batched_tokens: int) -> None:
        self._parts, self._token_budget = parts, max_num_batched_tokens
        self._rng, self._num_requests = Random(0), 0

    def decode_s(self, batch: int, context: int, num_steps: int) -> float:
        """Median time (s) of a step in which `batch` requests decode, around `context` tokens each.

        Raises ConfigError when the engine has not the slots or the memory for them.
        """
        # Those whose prompts come first decode while the others are prefilled: they end later and are ahead meanwhile.
        staggered = 2 + 2 * batch * context // self._token_budget
        prompt = max(1, context - (num_steps + staggered) // 2)
        requests = [self._add(prompt, num_steps + staggered) for _ in range(batch)]
        counts = dict.fromkeys(requests, 0)
        took: list[float] = []
        while self._parts.core.has_work and len(took) < num_steps:
            before = dict(counts)
            began = time.perf_counter()
            progress = self._parts.core.step()
            ended = time.perf_counter()
            for p in progress:
                counts[p.request_id] += len(p.new_token_ids)
            if all(before.values()) and all(counts[r] == before[r] + 1 for r in requests):
                took.append(ended - began)
        for request_id in requests:
            self._parts.core.abort(request_id)
        if not took:
            raise ConfigError(
                f"no step had all of {batch} requests of {context} tokens; raise --max-num-seqs or "
                f"--kv-cache-memory-bytes, or ask for a smaller --batch"
            )
        return statistics.median(took)

    def prefill_s(self, num_tokens: int) -> float:
        """Median time (s) from adding a prompt to its first token, over as many steps as it takes."""
        return statistics.median(self._one_prefill(num_tokens) for _ in range(PREFILL_REPEATS))

    def _one_prefill(self, num_tokens: int) -> float:
        self._add(num_tokens, 1)
        began = time.perf_counter()
        while self._parts.core.has_work:
            self._parts.core.step()
        return time.perf_counter() - began

    def _add(self, prompt_tokens: int, output_tokens: int) -> str:
        model = self._parts.model
        self._num_requests += 1
        tokens: Sequence[int] = self._rng.choices(range(model.vocab_size), k=prompt_tokens)
        (request,) = make_requests(
            model,
            tokens,
            SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
            request_id=f"roofline-{self._num_requests}",
            now=time.monotonic(),
            add_special_tokens=False,
        )
        self._parts.core.add(request)
        return request.request_id
