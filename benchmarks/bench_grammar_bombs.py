"""What hostile grammars cost those who ask for them, and everybody else: eight plain streams beside each.

    python benchmarks/bench_grammar_bombs.py

Against the served built-in model. For each grammar of tests/reliability/grammar_bombs.py: how it was answered, after
how long (bound: 6 s), and the longest gap between two chunks of any of the streams meanwhile (bound: 100 ms more than
without). A processor of its own for the compilation is what the bound supposes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

sys.path.insert(0, ".")
from tests.conftest import start_server
from tests.reliability.grammar_bombs import BOMBS

CHAT = "/v1/chat/completions"
NUM_STREAMS = 8
QUIET_S = 4.0
MESSAGES = [{"role": "user", "content": "What can I eat?"}]
PLAIN = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 1500, "temperature": 1, "stream": True}


@dataclass(slots=True)
class Gaps:
    """The longest since it was last read."""

    longest_s: float = 0.0

    def read_ms(self) -> float:
        longest_s, self.longest_s = self.longest_s, 0.0
        return 1000 * longest_s


async def stream_on(client: httpx.AsyncClient, gaps: Gaps) -> None:
    while True:
        async with client.stream("POST", CHAT, json=PLAIN) as answer:
            told_at: float | None = None
            async for _ in answer.aiter_raw():
                now = time.perf_counter()
                gaps.longest_s = max(gaps.longest_s, now - (told_at or now))
                told_at = now


async def post(client: httpx.AsyncClient, asked: Mapping[str, Any]) -> httpx.Response:
    return await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 20, **asked})


async def measure(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        warm = await post(client, {"response_format": {"type": "json_object"}})  # begins the processes
        warm.raise_for_status()
        gaps = Gaps()
        streams = [asyncio.create_task(stream_on(client, gaps)) for _ in range(NUM_STREAMS)]
        await asyncio.sleep(QUIET_S / 4)
        gaps.read_ms()
        await asyncio.sleep(QUIET_S)
        print(f"{'without':32s} {'':14s} longest gap {gaps.read_ms():6.1f} ms")
        for name, asked in BOMBS.items():
            began = time.perf_counter()
            answer = await post(client, asked)
            took_s = time.perf_counter() - began
            print(f"{name:32s} {answer.status_code} {took_s:8.2f} s longest gap {gaps.read_ms():6.1f} ms")
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def main() -> None:
    server = start_server()
    try:
        asyncio.run(measure(server.url))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
