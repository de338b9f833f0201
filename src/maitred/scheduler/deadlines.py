"""Deadlines: a heap, so that a step looks only at requests that have run out of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, Protocol, TypeVar

from maitred.core.request import FinishReason

MIN_DEAD_ENTRIES = 64  # below this a heap with ended requests in it is not worth compacting


class HasDeadlines(Protocol):
    """A request as far as its deadlines go."""

    @property
    def start_by(self) -> float | None: ...

    @property
    def finish_by(self) -> float | None: ...

    @property
    def first_scheduled_at(self) -> float | None: ...

    @property
    def finished(self) -> bool: ...


R = TypeVar("R", bound=HasDeadlines)


class _Entry(NamedTuple, Generic[R]):
    due_at: float
    sequence: int  # unique, so that ties go by arrival and requests are never compared
    request: R
    reason: FinishReason


class Deadlines(Generic[R]):
    """`start_by` and `finish_by` of all requests that have them and have not ended."""

    def __init__(self, awaits_leader: Callable[[R], bool] = lambda request: False) -> None:
        self._awaits_leader = awaits_leader
        self.heap: list[_Entry[R]] = []
        self._sequence = 0
        self._num_dead = 0  # entries of ended requests, as far as known

    def __len__(self) -> int:
        return len(self.heap)

    def add(self, request: R) -> None:
        if request.start_by is not None:
            self._push(request.start_by, request, FinishReason.QUEUE_TIMEOUT)
        if request.finish_by is not None:
            self._push(request.finish_by, request, FinishReason.TIMEOUT)

    def ended(self, request: R) -> None:
        """Forget the request; its entries are dropped when they surface, or when the dead outnumber the living."""
        self._num_dead += (request.start_by is not None) + (request.finish_by is not None)
        if self._num_dead > len(self.heap) // 2 + MIN_DEAD_ENTRIES:
            self.heap = [entry for entry in self.heap if not entry.request.finished]
            heapify(self.heap)
            self._num_dead = 0

    @property
    def next_at(self) -> float | None:
        """Return when the next request may run out of time (s)."""
        while self.heap and self.heap[0].request.finished:
            heappop(self.heap)
            self._num_dead = max(0, self._num_dead - 1)
        return self.heap[0].due_at if self.heap else None

    def missed(self, now: float) -> Iterator[tuple[R, FinishReason]]:
        """Yield requests past their deadline, the most overdue first; end each before asking for the next.

        A request in its first step is not late to start, nor is a sample whose leader computes the prompt already.
        """
        while self.heap and self.heap[0].due_at <= now:
            _, _, request, reason = heappop(self.heap)
            if request.finished:
                self._num_dead = max(0, self._num_dead - 1)
            elif reason is FinishReason.TIMEOUT or self._waits_to_start(request):
                yield request, reason

    def _push(self, due_at: float, request: R, reason: FinishReason) -> None:
        self._sequence += 1
        heappush(self.heap, _Entry(due_at, self._sequence, request, reason))

    def _waits_to_start(self, request: R) -> bool:
        return request.first_scheduled_at is None and not self._awaits_leader(request)
