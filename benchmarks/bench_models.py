"""Several models in memory for some of them: what the policy's order of swaps is worth, and two models at once.

    python benchmarks/bench_models.py swaps [--rates 0.5,1,2] [--waits 10]     simulated; seconds
    python benchmarks/bench_models.py least [--rates 0.2,0.5] [--waits 0,10]   the least loads of any order; seconds
    python benchmarks/bench_models.py together [--model smollm2] [--seconds 8] two live models on this machine's cores

`swaps`: five models, memory for two, requests by Zipf (exponent 1), loads of 8 s, llama-3.1-8b on an H100. `fifo`
serves requests strictly as they came and puts the least recently used model out; the others pass by `--swap-wait-s`.
Aims: at most half of fifo's loads, and a better p99 of waiting. `together`: requests of each of two
models alone, then of both, against `maitred serve --models`, in turn; aim: the sum of each one's rate over its rate
alone is at least 0.9. `least`: the same requests, and the least loads with which an order that knows all of them could
serve each within such a wait before its load begins, if loads and answers took no time; 0 is Belady's rule.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import httpx

from maitred.config import SchedulerConfig
from maitred.fleet.config import FleetConfig
from maitred.fleet.swapping import FleetModel, ModelSet, Residence, Swapping
from maitred.sim.devices import device_named, model_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup
from maitred.sim.results import SimulatedResults
from maitred.sim.synthetic import ClassSpec, ModelSpec, SyntheticWorkload, WorkloadSpec

LOAD_S, NUM_MODELS, NUM_LOADED, BLOCK_SIZE = 8.0, 5, 2, 16
SCHEDULER = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048)


def least_recently_used(self: Swapping, plan: Any, wanted: str, now: float) -> Iterator[str]:
    """What a cache of models puts out, whatever waits for it."""
    present = [name for name in self._books if self.state(name) in (Residence.READY, Residence.LOADING)]
    yield from sorted((n for n in present if n not in plan.planned), key=lambda n: self._books[n].used_at)


def workload(rate: float, num_requests: int, seed: int) -> WorkloadSpec:
    return WorkloadSpec(
        rate=rate, num_requests=num_requests, seed=seed,
        models={f"model-{rank}": ModelSpec(share=1 / rank, load_s=LOAD_S) for rank in range(1, NUM_MODELS + 1)},
        classes={"chat": ClassSpec(input="lognormal:256,0.8", output="lognormal:128,0.6")},
    )  # fmt: skip


def simulate(rate: float, swap_wait_s: float, policy: str, num_requests: int, seed: int) -> FleetSimulation:
    """`swap_wait_s` 0 is fifo with LRU."""
    device, model = device_named("h100"), model_named("llama-3.1-8b")
    engine = EngineSetup(
        scheduler=replace(SCHEDULER, policy=policy),
        num_blocks=num_kv_blocks(device, model, BLOCK_SIZE) // NUM_LOADED,
        block_size=BLOCK_SIZE,
    )
    spec = workload(rate, num_requests, seed)
    models = spec.models
    setup = FleetSetup(
        config=FleetConfig(swap_wait_s=swap_wait_s),
        scheduler=engine.scheduler,
        replicas=[ReplicaSetup(engine=engine, cost_model=roofline(device, model))] * NUM_MODELS,
        several=ModelSet(tuple(FleetModel(name=name, memory_bytes=1) for name in models), NUM_LOADED),
        load_s={name: each.load_s for name, each in models.items()},
    )
    simulation = FleetSimulation(setup, SimulatedResults())
    if not swap_wait_s:
        assert simulation.core.swapping is not None
        simulation.core.swapping._put_out_order = MethodType(least_recently_used, simulation.core.swapping)  # type: ignore[method-assign]
    simulation.run(SyntheticWorkload(spec).arrivals())
    return simulation


def swaps(rates: list[float], waits: list[float], policies: list[str], num_requests: int) -> None:
    heading = ("rate/s", "order", "loads", "x fifo", "wait mean", "p50", "p99", "max", "p99 x fifo")
    print(("{:>8} {:>22}" + " {:>10}" * 7).format(*heading))
    for rate in rates:
        base: dict[str, float] = {}
        for policy, wait in (("fcfs", 0.0), *((policy, wait) for policy in policies for wait in waits)):
            told = simulate(rate, wait, policy, num_requests, seed=1).to_json()
            queue, loads = told["queue_s"], told["num_starts"]
            base = base or {"loads": loads, "p99": queue["p99"]}
            name = "fifo, LRU" if not wait else f"{policy}, wait {wait:g} s"
            cells = (f"{queue[key]:.1f}" for key in ("mean", "p50", "p99", "max"))
            row = (
                f"{rate:g}",
                name,
                loads,
                f"{loads / base['loads']:.2f}",
                *cells,
                f"{queue['p99'] / base['p99']:.2f}",
            )
            print(("{:>8} {:>22}" + " {:>10}" * 7).format(*row))


# ---- the least loads

NEVER = float("inf")
Books = dict[tuple[tuple[str, ...], tuple[tuple[float, str], ...]], int]  # loaded, what is awaited by when -> loads


def fallen_due(books: Books, now: float) -> Books:
    """The same once all that must be loaded before `now` is, in each way: a load as late as it may be costs no more."""
    open_books, done = dict(books), Books()
    while open_books:
        (loaded, awaited), num_loads = open_books.popitem()
        if not awaited or awaited[0][0] >= now:
            done[loaded, awaited] = min(num_loads, done.get((loaded, awaited), num_loads))
            continue
        (_, name), rest = awaited[0], awaited[1:]
        for kept in [loaded] if len(loaded) < NUM_LOADED else [tuple(n for n in loaded if n != out) for out in loaded]:
            after = (tuple(sorted((*kept, name))), rest)
            open_books[after] = min(num_loads + 1, open_books.get(after, num_loads + 1))
    return done


def least_loads(rate: float, wait_s: float, num_requests: int) -> int:
    books: Books = {((), ()): 0}
    for arrival in SyntheticWorkload(workload(rate, num_requests, seed=1)).arrivals():
        came = Books()
        for (loaded, awaited), num_loads in fallen_due(books, arrival.at).items():
            is_new = arrival.model not in (*loaded, *(name for _, name in awaited))
            state = (loaded, (*awaited, (arrival.at + wait_s, arrival.model)) if is_new else awaited)
            came[state] = min(num_loads, came.get(state, num_loads))
        fewest = min(came.values())  # with a load of each model any state becomes any other
        books = {state: num_loads for state, num_loads in came.items() if num_loads <= fewest + NUM_MODELS}
    return min(fallen_due(books, NEVER).values())


# ---- two models at once


async def rate_of(client: httpx.AsyncClient, model: str, num_clients: int, until: float) -> float:
    """Output tokens a second of so many clients in a closed loop."""
    began, num_tokens = time.perf_counter(), 0

    async def chat(number: int) -> None:
        nonlocal num_tokens
        turn = 0
        while time.perf_counter() < until:
            turn += 1
            ask = {"model": model, "prompt": f"{number} {turn} Once upon a time", "max_tokens": 64, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=ask)).json()
            num_tokens += answer["usage"]["completion_tokens"]

    await asyncio.gather(*(chat(number) for number in range(num_clients)))
    return num_tokens / (time.perf_counter() - began)


async def measure(url: str, seconds: float, rounds: int, num_clients: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        for model in ("a", "b"):  # loaded, and warm
            await rate_of(client, model, num_clients, time.perf_counter() + 1.0)
        sums = []
        for _ in range(rounds):
            alone = [await rate_of(client, m, num_clients, time.perf_counter() + seconds) for m in ("a", "b")]
            end = time.perf_counter() + seconds
            both = await asyncio.gather(*(rate_of(client, model, num_clients, end) for model in ("a", "b")))
            sums.append(sum(beside / one for beside, one in zip(both, alone, strict=True)))
            print(json.dumps({"alone": alone, "together": list(both), "sum": round(sums[-1], 3)}))
        print(f"sum of each one's rate over its rate alone: {sorted(sums)[len(sums) // 2]:.2f}")


def together(model: str, seconds: float, rounds: int, num_clients: int, words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        file.write_text(json.dumps({"models": {name: {"model": model} for name in ("a", "b")}}))
        command = [sys.executable, "-m", "maitred", "serve", "--models", str(file), "--port", "0", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            try:
                found = next(hit for line in process.stdout if (hit := re.search(r"routes to .* on (http\S+)", line)))
                reading = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
                asyncio.run(measure(found[1], seconds, rounds, num_clients))
            finally:
                process.terminate()
                process.wait(60)
                reading.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("swaps", "least", "together"))
    parser.add_argument("--rates", default="0.5,1,2")
    parser.add_argument("--waits", default="10")
    parser.add_argument("--policies", default="fcfs")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--model", default="maitred-mini")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    asked, words = parser.parse_known_args()
    if asked.what == "together":
        together(asked.model, asked.seconds, asked.rounds, asked.clients, words)
        return
    numbers = [[float(word) for word in text.split(",")] for text in (asked.rates, asked.waits)]
    if asked.what == "least":
        for rate in numbers[0]:
            print(rate, {wait: least_loads(rate, wait, asked.requests) for wait in numbers[1]})
        return
    swaps(*numbers, asked.policies.split(","), asked.requests)


if __name__ == "__main__":
    main()
