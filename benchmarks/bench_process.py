"""What the engine's own process costs: the same server with `--in-process` and without, in turn, in one run.

Both servers are started and stay; a round loads one, then the other, so that the machine's moods meet both. Printed are
medians over rounds, and the median of the ratios of neighbouring rounds, which is the figure to look at. Processor time
says what it costs even while other work shares the cores.

    python benchmarks/bench_process.py --rounds 9 --clients 16
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field

import aiohttp
import psutil

PROMPT = "The maître d' decides who is seated next, keeps every table full, and knows the regulars."


@dataclass
class Served:
    """One of the two servers, and what was measured of it."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    tokens_per_s: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        server = psutil.Process(self.process.pid)
        return sum(sum(each.cpu_times()[:2]) for each in (server, *server.children()))


def start(name: str, words: list[str]) -> Served:
    """A server on a free port, once it has its model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "maitred",
        "serve",
        "maitred-mini",
        "--port",
        str(port),
        "--log-level",
        "warning",
        *words,
    ]
    served = Served(name, subprocess.Popen(command), f"http://127.0.0.1:{port}")
    while True:
        try:
            with urllib.request.urlopen(f"{served.url}/ready"):
                return served
        except OSError:
            if served.process.poll() is not None:
                raise SystemExit(f"the server {name} did not start") from None
            time.sleep(0.1)


async def stream(session: aiohttp.ClientSession, url: str, max_tokens: int) -> tuple[float, float, int]:
    """Seconds to the first event, seconds in all, tokens."""
    body = {
        "model": "maitred-mini",
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    began_at, first_at, count = time.perf_counter(), 0.0, 0
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b'data: {"id"') and b'"text"' in line:
                first_at = first_at or time.perf_counter()
                count += 1
    return first_at - began_at, time.perf_counter() - began_at, max_tokens


async def throughput(session: aiohttp.ClientSession, url: str, clients: int, max_tokens: int) -> float:
    """Output tokens per second of so many streams at once."""
    began_at = time.perf_counter()
    done = await asyncio.gather(*(stream(session, url, max_tokens) for _ in range(clients)))
    return sum(tokens for _, _, tokens in done) / (time.perf_counter() - began_at)


async def ttft_ms(session: aiohttp.ClientSession, url: str, count: int) -> float:
    """Median milliseconds to the first token of one request at a time."""
    return 1000 * statistics.median([(await stream(session, url, 1))[0] for _ in range(count)])


async def gap_ms(session: aiohttp.ClientSession, url: str, num_tokens: int) -> float:
    """Milliseconds between tokens of one stream that is alone."""
    first_s, whole_s, _ = await stream(session, url, num_tokens)
    return 1000 * (whole_s - first_s) / (num_tokens - 1)


async def measure(servers: list[Served], options: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for served in servers:
            await throughput(session, served.url, options.clients, 8)  # warm
        for round_number in range(options.rounds):
            for served in servers if round_number % 2 else reversed(servers):
                before_s = served.cpu_s()
                rate = await throughput(session, served.url, options.clients, options.tokens)
                served.cpu_us.append(1e6 * (served.cpu_s() - before_s) / (options.clients * options.tokens))
                served.tokens_per_s.append(rate)
                served.ttft_ms.append(await ttft_ms(session, served.url, options.singles))
                served.gap_ms.append(await gap_ms(session, served.url, options.tokens))


def report(inside: Served, outside: Served) -> None:
    print(f"{'':24}{inside.name:>14}{outside.name:>14}{'ratio':>9}{'difference':>13}")
    for title, attribute, unit in (
        ("throughput", "tokens_per_s", "tokens/s"),
        ("processor time a token", "cpu_us", "us"),
        ("first token, alone", "ttft_ms", "ms"),
        ("between tokens, alone", "gap_ms", "ms"),
    ):
        a, b = getattr(inside, attribute), getattr(outside, attribute)
        ratio = statistics.median(y / x for x, y in zip(a, b, strict=True))
        apart = statistics.median(y - x for x, y in zip(a, b, strict=True))
        middle = f"{statistics.median(a):>14.2f}{statistics.median(b):>14.2f}{ratio:>9.3f}{apart:>+13.2f} {unit}"
        print(f"{title:24}{middle}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--singles", type=int, default=20)
    parser.add_argument("--num-threads", type=int, default=1, help="of each engine")
    options = parser.parse_args()
    words = ["--num-threads", str(options.num_threads)]
    servers = [start("in process", ["--in-process", *words]), start("own process", words)]
    try:
        asyncio.run(measure(servers, options))
    finally:
        for served in servers:
            served.process.terminate()
            served.process.wait()
    report(*servers)


if __name__ == "__main__":
    main()
