"""One batch on one instance, in whatever thread: joined, run, split, and each of these timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import msgspec

from maitred.core.errors import InstanceLost, MaitredError
from maitred.tensor.batching import Batching, Rows
from maitred.tensor.instance import ModelInstance
from maitred.tensor.service import Tensor


class BatchTimes(msgspec.Struct, frozen=True, array_like=True):
    """A batch, and what its time went to (ns)."""

    model: str
    version: int
    num_requests: int
    num_rows: int
    input_ns: int
    infer_ns: int
    output_ns: int
    num_padded: int = 0  # elements along the length that are padding
    num_elements: int = 0  # of all, where lengths share buckets


@dataclass(slots=True)
class BatchRun:
    """Result of a batch: of each request its outputs or what was wrong."""

    answers: list[tuple[Tensor, ...] | MaitredError]
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    lost: bool = False

    @property
    def compute_us(self) -> int:
        return (self.input_ns + self.infer_ns + self.output_ns) // 1000


def run_batch(instance: ModelInstance, batching: Batching, batch: Sequence[Rows]) -> BatchRun:
    """Run a batch; where several requests fail together each is run alone, so that only faulty ones fail."""
    run = _run(instance, batching, batch)
    if len(batch) == 1 or run.lost or not isinstance(run.answers[0], MaitredError):
        return run
    alone = [_run(instance, batching, [rows]) for rows in batch]
    return BatchRun(
        [one.answers[0] for one in alone],
        input_ns=run.input_ns + sum(one.input_ns for one in alone),
        infer_ns=run.infer_ns + sum(one.infer_ns for one in alone),
        output_ns=sum(one.output_ns for one in alone),
        lost=any(one.lost for one in alone),
    )


def _run(instance: ModelInstance, batching: Batching, batch: Sequence[Rows]) -> BatchRun:
    times: list[int] = []
    answers: list[tuple[Tensor, ...] | MaitredError]
    try:
        instance.prepare()
        times.append(perf_counter_ns())
        inputs, wanted = batching.joined(batch)
        times.append(perf_counter_ns())
        outputs = instance.run(inputs, wanted)
        times.append(perf_counter_ns())
        answers = [*batching.split(outputs, batch)]
    except MaitredError as error:
        answers = [error] * len(batch)
    except MemoryError:
        answers = [InstanceLost("out of memory")] * len(batch)
    times += [perf_counter_ns()] * (4 - len(times))
    begun, joined, ran, ended = times
    lost = isinstance(answers[0], InstanceLost)
    return BatchRun(answers, joined - begun, ran - joined, ended - ran, lost=lost)
