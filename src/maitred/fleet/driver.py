"""Drives a `ClusterCore`: what happens goes in with the time, and what the core decides is carried out.

Members are URLs behind a router (`api/route/fleet`), engines of one server (`workers`), or simulated (`sim/fleet`).
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from maitred.core.clock import Clock
from maitred.fleet.actions import Action, Bind, Choices, Move, Probe, Refuse, Sleep, Start, Stop
from maitred.fleet.core import ClusterCore
from maitred.fleet.fleet_request import FleetRequest

TICK_S = 0.05  # how late what falls due may be noticed

R = TypeVar("R")


class Driver(Generic[R]):
    """`R` is a request as the members' side keeps it. A subclass does what its members can; on one event loop."""

    def __init__(self, core: ClusterCore, clock: Clock) -> None:
        self.core, self.clock = core, clock
        self.requests: dict[str, R] = {}  # by the core's id
        self.choices = Choices()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, request: FleetRequest, kept: R) -> None:
        """A new request."""
        self.requests[request.request_id] = kept
        self.hear(self.core.arrived, request)

    def hear(self, happened: Callable[..., list[Action]], *args: Any, **named: Any) -> None:
        """Tell the core what happens now, by one of its methods, and carry out what follows."""
        self.do(happened(*args, now=self.clock.now(), **named))

    def do(self, actions: Sequence[Action]) -> None:
        """Carry out what the core decided."""
        for action in actions:
            match action:
                case Bind():
                    self.bound(self.requests[action.request_id], action)
                case Move():
                    self.moved(self.requests[action.request_id], action)
                case Refuse():
                    self.refused(self.requests[action.request_id], action)
                case Probe(name):
                    self.probe(name)
                case Start(name, origin):
                    self.start(name, origin)
                case Sleep(name):
                    self.sleep(name)
                case Stop(name):
                    self.stop(name)

    # -- what the core decides

    @abstractmethod
    def bound(self, kept: R, bind: Bind) -> None: ...

    @abstractmethod
    def moved(self, kept: R, move: Move) -> None: ...

    @abstractmethod
    def refused(self, kept: R, refuse: Refuse) -> None: ...

    def probe(self, name: str) -> None:
        """Nothing, where a member tells of itself, as its health is heard of in one process."""

    def start(self, name: str, origin: str) -> None:
        """Nothing, as `sleep` and `stop`, where members are not the core's to start."""

    def sleep(self, name: str) -> None: ...

    def stop(self, name: str) -> None: ...

    # -- time, where it passes by itself

    def start_turns(self) -> None:
        """Notice what falls due, until `end_turns`."""
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._turn)

    def end_turns(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def look(self, now: float) -> None:
        """Called at each turn, before what has fallen due."""

    def _turn(self) -> None:
        self.start_turns()  # first, so that nothing can end the row
        now = self.clock.now()
        self.look(now)
        due = self.core.next_tick()
        if due is not None and due <= now:
            self.do(self.core.tick(now))
