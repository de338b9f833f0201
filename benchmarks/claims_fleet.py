"""Two common claims about routing, simulated.

    python benchmarks/claims_fleet.py stateless [--slices 400,200,100] [--seeds 2]
    python benchmarks/claims_fleet.py hashing [--rate 24] [--seeds 3]

`stateless`: "stateless, simple routing is enough", even for 700 million users. A slice of so many is simulated
before as many replicas as its part of 1,600, and the load is scaled until 95% of first tokens come within 2 s:
1,600 over that scale are the replicas that all users need. Routing is stateless (two choices; no two turns of a
conversation meet, as among very many replicas), hashed (a ring by session) or prefix-aware; slices should agree.

`hashing`: HAProxy with consistent hashing, plain and with bounded loads, and `prefix`: hits and waits with many keys
alike, with one that is hot, and while the fleet goes from 8 replicas to 9.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import islice
from random import Random
from statistics import mean
from typing import NamedTuple

from maitred.config import SchedulerConfig
from maitred.fleet.config import FleetConfig
from maitred.sim.devices import device_named, model_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSimulation
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup
from maitred.sim.results import Objectives, Results
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec
from maitred.sim.workload import Arrival, chain, next_turn

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
BEGUN_S, ANSWER_S = 100.0, 2.0  # conversations under way began so long ago; what an answer takes about
GUESSES = {"stateless": 0.68, "hashed": 1.22, "prefix-aware": 1.28}  # near the answer saves runs
COLD_S = 20.0  # of each run, which do not count: caches fill
WIDTH = 1.02  # of the first bracket


class Slices(NamedTuple):
    """The users of the largest slice in `parts` that are each one `divisor`th of all."""

    divisor: int
    parts: int


def users(slices: Slices, number: int, scale: float, seconds: float, *, is_apart: bool, seed: int) -> Iterator[Arrival]:
    """Turns of conversations, one to nine each, all with one of eight system prompts, in a state that lasts.

    `is_apart`: as one of very many replicas sees them that each had the turn before with the same chance, so that no
    two turns of a conversation meet; only system prompts do.
    """
    rate = USERS * slices.parts / slices.divisor / SESSION_EVERY_S * scale
    chat = ClassSpec(
        prefix_tokens=1024,
        num_prefixes=8,
        input="lognormal:600,0.7",
        output="lognormal:60,0.5",
        turns="uniform:1,9",
        think_s=8.0,
    )
    spec = WorkloadSpec(rate=rate, num_requests=10_000_000, classes={"chat": chat}, seed=seed)
    later: list[tuple[float, str, Arrival]] = []
    for first in islice(SyntheticWorkload(spec).arrivals(), number, None, slices.parts):
        while later and (later[0][0] <= first.at or first.at > BEGUN_S + seconds):
            at, name, turn = heappop(later)
            if (following := next_turn(turn, at + ANSWER_S)) is not None:
                heappush(later, (following.at, following.request_id, following))
            at -= BEGUN_S
            if 0 <= at < seconds:
                own = name.encode() if is_apart else turn.own
                tenant = "measured" if at >= COLD_S else "cold"
                yield replace(turn, at=at, own=own, turns=(), tenant=tenant)
        if first.at > BEGUN_S + seconds:
            return
        heappush(later, (first.at, f"{first.request_id}#1", replace(first, request_id=f"{first.request_id}#1")))


def tried(routing: str, slices: Slices, scale: float, seconds: float, seed: int) -> tuple[float, float]:
    """How many first tokens came in time, and cached tokens; of all parts together."""
    blocks, is_apart = num_kv_blocks(DEVICE, MODEL, BLOCK), routing == "stateless"
    num_good = num_asked = num_cached = num_prompt = 0
    for number in range(slices.parts):
        asked = users(slices, number, scale, seconds, is_apart=is_apart, seed=seed)
        simulation = simulate(asked, REPLICAS // slices.divisor, ROUTINGS[routing], blocks=blocks)
        measured = simulation.results.tenants["measured"]
        num_good, num_asked = num_good + measured.num_good, num_asked + measured.num_finished
        num_cached += simulation.results.num_cached_tokens
        num_prompt += simulation.figures.num_prompt_tokens
    return num_good / num_asked, num_cached / num_prompt


def scale_kept(routing: str, slices: Slices, seconds: float, seed: int, guess: float) -> tuple[float, float]:
    """The load, beside all users', at which the promise is just kept, by bracket and false position; and hits in
    the run next to it that keeps it.
    """
    low, (kept, hits) = guess, tried(routing, slices, guess, seconds, seed)
    width = WIDTH if kept >= KEPT else 1 / WIDTH
    while True:
        next_kept, next_hits = tried(routing, slices, low * width, seconds, seed)
        if (next_kept >= KEPT) is not (kept >= KEPT):
            scale = low * width ** ((kept - KEPT) / (kept - next_kept))
            return scale, hits if kept >= KEPT else next_hits
        low, kept, hits = low * width, next_kept, next_hits


def stateless(routings: list[str], divisors: list[int], seconds: float, seeds: int) -> None:
    """The same users in each row, cut into as many slices as it takes."""
    print(f"{'slice':>6} {'routing':14} {'replicas for all, by seed':>26} {'mean':>6} {'hits':>6}")
    for routing in routings:
        scale = GUESSES[routing]
        for divisor in divisors:
            slices = Slices(divisor, divisor // min(divisors))
            needs, hits = list[float](), list[float]()
            for seed in range(seeds):
                scale, found = scale_kept(routing, slices, seconds, seed, scale)
                needs.append(REPLICAS / scale)
                hits.append(found)
            listed = " ".join(f"{need:,.0f}" for need in needs)
            print(f"1/{divisor:<4} {routing:14} {listed:>26} {mean(needs):6,.0f} {mean(hits):6.3f}", flush=True)


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


def hashing(rate: float, seconds: float, seeds: int) -> None:
    print(f"{'':10} {'way':9} {'hits':>6} {'ttft mean':>10} {'p99':>8} {'max/mean':>9}")
    for name, hot_share in (("even", 0.0), ("hot key", HOT_SHARE)):
        for way, (balance, ratio) in WAYS.items():
            asked = [keyed(rate, seconds, hot_share, seed) for seed in range(seeds)]
            told(name, way, [simulate(each, 8, balance, ratio=ratio, blocks=2_500) for each in asked])
    for way, (balance, ratio) in WAYS.items():
        told("rescale", way, [rescaled(rate, seconds, balance, ratio, seed) for seed in range(seeds)])


def rescaled(rate: float, seconds: float, balance: str, ratio: float, seed: int) -> FleetSimulation:
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
    simulation.run(keyed(rate, seconds, 0.0, seed))
    return simulation


def told(name: str, way: str, simulations: list[FleetSimulation]) -> None:
    """Means over seeds."""
    figures = [simulation.to_json() for simulation in simulations]
    hits, uneven = (mean(each[key] for each in figures) for key in ("prefix_hit_ratio", "load_max_over_mean"))
    ttft_s, p99_s = (mean(each["ttft_s"][key] for each in figures) for key in ("mean", "p99"))
    print(f"{name:10} {way:9} {hits:6.3f} {ttft_s:10.3f} {p99_s:8.2f} {uneven:9.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("claim", choices=("stateless", "hashing"))
    parser.add_argument("--slices", default="400,200,100")
    parser.add_argument("--routings", default=",".join(ROUTINGS))
    parser.add_argument("--seconds", type=float, help="simulated; 240 of the first claim, 60 of the second")
    parser.add_argument("--seeds", type=int, default=2, help="of each figure")
    parser.add_argument("--rate", type=float, default=24.0)
    options = parser.parse_args()
    if options.claim == "stateless":
        slices = [int(word) for word in options.slices.split(",")]
        stateless(options.routings.split(","), slices, options.seconds or 240.0, options.seeds)
    else:
        hashing(options.rate, options.seconds or 60.0, options.seeds)


if __name__ == "__main__":
    main()
