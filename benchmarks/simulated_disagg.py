"""What handing KV over is worth, simulated: goodput, time in all, roles that follow the load, workers that come and go.

    python benchmarks/simulated_disagg.py [--part goodput|links|turn|steady|scale] [--setting h100|cpu] [--requests 300]

`goodput`: 1P+1D (`always`), two mixed workers (`never`) and `auto` under objectives tight in TTFT, tight in TPOT and
balanced, the best of several rates; aim of auto: 0.95 of the better. `links`: mean E2E over shm, tcp and 100 MB/s; aim:
1.05 of the better of always and never. `turn`: load turns from prompts to answers after 30 s; aim: as good as the best
fixed split 20 s later. `steady`: switches under ten minutes of each load; aim: one in 30 s. `scale`: workers of each
role follow the load; aim: only the busy role grows, at 0.85 of the cheapest fixed split's device-seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from maitred.bounds import Bounds
from maitred.cluster.autoscale import AutoscaleConfig, Autoscaler
from maitred.cluster.config import FleetConfig
from maitred.cluster.disagg import HandoverConfig, Role, WorkerFacts
from maitred.cluster.roles import RoleScaling
from maitred.config import SchedulerConfig
from maitred.request import RequestState
from maitred.sim.devices import device_named, model_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSimulation
from maitred.sim.fleet_setup import FleetSetup, ReplicaSetup
from maitred.sim.links import Link, link_named
from maitred.sim.results import GroupResults, Objectives, Results
from maitred.sim.workload import Arrival

BLOCK_SIZE, TURN_AT, SPAN_S = 16, 30.0, 5.0
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


@dataclass
class Phase:
    """Poisson arrivals up to `until` (s), lengths lognormal about their means."""

    until: float
    rate: float
    prompt: float
    output: float


def arrivals(phases: Sequence[Phase], spread: float, seed: int = 1, most: int = 1 << 30) -> Iterator[Arrival]:
    rng, at, number = Random(seed), 0.0, 0
    for phase in phases:
        while (at := at + rng.expovariate(phase.rate)) < phase.until and number < most:
            number += 1
            prompt, output = (
                max(2, round(mean * rng.lognormvariate(-spread * spread / 2, spread)))
                for mean in (phase.prompt, phase.output)
            )
            own = number.to_bytes(4, "little")
            yield Arrival(
                at=at, request_id=f"r{number}", prompt_tokens=prompt, output_tokens=output, max_tokens=4096, own=own
            )
        at = phase.until


@dataclass
class Run:
    """One fleet and its workload."""

    setting: Setting
    roles: Sequence[str]
    handover: str
    objectives: Objectives = field(default_factory=Objectives)
    link: str = ""
    switching: str = "off"
    scaling: dict[Role, RoleScaling] = field(default_factory=dict)

    def __call__(self, asked: Iterator[Arrival], results: Results | None = None) -> FleetSimulation:
        link = link_named(self.link or self.setting.link)
        replicas = [self._replica(role, link) for role in self.roles]
        setup = FleetSetup(
            config=FleetConfig(),
            handover=HandoverConfig(handover=self.handover, role_switching=self.switching == "on"),
            scheduler=replicas[0].engine.scheduler,
            replicas=replicas,
            link=link,
            role_scaling=self.scaling,
            cold_start_s=5.0,
        )
        simulation = FleetSimulation(setup, results or Results(self.objectives))
        simulation.run(asked)
        return simulation

    def _replica(self, role: str, link: Link | None) -> ReplicaSetup:
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
                phase = Phase(1e9, rate, setting.prompt, setting.output)
                told = Run(setting, roles, handover, objectives)(arrivals([phase], 0.6, most=num_requests)).to_json()
                best[system] = max(best[system], told["goodput_rps"])
        better = max(best["1P+1D"], best["2 mixed"])
        figures = " ".join(f"{value:8.3g}" for value in best.values())
        print(f"{name:10} {figures}   {best['auto'] / better:.3f} {best['auto PD'] / better:.3f}", flush=True)


def links(setting: Setting, num_requests: int) -> None:
    print(f"{'E2E (s)':16} " + " ".join(f"{name:>8}" for name in SYSTEMS) + "   auto, auto PD over the better")
    for link in ("shm", "tcp", "100MB/s"):
        for rate in setting.rates[::2]:
            phase, means = Phase(1e9, rate, setting.prompt, setting.output), {}
            for system, (roles, handover) in SYSTEMS.items():
                run = Run(setting, roles, handover, link=link)
                means[system] = run(arrivals([phase], 0.6, most=num_requests)).results.total.e2e_s.mean or 0.0
            better = min(means["1P+1D"], means["2 mixed"])
            figures = " ".join(f"{value:8.4g}" for value in means.values())
            ratios = f"{means['auto'] / better:.3f} {means['auto PD'] / better:.3f}"
            print(f"{link:8} {rate:5g}/s {figures}   {ratios}", flush=True)


PROMPTS, ANSWERS = (20.0, 3000, 40), (34.0, 250, 450)  # of the h100: rate, prompt, output
TURN_OBJECTIVES = Objectives(ttft_s=0.6, tpot_s=0.0105)


class Spans(Results):
    """Besides, by spans of arrival: how many requests were good, of how many."""

    def __init__(self, objectives: Objectives) -> None:
        super().__init__(objectives)
        self.spans: dict[int, list[int]] = {}

    def finished(self, group: GroupResults, request: RequestState, **more: Any) -> None:
        before = group.num_good
        super().finished(group, request, **more)
        span = self.spans.setdefault(int(request.arrived_at // SPAN_S), [0, 0])
        span[0] += group.num_good - before
        span[1] += 1

    def share(self, span: int) -> float:
        good, all_there = self.spans.get(span, [0, 1])
        return good / all_there


def turn(setting: Setting, _: int) -> None:
    phases, told = [Phase(TURN_AT, *PROMPTS), Phase(75.0, *ANSWERS)], list[tuple[str, Spans, list[float]]]()
    spans = range(int(TURN_AT // SPAN_S), 15)
    for num_prefill, handover, switching in (
        (3, "always", "off"),
        (2, "always", "off"),
        (1, "always", "off"),
        (3, "always", "on"),
        (3, "auto", "on"),
    ):
        roles, results = [P] * num_prefill + [D] * (4 - num_prefill), Spans(TURN_OBJECTIVES)
        run = Run(setting, roles, handover, TURN_OBJECTIVES, switching=switching)
        simulation = run(arrivals(phases, 0.4), results)
        name = f"{num_prefill}P+{4 - num_prefill}D {handover}, switching {switching}"
        told.append((name, results, [round(at, 1) for at, _, _ in simulation.figures.switches]))
    best = {span: max(results.share(span) for _, results, _ in told[:3]) for span in spans}
    for name, results, switches in told:
        worse = [span for span in spans if results.share(span) < 0.95 * best[span]]
        back_s = (max(worse, default=spans[0] - 1) + 1) * SPAN_S - TURN_AT
        back = f"{back_s:.0f} s" if spans[-1] not in worse else "never"
        print(f"{name:28} attained {results.total.slo_attainment:.3f}, back after {back}; switches at {switches}")


def steady(setting: Setting, _: int) -> None:
    for rate, prompt, output in (PROMPTS, ANSWERS, (12.0, 1500, 150)):
        phase = Phase(600.0, rate, prompt, output)
        simulation = Run(setting, [P, P, D, D], "auto", TURN_OBJECTIVES, switching="on")(arrivals([phase], 0.4))
        times = [at for at, _, _ in simulation.figures.switches]
        closest = min((later - at for at, later in pairwise(times)), default=float("inf"))
        print(
            f"{rate:g}/s of {prompt} + {output}: {len(times)} switches, the closest {closest:.0f} s apart", flush=True
        )


def scale(setting: Setting, _: int) -> None:
    objectives = Objectives(ttft_s=1.0, tpot_s=0.02)
    rates = (1.5, 4.0, 8.0, 12.0, 16.0, 12.0, 8.0, 4.0, 1.5, 1.5)  # a tide of prompts
    phases = [Phase(60.0 * (i + 1), rate, 4000, 20) for i, rate in enumerate(rates)]
    for num_prefill in (2, 3):
        simulation = Run(setting, [P] * num_prefill + [D], "always", objectives)(arrivals(phases, 0.4))
        _tell_scale(f"{num_prefill}P+1D", simulation)
    for handover in ("always", "auto"):
        scaling = {
            role: RoleScaling(Bounds(1, 4), Autoscaler(AutoscaleConfig(ttft_objective_s=objectives.ttft_s)))
            for role in (Role.PREFILL, Role.DECODE)
        }
        run = Run(setting, [P] * 4 + [D] * 4, handover, objectives, scaling=scaling)
        _tell_scale(f"1:4P+1:4D {handover}", run(arrivals(phases, 0.4)))


def _tell_scale(name: str, simulation: FleetSimulation) -> None:
    by_role = ", ".join(f"{role} {seconds:.0f}" for role, seconds in simulation.figures.role_s.items())
    attained, device_s = simulation.results.total.slo_attainment, simulation.figures.replica_s
    print(f"{name:20} attained {attained:.3f} device-seconds {device_s:6.0f} ({by_role})", flush=True)


PARTS = {"goodput": goodput, "links": links, "turn": turn, "steady": steady, "scale": scale}


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
