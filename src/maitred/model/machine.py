"""What this host can do: bytes streamed from memory and multiplications, measured with the native library's kernels."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from maitred.kernels import _native
from maitred.kernels.linear import SourceMatrix, allocate, linear, pack
from maitred.model.roofline import Machine

STREAM_BYTES = 256 * 2**20  # far more than any last-level cache of a small host
STREAM_REPEATS, PEAK_REPEATS = 5, 3
GEMM_ROWS, GEMM_OUT, GEMM_IN = 512, 4096, 2048
GEMM_REPEATS = 4
ARITHMETIC = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True)
class Measured:
    """A host's figures. `machine` holds what floors are made of: streaming, and the best matrix product."""

    machine: Machine
    registers_ops_per_s: dict[str, float]
    """Multiply-adds on registers alone, by arithmetic: what no product can pass."""
    num_threads: int
    isa: str


def measure(num_threads: int, isa: str | None = None) -> Measured:
    """All figures, in about two seconds; other load on the host makes them lower."""
    isa = isa or _native.default_isa()
    pool = _native.ThreadPool(num_threads)
    memory = allocate(STREAM_BYTES)
    memory[:: 4096 // 2] = 1  # pages that were never written are all the same page of zeros
    stream = float(_native.measure_stream(isa, pool, memory, STREAM_REPEATS))
    registers = {name: float(_native.measure_peak(isa, pool, name, PEAK_REPEATS)) for name in ARITHMETIC}
    products = {name: best_product(pool, isa, name) for name in ARITHMETIC}
    return Measured(Machine(stream, products), registers, num_threads, isa)


def best_product(pool: object, isa: str, dtype: str) -> float:
    """Operations per second of a product large enough that nothing but arithmetic counts; the best of a few."""
    rng = np.random.default_rng(0)
    weights = pack(pool, [SourceMatrix(rng.standard_normal((GEMM_OUT, GEMM_IN), dtype=np.float32))], dtype)
    rows = rng.standard_normal((GEMM_ROWS, GEMM_IN), dtype=np.float32)
    took = []
    for _ in range(GEMM_REPEATS):
        began = time.perf_counter()
        linear(pool, weights, rows, isa=isa)
        took.append(time.perf_counter() - began)
    return 2.0 * GEMM_ROWS * GEMM_OUT * GEMM_IN / min(took)
