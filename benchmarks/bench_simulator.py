"""How fast the simulator is: request-steps per second of CPU time at 64 running, for each policy.

    python benchmarks/bench_simulator.py [--requests 3000] [--policies fcfs,srpt]

Requests of 64 prompt and 128 output tokens, always more of them than slots. The goal is 100,000 request-steps/s, which
is 50,000 requests of 128 output tokens in a minute.
"""

from __future__ import annotations

import argparse
import time

from maitred.config import SchedulerConfig
from maitred.cost_model import CostModel
from maitred.policy.policies import POLICIES
from maitred.sim.engine import EngineSetup
from maitred.sim.results import Results
from maitred.sim.simulator import Simulation
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec

SLOTS, OUTPUT = 64, 128
COSTS = CostModel(fixed_s=3e-3, prefill_token_s=5e-5, decode_token_s=8e-5)


def measure(policy: str, num_requests: int) -> tuple[float, float]:
    """(request-steps per CPU second, mean rows of a step)."""
    classes = {"all": ClassSpec(input="64", output=str(OUTPUT), max_tokens=OUTPUT)}
    spec = WorkloadSpec(rate=60.0, num_requests=num_requests, classes=classes)
    setup = EngineSetup(scheduler=SchedulerConfig(max_num_seqs=SLOTS, policy=policy), num_blocks=4096)
    simulation = Simulation(setup, COSTS, Results())
    began = time.process_time()
    results = simulation.run(SyntheticWorkload(spec).arrivals())
    return results.num_row_steps / (time.process_time() - began), results.num_row_steps / results.num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args()
    print(f"{'policy':12} {'request-steps/s':>16} {'rows a step':>12} {'requests/min':>13}")
    for policy in options.policies.split(","):
        speed, rows = measure(policy, options.requests)
        print(f"{policy:12} {speed:16,.0f} {rows:12.1f} {speed / (OUTPUT + 1) * 60:13,.0f}", flush=True)


if __name__ == "__main__":
    main()
