"""How well the simulator foretells live runs: of the engine alone, and of a server over HTTP.

    python benchmarks/fidelity.py [engine] [http] [--executor torch|native] [--rounds 3] [--write]

Both simulate the very arrivals of a live run with costs that were never fitted to it. Printed are live figures (means
over rounds), the error of simulated over live, and `rounds`: how far the live rounds are from their own mean.

`engine`: bimodal Poisson arrivals at 0.5, 0.8 and 1.1 of capacity under four policies, with the built-in model and a
decision log; costs are fitted on the runs of *other* loads and policies. `error` takes the machine's slowness over time
from a probe: a second, small engine that serves the same prompts between the measured engine's steps, on a clock that
does not count it, for a shared machine serves the same step in other times from one second to the next. `unseen` takes
the machine to be as it was in the other runs. Time is the engine thread's CPU time, or `--clock wall`.

`http`: in each round `maitred profile`, then the same load as text over loopback at 0.5 and 0.8 of capacity, or with so
many requests in flight; aim 10% at TTFT's p50 at half of capacity, 15% at p50 and p90 else. `without` is the error
without the profile's edge, `engine` against the server's decision log. All is wall time, so the machine must be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

import psutil
from harness import write_section
from live_engine import CLOCKS, LiveEngine, live_engine, record

from maitred.cli.bench_session import summarise
from maitred.cli.endpoint import HttpEndpoint, first_model
from maitred.cli.load import WORD_VOCABULARY, LoadClient, LoadRun, PlannedRequest, Record, RequestForm
from maitred.cli.profiling import describe, measured_profile, served
from maitred.config import EngineConfig, ModelConfig, SchedulerConfig
from maitred.core.cost_model import CostModel, Slowness
from maitred.engine.build import build_parts
from maitred.sim.engine import EngineSetup, Simulation, SlownessAt
from maitred.sim.fit import MeasuredStep, RecordedRun, fit_steps, measured_steps, read_run
from maitred.sim.profile import Jitter, Profile
from maitred.sim.results import SimulatedResults
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec
from maitred.sim.workload import Arrival, Turn

LOADS, HTTP_LOADS = (0.5, 0.8, 1.1), (0.5, 0.8, 4.0)  # of capacity; from 2 on requests in flight
POLICIES = ("fcfs", "priority", "srpt", "mlfq")
CLASSES = {
    "chat": ClassSpec(share=0.85, input="lognormal:60,0.6", output="lognormal:40,0.6", max_tokens=512),
    "document": ClassSpec(
        share=0.15, input="lognormal:700,0.3", output="lognormal:120,0.4", max_tokens=512, priority=1
    ),
}
FIGURES = tuple(f"{measure}.{part}" for measure in ("ttft_s", "itl_s", "e2e_s") for part in ("p50", "p90", "p99"))
SLOTS, NUM_SEEDS, MAX_FITTED_STEPS, FAR_OFF = 16, 4, 3000, {"engine": 0.10, "http": 0.15}
DOCUMENT = Path(__file__).parents[1] / "docs" / "simulator.md"
Cell = dict[str, float]  # by figure
Compared = dict[tuple[float, str], dict[str, Cell]]  # of load and policy: by row


# ---- what every kind has


def workload(rate: float, num_requests: int, classes: Mapping[str, ClassSpec] = CLASSES) -> SyntheticWorkload:
    return SyntheticWorkload(WorkloadSpec(rate=rate, num_requests=num_requests, seed=1, classes=classes))


def engine_config(policy: str, executor: str = "auto") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="maitred-mini", num_threads=1, executor=executor),
        scheduler=SchedulerConfig(max_num_seqs=SLOTS, policy=policy, predictor="max_tokens"),
    )


def engine_setup(policy: str) -> EngineSetup:
    scheduler = engine_config(policy).scheduler
    return EngineSetup(scheduler=scheduler, num_blocks=SLOTS * 128, predictor="max_tokens")


def fitted(steps: Sequence[MeasuredStep]) -> CostModel:
    chosen = Random(0).sample(steps, min(MAX_FITTED_STEPS, len(steps)))
    return fit_steps(chosen, chosen).cost_model


def never_idle(costs: CostModel, classes: Mapping[str, ClassSpec] = CLASSES) -> float:
    """Requests per second of FCFS when all have come."""
    results = Simulation(engine_setup("fcfs"), costs, SimulatedResults()).run(workload(1e6, 1500, classes).arrivals())
    return results.total.num_finished / results.duration_s


def figures(results: SimulatedResults) -> Cell:
    whole = results.to_json()
    return {name: whole[measure][part] for name in FIGURES for measure, part in [name.split(".")]}


def simulated(
    arrivals: Sequence[Arrival],
    setup: EngineSetup,
    costs: CostModel,
    edge: Any = None,
    slowness: SlownessAt | None = None,
) -> Cell:
    """Means over seeds of the jitter."""
    seeds = []
    for seed in range(NUM_SEEDS):
        jitter, results = Jitter(costs, Random(seed)), SimulatedResults(edge=edge)
        seeds.append(figures(Simulation(setup, costs, results, jitter=jitter, slowness=slowness).run(iter(arrivals))))
    return mean_of(seeds)


def mean_of(cells: Sequence[Cell]) -> Cell:
    return {name: statistics.fmean(cell[name] for cell in cells) for name in cells[0]}


def error(guess: Cell, live: Cell) -> Cell:
    """Half of the gaps are 0 where a client that comes too seldom reads many tokens at once: no error is told there."""
    return {name: guess[name] / live[name] - 1 if live[name] else 0.0 for name in live}


def spread(cells: Sequence[Cell]) -> Cell:
    """Mean distance from the mean, as a share of it."""
    means = mean_of(cells)
    return {
        name: statistics.fmean(abs(cell[name] - mean) for cell in cells) / mean if mean else 0.0
        for name, mean in means.items()
    }


def summary(compared: Compared) -> str:
    lines = ["| | within 5% | within 10% | within 15% | median | mean |", "|---|--:|--:|--:|--:|--:|"]
    for row in next(iter(compared.values())):
        if row == "live":
            continue
        errors = [abs(off) for rows in compared.values() for off in rows[row].values()]
        shares = " | ".join(f"{sum(off <= b for off in errors) / len(errors):.0%}" for b in (0.05, 0.10, 0.15))
        lines.append(f"| `{row}` | {shares} | {statistics.median(errors):.1%} | {statistics.fmean(errors):.1%} |")
    return "\n".join(lines)


def table(compared: Compared, far_off: float) -> str:
    """Markdown; errors beyond `far_off` stand in bold."""
    heads = " | ".join(name.replace("_s.", " ").upper().replace("P", "p") for name in FIGURES)
    lines = [f"| load | policy | | {heads} |", "|--:|---|---|" + "--:|" * len(FIGURES)]
    for (load, policy), rows in compared.items():
        for row, cell in rows.items():
            where = f"{load} | {policy}" if row == "live" else " | "
            lines.append(f"| {where} | {row} | {' | '.join(_shown(row, value, far_off) for value in cell.values())} |")
    return "\n".join(lines)


def _shown(row: str, value: float, far_off: float) -> str:
    if row == "live":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    return f"{value:.1%}" if row == "rounds" else f"**{value:+.0%}**" if abs(value) > far_off else f"{value:+.1%}"


# ---- the engine, and how fast the machine is right now

PROMPT = [Arrival(at=0.0, request_id="probe", prompt_tokens=256, output_tokens=1, max_tokens=1)]
ANSWERS = [Arrival(at=0.0, request_id="probe", prompt_tokens=8, output_tokens=12, max_tokens=12)] * 4
EVERY_S, SMOOTHED = 0.2, 5  # of the measured engine's time; readings, about one second


class Reading(NamedTuple):
    """What the probe took (s), for a long prompt and for a few short answers: interference slows them unlike."""

    at: float
    prompt_s: float
    answers_s: float


@dataclass(slots=True)
class Watch:
    """The `aside` of a live run: a reading of the probe now and then, and the machine's slowness over time by them."""

    probe: LiveEngine
    readings: list[Reading] = field(default_factory=list)

    def __call__(self, now: float) -> bool:
        if self.readings and now < self.readings[-1].at + EVERY_S:
            return False
        self.readings.append(Reading(now, self._serve(PROMPT), self._serve(ANSWERS)))
        return True

    def _serve(self, work: Sequence[Arrival]) -> float:
        began = self.probe.clock.now()
        self.probe.serve(work)
        return self.probe.clock.now() - began

    def usual(self) -> Reading:
        return self._median(self.readings)

    def slowness(self, now: float, usual: Reading) -> Slowness:
        """By a running median, since a reading that met a time slice tells of a moment, not of a second."""
        at = bisect_left([reading.at for reading in self.readings], now)
        near = self._median(self.readings[max(0, at - SMOOTHED // 2) : at + SMOOTHED // 2 + 1] or self.readings[-1:])
        return Slowness(prompts=near.prompt_s / usual.prompt_s, rest=near.answers_s / usual.answers_s)

    def _median(self, readings: Sequence[Reading]) -> Reading:
        return Reading(*(statistics.median(values) for values in zip(*readings, strict=True)))


@contextmanager
def probe_of(config: EngineConfig, clock: str) -> Iterator[LiveEngine]:
    """An engine of its own, without prefix cache, so that the same prompts are computed each time."""
    cache = replace(config.cache, enable_prefix_caching=False)
    scheduler = replace(config.scheduler, policy="fcfs", max_num_seqs=len(ANSWERS))
    own = CLOCKS[clock]()
    parts = build_parts(replace(config, cache=cache, scheduler=scheduler, decision_log=None), clock=own)
    try:
        yield LiveEngine(parts, own, Path())
    finally:
        parts.close()


@dataclass(frozen=True)
class LiveRun:
    run: RecordedRun
    steps: list[MeasuredStep]
    watch: Watch

    def slowness(self, usual: Reading) -> SlownessAt:
        """By the time since the first arrival."""
        began_at = self.run.results.began_at
        assert began_at is not None
        return lambda at: self.watch.slowness(began_at + at, usual)

    def at_usual_speed(self, usual: Reading) -> list[MeasuredStep]:
        """As if all but prompts were as fast as usual; prompts count by how much slower they were than the rest."""
        found = []
        for step in self.steps:
            slowness, shape = self.watch.slowness(step.at, usual), step.shape
            more = slowness.prompts / slowness.rest
            tokens, attention = shape.prefill_tokens * more, shape.prefill_attention * more
            gap_s = None if step.gap_s is None else step.gap_s / slowness.rest
            shape = shape._replace(prefill_tokens=tokens, prefill_attention=attention)
            found.append(step._replace(shape=shape, step_s=step.step_s / slowness.rest, gap_s=gap_s))
        return found


def capacity_of(
    probe: LiveEngine | None,
    clock: str,
    executor: str,
    classes: Mapping[str, ClassSpec] = CLASSES,
    seconds: float = 5.0,
) -> tuple[float, Watch | None]:
    """Requests/s of FCFS when it is never idle, and the probe's readings meanwhile.

    Counting those that end in a few seconds would be 10% off by the luck of their lengths. So the steps of these
    seconds make a cost model, and the rate is that of a long simulation.
    """
    watch = Watch(probe) if probe is not None else None
    with live_engine(engine_config("fcfs", executor), CLOCKS[clock](), lambda line: None) as live:
        endless, until = workload(1.0, 1_000_000, classes).arrivals(), live.clock.now() + seconds
        live.serve_closed(endless, SLOTS, until, watch or (lambda now: False))
        steps = list(measured_steps(live.close()))
    return never_idle(fitted(steps), classes), watch


def engine(options: argparse.Namespace) -> None:
    runs: dict[tuple[float, str], list[LiveRun]] = {(load, policy): [] for load in LOADS for policy in POLICIES}
    with probe_of(engine_config("fcfs", options.executor), options.clock) as probe:
        Watch(probe)(0.0)  # warm
        capacity, watch = capacity_of(probe, options.clock, options.executor)
        assert watch is not None
        usual = watch.usual()
        print(f"capacity {capacity:.2f} requests/s at {SLOTS} slots, {options.clock} time", flush=True)
        for number in range(options.rounds):
            for load, policy in list(runs)[:: -1 if number % 2 else 1]:
                asked = workload(load * capacity, max(40, round(capacity * options.seconds))).arrivals()
                arrivals = [replace(each, max_tokens=each.output_tokens) for each in asked]  # the oracle's
                watch = Watch(probe)
                steps = record(engine_config(policy, options.executor), CLOCKS[options.clock](), arrivals, watch)
                runs[load, policy].append(LiveRun(read_run(steps), list(measured_steps(steps)), watch))
                seen = watch.usual()
                slow = seen.prompt_s / usual.prompt_s, seen.answers_s / usual.answers_s
                told = f"slowness {slow[0]:.2f} of prompts, {slow[1]:.2f} of the rest"
                print(f"  live: {load} {policy}, round {number + 1}: {told}", file=sys.stderr, flush=True)
    compared: Compared = {}
    for where, rounds in runs.items():
        others = [run for other, listed in runs.items() if other != where for run in listed]
        usual_costs = fitted([step for run in others for step in run.at_usual_speed(usual)])
        plain = fitted([step for run in others for step in run.steps])
        lives, setup = [figures(run.run.results) for run in rounds], engine_setup(where[1])
        told = [simulated(r.run.arrivals, setup, usual_costs, slowness=r.slowness(usual)) for r in rounds]
        unseen, live = [simulated(run.run.arrivals, setup, plain) for run in rounds], mean_of(lives)
        rows = {"error": error(mean_of(told), live), "unseen": error(mean_of(unseen), live), "rounds": spread(lives)}
        compared[where] = {"live": live, **rows}
    head = f"Executor {options.executor}, capacity {capacity:.1f}/s, {options.rounds} rounds, {options.clock} time."
    publish("engine", "fidelity", head, compared, options)


# ---- a server over HTTP

WARM_UP, WORDS_OF_TOKEN = 5, 0.73  # with the built-in tokenizer, about; how many there were is the server's to say


def planned(rate: float, num_requests: int) -> Iterator[PlannedRequest]:
    rng = Random(1)
    for index, asked in enumerate(workload(rate, num_requests).arrivals()):
        words = max(1, round(asked.prompt_tokens * WORDS_OF_TOKEN))
        yield PlannedRequest(index, asked.at, WORD_VOCABULARY.sentence(words, rng), asked.output_tokens)


async def load_of(url: str, load: float, capacity: float, num_requests: int) -> list[Record]:
    async with HttpEndpoint(url, timeout_s=600) as endpoint:
        form = RequestForm(model=await first_model(endpoint), as_tokens=False)
        for request in planned(1.0, WARM_UP):
            await LoadClient(endpoint, form).send(request, form.encode(request))
        run = LoadRun(LoadClient(endpoint, form), planned(load * capacity, num_requests))
        await (run.open_loop() if load < 2 else run.closed_loop(int(load)))
    if failed := [record.failure.message for record in run.progress.records if record.failure is not None]:
        raise SystemExit(f"a request failed: {failed[0]}")
    return sorted(run.progress.records, key=lambda record: record.sent_s)


def http_run(config: EngineConfig, load: float, capacity: float, num_requests: int) -> tuple[list[Record], Cell, Cell]:
    """Records, their figures, and the engine's by its decision log from when the last of the warm-up had ended."""
    with served(config) as server:
        records = asyncio.run(load_of(server.url, load, capacity, num_requests))
    told = summarise(records, {}, peak_in_flight=0)
    live = {name: getattr(getattr(told, measure), part) for name in FIGURES for measure, part in [name.split(".")]}
    warm_at = read_run(server.steps).results.tickets.kept[WARM_UP - 1].finished_at
    return records, live, figures(read_run(step for step in server.steps if step.scheduled_at > warm_at).results)


def arrivals_of(records: Sequence[Record]) -> list[Arrival]:
    return [
        Arrival(
            at=record.sent_s,
            request_id=str(record.index),
            prompt_tokens=record.input_tokens,
            output_tokens=record.output_tokens,
            max_tokens=record.output_tokens,
            own=str(record.index).encode(),
        )
        for record in records
    ]


def closed_arrivals(records: Sequence[Record], in_flight: int) -> list[Arrival]:
    """The same of a closed loop: a conversation for each of those in flight, whose turns come when the last has ended,
    so that a simulation that is slower is asked less. Turns here are longer by less than nothing, and share nothing.
    """
    loops: list[list[Record]] = []
    for each in records:
        ended = [loop for loop in loops if loop[-1].ended_s <= each.sent_s]
        if len(loops) < in_flight or not ended:
            loops.append([each])
        else:
            max(ended, key=lambda loop: loop[-1].ended_s).append(each)
    arrivals = []
    for loop, first in zip(loops, arrivals_of([loop[0] for loop in loops]), strict=True):
        turns = [
            Turn(
                think_s=each.sent_s - before.ended_s,
                new_tokens=each.input_tokens - before.input_tokens - before.output_tokens,
                output_tokens=each.output_tokens,
                max_tokens=each.output_tokens,
            )
            for before, each in pairwise(loop)
        ]
        arrivals.append(replace(first, turns=tuple(turns)))
    return arrivals


def http_setup(scheduler: SchedulerConfig, profile: Profile) -> EngineSetup:
    config, size = scheduler.settled(profile.token_budget), profile.block_size
    blocks = profile.kv_memory_bytes // (profile.kv_bytes_per_token * size)
    longest = config.max_num_seqs * -(-profile.max_model_len // size)
    return EngineSetup(
        scheduler=config,
        num_blocks=min(blocks, longest),
        block_size=size,
        predictor="max_tokens",
        enable_prefix_caching=False,  # no prompt begins as another
    )


T = TypeVar("T")
MOST_OTHERS, MOST_TRIES = 0.1, 4  # of a core, that other programs may take during a measurement; tries of one


def alone(measure: Callable[[], T]) -> tuple[T, float]:
    """What is measured, and how much of a core other programs took meanwhile; again where that was too much."""
    least: tuple[T, float] | None = None
    for _ in range(MOST_TRIES):
        before = time.monotonic(), _busy_s() - _own_s()
        found = measure()
        others = (_busy_s() - _own_s() - before[1]) / (time.monotonic() - before[0])
        if least is None or others < least[1]:
            least = found, others
        if others <= MOST_OTHERS:
            break
        print(f"  others took {others:.2f} of a core", flush=True)
    assert least is not None
    return least


def _busy_s() -> float:
    """Processor time of the whole machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own_s() -> float:
    """Processor time of this process and of children that have ended."""
    used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def http(options: argparse.Namespace) -> None:
    executor, before = "torch" if options.executor == "auto" else options.executor, os.getloadavg()[0]
    config, profiles, capacity = engine_config("fcfs", executor), list[Profile](), 0.0
    told: dict[float, list[dict[str, Cell]]] = {load: [] for load in options.loads}
    for number in range(options.rounds):  # with a profile of its own, since a machine changes its speed
        profile, others = alone(lambda: measured_profile(config, 3 * options.seconds, lambda line: None))
        print(describe(profile), flush=True)
        profiles.append(profile)
        setup, costs = http_setup(config.scheduler, profile), profile.cost_model
        capacity = capacity or never_idle(costs)
        num_requests = max(60, round(2 * capacity * options.seconds))
        for load in options.loads[:: -1 if number % 2 else 1]:
            num_sent = max(60, int(num_requests * min(load, 1.0)))
            (records, live, own), also = alone(partial(http_run, config, load, capacity, num_sent))
            others = max(others, also)
            asked = arrivals_of(records) if load < 2 else closed_arrivals(records, int(load))
            guess, without = simulated(asked, setup, costs, edge=profile.edge), simulated(asked, setup, costs)
            told[load].append({"live": live, "own": own, "error": guess, "without": without})
            off = error(guess, live)["ttft_s.p50"]
            ttft = f"TTFT p50 {live['ttft_s.p50'] * 1e3:.2f} ms, {off:+.1%}"
            print(f"  {load:g}, round {number + 1}: {ttft}; others took at most {others:.2f} of a core", flush=True)
    compared: Compared = {}
    for load, rounds in told.items():
        rows = {name: mean_of([each[name] for each in rounds]) for name in rounds[0]}
        live = rows["live"]
        off = {"error": error(rows["error"], live), "without": error(rows["without"], live)}
        off |= {"engine": error(rows["without"], rows["own"]), "rounds": spread([each["live"] for each in rounds])}
        compared[load, "fcfs"] = {"live": live, **off}
    names = ("fixed_s", "prompt_token_s", "output_token_s")
    edge = {name: statistics.fmean(getattr(each.edge, name) for each in profiles) for name in names}
    head = (
        f"Executor {executor}, capacity {capacity:.1f} requests/s, {options.rounds} rounds with a profile each; load "
        f"average {before:.1f} before, {os.getloadavg()[0]:.1f} after. The profiles' steps are "
        f"{statistics.fmean(each.mape for each in profiles):.0%} off on steps not fitted to, their sum "
        f"{statistics.fmean(each.bias for each in profiles):+.0%}, the edge "
        f"{statistics.fmean(each.edge_error for each in profiles):.0%}: {edge['fixed_s'] * 1e3:.2f} ms a request, "
        f"{edge['prompt_token_s'] * 1e6:.2f} us a prompt token, {edge['output_token_s'] * 1e6:.1f} a later one."
    )
    publish("http", f"fidelity-http-{executor}", head, compared, options)


def publish(kind: str, section: str, head: str, compared: Compared, options: argparse.Namespace) -> None:
    text = "\n\n".join((head, summary(compared), table(compared, FAR_OFF[kind])))
    print(text, flush=True)
    if options.write:
        write_section(DOCUMENT, section, text)


KINDS = {kind.__name__: kind for kind in (engine, http)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--executor", choices=("auto", "native", "torch"), default="torch", help="of the live runs")
    parser.add_argument("--seconds", type=float, default=5.0, help="of work in each run: so many times capacity")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--loads", type=lambda text: [float(word) for word in text.split(",")], default=HTTP_LOADS, help="of `http`"
    )
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu", help="of `engine`")
    parser.add_argument("--write", action="store_true", help="into docs/simulator.md")
    options = parser.parse_args()
    for kind in options.kinds or ["engine"]:
        KINDS[kind](options)


if __name__ == "__main__":
    main()
