"""What a balance is worth, simulated: hits, waits and evenness of 8 replicas on a conversation trace.

    python benchmarks/bench_balance.py [--balances prefix,round_robin] [--part alike|unlike]

`alike`: 8 H100 with llama-3.1-8b; the hits that a balance finds stand beside those of one cache as large as all
together (one engine eight times as fast). `unlike`: 4 H100 with 4 A100; `prefix` with and without the devices' speeds.
Aims of `prefix`: 0.95 of the one cache's hits, twice those of round robin, 0.7 of its mean TTFT, load_max_over_mean
1.6; knowing speeds, 0.85 of the p99 TTFT of not knowing them, and no worse a mean.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

from conversations import Conversations

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.fleet.config import FleetConfig
from maitred.sim.devices import device_named, model_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSimulation
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup
from maitred.sim.results import Results
from maitred.sim.simulator import Simulation
from maitred.sim.traces import TraceWorkload
from maitred.sim.workload import Arrival

BLOCK_SIZE, NUM_REPLICAS = 16, 8
SCHEDULER = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048)
MODEL = model_named("llama-3.1-8b")
BALANCES = "round_robin,least_load,two_choices,hash,session,prefix"


def replica(device_name: str, *, tells_speed: bool = True) -> ReplicaSetup:
    device = device_named(device_name)
    blocks = num_kv_blocks(device, MODEL, BLOCK_SIZE)
    engine = EngineSetup(scheduler=SCHEDULER, num_blocks=blocks, block_size=BLOCK_SIZE)
    return ReplicaSetup(engine=engine, cost_model=roofline(device, MODEL), tells_speed=tells_speed)


def fleet(replicas: list[ReplicaSetup], balance: str) -> FleetSetup:
    return FleetSetup(config=FleetConfig(balance=balance), scheduler=SCHEDULER, replicas=replicas)


def all_in_one(one: ReplicaSetup) -> Simulation:
    """As much cache and as fast as all, so that nothing but the routing is missing."""
    costs = one.cost_model
    faster = CostModel(
        fixed_s=costs.fixed_s,
        row_s=costs.row_s / NUM_REPLICAS,
        weights_s=costs.weights_s / NUM_REPLICAS,
        prefill_token_s=costs.prefill_token_s / NUM_REPLICAS,
        decode_token_s=costs.decode_token_s / NUM_REPLICAS,
        context_token_s=costs.context_token_s / NUM_REPLICAS,
        prefill_attention_s=costs.prefill_attention_s / NUM_REPLICAS,
    )
    scheduler = replace(SCHEDULER, max_num_seqs=64 * NUM_REPLICAS, max_num_batched_tokens=2048 * NUM_REPLICAS)
    setup = replace(one.engine, scheduler=scheduler, num_blocks=one.engine.num_blocks * NUM_REPLICAS)
    return Simulation(setup, faster, Results())


def in_sessions(workload: TraceWorkload) -> Iterator[Arrival]:
    """A conversation's first block of its own names it, as a client would by a header."""
    for arrival, line in zip(workload.arrivals(), workload.lines, strict=True):
        session, _, _ = str(line.hash_ids[-1]).partition("/")
        yield replace(arrival, request_id=f"{session}#{arrival.request_id}")


def told(name: str, simulation: FleetSimulation | Simulation, workload: TraceWorkload) -> None:
    began = time.process_time()
    results = simulation.run(in_sessions(workload))
    prompts = sum(line.input_length for line in workload.lines)
    whole = results.total
    extra = simulation.figures.to_json(results) if isinstance(simulation, FleetSimulation) else {}
    uneven, ttft_s = extra.get("load_max_over_mean"), whole.ttft_s.to_json()
    times = f"{ttft_s['mean']:9.3f} {ttft_s['p50']:8.3f} {ttft_s['p99']:8.2f} {whole.e2e_s.mean:8.2f}"
    evenness = "        -" if uneven is None else f"{uneven:9.2f}"
    cpu_s = time.process_time() - began
    print(f"{name:22} {results.num_cached_tokens / prompts:6.3f} {times} {evenness} {cpu_s:6.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("alike", "unlike", "both"), default="both")
    parser.add_argument("--balances", default=BALANCES)
    parser.add_argument("--sessions-per-s", type=float, default=4.5)
    parser.add_argument("--unlike-sessions-per-s", type=float, default=2.5)
    parser.add_argument("--duration-s", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    columns = ("hits", 6), ("ttft mean", 9), ("p50", 8), ("p99", 8), ("e2e", 8), ("max/mean", 9), ("cpu s", 6)
    heading = " " * 22 + "".join(f" {name:>{width}}" for name, width in columns)
    if options.part != "unlike":
        shape = Conversations(sessions_per_s=options.sessions_per_s, duration_s=options.duration_s, seed=options.seed)
        workload = shape.workload()
        print(heading)
        told("one cache", all_in_one(replica("h100")), workload)
        for balance in options.balances.split(","):
            setup = fleet([replica("h100") for _ in range(NUM_REPLICAS)], balance)
            told(balance, FleetSimulation(setup, Results()), workload)
    if options.part != "alike":
        shape = Conversations(
            sessions_per_s=options.unlike_sessions_per_s, duration_s=options.duration_s, seed=options.seed
        )
        workload = shape.workload()
        print(heading)
        for tells in (False, True):
            setup = fleet([replica(name, tells_speed=tells) for name in ("h100", "a100") * 4], "prefix")
            told(f"prefix, {'speeds' if tells else 'blind'}", FleetSimulation(setup, Results()), workload)


if __name__ == "__main__":
    main()
