"""maitred's own engine, in process: the parts that `maitred serve` wires, stepped by the caller."""

from __future__ import annotations

from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from maitred.core.clock import WallClock
from maitred.core.request import SamplingParams
from maitred.engine.build import build_parts
from maitred.engine.intake import make_requests
from peers.worker import Prompt

BLOCK_TOKENS = 16


class Request:
    def __init__(self) -> None:
        self.fresh = 0

    def take(self) -> int:
        fresh, self.fresh = self.fresh, 0
        return fresh


class Engine:
    def __init__(self, config: EngineConfig) -> None:
        self._clock = WallClock()
        self._parts = build_parts(config, clock=self._clock)
        self._live: dict[str, Request] = {}
        self._next_id = 0

    def add(self, prompt: Prompt, num_tokens: int) -> Request:
        self._next_id += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        (request,) = make_requests(
            self._parts.model,
            list(prompt),
            sampling,
            request_id=f"r{self._next_id}",
            now=self._clock.now(),
            add_special_tokens=False,
        )
        self._parts.core.add(request)
        self._live[request.request_id] = Request()
        return self._live[request.request_id]

    def step(self) -> None:
        for progress in self._parts.core.step():
            self._live[progress.request_id].fresh += len(progress.new_token_ids)
            if progress.finish_reason is not None:
                del self._live[progress.request_id]

    def held_tokens(self) -> int:
        return self._parts.core.stats.num_blocks_used * BLOCK_TOKENS


def load(
    model: str,
    threads: int = 2,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    chunk: int | None = None,
    max_num_seqs: int = 32,
    executor: str = "native",
) -> Engine:
    """`chunk` is a step's token budget; without one it is the default, as in `maitred serve`."""
    budget = {} if chunk is None else {"max_num_batched_tokens": chunk}
    config = EngineConfig(
        model=ModelConfig(
            model=model, dtype=dtype, kv_dtype=kv_dtype, num_threads=threads, executor=executor, max_model_len=4096
        ),
        cache=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, **budget),
    )
    return Engine(config)
