"""Candidates: a heap of items with keys that may rise unseen, and the smallest; `policy.queue` does so with groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Any, Generic, TypeVar

MIN_DEAD_ENTRIES = 64  # below this a heap with entries that count no more is not worth compacting

T = TypeVar("T", bound=Hashable)


class Candidates(Generic[T]):
    """`key_of` gives a thing's key now, or None while it is no candidate; a fall, and a return, must be offered."""

    def __init__(self, key_of: Callable[[T], tuple[Any, ...] | None]) -> None:
        self._key_of = key_of
        self._heap: list[tuple[tuple[Any, ...], int, T]] = []
        self._listed: dict[T, tuple[Any, ...]] = {}  # the key of the entry that counts
        self._sequence = count()

    def __len__(self) -> int:
        """Return an upper bound on the number of candidates."""
        return len(self._listed)

    def offer(self, thing: T) -> None:
        """Take in a new candidate, or one with a key that may have fallen."""
        key, listed = self._key_of(thing), self._listed.get(thing)
        if key is not None and (listed is None or key < listed):
            self._listed[thing] = key
            heappush(self._heap, (key, next(self._sequence), thing))
            if len(self._heap) > 2 * len(self._listed) + MIN_DEAD_ENTRIES:
                self._heap = [(key, next(self._sequence), thing) for thing, key in self._listed.items()]
                heapify(self._heap)

    def best(self) -> T | None:
        """The one with the smallest key, which stays."""
        first = self.first()
        return None if first is None else first[1]

    def first(self) -> tuple[tuple[Any, ...], T] | None:
        """Return the smallest key and its item, which stays."""
        while self._heap:
            listed, _, thing = self._heap[0]
            if self._listed.get(thing) is not listed:
                heappop(self._heap)
                continue
            key = self._key_of(thing)
            if key == listed:
                return listed, thing
            if key is None:
                heappop(self._heap)
                del self._listed[thing]
                continue
            self._listed[thing] = key
            heapreplace(self._heap, (key, next(self._sequence), thing))
        return None
