"""Holds the planner and its simulator against others' simulators and measurements, and against its own time.

    python benchmarks/fetch_inputs.py planners runs/plan_check      # once: sources and an environment of theirs
    python benchmarks/plan_check.py [distserve splitwise aiconfigurator time live] [--fetch] [--cells]

`distserve`: DistServe's simulator (Zhong et al., OSDI 2024) and this one run the same requests with its coefficients of
an A100 as cost models. `splitwise`: steps measured by Splitwise (Patel et al., ISCA 2024), a cost model fitted to one
half of the cells and held against the other, and the reverse. `aiconfigurator`: NVIDIA's planner and `maitred plan` are
asked the same; it knows no queue, and operations as measured in place of a datasheet. `time`: processor time and memory
of `maitred plan`. `live`: goodput of three layouts under three objectives as `maitred route --plan` serves them here,
and as simulated of this machine's profiles; it needs a quiet machine with two cores for three minutes. Nothing is
fetched but by --fetch. --cells prints every cell.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from harness import QWEN3_06B, begin_load, make_checkpoint, served

from maitred.cli.console import aligned
from maitred.cli.endpoint import HttpEndpoint, first_model
from maitred.cli.load import LoadClient, LoadRun, PlannedRequest, Record, RequestForm
from maitred.cli.profiling import describe, measured_profile
from maitred.cli.simulate_inputs import target_of
from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from maitred.config.speculative import SpeculativeConfig
from maitred.core.cost_model import CostModel, Knot, StepShape
from maitred.fleet.disagg import Role
from maitred.sim.devices import SimulatedTarget
from maitred.sim.engine import EngineSetup
from maitred.sim.fit import MeasuredStep, fit_steps
from maitred.sim.layouts import FREE_LINK, Group, PlannedDevice, PlanTerms, WorkerLayout, simulate_layout
from maitred.sim.links import link_named
from maitred.sim.profile import Profile
from maitred.sim.results import Objectives
from maitred.sim.synthetic import ClassSpec, SyntheticWorkload, WorkloadSpec
from maitred.sim.workload import Arrival, Demand

HOME = Path("runs/plan_check")
FETCH = f"python benchmarks/fetch_inputs.py planners {HOME}"


class Line(NamedTuple):
    """A line of the table."""

    what: str
    found: str
    asked: str
    is_met: bool


def source(name: str) -> Path:
    folder = HOME / name
    if not folder.exists():
        raise SystemExit(f"{folder} is not there; {FETCH}")
    return folder


def run_theirs(code: str, asked: object) -> Any:
    """The JSON that a script prints last, in the environment of their packages, when it reads `asked`."""
    python = source("bin/python").absolute()
    path = {**os.environ, "PYTHONPATH": str((HOME / "DistServe").absolute()), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [python, "-c", code], check=False, input=json.dumps(asked), capture_output=True, text=True, env=path
    )
    if done.returncode:
        raise SystemExit(f"theirs failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- DistServe's simulator

DISTSERVE = """
import json, sys
from simdistserve.benchmarks.simulate_dist import main, parse_args
for_each = []
for cell in json.load(sys.stdin):
    words = ["--model", cell["model"], "--workload", cell["file"], "--N", str(cell["num_requests"]), "--arrival",
        "custom", "--tp-prefill", cell["prefill"], "--tp-decode", cell["decode"], "--slo-scales", "[1.0]",
        "--prefill-target", str(cell["ttft_ms"]), "--decode-target", str(cell["tpot_ms"])]
    table = main(parse_args(words))[2]
    for_each.append(float(table[table.pd == "both"].attainment.iloc[0]) / 100)
print(json.dumps(for_each))
"""
# model, devices of the prefill and the decode worker, objectives (ms), requests a second
LAYOUTS = (
    ("facebook/opt-13b", "1", "1", 100, 45, (2.0, 4.0, 6.0, 8.0)),
    ("facebook/opt-13b", "2", "1", 100, 55, (4.0, 8.0, 9.0, 10.0)),
    ("facebook/opt-66b", "4", "4", 200, 55, (1.5, 3.0, 4.5, 6.0)),
    ("facebook/opt-66b", "4", "2", 250, 70, (1.0, 1.5, 2.0, 2.5)),
)
NUM_REQUESTS = 600
ENGINE_MS, ENGINE_TOKEN_MS = 2.0, 1e-4  # that its worker adds to each step, and to each token of context
BLOCK = 16  # tokens: prompts are whole blocks and one, because what is after them is computed again
PREFILL_MS = 1.0  # and to a prefill


@dataclass(frozen=True)
class Sample:
    """Requests of one rate, as a workload."""

    rate: float
    tenants: ClassVar[dict[str, Any]] = {}

    def arrivals(self) -> Iterator[Arrival]:
        rng, at = random.Random(7), 0.0
        for number in range(NUM_REQUESTS):
            prompt, output = (max(16, int(rng.lognormvariate(mean, 0.8))) for mean in (5.5, 4.8))
            prompt += 1 - prompt % BLOCK
            yield Arrival(
                at=at,
                request_id=str(number),
                prompt_tokens=prompt,
                output_tokens=output + 1,  # with the first token, which theirs does not count
                max_tokens=output + 1,
                own=str(number).encode(),
            )
            at += rng.expovariate(self.rate)


def distserve(cells: bool) -> Iterator[Line]:
    profiles = json.loads(
        (source("DistServe") / "simdistserve/estimators/profile_data/profiler-a100-80g.distserve.json").read_text()
    )
    asked, found, names = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for model, prefill, decode, ttft_ms, tpot_ms, rates in LAYOUTS:
            for rate in rates:
                file = Path(folder) / f"{len(asked)}.json"
                asked.append({"model": model, "prefill": prefill, "decode": decode, "file": str(file)})
                asked[-1] |= {"num_requests": NUM_REQUESTS, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms}
                requests = list(Sample(rate).arrivals())
                told = [
                    {"start_time": each.at, "prompt_len": each.prompt_tokens, "output_len": each.output_tokens - 1}
                    for each in requests
                ]
                file.write_text(json.dumps(told))
                costs = prefill_costs(profiles[model][prefill]), decode_costs(profiles[model][decode])
                found.append(apart(costs, Demand(Sample(rate)), Objectives(ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3)))
                names.append(f"{model} {prefill}+{decode} at {rate:g}/s")
        theirs = run_theirs(DISTSERVE, asked)
    off = [abs(ours - their) for ours, their in zip(found, theirs, strict=True)]
    if cells:
        for name, ours, their in zip(names, found, theirs, strict=True):
            print(f"  {name:34} {ours:6.1%} theirs {their:6.1%}")
    met = sum(each <= 0.02 for each in off)
    yield Line("DistServe: attainment within 2 points", f"{met} of {len(off)}", "15 of 16", met >= 15)


def prefill_costs(told: dict[str, Any]) -> CostModel:
    """Milliseconds a + b x tokens + c x the sum of squared lengths, which are two query-key pairs each."""
    a, b, c = told["prefill"]
    return CostModel(
        fixed_s=(a + PREFILL_MS + ENGINE_MS) / 1e3,
        prefill_token_s=b / 1e3,
        prefill_attention_s=2 * c / 1e3,
        context_token_s=ENGINE_TOKEN_MS / 1e3,
    )


def decode_costs(told: dict[str, Any]) -> CostModel:
    """Milliseconds a + b x context + c x requests, with other a and c from a number of requests on; b hardly differs,
    and the smaller batches' is taken.
    """
    (a, b, c), (more_a, _, more_c) = told["decoding_smallbs"], told["decoding_largebs"]
    at = told["decoding_large_small_bs_threshold"]
    knots = [(0, a), (at - 1, a + c * (at - 1)), (at, more_a + more_c * at), (2 * at, more_a + more_c * 2 * at)]
    return CostModel(
        fixed_s=ENGINE_MS / 1e3,
        context_token_s=(b + ENGINE_TOKEN_MS) / 1e3,
        steps=tuple(Knot(size, ms / 1e3) for size, ms in knots),
    )


def apart(costs: tuple[CostModel, CostModel], demand: Demand, objectives: Objectives) -> float:
    """Attainment of a prefill and a decode worker between which KV takes no time."""
    groups = tuple(
        Group(
            role,
            PlannedDevice(role.value, SimulatedTarget(role.value, each, lambda *_: 30_000, 66_144, 1.0)),
            4096,
            66_144,
        )
        for role, each in zip((Role.PREFILL, Role.DECODE), costs, strict=True)
    )
    engine = EngineSetup(scheduler=SchedulerConfig(policy="fcfs"), num_blocks=1)
    terms = PlanTerms(
        demand=demand,
        objectives=objectives,
        attainment=0.0,
        link=FREE_LINK,
        engine=engine,
        cache=CacheConfig(block_size=BLOCK),
        seed=None,
    )
    return simulate_layout(terms, WorkerLayout("disaggregated", groups), demand.rate, 0, NUM_REQUESTS).attainment


# ---- Splitwise's measurements


def splitwise(cells: bool) -> Iterator[Line]:
    """152 cells: devices, model and parallel degree by lengths and batches; the power-capped device is left out."""
    runs = defaultdict(list)
    with (source("splitwise-sim") / "data/perf_model.csv").open() as file:
        for row in csv.DictReader(file):
            if not row["hardware"].endswith("pcap"):
                worker = row["model"], row["hardware"], row["tensor_parallel"]
                size = int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
                runs[worker, size].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    by_worker = defaultdict(list)
    for (worker, size), times in sorted(runs.items()):
        by_worker[worker].append(steps_of(*size, *map(statistics.median, zip(*times, strict=True))))
    off = [list[float](), list[float]()]
    for worker, pairs in by_worker.items():
        for half in (0, 1):
            fitted, held_out = pairs[half::2], pairs[1 - half :: 2]
            costs = fit_steps(sum(fitted, ()), sum(held_out, ())).cost_model
            for kind in (0, 1):
                errors = [abs(costs.step_s(pair[kind].shape) / pair[kind].step_s - 1) for pair in held_out]
                off[kind] += errors
                if cells:
                    name = f"{' '.join(worker)}, half {half}, {('prompt', 'token')[kind]}"
                    print(f"  {name}: {statistics.median(errors):.1%}")
    for kind, name, most in ((1, "token", 0.08), (0, "prompt", 0.15)):
        middle = statistics.median(off[kind])
        what = f"Splitwise: median error of {name} time, {len(off[kind])} cells held out"
        yield Line(what, f"{middle:.1%}", f"{most:.0%}", middle <= most)


def steps_of(prompt: int, batch: int, output: int, prompt_s: float, token_s: float) -> tuple[MeasuredStep, ...]:
    """The step of the prompts, and the mean one of the answers."""
    pairs = batch * prompt * (prompt + 1) // 2
    first = StepShape(batch, batch * prompt, 0, batch * prompt, pairs, batch, batch)
    later = StepShape(batch, 0, batch, batch * (prompt + output // 2), 0, batch, 1)
    return MeasuredStep(first, prompt_s, None), MeasuredStep(later, token_s, None)


# ---- NVIDIA's planner

AICONFIGURATOR = """
import contextlib, json, logging, sys
from aiconfigurator.cli import cli_default
asked, told = json.load(sys.stdin), []
with contextlib.redirect_stdout(sys.stderr):
    for words in asked:
        result = cli_default(**words)
        best = {mode: table.iloc[0] for mode, table in result.best_configs.items() if len(table)}
        told.append({mode: float(row["tokens/s/gpu_cluster"]) for mode, row in best.items()})
print(json.dumps(told))
"""
THEIR_MODES = {"aggregated": "agg", "disaggregated": "disagg"}
# theirs, ours, system, prompt, answer, TTFT and TPOT (ms); 8 devices each
CASES = (
    ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b", "h100", 2000, 200, 1000, 20),
    ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b", "h200", 1000, 300, 500, 10),
    ("Qwen/Qwen3-32B", "qwen3-32b", "h100", 2000, 200, 2000, 40),
    ("Qwen/Qwen3-32B", "qwen3-32b", "h200", 4000, 500, 2000, 30),
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b", "h100", 1000, 200, 2000, 50),
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b", "h200", 2000, 200, 2000, 40),
    ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b", "h100", 2000, 200, 1000, 20),
    ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b", "b200", 4000, 200, 1000, 20),
)


def aiconfigurator(cells: bool) -> Iterator[Line]:
    asked = [
        {"model_path": theirs, "total_gpus": 8, "system": f"{system}_sxm", "backend": "vllm"}
        | {"isl": prompt, "osl": output, "ttft": ttft_ms, "tpot": tpot_ms}
        for theirs, _, system, prompt, output, ttft_ms, tpot_ms in CASES
    ]
    kept = HOME / "aiconfigurator.json"
    if not kept.exists() or json.loads(kept.read_text())["asked"] != asked:
        kept.write_text(json.dumps({"asked": asked, "told": run_theirs(AICONFIGURATOR, asked)}))
    num_modes, num_near = 0, 0
    for their, (_, model, system, prompt, output, ttft_ms, tpot_ms) in zip(
        json.loads(kept.read_text())["told"], CASES, strict=True
    ):
        words = f"--model {model} --device {system} --input {prompt} --output {output} --devices 8 --link nvlink"
        slo = f"--slo ttft:{ttft_ms}ms --slo tpot:{tpot_ms}ms --modes aggregated,disaggregated"
        plans, _, _ = planned(*f"{words} {slo}".split())
        ours = {THEIR_MODES[each["mode"]]: each["tokens_per_s_per_device"] for each in plans}
        best, their_best = max(ours, key=ours.__getitem__), max(their, key=their.__getitem__)
        ratio = ours[best] / their[their_best]
        num_modes += best == their_best
        num_near += 1 / 1.6 <= ratio <= 1.6
        if cells:
            rounded = [{mode: round(value) for mode, value in each.items()} for each in (ours, their)]
            print(f"  {model} {system} {prompt}+{output}: {rounded[0]}, theirs {rounded[1]}, {ratio:.2f}", flush=True)
    yield Line("aiconfigurator: the same mode", f"{num_modes} of {len(CASES)}", "7 of 8", num_modes >= 7)
    yield Line("aiconfigurator: tokens/s/GPU within 1.6x", f"{num_near} of {len(CASES)}", "6 of 8", num_near >= 6)


# ---- time and memory


def planned(*words: str) -> tuple[list[dict[str, Any]], float, float]:
    """(plans, processor time in s, GB) of `maitred plan`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "maitred", "plan", *words, "--json"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout)["plans"], used_s, after.ru_maxrss / 1e6


LOAD = "--model llama-3.1-8b --input lognormal:1500,0.6 --output lognormal:200,0.5 --slo ttft:2s --slo tpot:30ms"


def time(cells: bool) -> Iterator[Line]:
    for name, words, most_s in (
        ("16 devices", "--device h100 --devices 16", 90),
        ("700 M users", "--device h100 --users 700e6 --requests-per-user-day 10 --peak 2", 300),
    ):
        plans, used_s, gb = planned(*LOAD.split(), *words.split())
        if cells:
            print(*(f"  {each['mode']}: {each['layout']}, {each['rate']:,.1f}/s" for each in plans), sep="\n")
        found, asked = f"{used_s:.0f} s, {gb:.2f} GB", f"{most_s} s, 1 GB"
        yield Line(f"maitred plan, {name}: processor time", found, asked, used_s <= most_s and gb <= 1)


# ---- layouts of this machine, live and planned

SHAPE = QWEN3_06B | {
    **{"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048},
}
SLOTS, BUDGET, WORDS = 16, 128, ("--num-threads", "1", "--speculative", "off")
LENGTHS = ClassSpec(input="lognormal:120,0.4", output="lognormal:24,0.4")
PROFILE_S, RATE_S, NUM_RATES, WARM_UP = 12.0, 5.0, 5, 8  # s of a profile, and of load at each rate
LIVE_LAYOUTS = {"one": (Role.MIXED,), "two": (Role.MIXED, Role.MIXED), "apart": (Role.PREFILL, Role.DECODE)}
GOOD = 0.9


def live(cells: bool) -> Iterator[Line]:
    """Two profiles: of a worker alone, and of one beside another that is busy, which a layout of two workers is."""
    config = EngineConfig(
        model=ModelConfig(model=str(make_checkpoint(Path(tempfile.mkdtemp()) / "live", SHAPE)), num_threads=1),
        scheduler=SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=BUDGET),
        speculative=SpeculativeConfig(speculative="off"),  # random weights repeat themselves, and a plan has no drafts
    )
    model = str(config.model.model)
    alone = measured_profile(config, PROFILE_S, lambda line: None)
    with served(model, "--max-num-seqs", str(SLOTS), *WORDS) as other:
        load = begin_load("serve", other.url, "--concurrency", 2, "--duration", 600, "--input-len", 120)
        try:
            beside = measured_profile(config, PROFILE_S, lambda line: None)
        finally:
            load.terminate()
    demand = Demand(SyntheticWorkload(WorkloadSpec(rate=1.0, num_requests=4000, seed=3, classes={"all": LENGTHS})))
    goals = goals_of(alone, demand)
    if cells:
        for name, profile in (("alone", alone), ("beside", beside)):
            print(f"  a profile {name}: {describe(profile)}", sep="\n")
        print(*(f"  {goal}" for goal in goals), sep="\n", flush=True)
    found: dict[str, list[tuple[float, float, float]]] = {}  # by layout and objective: live, planned, of a worker alone
    for name, roles in LIVE_LAYOUTS.items():
        profiles = (beside if len(roles) > 1 else alone), alone
        rates = rates_of(profiles[0], roles, demand, goals)
        planned_shares = [[shares(profile, roles, demand, rate, goals) for rate in rates] for profile in profiles]
        live_shares = asyncio.run(served_shares(model, roles, demand, rates, goals))
        if cells:
            for rate, ours, theirs in zip(rates, live_shares, planned_shares[0], strict=True):
                words = (f"{a:.0%} ({b:.0%})" for a, b in zip(ours, theirs, strict=True))
                print(f"  {name} at {rate:.1f}/s, live (planned): {', '.join(words)}", flush=True)
        found[name] = [
            tuple(crossing(rates, [each[i] for each in one]) for one in (live_shares, *planned_shares))
            for i in range(len(goals))
        ]
    yield from live_lines(found, cells)


def live_lines(found: dict[str, list[tuple[float, float, float]]], cells: bool) -> Iterator[Line]:
    num_far, num_right, off, off_alone = 0, 0, list[float](), list[float]()
    for i in range(3):
        for one, other in combinations(found, 2):
            (a, plan_a, _), (b, plan_b, _) = found[one][i], found[other][i]
            if max(a, b) > 1.1 * min(a, b):
                num_far += 1
                num_right += (a > b) == (plan_a > plan_b)
    for name, each in found.items():
        off += [planned / live - 1 for live, planned, _ in each]
        off_alone += [planned / live - 1 for live, _, planned in each]
        if cells:
            words = (f"{live:.1f}/s ({planned:.1f}, {alone:.1f} of a profile alone)" for live, planned, alone in each)
            print(f"  {name}: live (planned): {', '.join(words)}")
    middle, of_alone = (statistics.median(map(abs, each)) for each in (off, off_alone))
    asked = f"{max(0, num_far - 1)} of {num_far}"
    yield Line("live: order of pairs over 10% apart", f"{num_right} of {num_far}", asked, num_right >= num_far - 1)
    found_text = f"{middle:.0%} in the median, {max(map(abs, off)):.0%} at most; {of_alone:.0%} of a profile alone"
    yield Line("live: goodput, error", found_text, "15%", max(map(abs, off)) <= 0.15)


def goals_of(profile: Profile, demand: Demand) -> list[Objectives]:
    """A first token, a pace and an end some times as late as those of a request that is alone."""
    costs, prompt, output = profile.cost_model, round(demand.mean_prompt), demand.mean_output
    first_s = profile.edge.first_token_s(prompt) + costs.expected_s(
        StepShape(1, prompt, 0, prompt, prompt * (prompt + 1) // 2, 1, 1)
    )
    step_s = costs.expected_s(StepShape(1, 0, 1, prompt + int(output / 2), 0, 1, 1)) + costs.gap_s(1)
    return [
        Objectives(ttft_s=4 * first_s),
        Objectives(tpot_s=2.5 * step_s),
        Objectives(e2e_s=4 * (first_s + output * step_s)),
    ]


def layout_of(profile: Profile, roles: tuple[Role, ...]) -> WorkerLayout:
    device = PlannedDevice("this machine", target_of(profile))
    alike = {role: roles.count(role) for role in roles}
    groups = tuple(Group(role, device, SLOTS, BUDGET, count) for role, count in alike.items())
    return WorkerLayout("aggregated" if Role.MIXED in roles else "disaggregated", groups)


def num_sent(rate: float) -> int:
    return max(40, int(rate * RATE_S))


def shares(
    profile: Profile, roles: tuple[Role, ...], demand: Demand, rate: float, goals: list[Objectives]
) -> list[float]:
    """Share of good requests under each objective, simulated."""
    found = []
    for goal in goals:
        terms = PlanTerms(
            demand=demand,
            objectives=goal,
            attainment=0.0,
            link=link_named("tcp"),
            engine=EngineSetup(scheduler=SchedulerConfig(policy="fcfs"), num_blocks=1),
        )
        found.append(
            simulate_layout(terms, layout_of(profile, roles), rate, WARM_UP, num_sent(rate) - WARM_UP).attainment
        )
    return found


def rates_of(profile: Profile, roles: tuple[Role, ...], demand: Demand, goals: list[Objectives]) -> list[float]:
    """Rates from well below the lowest planned goodput to well above the highest."""
    tried = [1.5**i for i in range(-3, 14)]
    good = [shares(profile, roles, demand, rate, goals) for rate in tried]
    goodputs = [crossing(tried, [each[i] for each in good]) for i in range(len(goals))]
    low, high = 0.6 * min(goodputs), 1.3 * max(goodputs)
    return [low * (high / low) ** (i / (NUM_RATES - 1)) for i in range(NUM_RATES)]


def crossing(rates: list[float], good: list[float]) -> float:
    """Goodput: the rate up to which GOOD of the requests are, between rates linearly."""
    if good[0] < GOOD:
        return rates[0] * good[0] / GOOD
    for i in range(1, len(rates)):
        if good[i] < GOOD:
            part = (good[i - 1] - GOOD) / (good[i - 1] - good[i])
            return rates[i - 1] + part * (rates[i] - rates[i - 1])
    return rates[-1]


async def served_shares(
    model: str, roles: tuple[Role, ...], demand: Demand, rates: list[float], goals: list[Objectives]
) -> list[list[float]]:
    """The same of `maitred route --plan`, at one rate after another."""
    limits = ["--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET), *WORDS]
    apart = Role.MIXED not in roles
    each = [[*limits, "--role", role.value, "--kv-listen", "127.0.0.1:0"] if apart else limits for role in roles]
    found = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"model": model, "plans": [{"handover": "always" if apart else "never", "replicas": each}]}, file)
        file.flush()
        with served("--plan", file.name, command="route") as router:
            async with HttpEndpoint(router.url, timeout_s=600) as endpoint:
                await all_ready(endpoint, len(roles))
                form = RequestForm(model=await first_model(endpoint))
                await LoadRun(LoadClient(endpoint, form), sent(demand, 100.0, 8)).closed_loop(4)
                for rate in rates:
                    run = LoadRun(LoadClient(endpoint, form), sent(demand, rate, num_sent(rate)))
                    await run.open_loop()
                    judged = [record for record in run.progress.records if record.index >= WARM_UP]
                    found.append([statistics.fmean(is_good(record, goal) for record in judged) for goal in goals])
    return found


async def all_ready(endpoint: HttpEndpoint, num_replicas: int) -> None:
    while True:
        async with endpoint.get("/admin/fleet") as reply:
            told = json.loads(await reply.read())
        if sum(each["state"] == "ready" for each in told["replicas"]) == num_replicas:
            return
        await asyncio.sleep(0.2)


def sent(demand: Demand, rate: float, num_requests: int) -> Iterator[PlannedRequest]:
    rng = random.Random(rate)
    for index, arrival in enumerate(demand.at(rate, num_requests)):
        tokens = rng.choices(range(100, 1400), k=arrival.prompt_tokens)
        yield PlannedRequest(index, arrival.at, tokens, arrival.output_tokens)


def is_good(record: Record, goal: Objectives) -> bool:
    bounds = ((record.ttft_s, goal.ttft_s), (record.tpot_s, goal.tpot_s), (record.e2e_s, goal.e2e_s))
    return record.ok and all(bound is None or value is None or value <= bound for value, bound in bounds)


ROWS: dict[str, Callable[[bool], Iterator[Line]]] = {
    each.__name__: each for each in (distserve, splitwise, aiconfigurator, time, live)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--cells", action="store_true", help="print every cell")
    parser.add_argument("--fetch", action="store_true", help=f"run {FETCH} first")
    given = parser.parse_args()
    if unknown := [name for name in given.rows if name not in ROWS]:
        parser.error(f"rows are {', '.join(ROWS)}, not {unknown[0]!r}")
    if given.fetch:
        subprocess.run(FETCH.replace("python", sys.executable, 1).split(), check=True)
    lines = [line for name in given.rows for line in ROWS[name](given.cells)]
    table = [["what", "found", "asked", ""], *([*line[:3], "" if line.is_met else "missed"] for line in lines)]
    print(aligned(table))
    raise SystemExit(not all(line.is_met for line in lines))


if __name__ == "__main__":
    main()
