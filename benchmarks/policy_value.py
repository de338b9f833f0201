"""What a policy is worth: bimodal chat and document load at rho 0.7, 0.9 and 1.2, simulated for all, live for a few.

    python benchmarks/policy_value.py [--device FILE] [--live fcfs,srpt,interactive] [--write]

The baseline is FCFS with chunked prefill and continuous batching. rho is the rate over the rate at which FCFS, never
idle, finishes this mixture. Mean, p99 and the longest wait stand beside each other: a mean alone can be had by letting
the long ones wait. Simulated runs use the fitted profile of this machine (`maitred profile`), or FILE; each is the mean
of several seeds. Live runs serve the same mixture with the built-in model. `--write` puts the tables between the marks
of docs/policies.md, one section for each of the two, and the plots into docs/plots/.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fidelity import CLASSES, engine_config, measure_capacity

from maitred.cli.simulation.live import record
from maitred.cli.simulation.sources import find_target
from maitred.cli.simulation.table import seconds_text
from maitred.config import SchedulerConfig
from maitred.scheduler.policies import POLICIES
from maitred.sim.cost_model import CostModel
from maitred.sim.recorded import read_run
from maitred.sim.report import thinned
from maitred.sim.results import Results
from maitred.sim.simulator import EngineSetup, Simulation
from maitred.sim.svg import COLOURS, Axis, Panel, axis, sheet
from maitred.sim.synthetic import SyntheticWorkload, TenantSpec, WorkloadSpec

RHOS = (0.7, 0.9, 1.2)
SLOTS = 16
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


def simulated_capacity(costs: CostModel) -> float:
    """Requests per second of FCFS when it is never idle."""
    results = simulate("fcfs", costs, 1e6, 1500, 0)
    return results.total.num_finished / results.duration_s


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
    names = [heading for heading, _, _ in FIGURES]
    lines = [f"**{title}**", "", f"| policy | {' | '.join(names)} | Jain, tenants | preemptions |"]
    lines.append("|---|" + "--:|" * (len(names) + 2))
    base = rows["fcfs"]
    for policy, figures in rows.items():
        cells = [f"{seconds_text(figures[name])}{_ratio(figures[name], base[name], policy)}" for name in names]
        lines.append(
            f"| {policy} | {' | '.join(cells)} | {figures['Jain, tenants']:.2f} | {figures['preemptions']:.2f} |"
        )
    return "\n".join([*lines, ""])


def _ratio(value: float, base: float, policy: str) -> str:
    return "" if policy == "fcfs" or base <= 0 else f" ({value / base:.2f})"


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


# ---- the whole


def simulated_part(costs: CostModel, options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    capacity = simulated_capacity(costs)
    text, plots = (
        [f"Simulated: capacity {capacity:.1f} requests/s, {options.requests} requests, {options.seeds} seeds.\n"],
        {},
    )
    for rho in RHOS:
        runs = {
            policy: [simulate(policy, costs, rho * capacity, options.requests, seed) for seed in range(options.seeds)]
            for policy in options.policies.split(",")
        }
        text.append(markdown({policy: average(r) for policy, r in runs.items()}, f"Simulated, rho {rho}"))
        name = f"policies-simulated-{rho}.svg"
        plots[name] = wait_plot({policy: r[0] for policy, r in runs.items()}, f"simulated, rho {rho}")
        text.append(f"![waits at rho {rho}](plots/{name})\n")
        print(text[-2], flush=True)
    return "\n".join(text), plots


def live_part(options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    policies = options.live.split(",")
    capacity = measure_capacity(SLOTS, "cpu", options.seconds)
    text, plots = (
        [f"Live, built-in model: capacity {capacity:.1f} requests/s, {options.seconds:g} s of arrivals.\n"],
        {},
    )
    for rho in RHOS:
        arrivals = list(offered(rho * capacity, round(rho * capacity * options.seconds), 0).arrivals())
        asked = [replace(arrival, max_tokens=arrival.output_tokens) for arrival in arrivals]
        runs = {policy: read_run(record(engine_config(policy, SLOTS), "cpu", asked)).results for policy in policies}
        text.append(markdown({policy: average([run]) for policy, run in runs.items()}, f"Live, rho {rho}"))
        name = f"policies-live-{rho}.svg"
        plots[name] = wait_plot(runs, f"live, rho {rho}")
        text.append(f"![live waits at rho {rho}](plots/{name})\n")
        print(text[-2], flush=True)
    return "\n".join(text), plots


def write(section: str, text: str, plots: Mapping[str, str]) -> None:
    """Between the section's marks of the page, which are made if they are not there."""
    folder = DOCUMENT.parent / "plots"
    folder.mkdir(exist_ok=True)
    for name, svg in plots.items():
        (folder / name).write_text(svg, encoding="utf-8")
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    page = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.is_file() else "# What a policy is worth\n"
    if begin not in page:
        page = f"{page.rstrip()}\n\n{begin}\n{end}\n"
    before, rest = page.split(begin)
    _, after = rest.split(end)
    DOCUMENT.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="profile or device name, as for maitred simulate")
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help="to simulate, fcfs among them; empty simulates none"
    )
    parser.add_argument("--live", default="fcfs,srpt,interactive", help="to serve, fcfs among them; empty serves none")
    parser.add_argument("--requests", type=int, default=2000, help="in each simulated run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals in each live run")
    parser.add_argument("--write", action="store_true", help="into docs/policies.md and docs/plots/")
    options = parser.parse_args()
    for listed in (options.policies, options.live):
        if listed and "fcfs" not in listed.split(","):
            sys.exit("fcfs is the baseline; name it too")
    if options.policies:
        target = find_target(options.device, None)
        text, plots = simulated_part(target.cost_model, options)
        if options.write:
            write("simulated", f"Cost model: {target.label}. {text}", plots)
    if options.live:
        text, plots = live_part(options)
        if options.write:
            write("live", text, plots)


if __name__ == "__main__":
    main()
