"""How large a fleet can be simulated: 1,000 replicas and 100,000 requests of 128 tokens, on one core.

    python benchmarks/bench_fleet_scale.py [--replicas 1000] [--requests 100000] [--profile]

Aim: 5 minutes, and memory that does not grow once the simulated caches, and the index of them, are full.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Iterator
from pathlib import Path

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.fleet.config import FleetConfig
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSimulation
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup
from maitred.sim.results import Results
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec
from maitred.sim.workload import Arrival

PROMPT, OUTPUT, RATE_OF_ONE = 64, 128, 12.0  # tokens; requests/s of a replica: some 20 in flight
COSTS = CostModel(fixed_s=10e-3, prefill_token_s=5e-5, decode_token_s=1e-4)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def watched(arrivals: Iterator[Arrival], every: int, marks: list[float]) -> Iterator[Arrival]:
    for number, arrival in enumerate(arrivals):
        if number and number % every == 0:
            marks.append(resident_mib())
            print(f"{number:>9,} came, {time.process_time():7.1f} s, {marks[-1]:7.1f} MiB", flush=True)
        yield arrival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--balance", default="prefix")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    classes = {"all": ClassSpec(input=str(PROMPT), output=str(OUTPUT), max_tokens=OUTPUT)}
    spec = WorkloadSpec(rate=RATE_OF_ONE * options.replicas, num_requests=options.requests, classes=classes)
    scheduler = SchedulerConfig(max_num_seqs=64)
    one = ReplicaSetup(engine=EngineSetup(scheduler=scheduler, num_blocks=512), cost_model=COSTS)
    setup = FleetSetup(
        config=FleetConfig(balance=options.balance), scheduler=scheduler, replicas=[one] * options.replicas
    )
    simulation, marks = FleetSimulation(setup, Results()), list[float]()
    arrivals = watched(SyntheticWorkload(spec).arrivals(), max(1, options.requests // 10), marks)
    profiler = cProfile.Profile()
    began = time.process_time()
    if options.profile:
        profiler.runcall(simulation.run, arrivals)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    else:
        simulation.run(arrivals)
    results, took_s = simulation.results, time.process_time() - began
    print(
        f"{results.total.num_finished:,} requests, {results.num_row_steps:,} request-steps in {results.num_steps:,} "
        f"steps, {results.duration_s:,.1f} s simulated in {took_s:.1f} s of processor time; "
        f"{resident_mib():.0f} MiB, {resident_mib() / marks[len(marks) // 2]:.2f} of that after half, with full caches"
    )


if __name__ == "__main__":
    main()
