"""Paged attention against what the machine can do: decode against the streaming read, prefill against the bf16 peak.

    python benchmarks/bench_attention.py [--threads 2] [--dtypes bfloat16,int8] [--isa auto] [--rounds 5] [--peer]

Shape: Qwen3-0.6B (28 layers, 16 query heads on 8 key/value heads of 128). Each round probes the machine, runs the cell
and probes again, because its memory has slow and fast minutes; a cell's figure is the best of its rounds, each
against the better probe of that round. Bytes are K and V of the tokens seen, without padding; operations are 4 * head
size for each pair of a query and a token that it sees. --peer adds PyTorch's scaled_dot_product_attention in bf16 over
contiguous K and V: of each request alone, as nothing else is exact for unequal lengths.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from maitred.kernels import _native
from maitred.kernels.kv_pool import make_kv_pool

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 28, 16, 8, 128, 16
Q_WIDTH, QKV_WIDTH = NUM_HEADS * HEAD_DIM, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
# Requests and context of a decode step.
DECODE = [(1, 512), (1, 4096), (1, 16384), (8, 576), (32, 576), (32, 2048)]
# Tokens of a prefill chunk and of the context before it.
PREFILL = [(256, 0), (512, 0), (2048, 0), (256, 2048), (512, 8192)]
PREFILL_LAYERS = 4
PROBE_BYTES = 1 << 29


class Machine:
    """Probes of this minute's speed."""

    def __init__(self, threads: _native.ThreadPool, isa: str) -> None:
        self._threads, self._isa = threads, isa
        self._memory = np.ones(PROBE_BYTES, dtype=np.uint8)

    def stream(self) -> float:
        """Bytes a second, all threads."""
        return float(_native.measure_stream(self._isa, self._threads, self._memory, 2))

    def bf16_peak(self) -> float:
        """Operations a second, all threads."""
        return float(_native.measure_peak(self._isa, self._threads, "bfloat16", 2))


class Attention:
    """A program that writes a step's keys and values into one layer, then attends to `num_layers`, one by one."""

    def __init__(self, pool: _native.KVPool, threads: _native.ThreadPool, isa: str, max_tokens: int, num_layers: int):
        self._program = program = _native.Program(threads, pool, isa, max_tokens, 1, 1, 1 << 20)
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

    @property
    def num_units(self) -> int:
        return int(self._program.num_attention_units)


def ends_of(parts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.cumsum([0, *(len(part) for part in parts)])


def attention_over(
    dtype: str, threads: _native.ThreadPool, isa: str, rows: list[tuple[int, int]], num_layers: int
) -> Attention:
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
    pool.touch(threads)
    rng = np.random.default_rng(0)
    ids = rng.permutation(sum(counts)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    writer = Attention(pool, threads, isa, BLOCK_SIZE, 0)
    for table in tables:  # one layer is written, and copied to the others
        for first in range(0, len(table) * BLOCK_SIZE, BLOCK_SIZE):
            writer.run([(first, BLOCK_SIZE)], [table], rng)
    for block in range(pool.num_blocks):
        for other in range(1, num_layers):
            pool.block_view(other, block)[:] = pool.block_view(0, block)
    attention = Attention(pool, threads, isa, sum(n for _, n in rows), num_layers)
    attention.run(rows, tables, rng)
    return attention


def decode_cell(dtype: str, args: argparse.Namespace, machine: Machine, requests: int, context: int) -> None:
    attention = attention_over(dtype, args.pool, args.isa, [(context - 1, 1)] * requests, NUM_LAYERS)
    token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * VALUE_BYTES[dtype] + (8 * NUM_KV_HEADS if dtype == "int8" else 0)
    num_bytes = NUM_LAYERS * requests * context * token_bytes
    repeats = max(1, int(2e9 / num_bytes))
    best, best_ratio, best_s = 0.0, 0.0, 0.0
    for _ in range(args.rounds):
        before = machine.stream()
        seconds = min(attention.seconds() for _ in range(repeats))
        rate, stream = num_bytes / seconds, max(before, machine.stream())
        if rate / stream > best_ratio:
            best, best_ratio, best_s = rate, rate / stream, seconds
    print(
        f"decode  {dtype:9} {requests:3} x {context:6}: {best_s * 1e3:8.2f} ms a step, {best / 1e9:6.1f} GB/s, "
        f"{best_ratio:6.1%} of the stream, {attention.num_units} units",
        flush=True,
    )


def prefill_cell(dtype: str, args: argparse.Namespace, machine: Machine, tokens: int, context: int) -> None:
    attention = attention_over(dtype, args.pool, args.isa, [(context, tokens)], PREFILL_LAYERS)
    pairs = tokens * context + tokens * (tokens + 1) // 2
    operations = PREFILL_LAYERS * 4 * NUM_HEADS * HEAD_DIM * pairs
    repeats = max(1, int(1e11 / operations))
    best, best_ratio, best_s = 0.0, 0.0, 0.0
    for _ in range(args.rounds):
        before = machine.bf16_peak()
        seconds = min(attention.seconds() for _ in range(repeats))
        rate, peak = operations / seconds, max(before, machine.bf16_peak())
        if rate / peak > best_ratio:
            best, best_ratio, best_s = rate, rate / peak, seconds
    print(
        f"prefill {dtype:9} {tokens:5} after {context:5}: {best_s * NUM_LAYERS / PREFILL_LAYERS * 1e3:8.2f} ms a step, "
        f"{best / 1e12:6.3f} TFLOP/s, {best_ratio:6.1%} of the bf16 peak",
        flush=True,
    )


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def peer_cells(args: argparse.Namespace) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(args.threads)

    def heads(num_heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, num_heads, tokens, HEAD_DIM, dtype=torch.bfloat16)

    for requests, context in DECODE:
        keys = [(heads(NUM_KV_HEADS, context), heads(NUM_KV_HEADS, context)) for _ in range(requests)]
        q = heads(NUM_HEADS, 1)
        seconds = min(timed(lambda: [sdpa(q, k, v, enable_gqa=True) for k, v in keys]) for _ in range(args.rounds))  # noqa: B023
        num_bytes = requests * context * 4 * NUM_KV_HEADS * HEAD_DIM
        print(
            f"decode  SDPA bf16 {requests:3} x {context:6}: {seconds * NUM_LAYERS * 1e3:8.2f} ms a step, "
            f"{num_bytes / seconds / 1e9:6.1f} GB/s (the same layer again, so partly from the cache)"
        )
    for tokens, context in PREFILL:
        q, k, v = heads(NUM_HEADS, tokens), heads(NUM_KV_HEADS, tokens + context), heads(NUM_KV_HEADS, tokens + context)
        mask = torch.ones(tokens, tokens + context, dtype=torch.bool).tril(context) if context else None
        seconds = min(
            timed(lambda: sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True))  # noqa: B023
            for _ in range(args.rounds)
        )
        operations = 4 * NUM_HEADS * HEAD_DIM * (tokens * context + tokens * (tokens + 1) // 2)
        print(
            f"prefill SDPA bf16 {tokens:5} after {context:5}: {seconds * NUM_LAYERS * 1e3:8.2f} ms a step, "
            f"{operations / seconds / 1e12:6.3f} TFLOP/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", default="bfloat16,int8")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--cells", type=int, help="only this many cells of each kind, from the first")
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    args.isa = _native.default_isa() if args.isa == "auto" else args.isa
    args.pool = _native.ThreadPool(args.threads)
    machine = Machine(args.pool, args.isa)
    print(f"{args.isa}, {args.threads} threads, stream {machine.stream() / 1e9:.1f} GB/s", end=", ")
    print(f"bf16 peak {machine.bf16_peak() / 1e12:.2f} TFLOP/s", flush=True)
    for dtype in args.dtypes.split(","):
        if args.only != "prefill":
            for requests, context in DECODE[: args.cells]:
                decode_cell(dtype, args, machine, requests, context)
        if args.only != "decode":
            for tokens, before in PREFILL[: args.cells]:
                prefill_cell(dtype, args, machine, tokens, before)
    if args.peer:
        peer_cells(args)


if __name__ == "__main__":
    main()
