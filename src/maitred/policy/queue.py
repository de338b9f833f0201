"""The waiting requests, in the order of a policy: a heap for each group and a heap of groups, never re-sorted whole."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, NamedTuple, TypeVar

from maitred.policy.policy import GroupRule, Queued, Rank

MIN_DEAD_ENTRIES = 64  # below this a heap with removed requests in it is not worth compacting

Q = TypeVar("Q", bound=Queued)


class _Entry(NamedTuple, Generic[Q]):
    key: tuple[Any, ...]
    sequence: int  # unique, so that comparing entries never compares requests
    request: Q


class RequestQueue(Generic[Q]):
    """Push, peek and pop cost O(log n). Removal is O(1): the entry stays in its heap until it surfaces, or until
    removed entries outnumber the living.
    """

    def __init__(self, groups: GroupRule | None = None) -> None:
        self._rule = groups if groups is not None else GroupRule()
        self._entries: dict[str, _Entry[Q]] = {}  # the living, by request id
        self._heaps: dict[str, list[_Entry[Q]]] = {}
        self._groups: list[tuple[Rank, str]] = []  # heap; an entry counts if its rank is the listed one
        self._listed: dict[str, Rank] = {}
        self._num_entries = 0  # in all heaps, removed ones too
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Q]:
        """Iterate in no order."""
        return (entry.request for entry in self._entries.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def num_entries(self) -> int:
        """Number of entries in its heaps, removed ones too; at most MIN_DEAD_ENTRIES + 1 over twice the living."""
        return self._num_entries

    def get(self, request_id: str) -> Q:
        """Raises KeyError when it is not here."""
        return self._entries[request_id].request

    def in_order(self) -> list[Q]:
        """The next first; sorts, so it is for people to look at and not for scheduling."""
        rule = self._rule

        def place(entry: _Entry[Q]) -> tuple[Any, ...]:
            group = rule.group_of(entry.request)
            return (rule.rank(group), group, entry.key)

        return [entry.request for entry in sorted(self._entries.values(), key=place)]

    def first(self, count: int) -> list[Q]:
        """The next `count`, in order, without sorting the rest: about count * log(count) steps in each group's heap."""
        found: list[Q] = []
        for _, group in sorted((self._rule.rank(group), group) for group in self._heaps):
            found += self._first_of(self._heaps[group], count - len(found))
            if len(found) >= count:
                break
        return found

    def _first_of(self, heap: list[_Entry[Q]], count: int) -> list[Q]:
        """Walks down a heap from its root, the smallest known entry first; removed entries are passed over."""
        found: list[Q] = []
        frontier = [(heap[0], 0)] if heap else []
        while frontier and len(found) < count:
            entry, index = heappop(frontier)
            if self._entries.get(entry.request.request_id) is entry:
                found.append(entry.request)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))
        return found

    def push(self, request: Q, key: tuple[Any, ...]) -> None:
        self._sequence += 1
        entry = _Entry(key, self._sequence, request)
        self._entries[request.request_id] = entry
        self._num_entries += 1
        group = self._rule.group_of(request)
        heappush(self._heaps.setdefault(group, []), entry)
        self.note_rank(group)

    def peek(self) -> Q | None:
        """The next request, which stays in the queue."""
        heap = self._first_heap()
        return heap[0].request if heap else None

    def peek_placed(self) -> tuple[Rank, str, Q] | None:
        """The rank and the name of the next request's group, and the request, which stays in the queue."""
        heap = self._first_heap()
        return (*self._groups[0], heap[0].request) if heap else None

    def pop(self) -> Q:
        """Takes out the next request. Raises IndexError when there is none."""
        heap = self._first_heap()
        if heap is None:
            raise IndexError("pop from an empty queue")
        self._num_entries -= 1
        request = heappop(heap).request
        del self._entries[request.request_id]
        return request

    def remove(self, request_id: str) -> None:
        """Takes out one request wherever it stands. Raises KeyError when it is not here."""
        del self._entries[request_id]
        if self._num_entries > 2 * len(self._entries) + MIN_DEAD_ENTRIES:
            self._compact()

    def note_rank(self, group: str) -> None:
        """The rank of `group` may have changed. A rise is noticed in `peek`, a fall must be told."""
        if group in self._heaps:
            rank = self._rule.rank(group)
            listed = self._listed.get(group)
            if listed is None or rank < listed:
                self._listed[group] = rank
                heappush(self._groups, (rank, group))
                if len(self._groups) > 2 * len(self._listed) + MIN_DEAD_ENTRIES:
                    self._groups = [(rank, group) for group, rank in self._listed.items()]
                    heapify(self._groups)

    def _first_heap(self) -> list[_Entry[Q]] | None:
        """The heap of the group that is served next, with a living entry on top."""
        groups, listed, rank_of = self._groups, self._listed, self._rule.rank
        while groups:
            rank, group = groups[0]
            if listed.get(group) != rank:
                heappop(groups)  # the group was listed anew with a smaller rank
                continue
            current = rank_of(group)
            if current != rank:
                listed[group] = current
                heapreplace(groups, (current, group))
                continue
            heap = self._heaps[group]
            self._drop_removed(heap)
            if heap:
                return heap
            heappop(groups)
            del self._heaps[group], listed[group]
        return None

    def _drop_removed(self, heap: list[_Entry[Q]]) -> None:
        while heap and self._entries.get(heap[0].request.request_id) is not heap[0]:
            heappop(heap)
            self._num_entries -= 1

    def _compact(self) -> None:
        for heap in self._heaps.values():
            heap[:] = [entry for entry in heap if self._entries.get(entry.request.request_id) is entry]
            heapify(heap)
        self._num_entries = len(self._entries)
