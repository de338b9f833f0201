"""Setup of a simulated fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from maitred.config import DEFAULT_TOKEN_BUDGET, SchedulerConfig
from maitred.core.cost_model import CostModel, StepShape
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import DEFAULT_HANDOVER, HandoverConfig, WorkerFacts
from maitred.fleet.sizing import Autoscale, as_asked
from maitred.sim.engine import EngineSetup
from maitred.sim.links import SimulatedDisk, SimulatedLink


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetup:
    """One replica: an engine on a device."""

    engine: EngineSetup
    cost_model: CostModel
    tells_speed: bool = True
    """The router knows how fast its device is."""
    worker: WorkerFacts | None = None
    """Facts that it tells of itself where it may hand KV over."""

    @property
    def tokens_per_s(self) -> float:
        """Return the prompt tokens a second, in steps of as many tokens as there may be."""
        budget = self.engine.scheduler.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
        return budget / self.cost_model.step_s(StepShape(prefill_tokens=budget, rows=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """A router and what is behind it."""

    config: FleetConfig
    scheduler: SchedulerConfig
    """Scheduler of the router's queue: its policy."""
    replicas: Sequence[ReplicaSetup]
    """Replicas, as many as there may be at once, in the order in which they are started."""
    low: int | None = None
    """Fewest there are to be, and as many are there at the beginning; None keeps all of them."""
    autoscale: Autoscale = as_asked
    cold_start_s: float = 30.0
    wake_s: float = 3.0
    num_asleep: int = 0
    """Replicas that are kept asleep when they are stopped, and so need `wake_s` to start."""
    handover: HandoverConfig = DEFAULT_HANDOVER
    """Hand-over, with the objectives by which results are judged."""
    link: SimulatedLink | None = None
    """Link between workers."""
    disk: SimulatedDisk | None = None
    """Disk on which all workers store KV; only where all tell their facts as workers."""

    def workers(self) -> Iterator[str]:
        """Named after their roles."""
        counts = Counter(one.worker.role for one in self.replicas if one.worker is not None)
        for role, count in counts.items():
            yield from (f"{role.value}-{i + 1}" for i in range(count))

    def number_for(self, name: str, unused: Sequence[int]) -> int:
        """Return the number of the first unused replica, of the role that `name` begins with if it names one."""
        of_role = [n for n in unused if (told := self.replicas[n].worker) and name.startswith(told.role)]
        return (of_role or unused)[0]
