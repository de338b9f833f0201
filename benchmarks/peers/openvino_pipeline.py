"""OpenVINO GenAI's continuous batching, in process. Models come from `optimum-cli export openvino`."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai

from peers.worker import Prompt


class Request:
    def __init__(self, handle: genai.GenerationHandle) -> None:
        self._handle = handle

    def take(self) -> int:
        if not self._handle.can_read():
            return 0
        return sum(len(output.generated_ids) for output in self._handle.read().values())


class Pipeline:
    def __init__(
        self, model: str, threads: int, precision: str | None, kv: str | None, chunk: int, cache_gb: int
    ) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.max_num_batched_tokens = chunk
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": threads}
        if precision:
            properties["INFERENCE_PRECISION_HINT"] = precision
        if kv:
            properties["KV_CACHE_PRECISION"] = kv
        self._pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._next_id = 0

    def add(self, prompt: Prompt, num_tokens: int) -> Request:
        config = genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._next_id += 1
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        return Request(self._pipe.add_request(self._next_id, ids, config))

    def step(self) -> None:
        self._pipe.step()


def load(
    model: str,
    threads: int = 2,
    precision: str | None = None,
    kv: str | None = None,
    chunk: int = 2048,
    cache_gb: int = 4,
) -> Pipeline:
    return Pipeline(model, threads, precision, kv, chunk, cache_gb)
