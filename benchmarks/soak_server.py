"""A served model under mixed load for as long as you like: clients that leave, an engine that is killed, nothing leaks.

    python benchmarks/soak_server.py [--minutes 20] [--clients 12] [--kill-every-s 60]

Whole answers and streams, one sample and three, short and long prompts, a quarter of the clients gone before the end,
and the engine's process killed now and then. Every answer that was waited for must be whole. At the end, when nothing
is asked any more: no block in use, no request in flight, as many files and tasks of the event loop as before, and
memory that did not grow after the first third.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import httpx
import psutil

sys.path.insert(0, ".")
from tests.conftest import ServerProcess, start_server
from tests.reliability.test_served_engine import engines_of
from tests.waiting import until

MODEL = "maitred-mini"
WORDS = ("the", "soup", "is", "on", "a", "table", "by", "window", "and", "nobody", "waits", "long", "tonight")
MIB = 2**20
MAX_SLOPE_MIB_PER_H = 64.0  # of the server's memory after the first third; noise of minutes looks like tens of MiB
EDGE_IS_CLEAN = ("requests_running", "requests_waiting", "kv_blocks_used")


class Sample(NamedTuple):
    """What the processes held at one time."""

    at_s: float
    server_mib: float
    engine_mib: float  # of all of them
    num_files: int
    num_threads: int
    num_tasks: int  # of the event loop, the one that was asked included


@dataclass
class Tally:
    """What came of the requests."""

    answered: int = 0
    left: int = 0
    kills: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)


def ask(chooser: random.Random) -> tuple[str, dict[str, Any]]:
    """Any request."""
    text = " ".join(chooser.choices(WORDS, k=chooser.choice((3, 20, 100, 400))))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": chooser.choice((1, 8, 40, 160)),
        "n": chooser.choice((1, 1, 1, 3)),
        "stream": chooser.random() < 0.6,
        "temperature": chooser.choice((0.0, 0.8)),
        "ignore_eos": True,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if chooser.random() < 0.2:
        body["logprobs"], body["top_logprobs"] = True, 3
    if chooser.random() < 0.5:
        body.pop("top_logprobs", None)
        if body.pop("logprobs", False):
            body["logprobs"] = 3
        return "/v1/completions", {**body, "prompt": text}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


async def one_request(session: aiohttp.ClientSession, chooser: random.Random, tally: Tally) -> None:
    path, body = ask(chooser)
    leaves_after = chooser.choice((0.0, 0.02, 0.1, 0.5)) if chooser.random() < 0.25 else None
    try:
        async with asyncio.timeout(leaves_after):
            fault = await (streamed if body["stream"] else whole)(session, path, body)
    except TimeoutError:
        tally.left += 1
        return
    except aiohttp.ClientError as error:
        fault = type(error).__name__
    if fault is None:
        tally.answered += 1
    else:
        tally.wrong[fault] += 1


async def whole(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> str | None:
    """What is wrong with the answer."""
    async with session.post(path, json=body) as answer:
        said = await answer.json()
        return _fault(body, said) if answer.status == 200 else f"status {answer.status}: {said['error']['code']}"


async def streamed(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> str | None:
    usage, last = None, ""
    async with session.post(path, json=body) as answer:
        if answer.status != 200:
            return f"status {answer.status}: {(await answer.json())['error']['code']}"
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            last = line[6:].decode().strip()
            if last != "[DONE]":
                event = json.loads(last)
                if "error" in event:
                    return f"in the stream: {event['error']['code']}"
                usage = event.get("usage") or usage
    return _fault(body, {"usage": usage}) if last == "[DONE]" else "a stream without its end"


def _fault(body: dict[str, Any], said: dict[str, Any]) -> str | None:
    wanted, got = body["n"] * body["max_tokens"], (said.get("usage") or {}).get("completion_tokens")
    return None if got == wanted else "not the tokens that were asked for"


def sample(server: ServerProcess, began: float) -> Sample:
    process, engines = psutil.Process(server.process.pid), engines_of(server)
    return Sample(
        time.monotonic() - began,
        process.memory_info().rss / MIB,
        sum(engine.memory_info().rss for engine in engines) / MIB,
        process.num_fds(),
        process.num_threads(),
        round(gauges(server)["event_loop_tasks"]),
    )


def gauges(server: ServerProcess) -> dict[str, float]:
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    lines = (line.split() for line in page.splitlines() if line.startswith("maitred_") and "{" not in line)
    return {words[0].removeprefix("maitred_"): float(words[1]) for words in lines}


def is_idle(server: ServerProcess) -> bool:
    told = gauges(server)
    return told["http_requests_in_flight"] == 1 and not any(told[name] for name in EDGE_IS_CLEAN)


def holds_no_more_than(server: ServerProcess, before: Sample) -> bool:
    """Files and tasks; connections that were closed take their moment."""
    now = sample(server, 0.0)
    return now.num_files <= before.num_files + 2 and now.num_tasks <= before.num_tasks


def slope_mib_per_h(samples: list[Sample]) -> float:
    """Of the server's memory, over what came after the first third."""
    settled = samples[len(samples) // 3 :]
    if len(settled) < 3:
        return 0.0
    return statistics.linear_regression([s.at_s for s in settled], [s.server_mib for s in settled]).slope * 3600


async def load(
    server: ServerProcess,
    tally: Tally,
    *,
    num_clients: int,
    seconds: float = float("inf"),
    requests_each: int = sys.maxsize,
    kill_every_s: float = float("inf"),
    kill_after: int | None = None,  # answers; once
) -> None:
    """Ask until the time is over (and the kill after so many answers has been), or each client asked so often."""
    began = time.monotonic()

    async def client(number: int) -> None:
        chooser = random.Random(number)
        for _ in range(requests_each):
            if time.monotonic() - began > seconds and (kill_after is None or tally.kills):
                return
            await one_request(session, chooser, tally)
            if kill_after is not None and not tally.kills and tally.answered >= kill_after:
                kill(server, tally)

    async def watch() -> None:
        next_kill_at = kill_every_s
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):  # killed while we looked
                tally.samples.append(await asyncio.to_thread(sample, server, began))
                tell(tally)
            await asyncio.sleep(5)
            if tally.samples[-1].at_s >= next_kill_at:
                kill(server, tally)
                next_kill_at += kill_every_s

    timeout = aiohttp.ClientTimeout(total=280)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client(number) for number in range(num_clients)))
        watching.cancel()


def kill(server: ServerProcess, tally: Tally) -> None:
    tally.kills += 1
    random.choice(engines_of(server)).kill()


def tell(tally: Tally) -> None:
    last = tally.samples[-1]
    sys.stdout.write(
        f"{last.at_s:6.0f} s  {tally.answered} answered, {tally.left} left, {sum(tally.wrong.values())} wrong, "
        f"{tally.kills} kills; server {last.server_mib:.0f} MiB, {last.num_files} files, {last.num_threads} threads, "
        f"{last.num_tasks} tasks; "
        f"engine {last.engine_mib:.0f} MiB\n"
    )
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--kill-every-s", type=float, default=60)
    chosen = parser.parse_args()
    tally, server = Tally(), start_server()
    try:
        asyncio.run(load(server, tally, num_clients=chosen.clients, requests_each=5))  # warm
        until(lambda: is_idle(server))
        before, tally = sample(server, 0.0), Tally()
        seconds = chosen.minutes * 60
        asyncio.run(load(server, tally, num_clients=chosen.clients, seconds=seconds, kill_every_s=chosen.kill_every_s))
        until(lambda: is_idle(server))
        until(lambda: holds_no_more_than(server, before))
        after, slope = sample(server, time.monotonic() - seconds), slope_mib_per_h(tally.samples)
        tally.samples.append(after)
        tell(tally)
    finally:
        ended = server.stop()
    sys.stdout.write(f"idle, every block free; memory {slope:+.1f} MiB/h after the first third; exit {ended}\n")
    for fault, count in tally.wrong.most_common():
        sys.stdout.write(f"{count} x {fault}\n")
    good = not tally.wrong and ended == 0 and (slope < MAX_SLOPE_MIB_PER_H or seconds < 600)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
