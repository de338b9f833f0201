"""Copying a context's KV to the host and back against computing it again: both measured, and where they break even.

    python benchmarks/bench_swap.py [--model DIR] [--device cpu|cuda]

"recompute" is the prefill of a fresh prompt of that many tokens through the executor. "out + in" are copies of its
blocks through the executor's host pool. The last column is what the scheduler decides with what the engine would have
measured: the pool's bandwidths, and the time of a prompt's token in the chunks of the longest prompt.
Then the same requests in an engine whose cache is too small for them, with and without host memory, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from maitred import LLM, SamplingParams
from maitred.core.step import BlockCopy
from maitred.scheduler.swap import SwapCosts, worth_swapping

BLOCK_SIZE = 16
REPEATS = 5


def measure_both(args: argparse.Namespace) -> None:
    with LLM(
        args.model,
        device=args.device,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        block_size=BLOCK_SIZE,
        swap_memory_bytes=1 << 28,
        enable_prefix_caching=False,
    ) as llm:
        core, plan = llm._open().core, llm.memory_plan
        host = core._executor._host
        torch.set_num_threads(core._executor._num_threads or torch.get_num_threads())  # as in a step
        bandwidth = host.measure()
        print(
            f"blocks of {plan.bytes_per_block:,} bytes; {bandwidth.out_bytes_per_s / 1e9:.2f} GB/s out, "
            f"{bandwidth.in_bytes_per_s / 1e9:.2f} GB/s in"
        )
        lengths = [n for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if n < plan.max_model_len - 1]
        recompute = {n: min(prefill_s(llm, n) for _ in range(REPEATS)) for n in lengths}
        prefill_s_per_token = recompute[lengths[-1]] / lengths[-1]
        costs = SwapCosts(plan.bytes_per_block, *bandwidth, prefill_s_per_token)
        print(f"{'tokens':>8} {'recompute ms':>13} {'out + in ms':>12} {'ratio':>7}   the rule")
        for n in lengths:
            num_blocks = min(-(-n // BLOCK_SIZE), host.num_blocks)
            copies = [BlockCopy(i, i) for i in range(num_blocks)]
            copy_s = min(host._timed(lambda: (host.copy_out(copies), host.copy_in(copies))) for _ in range(REPEATS))  # noqa: B023
            decides = "swap" if worth_swapping(costs, num_blocks, n) else "recompute"
            print(f"{n:8} {recompute[n] * 1e3:13.2f} {copy_s * 1e3:12.2f} {recompute[n] / copy_s:7.1f}   {decides}")


def prefill_s(llm: LLM, num_tokens: int) -> float:
    core = llm._open().core
    before = core.execute_s
    llm.generate([[3 + i % 200 for i in range(num_tokens)]], SamplingParams(max_tokens=1))
    return core.execute_s - before


def serve_in_a_small_cache(args: argparse.Namespace) -> None:
    print("\n24 requests of 200 + 150 tokens, 8 at once, in a cache for 3 of them, prefix cache off:")
    walls: dict[bool, list[float]] = {False: [], True: []}
    texts: dict[bool, list[list[int]]] = {}
    totals: dict[bool, str] = {}
    prompts = [[5 + (i * 31 + j * 7) % 300 for j in range(200)] for i in range(24)]
    sampling = [SamplingParams(temperature=0.8, seed=i, max_tokens=150, ignore_eos=True) for i in range(24)]
    with LLM(args.model, device=args.device, max_model_len=512, block_size=BLOCK_SIZE) as llm:
        kv_bytes = 66 * llm.memory_plan.bytes_per_block
    for _ in range(3):
        for swap in (False, True):
            with LLM(
                args.model,
                device=args.device,
                max_num_seqs=8,
                max_model_len=512,
                block_size=BLOCK_SIZE,
                kv_cache_memory_bytes=kv_bytes,
                swap_memory_bytes=1 << 26 if swap else 0,
                enable_prefix_caching=False,
            ) as llm:
                started = time.perf_counter()
                outputs = llm.generate(prompts, sampling)
                walls[swap].append(time.perf_counter() - started)
                texts[swap] = [list(output.outputs[0].token_ids) for output in outputs]
                stats = llm._open().core.stats
            totals[swap] = (
                f"{stats.num_preemptions} preemptions, {stats.num_scheduled_tokens:,} tokens computed, "
                f"{stats.num_swapped_out_blocks:,} blocks swapped out"
            )
    recompute, swap_s = statistics.median(walls[False]), statistics.median(walls[True])
    print(f"  recompute: {totals[False]}\n  swap:      {totals[True]}")
    print(
        f"  recompute {recompute:.2f} s, swap {swap_s:.2f} s, ratio {recompute / swap_s:.2f}; "
        f"tokens {'equal' if texts[False] == texts[True] else 'DIFFER'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="maitred-mini")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    measure_both(args)
    serve_in_a_small_cache(args)


if __name__ == "__main__":
    main()
