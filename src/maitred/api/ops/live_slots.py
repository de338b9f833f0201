"""The row of the picture that a running request has: a batch has no order, but people follow a request by its row."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


class SlotRows:
    """Gives each request the lowest free row and keeps it there until it no longer runs, as when it is preempted."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._free: list[int] = []

    def rows_of(self, request_ids: Iterable[str]) -> list[int]:
        """Rows of all that run now, in their order; whoever is not named has ended or was preempted."""
        running = list(request_ids)
        for gone in self._rows.keys() - set(running):
            heappush(self._free, self._rows.pop(gone))
        for request_id in running:
            if request_id not in self._rows:
                self._rows[request_id] = heappop(self._free) if self._free else len(self._rows)
        return [self._rows[request_id] for request_id in running]
