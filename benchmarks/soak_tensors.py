"""Reloads of a tensor model under load, memory over many, and kills: fails where a request fails, or memory grows.

    python benchmarks/soak_tensors.py [--reloads 50] [--more-reloads 150] [--requests 100000] [--kills 10]

An MLP of 70 MB answers sixteen clients, calm for a while, then while it is loaded again `--reloads` times: no request
may fail, and p99 may be at most three times what it was. After those and a tenth of the requests resident memory of
both processes is taken; at the end of all reloads and requests it may have grown by 5%. Then the engine's process is
killed `--kills` times under the same load: each request runs again, so none may fail.

Predicted before the first run: no failure; p99 1.5 times, since a reload reads and packs 70 MB on one of two cores for
about 0.15 s; memory flat after the first reloads, which leave two of the model's sizes to the allocator.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import psutil
from tensor.serving import served
from tensor_models import MLP_SIZES, write_mlp

from maitred.core.objectives import percentile
from maitred.tensor.infer_load import Measured, run_load
from maitred.tensor.infer_servers import Asked

CLIENTS, CALM_S, ENDLESS_S = 16, 8.0, 3600.0
BETWEEN_KILLS_S = 3.0
MAX_P99, MAX_GROWTH = 3.0, 1.05


async def asked(url: str, seconds: float, num_requests: int | None = None) -> Measured:
    what = Asked(url=url, model="mlp", protocol="http")
    return await run_load(what, concurrency=CLIENTS, rate=None, num_requests=num_requests, duration_s=seconds, seed=0)


async def reload_often(url: str, times: int) -> float:
    """Seconds that one took."""
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        for _ in range(times):
            async with session.post(f"{url}/v2/repository/models/mlp/load") as answer:
                if answer.status != 200:
                    raise SystemExit(f"a reload was refused: {answer.status} {await answer.text()}")
    return (time.monotonic() - began) / times


async def kill_often(url: str, times: int) -> float:
    """The engine's process, each time once it has answered for a while again; seconds from one kill to the next."""
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        for _ in range(times):
            await asyncio.sleep(BETWEEN_KILLS_S)
            (engine,) = server().children()
            engine.kill()
            engine.wait()
            while True:
                async with session.get(f"{url}/v2/models/mlp/ready") as answer:
                    if answer.status == 200 and server().children():
                        break
                await asyncio.sleep(0.05)
    return (time.monotonic() - began) / times


async def while_under_way(url: str, what: str, times: int, change: Callable[[str, int], Awaitable[float]]) -> Measured:
    """Load, until all changes were made."""
    changing = asyncio.ensure_future(change(url, times))
    whole = Measured()
    while not changing.done():
        part = await asked(url, 1.0)
        whole.latencies_s += part.latencies_s
        whole.failures += part.failures
    print(f"{times} {what}, {await changing:.2f} s each", flush=True)
    return whole


def server() -> psutil.Process:
    (found,) = psutil.Process().children()
    return found


def resident_mib() -> float:
    return sum(each.memory_info().rss for each in (server(), *server().children(recursive=True))) / 2**20


def p99_ms(measured: Measured) -> float:
    return percentile(sorted(measured.latencies_s), 99) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reloads", type=int, default=50)
    parser.add_argument("--more-reloads", type=int, default=150)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        write_mlp(Path(root), "mlp", MLP_SIZES)
        with served("none", "--model-repository", root, "--model-control-mode", "explicit", "--load-model", "*") as url:
            calm = asyncio.run(asked(url, CALM_S))
            loaded = asyncio.run(while_under_way(url, "reloads", options.reloads, reload_often))
            asyncio.run(asked(url, ENDLESS_S, options.requests // 10))
            before = resident_mib()
            after_reloads = asyncio.run(while_under_way(url, "reloads", options.more_reloads, reload_often))
            rest = asyncio.run(asked(url, ENDLESS_S, options.requests - options.requests // 10))
            after = resident_mib()
            killed = asyncio.run(while_under_way(url, "kills", options.kills, kill_often))
    ratio, growth = p99_ms(loaded) / p99_ms(calm), after / before
    num_failed = sum(each.failures.total() for each in (calm, loaded, after_reloads, rest, killed))
    print(f"p99 {p99_ms(calm):.1f} ms, while reloaded {p99_ms(loaded):.1f} ms: {ratio:.2f} times (at most {MAX_P99:g})")
    print(f"resident {before:.0f} MiB, after all {after:.0f} MiB: {growth:.3f} (at most {MAX_GROWTH:g})")
    print(f"{num_failed} failed")
    sys.exit(num_failed > 0 or ratio > MAX_P99 or growth > MAX_GROWTH)


if __name__ == "__main__":
    main()
