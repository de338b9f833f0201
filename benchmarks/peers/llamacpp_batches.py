"""llama.cpp through its Python bindings, in process: one `llama_decode` a step, prompts first, as its own server does.

Models: its own converter and quantiser. Each sequence has its own part of the KV cache (float16, the default).
"""

from __future__ import annotations

import ctypes

import llama_cpp as library
import numpy as np

from peers.worker import Prompt

BATCH_TOKENS, COMPUTE_TOKENS = 2048, 512  # n_batch and n_ubatch, the defaults of its server


class Request:
    def __init__(self, slot: int, prompt: Prompt, num_tokens: int) -> None:
        self.slot, self.left = slot, num_tokens
        self.pending = list(prompt)  # tokens that the model has not read yet
        self.position = self.fresh = 0

    def take(self) -> int:
        fresh, self.fresh = self.fresh, 0
        return fresh


class Batches:
    def __init__(self, model: str, threads: int, sequences: int, context: int) -> None:
        library.llama_backend_init()
        loaded = library.llama_model_load_from_file(model.encode(), library.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp could not load {model}")
        parameters = library.llama_context_default_params()
        parameters.n_seq_max, parameters.n_ctx = sequences, sequences * context
        parameters.n_batch, parameters.n_ubatch = BATCH_TOKENS, COMPUTE_TOKENS
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.kv_unified = False
        self._context = library.llama_init_from_model(loaded, parameters)
        self._memory = library.llama_get_memory(self._context)
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded))
        self._batch = library.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._free = list(range(sequences))[::-1]
        self._live: list[Request] = []

    def add(self, prompt: Prompt, num_tokens: int) -> Request:
        request = Request(self._free.pop(), prompt, num_tokens)
        self._live.append(request)
        return request

    def step(self) -> None:
        self._batch.n_tokens = 0
        sampling = [(request, at) for request in self._live if (at := self._feed(request)) is not None]
        if (code := library.llama_decode(self._context, self._batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        for request, at in sampling:
            self._note(request, self._greedy(at))

    def _feed(self, request: Request) -> int | None:
        """Put what fits of the request's pending tokens in the batch; the row whose logits it needs, if any."""
        batch, room = self._batch, BATCH_TOKENS - self._batch.n_tokens
        chunk, request.pending = request.pending[:room], request.pending[room:]
        for token in chunk:
            row = batch.n_tokens
            batch.token[row], batch.pos[row] = token, request.position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, request.slot
            batch.logits[row] = 0
            batch.n_tokens, request.position = row + 1, request.position + 1
        if request.pending or not chunk:
            return None
        batch.logits[batch.n_tokens - 1] = 1
        return int(batch.n_tokens) - 1

    def _greedy(self, row: int) -> int:
        logits = library.llama_get_logits_ith(self._context, row)
        values = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))
        return int(values.argmax())

    def _note(self, request: Request, token: int) -> None:
        request.fresh, request.left = request.fresh + 1, request.left - 1
        request.pending = [token]
        if request.left == 0:
            library.llama_memory_seq_rm(self._memory, request.slot, -1, -1)
            self._live.remove(request)
            self._free.append(request.slot)


def load(model: str, threads: int = 2, sequences: int = 1, context: int = 4096) -> Batches:
    return Batches(model, threads, sequences, context)
