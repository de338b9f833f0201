"""What a balance is worth to a fleet, simulated: hits, waits and evenness on a conversation trace.

    python benchmarks/bench_fleet.py [alike] [unlike] [--balances prefix,round_robin] [--trace FILE [--rate-scale 4]]

`alike`: 8 H100 with llama-3.1-8b on a conversation trace; the hits that a balance finds stand beside those of one cache
as large as all together (one engine eight times as fast). `unlike`: 4 H100 with 4 A100; `prefix` with and without the
devices' speeds. Aims of `prefix`: 0.95 of the one cache's hits, twice those of round robin, 0.7 of its mean TTFT,
load_max_over_mean 1.6; knowing speeds, 0.85 of the p99 TTFT of not knowing them, and no worse a mean. `saturated`: a
Mooncake trace so many times as fast as it was recorded, beside one LRU cache of the size of all; aim 0.8 of its hits.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from random import Random

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.fleet.config import FleetConfig
from maitred.sim.devices import device_named, model_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup, Simulation
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup
from maitred.sim.results import SimulatedResults
from maitred.sim.traces import BLOCK_TOKENS, TraceLine, TraceWorkload
from maitred.sim.workload import Arrival

BLOCK_SIZE, NUM_REPLICAS, SPREAD = 16, 8, 0.6
SCHEDULER = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048)
MODEL = model_named("llama-3.1-8b")
BALANCES = "round_robin,least_load,two_choices,hash,session,prefix"


# ---- balances


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """A trace like Mooncake's (Qin et al. 2024, arXiv:2407.00079, table 2 and figure 5), made from a seed.

    Sessions come by a Poisson process; each turn is sent at a set time, has the whole conversation so far as its
    prompt, and adds some. Prompts are 12,000 tokens on average with a long tail, answers 343, as in that trace; all
    begin with one system prompt.
    """

    sessions_per_s: float
    duration_s: float
    system_blocks: int = 2  # of 512 tokens
    first_tokens: float = 4500.0  # median of a session's first prompt
    more_tokens: float = 1200.0  # median that a turn adds
    spread: float = 1.0  # sigma of both, lognormal
    mean_turns: float = 4.0  # geometric
    think_s: float = 45.0  # mean from one turn to the next
    max_tokens: int = 100_000  # a session ends before that

    def workload(self) -> TraceWorkload:
        rng, lines, at, number = Random(0), list[TraceLine](), 0.0, 0
        while (at := at + rng.expovariate(self.sessions_per_s)) < self.duration_s:
            lines += self._session(rng, at, f"s{number}")
            number += 1
        return TraceWorkload(sorted(lines, key=lambda line: line.timestamp))

    def _session(self, rng: Random, at: float, name: str) -> list[TraceLine]:
        lines = []
        length = self.system_blocks * BLOCK_TOKENS + self._drawn(rng, self.first_tokens)
        while length < self.max_tokens and at < self.duration_s:
            answer = self._drawn(rng, 240.0)
            own = [f"{name}/{i}" for i in range(length // BLOCK_TOKENS - self.system_blocks)]
            hash_ids = (*range(self.system_blocks), *own)
            lines.append(TraceLine(timestamp=at * 1000, input_length=length, output_length=answer, hash_ids=hash_ids))
            if rng.random() < 1 / self.mean_turns:
                break
            length += answer + self._drawn(rng, self.more_tokens)
            at += rng.expovariate(1 / self.think_s)
        return lines

    def _drawn(self, rng: Random, median: float) -> int:
        return max(1, round(median * rng.lognormvariate(0, self.spread)))


def replica(device_name: str, *, tells_speed: bool = True) -> ReplicaSetup:
    device = device_named(device_name)
    blocks = num_kv_blocks(device, MODEL, BLOCK_SIZE)
    engine = EngineSetup(scheduler=SCHEDULER, num_blocks=blocks, block_size=BLOCK_SIZE)
    return ReplicaSetup(engine=engine, cost_model=roofline(device, MODEL), tells_speed=tells_speed)


def fleet(replicas: list[ReplicaSetup], balance: str) -> FleetSimulation:
    config = FleetConfig(balance=balance)
    return FleetSimulation(FleetSetup(config=config, scheduler=SCHEDULER, replicas=replicas), SimulatedResults())


def all_in_one(one: ReplicaSetup) -> Simulation:
    """As much cache and as fast as all, so that nothing but the routing is missing."""
    costs, num = one.cost_model, NUM_REPLICAS
    shared = ("row_s", "weights_s", "prefill_token_s", "decode_token_s", "context_token_s", "prefill_attention_s")
    faster = CostModel(fixed_s=costs.fixed_s, **{name: getattr(costs, name) / num for name in shared})
    scheduler = replace(SCHEDULER, max_num_seqs=64 * num, max_num_batched_tokens=2048 * num)
    return Simulation(
        replace(one.engine, scheduler=scheduler, num_blocks=one.engine.num_blocks * num), faster, SimulatedResults()
    )


def in_sessions(workload: TraceWorkload) -> Iterator[Arrival]:
    """A conversation's first block of its own names it, as a client would by a header."""
    for arrival, line in zip(workload.arrivals(), workload.lines, strict=True):
        session, _, _ = str(line.hash_ids[-1]).partition("/")
        yield replace(arrival, request_id=f"{session}#{arrival.request_id}")


def told(
    name: str,
    simulation: FleetSimulation | Simulation,
    workload: TraceWorkload,
    arrivals: Iterator[Arrival] | None = None,
) -> None:
    results = simulation.run(arrivals or in_sessions(workload))
    hits = results.num_cached_tokens / sum(line.input_length for line in workload.lines)
    extra = simulation.figures.to_json(results) if isinstance(simulation, FleetSimulation) else {}
    ttft_s, uneven = results.total.ttft_s.to_json(), extra.get("load_max_over_mean")
    times = f"{ttft_s['mean']:9.3f} {ttft_s['p50']:8.3f} {ttft_s['p99']:8.2f} {results.total.e2e_s.mean:8.2f}"
    print(f"{name:22} {hits:6.3f} {times} {'-' if uneven is None else f'{uneven:.2f}':>9}", flush=True)


def print_heading() -> None:
    print(f"{'':22} {'hits':>6} {'ttft mean':>9} {'p50':>8} {'p99':>8} {'e2e':>8} {'max/mean':>9}")


def alike(options: argparse.Namespace) -> None:
    workload = Conversations(sessions_per_s=4.5, duration_s=options.duration_s).workload()
    print_heading()
    told("one cache", all_in_one(replica("h100")), workload)
    for balance in options.balances.split(","):
        told(balance, fleet([replica("h100") for _ in range(NUM_REPLICAS)], balance), workload)


def unlike(options: argparse.Namespace) -> None:
    workload = Conversations(sessions_per_s=2.5, duration_s=options.duration_s).workload()
    print_heading()
    for tells in (False, True):
        replicas = [replica(name, tells_speed=tells) for name in ("h100", "a100") * 4]
        told(f"prefix, {'speeds' if tells else 'blind'}", fleet(replicas, "prefix"), workload)


def saturated(options: argparse.Namespace) -> None:
    if options.trace is None:
        raise SystemExit("saturated takes --trace FILE, as Mooncake's conversation_trace.jsonl")
    lines = [
        TraceLine(**{**line, "timestamp": line["timestamp"] / options.rate_scale, "hash_ids": tuple(line["hash_ids"])})
        for line in map(json.loads, options.trace.read_text().splitlines())
    ]
    one = replica("h100")
    print(
        f"one LRU cache of the size of all: {hits_of_lru(lines, NUM_REPLICAS * one.engine.num_blocks * BLOCK_SIZE):.3f}"
    )
    print_heading()
    for balance in options.balances.split(","):
        told(balance, fleet([one] * NUM_REPLICAS, balance), TraceWorkload(lines), TraceWorkload(lines).arrivals())


def hits_of_lru(lines: list[TraceLine], num_tokens: int) -> float:
    """Share of prompt tokens found, the trace in its order; answers are kept too."""
    kept, found = OrderedDict[object, None](), 0
    for number, line in enumerate(lines):
        prompt = line.hash_ids[: line.input_length // BLOCK_TOKENS]
        found += BLOCK_TOKENS * sum(1 for _ in takewhile(kept.__contains__, prompt))
        for name in (*((number, i) for i in range(-(-line.output_length // BLOCK_TOKENS))), *reversed(line.hash_ids)):
            kept[name] = None
            kept.move_to_end(name)
        while len(kept) > num_tokens // BLOCK_TOKENS:
            kept.popitem(last=False)
    return found / sum(line.input_length for line in lines)


PARTS = {part.__name__: part for part in (alike, unlike, saturated)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--balances", default=BALANCES)
    parser.add_argument("--trace", type=Path, help="of `saturated`")
    parser.add_argument("--rate-scale", type=float, default=4.0, help="of `saturated`")
    parser.add_argument("--duration-s", type=float, default=300.0, help="of the conversation trace")
    options = parser.parse_args()
    for name in options.parts or ("alike", "unlike"):
        print(f"-- {name}")
        PARTS[name](options)


if __name__ == "__main__":
    main()
