"""The native library's kernels against what the machine can do: linears and paged attention.

    python benchmarks/bench_kernels.py [linear] [attention] [--threads 2] [--isa avx512] [--rounds 4]
        [--shapes qwen3|llama|1024x4096,...] [--rows 1,8] [--dtypes bfloat16,int8]

The best of many tries counts on all sides, for other programs on the machine only ever slow things down.

`linear`: for each format, shape (K x N) and number of rows M: microseconds (preparing the rows and both barriers
included), GB/s of weights, GOP/s, and the share of the floor: the larger of weights over the streaming read and
operations over the peak of registers, both measured in turn with the kernel. A small matrix has copies, one behind the
other and more than a cache apart, so weights come from memory as in a step. A share over 1 says that the memory was
faster while the kernel ran than while it was probed.

`attention`: Qwen3-0.6B's shape over blocks in random order; decode against the streaming read (K and V of the tokens
seen, without padding), prefill against the bf16 peak (4 * head size operations for each pair of a query and a seen
token). Each round probes, runs the cell and probes again, for memory has slow and fast minutes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maitred.kernels import _native, linear
from maitred.kernels.kv_pool import make_kv_pool


class Machine:
    """Threads, each on a core of its own (under load two may else take turns on one), and this minute's speed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.isa, self.pool = options.isa, _native.ThreadPool(options.threads)
        if options.threads > 1:
            self.pool.bind(sorted(os.sched_getaffinity(0)))
        self._memory = linear.allocate(1 << 29)
        self._memory[:] = 1

    def stream(self) -> float:
        """Bytes a second, all threads."""
        return float(_native.measure_stream(self.isa, self.pool, self._memory, 1))

    def peak(self, dtype: str = "bfloat16") -> float:
        """Operations a second in registers, all threads."""
        return float(_native.measure_peak(self.isa, self.pool, dtype, 2))


# ---- linears

SHAPES = {
    "qwen3": "1024x4096,2048x1024,1024x6144,3072x1024,1024x151936",
    "llama": "2048x3072,2048x2048,2048x16384,8192x2048,2048x128256",
}
COLD_BYTES = 128 << 20  # of copies: several times any last-level cache's share


def linears(machine: Machine, options: argparse.Namespace) -> None:
    print(f"{'format':10}{'K x N':>14}{'M':>5}{'us':>9}{'GB/s':>8}{'GOP/s':>8}{'of floor':>10}")
    for shape in SHAPES.get(options.shapes, options.shapes).split(","):
        k, n = (int(number) for number in shape.split("x"))
        matrix = np.random.default_rng(0).standard_normal((n, k), dtype=np.float32)
        for dtype in (options.dtypes or "bfloat16,int8,q4_1,q8_0").split(","):
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


# ---- attention

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 28, 16, 8, 128, 16
Q_WIDTH, QKV_WIDTH = NUM_HEADS * HEAD_DIM, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
DECODE = [(1, 512), (1, 4096), (1, 16384), (8, 576), (32, 576), (32, 2048)]  # requests, and context of each
PREFILL = [(256, 0), (512, 0), (2048, 0), (256, 2048), (512, 8192)]  # tokens of a chunk, and the context before it
PREFILL_LAYERS = 4


class Attention:
    """A program that writes a step's keys and values into one layer, then attends to `num_layers`, one by one."""

    def __init__(self, pool: _native.KVPool, machine: Machine, max_tokens: int, num_layers: int) -> None:
        self._program = program = _native.Program(machine.pool, pool, machine.isa, max_tokens, 1, 1, 1 << 20)
        self._qkv, out = program.rows(QKV_WIDTH), program.rows(Q_WIDTH)
        program.qkv(0, NUM_HEADS, self._qkv, None, None, None, False, 1e-6)
        reader = _native.LinearShape("float32", 1, Q_WIDTH)
        for layer in range(num_layers):
            program.attention(layer, NUM_HEADS, 0, HEAD_DIM**-0.5, 0.0, out, reader)
        program.begin_logits()
        program.set_profiling(True)

    def run(self, rows: list[tuple[int, int]], tables: list[list[int]], rng: np.random.Generator) -> None:
        """A step of rows (start, tokens) with random queries, keys and values."""
        num_tokens = sum(n for _, n in rows)
        self._qkv.view(num_tokens)[:] = rng.standard_normal((num_tokens, QKV_WIDTH), dtype=np.float32)
        positions = [np.arange(start, start + n) for start, n in rows]
        arrays = [np.zeros(num_tokens), np.concatenate(positions), ends_of(positions), np.concatenate(tables)]
        self._step = [array.astype(np.int32) for array in (*arrays, ends_of(tables), np.empty(0))]
        self.seconds()

    def seconds(self) -> float:
        """Of attention alone in the last step, run again."""
        self._program.run(*self._step)
        return sum(ns for name, ns in self._program.profile() if name == "attention") / 1e9


def ends_of(parts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.cumsum([0, *(len(part) for part in parts)])


def attention_over(dtype: str, machine: Machine, rows: list[tuple[int, int]], num_layers: int) -> Attention:
    """A step of rows (start, tokens) over a pool full of random keys and values in shuffled blocks."""
    counts = [-(-(start + n) // BLOCK_SIZE) for start, n in rows]
    pool = make_kv_pool(
        dtype=dtype,
        num_layers=num_layers,
        num_blocks=sum(counts),
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
    )
    pool.touch(machine.pool)
    rng = np.random.default_rng(0)
    ids = rng.permutation(sum(counts)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    writer = Attention(pool, machine, BLOCK_SIZE, 0)
    for table in tables:  # one layer is written, and copied to the others
        for first in range(0, len(table) * BLOCK_SIZE, BLOCK_SIZE):
            writer.run([(first, BLOCK_SIZE)], [table], rng)
    for block in range(pool.num_blocks):
        for other in range(1, num_layers):
            pool.block_view(other, block)[:] = pool.block_view(0, block)
    attention = Attention(pool, machine, sum(n for _, n in rows), num_layers)
    attention.run(rows, tables, rng)
    return attention


def best_share(attention: Attention, work: float, probe: Callable[[], float], options: argparse.Namespace) -> Any:
    """(seconds, share of the better probe beside it) of the round with the best share."""
    found = []
    for _ in range(options.rounds):
        before, repeats = probe(), max(1, int(options.work / work))
        seconds = min(attention.seconds() for _ in range(repeats))
        found.append((work / seconds / max(before, probe()), seconds))
    share, seconds = max(found)
    return seconds, share


def attention(machine: Machine, options: argparse.Namespace) -> None:
    print(f"stream {machine.stream() / 1e9:.1f} GB/s, bf16 peak {machine.peak() / 1e12:.2f} TFLOP/s", flush=True)
    for dtype in (options.dtypes or "bfloat16,int8").split(","):
        token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * VALUE_BYTES[dtype] + (8 * NUM_KV_HEADS if dtype == "int8" else 0)
        for requests, context in DECODE[: options.cells]:
            cell = attention_over(dtype, machine, [(context - 1, 1)] * requests, NUM_LAYERS)
            num_bytes, options.work = NUM_LAYERS * requests * context * token_bytes, 2e9
            seconds, share = best_share(cell, num_bytes, machine.stream, options)
            told = f"{seconds * 1e3:8.2f} ms a step, {num_bytes / seconds / 1e9:6.1f} GB/s, {share:6.1%} of the stream"
            print(f"decode  {dtype:9} {requests:5} x {context:9}: {told}", flush=True)
        for tokens, context in PREFILL[: options.cells]:
            cell = attention_over(dtype, machine, [(context, tokens)], PREFILL_LAYERS)
            pairs = tokens * context + tokens * (tokens + 1) // 2
            operations, options.work = PREFILL_LAYERS * 4 * NUM_HEADS * HEAD_DIM * pairs, 1e11
            seconds, share = best_share(cell, operations, machine.peak, options)
            whole_ms = seconds * NUM_LAYERS / PREFILL_LAYERS * 1e3
            told = (
                f"{whole_ms:8.2f} ms a step, {operations / seconds / 1e12:6.3f} TFLOP/s, {share:6.1%} of the bf16 peak"
            )
            print(f"prefill {dtype:9} {tokens:5} after {context:5}: {told}", flush=True)


PARTS = {"linear": linears, "attention": attention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default=_native.default_isa())
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtypes", help="of linears or of KV")
    parser.add_argument("--shapes", default="qwen3", help="of linears: qwen3, llama, or KxN,KxN,...")
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,512", help="of linears")
    parser.add_argument("--cells", type=int, help="of attention: only so many of each kind, from the first")
    options = parser.parse_args()
    machine = Machine(options)
    print(f"{options.isa}, {options.threads} threads")
    for part in options.parts or PARTS:
        PARTS[part](machine, options)


if __name__ == "__main__":
    main()
