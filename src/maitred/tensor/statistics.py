"""Triton's statistics of models, counted where answers come by: they go on over the end of an engine."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from maitred.core.tensor_request import DURATIONS, BatchTimes, ModelStatistics, unknown_model


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
    durations: dict[str, _Count] = field(default_factory=lambda: {name: _Count() for name in DURATIONS})
    batches: dict[int, _Count] = field(default_factory=dict)  # by rows


class Statistics:
    """Statistics by model and version, from its load until it is unloaded."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], _Counts] = {}

    def serve(self, versions: Collection[tuple[str, int]]) -> None:
        """Take in the served versions; others are forgotten."""
        self._counts = {key: self._counts.get(key) or _Counts() for key in sorted(versions)}

    def ran(self, times: BatchTimes) -> None:
        """Count as Triton does: each request of a batch is charged with all of it, the batch once."""
        counts = self._counts.setdefault((times.model, times.version), _Counts())
        counts.last_inference_ms = int(time.time() * 1000)
        counts.num_rows += times.num_rows
        for name in ("input", "infer", "output"):
            counts.durations[f"compute_{name}"].add(
                times.num_requests, times.num_requests * getattr(times, f"{name}_ns")
            )
        counts.batches.setdefault(times.num_rows, _Count()).add(1, times.infer_ns)

    def ended(self, model: str, version: int, *, succeeded: bool, total_ns: int, queue_ns: int) -> None:
        """Count an ended request; version 0 is the highest served one, and without any it is not counted."""
        version = version or max((number for name, number in self._counts if name == model), default=0)
        if not version:
            return
        durations = self._counts.setdefault((model, version), _Counts()).durations
        durations["success" if succeeded else "fail"].add(1, total_ns)
        if succeeded:
            durations["queue"].add(1, queue_ns)

    def cached(self, model: str, version: int, *, hit: bool, ns: int) -> None:
        """Count a look into the cache; of a miss the time that looking and keeping took."""
        durations = self._counts.setdefault((model, version), _Counts()).durations
        durations["cache_hit" if hit else "cache_miss"].add(1, ns)

    def of(self, model: str = "", version: int = 0) -> list[ModelStatistics]:
        """Return the statistics of all, of a model, or of a version. Raises ModelNotFound."""
        keys = [key for key in self._counts if model in ("", key[0]) and version in (0, key[1])]
        if model and not keys:
            raise unknown_model(model, version)
        return [_told(*key, self._counts[key]) for key in keys]


def _told(model: str, version: int, counts: _Counts) -> ModelStatistics:
    return ModelStatistics(
        model=model,
        version=version,
        last_inference_ms=counts.last_inference_ms,
        inference_count=counts.num_rows,
        execution_count=sum(each.count for each in counts.batches.values()),
        batches=tuple((rows, each.count, each.ns) for rows, each in sorted(counts.batches.items())),
        **{name: each.pair for name, each in counts.durations.items()},
    )
