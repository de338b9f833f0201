"""What a balance and a hand-over of KV are worth to a fleet, simulated.

    python benchmarks/bench_fleet.py [alike] [unlike] [goodput] [links] [--balances prefix,round_robin] [--requests 300]

`alike`: 8 H100 with llama-3.1-8b on a conversation trace; the hits that a balance finds stand beside those of one cache
as large as all together (one engine eight times as fast). `unlike`: 4 H100 with 4 A100; `prefix` with and without the
devices' speeds. Aims of `prefix`: 0.95 of the one cache's hits, twice those of round robin, 0.7 of its mean TTFT,
load_max_over_mean 1.6; knowing speeds, 0.85 of the p99 TTFT of not knowing them, and no worse a mean.

`goodput`: a prefill and a decode worker (`always`), two mixed ones (`never`) and `auto` under objectives tight in TTFT,
tight in TPOT and balanced, the best of several rates; aim of auto: 0.95 of the better. `links`: mean E2E over shm, tcp
and 100 MB/s; aim: 1.05 of the better of always and never. `--setting cpu` takes a core with Qwen3-0.6B for an H100.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import HandoverConfig, Role, WorkerFacts
from maitred.sim.devices import device_named, model_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSimulation
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup
from maitred.sim.links import SimulatedLink, link_named
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


@dataclass(frozen=True)
class Setting:
    """A model on devices, and loads that are about what two of them can do."""

    device: str
    model: str
    link: str
    rates: Sequence[float]  # of `goodput`
    prompt: float
    output: float
    objectives: dict[str, tuple[float, float]]  # TTFT and TPOT, s


SETTINGS = {
    "h100": Setting(
        *("h100", "llama-3.1-8b", "100gbe", (6.0, 9.0, 12.0, 15.0), 1800, 170),
        {"TTFT": (0.2, 0.06), "TPOT": (2.0, 0.012), "balanced": (0.5, 0.025)},
    ),
    "cpu": Setting(
        *("cpu", "qwen3-0.6b", "shm", (0.1, 0.15, 0.2, 0.25), 400, 60),
        {"TTFT": (12.0, 5.0), "TPOT": (60.0, 0.35), "balanced": (25.0, 1.0)},
    ),
}
SYSTEMS = {
    "1P+1D": ((P, D), "always"),
    "2 mixed": ((M, M), "never"),
    "auto": ((M, M), "auto"),
    "auto PD": ((P, D), "auto"),
}


def arrivals(rate: float, setting: Setting, num_requests: int) -> Iterator[Arrival]:
    """Poisson arrivals, lengths lognormal about their means."""
    rng, at = Random(1), 0.0
    for number in range(1, num_requests + 1):
        at += rng.expovariate(rate)
        num_prompt, num_output = (
            max(2, round(mean * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)))
            for mean in (setting.prompt, setting.output)
        )
        own = number.to_bytes(4, "little")
        yield Arrival(
            at=at, request_id=f"r{number}", prompt_tokens=num_prompt, output_tokens=num_output, max_tokens=4096, own=own
        )


@dataclass
class Run:
    """One fleet of two and its workload."""

    setting: Setting
    system: str
    objectives: Objectives = field(default_factory=Objectives)
    link: str = ""

    def __call__(self, asked: Iterator[Arrival]) -> FleetSimulation:
        (roles, handover), link = SYSTEMS[self.system], link_named(self.link or self.setting.link)
        assert link is not None
        replicas = [self._replica(role, link) for role in roles]
        setup = FleetSetup(
            config=FleetConfig(),
            handover=HandoverConfig(handover=handover),
            scheduler=replicas[0].engine.scheduler,
            replicas=replicas,
            link=link,
        )
        simulation = FleetSimulation(setup, Results(self.objectives))
        simulation.run(asked)
        return simulation

    def _replica(self, role: str, link: SimulatedLink) -> ReplicaSetup:
        device, model = device_named(self.setting.device), model_named(self.setting.model)
        costs = roofline(device, model)
        engine = EngineSetup(
            scheduler=SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=max(128, device.token_budget)),
            num_blocks=min(num_kv_blocks(device, model, BLOCK_SIZE), 40_000),
            block_size=BLOCK_SIZE,
        )
        facts = WorkerFacts(
            role=Role(role),
            costs=costs,
            token_budget=engine.scheduler.token_budget,
            num_blocks=engine.num_blocks,
            block_size=BLOCK_SIZE,
            bytes_per_token=model.kv_bytes_per_token,
            num_layers=model.num_layers,
            bandwidth=link.bandwidth,
            latency_s=link.latency_s,
            shares_link=link.is_shared,
        )
        return ReplicaSetup(engine=engine, cost_model=costs, worker=facts)


def goodput(options: argparse.Namespace) -> None:
    setting = SETTINGS[options.setting]
    print(f"{'goodput/s':16} " + " ".join(f"{name:>8}" for name in SYSTEMS) + "   auto, auto PD over the better")
    for name, (ttft_s, tpot_s) in setting.objectives.items():
        objectives = Objectives(ttft_s=ttft_s, tpot_s=tpot_s)
        best = {
            system: max(
                Run(setting, system, objectives)(arrivals(rate, setting, options.requests)).to_json()["goodput_rps"]
                for rate in setting.rates
            )
            for system in SYSTEMS
        }
        print_systems(name, best, max(best["1P+1D"], best["2 mixed"]))


def links(options: argparse.Namespace) -> None:
    setting = SETTINGS[options.setting]
    print(f"{'E2E (s)':16} " + " ".join(f"{name:>8}" for name in SYSTEMS) + "   auto, auto PD over the better")
    for link in ("shm", "tcp", "100MB/s"):
        for rate in setting.rates[::2]:
            runs = {
                system: Run(setting, system, link=link)(arrivals(rate, setting, options.requests)) for system in SYSTEMS
            }
            means = {system: run.results.total.e2e_s.mean or 0.0 for system, run in runs.items()}
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
    parser.add_argument("--setting", choices=tuple(SETTINGS), default="h100")
    parser.add_argument("--requests", type=int, default=300, help="of hand-overs")
    options = parser.parse_args()
    for name in options.parts or PARTS:
        print(f"-- {name}")
        PARTS[name](options)


if __name__ == "__main__":
    main()
