"""Time to sample one step's rows: `python benchmarks/bench_sampler.py [--rows 32] [--vocab 151936]`.

Prints milliseconds for all rows (best of --repeats) and the ratio to greedy in the same run. Two kinds of rows:
"peaked" has the shape of a language model's logits (most mass on few tokens), "flat" is the worst case for top-p.
One thread; the time to copy the logits is not counted.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from maitred.executor.sampler import RequestSampler, sample_rows
from maitred.executor.sampler_state import LogitsRow
from maitred.request import SamplingParams

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy + 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50 + top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "top-p + penalties + 5 logprobs": {"top_p": 0.95, "logprobs": 5, **PENALTIES},
}
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 2000, 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.rows} rows x {args.vocab} tokens, ms for all rows (ratio to greedy)")
    print(f"{'':32}{'peaked':>20}{'flat':>20}")
    greedy: dict[str, float] = {}
    for name, params in CASES.items():
        cells = []
        for shape, scale in (("peaked", 3.0), ("flat", 0.1)):
            taken_s = best_time(logits(args.rows, args.vocab, scale), params, args.repeats)
            cells.append(f"{taken_s * 1e3:9.2f} ({taken_s / greedy.setdefault(shape, taken_s):6.1f}x)")
        print(f"{name:32}" + "".join(f"{cell:>20}" for cell in cells))


def logits(num_rows: int, vocab_size: int, scale: float) -> LogitsRow:
    return (np.random.default_rng(0).standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)


def best_time(logits_RV: LogitsRow, params: dict[str, Any], repeats: int) -> float:
    num_rows, vocab_size = logits_RV.shape
    tokens = np.random.default_rng(1).integers(0, vocab_size, NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS).tolist()
    samplers = [
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
    best_s = float("inf")
    for _ in range(repeats):
        rows_RV = logits_RV.copy()
        began = time.perf_counter()
        sample_rows(rows_RV, samplers)
        best_s = min(best_s, time.perf_counter() - began)
    return best_s


if __name__ == "__main__":
    main()
