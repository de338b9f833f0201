"""ONNX Runtime GenAI, in process: a static batch of equal prompts, so no closed loop. Models: its own builder's."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime_genai as genai

from peers.worker import Prompt


class Request:
    def __init__(self) -> None:
        self.fresh = 0

    def take(self) -> int:
        fresh, self.fresh = self.fresh, 0
        return fresh


class StaticBatch:
    """Collects what is added until the first step; the batch then runs to its end."""

    def __init__(self, model: str, threads: int) -> None:
        config = genai.Config(model)
        options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
        config.overlay(json.dumps(options))
        self._model = genai.Model(config)
        self._prompts: list[Prompt] = []
        self._requests: list[Request] = []
        self._generator: genai.Generator | None = None
        self._left = 0

    def add(self, prompt: Prompt, num_tokens: int) -> Request:
        assert self._generator is None, "a static batch is running"
        self._prompts.append(prompt)
        self._requests.append(Request())
        self._left = num_tokens
        return self._requests[-1]

    def step(self) -> None:
        if self._generator is None:
            parameters = genai.GeneratorParams(self._model)
            length = len(self._prompts[0]) + self._left
            parameters.set_search_options(
                max_length=length, min_length=length, do_sample=False, batch_size=len(self._prompts)
            )
            self._generator = genai.Generator(self._model, parameters)
            self._generator.append_tokens(np.array(self._prompts, dtype=np.int32))
        self._generator.generate_next_token()
        for request in self._requests:
            request.fresh += 1
        self._left -= 1
        if self._left == 0:
            self._generator, self._prompts, self._requests = None, [], []


def load(model: str, threads: int = 2) -> StaticBatch:
    return StaticBatch(model, threads)
