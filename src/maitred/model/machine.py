"""Machine peaks: memory bandwidth and multiplications, measured with the native library's kernels."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maitred.kernels import _native
from maitred.kernels.linear import SourceMatrix, allocate, linear, pack
from maitred.model.roofline import Machine

STREAM_BYTES = 256 * 2**20  # far more than any last-level cache of a small host
CACHE_REPEATS = 20  # within one probe: reading a cache takes microseconds
GEMM_ROWS, GEMM_OUT, GEMM_IN = 512, 4096, 2048
ARITHMETIC = ("float32", "bfloat16", "int8")
LIMIT_S = 3.0  # for all figures
AGREEING, APART = 3, 0.05  # the best three repeats, and how far they may be apart

Probe = Callable[[], float]
"""Measures a rate once."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A host's figures. `machine` holds what floors are made of: streaming, and the best matrix product."""

    machine: Machine
    registers_ops_per_s: dict[str, float]
    """Multiply-adds on registers alone, by arithmetic: what no product can pass."""
    num_threads: int
    isa: str
    cache_bytes_per_s: float | None = None
    """Streaming read of as many bytes as the model has, where the last-level cache holds them."""
    unsteady: tuple[str, ...] = ()
    """Figures with repeats that did not agree, because the machine is busy: the best seen, which may be too low."""

    @property
    def machine_of_model(self) -> Machine:
        """Return the machine with the stream of the memory in which the model's weights lie."""
        return replace(self.machine, stream_bytes_per_s=self.cache_bytes_per_s or self.machine.stream_bytes_per_s)


class Settled(NamedTuple):
    best: float
    steady: bool


def measure(num_threads: int, isa: str | None = None, *, model_bytes: int | None = None) -> Measured:
    """Measure all figures, each probed until its repeats agree, in LIMIT_S and the time to make the matrices."""
    isa = isa or _native.default_isa()
    pool = _native.ThreadPool(num_threads)
    memory = allocate(STREAM_BYTES)
    memory[:: 4096 // 2] = 1  # pages that were never written are all the same page of zeros
    probes: dict[str, Probe] = {"memory": partial(_native.measure_stream, isa, pool, memory, 1)}
    if model_bytes is not None and model_bytes <= min(last_level_cache_bytes() or 0, STREAM_BYTES):
        cached = memory[: max(model_bytes, 4096 * num_threads)]
        probes["cache"] = partial(_native.measure_stream, isa, pool, cached, CACHE_REPEATS)
    for name in ARITHMETIC:
        probes[f"{name} registers"] = partial(_native.measure_peak, isa, pool, name, 1)
    for name in ARITHMETIC:
        probes[f"{name} product"] = product_probe(pool, isa, name)
    began_at, found = time.perf_counter(), dict[str, Settled]()
    for number, (name, probe) in enumerate(probes.items(), start=1):  # what one leaves of its share is the next ones'
        found[name] = settled(probe, until=began_at + LIMIT_S * number / len(probes))
    products = {name: found[f"{name} product"].best for name in ARITHMETIC}
    return Measured(
        Machine(found["memory"].best, products),
        {name: found[f"{name} registers"].best for name in ARITHMETIC},
        num_threads,
        isa,
        cache_bytes_per_s=found["cache"].best if "cache" in found else None,
        unsteady=tuple(name for name, value in found.items() if not value.steady),
    )


def num_preemptions() -> int:
    """Return how often a thread of this process has lost its processor to other work."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def settled(
    probe: Probe,
    *,
    until: float,
    now: Callable[[], float] = time.perf_counter,
    preemptions: Callable[[], int] = num_preemptions,
) -> Settled:
    """Repeat `probe` until its best three repeats agree without preemption, or until `now()` is `until`.

    A machine that is too slow for three repeats in that time is not called busy for it.
    """
    rates, whole = list[float](), list[float]()
    while True:
        before = preemptions()
        rates.append(float(probe()))
        if preemptions() == before:
            whole.append(rates[-1])
        best = sorted(whole, reverse=True)[:AGREEING]
        if len(best) == AGREEING and best[-1] >= (1 - APART) * best[0]:
            return Settled(max(rates), True)
        if now() >= until:
            return Settled(max(rates), len(whole) == len(rates) < AGREEING)


def product_probe(pool: object, isa: str, dtype: str) -> Probe:
    """Operations per second of a product large enough that nothing but arithmetic counts."""
    rng = np.random.default_rng(0)
    weights = pack(pool, [SourceMatrix(rng.standard_normal((GEMM_OUT, GEMM_IN), dtype=np.float32))], dtype)
    rows = rng.standard_normal((GEMM_ROWS, GEMM_IN), dtype=np.float32)

    def probe() -> float:
        began = time.perf_counter()
        linear(pool, weights, rows, isa=isa)
        return 2.0 * GEMM_ROWS * GEMM_OUT * GEMM_IN / (time.perf_counter() - began)

    return probe


def last_level_cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Return the size of the last-level cache; None where the system does not tell."""
    try:
        sizes = {
            int((each / "level").read_text()): (each / "size").read_text().strip() for each in caches.glob("index*")
        }
        return int(sizes[max(sizes)].removesuffix("K")) * 1024 if sizes else None
    except (OSError, ValueError):
        return None
