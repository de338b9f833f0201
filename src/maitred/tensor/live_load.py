"""Load on a model in this process: requests when they are due, or by so many clients, and what each waited."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from google.protobuf import json_format

from maitred.errors import CheckpointError, MaitredError
from maitred.tensor.arrays import tensor_of
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, TensorSpec, inputs_of
from maitred.tensor.control import ControlMode
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.local import LocalTensorService
from maitred.tensor.sequence_tensors import kept_specs
from maitred.tensor.service import InferRequest, Tensor
from maitred.tensor.warmup import made_array


@dataclass(slots=True)
class LiveRun:
    """What was measured."""

    latencies_s: list[float] = field(default_factory=list)  # of those that were answered, in that order
    num_failed: int = 0
    num_rows: int = 0  # of batches
    num_batches: int = 0
    compute_s: float = 0.0  # of batches
    span_s: float = 0.0  # from the first request to the last answer

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
async def served(repository: Path, config: ANY_MESSAGE) -> AsyncIterator[LocalTensorService]:
    """One model as `config` has it. Raises CheckpointError."""
    service = LocalTensorService(repository, ControlMode.EXPLICIT)
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

    async def open_loop(self, due_s: Sequence[float]) -> LiveRun:
        """Each comes when it is due (s from now), whatever became of those before it. A thread keeps the time, for the
        loop's own timers are a thousandth of a second wide.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        asked: set[asyncio.Task[None]] = set()
        left = [len(due_s)]

        def begin(due_at: float) -> None:
            task = loop.create_task(self._ask(due_at))
            asked.add(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[None]) -> None:
            asked.discard(task)
            left[0] -= 1
            if not left[0]:
                ended.set()

        def keep_time() -> None:
            for due_at in (began + due for due in due_s):
                if (wait_s := due_at - time.monotonic()) > 0.0:
                    time.sleep(wait_s)
                loop.call_soon_threadsafe(begin, due_at)

        async with self._measured():
            began = time.monotonic()
            threading.Thread(target=keep_time, name="maitred-load", daemon=True).start()
            await ended.wait()
        return self.run

    async def closed_loop(self, in_flight: int, seconds: float) -> LiveRun:
        """So many clients, each asking again once it was answered."""

        async def client() -> None:
            while time.monotonic() < until:
                await self._ask(time.monotonic())

        async with self._measured():
            until = time.monotonic() + seconds
            await asyncio.gather(*(client() for _ in range(in_flight)))
        return self.run

    async def _ask(self, due_at: float) -> None:
        request = InferRequest(request_id=f"load{next(self._numbers)}", model=self._model, inputs=self._inputs)
        try:
            await self._service.infer(request)
            self.run.latencies_s.append(time.monotonic() - due_at)
        except MaitredError:
            self.run.num_failed += 1

    @asynccontextmanager
    async def _measured(self) -> AsyncIterator[None]:
        self.run = LiveRun()
        before, began = self._totals(), time.monotonic()
        yield
        run, run.span_s = self.run, time.monotonic() - began
        num_rows, num_batches, compute_s = np.subtract(self._totals(), before)
        run.num_rows, run.num_batches, run.compute_s = int(num_rows), int(num_batches), float(compute_s)

    def _totals(self) -> tuple[int, int, float]:
        told = self._service.statistics(self._model)
        ns = sum(each.compute_input[1] + each.compute_infer[1] + each.compute_output[1] for each in told)
        return sum(each.inference_count for each in told), sum(each.execution_count for each in told), ns / 1e9
