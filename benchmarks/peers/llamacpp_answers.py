"""Greedy answers of llama.cpp, by the package `xllamacpp`: JSON of model, prompts, num_tokens in, lists of tokens out.

Runs in an environment of its own, so it imports nothing of maitred.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import xllamacpp


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")  # the library prints to standard output as it likes
    os.dup2(2, 1)
    ask = json.load(sys.stdin)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = ask["model"]
    parameters.verbosity = 1  # errors alone
    parameters.n_ctx, parameters.n_parallel = 2048, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1  # others have work on this machine too
    server = xllamacpp.Server(parameters)
    json.dump([greedy(server, prompt, ask["num_tokens"]) for prompt in ask["prompts"]], replies)
    replies.close()


def greedy(server: Any, prompt: list[int], num_tokens: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": 1, "cache_prompt": False}
    answer = server.handle_completions(body)
    return [token["id"] for token in answer["choices"][0]["logprobs"]["content"]]


if __name__ == "__main__":
    main()
