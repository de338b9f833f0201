"""A million simulated requests in flat memory: fails when the process grows after the first tenth.

    python benchmarks/soak_simulator.py [--requests 1000000] [--policy interactive]

Three tenants, shared prefixes, conversations of one to three turns, short answers; memory is what is resident.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.sim.engine import EngineSetup
from maitred.sim.results import Results
from maitred.sim.simulator import Simulation
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, TenantSpec, WorkloadSpec
from maitred.sim.workload import Arrival

MAX_GROWTH = 1.05  # of resident memory, from the first tenth to the last
COSTS = CostModel(fixed_s=1e-3, prefill_token_s=1e-6, decode_token_s=1e-5)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def watched(arrivals: Iterator[Arrival], every: int, marks: list[float]) -> Iterator[Arrival]:
    began = time.process_time()
    for number, arrival in enumerate(arrivals):
        if number and number % every == 0:
            marks.append(resident_mib())
            print(f"{number:>10,} conversations {time.process_time() - began:8.0f} s {marks[-1]:8.1f} MiB", flush=True)
        yield arrival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--policy", default="fcfs")
    options = parser.parse_args()
    spec = WorkloadSpec(
        rate=600.0,
        num_requests=options.requests,
        classes={
            "chat": ClassSpec(
                prefix_tokens=64, num_prefixes=8, input="uniform:8,64", output="uniform:2,12", turns="uniform:1,3",
                think_s=2.0, max_tokens=64,
            )
        },
        tenants={"a": TenantSpec(share=2), "b": TenantSpec(weight=2), "c": TenantSpec()},
    )  # fmt: skip
    setup = EngineSetup(scheduler=SchedulerConfig(max_num_seqs=64, policy=options.policy), num_blocks=4096)
    marks: list[float] = []
    arrivals = watched(SyntheticWorkload(spec).arrivals(), options.requests // 20, marks)
    results = Simulation(setup, COSTS, Results()).run(arrivals)
    total = results.total
    growth = resident_mib() / marks[0]
    print(
        f"{total.num_finished:,} finished, {total.num_failed:,} failed, {results.num_row_steps:,} request-steps; "
        f"memory at the end is {growth:.3f} of that after a tenth"
    )
    if total.num_finished + total.num_failed != options.requests or growth > MAX_GROWTH:
        sys.exit("soak failed: requests were lost, or memory grew")


if __name__ == "__main__":
    main()
