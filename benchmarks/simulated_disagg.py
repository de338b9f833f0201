"""What handing KV over is worth, simulated: goodput and time in all.

    python benchmarks/simulated_disagg.py [--part goodput|links] [--setting h100|cpu] [--requests 300]

`goodput`: 1P+1D (`always`), two mixed workers (`never`) and `auto` under objectives tight in TTFT, tight in TPOT and
balanced, the best of several rates; aim of auto: 0.95 of the better. `links`: mean E2E over shm, tcp and 100 MB/s; aim:
1.05 of the better of always and never.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from maitred.config import SchedulerConfig
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import HandoverConfig, Role, WorkerFacts
from maitred.sim.devices import device_named, model_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSimulation
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup
from maitred.sim.links import SimulatedLink, link_named
from maitred.sim.results import Objectives, Results
from maitred.sim.workload import Arrival

BLOCK_SIZE, SPREAD = 16, 0.6
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
    objectives: dict[str, Objectives]


SETTINGS = {
    "h100": Setting(
        "h100",
        "llama-3.1-8b",
        "100gbe",
        (6.0, 9.0, 12.0, 15.0),
        1800,
        170,
        {
            "TTFT": Objectives(ttft_s=0.2, tpot_s=0.06),
            "TPOT": Objectives(ttft_s=2.0, tpot_s=0.012),
            "balanced": Objectives(ttft_s=0.5, tpot_s=0.025),
        },
    ),
    "cpu": Setting(
        "cpu",
        "qwen3-0.6b",
        "shm",
        (0.1, 0.15, 0.2, 0.25),
        400,
        60,
        {
            "TTFT": Objectives(ttft_s=12.0, tpot_s=5.0),
            "TPOT": Objectives(ttft_s=60.0, tpot_s=0.35),
            "balanced": Objectives(ttft_s=25.0, tpot_s=1.0),
        },
    ),
}
SYSTEMS = {
    "1P+1D": ((P, D), "always"),
    "2 mixed": ((M, M), "never"),
    "auto": ((M, M), "auto"),
    "auto PD": ((P, D), "auto"),
}


def arrivals(rate: float, prompt: float, output: float, num_requests: int) -> Iterator[Arrival]:
    """Poisson arrivals, lengths lognormal about their means."""
    rng, at = Random(1), 0.0
    for number in range(1, num_requests + 1):
        at += rng.expovariate(rate)
        num_prompt, num_output = (
            max(2, round(mean * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD))) for mean in (prompt, output)
        )
        own = number.to_bytes(4, "little")
        yield Arrival(
            at=at, request_id=f"r{number}", prompt_tokens=num_prompt, output_tokens=num_output, max_tokens=4096, own=own
        )


@dataclass
class Run:
    """One fleet and its workload."""

    setting: Setting
    roles: Sequence[str]
    handover: str
    objectives: Objectives = field(default_factory=Objectives)
    link: str = ""

    def __call__(self, asked: Iterator[Arrival]) -> FleetSimulation:
        link = link_named(self.link or self.setting.link)
        replicas = [self._replica(role, link) for role in self.roles]
        setup = FleetSetup(
            config=FleetConfig(),
            handover=HandoverConfig(handover=self.handover),
            scheduler=replicas[0].engine.scheduler,
            replicas=replicas,
            link=link,
        )
        simulation = FleetSimulation(setup, Results(self.objectives))
        simulation.run(asked)
        return simulation

    def _replica(self, role: str, link: SimulatedLink | None) -> ReplicaSetup:
        device, model = device_named(self.setting.device), model_named(self.setting.model)
        budget, costs = device.token_budget, roofline(device, model)
        engine = EngineSetup(
            scheduler=SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=max(128, budget)),
            num_blocks=min(num_kv_blocks(device, model, BLOCK_SIZE), 40_000),
            block_size=BLOCK_SIZE,
        )
        assert link is not None
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


def goodput(setting: Setting, num_requests: int) -> None:
    print(f"{'goodput/s':10} " + " ".join(f"{name:>8}" for name in SYSTEMS) + "   auto, auto PD over the better")
    for name, objectives in setting.objectives.items():
        best = dict.fromkeys(SYSTEMS, 0.0)
        for system, (roles, handover) in SYSTEMS.items():
            for rate in setting.rates:
                asked = arrivals(rate, setting.prompt, setting.output, num_requests)
                told = Run(setting, roles, handover, objectives)(asked).to_json()
                best[system] = max(best[system], told["goodput_rps"])
        better = max(best["1P+1D"], best["2 mixed"])
        figures = " ".join(f"{value:8.3g}" for value in best.values())
        print(f"{name:10} {figures}   {best['auto'] / better:.3f} {best['auto PD'] / better:.3f}", flush=True)


def links(setting: Setting, num_requests: int) -> None:
    print(f"{'E2E (s)':16} " + " ".join(f"{name:>8}" for name in SYSTEMS) + "   auto, auto PD over the better")
    for link in ("shm", "tcp", "100MB/s"):
        for rate in setting.rates[::2]:
            means = {}
            for system, (roles, handover) in SYSTEMS.items():
                asked = arrivals(rate, setting.prompt, setting.output, num_requests)
                means[system] = Run(setting, roles, handover, link=link)(asked).results.total.e2e_s.mean or 0.0
            better = min(means["1P+1D"], means["2 mixed"])
            figures = " ".join(f"{value:8.4g}" for value in means.values())
            ratios = f"{means['auto'] / better:.3f} {means['auto PD'] / better:.3f}"
            print(f"{link:8} {rate:5g}/s {figures}   {ratios}", flush=True)


PARTS = {"goodput": goodput, "links": links}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--setting", choices=tuple(SETTINGS), default="h100")
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    for name, part in PARTS.items():
        if options.part in (name, "all"):
            print(f"-- {name}")
            part(SETTINGS[options.setting], options.requests)


if __name__ == "__main__":
    main()
