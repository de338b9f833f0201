"""A running engine as its owner holds it, whichever process it is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from maitred.config import SchedulerConfig
from maitred.engine.intake import ServedModel
from maitred.engine.live_view import LiveView
from maitred.engine.memory import MemoryPlan
from maitred.gate.admission import AdmissionController
from maitred.replica import Replica
from maitred.scheduler.queue_view import QueueView


class LocalReplica(Replica, Protocol):
    """A replica with an engine of its own on this machine, to look into and to stop."""

    async def queue_view(self, *, offset: int, limit: int) -> QueueView: ...

    async def live_view(self) -> LiveView: ...

    async def scheduler_config(self) -> SchedulerConfig: ...

    async def policy_names(self) -> tuple[str, ...]: ...

    async def configure(self, config: SchedulerConfig) -> None: ...

    async def close(self) -> None:
        """Stop after the current step; unfinished requests end with EngineDead."""

    def stop(self) -> None:
        """The same from any thread, without telling those who listen; idempotent."""


@dataclass(slots=True)
class Engine:
    """A running engine and what the edge must know of it."""

    replica: LocalReplica
    model: ServedModel
    memory_plan: MemoryPlan
    admission: AdmissionController
    start_phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of its start, in order; with a process of its own, those inside it."""
