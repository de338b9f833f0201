"""Load on a model in this process: requests when they are due, or by so many clients, and what each waited."""

from __future__ import annotations

import array
import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path

import numpy as np
from google.protobuf import json_format

from maitred.core.errors import CheckpointError, MaitredError
from maitred.core.tensor_request import InferRequest, Tensor
from maitred.engine.limits import hand_over_quickly
from maitred.tensor.arrays import tensor_of
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, TensorSpec, inputs_of
from maitred.tensor.control import ControlMode
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.local import LocalTensorService
from maitred.tensor.sequence_tensors import kept_specs
from maitred.tensor.served_models import OPENERS, Opener
from maitred.tensor.warmup import made_array

KEEPER = (sys.executable, "-P", "-m", "maitred.tensor.due")
START_S = 0.3  # until it runs
READ_BYTES = 65536


@dataclass(slots=True)
class LiveRun:
    """Figures of a measured run."""

    latencies_s: list[float] = field(default_factory=list)  # of those that were answered, in that order
    num_failed: int = 0
    num_rows: int = 0  # of batches
    num_batches: int = 0
    compute_s: float = 0.0  # of batches, of each once for each request in it
    span_s: float = 0.0  # from the first request to the last answer
    loop_s: float = 0.0  # CPU time of the event loop's thread

    @property
    def mean_batch(self) -> float:
        return self.num_rows / max(1, self.num_batches)

    @property
    def throughput_rps(self) -> float:
        return len(self.latencies_s) / self.span_s if self.span_s else 0.0


def made_inputs(config: ANY_MESSAGE, num_rows: int, length: int) -> tuple[Tensor, ...]:
    """Numbers from 0 to 1, their open dimensions `length` long; whole ones may be places in a table."""
    specs: Sequence[TensorSpec] = [*inputs_of(config), *kept_specs(config)[0].values()]
    rows = (num_rows,) if config.max_batch_size > 0 else ()
    return tuple(
        tensor_of(spec.name, made_array(NUMPY_TYPES[spec.data_type], rows + _dims(spec, length), random=True), kind)
        for spec in specs
        for kind in (spec.data_type,)
    )


def _dims(spec: TensorSpec, length: int) -> tuple[int, ...]:
    return tuple(length if dim == WILDCARD else dim for dim in spec.dims)


@asynccontextmanager
async def served(
    repository: Path, config: ANY_MESSAGE, openers: Mapping[str, Opener] = OPENERS
) -> AsyncIterator[LocalTensorService]:
    """One model as `config` has it. Raises CheckpointError."""
    hand_over_quickly()
    service = LocalTensorService(repository, ControlMode.EXPLICIT, openers=openers)
    await service.start()
    try:
        await service.load(config.name, json_format.MessageToJson(config))
        yield service
    except MaitredError as error:
        raise CheckpointError(f"{config.name!r}: {error}") from None
    finally:
        await service.close()


class Load:
    """Asks one model for the same rows again and again. On the event loop of its service."""

    def __init__(self, service: LocalTensorService, model: str, *, num_rows: int = 1, length: int = 0) -> None:
        self._service, self._model = service, model
        self._inputs = made_inputs(service.config(model), num_rows, length)
        self._numbers = count()
        self.run = LiveRun()
        self._first_at, self._last_at = inf, -inf
        self._cpu_at = 0.0

    async def open_loop(self, due_s: Sequence[float]) -> LiveRun:
        """Each comes when it is due (s from now), whatever became of those before it."""
        async with self._measured():
            times = [time.monotonic() + START_S + due for due in due_s]
            keeper = await asyncio.create_subprocess_exec(*KEEPER, stdin=PIPE, stdout=PIPE)
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            keeper.stdin.write(array.array("d", times).tobytes())
            keeper.stdin.close()
            self._cpu_at = time.thread_time()
            asked, left = set[asyncio.Task[None]](), iter(times)
            while come := await keeper.stdout.read(READ_BYTES):
                asked |= {asyncio.create_task(self._ask(due_at)) for _, due_at in zip(come, left, strict=False)}
            await asyncio.gather(*asked)
            await keeper.wait()
        return self.run

    async def closed_loop(self, in_flight: int, seconds: float) -> LiveRun:
        """Run so many clients, each asking again once it was answered."""

        async def client() -> None:
            while time.monotonic() < until:
                await self._ask(time.monotonic())

        async with self._measured():
            until = time.monotonic() + seconds
            await asyncio.gather(*(client() for _ in range(in_flight)))
        return self.run

    async def _ask(self, due_at: float) -> None:
        self._first_at = min(self._first_at, due_at)
        request = InferRequest(request_id=f"load{next(self._numbers)}", model=self._model, inputs=self._inputs)
        try:
            await self._service.infer(request)
            self._last_at = time.monotonic()
            self.run.latencies_s.append(self._last_at - due_at)
        except MaitredError:
            self.run.num_failed += 1

    @asynccontextmanager
    async def _measured(self) -> AsyncIterator[None]:
        self.run = run = LiveRun()
        self._first_at, self._last_at = inf, -inf
        before, self._cpu_at = self._totals(), time.thread_time()
        yield
        run.loop_s = time.thread_time() - self._cpu_at
        run.span_s = max(0.0, self._last_at - self._first_at)
        num_rows, num_batches, compute_s = np.subtract(self._totals(), before)
        run.num_rows, run.num_batches, run.compute_s = int(num_rows), int(num_batches), float(compute_s)

    def _totals(self) -> tuple[int, int, float]:
        told = self._service.statistics(self._model)
        ns = sum(each.compute_input[1] + each.compute_infer[1] + each.compute_output[1] for each in told)
        return sum(each.inference_count for each in told), sum(each.execution_count for each in told), ns / 1e9
