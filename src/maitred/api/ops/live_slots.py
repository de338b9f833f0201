"""Which row of the picture a request sits in: a batch has no places, but people follow a request by its place."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


class SeatPlan:
    """Gives each request the lowest free seat and keeps it there until it leaves. A preempted one leaves."""

    def __init__(self) -> None:
        self._seats: dict[str, int] = {}
        self._free: list[int] = []

    def seat(self, request_ids: Iterable[str]) -> list[int]:
        """Seats of all that sit now, in their order; whoever is not named has left."""
        sitting = list(request_ids)
        for gone in self._seats.keys() - set(sitting):
            heappush(self._free, self._seats.pop(gone))
        for request_id in sitting:
            if request_id not in self._seats:
                self._seats[request_id] = heappop(self._free) if self._free else len(self._seats)
        return [self._seats[request_id] for request_id in sitting]
