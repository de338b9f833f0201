"""Holds the planner and its simulator against others' simulators and measurements, and against its own time.

    python benchmarks/fetch_inputs.py planners runs/plan_check      # once: sources and an environment of theirs
    python benchmarks/plan_check.py [distserve splitwise aiconfigurator time] [--fetch] [--cells]

`distserve`: DistServe's simulator (Zhong et al., OSDI 2024) and this one run the same requests with its coefficients of
an A100 as cost models. `splitwise`: steps measured by Splitwise (Patel et al., ISCA 2024), a cost model fitted to one
half of the cells and held against the other, and the reverse. `aiconfigurator`: NVIDIA's planner and `maitred plan` are
asked the same; it knows no queue, and operations as measured in place of a datasheet. `time`: processor time and memory
of `maitred plan`. Nothing is fetched but by --fetch. --cells prints every cell.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from maitred.cli.console import aligned
from maitred.config import CacheConfig, SchedulerConfig
from maitred.core.cost_model import CostModel, Knot, StepShape
from maitred.fleet.disagg import Role
from maitred.sim.devices import SimulatedTarget
from maitred.sim.engine import EngineSetup
from maitred.sim.fit import MeasuredStep, fit_steps
from maitred.sim.layouts import FREE_LINK, Group, PlannedDevice, PlanTerms, WorkerLayout, simulate_layout
from maitred.sim.results import Objectives
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


ROWS: dict[str, Callable[[bool], Iterator[Line]]] = {
    each.__name__: each for each in (distserve, splitwise, aiconfigurator, time)
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
