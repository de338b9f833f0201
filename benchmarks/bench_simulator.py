"""How fast the simulator is: request-steps per second of CPU time at 64 running, for each policy.

    python benchmarks/bench_simulator.py [--requests 3000] [--policies fcfs,srpt]

Requests of 64 prompt and 128 output tokens, always more of them than slots. The goal is 100,000 request-steps/s, which
is 50,000 requests of 128 output tokens in a minute.

Tensor requests, of one to four rows for four models, 600 a simulated second: the goal is to simulate 10,000 in a
second.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from random import Random

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.core.tensor_request import BatchRules
from maitred.policy.policies import POLICIES
from maitred.sim.arrivals import arrival_times
from maitred.sim.engine import EngineSetup
from maitred.sim.results import Results
from maitred.sim.simulator import Simulation
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec
from maitred.sim.tensor_arrival import TensorArrival
from maitred.sim.tensor_profile import HostTimes, ModelTimes, ShapeTimes
from maitred.sim.tensors import SimulatedModel, TensorSimulation
from maitred.tensor.lone import lone_scheduler

SLOTS, OUTPUT = 64, 128
TENSOR_MODELS, TENSOR_RATE = ("a", "b", "c", "d"), 600.0
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


def measure_tensors(num_requests: int) -> tuple[float, float]:
    """(requests per CPU second, mean rows of a batch)."""
    rows, batch_s = (1, 2, 4, 8, 16, 32), (0.004, 0.0042, 0.0046, 0.0054, 0.007, 0.01)
    models = [
        SimulatedModel(
            name=name, version=1, rules=BatchRules(max_batch_size=32, dynamic=True, delay_s=0.002, machine_share=0.5),
            times=ModelTimes(model=name, version=1, shapes=(ShapeTimes(length=0, rows=rows, seconds=batch_s),)),
        )
        for name in TENSOR_MODELS
    ]  # fmt: skip
    rng = Random(0)
    simulation = TensorSimulation(lone_scheduler(SchedulerConfig()), models, HostTimes(), rng)
    simulation.begin(
        TensorArrival(at=at, request_id=str(i), model=rng.choice(TENSOR_MODELS), num_rows=rng.randint(1, 4))
        for i, at in enumerate(islice(arrival_times(TENSOR_RATE, 1.0, rng), num_requests))
    )
    began = time.process_time()
    told = simulation.run().values()
    took_s = time.process_time() - began
    assert sum(each.num_rows for each in told) >= num_requests
    return num_requests / took_s, sum(each.num_rows for each in told) / sum(each.num_batches for each in told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args()
    print(f"{'policy':12} {'request-steps/s':>16} {'rows a step':>12} {'requests/min':>13}")
    for policy in options.policies.split(","):
        speed, rows = measure(policy, options.requests)
        print(f"{policy:12} {speed:16,.0f} {rows:12.1f} {speed / (OUTPUT + 1) * 60:13,.0f}", flush=True)
    speed, rows = measure_tensors(20 * options.requests)
    print(f"\ntensor requests/s {speed:,.0f}, in batches of {rows:.1f} rows")


if __name__ == "__main__":
    main()
