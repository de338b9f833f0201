"""Measures one round of one cell for one contender, with the memory's bandwidth beside each repetition.

Bandwidth flips between states within seconds, so a share of the floor is taken from what was probed right before and
after the few steps that it is about, and where those two agree, if they do anywhere in the round.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from maitred.kernels import _native
from maitred.kernels.linear import allocate
from maitred.model.checkpoint import Checkpoint, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.roofline import STREAM_BYTES, KVFormat, Machine, Row, WeightFormat, floor_s, step_work
from maitred.model.spec import DecoderSpec
from peers.contact import Workers, serving
from peers.entries import Entry, gguf_file
from peers.http_load import run_http_loop
from peers.shapes import SHAPES

DECODE_STEPS, CONTEXT = 64, 512
MEMORY_REQUESTS, MEMORY_TOKENS = 8, 64
LOOP_INPUT, LOOP_OUTPUT = 512, 128
CHUNK = 512  # maitred's prefill and decode cells; peers read 2,048 tokens a step. Served, start, memory: the default
WAVES = {1: 8, 8: 5, 32: 3}  # requests of a closed loop for each of its clients
PREFILLS = {128: 6, 512: 4, 2048: 2}  # repetitions in a round
PROBE_REPEATS = 4
SETTLE_S = 0.02  # for threads of a contender that still spin
CELLS = (
    *(f"http-{n}" for n in (8, 32, 1)),
    *(f"decode-{n}" for n in (16, 8, 1, 32)),
    *(f"prefill-{n}" for n in (2048, 512, 128)),
    "start",
    "memory",
)
MOVED = 0.1  # from there two probes do not agree
Figures = dict[str, Any]


class Share(NamedTuple):
    """What a few steps reached of their floor, and whether memory was in the same state before and after."""

    value: float
    steady: bool


class Probe:
    """Streaming reads of this process, all cores, about 30 ms each: what memory gives right now.

    Each thread keeps to a core of its own: two that are woken on the same one would see half of the bandwidth.
    """

    def __init__(self, num_threads: int) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        before = set(os.listdir("/proc/self/task"))
        self._isa, self._pool = _native.default_isa(), _native.ThreadPool(num_threads)
        for core, thread in zip(self._cores[1:], set(os.listdir("/proc/self/task")) - before, strict=False):
            os.sched_setaffinity(int(thread), {core})
        self._memory = allocate(STREAM_BYTES)
        self._memory[:: 4096 // 2] = 1  # pages that were never written are all the same page of zeros

    def bytes_per_s(self) -> float:
        time.sleep(SETTLE_S)
        os.sched_setaffinity(0, self._cores[:1])
        try:
            return float(_native.measure_stream(self._isa, self._pool, self._memory, PROBE_REPEATS))
        finally:
            os.sched_setaffinity(0, self._cores)  # whatever is launched later inherits it


@dataclass
class Bench:
    """What all cells of one model share."""

    work: Path
    model: str
    probe: Probe
    peaks: dict[str, float]
    workers: Workers
    streams: list[float] = field(default_factory=list)  # probes of the round that runs

    def look(self) -> None:
        self.streams.append(self.probe.bytes_per_s())

    @cached_property
    def gguf(self) -> Checkpoint | None:
        return None if self.model in SHAPES else open_checkpoint(str(gguf_file(self.work, self.model)))

    @property
    def spec(self) -> DecoderSpec:
        if self.gguf is not None:
            return spec_from_config(self.gguf.config)
        return spec_from_config(json.loads((self.work / self.model / "config.json").read_text()))

    def weights(self, dtype: str) -> tuple[WeightFormat, WeightFormat | None]:
        """Of layers, and of the output matrix where that is another; `gguf` is the file's mix, bytes of a weight on
        average: a step reads all of the output matrix, and of experts few."""
        if self.gguf is None:
            return WeightFormat(dtype), None
        names = self.gguf.tensor_names()
        head = next(name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in names)
        layers = [self.gguf.tensor(name) for name in names if name.startswith("model.layers.")]
        mixes = ((sum(t.data.nbytes for t in mix), sum(math.prod(t.shape) for t in mix))
                 for mix in (layers, [self.gguf.tensor(head)]))  # fmt: skip
        of_layers, of_head = (WeightFormat("q8_0", num_bytes / size) for num_bytes, size in mixes)
        return of_layers, of_head


def measure(bench: Bench, entry: Entry, cell: str, seed: int) -> Figures:
    """One round; the figure that counts is `value`, in the cell's unit. Raises RuntimeError if the contender fails."""
    bench.streams = []
    bench.look()
    kind, _, number = cell.partition("-")
    figures = KINDS[kind](bench, entry, int(number or 0), seed)
    if kind != "decode":
        bench.look()
    return {**figures, "streams": [round(stream / 1e9, 2) for stream in bench.streams]}


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = Random(f"{length}/{seed}")
    return [rng.choices(range(300, 8000), k=length) for _ in range(count)]


def _prefill(bench: Bench, entry: Entry, length: int, seed: int) -> Figures:
    rates, shares = [], []
    with bench.workers.working(entry, sequences=1, context=_rounded(length + 1), chunk=CHUNK) as worker:
        for prompt in prompts(PREFILLS.get(length, 3), length, seed):
            bench.look()
            rates.append(length / worker.ask(cell="prefill", prompts=[prompt])["first_s"])
            bench.look()
            shares.append(_share(bench, entry, rates[-1], length, [Row(0, length)]))
    return {"value": statistics.median(rates), **_median_share(shares)}


def _decode(bench: Bench, entry: Entry, count: int, seed: int) -> Figures:
    apart = count if entry.module else 3 * count  # prompts that are read one after the other set requests apart
    num_tokens = DECODE_STEPS + apart + 1
    asked = prompts(count, CONTEXT - num_tokens // 2, seed)
    bench.streams = []  # the worker pauses before each segment and after the last
    load = {"prompts": asked, "num_tokens": num_tokens, "num_steps": DECODE_STEPS}
    sizes = {"sequences": count, "context": _rounded(CONTEXT + num_tokens), "chunk": CHUNK}
    with bench.workers.working(entry, **sizes) as worker:
        segments = worker.ask(bench.look, cell="decode", **load)["segments_s"]
    rows, around, shares = [Row(CONTEXT - 1, 1)] * count, bench.streams, []
    for number, segment in enumerate(segments):
        bench.streams = around[number : number + 2]
        shares.append(_share(bench, entry, count / statistics.median(segment), count, rows))
    bench.streams = around
    return {"value": count / statistics.median(step for s in segments for step in s), **_median_share(shares)}


def _http(bench: Bench, entry: Entry, clients: int, seed: int) -> Figures:
    """The same load over HTTP and, for maitred, in process too: `offline` is the second's rate."""
    count = clients * WAVES.get(clients, 3)
    asked, context = prompts(count, LOOP_INPUT, seed), _rounded(LOOP_INPUT + LOOP_OUTPUT)
    if entry.server is None:
        return _in_process(bench, entry, asked, clients)
    with serving(entry, clients, context, bench.workers.log(entry)) as (port, _):
        dialect = entry.server.dialect
        run_http_loop(port, "bench", prompts(1, 32, seed), 1, 4, dialect)
        loop = run_http_loop(port, "bench", asked, clients, LOOP_OUTPUT, dialect)
    figures = {"value": loop["steady"], **loop}
    if entry.ours and entry.module:
        bench.look()
        figures["offline"] = _in_process(bench, entry, asked, clients)["value"]
    return figures


def _in_process(bench: Bench, entry: Entry, asked: Sequence[Sequence[int]], clients: int) -> Figures:
    with bench.workers.working(entry) as worker:
        loop = worker.ask(cell="loop", prompts=asked, clients=clients, num_tokens=LOOP_OUTPUT)
    return {"value": loop["steady"], **loop}


def _start(bench: Bench, entry: Entry, _: int, seed: int) -> Figures:
    """The second of two launches in a row. Other contenders' cells come before the first, and its files may have left
    memory meanwhile: some virtual machines throw out what nobody has used for half a minute, free memory or not."""
    launches = []
    if entry.cache is not None:
        shutil.rmtree(entry.cache, ignore_errors=True)
    for _ in range(2):
        with bench.workers.working(entry, sequences=1, context=CONTEXT) as worker:
            launches.append(worker.first_token_s)
    return {"value": launches[1], "first_launch": launches[0]}


def _memory(bench: Bench, entry: Entry, _: int, seed: int) -> Figures:
    """Peak of the process after a few requests; for maitred split into weights, keys and values, and the rest. Of a
    server, what is resident after a short request, and `used_mb` after that many."""
    asked = prompts(MEMORY_REQUESTS, CONTEXT, seed)
    sizes = {"sequences": MEMORY_REQUESTS, "context": _rounded(CONTEXT + MEMORY_TOKENS if entry.module else 1024)}
    with bench.workers.working(entry, **sizes) as worker:
        found = worker.ask(cell="memory", prompts=asked, num_tokens=MEMORY_TOKENS)
    peak = found["peak_mb"]
    if "used_mb" in found:
        return {"value": peak, "used_mb": found["used_mb"]}
    if entry.floor is None:
        return {"value": peak}
    weights, kv_of_token = _footprint(bench, *entry.floor)
    weights_mb, kv_mb = weights / 2**20, kv_of_token * found["held_tokens"] / 2**20
    return {"value": peak, "weights_mb": weights_mb, "kv_mb": kv_mb, "rest_mb": peak - weights_mb - kv_mb}


KINDS: dict[str, Callable[[Bench, Entry, int, int], Figures]] = {
    "prefill": _prefill,
    "decode": _decode,
    "http": _http,
    "start": _start,
    "memory": _memory,
}


def _footprint(bench: Bench, dtype: str, kv_dtype: str) -> tuple[float, float]:
    """Bytes of all matrices, and of one token's keys and values."""
    work = {True: 0.0, False: 0.0}
    weights, head = bench.weights(dtype)
    for op in step_work(bench.spec, [Row(0, 1)], weights, KVFormat(kv_dtype), head):
        work[op.name == "attention"] += op.num_bytes
    return work[False], work[True]


def _share(bench: Bench, entry: Entry, rate: float, tokens: int, rows: Sequence[Row]) -> Share | None:
    """`rate` (tokens/s) of a step of so many tokens, as a share of its floor with the last two probes."""
    if entry.floor is None:
        return None
    (dtype, kv), around = entry.floor, bench.streams[-2:]
    machine = Machine(statistics.harmonic_mean(around), bench.peaks)
    weights, head = bench.weights(dtype)
    floor = floor_s(step_work(bench.spec, rows, weights, KVFormat(kv), head), machine)
    return Share(rate * floor / tokens, max(around) <= (1 + MOVED) * min(around))


def _median_share(shares: Sequence[Share | None]) -> Figures:
    known = [share for share in shares if share is not None]
    counted = [share.value for share in known if share.steady] or [share.value for share in known]
    return {"share": statistics.median(counted)} if counted else {}


def _rounded(tokens: int) -> int:
    """llama.cpp rounds a sequence's context up to a multiple of 256 tokens."""
    return -(-tokens // 256) * 256
