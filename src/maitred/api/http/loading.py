"""Before the engine is there: what the server answers meanwhile, and how it hears that requests are welcome."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from maitred.engine.intake import ServedModel
from maitred.errors import EngineDead
from maitred.gate.admission import AdmissionController
from maitred.replica import Replica, ReplicaState
from maitred.request import FinishReason, RequestSpec
from maitred.step import RequestProgress

LOADING = "the engine is loading; try again"


class Opened(Protocol):
    """A running engine and what the server must know of it."""

    @property
    def replica(self) -> Replica: ...

    @property
    def model(self) -> ServedModel: ...

    @property
    def admission(self) -> AdmissionController | None: ...

    @property
    def start_phases(self) -> Mapping[str, float]:
        """Seconds of each phase of its start, in order."""


class Starting(Protocol):
    """An engine on its way."""

    def wait(self) -> Opened:
        """Returns when it has loaded, raises what keeps it from loading. Called in a thread of its own, once."""

    def give_up(self) -> None:
        """From another thread: nobody wants it any more, and `wait` need not wait."""


class LoadingReplica:
    """Stands where the engine will be. Not alive, and nothing is wrong with that."""

    def state(self) -> ReplicaState:
        return ReplicaState(alive=False, loading=True)

    def submit(self, request: RequestSpec) -> AsyncIterator[RequestProgress]:
        raise EngineDead(LOADING)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """There is nothing to end."""
