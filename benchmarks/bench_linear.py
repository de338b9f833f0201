"""The native library's linears against what the machine can do.

    python benchmarks/bench_linear.py [--shapes qwen3|llama|1024x4096,...] [--rows 1,8] [--dtypes bfloat16,int8]

For each format, shape (K x N) and number of rows M: microseconds (preparing the rows and both barriers included), GB/s
of weights, GOP/s, and the share of the floor: the larger of weights over the streaming read and operations over the
peak of registers, both measured in turn with the kernel. The best of many tries counts on all sides, for other programs
on the machine only ever slow things down. A small matrix has copies, one behind the other and more than a cache apart,
so weights come from memory as in a step. A share over 1 says that the memory was faster while the kernel ran than while
it was probed.
"""

from __future__ import annotations

import argparse
import os

import numpy as np

from maitred.kernels import _native, linear


class Machine:
    """Threads, each on a core of its own (under load two may else take turns on one), and this minute's speed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.isa, self.pool = options.isa, _native.ThreadPool(options.threads)
        if options.threads > 1:
            self.pool.bind(sorted(os.sched_getaffinity(0)))
        self._memory = linear.allocate(64 << 20)
        self._memory[:] = 1

    def stream(self) -> float:
        """Bytes a second, all threads; the best of short reads."""
        pieces = (self._memory[at : at + PROBE_BYTES] for at in range(0, len(self._memory), PROBE_BYTES))
        return float(max(_native.measure_stream(self.isa, self.pool, piece, 1) for piece in pieces))

    def peak(self, dtype: str) -> float:
        """Operations a second in registers, all threads."""
        return float(_native.measure_peak(self.isa, self.pool, dtype, 2))


SHAPES = {
    "qwen3": "1024x4096,2048x1024,1024x6144,3072x1024,1024x151936",
    "llama": "2048x3072,2048x2048,2048x16384,8192x2048,2048x128256",
}
PROBE_BYTES = 4 << 20
COLD_BYTES = 128 << 20  # of copies: several times any last-level cache's share


def linears(machine: Machine, options: argparse.Namespace) -> None:
    print(f"{'format':10}{'K x N':>14}{'M':>5}{'us':>9}{'GB/s':>8}{'GOP/s':>8}{'of floor':>10}")
    for shape in SHAPES.get(options.shapes, options.shapes).split(","):
        k, n = (int(number) for number in shape.split("x"))
        matrix = np.random.default_rng(0).standard_normal((n, k), dtype=np.float32)
        for dtype in options.dtypes.split(","):
            weights = linear.pack(machine.pool, [linear.SourceMatrix(matrix)], dtype)
            for m in [int(m) for m in options.rows.split(",") if n < 100_000 or int(m) <= 64]:
                print(
                    f"{dtype:10}{shape:>14}{m:>5}{linear_row(machine, weights, dtype, m, options.rounds)}", flush=True
                )


def linear_row(machine: Machine, weights: linear.PackedWeights, dtype: str, m: int, rounds: int) -> str:
    num_bytes, operations = weights.shape.packed_bytes, 2.0 * m * weights.shape.n * weights.shape.k
    stride = -(-num_bytes // 4096) * 4096
    num_copies = max(1, min(COLD_BYTES // stride, 200 // m))
    copies = linear.allocate(stride * num_copies)
    for i in range(num_copies):
        copies[i * stride : i * stride + num_bytes] = weights.data[:num_bytes]
    seconds, stream, peak = float("inf"), 0.0, 0.0
    for _ in range(rounds):
        stream = max(stream, machine.stream())
        took = _native.time_linear(machine.isa, machine.pool, weights.shape, copies, num_copies, m, 2)
        seconds, peak = min(seconds, took), max(peak, machine.peak(dtype))
    floor = max(num_bytes / stream, operations / peak)
    rates = f"{num_bytes / seconds / 1e9:8.1f}{operations / seconds / 1e9:8.0f}"
    return f"{seconds * 1e6:9.0f}{rates}{floor / seconds:10.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default=_native.default_isa())
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtypes", default="bfloat16,int8,q4_1,q8_0")
    parser.add_argument("--shapes", default="qwen3", help="qwen3, llama, or KxN,KxN,...")
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,512")
    options = parser.parse_args()
    machine = Machine(options)
    print(f"{options.isa}, {options.threads} threads")
    linears(machine, options)


if __name__ == "__main__":
    main()
