"""What a policy is worth: bimodal chat and document load at rho 0.7, 0.9 and 1.2, live for a few, simulated for all.

    python benchmarks/policy_value.py [--live fcfs,srpt,interactive] [--rounds 3] [--device FILE] [--write]

The baseline is FCFS with chunked prefill and continuous batching. rho is the rate over the rate at which FCFS, never
idle, finishes this mixture. Mean, p99 and the longest wait stand beside each other: a mean alone can be had by letting
the long ones wait.

Live runs serve the mixture with the built-in model. Policies take turns within a round, every round has arrivals of its
own, and ratios are to FCFS of the same round; time is the engine thread's CPU time. Simulated runs use a cost model
fitted on the steps of the live ones, or that of FILE, and are the mean of several seeds. `--write` puts the tables
between the marks of docs/policies.md, one section for each of the two, and the plots into docs/plots/.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fidelity import SLOTS, capacity_of, engine_config, fitted, never_idle
from harness import write_section

from maitred.cli.console import seconds_text
from maitred.cli.profiling import CpuClock, record
from maitred.cli.simulate_inputs import find_target
from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.policy.policies import POLICIES
from maitred.sim.engine import EngineSetup
from maitred.sim.recorded import MeasuredStep, measured_steps, read_run
from maitred.sim.report import thinned
from maitred.sim.results import Results
from maitred.sim.simulator import Simulation
from maitred.sim.svg import COLOURS, Axis, Panel, axis, sheet
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, TenantSpec, WorkloadSpec
from maitred.sim.workload import Arrival

RHOS = (0.7, 0.9, 1.2)
CLASSES = {
    "chat": ClassSpec(share=0.9, input="lognormal:60,0.6", output="lognormal:40,0.6", max_tokens=512),
    "document": ClassSpec(share=0.1, input="lognormal:700,0.3", output="lognormal:120,0.4", max_tokens=512, priority=1),
}
TENANTS = {"light": TenantSpec(share=1), "heavy": TenantSpec(share=3)}
FIGURES = (  # heading, part, figure
    ("TTFT mean", "ttft_s", "mean"),
    ("TTFT p99", "ttft_s", "p99"),
    ("E2E mean", "e2e_s", "mean"),
    ("E2E p99", "e2e_s", "p99"),
    ("ITL p99", "itl_s", "p99"),
    ("wait mean", "queue_s", "mean"),
    ("wait p99", "queue_s", "p99"),
    ("wait max", "queue_s", "max"),
)
DOCUMENT = Path(__file__).parents[1] / "docs" / "policies.md"
Rows = Mapping[str, Mapping[str, Any]]


def offered(rate: float, num_requests: int, seed: int) -> SyntheticWorkload:
    spec = WorkloadSpec(rate=rate, num_requests=num_requests, seed=seed, classes=CLASSES, tenants=TENANTS)
    return SyntheticWorkload(spec)


def simulate(policy: str, costs: CostModel, rate: float, num_requests: int, seed: int) -> Results:
    config = SchedulerConfig(max_num_seqs=SLOTS, policy=policy)
    setup = EngineSetup(scheduler=config, num_blocks=SLOTS * 128, predictor="oracle")
    return Simulation(setup, costs, Results()).run(offered(rate, num_requests, seed).arrivals())


def average(runs: Sequence[Results]) -> dict[str, Any]:
    """Mean of each figure over the seeds; of a maximum, the largest."""
    listed = [run.to_json() for run in runs]

    def figure(part: str, name: str) -> float:
        values = [figures[part][name] for figures in listed]
        return max(values) if name == "max" else statistics.fmean(values)

    averaged: dict[str, Any] = {heading: figure(part, name) for heading, part, name in FIGURES}
    averaged["Jain, tenants"] = statistics.fmean(figures["jain"] for figures in listed)
    averaged["preemptions"] = statistics.fmean(run.num_preemptions / run.total.num_finished for run in runs)
    return averaged


def markdown(rows: Rows, title: str) -> str:
    """A table: each figure, and in brackets its ratio to FCFS; `spread` of a ratio, where known, is over rounds."""
    names = [heading for heading, _, _ in FIGURES]
    lines = [f"**{title}**", "", f"| policy | {' | '.join(names)} | Jain, tenants | preemptions |"]
    lines.append("|---|" + "--:|" * (len(names) + 2))
    base = rows["fcfs"]
    for policy, figures in rows.items():
        cells = [f"{seconds_text(figures[name])}{_ratio(figures, base, name, policy)}" for name in names]
        lines.append(
            f"| {policy} | {' | '.join(cells)} | {figures['Jain, tenants']:.2f} | {figures['preemptions']:.2f} |"
        )
    return "\n".join([*lines, ""])


def _ratio(figures: Mapping[str, Any], base: Mapping[str, Any], name: str, policy: str) -> str:
    if policy == "fcfs" or base[name] <= 0:
        return ""
    spread = figures.get("spread", {}).get(name)
    return f" ({figures[name] / base[name]:.2f}{'' if spread is None else f' ± {spread:.2f}'})"


def in_words(tables: Mapping[float, Rows], policies: Sequence[str]) -> str:
    """What the tables say of the mean wait and the longest one."""
    lines = []
    for rho, rows in tables.items():
        base = rows["fcfs"]
        told = [
            f"`{policy}` {rows[policy]['wait mean'] / base['wait mean']:.2f} of the mean wait "
            f"and {rows[policy]['wait max'] / base['wait max']:.1f} of the longest"
            for policy in policies
            if policy in rows and base["wait mean"] > 0
        ]
        lines.append(f"- rho {rho}, against FCFS: {'; '.join(told)}.")
    return "\n".join(lines) + "\n"


# ---- plots


def wait_plot(runs: Mapping[str, Results], heading: str) -> str:
    """Share of requests that waited longer than this: the tail, where policies differ."""
    panels = []
    for title, part in (("wait in queue: share above this", "queue_s"), ("end to end: share above this", "e2e_s")):
        curves = {
            policy: [(max(x, 1e-4), 1 - y) for x, y in thinned(list(getattr(results.total, part).curve()))]
            for policy, results in runs.items()
        }
        values = [x for curve in curves.values() for x, _ in curve]
        panel = Panel(title, axis(values, log=True), Axis(1e-3, 1.0, log=True), "s", height=320)
        for colour, curve in zip(COLOURS * 2, curves.values(), strict=False):
            panel.line([(x, y) for x, y in curve if y > 0], colour, step=True)
        panels.append(panel)
    return sheet(heading, list(zip(runs, COLOURS * 2, strict=False)), panels)


# ---- live


@dataclass(frozen=True)
class LiveRun:
    results: Results
    steps: list[MeasuredStep]


def serve(policy: str, arrivals: Sequence[Arrival]) -> LiveRun:
    steps = record(engine_config(policy), CpuClock(), arrivals, lambda now: False)
    print(f"  live: {policy}, {len(arrivals)} requests", file=sys.stderr, flush=True)
    return LiveRun(read_run(steps).results, list(measured_steps(steps)))


def asked(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """The oracle's max_tokens: what a request is going to say."""
    arrivals = offered(rate, max(20, round(rate * seconds)), seed).arrivals()
    return [replace(arrival, max_tokens=arrival.output_tokens) for arrival in arrivals]


Lives = dict[float, dict[str, list[LiveRun]]]  # by rho and policy, a run a round


def serve_all(options: argparse.Namespace) -> tuple[float, Lives]:
    """(capacity, runs); stops after a whole round when the time is up."""
    policies = options.live.split(",")
    capacity, _ = capacity_of(None, "cpu", "auto", CLASSES)
    lives: Lives = {rho: {policy: [] for policy in policies} for rho in RHOS}
    began = time.monotonic()
    for number in range(options.rounds):
        if number and (time.monotonic() - began) * (number + 1) / number > options.minutes * 60:
            break
        for rho in RHOS:
            arrivals = asked(rho * capacity, options.seconds, number)
            for policy in [*policies[number % len(policies) :], *policies[: number % len(policies)]]:
                lives[rho][policy].append(serve(policy, arrivals))
    return capacity, lives


def over_rounds(runs: Mapping[str, Sequence[LiveRun]]) -> Rows:
    """Averages, and how the ratio to FCFS of the same round is spread over rounds."""
    rows = {policy: average([run.results for run in of_policy]) for policy, of_policy in runs.items()}
    rounds = {policy: [average([run.results]) for run in of_policy] for policy, of_policy in runs.items()}
    for policy, figures in rows.items():
        if len(rounds[policy]) > 1:
            figures["spread"] = {
                name: statistics.stdev(
                    own[name] / base[name] if base[name] > 0 else 1.0
                    for own, base in zip(rounds[policy], rounds["fcfs"], strict=True)
                )
                for name, _, _ in FIGURES
            }
    return rows


def live_part(capacity: float, lives: Lives, options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    num_rounds = max(len(of_policy) for of_rho in lives.values() for of_policy in of_rho.values())
    rounds = "1 round" if num_rounds == 1 else f"{num_rounds} rounds"
    tables = {rho: over_rounds(of_rho) for rho, of_rho in lives.items()}
    text = [
        f"Live, built-in model: capacity {capacity:.1f} requests/s, {rounds} of {options.seconds:g} s of "
        f"arrivals, CPU time."
        f"{' After ±: one standard deviation of the ratio over rounds.' if num_rounds > 1 else ''}\n",
        in_words(tables, [policy for policy in tables[RHOS[0]] if policy != "fcfs"]),
    ]
    plots = {}
    for rho, rows in tables.items():
        text.append(markdown(rows, f"Live, rho {rho}"))
        name = f"policies-live-{rho}.svg"
        plots[name] = wait_plot(
            {p: merged([run.results for run in r]) for p, r in lives[rho].items()}, f"live, rho {rho}"
        )
        text.append(f"![live waits at rho {rho}](plots/{name})\n")
    return "\n".join(text), plots


def merged(runs: Sequence[Results]) -> Results:
    """All of them as one, for its curves."""
    whole = Results()
    for run in runs:
        for name, group in run.tenants.items():
            whole.tenant(name).merge(group)
    return whole


# ---- simulated


def simulated_part(costs: CostModel, label: str, options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    capacity = never_idle(costs, CLASSES)
    plots, tables = {}, {}
    for rho in RHOS:
        runs = {
            policy: [simulate(policy, costs, rho * capacity, options.requests, seed) for seed in range(options.seeds)]
            for policy in options.policies.split(",")
        }
        tables[rho] = {policy: average(r) for policy, r in runs.items()}
        plots[f"policies-simulated-{rho}.svg"] = wait_plot({p: r[0] for p, r in runs.items()}, f"simulated, rho {rho}")
    text = [
        f"Cost model: {label}. Capacity {capacity:.1f} requests/s, {options.requests} requests and {options.seeds} "
        "seeds for each.\n",
        in_words(tables, ("interactive", "srpt", "mlfq")),
    ]
    for rho, rows in tables.items():
        text.append(markdown(rows, f"Simulated, rho {rho}"))
        text.append(f"![waits at rho {rho}](plots/policies-simulated-{rho}.svg)\n")
    return "\n".join(text), plots


# ---- the whole


def write(section: str, text: str, plots: Mapping[str, str]) -> None:
    folder = DOCUMENT.parent / "plots"
    folder.mkdir(exist_ok=True)
    for name, svg in plots.items():
        (folder / name).write_text(svg, encoding="utf-8")
    write_section(DOCUMENT, section, text)


def parts(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, str]]]:
    """(section, text, plots), each when it is there."""
    lives: Lives = {}
    if options.live:
        capacity, lives = serve_all(options)
        yield "live", *live_part(capacity, lives, options)
    if options.policies:
        if lives and options.device is None:
            steps = [s for of_rho in lives.values() for runs in of_rho.values() for run in runs for s in run.steps]
            costs, label = fitted(steps), "fitted on the steps of the live runs"
        else:
            target = find_target(options.device, None)
            costs, label = target.cost_model, target.label
        yield "simulated", *simulated_part(costs, label, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", help="profile or device name, as for maitred simulate; else fitted on the live runs"
    )
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help="to simulate, fcfs among them; empty simulates none"
    )
    parser.add_argument("--live", default="fcfs,srpt,interactive", help="to serve, fcfs among them; empty serves none")
    parser.add_argument("--requests", type=int, default=2000, help="in each simulated run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals in each live run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=4.5, help="begin no round that would end after so long")
    parser.add_argument("--write", action="store_true", help="into docs/policies.md and docs/plots/")
    options = parser.parse_args()
    for listed in (options.policies, options.live):
        if listed and "fcfs" not in listed.split(","):
            sys.exit("fcfs is the baseline; name it too")
    for section, text, plots in parts(options):
        print(text, flush=True)
        if options.write:
            write(section, text, plots)


if __name__ == "__main__":
    main()
