"""Usage that replicas report late, of requests that came to no end there: a ledger row waits a moment for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from maitred.fleet.fleet_request import Usage
from maitred.fleet.told_tokens import NOTHING, ToldUsage

WAIT_S = 2.0  # for a report that comes a step after the request was let go; a dead replica sends none


class Bill:
    """One request's late usage: what each replica that did not finish it had told, and what it says it computed."""

    __slots__ = ("_computed", "_on_settled", "_told")

    def __init__(self) -> None:
        self._told: dict[str, ToldUsage] = {}
        self._computed: dict[str, ToldUsage] = {}
        self._on_settled: Callable[[], None] | None = None

    def left(self, replica: str, told: ToldUsage) -> None:
        """The request leaves `replica`; `told` is all that any replica told of it so far."""
        self._told[replica] = told

    def computed(self, replica: str, usage: ToldUsage) -> None:
        self._computed[replica] = usage
        if self._on_settled is not None and self.is_settled:
            settled, self._on_settled = self._on_settled, None
            settled()

    @property
    def is_settled(self) -> bool:
        return self._told.keys() <= self._computed.keys()

    def when_settled(self, call: Callable[[], None]) -> None:
        self._on_settled = call

    def with_untold(self, usage: Usage) -> Usage:
        """Usage with what was computed beyond what was told."""
        untold = NOTHING
        for replica, told in list(self._told.items()):  # the ledger's thread asks too
            computed = self._computed.get(replica, told)
            untold = ToldUsage(
                *(sum_ + max(0, all_ - part) for sum_, all_, part in zip(untold, computed, told, strict=True))
            )
        if not any(untold):
            return usage
        return Usage(
            (usage.num_prompt_tokens or 0) + untold.num_prompt_tokens,
            (usage.num_output_tokens or 0) + untold.num_output_tokens,
            (usage.num_cached_tokens or 0) + untold.num_cached_tokens,
            usage.complete,
            usage.compute_us + untold.compute_us,
        )


class Bills:
    """Open bills, by the id under which replicas know the request. Belongs to the event loop."""

    def __init__(self) -> None:
        self._open: dict[str, Bill] = {}

    def computed(self, replica: str, request_id: str, usage: ToldUsage) -> None:
        """Usage reported by a replica; ignored for closed requests and for other routers'."""
        bill = self._open.get(request_id)
        if bill is not None:
            bill.computed(replica, usage)

    def opened(self, request_id: str) -> Bill:
        """Open a bill until `closed`; of two in flight with the same id, only the first hears of usage."""
        bill = Bill()
        self._open.setdefault(request_id, bill)
        return bill

    def close(self, request_id: str, bill: Bill, then: Callable[[], None]) -> None:
        """Close a bill and call `then`, once it is settled or no more is to come."""
        if bill.is_settled:
            self._closed(request_id, bill, then)
            return
        giving_up = asyncio.get_running_loop().call_later(WAIT_S, self._closed, request_id, bill, then)

        def settled() -> None:
            giving_up.cancel()
            self._closed(request_id, bill, then)

        bill.when_settled(settled)

    def _closed(self, request_id: str, bill: Bill, then: Callable[[], None]) -> None:
        if self._open.get(request_id) is bill:
            del self._open[request_id]
        then()
