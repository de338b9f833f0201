"""How well the simulator foretells the live engine: three loads, four policies, the same arrivals, unseen cost models.

    python benchmarks/fidelity.py [--seconds 12] [--rounds 2] [--json FILE]

Each live run serves bimodal Poisson arrivals with the built-in model (float32, one thread) and its decision log on. Its
simulation gets the arrivals from that log and a cost model, with its jitter, fitted on the steps of all *other* runs.
Printed is the error of simulated over live p50, p90 and p99 of TTFT, ITL and E2E; the simulated are means over seeds.

- `unseen`: everything is from the other runs, the machine's speed too;
- `speed`: one number is from the run itself, its steps' total time over the modelled one. Neighbours on a shared
  machine slow a run down by a third and more, and near capacity a queue feels each percent many times over.

By default time is the engine thread's CPU time, since other processes share the cores; on a quiet machine use
`--clock wall`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random

from maitred.cli.simulation.live import live_engine, record
from maitred.config import EngineConfig, ModelConfig, SchedulerConfig
from maitred.sim.cost_model import CostModel, Jitter
from maitred.sim.fit import fit_steps
from maitred.sim.recorded import MeasuredStep, RecordedRun, measured_steps, read_run
from maitred.sim.results import Results
from maitred.sim.simulator import EngineSetup, Simulation
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec
from maitred.sim.workload import Arrival

LOADS = (0.5, 0.8, 1.1)
POLICIES = ("fcfs", "priority", "srpt", "mlfq")
MEASURES, QUANTILES = ("ttft_s", "itl_s", "e2e_s"), ("p50", "p90", "p99")
CLASSES = {
    "chat": ClassSpec(share=0.9, input="lognormal:60,0.6", output="lognormal:40,0.6", max_tokens=512),
    "document": ClassSpec(share=0.1, input="lognormal:700,0.3", output="lognormal:120,0.4", max_tokens=512, priority=1),
}
MAX_FITTED_STEPS = 4000
NUM_SEEDS = 5


@dataclass(frozen=True)
class LiveRun:
    load: float
    policy: str
    round: int
    run: RecordedRun
    steps: list[MeasuredStep]


def workload(rate: float, num_requests: int, seed: int = 1) -> SyntheticWorkload:
    return SyntheticWorkload(WorkloadSpec(rate=rate, num_requests=num_requests, seed=seed, classes=CLASSES))


def engine_config(policy: str, max_num_seqs: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(num_threads=1, dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, policy=policy, predictor="max_tokens"),
    )


def measure_capacity(max_num_seqs: int, clock: str, seconds: float) -> float:
    """Requests per second when as many as there are slots are always in flight."""
    with live_engine(engine_config("fcfs", max_num_seqs), clock, lambda line: None) as live:
        endless = workload(1.0, 1_000_000).arrivals()
        live.serve_closed(endless, max_num_seqs, live.clock.now() + seconds / 4)  # warm up
        began, done = live.clock.now(), live.parts.core.stats.num_finished
        live.serve_closed(endless, max_num_seqs, began + seconds)
        ended = live.clock.now()
        num_done = sum(live.parts.core.stats.num_finished.values()) - sum(done.values())
        live.close()
        return num_done / (ended - began)


def run_live(load: float, policy: str, number: int, arrivals: list[Arrival], options: argparse.Namespace) -> LiveRun:
    steps = record(engine_config(policy, options.max_num_seqs), options.clock, arrivals)
    print(f"  live: load {load}, {policy}, round {number + 1}: {len(steps)} steps", file=sys.stderr, flush=True)
    return LiveRun(load, policy, number, read_run(steps), list(measured_steps(steps)))


def fit_on_others(run: LiveRun, runs: Sequence[LiveRun]) -> tuple[CostModel, CostModel]:
    """(as it comes, for this run's speed); neither saw a step of this load and policy, but for one sum."""
    others = [other for other in runs if (other.load, other.policy) != (run.load, run.policy)]
    unseen = fitted([step for other in others for step in other.steps])
    even = fitted([step for other in others for step in at_speed(other.steps, 1 / slowness(other.steps, unseen))])
    return unseen, scaled(even, slowness(run.steps, even))


def fitted(steps: Sequence[MeasuredStep]) -> CostModel:
    chosen = Random(0).sample(steps, min(MAX_FITTED_STEPS, len(steps)))
    return fit_steps(chosen, chosen).cost_model


def slowness(steps: Sequence[MeasuredStep], model: CostModel) -> float:
    return sum(step.step_s for step in steps) / sum(model.expected_s(step.shape) for step in steps)


def at_speed(steps: Sequence[MeasuredStep], factor: float) -> list[MeasuredStep]:
    return [
        MeasuredStep(step.shape, step.step_s * factor, None if step.gap_s is None else step.gap_s * factor)
        for step in steps
    ]


def scaled(model: CostModel, factor: float) -> CostModel:
    times = {f.name: getattr(model, f.name) * factor for f in fields(model) if f.name.endswith("_s")}
    return replace(model, **times)


def simulated(run: LiveRun, model: CostModel, seed: int, max_num_seqs: int) -> Results:
    setup = EngineSetup(
        scheduler=engine_config(run.policy, max_num_seqs).scheduler,
        num_blocks=max_num_seqs * 128,
        predictor="max_tokens",
    )
    return Simulation(setup, model, Results(), jitter=Jitter(model, Random(seed))).run(iter(run.run.arrivals))


def figures(results: Results) -> dict[str, float]:
    whole = results.to_json()
    return {f"{m}.{q}": whole[m][q] for m in MEASURES for q in QUANTILES}


def compare(repeats: Sequence[LiveRun], runs: Sequence[LiveRun], max_num_seqs: int) -> dict[str, dict[str, float]]:
    """Of one load and policy: live, and the median error over rounds, both ways."""
    errors: dict[str, dict[str, list[float]]] = {"unseen": {}, "speed": {}}
    for run in repeats:
        live = figures(run.run.results)
        for kind, model in zip(errors, fit_on_others(run, runs), strict=True):
            guessed = [figures(simulated(run, model, seed, max_num_seqs)) for seed in range(NUM_SEEDS)]
            for name, real in live.items():
                guess = statistics.fmean(f[name] for f in guessed)
                errors[kind].setdefault(name, []).append(guess / real - 1)
    lives = [figures(run.run.results) for run in repeats]
    return {
        name: {
            "live": statistics.median(f[name] for f in lives),
            "live_spread": (max(f[name] for f in lives) - min(f[name] for f in lives)) / lives[0][name],
            **{kind: statistics.median(of_name[name]) for kind, of_name in errors.items()},
        }
        for name in lives[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals in each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--json", help="write all figures here")
    options = parser.parse_args()
    capacity = measure_capacity(options.max_num_seqs, options.clock, options.seconds)
    print(f"capacity {capacity:.2f} requests/s at {options.max_num_seqs} slots, {options.clock} time")
    policies = options.policies.split(",")
    runs = [
        run_live(load, policy, number, offered(load * capacity, options.seconds), options)
        for number in range(options.rounds)
        for load in LOADS
        for policy in policies
    ]
    print_comparison(runs, policies, options)


def offered(rate: float, seconds: float) -> list[Arrival]:
    """The same for every policy and round. The oracle's max_tokens: what a request is going to say."""
    return [replace(a, max_tokens=a.output_tokens) for a in workload(rate, max(20, round(rate * seconds))).arrivals()]


def print_comparison(runs: Sequence[LiveRun], policies: Sequence[str], options: argparse.Namespace) -> None:
    names = [f"{m}.{q}" for m in MEASURES for q in QUANTILES]
    print(f"{'load':>5} {'policy':9}{'':7}" + "".join(f"{name.replace('_s', ''):>11}" for name in names))
    record_of: dict[str, dict[str, dict[str, float]]] = {}
    for load in LOADS:
        for policy in policies:
            repeats = [run for run in runs if (run.load, run.policy) == (load, policy)]
            compared = compare(repeats, runs, options.max_num_seqs)
            record_of[f"{load} {policy}"] = compared
            print(f"{load:5} {policy:9}{'live':7}" + "".join(f"{compared[n]['live'] * 1e3:>9.1f}ms" for n in names))
            for kind in ("unseen", "speed"):
                cells = "".join(f"{compared[name][kind]:>+11.1%}" for name in names)
                print(f"{'':15}{kind:7}{cells}", flush=True)
    for kind in ("unseen", "speed"):
        errors = [abs(c[kind]) for compared in record_of.values() for c in compared.values()]
        within = [sum(e <= bound for e in errors) / len(errors) for bound in (0.05, 0.10)]
        print(
            f"{kind}: within 5%: {within[0]:.0%}, within 10%: {within[1]:.0%} of {len(errors)} figures, "
            f"median error {statistics.median(errors):.1%}"
        )
    spread = statistics.median(c["live_spread"] for compared in record_of.values() for c in compared.values())
    print(f"rounds of the same live run differ by {spread:.1%} (median)")
    if options.json:
        Path(options.json).write_text(json.dumps(record_of, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
