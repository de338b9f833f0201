"""The owner of a supervised engine: what it is told of engines that come and go."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from maitred.engine.frames import Report


class Loss(NamedTuple):
    """Outcome for the requests of an engine that died."""

    num_kept: int  # wait for the next one
    num_ended: int
    found_cause: bool = False  # one of those that ended had killed the engines; the others may hope

    def beside(self, other: Loss) -> Loss:
        """The loss of both together."""
        cause = self.found_cause or other.found_cause
        return Loss(self.num_kept + other.num_kept, self.num_ended + other.num_ended, cause)


class Owner(Protocol):
    """The owner of the engine; told everything on the event loop, once there is one."""

    def heard(self, report: Report) -> None:
        """Take a report that is not about the process itself."""

    def lost(self, cause: str, *, deterministic: bool, own_fault: bool) -> Loss:
        """The engine died, by its own fault or not; if there will be none any more, `bereft` comes next."""

    def regained(self) -> int:
        """Send the requests to a new engine; how many go on."""

    def bereft(self, cause: str) -> None:
        """The engine died, and none will come."""

    def idle_s(self) -> float:
        """Since there was last a request; 0 while there is one."""

    def slept(self) -> None:
        """The engine was ended on purpose, without a request; `regained` follows when there is one again."""
