"""Actions that the core returns for its driver, and the choices remembered for people asking why."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from maitred.core.errors import MaitredError
from maitred.fleet.balance import Candidate, Choice
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


MAX_REQUESTS = 1000  # that are remembered


class Way(msgspec.Struct, frozen=True):
    """A way to serve a request among workers that hand KV over, as it was foretold; see `fleet.disagg.Option`."""

    name: str  # `worker`, or `prefill > worker`; with `< peer` where a prefix is fetched
    terms: dict[str, float]


class ChoiceMade(msgspec.Struct, frozen=True):
    """One attempt: the replica chosen, after how long a wait, and the other candidates, the best first."""

    attempt: int
    replica: str
    held_s: float
    resumes: bool
    candidates: tuple[Candidate, ...]
    ways: tuple[Way, ...] = ()  # the first was chosen


class ChoicesMade(msgspec.Struct, frozen=True):
    """Choices of one request, in order."""

    request_id: str
    choices: tuple[ChoiceMade, ...]


class Choices:
    """Remembers those of the last MAX_REQUESTS requests that were bound."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, list[tuple[Bind, float]]] = OrderedDict()  # the newest is last

    def bound(self, bind: Bind, held_s: float) -> None:
        """A request goes to a replica, for the first time or again."""
        if bind.attempt == 1:  # an id that was used before begins anew, and is the newest
            self._of.pop(bind.request_id, None)
            if len(self._of) >= MAX_REQUESTS:
                self._of.popitem(last=False)
        self._of.setdefault(bind.request_id, []).append((bind, held_s))

    def of(self, words: str) -> ChoicesMade | None:
        """Choices of the newest request of that id, else of one whose id is a part of `words`, or they of it: an
        answer's id has a prefix that a router's lacks, and a worker's goes on with the number of the prompt.
        """
        alike = (name for name in reversed(self._of) if name in words or words in name)
        found = words if words in self._of else next(alike, None)
        if found is None:
            return None
        return ChoicesMade(found, tuple(_made(bind, held_s) for bind, held_s in self._of[found]))


def _made(bind: Bind, held_s: float) -> ChoiceMade:
    ways = tuple(Way(option.name, option.terms) for option in bind.choice.foretold)
    return ChoiceMade(bind.attempt, bind.choice.replica, held_s, bind.resumes, tuple(bind.choice.candidates), ways)
