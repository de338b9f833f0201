"""What clients notice of a replica that dies: `python benchmarks/bench_failover.py [--signal KILL|STOP] [--json]`.

Replicas of the built-in model (--replicas 4) behind `maitred route`, and --requests 800 streams, --in-flight of them at
once: first undisturbed, then again while one replica gets the signal once half of them have begun. Every other request
has a seed, the rest are greedy. Told: how many failed, how many texts differ from the undisturbed ones, and for streams
that the signal interrupted the pause: the longest time between two of a stream's pieces after the signal, beside what a
fresh request's first token took (both runs, on the same machine, with clients, router and replicas on the same cores).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

READY_S, ANSWER_S = 120.0, 300.0
TEXT_PATH = "/v1/chat/completions"


class Told(NamedTuple):
    """What one client had."""

    text: str | None  # None where it failed
    replica: str  # that began it
    began_at: float  # s
    ttft_s: float
    pause_s: float  # the longest, of those that end after the signal
    ended_at: float


class Failed(NamedTuple):
    """A run in figures."""

    num_failed: int
    num_different: int
    num_interrupted: int
    pause_s: Sequence[float]  # of the interrupted
    ttft_s: Sequence[float]  # of all requests of the undisturbed run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(16))
        figures = run(options, Path(folder), ("--fleet-token-file", str(token)))
    show(figures, as_json=options.json)


def run(options: argparse.Namespace, folder: Path, flags: tuple[str, ...]) -> Failed:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = folder / f"{len(processes)}.log"
        process = begin(log, *words, "--port", "0", *flags)
        processes.append(process)
        return process, log

    try:
        replicas = [start("serve", "maitred-mini") for _ in range(options.replicas)]
        urls = {url_in(log): process for process, log in replicas}
        url = url_in(start("route", *urls)[1])
        wait_ready(url, options.replicas)
        undisturbed = asyncio.run(all_streams(url, options, lambda: None))
        name, doomed = next(iter(urls.items()))
        signalled: list[float] = []

        def disturb() -> None:
            signalled.append(time.monotonic())
            os.kill(doomed.pid, signal.Signals[f"SIG{options.signal}"])

        disturbed = asyncio.run(all_streams(url, options, disturb, signalled))
        return figures_of(undisturbed, disturbed, name.removeprefix("http://"), signalled[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def figures_of(undisturbed: Sequence[Told], disturbed: Sequence[Told], doomed: str, at: float) -> Failed:
    pairs = list(zip(undisturbed, disturbed, strict=True))
    hit = [told for told in disturbed if told.replica == doomed and told.began_at < at < told.ended_at]
    return Failed(
        num_failed=sum(told.text is None for told in (*undisturbed, *disturbed)),
        num_different=sum(told.text is not None and told.text != before.text for before, told in pairs),
        num_interrupted=len(hit),
        pause_s=[told.pause_s for told in hit],
        ttft_s=[told.ttft_s for told in undisturbed],
    )


async def all_streams(
    url: str, options: argparse.Namespace, disturb: Callable[[], None], signalled: Sequence[float] = ()
) -> list[Told]:
    """All requests, `in_flight` at once; `disturb` is called once half of them have begun to answer."""
    places, num_begun = asyncio.Semaphore(options.in_flight), 0

    def began() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == options.requests // 2:
            disturb()

    limits = httpx.Limits(max_connections=options.in_flight)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client:

        async def one(number: int) -> Told:
            async with places:
                return await stream(client, body_of(number, options.max_tokens), began, signalled)

        return list(await asyncio.gather(*map(one, range(options.requests))))


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    said = f"Tell me, in your own words, the story number {number} of the sea and of those who sail on it."
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    messages = [{"role": "user", "content": said}]
    return {"messages": messages, "stream": True, "max_tokens": max_tokens, "ignore_eos": True, **sampling}


async def stream(
    client: httpx.AsyncClient, body: dict[str, Any], began: Callable[[], None], signalled: Sequence[float]
) -> Told:
    asked_at = last_at = time.monotonic()
    ttft_s, pause_s, pieces, replica = 0.0, 0.0, [], ""
    try:
        async with client.stream("POST", TEXT_PATH, json=body) as answer:
            replica = answer.headers.get("x-maitred-replica", "")
            async for piece in answer.aiter_bytes():
                now = time.monotonic()
                if not pieces:
                    ttft_s = now - asked_at
                    began()
                elif signalled and now > signalled[0]:
                    pause_s = max(pause_s, now - last_at)
                last_at = now
                pieces.append(piece)
    except httpx.HTTPError:
        pieces = []
    return Told(text_of(b"".join(pieces)), replica, asked_at + ttft_s, ttft_s, pause_s, time.monotonic())


def text_of(events: bytes) -> str | None:
    lines = [line[6:] for line in events.decode().split("\n\n") if line.startswith("data: ")]
    if not lines or lines.pop() != "[DONE]":
        return None
    chunks = [json.loads(line) for line in lines]
    if any("error" in chunk for chunk in chunks) or chunks[-1]["choices"][0]["finish_reason"] is None:
        return None
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def begin(log: Path, *words: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as told:
        command = [sys.executable, "-m", "maitred", *words]
        return subprocess.Popen(command, stdout=told, stderr=told, env={**os.environ, "PYTHONUNBUFFERED": "1"})


def url_in(log: Path) -> str:
    """Where a server listens, as it says once it does."""
    give_up_at = time.monotonic() + READY_S
    while time.monotonic() < give_up_at:
        if found := re.search(r" on (http://[\w.]+:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise SystemExit(f"a server did not start: {log.read_text()}")


def wait_ready(url: str, num: int) -> None:
    give_up_at = time.monotonic() + READY_S
    while time.monotonic() < give_up_at:
        states = [replica["state"] for replica in httpx.get(f"{url}/admin/fleet").json()["replicas"]]
        if states == ["ready"] * num:
            return
        time.sleep(0.1)
    raise SystemExit("the replicas were not ready in time")


def show(figures: Failed, *, as_json: bool) -> None:
    told = {
        "failed": figures.num_failed,
        "different": figures.num_different,
        "interrupted": figures.num_interrupted,
        "pause_s": {"p50": median(figures.pause_s), "max": max(figures.pause_s, default=None)},
        "ttft_s": {"p50": median(figures.ttft_s), "max": max(figures.ttft_s, default=None)},
    }
    if as_json:
        print(json.dumps(told))
        return
    for name, value in told.items():
        print(f"{name:12}{value}")


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


if __name__ == "__main__":
    main()
