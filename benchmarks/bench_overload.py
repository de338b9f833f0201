"""A live server under 1, 2, 5 and 10 times the load it can carry: goodput, refusals, accepted first tokens, recovery.

    python benchmarks/bench_overload.py --seconds 20 --objective-s 1.0

Starts `maitred serve` with the built-in model, measures its capacity with as many clients as slots, then offers Poisson
loads. Prints a table and whether the three statements hold: goodput at 10x is at least 90 % of that at 1x, refusals are
answered within 50 ms (99th percentile), and the 99th percentile of the first token of accepted requests is within the
objective. Load generator and server share the machine: the first takes a core of its own at high rates.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp

FACTORS = (1, 2, 5, 10)
TOPICS = ("soup", "the sea", "winter", "a small town", "trains", "bread", "a cat", "music")


@dataclass
class Load:
    """What came of one load."""

    factor: float
    seconds: float
    offered: int = 0
    ttft_s: list[float] = field(default_factory=list)  # of accepted requests
    refused_s: list[float] = field(default_factory=list)  # how long each refusal took
    refused_at: list[float] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def goodput(self, objective_s: float) -> float:
        return sum(t <= objective_s for t in self.ttft_s) / self.seconds


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


@contextmanager
def served(arguments: argparse.Namespace) -> Iterator[str]:
    """The URL of a fresh server."""
    command = [sys.executable, "-m", "maitred", "serve", "maitred-mini", "--port", "0", "--log-level", "info"]
    command += ["--max-num-seqs", str(arguments.max_num_seqs), "--ttft-objective-s", str(arguments.objective_s)]
    if arguments.policy:
        command += ["--policy", arguments.policy]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://[\w.]+:\d+", line):
            break
    else:
        raise SystemExit("the server did not start")
    drained = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
    try:
        yield found[0]
    finally:
        process.terminate()
        process.wait(30)
        drained.wait(30)


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, arguments: argparse.Namespace) -> None:
        self._session, self._url, self._arguments = session, f"{url}/v1/chat/completions", arguments
        self._random = random.Random(arguments.seed)

    async def one(self, load: Load) -> None:
        """One streamed chat, to its end."""
        length = min(1 + int(self._random.expovariate(1 / self._arguments.output_tokens)), 400)
        text = f"Tell me about {self._random.choice(TOPICS)} and {self._random.randrange(10**6)}."
        body = {
            "model": self._arguments.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": length,
            "ignore_eos": True,
            "stream": True,
        }
        load.offered += 1
        started = time.perf_counter()
        try:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status == 503:
                    await answer.read()
                    load.refused_s.append(time.perf_counter() - started)
                    load.refused_at.append(started)
                    load.retry_after_s.append(float(answer.headers["retry-after"]))
                    return
                answer.raise_for_status()
                first = None
                async for _ in answer.content:
                    first = first or time.perf_counter() - started
                load.ttft_s.append(first or 0.0)
        except aiohttp.ClientError as error:
            load.failures.append(f"{type(error).__name__}: {error}")

    async def poisson(self, factor: float, rate: float, seconds: float) -> Load:
        load, tasks = Load(factor, seconds), set[asyncio.Task[None]]()
        start = next_at = time.perf_counter()
        while (next_at := next_at + self._random.expovariate(rate)) < start + seconds:
            await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
            task = asyncio.create_task(self.one(load))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return load

    async def capacity(self, num_clients: int, seconds: float) -> float:
        """Requests finished in a second, with as many clients as slots, each with one request at a time."""
        load, until = Load(0, seconds), time.perf_counter() + seconds

        async def again_and_again() -> None:
            while time.perf_counter() < until:
                await self.one(load)

        await asyncio.gather(*(again_and_again() for _ in range(num_clients)))
        return len(load.ttft_s) / seconds


async def measure(url: str, arguments: argparse.Namespace) -> bool:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        async with session.get(f"{url}/v1/models") as answer:
            arguments.model = (await answer.json())["data"][0]["id"]
        client = Client(session, url, arguments)
        await client.capacity(arguments.max_num_seqs, 3.0)  # warm up
        capacity = await client.capacity(arguments.max_num_seqs + 2, arguments.seconds)
        print(
            f"capacity {capacity:.1f} requests/s of about {arguments.output_tokens} tokens; "
            f"objective {arguments.objective_s} s"
        )
        print("  load  offered  accepted  goodput/s  TTFT p50  p99 (s)  refused  in p50  p99 (ms)  Retry-After p50 (s)")
        loads = []
        for factor in FACTORS:
            load = await client.poisson(factor, factor * capacity, arguments.seconds)
            loads.append(load)
            show(load, arguments.objective_s)
        ended = time.perf_counter()
        after = await client.poisson(0.5, 0.5 * capacity, 8.0)
        show(after, arguments.objective_s)
        recovery_s = max((at - ended for at in after.refused_at), default=0.0)
        print(f"recovery: the last refusal came {recovery_s:.1f} s after the overload")
        return verdict(loads, arguments.objective_s)


def show(load: Load, objective_s: float) -> None:
    ttft, refused = load.ttft_s, load.refused_s
    print(
        f"{load.factor:5g}x {load.offered:8} {len(ttft):9} {load.goodput(objective_s):10.1f} "
        f"{percentile(ttft, 0.5):9.3f} {percentile(ttft, 0.99):8.3f} {len(refused):8} "
        f"{percentile(refused, 0.5) * 1e3:7.1f} {percentile(refused, 0.99) * 1e3:9.1f} "
        f"{percentile(load.retry_after_s, 0.5):13.0f}" + (f"   {len(load.failures)} failed" if load.failures else "")
    )


def verdict(loads: list[Load], objective_s: float) -> bool:
    first, last = loads[0], loads[-1]
    ratio = last.goodput(objective_s) / max(first.goodput(objective_s), 1e-9)
    refusals_s = percentile([s for load in loads for s in load.refused_s], 0.99)
    ttft_s = max(percentile(load.ttft_s, 0.99) for load in loads)
    statements = (
        (f"goodput at 10x is {ratio:.0%} of that at 1x", ratio >= 0.9),
        (f"99 % of refusals within {refusals_s * 1e3:.0f} ms", refusals_s <= 0.05),
        (f"99 % of accepted first tokens within {ttft_s:.2f} s of {objective_s:g} s", ttft_s <= objective_s),
    )
    for text, holds in statements:
        print(("holds:  " if holds else "FAILS:  ") + text)
    return all(holds for _, holds in statements)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--objective-s", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=64, help="mean; exponential, at most 400")
    parser.add_argument("--policy", default=None)
    parser.add_argument("--url", default=None, help="a server that runs already, with the same objective")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.url is not None:
        sys.exit(not asyncio.run(measure(arguments.url, arguments)))
    with served(arguments) as url:
        holds = asyncio.run(measure(url, arguments))
    sys.exit(not holds)


if __name__ == "__main__":
    main()
