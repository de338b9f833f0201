"""How fast the simulator is, how large a fleet it takes, and whether its memory stays flat.

    python benchmarks/bench_simulator.py [speed] [fleet] [soak] [--requests N] [--policies fcfs,srpt] [--base FOLDER]

`speed`: request-steps per second of CPU time at 64 running, for each policy; requests of 64 prompt and 128 output
tokens, always more of them than slots; aim 100,000, which is 50,000 requests a minute. `fleet`: 1,000 replicas and
100,000 requests of 128 tokens on one core; aim 5 minutes, and memory that does not grow once simulated caches are full.
`soak`: a million requests of three tenants with shared prefixes and conversations of one to three turns; fails when
requests are lost, or when resident memory grows by 5% after the first twentieth. With `--base`, an earlier tree, each
part runs there, then here, and the ratio of processor times is printed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.fleet.config import FleetConfig
from maitred.policy.policies import POLICIES
from maitred.sim.engine import EngineSetup, Simulation
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup
from maitred.sim.results import SimulatedResults
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, TenantSpec, WorkloadSpec
from maitred.sim.workload import Arrival

SLOTS, PROMPT, OUTPUT = 64, 64, 128
REPLICAS, RATE_OF_ONE = 1000, 12.0  # requests/s of a replica: some 20 in flight
MAX_GROWTH = 1.05


def alike(rate: float, num_requests: int) -> Iterator[Arrival]:
    classes = {"all": ClassSpec(input=str(PROMPT), output=str(OUTPUT), max_tokens=OUTPUT)}
    return SyntheticWorkload(WorkloadSpec(rate=rate, num_requests=num_requests, classes=classes)).arrivals()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def watched(arrivals: Iterator[Arrival], every: int, marks: list[float]) -> Iterator[Arrival]:
    """The same; notes and tells memory after each so many."""
    for number, arrival in enumerate(arrivals):
        if number and number % every == 0:
            marks.append(resident_mib())
            print(f"{number:>10,} came, {time.process_time():7.1f} s, {marks[-1]:7.1f} MiB", flush=True)
        yield arrival


def speed(options: argparse.Namespace) -> None:
    costs = CostModel(fixed_s=3e-3, prefill_token_s=5e-5, decode_token_s=8e-5)
    print(f"{'policy':12} {'request-steps/s':>16} {'rows a step':>12} {'requests/min':>13}")
    for policy in options.policies.split(","):
        setup = EngineSetup(scheduler=SchedulerConfig(max_num_seqs=SLOTS, policy=policy), num_blocks=4096)
        simulation, began = Simulation(setup, costs, SimulatedResults()), time.process_time()
        results = simulation.run(alike(60.0, options.requests or 3000))
        rate = results.num_row_steps / (time.process_time() - began)
        rows = results.num_row_steps / results.num_steps
        print(f"{policy:12} {rate:16,.0f} {rows:12.1f} {rate / (OUTPUT + 1) * 60:13,.0f}", flush=True)


def fleet(options: argparse.Namespace) -> None:
    num_requests, scheduler, marks = options.requests or 100_000, SchedulerConfig(max_num_seqs=64), list[float]()
    costs = CostModel(fixed_s=10e-3, prefill_token_s=5e-5, decode_token_s=1e-4)
    one = ReplicaSetup(engine=EngineSetup(scheduler=scheduler, num_blocks=512), cost_model=costs)
    setup = FleetSetup(config=FleetConfig(balance="prefix"), scheduler=scheduler, replicas=[one] * REPLICAS)
    simulation, began = FleetSimulation(setup, SimulatedResults()), time.process_time()
    simulation.run(watched(alike(RATE_OF_ONE * REPLICAS, num_requests), max(1, num_requests // 10), marks))
    results, took_s = simulation.results, time.process_time() - began
    print(
        f"{results.total.num_finished:,} requests, {results.num_row_steps:,} request-steps, {results.duration_s:,.1f} s"
        f" simulated in {took_s:.1f} s of processor time; {resident_mib():.0f} MiB, "
        f"{resident_mib() / marks[len(marks) // 2]:.2f} of that after half, with full caches"
    )


def soak(options: argparse.Namespace) -> None:
    num_requests = options.requests or 1_000_000
    chat = ClassSpec(
        prefix_tokens=64,
        num_prefixes=8,
        input="uniform:8,64",
        output="uniform:2,12",
        turns="uniform:1,3",
        think_s=2.0,
        max_tokens=64,
    )
    tenants = {"a": TenantSpec(share=2), "b": TenantSpec(weight=2), "c": TenantSpec()}
    spec = WorkloadSpec(rate=600.0, num_requests=num_requests, classes={"chat": chat}, tenants=tenants)
    setup = EngineSetup(scheduler=SchedulerConfig(max_num_seqs=64), num_blocks=4096)
    costs, marks = CostModel(fixed_s=1e-3, prefill_token_s=1e-6, decode_token_s=1e-5), list[float]()
    arrivals = watched(SyntheticWorkload(spec).arrivals(), num_requests // 20, marks)
    results = Simulation(setup, costs, SimulatedResults()).run(arrivals)
    total, growth = results.total, resident_mib() / marks[0]
    print(f"{total.num_finished:,} finished, {total.num_failed:,} failed; memory is {growth:.3f} of the first mark's")
    if total.num_finished + total.num_failed != num_requests or growth > MAX_GROWTH:
        sys.exit("soak failed: requests were lost, or memory grew")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {part.__name__: part for part in (speed, fleet, soak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--requests", type=int, help="of each part")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--base", type=Path, help="an earlier tree, to run in turn")
    options = parser.parse_args()
    for name in options.parts or ("speed",):
        if options.base is None:
            PARTS[name](options)
            continue
        base_s, own_s = (seconds_of(tree, name, options) for tree in (options.base, Path(__file__).parents[1]))
        print(f"{name}: {base_s:.1f} s of processor time before, {own_s:.1f} s now: {base_s / own_s:.2f}x")


def seconds_of(tree: Path, part: str, options: argparse.Namespace) -> float:
    """Processor time of a part, by this very script on the sources of another tree."""
    asked = [part, "--policies", options.policies, *(["--requests", str(options.requests)] if options.requests else [])]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, __file__, *asked], check=True, env={**os.environ, "PYTHONPATH": f"{tree}/src"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
