"""Processor time of one choice: a request arrives, is bound to one of 16 replicas, and ends. Least of several rounds.

    python benchmarks/bench_choice.py

Aims: 30 us with 64 prefix keys, 100 us with 4,096, all of arrival, queue, choice and end.
"""

from __future__ import annotations

from time import process_time

from maitred.config import SchedulerConfig
from maitred.fleet.balance import BALANCES
from maitred.fleet.config import FleetConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.fleet_request import FleetRequest, Usage
from maitred.fleet.replicas import ReplicaFacts, Report

NUM_REPLICAS, NUM_IN_FLIGHT, NUM_ROUNDS, NUM_CHOICES = 16, 512, 15, 100


def make_core(balance: str, policy: str, num_keys: int) -> tuple[ClusterCore, list[tuple[int, ...]]]:
    """Half full; of each prompt, replicas have beginnings of different length."""
    core = ClusterCore(FleetConfig(balance=balance), SchedulerConfig(policy=policy, predictor="quantile"))
    for number in range(NUM_REPLICAS):
        core.joined(ReplicaFacts(name=f"r{number:02d}", models=("m",)), 0.0)
    prompts = [tuple(hash((p, i, "")) & (2**64 - 1) for i in range(num_keys)) for p in range(NUM_CHOICES)]
    for p, keys in enumerate(prompts):
        for r in range(p % 4, NUM_REPLICAS, 4):
            core.reported(f"r{r:02d}", Report(stored=keys[: num_keys * (r + 1) // NUM_REPLICAS]), 0.0)
    for number in range(NUM_IN_FLIGHT):
        core.arrived(make_request(f"old{number}", ()), 0.0)
    return core, prompts


def make_request(name: str, keys: tuple[int, ...]) -> FleetRequest:
    return FleetRequest(
        request_id=name, arrived_at=0.0, num_bytes=256 * len(keys) + 1, max_tokens=256, model="m", keys=keys
    )


def choice_us(balance: str, policy: str, num_keys: int) -> tuple[float, float]:
    """(arrival to bind, then progress and end)."""
    core, prompts = make_core(balance, policy, num_keys)
    binding, ending = [], []
    for again in range(NUM_ROUNDS):
        requests = [make_request(f"{again}.{i}", keys) for i, keys in enumerate(prompts)]
        began = process_time()
        for request in requests:
            core.arrived(request, 1.0)
        bound = process_time()
        for request in requests:
            core.progressed(request.request_id, 1, 1.0)
            core.ended(request.request_id, Usage(100, 1), 1.0)
        binding.append(bound - began)
        ending.append(process_time() - bound)
    return min(binding) / NUM_CHOICES * 1e6, min(ending) / NUM_CHOICES * 1e6


def main() -> None:
    print(f"{'balance':12} {'policy':12} {'keys':>5} {'bind us':>8} {'end us':>7}")
    for balance in BALANCES:
        for policy in ("fcfs", "vtc") if balance == "prefix" else ("fcfs",):
            for num_keys in (64, 4096):
                bind, end = choice_us(balance, policy, num_keys)
                print(f"{balance:12} {policy:12} {num_keys:5} {bind:8.1f} {end:7.1f}")


if __name__ == "__main__":
    main()
