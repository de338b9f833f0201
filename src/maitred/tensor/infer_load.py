"""Load on a server of KServe v2, whosever it is: one request again and again, by HTTP or gRPC, and what each waited.

What is sent is made once, from the model's metadata: numbers from 0 to 1, whole ones 0 or 1.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from maitred.core.objectives import percentile
from maitred.core.tensor_request import Tensor
from maitred.tensor.arrays import data_type_of, tensor_of
from maitred.tensor.config import WILDCARD
from maitred.tensor.infer_servers import Asked, Caller, Server, connected, places
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.warmup import made_array

PERCENTS = (50, 90, 99)


@dataclass(slots=True)
class Measured:
    """Figures of a run."""

    latencies_s: list[float] = field(default_factory=list)  # of those that were answered
    failures: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)  # the first one of each kind of failure
    span_s: float = 0.0
    rows: int = 1

    def to_json(self) -> dict[str, Any]:
        """Rates by the second, latencies in ms."""
        ordered = sorted(self.latencies_s)
        rate = len(ordered) / self.span_s if self.span_s else 0.0
        told = {f"p{percent}_ms": percentile(ordered, percent) * 1e3 for percent in PERCENTS} if ordered else {}
        counts = {"num_requests": len(ordered), "num_failed": self.failures.total()}
        failed = {"failures": dict(self.failures), "reasons": self.reasons}
        rates = {"span_s": self.span_s, "requests_per_s": rate, "rows_per_s": rate * self.rows}
        return {**counts, **failed, **rates, **told}


async def run_load(
    asked: Asked, *, concurrency: int | None, rate: float | None, num_requests: int | None, duration_s: float, seed: int
) -> Measured:
    """Run so many clients, or so many requests a second whatever becomes of them; until `num_requests` were sent or
    the time is over. Raises ConfigError for a server that does not tell of the model.
    """
    async with connected(asked) as server:
        tensors = made_tensors(await server.inputs(), asked)
        with _region(tensors, shm=asked.shm) as region:
            if region is not None:
                await server.register(f"/{region.name}", region.size)
            try:
                server.prepare(tensors, in_region=region is not None)
                left = iter(range(num_requests)) if num_requests is not None else _endless()
                if rate is not None:
                    return await _open_loop(server, rate, left, duration_s, asked.rows, random.Random(seed))
                return await _closed_loop(server, concurrency or 1, left, duration_s, asked.rows)
            finally:
                if region is not None:
                    await server.unregister()


def _endless() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def made_tensors(inputs: Sequence[Tensor], asked: Asked) -> list[Tensor]:
    """Inputs with data. Of each the shape has the rows first already."""
    made = []
    for each in inputs:
        kind = NUMPY_TYPES[data_type_of(each.datatype)]
        dims = tuple(asked.length if size == WILDCARD else size for size in each.shape)
        made.append(tensor_of(each.name, made_array(kind, dims, random=True), data_type_of(each.datatype)))
    return made


@contextmanager
def _region(tensors: Sequence[Tensor], *, shm: bool) -> Iterator[SharedMemory | None]:
    """The inputs one after another in shared memory."""
    if not shm:
        yield None
        return
    region = SharedMemory(create=True, size=sum(memoryview(each.data).nbytes for each in tensors))
    try:
        assert region.buf is not None
        for each, size, at in places(tensors):
            region.buf[at : at + size] = memoryview(each.data).cast("B")
        yield region
    finally:
        region.close()
        region.unlink()


async def _closed_loop(server: Server, concurrency: int, left: Iterator[int], duration_s: float, rows: int) -> Measured:
    measured, began = Measured(rows=rows), time.monotonic()

    async def client() -> None:
        caller = server.caller()
        try:
            while time.monotonic() - began < duration_s and next(left, None) is not None:
                await _one(caller, measured, time.monotonic())
        finally:
            await caller.close()

    await asyncio.gather(*(client() for _ in range(concurrency)))
    measured.span_s = time.monotonic() - began
    return measured


async def _open_loop(
    server: Server, rate: float, left: Iterator[int], duration_s: float, rows: int, drawn: random.Random
) -> Measured:
    """Send at exponential gaps; a request waits for no other, so latency counts from when it was due."""
    measured, began, due = Measured(rows=rows), time.monotonic(), time.monotonic()
    idle: list[Caller] = []
    running: set[asyncio.Task[None]] = set()

    async def one(due_at: float) -> None:
        caller = idle.pop() if idle else server.caller()
        await _one(caller, measured, due_at)
        idle.append(caller)

    while due - began < duration_s and next(left, None) is not None:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(one(due))
        running.add(task)
        task.add_done_callback(running.discard)
        due += drawn.expovariate(rate)
    await asyncio.gather(*running)
    measured.span_s = time.monotonic() - began
    for caller in idle:
        await caller.close()
    return measured


async def _one(caller: Caller, measured: Measured, due_at: float) -> None:
    failed = await caller.ask()
    if failed:
        measured.failures[failed.kind] += 1
        measured.reasons.setdefault(failed.kind, failed.reason)
    else:
        measured.latencies_s.append(time.monotonic() - due_at)


def lines(measured: Measured) -> list[str]:
    """Return the figures as lines for people."""
    told = measured.to_json()
    rates = f"{told['requests_per_s']:,.1f} requests/s, {told['rows_per_s']:,.1f} rows/s in {measured.span_s:.1f} s"
    found = [f"{told['num_requests']} answered, {told['num_failed']} failed: {rates}"]
    if measured.latencies_s:
        found.append("latency " + ", ".join(f"p{percent} {told[f'p{percent}_ms']:.2f} ms" for percent in PERCENTS))
    failed = measured.failures.most_common()
    return [*found, *(f"failed {kind}: {count}, the first with: {measured.reasons[kind]}" for kind, count in failed)]
