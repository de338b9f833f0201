"""Whom a supervised engine works for: what it is told of engines that come and go."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from maitred.engine.frames import Report


class Loss(NamedTuple):
    """What came of the requests of an engine that died."""

    num_kept: int  # wait for the next one
    num_ended: int
    found_cause: bool = False  # one of those that ended had killed the engines; the others may hope

    def beside(self, other: Loss) -> Loss:
        """Of both together."""
        cause = self.found_cause or other.found_cause
        return Loss(self.num_kept + other.num_kept, self.num_ended + other.num_ended, cause)


class Owner(Protocol):
    """Whom the engine works for; told everything on the event loop, once there is one."""

    def heard(self, report: Report) -> None:
        """What is not about the process itself."""

    def lost(self, cause: str, *, deterministic: bool, own_fault: bool) -> Loss:
        """The engine died, by its own fault or not; if there will be none any more, `bereft` comes next."""

    def regained(self) -> int:
        """There is an engine again: how many requests go on."""

    def bereft(self, cause: str) -> None:
        """The engine died, and none will come."""

    def idle_s(self) -> float:
        """Since there was last a request; 0 while there is one."""

    def slept(self) -> None:
        """The engine was ended on purpose, without a request; `regained` follows when there is one again."""
