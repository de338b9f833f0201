"""Rates of the native linears: `python benchmarks/bench_linear.py [--shapes qwen3|llama|1024x4096,...] [--rows 1,8]`.

For each format, shape (K x N) and number of rows M: microseconds (preparing the rows and both barriers included), GB/s
of weights, GOP/s, and how much of the floor it reaches: the larger of weights over the streaming read and operations
over the peak of registers, both measured in turn with the kernel in the same run. The best of many tries counts on
all sides, for other programs on the machine only ever slow things down. Where a matrix is small, its copies lie one
behind the other and more than a cache apart, so weights come from memory as in a step. A ratio over 1 says that the
memory was faster while the kernel ran than while it was probed.

With PyTorch installed, `F.linear` in bfloat16 (oneDNN, as a model calls it) beside it; on a busy machine its threads
wait for each other, and the ratio says little.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from typing import Any, NamedTuple

import numpy as np

from maitred.kernels import _native, linear
from maitred.kernels.linear import PackedWeights, SourceMatrix

SHAPES = {
    "qwen3": "1024x4096,2048x1024,1024x6144,3072x1024,1024x151936",
    "llama": "2048x3072,2048x2048,2048x16384,8192x2048,2048x128256",
}
COLD_BYTES = 128 << 20  # of copies: several times any last-level cache's share
PROBE_BYTES = 4 << 20


class Rates(NamedTuple):
    """The best seen: seconds of a product, bytes a second of the streaming read, operations a second of registers."""

    product_s: float
    stream: float
    peak: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3", help="qwen3, llama, or KxN,KxN,...")
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,512")
    parser.add_argument("--dtypes", default="bfloat16,int8,q4_1,q8_0")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default=_native.default_isa())
    parser.add_argument("--tries", type=int, default=4)
    args = parser.parse_args()
    shapes = {s: tuple(int(number) for number in s.split("x")) for s in SHAPES.get(args.shapes, args.shapes).split(",")}
    rows = {s: [int(m) for m in args.rows.split(",") if n < 100_000 or int(m) <= 64] for s, (_, n) in shapes.items()}
    others = torch_seconds(args.threads, shapes, rows)  # before threads are bound to cores, which torch's would inherit
    pool = pinned_pool(args.threads)
    memory = linear.allocate(64 << 20)
    memory[:] = 1
    print(f"{args.isa}, {args.threads} threads")
    heads = f"{'us':>9}{'GB/s':>8}{'GOP/s':>8}{'of floor':>10}{'torch bf16 / this':>19}"
    print(f"{'format':10}{'K x N':>14}{'M':>5}{heads}")
    for shape, (k, n) in shapes.items():
        matrix = np.random.default_rng(0).standard_normal((n, k), dtype=np.float32)
        for dtype in args.dtypes.split(","):
            weights = linear.pack(pool, [SourceMatrix(matrix)], dtype)
            for m in rows[shape]:
                rates = measure(args.isa, pool, weights, dtype, m, memory, args.tries)
                print_row(dtype, shape, m, weights, rates, others.get((shape, m)))


def pinned_pool(num_threads: int) -> Any:
    """Each thread on a core of its own (Linux): under load two of them may else take turns on one, at every barrier."""
    pool = _native.ThreadPool(num_threads)
    if num_threads > 1:
        pool.bind(sorted(os.sched_getaffinity(0)))
    return pool


def measure(isa: str, pool: Any, weights: PackedWeights, dtype: str, m: int, memory: Any, tries: int) -> Rates:
    num_bytes = weights.shape.packed_bytes
    stride = -(-num_bytes // 4096) * 4096
    num_copies = max(1, min(COLD_BYTES // stride, 200 // m))
    copies = linear.allocate(stride * num_copies)
    for i in range(num_copies):
        copies[i * stride : i * stride + num_bytes] = weights.data[:num_bytes]
    best = Rates(float("inf"), 0.0, 0.0)
    for _ in range(tries):
        stream = max(
            _native.measure_stream(isa, pool, memory[at : at + PROBE_BYTES], 1)
            for at in range(0, len(memory), PROBE_BYTES)
        )
        seconds = _native.time_linear(isa, pool, weights.shape, copies, num_copies, m, 2)
        peak = _native.measure_peak(isa, pool, dtype, 2)
        best = Rates(min(best.product_s, seconds), max(best.stream, stream), max(best.peak, peak))
    return best


def print_row(dtype: str, shape: str, m: int, weights: PackedWeights, rates: Rates, torch_s: float | None) -> None:
    num_bytes, operations = weights.shape.packed_bytes, 2.0 * m * weights.shape.n * weights.shape.k
    floor = max(num_bytes / rates.stream, operations / rates.peak)
    other = f"{torch_s / rates.product_s:18.1f}x" if torch_s else f"{'-':>19}"
    print(
        f"{dtype:10}{shape:>14}{m:>5}{rates.product_s * 1e6:9.0f}{num_bytes / rates.product_s / 1e9:8.1f}"
        f"{operations / rates.product_s / 1e9:8.0f}{floor / rates.product_s:10.2f}{other}",
        flush=True,
    )


def torch_seconds(num_threads: int, shapes: Any, rows: Any) -> dict[tuple[str, int], float]:
    """F.linear in bfloat16 by shape and number of rows, over copies as above; nothing without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    torch.set_num_threads(num_threads)
    best: dict[tuple[str, int], float] = {}
    for shape, (k, n) in shapes.items():
        copies = [torch.randn(n, k, dtype=torch.bfloat16) for _ in range(max(1, COLD_BYTES // (2 * n * k)))]
        for m in rows[shape]:
            x = torch.randn(m, k, dtype=torch.bfloat16)
            for copy in (copies * 2)[: max(2, 200 // m)]:
                start = time.perf_counter()
                with torch.inference_mode():
                    torch.nn.functional.linear(x, copy)
                best[shape, m] = min(best.get((shape, m), float("inf")), time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
