"""Roofline: the least time of a step on a machine, bytes over bandwidth, operations over peak, op by op.

Roofline: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009. A step's
floor is the sum over its ops of the larger of the two: an op of a decoder needs the result of the one before.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maitred.kernels import _native
from maitred.kernels.linear import SourceMatrix, allocate, linear, pack
from maitred.model.spec import DecoderSpec, RoutedSpec, latent_shapes

# Arithmetic that a weight format runs on: weights of 4 to 8 bits meet int8 activations.
ARITHMETIC = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "int4": "int8"}
BYTES = {  # of a weight, scales included
    "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int4": 20 / 32,
    "q4_0": 18 / 32, "q4_1": 20 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32, "q8_0": 34 / 32,
    "q4_z": 20 / 32, "q8_z": 36 / 32, "q8_w": 36 / 32, "fp8": 132 / 128,
    "q4_k": 148 / 256, "q5_k": 180 / 256, "q6_k": 210 / 256,
}  # fmt: skip
SCALE_BYTES = 4  # of a row of int8
BUDGET_STEP = 64
READINGS = 4


@dataclass(frozen=True, slots=True)
class Machine:
    """Peaks of one host, measured with all its threads."""

    stream_bytes_per_s: float
    peak_ops_per_s: Mapping[str, float]
    """Multiplications and additions, each counted, by arithmetic: float32, bfloat16, int8."""


class WeightFormat(NamedTuple):
    """Number format of matrices; `per_weight` are bytes of one where a file mixes several formats."""

    dtype: str
    per_weight: float | None = None

    def bytes_of(self, rows: int, columns: int) -> float:
        """Return the bytes of a matrix [rows, columns], scales included."""
        if self.per_weight is not None:
            return self.per_weight * rows * columns
        if self.dtype == "int8":
            return rows * (columns + SCALE_BYTES)
        return BYTES[self.dtype] * rows * columns

    @property
    def arithmetic(self) -> str:
        if self.dtype in ("float32", "float16"):
            return "float32"
        return "bfloat16" if self.dtype in ("bfloat16", "fp8") else "int8"

    @property
    def lm_head(self) -> WeightFormat:
        """Return the output matrix's format unless another is asked for: int8 beside int4, else the same."""
        return WeightFormat("int8") if self.dtype in ("int4", "q4_1") else self


class KVFormat(NamedTuple):
    """Number format of keys and values."""

    dtype: str

    def bytes_of(self, head_dim: int) -> float:
        """Return the bytes of one head's key or value of one token."""
        if self.dtype == "int4":  # a scale and a minimum in bfloat16 for each 32 values
            return head_dim / 2 + math.ceil(head_dim / 32) * SCALE_BYTES
        return {"float32": 4.0 * head_dim, "bfloat16": 2.0 * head_dim, "int8": head_dim + SCALE_BYTES}[self.dtype]


class Work(NamedTuple):
    """One op of a step: what it must read from memory and compute."""

    name: str
    num_bytes: float
    num_ops: float
    arithmetic: str

    def floor_s(self, machine: Machine) -> float:
        return max(self.num_bytes / machine.stream_bytes_per_s, self.num_ops / machine.peak_ops_per_s[self.arithmetic])


class Row(NamedTuple):
    """One request's share of a step: positions [start, start + num_tokens), and whether it samples."""

    start: int
    num_tokens: int
    samples: bool = True


def step_work(
    spec: DecoderSpec, rows: Sequence[Row], weights: WeightFormat, kv: KVFormat, lm_head: WeightFormat | None = None
) -> Iterator[Work]:
    """The ops of one step that a floor counts: linears, attention, lm_head. Norms and the like move next to nothing."""
    tokens = sum(row.num_tokens for row in rows)
    for index, layer in enumerate(spec.layers):
        if (delta := layer.recurrent) is not None:
            yield _linear("recurrent.inputs", delta.input_width, spec.hidden_size, tokens, weights)
            yield Work("recurrence", 8.0 * delta.state_values * len(rows), 8.0 * delta.state_values * tokens, "float32")
            yield _linear("recurrent.output", spec.hidden_size, delta.value_width, tokens, weights)
        elif (latent := layer.latent) is not None:
            for name, size in latent_shapes(spec, latent).items():
                if size is not None and len(size) == 2:
                    yield _linear(name.removesuffix(".weight"), size[0], size[1], tokens, weights)
            yield _attention(spec, None, rows, kv)
        else:
            at = spec.at(index)
            width = at.qkv_width if layer.kv_of is None else at.q_width
            yield _linear("qkv", width, spec.hidden_size, tokens, weights)
            yield _attention(at, layer.window, rows, kv)
            yield _linear("attention_output", spec.hidden_size, at.q_width, tokens, weights)
        if layer.routed is not None:
            yield from _routed(spec, layer.routed, tokens, weights)
        if inner := layer.routed.shared_width if layer.routed is not None else spec.inner_width(index):
            yield _linear("gate_up", 2 * inner, spec.hidden_size, tokens, weights)
            yield _linear("down", spec.hidden_size, inner, tokens, weights)
    sampled = sum(row.samples for row in rows)
    if sampled:
        yield _linear("lm_head", spec.vocab_size, spec.hidden_size, sampled, lm_head or weights.lm_head)


def floor_s(work: Iterator[Work] | Sequence[Work], machine: Machine) -> float:
    """Seconds below which a step of this work cannot come."""
    return sum(op.floor_s(machine) for op in work)


def critical_batch(weights: WeightFormat, machine: Machine) -> float:
    """Tokens in a step from which a linear is held by arithmetic and no longer by reading its weights."""
    bytes_per_weight = weights.bytes_of(1024, 1024) / 1024**2
    peak = machine.peak_ops_per_s[weights.arithmetic]
    return peak * bytes_per_weight / (2 * machine.stream_bytes_per_s)


def token_budget(weights: WeightFormat, machine: Machine) -> int:
    """Tokens a step should hold at most: a larger step saves nothing worth the longer gaps between others' tokens.

    The multiple of 64 nearest to where the arithmetic takes four times as long as reading the weights, which it hides
    then even where memory is slower for a while than it was when measured.
    """
    return BUDGET_STEP * max(1, round(READINGS * critical_batch(weights, machine) / BUDGET_STEP))


def _linear(name: str, width_out: int, width_in: int, tokens: int, weights: WeightFormat) -> Work:
    ops = 2.0 * width_out * width_in * tokens
    return Work(name, weights.bytes_of(width_out, width_in), ops, weights.arithmetic)


def experts_touched(routed: RoutedSpec, tokens: int) -> float:
    """Experts of a layer that a step of so many tokens reads, on average where each is as likely as the others."""
    return routed.num_experts * (1 - (1 - routed.num_active / routed.num_experts) ** tokens)


def _routed(spec: DecoderSpec, routed: RoutedSpec, tokens: int, weights: WeightFormat) -> Iterator[Work]:
    hidden, width, touched = spec.hidden_size, routed.width, experts_touched(routed, tokens)
    yield _linear("router", routed.num_experts, hidden, tokens, WeightFormat("float32"))
    for name, rows, columns in (("experts.gate_up", 2 * width, hidden), ("experts.down", hidden, width)):
        ops = 2.0 * rows * columns * tokens * routed.num_active
        yield Work(name, touched * weights.bytes_of(rows, columns), ops, weights.arithmetic)


def _attention(spec: DecoderSpec, window: int | None, rows: Sequence[Row], kv: KVFormat) -> Work:
    """Each visible key and value read once for each request, 2 operations a value of each query-key pair and of each
    that it gives."""
    keys = sum(_visible_keys(row, window) for row in rows)
    pairs = sum(query_key_pairs(row, window) for row in rows)
    num_bytes = keys * (1 if spec.latent else 2) * spec.num_kv_heads * kv.bytes_of(spec.head_dim)
    arithmetic = "float32" if kv.dtype == "float32" else "bfloat16"
    return Work("attention", num_bytes, 2.0 * pairs * (spec.q_width + spec.attended_width), arithmetic)


def query_key_pairs(row: Row, window: int | None) -> int:
    """Return the number of keys that the row's tokens see in all: position p sees min(p + 1, window)."""
    start, num_tokens = row.start, row.num_tokens
    whole = num_tokens if window is None else min(max(window - start, 0), num_tokens)  # tokens that see all before them
    return whole * start + whole * (whole + 1) // 2 + (num_tokens - whole) * (window or 0)


def _visible_keys(row: Row, window: int | None) -> int:
    end = row.start + row.num_tokens
    return end if window is None else min(end, window + row.num_tokens - 1)


STREAM_BYTES = 256 * 2**20  # far more than any last-level cache of a small host
CACHE_REPEATS = 20  # within one probe: reading a cache takes microseconds
GEMM_ROWS, GEMM_OUT, GEMM_IN = 512, 4096, 2048
MEASURED = ("float32", "bfloat16", "int8")
LIMIT_S = 3.0  # for all figures
AGREEING, APART = 3, 0.05  # the best three repeats, and how far they may be apart

Probe = Callable[[], float]
"""Measures a rate once."""


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
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


def measure(num_threads: int, isa: str | None = None, *, model_bytes: int | None = None) -> MeasuredMachine:
    """Measure all figures, each probed until its repeats agree, in LIMIT_S and the time to make the matrices."""
    isa = isa or _native.default_isa()
    pool = _native.ThreadPool(num_threads)
    memory = allocate(STREAM_BYTES)
    memory[:: 4096 // 2] = 1  # pages that were never written are all the same page of zeros
    probes: dict[str, Probe] = {"memory": partial(_native.measure_stream, isa, pool, memory, 1)}
    if model_bytes is not None and model_bytes <= min(last_level_cache_bytes() or 0, STREAM_BYTES):
        cached = memory[: max(model_bytes, 4096 * num_threads)]
        probes["cache"] = partial(_native.measure_stream, isa, pool, cached, CACHE_REPEATS)
    for name in MEASURED:
        probes[f"{name} registers"] = partial(_native.measure_peak, isa, pool, name, 1)
    for name in MEASURED:
        probes[f"{name} product"] = product_probe(pool, isa, name)
    began_at, found = time.perf_counter(), dict[str, Settled]()
    for number, (name, probe) in enumerate(probes.items(), start=1):  # what one leaves of its share is the next ones'
        found[name] = settled(probe, until=began_at + LIMIT_S * number / len(probes))
    products = {name: found[f"{name} product"].best for name in MEASURED}
    return MeasuredMachine(
        Machine(found["memory"].best, products),
        {name: found[f"{name} registers"].best for name in MEASURED},
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
