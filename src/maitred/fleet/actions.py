"""Actions that the core returns, for its driver to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.core.errors import MaitredError
from maitred.fleet.balance import Choice
from maitred.fleet.fleet_request import Failure


@dataclass(frozen=True, slots=True)
class Bind:
    """Send it there. `resumes` says that the client has a part of the answer, which must go on token for token."""

    request_id: str
    choice: Choice
    attempt: int  # 1, 2 ...
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """Abandon the attempt that is under way, and say nothing to the client; a Bind or a Refuse of it follows."""

    request_id: str
    replica: str
    reason: str  # silent, reset, hung, drain


@dataclass(frozen=True, slots=True, eq=False)
class Refuse:
    """End it with this error, and its attempt if one is under way; it is forgotten here. `failure` is what its last
    replica did, if that is why.
    """

    request_id: str
    error: MaitredError
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """A launched replica: a new one under this name, or one that is asleep; tell `joined` when it is ready. One kept
    warm is there already.
    """

    name: str
    origin: str  # warm, asleep, cold


@dataclass(frozen=True, slots=True)
class Sleep:
    """A launched replica that is not needed, and has nothing in flight: it is to give its memory back."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """A launched replica that has nothing in flight any more; tell `left` when it has ended."""

    name: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask whether it can serve, and tell `probed`."""

    name: str


Action = Bind | Move | Refuse | Start | Sleep | Stop | Probe
