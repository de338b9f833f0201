"""Small simulated worlds in a line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.core.step import SchedulerOutput
from maitred.scheduler.engine_core import StepListener, StepTimes
from maitred.sim.engine import EngineSetup, Simulation
from maitred.sim.results import Objectives, SimulatedResults
from maitred.sim.synthetic import SyntheticWorkload, parse_spec
from maitred.sim.workload import Arrival

COSTS = CostModel(fixed_s=1e-3, prefill_token_s=1e-5, decode_token_s=1e-4)


class PlanKeeper(StepListener):
    """Keeps every plan, and the times around it."""

    def __init__(self) -> None:
        self.plans: list[SchedulerOutput] = []
        self.times: list[tuple[float, float]] = []

    def stepped(self, plan: SchedulerOutput, output: object, progress: object, times: StepTimes) -> None:
        self.plans.append(plan)
        self.times.append((times.scheduled_at, times.executed_at))


class Calls:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.num = function, 0

    def __call__(self, *args: Any) -> Any:
        self.num += 1
        return self._function(*args)


def arrival(request_id: str, at: float = 0.0, prompt: int = 8, output: int = 4, **fields: Any) -> Arrival:
    fields = {"max_tokens": max(output, 16), "own": request_id.encode()} | fields
    return Arrival(at=at, request_id=request_id, prompt_tokens=prompt, output_tokens=output, **fields)


def setup(*, policy: str = "fcfs", max_num_seqs: int = 4, num_blocks: int = 64, **fields: Any) -> EngineSetup:
    config = SchedulerConfig(policy=policy, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    return EngineSetup(scheduler=config, num_blocks=num_blocks, **{"block_size": 4} | fields)


def simulation(
    *, objectives: Objectives | None = None, listener: PlanKeeper | None = None, **fields: Any
) -> Simulation:
    return Simulation(setup(**fields), COSTS, SimulatedResults(objectives), listener=listener)


def workload(**spec: Any) -> SyntheticWorkload:
    return SyntheticWorkload(parse_spec(spec, "test"))
