"""One request on its way through the router: held, bound to a replica, perhaps again to another, answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from maitred.api.http.exchange import Exchange
from maitred.fleet.fleet_request import FleetRequest

if TYPE_CHECKING:
    from maitred.fleet.actions import Bind


class Moved(Exception):
    """The request is taken from its replica; it will be bound again, or refused."""


class RoutedRequest:
    """A request whose task waits here for the core's decisions; interruptions, a client that left say, come from
    outside.
    """

    __slots__ = (
        *("_bind", "_decision", "_error", "_reason", "_task"),
        *("began", "exchange", "held_at", "held_s", "lost_by", "request"),
    )

    def __init__(self, request: FleetRequest, exchange: Exchange) -> None:
        """Called by the task that answers the request."""
        task = asyncio.current_task()
        assert task is not None, "a request has a task"
        self.request, self.exchange = request, exchange
        self.began = False  # a byte of a replica's answer came, and no other replica may begin anew
        self.held_at: float | None = request.arrived_at  # since when it is waiting for a replica
        self.held_s = 0.0  # before that
        self.lost_by: str | None = None  # the replica that died or hung with it, until it goes on
        self._task = task
        self._bind: Bind | None = None
        self._error: Exception | None = None
        self._decision: asyncio.Future[None] | None = None  # while the task waits for one
        self._reason: Exception | None = None  # why the task was cancelled

    # the task's side

    def bound(self) -> Bind | None:
        """Where the request goes next; None while it is held. Raises why it goes nowhere."""
        if self._error is not None:
            raise self._error
        bind, self._bind = self._bind, None
        return bind

    async def decision(self) -> None:
        """Returns when `bound` may have something else to say."""
        self._decision = asyncio.get_running_loop().create_future()
        try:
            await self._decision
        finally:
            self._decision = None

    @property
    def is_decided(self) -> bool:
        return self._bind is not None or self._error is not None

    def interruption(self) -> Exception | None:
        """Why we cancelled the task; None if we did not. Ends the cancellation."""
        reason, self._reason = self._reason, None
        if reason is not None:
            self._task.uncancel()
        return reason

    # from outside

    def decided(self, bind: Bind, now: float) -> None:
        if self.held_at is not None:
            self.held_s, self.held_at = self.held_s + now - self.held_at, None
        self._bind = bind
        self._wake()

    def refused(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def held_again(self, now: float) -> None:
        if self.held_at is None:
            self.held_at = now

    def interrupt(self, reason: Exception) -> None:
        """End what the task is doing; the first reason counts."""
        if self._reason is None and not self.exchange.complete:
            self._reason = reason
            self._task.cancel()

    def _wake(self) -> None:
        if self._decision is not None and not self._decision.done():
            self._decision.set_result(None)
