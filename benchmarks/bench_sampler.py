"""Time to sample one step's rows: `python benchmarks/bench_sampler.py [--rows 32] [--vocab 151936] [--threads 2]`.

Prints milliseconds for all rows (best of --repeats, the three in turn) of the numpy sampler (one thread), the native
one, and PyTorch as it is usually written (where installed; without penalties and logprobs), and how many times faster
the native one is. Four kinds of rows: "sharp" is what a trained model gives (most mass on tens of tokens), "wide"
a normal distribution of standard deviation 3 (a nucleus of 13,000), "flat" one of 0.1 (140,000), "zipf" Zipf's law
with exponent 1.1 (80,000).
The time to copy the logits is not counted. With --cold, 160 MB of other memory are read after the copy, as the weights
of a step's last linear are, so that the logits have left the caches.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maitred.core.request import SamplingParams
from maitred.executor.native_sampler import NativeSampler
from maitred.executor.sampler import RequestSampler, sample_rows
from maitred.executor.sampler_state import LogitsRow
from maitred.kernels import _native

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy + 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "greedy + penalties": {"temperature": 0.0, **PENALTIES},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
    "min-p + penalties": {"min_p": 0.05, **PENALTIES},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50 + top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "top-k + top-p + penalties": {"top_k": 50, "top_p": 0.95, **PENALTIES},
    "top-p + penalties": {"top_p": 0.95, **PENALTIES},
    "top-p + penalties + 5 logprobs": {"top_p": 0.95, "logprobs": 5, **PENALTIES},
}
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 2000, 500


SampleRows = Callable[[LogitsRow, Sequence[RequestSampler]], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="count this thread's time alone; for --threads 1")
    parser.add_argument("--cold", action="store_true", help="logits lie in no cache")
    args = parser.parse_args()
    other_memory = np.ones(20_000_000 if args.cold else 0)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    native = NativeSampler(_native.ThreadPool(args.threads)).sample_rows
    print(f"{args.rows} rows x {args.vocab} tokens, ms for all rows; {_native.default_isa()}, {args.threads} threads")
    print(f"{'':32}{'':8}{'numpy':>9}{'torch':>9}{'native':>9}{'numpy/native':>14}{'torch/native':>14}")
    for name, params in CASES.items():
        samplers = make_samplers(args.rows, args.vocab, params)
        for shape, make in SHAPES.items():
            ways: dict[str, SampleRows] = {"numpy": sample_rows, "native": native}
            torch_way = torch_sampler(params, args.threads)
            if torch_way is not None:
                ways["torch"] = torch_way
            ms = best_ms(ways, make(args.rows, args.vocab), samplers, args.repeats, clock, other_memory)
            torch_ms = ms.get("torch", float("nan"))
            print(
                f"{name:32}{shape:8}{ms['numpy']:9.2f}{torch_ms:9.2f}{ms['native']:9.2f}"
                f"{ms['numpy'] / ms['native']:14.1f}{torch_ms / ms['native']:14.1f}"
            )


def logits(num_rows: int, vocab_size: int, scale: float) -> LogitsRow:
    return (np.random.default_rng(0).standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)


def sharp(num_rows: int, vocab_size: int) -> LogitsRow:
    rows_RV = logits(num_rows, vocab_size, 2.0)
    for row_V in rows_RV:
        row_V[np.random.default_rng(2).integers(0, vocab_size, 40)] += np.linspace(16, 8, 40, dtype=np.float32)
    return rows_RV


def zipf(num_rows: int, vocab_size: int) -> LogitsRow:
    ranks = np.random.default_rng(3).permuted(np.tile(np.arange(1, vocab_size + 1), (num_rows, 1)), axis=1)
    return (-1.1 * np.log(ranks)).astype(np.float32)


SHAPES: dict[str, Callable[[int, int], LogitsRow]] = {
    "sharp": sharp,
    "wide": lambda rows, vocab: logits(rows, vocab, 3.0),
    "flat": lambda rows, vocab: logits(rows, vocab, 0.1),
    "zipf": zipf,
}


def make_samplers(num_rows: int, vocab_size: int, params: dict[str, Any]) -> list[RequestSampler]:
    tokens = np.random.default_rng(1).integers(0, vocab_size, NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS).tolist()
    return [
        RequestSampler(
            SamplingParams(max_tokens=1000, **params),
            vocab_size=vocab_size,
            seed=row,
            sample_index=0,
            prompt_token_ids=tokens[:NUM_PROMPT_TOKENS],
            output_token_ids=tokens[NUM_PROMPT_TOKENS:],
        )
        for row in range(num_rows)
    ]


def torch_sampler(params: dict[str, Any], num_threads: int) -> SampleRows | None:
    """Sort for top-p, topk for top-k, softmax and multinomial; None without PyTorch or for what this leaves out."""
    if importlib.util.find_spec("torch") is None or set(params) - {"temperature", "top_k", "top_p", "min_p"}:
        return None
    import torch

    torch.set_num_threads(num_threads)

    def sample(logits_RV: LogitsRow, samplers: Sequence[RequestSampler]) -> Any:
        rows = torch.from_numpy(logits_RV)
        temperature = params.get("temperature", 1.0)
        if temperature == 0.0:
            return rows.argmax(dim=-1).tolist()
        rows = rows / temperature
        if "top_k" in params:
            rows.masked_fill_(rows < rows.topk(params["top_k"], dim=-1).values[:, -1:], -torch.inf)
        if "top_p" in params:
            ordered, ids = rows.sort(dim=-1)
            beyond = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - params["top_p"]
            rows.masked_fill_(torch.zeros_like(beyond).scatter_(1, ids, beyond), -torch.inf)
        weights = rows.softmax(dim=-1)
        if "min_p" in params:
            weights[weights < params["min_p"] * weights.amax(dim=-1, keepdim=True)] = 0.0
        return torch.multinomial(weights, 1).tolist()

    return sample


def best_ms(
    ways: dict[str, SampleRows],
    logits_RV: LogitsRow,
    samplers: Sequence[RequestSampler],
    repeats: int,
    clock: Callable[[], float],
    other_memory: NDArray[np.float64],
) -> dict[str, float]:
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, sample in ways.items():
            rows_RV = logits_RV.copy()
            other_memory.sum()
            began = clock()
            sample(rows_RV, samplers)
            best[name] = min(best[name], (clock() - began) * 1e3)
    return best


if __name__ == "__main__":
    main()
