"""Batches of a model: rules as the config gives them, requests as rows of arrays, one batch run and cut apart again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter_ns

import numpy as np

from maitred.core.errors import InstanceLost, InvalidRequest, MaitredError
from maitred.core.tensor_request import BatchRules, InferRequest, Instance, QueueRules, Tensor
from maitred.tensor.arrays import array_of, datatype_of, kept_specs, tensor_of
from maitred.tensor.config import ANY_MESSAGE, SCHEMA, WILDCARD, DeclaredTensor, inputs_of, outputs_of, parameters_of
from maitred.tensor.instance import NUMPY_TYPES, ModelInstance

US = 1e-6
_DELAY = SCHEMA.enums["ModelQueuePolicy.TimeoutAction"]["DELAY"]


def rules_of(config: ANY_MESSAGE, num_cores: int | None = None) -> BatchRules:
    """How requests of a loaded model become batches."""
    dynamic, parameters = config.dynamic_batching, parameters_of(config)
    if config.HasField("sequence_batching"):
        return _sequence_rules(config, num_cores)
    levels = [(level, _queue(policy)) for level, policy in sorted(dynamic.priority_queue_policy.items())]
    return BatchRules(
        max_batch_size=config.max_batch_size,
        dynamic=config.HasField("dynamic_batching"),
        preferred_sizes=tuple(dynamic.preferred_batch_size),
        delay_s=dynamic.max_queue_delay_microseconds * US,
        auto_delay=parameters.get("queue_delay") == "auto",
        preserve_ordering=dynamic.preserve_ordering,
        num_levels=dynamic.priority_levels,
        default_level=dynamic.default_priority_level,
        queue=_queue(dynamic.default_queue_policy),
        level_queues=tuple(levels),
        instances=_instances(config),
        machine_share=_machine_share(int(parameters.get("intra_op_thread_count", "0")), num_cores),
    )


def _sequence_rules(config: ANY_MESSAGE, num_cores: int | None) -> BatchRules:
    """Requests of unlike sequences share a batch; there is at most one of each."""
    oldest, direct = config.sequence_batching.oldest, config.sequence_batching.direct
    strategy = oldest if config.sequence_batching.HasField("oldest") else direct
    busy = max(1, ceil(direct.minimum_slot_utilization * config.max_batch_size))
    return BatchRules(
        max_batch_size=config.max_batch_size,
        dynamic=config.max_batch_size > 1,
        preferred_sizes=tuple(oldest.preferred_batch_size) if strategy is oldest else (busy,),
        delay_s=strategy.max_queue_delay_microseconds * US,
        preserve_ordering=oldest.preserve_ordering,
        instances=_instances(config),
        machine_share=_machine_share(int(parameters_of(config).get("intra_op_thread_count", "0")), num_cores),
    )


def _machine_share(num_threads: int, num_cores: int | None) -> float:
    """Return the cores that a running instance takes; without a number of threads the runtime takes all."""
    num_cores = num_cores or len(os.sched_getaffinity(0))
    return min(1.0, num_threads / num_cores) if num_threads > 0 else 1.0


def _queue(policy: ANY_MESSAGE) -> QueueRules:
    return QueueRules(
        max_size=policy.max_queue_size,
        timeout_s=policy.default_timeout_microseconds * US,
        delays=policy.timeout_action == _DELAY,
        allow_override=policy.allow_timeout_override,
    )


def _instances(config: ANY_MESSAGE) -> tuple[Instance, ...]:
    """Return the instances in the order of `LoadedVersion.instances`: groups, their devices, `count` on each."""
    found: list[Instance] = []
    for group in config.instance_group:
        for gpu in group.gpus or (None,):
            limits = group.rate_limiter
            device = "" if gpu is None else f"@{gpu}"
            resources = (
                (each.name if getattr(each, "global") else each.name + device, each.count) for each in limits.resources
            )
            found += [Instance(resources=tuple(resources), weight=max(1, limits.priority))] * group.count
    return tuple(found) or (Instance(),)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Length buckets: inputs of unlike length share a batch, each padded to the longest in it."""

    buckets: tuple[int, ...] = ()  # ascending; none where unlike lengths keep lanes of their own
    pads: Mapping[str, str] | None = None  # by input; "0" else

    def bucket(self, length: int) -> int | None:
        """The smallest that holds it."""
        return next((size for size in self.buckets if length <= size), None)


def lengths_of(config: ANY_MESSAGE) -> Lengths:
    """Parameters `length_buckets` = "16,32,64" and `pad.INPUT`. Raises InvalidRequest for what is no list of sizes."""
    parameters = parameters_of(config)
    try:
        sizes = sorted({int(word) for word in parameters.get("length_buckets", "").split(",") if word.strip()})
    except ValueError:
        sizes = [0]
    if sizes and sizes[0] < 1:
        raise InvalidRequest(f"length_buckets is {parameters['length_buckets']!r}; write sizes as in 16,32,64")
    pads = {key.removeprefix("pad."): value for key, value in parameters.items() if key.startswith("pad.")}
    return Lengths(tuple(sizes), pads)


@dataclass(frozen=True, slots=True)
class Rows:
    """A request's inputs, checked: what it brings to a batch."""

    num_rows: int
    bucket: str  # what they share a batch by
    inputs: Mapping[str, np.ndarray]
    length: int | None = None  # where it is in a length bucket
    outputs: tuple[str, ...] = ()


class Batching:
    """A config as far as requests are checked, joined and split by it."""

    def __init__(self, config: ANY_MESSAGE) -> None:
        self._batched = config.max_batch_size > 0
        kept_in, kept_out = kept_specs(config)
        self._inputs = {spec.name: spec for spec in inputs_of(config)} | kept_in
        self._outputs = kept_out | {spec.name: spec for spec in outputs_of(config)}
        self._lengths, self._name = lengths_of(config), config.name

    def rows(self, request: InferRequest) -> Rows:
        """Raises InvalidRequest."""
        given = {tensor.name: tensor for tensor in request.inputs}
        self._check_names(request, given)
        inputs = {name: self._input(self._inputs[name], given[name]) for name in self._inputs if name in given}
        num_rows = self._num_rows(inputs)
        bucket, length = self._bucket(inputs)
        return Rows(num_rows, bucket, inputs, length, request.outputs)

    def _check_names(self, request: InferRequest, given: Mapping[str, Tensor]) -> None:
        if len(given) < len(request.inputs):
            raise InvalidRequest(f"an input of model {self._name!r} is given twice")
        for name in given:
            if name not in self._inputs:
                raise InvalidRequest(f"unexpected inference input {name!r} for model {self._name!r}")
        missing = [spec.name for spec in self._inputs.values() if not spec.optional and spec.name not in given]
        if missing:
            raise InvalidRequest(f"input {missing[0]!r} of model {self._name!r} is missing")
        for name in request.outputs:
            if name not in self._outputs:
                raise InvalidRequest(f"unexpected inference output {name!r} for model {self._name!r}")

    def _input(self, spec: DeclaredTensor, tensor: Tensor) -> np.ndarray:
        wanted, shape = datatype_of(spec.data_type), tensor.shape
        if tensor.datatype != wanted:
            raise InvalidRequest(
                f"inference input {spec.name!r} data-type is {tensor.datatype!r}, but model {self._name!r} "
                f"expects {wanted!r}"
            )
        dims = (WILDCARD, *spec.dims) if self._batched else spec.dims
        if len(shape) != len(dims) or any(dim not in (WILDCARD, size) for dim, size in zip(dims, shape, strict=True)):
            raise InvalidRequest(
                f"unexpected shape for input {spec.name!r} for model {self._name!r}. Expected {list(dims)}, "
                f"got {list(shape)}"
            )
        return array_of(tensor)

    def _num_rows(self, inputs: Mapping[str, np.ndarray]) -> int:
        if not self._batched or not inputs:
            return 1
        counts = {name: array.shape[0] for name, array in inputs.items()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise InvalidRequest(f"inputs of model {self._name!r} have unlike numbers of rows: {told}")
        return int(next(iter(counts.values())))

    def _bucket(self, inputs: Mapping[str, np.ndarray]) -> tuple[str, int | None]:
        """The shape of a row where it may vary, or the bucket that its length falls in."""
        if not self._batched:
            return "", None
        varying = {name: array.shape[1:] for name, array in inputs.items() if WILDCARD in self._inputs[name].dims}
        present = "" if len(inputs) == len(self._inputs) else "+".join(inputs) + " "
        length = self._length(varying)
        size = self._lengths.bucket(length) if length is not None else None
        if size is not None:
            return f"{present}<={size}", length
        return present + ";".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in varying.items()), None

    def _length(self, varying: Mapping[str, Sequence[int]]) -> int | None:
        """The one length of all inputs of any length; None where there are several."""
        if not self._lengths.buckets:
            return None
        found = {
            size for name, shape in varying.items()
            for dim, size in zip(self._inputs[name].dims, shape, strict=True) if dim == WILDCARD
        }  # fmt: skip
        return found.pop() if len(found) == 1 else None

    def joined(self, batch: Sequence[Rows]) -> tuple[dict[str, np.ndarray], set[str]]:
        """Join inputs by rows, one request after another, and the wanted outputs; none is all."""
        wanted = set() if any(not rows.outputs for rows in batch) else {name for rows in batch for name in rows.outputs}
        if len(batch) == 1:
            return dict(batch[0].inputs), wanted
        longest = self._longest(batch)
        parts = {name: [self._padded(name, rows.inputs[name], longest) for rows in batch] for name in batch[0].inputs}
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}, wanted

    def _longest(self, batch: Sequence[Rows]) -> int | None:
        return None if batch[0].length is None else max(rows.length or 0 for rows in batch)

    def _padded(self, name: str, array: np.ndarray, longest: int | None) -> np.ndarray:
        if longest is None:
            return array
        dims = self._inputs[name].dims
        shape = (array.shape[0], *(longest if dim == WILDCARD else dim for dim in dims))
        if shape == array.shape:
            return array
        padded = np.full(shape, self._pad(name), array.dtype)
        padded[tuple(slice(0, size) for size in array.shape)] = array
        return padded

    def _pad(self, name: str) -> object:
        kind = NUMPY_TYPES[self._inputs[name].data_type]
        word = (self._lengths.pads or {}).get(name)
        if kind.hasobject:
            return (word or "").encode()
        return kind.type(0 if word is None else float(word) if kind.kind == "f" else int(word))

    def num_padded(self, batch: Sequence[Rows]) -> tuple[int, int]:
        """(elements of padding, all elements) along the length, of a batch in a length bucket."""
        longest = self._longest(batch)
        if longest is None:
            return 0, 0
        whole = longest * sum(rows.num_rows for rows in batch)
        return whole - sum((rows.length or 0) * rows.num_rows for rows in batch), whole

    def split(self, outputs: Mapping[str, np.ndarray], batch: Sequence[Rows]) -> list[tuple[Tensor, ...]]:
        """Split off each request's rows, cut back to its length. Raises InvalidRequest for too few rows."""
        total, longest = sum(rows.num_rows for rows in batch), self._longest(batch)
        for name, array in outputs.items():
            if len(batch) > 1 and (not array.ndim or array.shape[0] != total):
                raise InvalidRequest(
                    f"output {name!r} of {self._name!r} has shape {list(array.shape)} for {total} rows"
                )
        answers, start = [], 0
        for rows in batch:
            end = start + rows.num_rows
            mine = {name: array[start:end] if len(batch) > 1 else array for name, array in outputs.items()}
            answers.append(self._answer(mine, rows, longest))
            start = end
        return answers

    def _answer(self, outputs: Mapping[str, np.ndarray], rows: Rows, longest: int | None) -> tuple[Tensor, ...]:
        names = rows.outputs or [name for name in self._outputs if name in outputs]
        cut = (self._cut(self._outputs[name], outputs[name], rows.length, longest) for name in names)
        return tuple(
            tensor_of(name, array, self._outputs[name].data_type) for name, array in zip(names, cut, strict=True)
        )

    def _cut(self, spec: DeclaredTensor, array: np.ndarray, length: int | None, longest: int | None) -> np.ndarray:
        if length is None or length == longest or array.ndim != len(spec.dims) + 1:
            return array
        pairs = zip(spec.dims, array.shape[1:], strict=True)
        return array[
            (slice(None), *(slice(length if dim == WILDCARD and size == longest else size) for dim, size in pairs))
        ]


# ---- one batch on one instance, in whatever thread: joined, run, split, and each of these timed


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
