"""Tensor models of an engine, as its client knows them: the index and the configs that the engine told, statistics in
Triton's form, counts for the metrics page. All of it goes on over the end of an engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maitred.core import metrics as m
from maitred.core import tensor_request
from maitred.core.metrics import Metric
from maitred.core.request import Charges, FinishReason
from maitred.core.step import RequestTiming
from maitred.engine.frames import Ended, Looked, ModelsTold, News, Ran, StepEnded

Samples = dict[tuple[str, ...], float]


@dataclass(slots=True)
class _Served:
    configs: dict[int, Any] = field(default_factory=dict)  # ModelConfigs by version
    labels: dict[str, int] = field(default_factory=dict)


class TensorModels:
    """Tensor models of one server, which every protocol asks, on the event loop; what waits is a coroutine.

    Errors are `maitred.core.errors`: ModelNotFound, InvalidRequest, Unavailable, Overloaded, RequestTimeout ...
    """

    def __init__(
        self,
        infer: Callable[[tensor_request.InferRequest], Awaitable[tensor_request.InferResponse]],
        change: Callable[[tensor_request.ModelChange], Awaitable[None]],
        unanswered: Callable[[], Iterable[tensor_request.InferRequest]],
        read_config: Callable[[bytes], Any],
    ) -> None:
        """`infer`, `change` and `unanswered`, the requests without an answer, are the client's; `read_config` makes a
        ModelConfig of protobuf's wire format.
        """
        self._infer, self._change, self._unanswered, self._read_config = infer, change, unanswered, read_config
        self._index: tuple[tensor_request.IndexEntry, ...] = ()
        self._served: dict[str, _Served] = {}
        self._statistics = Statistics()
        self.counts = TensorCounts()

    async def infer(self, request: tensor_request.InferRequest) -> tensor_request.InferResponse:
        """Answer of a model. Cancelling gives up the request's place at once."""
        return await self._infer(request)

    async def load(self, model: str, config: str | None = None) -> None:
        """Load as `tensor.served_models.ModelControl.load`."""
        await self._change(tensor_request.ModelChange(model=model, loads=True, config=config))

    async def unload(self, model: str) -> None:
        await self._change(tensor_request.ModelChange(model=model, loads=False))

    def index(self, *, ready_only: bool = False) -> Sequence[tensor_request.IndexEntry]:
        ready = {(name, version) for name, served in self._served.items() for version in served.configs}
        return [entry for entry in self._index if not ready_only or (entry.name, entry.version) in ready]

    def config(self, model: str, version: int = 0, label: str = "") -> Any:
        """The ModelConfig as it is served, gaps filled. Raises ModelNotFound."""
        served = self._served.get(model)
        if served is None:
            raise tensor_request.unknown_model(model)
        if label and label not in served.labels:
            raise tensor_request.unknown_model(model, label=label, served=tuple(served.configs))
        number = served.labels[label] if label else version or max(served.configs)
        if number not in served.configs:
            raise tensor_request.unknown_model(model, number, served=tuple(served.configs))
        return served.configs[number]

    def versions(self, model: str) -> Sequence[int]:
        """Versions that answer now, ascending; none for a model that is not served."""
        return sorted(self._served[model].configs) if model in self._served else ()

    def statistics(self, model: str = "", version: int = 0) -> Sequence[tensor_request.ModelStatistics]:
        """Statistics of all models, of one, or of one version. Raises ModelNotFound."""
        return self._statistics.of(model, version)

    def num_unanswered(self) -> Counter[tuple[str, int]]:
        """Requests that wait or run, by model and version."""
        return Counter(
            (each.model, each.version or max(self.versions(each.model), default=0)) for each in self._unanswered()
        )

    # -- what the engine tells

    def hear(self, news: News) -> None:
        match news:
            case ModelsTold():
                self._models_changed(news)
            case Ran() | Looked() | StepEnded():
                self._statistics.hear(news)
                if isinstance(news, Ran):
                    self.counts.ran(news.times)

    def ended(self, request: tensor_request.InferRequest, ended: Ended) -> None:
        """Count a request's end in the engine."""
        if ended.timing is not None:
            self.counts.ended(request.model, ended.finish_reason, ended.charges)
            version = request.version if ended.result is None else ended.result.version
            self._statistics.ended(request.model, version, ended.timing, succeeded=ended.result is not None)

    def _models_changed(self, models: ModelsTold) -> None:
        self._index, self._served = models.index, {}
        for each in models.served:
            served = self._served.setdefault(each.model, _Served())
            served.configs[each.number] = self._read_config(each.config)
            served.labels |= dict.fromkeys(each.labels, each.number)
        self._statistics.serve([(each.model, each.number) for each in models.served])


@dataclass(slots=True)
class _Count:
    count: int = 0
    ns: int = 0

    def add(self, count: int, ns: int) -> None:
        self.count += count
        self.ns += ns

    @property
    def pair(self) -> tuple[int, int]:
        return self.count, self.ns


@dataclass(slots=True)
class _Counts:
    last_inference_ms: int = 0
    num_rows: int = 0
    durations: dict[str, _Count] = field(default_factory=lambda: {name: _Count() for name in tensor_request.DURATIONS})
    batches: dict[int, _Count] = field(default_factory=dict)  # by rows


class Statistics:
    """Statistics by model and version, from its load until it is unloaded."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], _Counts] = {}

    def serve(self, versions: Collection[tuple[str, int]]) -> None:
        """Take in the served versions; others are forgotten."""
        self._counts = {key: self._counts.get(key) or _Counts() for key in sorted(versions)}

    def hear(self, news: Ran | Looked | StepEnded) -> None:
        """Count a batch, a look into the response cache, or a step of an ensemble."""
        match news:
            case Ran(times):
                self._ran(times)
            case Looked(model, version, hit, ns):  # a miss takes what looking and keeping took
                self._at(model, version).durations["cache_hit" if hit else "cache_miss"].add(1, ns)
            case StepEnded(model, version, succeeded, total_ns, queue_ns):
                self._ended(model, version, succeeded, total_ns, queue_ns)

    def ended(self, model: str, version: int, timing: RequestTiming, *, succeeded: bool) -> None:
        """Count an ended request; version 0 is the highest served one, and without any it is not counted."""
        self._ended(model, version, succeeded, round(timing.total_s * 1e9), round(timing.queue_s * 1e9))

    def _ran(self, times: tensor_request.BatchTimes) -> None:
        """Count as Triton does: each request of a batch is charged with all of it, the batch once."""
        counts = self._at(times.model, times.version)
        counts.last_inference_ms = int(time.time() * 1000)
        counts.num_rows += times.num_rows
        for name in ("input", "infer", "output"):
            counts.durations[f"compute_{name}"].add(
                times.num_requests, times.num_requests * getattr(times, f"{name}_ns")
            )
        counts.batches.setdefault(times.num_rows, _Count()).add(1, times.infer_ns)

    def _ended(self, model: str, version: int, succeeded: bool, total_ns: int, queue_ns: int) -> None:
        version = version or max((number for name, number in self._counts if name == model), default=0)
        if not version:
            return
        durations = self._at(model, version).durations
        durations["success" if succeeded else "fail"].add(1, total_ns)
        if succeeded:
            durations["queue"].add(1, queue_ns)

    def _at(self, model: str, version: int) -> _Counts:
        key = (model, version)
        if key not in self._counts:
            self._counts[key] = _Counts()
        return self._counts[key]

    def of(self, model: str = "", version: int = 0) -> list[tensor_request.ModelStatistics]:
        """Return the statistics of all, of a model, or of a version. Raises ModelNotFound."""
        keys = [key for key in self._counts if model in ("", key[0]) and version in (0, key[1])]
        if model and not keys:
            raise tensor_request.unknown_model(model, version)
        return [_told(*key, self._counts[key]) for key in keys]


def _told(model: str, version: int, counts: _Counts) -> tensor_request.ModelStatistics:
    return tensor_request.ModelStatistics(
        model=model,
        version=version,
        last_inference_ms=counts.last_inference_ms,
        inference_count=counts.num_rows,
        execution_count=sum(each.count for each in counts.batches.values()),
        batches=tuple((rows, each.count, each.ns) for rows, each in sorted(counts.batches.items())),
        **{name: each.pair for name, each in counts.durations.items()},
    )


@dataclass(slots=True)
class TensorCounts:
    """Counts of all engines so far, by model."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by model and how they ended
    compute_us: Counter[str] = field(default_factory=Counter)  # the ledger's rows have the same
    rows: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    padding: Counter[str] = field(default_factory=Counter)  # elements along the length
    elements: Counter[str] = field(default_factory=Counter)  # of all, where lengths share buckets

    def ended(self, model: str, reason: FinishReason, charges: Charges) -> None:
        """A request that had been taken in."""
        self.requests[model, reason.value] += 1
        self.compute_us[model] += charges.compute_us

    def ran(self, times: tensor_request.BatchTimes) -> None:
        self.batches[times.model] += 1
        self.rows[times.model] += times.num_rows
        self.padding[times.model] += times.num_padded
        self.elements[times.model] += times.num_elements

    def samples(self) -> Mapping[Metric, Samples]:
        """Samples of TENSOR_METRICS."""
        return {
            m.TENSOR_REQUESTS: {labels: float(count) for labels, count in self.requests.items()},
            m.TENSOR_COMPUTE: {(model,): us / 1e6 for model, us in self.compute_us.items()},
            m.TENSOR_ROWS: _by_model(self.rows),
            m.TENSOR_BATCHES: _by_model(self.batches),
            m.TENSOR_PADDING: {
                (model,): self.padding[model] / count for model, count in self.elements.items() if count
            },
        }


def _by_model(counts: Counter[str]) -> Samples:
    return {(model,): float(count) for model, count in counts.items()}
