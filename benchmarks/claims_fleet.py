"""Two common claims about routing, simulated.

    python benchmarks/claims_fleet.py stateless [--slices 400,200,100]
    python benchmarks/claims_fleet.py hashing [--rate 24]

`stateless`: "stateless, simple routing is enough", even for 700 million users. A slice of so many is simulated
before as many replicas as its part of 1,600, and the load is scaled until 95% of first tokens come within 2 s:
1,600 over that scale are the replicas that all users need. Routing is stateless (two choices), hashed (a ring by
session) or prefix-aware; slices should agree.

`hashing`: HAProxy with consistent hashing, plain and with bounded loads, and `prefix`: hits and waits with many keys
alike, with one that is hot, and while the fleet goes from 8 replicas to 9.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import takewhile
from random import Random

from maitred.cluster.config import FleetConfig
from maitred.config import SchedulerConfig
from maitred.sim.devices import device_named, model_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup
from maitred.sim.results import Objectives, Results
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec
from maitred.sim.workload import Arrival, chain

BLOCK = 64
SCHEDULER = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048)
MODEL, DEVICE = model_named("llama-3.1-8b"), device_named("a100")
OBJECTIVE_S, KEPT = 2.0, 0.95
UNBOUNDED = 1e6


def replica(num_blocks: int) -> ReplicaSetup:
    engine = EngineSetup(scheduler=SCHEDULER, num_blocks=num_blocks, block_size=BLOCK)
    return ReplicaSetup(engine=engine, cost_model=roofline(DEVICE, MODEL))


def simulate(
    arrivals: Iterator[Arrival], num: int, balance: str, *, ratio: float = 1.25, blocks: int
) -> FleetSimulation:
    config = FleetConfig(balance=balance, max_load_ratio=ratio)
    setup = FleetSetup(config=config, scheduler=SCHEDULER, replicas=[replica(blocks)] * num)
    simulation = FleetSimulation(setup, Results(Objectives(ttft_s=OBJECTIVE_S)))
    simulation.run(arrivals)
    return simulation


# -- stateless

USERS, SESSION_EVERY_S, REPLICAS = 700e6, 7 * 86_400, 1600
ROUTINGS = {"stateless": "two_choices", "hashed": "hash", "prefix-aware": "prefix"}
NUM_HALVINGS = 5


def users(part: float, scale: float, seconds: float) -> Iterator[Arrival]:
    """Conversations of one to nine turns, all with one of eight system prompts."""
    rate = USERS * part / SESSION_EVERY_S * scale
    chat = ClassSpec(
        prefix_tokens=1024,
        num_prefixes=8,
        input="lognormal:600,0.7",
        output="lognormal:60,0.5",
        turns="uniform:1,9",
        think_s=8.0,
    )
    spec = WorkloadSpec(rate=rate, num_requests=10_000_000, classes={"chat": chat})
    return takewhile(lambda arrival: arrival.at < seconds, SyntheticWorkload(spec).arrivals())


def scale_kept(balance: str, divisor: int, seconds: float) -> tuple[float, FleetSimulation]:
    """The largest load, beside all users', at which the promise is kept, and a run near it."""
    blocks = num_kv_blocks(DEVICE, MODEL, BLOCK)
    low, high = 1.0, 8.0
    for _ in range(NUM_HALVINGS):
        scale = math.sqrt(low * high)
        simulation = simulate(users(1 / divisor, scale, seconds), REPLICAS // divisor, balance, blocks=blocks)
        if simulation.results.total.slo_attainment >= KEPT:
            low = scale
        else:
            high = scale
    return math.sqrt(low * high), simulation


def stateless(slices: list[int], seconds: float) -> None:
    print(f"{'slice':>6} {'routing':14} {'replicas for all':>16} {'hits':>6} {'ttft mean':>10}")
    for divisor in slices:
        for routing, balance in ROUTINGS.items():
            scale, simulation = scale_kept(balance, divisor, seconds)
            figures = simulation.to_json()
            hits, ttft_s = figures["prefix_hit_ratio"], figures["ttft_s"]["mean"]
            print(f"1/{divisor:<4} {routing:14} {REPLICAS / scale:16,.0f} {hits:6.3f} {ttft_s:10.3f}", flush=True)


# -- hashing

WAYS = {
    "plain": ("hash", UNBOUNDED),
    "bounded": ("hash", 1.25),
    "prefix": ("prefix", 1.25),
}
NUM_KEYS, HOT_SHARE, PREFIX = 200, 0.3, 4096


def keyed(rate: float, seconds: float, hot_share: float, seed: int = 0) -> Iterator[Arrival]:
    """Each request has one of many shared prefixes, the first of them far more often, and a little of its own."""
    rng, at, number = Random(seed), 0.0, 0
    prefixes = [chain([f"key {i}"], PREFIX) for i in range(NUM_KEYS)]
    while (at := at + rng.expovariate(rate)) < seconds:
        number += 1
        key = 0 if rng.random() < hot_share else rng.randrange(NUM_KEYS)
        output = max(1, round(rng.lognormvariate(math.log(100), 0.5)))
        yield Arrival(
            at=at,
            request_id=f"r{number}",
            prompt_tokens=PREFIX + rng.randrange(64, 512),
            output_tokens=output,
            max_tokens=output + 1,
            spans=prefixes[key],
            own=number.to_bytes(8, "little"),
        )


def hashing(rate: float, seconds: float) -> None:
    print(f"{'':10} {'way':9} {'hits':>6} {'ttft mean':>10} {'p99':>8} {'max/mean':>9}")
    for name, hot_share in (("even", 0.0), ("hot key", HOT_SHARE)):
        for way, (balance, ratio) in WAYS.items():
            simulation = simulate(keyed(rate, seconds, hot_share), 8, balance, ratio=ratio, blocks=2_500)
            told(name, way, simulation)
    for way, (balance, ratio) in WAYS.items():
        told("rescale", way, rescaled(rate, seconds, balance, ratio))


def rescaled(rate: float, seconds: float, balance: str, ratio: float) -> FleetSimulation:
    """A ninth replica joins in the middle."""
    config = FleetConfig(balance=balance, max_load_ratio=ratio)
    setup = FleetSetup(
        config=config,
        scheduler=SCHEDULER,
        replicas=[replica(2_500)] * 9,
        low=8,
        autoscale=lambda figures, now: 8 if now < seconds / 2 else 9,
        cold_start_s=0.0,
    )
    simulation = FleetSimulation(setup, Results(Objectives(ttft_s=OBJECTIVE_S)))
    simulation.run(keyed(rate, seconds, 0.0))
    return simulation


def told(name: str, way: str, simulation: FleetSimulation) -> None:
    figures = simulation.to_json()
    ttft_s, uneven = figures["ttft_s"], figures["load_max_over_mean"]
    print(
        f"{name:10} {way:9} {figures['prefix_hit_ratio']:6.3f} {ttft_s['mean']:10.3f} {ttft_s['p99']:8.2f} "
        f"{'-' if uneven is None else f'{uneven:.2f}':>9}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("claim", choices=("stateless", "hashing"))
    parser.add_argument("--slices", default="400,200,100")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rate", type=float, default=24.0)
    options = parser.parse_args()
    if options.claim == "stateless":
        stateless([int(word) for word in options.slices.split(",")], options.seconds)
    else:
        hashing(options.rate, options.seconds)


if __name__ == "__main__":
    main()
