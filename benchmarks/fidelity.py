"""How well the simulator foretells the live engine: three loads, four policies, the same arrivals, unseen cost models.

    python benchmarks/fidelity.py [--seconds 5] [--rounds 3] [--write] [--json FILE]

Each live run serves bimodal Poisson arrivals with the built-in model (one thread) and its decision log on;
rounds go over loads and policies in rotated order. Its simulation gets the arrivals from that log and a cost model,
with its jitter, fitted on the steps of runs of *other* loads and policies. Printed is the error of simulated over live
p50, p90 and p99 of TTFT, ITL and E2E, each the mean over rounds (and seeds). Of the requests 15% are documents: at 10%
p90 of TTFT would lie on the edge between chats and documents, and one request more or less would move it by half.

- `probe`: the machine's slowness over time comes from a probe (machine_speed.py) that ran between the engine's steps.
  The cost model is fitted on steps at the probe's usual speed, and a run is simulated at the speed that its probe
  found. How much the probe's word counts, as a power of its slowness, is fitted on the other runs too. Nothing else of
  the run is known but its arrivals.
- `unseen`: the machine is taken to be as it was in the other runs.
- `speed`, a diagnosis: one number is from the run itself, its steps' total time over the modelled one.
- `live`: how far the rounds are from their own mean, live against live: what no simulation can be nearer than.
- `seeds`: the same of simulations that differ in the jitter's seed alone.
- `rank`: by how much the live figure changes when its rank moves by one request: what one request in the tail decides.

A run is thrown away and served again, a few times in all, when the probe before it and after it differ by more than
--unsteady or others took more than --others of a core. Time is the engine thread's CPU time by default, since other
processes share the cores; on a quiet machine use `--clock wall`. `--write` puts the tables into docs/simulator.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

from fidelity_models import Known, LiveRun, at_usual_speed, fit_on_others, fitted, step_error, total_slowness
from fidelity_telling import (
    FIGURES,
    KINDS,
    MEASURES,
    QUANTILES,
    SHARES,
    Cell,
    explained,
    print_comparison,
    summary,
    table,
)
from harness import write_section
from machine_speed import Probe, Quiet, Times, Trace, Watch, median_of, probe_engine

from maitred.cli.profiling import CLOCKS, live_engine, record
from maitred.config import EngineConfig, ModelConfig, SchedulerConfig
from maitred.core.cost_model import CostModel, Slowness
from maitred.sim.engine import EngineSetup, SlownessAt
from maitred.sim.jitter import Jitter
from maitred.sim.recorded import measured_steps, read_run
from maitred.sim.results import Results
from maitred.sim.simulator import Simulation
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec
from maitred.sim.workload import Arrival

LOADS = (0.5, 0.8, 1.1)
POLICIES = ("fcfs", "priority", "srpt", "mlfq")
CLASSES = {
    "chat": ClassSpec(share=0.85, input="lognormal:60,0.6", output="lognormal:40,0.6", max_tokens=512),
    "document": ClassSpec(
        share=0.15, input="lognormal:700,0.3", output="lognormal:120,0.4", max_tokens=512, priority=1
    ),
}
NUM_SEEDS = 4
DOCUMENT = Path(__file__).parents[1] / "docs" / "simulator.md"


def workload(
    rate: float, num_requests: int, seed: int = 1, classes: Mapping[str, ClassSpec] = CLASSES
) -> SyntheticWorkload:
    return SyntheticWorkload(WorkloadSpec(rate=rate, num_requests=num_requests, seed=seed, classes=classes))


def engine_config(policy: str, max_num_seqs: int, executor: str = "auto") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="maitred-mini", num_threads=1, executor=executor),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, policy=policy, predictor="max_tokens"),
    )


# ---- live


class Capacity(NamedTuple):
    rate: float  # requests per second
    usual: Times
    prompt_share: float  # of the engine's time


def measure_capacity(
    classes: Mapping[str, ClassSpec],
    max_num_seqs: int,
    clock: str,
    probe: Probe,
    seconds: float,
    executor: str = "auto",
) -> Capacity:
    """Of FCFS when it is never idle, and what the probe took meanwhile.

    Counting those that end in a few seconds would be 10% off by the luck of their lengths. So the steps of these
    seconds make a cost model, and the rate is that of a long simulation.
    """
    watch = Watch(probe)
    with live_engine(engine_config("fcfs", max_num_seqs, executor), CLOCKS[clock](), lambda line: None) as live:
        endless = workload(1.0, 1_000_000, classes=classes).arrivals()
        live.serve_closed(endless, max_num_seqs, live.clock.now() + seconds, watch)
        steps = list(measured_steps(live.close()))
    usual = median_of([reading.took for reading in watch.readings])
    trace = Trace(watch.readings, usual)
    costs = fitted([at_usual_speed(step, trace) for step in steps])
    whole_s = sum(costs.step_s(step.shape) for step in steps)
    prompts_s = sum(costs.slowed_s(step.shape, Slowness(prompts=1.0, rest=0.0)) for step in steps)
    return Capacity(never_idle(costs, classes, max_num_seqs), usual, prompts_s / whole_s)


def never_idle(costs: CostModel, classes: Mapping[str, ClassSpec], max_num_seqs: int) -> float:
    """Requests per second of FCFS when all have come."""
    arrivals = workload(1e6, 1500, classes=classes).arrivals()
    results = Simulation(engine_setup("fcfs", max_num_seqs), costs, Results()).run(arrivals)
    return results.total.num_finished / results.duration_s


def engine_setup(policy: str, max_num_seqs: int) -> EngineSetup:
    config = engine_config(policy, max_num_seqs)
    return EngineSetup(scheduler=config.scheduler, num_blocks=max_num_seqs * 128, predictor="max_tokens")


def offered(rate: float, num_requests: int) -> list[Arrival]:
    """The same for every policy and round. The oracle's max_tokens: what a request is going to say."""
    return [replace(a, max_tokens=a.output_tokens) for a in workload(rate, num_requests).arrivals()]


def run_all(capacity: float, probe: Probe, usual: Times, options: argparse.Namespace) -> tuple[list[LiveRun], int]:
    """(runs, how many were thrown away)."""
    combinations = [(load, policy) for load in LOADS for policy in options.policies.split(",")]
    runs: list[LiveRun] = []
    num_redone, began = 0, time.monotonic()
    for number in range(options.rounds):
        turn = number * len(combinations) // max(1, options.rounds)
        for load, policy in [*combinations[turn:], *combinations[:turn]]:
            if number and time.monotonic() - began > options.minutes * 60:
                break
            arrivals = offered(load * capacity, max(40, round(capacity * options.seconds)))
            run = run_live(load, policy, number, arrivals, probe, usual, options)
            while num_redone < options.redo and spoilt(run, options):
                num_redone += 1
                run = run_live(load, policy, number, arrivals, probe, usual, options)
            runs.append(run)
    return runs, num_redone


def spoilt(run: LiveRun, options: argparse.Namespace) -> bool:
    return run.unsteady > options.unsteady or run.others > options.others


def run_live(
    load: float,
    policy: str,
    number: int,
    arrivals: list[Arrival],
    probe: Probe,
    usual: Times,
    options: argparse.Namespace,
) -> LiveRun:
    before, quiet, watch = median_of(probe.readings()), Quiet(), Watch(probe)
    config = engine_config(policy, options.max_num_seqs, options.executor)
    steps = record(config, CLOCKS[options.clock](), arrivals, watch)
    others, after = quiet.others(), median_of(probe.readings())
    run = LiveRun(
        load=load,
        policy=policy,
        round=number,
        run=read_run(steps),
        steps=list(measured_steps(steps)),
        trace=Trace(watch.readings, usual),
        before=before,
        after=after,
        others=others,
    )
    mean = run.trace.mean
    print(
        f"  live: load {load}, {policy}, round {number + 1}: {len(run.steps)} steps, slowness {mean.prompts:.2f} of "
        f"prompts, {mean.rest:.2f} of the rest (spread {run.trace.spread:.0%}), unsteady {run.unsteady:.1%}, "
        f"others {others:.2f} of a core",
        file=sys.stderr,
        flush=True,
    )
    return run


# ---- simulated


def simulated(
    run: LiveRun, model: CostModel, slowness: SlownessAt | None, max_num_seqs: int, num_seeds: int
) -> list[Cell]:
    """The figures, for each seed of the jitter."""
    setup = engine_setup(run.policy, max_num_seqs)
    return [
        figures(
            Simulation(setup, model, Results(), jitter=Jitter(model, Random(seed)), slowness=slowness).run(
                iter(run.run.arrivals)
            )
        )
        for seed in range(num_seeds)
    ]


def figures(results: Results) -> Cell:
    whole = results.to_json()
    return {f"{m}.{q}": whole[m][q] for m in MEASURES for q in QUANTILES}


def compare(repeats: Sequence[LiveRun], known: Known, max_num_seqs: int) -> dict[str, Cell]:
    """Of the rounds of one load and policy, with what is known from the others."""
    guesses: dict[str, list[list[Cell]]] = {kind: [] for kind in KINDS}
    for run in repeats:
        own = total_slowness(run.steps, known.plain)
        guesses["probe"].append(simulated(run, known.usual, run.slowness(known.worth), max_num_seqs, NUM_SEEDS))
        guesses["unseen"].append(simulated(run, known.plain, None, max_num_seqs, NUM_SEEDS // 2))
        guesses["speed"].append(
            simulated(run, known.plain, lambda at, own=own: Slowness(own, own), max_num_seqs, NUM_SEEDS // 2)
        )
    lives = [figures(run.run.results) for run in repeats]
    cells: dict[str, Cell] = {}
    for name in FIGURES:
        live_s = statistics.fmean(live[name] for live in lives)
        cell = {"live_s": live_s, "live": spread([live[name] for live in lives])}
        cell["rank"] = statistics.fmean(rank_step(run.run.results, name) for run in repeats)
        cell["seeds"] = statistics.fmean(spread([seed[name] for seed in seeds]) for seeds in guesses["probe"])
        for kind, by_run in guesses.items():
            cell[kind] = statistics.fmean(seed[name] for seeds in by_run for seed in seeds) / live_s - 1
        cells[name] = cell
    return cells


def rank_step(results: Results, name: str) -> float:
    """How far the figure is from those one request above and below in rank: the mean, as a share of it."""
    measure, quantile = name.split(".")
    total = results.total
    sketch, share, one = getattr(total, measure), SHARES[quantile], 1 / total.num_finished
    here, below, above = (sketch.quantile(min(1.0, share + step)) for step in (0.0, -one, one))
    return float((above - below) / 2 / here)


def spread(values: Sequence[float]) -> float:
    """Mean distance from the mean, as a share of it."""
    mean = statistics.fmean(values)
    return statistics.fmean(abs(value - mean) for value in values) / mean


# ---- what is told


def machine(runs: Sequence[LiveRun], num_redone: int, options: argparse.Namespace) -> str:
    means = [run.trace.mean for run in runs]
    prompts, rest = [mean.prompts for mean in means], [mean.rest for mean in means]
    within = statistics.fmean(run.trace.spread for run in runs)
    num_spoilt = sum(spoilt(run, options) for run in runs)
    return (
        f"The probe's means over a run were {min(prompts):.2f} to {max(prompts):.2f} of its usual time for prompts, "
        f"{min(rest):.2f} to {max(rest):.2f} for the rest, and ranged by {within:.0%} within a run (mean); others used "
        f"{statistics.fmean(run.others for run in runs):.2f} of a core. "
        f"{num_redone} runs were thrown away and served again; {num_spoilt} of the {len(runs)} kept are no better."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of work in each run: so many times capacity requests"
    )
    parser.add_argument(
        "--executor",
        choices=("auto", "native", "torch"),
        default="torch",
        help="of the live runs; torch's steps of the built-in model take milliseconds, as a real model's do",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no live run after so long")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--redo", type=int, default=4, help="most runs to throw away, in all")
    parser.add_argument("--unsteady", type=float, default=0.08, help="probe after over probe before, less 1")
    parser.add_argument("--others", type=float, default=0.25, help="cores that others may use")
    parser.add_argument("--write", action="store_true", help="into docs/simulator.md")
    parser.add_argument("--json", help="write all figures here")
    options = parser.parse_args()
    config = engine_config("fcfs", options.max_num_seqs, options.executor)
    with probe_engine(config, CLOCKS[options.clock]()) as probe:
        capacity, usual, _ = measure_capacity(
            CLASSES, options.max_num_seqs, options.clock, probe, 5.0, options.executor
        )
        print(f"capacity {capacity:.2f} requests/s at {options.max_num_seqs} slots, {options.clock} time", flush=True)
        runs, num_redone = run_all(capacity, probe, usual, options)
    combinations = list(dict.fromkeys((run.load, run.policy) for run in runs))
    known = {c: fit_on_others(*c, runs) for c in sorted(combinations, key=_listed(options))}
    repeats = {c: [run for run in runs if (run.load, run.policy) == c] for c in known}
    compared = {c: compare(repeats[c], known[c], options.max_num_seqs) for c in known}
    off = statistics.fmean(step_error(run, known[c]) for c in known for run in repeats[c])
    worth = statistics.fmean(known[c].worth for c in known)
    print_comparison(compared)
    parts = [
        f"Executor {options.executor}, capacity {capacity:.1f} requests/s, {len(runs)} runs of "
        f"{runs[0].run.results.total.num_finished} requests, "
        f"{options.clock} time. {machine(runs, num_redone, options)} A single "
        f"step is {off:.0%} off its modelled time on average, at the speed that the probe found; its slowness counts "
        f"with a power of {worth:.2f}.",
        summary(compared),
        table(compared),
        "Over 10%:\n\n" + explained(compared),
    ]
    print("", parts[0], parts[1], parts[3], sep="\n")
    if options.write:
        write_section(DOCUMENT, "fidelity", "\n\n".join(parts))
    if options.json:
        told = {f"{load} {policy}": cells for (load, policy), cells in compared.items()}
        Path(options.json).write_text(json.dumps(told, indent=1), encoding="utf-8")


def _listed(options: argparse.Namespace) -> Callable[[tuple[float, str]], tuple[float, int]]:
    policies = options.policies.split(",")
    return lambda combination: (combination[0], policies.index(combination[1]))


if __name__ == "__main__":
    main()
