"""vLLM's CPU build, in process: its engine stepped by the caller, compiled, bfloat16."""

from __future__ import annotations

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import EngineArgs, LLMEngine, SamplingParams  # reads the environment when imported

from peers.worker import Prompt


class Request:
    def __init__(self) -> None:
        self.seen = self.fresh = 0

    def take(self) -> int:
        fresh, self.fresh = self.fresh, 0
        return fresh


class Engine:
    def __init__(self, arguments: EngineArgs) -> None:
        self._engine = LLMEngine.from_engine_args(arguments)
        self._live: dict[str, Request] = {}
        self._next_id = 0

    def add(self, prompt: Prompt, num_tokens: int) -> Request:
        self._next_id += 1
        name = f"r{self._next_id}"
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        self._live[name] = Request()
        return self._live[name]

    def step(self) -> None:
        for output in self._engine.step():
            request, count = self._live[output.request_id], len(output.outputs[0].token_ids)
            request.fresh += count - request.seen
            request.seen = count
            if output.finished:
                del self._live[output.request_id]


def load(model: str, chunk: int = 2048) -> Engine:
    return Engine(
        EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )
