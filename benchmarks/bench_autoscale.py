"""The autoscaler beside the rule of the HPA of `deploy/kubernetes/fleet`, simulated: replica-seconds and
promises kept.

    python benchmarks/bench_autoscale.py [--hours 1]

An hour of a step, a day's tide and bursts, over replicas of 8 slots that take 20 s to start and 6 s for a request; the
promise is a first token within 1 s. Aims: at most 0.8 of the HPA's replica-seconds at no worse attainment, and at a
steady load no change of the target against the one before within a minute.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from kubernetes_hpa import HpaRule, Metric

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.fleet.autoscale import AutoscaleConfig, Autoscaler, FleetFigures
from maitred.fleet.config import FleetConfig
from maitred.fleet.sizing import Autoscale
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSimulation
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup
from maitred.sim.results import Objectives, Results
from maitred.sim.workload import Arrival

OBJECTIVE_S, START_S, SLOTS, MOST = 1.0, 20.0, 8, 24
STEP_S, MEAN_TOKENS = 0.2, 30  # 6 s a request
SCHEDULER = SchedulerConfig(max_num_seqs=SLOTS)
Rate = Callable[[float], float]  # arrivals/s at a time

SHAPES: dict[str, tuple[Rate, float]] = {  # and the highest
    "steady": (lambda at: 4.0, 4.0),
    "step": (lambda at: 2.0 if at % 2400 < 1200 else 8.0, 8.0),
    "diurnal": (lambda at: 5.0 - 4.0 * math.cos(2 * math.pi * at / 3600), 9.0),
    "burst": (lambda at: 10.0 if at % 900 > 840 else 2.0, 10.0),
}


@dataclass
class Kept:
    """An autoscaler whose targets are kept."""

    scale: Autoscale
    targets: list[tuple[float, int]] = field(default_factory=list)

    def __call__(self, figures: FleetFigures, now: float) -> int:
        self.targets.append((now, self.scale(figures, now)))
        return self.targets[-1][1]

    def num_reversals(self, within_s: float) -> int:
        changes = [(at, num - before) for (_, before), (at, num) in pairwise(self.targets) if num != before]
        return sum(1 for (at, move), (later, other) in pairwise(changes) if move * other < 0 and later - at < within_s)


def arrivals(shape: str, seconds: float, seed: int) -> Iterator[Arrival]:
    """Poisson with a rate that changes: arrivals at the highest rate, thinned (Lewis and Shedler 1979)."""
    (rate, highest), rng, at, number = SHAPES[shape], Random(f"{shape}/{seed}"), 0.0, 0
    while (at := at + rng.expovariate(highest)) < seconds:
        if rng.random() * highest > rate(at):
            continue
        number += 1
        tokens = max(2, round(MEAN_TOKENS * rng.lognormvariate(-0.125, 0.5)))
        own = number.to_bytes(8, "little")
        yield Arrival(
            at=at, request_id=f"r{number}", prompt_tokens=64, output_tokens=tokens, max_tokens=tokens + 1, own=own
        )


def run(shape: str, scale: Autoscale, results: Results, seconds: float, seed: int) -> FleetSimulation:
    engine = EngineSetup(scheduler=SCHEDULER, num_blocks=4096)
    one = ReplicaSetup(engine=engine, cost_model=CostModel(fixed_s=STEP_S))
    setup = FleetSetup(
        config=FleetConfig(reserve=0.0),  # who is bound has a slot, as the wait in the queue is what both look at
        scheduler=SCHEDULER,
        replicas=[one] * MOST,
        low=1,
        autoscale=scale,
        cold_start_s=START_S,
    )
    simulation = FleetSimulation(setup, results)
    simulation.run(arrivals(shape, seconds, seed))
    return simulation


def hpa(results: Results) -> Autoscale:
    def read() -> Metric:
        """The router counts a wait when the answer is over, as the results do."""
        waits = results.total.queue_s
        return Metric(waits.count, waits.total)

    return HpaRule.of_manifest(1, MOST, read)


def ours(results: Results) -> Autoscale:
    return Autoscaler(AutoscaleConfig(ttft_objective_s=OBJECTIVE_S))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{'':10} {'':12} {'replica-s':>10} {'kept':>7} {'starts':>7} {'reversals':>10}")
    for shape in options.shapes.split(","):
        costs = {}
        for name, rule in (("hpa", hpa), ("autoscaler", ours)):
            results = Results(Objectives(ttft_s=OBJECTIVE_S))
            kept = Kept(rule(results))
            figures = costs[name] = run(shape, kept, results, options.hours * 3600, options.seed).to_json()
            print(
                f"{shape:10} {name:12} {figures['replica_s']:10,.0f} {results.total.slo_attainment:7.1%} "
                f"{figures['num_starts']:7} {kept.num_reversals(60.0):10}",
                flush=True,
            )
        print(f"{shape:10} {'ratio':12} {costs['autoscaler']['replica_s'] / costs['hpa']['replica_s']:10.2f}")


if __name__ == "__main__":
    main()
