"""How well a profile foretells what clients of `maitred serve` see: a load over HTTP, and the same one simulated.

    python benchmarks/fidelity_http.py [--executor native|torch] [--seconds 12] [--rounds 2] [--write]

In one run: `maitred profile` as a user would have it, then bimodal Poisson load as text over loopback at shares of
capacity under two policies, each server in turn, then each run simulated from when its requests were sent and how many
tokens they had. Nothing is fitted to these runs. Printed is, for p50, p90 and p99 of TTFT, ITL and E2E, each the mean
over rounds (and seeds of the jitter):

- `live`, what the client measured, and the error of the simulation; the aim is 15% for p50 and p90.
- `without edge`: the error if the profile had none.
- `engine`, a diagnosis: the simulation without the edge against the server's own decision log. What is off here is off
  in the steps, not in the edge.
- `rounds`: how far the live rounds are from their own mean.

All is wall time, so the machine must be quiet; server, engine and this client need a core each to be what they would be
apart. Torch's steps of the built-in model take milliseconds, as a real model's do; native ones are shorter than the way
over HTTP, which is then most of TTFT, and the front end is at its limit before the engine is.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from fidelity import CLASSES, DOCUMENT, engine_config, figures, never_idle, spread, workload
from fidelity_telling import FIGURES, Cell, Comparison
from harness import write_section

from maitred.cli.bench_session import summarise
from maitred.cli.endpoint import HttpEndpoint, first_model
from maitred.cli.load import WORD_VOCABULARY, LoadClient, LoadRun, PlannedRequest, Record, RequestForm
from maitred.cli.profiling import describe, measured_profile, served
from maitred.config import EngineConfig, SchedulerConfig
from maitred.decisions.log import Step
from maitred.sim.engine import EngineSetup
from maitred.sim.jitter import Jitter
from maitred.sim.profile import Profile
from maitred.sim.recorded import read_run
from maitred.sim.results import Results
from maitred.sim.simulator import Simulation
from maitred.sim.workload import Arrival

AIM = 0.15  # of what is not p99
ROWS = {"live_s": "live", "error": "error", "without": "without edge", "engine": "engine", "live": "rounds"}
NUM_SEEDS = 4
WARM_UP = 5
WORDS_OF_TOKEN = 0.73  # with the built-in tokenizer, about; how many there were is the server's to say


# ---- live


def planned(rate: float, num_requests: int) -> Iterator[PlannedRequest]:
    rng = Random(1)
    for index, asked in enumerate(workload(rate, num_requests).arrivals()):
        words = max(1, round(asked.prompt_tokens * WORDS_OF_TOKEN))
        yield PlannedRequest(index, asked.at, WORD_VOCABULARY.sentence(words, rng), asked.output_tokens)


async def load(url: str, rate: float, num_requests: int) -> list[Record]:
    async with HttpEndpoint(url, timeout_s=600) as endpoint:
        form = RequestForm(model=await first_model(endpoint), as_tokens=False)
        for request in planned(1.0, WARM_UP):
            await LoadClient(endpoint, form).send(request, form.encode(request))
        run = LoadRun(LoadClient(endpoint, form), planned(rate, num_requests))
        await run.open_loop()
    for record in run.progress.records:
        if record.failure is not None:
            raise SystemExit(f"a request failed: {record.failure.message}")
    return sorted(run.progress.records, key=lambda record: record.sent_s)


def live_figures(records: Sequence[Record]) -> Cell:
    summary = summarise(list(records), {}, peak_in_flight=0)
    return {name: getattr(getattr(summary, measure), q) for name in FIGURES for measure, q in [name.split(".")]}


def engine_figures(steps: Sequence[Step]) -> Cell:
    """By the decision log, from when the last of the warm-up had ended."""
    warm_at = read_run(steps).results.tickets.kept[WARM_UP - 1].finished_at
    return figures(read_run(step for step in steps if step.scheduled_at > warm_at).results)


class Run(NamedTuple):
    records: list[Record]
    engine: Cell


def serve(config: EngineConfig, rate: float, num_requests: int) -> Run:
    with served(config) as server:
        records = asyncio.run(load(server.url, rate, num_requests))
    return Run(records, engine_figures(server.steps))


# ---- simulated


def simulated(records: Sequence[Record], profile: Profile, setup: EngineSetup, *, edge: bool) -> Cell:
    arrivals = [
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
    seeds: list[Cell] = []
    for seed in range(NUM_SEEDS):
        costs, results = profile.cost_model, Results(edge=profile.edge if edge else None)
        seeds.append(figures(Simulation(setup, costs, results, jitter=Jitter(costs, Random(seed))).run(iter(arrivals))))
    return {name: statistics.fmean(each[name] for each in seeds) for name in FIGURES}


def compare(rounds: Sequence[Run], profile: Profile, setup: EngineSetup) -> dict[str, Cell]:
    lives = [live_figures(run.records) for run in rounds]
    guesses = [simulated(run.records, profile, setup, edge=True) for run in rounds]
    without = [simulated(run.records, profile, setup, edge=False) for run in rounds]
    each = (lives, guesses, without, [run.engine for run in rounds])
    cells: dict[str, Cell] = {}
    for name in FIGURES:
        live_s, guess_s, without_s, engine_s = (statistics.fmean(f[name] for f in found) for found in each)
        cells[name] = {
            "live_s": live_s,
            "error": off(guess_s, live_s),
            "without": off(without_s, live_s),
            "engine": off(without_s, engine_s),
            "live": spread([live[name] for live in lives]) if live_s else 0.0,
        }
    return cells


def off(guess_s: float, real_s: float) -> float:
    """Half of the gaps are 0 where a client that comes too seldom reads many tokens at once."""
    return guess_s / real_s - 1 if real_s else math.inf


# ---- what is told


def table(compared: Comparison) -> str:
    heads = " | ".join(name.replace("_s.", " ").upper().replace("P", "p") for name in FIGURES)
    lines = [f"| load | policy | | {heads} |", "|--:|---|---|" + "--:|" * len(FIGURES)]
    for (share, policy), cells in compared.items():
        for kind, heading in ROWS.items():
            values = " | ".join(_shown(kind, cells[name][kind]) for name in FIGURES)
            where = f"{share} | {policy}" if kind == "live_s" else " | "
            lines.append(f"| {where} | {heading} | {values} |")
    return "\n".join(lines)


def _shown(kind: str, value: float) -> str:
    if kind == "live_s":
        return f"{value * 1e3:.3g} ms"
    return f"{value:.1%}" if kind == "live" else f"**{value:+.0%}**" if abs(value) > AIM else f"{value:+.1%}"


def verdict(compared: Comparison) -> str:
    told = []
    for name in FIGURES:
        errors = [abs(cells[name]["error"]) for cells in compared.values()]
        within = sum(error <= AIM for error in errors)
        told.append(f"{name.replace('_s.', ' ')} {within} of {len(errors)} (worst {max(errors):.0%})")
    return f"Within {AIM:.0%}: {', '.join(told)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executor", choices=("native", "torch"), default="torch")
    parser.add_argument("--seconds", type=float, default=12.0, help="of work in each run: so many times capacity")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile-seconds", type=float, default=30.0)
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.8], help="shares of capacity")
    parser.add_argument("--policies", default="fcfs,srpt")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="into docs/simulator.md")
    options = parser.parse_args()
    policies = options.policies.split(",")
    configs = {policy: engine_config(policy, options.max_num_seqs, options.executor) for policy in policies}
    before = os.getloadavg()[0]
    profile = measured_profile(configs[policies[0]], options.profile_seconds, "wall", lambda line: None)
    print(describe(profile), flush=True)
    setups = {policy: _setup(configs[policy].scheduler, profile) for policy in policies}
    capacity = never_idle(profile.cost_model, CLASSES, options.max_num_seqs)
    num_requests = max(60, round(capacity * options.seconds))
    runs: dict[tuple[float, str], list[Run]] = {(s, p): [] for s in options.loads for p in policies}
    for number in range(options.rounds):
        for share, policy in list(runs)[:: -1 if number % 2 else 1]:
            run = serve(configs[policy], share * capacity, num_requests)
            runs[share, policy].append(run)
            lag = max(record.lag_s for record in run.records)
            print(f"  live: {share} {policy}, round {number + 1}, late {lag * 1e3:.1f} ms", file=sys.stderr, flush=True)
    compared = {where: compare(rounds, profile, setups[where[1]]) for where, rounds in runs.items()}
    parts = [
        f"Executor {options.executor}, capacity {capacity:.1f} requests/s, {num_requests} requests a run, "
        f"{options.rounds} rounds; load average {before:.1f} before and {os.getloadavg()[0]:.1f} after. The profile's "
        f"steps are {profile.mape:.0%} off on steps not fitted to, its edge {profile.edge_error:.0%}: "
        f"{profile.edge.fixed_s * 1e3:.2f} ms, {profile.edge.prompt_token_s * 1e6:.2f} us a prompt token, "
        f"{profile.edge.output_token_s * 1e6:.1f} us a token after the first.",
        verdict(compared),
        table(compared),
    ]
    print("", *parts, sep="\n\n")
    if options.write:
        write_section(DOCUMENT, f"fidelity-http-{options.executor}", "\n\n".join(parts))


def _setup(scheduler: SchedulerConfig, profile: Profile) -> EngineSetup:
    config = scheduler.settled(profile.token_budget)
    blocks = profile.kv_memory_bytes // (profile.kv_bytes_per_token * profile.block_size)
    longest = config.max_num_seqs * -(-profile.max_model_len // profile.block_size)
    return EngineSetup(
        scheduler=config, num_blocks=min(blocks, longest), block_size=profile.block_size, predictor="max_tokens"
    )


if __name__ == "__main__":
    main()
