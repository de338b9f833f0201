"""Timers: a heap of what falls due; entries no longer wanted are dropped when they surface or pile up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
MIN_DEAD_ENTRIES = 64  # below this a heap with dead entries in it is not worth compacting


class _Entry(NamedTuple, Generic[T]):
    at: float
    sequence: int  # unique, so that what is due is never compared
    due: T


class Timers(Generic[T]):
    """`is_living` tells whether an entry still means something; it must, while `at` is not over, be cheap."""

    def __init__(self, is_living: Callable[[T], bool]) -> None:
        self._is_living = is_living
        self._heap: list[_Entry[T]] = []
        self._sequence = 0
        self._compact_over = MIN_DEAD_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, due: T) -> None:
        self._sequence += 1
        heappush(self._heap, _Entry(at, self._sequence, due))
        if len(self._heap) > self._compact_over:
            self._compact()

    def next_at(self) -> float | None:
        """When the next living entry falls due."""
        heap = self._heap
        while heap and not self._is_living(heap[0].due):
            heappop(heap)
        return heap[0].at if heap else None

    def take_due(self, now: float) -> Iterator[T]:
        """Yield what is due, the earliest first; more may be added meanwhile."""
        while (at := self.next_at()) is not None and at <= now:
            yield heappop(self._heap).due

    def _compact(self) -> None:
        """Costs as much as was added since the last time, or less."""
        self._heap = [entry for entry in self._heap if self._is_living(entry.due)]
        heapify(self._heap)
        self._compact_over = 2 * len(self._heap) + MIN_DEAD_ENTRIES
