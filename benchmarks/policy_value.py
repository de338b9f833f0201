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
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

from fidelity import SLOTS, capacity_of, engine_config, fitted, never_idle
from harness import write_section
from live_engine import CpuClock, record

from maitred.cli.console import seconds_text
from maitred.cli.simulate_inputs import find_target
from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel
from maitred.policy.policies import POLICIES
from maitred.sim.engine import EngineSetup, Simulation
from maitred.sim.fit import MeasuredStep, measured_steps, read_run
from maitred.sim.results import SimulatedResults
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, TenantSpec, WorkloadSpec
from maitred.sim.workload import Arrival

RHOS = (0.7, 0.9, 1.2)
CLASSES = {
    "chat": ClassSpec(share=0.9, input="lognormal:60,0.6", output="lognormal:40,0.6", max_tokens=512),
    "document": ClassSpec(share=0.1, input="lognormal:700,0.3", output="lognormal:120,0.4", max_tokens=512, priority=1),
}
TENANTS = {"light": TenantSpec(share=1), "heavy": TenantSpec(share=3)}
FIGURES = {
    f"{heading} {name}": (part, name)
    for heading, part, names in (
        ("TTFT", "ttft_s", ("mean", "p99")),
        ("E2E", "e2e_s", ("mean", "p99")),
        ("ITL", "itl_s", ("p99",)),
        ("wait", "queue_s", ("mean", "p99", "max")),
    )
    for name in names
}
DOCUMENT = Path(__file__).parents[1] / "docs" / "policies.md"
COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#111111",
    "#66c2a5",
)
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 34  # margins of a panel

Point = tuple[float, float]
Runs = dict[float, dict[str, list[SimulatedResults]]]  # by rho and policy, a run for each round or seed


def offered(rate: float, num_requests: int, seed: int) -> Iterator[Arrival]:
    spec = WorkloadSpec(rate=rate, num_requests=num_requests, seed=seed, classes=CLASSES, tenants=TENANTS)
    return SyntheticWorkload(spec).arrivals()


# ---- what is told


def average(runs: Sequence[SimulatedResults]) -> dict[str, float]:
    """Mean of each figure over runs; of a maximum, the largest."""
    listed = [run.to_json() for run in runs]
    averaged = {
        heading: (max if name == "max" else statistics.fmean)([figures[part][name] for figures in listed])
        for heading, (part, name) in FIGURES.items()
    }
    averaged["Jain, tenants"] = statistics.fmean(figures["jain"] for figures in listed)
    averaged["preemptions"] = statistics.fmean(run.num_preemptions / run.total.num_finished for run in runs)
    return averaged


def ratio(runs: Mapping[str, Sequence[SimulatedResults]], policy: str, heading: str) -> str:
    """To FCFS; after a plus-minus sign one standard deviation of the ratio over rounds or seeds."""
    base, own = (average(runs[name])[heading] for name in ("fcfs", policy))
    if policy == "fcfs" or base <= 0:
        return ""
    pairs = [(average([a])[heading], average([b])[heading]) for a, b in zip(runs[policy], runs["fcfs"], strict=True)]
    each = [one / other for one, other in pairs if other > 0]
    return f" ({own / base:.2f}{f' ± {statistics.stdev(each):.2f}' if len(each) > 1 else ''})"


def markdown(runs: Mapping[str, Sequence[SimulatedResults]], title: str) -> str:
    """A table: each figure, and in brackets its ratio to FCFS."""
    lines = [f"**{title}**", "", f"| policy | {' | '.join(FIGURES)} | Jain, tenants | preemptions |"]
    lines.append("|---|" + "--:|" * (len(FIGURES) + 2))
    for policy, of_policy in runs.items():
        figures = average(of_policy)
        cells = [f"{seconds_text(figures[heading])}{ratio(runs, policy, heading)}" for heading in FIGURES]
        rest = f"{figures['Jain, tenants']:.2f} | {figures['preemptions']:.2f}"
        lines.append(f"| {policy} | {' | '.join(cells)} | {rest} |")
    return "\n".join([*lines, ""])


def in_words(runs: Runs, policies: Sequence[str]) -> str:
    """What the tables say of the mean wait and the longest one."""
    lines = []
    for rho, of_rho in runs.items():
        rows = {policy: average(of_policy) for policy, of_policy in of_rho.items()}
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


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**decade for decade in decades]
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis(values: Sequence[float], *, log: bool = False) -> Axis:
    """Wide enough for all `values`; logarithmic ones end at whole decades."""
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        low = 10.0 ** math.floor(math.log10(min(positive)))
        return Axis(low, max(10.0 ** math.ceil(math.log10(max(positive))), 10 * low), log=True)
    return Axis(0.0, max([*values, 0.0]) or 1.0)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)


@dataclass(slots=True)
class Panel:
    """One plot of `width` x `height` pixels; draws in data coordinates."""

    title: str
    x: Axis
    y: Axis
    x_label: str
    width: int = 460
    height: int = 250
    _parts: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], colour: str, *, step: bool = False) -> None:
        """Draw a line through the points; `step` holds each value until the next point."""
        if not points:
            return
        words, last_y = [], 0.0
        for number, (x, y) in enumerate(points):
            px, py = self._px(x), self._py(y)
            if number == 0:
                words.append(f"M{px:.1f},{py:.1f}")
            else:
                words.append(f"L{px:.1f},{last_y:.1f}L{px:.1f},{py:.1f}" if step else f"L{px:.1f},{py:.1f}")
            last_y = py
        self._parts.append(f'<path d="{"".join(words)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')

    def svg(self, at_x: int, at_y: int) -> str:
        return f'<g transform="translate({at_x},{at_y})">{self._frame()}{"".join(self._parts)}</g>'

    def _px(self, x: float) -> float:
        return LEFT + self.x.place(x) * (self.width - LEFT - RIGHT)

    def _py(self, y: float) -> float:
        return self.height - BOTTOM - self.y.place(y) * (self.height - TOP - BOTTOM)

    def _frame(self) -> str:
        parts = [_text(self.width / 2, 16, self.title, "middle", "title")]
        for value in self.x.ticks():
            px = self._px(value)
            parts.append(f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}" class="grid"/>')
            parts.append(_text(px, self.height - BOTTOM + 14, number_text(value), "middle"))
        for value in self.y.ticks():
            py = self._py(value)
            parts.append(f'<line x1="{LEFT}" x2="{self.width - RIGHT}" y1="{py:.1f}" y2="{py:.1f}" class="grid"/>')
            parts.append(_text(LEFT - 5, py + 4, number_text(value), "end"))
        parts.append(_text(self.width / 2, self.height - 6, self.x_label, "middle"))
        return "".join(parts)


def number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    classes = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}>{escape(text)}</text>'


STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}.title{font-size:13px;font-weight:600}"
    ".grid{stroke:#ddd;stroke-width:.6}.heading{font-size:14px;font-weight:600}"
)


def sheet(heading: str, legend: Sequence[tuple[str, str]], panels: Sequence[Panel], *, columns: int = 2) -> str:
    """All panels on one SVG, with a legend of (name, colour)."""
    width = max(panel.width for panel in panels) * columns
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    parts, top = [], 58
    for row in rows:
        parts += [panel.svg(i * width // columns, top) for i, panel in enumerate(row)]
        top += max(panel.height for panel in row) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{_text(12, 20, heading, 'start', 'heading')}{_legend(legend)}{''.join(parts)}</svg>\n"
    )


def _legend(legend: Sequence[tuple[str, str]]) -> str:
    parts, left = [], 12.0
    for name, colour in legend:
        parts.append(f'<rect x="{left:.0f}" y="32" width="14" height="8" fill="{colour}"/>')
        parts.append(_text(left + 18, 40, name, "start"))
        left += 34 + 6.6 * len(name)
    return "".join(parts)


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most 400 of them, the last one among them."""
    stride = -(-len(points) // 400) or 1
    return [*points[:-1:stride], *points[-1:]]


def wait_plot(runs: Mapping[str, Sequence[SimulatedResults]], heading: str) -> str:
    """Share of requests that waited longer than this: the tail, where policies differ."""
    panels, merged = [], {policy: SimulatedResults() for policy in runs}
    for policy, of_policy in runs.items():
        for name, group in ((name, group) for run in of_policy for name, group in run.tenants.items()):
            merged[policy].tenant(name).merge(group)
    for title, part in (("wait in queue: share above this", "queue_s"), ("end to end: share above this", "e2e_s")):
        curves = {
            policy: [(max(x, 1e-4), 1 - y) for x, y in thinned(list(getattr(results.total, part).curve()))]
            for policy, results in merged.items()
        }
        values = [x for curve in curves.values() for x, _ in curve]
        panel = Panel(title, axis(values, log=True), Axis(1e-3, 1.0, log=True), "s", height=320)
        for colour, curve in zip(COLOURS * 2, curves.values(), strict=False):
            panel.line([(x, y) for x, y in curve if y > 0], colour, step=True)
        panels.append(panel)
    return sheet(heading, list(zip(merged, COLOURS * 2, strict=False)), panels)


def publish(kind: str, head: str, runs: Runs, policies: Sequence[str], options: argparse.Namespace) -> None:
    """Prints the tables; with --write, they and the plots go into docs/."""
    text, folder = [head + "\n", in_words(runs, policies)], DOCUMENT.parent / "plots"
    for rho, of_rho in runs.items():
        text.append(markdown(of_rho, f"{kind.capitalize()}, rho {rho}"))
        text.append(f"![{kind} waits at rho {rho}](plots/policies-{kind}-{rho}.svg)\n")
        if options.write:
            (folder / f"policies-{kind}-{rho}.svg").write_text(wait_plot(of_rho, f"{kind}, rho {rho}"))
    print("\n".join(text), flush=True)
    if options.write:
        write_section(DOCUMENT, kind, "\n".join(text))


# ---- live and simulated


def live(options: argparse.Namespace) -> list[MeasuredStep]:
    """All steps of the live runs."""
    policies, steps = options.live.split(","), list[MeasuredStep]()
    capacity, _ = capacity_of(None, "cpu", "auto", CLASSES)
    runs: Runs = {rho: {policy: [] for policy in policies} for rho in RHOS}
    for number in range(options.rounds):
        for rho in RHOS:
            asked = offered(rho * capacity, max(20, round(rho * capacity * options.seconds)), number)
            arrivals = [replace(each, max_tokens=each.output_tokens) for each in asked]  # the oracle's
            for policy in [*policies[number % len(policies) :], *policies[: number % len(policies)]]:
                recorded = record(engine_config(policy), CpuClock(), arrivals, lambda now: False)
                runs[rho][policy].append(read_run(recorded).results)
                steps += measured_steps(recorded)
                print(f"  live: rho {rho}, {policy}, round {number + 1}", file=sys.stderr, flush=True)
    rounds = len(runs[RHOS[0]]["fcfs"])
    head = f"Live, built-in model: capacity {capacity:.1f} requests/s, {rounds} rounds of {options.seconds:g} s of "
    publish("live", head + "arrivals, CPU time.", runs, [each for each in policies if each != "fcfs"], options)
    return steps


def simulated(costs: CostModel, label: str, options: argparse.Namespace) -> None:
    capacity = never_idle(costs, CLASSES)

    def run(policy: str, rho: float, seed: int) -> SimulatedResults:
        config = SchedulerConfig(max_num_seqs=SLOTS, policy=policy)
        setup = EngineSetup(scheduler=config, num_blocks=SLOTS * 128, predictor="oracle")
        return Simulation(setup, costs, SimulatedResults()).run(offered(rho * capacity, options.requests, seed))

    policies = options.policies.split(",")
    runs: Runs = {
        rho: {policy: [run(policy, rho, seed) for seed in range(options.seeds)] for policy in policies} for rho in RHOS
    }
    size = f"{options.requests} requests and {options.seeds} seeds for each."
    head = f"Cost model: {label}. Capacity {capacity:.1f} requests/s, {size}"
    publish("simulated", head, runs, ("interactive", "srpt", "mlfq"), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="profile or device, as for maitred simulate; else fitted on the live runs")
    parser.add_argument("--policies", default=",".join(POLICIES), help="to simulate; empty simulates none")
    parser.add_argument("--live", default="fcfs,srpt,interactive", help="to serve; empty serves none")
    parser.add_argument("--requests", type=int, default=2000, help="in each simulated run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals in each live run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into docs/policies.md and docs/plots/")
    options = parser.parse_args()
    for listed in (options.policies, options.live):
        if listed and "fcfs" not in listed.split(","):
            sys.exit("fcfs is the baseline; name it too")
    steps = live(options) if options.live else []
    if options.policies and steps and options.device is None:
        simulated(fitted(steps), "fitted on the steps of the live runs", options)
    elif options.policies:
        target = find_target(options.device, None)
        simulated(target.cost_model, target.label, options)


if __name__ == "__main__":
    main()
