"""What a balance and a hand-over of KV are worth to a fleet, simulated.

    python benchmarks/bench_fleet.py [alike] [unlike] [goodput] [links] [--balances prefix,round_robin] [--requests 300]

`alike`: 8 H100 with llama-3.1-8b on a conversation trace; the hits that a balance finds stand beside those of one cache
as large as all together (one engine eight times as fast). `unlike`: 4 H100 with 4 A100; `prefix` with and without the
devices' speeds. Aims of `prefix`: 0.95 of the one cache's hits, twice those of round robin, 0.7 of its mean TTFT,
load_max_over_mean 1.6; knowing speeds, 0.85 of the p99 TTFT of not knowing them, and no worse a mean.

`goodput`: a prefill and a decode worker (`always`), two mixed ones (`never`) and `auto` under objectives tight in TTFT,
tight in TPOT and balanced, the best of several rates; aim of auto: 0.95 of the better. `links`: mean E2E over shm, tcp
and 100 MB/s; aim: 1.05 of the better of always and never.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import HandoverConfig, Role, WorkerFacts
from maitred.sim.devices import device_named, model_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSimulation
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup
from maitred.sim.links import link_named
from maitred.sim.results import Objectives, Results
from maitred.sim.simulator import Simulation
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
    seed: int = 0
    system_blocks: int = 2  # of 512 tokens
    first_tokens: float = 4500.0  # median of a session's first prompt
    more_tokens: float = 1200.0  # median that a turn adds
    spread: float = 1.0  # sigma of both, lognormal
    mean_turns: float = 4.0  # geometric
    think_s: float = 45.0  # mean from one turn to the next
    max_tokens: int = 100_000  # a session ends before that

    def workload(self) -> TraceWorkload:
        rng, lines, at, number = Random(self.seed), list[TraceLine](), 0.0, 0
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
    return FleetSimulation(FleetSetup(config=config, scheduler=SCHEDULER, replicas=replicas), Results())


def all_in_one(one: ReplicaSetup) -> Simulation:
    """As much cache and as fast as all, so that nothing but the routing is missing."""
    costs, num = one.cost_model, NUM_REPLICAS
    faster = CostModel(
        fixed_s=costs.fixed_s,
        row_s=costs.row_s / num,
        weights_s=costs.weights_s / num,
        prefill_token_s=costs.prefill_token_s / num,
        decode_token_s=costs.decode_token_s / num,
        context_token_s=costs.context_token_s / num,
        prefill_attention_s=costs.prefill_attention_s / num,
    )
    scheduler = replace(SCHEDULER, max_num_seqs=64 * num, max_num_batched_tokens=2048 * num)
    return Simulation(
        replace(one.engine, scheduler=scheduler, num_blocks=one.engine.num_blocks * num), faster, Results()
    )


def in_sessions(workload: TraceWorkload) -> Iterator[Arrival]:
    """A conversation's first block of its own names it, as a client would by a header."""
    for arrival, line in zip(workload.arrivals(), workload.lines, strict=True):
        session, _, _ = str(line.hash_ids[-1]).partition("/")
        yield replace(arrival, request_id=f"{session}#{arrival.request_id}")


def told(name: str, simulation: FleetSimulation | Simulation, workload: TraceWorkload) -> None:
    results = simulation.run(in_sessions(workload))
    hits = results.num_cached_tokens / sum(line.input_length for line in workload.lines)
    extra = simulation.figures.to_json(results) if isinstance(simulation, FleetSimulation) else {}
    ttft_s, uneven = results.total.ttft_s.to_json(), extra.get("load_max_over_mean")
    times = f"{ttft_s['mean']:9.3f} {ttft_s['p50']:8.3f} {ttft_s['p99']:8.2f} {results.total.e2e_s.mean:8.2f}"
    print(f"{name:22} {hits:6.3f} {times} {'-' if uneven is None else f'{uneven:.2f}':>9}", flush=True)


def print_heading() -> None:
    print(f"{'':22} {'hits':>6} {'ttft mean':>9} {'p50':>8} {'p99':>8} {'e2e':>8} {'max/mean':>9}")


def alike(options: argparse.Namespace) -> None:
    workload = Conversations(sessions_per_s=4.5, duration_s=options.duration_s, seed=options.seed).workload()
    print_heading()
    told("one cache", all_in_one(replica("h100")), workload)
    for balance in options.balances.split(","):
        told(balance, fleet([replica("h100") for _ in range(NUM_REPLICAS)], balance), workload)


def unlike(options: argparse.Namespace) -> None:
    workload = Conversations(sessions_per_s=2.5, duration_s=options.duration_s, seed=options.seed).workload()
    print_heading()
    for tells in (False, True):
        replicas = [replica(name, tells_speed=tells) for name in ("h100", "a100") * 4]
        told(f"prefix, {'speeds' if tells else 'blind'}", fleet(replicas, "prefix"), workload)


# ---- hand-overs

P, D, M = "prefill", "decode", "mixed"
LINK, RATES, PROMPT, OUTPUT = "100gbe", (6.0, 9.0, 12.0, 15.0), 1800, 170  # about what two H100 can do
OBJECTIVES = {  # TTFT and TPOT, s
    "TTFT": Objectives(ttft_s=0.2, tpot_s=0.06),
    "TPOT": Objectives(ttft_s=2.0, tpot_s=0.012),
    "balanced": Objectives(ttft_s=0.5, tpot_s=0.025),
}
SYSTEMS = {
    "1P+1D": ((P, D), "always"),
    "2 mixed": ((M, M), "never"),
    "auto": ((M, M), "auto"),
    "auto PD": ((P, D), "auto"),
}


def arrivals(rate: float, num_requests: int) -> Iterator[Arrival]:
    """Poisson arrivals, lengths lognormal about their means."""
    rng, at = Random(1), 0.0
    for number in range(1, num_requests + 1):
        at += rng.expovariate(rate)
        prompt, output = (
            max(2, round(mean * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD))) for mean in (PROMPT, OUTPUT)
        )
        own = number.to_bytes(4, "little")
        yield Arrival(
            at=at, request_id=f"r{number}", prompt_tokens=prompt, output_tokens=output, max_tokens=4096, own=own
        )


def run(system: str, rate: float, num_requests: int, objectives: Objectives, link_name: str = LINK) -> FleetSimulation:
    (roles, handover), link = SYSTEMS[system], link_named(link_name)
    assert link is not None
    device = device_named("h100")
    scheduler = SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=max(128, device.token_budget))
    blocks, costs = min(num_kv_blocks(device, MODEL, BLOCK_SIZE), 40_000), roofline(device, MODEL)
    engine = EngineSetup(scheduler=scheduler, num_blocks=blocks, block_size=BLOCK_SIZE)
    facts = WorkerFacts(
        role=Role(M),
        costs=costs,
        token_budget=scheduler.token_budget,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        bytes_per_token=MODEL.kv_bytes_per_token,
        num_layers=MODEL.num_layers,
        bandwidth=link.bandwidth,
        latency_s=link.latency_s,
        shares_link=link.is_shared,
    )
    replicas = [ReplicaSetup(engine=engine, cost_model=costs, worker=replace(facts, role=Role(role))) for role in roles]
    config = {"config": FleetConfig(), "handover": HandoverConfig(handover=handover)}
    setup = FleetSetup(**config, scheduler=scheduler, replicas=replicas, link=link)
    simulation = FleetSimulation(setup, Results(objectives))
    simulation.run(arrivals(rate, num_requests))
    return simulation


def goodput(options: argparse.Namespace) -> None:
    print(f"{'goodput/s':16} " + " ".join(f"{name:>8}" for name in SYSTEMS) + "   auto, auto PD over the better")
    for name, objectives in OBJECTIVES.items():
        best = {
            system: max(run(system, rate, options.requests, objectives).to_json()["goodput_rps"] for rate in RATES)
            for system in SYSTEMS
        }
        print_systems(name, best, max(best["1P+1D"], best["2 mixed"]))


def links(options: argparse.Namespace) -> None:
    print(f"{'E2E (s)':16} " + " ".join(f"{name:>8}" for name in SYSTEMS) + "   auto, auto PD over the better")
    for link in ("shm", "tcp", "100MB/s"):
        for rate in RATES[::2]:
            means = {}
            for system in SYSTEMS:
                told = run(system, rate, options.requests, Objectives(), link)
                means[system] = told.results.total.e2e_s.mean or 0.0
            print_systems(f"{link:8} {rate:5g}/s", means, min(means["1P+1D"], means["2 mixed"]))


def print_systems(name: str, figures: dict[str, float], better: float) -> None:
    cells = " ".join(f"{value:8.4g}" for value in figures.values())
    print(f"{name:16} {cells}   {figures['auto'] / better:.3f} {figures['auto PD'] / better:.3f}", flush=True)


PARTS = {part.__name__: part for part in (alike, unlike, goodput, links)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--balances", default=BALANCES)
    parser.add_argument("--duration-s", type=float, default=300.0, help="of the conversation trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=300, help="of hand-overs")
    options = parser.parse_args()
    for name in options.parts or PARTS:
        print(f"-- {name}")
        PARTS[name](options)


if __name__ == "__main__":
    main()
